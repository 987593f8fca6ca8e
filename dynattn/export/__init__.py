"Decoders with caches as small as their windows, in ONNX Runtime."
from .graph import export
from .runtime import OnnxModel

__all__ = ['OnnxModel', 'export']
