"""Random search for wrong answers of `dynattn.attention`.

    python tests/search.py --minutes 10 [--seed N] [--impl dense banded ...] [--kind value wrong ...] [--isolated]

Hypothesis draws calls over all arguments but `q_offsets`, `key_segments` and `return_lse`, of which it draws wrong values
only: `test_key_texts.py` draws them, against the dense path. Each is worked out with `oracle.py` (NumPy, float64, no line shared with the
package), and output and gradients are compared within a bound of the rounding; or it is repeated, transformed, or given
one wrong argument. Hypothesis shrinks what fails, and the case is printed as a snippet that runs. A call that kills
its process ends the search; with `--isolated` it is a failure like any other."""
import argparse, faulthandler, inspect, itertools, multiprocessing, os, re, signal, sys, textwrap, time, traceback, warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import cache
from unittest import mock
# before dynattn is imported: kernels run without a GPU
if __name__=='__main__': os.environ.setdefault('TRITON_INTERPRET', '1')
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
import numpy as np
import torch, torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
import oracle, dynattn
from dynattn import smoothing
from dynattn.engine import ops
from dynattn.engine import operator as band
from dynattn.engine.plan import _at_most_two
from dynattn.engine.native import core
from dynattn.engine.ops import choose

inf,nan = float('inf'),float('nan')
FORK = multiprocessing.get_context('fork')

# ---------------------------------------------------------------- what the text of a call may use

def _numbers(seed): return torch.Generator().manual_seed(seed)
def normal(seed, *shape): return torch.randn(shape, generator=_numbers(seed), dtype=torch.float64)
def uniform(seed, *shape): return torch.rand(shape, generator=_numbers(seed), dtype=torch.float64)
def lengths(seed, b, m): return torch.randint(0, m+1, (b,), generator=_numbers(seed))
def segments(seed, b, n): return torch.randint(0, 2, (b,n), generator=_numbers(seed)).mul(torch.rand((b,n),
    generator=_numbers(seed+1))<.4).cumsum(1)
def cu_seqlens(seed, n): return torch.cat((torch.tensor([0]),
                                           torch.randint(0, n+1, (3,), generator=_numbers(seed)).sort().values,
                                           torch.tensor([n]))).int()
def pick(seed, values, *shape): return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape,
    generator=_numbers(seed))]

DTYPES = dict(float64=torch.float64, float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16)
ROUNDING = {torch.float64: 2.**-53, torch.float32: 2.**-24, torch.bfloat16: 2.**-9, torch.float16: 2.**-12}
# Weights that may count as zero: entmax drops those below e^-650 in float64 and below e^-80 in float32 (chapter 22).
TINY = {torch.float64: 1e-280, torch.float32: 1e-33, torch.bfloat16: 1e-33, torch.float16: 2.**-23}
HALF = (torch.bfloat16, torch.float16)
MARGIN = 6.  # times the first-order bound of the rounding
LEAVES = ('q','k','v','sigma','alpha','rel_bias','sink','attn_mask')

# ---------------------------------------------------------------- a case

@dataclass
class Case:
    "One call as text, and what to do with it."
    kind:str      # a key of `KINDS`
    impl:str
    sizes:dict    # B, H, G (heads of the keys), N, M, d, dv
    dtype:str     # of q, k and v
    args:dict     # name -> text; 'sigma' belongs to the window
    wants:tuple=('q','k','v')  # whose gradient is asked for
    mode:str='plain'           # 'plain', 'inference', 'no_grad', 'autocast bfloat16', 'autocast float16'
    poison:str=''              # of padded keys and values: 'nan', 'inf', or 'large', the largest finite number
    lost:bool=False            # one query that is not a number
    spoiled:tuple=()           # of a wrong call: (argument, text)

    def source(self):
        "The call as a function of the classes to make it with."
        names,numbers = ', '.join(self.sizes),', '.join(map(str, self.sizes.values()))
        body = [f"sigma = {self.args['sigma']}"] if 'sigma' in self.args else []
        given = ',\n        '.join(f'{name}={text}' for name,text in self.args.items() if name!='sigma')
        body.append(f"return dict({given})")
        head = f"{names}, dtype = {numbers}, torch.{self.dtype}\n\ndef call(Window, PaddingMask):\n"
        return head + textwrap.indent('\n'.join(body), '    ')

    def call(self):
        space = dict(globals())
        exec(self.source(), space)
        return space['call']

    def said(self):
        "In one line."
        options = ', '.join(f'{name}={text}' for name,text in self.args.items() if name not in 'qkv')
        extra = [self.mode] if self.mode!='plain' else []
        if self.poison: extra.append(f'{self.poison} in padding')
        if self.lost: extra.append('a NaN query')
        if self.spoiled: extra.append('wrong: '+' = '.join(self.spoiled))
        sizes = tuple(self.sizes.values())
        return f"{self.kind} {self.impl} {self.dtype} {sizes} {options}" + (' | '+', '.join(extra) if extra else '')

    def snippet(self):
        rest = ', '.join(f'{name}={getattr(self, name)!r}' for name in ('wants','mode','poison','lost','spoiled')
                         if getattr(self, name)!=getattr(Case, name))
        lines = ["import os, sys; sys.path.insert(0, 'tests')"]
        if self.impl=='triton': lines.append("os.environ['TRITON_INTERPRET'] = '1'")
        if self.impl=='plain': lines.append("os.environ['DYNATTN_NATIVE'] = '0'")
        lines += ["import dynattn, oracle", "from search import *", "", self.source(), ""]
        if self.kind=='value' and self.mode=='plain' and not self.poison and not self.lost:
            lines += [f"out = dynattn.attention(**call(dynattn.Window, dynattn.PaddingMask), impl={self.named!r})",
                      "want = oracle.attention(**call(oracle.Window, oracle.PaddingMask))",
                      "print(abs(out.double().numpy() - want).max())"]
        lines.append(f"print(failure(call, {self.kind!r}, {self.named!r}{', '+rest if rest else ''}))")
        return '\n'.join(lines)

    def failure(self):
        "What is wrong, or None."
        library = (lambda: None) if self.impl=='plain' else core.library
        with mock.patch.object(core, 'library', library):
            return failure(self.call(), self.kind, self.named, self.wants, self.mode, self.poison, self.lost, self.spoiled)

    @property
    def named(self): return 'banded' if self.impl=='plain' else self.impl  # `plain` is the band without the core

class Refused(Exception): "The implementation that was named does not serve the call, as it may."
class Unfit(Exception): "The call has no one right answer to its precision: a cliff of the window at a token."
class TooLong(BaseException): "Raised by a timer wherever the call is; nothing in between may catch it."

# ---------------------------------------------------------------- both sides of a call

class Leaf:
    "Makes windows whose sigma is a leaf of its own."
    def __init__(self, wants): self.wants,self.sigma = wants,None
    def leaf(self, sigma):
        if not isinstance(sigma, torch.Tensor): return sigma
        self.sigma = sigma.detach().clone().requires_grad_('sigma' in self.wants and sigma.is_floating_point())
        return self.sigma
    def __call__(self, sigma, *args, **kw): return dynattn.Window(self.leaf(sigma), *args, **kw)
    def default(self, sigma, *args, **kw): return dynattn.Window.default(self.leaf(sigma), *args, **kw)
    def span(self, sigma, *args, **kw): return dynattn.Window.span(self.leaf(sigma), *args, **kw)
    def report_20220330(self, sigma, *args, **kw): return dynattn.Window.report_20220330(self.leaf(sigma), *args, **kw)
    def report_20220413(self, sigma, *args, **kw): return dynattn.Window.report_20220413(self.leaf(sigma), *args, **kw)

