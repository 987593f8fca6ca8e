"""Attention in a band on a CPU: time against the limit and against peers, growth, memory, mixed widths.

python benchmarks/cpu.py          a few minutes
python benchmarks/cpu.py --full   all of it
python benchmarks/cpu.py short    sequences of 32 to 1,024 tokens over plain attention
python benchmarks/cpu.py packed query    many texts in one row; one query over a long cache
python benchmarks/cpu.py --upto 256      no text is longer: to see that everything runs
python benchmarks/cpu.py zeros    windows and alpha over plain attention, one thread and two, scores of two sizes
                                  (ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2: without AVX-512)
Every peer is checked against the dense attention first; one that computes something else is not timed.
Rows are appended to benchmarks/results/cpu.csv."""
import argparse, os, statistics, subprocess, sys, time
from dataclasses import dataclass, replace
from unittest import mock
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..')
sys.path.insert(0, ROOT)
import torch, torch.nn.functional as F
from dynattn.engine.operator import banded_attention
from dynattn.engine.native import core
from dynattn.engine.dense import dense_attention
from dynattn.engine.ops import attention
from dynattn.padding import PaddingMask
from dynattn.window import Window
from harness import CLOCK, Registry, append, count_cpu_time, in_turn, own_process, seconds

band = Registry()
LONGEST = [2**62]   # `--upto`

def within(*every):
    "Those that are asked for; one of them at least, cut."
    return [n for n in every if n<=LONGEST[0]] or [LONGEST[0]]

def band_flops(n, width, d, heads, backward):
    "Operations that attention to `width` keys of each of `n` queries cannot do without; both passes are 3.5 times one."
    return 4*heads*n*width*d*(3.5 if backward else 1)

SOFT = 'dynattn.banded','FlexAttention, compiled, soft window'  # the others have a hard one

@dataclass(frozen=True)
class Case:
    N:int
    w:int
    B:int = 1
    H:int = 8
    d:int = 64
    backward:bool = False
    @property
    def flops(self): return band_flops(self.N, 2*self.w+1, self.d, self.B*self.H, self.backward)
    def row(self): return dict(B=self.B, H=self.H, N=self.N, d=self.d, w=self.w, dtype='float32', **{'pass':'both' if self.backward else 'forward'})
    def tensors(self):
        g = torch.Generator().manual_seed(0)
        return [torch.randn(self.B, self.H, self.N, self.d, generator=g).requires_grad_(self.backward) for _ in range(3)]

def step(f, leaves, backward):
    "`f()` alone without a graph, or with the gradients of `leaves`."
    if not backward: return torch.no_grad()(f)
    go = torch.ones_like(f())
    return lambda: torch.autograd.grad(f(), leaves, go)

# ------------------------------------------------------------------ who takes part
@band('dynattn.banded')
def ours(c):
    q,k,v = c.tensors()
    sigma = torch.full((c.H,), c.w-.5, requires_grad=c.backward)  # half-width w, and it learns
    return step(lambda: banded_attention(q, k, v, window=Window.default(sigma)), (q,k,v,sigma), c.backward)

@band('dynattn.banded, hard window')
def hard(c):
    q,k,v = c.tensors()
    return step(lambda: banded_attention(q, k, v, window=c.w), (q,k,v), c.backward)

@band('Longformer sliding chunks')
def longformer(c):
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention, LongformerConfig
    core = LongformerSelfAttention(LongformerConfig(hidden_size=c.H*c.d, num_attention_heads=c.H, attention_window=[2*c.w], num_hidden_layers=1), 0)
    q,k,v = (x.detach().transpose(1, 2).contiguous().requires_grad_(c.backward) for x in c.tensors())  # [B,N,H,d], its own layout
    def f():
        p = core._sliding_chunks_query_key_matmul(q*c.d**-.5, k, c.w).softmax(-1)
        return core._sliding_chunks_matmul_attn_probs_value(p, v, c.w)
    g = step(f, (q,k,v), c.backward)
    return g if c.backward else lambda: g().transpose(1, 2)

