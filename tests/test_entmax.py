"Property tests of entmax: any shape, axis, mask, dtype, scale and alpha."
import subprocess, sys
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from dynattn import attention
from dynattn.alpha import entmax
from dynattn.engine.native import core
from dynattn.sparsity import support_size, topk_softmax

SETTINGS = settings(deadline=None, derandomize=True)   # how many examples: conftest.py
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
ALPHAS = st.one_of(st.sampled_from([1., 1+1e-9, 1.0001, 1.5, 2., 2+1e-9, 4.]), st.floats(1, 5))

@st.composite
def scores(draw, dtypes=FLOATS):
    "Scores [R,M]: ties, -inf, empty rows, large gaps, large offsets and non-contiguous storage included."
    R,M = draw(st.integers(0, 5)),draw(st.integers(1, 9))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    z = torch.randn(R, M, generator=g, dtype=torch.float64)*draw(st.sampled_from([0., .01, 1., 5., 1e4]))
    if draw(st.booleans()): z = z.round()
    z = (z + draw(st.sampled_from([0., 0., 1e4]))).masked_fill(torch.rand(R, M, generator=g) < draw(st.sampled_from([0., .3, .9])), -torch.inf)
    z = z.to(draw(st.sampled_from(dtypes)))
    return z.T.contiguous().T if draw(st.booleans()) else z

def by_halving(z, alpha):
    "Float64 weights; softmax where halving has too few digits."
    empty = (z==-torch.inf).all(-1, keepdim=True)
    z = z.double().masked_fill(empty, 0.)
    z = z - z.amax(-1, keepdim=True)
    if alpha-1 < 1e-6: return z.softmax(-1).masked_fill(empty, 0.)
    z,lo,hi = (alpha-1)*z,torch.full_like(z[:,:1], -1.),torch.zeros_like(z[:,:1])
    for _ in range(90):
        mid = (lo+hi)/2
        over = (z-mid).clamp(min=0).pow(1/(alpha-1)).sum(-1, keepdim=True) > 1
        lo,hi = torch.where(over, mid, lo),torch.where(over, hi, mid)
    return (z-lo).clamp(min=0).pow(1/(alpha-1)).masked_fill(empty, 0.)

@SETTINGS
@given(scores(), ALPHAS, st.booleans())
def test_weights(z, alpha, as_tensor):
    before = z.clone()
    p = entmax(z, torch.tensor(alpha, dtype=torch.float64) if as_tensor else alpha)
    assert p.dtype==z.dtype and p.shape==z.shape and torch.equal(z, before) and p.isfinite().all() and (p>=0).all()
    full = (z>-torch.inf).any(-1)
    assert not p[~full].any() and not p[z==-torch.inf].any()
    assert_close(p.double().sum(-1), full.double(), rtol=0, atol=2*torch.finfo(z.dtype).eps if z.dtype!=torch.float64 else 1e-14)
    eps = torch.finfo(z.dtype).eps if z.dtype!=torch.float64 else 0
    assert_close(p.double(), by_halving(z, alpha), rtol=eps, atol=5e-6 if z.dtype!=torch.float64 else 2e-6 if alpha>2 or alpha-1<1e-6 else 1e-12)

@SETTINGS
@given(scores(dtypes=(torch.float32, torch.float64)), ALPHAS)
def test_gradients(z, alpha):
    z,a = z.requires_grad_(),torch.tensor(alpha, dtype=z.dtype, requires_grad=True)
    p = entmax(z, a)
    weights = torch.arange(z.shape[-1], dtype=z.dtype)
    dz,da = torch.autograd.grad((p*weights).sum(), (z, a), create_graph=True)
    again = torch.autograd.grad((p*weights).sum(), (z, a), retain_graph=True)  # the chunks, not the graph
    assert dz.isfinite().all() and da.isfinite() and not dz[p==0].any()
    assert_close(again[0], dz); assert_close(again[1], da, rtol=1e-4, atol=1e-5)
    steepest = max((p.detach()[p>0]**(2-alpha)).tolist(), default=0.)  # a weight near 0 has a slope without bound for alpha > 2
    assert_close(dz.sum(-1), torch.zeros(len(z), dtype=z.dtype), rtol=0, atol=100*torch.finfo(z.dtype).eps*(1+steepest))