def spoil(given, keep, poison, lost):
    "Puts NaN or inf where they must not matter."
    if poison and keep is not None:
        for name in 'kv':
            even = torch.arange(given[name].shape[-1])%2==0
            dtype = given[name].dtype
            most = torch.full((), torch.finfo(dtype).max if poison=='large' else float(poison), dtype=dtype)
            value = torch.where(even, most, -most)
            given[name] = torch.where(keep[:,None,:,None], given[name], value)
    if lost and given['q'].numel(): given['q'] = given['q'].index_fill(2, torch.tensor([given['q'].shape[2]//2]), nan)

def is_plain(x): return isinstance(x, torch.Tensor) and not hasattr(x, 'variant')

def real(call, wants=(), poison='', lost=False):
    "The arguments for `dynattn.attention` and the leaves by name."
    windows = Leaf(wants)
    given = call(windows, dynattn.PaddingMask)
    spoil(given, given['padding'].keep if 'padding' in given else None, poison, lost)
    leaves = {}
    for name in LEAVES:
        if name not in wants: continue
        if name=='sigma' and windows.sigma is not None: leaves[name] = windows.sigma
        x = given.get(name)
        if is_plain(x) and x.is_floating_point(): leaves[name] = given[name] = x.detach().requires_grad_()
    return given,leaves

def worked_out(call, mode, poison, lost):
    "The same by the oracle."
    given = call(oracle.Window, oracle.PaddingMask)
    spoil(given, torch.from_numpy(given['padding'].keep) if 'padding' in given else None, poison, lost)
    if hasattr(given.get('attn_mask'), 'variant'):  # CausalBias: key j <= i, or aligned at the last key
        n,m = given['q'].shape[2],given['k'].shape[2]
        shift = m-n if given['attn_mask'].variant.name=='LOWER_RIGHT' else 0
        given['attn_mask'] = torch.ones(n, m, dtype=torch.bool).tril(shift)
    dtype = DTYPES[mode.split()[1]] if mode.startswith('autocast') else None
    if dtype is not None: given.update({x: given[x].to(dtype) for x in 'qkv' if given[x].dtype==torch.float32})
    return given,given['q'].dtype

def context(mode):
    if mode.startswith('autocast'): return torch.autocast('cpu', DTYPES[mode.split()[1]])
    return torch.inference_mode() if mode=='inference' else torch.no_grad() if mode=='no_grad' else nullcontext()

def plain_sigma(call):
    "The sigma of the window as the call gives it."
    seen = []
    class Look:
        def __call__(self, sigma, *a, **k): seen.append(sigma)
        default = span = report_20220330 = report_20220413 = __call__
    call(Look(), oracle.PaddingMask)
    return seen[0] if seen else None

def roundings(call, dtype):
    "(of the scores, of the window, tiny)"
    sigma = plain_sigma(call)
    double = isinstance(sigma, torch.Tensor) and sigma.dtype==torch.float64
    of_sigma = ROUNDING[torch.float64 if double else torch.float32]
    return ROUNDING[dtype],max(of_sigma, min(ROUNDING[dtype], ROUNDING[torch.float32])),TINY[dtype]

# ---------------------------------------------------------------- who serves what

def serves(impl, call, given):
    "True: it must. False: it may refuse, and if it does not, be right."
    has = lambda *names: any(x in given for x in names)
    mask,window,alpha = given.get('attn_mask'),given.get('window'),given.get('alpha')
    soft = isinstance(window, dynattn.Window)
    if impl in ('auto','dense'): return True
    if impl=='sdpa': return not has('window','alpha','rel_bias','return_weights','segments','sink','softcap')
    if impl=='banded':
        keys = mask is None or mask.dtype==torch.bool and all(s==1 for s in mask.shape[-3:-1])
        return keys and not (soft and window.sigma.ndim==3) and not has('return_weights') and _at_most_two(alpha)
    if has('attn_mask','rel_bias','return_weights','segments','sink','softcap') or given.get('dropout_p'): return False
    if soft and (window.sigma.ndim==3 or window.apply=='after') or given['q'].dtype==torch.float64: return False
    return _at_most_two(alpha) and max(given['q'].shape[-1], given['v'].shape[-1])<=256

def well_formed(e, names=None):
    "Whether an error names an argument, what was expected and what came."
    text = str(e)
    m = re.match(r'(\w+)[:.]', text)
    if not isinstance(e, (TypeError,ValueError)) or not m: return False
    return (names is None or m[1] in names) and 'expected' in text and 'got' in text

def attend(call, impl, given, mode='plain'):
    "The output; `Refused` where the implementation may and does refuse in good form."
    try:
        with context(mode): return dynattn.attention(**given, impl=impl)
    except Exception as e:
        if not (serves(impl, call, given) and given['q'].shape[-1]) and well_formed(e): raise Refused(str(e)) from None
        raise

# ---------------------------------------------------------------- who computes

ENGINES = {  # name -> where its function stands
    'core, forward': (core,'forward'), 'core, backward': (core,'backward'), 'plain loop': (band,'_plain'),
    **{name: (ops.impls,name) for name in ops.impls}}

class watched:
    "Counts in `used` which engines compute while it lasts."
    def __init__(self, used): self.used = used
    def counting(self, name, f):
        def counted(*args, **kwargs):
            self.used.add(name)
            return f(*args, **kwargs)
        return counted
    def __enter__(self):
        self.before = []
        for name,(owner,key) in ENGINES.items():
            if isinstance(owner, dict):
                self.before.append((owner,key,owner[key]))
                owner[key] = owner[key]._replace(run=self.counting(name, owner[key].run))
                continue
            found = inspect.getattr_static(owner, key)
            self.before.append((owner,key,found))
            bound = isinstance(found, (classmethod,staticmethod))
            counted = self.counting(name, found.__func__ if bound else found)
            setattr(owner, key, type(found)(counted) if bound else counted)
    def __exit__(self, *_):
        for owner,key,found in self.before:
            if isinstance(owner, dict): owner[key] = found
            else: setattr(owner, key, found)

# ---------------------------------------------------------------- comparing

def text_of(e): return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:300]

def differs(name, got, want, bound, dtype):
    "What is wrong with `got`, or None."
    got,want = got.detach().double().cpu().numpy(),np.asarray(want)
    if got.shape!=want.shape: return f"{name} has shape {got.shape} instead of {want.shape}"
    largest = 65504. if dtype==torch.float16 else 3e38 if dtype!=torch.float64 else inf
    finite = np.isfinite(got)
    with np.errstate(all='ignore'):
        off = np.abs(got-want)
        slack = MARGIN*(bound + ROUNDING[dtype]*np.abs(want)) + TINY[dtype]
        fits = np.abs(want)+slack <= .98*largest
        wrong = ~(off<=slack) & ~(np.isnan(got) & np.isnan(want)) & fits
        wrong |= ~finite & np.isfinite(want) & (fits | (name=='sigma') | np.isnan(got))  # sigma's gradient is clamped
    if not wrong.any(): return None
    at = tuple(int(x) for x in np.argwhere(wrong)[0])
    off = np.where(wrong & finite, off, 0.)
    share = np.linalg.norm(off)/max(np.linalg.norm(np.nan_to_num(want)), 1e-300)
    lost = '' if finite[wrong].all() else f", {int((~finite[wrong]).sum())} not finite"
    return (f"{name} is wrong in {int(wrong.sum())} of {wrong.size} entries{lost}: {got[at]:.6g} instead of "
            f"{want[at]:.6g} at {at}, by {off.max():.2g} at most, {share:.2g} of the norm")

def unclear(a, eps_mask):
    "Whether the window ends so near to a token that rounding decides."
    return a.window is not None and a.window.unclear(a.offsets, a.M, 8*max(eps_mask, 1e-12))

def allowed(a, bounds, name, leaf):
    "The bound for the gradient of a leaf; a sum in float32 is allowed for a leaf in float32."
    bound = {'alpha': 8, 'sigma': 2}.get(name, 1)*bounds[name]
    return bound + ROUNDING[leaf.dtype]*a.sizes.get(name, 0.) if leaf.dtype==torch.float32 else bound

def same_bits(x, y): return torch.equal(x.nan_to_num(7.), y.nan_to_num(7.))

def upstream(shape, dtype): return normal(99, *shape).to(dtype)

def check_value(call, impl, wants=('q','k','v'), mode='plain', poison='', lost=False, spoiled=()):
    "Output and gradients against the oracle; nothing of the input changes."
    told,work = worked_out(call, mode, poison, lost)
    eps,eps_mask,tiny = roundings(call, work)
    a = oracle.Attention(**told)
    if unclear(a, eps_mask): raise Unfit
    given,leaves = real(call, wants if mode not in ('inference','no_grad') else (), poison, lost)
    before = {name: x.detach().clone() for name,x in given.items() if is_plain(x)}
    out = attend(call, impl, given, mode)
    if given.get('return_weights'): out,weights = out
    if out.dtype!=work: return f"out has dtype {out.dtype} instead of {work}"
    dout = upstream(out.shape, out.dtype)
    wanted = a.gradients(dout)
    bounds = a.bounds(eps, eps_mask, tiny)
    wrong = differs('out', out, a.out, bounds['out'], work)
    if wrong: return wrong
    if given.get('return_weights'):
        wrong = differs('weights', weights.masked_fill(torch.from_numpy(a.lost), 0.), np.where(a.lost, 0., a.weights),
                        a.vw, work)
        if wrong: return wrong
    for name,x in before.items():
        if not same_bits(x, given[name].detach()): return f"{name} was changed by the call"
    if not leaves: return None
    if not out.numel(): return None
    if not out.requires_grad:  # an output of zeros alone
        return "out does not require a gradient" if any(np.any(wanted[name]) for name in leaves) else None
    grads = torch.autograd.grad(out, list(leaves.values()), dout, materialize_grads=True)
    for (name,leaf),g in zip(leaves.items(), grads):
        if g.dtype!=leaf.dtype: return f"the gradient of {name} has dtype {g.dtype} instead of {leaf.dtype}"
        want = wanted[name]
        if name=='sigma' and a.corners: continue
        if name=='q':  # what a NaN query itself gets does not matter
            g,want = g.masked_fill(torch.from_numpy(a.lost), 0.),np.where(a.lost, 0., want)
        bound = allowed(a, bounds, name, leaf)
        wrong = differs(name, g, want, bound, max(g.dtype, work, key=ROUNDING.get))
        if wrong: return f"the gradient of {wrong}"
    if work not in HALF or impl=='dense': return None
    return check_precision(call, impl, given, leaves, mode, a, out, grads, dout, wanted, bounds)

def check_precision(call, impl, given, leaves, mode, a, out, grads, dout, wanted, bounds):
    "In half precision: no more than twice the error of the dense path."
    with context(mode): dense = dynattn.attention(**given, impl='dense')
    dense = dense[0] if isinstance(dense, tuple) else dense
    theirs = torch.autograd.grad(dense, list(leaves.values()), dout, materialize_grads=True)
    for name,x,y,want in (('out',out,dense,a.out), *((n,x,y,wanted[n]) for n,x,y in zip(leaves, grads, theirs))):
        if name=='sigma' and a.corners: continue
        largest = torch.finfo(out.dtype).max
        def far(t):
            off = t.detach().double().clamp(-largest, largest).numpy()-want
            return float(np.linalg.norm(np.nan_to_num(off)))
        size = float(np.linalg.norm(np.nan_to_num(want)))+float(dout.double().norm())*ROUNDING[out.dtype]
        slack = 2*ROUNDING[out.dtype]*size + 1.5*float(np.linalg.norm(bounds[name]))
        if far(x) > 2*far(y) + slack:
            return (f"{name}: the error of {impl}, {far(x)/size:.2g} of the norm, is more than twice that of dense, "
                    f"{far(y)/size:.2g}")

# ---------------------------------------------------------------- as `F.scaled_dot_product_attention` is called

FORMS = ('two axes','three axes','five axes','keywords','positional')

def check_dropin(call, impl, wants=('q','k','v'), mode='plain', poison='', lost=False, spoiled=()):
    "Other numbers of axes, PyTorch's names, arguments by position: the same numbers."
    told,work = worked_out(call, 'plain', '', False)
    eps,eps_mask,tiny = roundings(call, work)
    a = oracle.Attention(**told)
    given,_ = real(call)
    if unclear(a, eps_mask) or not serves(impl, call, given): raise Unfit
    b,h,g = a.B,a.H,a.G
    forms = [f for f,fits in zip(FORMS, (b==h==g==1, b==1, True, True, True)) if fits]
    form = forms[(a.N+a.M+a.d) % len(forms)]
    heads = {x: given.pop(x) for x in 'qkv'}
    if form=='two axes': heads = {n: x[0,0] for n,x in heads.items()}
    if form=='three axes': heads = {n: x[0] for n,x in heads.items()}
    if form=='five axes': heads = {n: x[None] for n,x in heads.items()}
    if form=='keywords': heads = {dict(q='query', k='key', v='value')[n]: x for n,x in heads.items()}
    if form=='positional':
        more = (('attn_mask',None),('dropout_p',0.),('is_causal',False),('scale',None),('enable_gqa',False))
        out = dynattn.attention(*heads.values(), *(given.pop(n, default) for n,default in more[:3]), impl=impl, **given)
    else: out = dynattn.attention(**heads, **given, impl=impl)
    out,weights = out if isinstance(out, tuple) else (out,None)
    axes = (1,)*(form=='five axes') + ((b,h) if form not in ('two axes','three axes') else (h,)*(form=='three axes'))
    wrong = differs('out', out, a.out.reshape(axes+a.out.shape[2:]),
                    a.bounds(eps, eps_mask, tiny)['out'].reshape(axes+a.out.shape[2:]), work)
    return f"{form}: {wrong}" if wrong else None

# ---------------------------------------------------------------- the same bits twice

def check_repeat(call, impl, wants=('q','k','v'), mode='plain', poison='', lost=False, spoiled=()):
    "Twice the same bits, at one thread and at two."
    given,leaves = real(call, wants, poison, lost)
    def run(threads):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        out = attend(call, impl, given)
        out = out[0] if isinstance(out, tuple) else out
        return out,*torch.autograd.grad(out, list(leaves.values()), upstream(out.shape, out.dtype),
                                        materialize_grads=True)
    before = torch.get_num_threads()
    try:
        for threads in (1,2):
            first,again = run(threads),run(threads)
            for name,x,y in zip(('out',*leaves), first, again):
                if not same_bits(x, y): return f"{name} has other bits the second time, at {threads} threads"
    finally: torch.set_num_threads(before)

# ---------------------------------------------------------------- transforms

REMEDY = re.compile(r'\bimpl\b|\bdense\b|_for_cpu_backward is not implemented')     # the last is PyTorch's fused attention

def transformed(f, what):
    "The result, or `Refused` for an error of a kind that a transform may raise, with its remedy."
    try: return f()
    except (TypeError,ValueError,NotImplementedError,RuntimeError) as e:
        if REMEDY.search(str(e)): raise Refused(str(e)) from None
        raise

def as_function(call, impl, wants, move=None):
    "`attention` as a function of its leaves, and those."
    given,leaves = real(call, wants)
    names = list(leaves)
    def f(*tensors):
        now = dict(zip(names, tensors))
        with_sigma = {'window': given['window'].replace(sigma=now['sigma'])} if 'sigma' in now else {}
        return dynattn.attention(**{**given, **{n:x for n,x in now.items() if n!='sigma'}, **with_sigma}, impl=impl)
    return f,names,[x.detach().clone(memory_format=torch.contiguous_format) for x in leaves.values()],given

def prepared(call, impl, wants):
    told,work = worked_out(call, 'plain', '', False)
    eps,eps_mask,tiny = roundings(call, work)
    a = oracle.Attention(**told)
    if unclear(a, eps_mask) or a.corners or a.lost.any(): raise Unfit
    dout = upstream(a.out.shape, work)
    wanted,bounds = a.gradients(dout),a.bounds(eps, eps_mask, tiny)
    f,names,x,given = as_function(call, impl, wants)
    if not serves(impl, call, given) or given.get('return_weights') or not names: raise Unfit
    return told,work,a,dout,wanted,bounds,f,names,x,given

def compare_all(a, names, got, wanted, bounds, work, what):
    for name,g in zip(names, got):
        wrong = differs(name, g, wanted[name], 4*allowed(a, bounds, name, g), max(g.dtype, work, key=ROUNDING.get))
        if wrong: return f"{what}: the gradient of {wrong}"

def check_func_grad(call, impl, wants=('q','k','v'), **_):
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    loss = lambda *t: (f(*t)*dout).sum()
    got = transformed(lambda: torch.func.grad(loss, argnums=tuple(range(len(x))))(*x), 'grad')
    return compare_all(a, names, got, wanted, bounds, work, 'torch.func.grad')

def check_vmap_grad(call, impl, wants=('q','k','v'), **_):
    "Two copies along a new axis, each its own gradient."
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    loss = lambda *t: (f(*t)*dout).sum()
    two = [torch.stack((t, t)) for t in x]
    got = transformed(lambda: torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(len(x)))))(*two), 'vmap(grad)')
    for i in range(2):
        wrong = compare_all(a, names, [g[i] for g in got], wanted, bounds, work, 'vmap(grad)')
        if wrong: return wrong

