"""Which tiles suit the kernels: sizes, warps, stages and registers of each kernel, timed on a GPU one change at a time.

python benchmarks/gpu_tiles.py --to tiles.csv            all kernels, heads of 64 and 128
python benchmarks/gpu_tiles.py --warm                    compile them, in processes side by side; times nothing
python benchmarks/gpu_tiles.py --only window --d 64 --minutes 1
entmax15 is entmax with the number 1.5; 'tile' changes the size of a tile that has a flag, and with it
all kernels. `registers` is the most that a thread may have, 0 for no limit: with fewer, more programs share a multiprocessor.
Times are of the kernels: CUDA events around them, with work queued before so that the device never waits for Python; `parts`
has each kernel's own, in milliseconds, from a profiler. `host` is what Python needs to start a call."""
import argparse, functools, os, statistics, sys, time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
import torch
from harness import append
from dynattn.engine.call import Call
from dynattn.engine.triton import entmax, primitives, window
from gpu import Case, sharpened

# BLOCK_M, BLOCK_N, warps, stages, registers; 'tile': queries and keys of a tile of entmax that has a flag
ENTMAX = {
    'tile': [(32,32),(64,32),(32,64),(64,64),(32,16)],
    'bound': [(64,64,4,3,0),(64,64,4,3,168),(64,64,4,3,128),(64,64,4,2,128),(128,64,8,2,128)],
    'rows': [(64,32,4,3,0),(64,32,4,3,168),(64,32,4,3,128),(64,32,4,4,168),(64,32,4,2,168),(128,32,8,3,128)],
    'dq': [(64,32,4,2,0),(64,32,4,2,168),(64,32,4,2,128),(64,32,4,3,168),(128,32,8,2,128)],
    'dkv': [(32,64,4,2,0),(32,64,4,2,168),(32,64,4,2,128),(32,64,4,3,168),(32,32,4,2,0),(32,128,8,2,128)]}
SIZES = {
    'entmax15': ENTMAX, 'entmax': ENTMAX,
    'entmax in windows': {
        'bound': [(64,64,4,3,0),(64,64,4,3,128)],
        'rows': [(64,32,4,3,0),(64,32,4,3,168),(64,32,4,3,128)],
        'dq': [(64,32,4,2,0),(64,32,4,3,0),(64,32,4,3,168),(64,32,8,2,0)],
        'dkv': [(32,64,4,2,0),(32,64,4,2,168),(32,64,8,2,0)]},
    'window': {
        'rows': [(64,64,4,2,0),(64,32,4,3,0),(64,32,4,3,168),(64,32,4,3,128),(64,32,4,2,128),(64,32,4,4,128),(128,32,8,3,128)],
        'dq': [(64,32,4,3,0),(64,32,4,3,168),(64,32,4,3,128),(64,32,4,2,128),(128,32,8,3,128)],
        'dkv': [(32,64,4,2,0),(32,64,4,2,168),(32,64,4,2,152),(32,64,4,3,168),(32,128,8,2,128)]}}
MODULES = dict(zip(SIZES, (entmax,entmax,entmax,window), strict=True))
FORWARD,BACKWARD = ('rows','bound'),('dq','dkv')
known_sizes = {module: module._tile_sizes for module in (window,entmax)}

def questions(only, heads):
    "(suite, d, way, sizes)"
    for d in heads:
        for suite,ways in SIZES.items():
            if only and suite not in only: continue
            for way,sizes in ways.items():
                for size in sizes: yield suite,d,way,size

def set_tiles(suite, way, size):
    "Let one kernel of a suite take these sizes, or all of them flags of such tiles."
    module = MODULES[suite]
    known = known_sizes[module]
    def sizes(q, v, asked):
        if way=='tile': return known(q, v, asked, tile=size)
        if asked!=way: return known(q, v, asked)
        rows,keys,warps,stages,registers = size
        return known(q, v, asked) | dict(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, maxnreg=registers or None)
    module._tile_sizes = sizes

def prepared(suite, d, n=8192):
    "Plan and inputs of the call that is timed, and a gradient of its output."
    case = sharp(Case(n, B=2, d=d, causal=True, w=str(n), alike=.9)) if suite.startswith('entmax') else Case(n, d=d, causal=True)
    options = {}
    if 'window' in suite:
        case = replace(case, B=4, w='mixed')
        options['window'] = case.window(case.sigma())
    if 'entmax' in suite: options['alpha'] = torch.full((case.H,), 1.5, device='cuda', requires_grad=suite!='entmax15')
    q,k,v = case.tensors()
    return lambda: primitives._served(Call(q, k, v, is_causal=True, **options))

