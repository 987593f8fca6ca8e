"Record in nbs/times.json how many seconds each notebook takes, run alone as the tests run it: `python docs/measure.py [notebook ...]`."
import json, os, platform, re, subprocess, sys, time
from pathlib import Path
import book

def seconds(p):
    t = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name('nbdev_test'), '--path', book.NBS/p], check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter()-t, 1)

def machine():
    cpu = Path('/proc/cpuinfo')
    m = re.search(r'model name\s*:\s*(.*)', cpu.read_text()) if cpu.exists() else None
    return f'{os.cpu_count()} cores of {m[1] if m else platform.processor() or platform.machine()}, Python {platform.python_version()}'

names = ['index.ipynb', *(c.path.as_posix() for c in book.chapters())]
old = book.times().get('seconds', {})
new = {n: seconds(n) if not sys.argv[1:] or n in sys.argv[1:] else old[n] for n in names if not sys.argv[1:] or n in sys.argv[1:] or n in old}
book.TIMES.write_text(json.dumps(dict(machine=machine(), seconds=new), indent=1) + '\n')
print(*(f'{s:6.1f} s  {n}' for n,s in new.items()), sep='\n')