@band('local-attention')
def local(c):
    from local_attention import LocalAttention
    core = LocalAttention(c.w, exact_windowsize=True, use_rotary_pos_emb=False)
    q,k,v = c.tensors()
    return step(lambda: core(q, k, v), (q,k,v), c.backward)

@band('FlexAttention, compiled', backward=False)
def flex(c):
    from torch.nn.attention.flex_attention import flex_attention, create_block_mask
    mask = create_block_mask(lambda b,h,i,j: (i-j).abs()<=c.w, None, None, c.N, c.N, device='cpu')  # made beforehand
    torch.compiler.reset()  # a graph for each shape: its dynamic one does not compile here
    f,(q,k,v) = torch.compile(flex_attention, dynamic=False),c.tensors()
    return torch.no_grad()(lambda: f(q, k, v, block_mask=mask))

@band('FlexAttention, compiled, soft window', backward=False)
def flex_soft(c):
    from torch.nn.attention.flex_attention import flex_attention, create_block_mask
    log_m = Window.default(torch.full((c.H,), c.w-.5)).log_mask(torch.arange(-c.w, c.w+1)).view(c.H, -1)  # [H,2w+1]
    mask = create_block_mask(lambda b,h,i,j: (i-j).abs()<=c.w, None, None, c.N, c.N, device='cpu')  # made beforehand
    torch.compiler.reset()
    f,(q,k,v) = torch.compile(flex_attention, dynamic=False),c.tensors()
    def score(s, b, h, i, j): return s+log_m[h,(j-i+c.w).clamp(0, 2*c.w)]
    return torch.no_grad()(lambda: f(q, k, v, score_mod=score, block_mask=mask))

