"""What a cache holds: any state is refused or means what its description says, and what refuses or is interrupted changes nothing.

`python tests/test_cache_state.py SECONDS` changes states of all configurations at random, for as long."""
import copy, itertools, json, math, os, random, subprocess, sys, time
from pathlib import Path
from unittest import mock
import pytest, torch
from torch.testing import assert_close
from dynattn import Window, dense_attention
from dynattn.cache import WindowedLayer, check_rows
from dynattn.engine.native import core
from dynattn.saved import read_weights, write_weights

os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]
WIDTHS = torch.tensor([2.,5.,9.,1.])

# ---- layers of many kinds, and states of them

def tokens(n, heads, batch=2, seed=0, dtype=torch.float64, d=4):
    return torch.randn(batch, heads, n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))

def text(layer, first, n, batch=2, dtype=torch.float64):
    "q, k and v of n tokens from position `first` on."
    return [tokens(first+n, heads, batch, seed, dtype)[:,:,first:] for seed,heads in enumerate((layer.heads, layer.kv_heads, layer.kv_heads))]

def grown(options, then=lambda layer: None, n=23, batch=2, dtype=torch.float64, keep=None, steps=2):
    "A layer after a prompt and some steps, on which `then` was called."
    layer = WindowedLayer(**options)
    for first,count in [(0,n), *((n+i,1) for i in range(steps))]:
        layer.attend(*text(layer, first, count, batch, dtype), None if keep is None else keep[:,:first+count])
    then(layer)
    return layer

def recorded(layer):
    layer.record_past = True
    layer.attend(*text(layer, layer.seen, 3))

LEFT = torch.arange(60)>=torch.tensor([[0],[7]])
CONFIGS = dict(
    one_width=lambda: grown(dict(heads=2, window=8)),
    per_head=lambda: grown(dict(heads=4, window=Window.default(WIDTHS))),
    grouped=lambda: grown(dict(heads=4, kv_heads=2, window=Window.span(WIDTHS, 3.))),
    unlimited=lambda: grown(dict(heads=4, window=None)),
    leading=lambda: grown(dict(heads=4, kv_heads=2, window=Window.default(WIDTHS), n_global=3)),
    short=lambda: grown(dict(heads=2, window=2, n_global=6), n=2, steps=1),
    padded=lambda: grown(dict(heads=4, kv_heads=2, window=Window.default(WIDTHS), n_global=3), keep=LEFT),
    entmax=lambda: grown(dict(heads=4, window=4, alpha=torch.tensor([1.,1.3,1.5,2.]))),
    sink=lambda: grown(dict(heads=4, window=(5,0), sink=torch.tensor([.1,-2.,3.,0.]), softcap=2., scale=.4)),
    batch=lambda: grown(dict(heads=2, window=3), batch=5),
    nothing=lambda: grown(dict(heads=2, window=3), batch=0),
    cropped=lambda: grown(dict(heads=2, window=9), lambda layer: layer.crop(2)),
    turned=lambda: grown(dict(heads=4, window=Window.default(WIDTHS), n_global=2), lambda layer: layer.select(torch.tensor([1,0,1]))),
    recorded=lambda: grown(dict(heads=4, window=Window.default(WIDTHS)), recorded),
    single=lambda: grown(dict(heads=2, window=0), dtype=torch.float32),
    half=lambda: grown(dict(heads=2, window=5), dtype=torch.bfloat16))

def keep_of(name, batch, n):
    "Which of n tokens are real; None where all are."
    return LEFT[:batch,:n] if name=='padded' and batch==2 and n<=LEFT.shape[1] else None

def bias_of(layer, h, offset): # of head `h`, at offsets
    window = layer.options['window']
    if window is None: return torch.zeros(offset.shape, dtype=torch.float64)
    if isinstance(window, tuple): return torch.where(offset>=-window[0], 0., -math.inf).double()
    return window.replace(sigma=window.sigma[h].double()).log_mask(offset)