@SETTINGS
@given(scores(dtypes=(torch.float32, torch.float64)), st.lists(ALPHAS, min_size=5, max_size=5))
def test_a_row_does_not_feel_its_neighbours(z, alphas):
    a = torch.tensor(alphas[:len(z)], dtype=torch.float64)[:,None]
    if not len(z): return
    p = entmax(z, a)
    for i in range(len(z)): assert_close(p[i], entmax(z[i], alphas[i]), rtol=0, atol=2e-6 if z.dtype==torch.float32 else 2e-6 if alphas[i]>2 else 1e-14)
    assert torch.equal(entmax(z.T, a.T, dim=0), p.T)

def test_the_smallest_weights_beside_a_steep_row():
    "A weight of e^-488 at alpha 1.0001 has its own slope, whatever alpha the row below has."
    z = torch.tensor([[0., -476.4, -3.], [0., -.1, -.2]], dtype=torch.float64, requires_grad=True)
    alone = torch.autograd.grad(entmax(z[0], 1.0001)[0], z)[0][0]
    beside = torch.autograd.grad(entmax(z, torch.tensor([[1.0001], [2.7]], dtype=torch.float64))[0,0], z)[0][0]
    assert 0 < -alone[1] < 1e-200
    assert_close(beside, alone, rtol=1e-9, atol=0.)

@SETTINGS
@given(scores(dtypes=(torch.float64,)), st.integers(1, 12))
def test_topk_keeps_the_largest(z, k):
    p,finite = topk_softmax(z, k),(z>-torch.inf).sum(-1)
    kept = support_size(p)
    least = torch.minimum(finite, torch.tensor(k))
    underflow = (z-z.amax(-1, keepdim=True) < -700).any(-1)
    assert ((kept>=least) | underflow).all()
    for row,w in zip(z, p): assert not w.any() or row[w>0].min() >= row[w==0].max() if (w==0).any() and w.any() else True

@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(256, 700), st.integers(0, 10**6), st.sampled_from([.1, 1., 30.]), ALPHAS, st.sampled_from([torch.float32, torch.float64]))
def test_long_rows(M, seed, spread, alpha, dtype):
    "Long rows begin from groups of keys: one key far above the others, anywhere; a run of keys alone in sight."
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(4, M, generator=g, dtype=dtype)*spread
    z[0,int(torch.randint(M, (), generator=g))] += 50
    first = int(torch.randint(M-20, (), generator=g))
    z[1,:first] = z[1,first+20:] = -torch.inf
    z[2,1:] = -torch.inf
    p = entmax(z, alpha)
    assert_close(p.sum(-1), torch.ones(4, dtype=dtype), rtol=0, atol=2e-6 if dtype==torch.float32 else 1e-13)
    assert_close(p.double(), by_halving(z, alpha), rtol=0, atol=5e-6 if dtype==torch.float32 else 2e-6 if alpha>2 or alpha-1<1e-6 else 1e-11)

@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from([1.2, 1.5, 2., 3.]), st.booleans())
def test_a_key_at_the_threshold_gets_no_gradient(alpha, as_tensor):
    "Everywhere: the weight is 0, so the slope is, though at alpha = 2 it is 1 on the other side."
    gap = 1/(alpha-1)
    gap += -gap*torch.finfo(torch.float64).eps if 1+(alpha-1)*-gap < 0 else 0.
    z = torch.tensor([[0.,-gap]], dtype=torch.float64, requires_grad=True)
    p = entmax(z, torch.tensor(alpha, dtype=torch.float64) if as_tensor else alpha)
    if p[0,1]==0: assert not torch.autograd.grad(p[0,1], z)[0].any()
    q,k = torch.ones(1, 1, 1, 1, dtype=torch.float64),z.detach().view(1, 1, 2, 1)
    v = torch.tensor([1.,3.], dtype=torch.float64).view(1, 1, 2, 1)
    for impl in ('dense', 'banded' if alpha<=2 else 'auto'):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, alpha=alpha, scale=1., impl=impl)
        dq,dk,dv = torch.autograd.grad(out.sum(), leaves)
        if alpha in (1.5, 2.): assert out.item()==1 and not dq.any() and not dk.any() and dv.flatten().tolist()==[1.,0.]

