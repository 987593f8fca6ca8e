"""What the compiler makes of every kernel, for GPUs that need not be there: Ampere (sm_80), Hopper (sm_90), Blackwell (sm_100).

sm_86, sm_89 and sm_120 are cards whose programs have 99 KiB of shared memory at most.

python benchmarks/registers.py              heads of 64, 128 and 256 in bfloat16; renews their rows in benchmarks/results/registers.csv
python benchmarks/registers.py --target 80  for one of them (default: 90)
python benchmarks/registers.py --quick      heads of 64 if none are given; writes nothing
python benchmarks/registers.py --d 256 --dtype float16 --window hard
Registers and bytes of stack a thread (what did not fit into registers, spilled to memory), bytes of shared memory a program,
from cuobjdump, and how many instructions of the tensor cores there are (none for float32, whose products are exact)."""
import argparse, os, re, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
os.environ.pop('TRITON_INTERPRET', None)
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from types import SimpleNamespace
from harness import rows_of, write
from dynattn.engine.call import Call
from dynattn.engine.triton import entmax, primitives, window
from dynattn.padding import PaddingMask
from dynattn.window import Window

primitives._kernel_refuses = lambda call: None # nothing is run here, so tensors may stand on the CPU

class Absent:
    "What a launch asks of the driver, answered for a GPU of this compute capability"
    def __init__(self, capability): self.capability = capability
    def get_current_target(self): return GPUTarget('cuda', self.capability, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=None): return 0

FIELDS = 'triton target kernel d dtype window rows keys warps registers stack shared mma failed'.split()
TOOL = os.path.join(os.path.dirname(triton.__file__), 'backends', 'nvidia', 'bin', 'cuobjdump')

def usage(binary):
    "Registers and bytes of stack a thread."
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(binary); f.flush()
        text = subprocess.run([TOOL, '--dump-resource-usage', f.name], capture_output=True, text=True, check=True).stdout
    return map(int, re.search(r'REG:(\d+) STACK:(\d+)', text).groups())

def compiled(kernel, programs, device, **arguments):
    "In place of `_start`: compiles, runs nothing."
    band = arguments.get('band')
    form = '' if band is None else 'table' if band.table is not None else 'hard' if band.sigma is None else 'soft'
    row = dict(triton=triton.__version__, target=f'sm_{args.target}', kernel=kernel.fn.__name__.removeprefix('_'),
               d=arguments.get('D'), dtype=args.dtype, window=form, rows=arguments.get('BLOCK_M'),
               keys=arguments.get('BLOCK_N'), warps=arguments.get('num_warps'))
    try: kernel = kernel.warmup(grid=(1,), **arguments)
    except RuntimeError as e:                     # the compiler gave up; the row says so
        return note(row | dict(registers='', stack='', shared='', mma='', failed=f'{type(e).__name__}: {e}'))
    if 'D' not in arguments: return               # lists and limits: no products, and registers for a few numbers
    registers,stack = usage(kernel.asm['cubin'])
    products = len(re.findall('wgmma.mma|mma.sync|tcgen05.mma', kernel.asm['ptx']))
    note(row | dict(registers=registers, stack=stack, shared=kernel.metadata.shared, mma=products, failed=''))

def note(row):
    "Print a row, and put it in the place of its older self."
    print(*(f'{name}={x}' for name,x in row.items()), flush=True)
    if args.quick: return
    key = lambda r: [str(r[name]) for name in ('target','kernel','d','dtype','window')]
    others = (r for r in rows_of('registers.csv') if key(r)!=key(row))
    write('registers.csv', sorted([*others, row], key=key), FIELDS)

def compile_all(suite, d, dtype, w):
    "The forward and backward kernels of one suite, every gradient asked for."
    q = torch.zeros(1, 2, 300, d, dtype=dtype)
    keep = PaddingMask(torch.ones(1, 300, dtype=torch.bool))
    rows = dict(segments=torch.arange(300).div(100).long()[None]) if args.packed else dict(n_global=1)
    alpha,module = (None,window) if suite=='window' else (torch.tensor(1.5),entmax)
    plan,x = primitives._served(Call(q, q, q, padding=keep, is_causal=True, window=w, alpha=alpha, **rows))
    result = module._forward(plan, x)
    module._backward(plan, x, result[0], *result, x.learning)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--suite', choices=('window','entmax'), help="default: both")
    a.add_argument('--target', type=int, choices=(80,86,89,90,100,120), default=90, help="compute capability, times ten")
    a.add_argument('--d', type=int, nargs='*', help="default: 64 128 256")
    a.add_argument('--dtype', default='bfloat16', choices=('bfloat16','float16','float32'))
    a.add_argument('--window', choices=('soft','hard','table'), help="default: soft and hard")
    a.add_argument('--packed', action='store_true', help="several texts in a row instead of a leading token; needs --quick")
    a.add_argument('--quick', action='store_true', help="d 64 if none is given, nothing written")
    args = a.parse_args()
    if args.packed and not args.quick: a.error('--packed: expected with --quick, got it alone')
    driver.set_active(Absent(args.target))
    primitives._start = compiled
    room = 232448 if args.target in (90,100) else 166912 if args.target==80 else 101376
    card = SimpleNamespace(major=args.target//10, shared_memory_per_block_optin=room)
    primitives._card = lambda q: card
    for suite in [args.suite] if args.suite else ('window','entmax'):
        for d in args.d or ((64,) if args.quick else (64,128,256)):
            for w in [dict(soft=Window(9.), hard=5, table=Window(9., smooth='gaussian'))[args.window]] if args.window else (Window(9.),5): compile_all(suite, d, getattr(torch, args.dtype), w)
