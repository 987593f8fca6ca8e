"""The core under the compiler's sanitizers: random calls, forward and backward, with two threads.

python tests/sanitize_native.py [SECONDS]       address and undefined behaviour, then threads; `make sanitize`

The core is built anew in a temporary folder; the rest of the process is not instrumented, and is not judged."""
import os, platform, subprocess, sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT/'dynattn/engine/native/core.cpp'
TOOLS = dict(
    asan=('-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined', ('libasan.so','libubsan.so'),
          dict(ASAN_OPTIONS='detect_leaks=0', UBSAN_OPTIONS='print_stacktrace=1')),
    tsan=('-g -fsanitize=thread', ('libtsan.so',),
          dict(TSAN_OPTIONS='ignore_noninstrumented_modules=1 halt_on_error=1 report_signal_unsafe=0')))

def build(folder, flags, path=SOURCE):
    "The core for this machine with `flags`, from the source at `path`."
    lib = Path(folder)/f'{path.stem}.so'
    own = '-std=c++17 -O1 -march=native -fno-math-errno -fno-trapping-math -Wno-psabi -fPIC -shared -fvisibility=hidden'
    subprocess.run([os.environ.get('CXX', 'g++'), *own.split(), *flags.split(), '-o', lib, path, '-lpthread'], check=True)
    return lib

def calls(seconds):
    "Random calls for a while, each checked against the dense attention; two threads wherever there is work for two."
    import torch
    from hypothesis import HealthCheck, given, seed, settings, strategies as st
    sys.path.insert(0, str(ROOT/'tests'))
    from test_banded import cases
    from test_native import DTYPES, a_call, between_guards, exact_case, newest_queries, newest_queries_of_texts, rows_of_entmax
    from dynattn.engine.native import core
    torch.set_num_threads(2)
    for start in range(3):
        for alpha in (None,1.5): a_call(start, n=1500, alpha=alpha)()
    rows_of_entmax()
    newest_queries()
    newest_queries_of_texts()
    deadline,count = time.monotonic()+seconds,0
    while time.monotonic()<deadline:
        @seed(count)
        @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=cases(), dtype=DTYPES, at_end=st.booleans(), projected=st.booleans())
        def some(case, dtype, at_end, projected): between_guards(exact_case(case, dtype, projected), at_end)
        some()
        count += 50
    print(f'{count} calls by {core.info()["library"]}', flush=True)

def sanitize(name, seconds):
    "A run under a sanitizer; its exit status."
    flags,runtimes,options = TOOLS[name]
    with tempfile.TemporaryDirectory() as folder:
        lib = build(folder, flags)
        preload = ' '.join(subprocess.check_output(['g++', f'-print-file-name={r}'], text=True).strip() for r in runtimes)
        env = {**os.environ, **options, 'LD_PRELOAD': preload, 'DYNATTN_NATIVE': str(lib), 'OMP_NUM_THREADS': '1',
               'PYTHONPATH': os.pathsep.join([str(ROOT),os.environ.get('PYTHONPATH', '')])}
        # the thread sanitizer wants its shadow memory where a random layout may have put something else
        r = subprocess.run(['setarch', platform.machine(), '-R', sys.executable, __file__, '--calls', str(seconds)], env=env)
    print(f'{name}: {"clean" if r.returncode==0 else f"failed with {r.returncode}"}', flush=True)
    return r.returncode

if __name__=='__main__':
    if sys.argv[1:2]==['--calls']: calls(float(sys.argv[2]))
    else: sys.exit(max(abs(sanitize(name, float(sys.argv[1]) if len(sys.argv)>1 else 60)) for name in TOOLS))
