"""The quick suite as other machines would run it: with another core, other kernels of PyTorch, other sums, other threads.

    python tests/machines.py                # all, one after the other: three quarters of an hour on two cores
    python tests/machines.py sums threads-4 # these
    python tests/machines.py sums -- -k law # what follows goes to pytest

Each runs the whole quick suite, for every number that a notebook or a test looks at goes through PyTorch or the core.
A machine that cannot run an instruction set says so and leaves it out; what PyTorch itself breaks under a switch is
skipped by name, in the test. Exit status 1 where a check fails."""
import os, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINES = {    # what each sets; the instruction set that it needs
    'core-amx': (dict(DYNATTN_NATIVE='amx'), 'AVX512'),             # without tiles: as core-avx512
    'core-bf16': (dict(DYNATTN_NATIVE='bf16'), 'AVX512'),           # without such products: as core-avx512
    'core-avx512': (dict(DYNATTN_NATIVE='avx512'), 'AVX512'),
    'core-avx2': (dict(DYNATTN_NATIVE='avx2'), 'AVX2'),
    'core-generic': (dict(DYNATTN_NATIVE='generic'), None),
    'core-none': (dict(DYNATTN_NATIVE='0'), None),                  # no compiler was at hand
    'torch-default': (dict(ATEN_CPU_CAPABILITY='default'), None),   # the core follows: generic
    'torch-avx2': (dict(ATEN_CPU_CAPABILITY='avx2'), 'AVX2'),
    'sums': (dict(MKL_CBWR='COMPATIBLE'), None),                    # products summed in another order
    'threads-1': (dict(OMP_NUM_THREADS='1'), None),
    'threads-2': (dict(OMP_NUM_THREADS='2'), None),
    'threads-4': (dict(OMP_NUM_THREADS='4'), None),
    'busy': (dict(), None),                                         # two other programs on every core
}
ORDER = None, 'AVX2', 'AVX512'      # what PyTorch calls them, the oldest first

def lacking(name):
    "The instruction set, or the library built for it, that this machine has not; None where it can run"
    import torch
    environment,needs = MACHINES[name]
    here = torch.backends.cpu.get_cpu_capability()
    if needs and ORDER.index(needs)>ORDER.index(here if here in ORDER else None): return needs
    wanted = environment.get('DYNATTN_NATIVE', '0')
    if wanted!='0' and not (ROOT/f'dynattn/engine/native/core_{wanted}.so').exists(): return f'core_{wanted}.so'

def run(name, more):
    "Exit status of pytest, and its last line"
    environment,others = {**os.environ, **MACHINES[name][0]},[]
    if name=='busy': others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(2*os.cpu_count())]
    try:
        r = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-n', 'auto', *more], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    finally:
        for p in others: p.kill()
    if r.returncode: print(r.stdout)
    return r.returncode, r.stdout.rstrip().splitlines()[-1]

def main(argv):
    cut = argv.index('--') if '--' in argv else len(argv)
    names,more = argv[:cut],argv[cut+1:]
    unknown = set(names)-set(MACHINES)
    if unknown: sys.exit(f"machines: expected some of {', '.join(MACHINES)}, got {', '.join(sorted(unknown))}")
    worst = 0
    for name in names or MACHINES:
        missing,began = lacking(name),time.monotonic()
        if missing:
            print(f'{name:14} skipped: no {missing} here', flush=True)
            continue
        status,said = run(name, more)
        worst = max(worst, status)
        print(f'{name:14} {said}, {(time.monotonic()-began)/60:.1f} min', flush=True)
    return int(worst>0)

if __name__=='__main__': sys.exit(main(sys.argv[1:]))
