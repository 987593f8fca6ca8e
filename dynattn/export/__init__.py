"Decoders with caches as small as their windows, in ONNX Runtime."
import typing
from .runtime import OnnxModel
if typing.TYPE_CHECKING: from .graph import export

__all__ = ['OnnxModel', 'export']

def _imported(name):
    "`export` needs transformers, which the audit's `runtime` does not."
    if name!='export': raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .graph import export
    globals()[name] = export
    return export

# a type checker that sees it takes every name for known
if not typing.TYPE_CHECKING: __getattr__ = _imported

def __dir__(): return sorted({*globals(), *__all__})
