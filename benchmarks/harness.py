"What every benchmark shares: the limit, peers in turn, medians, and rows of a CSV that names the machine."
import argparse, csv, functools, io, os, platform, statistics, subprocess, sys, time, traceback
from dataclasses import dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Callable
import torch

RESULTS = Path(__file__).parent/'results'
CLOCK = [time.perf_counter]

def count_cpu_time():
    "For a machine that others use too: one thread, and the time that the processor spent on it."
    torch.set_num_threads(1); CLOCK[0] = time.process_time

@dataclass
class Op:
    "Something to time: `make(case)` gives `fn()`; `check(case)` raises where it computes something else."
    name:str
    make:Callable
    check:Callable = lambda case: None
    backward:bool = True     # has a backward at all
    upto:int = 2**62         # largest N it is asked for

@dataclass
class Registry:
    ops:dict = field(default_factory=dict)
    def __call__(self, name, **options):
        def put(make): self.ops[name] = Op(name, make, **options); return make
        return put

def machine():
    "The processor, in its own words, and how many threads were used."
    if torch.cuda.is_available(): return torch.cuda.get_device_name()
    try: cpu = next(l.split(':')[1].strip() for l in open('/proc/cpuinfo') if l.startswith('model name'))
    except (OSError, StopIteration): cpu = platform.processor() or platform.machine()
    return f"{cpu}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads{', CPU time' if CLOCK[0] is time.process_time else ''}"

@functools.cache
def commit():
    "Of the code that runs: a commit made meanwhile is another one. None, and not that of a repository around it, of a download."
    head = ['git', '--git-dir', RESULTS.parents[1]/'.git', 'rev-parse', '--short', 'HEAD']
    try: return subprocess.run(head, capture_output=True, text=True).stdout.strip()
    except OSError: return ''  # a machine without git

def own_process(*arguments):
    "What Python prints in a process of its own; what goes wrong there is seen here."
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout

def folder_of(package):
    "Of a package that holds a model or texts, found without importing it; without it the program ends."
    found = find_spec(package)
    if found is None: sys.exit(f"{sys.argv[0]} needs a package that is not installed: pip install {package.replace('_', '-')}")
    return Path(found.origin).parent

_square = {}
def peak(n=None, dtype=torch.float32, runs=3):
    "Operations per second of a square matrix product, the best of some: what the machine gives at this moment."
    n = n or 1024*torch.get_num_threads()
    if (n,dtype) not in _square: _square[n,dtype] = torch.randn(3, n, n).to(dtype)
    a,b,c = _square[n,dtype]
    return 2*n**3/min(seconds(lambda: torch.mm(a, b, out=c)) for _ in range(runs))

def seconds(fn):
    start = CLOCK[0](); fn()
    return CLOCK[0]()-start

def in_turn(fns, flops, rounds=5, budget=8.):
    "name -> (median seconds, median multiple of the limit, median peak); each peer runs once a round, the peak is taken on both sides of it."
    for fn in fns.values(): fn()
    runs,start = {name:[] for name in fns},time.perf_counter()
    for r in range(rounds):
        for name,fn in fns.items():
            before = peak(); s = seconds(fn); p = (before+peak())/2
            runs[name].append((s, s*p/flops, p))
        if r>=2 and time.perf_counter()-start>budget: break
    return {name: tuple(statistics.median(x) for x in zip(*rows)) for name,rows in runs.items()}

FIELDS = 'date machine torch commit suite op pass B H N d w dtype ms limits peak_gflops mb value'.split()

def rows_of(file):
    "The rows of a CSV of `RESULTS`, or of an absolute path; none where there is no file."
    columns,rows = _read(RESULTS/file)
    return [dict(zip(columns, values)) for values in rows]

def _read(path):
    "Columns and rows of a CSV. One that was cut off is an error: the next row would be written into it."
    if not path.exists(): return [],[]
    with open(path, newline='', encoding='utf-8') as f: text = f.read()
    read = csv.reader(io.StringIO(text, newline=''))
    columns,rows = next(read, []),[]
    for values in filter(None, read):
        rows.append(values)
        if len(values)!=len(columns): break
    is_whole = not rows or len(rows[-1])==len(columns)
    if is_whole and (not text or text.endswith('\n')): return columns,rows
    raise ValueError(f"{path}: expected {len(columns)} values and an end of the line, got in line {read.line_num} "
                     f"{','.join(rows[-1] if rows else columns)[:80]!r}; take that line out to go on")

def write(file, rows, fields=None, mode='w'):
    """Rows in place of what the CSV held, in the columns of the first one if none are named; what is not given stays empty.
    What cannot be written is printed: it may have taken hours to measure."""
    rows,path,text = list(rows),RESULTS/file,io.StringIO(newline='')
    fields = list(fields or rows[0])
    try:
        begun = _read(path)[0] if mode=='a' else []
        if begun and begun!=fields: raise ValueError(f"{path}: expected the columns {begun}, got {fields}")
        w = csv.DictWriter(text, fields, lineterminator='\n')
        if not begun: w.writeheader()
        w.writerows(rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name+'.new')      # in place of the old one when it is whole
        with open(path if mode=='a' else new, mode, newline='', encoding='utf-8') as f: f.write(text.getvalue())
        if mode=='w': new.replace(path)
    except (OSError, ValueError):
        print(f'not written to {path}:', *rows, sep='\n', file=sys.stderr, flush=True)
        raise

def append(file, rows, fields=FIELDS):
    "Rows behind those of the CSV, each with the day, the machine, PyTorch and the commit; `fields=None`: and its own columns."
    same = dict(date=date.today().isoformat(), machine=machine(), torch=torch.__version__, commit=commit())
    rows = [{**same, **row} for row in rows]
    if rows: write(file, rows, fields, 'a')

def part_of(text):
    "Of an option: '1/4', the second of four."
    first,_,parts = text.partition('/')
    if first.isdecimal() and parts.isdecimal() and int(first)<int(parts): return int(first),int(parts)
    raise argparse.ArgumentTypeError(f'expected a part such as 0/4, 1/4, 2/4 or 3/4, got {text}')

def ask_all(questions, to=None, seconds=1e9):
    "Ask (kind, function, case, dtype) one after the other, a row for each as soon as it is answered; ends the program, with 1 where one does not hold."
    start,bad = time.perf_counter(),0
    for kind,ask,case,dtype in questions:
        name = getattr(case, 'name', case)
        if time.perf_counter()-start>seconds: return print('out of time; not asked:', kind, name)
        row = dict(kind=kind, case=name, dtype=str(dtype).removeprefix('torch.'), error='', allowed='', where='', holds=False)
        try: row |= ask(case, dtype)
        except Exception as e:
            traceback.print_exc()
            row['where'] = f'{type(e).__name__}: {" ".join(str(e).split())}'[:160]
        bad += not row['holds']
        row = {field: f'{x:.3g}' if isinstance(x, float) else x for field,x in row.items()}
        print(*row.values(), flush=True)
        if to: append(to, [row], None)
    print(f'{bad} do not hold' if bad else 'all hold')
    sys.exit(bool(bad))
