"Kernels without a GPU: Triton compiles them for one that is not there; and what happens where Triton is missing."
import os, subprocess, sys
import pytest

def run(code, **env): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600, env={**{k:v for k,v in os.environ.items() if k!='TRITON_INTERPRET'}, **env})

ROOT = os.path.join(os.path.dirname(__file__), '..')
def script(*args): return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=900, cwd=ROOT, env={k:v for k,v in os.environ.items() if k!='TRITON_INTERPRET'})

@pytest.mark.slow
@pytest.mark.parametrize('suite,kernels,packed,target', [
    *(('window',3,(),target) for target in ('80','90','100')), *(('entmax',4,('--packed',),target) for target in ('80','90','100'))])
def test_kernels_compile_for_three_generations_use_tensor_cores_and_fit_into_registers(suite, kernels, packed, target):
    pytest.importorskip('triton')
    r = script('benchmarks/registers.py', '--quick', '--suite', suite, '--target', target, *packed)
    lines = [line for line in r.stdout.splitlines() if line.startswith('triton=')]
    assert all(line.endswith('failed=') for line in lines), r.stdout
    rows = [dict(x.split('=') for x in line.split()) for line in lines]
    assert r.returncode==0 and len(rows)==2*kernels and 'FP_FUSION' not in r.stderr, r.stdout + r.stderr
    most = 256 if packed else 128                # tiles are chosen for Hopper; the others spill more, as the rows say
    for row in rows: assert int(row['mma'])>0 and (target!='90' or int(row['stack'])<=most), row

def test_without_triton_the_package_imports_and_the_kernels_say_what_is_missing():
    r = run('''
import sys
sys.modules['triton'] = None
import dynattn, torch
q = torch.randn(1, 2, 200, 8)
assert dynattn.attention(q, q, q, window=3).shape==q.shape
try: import dynattn.engine.triton.window
except ImportError as e: print(e)
''')
    assert r.returncode==0 and 'dynattn.engine.triton needs Triton' in r.stdout, r.stdout + r.stderr