def described(layer, numbers, tensors, q, k, v, keep): # the newest tokens -> [B,H,n,dv] float64
    "Attention of new tokens to the keys that a state describes, each at its position, by the dense path."
    seen,(batch,_,n,_),lead = numbers['seen'],q.shape,layer.n_global
    q,k,v = q.double(),k.double(),v.double()
    copies = lead if 'padded' in tensors else 0                                # leading keys of each row, wherever it begins
    origin = torch.zeros(batch, dtype=torch.int64) if keep is None else keep.int().argmax(1)
    queries = torch.arange(seen, seen+n)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for i,group in enumerate(layer.groups):
        start = numbers['start'][i] if seen else lead
        shared = torch.tensor([*range(0 if copies else min(lead, seen)), *range(start, seen), *queries])
        far = origin[:,None]+torch.arange(copies)                              # [B,copies] positions
        place = torch.cat([far, shared.expand(batch, -1)], 1)                  # [B,M]
        twice = torch.cat([far>=start, torch.zeros(batch, len(shared), dtype=torch.bool)], 1)
        offset = place[:,None]-queries[:,None]                                 # [B,n,M]
        is_first = ((place>=origin[:,None]) & (place<origin[:,None]+lead))[:,None]
        see = (offset<=0) & ~twice[:,None]
        if keep is not None: see = see & keep.gather(1, place.clamp(max=seen+n-1))[:,None]
        members = group.kv_heads if isinstance(group.kv_heads, list) else list(range(layer.kv_heads))[group.kv_heads]
        for at,head in enumerate(members):
            old = [tensors[f'{i}.{name}'][:,at:at+1].double() for name in 'kv'] if seen else [x[:,:1,:0] for x in (k, v)]
            keys,values = (torch.cat([x, new[:,head:head+1]], 2) for x,new in zip(old, (k, v)))
            for h in range(head*layer.heads//layer.kv_heads, (head+1)*layer.heads//layer.kv_heads):
                bias = torch.where(see, bias_of(layer, h, offset).masked_fill(is_first, 0.), -math.inf)[:,None]
                alpha,sink = (x[h:h+1].double() if isinstance(x, torch.Tensor) else x for x in (layer.options['alpha'], layer.options['sink']))
                out[:,h:h+1] = dense_attention(q[:,h:h+1], keys, values, attn_mask=bias, alpha=alpha, sink=sink,
                                               scale=layer.options['scale'], softcap=layer.options['softcap'])
    return out

# ---- changes of a state

NUMBERS = 0,-1,10**6,2**31-1,2**31,2**63,10**30,True,False,.5,math.nan,math.inf,'x','3',None,[],{},[0]

def number_changes(x):
    "Other values for an entry, or for one of its own entries."
    if isinstance(x, list):
        for i,y in enumerate(x): yield from ([*x[:i], other, *x[i+1:]] for other in number_changes(y))
        yield from (x[:-1], x+x[-1:], x+[0], tuple(x), x[::-1])
    if type(x) is int: yield from (x+1, x-1, float(x))
    if isinstance(x, float): yield from (x+1, -x, 2*x)
    yield from NUMBERS

def tensor_changes(x):
    "Other tensors, and what is none."
    yield from (x.long(), x.half(), x.double(), x.bool(), x.cfloat(), x.to('meta'), x.to_sparse(), [x], None, 3, x.tolist())
    yield from (x[None], x.flatten(), x[0] if len(x) else x, torch.tensor(1.), x.repeat(*[2]*x.dim()))
    for axis,size in enumerate(x.shape):
        for n in {max(size-1, 0), size+1, 0, 10**9}:
            shape = [n if i==axis else s for i,s in enumerate(x.shape)]
            yield x.narrow(axis, 0, n) if n<=size else x.new_zeros(1).expand(shape) if n>10**6 else x.new_zeros(shape)
    yield from (x.clone()+1, x*0, torch.full_like(x, -1), torch.full_like(x, 10**6), x.flip(0), torch.nn.Parameter(x.double()) if x.is_floating_point() else x.to(torch.int32))
    if x.dim()==4: yield from (x.transpose(1, 2).contiguous().transpose(1, 2), torch.full_like(x, math.nan), x.transpose(1, 2), x[:1].expand(x.shape) if len(x) else x)

def changes(state, other):
    "Every state that differs from `state` in one entry, or has something of `other`; with a name."
    numbers,tensors = state
    for name,x in numbers.items():
        for i,wrong in enumerate(number_changes(x)): yield f'{name} {i}',({**numbers, name: wrong},tensors)
        yield f'no {name}',({key: y for key,y in numbers.items() if key!=name},tensors)
        if name in other[0]: yield f'other {name}',({**numbers, name: other[0][name]},tensors)
    for name,x in tensors.items():
        for i,wrong in enumerate(tensor_changes(x)): yield f'{name} {i}',(numbers,{**tensors, name: wrong})
        yield f'no {name}',(numbers,{key: y for key,y in tensors.items() if key!=name})
        if name in other[1]: yield f'other {name}',(numbers,{**tensors, name: other[1][name]})
        for key,y in tensors.items(): yield f'{name} as {key}',(numbers,{**tensors, name: y})
    some = next(iter(tensors.values()), torch.zeros(1))
    for name in ('9.k','padded','',0): yield f'more {name}',(numbers,{**tensors, name: some})
    yield 'padded',(numbers,{**tensors, 'padded': torch.zeros(len(some), dtype=torch.int64)})
    yield 'more',({**numbers, 'more': 1},tensors)
    for i,wrong in enumerate((None, [], 3, 'x', {})):
        yield f'numbers {i}',(wrong,tensors)
        yield f'tensors {i}',(numbers,wrong)
    yield 'numbers of the other',(other[0],tensors)
    yield 'tensors of the other',(numbers,other[1])
    if numbers['seen']: # the report's: a later first key, and no key at all
        yield 'report',({**numbers, 'start': [10**6]*len(numbers['start'])},{name: x[:,:,:0] if x.dim()==4 else x for name,x in tensors.items()})
        yield 'later',({**numbers, 'start': [x+1 for x in numbers['start']]},{name: x[:,:,:-1] if x.dim()==4 else x for name,x in tensors.items()})

def goes_on(layer, name):
    "Outputs of the next token and two more."
    out = []
    for n in (1, 2):
        batch = layer.batch if layer.seen else 2
        dtype = layer.groups[0].k.dtype if layer.seen else torch.float64
        keep = keep_of(name, batch, layer.seen+n)
        out.append(layer.attend(*text(layer, 30, n, batch, dtype), keep))
    return out

def judge(name, original, changed, which): # a layer, a state that differs from its own
    """Whether the state is refused. A refusal changes nothing; otherwise both engines compute what it says."""
    found = []
    for library in (core.library, lambda: None):
        layer = copy.deepcopy(original)
        before = vars(layer).copy()
        with mock.patch.object(core, 'library', library):
            try: layer.load_state(*changed)
            except (TypeError,ValueError):
                assert all(vars(layer)[entry] is x for entry,x in before.items()), (name, which)
                found.append(None)
                continue
            loaded = copy.deepcopy(layer)
            try: found.append(goes_on(layer, name))
            except (TypeError,ValueError): found.append(None) # keys of another width, say
    assert (found[0] is None)==(found[1] is None), (name, which)
    if found[0] is None: return True
    if not all(x.isfinite().all() for x in changed[1].values()): return False
    q,k,v = text(loaded, 30, 1, loaded.batch if loaded.seen else 2, loaded.groups[0].k.dtype if loaded.seen else torch.float64)
    expected = described(loaded, *changed, q, k, v, keep_of(name, len(q), loaded.seen+1))
    eps = 1e-10 if q.dtype==torch.float64 else 8*torch.finfo(q.dtype).eps
    close = dict(atol=eps*max([1., *(x.double().abs().max().item() for x in changed[1].values() if x.numel())]), rtol=eps)
    for one in found: assert_close(one[0].double(), expected, **close, msg=lambda text: f'{name}, {which}: {text}')
    for one,two in zip(*found): assert_close(one, two, **close, msg=lambda text: f'{name}, {which}: {text}')
    return False

def fuzz(seconds=0., every=1, seed=0):
    "Changed states of all configurations, every so-manieth; afterwards two changes of a state at a time, for so long."
    rng,count,refused = random.Random(seed),0,0
    made = {name: make() for name,make in CONFIGS.items()}
    for name,layer in made.items():
        assert not judge(name, layer, layer.state(), 'as it was')
        later = copy.deepcopy(layer)
        goes_on(later, name)
        for other in (later, made[rng.choice(list(made))]):
            for i,(which,changed) in enumerate(changes(layer.state(), other.state())):
                if i%every!=seed%every: continue
                refused += judge(name, layer, changed, which)
                count += 1
    deadline = time.monotonic()+seconds
    while time.monotonic()<deadline:
        name,other = rng.choice(list(made)),rng.choice(list(made))
        once = rng.choice(list(changes(made[name].state(), made[other].state())))
        entries = [(part,entry) for part in (0, 1) if isinstance(once[1][part], dict) for entry in once[1][part]]
        again = rng.choice(list(changes(made[name].state(), made[other].state())))
        both = tuple(dict(a) | {k: x for k,x in b.items() if k not in old or x is not old[k]} if isinstance(a, dict) and isinstance(b, dict) else a
                     for a,b,old in zip(once[1], again[1], made[name].state()))
        refused += judge(name, made[name], both, f'{once[0]}, {again[0]}')
        count += 1
    print(f'{count} states, {refused} refused')

if __name__=='__main__':
    if sys.argv[1:2]==['--every']: fuzz(every=int(sys.argv[2]), seed=int(sys.argv[3]))
    else: fuzz(float(sys.argv[1]))
