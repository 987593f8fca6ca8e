"""Attention on a GPU: the kernels beside what else there is.

python benchmarks/gpu.py --suite window     soft and hard windows, mixed and uniform widths, N 2k to 32k
python benchmarks/gpu.py --suite entmax     alpha-entmax, N 4k to 128k, scores scaled until 50 to 85 % of the tiles hold no weight
python benchmarks/gpu.py --minutes 9 --to gpu.csv    start no new case after nine minutes, and leave out what the file has already
python benchmarks/gpu.py --first-hour       few cases and peers: what benchmarks/first_hour.sh runs
python benchmarks/gpu.py --warm --case 2    compile what one case needs, for a run beside others that times it afterwards
python benchmarks/gpu.py --read FOLDER      what that script found on a device, into benchmarks/results; needs no GPU
python benchmarks/gpu.py --dry-run          both at toy sizes in Triton's interpreter on a CPU; writes nothing but to a file that is named
Each peer is checked against the dense attention in float64 first; one that computes something else is not timed. Peers run in turn,
medians of CUDA events. After each case its rows are appended to benchmarks/results/gpu.csv with the machine and its limits as measured
here; a peer that could not run has a row that says why."""
import argparse, functools, math, os, statistics, sys, time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
DRY = any(a.startswith('--dr') for a in sys.argv)
if DRY: os.environ['TRITON_INTERPRET'] = '1'    # before the kernels are imported
import torch, torch.nn.functional as F
import triton
from dynattn.engine.call import Call
from dynattn.engine.dense import dense_attention
from dynattn.engine.triton.entmax import entmax_attention, _forward, _tile_sizes
from dynattn.engine.triton.primitives import _served
from dynattn.engine.triton.window import windowed_attention
from dynattn.window import Window
from harness import Registry, append, machine, rows_of, write

DEV,DTYPE = ('cpu',torch.float32) if DRY else ('cuda',torch.bfloat16)
softmax_ops,entmax_ops = Registry(),Registry()