@pytest.mark.slow
def test_the_named_implementation_runs_in_the_interpreter_compiled_and_exported_as_one_operator():
    pytest.importorskip('triton')
    r = run('''
import torch, dynattn
from torch.testing import assert_close
q,sigma = torch.randn(1, 2, 20, 16),torch.tensor([3.,9.], requires_grad=True)
def f(q, sigma, impl, alpha): return dynattn.attention(q, q, q, window=dynattn.Window(sigma), is_causal=True, alpha=alpha, impl=impl)
for run in (f, torch.compile(f, fullgraph=True, backend='aot_eager')):
    for alpha in (None,1.5):
        a,b = (torch.autograd.grad((o := run(q, sigma, impl, alpha)).square().sum(), sigma)+(o,) for impl in ('triton','dense'))
        for x,y in zip(a, b): assert_close(x, y, rtol=1e-4, atol=1e-5)
class Layer(torch.nn.Module):
    def __init__(self, alpha): super().__init__(); self.alpha = alpha
    def forward(self, q, sigma): return f(q, sigma, 'triton', self.alpha)
for alpha,name in ((None,'windowed'),(1.5,'entmax15'),(1.3,'entmax')):
    exported = torch.export.export(Layer(alpha), (q,sigma))
    assert [str(n.target) for n in exported.graph.nodes if 'dynattn' in str(n.target)]==[f'dynattn.{name}_attention.default']
    assert_close(exported.module()(q, sigma), f(q, sigma, 'triton', alpha))
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.slow
@pytest.mark.parametrize('suite', ['window','entmax'])
def test_the_gpu_benchmark_runs_at_toy_sizes_and_goes_on_where_it_stopped(suite, tmp_path):
    pytest.importorskip('triton')
    r,again = (script('benchmarks/gpu.py', '--dry-run', '--suite', suite, '--to', str(tmp_path/'gpu.csv')) for _ in range(2))
    assert r.returncode==again.returncode==0 and 'both     dynattn' in r.stdout and 'dynattn' not in again.stdout, r.stdout + r.stderr + again.stderr
    assert 'failed: NotImplementedError: needs a GPU' in (tmp_path/'gpu.csv').read_text()

@pytest.mark.slow
def test_the_first_hour_is_rehearsed(tmp_path):
    "All of it but the chapters' cells, which other tests run; one failing step does not stop the next."
    pytest.importorskip('triton')
    steps = ['sanitize', 'programs', 'checks', 'window', 'entmax']
    env = dict(os.environ, PYTHON=sys.executable, TRITON_INTERPRET='1')
    def run(*args): return subprocess.run(['bash', 'benchmarks/first_hour.sh', *args], capture_output=True, text=True, cwd=ROOT, env=env)
    r = run('--dry-run', str(tmp_path/'found'), '1500', *steps)
    ended = [line.split(',') for line in (tmp_path/'found/steps.csv').read_text().splitlines()[1:]]
    assert r.returncode==0 and {e[3] for e in ended}=={'0'}, r.stdout + r.stderr
    assert sorted(e[0] for e in ended)==sorted(steps + 3*['checks']) and [e[0] for e in ended][-2:]==['window', 'entmax']   # the timed ones alone, and last
    assert 'all hold' in r.stdout and (tmp_path/'found/gpu.csv').exists() and (tmp_path/'found/gpu_checks.csv').exists()
    env['PYTHON'] = 'false'                      # every step fails
    assert run('--dry-run', str(tmp_path/'bad'), '60', 'sanitize', 'checks').returncode==1
    assert len((tmp_path/'bad/steps.csv').read_text().splitlines())==6     # a head, sanitize, and four parts of the checks

@pytest.mark.slow
def test_the_case_for_the_sanitizer_runs_in_the_interpreter():
    pytest.importorskip('triton')
    r = script('tests/sanitize.py')
    assert r.returncode==0 and r.stdout.count('agree')==6, r.stdout + r.stderr

@pytest.mark.slow
def test_a_call_starts_few_operations_beside_its_kernels():
    "Each is a start of its own on the device: 37 in the forward pass once, 85 in both."
    pytest.importorskip('triton')
    r = run('''
import dynattn, torch
from torch.profiler import ProfilerActivity, profile
from dynattn.engine.triton import primitives
primitives._start = lambda *args, **arguments: None
inside = set('empty empty_strided empty_like new_empty expand as_strided transpose unbind select view detach alias'.split())

def starts(events):
    "Operations that compute something, the innermost only."
    names = {id(e): e.name.removeprefix('aten::') for e in events if e.name.startswith('aten::')}
    computes = {e for e in names if names[e] not in inside}
    return [names[id(e)] for e in events if id(e) in computes and not any(id(x) in computes for x in e.cpu_children)]

q = torch.randn(4, 16, 64, 64, requires_grad=True)
sigma = torch.full((4,16), 20., requires_grad=True)
for alpha,forward,both in ((None,8,12), (1.5,14,20)):
    def call(): return dynattn.attention(q, q, q, window=dynattn.Window.default(sigma), is_causal=True, alpha=alpha, impl='triton')
    with profile(activities=[ProfilerActivity.CPU]) as one: out = call()
    with profile(activities=[ProfilerActivity.CPU]) as two: torch.autograd.grad(call(), (q, sigma), out)
    for kind,most in ((one,forward), (two,both)):
        found = starts(kind.events())
        assert 0 < len(found) <= most, (alpha, len(found), found)
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.slow
def test_several_gradients_at_once_are_those_of_the_dense_path():
    "In eager mode the kernels are called directly; what they cannot do goes through the operator."
    pytest.importorskip('triton')
    r = run('''
import dynattn, torch
from torch.testing import assert_close
torch.manual_seed(0)
q,k = torch.randn(1, 4, 20, 16, requires_grad=True), torch.randn(1, 2, 20, 16, requires_grad=True)
sigma = torch.tensor([3., 9., 1., 5.], requires_grad=True)
several = torch.randn(3, 1, 4, 20, 16)
for alpha in (None, 1.5):
    def out(impl): return dynattn.attention(q, k, k, window=dynattn.Window.default(sigma), alpha=alpha, impl=impl)
    found,want = (torch.autograd.grad(out(impl), (q, k, sigma), several, is_grads_batched=True) for impl in ('triton','dense'))
    for a,b in zip(found, want): assert_close(a, b, rtol=1e-3, atol=1e-4)
    first, = torch.autograd.grad(out('triton').sum(), sigma, create_graph=True)
    try: first.sum().backward()
    except RuntimeError as e: assert str(e).startswith('create_graph: expected no second derivative'), e
    else: raise AssertionError('a second derivative')
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

def test_heads_get_no_tiles_that_a_smaller_card_has_no_room_for_and_older_cards_are_refused():
    "99 KiB of shared memory a program, as on consumer cards: the backward pass of heads of 256 asked for 112, an error of Triton's own in the middle of a step."
    pytest.importorskip('triton')
    r = run('''
import types, torch
from dynattn.engine.call import Call
from dynattn.engine.triton import entmax, primitives, window
card = types.SimpleNamespace(major=8, minor=6, shared_memory_per_block_optin=101376)
torch.cuda.get_device_properties = lambda device: card
q = torch.zeros(1, 1, 4, 256, dtype=torch.bfloat16)
q.__class__ = type('OnDevice', (torch.Tensor,), dict(is_cuda=True))
torch.cuda.is_available = lambda: True
small = [window._tile_sizes(q, q, way) for way in ('dq','dkv')]
card.shared_memory_per_block_optin = 166912
large = [window._tile_sizes(q, q, way) for way in ('dq','dkv')]
assert all(a['BLOCK_M']*a['BLOCK_N']<b['BLOCK_M']*b['BLOCK_N'] for a,b in zip(small, large)), (small, large)

card.major,card.shared_memory_per_block_optin = 10,232448 # what Triton 3.7.1 makes of larger tiles there is empty
assert small==[window._tile_sizes(q, q, way) for way in ('dq','dkv')]
assert entmax._tile_sizes(q[...,:64], q[...,:64], 'rows')['FLAG_M']==32
card.major = 8
def why(): return primitives._kernel_refuses(Call(q, q, q))
assert why() is None
card.major,card.minor = 7,5
assert why().startswith('q: expected a GPU of compute capability 8.0 or newer') and 'got 7.5' in why(), why()
''')
    assert r.returncode==0, r.stdout + r.stderr

def test_positions_that_float32_cannot_tell_apart_are_refused_where_a_window_is_soft():
    "A query at 2^25 reckoned its distances to its neighbours as multiples of four."
    pytest.importorskip('triton')
    r = run('''
import torch, dynattn
from torch.testing import assert_close
q = torch.randn(1, 1, 4, 16)
def call(offset, impl): return dynattn.attention(q[:,:,2:], q, q, window=dynattn.Window(torch.tensor(2.)), q_offset=offset, impl=impl)
assert_close(call(2, 'triton'), call(2, 'dense'), rtol=1e-4, atol=1e-5)
try: call(2**25, 'triton')
except ValueError as e: assert str(e).startswith('q_offset: expected positions up to 2^24'), e
else: raise AssertionError('computed')
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

def test_alpha_learns_where_the_first_tile_weighs_next_to_nothing():
    "Its slopes have no reciprocal in float32: alpha's gradient was NaN."
    pytest.importorskip('triton')
    r = run('''
import torch, dynattn
from torch.testing import assert_close
q,k = torch.zeros(1, 1, 32, 16),torch.zeros(1, 1, 64, 16)
q[...,0],k[0,0,:32,0] = 1,-90
k[0,0,32:,0] = torch.linspace(-.1, .1, 32)
v = torch.randn(1, 1, 64, 16, generator=torch.Generator().manual_seed(0))
def gradient(impl, dtype, eps):
    alpha = torch.tensor([1+eps], dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    out = dynattn.attention(q.to(dtype), k.to(dtype), v.to(dtype), alpha=alpha, scale=1., impl=impl)
    return torch.autograd.grad(out.square().sum(), alpha)[0].double()
for eps in (0., 1e-4, 2e-3):
    exact = gradient('dense', torch.float64, eps)
    assert_close(gradient('triton', torch.float32, eps), exact, rtol=1e-3, atol=1e-4)
    assert_close(gradient('triton', torch.float16, eps), exact, rtol=2e-2, atol=2e-2)
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

def test_a_negative_scale_in_every_dtype():
    "In bfloat16 the interpreter negates the bits of a number."
    pytest.importorskip('triton')
    r = run('''
import torch, dynattn
from torch.testing import assert_close
draw = torch.Generator().manual_seed(0)
q,k,v = torch.randn(3, 1, 1, 40, 16, generator=draw).bfloat16().unbind()
for dtype,off in ((torch.bfloat16,.02), (torch.float16,.005), (torch.float32,1e-4)):
    for options in (dict(alpha=1.5), dict(alpha=torch.tensor([1.3])), dict(window=9), dict(window=9, alpha=1.5)):
        for scale in (-.5, 0.):
            a,b = (dynattn.attention(q.to(t), k.to(t), v.to(t), scale=scale, impl=impl, **options) for impl,t in (('triton',dtype), ('dense',torch.float64)))
            assert_close(a.double(), b, rtol=off, atol=off, msg=lambda m: f'{dtype} {scale} {options} {m}')
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.slow
def test_every_kernel_fits_into_a_card_of_99_KiB():
    pytest.importorskip('triton')
    for dtype in ('bfloat16','float32'):
        r = script('benchmarks/registers.py', '--target', '86', '--d', '256', '--dtype', dtype, '--window', 'soft', '--quick')
        rows = [dict(x.split('=') for x in line.split()) for line in r.stdout.splitlines() if line.startswith('triton=')]
        assert r.returncode==0 and len(rows)==7 and {row['d'] for row in rows}=={'256'}, r.stdout + r.stderr
        for row in rows: assert int(row['shared'])<=101376, row

@pytest.mark.slow
def test_results_are_the_same_with_every_size_of_tiles_that_a_device_is_asked_for():
    "And with one part of the loops instead of three, as float32 is compiled; flags of the forward pass may be smaller than a tile of the backward pass."
    pytest.importorskip('triton')
    r = run('''
import sys, warnings
sys.path.insert(0, 'benchmarks')
warnings.filterwarnings('ignore')
import dynattn, gpu_tiles, torch
from torch.testing import assert_close
torch.manual_seed(0)
q,k,v = torch.randn(1, 2, 101, 16, requires_grad=True),*torch.randn(2, 1, 1, 101, 16).unbind()
k,v,sigma,dout = k.requires_grad_(),v.requires_grad_(),torch.tensor([9., 60.], requires_grad=True),torch.randn(1, 2, 101, 16)
padding = dynattn.PaddingMask((torch.arange(101)%5!=2)[None])
alphas = torch.tensor([1.3, 1.8], requires_grad=True)

def results(impl, suite, dtype=torch.float32):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, sigma, *([alphas] if 'entmax' in suite else []))]
    out = dynattn.attention(3*leaves[0], *leaves[1:3], window=dynattn.Window(leaves[3]), padding=padding, n_global=2,
                            alpha=leaves[4] if 'entmax' in suite else None, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

asked = [(suite, way, size) for suite in ('entmax in windows','window') for way,sizes in gpu_tiles.SIZES[suite].items() for size in sizes]
asked += [('entmax in windows', 'dq', (32,16,4,2,0))] + [('entmax in windows', 'tile', tile) for tile in ((16,16), (16,64), (64,16), (32,32), (64,64))]
first = [next(x for x in asked if x[0]==suite) for suite in ('entmax in windows','window')]
seen = set()
for suite,way,size in asked:
    gpu_tiles.set_tiles(suite, way, size)
    module,sizes = gpu_tiles.MODULES[suite],gpu_tiles.MODULES[suite]._tile_sizes
    for parts in (3,1) if (suite,way,size) in first else (3,):
        found = {way: sizes(q, v, way) | dict(PARTS=parts) for way in ('bound','rows','dq','dkv') if suite!='window' or way!='bound'}
        if (known := str((suite, [{n: x for n,x in f.items() if n.isupper()} for f in found.values()]))) in seen: continue
        seen.add(known)
        module._tile_sizes = lambda q, v, way: found[way]
        for a,b in zip(results('triton', suite), results('dense', suite, torch.float64)): assert_close(a.double(), b, rtol=1e-3, atol=2e-4, msg=lambda m: f'{found} {m}')
    if (way,size)==('tile',(16,16)): # half precision has branches of its own, and flags smaller than its tiles
        for a,b in zip(results('triton', suite, torch.float16), results('dense', suite, torch.float64)): assert_close(a.double(), b, rtol=2e-2, atol=2e-2)
assert len(seen)>12
print(len(seen), 'sizes')
''', TRITON_INTERPRET='1', PYTHONPATH=ROOT)
    assert r.returncode==0, r.stdout + r.stderr
