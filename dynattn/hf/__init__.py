"Windows and entmax in models of transformers: a cache, windows that pretrained models learn."
import typing
from importlib import import_module as _import_module
if typing.TYPE_CHECKING:
    from .masks import Sight
    from .layers import Learned
    from .plugin import attend, register, switch
    from .windows import (
        HeadReport, add_alpha, add_windows, mean_width, penalise, remove_alpha, remove_windows,
        report)
    from .saving import auto_class, load, save
    from .cache import WindowedCache
    from .curves import CostCurves, cost_curves
    from .looking import Looks, look
    from .narrowing import Narrowed, narrow

__all__ = [
    'Learned', 'Sight', 'attend', 'register', 'switch', 'HeadReport', 'add_alpha', 'add_windows',
    'mean_width', 'penalise', 'remove_alpha', 'remove_windows', 'report', 'auto_class', 'load',
    'save', 'WindowedCache', 'CostCurves', 'cost_curves', 'Looks', 'look', 'Narrowed', 'narrow']

_NAMES = dict( # module -> its names that stand here too
    masks='Sight', layers='Learned', plugin='attend register switch',
    windows='HeadReport add_alpha add_windows mean_width penalise remove_alpha remove_windows '
            'report',
    saving='auto_class load save', cache='WindowedCache', curves='CostCurves cost_curves',
    healing='', looking='Looks look', narrowing='Narrowed narrow')
_HOME = {name: module for module,names in _NAMES.items() for name in names.split()}

def _imported(name):
    "A name is imported with its module when it is first used."
    if name in _NAMES: return _import_module(f'.{name}', __name__)
    if name not in _HOME: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f'.{_HOME[name]}', __name__), name)
    globals()[name] = value
    return value

# a type checker that sees it takes every name for known
if not typing.TYPE_CHECKING: __getattr__ = _imported

# from now on `from_pretrained(..., attn_implementation="dynattn")` finds it
_imported('register')()

def __dir__(): return sorted({*globals(), *__all__, *_NAMES})
