"""The core in C++: memory it may not touch and memory it must write, threads, processes and instruction sets.

`python tests/test_native.py [EXAMPLES]` is the part that runs in a process of its own, with each instruction set."""
import ctypes, faulthandler, itertools, json, math, mmap, os, re, shutil, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
import pytest, torch
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from dynattn.alpha import entmax
from dynattn.family import plain_entmax
from dynattn.engine.operator import banded_attention
from dynattn.engine.plan import prepare
from dynattn.engine.call import Call, takes
from dynattn.engine.fields import PER_HEAD
from dynattn.engine.dense import dense_attention
from dynattn.engine.native import core
from dynattn.engine.ops import attention
from dynattn.padding import PaddingMask
from dynattn.window import Window

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from test_banded import cases, learned

pytestmark = pytest.mark.skipif(core.library() is None, reason='no compiled core')
SETS = [s for s in ('generic','avx2','avx512','bf16','amx') if (Path(core.__file__).parent/f'core_{s}.so').exists()]
BEST = dict(AVX512=3, AVX2=2).get(torch.backends.cpu.get_cpu_capability(), 1) # how many of them this processor runs
OWN = (core.info()['library'] or '')[5:-3]                                           # of a library of one's own, nothing
if OWN in SETS and core.library().dynattn_tiles(): BEST = 1+SETS.index(OWN)

@takes(Call)
def record(call):
    "The record of a call."
    return call

@pytest.mark.parametrize('name', SETS)
def test_compiled_with_the_flags_meant(name):
    "A library holds its compiler's flags; the last of a kind counts, and Python's own -fwrapv comes first."
    binary = (Path(core.__file__).parent/f'core_{name}.so').read_bytes()
    for kind,meant in (('-f(?:no-)?wrapv','-fno-wrapv'), ('-O[0-9s]','-O3'), ('-ffp-contract=[a-z]*','-ffp-contract=fast')):
        assert re.findall(kind.encode(), binary)[-1:]==[meant.encode()]
    if name!='generic': assert dict(avx2=b'-march=x86-64-v3', avx512=b'-march=x86-64-v4', bf16=b'-mavx512bf16', amx=b'-march=x86-64-v4')[name] in binary

# ---- memory between two pages that nobody may touch

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype,LIBC.mmap.argtypes = ctypes.c_void_p,[ctypes.c_void_p,ctypes.c_size_t,*[ctypes.c_int]*3,ctypes.c_long]
LIBC.mprotect.argtypes = ctypes.c_void_p,ctypes.c_size_t,ctypes.c_int

def guarded(x, at_end):
    "A copy of a tensor that ends where a forbidden page begins, or begins where one ends; its strides stay."
    page,span = mmap.PAGESIZE,1+sum((n-1)*s for n,s in zip(x.shape, x.stride()))
    if not x.numel(): return x
    size = span*x.element_size()
    inner = -(-size//page)*page
    base = LIBC.mmap(None, inner+2*page, mmap.PROT_READ|mmap.PROT_WRITE, mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS, -1, 0)
    assert not LIBC.mprotect(base, page, 0) and not LIBC.mprotect(base+page+inner, page, 0)
    first = base+page+(inner-size if at_end else 0)
    flat = torch.frombuffer((ctypes.c_char*size).from_address(first), dtype=x.dtype)
    LIVE.append((base,inner+2*page))
    return flat.as_strided(x.shape, x.stride()).copy_(x)
LIVE = []
def release():
    for base,size in LIVE: LIBC.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))
    LIVE.clear()

NEW = torch.Tensor.new_empty,torch.empty_like,torch.empty,torch.empty_strided
class Guarded(TorchFunctionMode):
    "New memory is guarded, and full of NaN."
    def __init__(self, at_end): super().__init__(); self.at_end = at_end
    def __torch_function__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        return guarded(out.fill_(torch.nan if out.is_floating_point() else 255), self.at_end) if f in NEW else out

def exact_case(case, dtype, projected):
    "A call in `dtype`, its layout, and what it should give, from the dense attention in float64."
    (q,k,v),o = case
    loud = max(1., (q.abs().max()*k.abs().max()).item()/100)    # scores of 1e4 carry an error of their own
    if dtype!=torch.float64 and loud>1: tolerance = None
    else: tolerance = {torch.float64: 1e-10, torch.float32: 1e-3}.get(dtype, .1)*loud
    rounded = [t.to(dtype).double().requires_grad_() for t in (q,k,v)]
    leaves = dict(q=rounded[0], k=rounded[1], v=rounded[2], sigma=getattr(o['window'], 'sigma', None), alpha=o.get('alpha'),
                  rel_bias=o.get('rel_bias'), sink=o.get('sink'))
    leaves = {name: t for name,t in leaves.items() if t is not None}
    out = dense_attention(*rounded, **o)
    dout = torch.randn_like(out).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), dout.double(), materialize_grads=True)
    def lay(t):
        t = t.detach().to(dtype)
        return t.transpose(1, 2).contiguous().transpose(1, 2) if projected else t.contiguous()
    plan,x = prepare(record(*map(lay, rounded), **o))
    x = x._replace(**{name: t.detach() for name,t in zip(x._fields, x) if t is not None})
    return plan,x,lay(dout),dict(out=out.detach(), **dict(zip(leaves, grads))),tolerance

def same_bits(a, b):
    "Of two calls; tiles round weights to bfloat16 where no gradient follows, and keep the rest of them where one does."
    if a.dtype!=torch.bfloat16 or not core.library().dynattn_tiles(): assert torch.equal(a, b)
    else: assert (a.double()-b.double()).abs().max() <= b.double().abs().max()/64

def between_guards(exact, at_end):
    "Run it with inputs and results between guards, and compare: right, complete, and nothing else is touched."
    plan,x,dout,want,tolerance = exact
    kept_as_is = 'segments','seed'                                          # read by Python only
    x = x._replace(**{n: guarded(t, at_end) for n,t in zip(x._fields, x) if t is not None and n not in kept_as_is})
    with Guarded(at_end):
        out,kept,lse = core.forward(plan, x)
        grads = core.backward(plan, x, guarded(dout, at_end), out, kept, lse, x.learning)
        same_bits(core.forward(plan, x, learns=False)[0], out)              # without what a backward pass needs
    assert not lse.isnan().any() and (kept is None or not kept.isnan().any())
    for name,got in (('out',out),*grads.items()):
        assert got.isfinite().all(), name
        if tolerance is None or name not in want: continue                  # a table's gradient goes on to its sigma
        assert (got.double()-want[name]).abs().max() <= tolerance*(want[name].abs().max()+1), name
    release()

