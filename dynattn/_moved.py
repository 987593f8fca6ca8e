"Modules of the first edition under their old names, for one version: importing one warns and gives what the new one has."
import importlib, sys, warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {'dynattn.attention': 'dynattn.dense', 'dynattn.banded': 'dynattn.band.attention', 'dynattn.bell': 'dynattn.curve', 'dynattn.entmax': 'dynattn.alpha',
         'dynattn.sinkhorn': 'dynattn.sorting', 'dynattn.survey.kernels': 'dynattn.survey.feature_maps'}

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
        warnings.warn(f"{module.__name__} is now {MOVED[module.__name__]}; the old name goes with the next version", FutureWarning, stacklevel=6)

def moved_names(module, homes):
    "A `__getattr__` for a module that has given names away: it warns and takes them from their new module. `homes`: name -> module"
    def __getattr__(name):
        if name not in homes: raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {homes[name]}.{name}; the old name goes with the next version", FutureWarning, stacklevel=2)
        return getattr(importlib.import_module(homes[name]), name)
    return __getattr__

sys.meta_path.append(_Finder())