# ------------------------------------------------------------------ cases
@dataclass(frozen=True)
class Case:
    N:int
    B:int = 4
    H:int = 16
    d:int = 64
    causal:bool = False
    w:str = 'mixed'        # 'mixed': log-uniform 64..2048 per (batch, head); else the number of tokens to each side
    alpha:float = 1.5
    sharp:float = 1.       # factor of the queries
    alike:float = 0.       # share of a query that is common to 256 neighbours
    dtype:torch.dtype = DTYPE
    def widths(self):
        "[B,H] whole tokens"
        if self.w!='mixed': return torch.full((self.B,self.H), int(self.w), device=DEV)
        u = torch.rand(self.B, self.H, generator=torch.Generator().manual_seed(1))
        return (64*32**u).round().long().clamp(max=self.N).to(DEV)
    def sigma(self): return (self.widths()-.5).requires_grad_()
    def window(self, sigma): return Window.default(sigma, reach=(None,0) if self.causal else None)
    def tensors(self):
        g = torch.Generator(DEV).manual_seed(0)
        q,k,v = (torch.randn(self.B, self.H, self.N, self.d, generator=g, device=DEV) for _ in range(3))
        common = torch.randn(self.B, self.H, self.N//256+2, self.d, generator=g, device=DEV).repeat_interleave(256, 2)
        common = common[:,:,37:37+self.N]       # tiles do not begin where neighbours do
        q = self.alike**.5*common + (1-self.alike)**.5*q
        return [t.to(self.dtype).requires_grad_() for t in (q*self.sharp,k,v)]
    def pairs(self):
        "Query-key pairs inside the windows, of all heads."
        w = self.widths().double().clamp(max=self.N-1)
        one = self.N*w - w*(w+1)/2
        return (one*(1 if self.causal else 2) + self.N).sum().item()
    def row(self):
        "The columns that name a case."
        w = self.w
        if self.causal: w += ', causal'
        if self.w==str(self.N): w += f', alpha {self.alpha}'
        return dict(B=self.B, H=self.H, N=self.N, d=self.d, w=w, dtype=str(self.dtype).removeprefix('torch.'))

def step(f, leaves, backward):
    "A function that runs `f` forward, or forward and backward."
    if not backward: return torch.no_grad()(f)
    go = torch.ones_like(f())
    return lambda: torch.autograd.grad(f(), leaves, go)

# ------------------------------------------------------------------ softmax in a window: make(case) -> (f, leaves, window of the oracle)
@softmax_ops('dynattn, sigma learns')
def soft(c):
    (q,k,v),sigma = c.tensors(),c.sigma()
    return (lambda: windowed_attention(q, k, v, window=c.window(sigma), is_causal=c.causal)), (q,k,v,sigma)

def hard_bounds(c, w=None):
    "(left, right) of `w` tokens to each side, by default the case's."
    w = int(c.w) if w is None else w
    return w,0 if c.causal else w

@softmax_ops('dynattn, sigma fixed')
def fixed(c):
    (q,k,v),sigma = c.tensors(),c.sigma().detach()
    return (lambda: windowed_attention(q, k, v, window=c.window(sigma), is_causal=c.causal)), (q,k,v)

@softmax_ops('dynattn, hard window')
def hard(c):
    q,k,v = c.tensors()
    if c.w=='mixed': raise NotImplementedError("one hard window for all heads")
    return (lambda: windowed_attention(q, k, v, window=hard_bounds(c), is_causal=c.causal)), (q,k,v)

def block_mask(c, mod, block=128):
    "A BlockMask in closed form: which blocks a band touches, and which lie inside it, without looking at pairs."
    from torch.nn.attention.flex_attention import BlockMask
    w,n = c.widths()[...,None,None],-(-c.N//block)
    i = torch.arange(n, device=DEV)*block
    near,far = i-i[:,None]-(block-1),i-i[:,None]+(block-1)  # least and greatest j - i in a pair of blocks
    right = torch.zeros_like(w) if c.causal else w
    touched,inside = (far>=-w) & (near<=right),(near>=-w) & (far<=right)
    inside = inside & (i+block<=c.N) & (i[:,None]+block<=c.N)
    pack = lambda b: (b.sum(-1, dtype=torch.int32), b.int().argsort(dim=-1, descending=True, stable=True).int())
    return BlockMask.from_kv_blocks(*pack(touched & ~inside), *pack(inside), BLOCK_SIZE=block, mask_mod=mod, seq_lengths=(c.N,c.N))

def flex_parts(c):
    from torch.nn.attention.flex_attention import flex_attention, create_block_mask
    w = c.widths()
    def mask_mod(b, h, i, j): return ((i-j).abs()<=w[b,h]) & (i>=j) if c.causal else (i-j).abs()<=w[b,h]
    T = math.exp(-.5)
    def score_mod(sigma):
        def mod(s, b, h, i, j):
            V = torch.exp(-.5*((i-j)/(sigma[b,h]+1))**2)
            above = (V-T).clamp(min=1e-9)/(1-T)     # not 0: masked pairs would send back NaN
            return s + torch.log(torch.tanh(2*above)/math.tanh(2))
        return mod
    if DRY: return flex_attention,create_block_mask,mask_mod,score_mod
    from torch._dynamo import config
    # a case more is a compilation more, and past the limit it would run uncompiled
    config.recompile_limit = config.accumulated_recompile_limit = 10_000
    return torch.compile(flex_attention, dynamic=False),torch.compile(create_block_mask),mask_mod,score_mod

def flex(c, sigma, fresh):
    "`sigma` 'learns', is 'fixed', or None for a hard window; the block mask in closed form, or `fresh` from `create_block_mask` at every step."
    f,create,mask_mod,score_mod = flex_parts(c)
    (q,k,v),width = c.tensors(),c.sigma()
    mod = score_mod(width if sigma=='learns' else width.detach()) if sigma else None
    ready = None if fresh else block_mask(c, mask_mod)
    def run():
        blocks = create(mask_mod, c.B, c.H, c.N, c.N, device=DEV) if fresh else ready
        return f(q, k, v, score_mod=mod, block_mask=blocks)
    return run, ((q,k,v,width) if sigma=='learns' else (q,k,v))

WIDTHS = {'learns': 'sigma learns', 'fixed': 'sigma fixed', None: 'hard window'}
BLOCKS = {False: 'analytic block mask', True: 'create_block_mask each step'}
for _sigma,_width in WIDTHS.items():
    for _fresh,_blocks in BLOCKS.items():
        softmax_ops(f'FlexAttention, {_width}, {_blocks}')(partial(flex, sigma=_sigma, fresh=_fresh))

def sdpa(c, backend):
    from torch.nn.attention import sdpa_kernel, SDPBackend
    q,k,v = c.tensors()
    chosen = SDPBackend.MATH if DRY else getattr(SDPBackend, backend)
    def f():
        with sdpa_kernel(chosen): return F.scaled_dot_product_attention(q, k, v, is_causal=c.causal)
    return f, (q,k,v)

softmax_ops('SDPA flash, no window')(lambda c: sdpa(c, 'FLASH_ATTENTION'))
softmax_ops('SDPA cuDNN, no window')(lambda c: sdpa(c, 'CUDNN_ATTENTION'))

class _Flash(torch.autograd.Function):
    "aten's FlashAttention with its one window for all heads; tensors are [B,N,H,d]"
    @staticmethod
    def forward(ctx, q, k, v, left, right, causal):
        n = q.shape[1]
        ctx.rest = left,right,causal
        out,lse,seed,unused,_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, n, n, 0., causal, False, window_size_left=left, window_size_right=right)
        ctx.save_for_backward(q, k, v, out, lse, seed, unused)
        return out
    @staticmethod
    def backward(ctx, go):
        q,k,v,out,lse,seed,unused = ctx.saved_tensors
        left,right,causal = ctx.rest
        n = q.shape[1]
        grads = torch.ops.aten._flash_attention_backward(
            go, q, k, v, out, lse, None, None, n, n, 0., causal, seed, unused,
            window_size_left=left, window_size_right=right)
        return *grads,None,None,None

@softmax_ops('flash, one window (the widest)')
def flash(c):
    if DRY: raise NotImplementedError("needs a GPU")
    leaves = c.tensors()
    left,right = hard_bounds(c, int(c.widths().max()))
    def f():
        by_token = (t.transpose(1, 2) for t in leaves)
        return _Flash.apply(*by_token, left, right, c.causal).transpose(1, 2)
    return f, tuple(leaves)

# ------------------------------------------------------------------ entmax
@entmax_ops('dynattn')
def ours(c):
    q,k,v = c.tensors()
    alpha = torch.full((c.H,), c.alpha, device=DEV, requires_grad=True)
    return (lambda: entmax_attention(q, k, v, alpha=alpha, is_causal=c.causal)), (q,k,v,alpha)

@entmax_ops('dynattn, alpha fixed')
def tensor_alpha(c):
    q,k,v = c.tensors()
    def f(): return entmax_attention(q, k, v, alpha=torch.full((c.H,), c.alpha, device=DEV), is_causal=c.causal)
    return f, (q,k,v)

@entmax_ops('dynattn, alpha a number')
def fixed_alpha(c):
    q,k,v = c.tensors()
    return (lambda: entmax_attention(q, k, v, alpha=c.alpha, is_causal=c.causal)), (q,k,v)

@entmax_ops('SDPA flash, softmax')
def dense_flash(c): return sdpa(c, 'FLASH_ATTENTION')

@functools.cache
def fewer_settings():
    """Let AdaSplash-2 try 14 of its 66 settings of tiles, warps and stages.

    Compiling all of them takes longer than the first hour has."""
    every = triton.autotune
    def is_likely(x):
        is_square = x.kwargs.get('BLOCK_M', 64)==x.kwargs.get('BLOCK_N', 64)
        return is_square and x.num_warps==4 and x.num_stages<4
    def some(configs, **more):
        likely = [x for x in configs if is_likely(x)]
        return every(configs=likely or configs, **more)
    triton.autotune = some
    try: import adasplash.adasplash_v2
    finally: triton.autotune = every

@entmax_ops('AdaSplash-1')
def adasplash1(c):
    if DRY: raise NotImplementedError("needs a GPU")
    from adasplash import adasplash_v1
    q,k,v = c.tensors()
    return (lambda: adasplash_v1(q, k, v, alpha=c.alpha, is_causal=c.causal)), (q,k,v)

@entmax_ops('AdaSplash-2')
def adasplash2(c):
    if DRY: raise NotImplementedError("needs a GPU")
    if FIRST: fewer_settings()
    from adasplash import adasplash_v2
    if not c.causal or c.alpha!=1.5: raise NotImplementedError("causal and alpha=1.5 only")
    q,k,v = c.tensors()
    return (lambda: adasplash_v2(q, k, v)), (q,k,v)

@entmax_ops('dense entmax_bisect', upto=4096)
def bisect(c):
    from entmax import entmax_bisect
    q,k,v = c.tensors()
    alpha = torch.full((c.H,1,1), c.alpha, device=DEV, requires_grad=True)
    hide = torch.ones(c.N, c.N, dtype=torch.bool, device=DEV).triu(1) if c.causal else None
    def f():
        s = (q@k.mT).float()*c.d**-.5
        return entmax_bisect(s if hide is None else s.masked_fill(hide, -1e30), alpha).to(v.dtype)@v
    return f, (q,k,v,alpha)

def sparsity(c, size=64):
    "The share of the tiles of `size` queries and as many keys without weight, among those that causality leaves."
    q,k,v = (t.detach() for t in replace(c, B=1, H=min(c.H, 4)).tensors())
    _,live,_ = _forward(*_served(Call(q, k, v, alpha=torch.tensor(c.alpha, device=DEV), is_causal=c.causal)))
    flag = _tile_sizes(q, v, 'rows')
    rows,cols = (max(size//flag[name], 1) for name in ('FLAG_M','FLAG_N'))
    live = F.max_pool2d(live.float(), (rows,cols), ceil_mode=True)
    tiles = torch.ones(live.shape[2:], dtype=torch.bool)
    if c.causal:
        last = torch.arange(1, live.shape[2]+1)[:,None]*rows*flag['FLAG_M']
        tiles &= torch.arange(live.shape[3])*cols*flag['FLAG_N'] < last
    return 1-live.sum().item()/(q.shape[1]*tiles.sum().item())

def sharpened(c, least=.5, most=.85):
    """Scores scaled until between `least` and `most` of the tiles hold no weight.

    The scale is doubled until enough do, then halved in between."""
    low,x = .01,1.
    while (s := sparsity(replace(c, sharp=x)))<least and x<1024: low,x = x,2*x
    high = x
    while not least<=s<=most and high-low>.01*high:
        x = (low+high)/2
        s = sparsity(replace(c, sharp=x))
        if s<least: low = x
        else: high = x
    if not least<=s<=most: print(f"  no scale of the scores gives a block sparsity from {least} to {most}")
    return replace(c, sharp=x),s

# ------------------------------------------------------------------ checks
def oracle(name, c, leaves):
    "What this peer is to compute, in float64."
    q,k,v = (t.detach().double().requires_grad_() for t in leaves[:3])
    if name=='SDPA flash, softmax': return dense_attention(q, k, v, is_causal=c.causal),(q,k,v)
    if name in entmax_ops.ops:
        alpha = torch.full((c.H,), c.alpha, dtype=torch.float64, device=DEV, requires_grad=True)
        return dense_attention(q, k, v, is_causal=c.causal, alpha=alpha), (q,k,v,alpha)
    sigma = c.sigma().detach().double().requires_grad_()
    if 'sigma' in name: options = dict(window=c.window(sigma))
    elif 'no window' in name: options = {}
    elif name.startswith('FlexAttention, hard window') and c.w=='mixed':    # one width per head, as a mask
        i = torch.arange(c.N, device=DEV)
        options = dict(attn_mask=(i-i[:,None]).abs()<=c.widths()[...,None,None])
    else: options = dict(window=int(c.widths().max()))
    return dense_attention(q, k, v, is_causal=c.causal, **options), (q,k,v,sigma)

def check(name, op, c):
    "Raises where a peer's output or gradients are further from float64 than half precision explains."
    f,leaves = op.make(c)
    out,(want,exact) = f(),oracle(name, c, leaves)
    go = torch.randn(out.shape, generator=torch.Generator(DEV).manual_seed(2), device=DEV)
    got = torch.autograd.grad(out, leaves, go.to(out.dtype))
    truth = torch.autograd.grad(want, exact[:len(leaves)], go.double(), allow_unused=True)
    allowed = 1e-4 if c.dtype==torch.float32 else 3e-2
    for what,a,b in zip(('out','dq','dk','dv','dparam'), (out,*got), (want,*truth)):
        e = ((a.double().reshape(b.shape)-b).norm()/b.norm()).item()
        if not e < allowed: raise AssertionError(f"{what} is off by {e:.1e}")

def reason(e):
    "One line of an error; one that has lost the device ends the run, for all that came after it would fail as well."
    if 'CUDA error' in str(e): sys.exit(f"the device is lost: {e}")
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:160]

_able = {}
def able(registry, c):
    "The peers that are there and right for this kind of case, and why the others are not."
    small = replace(c, N=min(c.N, 256 if not DRY else c.N), B=1, H=2, sharp=1.)
    if small not in _able:
        ops,failed = {},{}
        for name,op in registry.ops.items():
            if any(word in name for word in SKIP): continue
            try:
                check(name, op, small)
                ops[name] = op
            except Exception as e:
                failed[name] = reason(e)
                print(f"  {name}: left out, {failed[name]}", flush=True)
        _able[small] = ops,failed
    return _able[small]

# ------------------------------------------------------------------ timing
_work = []
def queue():
    "Four milliseconds of work for the device, so that it does not wait for Python, as in a training step; it empties the cache too."
    if not _work: _work.append(torch.empty(2**30, dtype=torch.uint8, device=DEV))
    for _ in range(12): _work[0].zero_()

def seconds(fn, runs=1, host=None):
    "Median time of one run on the device, by CUDA events; what Python needed to start each goes to the list `host`."
    if DRY:
        start = time.perf_counter()
        fn()
        return time.perf_counter()-start
    times = []
    for _ in range(runs):
        a,b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        queue()
        a.record()
        start = time.perf_counter()
        fn()
        if host is not None: host.append(time.perf_counter()-start)
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b)/1e3)
    return statistics.median(times)

