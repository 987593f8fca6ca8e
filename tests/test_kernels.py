"Kernels without a GPU: Triton compiles them for one that is not there; and what happens where Triton is missing."
import os, subprocess, sys
import pytest

def run(code, **env): return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600, env={**{k:v for k,v in os.environ.items() if k!='TRITON_INTERPRET'}, **env})

COMPILE = '''
import torch
from triton.runtime import driver
from triton.backends.compiler import GPUTarget
class Hopper:
    "What a launch asks of the driver, answered for a GPU of compute capability 9.0"
    def get_current_target(self): return GPUTarget('cuda', 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0
driver.set_active(Hopper())
{body}
'''
WINDOW = '''
from dynattn.kernels import window
from dynattn.kernels.primitives import window_form, window_limits
from dynattn import Window
def compiled(kernel, heads, length, block, *args, **constants):
    ptx = kernel.warmup(*args, grid=(1,), **constants).asm['ptx']
    assert 'wgmma.mma' in ptx, (kernel.fn.__name__, constants)
    print(kernel.fn.__name__)
window._launch = compiled
for d,dtype,w in ((64,torch.bfloat16,Window(9.)), (128,torch.float16,5)):
    q,sigma = torch.zeros(1, 2, 300, d, dtype=dtype),torch.ones(1, 2)
    form,ramp,unit = window_form(w, 300)
    rest = .1, 1, 0, True, form.curve, form.smooth, [*form[2:],ramp,unit]
    tensors = q, q.clone(), q.clone(), torch.ones(1, 300, dtype=torch.int8), *window_limits(w, 1, 2, 300, 'cpu')
    out,lse = window.window_forward(*tensors, *rest)
    window.window_backward(out, *tensors, out.clone(), lse, form.smooth!='hard', *rest)
'''
ENTMAX = WINDOW.split('for d,')[0].replace('import window\n', 'import entmax\n').replace('window._launch', 'entmax._launch') + '''
q,alpha = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16),torch.full((1,2), 1.5)
form,ramp,unit = window_form(Window(9.), 300)
rest = .1, 1, 0, True, form.curve, form.smooth, [*form[2:],ramp,unit]
tensors = q, q.clone(), q.clone(), torch.ones(1, 300, dtype=torch.int8), alpha, *window_limits(Window(9.), 1, 2, 300, 'cpu')
out,threshold,live = entmax.entmax_forward(*tensors, *rest)
entmax.entmax_backward(out, *tensors, out.clone(), threshold, live, True, True, *rest)
'''
@pytest.mark.parametrize('body,kernels', [(WINDOW,6),(ENTMAX,4)], ids=['window','entmax'])
def test_kernels_compile_for_hopper_and_use_its_tensor_cores(body, kernels):
    pytest.importorskip('triton')
    r = run(COMPILE.format(body=body))
    assert r.returncode==0 and r.stdout.count('kernel')==kernels, r.stdout + r.stderr

def test_without_triton_the_package_imports_and_the_kernels_say_what_is_missing():
    r = run('''
import sys
sys.modules['triton'] = None
import dynattn, torch
q = torch.randn(1, 2, 200, 8)
assert dynattn.attention(q, q, q, window=3).shape==q.shape
try: import dynattn.kernels.window
except ImportError as e: print(e)
''')
    assert r.returncode==0 and 'dynattn.kernels needs Triton' in r.stdout, r.stdout + r.stderr

def test_the_named_implementation_runs_in_the_interpreter():
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
''', TRITON_INTERPRET='1')
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.parametrize('suite', ['window','entmax'])
def test_the_gpu_benchmark_runs_at_toy_sizes(suite):
    pytest.importorskip('triton')
    r = subprocess.run([sys.executable, 'benchmarks/gpu.py', '--dry-run', '--suite', suite], capture_output=True, text=True, timeout=600, cwd=os.path.join(os.path.dirname(__file__), '..'))
    assert r.returncode==0 and 'both     dynattn' in r.stdout, r.stdout + r.stderr
