"""dynattn: Attention that learns how far each head looks

An attention head weighs every word against every other; most heads need only a few. `dynattn` gives
each head a window whose width it learns, and computes only what lies inside.

On a CPU (Intel, AVX-512, two threads), an encoder of ModernBERT-base's size, with random weights,
reads 8,192 tokens in 0.46 of the time that transformers takes, with the same output. With a quarter
of the keys, and its weights adapted to that on 48 texts, SmolLM2-135M gives 107 right answers (106
and 110 with two other seeds) to 128 questions about facts anywhere in 2,048 tokens; with all of
them, as it was, it gives 109. Below about 1,000 tokens, or where any word may matter, use plain
attention.

    import torch
    from dynattn import SigmaParameter, Window, attention
    torch.manual_seed(0)
    q,k,v = torch.randn(3, 1, 4, 512, 32)             # four heads, 512 tokens
    width = SigmaParameter(4, init_width=32.)         # one width per head, learned
    out = attention(q, k, v, window=Window.default(width()), is_causal=True)
    out.square().mean().backward()
    width.z.grad                                      # it moves the widths

    tensor([-0.0081, -0.0086, -0.0075, -0.0079])

`attention` takes the arguments of PyTorch's own function, and padding, packed texts, sinks and
α-entmax besides. The same windows go into models of Hugging Face, `nn.TransformerEncoder`, a small
cache and, by `dynattn narrow`, into a trained language model.

A program that knows only PyTorch's attention, or `flash_attn`'s, needs one line before it:
`dynattn.everywhere.on()`, or `dynattn.flash_attn.install()`. Four layers of transformers' Mistral,
with a window of 256, train on 2,048 tokens in 0.56 of their time (AMD, AVX2, one thread; Intel,
AVX-512: 0.63), with the same numbers. On AMD's Zen 5 (AVX-512) ModernBERT reads 4,096 tokens in
0.59 of its time, and two layers of Llama 3.2 1B in bfloat16 go on after 32,768 tokens in 0.16 of
theirs. A short text gains nothing.

Of a model of transformers, `dynattn look` shows what every head looks at in your text, and `dynattn
audit` whether it keeps the sliding window that it promises.
"""

__version__ = "0.0.1"
import multiprocessing as _processes, os as _os, signal as _signal, sys as _sys, typing as _typing
from importlib import import_module as _import_module

def _is_command():
    "Whether this process, no worker of it, is `dynattn VERB` or `python -m dynattn VERB`."
    if _processes.parent_process() is not None: return False
    program,words = _os.path.basename(_sys.argv[0] if _sys.argv else ''),_sys.orig_argv
    as_module = ('-m', 'dynattn') in zip(words, words[1:])
    return as_module if program=='-m' else _os.path.splitext(program)[0]=='dynattn'

def _leave(number, frame):
    _os.write(2, b'dynattn: interrupted; nothing was written yet\n')
    _os._exit(128+number)

# PyTorch takes seconds to import. An interrupt of the command in that time is a line and a status;
# of any other program it stays what it was.
_HANDLERS = {_signal.SIGINT: _signal.default_int_handler, _signal.SIGTERM: _signal.SIG_DFL}
_answered = [s for s,usual in _HANDLERS.items() if _is_command() and _signal.getsignal(s)==usual]
for _number in _answered: _signal.signal(_number, _leave)

from dynattn.padding import PaddingMask, masked_softmax
from dynattn.engine.dense import dense_attention, attention_weights
from dynattn.metrics import window_recall, window_precision
from dynattn.window import Window
from dynattn.sigma import SigmaHead, SigmaParameter
from dynattn.alpha import entmax
from dynattn.sparsity import topk_softmax, AlphaHead
from dynattn.engine.operator import banded_attention
from dynattn.engine import native
from dynattn.engine.ops import attention
from dynattn.engine.weights import window_weights
from dynattn.modules import MultiheadAttention, convert
from dynattn.train.encoder import EncoderLayer, EncoderConfig, Encoder, Classifier

__all__ = [
    'PaddingMask', 'masked_softmax', 'dense_attention', 'attention_weights', 'window_recall',
    'window_precision', 'Window', 'SigmaHead', 'SigmaParameter', 'entmax',
    'topk_softmax', 'AlphaHead', 'banded_attention', 'native', 'attention', 'window_weights',
    'MultiheadAttention', 'convert',
    'EncoderLayer', 'EncoderConfig', 'Encoder', 'Classifier']

def _imported(name):
    "These modules are imported when they are first asked for."
    if name not in ('everywhere','flash_attn','hf'):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _import_module(f'dynattn.{name}')

# a type checker that sees it takes every name for known
if _typing.TYPE_CHECKING:
    from dynattn import everywhere as everywhere, flash_attn as flash_attn, hf as hf
else: __getattr__ = _imported

def _activated():
    "Called by `torch.nn.attention.activate_flash_attention_impl('dynattn')`."
    return _imported('everywhere').activated()

import torch as _torch
# older versions have no such register; nothing is activated
if hasattr(_torch.nn.attention, 'register_flash_attention_impl'):
    _torch.nn.attention.register_flash_attention_impl('dynattn', register_fn=_activated)

if _answered:
    import dynattn.command    # which takes a part of these seconds
    for _number in _answered: _signal.signal(_number, _HANDLERS[_number])