def check_vmap(call, impl, wants=('q','k','v'), **_):
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    first = x[0]
    got = transformed(lambda: torch.func.vmap(lambda t: f(t, *x[1:]))(torch.stack((first, first))), 'vmap')
    for i in range(2):
        wrong = differs('out', got[i], a.out, bounds['out'], work)
        if wrong: return f"vmap over {names[0]}: {wrong}"

def check_jvp(call, impl, wants=('q','k','v'), **_):
    "Forward mode, by `torch.func` and by dual numbers, in one input at a time."
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    for i,name in enumerate(names):
        if name=='sigma' and (a.window.sigma==0).any(): continue
        direction = normal(77+i, *x[i].shape).to(x[i].dtype)
        want = 0. if a.dropped else (oracle.directional(told, name, direction)*dout.double().numpy()).sum()
        along = np.abs(oracle.array(direction))
        slack = MARGIN*((8*along*bounds[name]).sum() + 50*ROUNDING[work]*np.abs(along*wanted[name]).sum())
        def forward():
            return torch.func.jvp(lambda t: f(*x[:i], t, *x[i+1:]), (x[i],), (direction,))[1]
        def dual():
            with torch.autograd.forward_ad.dual_level():
                t = torch.autograd.forward_ad.make_dual(x[i], direction)
                d = torch.autograd.forward_ad.unpack_dual(f(*x[:i], t, *x[i+1:])).tangent
                return torch.zeros(a.out.shape, dtype=work) if d is None else d.clone()
        for way,run in (('torch.func.jvp', forward),('a dual number', dual)):
            got = float((transformed(run, way).double()*dout.double()).sum())
            if not abs(got-want) <= slack+1e-12*abs(want): return f"{way} in {name}: {got:.6g} instead of {want:.6g}"

