"""Runs `nbdev_test`, the function behind the command, on one notebook at a time, each in a fork of one process that has made
the slow imports.

Nothing of this package is loaded before the fork: a notebook starts as in a fresh process, 3 to 6 seconds of processor
time earlier. `Server(ALL).run(path)` is for the tests. The process behind it reads a path and flags per line, as JSON,
and answers with what came of it."""
import importlib, io, json, os, signal, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIGHT = 'torch', 'nbdev.test', 'matplotlib.pyplot'
ALL = *LIGHT, 'torch._dynamo', 'torch.export', 'transformers.modeling_utils'      # these load Triton
MINUTES = 10, 60        # for a notebook, and for one with flags
PASSED = 77             # exit status; a notebook that ends its process early has another one

class Server:
    "A process that has imported `modules` and forks"
    command = [sys.executable, __file__]
    def __init__(self, modules, **environment):
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), **environment}
        self.process = subprocess.Popen([*self.command, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    def run(self, path, flags=()):
        "(whether it passed, what it printed)"
        self.process.stdin.write(json.dumps([str(path), list(flags)]) + '\n')
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else (False, 'the process that runs notebooks has ended')
    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)

def run(path, flags, output):
    "In a fork: runs the notebook and ends the process; its status is the answer"
    signal.alarm(60*MINUTES[bool(flags)])
    for stream in (1, 2): os.dup2(output.fileno(), stream)
    from nbdev.test import nbdev_test
    from execnb import shell
    shell._out_nb = lambda said, formats: []    # outputs that nobody keeps: each figure would be drawn again for them
    os.chdir(ROOT)
    try: nbdev_test(path=str(path), flags=' '.join(flags), n_workers=0)
    except SystemExit: status = 1       # a cell failed
    else: status = PASSED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

def draw():
    "The first figure of a process takes most of a second: fonts, and the parser of formulas"
    from matplotlib.figure import Figure
    figure = Figure()
    figure.text(.1, .1, r'$\sigma_0^2$')
    figure.savefig(io.BytesIO())

def serve(modules, run):
    for name in modules: importlib.import_module(name)
    draw()
    answers = os.fdopen(os.dup(1), 'w')
    for line in sys.stdin:
        path,flags = json.loads(line)
        with tempfile.TemporaryFile('w+') as output:
            child = os.fork()
            if not child: run(Path(path), flags, output)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            print(json.dumps([status==PASSED, output.read() or f'exit status {status}']), file=answers, flush=True)

if __name__=='__main__': serve(sys.argv[1:], run)
