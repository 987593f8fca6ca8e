"""The kinds of argument that a callable takes: read from annotations, and said in one sentence
where an argument differs.

`@checked()` compares the arguments of a function, or of the constructor of a class, with the
annotations in its signature, before its body runs. A value of another kind raises an error of the
form "name: expected ..., got ...". Bounds of numbers are given by name:
`@checked(heads=1, p=(0, 1))`. A number of another library, such as `numpy.float32` or `Fraction`,
reaches the body as an int or a float, and a tensor is a dense one.

The decorator costs a microsecond or two in a call, so that functions in which this matters, such as
`dynattn.attention`, check their arguments by hand, with `number` and `integer`. So do those
that give up a large argument before they return, such as `masked_softmax`: a call through the
decorator holds its arguments to the end. The decorator
does not check a compiled call a second time: nothing of it stays in a compiled program."""
import inspect, math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin
import torch
from torch import SymBool, SymFloat, SymInt, Tensor

__all__ = [
    'FAR', 'ANY', 'got', 'number', 'integer', 'axis', 'device', 'dtype', 'flag', 'floating',
    'checked']

FAR = 2**31 - 1 # the largest size; tokens, further than any sequence is long
ANY = -math.inf, math.inf # bounds of a number that may also be infinite, or no number

_INTS = int, Integral, SymInt
_NUMBERS = float, int, Real, SymFloat, SymInt
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_AS_THEY_ARE = {int, float, bool, NoneType, str, Tensor, torch.nn.Parameter}

def got(x) -> str:
    "A short description of the value that was passed, for an error message."
    if isinstance(x, Tensor): return f"a tensor of shape {tuple(x.shape)}, {x.dtype}"
    short = isinstance(x, (bool, int, float, complex, str, bytes, tuple, list, type(None)))
    if not short: return type(x).__name__
    if isinstance(x, int) and abs(x) > 2**256: return "a number above 1e77 in size"
    return repr(x) if len(repr(x)) <= 60 else type(x).__name__

def number(name, x, expected): # -> float
    "A finite number; a tensor of no axes that does not learn is one."
    if isinstance(x, Tensor) and x.dim() == 0 and not x.requires_grad: x = x.item()
    if isinstance(x, bool) or not isinstance(x, _NUMBERS):
        raise TypeError(f"{name}: expected {expected}, got {got(x)}")
    if not isinstance(x, (SymFloat, SymInt)):
        try: x = float(x)
        except OverflowError:
            raise ValueError(f"{name}: expected {expected}, got a number above 1.8e308") from None
    if not -math.inf < x < math.inf: raise ValueError(f"{name}: expected {expected}, got {x}")
    return x

def integer(name, x, least, most=FAR): # -> int
    "A whole number from `least` to `most`."
    if isinstance(x, bool) or not isinstance(x, _INTS):
        raise TypeError(f"{name}: expected an int, got {got(x)}")
    if not isinstance(x, (int, SymInt)): x = int(x)
    if not least <= x <= most:
        raise ValueError(f"{name}: expected an int from {least} to {most}, got {got(x)}")
    return x

def _plain(name, x):
    "A number of another library as an int or a float, which PyTorch takes; anything else as it is."
    if isinstance(x, (int, float, SymInt, SymFloat)) or not isinstance(x, Real): return x
    try: return int(x) if isinstance(x, Integral) else float(x)
    except OverflowError:
        raise ValueError(f"{name}: expected a finite number, got one above 1.8e308") from None

def axis(name, dim, x:Tensor, of): # -> int, from 0 on
    "The number of an axis of a tensor; `of` is the tensor's name."
    if isinstance(dim, bool) or not isinstance(dim, _INTS):
        raise TypeError(f"{name}: expected an int, got {got(dim)}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{name}: expected an axis of {of} {tuple(x.shape)}, got {got(dim)}")
    return dim % x.dim()

def device(name, x): # -> torch.device
    "A device, or its name."
    try: return torch.device(x)
    except (TypeError, ValueError, RuntimeError):
        raise _not_a_device(name, x) from None

def _not_a_device(name, x):
    kind = ValueError if isinstance(x, (str, int)) else TypeError
    return kind(f"{name}: expected one such as 'cpu' or 'cuda', got {got(x)}")

def dtype(name, x): # -> torch.dtype
    "A dtype of floating numbers."
    if isinstance(x, torch.dtype) and x.is_floating_point: return x
    found = x if isinstance(x, torch.dtype) else got(x)
    raise TypeError(f"{name}: expected a floating dtype, got {found}")

def _dense(name, x): # a tensor -> the same
    if x.layout in _SPARSE: raise TypeError(f"{name}: expected a dense tensor, got {x.layout}")
    return x

def flag(name, x): # -> bool
    "Anything that is true or false."
    if isinstance(x, bool): return x
    try: return bool(x)
    except Exception: raise TypeError(f"{name}: expected a bool, got {got(x)}") from None

def floating(name, x, shape=''): # -> Tensor
    "A tensor of floating numbers; `shape` says which one, for the error."
    if isinstance(x, Tensor) and x.is_floating_point(): return _dense(name, x)
    is_other = isinstance(x, Tensor)
    raise TypeError(f"{name}: expected a floating tensor{shape and ' '+shape}, "
                    f"got {x.dtype if is_other else got(x)}")