def check_jacobian(call, impl, wants=('q','k','v'), **_):
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    if a.out.size*x[0].numel()>20_000: raise Unfit
    for way in (torch.func.jacrev, torch.func.jacfwd):
        J = transformed(lambda: way(lambda t: f(t, *x[1:]))(x[0]), way.__name__)
        got = (J*dout.reshape(dout.shape+(1,)*x[0].dim())).sum(tuple(range(dout.dim())))
        wrong = compare_all(a, names[:1], [got], wanted, {n: 4*b for n,b in bounds.items()}, work, way.__name__)
        if wrong: return wrong

def check_double(call, impl, wants=('q','k','v'), **_):
    "The gradient of a gradient, against differences of the oracle's."
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    if work!=torch.float64 or a.alpha is not None and (np.asarray(a.eps)>.9).any(): raise Unfit
    leaves = [t.clone().requires_grad_() for t in x]
    along = [normal(55+i, *t.shape).to(t.dtype) for i,t in enumerate(x)]
    def second():
        first = torch.autograd.grad(f(*leaves), leaves, dout, create_graph=True, materialize_grads=True)
        whole = sum((g*u).sum() for g,u in zip(first, along))
        if not whole.requires_grad: return [torch.zeros_like(t) for t in leaves]
        return torch.autograd.grad(whole, leaves, materialize_grads=True)
    got = transformed(second, 'double backward')
    def gradient(i, direction, h):
        name,moved = names[i],dict(told)
        if name=='sigma':
            window = oracle.Window.__new__(oracle.Window)
            window.__dict__.update(told['window'].__dict__, sigma=told['window'].sigma+h*oracle.array(direction))
            moved['window'] = window
        else: moved[name] = oracle.array(told[name])+h*oracle.array(direction)
        b = oracle.Attention(**moved)
        if ((b.weights!=0)!=(a.weights!=0)).any(): raise Unfit
        g = b.gradients(dout)
        return sum((g[n]*oracle.array(u)).sum() for n,u in zip(names, along))
    for i,name in enumerate(names):
        if x[i].dtype!=torch.float64: continue
        direction = normal(33+i, *x[i].shape)
        h = 1e-5
        near,far = ((gradient(i, direction, s)-gradient(i, direction, -s))/(2*s) for s in (h,2*h))
        want,mine = (4*near-far)/3,float((got[i]*direction).sum())
        size = abs(near)+float((got[i]*direction).abs().sum())+sum(float(np.abs(wanted[n]).sum()) for n in names)
        if abs(near-far) > 1e-3*size: continue  # a corner nearby
        if not abs(mine-want) <= 3e-5*size + 10*abs(near-far):
            return f"double backward in {name}: {mine:.6g} instead of {want:.6g}"

def check_same(call, impl, wants=('q','k','v'), **_):
    "One tensor as query, key and value, as in self-attention: its gradient, alone, with a graph, and several at once."
    told,work = worked_out(call, 'plain', '', False)
    told['k'] = told['v'] = told['q']
    eps,eps_mask,tiny = roundings(call, work)
    a = oracle.Attention(**told)
    given,_ = real(call)
    if unclear(a, eps_mask) or a.lost.any() or not serves(impl, call, given) or given.get('return_weights'): raise Unfit
    dout = upstream(a.out.shape, work)
    wanted,bounds = a.gradients(dout),a.bounds(eps, eps_mask, tiny)
    x = given['q'].detach().clone().requires_grad_()
    given.update(q=x, k=x, v=x)
    out = attend(call, impl, given)
    if not out.requires_grad: return None
    want,bound = (sum(part[name] for name in 'qkv') for part in (wanted,bounds))
    def gradient(d, **options): return torch.autograd.grad(out, x, d, retain_graph=True, **options)[0]
    def batched(): return gradient(torch.stack((dout, 2*dout)), is_grads_batched=True)[0]
    ways = dict(alone=lambda: gradient(dout), graph=lambda: gradient(dout, create_graph=True), batched=batched)
    for name,way in ways.items():
        wrong = differs('x', transformed(way, name), want, 4*bound, work)
        if wrong: return f"one tensor as q, k and v, {name}: the gradient of {wrong}"

def check_checkpoint(call, impl, wants=('q','k','v'), **_):
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    from torch.utils.checkpoint import checkpoint
    leaves = [t.clone().requires_grad_() for t in x]
    got = transformed(lambda: torch.autograd.grad(checkpoint(f, *leaves, use_reentrant=False), leaves, dout,
                                                  materialize_grads=True), 'checkpoint')
    return compare_all(a, names, got, wanted, bounds, work, 'checkpoint')

def check_compile(call, impl, wants=('q','k','v'), **_):
    told,work,a,dout,wanted,bounds,f,names,x,given = prepared(call, impl, wants)
    torch._dynamo.reset()
    leaves = [t.clone().requires_grad_() for t in x]
    out = transformed(lambda: torch.compile(f, fullgraph=True, backend='aot_eager')(*leaves), 'compile')
    wrong = differs('out', out, a.out, bounds['out'], work)
    if wrong: return f"torch.compile: {wrong}"
    return compare_all(a, names, torch.autograd.grad(out, leaves, dout, materialize_grads=True), wanted, bounds, work,
                       'torch.compile')

def moved_to(given, place, names):
    "The call with these tensors moved by `place`."
    moved = dict(given)
    for name in names:
        if name=='sigma': moved['window'] = given['window'].replace(sigma=place(given['window'].sigma))
        elif name=='padding': moved['padding'] = dynattn.PaddingMask(place(given['padding'].keep))
        else: moved[name] = place(given[name])
    return moved

def tensors_of(given):
    names = [n for n,x in given.items() if isinstance(x, torch.Tensor)] + (['padding'] if 'padding' in given else [])
    return names + (['sigma'] if isinstance(given.get('window'), dynattn.Window) else [])

def check_meta(call, impl, wants=('q','k','v'), **_):
    "Everything on the meta device: the right shape. One tensor alone: that or an error."
    told,work,a,*_rest,given = prepared(call, impl, wants)
    everything = moved_to(given, lambda t: t.to('meta'), tensors_of(given))
    out = transformed(lambda: dynattn.attention(**everything, impl=impl), 'meta')
    if not out.is_meta or tuple(out.shape)!=a.out.shape or out.dtype!=work:
        return f"on meta: {out.device} {tuple(out.shape)} {out.dtype} instead of {a.out.shape} {work}"
    for name in tensors_of(given):
        try: out = dynattn.attention(**moved_to(given, lambda t: t.to('meta'), [name]), impl=impl)
        except (TypeError,ValueError) as e:
            if not well_formed(e): return f"{name} alone on meta raised {text_of(e)}"
            continue
        if not out.is_meta: return f"{name} alone on meta gives numbers from memory that was never written"

def check_fake(call, impl, wants=('q','k','v'), **_):
    told,work,a,*_rest,given = prepared(call, impl, wants)
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        everything = moved_to(given, mode.from_tensor, tensors_of(given))
        out = transformed(lambda: dynattn.attention(**everything, impl=impl), 'fake')
    if tuple(out.shape)!=a.out.shape or out.dtype!=work:
        return f"fake tensors: {tuple(out.shape)} {out.dtype} instead of {a.out.shape} {work}"

# ---------------------------------------------------------------- wrong calls

def other(t): return t.double() if t.dtype!=torch.float64 else t.float()

