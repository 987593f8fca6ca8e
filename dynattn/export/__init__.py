"Decoders with caches as small as their windows, in ONNX Runtime."
import typing
from .runtime import OnnxModel
if typing.TYPE_CHECKING: from .graph import export

__all__ = ['OnnxModel', 'export']

def __getattr__(name):
    "`export` needs transformers, which the audit's `runtime` does not."
    if name!='export': raise AttributeError(name)
    from .graph import export
    return export
