#!/usr/bin/env bash
# The first minutes on a GPU: is everything right, and how fast is it? Each step has a time limit, writes its rows as it goes,
# and may fail without stopping the next.
#
#   benchmarks/first_hour.sh --pack FOLDER             wheels that a bare machine lacks, for it to install from; needs pip
#   benchmarks/first_hour.sh OUT [SECONDS] [STEP ...]  all steps within so many seconds (540), or the steps that are named
#   benchmarks/first_hour.sh --dry-run OUT             toy sizes in Triton's interpreter, on a CPU
#
# With WHEELS=FOLDER the wheels are installed first, beside the machine's own packages. Afterwards, where the repository is:
#   python benchmarks/gpu.py --read OUT
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = --pack ]; then
  $PYTHON -m pip download -q --no-deps -d "$2" fastcore==1.14.5 entmax==1.3 adasplash==0.2.2
  exit
fi

dry=''; if [ "${1:-}" = --dry-run ]; then dry=--dry-run; shift; export TRITON_INTERPRET=1; fi
out=$(mkdir -p "${1:?a folder for what is found}" && cd "$1" && pwd); shift
seconds=540; case "${1:-}" in [0-9]*) seconds=$1; shift;; esac
asked=("$@")

if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

rows="--to $out/gpu.csv $dry"
checks="--to $out/gpu_checks.csv"
# name, its share of the time, command: each step trusts the ones before it
steps=(
  "sanitize|8|tests/sanitize.py"
  "cells40|6|benchmarks/gpu_cells.py 40 $checks"
  "cells41|14|benchmarks/gpu_cells.py 41 $checks"
  "cells42|14|benchmarks/gpu_cells.py 42 $checks"
  "checks|20|benchmarks/gpu_checks.py $checks $dry"
  "window|24|benchmarks/gpu.py --suite window --first-hour $rows"
  "entmax|14|benchmarks/gpu.py --suite entmax --first-hour $rows"
)

wanted() { [ ${#asked[@]} = 0 ] || [[ " ${asked[*]} " = *" $1 "* ]]; }
left=0
for step in "${steps[@]}"; do IFS='|' read -r name share _ <<<"$step"; if wanted "$name"; then left=$((left+share)); fi; done
[ "$left" -gt 0 ] || { echo "STEP: expected some of sanitize cells40 cells41 cells42 checks window entmax, got ${asked[*]}"; exit 2; }

[ -e "$out/steps.csv" ] || echo step,seconds,limit,status >"$out/steps.csv"
$PYTHON -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")' | tee -a "$out/log.txt"
end=$((SECONDS+seconds)); failed=0
for step in "${steps[@]}"; do
  IFS='|' read -r name share command <<<"$step"
  wanted "$name" || continue
  limit=$(( (end-SECONDS)*share/left )); left=$((left-share)); start=$SECONDS
  if [ "$limit" -lt 5 ]; then echo "$name,0,$limit,no time" >>"$out/steps.csv"; failed=1; continue; fi
  echo "== $name, at most $limit s" | tee -a "$out/log.txt"
  extra=''; case "$name" in window|entmax) extra="--minutes $(awk "BEGIN {print .8*$limit/60}")";; checks) extra="--seconds $((limit-3))";; esac
  PYTHONUNBUFFERED=1 timeout -k 5 "$limit" $PYTHON $command $extra 2>&1 | tee -a "$out/log.txt"
  status=${PIPESTATUS[0]}
  echo "$name,$((SECONDS-start)),$limit,$status" | tee -a "$out/steps.csv"
  if [ "$status" != 0 ]; then failed=1; fi
done
exit $failed