DTYPES = st.sampled_from([torch.float64,torch.float64,torch.float32,torch.bfloat16,torch.float16])

def float32_is_right_to_millionths():
    "Largest error over largest value, of everything, for a friendly input and whole vectors or not."
    worst = {}
    for n,d,width,alpha in ((33,32,3.,None), (130,64,20.,None), (700,128,60.,None), (130,40,900.,None), (130,64,20.,1.5), (300,32,30.,1.2)):
        torch.manual_seed(n)
        x = [torch.randn(2, h, n, d) for h in (4,2,2)]
        sigma = torch.rand(2, 4)*width
        def run(f, dtype):
            leaves = [t.to(dtype).requires_grad_() for t in (*x,sigma)]
            torch.manual_seed(0)
            y = f(*leaves[:3], window=Window.default(leaves[3]), alpha=alpha)
            return y,*torch.autograd.grad(y, leaves, torch.randn(2, 4, n, d).to(dtype))
        for name,a,b in zip(('out','q','k','v','sigma'), run(banded_attention, torch.float32), run(dense_attention, torch.float64)):
            worst[name] = max(worst.get(name, 0), ((a.double()-b).abs().max()/b.abs().max()).item())
    print(core.info()['library'], {k: f'{e:.1e}' for k,e in worst.items()})
    for name,bound in dict(out=1.2e-6, q=2e-6, k=2e-6, v=2e-6, sigma=6e-6).items(): assert worst[name] <= bound, (name,worst)

def test_an_alpha_above_two_is_nan_and_never_another_law():
    "Where nobody could look at its value, in a compiled program; and `auto` takes the dense path where somebody can."
    plan,x = prepare(record(*torch.randn(3, 1, 2, 20, 8), alpha=torch.tensor([1.5,2.])))
    for high in (2.001,math.inf,math.nan):
        steep = x._replace(alpha=torch.tensor([1.5,high]))
        out,kept,lse = core.forward(plan, steep)
        assert out[:,1].isnan().all() and out[:,0].isfinite().all()
        dq = core.backward(plan, steep, torch.ones_like(out), out, kept, lse, steep.learning)['q']
        assert (dq[:,1]==0).all() and dq[:,0].any()
    assert core.forward(plan, x)[0].isfinite().all()
    assert_close(attention(*x[:3], alpha=2.5, window=3), dense_attention(*x[:3], alpha=2.5, window=3))
    with pytest.raises(ValueError, match='alpha: expected 1 to 2'): attention(*x[:3], alpha=torch.tensor([2.5]), impl='banded')

def zeros_of_long_rows():
    "Rows long enough for keys to be dropped: few live ones and many, all options, gradients included, in float64."
    def normal(*shape, seed): return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    keep = torch.rand(2, 333, generator=torch.Generator().manual_seed(0)) < .8
    segments = torch.cat((torch.zeros(2, 101),torch.ones(2, 130),torch.full((2,102), 2)), 1).long()
    sink,bias = normal(4, seed=8).requires_grad_(),normal(4, 9, seed=9).requires_grad_()
    for i,(sharp,more) in enumerate([(1,{}), (3,dict(sink=sink)), (.3,dict(rel_bias=bias, n_global=3)), (1,dict(segments=segments)),
            (2,dict(padding=PaddingMask(keep), n_global=70, window=40)), (2,dict(is_causal=True, softcap=3.)), (1,dict(window=Window.default(30.).replace(apply='after')))]):
        q,dout = normal(2, 4, 333, 8, seed=i)*sharp,normal(2, 4, 333, 8, seed=20+i)
        k,v = normal(2, 2, 2, 333, 8, seed=40+i)
        if i==3: v[0,0,150,2] = math.inf                                  # a text whose blocks have one query each
        leaves = [x.requires_grad_() for x in (q,k,v,torch.tensor([1.01,1.3,1.5,2.], dtype=torch.float64))]
        leaves += [x for x in (more.get('sink'),more.get('rel_bias')) if x is not None]
        outs = [f(*leaves[:3], alpha=leaves[3], **more) for f in (banded_attention,dense_attention)]
        assert_close(*outs, rtol=0, atol=1e-11, equal_nan=True)
        seen = dout.masked_fill(~outs[1].isfinite(), 0.)
        for a,b in zip(*(torch.autograd.grad(out, leaves, seen) for out in outs)):
            fine = torch.ones_like(b, dtype=torch.bool) if i!=3 else b.isfinite()
            if i==3 and a.shape==q.shape: fine = fine & outs[1].isfinite().all(-1, keepdim=True) # a row that is lost is lost
            assert_close(a[fine], b[fine], rtol=0, atol=1e-9)

    leaves = [normal(1, 1, n, 4, seed=seed).requires_grad_() for n,seed in ((1,60),(1500,61),(1500,62))] # a bit stands for four keys
    ours,dense = (torch.autograd.grad(f(*leaves, alpha=1.5).square().sum(), leaves) for f in (banded_attention,dense_attention))
    for a,b in zip(ours, dense): assert_close(a, b, rtol=0, atol=1e-9)

def test_zeros_of_long_rows(): zeros_of_long_rows()

def most_keys_stay_and_few_do():
    "Bits of the first block: where a sample says that most keys have weight, all stay; else the live ones."
    def share(alpha, n):
        x = torch.randn(3, 1, 1, n, 16, generator=torch.Generator().manual_seed(0))
        _,kept,_ = core.forward(*prepare(record(*x, alpha=torch.tensor([alpha]))))
        return (kept[0,0,:16].flatten()[:,None]>>torch.arange(8) & 1).flatten()[:n].float().mean().item()
    assert share(1.35, 256)==1 and share(1.5, 2048)<.5, (share(1.35, 256),share(1.5, 2048))

def test_most_keys_stay_and_few_do(): most_keys_stay_and_few_do()