def in_turn(fns, rounds=7, budget=6.):
    """name -> (median seconds, peak MB beyond what was allocated before, median seconds of Python).

    Peers alternate round by round."""
    times = {name: [] for name in fns}
    host = {name: [] for name in fns}
    mb = {}
    runs = {}                                       # what is slow is timed less often
    for name,fn in fns.items():
        fn()                                        # compile
        if DRY: continue
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        first = seconds(fn)
        mb[name] = (torch.cuda.max_memory_allocated()-before)/2**20
        runs[name] = 5 if first<.02 else 1
        if first<.02:
            fn()
            fn()
    start = time.perf_counter()
    for r in range(1 if DRY else rounds):
        for name,fn in fns.items(): times[name].append(seconds(fn, runs.get(name, 1), host[name]))
        if r>=2 and time.perf_counter()-start>budget: break
    median = statistics.median
    return {name: (median(took), mb.get(name), median(host[name] or [0.])) for name,took in times.items()}

def ceilings():
    "Operations a second of a large product in the dtype of the cases, and bytes a second of a large copy."
    n = 256 if DRY else 8192
    a,b = torch.randn(2, n, n, device=DEV).to(DTYPE)
    x = torch.empty(n*n*4, dtype=torch.uint8, device=DEV)
    y = torch.empty_like(x)
    for _ in range(3):
        a@b
        y.copy_(x)
    return 2*n**3/seconds(lambda: a@b, 20),2*x.numel()/seconds(lambda: y.copy_(x), 20)

