"""What a user writes, for type checkers: the type behind each `reveal_type` is what stands in the comment, and each line
that ends in `wrong` has a mistake that a checker finds. `tests/test_types.py` runs them; nobody runs this file."""
from typing import Any
import dynattn, torch
from dynattn import AlphaHead, MultiheadAttention, SigmaHead, Window, attention, hf, window_weights
from dynattn.cache import WindowedLayer
from dynattn.flash_attn import flash_attn_func, flash_attn_with_kvcache
from dynattn.hf import CostCurves, WindowedCache, narrow
from dynattn.hf.narrowing import Reference
from transformers import PreTrainedModel

x = torch.ones(1, 2, 3, 4)
w = Window(3., smooth="gaussian")
reveal_type(w.replace(reach=(None, 0)).mask(torch.arange(-3, 4)))    # Tensor
reveal_type(Window.default(3.).half_width(4))                        # Tensor
reveal_type(Window.span(3.))                                         # Window
reveal_type(w.sigma)                                                 # Tensor
reveal_type(w.bounds(12))                                            # tuple[Tensor, ...]
reveal_type(w.penalty())                                             # Tensor
layer = WindowedLayer(2, window=w)
reveal_type(layer.attend(x, x, x))                                   # Tensor
reveal_type(layer.to("cpu"))                                         # WindowedLayer
reveal_type(layer.batch)                                             # int
reveal_type(layer.state())                                           # tuple[dict[Any, Any], dict[Any, Any]]
reveal_type(attention(x, x, x))                                      # Tensor
reveal_type(attention(x, x, x, return_weights=True))                 # tuple[Tensor, Tensor]
reveal_type(attention(x, x, x, return_lse=True))                     # tuple[Tensor, Tensor]

reveal_type(attention(query=x, key=x, value=x, is_causal=True))      # Tensor
reveal_type(window_weights(x, x, window=3))                          # WindowWeights
reveal_type(window_weights(x, x, window=3, reduce="distance"))       # Tensor
reveal_type(flash_attn_func(x, x, x, causal=True))                   # Tensor
reveal_type(flash_attn_func(x, x, x, return_attn_probs=True))        # tuple[Any, ...]
reveal_type(flash_attn_with_kvcache(x, x, x))                        # Tensor
reveal_type(SigmaHead(4, 2)(x))                                      # Tensor
reveal_type(AlphaHead(2)())                                          # Tensor
module = MultiheadAttention(4, 2, window="learned")
reveal_type(module.own_keys)                                         # bool | None
module.own_keys = True
reveal_type(module.new_cache())                                      # WindowedLayer
dynattn.everywhere.on()

def learn(model: PreTrainedModel, batches: list[dict[str, Any]], curves: CostCurves) -> None:
    found = narrow(model, batches, .25, heal=3)
    reveal_type(found)                                               # Narrowed
    reveal_type(found.share(12))                                     # float
    reveal_type(Reference(model, batches).changes())                 # list[float]
    reveal_type(curves.budget.scaled(curves.sizes, .5))              # Tensor
    reveal_type(WindowedCache(model).nbytes)                         # int
    hf.narow(model, batches)             # no such name: wrong
    found.shares(12)                     # no such method: wrong
    curves.total(answer=.1)              # no such argument: wrong

w.half_widths(4)                         # no such method: wrong
w.mask("0")                              # a string for a Tensor: wrong
w.bounds(m=3)                            # no such argument: wrong
layer.attend(x, x)                       # v is missing: wrong
layer.atend(x, x, x)                     # no such method: wrong
attention(x, x, x, widow=3)              # no such argument: wrong
WindowedLayer(2, breadth=4)              # no such argument: wrong
dynattn.atention(x, x, x)                # no such name: wrong
dynattn.everywhere.onn()                 # no such name: wrong
flash_attn_func(x, x, x, casual=True)    # no such argument: wrong
flash_attn_func(x, x)                    # v is missing: wrong