def _parts(annotation):
    """The alternatives of a union, without type variables and parameters.

    None where the annotation says nothing."""
    if annotation in (inspect.Parameter.empty, Any): return None
    if isinstance(annotation, TypeVar): return _parts(annotation.__bound__ or Any)
    if isinstance(annotation, str): return None
    if annotation is None: return [NoneType]
    if get_origin(annotation) in (Union, UnionType):
        parts = [_parts(a) for a in get_args(annotation)]
        return None if None in parts else [x for part in parts for x in part]
    plain = get_origin(annotation) or annotation
    return [plain] if isinstance(plain, type) else None

@dataclass(frozen=True)
class _Kind:
    "The values that one parameter may have."
    name:str
    classes:tuple     # instances of these; numbers and bools have fields of their own
    int:bool          # whole numbers
    float:bool        # numbers, and tensors of no axes
    bool:bool
    least:float       # of a number
    most:float
    any_number:bool   # infinite ones, and NaN

    def says(self) -> str:
        "The expected kind, in words."
        words = []
        if self.int or self.float: words.append(self._of_numbers())
        if self.bool: words.append('a bool')
        names = ['tensor' if c is Tensor else c.__name__ for c in self.classes if c is not NoneType]
        words += [('an ' if name[0] in 'aeiouAEIOU' else 'a ')+name for name in names]
        if NoneType in self.classes: words.append('None')
        return ', '.join(words[:-1])+' or '+words[-1] if len(words) > 1 else words[0]

    def _of_numbers(self):
        kind = 'a number' if self.float else 'an int'
        has_least = self.least not in (-math.inf, -FAR)
        has_most = self.most < math.inf and (has_least or self.most != FAR)
        if has_least and has_most: return f'{kind} from {self.least} to {self.most}'
        if has_least: return f'{kind} >= {self.least}'
        return kind if self.any_number or not self.float else 'a finite number'

    def check(self, x):
        "Raise where `x` is something else."
        if isinstance(x, (bool, SymBool)): fits = self.bool
        elif self.float and isinstance(x, _NUMBERS) or self.int and isinstance(x, _INTS):
            return self._check_bounds(x)
        else:
            fits = isinstance(x, self.classes)
            if self.float and isinstance(x, Tensor): # a number in it, or many
                of_numbers = x.dtype != torch.bool and not x.is_complex()
                fits = of_numbers and (fits or x.dim() == 0)
            if fits and isinstance(x, Tensor): _dense(self.name, x)
        if not fits: raise TypeError(f"{self.name}: expected {self.says()}, got {got(x)}")

    def _check_bounds(self, x):
        if isinstance(x, (SymInt, SymFloat)): return
        is_finite = self.least <= x <= self.most and abs(x) < math.inf
        too_long = isinstance(x, int) and abs(x) >= 2**63 # for PyTorch, which takes it as a float
        if (is_finite or self.any_number) and not too_long: return
        hint = '; write it as a float' if too_long and self.float else ''
        raise ValueError(f"{self.name}: expected {self.says()}, got {got(x)}{hint}")

def _kind(name, annotation, bounds): # `bounds`: None, the least, or (least, most)
    "The `_Kind` of a parameter; None where its annotation says nothing."
    parts = _parts(annotation)
    if parts is None: return None
    whole_only = int in parts and float not in parts
    least,most = (-FAR, FAR) if whole_only else (-math.inf, math.inf)
    if isinstance(bounds, tuple): least,most = bounds[:2]
    elif bounds is not None: least = bounds
    classes = tuple(part for part in parts if part not in (int, float, bool))
    return _Kind(name, classes, int in parts, float in parts, bool in parts, least, most,
                 any_number=bounds is ANY)

_F = TypeVar('_F', bound=Callable)

def checked(
    # of numbers, by name: the least, (least, most) or `ANY`; or a function `check(name, x)`;
    # or `...` where the body checks
    **bounds,
) -> Callable[[_F], _F]: # a decorator of functions and classes
    "Refuse arguments that are not what their annotations say, before the function runs."
    def decorate(f):
        if isinstance(f, type):
            f.__init__ = decorate(f.__init__)
            return f
        parameters = inspect.signature(f).parameters
        unknown = bounds.keys()-parameters.keys()
        if unknown: raise TypeError(f"bounds: expected names of arguments, got {sorted(unknown)}")
        checks,numeric = {},set()
        for name,p in parameters.items():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD): continue
            bound = bounds.get(name)
            if bound is ...: continue
            if callable(bound): checks[name] = lambda x, name=name, check=bound: check(name, x)
            elif kind := _kind(name, p.annotation, bound):
                checks[name] = kind.check
                if kind.int or kind.float: numeric.add(name)
        by_position = [name for name,p in parameters.items()
                       if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

        def is_converted(name, x): return type(x) not in _AS_THEY_ARE and name in numeric

        # a function of its own, which the compiler does not look into; -> the arguments
        def check(args, kwargs):
            given = args
            for i,(name,x) in enumerate(zip(by_position, given)):
                if name in checks: checks[name](x)
                if is_converted(name, x): args = *args[:i],_plain(name, x),*args[i+1:]
            for name,x in kwargs.items():
                if name in checks: checks[name](x)
                if is_converted(name, x): kwargs[name] = _plain(name, x) # a dict of this call
            return args,kwargs

        @wraps(f)
        def call(*args, **kwargs):
            if not torch.compiler.is_compiling(): args,kwargs = check(args, kwargs)
            return f(*args, **kwargs)
        return call
    return decorate