def keys_near_the_threshold():
    "Rows of three scores, and six more near where a weight begins: small steps that are not the last."
    g = torch.Generator().manual_seed(0)
    near = 10**(-3-1.5*torch.rand(1000, 1, generator=g, dtype=torch.float64))*(4*torch.rand(1000, 6, generator=g, dtype=torch.float64)-1)
    z = torch.cat([torch.zeros(1000, 1),-torch.rand(1000, 2, generator=g)], 1).double()
    for alpha in (1.1,1.3,1.5,1.75,1.9,2.):
        begins = z[:,:1]-entmax(z, alpha)[:,:1]**(alpha-1)/(alpha-1)
        scores = torch.cat([z,begins+near], 1).float()
        ones,values = torch.ones(1000, 1, 1, 1),torch.eye(9).expand(1000, 1, 9, 9)
        weights = banded_attention(ones, scores[:,None,:,None], values, alpha=alpha, scale=1.)[:,0,0]
        assert (weights-entmax(scores.double(), alpha)).abs().max() < 2e-6,alpha

def test_keys_near_the_threshold(): keys_near_the_threshold()

def test_an_alpha_near_one_takes_no_more_steps_than_another():
    "The rounding of a long sum is larger than any fixed bound on a step: the search for thresholds ends all the same."
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    q,k,v = torch.randn(3, 1, 1, 1024, 64)
    def seconds(alpha):
        start = time.process_time(); attention(q, k, v, alpha=alpha)
        return time.process_time()-start
    torch.set_num_threads(1)
    try: near,other = (min(seconds(alpha) for _ in range(5)) for alpha in (1.02,1.3))
    finally: torch.set_num_threads(threads)
    assert near < 3*other

def passes_cut_in_other_places():
    "The tasks of the two passes differ, so a number that is lost makes one of them go query by query, and texts cross their ends."
    g,n = torch.Generator().manual_seed(0),1500
    q,dout = torch.randn(2, 1, 2, n, 64, generator=g)
    k,v = torch.randn(2, 1, 1, n, 64, generator=g)
    texts = torch.arange(n)[None]//401
    for lost,more in ((1400,dict(window=10)), (1200,dict(window=Window.default(torch.tensor([4.,50.])))), (None,dict(window=10, segments=texts))):
        leaves = [x.clone() for x in (q,k,v)]
        if lost: leaves[2][0,0,lost,3] = math.nan
        found = []
        for f,dtype in ((banded_attention,torch.float32),(dense_attention,torch.float64)):
            own = [x.to(dtype).requires_grad_() for x in leaves]
            out = f(*own, alpha=1.5, **more)
            found.append((out.detach().double(),*torch.autograd.grad(out, own, dout.to(dtype).masked_fill(out.isnan(), 0.))))
        for a,b in zip(*found): assert_close(a[:,:,:1000].double(), b[:,:,:1000], rtol=0, atol=2e-4)

def test_passes_cut_in_other_places(): passes_cut_in_other_places()

def powers_of_two():
    "The exponential is right to two last bits, and exactly zero far below."
    x = torch.cat((torch.linspace(-124.9, 0, 2**14),torch.full((16,), -126.)))
    y = torch.full_like(x, torch.nan)
    core.library().dynattn_each(0, ctypes.c_int64(len(x)), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    assert (y[:-16].double()/x[:-16].double().exp2()-1).abs().max() <= 2**-22 and (y[-16:]==0).all()

def rows_of_entmax():
    "By rows, between guards: right to the precision, nothing beside a buffer is touched; a row that is lost is alone."
    for cols,alpha,dtype,at_end in itertools.product((1,15,17,130,2100), (1.,1.06,1.3,1.5,2.), (torch.float32,torch.float64), (True,False)):
        torch.manual_seed(cols)
        z = 2*torch.randn(7, cols, dtype=torch.float64)
        if cols>2: z[0],z[1,2:],z[2,1],z[3,-1],z[4] = -math.inf,-math.inf,z[2,0],30.,z[4].round()
        z[5] = -math.inf if cols==1 else z[5]*1e4
        z,g = z.to(dtype),torch.randn(7, cols).to(dtype)
        eps = torch.full((7,1), alpha-1 or 2.**-64).to(dtype)
        mixed = eps.clone()
        mixed[3:] = 1.
        some = z.isfinite().any(-1)
        for e in (eps,mixed):
            exact = z[some].double().requires_grad_(),e[some].double()+1
            exact[1].requires_grad_()
            want = plain_entmax(*exact)
            with Guarded(at_end):
                p = core._entmax_rows(guarded(z, at_end), e)
                dz,da = core._entmax_rows(guarded(p, at_end), e, guarded(g, at_end), True)
                assert torch.equal(dz, core._entmax_rows(p, e, g.masked_fill(p==0, math.nan), True)[0])  # what has no weight counts for nothing
            assert not (p[~some].any() or dz[~some].any() or da[~some].any())
            grads = torch.autograd.grad(want, exact, g[some].double())
            for got,true in zip((p,dz,da), (want,*grads)):
                near = 1e-12 if dtype==torch.float64 else 4e-6
                if true is not want: near *= 20*max(1, true.abs().max().item())
                assert (got[some].double()-true).abs().max() <= near, (cols,alpha,dtype)
            for lost in (math.nan,math.inf):
                one = z.clone()
                one[6,cols//2] = lost
                q = core._entmax_rows(one, e)
                assert q[6].isnan().all() and torch.equal(q[:4], p[:4]) and q[some & (torch.arange(7)<6)].isfinite().all()
            release()

def alone(examples):
    "With each library that this processor runs: a case and its oracle are made once for all of them."
    libraries = {}
    for name in SETS[:BEST]:
        os.environ['DYNATTN_NATIVE'] = name
        core.library.cache_clear()
        libraries[name] = core.library()
    def with_each(check, *args):
        for name,library in libraries.items():
            core.library = lambda: library
            if currently_in_test_context(): note(name)
            assert core.info()['library']==f'core_{name}.so'
            check(*args)
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases(), dtype=DTYPES, at_end=st.booleans(), projected=st.booleans())
    def each_case(case, dtype, at_end, projected): with_each(between_guards, exact_case(case, dtype, projected), at_end)
    for check in (powers_of_two, rows_of_entmax, zeros_of_long_rows, float32_is_right_to_millionths): with_each(check)
    each_case()

def test_each_instruction_set_between_guards():
    "Right to float32's precision; no byte is read or written beside a buffer, none that counts is left unwritten."
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(HERE.parent),os.environ.get('PYTHONPATH', '')])}
    r = subprocess.run([sys.executable, __file__, os.environ.get('DYNATTN_EXAMPLES', '300')], env=env, capture_output=True, text=True)
    assert r.returncode==0, f'{r.returncode}\n{r.stdout[-3000:]}\n{r.stderr[-3000:]}'
    for name in SETS[:BEST]: assert f'core_{name}.so' in r.stdout

