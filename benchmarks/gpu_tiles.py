"""Which tiles suit the kernels: sizes, warps and stages of each kernel, timed on a GPU one change at a time.

python benchmarks/gpu_tiles.py --to tiles.csv            all kernels, heads of 64 and 128
python benchmarks/gpu_tiles.py --warm                    compile them, in processes side by side; times nothing
python benchmarks/gpu_tiles.py --only window --minutes 1
A tile of entmax ('rows' and 'back', forward and backward) is one that has a flag, and all kernels of the call take its size. Times are
of the kernels: CUDA events around them, with work queued before so that the device never waits for Python. `host` is
what Python needs to start a call."""
import argparse, functools, os, statistics, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
import torch
from harness import append
from dynattn.engine.call import Call
from dynattn.engine.triton import entmax, primitives, window
from gpu import Case, sharpened

# BLOCK_M, BLOCK_N, warps, stages
SIZES = {
    ('entmax','rows'): [(64,64,4,2),(64,64,4,3),(64,32,4,3),(128,64,8,2),(128,32,4,3)],
    ('entmax','back'): [(64,64,0,2),(64,32,0,2),(32,64,0,2),(128,64,0,2)],     # 0 warps: as many as by default
    ('entmax','dq'): [(64,32,4,2),(64,64,4,2),(64,32,4,3),(64,64,4,3)],
    ('entmax','dkv'): [(32,64,4,2),(64,64,4,2),(32,64,4,3),(64,64,8,2)],
    ('window','rows'): [(64,64,4,2),(64,64,4,3),(128,64,8,3)],
    ('window','dq'): [(64,32,4,3),(64,64,4,2),(64,32,4,2)],
    ('window','dkv'): [(32,64,4,2),(64,64,4,2),(32,64,4,3)]}
MODULES = dict(window=window, entmax=entmax)
known_sizes = {name: module._tile_sizes for name,module in MODULES.items()}

def questions(only):
    "(suite, d, way, sizes)"
    for d in (64, 128):
        for (suite,way),sizes in SIZES.items():
            if only and suite!=only: continue
            for size in sizes: yield suite,d,way,size

def set_tiles(suite, way, size):
    "Let one kernel of a suite take these sizes."
    rows,keys,warps,stages = size
    timed_ways = dict(back=('dq','dkv')).get(way, (way,))
    def sizes(q, v, asked):
        own = dict(BLOCK_M=rows, BLOCK_N=keys)
        if suite=='window': found = known_sizes[suite](q, v, asked) | (own if asked==way else {})
        elif way in ('rows','back'): found = known_sizes[suite](q, v, asked, tile=(rows,keys))
        else: found = known_sizes[suite](q, v, asked, tile=(64,64)) | (own if asked==way else {})
        if asked not in timed_ways: return found
        return found | dict(num_warps=warps or found.get('num_warps'), num_stages=stages)
    MODULES[suite]._tile_sizes = sizes

def prepared(suite, d, n=8192):
    "Plan and inputs of the call that is timed, and a gradient of its output."
    if suite=='window':
        case = Case(n, d=d, causal=True)
        options = dict(window=case.window(case.sigma()))
    else:
        case = sharp(Case(n, B=2, d=d, causal=True, w=str(n), alike=.9))
        options = dict(alpha=torch.full((case.H,), 1.5, device='cuda', requires_grad=True))
    q,k,v = case.tensors()
    return lambda: primitives._served(Call(q, k, v, is_causal=True, **options))

@functools.cache
def sharp(case):
    "Scores as sharp for all sizes of tiles."
    asked,entmax._tile_sizes = entmax._tile_sizes,known_sizes['entmax']
    try: return sharpened(case)[0]
    finally: entmax._tile_sizes = asked

def functions(suite, served):
    "Forward, and backward, as the operator calls them."
    module = MODULES[suite]
    plan,x = served()
    learning = list(x.learning)
    with torch.no_grad():
        result = module._forward(plan, x)
        dout = torch.randn_like(result[0])
    def forward():
        with torch.no_grad(): return module._forward(*served())
    def backward():
        with torch.no_grad(): return module._backward(plan, x, dout, *result, learning)
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

def compile_some(asked):
    "In a process of its own: run each once."
    for suite,d,way,size in asked:
        try:
            set_tiles(suite, way, size)
            for fn in functions(suite, prepared(suite, d)): fn()
            torch.cuda.synchronize()
        except Exception as e: print(suite, d, way, size, 'failed', type(e).__name__, flush=True)

def main(only, to, minutes, warm):
    start,asked = time.perf_counter(),list(questions(only))
    if warm:
        with ProcessPoolExecutor(warm, mp_context=get_context('spawn')) as pool:
            return [*pool.map(compile_some, [asked[i::warm] for i in range(warm)])]
    filler = torch.empty(2**30, dtype=torch.uint8, device='cuda')
    for suite,d,way,size in asked:
        if time.perf_counter()-start > 60*minutes: return print('out of time')
        row = dict(suite=suite, d=d, kernel=way, **dict(zip(('rows','keys','warps','stages'), size)), ms='', host_ms='', failed='')
        try:
            set_tiles(suite, way, size)
            forward,backward = functions(suite, prepared(suite, d))
            ms,host = timed(forward if way=='rows' else backward, filler)
            row |= dict(ms=f'{ms:.4f}', host_ms=f'{host:.3f}')
        except Exception as e: row['failed'] = f'{type(e).__name__}: {" ".join(str(e).split())}'[:100]
        print(*row.values(), flush=True)
        if to: append(to, [row], None)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--only', choices=('window','entmax'), help="one suite (default: both)")
    a.add_argument('--to', help="a CSV file to append to (default: none)")
    a.add_argument('--minutes', type=float, default=1e9, help="start nothing after so many")
    a.add_argument('--warm', type=int, nargs='?', const=6, default=0, help="processes that compile side by side")
    args = a.parse_args()
    if not torch.cuda.is_available(): sys.exit("benchmarks/gpu_tiles.py needs a GPU")
    main(args.only, args.to and os.path.abspath(args.to), args.minutes, args.warm)