def test_the_first_call_imports_no_compiler():
    code = '''
import sys, torch, torch.utils.checkpoint  # which in PyTorch 2.6 brings sympy along
before = set(sys.modules)
import dynattn
z = torch.randn(2, 3, requires_grad=True)
dynattn.entmax(z, 1.3).sum().backward()
assert not {'sympy','torch._dynamo'} & (set(sys.modules) - before)
'''
    subprocess.run([sys.executable, '-c', code], check=True)

@pytest.mark.parametrize('alpha', [1.5, 3.5])
def test_a_query_that_is_no_number_and_sees_no_key(alpha):
    q,k = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (150, 2))
    q[:,:,[1,75]] = torch.nan
    out = attention(q, k, k, window=1, alpha=alpha)
    assert out[:,:,1].isnan().all() and not out[:,:,75].any() and out[:,:,0].isfinite().all()

@pytest.mark.parametrize('alpha', [[2.7,2.7], [6.,6.], [10.,10.], [1.5,8.]], ids=str)
@pytest.mark.parametrize('learns_alpha', [False, True])
@pytest.mark.parametrize('impl,options', [('dense', {}), ('auto', dict(window=40)), ('auto', {}),
                                          ('auto', dict(window=7, n_global=1))], ids=str)
def test_steep_gradients_in_float32(alpha, learns_alpha, impl, options):
    "Far above alpha = 2 the mean under the slopes lies next to the gradient of one key, and a threshold is too coarse."
    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, 2, 60, 4, generator=g) for _ in range(4)]
    def gradients(dtype, impl):
        *heads,dout = (x.to(dtype) for x in tensors)
        leaves = [x.requires_grad_() for x in heads] + [torch.tensor(alpha, dtype=dtype, requires_grad=learns_alpha)]
        out = attention(*leaves[:3], alpha=leaves[3], scale=.5, impl=impl, **options)
        return torch.autograd.grad(out, leaves if learns_alpha else leaves[:3], dout)
    for single,double in zip(gradients(torch.float32, impl), gradients(torch.float64, 'dense')):
        assert (single-double).abs().max() < 2e-3*double.abs().max()

@pytest.mark.parametrize('alpha', [1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.])
def test_small_weights_keep_their_digits(alpha):
    "The last step goes along slopes: what bends is left out, and must be less than rounding of the scores makes"
    generator = torch.Generator().manual_seed(0)
    for keys in (3, 6, 17, 40, 300):
        z = 1.5*torch.randn(500, keys, generator=generator)
        got,want = entmax(z, alpha).double(),entmax(z.double(), alpha)
        rounding = torch.finfo(torch.float32).eps*(want**(2-alpha)+want)        # of a score, through the slope, and of the weight
        assert ((got-want).abs() <= 16*rounding+1e-15).all()

@pytest.mark.parametrize('alpha', [1.3, 2.5, 'of heads'])
def test_many_rows_take_the_memory_of_a_few(monkeypatch, alpha):
    "Without the core, rows are solved and pulled back as many at a time as stay in a cache; what comes out is the same."
    from dynattn import alpha as solver
    alpha = torch.tensor([1.,1.5,3.]).view(3, 1, 1).double().requires_grad_() if alpha=='of heads' else alpha
    z,g = torch.randn(2, 2, 3, 50, 40, dtype=torch.float64)
    z.requires_grad_()
    monkeypatch.setattr(solver, '_by_core', lambda *_: None)
    leaves = [t for t in (z, alpha) if isinstance(t, torch.Tensor)]
    def run():
        p = entmax(z, alpha)
        return p,*torch.autograd.grad(p, leaves, g)
    want,sizes = run(),[]
    def watched(work):
        def f(x, *args, **kw):
            sizes.append(x.numel())
            return work(x, *args, **kw)
        return f
    for name in ('_solve_rows','_pull'): monkeypatch.setattr(solver, name, watched(getattr(solver, name)))
    monkeypatch.setattr(solver, '_CHUNK', 1000)
    for a,b in zip(run(), want): torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert len(sizes)==24 and max(sizes)==1000, sizes

@pytest.mark.parametrize('alpha', [1-1e-3, 1., 1+1e-9])
def test_second_derivatives_on_both_sides_of_softmax(monkeypatch, alpha):
    "Central differences at alpha = 1 take a step below it, where `p^-eps` cannot overflow."
    from dynattn import alpha as solver
    monkeypatch.setattr(solver, '_by_core', lambda *_: None)
    z,a = torch.randn(1, 3, dtype=torch.float64).requires_grad_(),torch.full((1,1), alpha, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z, a: solver._apply(z, a-1 + (a==1)*solver._TINY), (z, a))