def in_child(f, seconds=300):
    "The exit status of `f` in a fork; None where it hangs."
    pid = os.fork()
    if not pid:
        faulthandler.disable()                              # a crash that is asked for needs no traceback
        try: os._exit(0 if f() else 1)
        finally: os._exit(2)
    for _ in range(seconds*100):
        done,status = os.waitpid(pid, os.WNOHANG)
        if done: return os.waitstatus_to_exitcode(status)
        time.sleep(.01)
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)

@pytest.mark.parametrize('at_end', [True,False])
def test_guards_are_deadly(at_end):
    "What the test above stands on: the next number, and the one before, cannot be read; a key too few kills the core."
    x = guarded(torch.arange(24.).view(2, 3, 4), at_end)
    beside = x.data_ptr()+(x.numel()*4 if at_end else -4)
    assert in_child(lambda: ctypes.c_float.from_address(x.data_ptr()).value==0)==0
    assert in_child(lambda: ctypes.c_float.from_address(beside).value)==-signal.SIGSEGV
    plan,inputs = prepare(record(*torch.randn(3, 1, 1, 32, 16), window=2))
    inputs = inputs._replace(k=guarded(inputs.k, at_end))
    assert in_child(lambda: core.forward(plan, inputs)[0].isfinite().all())==0
    if at_end: assert in_child(lambda: core.forward(plan, inputs._replace(k=inputs.k[:,:,1:])))==-signal.SIGSEGV # v says 32 rows
    release()

@pytest.mark.parametrize('dtype', [torch.float32,torch.float64,torch.bfloat16])
def test_few_queries_read_no_key_too_many(dtype):
    "One query, or two, sum as many keys at once as a vector has lanes; the last of them need not be there."
    for n,d in ((1,16), (1,80), (2,16), (2,80)):
        for m in (1,3,13,17):
            q,k,v = torch.randn(1, 1, n, d, dtype=dtype),*torch.randn(2, 1, 1, m, d, dtype=dtype)
            plan,x = prepare(record(q, k, v))
            out = core.forward(plan, x._replace(k=guarded(k, True), v=guarded(v, True)))[0]
            exact = dense_attention(q.double(), k.double(), v.double())
            near = torch.finfo(dtype).eps*8
            assert_close(out.double(), exact, rtol=near, atol=near)
    release()

def newest_queries(first=0, trials=120):
    "A query of every head, as decoding has them: heads of a key head with windows of their own, keys in several parts, against float64."
    far = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
    for trial in range(first, first+trials):
        g = torch.Generator().manual_seed(trial)
        def number(n): return int(torch.randint(n, (), generator=g))
        def some(*values): return values[number(len(values))]
        def often(p): return float(torch.rand((), generator=g))<p
        b,kv,share = some(1, 2, 3),some(1, 2, 3),some(1, 2, 3, 4, 7)
        h,m,d = kv*share,some(1, 2, 5, 17, 100, 511, 513, 700, 1100, 2100),some(4, 16, 24, 33, 64, 80, 128)
        dv,dtype = some(d, 8, 33),some(*far)
        q,k,v = (torch.randn(b, n, x, size, generator=g).to(dtype) for n,x,size in ((h,1,d), (kv,m,d), (kv,m,dv)))
        if often(.3): k,v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        o = dict(q_offset=some(m-1, m-1, 0, m//2), is_causal=often(.6))
        if often(.2): o = dict(q_offsets=torch.randint(m, (b,), generator=g), is_causal=o['is_causal'])
        widths = .1+m*torch.rand(*some((h,), (b,h)), generator=g)
        if often(.6): o['window'] = Window.default(widths)
        elif often(.5): o['window'] = (number(m+1),number(m+1))
        elif often(.3): o['window'] = Window(widths, smooth='gaussian')
        if often(.3): o['n_global'] = 1+number(6)
        if often(.3): o['softcap'] = 5.
        if often(.3): o['sink'] = torch.randn(h, generator=g)
        if often(.3): o['rel_bias'] = torch.randn(h, 2*number(40)+1, generator=g)
        keep = torch.rand(b, m, generator=g)<.8 if often(.5) else torch.arange(m)>=torch.randint(m, (b,1), generator=g)
        keep[:,-1] = True
        if often(.3): o['padding'] = PaddingMask(keep)
        if often(.3): o['return_lse'] = True
        note = trial,dtype,q.shape,k.shape,dv,o
        found,exact = (f(*x, **o) for f,x in ((banded_attention,(q, k, v)), (dense_attention,(q.double(), k.double(), v.double()))))
        pairs = zip(found, exact) if o.get('return_lse') else [(found, exact)]
        for a,e in pairs:
            assert torch.equal(a.isfinite(), e.isfinite()),note
            seen = e.isfinite()
            assert not seen.any() or (a.double()-e)[seen].abs().max()<far[dtype],note

@pytest.mark.parametrize('first', [0, 120, 240])
def test_newest_queries(first): newest_queries(first)

def newest_queries_of_texts():
    "A token of each of several texts in one row, as servers pack them: each as in a call of its own."
    torch.manual_seed(0)
    lengths = torch.tensor([3,700,1,64,1300])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1,0))
    packed = dict(segments=torch.arange(len(ends)), key_segments=ends, q_offsets=lengths-1, is_causal=True)
    widths = torch.tensor([5.,900.,40.,2000.,64.,64.])
    for dtype,near in ((torch.float64,1e-12), (torch.float32,2e-5), (torch.bfloat16,3e-2)):
        q,k,v = (torch.randn(1, h, n, 48).to(dtype) for h,n in ((6,len(lengths)), (2,sum(lengths)), (2,sum(lengths))))
        for options in (dict(), dict(window=Window.default(widths)), dict(window=100, n_global=2), dict(sink=torch.randn(6))):
            found = banded_attention(q, k, v, **packed, **options)
            for t,(keys,values) in enumerate(zip(k.split(lengths.tolist(), 2), v.split(lengths.tolist(), 2))):
                alone = dense_attention(q[:,:,t:t+1].double(), keys.double(), values.double(), is_causal=True, q_offset=len(keys[0,0])-1, **options)
                assert (found[:,:,t:t+1].double()-alone).abs().max()<near,(dtype, t, options)

