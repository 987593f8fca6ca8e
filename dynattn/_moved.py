"Modules of the first edition under their old names, for one version: importing one warns and hands on the new names"
import importlib, sys, warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {'dynattn.attention': 'dynattn.dense', 'dynattn.banded': 'dynattn.band.attention',
         'dynattn.bell': 'dynattn.curve', 'dynattn.entmax': 'dynattn.alpha',
         'dynattn.sinkhorn': 'dynattn.sorting', 'dynattn.survey.kernels': 'dynattn.survey.feature_maps'}

def _warn(old, new, stacklevel):
    warnings.warn(f"{old} is now {new}; the old name goes with the next version", FutureWarning, stacklevel=stacklevel)

class _Module(ModuleType):
    "Hands on every name; callable, because importing a submodule hides the function of that name in the package."
    def __getattr__(self, name):
        if name.startswith('__'): raise AttributeError(name)
        home = 'dynattn.chunks' if name=='band_flops' else MOVED[self.__name__]
        return getattr(importlib.import_module(home), name)

    def __call__(self, *args, **kwargs):
        home = importlib.import_module('dynattn.ops' if self.__name__=='dynattn.attention' else MOVED[self.__name__])
        return getattr(home, self.__name__.rpartition('.')[2])(*args, **kwargs)

class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None): return ModuleSpec(name, self) if name in MOVED else None
    def create_module(self, spec): return _Module(spec.name)
    def exec_module(self, module):
        _warn(module.__name__, MOVED[module.__name__], stacklevel=7)

def moved_names(module, homes):
    "A `__getattr__` that warns and takes a name from the module it went to; `homes`: name -> module."
    def __getattr__(name):
        if name not in homes: raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(f"{module}.{name}", f"{homes[name]}.{name}", stacklevel=3)
        return getattr(importlib.import_module(homes[name]), name)
    return __getattr__

sys.meta_path.append(_Finder())