def row(suite, name, c, peak, way, **found):
    "A row of the file; `peak` in operations a second, `way` 'forward' or 'both'."
    return dict(suite=suite, op=name, peak_gflops=round(peak/1e9)) | {'pass': way} | c.row() | found

def compare(suite, registry, c, peak, value=None):
    "Rows of all peers, forward and both; those that failed say why."
    print(f"{suite} {c}", flush=True)
    ops,failed = able(registry, c)
    rows = []
    for way in ('forward','both'):
        fns,missing = started(ops, c, way)
        for name,why in (failed | missing).items(): rows.append(row(suite, name, c, peak, way, value=f"failed: {why}"))
        flops = 4*c.pairs()*c.d*(3.5 if way=='both' else 1)
        if WARM: continue
        for name,(s,mb,host) in in_turn(fns).items():
            limits = s*peak/flops
            memory = f" {mb:9.1f} MB" if mb else ''
            print(f"  {way:8} {name:58} {s*1e3:10.3f} ms {limits:8.2f} limits, host {host*1e3:6.3f} ms{memory}", flush=True)
            rows.append(row(suite, name, c, peak, way, value=value or f"host {host*1e3:.3f} ms",
                            ms=round(s*1e3, 4), limits=round(limits, 3), mb=mb and round(mb, 1)))
    return rows