# argument -> texts of what it must not be; {x} is the argument itself
SPOILED = dict(
    segments=["3", "'x'", "[0, 1]", "torch.zeros(B, N)", "torch.zeros(B, N).bool()", "torch.zeros(B+1, N).long()",
              "torch.zeros(B, N+1).long()", "torch.arange(N+1, 0, -1)[None, :N].long() if N>1 else 1",
              "torch.zeros(B, N, 1).long()"],
    sink=["3", "'x'", "[1.]", "torch.zeros(H+1)", "torch.zeros(H).long()", "torch.zeros(B, H, 1)",
          "torch.zeros(H, dtype=torch.complex64)", "torch.zeros(H).numpy()", "torch.zeros(H).bool()"],
    softcap=["0", "-1.", "'x'", "True", "nan", "inf", "[1.]", "torch.ones(2)", "1j"],
    q=["[1., 2.]", "{x}.float().numpy()", "None", "{x}.long()", "{x}>0", "{x}.to(torch.complex64)", "{x}[0,0,0]", "3",
       "1.5", "True", "'q'", "other({x})", "{x}.to(torch.float8_e4m3fn)", "{x}.to_sparse()", "{x}[...,:-1]",
       "torch.cat(({x},{x})) if B>1 else None", "object()"],
    k=["[1., 2.]", "{x}.float().numpy()", "None", "{x}.long()", "{x}>0", "{x}.to(torch.complex64)", "{x}[0,0,0]", "3",
       "'k'", "other({x})", "{x}[:,:0]", "{x}[...,:-1]", "torch.cat(({x},{x})) if B>1 else None",
       "torch.cat(({x},{x}), 2)", "{x}.to('meta')", "torch.cat(({x},)*(H//G+1), 1) if H>1 else None"],
    v=["[1., 2.]", "{x}.float().numpy()", "None", "{x}.long()", "{x}>0", "{x}.to(torch.complex64)", "{x}[0,0,0]", "3",
       "'v'", "other({x})", "{x}[:,:0]", "torch.cat(({x},{x})) if B>1 else None", "torch.cat(({x},{x}), 2)",
       "{x}.to('meta')"],
    attn_mask=["[True]", "torch.ones(N, M).numpy()", "torch.ones(N, M)", "torch.ones(N, M).long()",
               "torch.ones(N, M, dtype=torch.complex64)", "torch.ones(N+1, M+1, dtype=torch.bool)",
               "torch.ones(1,1,1,N,M, dtype=torch.bool)", "'causal'", "True", "3", "torch.ones(B, H, N, M+1).bool()"],
    dropout_p=["'x'", "torch.tensor([.1,.2])", "-.1", "1.1", "nan", "None", "[.1]", "True", "inf", "1j"],
    is_causal=["'yes'", "None", "2", "torch.ones(2).bool()", "1.", "[True]"],
    scale=["'1'", "nan", "[1]", "True", "inf", "1j", "torch.ones(2)"],
    enable_gqa=["'yes'", "[1]", "2", "None"],
    padding=["torch.ones(B, M).bool()", "[M]", "PaddingMask(torch.ones(B, M+1).bool())",
             "PaddingMask(torch.ones(B+1, M).bool())", "torch.ones(B, M)", "'x'", "3", "True"],
    window=["-1", "True", "2.5", "'3'", "(1,)", "(1,2,3)", "(-1,2)", "(True,1)", "('a',1)", "(1.5,2)", "Window",
            "torch.tensor(3)", "torch.tensor([1.,2.])", "{{'sigma': 3}}", "nan",
            "Window(torch.ones(H+1))", "Window(torch.ones(H-1 if H>2 else 3))", "Window(torch.ones(B+1, H))",
            "Window(torch.ones(B, H+1))",
            "Window(torch.ones(B, H, N+1))", "changed(Window(torch.ones(H)), nan)",
            "changed(Window(torch.ones(B, H)), -1.)",
            "changed(Window(torch.tensor(2.)), inf)"],
    alpha=["'1.5'", "True", ".5", "nan", "inf", "-1", "[1.5]", "1.5j", "torch.tensor(2)", "torch.tensor(.5)",
           "torch.full((H,), nan)", "torch.full((B,H), .9)", "torch.ones(H+1)", "torch.ones(B+1, H)",
           "torch.ones(H-1 if H>2 else 3)", "torch.ones(B, H-1 if H>2 else 3)",
           "torch.ones(B, H, N)", "torch.ones(H).numpy()", "torch.ones(H).bool()", "torch.full((H,), inf)"],
    n_global=["torch.tensor([0, 1])", "-1", "1.5", "True", "'x'", "None", "[1]", "torch.tensor(1.)", "nan"],
    rel_bias=["torch.zeros(H, 4)", "torch.zeros(H+1, 5)", "torch.zeros(5)", "torch.zeros(H, 5).long()", "[[1.]]",
              "torch.zeros(H, 5).numpy()", "3", "'x'", "torch.zeros(B+1, H, 5)", "torch.zeros(H, 5).bool()",
              "torch.zeros(H, 5, dtype=torch.complex64)", "torch.zeros(H, 0)"],
    query=["{x}"], key=["{x}"],  # beside q and k
    q_offset=["torch.tensor([0, 1])", "1.5", "True", "'x'", "None", "[1]", "torch.tensor(1.)", "nan"],
    q_offsets=["3", "'x'", "True", "nan", "[1]", "torch.zeros(B+1).long()", "torch.zeros(B)", "torch.zeros(B).bool()", "torch.zeros(B, 1).long()", "torch.zeros(B).long().numpy()"],
    key_segments=["3", "'x'", "True", "nan", "[1]", "torch.zeros(B+1, M).long()", "torch.zeros(B, M)", "torch.zeros(B, M+1).long()", "torch.zeros(B, M).bool()", "torch.zeros(B, 1, M).long()"],
    return_weights=["'yes'", "None", "2", "[True]"], return_lse=["'yes'", "None", "2", "[True]"],
    impl=["'foo'", "None", "3", "['dense']", "True"],
    widow=["3"],
)
# what may be refused or understood
EITHER = dict(q=["{x}[:,:0]"], n_global=["10**30"], window=["10**30", "(10**30, None)"], q_offset=["10**30", "-10**30"],
              scale=["torch.tensor(.5)", "np.float64(.5)"], is_causal=["np.True_"])
NOT_SERVED = ("other({x})","Window(torch.ones(B, H, N+1))")
# of the constructor of `Window`
SPOILED_WINDOW = dict(
    sigma=["'x'", "None", "nan", "-1.", "True", "torch.ones(2).long()", "torch.ones(2, dtype=torch.complex64)", "[1.]",
           "torch.tensor([1., nan])", "inf", "torch.ones(1,1,1,1)", "np.ones(2)"],
    curve=["'x'", "None", "3", "['bell']"],
    cut=["2", "-1.", "'x'", "(.5,1)", "0.", "1.", "nan", "True", "(.5,)", "[.5,0]", "('x',0)", "torch.tensor(.5)"],
    smooth=["'x'", "None", "3"],
    unit=["'x'", "None", "3"],
    apply=["'x'", "None", "3"],
    reach=["(1,)", "(-1,0)", "'x'", "(1.5,0)", "(True,0)", "3", "(1,2,3)"],
    p=["-1.", "'x'", "True", "nan", "0", "inf", "[1]"],
    ramp=["3.", "'x'"],
    eps=["0", "-1.", "nan", "'x'", "True"],
)
TENSORS = ('q','k','v')

def changed(window, value):
    "A window whose sigma was written to after it was made."
    with torch.no_grad(): window.sigma.fill_(value)
    return window

