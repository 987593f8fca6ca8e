"""Every kernel forward and backward, once and small, for NVIDIA's compute-sanitizer; checked against the dense attention as well.

compute-sanitizer --tool memcheck python tests/sanitize.py      then racecheck, initcheck, synccheck
Without a GPU it runs in Triton's interpreter, which says that the script itself is sound."""
import os, sys, warnings
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'  # a cached block would hide what lies past a tensor's end
import torch
GPU = torch.cuda.is_available()
if not GPU: os.environ['TRITON_INTERPRET'] = '1'; warnings.filterwarnings('ignore')
import dynattn

# ragged lengths, grouped heads, more keys than queries, an empty row of the batch, an offset, leading tokens
device,dtype = ('cuda',torch.float16) if GPU else ('cpu',torch.float32)
g = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(shape, generator=g).to(device, dtype)
q,k,v,dout = draw(2, 2, 77, 24),draw(2, 1, 83, 24),draw(2, 1, 83, 20),draw(2, 2, 77, 20)
options = dict(padding=dynattn.PaddingMask.from_lengths(torch.tensor([83,0])).to(device), n_global=2, q_offset=6)

def results(impl, dtype, alpha, window, **more):
    "Output and gradients of everything that has one."
    sigma = [window.sigma] if isinstance(window, dynattn.Window) else []
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q,k,v)] + [t.detach().clone().requires_grad_() for t in (*sigma,*([] if alpha is None else [alpha]))]
    if sigma: window = window.replace(sigma=leaves[3])
    out = dynattn.attention(*leaves[:3], window=window, alpha=None if alpha is None else leaves[-1], impl=impl, **options, **more)
    return [out.detach(),*torch.autograd.grad(out, leaves, dout.to(dtype))]

for alpha in (None, torch.tensor([1.3,1.8], device=device)):
    for name,window,causal in (('soft',dynattn.Window(torch.tensor([5.,60.], device=device)),False), ('hard, causal',9,True), ('hard, wide enough for tiles inside',(40,25),False)):
        pair = results('triton', dtype, alpha, window, is_causal=causal),results('dense', torch.float64, alpha, window, is_causal=causal)
        for a,b in zip(*pair): torch.testing.assert_close(a.double(), b.double(), rtol=2e-2 if GPU else 1e-4, atol=2e-2 if GPU else 2e-5)
        print('alpha,' if alpha is not None else 'softmax,', name, 'agree', flush=True)
if GPU: torch.cuda.synchronize()