def test_newest_queries_of_texts(): newest_queries_of_texts()

def lost_newest_queries():
    "A number that is none is seen by those heads of a key head that look at it, in any part, and by no other."
    torch.manual_seed(0)
    widths = torch.tensor([4.,90.,600.,1400.])
    for dtype in (torch.float32,torch.bfloat16):
        for place in (0, 700, 1390, 1399):
            for which in (0,1,2):
                q,k,v = torch.randn(1, 4, 1, 32).to(dtype),*torch.randn(2, 1, 1, 1400, 32).to(dtype)
                if which: (k,v)[which-1][0,0,place,3] = torch.nan
                else: q[0,place%4,0,3] = torch.inf
                o = dict(window=Window.default(widths), is_causal=True, q_offset=1399)
                lost = banded_attention(q, k, v, **o).isnan().any(-1).flatten()
                expected = torch.arange(4)==place%4 if not which else 1399-place<=(widths+1).ceil()-1
                assert lost.tolist()==expected.tolist(),(dtype, place, which, lost)

def test_lost_newest_queries(): lost_newest_queries()

@pytest.mark.parametrize('n', [5,31,300])
@pytest.mark.parametrize('alpha', [None,1.5])
def test_rows_that_lie_apart_give_the_same_bits(n, alpha):
    "Heads of a model are [B,N,H,d]; rows copied, and rows read where they lie."
    x = [torch.randn(2, n, heads, 16) for heads in (4,2,2)]
    found = []
    for place in (lambda t: t.transpose(1, 2), lambda t: t.transpose(1, 2).contiguous()):
        own = [place(t).requires_grad_() for t in x]
        out = banded_attention(*own, window=Window.default(20.), alpha=alpha, n_global=2, enable_gqa=True)
        found.append((out,*torch.autograd.grad(out.sin().sum(), own)))
    for apart,dense in zip(*found): assert torch.equal(apart, dense)

# ---- threads and processes

def a_call(seed, n=600, alpha=None, heads=4):
    "A function that computes output and gradients anew."
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(1, heads, n, 32, generator=g).requires_grad_() for _ in 'qkv']
    sigma = (40*torch.rand(heads, generator=g)).requires_grad_()
    def run():
        out = banded_attention(*x, window=Window.default(sigma), alpha=alpha)
        return out.detach(),*torch.autograd.grad(out.square().sum(), (*x,sigma))
    return run

@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)

@pytest.mark.parametrize('alpha', [None,1.5])
def test_repeated_runs_give_the_same_bits(two_threads, alpha):
    run = a_call(0, alpha=alpha)
    first = run()
    for _ in range(5): assert all(map(torch.equal, first, run()))

def test_several_threads_call_at_once(two_threads):
    "Calls of different sizes beside each other: each gives the bits that it gives alone."
    calls = [a_call(i, n=(40,600,257,900)[i%4], alpha=(None,1.5)[i%2]) for i in range(8)]
    want = [run() for run in calls]
    with ThreadPoolExecutor(6) as pool: got = list(pool.map(lambda i: calls[i%8](), range(48)))
    for i,one in enumerate(got): assert all(map(torch.equal, one, want[i%8])), i

def test_a_fork_after_use(two_threads):
    "The child of a process that has used two threads uses two as well, and does not hang."
    run = a_call(1, n=2000)
    want = run()
    plan,x = prepare(record(*torch.randn(3, 1, 4, 2000, 32, generator=torch.Generator().manual_seed(0)), window=40))
    first = core.forward(plan, x)[0]
    for _ in range(3): assert in_child(lambda: (core.forward(plan, x)[0].numpy()==first.numpy()).all())==0 # OpenMP would hang
    assert all(map(torch.equal, run(), want))

CALLS = """
import os, signal, sys, time, torch
from dynattn import Window, attention
def call(n=400 if os.environ['DYNATTN_NATIVE']=='0' else 3000): # a loop in Python is slow
    q = torch.randn(3, 1, 4, n, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sigma = torch.full((4,), 60., requires_grad=True)
    return torch.autograd.grad(attention(*q, window=Window.default(sigma)).sum(), (q, sigma))
"""

def calls(code, native, timeout=600):
    return subprocess.run([sys.executable, '-c', CALLS+code], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, 'DYNATTN_NATIVE': native})

@pytest.mark.parametrize('native', ['1', '0'])
def test_more_threads_than_cores_and_one_core_of_many(native):
    r = calls("""
torch.set_num_threads(1)
usual = call()
for threads in (2, 16, 3):
    torch.set_num_threads(threads)
    for a,b in zip(call(), usual): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
if hasattr(os, 'sched_setaffinity'): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for a,b in zip(call(), usual): torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
print('right')""", native)
    assert r.stdout.strip()=='right', r.stderr

@pytest.mark.parametrize('native', ['1', '0'])
def test_an_interrupted_program_ends_and_its_next_call_is_right(native):
    r = calls("""
torch.set_num_threads(2)
usual,hits = call(500),0
def interrupt(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
for _ in range(6):
    try:
        signal.setitimer(signal.ITIMER_REAL, .02)
        while True: call()
    except KeyboardInterrupt: hits += 1
    for a,b in zip(call(500), usual): assert torch.equal(a, b)
print(hits)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
while True: call()""", native)
    assert r.stdout.strip()=='6' and r.returncode and 'KeyboardInterrupt' in r.stderr, (r.returncode, r.stderr)

@pytest.mark.parametrize('seed', [0,1])
def test_many_tasks_of_a_head(two_threads, seed): same_as_dense_when_long(seed)