def check_wrong(call, impl, wants=(), mode='plain', poison='', lost=False, spoiled=()):
    "One argument is wrong: TypeError or ValueError that names it, with what was expected and what came."
    argument,text = spoiled
    space = dict(call.__globals__, Window=dynattn.Window, PaddingMask=dynattn.PaddingMask)
    if argument.startswith('Window.'):
        name = argument.split('.')[1]
        kw = {'sigma': 3., name: eval(text, space)}
        try: dynattn.Window(**kw)
        except Exception as e: return None if well_formed(e, (name,)) else f"Window({name}={text}) raised {text_of(e)}"
        return f"Window({name}={text}) was accepted"
    given,_ = real(call)
    if argument!='impl' and not serves(impl, call, given): raise Unfit
    space['x'] = given.get(dict(query='q', key='k').get(argument, argument))
    value = eval(text.format(x='x'), space)
    kind_of = lambda t: isinstance(t, torch.Tensor) and (t.shape,t.dtype,t.device)
    if kind_of(value) and kind_of(value)==kind_of(space['x']): raise Unfit  # not wrong for these sizes
    call_with = {**given, 'impl': impl, argument: value}
    names = {'window': ('window','sigma'), 'query': ('q',), 'key': ('k',)}.get(argument, (argument,))
    if argument in (*TENSORS,'segments'): names = None  # other sizes of q may make any other argument wrong
    why = f"{argument}={text.format(x=argument)}"
    try: dynattn.attention(**call_with)
    except Exception as e:
        if argument=='widow' and isinstance(e, TypeError): return None
        if well_formed(e, names): return None
        may_refuse = impl not in ('auto','dense') and (argument not in given or text in NOT_SERVED)
        if may_refuse and well_formed(e, ('impl',)): return None
        return f"{why} raised {text_of(e)}"
    if text not in EITHER.get(argument, ()): return f"{why} was accepted"

# ---------------------------------------------------------------- drawing

LAYOUTS = [
    ("normal({s},B,{h},{n},{w}).to(dtype)",5), ("normal({s},B,{n},{h},{w}).to(dtype).transpose(1,2)",4),
    ("normal({s},B,{h},{w},{n}).to(dtype).mT",1), ("normal({s},B,{h},{n},2*{w}).to(dtype)[...,::2]",1),
    ("normal({s},B,{h},{n}+3,{w}).to(dtype)[:,:,3:]",1),
    ("normal({s},1,{h},{n},{w}).to(dtype).expand(B,-1,-1,-1)",1),
    ("normal({s},B,1,{n},{w}).to(dtype).expand(-1,{h},-1,-1)",1),
    ("normal({s},B,{n},3,{h},{w}).to(dtype)[:,:,1].transpose(1,2)",1),
    ("normal({s},{n},B,{h},{w}).to(dtype).permute(1,2,0,3)",1),
    ("normal({s},B,{h},2*{n},{w}).to(dtype)[:,:,::2]",1),
    ("normal({s},B,{h},1,{w}).to(dtype).expand(-1,-1,{n},-1)",1)]
PADDINGS = [
    "PaddingMask.from_lengths(lengths({s},B,M), M)", "PaddingMask(uniform({s},B,M)<.7)",
    "PaddingMask(uniform({s},B,M)<.2)", "PaddingMask.from_keep((uniform({s},B,M)<.8).long())",
    "PaddingMask.from_ignore(uniform({s},B,M)<.3)", "PaddingMask.from_hf((uniform({s},B,M)<.6).int())",
    "PaddingMask.from_additive(torch.where(uniform({s},B,M)<.6, 0., -inf))",
    "PaddingMask(torch.zeros(B,M).bool())",
    "PaddingMask(lengths({s},B,M)[:,None]<=torch.arange(M))"]
MASKS = [
    ("uniform({s},N,M)<.7",2), ("uniform({s},B,1,1,M)<.7",3), ("uniform({s},B,H,N,M)<.5",2),
    ("uniform({s},1,H,N,M)<.7",1), ("uniform({s},B,1,N,1)<.7",.5), ("uniform({s},M)<.7",1),
    ("normal({s},N,M)",2), ("normal({s},B,H,N,M).to(dtype)",1), ("normal({s},B,1,1,M).float()",1),
    ("normal({s},H,N,M).masked_fill(uniform({s},H,N,M)<.3,-inf)",2)]
MASKS_OF_KEYS = [MASKS[1],MASKS[5]]
BIASES = [("causal_lower_right(N,M)",1), ("causal_upper_left(N,M)",.5)]
ALPHAS = [
    ("1.5",2), ("1.",1), ("1",.3), ("1.2",1), ("2.",1.5), ("2",.3), ("2.5",.5), ("1.000001",.5), ("3.5",.4),
    ("1+uniform({s},H)",3), ("(1+uniform({s},B,H)).float()",3), ("torch.tensor(1.5)",1),
    ("pick({s},[1.,1.25,1.5,2.],H)",2), ("pick({s},[1.,1.0001,1.5,2.,2.7],B,H)",1),
    ("(1+uniform({s},H)).bfloat16()",.4), ("pick({s},[1.5,2.,3.,4.],H)",.5)]
REL_BIASES = [
    ("normal({s},H,5)",2), ("normal({s},B,H,3)",1), ("normal({s},H,1)",.5),
    ("normal({s},H,2*M+1).to(dtype)",1), ("normal({s},H,1).to(dtype)",.5), ("normal({s},H,9).float()",1)]
SINKS = [("normal({s},H)",3), ("normal({s},H).float()",2), ("normal({s},H).to(dtype)",1)]
OFFSETS = [('1',1), ('-1',1), ('M-N',2), ('-3',1), ('-N//2',1), ('M//2',1), ('-N',.5), ('M+2',.5)]

class Draws:
    "Hypothesis's draws. It shrinks towards the first of several values, and towards no."
    def __init__(self, draw): self.draw = draw
    def integer(self, least, most): return self.draw(st.integers(least, most))
    def seed(self): return self.integer(0, 9999)
    def of(self, values): return values[self.integer(0, len(values)-1)]
    def chance(self, share): return self.integer(0, 99)>=100-100*share

    def some(self, *pairs): # (value, weight)
        ends = [*itertools.accumulate(weight for _,weight in pairs)]
        at = (self.integer(0, 99)+.5)/100*ends[-1] # hypothesis draws evenly up to 127
        return next(value for (value,_),end in zip(pairs, ends) if at<end)

def draw_tensor(r, name, loud):
    h,n,w = dict(q=('H','N','d'), k=('G','M','d'), v=('G','M','dv'))[name]
    text = r.some(*LAYOUTS).format(s=r.seed(), h=h, n=n, w=w)
    return text if name=='v' or loud==1 else text.replace('.to(dtype)', f'.mul({loud}).to(dtype)')

def draw_sigma(r, unit, per_query):
    "The text of a width."
    tokens = unit=='tokens'
    widths = [('4.',4), ('1.5',3), ('12.',2), ('60.',1), ('M',1)] if tokens else [('.3',2), ('1.',2), ('2.5',1)]
    shapes = [("H",4), ("",2), ("B,H",4), ("B,1",1), ("1,H",1), ("1",.5), ("1,1",.5)]
    if per_query: shapes = [("B,H,N",3), ("1,H,N",1), ("B,1,N",1), ("B,H,1",.5)]
    form = r.some(('random',79), ('number',15), ('whole',8.5*tokens), ('extreme',3))
    if form=='number':
        numbers = [('2.',2), ('0.',1), ('1.',1), ('5.',1), ('.25',1)] if tokens else [('.25',1), ('.5',1)]
        return r.some(*numbers)
    if form=='extreme': return r.of(['.01','1e6','1e-20','1e20','1e30'])
    if form=='whole': text = f"pick({r.seed()},[0.,1.,2.,3.,7.],{r.some(*shapes)})"
    else: text = f"{r.some(('.1+',2), ('',1))}uniform({r.seed()},{r.some(*shapes)})*{r.some(*widths)}"
    kind = r.some(('',5), ('.float()',4), ('.bfloat16()',.4), ('.half()',.4))
    return f"({text}){kind}" if kind else text

def draw_side(r): return r.of(['1','0','2','3','5','9','N','None'])

def draw_preset(r):
    "The texts of a window that has a name, and of its sigma."
    if r.chance(.3):
        random_widths = f"uniform({r.seed()},H)"
        report = r.of(["report_20220330(sigma,p=50.)", "report_20220413(sigma,p=2.,T=.3)"])
        return f"Window.{report}",r.some((f".4+.04*{random_widths}",3), (".3",.5), (random_widths,1))
    preset = r.some(("default(sigma)",2), ("span(sigma,ramp=3)",2), ("span(sigma,ramp=2.5,reach=(None,0))",1))
    return f"Window.{preset}",draw_sigma(r, 'tokens', False)

# the library's own, by name; what each is given follows from its class
SMOOTHINGS = {name: kind for name,kind in smoothing.SMOOTHINGS.items() if kind.__module__==smoothing.__name__}
DRAWN = dict(edge=5, gaussian=2, ramp=2)    # how often, where not once

def of_ones(kind): return kind(*[1. for _ in fields(kind)])

def needs_threshold(kind):
    "Whether a window of it must be given one."
    try: of_ones(kind).check(None)
    except ValueError: return True
    return False

def ends_without_threshold(kind):
    "Whether a window of it that is given none has none: it ends at `eps`, or has no curve."
    return not needs_threshold(kind) and of_ones(kind).check(None) is None