def started(ops, c, way):
    "The functions of the peers that ran once, and why others did not, both by name."
    fns,missing = {},{}
    for name,op in ops.items():
        if c.N>op.upto: continue
        try:
            fns[name] = step(*op.make(c), way=='both')
            fns[name]()
        except Exception as e:
            fns.pop(name, None)     # and its tensors, before the next one
            missing[name] = reason(e)
            print(f"  {way:8} {name}: failed, {missing[name]}", flush=True)
        if not DRY: torch.cuda.empty_cache()
    return fns,missing

def each_alone(c, peak):
    """Rows of the soft window with one of the widths for all heads, the mean over the heads' widths.

    So long they would take if none waited for a wider one."""
    name = 'dynattn, each width alone'
    for way in ('forward','both'):
        took = []
        for w in c.widths().flatten().tolist():
            fn = step(*soft(replace(c, w=str(w))), way=='both')
            fn()
            took.append(seconds(fn, 3))
        s = statistics.fmean(took)
        print(f"  {way:8} {name:58} {s*1e3:10.3f} ms", flush=True)
        yield row('window', name, c, peak, way, ms=round(s*1e3, 4))

# ------------------------------------------------------------------ suites
FIRST = False                               # `--first-hour`
WARM = False                                # `--warm`
CASE = None                                 # `--case`
SKIP = ()                                   # `--skip`
LATER = 'create_block_mask each step','cuDNN','AdaSplash-1','bisect'   # peers that it leaves out