def same_as_dense_when_long(seed):
    "Chunks of the backward pass, even and odd, share keys with their neighbours."
    g = torch.Generator().manual_seed(seed)
    n = (1500,1201)[seed]
    x = [torch.randn(1, h, n, 32, generator=g).requires_grad_() for h in (4,2,2)]
    sigma = torch.tensor([3.,60.,20.,200.]).requires_grad_()
    outs = [f(*x, window=Window.default(sigma), is_causal=bool(seed)) for f in (banded_attention,dense_attention)]
    dout = torch.randn(outs[0].shape, generator=g)
    for a,b in zip(*(torch.autograd.grad(out, (*x,sigma), dout) for out in outs)): assert_close(a, b, rtol=0, atol=2e-4)

# ---- numbers

@pytest.mark.parametrize('dtype', [torch.bfloat16,torch.float16])
def test_every_number_of_sixteen_bits(dtype):
    "One key alone has weight 1: its values go in and out unchanged. Of two alike, the mean is rounded as PyTorch rounds."
    every = torch.arange(-2**15, 2**15).to(torch.int16).view(dtype)
    q = torch.zeros(1, 1, 1, 1, dtype=dtype)
    out = banded_attention(q, q, every.view(1, 1, 1, -1))[0,0,0]
    nan = every.isnan()
    assert torch.equal(out.isnan(), nan) and torch.equal(out[~nan], every[~nan])
    if dtype==torch.float16: # beyond its largest number: what dropout keeps is twice as large
        large = banded_attention(q.expand(1, 1, 64, 1), q, torch.full((1,1,1,8), 6e4, dtype=dtype), dropout_p=.5)
        assert set(large.flatten().tolist())=={0.,float('inf')}
    finite = every[every.isfinite()]
    pair = torch.stack((finite,finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))]))
    mean = (pair.float().sum(0)/2).to(dtype)
    assert_close(banded_attention(q, q.expand(1, 1, 2, 1), pair[None,None])[0,0,0], mean, rtol=0, atol=0)

@pytest.mark.parametrize('softcap', [None,2.])
@pytest.mark.parametrize('alpha', [None,1.5])
def test_a_key_that_is_no_number(softcap, alpha):
    "The queries that see it are lost, whatever is done to the scores."
    q,k,v = torch.randn(3, 1, 1, 60, 8)
    k[0,0,30,3] = torch.nan
    out = banded_attention(q, k, v, window=4, softcap=softcap, alpha=alpha)
    assert out[0,0].isnan().all(-1).nonzero()[:,0].tolist()==list(range(26, 35))

def a_capped_score_that_is_no_number():
    """Infinity less infinity stays NaN below a soft cap, and the query is lost. One query or two alone: their products lie in lanes of
    their own, whose sum is NaN on every machine; one after the other, a fused addition never sees the second infinity."""
    for n in (1,2):
        q,k,v = torch.full((1,1,n,8), 1e30),torch.tensor([1e30,-1e30]*4).expand(1, 1, 20, 8),torch.randn(1, 1, 20, 8)
        for alpha in (None,1.5):
            out = banded_attention(q, k, v, window=4, softcap=2., alpha=alpha, q_offset=7)
            assert out.isnan().all(), (n,alpha)

@pytest.mark.skipif(core.library() is None, reason='no compiled core')
def test_a_capped_score_that_is_no_number(): a_capped_score_that_is_no_number()

@pytest.mark.parametrize('size', [torch.inf,-torch.inf])
@pytest.mark.parametrize('options', [dict(), dict(softcap=5.), dict(alpha=1.5), dict(n_global=6), dict(n_global=6, is_causal=True),
                                     dict(rel_bias=torch.tensor([[-torch.inf,0.,1.]]))], ids=str)
def test_an_infinite_key_is_no_number_for_those_who_see_it(size, options):
    q,k,v = torch.randn(3, 1, 1, 12, 8)
    k[0,0,5] = 0.
    k[0,0,5,3] = size
    out = [impl(q, k, v, window=2, **options).isnan() for impl in (banded_attention,dense_attention)]
    assert out[0].any() and torch.equal(*out)

@pytest.mark.parametrize('bad', [torch.nan, torch.inf])
@pytest.mark.parametrize('options', [dict(), dict(window=4), dict(is_causal=True), dict(n_global=2, window=3), dict(alpha=1.5), dict(alpha=1.5, window=4, softcap=5.),
                                     dict(sink=torch.ones(2)), dict(n_global=3, window=1, alpha=1.3, is_causal=True)], ids=str)
def test_hostile_65_a_bias_that_is_no_number(options, bad):
    "The queries that add it are lost, and no others: an offset of the bias hidden by the window counts for nothing."
    for n,at in ((1,20), (2,19), (40,20), (40,0), (40,39)): # which offset
        q,k,v = torch.randn(1, 2, n, 8),*torch.randn(2, 1, 2, 40, 8)
        bias = torch.randn(2, 41)
        bias[1,at] = bad
        out,want = (impl(q, k, v, rel_bias=bias, q_offset=20 if n<3 else 0, **options) for impl in (banded_attention,dense_attention))
        assert torch.equal(out.isnan(), want.isnan()) and not out[:,0].isnan().any(), (n,at)
        assert_close(out, want, equal_nan=True, rtol=1e-5, atol=1e-5)

def a_query_alone_is_lost_as_among_others(dtype=torch.float32):
    "Each query of a text in a call of its own, or with another one, beside keys and values that are no numbers."
    torch.manual_seed(0)
    near = dict(rtol=5e-5, atol=1e-5) if dtype==torch.float32 else dict(rtol=3e-2, atol=3e-2)
    many = torch.finfo(dtype).max
    for options in (dict(), dict(softcap=5.), dict(n_global=3), dict(is_causal=True, n_global=2), dict(sink=torch.tensor([.5])), dict(alpha=1.5),
                    dict(rel_bias=torch.tensor([[-torch.inf,0.,1.]]))):
        for size in (torch.nan, torch.inf, -torch.inf, many):
            for which in (1,2):
                x = torch.randn(3, 1, 1, 160, 16).to(dtype)
                x[which,0,0,(1,90),(3,5)] = size
                q,k,v = x
                whole = banded_attention(q, k, v, window=40, **options)
                for some in (1,2):
                    each = [banded_attention(q[:,:,i:i+some], k, v, window=40, q_offset=i, **options)[:,:,:1] for i in range(6, 159, 7)]
                    assert_close(torch.cat(each, 2), whole[:,:,6:159:7], equal_nan=True, **near)
                assert whole.isnan().any() or size==many or which==2

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_query_alone_is_lost_as_among_others(dtype): a_query_alone_is_lost_as_among_others(dtype)

