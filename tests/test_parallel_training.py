"`dynattn train --sequence-ranks 2` in real processes: what one process learns, the same bits after a stop, one line after a death."
import json, os, socket, subprocess, sys, threading
from pathlib import Path
import pytest, torch
pytest.importorskip('accelerate'); pytest.importorskip('safetensors')
from dynattn import training
from dynattn.command import main
from test_training import bits, tree  # noqa: F401, a fixture

ROOT = Path(__file__).resolve().parents[1]
SMALL = ('--crop 48 --dim 8 --heads 2 --layers 1 --grams 2 --patch 4 --min-files 12 --per-package 20 --batch 8 --epochs 1 --every 3 '
         '--dropout 0 --price 0.1 --rank-timeout 60').split()
WORKER = """
import contextlib, io, json, os, signal, sys
import torch
torch.set_num_threads(1)
from accelerate.state import AcceleratorState
from dynattn import command, training
optimizer = training._optimizer
training._optimizer = lambda model,c: optimizer(model.double(), c)  # see below

class At(training.Callback):
    "What happens to rank 1 at the second step."
    def __init__(self, what): self.what = what
    def before_step(self, t, batch):
        if os.environ['RANK']!='1' or t.step!=1: return
        if self.what=='stops': os.kill(os.getpid(), signal.SIGTERM)
        if self.what=='dies': os._exit(9)

for line in sys.stdin:
    argv,port,what = json.loads(line)
    os.environ['MASTER_PORT'] = port
    out,err = io.StringIO(),io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err): status = command.main(argv, callbacks=[At(what)])
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
    if what=='dies': os._exit(0)
    if torch.distributed.is_initialized(): torch.distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
"""

@pytest.fixture
def pair(tmp_path):
    "Two processes that run commands together, and end with the test."
    def started(rank):
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': '2',
               'MASTER_ADDR': '127.0.0.1', 'ACCELERATE_USE_CPU': 'true'}
        return subprocess.Popen([sys.executable, '-c', WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=env)
    both = [started(0), started(1)]
    def end():
        for p in both: p.kill()
    limit = threading.Timer(240, end)  # seconds, after which they answer nothing
    limit.start()
    def run(*argv, what=None): # -> [status, output, errors] of each, None for one that died
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = str(s.getsockname()[1])
        for p in both:
            p.stdin.write(json.dumps([[str(a) for a in argv], port, what])+'\n')
            p.stdin.flush()
        return [json.loads(line) if (line := p.stdout.readline()) else None for p in both]
    yield run
    limit.cancel()
    end()
    for p in both: p.wait()

def learned(out): return training._saved_state(out)['model']

@pytest.mark.slow
def test_two_processes_that_share_pieces_learn_what_one_learns(tree, tmp_path, pair, monkeypatch):
    "In float64, so that the order of sums does not matter: Adam makes rounding large where a gradient is zero."
    argv = ['train', tree, *SMALL, '--alpha', 'learned']
    two = [*argv, '--sequence-ranks', 2]
    optimizer = training._optimizer
    monkeypatch.setattr(training, '_optimizer', lambda model,c: optimizer(model.double(), c))
    assert main([str(a) for a in [*argv, '--out', tmp_path/'one', '--quiet']])==0

    assert pair(*argv, '--sequence-ranks', 3, '--out', tmp_path/'three')[0][2].startswith(
        'dynattn: sequence_ranks: expected a divisor of the number of processes, 2, got 3')
    (status,said,_),(other,nothing,_) = pair(*two, '--out', tmp_path/'two')
    assert status==other==0 and 'Accuracy' in said and nothing==''
    one,both = learned(tmp_path/'one'),learned(tmp_path/'two')
    for name,want in one.items(): torch.testing.assert_close(both[name], want, rtol=0, atol=1e-7, msg=lambda m: f'{name}: {m}')
    alone,together = (json.loads((tmp_path/run/'result.json').read_text()) for run in ('one', 'two'))
    for name in ('confusion', 'widths', 'flops', 'wrong', 'steps'): assert alone[name]==together[name], name
    torch.testing.assert_close(alone['alphas'], together['alphas'], rtol=0, atol=1e-7)

    stopped = pair(*two, '--out', tmp_path/'again', what='stops')
    assert [s for s,_,_ in stopped]==[143, 143] and training._saved_state(tmp_path/'again')['step']==2
    went_on = pair('train', '--out', tmp_path/'again', '--resume')
    assert [s for s,_,_ in went_on]==[0, 0] and bits(tmp_path/'again')==bits(tmp_path/'two')

    told,nothing = pair(*two, '--out', tmp_path/'dies', what='dies')
    assert nothing is None and told[0]==2 and told[2].count('\n')==1, told
    assert 'another process ended, or did not answer within 60 s' in told[2]
