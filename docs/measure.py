"""Record in nbs/times.json how many seconds each notebook takes: `python docs/measure.py [notebook ...]`.

Run as the tests run it, with one thread. Processor time is counted, which is the same on a busy machine."""
import json, os, platform, re, resource, subprocess, sys
from pathlib import Path
import book

def spent():
    u = resource.getrusage(resource.RUSAGE_CHILDREN)
    return u.ru_utime + u.ru_stime

def seconds(p):
    t = spent()
    command = [Path(sys.executable).with_name('nbdev_test'), '--path', book.NBS/p]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    return round(spent()-t, 1)

def machine():
    cpu = Path('/proc/cpuinfo')
    m = re.search(r'model name\s*:\s*(.*)', cpu.read_text()) if cpu.exists() else None
    processor = m[1] if m else platform.processor() or platform.machine()
    return f'one core of {processor}, Python {platform.python_version()}'

def main(*wanted):
    names = ['index.ipynb', *(c.path.as_posix() for c in book.chapters())]
    known = {n: s for n,s in book.times().get('seconds', {}).items() if n in names}
    for n in wanted or names:
        known[n] = seconds(n)
        print(f'{known[n]:6.1f} s  {n}', flush=True)
        taken = {k: known[k] for k in names if k in known}
        book.TIMES.write_text(json.dumps(dict(machine=machine(), seconds=taken), indent=1) + '\n')

if __name__=='__main__': main(*sys.argv[1:])