# ---- nothing ends the process

FUZZ = """
import random, sys, torch
from dynattn.alpha import entmax
from dynattn.engine.operator import banded_attention
from dynattn.engine.dense import dense_attention
from dynattn.window import Window
r = random.Random(int(sys.argv[1]))
EDGE = 2**31
far = [0, 1, 2, 12, 10**8, EDGE-2, EDGE-1, EDGE, EDGE+1]
offset = [s*x for x in far for s in (1,-1)]
def one():
    h = r.choice([0, 1, 2, 4])
    kv = r.choice([x for x in (0, 1, 2, 4) if x and h%x==0 or x==h] or [1])
    b,n,m,d = r.choice([0, 1, 2]),r.choice([0, 1, 2, 12, 17]),r.choice([0, 1, 2, 12, 17]),r.choice([0, 1, 8])
    x = [torch.randn(b, heads, size, d, dtype=torch.float64, requires_grad=True) for heads,size in ((h,n),(kv,m),(kv,m))]
    o = dict(q_offset=r.choice(offset), is_causal=r.random()<.3)
    kind = r.random()
    if kind<.5: o['window'] = r.choice([r.choice(far), (r.choice(far),r.choice(far)), (None,r.choice(far)), (r.choice(far),None)])
    elif kind<.8:
        sigma = torch.tensor([r.choice([*far,1e18,1e30])]*h, dtype=torch.float64, requires_grad=True)
        o['window'] = Window(sigma, apply=r.choice(['inside','after']), smooth=r.choice(['edge','gaussian']))
        x.append(sigma)
    if r.random()<.4: o['n_global'] = r.choice(far)
    if r.random()<.3: o['alpha'] = r.choice([1., 1.5, 2.])
    if r.random()<.3: x.append(torch.randn(h, 2*r.choice([0, 1, 50, 10**5])+1, dtype=torch.float64, requires_grad=True)); o['rel_bias'] = x[-1]
    if r.random()<.2: o['dropout_p'] = r.choice([5e-324, 2.**-24, 1-2.**-24, 1-2.**-53, 1.])
    return x,o
def run(f, x, o):
    torch.manual_seed(0)
    try: out = f(*x[:3], **o)
    except (ValueError, TypeError) as error: return str(error).split(':')[0]
    return out,*torch.autograd.grad(out, x, torch.ones_like(out), materialize_grads=True)
limit = int(sys.argv[2])
for i in range(limit):
    x,o = one()
    mine = run(banded_attention, x, o)
    if isinstance(mine, str): assert mine in o,(mine, o); continue
    for s,t in zip(mine, run(dense_attention, x, o), strict=True):
        assert s.shape==t.shape and torch.allclose(s, t, rtol=1e-9, atol=1e-9, equal_nan=True),(i, o, [t.shape for t in x], (s-t).abs().max())
"""

def in_little_memory(code, *args, more=2**31):
    "A program in a process of its own, with so many bytes more than Python and PyTorch take."
    head = f"""
import resource, torch, dynattn.engine.ops
used = int(open('/proc/self/statm').read().split()[0])*resource.getpagesize() # virtual
resource.setrlimit(resource.RLIMIT_AS, (used+{more},)*2)
torch.set_num_threads(1)
"""
    return subprocess.run([sys.executable,'-c',head+code,*map(str, args)], capture_output=True, text=True, timeout=300)

@pytest.mark.parametrize('native', ['1', '0'])
@pytest.mark.parametrize('seed', range(2))
def test_sizes_at_and_beyond_every_edge(monkeypatch, seed, native):
    "A result as the dense path's, or an error that names the argument; two gigabytes do for numbers as large as 2**31."
    if native=='0': monkeypatch.setenv('DYNATTN_NATIVE', '0')   # the plain loop
    done = in_little_memory(FUZZ, seed, 300)
    assert done.returncode==0,(done.returncode, done.stderr[-3000:])

def test_memory_that_cannot_be_had():
    done = in_little_memory("""
from dynattn.engine.ops import attention
q,k = torch.zeros(1, 1, 1, 8),torch.zeros(1, 1, 1, 8).expand(1, 1, 2**22, 8)
try: attention(q, k, k, alpha=1.5)
except MemoryError as error: assert str(error).startswith('attention: expected'); print('raised')
x = torch.ones(1, 1, 4, 8)
assert torch.equal(attention(x, x, x, window=1), x) # and the next call works
""", more=2**28)
    assert done.returncode==0 and done.stdout=='raised\n',(done.returncode, done.stderr[-3000:])

# ---- tensors that do not lie as they read

def test_a_bias_of_another_order_in_memory():
    q,k,v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    bias = torch.randn(9, 2, dtype=torch.float64).T.requires_grad_()
    out = [impl(q, k, v, window=5, rel_bias=bias) for impl in (banded_attention,dense_attention)]
    assert_close(*out)
    assert_close(*(torch.autograd.grad(x.square().sum(), bias)[0] for x in out))

@pytest.mark.parametrize('name', ['q','k','v','sigma','alpha','sink','rel_bias'])
def test_a_sign_that_is_still_to_be_turned(name):
    "The imaginary part of a conjugate lies in memory with the other sign."
    q,k,v = torch.randn(3, 1, 2, 12, 8).unbind()
    given = dict(q=q, k=k, v=v, sigma=torch.tensor([2.,3.]), alpha=torch.tensor([1.2,1.7]), sink=torch.ones(2), rel_bias=torch.randn(2, 5))
    turned = given | {name: torch.complex(torch.zeros_like(given[name]), -given[name]).conj().imag}
    assert turned[name].is_neg()
    def run(given):
        given = {n: t.detach().requires_grad_() for n,t in given.items()}
        options = {n: given[n] for n in ('alpha','sink','rel_bias')}
        out = attention(given['q'], given['k'], given['v'], window=Window(given['sigma']), **options)
        return out,*torch.autograd.grad(out.square().sum(), list(given.values()))
    for a,b in zip(run(turned), run(given), strict=True): assert_close(a, b)