def needed(kind):
    "The names of its numbers that have no default: `p` or `ramp`."
    return [f.name for f in fields(kind) if f.default is MISSING]

def draw_window(r):
    "The texts of a window and of its sigma."
    kind = r.some(('int',2), ('pair',1.5), ('soft',6), ('preset',1))
    if kind=='int': return r.of(['2','0','1','3','6','15','M','M+5']),None
    if kind=='pair': return r.some(("({},{})",4), ("[{},{}]",1)).format(draw_side(r), draw_side(r)),None
    if kind=='preset': return draw_preset(r)
    smooth = r.some(*((name, DRAWN.get(name, 1)) for name in SMOOTHINGS))
    kind = SMOOTHINGS[smooth]
    options = {}
    if smooth!='edge' or r.chance(.4): options['smooth'] = repr(smooth)
    if needs_threshold(kind): options['cut'] = r.of(['.5',f'(.3,{kind.fill})','.05'])
    elif kind.curved and r.chance(.35): options['cut'] = r.of(['.5','.1',f'(.3,{kind.fill})'])
    for f in fields(kind):
        if f.default is not MISSING and not r.chance(.3): continue
        options[f.name] = r.of(['1.','.5','2.5','4'] if f.name=='ramp' else ['1.','.5','3.','20.','1000.'])
    if kind.curved and r.chance(.2): options['curve'] = "'normal'"
    unit = r.some(('tokens',3), ('fraction',1))
    if unit=='fraction': options['unit'] = "'fraction'"
    if r.chance(.25): options['apply'] = "'after'"
    if r.chance(.2): options['reach'] = f"({draw_side(r)},{draw_side(r)})"
    if kind.curved and ends_without_threshold(kind) and r.chance(.1): options['eps'] = '1e-3'
    given = ', '.join(['sigma', *(f'{name}={text}' for name,text in options.items())])
    return f"Window({given})",draw_sigma(r, unit, r.chance(.12))

def draw_tokens(r, kind, impl):
    if impl=='triton': return r.of([1,2,5,9,17,20,24])
    many = kind in ('value','repeat')
    band = impl in ('auto','banded','plain')  # tasks and strips of many tokens
    dozens = kind not in ('jacobian','double','jvp')
    long = (.9 if band else .2)*many
    size = r.some(('few',4), ('one',1), ('two',.7), ('dozens',4*dozens), ('a block',.6*many),
                  ('hundreds',long), ('more',.15*many*band))
    if size=='few': return r.integer(3, 12)
    if size=='dozens': return r.integer(13, 40)
    return r.of({'one': [1], 'two': [2], 'a block': [63,64,65,70],
                 'hundreds': [95,130,150,200,260], 'more': [300,400]}[size])

def draw_sizes(r, kind, impl):
    N = draw_tokens(r, kind, impl)
    M = draw_tokens(r, kind, impl) if r.chance(.35) else N
    if impl!='triton' and kind in ('value','repeat') and r.chance(.05):
        N,M = 1,r.of([40,200,600,1500])  # one query, whose window cuts the keys
    H = r.some((1,2), (2,3), (3,1), (4,3), (8,.5))
    if impl=='triton' or max(N, M)>64: H = min(H, 2)
    if N>260: H = 1
    divisors = [g for g in range(H, 0, -1) if H%g==0]
    sizes = dict(
        B=1 if N>64 else r.some((1,3), (2,4), (3,1)), H=H, G=r.of([H, *divisors]), N=N, M=M,
        d=r.some((1,1), (3,2), (4,2), (8,3), (16,1), (64,.3)), dv=r.some((1,1), (2,1), (4,3), (8,2)))
    if kind=='value' and impl!='triton' and r.chance(.02): sizes[r.of(['B','N','M','dv','d'])] = 0
    return sizes

def draw_options(r, kind, impl):
    "The texts of all arguments but q, k and v."
    args = {}
    free = impl!='sdpa'
    served = impl in ('auto','dense','banded','plain') or r.chance(.1)
    if free and r.chance(.55 if impl=='auto' else .75):
        args['window'],sigma = draw_window(r)
        if sigma: args = dict(sigma=sigma, **args)
    if r.chance(.4): args['padding'] = r.of(PADDINGS).format(s=r.seed())
    if impl!='triton' and r.chance(.25):
        masks = MASKS_OF_KEYS if impl in ('banded','plain') else MASKS+BIASES*(kind in ('value','dropin'))
        args['attn_mask'] = r.some(*masks).format(s=r.seed())
    if free and r.chance(.35): args['alpha'] = r.some(*ALPHAS).format(s=r.seed())
    if r.chance(.4): args['n_global'] = r.of(['1','2','5','M'])
    if free and impl!='triton' and r.chance(.25):
        args['rel_bias'] = r.some(*REL_BIASES).format(s=r.seed())
    if r.chance(.45): args['q_offset'] = r.some(*OFFSETS)
    if r.chance(.3): args['is_causal'] = 'True'
    if served and r.chance(.15): args['softcap'] = r.of(['1.','5.','30','.3'])
    if served and r.chance(.15): args['sink'] = r.some(*SINKS).format(s=r.seed())
    may_be_packed = served and not re.search('fraction|report', args.get('window', ''))
    if may_be_packed and r.chance(.15):
        args['segments'] = r.some(("segments({s},B,N)",4), ("segments({s},1,N)",1)).format(s=r.seed())
        args.pop('q_offset', None)
    if r.chance(.2): args['scale'] = r.of(['1.','.3','.05','0.','-1.','2'])
    if r.chance(.1): args['enable_gqa'] = 'True'
    if impl!='triton' and r.chance(.04): args['dropout_p'] = '1.'
    if impl in ('dense','auto') and r.chance(.06): args['return_weights'] = 'True'
    return args

def with_few(r, impl, args):
    "As most calls are, and some engines serve no others."
    always = 'sigma','window','enable_gqa','scale'
    args = {name: text for name,text in args.items() if name in always or r.chance(.3)}
    if impl in ('auto','sdpa') and r.chance(.4):  # PyTorch's own attention
        args = {name: text for name,text in args.items() if name not in ('window','sigma','alpha')}
        if r.chance(.3): args['scale'] = r.of(['.3','0.','-1.'])
        if r.chance(.5): args['is_causal'] = 'True'
    elif r.chance(.15):  # a window that is 1 on more keys than a block has queries
        args['sigma'] = f"pick({r.seed()},[34.,45.,60.],H)"
        args['window'] = f"Window(sigma, smooth='ramp', ramp={r.of(['1.','3.'])})"
    return args

@st.composite
def cases(draw, kinds=None, impls=None, dtypes=None, spoiled=None):
    "Calls over all arguments, of these kinds, implementations, dtypes, and wrong arguments, if any are named."
    r = Draws(draw)
    kind = r.some(*((name,weight) for name,(_,weight) in KINDS.items() if not kinds or name in kinds))
    triton = 1.2 if kind in ('value','repeat','wrong') else .2
    shares = dict(dense=2, auto=2.5, banded=5, plain=2, sdpa=1, triton=triton)
    impl = r.some(*((name,share) for name,share in shares.items() if not impls or name in impls))
    half = .8 if kind=='value' else .1
    shares = dict(float64=5*(impl!='triton'), float32=3.5, bfloat16=half, float16=half)
    if kind=='double': shares = dict(float64=1)
    elif dtypes: shares = dict.fromkeys(dtypes, 1)
    dtype = r.some(*shares.items())
    loud = r.some((1,8), (6,1), (30,.5), (60,2 if dtype=='float16' else .2)) if kind=='value' else 1
    args = draw_options(r, kind, impl)
    few = kind in ('value','repeat') and r.chance(.35)
    if few: args = with_few(r, impl, args)
    sizes = draw_sizes(r, kind, impl)
    if few and r.chance(.7): sizes.update(M=sizes['N'], dv=sizes['d'])
    if '[34.' in args.get('sigma', '') and impl!='triton':
        sizes.update(N=r.of([150,260]), M=r.of([150,260]), B=1, H=2, G=r.of([2,1]))
    if 'segments' in args:
        sizes['M'] = sizes['N']
        if sizes['B']==1 and r.chance(.4): args['segments'] = f"cu_seqlens({r.seed()},N)"
    if kind=='same': sizes.update(G=sizes['H'], M=sizes['N'], dv=sizes['d'])
    sigma = {'sigma': args.pop('sigma')} if 'sigma' in args else {}
    args = sigma | {name: draw_tensor(r, name, loud) for name in 'qkv'} | args
    wants = tuple(name for name in LEAVES if name in args)
    if kind=='value' and r.chance(.3): wants = tuple(x for x in wants if r.chance(.5)) or ('v',)
    case = Case(kind, impl, sizes, dtype, args, wants)
    if kind=='value':
        case.mode = r.some(('plain',12), ('inference',.7), ('no_grad',.5),
                           ('autocast bfloat16',.8*(dtype in ('float32','float64'))),
                           ('autocast float16',.4*(dtype=='float32')))
        if 'padding' in args and r.chance(.5): case.poison = r.of(['nan','inf','large'])
        case.lost = r.chance(.04)
    if kind=='wrong':
        of_window = not spoiled and r.chance(.12)
        name = r.of(spoiled or list(SPOILED_WINDOW if of_window else SPOILED))
        texts = SPOILED_WINDOW[name] if of_window else SPOILED[name]+EITHER.get(name, [])
        case.spoiled = (f'Window.{name}' if of_window else name, r.of(texts))
    return case