def window_cases():
    if DRY: return [Case(48, B=1, H=2, d=16, w='9'), Case(48, B=1, H=2, d=16, causal=True, w='mixed')]
    if FIRST: return [
        Case(8192, causal=True), Case(8192, causal=True, w='256'), Case(32768, causal=True), Case(8192), Case(32768),
        Case(4096, causal=True), Case(16384, causal=True), Case(8192, d=128, causal=True), Case(8192, w='256'),
        Case(32768, causal=True, w='256')]
    every = product((8192, 32768, 2048, 16384, 4096), ('mixed','256','1024'), (64, 128), (False,True))
    return [Case(N, d=d, causal=causal, w=w) for N,w,d,causal in every]

def entmax_cases():
    if DRY: return [Case(48, B=1, H=2, d=16, w='48', causal=True)]
    def case(N, causal, alpha):
        return Case(N, B=1 if N>8192 else 4, H=16 if N<65536 else 4, causal=causal, w=str(N), alpha=alpha, alike=.9)
    if FIRST: return [case(N, causal, 1.5) for causal in (True,False) for N in (8192, 4096, 16384)]
    every = product((1.5, 1.25), (4096, 16384, 65536, 131072), (True,False))
    return [case(N, causal, alpha) for alpha,N,causal in every]

def done(file):
    "Cases that the file has of this machine, as (suite, fields of `Case.row`)."
    here = [r for r in rows_of(file) if r['machine']==machine() and r['torch']==torch.__version__]
    return {(r['suite'],*(r[name] for name in ('B','H','N','d','w','dtype'))) for r in here}