@functools.cache
def sharp(case):
    "Scores as sharp for all sizes of tiles."
    asked,entmax._tile_sizes = entmax._tile_sizes,known_sizes[entmax]
    try: return sharpened(case)[0]
    finally: entmax._tile_sizes = asked

def functions(suite, served):
    "Forward, and backward, as the operator calls them."
    module,square = MODULES[suite],dict(square=True) if suite=='entmax15' else {}
    forward_of,backward_of = partial(module._forward, **square),partial(module._backward, **square)
    plan,x = served()
    learning = [name for name,t in x.learning.items() if t.requires_grad]
    with torch.no_grad():
        result = forward_of(plan, x)
        dout = torch.randn_like(result[0])
    def forward():
        with torch.no_grad(): return forward_of(*served())
    def backward():
        with torch.no_grad(): return backward_of(plan, x, dout, *result, learning)
    return forward,backward

def timed(fn, filler, runs=8):
    "Median milliseconds on the device, and of Python."
    fn(); fn(); torch.cuda.synchronize()
    device,host = [],[]
    for _ in range(runs):
        a,b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(12): filler.zero_()
        a.record(); start = time.perf_counter(); fn(); host.append(time.perf_counter()-start); b.record()
        torch.cuda.synchronize(); device.append(a.elapsed_time(b))
    return statistics.median(device),1e3*statistics.median(host)

def parts_of(fn, runs=3):
    "Milliseconds of each of our kernels, by name."
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs): fn()
        torch.cuda.synchronize()
    took = defaultdict(list)
    for event in seen.events():
        if event.name.endswith('_kernel') and event.name.startswith('_'): took[event.name.removesuffix('_kernel').lstrip('_')].append(event.device_time/1e3)
    return ', '.join(f'{name} {statistics.median(times):.3f}' for name,times in took.items())

def compile_some(asked):
    "In a process of its own: run each once."
    for suite,d,way,size in asked:
        try:
            set_tiles(suite, way, size)
            for fn in functions(suite, prepared(suite, d)): fn()
            torch.cuda.synchronize()
        except Exception as e: print(suite, d, way, size, 'failed', type(e).__name__, flush=True)

def main(only, heads, to, minutes, warm):
    start,asked = time.perf_counter(),list(questions(only, heads))
    if warm:
        with ProcessPoolExecutor(warm, mp_context=get_context('spawn')) as pool:
            return [*pool.map(compile_some, [asked[i::warm] for i in range(warm)])]
    filler = torch.empty(2**30, dtype=torch.uint8, device='cuda')
    for suite,d,way,size in asked:
        if time.perf_counter()-start > 60*minutes: return print('out of time')
        numbers = dict(zip(('rows','keys','warps','stages','registers'), (*size, '', '', '')))
        row = dict(suite=suite, d=d, kernel=way, **numbers, ms='', host_ms='', parts='', failed='')
        try:
            set_tiles(suite, way, size)
            forward,backward = functions(suite, prepared(suite, d))
            found = [(*timed(fn, filler), parts_of(fn)) for fn in ((forward,) if way in FORWARD else (backward,) if way in BACKWARD else (forward,backward))]
            ms,host,parts = zip(*found)
            row |= dict(ms=f'{sum(ms):.4f}', host_ms=f'{sum(host):.3f}', parts=', '.join(parts))
        except Exception as e: row['failed'] = f'{type(e).__name__}: {" ".join(str(e).split())}'[:100]
        print(*row.values(), flush=True)
        if to: append(to, [row], None)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--only', choices=SIZES, nargs='*', help="some suites (default: all)")
    a.add_argument('--d', type=int, nargs='*', default=(64, 128), help="widths of the heads")
    a.add_argument('--to', help="a CSV file to append to (default: none)")
    a.add_argument('--minutes', type=float, default=1e9, help="start nothing after so many")
    a.add_argument('--warm', type=int, nargs='?', const=6, default=0, help="processes that compile side by side")
    args = a.parse_args()
    if not torch.cuda.is_available(): sys.exit("benchmarks/gpu_tiles.py needs a GPU")
    main(args.only, args.d, args.to and os.path.abspath(args.to), args.minutes, args.warm)
