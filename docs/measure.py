"""Record in nbs/times.json how many seconds each notebook takes: `python docs/measure.py [notebook ...]`.

Run as the tests run it, with one thread; what counts is processor time, which is what a quiet machine would take, also when this one is not."""
import json, os, platform, re, resource, subprocess, sys
from pathlib import Path
import book

def spent():
    u = resource.getrusage(resource.RUSAGE_CHILDREN)
    return u.ru_utime + u.ru_stime

def seconds(p):
    t = spent()
    subprocess.run([Path(sys.executable).with_name('nbdev_test'), '--path', book.NBS/p], check=True, stdout=subprocess.DEVNULL, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    return round(spent()-t, 1)

def machine():
    cpu = Path('/proc/cpuinfo')
    m = re.search(r'model name\s*:\s*(.*)', cpu.read_text()) if cpu.exists() else None
    return f'one core of {m[1] if m else platform.processor() or platform.machine()}, Python {platform.python_version()}'

names = ['index.ipynb', *(c.path.as_posix() for c in book.chapters())]
old = book.times().get('seconds', {})
new = {n: seconds(n) if not sys.argv[1:] or n in sys.argv[1:] else old[n] for n in names if not sys.argv[1:] or n in sys.argv[1:] or n in old}
book.TIMES.write_text(json.dumps(dict(machine=machine(), seconds=new), indent=1) + '\n')
print(*(f'{s:6.1f} s  {n}' for n,s in new.items()), sep='\n')
