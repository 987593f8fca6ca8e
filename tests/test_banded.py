"""The band against the dense oracle in float64: random shapes, windows, masks and options, gradients included.

500 cases; DYNATTN_EXAMPLES=20000 for more."""
import os, random, time
import pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from dynattn.dense import dense_attention
from dynattn.band import attention as band
from dynattn.band.attention import BandWeights, Tiled, banded_attention
from dynattn.band.engines import Inputs
from dynattn.ops import attention
from dynattn.padding import PaddingMask
from dynattn.window import Window

EXAMPLES = int(os.environ.get('DYNATTN_EXAMPLES', 500))
F64 = torch.float64

@st.composite
def shapes(draw):
    h = draw(st.sampled_from([1,2,4]))
    n = draw(st.one_of(st.integers(1, 24), st.sampled_from([63,64,65,130,200])))
    m = n if draw(st.booleans()) else draw(st.integers(1, 40))
    return dict(B=draw(st.integers(1, 2)), H=h, Hkv=draw(st.sampled_from([x for x in (1,2,4) if h%x==0])), N=n, M=m, d=draw(st.sampled_from([1,3,8])), dv=draw(st.sampled_from([1,3,8])))

SMOOTH = dict(edge={}, gaussian={}, ramp=dict(ramp=2.), tanh=dict(p=4.), power=dict(p=3., cut=.3))

@st.composite
def windows(draw, s):
    "None, an int, a pair, or a soft window with its sigma."
    kind = draw(st.sampled_from(['none','int','pair','soft','soft','soft']))
    side = st.one_of(st.none(), st.integers(0, 12))
    if kind=='none': return None
    if kind=='int': return draw(st.integers(0, s['M']+5))
    if kind=='pair': return draw(side),draw(side)
    smooth,unit = draw(st.sampled_from(list(SMOOTH))),draw(st.sampled_from(['tokens','tokens','fraction']))
    options = dict(SMOOTH[smooth], smooth=smooth, unit=unit, apply=draw(st.sampled_from(['inside','inside','after'])), reach=draw(st.one_of(st.none(), st.tuples(side, side))))
    if smooth not in ('ramp','edge'): options['curve'] = draw(st.sampled_from(['bell','normal']))
    shape = draw(st.sampled_from([(), (s['H'],), (s['B'],s['H'])]))
    sigma = .1+torch.rand(shape, dtype=F64)*(draw(st.sampled_from([1.,8.,40.])) if unit=='tokens' else .8)
    return Window(sigma.requires_grad_(), **options)