KINDS = dict(value=(check_value,60), wrong=(check_wrong,40), dropin=(check_dropin,5), repeat=(check_repeat,6),
             func_grad=(check_func_grad,4), vmap=(check_vmap,3), vmap_grad=(check_vmap_grad,3), jvp=(check_jvp,4),
             jacobian=(check_jacobian,2), double=(check_double,3), checkpoint=(check_checkpoint,2), same=(check_same,3),
             compile=(check_compile,.4), meta=(check_meta,4), fake=(check_fake,2))

def failure(call, kind, impl, wants=('q','k','v'), mode='plain', poison='', lost=False, spoiled=()):
    "What is wrong with this call, or None. `Refused` and `Unfit` pass."
    def stop(*_): raise TooLong
    for limit in (signal.SIGPROF, signal.SIGALRM): signal.signal(limit, stop)
    signal.setitimer(signal.ITIMER_PROF, 60)  # of the processor, which a busy machine does not use up
    signal.alarm(600)                         # of the clock, for a call that waits for ever
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return KINDS[kind][0](call, impl, wants=wants, mode=mode, poison=poison, lost=lost, spoiled=spoiled)
    except (Refused,Unfit): raise
    except TooLong: return "took more than a minute of the processor, or ten of the clock"
    except Exception as e:
        if e.__traceback__ and 'oracle.py' in traceback.extract_tb(e.__traceback__)[-1].filename: raise
        return f"raised {text_of(e)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)

# ---------------------------------------------------------------- one case

# Differences that are meant: chapter 44 says that a plain call is PyTorch's own in every respect.
SETTLED = {
    'second derivative': "PyTorch's fused attention has no second derivative; impl='dense' has one",
    'NaN query': "PyTorch's attention without padding spreads a NaN query over the gradients of all keys and values, "
                 "and over all queries where there is no key",
}

def settled(case, wrong):
    "The key of `SETTLED` that explains what is wrong, or None."
    second = case.kind=='double' and re.match(r'raised RuntimeError: derivative for aten::_scaled_dot_product', wrong)
    spread = case.kind=='value' and case.lost and re.match(r'the gradient of [kv] is wrong.*not finite', wrong)
    if case.kind=='value' and case.lost and not case.sizes['M']: spread = spread or wrong.startswith('out is wrong')
    if not second and not spread: return None
    given,_ = real(case.call())
    plain = case.impl in ('auto','sdpa') and choose(**given)=='sdpa'
    if not plain or spread and 'padding' in given: return None
    return 'second derivative' if second else 'NaN query'

def tried(case):
    "(outcome, what is wrong, the engines that computed)"
    used = set()
    try:
        with watched(used) if case.kind in ('value','repeat') else nullcontext(): wrong = case.failure()
    except Refused: return 'refused',None,used
    except Unfit: return 'unfit',None,used
    if not wrong: return 'passed',None,used
    reason = settled(case, wrong)
    return (reason,None,used) if reason else ('failed',wrong,used)

def isolated(case):
    "`tried(case)` in a process of its own, which it may kill."
    here,there = FORK.Pipe(duplex=False)
    def work():
        faulthandler.disable()  # the end of the process is the finding
        there.send(tried(case))
    child = FORK.Process(target=work)
    child.start()
    there.close()
    try: return here.recv()
    except EOFError:
        child.join()
        if child.exitcode>=0: raise RuntimeError(f'the search ended with status {child.exitcode}') from None
        return 'failed',f'killed by {signal.Signals(-child.exitcode).name}',set()
    finally: child.join()

# ---------------------------------------------------------------- many cases

def outline(wrong):
    "A failure without its numbers, so that two of a kind are one."
    wrong = re.sub(r"\(\d+(, \d+)*,?\)|\[\d+(, \d+)*\]|-?\d+(\.\d+)?(e[-+]?\d+)?|\bnan\b|-?\binf\b", '#', wrong)
    return re.sub(r' (entries|not finite|instead).*', '', wrong)[:90]

@cache
def class_of(case_kind, impl, said):
    "Hypothesis takes errors of one class for one failure, and shrinks each class."
    return type(f'{case_kind} {impl}: {said}', (AssertionError,), {})

ROUND = 25 # cases; Hypothesis varies those that it has drawn, so that the options of a long round are much alike

def search_round(counts, examples, kind, impls, dtypes, seed, run):
    "Raise the failures among cases of one kind, shrunk."
    @hypothesis.seed(seed)
    @settings(max_examples=examples, database=None, deadline=None, print_blob=False,
              phases=[Phase.generate, Phase.shrink], # explaining takes minutes
              suppress_health_check=list(HealthCheck))
    @given(cases([kind], impls, dtypes))
    def try_one(case):
        outcome,wrong,used = run(case)
        counts[kind,outcome] += 1
        counts.update(('computed by',engine) for engine in used)
        if not wrong: return
        about = f'{case.spoiled[0]} ' if case.spoiled else ''
        said = f'{wrong}\n{case.said()}\n\n{case.snippet()}\n'
        raise class_of(kind, case.impl, about+outline(wrong))(said)
    try_one()

def search(counts, examples, kinds=None, impls=None, dtypes=None, seed=0, run=tried):
    """Try about so many cases, the same each time with the same seed; raise what fails, shrunk.
    `run=isolated` finds calls that kill their process, too."""
    weights = {kind: weight for kind,(_,weight) in KINDS.items() if not kinds or kind in kinds}
    errors = []
    for kind,weight in weights.items():
        left = max(1, round(examples*weight/sum(weights.values())))
        try:
            for i in range(0, left, ROUND):
                search_round(counts, min(ROUND, left-i), kind, impls, dtypes, f'{seed}.{i}', run)
        except Exception as e: errors.append(e)
    if errors: raise ExceptionGroup(f'{len(errors)} kinds of cases fail', errors)

def report(counts):
    outcomes = dict(passed=['passed'], failed=['failed'], settled=list(SETTLED), refused=['refused'], unfit=['unfit'])
    print(f"{'':12}" + ''.join(f"{name:>9}" for name in outcomes))
    for kind in KINDS:
        row = [sum(counts[kind,x] for x in of) for of in outcomes.values()]
        if any(row): print(f"{kind:12}" + ''.join(f"{x:9}" for x in row))
    for name,reason in SETTLED.items():
        times = sum(counts[kind,name] for kind in KINDS)
        if times: print(f"settled, {times} times: {reason}")
    print("computed by " + ', '.join(f"{name} {counts['computed by',name]}" for name in ENGINES))
    print(sum(n for (kind,x),n in counts.items() if kind!='computed by' and x!='unfit'), 'cases')

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--minutes', type=float, default=0., help='rounds of so many cases, until the time is over')
    p.add_argument('--examples', type=int, default=100, help='cases [100]')
    p.add_argument('--seed', type=int, default=0, help='another one draws other cases [0]')
    p.add_argument('--impl', nargs='*', choices=['auto','dense','banded','plain','sdpa','triton'])
    p.add_argument('--kind', nargs='*', choices=list(KINDS))
    p.add_argument('--dtype', nargs='*', choices=list(DTYPES))
    p.add_argument('--isolated', action='store_true', help='each case in a process of its own, which it may kill')
    o = p.parse_args(args)
    torch.set_num_threads(1)
    counts,end = Counter(),time.monotonic()+60*o.minutes
    try:
        for i in itertools.count():
            run = isolated if o.isolated else tried
            search(counts, o.examples, o.kind, o.impl, o.dtype, o.seed+i, run)
            if time.monotonic()>=end: break
    finally: report(counts)

if __name__=='__main__': main()