def test_make_fx_without_fake_tensors_records_an_operator():
    x,y = torch.randn(2, 1, 2, 12, 8).unbind()
    def f(q): return attention(q, q, q, window=3, alpha=1.5)
    assert_close(make_fx(f)(x)(y), f(y))

def test_a_subclass_that_wraps_others():
    x = torch.randn(3, 1, 2, 12, 8)
    two = [TwoTensor(t.clone(), 2*t).requires_grad_() for t in x]
    out = attention(*two, window=3)
    want = [attention(*t, window=3) for t in (x, 2*x)]
    assert_close(out.a, want[0]), assert_close(out.b, want[1])
    out.sum().backward()
    leaf = x[0].clone().requires_grad_()
    attention(leaf, *x[1:], window=3).sum().backward()
    assert_close(two[0].grad.a, leaf.grad)

def test_every_field_that_learns_has_a_sum_of_its_name():
    "A number of each head is added up under the name of its field, and written to the gradient of that name."
    source = (files('dynattn')/'engine'/'native'/'core.cpp').read_text(encoding='utf-8')
    written = dict(re.findall(r'^    write\(g\.d(\w+), &Sums::(\w+), ', source, re.M))
    assert written=={name: name for name in PER_HEAD}

def per_head_gradients(names, dtype=torch.float64):
    "Gradients of some of all that a head can learn, by the core."
    g = torch.Generator().manual_seed(0)
    def normal(*shape): return torch.randn(*shape, generator=g, dtype=dtype)
    q,k,v,dout = (normal(1, 2, 30, 4) for _ in range(4))
    learns = dict(sigma=torch.tensor([2.,6.], dtype=dtype), alpha=torch.tensor([1.3,1.7], dtype=dtype),
                  rel_bias=normal(2, 7), sink=normal(2))
    window = Window.default(learns['sigma'])
    plan,x = prepare(record(q, k, v, window=window, **{n: t for n,t in learns.items() if n!='sigma'}))
    out,kept,lse = core.forward(plan, x)
    return core.backward(plan, x, dout, out, kept, lse, names)

def test_a_gradient_stands_in_its_own_place():
    "Each gradient is the same whichever others are computed with it."
    names = 'sigma','alpha','rel_bias','sink'
    everything = per_head_gradients(names)
    for n in range(len(names)):
        for some in itertools.combinations(names, n):
            found = per_head_gradients(some)
            for name in some: assert torch.equal(found[name], everything[name]), (name,some)
    assert not any(torch.equal(everything[a], everything[b]) for a,b in itertools.combinations(('sigma','alpha','sink'), 2))

@pytest.mark.parametrize('n', [1, 4, 200])
def test_prog6_sums_over_many_keys_round_as_sums_of_sums(n):
    "Key by key in one sum, 6,000 equal weights lose ten times as much, and a gradient that is a small difference more"
    g = torch.Generator().manual_seed(0)
    q,k,v,dout = (torch.randn(1, 2, size, 32, generator=g) for size in (n,6000,6000,n))
    leaves = [x.double().requires_grad_() for x in (q*.1,k,v+10*torch.randn(1, 2, 1, 32, generator=g))]
    leaves = [x.detach().float().double().requires_grad_() for x in leaves]
    exact = dense_attention(*leaves)
    exact = exact,*torch.autograd.grad(exact, leaves, dout.double())
    plan,x = prepare(record(*(x.detach().float() for x in leaves)))
    out,kept,lse = core.forward(plan, x)
    grads = core.backward(plan, x, dout, out, kept, lse, ('q','k','v'))
    def rms(x): return x.double().pow(2).mean().sqrt().item()
    eps = torch.finfo(torch.float32).eps
    for found,wanted,most in zip((out,*(grads[name] for name in 'qkv')), exact, (4,80,80,6)):
        assert rms(found-wanted)<most*eps*rms(wanted)

def test_the_page_shows_the_file_as_it_is():
    "Chapter 33 quotes core.cpp; what it printed is what the file says now."
    cells = json.loads((HERE.parent/'nbs/engine/33_native.core.ipynb').read_text(encoding='utf-8'))['cells']
    sources = [''.join(c['source']) for c in cells]
    names = dict(files=files, Markdown=lambda text: text)
    exec(next(s for s in sources if 'def quote(' in s), names)
    quotes = [(s,c) for s,c in zip(sources, cells) if s.startswith('quote(')]
    assert len(quotes)>=10
    old = [source for source,cell in quotes if eval(source, names)!=''.join(cell['outputs'][0]['data']['text/markdown'])]
    assert not old, f'core.cpp is another there: python tests/outputs.py --store nbs/engine/33_native.core.ipynb: {old}'

if __name__=='__main__': alone(int(sys.argv[1]) if len(sys.argv)>1 else 300)

@pytest.mark.skipif(sys.platform!='linux' or core.library() is None, reason='reads the libraries of a process, as Linux lists them')
def test_a_library_of_any_name_may_be_loaded(tmp_path):
    "In a folder whose name is not UTF-8, a call raised UnicodeDecodeError"
    folder = os.fsencode(tmp_path)+b'/caf\xe9'
    os.mkdir(folder)
    shutil.copy(core.library()._name, folder+b'/libgomp.so')
    script = "import ctypes, os, sys, torch; ctypes.CDLL(sys.argv[1]); from dynattn import attention; x = torch.ones(1, 2, 600, 8); attention(x, x, x, window=3)"
    done = subprocess.run([sys.executable, '-c', script, folder+b'/libgomp.so'], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode==0, done.stderr

def test_a_folder_of_openmp_may_have_blanks():
    "The path was cut at the blank, no such library was found, and the core made threads of its own"
    lines = '7f-8f r-xp 00000000 08:01 42    /home/a b/site/torch/lib/libgomp.so.1\n', '8f-9f rw-p 00000000 00:00 0    [heap]\n', '9f-af r--p 00000000 08:01 43    /usr/lib/libomptarget/x.so\n'
    assert core._libraries_of_openmp(''.join(lines))=={'/home/a b/site/torch/lib/libgomp.so.1'}