def unfolded(q, k, v, w):
    "Views of padded keys and values, and PyTorch's attention for each block."
    (b,h,n,d),c = q.shape,64
    k,v = (F.pad(x, (0,0,w,w)).unfold(2, c+2*w, c).mT for x in (k,v))  # [B,H,n/c,c+2w,d]
    i = torch.arange(n).view(n//c, c, 1); j = torch.arange(n//c)[:,None,None]*c+torch.arange(c+2*w)-w
    keep = ((i-j).abs()<=w) & (j>=0) & (j<n)
    return F.scaled_dot_product_attention(q.reshape(b, h, n//c, c, d).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), keep).view(b, h, n, d)

@band('unfold + SDPA')
def views(c):
    q,k,v = c.tensors()
    return step(lambda: unfolded(q, k, v, c.w), (q,k,v), c.backward)

@band('SDPA, no window', upto=4096)
def sdpa(c):
    q,k,v = c.tensors()
    return step(lambda: F.scaled_dot_product_attention(q, k, v), (q,k,v), c.backward)

@band('SDPA, band mask', upto=4096)
def masked(c):
    q,k,v = c.tensors()
    i = torch.arange(c.N); see = (i[:,None]-i).abs()<=c.w
    return step(lambda: F.scaled_dot_product_attention(q, k, v, see), (q,k,v), c.backward)

# ------------------------------------------------------------------ checks
def check(name, op):
    "Raises where a peer disagrees with the dense attention at a small shape."
    for backward in (False, op.backward):
        c = Case(256, 32, H=2, d=16, backward=backward)
        q,k,v = c.tensors()
        window = Window.default(torch.full((2,), 31.5, requires_grad=True)) if name in SOFT else None if name=='SDPA, no window' else 32
        ref = dense_attention(*(x.double() for x in (q,k,v)), window=window)
        got = op.make(c)()
        if not backward: torch.testing.assert_close(got.double(), ref.detach(), rtol=1e-4, atol=1e-5); continue
        leaves = (q,k,v) if len(got)==3 else (q,k,v,window.sigma)
        want = torch.autograd.grad(ref.sum(), leaves)
        for a,b in zip(got, want):
            a = a.transpose(1, 2) if a.shape!=b.shape else a
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-4)

def able(names=None):
    res = {}
    for name,op in band.ops.items():
        if names and name not in names: continue
        try: check(name, op); res[name] = op
        except ImportError as e: print(f"{name}: not installed ({e.name})")
    return res

# ------------------------------------------------------------------ suites
def compare(full):
    "Peers in turn."
    ops,rows = able(),[]
    alone = CLOCK[0] is time.perf_counter  # else: others use the machine too
    for N in within(4096) if not alone else within(2048, 8192, 65536) if full else within(2048, 8192):
        for w in (64, 256, 512):
            if 2*w>N: continue
            for backward in (False, True):
                c = Case(N, w, H=8 if alone else 2, backward=backward)
                big = N>8192
                fns = {n:op.make(c) for n,op in ops.items() if N<=op.upto and (alone or not n.startswith('SDPA')) and (op.backward or not backward) and not (big and n not in ('dynattn.banded','local-attention','unfold + SDPA'))}
                for name,(s,limits,p) in in_turn(fns, c.flops, rounds=9 if alone else 3, budget=40.).items():
                    rows.append(dict(suite='compare', op=name, ms=round(s*1e3, 3), limits=round(limits, 3), peak_gflops=round(p/1e9, 1), **c.row()))
                    print(f"N={N} w={w} {'both' if backward else 'forward':8} {name:37} {s*1e3:9.1f} ms {limits:7.2f} limits", flush=True)
                append('cpu.csv', rows)
                rows.clear()

def mixed(full):
    "Eight heads of widths 16 to 2048 in one call, and each alone."
    widths = torch.tensor([16.,32,64,128,256,512,1024,2048])-.5
    for backward in (False, True):
        c = Case(*within(8192), 0, backward=backward)
        q,k,v = c.tensors()
        def fn(heads):
            x,s = [t[:,heads].detach().clone().requires_grad_(backward) for t in (q,k,v)],widths[heads].clone().requires_grad_(backward)
            return step(lambda: banded_attention(*x, window=Window.default(s)), (*x,s), backward)
        fns = {'together': fn(list(range(8))), **{str(i): fn([i]) for i in range(8)}}
        flops = sum(band_flops(c.N, int(2*w+2), c.d, 1, backward) for w in widths.tolist())
        t = in_turn(fns, flops)
        ratio = t['together'][0]/sum(s for n,(s,*_) in t.items() if n!='together')
        print(f"mixed widths, {'both' if backward else 'forward'}: together {t['together'][0]*1e3:.0f} ms, {t['together'][1]:.2f} limits, {ratio:.2f} of the sum of each alone", flush=True)
        append('cpu.csv', [dict(suite='mixed', op='dynattn.banded', ms=round(t['together'][0]*1e3, 3), limits=round(t['together'][1], 3), value=round(ratio, 4), **c.row())])

def exponent(ns, ts):
    "Slope of log t over log n, by least squares."
    x,y = torch.tensor(ns).double().log(),torch.tensor(ts).double().log()
    return (((x-x.mean())*(y-y.mean())).sum()/((x-x.mean())**2).sum()).item()

def growth(full):
    "Time as N grows at w = 256."
    for backward in (False, True):
        top = (20 if full else 18) if not backward else (18 if full else 16)
        if CLOCK[0] is not time.perf_counter: top = 16 if not backward else 15
        ns,ts,rows = within(*(2**i for i in range(12, top+1))),[],[]
        for N in ns:
            c = Case(N, 256, H=2, backward=backward)
            s,limits,p = in_turn({'x': ours(c)}, c.flops, rounds=3)['x']
            ts.append(limits)  # in limits of one N, so that the machine's mood cancels
            rows.append(dict(suite='growth', op='dynattn.banded', ms=round(s*1e3, 3), limits=round(limits, 3), peak_gflops=round(p/1e9, 1), **c.row()))
            print(f"N={N} {'both' if backward else 'forward'} {s*1e3:.0f} ms {limits:.2f} limits", flush=True)
        if len(ns)>1:
            e = exponent(ns, [t*n for t,n in zip(ts, ns)])
            rows.append(dict(suite='growth exponent, time', op='dynattn.banded', value=round(e, 4), **replace(c, N=0).row()))
            print(f"time grows as N^{e:.3f}", flush=True)
        append('cpu.csv', rows)

def training(full):
    "A batch as one trains on: 8 sequences of 100 to 1024 tokens, a width for each head and sequence; with and without dropout."
    N, = within(1024)
    c = Case(N, 64, B=8, backward=True)
    q,k,v = c.tensors()
    g = torch.Generator().manual_seed(1)
    pad = PaddingMask.from_lengths(torch.randint(100*N//1024, N+1, (8,), generator=g), N)
    sigma = (16+100*torch.rand(8, 8, generator=g)).requires_grad_()
    fns = {'dynattn.attention': step(lambda: attention(q, k, v, padding=pad, window=Window.default(sigma)), (q,k,v,sigma), True),
           'SDPA, padding only': step(lambda: F.scaled_dot_product_attention(q, k, v, pad.sdpa()), (q,k,v), True),
           'dynattn.attention, dropout': step(lambda: attention(q, k, v, padding=pad, window=Window.default(sigma), dropout_p=.1), (q,k,v,sigma), True),
           'SDPA, padding only, dropout': step(lambda: F.scaled_dot_product_attention(q, k, v, pad.sdpa(), .1), (q,k,v), True),
           'dense_attention': step(lambda: dense_attention(q, k, v, padding=pad, window=Window.default(sigma)), (q,k,v,sigma), True)}
    rows = []
    for name,(s,limits,p) in in_turn(fns, c.flops, rounds=3).items():
        print(f"training step, {name:28} {s*1e3:8.1f} ms")
        rows.append(dict(suite='training', op=name, ms=round(s*1e3, 3), peak_gflops=round(p/1e9, 1), **c.row()))
    append('cpu.csv', rows)

# ------------------------------------------------------------------ memory: a fresh process each
def resident(name, N, w, backward):
    "Prints how far the peak resident size (MB) rises above that with the inputs made, after a small run has loaded everything."
    import resource
    H = 8 if N<=65536 else 2
    op = band.ops[name]
    op.make(Case(1024, min(w, 256), H=H, backward=backward and op.backward))()
    c = Case(N, w, H=H, backward=backward)
    q = c.tensors()
    def rss(): # that of this program; ru_maxrss counts the parent's too, from before the program began
        try: return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))/1024
        except (OSError, StopIteration): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024
    before = rss(); del q
    op.make(c)()
    print(f"MB {rss()-before:.1f}")

def memory(full):
    names = ['dynattn.banded','unfold + SDPA','local-attention','Longformer sliding chunks']
    rows,(N,) = [],within(65536 if full else 16384)
    for backward in (False, True):
        ours_too = [('dynattn.banded', n) for n in within(4096, 16384, 65536, *((262144,) if full else ()))]
        mb = {}
        for name,n in dict.fromkeys([(x, N) for x in names]+ours_too):
            r = subprocess.run([sys.executable, __file__, '--resident', name, str(n), '256', str(int(backward))], capture_output=True, text=True)
            if r.returncode: print(f"memory {name} N={n}: failed, {r.stderr.strip().splitlines()[-1:] or r.returncode}"); continue
            mb[name,n] = float(r.stdout.split('MB ')[1])
            H = 8 if n<=65536 else 2
            rows.append(dict(suite='memory', op=name, mb=mb[name,n], **Case(n, 256, H=H, backward=backward).row()))
            print(f"memory, {'both' if backward else 'forward':8} {name:28} N={n:7} H={H}: {mb[name,n]:8.1f} MB beyond the inputs", flush=True)
        some = [(n,x) for (name,n),x in mb.items() if name=='dynattn.banded' and n in (16384,65536)]
        if len(some)==2:
            e = exponent(*zip(*some)); print(f"memory grows as N^{e:.3f}")
            rows.append(dict(suite='growth exponent, memory', op='dynattn.banded', value=round(e, 4), **Case(0, 256, backward=backward).row()))
    append('cpu.csv', rows)

# ------------------------------------------------------------------ short sequences: times over plain attention
SHORT = (32, 64, 128, 256, 512, 1024)
TOKENS = 4096   # of a batch

def medians(fns, rounds=7, budget=5.):
    "name -> median seconds; each runs once a round."
    for fn in fns.values(): fn()
    runs,start = {name:[] for name in fns},time.perf_counter()
    for r in range(rounds):
        for name,fn in fns.items(): runs[name].append(seconds(fn))
        if r>=2 and time.perf_counter()-start>budget: break
    return {name: statistics.median(t) for name,t in runs.items()}

def soft(c, reach=None):
    "`attention` under a soft window whose sigma [B,H] learns."
    q,k,v = c.tensors()
    sigma = torch.full((c.B,c.H), (c.w if reach is None else reach)-.5, requires_grad=c.backward)
    return step(lambda: attention(q, k, v, window=Window.default(sigma)), (q,k,v,sigma), c.backward)

def sharp(c, reach=None):
    "`attention` with an alpha [H] that learns, without a window, or with one whose sigma learns."
    q,k,v = c.tensors()
    alpha = torch.full((c.H,), 1.5, requires_grad=c.backward)
    if reach is None: return step(lambda: attention(q, k, v, alpha=alpha), (q,k,v,alpha), c.backward)
    sigma = torch.full((c.B,c.H), reach-.5, requires_grad=c.backward)
    return step(lambda: attention(q, k, v, alpha=alpha, window=Window.default(sigma)), (q,k,v,alpha,sigma), c.backward)

def looped(c):
    "`soft` by the plain loop."
    f = soft(c)
    def g():
        with mock.patch.object(core, 'library', lambda: None): return f()
    return g

def entmax_package(c):
    "entmax15 of the entmax package inside plain attention; its alpha is fixed."
    from entmax import entmax15
    q,k,v = c.tensors()
    return step(lambda: entmax15(q@k.mT*c.d**-.5, dim=-1)@v, (q,k,v), c.backward)

def plain(c):
    q,k,v = c.tensors()
    return step(lambda: F.scaled_dot_product_attention(q, k, v), (q,k,v), c.backward)

def check_short():
    "Raises where one of them computes something else than the dense attention, gradients included."
    for backward in (False, True):
        c = Case(64, 8, B=2, H=2, d=16, backward=backward)
        q,k,v = c.tensors()
        for make,options in ((soft, dict(window=Window.default(torch.full((2,2), 7.5, requires_grad=True)))),
                             (sharp, dict(alpha=torch.full((2,), 1.5, requires_grad=True))), (entmax_package, dict(alpha=1.5)), (plain, {})):
            double = {name: x.detach().double().requires_grad_() if isinstance(x, torch.Tensor) else x for name,x in options.items()}
            ref = dense_attention(*(x.double() for x in (q,k,v)), **double)
            got = make(c)()
            if not backward: torch.testing.assert_close(got.double(), ref.detach(), rtol=1e-4, atol=1e-5); continue
            learned = [x.sigma if isinstance(x, Window) else x for x in double.values() if not isinstance(x, float)]
            for mine,theirs in zip(got, torch.autograd.grad(ref.sum(), (q,k,v,*learned))):
                torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-3, atol=1e-4)

def short_row(op, c, s, value, suite='short'):
    print(f"{suite}: N={c.N:5} B={c.B:3} H={c.H:2} w={c.w:4} {c.row()['pass']:8} {op:45} {s*1e3:9.2f} ms  {value:8.3f}", flush=True)
    return dict(suite=suite, op=op, ms=round(s*1e3, 4), value=round(value, 4), **c.row())

def short_table():
    "Windows and alpha over plain attention at 4,096 tokens."
    rows = []
    for H,d in ((8, 64), (12, 32)):
        for N in within(*SHORT):
            for backward in (False, True):
                def case(w): return Case(N, w, B=TOKENS//N, H=H, d=d, backward=backward)
                fns = {('SDPA, no window', 0): plain(case(0)),
                       ('dynattn.attention, soft window', N//8): soft(case(N//8)),
                       ('dynattn.attention, window over everything', N): soft(case(N)),
                       ('dynattn.attention, alpha', 0): sharp(case(0)),
                       ('dynattn.attention, alpha and window', N//8): sharp(case(0), N//8),
                       ('dynattn.attention, soft window, plain loop', N//8): looped(case(N//8)),
                       ('entmax15 of the entmax package', 0): entmax_package(case(0))}
                t = medians(fns)
                base = t['SDPA, no window', 0]
                rows += [short_row(op, case(w), s, s/base) for (op,w),s in t.items()]
    return rows

def short_peers(full):
    "The grid of lengths and widths, with those who have a window; theirs are hard. `value` is the time over ours."
    ops,rows = able({'local-attention','unfold + SDPA','FlexAttention, compiled'}),[]
    for N in within(*SHORT, 2048, 4096, 8192):
        for w in (16, 64, 256):
            if w>=N: continue
            for backward in (False, True):
                c = Case(N, w, B=max(TOKENS//N, 1), backward=backward)
                fns = {'dynattn.attention, soft window': soft(c)}
                if N<=4096: fns['SDPA, no window'] = plain(c)
                for name,op in ops.items():
                    compiled = name.startswith('Flex')
                    fits = N%w==0 if name=='local-attention' else N%64==0 or compiled
                    if fits and (op.backward or not backward) and (not compiled or full or N in (256, 1024, 4096)): fns[name] = op.make(c)
                t = medians(fns, rounds=5, budget=3.)
                ours = t['dynattn.attention, soft window']
                rows += [short_row(op, c, s, s/ours, 'short peers') for op,s in t.items()]
    return rows

def short_batches():
    "Eight sequences of 512 tokens over one of 4,096; real lengths over none; bfloat16 over SDPA's."
    rows = []
    for w in (16, 64):
        for backward in (False, True):
            eight,one = (Case(N, w, B=TOKENS//N, backward=backward) for N in (512, 4096))
            t = medians({'eight': soft(eight), 'one': soft(one)})
            rows.append(short_row('dynattn.attention, eight of 512 over one of 4096', eight, t['eight'], t['eight']/t['one'], 'short batches'))
    for N in within(64, 256, 1024):
        for backward in (False, True):
            c = Case(N, N//8, B=TOKENS//N, backward=backward)
            q,k,v = c.tensors()
            lengths = torch.randint(N//8, N+1, (c.B,), generator=torch.Generator().manual_seed(1))
            pad = PaddingMask.from_lengths(lengths, N)
            sigma = torch.full((c.B,c.H), c.w-.5, requires_grad=backward)
            padded = step(lambda: attention(q, k, v, padding=pad, window=Window.default(sigma)), (q,k,v,sigma), backward)
            t = medians({'padded': padded, 'whole': soft(c)})
            rows.append(short_row('dynattn.attention, real lengths over full', c, t['padded'], t['padded']/t['whole'], 'short batches'))
            half = [x.detach().bfloat16().requires_grad_(backward) for x in (q,k,v)]
            ours = step(lambda: attention(*half, window=Window.default(sigma)), (*half,sigma), backward)
            t = medians({'ours': ours, 'SDPA': step(lambda: F.scaled_dot_product_attention(*half), half, backward)})
            row = short_row('dynattn.attention, bfloat16 over SDPA in bfloat16', c, t['ours'], t['ours']/t['SDPA'], 'short batches')
            rows.append(dict(row, dtype='bfloat16'))
    return rows

def short_calls():
    "Microseconds of a call on [1,8,16,64], one thread, forward; seconds of the first call in a fresh process."
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    c,rows = Case(16, 4),[]
    q,k,v = c.tensors()
    window,alpha = Window.default(torch.full((1,8), 3.5)),torch.full((8,), 1.5)
    calls = {'SDPA, no window': lambda: F.scaled_dot_product_attention(q, k, v), 'dynattn.attention, soft window': lambda: attention(q, k, v, window=window),
             'dynattn.attention, hard window': lambda: attention(q, k, v, window=4), 'dynattn.attention, alpha': lambda: attention(q, k, v, alpha=alpha)}
    def many(f):
        def g():
            with torch.no_grad():
                for _ in range(200): f()
        return g
    for op,s in medians({op:many(f) for op,f in calls.items()}, rounds=15).items(): rows.append(short_row(op, c, s/200, s/200*1e6, 'short calls'))
    torch.set_num_threads(threads)
    code = ("import time, torch; from dynattn.engine.ops import attention; from dynattn.window import Window; x = torch.randn(3, 1, 8, 16, 64)\n"
            "s = torch.full((1,8), 3.5, requires_grad=True); t = time.perf_counter()\n"
            "attention(*x, window=Window.default(s)).sum().backward(); print(time.perf_counter()-t)")
    times = [float(own_process('-c', code)) for _ in range(3)]
    rows.append(short_row('dynattn.attention, first call of a process', replace(c, backward=True), min(times), min(times), 'short calls'))
    return rows

def short(full):
    "Sequences of 32 to 1,024 tokens over plain attention, peers, batches, single calls; about ten minutes."
    check_short()
    for rows in (short_table, short_batches, short_calls, lambda: short_peers(full)): append('cpu.csv', rows())

# ------------------------------------------------------------------ packed rows, and single queries
def packed(full):
    "Sixteen texts of uneven length in one row of 8,192 tokens, over sixteen of 512 as a batch (`value`)."
    g,rows = torch.Generator().manual_seed(2),[]
    N, = within(8192)
    ends = torch.cat([torch.randperm(N-1, generator=g)[:15].sort().values+1, torch.tensor([N])])
    ids = torch.searchsorted(ends, torch.arange(N), right=True)[None]
    for w in (16, 64):
        for backward in (False, True):
            one,batch = Case(N, w, backward=backward),Case(N//16, w, B=16, backward=backward)
            for kind in ('hard', 'soft'):
                def run(c, **options):
                    q,k,v = c.tensors()
                    sigma = torch.full((c.H,), w-.5, requires_grad=backward)
                    window = Window.default(sigma) if kind=='soft' else w
                    return step(lambda: attention(q, k, v, window=window, **options), (q,k,v,*([sigma] if kind=='soft' else [])), backward)
                t = medians({'packed': run(one, segments=ids), 'batch': run(batch), 'one text': run(one)}, rounds=9)
                for name in ('packed', 'one text'):
                    rows.append(short_row(f'dynattn.attention, {kind} window, {name}', one, t[name], t[name]/t['batch'], 'packed'))
    append('cpu.csv', rows)

def query(full):
    "One query over a cache of 2k to 128k keys, w 64, one thread, over SDPA on the 65 keys in reach (`value`)."
    threads,rows = torch.get_num_threads(),[]
    torch.set_num_threads(1)
    sigma = torch.full((8,), 63.5)
    kinds = {'hard window': dict(window=64), 'soft window': dict(window=Window.default(sigma)),
             'four widths': dict(window=Window.default(torch.tensor([7.5,31.5,63.5,255.5]*2))),
             'alpha': dict(window=64, alpha=1.5), 'leading tokens': dict(window=64, n_global=4), 'sink': dict(window=64, sink=torch.zeros(8))}
    for M in within(2048, 8192, 32768, 131072):
        c = Case(M, 64)
        q,k,v = c.tensors()
        q,near = q[:,:,-1:],[x[:,:,-65:].clone() for x in (k, v)]
        def many(f):
            def g():
                with torch.no_grad():
                    for _ in range(50): f()
            return g
        fns = {kind: many(lambda o=o: attention(q, k, v, is_causal=True, q_offset=M-1, **o)) for kind,o in kinds.items()}
        t = medians({'SDPA': many(lambda: F.scaled_dot_product_attention(q, *near)), **fns}, rounds=15)
        for kind in kinds: rows.append(short_row(f'dynattn.attention, one query, {kind}', c, t[kind]/50, t[kind]/t['SDPA'], 'query'))
    torch.set_num_threads(threads)
    append('cpu.csv', rows)

def busy(full):
    """Beside as many processes as the machine has cores, which multiply matrices: `value` is the time over that of a
    quiet machine, ours and SDPA's, both passes."""
    rows,code = [],"import torch\ntorch.set_num_threads(1)\nx = torch.randn(500, 500)\nwhile True: x@x"
    cases = [Case(N, N//8, B=TOKENS//N, backward=True) for N in within(128, 512, 4096)]
    fns = {(op,c.N): f(c) for c in cases for op,f in (('SDPA, no window', plain), ('dynattn.attention, soft window', soft))}
    quiet = medians(fns)
    others = [subprocess.Popen([sys.executable, '-c', code]) for _ in range(os.cpu_count())]
    try:
        time.sleep(5)
        loud = medians(fns, rounds=9, budget=40.)
    finally:
        for other in others: other.kill()
    for c in cases:
        for op in ('SDPA, no window', 'dynattn.attention, soft window'):
            rows.append(short_row(op, c, loud[op,c.N], loud[op,c.N]/quiet[op,c.N], 'busy'))
    append('cpu.csv', rows)

# ------------------------------------------------------------------ zeros: alpha over plain attention
def rows_of_heads(c, std):
    "Queries, keys and values that lie as [B,N,H,d], whose scores have this standard deviation."
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(c.B, c.N, c.H, c.d, generator=g).transpose(1, 2) for _ in range(3)]
    return [t.mul_(by).requires_grad_(c.backward) for t,by in zip(x, (std,1,1))]

def learned_call(c, std, w, has_alpha):
    "`attention` with a sigma that learns for half-width `w`, and an alpha that learns; each only if asked for."
    x = rows_of_heads(c, std)
    sigma = torch.full((c.B,c.H), w-.5, requires_grad=c.backward) if w else None
    alpha = torch.full((c.H,), 1.5, requires_grad=c.backward) if has_alpha else None
    window = None if sigma is None else Window.default(sigma)
    return step(lambda: attention(*x, window=window, alpha=alpha), (*x,*(t for t in (sigma,alpha) if t is not None)), c.backward)

def zeros(full):
    "Time over plain attention without a window: windows, alpha and both, by the sharpness of the scores; `value`."
    check_short()
    threads,rows = torch.get_num_threads(),[]
    for number in (1, 2):
        torch.set_num_threads(number)
        for N in within(64, 256, 1024, 4096):
            for std in (1, 2):
                for backward in (False, True):
                    c,x = Case(N, 0, B=TOKENS//N, backward=backward),rows_of_heads(Case(N, 0, B=TOKENS//N, backward=backward), std)
                    kinds = {'soft window': (N//8,False), 'window over everything': (N,False), 'alpha': (0,True), 'alpha and window': (N//8,True)}
                    if std>1: kinds = {kind: y for kind,y in kinds.items() if y[1]}
                    fns = {kind: learned_call(c, std, *y) for kind,y in kinds.items()}
                    t = medians({'SDPA': step(lambda: F.scaled_dot_product_attention(*x), x, backward), **fns}, rounds=9 if full else 3, budget=4.)
                    for kind,(w,_) in kinds.items():
                        rows.append(short_row(f'dynattn.attention, {kind}, scores of std {std}', replace(c, w=w), t[kind], t[kind]/t['SDPA'], 'zeros'))
        append('cpu.csv', rows); rows = []
    torch.set_num_threads(threads)

suites = dict(short=short, packed=packed, query=query, busy=busy, zeros=zeros, compare=compare, mixed=mixed, growth=growth, training=training, memory=memory)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('suites', nargs='*', metavar='SUITE', help=f"of {', '.join(suites)} (default: all)")
    a.add_argument('--full', action='store_true', help="larger N, and all peers")
    a.add_argument('--cpu-time', action='store_true', help="one thread and processor time, smaller shapes: for a machine that is busy")
    a.add_argument('--upto', type=int, help="no text is longer [no limit]; below 512 some peers cannot run")
    a.add_argument('--resident', nargs=4, help=argparse.SUPPRESS)
    args = a.parse_args()
    unknown = [s for s in args.suites if s not in suites]
    if unknown: a.error(f"SUITE: expected some of {', '.join(suites)}, got {', '.join(unknown)}")
    if args.upto: LONGEST[0] = args.upto
    if args.cpu_time: count_cpu_time()
    if args.resident: name,n,w,b = args.resident; resident(name, int(n), int(w), b=='1')
    else:
        for s in args.suites or suites: suites[s](args.full)
