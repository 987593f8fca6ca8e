#!/usr/bin/env bash
# The first minutes on a GPU: is everything right, and how fast is it? What must hold is asked side by side, for it is the compilers
# that take the time; then each step is timed alone. Each has a time limit, writes its rows as it goes, and may fail without stopping the next.
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
checks="--to $out/checks"                           # a file a step, since they run side by side
window="benchmarks/gpu.py --suite window --first-hour $dry" entmax="benchmarks/gpu.py --suite entmax --first-hour $dry"
# Side by side: what must hold, and compiling what is timed afterwards. Name, command.
together=("sanitize|tests/sanitize.py" "programs|benchmarks/gpu_programs.py $checks-programs.csv" "cells40|benchmarks/gpu_cells.py 40 $checks-40.csv")
for i in 0 1 2 3; do
  together+=("cells42|benchmarks/gpu_cells.py 42 --cuda --part $i/4 $checks-42-$i.csv" "cells41|benchmarks/gpu_cells.py 41 --cuda --part $i/4 $checks-41-$i.csv")
  if [ -n "$dry" ]; then break; fi                  # a CPU has no cells for a GPU, and few cores
done
parts=8; if [ -n "$dry" ]; then parts=4; fi
for ((i=0; i<parts; i++)); do together+=("checks|benchmarks/gpu_checks.py --part $i/$parts $checks-$i.csv $dry"); done
if [ -z "$dry" ]; then together+=(
  "tiles|benchmarks/gpu_tiles.py --warm 4 --d 64" "entmax|$entmax --warm --case 0"
  "window|$window --warm --case 0" "window|$window --warm --case 1" "window|$window --warm --case 2"); fi
# Alone, since they are timed. Name, its share of the time, command.
alone=("window|40|$window $rows" "entmax|25|$entmax $rows")
if [ -z "$dry" ]; then alone=("tiles|20|benchmarks/gpu_tiles.py --d 64 --to $out/gpu_tiles.csv" "${alone[@]}"); fi

names='sanitize programs cells40 cells41 cells42 checks tiles window entmax'
for name in ${asked[@]+"${asked[@]}"}; do [[ " $names " = *" $name "* ]] || { echo "STEP: expected some of $names, got $name"; exit 2; }; done
wanted() { [ ${#asked[@]} = 0 ] || [[ " ${asked[*]} " = *" $1 "* ]]; }
note() { echo "$*" | tee -a "$out/log.txt"; }

[ -e "$out/steps.csv" ] || echo step,seconds,limit,status >"$out/steps.csv"
note "$($PYTHON -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")')"
export PYTHONUNBUFFERED=1
end=$((SECONDS+seconds)); limit=$((seconds*45/100)); start=$SECONDS; running=()
for step in "${together[@]}"; do
  IFS='|' read -r name command <<<"$step"
  wanted "$name" || continue
  extra=''; if [ "$name" = checks ]; then extra="--seconds $((limit-10))"; fi
  log="$out/part-${#running[@]}.txt"
  (echo "== $command"; timeout -k 5 "$limit" $PYTHON $command $extra 2>&1; status=$?; echo "$name,$((SECONDS-start)),$limit,$status" >>"$out/steps.csv"; exit $status) >"$log" &
  running+=($!)
done
failed=0
for pid in ${running[@]+"${running[@]}"}; do wait "$pid" || failed=1; done
for i in "${!running[@]}"; do cat "$out/part-$i.txt"; done | tee -a "$out/log.txt"; rm -f "$out"/part-*.txt
for file in "$out"/checks-*.csv; do                 # one file again, with one header
  [ -e "$file" ] || continue
  if [ -e "$out/gpu_checks.csv" ]; then tail -n +2 "$file" >>"$out/gpu_checks.csv"; else cp "$file" "$out/gpu_checks.csv"; fi
  rm "$file"
done

left=0; for step in "${alone[@]}"; do IFS='|' read -r name share _ <<<"$step"; if wanted "$name"; then left=$((left+share)); fi; done
for step in "${alone[@]}"; do
  IFS='|' read -r name share command <<<"$step"
  wanted "$name" || continue
  limit=$(( (end-SECONDS)*share/left )); left=$((left-share)); start=$SECONDS
  if [ "$limit" -lt 5 ]; then echo "$name,0,$limit,no time" >>"$out/steps.csv"; failed=1; continue; fi
  note "== $name, at most $limit s"
  timeout -k 5 "$limit" $PYTHON $command --minutes "$(awk "BEGIN {print .85*$limit/60}")" 2>&1 | tee -a "$out/log.txt"
  status=${PIPESTATUS[0]}
  echo "$name,$((SECONDS-start)),$limit,$status" | tee -a "$out/steps.csv"
  if [ "$status" != 0 ]; then failed=1; fi
done
cat "$out/steps.csv"
exit $failed
