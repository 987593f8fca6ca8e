"""Plain calls: the core's time divided by PyTorch's, in one process, in turn; and chapter 36's table, made of it.

    python benchmarks/plain.py               # appends rows for this machine to results/plain.csv; ten minutes or more
    python benchmarks/plain.py --threads 2   # the same with two threads, by the clock
    python benchmarks/plain.py --one         # only calls of one query, as decoding has them
    python benchmarks/plain.py --mask 'padding half'  # only calls with this mask
    python benchmarks/plain.py --dtype bfloat16       # only this dtype
    python benchmarks/plain.py --quick       # a few shapes in half a minute; prints, writes nothing
    python benchmarks/plain.py --store       # writes the table of nbs/engine/36_faster.ipynb; then nbdev_export

A machine that others use is measured by the time of its processor (one thread, the default), else by the clock.
`attention` is dynattn's function with impl='banded' and with impl='sdpa'. `everywhere` is PyTorch's own function
with `dynattn.everywhere` on and off, where every call is served. A window of ±64 tokens, padding of a quarter, of
half of the keys (a square of the mask per text, as transformers makes it) and a bias per head come as masks.
"""
import argparse, json, statistics, time
from itertools import product
from pathlib import Path
from unittest import mock
import torch, torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as sdpa
from dynattn import attention, everywhere
from dynattn.engine import faster
from harness import CLOCK, RESULTS, append, count_cpu_time, rows_of

FILE,CHAPTER,CELL = 'plain.csv',Path(__file__).parents[1]/'nbs/engine/36_faster.ipynb','e5a30001'
FIELDS = 'date machine torch commit set way dtype mask gradient B H N M d pytorch_us ratio Hkv'.split()
SHAPES = [(1,12,n,n,64) for n in (16,32,64,128,512,2048)]
SHAPES += [(8,12,32,32,64), (8,12,128,128,64), (1,1,128,128,8), (1,1,512,512,64)]
SHAPES += [(1,12,512,512,d) for d in (32,80,128,256)] + [(1,4,512,512,8), (1,4,512,512,33)]
SHAPES += [(1,8,n,m,64) for n in (1,4,8,16) for m in (512,4096)] + [(1,32,1,4096,128), (8,8,1,512,64)]
SHAPES += [(1,h,1,m,d,kv) for h,kv,d in ((9,3,64), (14,2,64), (16,8,64), (32,8,128)) for m in (128,512,2048,8192)] # kv: key heads
QUICK = [(1,12,n,n,64) for n in (32,128,512)] + [(1,8,1,4096,64)]
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64

def clock(fn, budget):
    "Seconds of one call, over as many as fit in a budget."
    start = CLOCK[0]()
    fn()
    times = max(1, int(budget/max(CLOCK[0]()-start, 1e-5)))
    start = CLOCK[0]()
    for _ in range(times): fn()
    return (CLOCK[0]()-start)/times

def ratio(mine, theirs, rounds, budget=.02):
    "(core / PyTorch, PyTorch's microseconds): the least of some rounds each, in turn; peers are (switch, call)."
    least = {mine: [], theirs: []}
    for _ in range(rounds):
        for (switch,call),seen in least.items():
            switch()
            seen.append(clock(call, budget))
    return round(min(least[mine])/min(least[theirs]), 3), round(min(least[theirs])*1e6, 1)

def masks(B, H, N, M, dtype):
    "Keyword arguments of the kinds of calls that are measured for a shape, by name."
    found = {'': {}}
    if N!=M: return found
    found['causal'] = dict(is_causal=True)
    near = (torch.arange(N)[:,None]-torch.arange(M)).abs()<=64
    if N>=32: found['padding half'] = dict(attn_mask=half_padded(B, N, M))
    if dtype==torch.bfloat16 and N>=512: found['window 64'] = dict(attn_mask=near)
    if N<128 or dtype!=torch.float32: return found
    keep = torch.ones(B, 1, 1, M, dtype=torch.bool)
    keep[...,M*3//4:] = False
    bias = torch.randn(1, H, N, M)
    masks = {'padding': keep, 'window 64': near, 'bias': bias}
    return found | {name: dict(attn_mask=mask) for name,mask in masks.items()}

def half_padded(B, N, M):
    "[B,1,N,M], true for half of all keys; texts of a batch differ in length."
    lengths = torch.linspace(0, M, B+2)[1:-1].round()
    return (torch.arange(M)<lengths[:,None])[:,None,None].repeat(1, 1, N, 1)

def peers(way, q, k, v, options, learns, dout):
    "The core's call and PyTorch's, each with the switch that is thrown before."
    if way=='attention':
        def by(impl): return lambda: attention(q, k, v, **options, impl=impl)
        calls = [by('banded'), by('sdpa')]
        switches = everywhere.off,everywhere.off
    else:
        def usual(): return sdpa(q, k, v, **options, enable_gqa=q.shape[1]!=k.shape[1])
        calls = [usual, usual]
        switches = everywhere.on,everywhere.off
    def with_gradients(call): return lambda: torch.autograd.grad(call(), (q, k, v), dout)
    return list(zip(switches, map(with_gradients, calls) if learns else calls))

def check(peers, tolerance):
    "Both give the same, before either is timed."
    found = []
    for switch,call in peers:
        switch()
        result = call()
        found.append(result if isinstance(result, tuple) else (result,))
    for a,b in zip(*found): torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)

