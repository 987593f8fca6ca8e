"""Every threshold of the package, and the command that measures it again on this machine.

    python benchmarks/tune.py [NAME ...]      all of them take two minutes on two cores

For each threshold it prints the time at half, at twice and at four times its value over the time at its value: medians of
runs in turn in one process. A number well below 1 says that another value suits this machine better."""
import argparse, os, re, statistics, subprocess, tempfile, time
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch
import torch
from harness import machine
from dynattn import Window, alpha, attention, cache, entmax
from dynattn.cache import WindowedLayer
from dynattn.engine import plain
from dynattn.engine.native import core

ROOT = Path(__file__).parent.parent

def band(n, w, tokens=4096, **options):
    "Forward and backward of a window, H 8, d 64, of so many tokens in all."
    q,k,v = (torch.randn(max(1, tokens//n), 8, n, 64, requires_grad=True) for _ in range(3))
    sigma = torch.full((8,), w/2., requires_grad=True)
    def run(): attention(q, k, v, window=Window.default(sigma), impl='banded', **options).sum().backward()
    return run

def by_plain(n, w):
    run = band(n, w)
    def without():
        with patch.object(core, 'library', lambda: None): run()
    return without

def rows_of_entmax(n):
    z = torch.randn(n, n)
    return lambda: entmax(z, 1.5)

def tokens_of_cache(n):
    "A cache that grows by a token at a time, on one layer."
    x = torch.randn(1, 4, 1, 64)
    def run():
        layer = WindowedLayer(4, window=256)
        for _ in range(n): layer.attend(x, x, x)
    return run

@dataclass
class Threshold:
    "A constant: the file it is in, what it decides, and calls that feel it."
    file:str
    decides:str
    calls:dict

THRESHOLDS = {
    'KEYS': Threshold('dynattn/engine/native/core.cpp', "keys of a block: scores that stay in the nearest cache",
        {'N 512': lambda: band(512, 64), 'N 4,096': lambda: band(4096, 512)}),
    'WORTH_A_THREAD': Threshold('dynattn/engine/native/core.cpp', "multiplications for which a second thread is woken",
        {'16 tokens': lambda: band(16, 4, 16), '64 tokens': lambda: band(64, 8, 64), '128 tokens': lambda: band(128, 16, 128)}),
    'MULTIPLICATIONS_OF_A_TASK': Threshold('dynattn/engine/native/core.cpp', "how finely rows are dealt out to threads",
        {'N 1,024': lambda: band(1024, 128), 'alpha': lambda: band(1024, 128, alpha=1.5)}),
    'KEPT': Threshold('dynattn/engine/native/core.cpp', "bytes of working memory kept from call to call",
        {'N 256': lambda: band(256, 32), 'N 4,096': lambda: band(4096, 512)}),
    '_CHUNK': Threshold('dynattn/alpha.py', "numbers that entmax solves at a time",
        {'rows of 512': lambda: rows_of_entmax(512), 'rows of 2,048': lambda: rows_of_entmax(2048)}),
    '_STRIP': Threshold('dynattn/engine/plain.py', "queries of a strip of the plain loop",
        {'N 512': lambda: by_plain(512, 64), 'N 4,096': lambda: by_plain(4096, 64)}),
    '_SPARE': Threshold('dynattn/cache.py', "one spare place of a cache for so many needed ones",
        {'1,024 tokens': lambda: tokens_of_cache(1024)}),
}

OF_CORE = 'dynattn/engine/native/core.cpp'
MODULES = {'dynattn/alpha.py': alpha, 'dynattn/engine/plain.py': plain, 'dynattn/cache.py': cache}

def value_of(name, file):
    "The committed value of a constant, a product or a shift of whole numbers."
    found = re.search(rf'\b{name} = ([\d <*]+)', (ROOT/file).read_text(encoding='utf-8'))
    return eval(found[1])

def compiled(name, value, folder):
    "The core with another value of one constant, for this machine."
    source = re.sub(rf'\b{name} = [\d <]+', f'{name} = {value}', (ROOT/OF_CORE).read_text(encoding='utf-8'))
    path = Path(folder)/f'{name}_{value}.cpp'
    path.write_text(source, encoding='utf-8')
    wide = ['-mprefer-vector-width=512'] if core.library().dynattn_vector()==64 else []
    flags = '-std=c++17 -O3 -shared -fPIC -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -Wno-psabi'
    subprocess.run([os.environ.get('CXX', 'c++'), *flags.split(), *wide, path, '-o', path.with_suffix('.so'), '-pthread'], check=True)
    return core._typed(CDLL(str(path.with_suffix('.so'))))

@contextmanager
def having(file, name, value, libraries):
    "Within it, the constant has this value."
    if file==OF_CORE: swapped = patch.object(core, 'library', lambda: libraries[value])
    else: swapped = patch.object(MODULES[file], name, value)
    with swapped: yield

def measure(name, t, rounds):
    "call -> value -> median seconds."
    value = value_of(name, t.file)
    values = [value//2,value,value*2,value*4]
    with tempfile.TemporaryDirectory() as folder:
        libraries = {v: compiled(name, v, folder) for v in values} if t.file==OF_CORE else {}
        for label,make in t.calls.items():
            run,times = make(),{v: [] for v in values}
            for turn in range(rounds+1):
                for v in values:
                    with having(t.file, name, v, libraries):
                        start = time.perf_counter()
                        run()
                        if turn: times[v].append(time.perf_counter()-start)
            yield label,{v: statistics.median(x) for v,x in times.items()}

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('names', nargs='*', metavar='NAME', help=f"of {', '.join(THRESHOLDS)} (default: all)")
    a.add_argument('--rounds', type=int, default=9)
    args = a.parse_args()
    unknown = [name for name in args.names if name not in THRESHOLDS]
    if unknown: a.error(f"NAME: expected some of {', '.join(THRESHOLDS)}, got {', '.join(unknown)}")
    torch.manual_seed(0)
    print(machine())
    for name in args.names or THRESHOLDS:
        t = THRESHOLDS[name]
        print(f'{name} ({t.file}): {t.decides}')
        for label,seconds in measure(name, t, args.rounds):
            value = sorted(seconds)[1]
            others = '   '.join(f'{v:,}: {s/seconds[value]:.2f}' for v,s in seconds.items() if v!=value)
            print(f'    {label:14} {value:,}: {1e3*seconds[value]:.3f} ms   {others}', flush=True)

if __name__=='__main__': main()
