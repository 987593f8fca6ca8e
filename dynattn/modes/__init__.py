"""Which modes of PyTorch are on: the one place that asks for its private state.

A call may be traced, differentiated or exported, and each changes what may be computed. PyTorch
says most of it in names that begin with an underscore; they stand here, so that a release which
moves one is met in one place."""
from typing import TypeVar as _TypeVar
import torch
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor

__all__ = ['transformed', 'transforming', 'in_forward_mode', 'grad_levels', 'forward_levels',
           'recorded', 'exporting', 'traced_by_jit', 'holds_several_gradients', 'dispatched', 'lasting',
           'uncompiled']

_TYPE = torch._C._functorch.TransformType
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)

def transforming() -> bool:
    "Whether a transform of `torch.func` is at work: `grad`, `vmap`, `jvp`."
    return torch._C._are_functorch_transforms_active()

def transformed() -> bool:
    "Whether a transform of `torch.func` or forward-mode differentiation is at work."
    return torch._C._are_functorch_transforms_active() or in_forward_mode()

def in_forward_mode() -> bool:
    "Whether forward-mode differentiation is at work."
    return torch.autograd.forward_ad._current_level>=0

def _levels(kind): # how many transforms of a kind are nested around this call
    if not torch._C._are_functorch_transforms_active(): return 0
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key()==kind for level in stack)

def grad_levels() -> int:
    "How many times `torch.func.grad`, or what is made of it, is nested around this call."
    return _levels(_TYPE.Grad)

def forward_levels() -> int:
    "How many times `torch.func.jvp`, or what is made of it, is nested around this call."
    return _levels(_TYPE.Jvp)

def recorded() -> bool:
    """Whether operations are written down to be run again: by the compiler, `make_fx` (`linearize`)
    or `torch.jit.trace`."""
    if torch.compiler.is_compiling(): return True
    by_make_fx = torch._C._get_dispatch_mode(_PROXY)
    return by_make_fx is not None or torch.jit.is_tracing()

def exporting() -> bool:
    "Whether `torch.export` is at work; before it could be told apart, any compiler."
    return _is_exporting()

def traced_by_jit() -> bool:
    "Whether `torch.jit.trace` is running."
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None

def dispatched() -> bool:
    "Whether a `TorchDispatchMode` sees what is computed."
    return bool(torch._C._len_torch_dispatch_stack())

def holds_several_gradients(
    g:torch.Tensor, # that a backward pass hands on
) -> bool:
    "Whether it is a batch of them, as by `torch.autograd.grad(..., is_grads_batched=True)`."
    return torch._C._functorch.is_legacy_batchedtensor(g)

def lasting(
    x:torch.Tensor, # that a call made
) -> torch.Tensor|None:
    """Its values as they outlive the call: without the wrappers of `torch.func`, which die with it.
    None where there are none, under `vmap` and in a fake tensor."""
    if torch.compiler.is_compiling(): return x    # what is traced has no value yet
    wrappers = torch._C._functorch
    while wrappers.is_functorch_wrapped_tensor(x):
        if wrappers.is_batchedtensor(x): return None
        x = wrappers.get_unwrapped(x)
    return None if isinstance(x, _FakeTensor) else x

_F = _TypeVar('_F')

def uncompiled(f:_F) -> _F: # a function -> the same
    """Keep the compiler out of a function, which a program or PyTorch's dispatcher calls, and of
    what it calls.

    A program that is compiled breaks at its call. And where a frame cannot be compiled, the
    compiler tries the frames below it, of which this one would be. `torch.compiler.disable` does
    the same, but imports the compiler."""
    f._torchdynamo_disable = True # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, 'set_code_exec_strategy'): # since PyTorch 2.8 or so
        skip = frames._FrameAction.SKIP
        code = f.__code__ # type: ignore[attr-defined]
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return f