def measure(shapes, dtypes, rounds, only=None):
    "Rows of all ways, kinds and shapes; each call is checked before it is timed."
    for (B,H,N,M,d,*shared),dtype in product(shapes, dtypes):
        torch.manual_seed(0)
        Hkv = shared[0] if shared else H
        q,k,v = (torch.randn(B, n, h, d, dtype=dtype).transpose(1, 2) for h,n in ((H,N),(Hkv,M),(Hkv,M)))
        kinds = masks(B, H, N, M, dtype)
        for way,(mask,options) in product(('attention','everywhere'), kinds.items()):
            if way=='attention' and 'attn_mask' in options or only not in (None, mask): continue
            for learns in (False,True):
                if learns and mask not in ('','causal','padding half'): continue
                leaves = [x.detach().requires_grad_(learns) for x in (q,k,v)]
                both = peers(way, *leaves, options, learns, torch.randn_like(q))
                check(both, .05 if dtype.itemsize==2 else 1e-4)
                times,us = ratio(*both, rounds=2 if B*H*N*M>=2**24 else rounds)
                row = dict(set=faster.instruction_set(dtype), way=way, dtype=str(dtype)[6:], mask=mask,
                           gradient=int(learns), B=B, H=H, N=N, M=M, d=d, pytorch_us=us, ratio=times, Hkv=Hkv)
                kind = f"{mask or 'plain'}{' with gradient' if learns else ''}"
                print(f"{way:10} {row['dtype']:8} {kind:20} {(B,H,N,M,d,*shared)!s:24} {us:9.0f} us  {times:.2f}", flush=True)
                yield row
        everywhere.off()

def table(rows):
    "Kind -> least pairs from which no row of the kind has a ratio above one; kinds without any are left out."
    kinds = {}
    for row in rows:
        B,H,N,M = (int(row[name]) for name in 'BHNM')
        is_narrow = row['mask']=='window 64' and 4*(129*N-64*65)<=N*M
        hides = {'': False, 'causal': True, 'padding': 'padded', 'padding half': 'padded'}.get(row['mask'], 'narrow' if is_narrow else None)
        if hides is None: continue
        kind = row['set'],row['dtype'],hides,row['gradient']=='1',faster.kind_of_queries(N, H//int(row['Hkv']))
        kinds.setdefault(kind, []).append((B*H*N*M, float(row['ratio'])))
    found = {}
    for kind,seen in kinds.items():
        slower = max((pairs for pairs,ratio in seen if ratio>1), default=-1)
        if above := [pairs for pairs,_ in seen if pairs>slower]: found[kind] = min(above)
    return dict(sorted(found.items(), key=str))

def store(rows):
    "The table as the source of the chapter's cell."
    chapter = json.loads(CHAPTER.read_text(encoding='utf-8'))
    cell = next(c for c in chapter['cells'] if c['id']==CELL)
    begin = next(i for i,line in enumerate(cell['source']) if line.startswith('LEAST_PAIRS'))
    lines = [f'    {kind}: {pairs},\n' for kind,pairs in table(rows).items()]
    cell['source'] = [*cell['source'][:begin+1], *lines, '}']
    text = json.dumps(chapter, indent=1, ensure_ascii=False, sort_keys=True)
    CHAPTER.write_text(text+'\n', encoding='utf-8')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--one', action='store_true')
    p.add_argument('--mask')
    p.add_argument('--dtype', choices=[str(x)[6:] for x in DTYPES])
    p.add_argument('--shapes', type=int, help='only the first so many [all]')
    p.add_argument('--quick', action='store_true')
    p.add_argument('--store', action='store_true')
    args = p.parse_args()
    if args.store:
        if not rows_of(FILE): p.error(f'--store: expected rows in {RESULTS/FILE}, got none')
        return store(rows_of(FILE))
    if args.threads==1: count_cpu_time()
    torch.set_num_threads(args.threads)
    with mock.patch.object(everywhere, 'core_is_faster', lambda *args, **kwargs: True):
        if args.quick: return list(measure(QUICK, DTYPES[:2], 2))
        shapes = [s for s in SHAPES if s[2]==1] if args.one else SHAPES
        dtypes = [getattr(torch, args.dtype)] if args.dtype else DTYPES
        for shape in shapes[:args.shapes]: append(FILE, list(measure([shape], dtypes, 5, args.mask)), FIELDS)

if __name__=='__main__': main()
