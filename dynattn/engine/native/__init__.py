"The CPU core: `info()` says whether it serves."
from .core import info

__all__ = ['info']