# ---- the gradient of alpha, where keys are alike

def exact_alpha_gradient(z, alpha, weight):
    "In float64, and the rounding of float32 that its sum may keep: scores [R,M], the gradient `weight` of the weights."
    alpha = torch.tensor(alpha, dtype=torch.float32).item()         # as the function gets it
    z,weight,eps = z.double(),weight.double(),alpha-1
    p = entmax(z, alpha)
    log_p = torch.where(p>0, p, 1.).log()
    slope = torch.where(p>0, p**(1-eps), 0.)
    phi = (log_p*(eps*log_p).exp()*eps-(eps*log_p).exp()+1)/eps**2
    def less_mean(x): return x-(slope*x).sum(-1, keepdim=True)/slope.sum(-1, keepdim=True)
    pull = slope*less_mean(weight)*less_mean(phi)
    unit = torch.finfo(torch.float32).eps/2
    # every phi is rounded by itself; and every term of the sum
    rounding = unit*((slope*less_mean(weight)*phi).norm(dim=-1)+pull.abs().sum(-1))
    return -pull.sum(-1),rounding

def alike(kind, n, generator):
    "Scores [3,n] of float32: equal, nearly equal, or of two heights."
    z = torch.zeros(3, n)
    if kind=='raised': z = z+37.3
    if kind=='near': z = 1e-3*torch.randn(3, n, generator=generator)
    if kind=='hardly apart': z = 1e-6*torch.randn(3, n, generator=generator)
    if kind=='two heights': z[:,n//2:] = -.1
    return z

@pytest.mark.parametrize('by_core', [True,False])
@pytest.mark.parametrize('kind', ['equal','raised','near','hardly apart','two heights'])
def test_hostile_9_alpha_gradient_of_equal_scores(monkeypatch, kind, by_core):
    """The gradients of a row's scores sum to zero but for rounding. What alpha gets from each key is large and nearly the
    same, and multiplied that rounding: the core erred by 3.3e-3 where the exact gradient is zero."""
    if not by_core: monkeypatch.setattr(core, 'library', lambda: None)
    g = torch.Generator().manual_seed(0)
    for n in (2,3,17,100,1000,10000):
        z,weight = alike(kind, n, g),torch.randn(3, n, generator=g)
        for alpha in (1.01,1.1,1.3,1.5,1.8,2.):
            want,rounding = exact_alpha_gradient(z, alpha, weight)
            of_rows = torch.full((3,1), alpha, requires_grad=True)
            (entmax(z, of_rows)*weight).sum().backward()
            assert ((of_rows.grad[:,0].double()-want).abs() <= 16*rounding).all(), (n, alpha)
            for impl in ('banded','dense'):                         # a query of ones and keys of one number
                of_heads = torch.full((3,1), alpha, requires_grad=True)
                out = attention(torch.ones(3, 1, 1, 1), z[:,None,:,None], weight[:,None,:,None], alpha=of_heads, scale=1., impl=impl)
                out.sum().backward()
                # the core has sums of n terms, one after the other
                assert ((of_heads.grad[:,0].double()-want).abs() <= (16+n**.5)*rounding).all(), (n, alpha, impl)

def test_alpha_gradient_beside_mpmath():
    "A row's objective as a function of alpha, differentiated with fifty digits."
    mp = pytest.importorskip('mpmath')
    mp.mp.dps = 50
    z,weight = [.3,.3,.3000001,-.2,.29],[1.,-2.,.5,.25,-1.5]
    def objective(alpha):
        def weights(top): return [max(1+(alpha-1)*(x-top), mp.mpf(0))**(1/(alpha-1)) for x in map(mp.mpf, z)]
        top = mp.findroot(lambda c: sum(weights(c))-1, (mp.mpf(1),mp.mpf(2)), solver='anderson')
        return sum(g*w for g,w in zip(weight, weights(top)))
    for alpha in (1.01,1.3,1.5,1.9):
        got = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        (entmax(torch.tensor(z, dtype=torch.float64), got)*torch.tensor(weight, dtype=torch.float64)).sum().backward()
        assert_close(got.grad.item(), float(mp.diff(objective, mp.mpf(alpha))), rtol=1e-11, atol=1e-13)