@st.composite
def cases(draw):
    s = draw(shapes()); seed = draw(st.integers(0, 2**31))
    torch.manual_seed(seed)
    loud = draw(st.sampled_from([1.]*8+[30.]))
    q,k,v = (torch.randn(s['B'], h, n, d, dtype=F64)*f for h,n,d,f in ((s['H'],s['N'],s['d'],loud),(s['Hkv'],s['M'],s['d'],loud),(s['Hkv'],s['M'],s['dv'],1.)))
    o = dict(window=draw(windows(s)), is_causal=draw(st.booleans()), n_global=draw(st.sampled_from([0,0,0,1,3])), q_offset=draw(st.sampled_from([0,0,0,-4,-(s['N']//2),1,s['M']-1])))
    keep = draw(st.sampled_from(['all','all','lengths','holes']))
    if keep=='lengths': o['padding'] = PaddingMask.from_lengths(torch.randint(0, s['M']+1, (s['B'],)), s['M'])
    if keep=='holes': o['padding'] = PaddingMask(torch.rand(s['B'], s['M'])<draw(st.sampled_from([.2,.8])))
    per_head = st.sampled_from([(s['H'],), (s['B'],s['H'])])
    if draw(st.integers(0, 2))==0: o['rel_bias'] = torch.randn(*draw(per_head), 2*draw(st.integers(0, 6))+1, dtype=F64, requires_grad=True)
    if draw(st.integers(0, 2))==0: o['alpha'] = (1+draw(st.sampled_from([1.,1.,3.]))*torch.rand(draw(per_head), dtype=F64)).requires_grad_()
    if draw(st.integers(0, 3))==0: o['scale'] = draw(st.sampled_from([1.,.05]))
    return (q,k,v),o

@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    "What a path forgets to write cannot look right by chance."
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)

def tiles_only(m):
    "The tiles of chapter 32 serve every call of softmax."
    m.setattr(band, 'short_engine', lambda *_: None)
    m.setattr(band, 'FEW_PAIRS', 0)

def one_by_one(widths, *_): return [slice(x, x+1) for x in range(len(widths))]

def learned(o): return [x for x in (getattr(o['window'], 'sigma', None),o.get('rel_bias'),o.get('alpha')) if x is not None]

@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.booleans())
def test_equals_dense(case, alone):
    x,o = case
    equals_dense(x, o)
    with pytest.MonkeyPatch.context() as m:
        tiles_only(m)
        if alone: m.setattr(band, 'sums_groups', one_by_one); m.setattr(band, 'rows_groups', one_by_one)  # small heads are done together else
        equals_dense(x, o)

def equals_dense(x, o):
    leaves = [t.requires_grad_() for t in x]+learned(o)
    a,b = dense_attention(*x, **o),banded_attention(*x, **o)
    loud = max(1., (x[0].abs().max()*x[1].abs().max()).item()/100)  # scores of 1e4 carry an error of their own
    assert_close(b, a, rtol=0, atol=1e-10*loud)
    g = torch.randn_like(a)
    for s,t in zip(*(torch.autograd.grad(y, leaves, g, materialize_grads=True) for y in (b,a))): assert_close(s, t, rtol=1e-10*loud, atol=1e-10*loud)

@pytest.mark.parametrize('n,m', [(1300,48),(2047,31),(1025,63),(1024,64),(1400,47),(300,218),(2,20000)])
def test_few_pairs_go_back_as_they_came(n, m):
    "Few pairs are one rectangle forward; the engine of the backward pass must read what that left."
    torch.manual_seed(n)
    q,k,v = torch.randn(1, 1, n, 4, dtype=F64),*torch.randn(2, 1, 1, m, 4, dtype=F64)
    for width in (.5, 9., 1e5):
        equals_dense((q, k, v), dict(window=Window.default(torch.tensor([width], dtype=F64, requires_grad=True)), q_offset=m-n))

@pytest.mark.parametrize('causal', [False,True])
@pytest.mark.parametrize('broken', [False,True])
@pytest.mark.parametrize('n_global', [0,2])
@pytest.mark.parametrize('n,q_offset', [(7,0),(7,-3),(40,0),(40,-3),(130,0),(130,-70),(130,60)])
def test_heads_together_are_heads_alone(n, q_offset, n_global, broken, causal):
    torch.manual_seed(n)
    q,k,v = torch.randn(3, 2, 4, n, 3, dtype=F64)
    if broken: q[0,2,n//2] = float('nan')
    sigma = torch.tensor([1.,7.,3.,12.], dtype=F64)[torch.randperm(4)]
    o = dict(is_causal=causal, n_global=n_global, q_offset=q_offset, padding=PaddingMask.from_lengths(torch.tensor([n,n//2]), n))
    def run(groups):
        leaves = [x.clone().requires_grad_() for x in (q,k,v,sigma)]
        with pytest.MonkeyPatch.context() as m:
            m.setattr(band, 'sums_groups', groups)
            tiles_only(m)
            out = banded_attention(*leaves[:3], window=Window.default(leaves[3]), **o)
            assert broken or out.isfinite().all()
            return out,*torch.autograd.grad(out.nan_to_num(0.).sin().sum(), leaves)
    for a,b in zip(run(lambda widths, n: [slice(0, 3),slice(3, len(widths))]), run(one_by_one)): assert_close(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)

@settings(max_examples=EXAMPLES//10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_weights(case):
    x,o = case
    out,w = banded_attention(*x, return_weights=True, **o)
    dense = dense_attention(*x, return_weights=True, **o)[1]
    assert isinstance(w, BandWeights) and not w.band.requires_grad
    assert_close(w.dense(), dense.detach(), rtol=0, atol=1e-8)

@settings(max_examples=EXAMPLES//10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.sampled_from([torch.float32,torch.bfloat16,torch.float16]))
def test_narrow_dtypes(case, dtype):
    "The error against float64 is at most twice the dense path's own, or what rounding the result costs, forward and backward."
    (q,k,v),o = case
    x = [(t/t.abs().max().clamp_min(1)*3).to(dtype).requires_grad_() for t in (q,k,v)]
    exact = dense_attention(*(t.double() for t in x), **o)
    g = torch.randn_like(exact).to(dtype)
    want = exact,*torch.autograd.grad(exact, x, g.double(), materialize_grads=True)
    def errors(f):
        y = f(*x, **o)
        assert y.dtype==dtype
        return [(a.double()-b.double()).norm() for a,b in zip((y,*torch.autograd.grad(y, x, g, materialize_grads=True)), want)]
    for mine,dense,b in zip(errors(banded_attention), errors(dense_attention), want):
        assert mine <= max(2*dense, torch.finfo(dtype).eps/2*b.norm()) + 1e-5*(b.norm()+g.double().norm()+1)

@settings(max_examples=EXAMPLES//10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_padding_counts_for_nothing(case):
    "NaN in padded keys and values, and twice the same bits."
    (q,k,v),o = case
    if 'padding' not in o: return
    out = banded_attention(q, k, v, **o)
    keep = o['padding'].keep[:,None,:,None]
    k2,v2 = (t.masked_fill(~keep, torch.nan).requires_grad_() for t in (k,v))
    again = banded_attention(q, k2, v2, **o)
    assert torch.equal(out, again)
    for g in torch.autograd.grad(again.sum(), (k2,v2)): assert g.isfinite().all() and (g.masked_select(~keep)==0).all()

class Largest(TorchDispatchMode):
    "The most elements that any result of an operation holds in memory."
    most = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.most = max([self.most]+[t.untyped_storage().nbytes()//t.element_size() for t in tree_leaves(out) if isinstance(t, torch.Tensor)])
        return out

@pytest.mark.parametrize('alpha', [None,1.5])
def test_nothing_quadratic(alpha):
    "The largest tensor of a call grows as N at most."
    def largest(n):
        q = torch.randn(1, 1, n, 4)
        inputs = Inputs(q=q, k=q, v=q, scale=.5, left=[[8]], right=[[8]], alpha=None if alpha is None else [[alpha]], n_global=1)
        with Largest() as mode: Tiled.forward(inputs)
        return mode.most
    threads = torch.get_num_threads(); torch.set_num_threads(1)
    try: assert largest(32768) <= max(2.1*largest(16384), 2**18)
    finally: torch.set_num_threads(threads)

def test_threads_give_the_same_bits():
    threads = torch.get_num_threads()
    q = torch.randn(1, 6, 300, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sigma = torch.tensor([1.,5,20,60,100,300], requires_grad=True)
    def run(n):
        torch.set_num_threads(n)
        return torch.autograd.grad(banded_attention(q, q, q, window=Window.default(sigma)).square().sum(), (q,sigma))
    try:
        two,again = run(2),run(2)
        assert all(torch.equal(a, b) for a,b in zip(two, again))
        for a,b in zip(two, run(1)): assert_close(a, b)
    finally: torch.set_num_threads(threads)

@pytest.mark.parametrize('kv,dtype', [(4,torch.float32),(2,torch.float32),(2,torch.bfloat16)])
def test_operator(kv, dtype):
    "Schema, shapes and strides of the results, and gradients, as PyTorch's own checker sees them; inputs in the layout of a projection."
    q,k,v = (torch.randn(2, 9, h, 8, dtype=dtype).transpose(1, 2).requires_grad_() for h in (4,kv,kv))
    sigma,alpha,bias = (x.requires_grad_() for x in (4*torch.rand(2, 4), 1+torch.rand(4), torch.randn(4, 5)))
    window,off = Window.default(sigma.detach()),torch.arange(-8, 9)
    vectors = window.mask(off),window.dmask(off),window.half_width(9)
    args = q,k,v,sigma,alpha,bias,torch.ones(2, 9, dtype=torch.bool),*vectors,None,-1,-1,1,0,.5,0.,False,False,False,[True,True,True]
    torch.library.opcheck(torch.ops.dynattn.band, args, test_utils=('test_schema','test_faketensor','test_autograd_registration','test_aot_dispatch_static'))

def test_inference_mode():
    q = torch.randn(1, 4, 70, 8)
    with torch.inference_mode(): a = banded_attention(q, q, q, window=3)
    assert torch.equal(a, banded_attention(q, q, q, window=3))

@pytest.mark.parametrize('alpha', (None,1.5))
@pytest.mark.parametrize('width', (3,40))
def test_dropout_is_that_of_the_weights_it_returns(alpha, width):
    "Heads and sequences drop different weights, as many as asked, and the weights handed out are those the output was made with."
    q,k = torch.randn(2, 2, 3, 96, 8, dtype=torch.double)
    unit = torch.eye(96, dtype=torch.double).expand(2, 3, -1, -1)
    options = dict(window=width, alpha=alpha, n_global=1, dropout_p=.25)
    out,weights = banded_attention(q, k, unit, return_weights=True, **options)
    assert_close(weights.dense(), out)
    torch.manual_seed(5); one = banded_attention(q, k, unit, **options)
    torch.manual_seed(5); assert torch.equal(one, banded_attention(q, k, unit, **options))
    whole = dense_attention(q, k, unit, **{**options, 'dropout_p': 0.})
    seen = whole>0
    gone = [(seen & (one==0))[b,h] for b in range(2) for h in range(3)]
    assert not any(torch.equal(x, y) for i,x in enumerate(gone) for y in gone[:i])
    assert abs(sum(x.sum() for x in gone)/seen.sum()-.25) < .03
    assert_close(one, torch.where(one==0, 0., whole/.75))

@pytest.mark.parametrize('short', [True,False])
@pytest.mark.parametrize('kv_heads', [4,2])
@pytest.mark.parametrize('width', [5.,90.])
def test_dropout_in_training(width, kv_heads, short, monkeypatch):
    "Output and all gradients are those of the dense weights times the same factors, in each engine."
    if not short: tiles_only(monkeypatch)
    q,k,v = (torch.randn(3, h, 90, 8, dtype=F64, requires_grad=True) for h in (4, kv_heads, kv_heads))
    sigma = width*(.5+torch.rand(3, 4, dtype=F64)); sigma.requires_grad_()
    options = dict(window=Window.default(sigma), n_global=1, padding=PaddingMask(torch.ones(3, 90, dtype=torch.bool)))
    def run(v): torch.manual_seed(3); return banded_attention(q, k, v, dropout_p=.25, **options)
    unit = torch.eye(90, dtype=F64).expand(3, kv_heads, -1, -1)
    kept = run(unit).detach()!=0
    out,wanted = run(v),(dense_attention(q, k, unit, **options)*kept/.75) @ v.repeat_interleave(4//kv_heads, 1)
    assert_close(out, wanted)
    dout = torch.randn_like(out)
    for a,b in zip(*(torch.autograd.grad(x, (q,k,v,sigma), dout) for x in (out, wanted))): assert_close(a, b)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[:,0], kept[:,1])

@pytest.mark.parametrize('dv', [1,16])
@pytest.mark.parametrize('short', [True,False])
def test_a_lost_query_without_a_key_sends_nothing_back(dv, short, monkeypatch):
    "Queries 2 and 3 see no key; 2 is NaN, and so is 1, which sees one."
    if not short: tiles_only(monkeypatch)
    q,k,v = (torch.randn(1, 1, n, d, dtype=F64) for n,d in ((4,16),(1,16),(1,dv)))
    q[...,1:3,:] = torch.nan
    sigma = torch.tensor([1.2], dtype=F64)
    leaves = [x.requires_grad_() for x in (q,k,v,sigma)]
    a,b = (f(q, k, v, window=Window.default(sigma)) for f in (dense_attention,banded_attention))
    assert_close(b, a, equal_nan=True)
    g = torch.ones_like(a)
    for s,t in zip(*(torch.autograd.grad(y, leaves, g) for y in (b,a))): assert_close(s, t, rtol=0, atol=1e-12)

REACH = 20
ONE_QUERY = dict(
    hard=dict(window=REACH), soft=dict(window=Window(torch.tensor([2.,REACH-1.]), smooth='ramp', ramp=1.)),
    alpha=dict(window=REACH, alpha=torch.tensor([1.5,1.7])), leading=dict(window=REACH, n_global=3),
    soft_leading=dict(window=Window(torch.tensor([2.,REACH-1.]), smooth='ramp', ramp=1.), n_global=3),
    sink=dict(window=REACH, sink=torch.zeros(2)), softcap=dict(window=REACH, softcap=2.),
    bias=dict(window=REACH, rel_bias=torch.ones(2, 2*REACH+1)), sharp=dict(window=REACH, sink=torch.zeros(2), alpha=1.5))

@pytest.mark.parametrize('name', ONE_QUERY)
def test_one_query_costs_its_window(name):
    "What lies outside is not even multiplied, so a cache of 65,536 keys takes about the time of one of 512"
    options = dict(is_causal=True, **ONE_QUERY[name])
    def best(keys):
        g = torch.Generator().manual_seed(0)
        q,k,v = torch.randn(1, 2, 1, 16, generator=g),*torch.randn(2, 1, 2, keys, 16, generator=g)
        k[:,:,3:-REACH-1] = v[:,:,3:-REACH-1] = torch.nan
        if not options.get('n_global'): k[:,:,:3] = v[:,:,:3] = torch.nan
        taken = []
        with torch.no_grad():
            for _ in range(15):
                began = time.process_time()
                out = attention(q, k, v, q_offset=keys-1, **options)
                taken.append(time.process_time()-began)
        assert out.isfinite().all()
        return min(taken)
    assert best(2**16) < 3*best(2**9)

@pytest.mark.parametrize('heads,n,m', [(1,200,200), (2,150,150), (1,1,300), (4,9,9)])
def test_few_scores_of_entmax_have_a_backward_that_knows_their_shift(heads, n, m):
    "In one piece, or in a band where a head has more pairs: forward and backward must choose alike."
    g = torch.Generator().manual_seed(0)
    q,k,v,dout = (torch.randn(1, heads, x, 8, dtype=torch.float64, generator=g) for x in (n, m, m, n))
    sigma,alpha = torch.linspace(5, 20, heads).double(),torch.linspace(1.2, 1.9, heads).double()
    leaves = [x.requires_grad_() for x in (q, k, v, sigma, alpha)]
    outs = [f(q, k, v, alpha=alpha, window=Window.default(sigma), is_causal=True, q_offset=m-n)
            for f in (banded_attention, dense_attention)]
    assert_close(*outs, rtol=0, atol=1e-10)
    for a,b in zip(*(torch.autograd.grad(out, leaves, dout) for out in outs)): assert_close(a, b, rtol=0, atol=1e-10)
