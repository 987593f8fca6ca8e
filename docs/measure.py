"""Record in nbs/times.json how many seconds and megabytes each notebook takes: `python docs/measure.py [notebook ...]`.

Run as the tests run it, with one thread. Processor time is counted, which is the same on a busy machine."""
import json, os, platform, re, subprocess, sys
from pathlib import Path
import book

def cost(p):
    "Seconds of a notebook's process, and the most memory that it held, in megabytes"
    command = [Path(sys.executable).with_name('nbdev_test'), '--path', book.NBS/p]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    _,status,used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode: raise subprocess.CalledProcessError(process.returncode, command)
    return round(used.ru_utime+used.ru_stime, 1), round(used.ru_maxrss/(2**20 if sys.platform=='darwin' else 2**10))

def machine():
    cpu = Path('/proc/cpuinfo')
    m = re.search(r'model name\s*:\s*(.*)', cpu.read_text()) if cpu.exists() else None
    processor = m[1] if m else platform.processor() or platform.machine()
    return f'one core of {processor}, Python {platform.python_version()}'

def main(*wanted):
    names = ['index.ipynb', *(c.path.as_posix() for c in book.chapters())]
    seconds,megabytes = ({n: x for n,x in book.times().get(kind, {}).items() if n in names} for kind in ('seconds', 'megabytes'))
    wanted = [n.removeprefix('nbs/') for n in wanted]
    unknown = [n for n in wanted if n not in names]
    if unknown: sys.exit(f"notebook: expected some of {', '.join(names)}, got {', '.join(unknown)}")
    for n in wanted or names:
        seconds[n],megabytes[n] = cost(n)
        print(f'{seconds[n]:6.1f} s {megabytes[n]:6} MB  {n}', flush=True)
        taken = {kind: {k: x[k] for k in names if k in x} for kind,x in dict(seconds=seconds, megabytes=megabytes).items()}
        book.TIMES.write_text(json.dumps(dict(machine=machine(), **taken), indent=1) + '\n', encoding='utf-8')

if __name__=='__main__': main(*sys.argv[1:])