def main(suites, file, minutes):
    start,name = time.perf_counter(),'CPU, interpreter' if DRY else torch.cuda.get_device_name()
    peak,copy = ceilings()
    print(f"{name}; torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}")
    print(f"measured limits: {peak/1e12:.3g} TFLOP/s ({str(DTYPE).removeprefix('torch.')} product), {copy/1e12:.3g} TB/s (copy)", flush=True)
    for suite in suites:
        for i,c in enumerate(window_cases() if suite=='window' else entmax_cases()):
            if CASE is not None and i!=CASE: continue
            if file and (suite,*(str(x) for x in c.row().values())) in done(file): continue
            if time.perf_counter()-start > 60*minutes: return print("out of time; the same command goes on from here")
            value = None
            if suite=='entmax':
                c,s = sharpened(c, *((0.,1.) if DRY else ()))
                value = f"{s:.2f}"
                print(f"block sparsity {value}")
            rows = compare(suite, softmax_ops if suite=='window' else entmax_ops, c, peak, value)
            if file and not WARM: append(file, rows)
            if suite=='window' and c.w=='mixed' and not WARM:
                rows = [*each_alone(c, peak)]
                if file: append(file, rows)
            if not DRY: torch.cuda.empty_cache()

def read(folder):
    "Put the rows of `first_hour.sh` behind those of benchmarks/results, and print how its steps ended."
    for name in ('gpu.csv','gpu_checks.csv','gpu_tiles.csv'):
        found,known = rows_of(os.path.join(folder, name)),rows_of(name)
        new = [row for row in found if row not in known]
        if new: write(name, new, list(new[0]), 'a')
        print(f"{name}: {len(new)} rows of {len(found)} are new")
    for row in rows_of(os.path.join(folder, 'steps.csv')): print(*(f'{key} {x}' for key,x in row.items()), sep='  ')
    bad = [row for row in rows_of(os.path.join(folder, 'gpu_checks.csv')) if row['holds']!='True']
    for row in bad: print('does not hold:', row['kind'], row['case'], row['dtype'], row['where'])
    sys.exit(bool(bad))

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--suite', choices=('window','entmax'), help="default: both")
    a.add_argument('--minutes', type=float, default=1e9, help="start no case after so many")
    a.add_argument('--to', help="a CSV file to append to (default: benchmarks/results/gpu.csv)")
    a.add_argument('--first-hour', action='store_true', help="few cases and peers")
    a.add_argument('--warm', action='store_true', help="compile what is run, and time nothing")
    a.add_argument('--skip', nargs='*', default=(), help="peers whose names hold one of these words are left out")
    a.add_argument('--case', type=int, help="only this case of the suite, counted from 0")
    a.add_argument('--read', metavar='FOLDER', help="what first_hour.sh found, into benchmarks/results")
    a.add_argument('--dry-run', action='store_true', help="toy sizes on a CPU, to see that everything runs")
    args = a.parse_args()
    FIRST,WARM,CASE,SKIP = args.first_hour,args.warm,args.case,(*args.skip,*(LATER if args.first_hour else ()))
    if args.read: read(os.path.abspath(args.read))
    if not (DRY or torch.cuda.is_available()): sys.exit("benchmarks/gpu.py needs a GPU; --dry-run does not")
    file = os.path.abspath(args.to) if args.to else None if DRY else 'gpu.csv'
    main([args.suite] if args.suite else ['window','entmax'], file, args.minutes)
