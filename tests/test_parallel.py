"""Attention across ranks in real processes: the numbers of one, the same bits twice, and no rank that waits for ever."""
import subprocess, sys, time
from pathlib import Path
import pytest

HERE = Path(__file__).parent
START = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
torch.set_num_threads(1)
rank,size = int(sys.argv[1]),int(sys.argv[2])
dist.init_process_group('gloo', init_method='file://'+sys.argv[3], rank=rank, world_size=size, timeout=timedelta(seconds=120))
from dynattn import Window, parallel
"""

def run(size, store, *command): # -> [(exit status, output)]
    "One process for each rank."
    started = [subprocess.Popen([sys.executable, *command[:2], str(r), str(size), str(store), *command[2:]], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for r in range(size)]
    return [(p.returncode, out) for p,out in [(p, p.communicate(timeout=400)[0]) for p in started]]

@pytest.mark.parametrize('size', [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_compute_what_one_process_does(size, tmp_path):
    first = 1000*size
    for status,out in run(size, tmp_path/'store', '-u', str(HERE/'parallel_cases.py'), str(first), str(first+25)):
        assert status==0 and 'done 25' in out, out[-3000:]

@pytest.mark.parametrize('when', [pytest.param('before', marks=pytest.mark.slow), 'backward'])
def test_a_rank_that_ends_ends_the_others(when, tmp_path):
    code = START+f"""
q = torch.randn(1, 2, 6, 4, requires_grad=True)
def attend(): return parallel.attention(q, q, q, window=3, n_global=1)
out = attend()
if rank==1: os._exit(3)
try:
    if '{when}'=='before': attend()
    else: out.sum().backward()
except parallel.RankError as error: print(f'told: {{error}}', flush=True)
os._exit(0)
"""
    began = time.monotonic()
    (one,told),(two,_),(three,too) = run(3, tmp_path/'store', '-c', code)
    assert (one,two,three)==(0, 3, 0), (told, too)
    for text in (told, too): assert text.count('told: rank')==1 and len(text.splitlines())==1, text
    assert time.monotonic()-began<600

@pytest.mark.slow
def test_no_number_grows_with_the_sequence(tmp_path):
    code = START+"""
sent = []
begin = dist.batch_isend_irecv
def counting(steps):
    sent.extend(s.tensor.numel()*s.tensor.element_size() for s in steps if s.op is dist.isend)
    return begin(steps)
dist.batch_isend_irecv = counting
def measured(n):
    sent.clear()
    q,k = torch.randn(1, 4, n, 8),torch.randn(1, 2, n, 8, requires_grad=True)
    out = parallel.attention(q, k, k, window=Window.default(torch.tensor([3., 17., 60., 5.])))
    out.sum().backward()
    return sum(sent)
print(measured(200), measured(2000), flush=True)
dist.destroy_process_group()
"""
    widths = 17+60 # of the two key heads, each as wide as the wider of its two query heads
    both_ways = 2*2*widths*2*8*4 # to both sides, keys and values, there and back
    outer,inner,last = run(3, tmp_path/'store', '-c', code)
    assert inner==(0, f'{both_ways} {both_ways}\n') and outer==last==(0, f'{both_ways//2} {both_ways//2}\n'), (outer, inner, last)

def test_a_graph_does_not_keep_the_process_group(tmp_path):
    "Or its threads would live into the interpreter's end, where one that still holds a tensor aborts the process."
    code = START+"""
import weakref
group = weakref.ref(dist.group.WORLD)
q = torch.randn(1, 2, 6, 4, requires_grad=True)
width = torch.tensor([2., 3.], requires_grad=True)
def attend(): return parallel.attention(q, q, q, window=Window.default(width), n_global=1, alpha=1.5)
done,late = attend(),attend()
done.sum().backward()
dist.destroy_process_group()
print(group(), flush=True)
try: late.sum().backward()
except parallel.RankError as error: print(error, flush=True)
"""
    for r,(status,out) in enumerate(run(2, tmp_path/'store', '-c', code)):
        gone,error = out.splitlines()
        assert (status,gone)==(0, 'None') and error.startswith(f'rank {r}: expected') and error.endswith('the process group is destroyed')
