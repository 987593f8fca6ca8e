"Devices that are not here: Apple's GPUs have no float64, and an operator needs a kernel for each device."
import pytest, torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from dynattn import Window, entmax
from dynattn.cache import _reach_back
from dynattn.engine.dense import dropout_factors
from dynattn.engine.fields import Inputs, Plan
from dynattn.engine.plain import plain_attention
from dynattn.parts import sinusoidal_positions

class Apple(TorchDispatchMode):
    "What such a GPU says to float64; values are not computed."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.device.type!='cpu' and t.dtype==torch.float64:
                raise TypeError(f'Cannot convert a MPS Tensor to float64 dtype: {func}')
        return out

@pytest.fixture
def apple():
    with FakeTensorMode(), Apple(): yield

FAR = 'lazy' # stands for it where PyTorch asks for the driver of a device
def heads(*shape): return torch.randn(3, *shape, device=FAR).unbind()

def test_such_a_gpu_is_recognised(apple):
    with pytest.raises(TypeError, match='float64'): torch.ones(2, device=FAR).double()

@pytest.mark.parametrize('dropout_p', [0., .1])
@pytest.mark.parametrize('window', [False, True])
def test_the_plain_loop_needs_no_float64(apple, dropout_p, window):
    q,k,v = heads(2, 4, 40, 8)
    plan = Plan(8**-.5, is_causal=True, dropout_p=dropout_p)
    if window: plan = plan._replace(left=4, right=0)
    seed = torch.ones((), dtype=torch.int64, device=FAR) if dropout_p else None
    out = plain_attention(plan, Inputs(q, k, v, seed=seed))
    assert out.device.type==FAR and out.dtype==torch.float32

def test_dropout_needs_no_float64(apple):
    n = torch.arange(4, device=FAR)
    factors = dropout_factors(.1, n[1], n.view(1, 4, 1, 1), n[:,None], n, torch.float32)
    assert factors.device.type==FAR and factors.shape==(1,4,4,4)

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_positions_are_computed_elsewhere(apple, dtype):
    x = sinusoidal_positions(5, 8, device=FAR, dtype=dtype)
    assert x.device.type==FAR and x.dtype==dtype

def test_entmax_needs_no_float64(apple):
    assert entmax(torch.randn(2, 9, device='mps'), 1.3).device.type=='mps'

def test_a_cache_reads_its_widths_elsewhere(apple):
    "It stops where it asks for their values, which are not computed here"
    window = Window.default(torch.full((4,), 3., device=FAR))
    with pytest.raises(DataDependentOutputException): _reach_back(window, 4)

@pytest.mark.parametrize('name', ['band3', 'band3_backward', 'entmax'])
@pytest.mark.parametrize('device', ['CPU', 'CUDA', 'MPS', 'XPU', 'HPU', 'PrivateUse1'])
def test_compiled_programs_find_the_operators_on_every_device(name, device):
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f'dynattn::{name}', device)
