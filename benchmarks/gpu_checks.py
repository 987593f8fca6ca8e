"""What must hold of the kernels on a GPU, before any of their times counts; a row for each question, written as soon as it is answered.

python benchmarks/gpu_checks.py --to checks.csv            all of them
python benchmarks/gpu_checks.py --only right --to x.csv    right, refused, again, memory: one kind
python benchmarks/gpu_checks.py --dry-run                  toy sizes in Triton's interpreter, on a CPU
Right: output and gradients of thirty-two calls beside the dense attention in float64. The error of a kernel may be twice that of the
dense attention in the same dtype, or a few roundings where the dense one has none. Refused: what the kernels do
not compute. Again: two runs give the same bits. Memory: it
grows as the text does, forward and backward."""
import argparse, os, sys
from dataclasses import dataclass, field
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
DRY = any(a.startswith('--dr') for a in sys.argv)
if DRY: os.environ['TRITON_INTERPRET'] = '1'    # before the kernels are imported
import torch
import dynattn
from dynattn import PaddingMask, Window
from harness import ask_all, part_of

DEV = 'cpu' if DRY else 'cuda'
DTYPES = (torch.float32,) if DRY else (torch.bfloat16, torch.float32)   # the interpreter's NumPy has no bfloat16

@dataclass(frozen=True)
class Case:
    name:str
    B:int = 2
    H:int = 4
    Hkv:int = 4
    N:int = 512
    M:int = 0                   # keys; 0: as many as queries
    d:int = 64
    sigma:tuple = ()            # soft windows, one width per head, which learn; () for none
    window:object = None        # a hard one: a half-width, or (left, right)
    alpha:tuple = ()            # one per head, which learn
    options:dict = field(default_factory=dict)
    padded:tuple = ()           # real keys of each text

    def small(self):
        "The same question at a size that the interpreter can answer."
        factor = self.N//32
        shrink = lambda w: None if w is None else max(w//factor, 0) if isinstance(w, int) else tuple(map(shrink, w))
        more = dict(self.options)
        if 'segments' in more: more['segments'] = tuple(-(-n//factor) for n in more['segments'])
        if 'n_global' in more: more['n_global'] = min(more['n_global'], 2)
        if 'q_offset' in more: more['q_offset'] = self.M//factor-self.N//factor
        return Case(self.name, self.B, self.H, self.Hkv, self.N//factor, self.M//factor, min(self.d, 16),
                    tuple(s/factor for s in self.sigma), shrink(self.window), self.alpha, more,
                    tuple(n//factor for n in self.padded))

MIXED,ALPHAS = (6.,40.,150.,2000.),(1.,1.2,1.5,2.)
RIGHT = [
    Case('soft, mixed widths', sigma=MIXED), Case('soft, causal', sigma=MIXED, options=dict(is_causal=True)),
    Case('soft, grouped keys', Hkv=2, sigma=MIXED), Case('soft, one key head', Hkv=1, sigma=MIXED),
    Case('soft, padding', sigma=MIXED, padded=(512, 201)), Case('soft, an empty text', sigma=MIXED, padded=(512, 0)),
    Case('soft, leading tokens', sigma=MIXED, options=dict(n_global=4)),
    Case('soft, leading tokens, causal, padding', sigma=MIXED, padded=(512, 77), options=dict(n_global=3, is_causal=True)),
    Case('soft, packed', sigma=MIXED, options=dict(segments=(200, 1, 311))),
    Case('soft, packed, causal', sigma=MIXED, options=dict(segments=(100, 412), is_causal=True)),
    Case('soft, d 256', N=256, d=256, sigma=MIXED), Case('soft, d 128', d=128, sigma=MIXED),
    Case('soft, d 80', d=80, sigma=MIXED), Case('soft, 509 tokens', N=509, sigma=MIXED),
    Case('soft, more keys', N=384, M=512, sigma=MIXED, options=dict(q_offset=128)),
    Case('soft, wider than the text', sigma=(5000.,)*4), Case('soft, narrower than a tile', sigma=(1.,2.,3.,4.)),
    Case('hard', window=100), Case('hard, causal', window=(100,0), options=dict(is_causal=True)),
    Case('hard, padding, grouped', Hkv=2, window=64, padded=(300, 512)), Case('hard, two sides', window=(200,30)),
    Case('hard, packed', window=(50,0), options=dict(segments=(130, 382))),
    Case('alpha by head', alpha=ALPHAS), Case('alpha, causal', alpha=ALPHAS, options=dict(is_causal=True)),
    Case('alpha, soft windows', alpha=ALPHAS, sigma=MIXED), Case('alpha, hard window, causal', alpha=ALPHAS, window=(90,0)),
    Case('alpha, padding', alpha=ALPHAS, padded=(512, 130)), Case('alpha, grouped keys', Hkv=2, alpha=ALPHAS),
    Case('alpha, leading tokens', alpha=ALPHAS, sigma=MIXED, options=dict(n_global=4)),
    Case('alpha 1.5', options=dict(alpha=1.5, is_causal=True)), Case('alpha 1.5, soft windows', sigma=MIXED, options=dict(alpha=1.5)),
    Case('alpha near 1', alpha=(1.001,1.01,1.03,1.05), options=dict(is_causal=True))]
REFUSED = [Case('sinks', sigma=MIXED, options=dict(sink=True)), Case('soft cap', sigma=MIXED, options=dict(softcap=20.)),
    Case('alpha above 2', alpha=(2.5,)*4)]

def call(case, impl, dtype):
    "Output, and gradients of all that learns, by name."
    draw = torch.Generator().manual_seed(0)
    def normal(*shape): return torch.randn(shape, generator=draw, dtype=torch.float64)
    keys = case.M or case.N
    inputs = dict(q=normal(case.B, case.H, case.N, case.d), k=normal(case.B, case.Hkv, keys, case.d),
                  v=normal(case.B, case.Hkv, keys, case.d))
    upstream = normal(case.B, case.H, case.N, case.d).to(torch.bfloat16 if torch.bfloat16 in DTYPES else torch.float32)
    numbers,options = {},dict(case.options)
    if case.sigma: numbers['sigma'] = torch.tensor(case.sigma)
    if case.alpha: numbers['alpha'] = torch.tensor(case.alpha)
    if 'segments' in options:
        lengths = torch.tensor(options['segments'])
        texts = torch.arange(len(lengths)).repeat_interleave(lengths)[:case.N]
        options['segments'] = texts.expand(case.B, -1).to(DEV)
    if options.pop('sink', False): numbers['sink'] = torch.linspace(-2, 1, case.H)
    rounded = torch.bfloat16 if torch.bfloat16 in DTYPES else torch.float32     # all see the same inputs
    learn = {name: x.to(rounded).to(DEV, dtype).requires_grad_() for name,x in inputs.items()}
    wide = torch.promote_types(dtype, torch.float32)
    learn |= {name: x.to(DEV, wide).requires_grad_() for name,x in numbers.items()}
    if case.padded: options['padding'] = PaddingMask.from_lengths(torch.tensor(case.padded), keys).to(DEV)
    if 'sigma' in learn: options['window'] = Window.default(learn['sigma'])
    elif case.window is not None: options['window'] = case.window
    for name in ('alpha','sink'):
        if name in learn: options[name] = learn[name]
    out = dynattn.attention(learn['q'], learn['k'], learn['v'], impl=impl, **options)
    gradients = torch.autograd.grad(out, [*learn.values()], upstream.to(DEV, dtype))
    return dict(out=out.detach()) | {f'd{name}': g for name,g in zip(learn, gradients)}

def error(got, want): return ((got.double()-want).norm()/want.norm().clamp(min=1e-30)).item()

def right(case, dtype):
    "The largest error of the kernels, what it is allowed to be, and where it is largest beside that."
    exact = call(case, 'dense', torch.float64)
    plain,kernel = call(case, 'dense', dtype),call(case, 'triton', dtype)
    few = (32 if dtype==torch.float32 else 2)*torch.finfo(dtype).eps
    worst = max(((error(kernel[name], exact[name]), max(2*error(plain[name], exact[name]), few), name) for name in exact),
                key=lambda found: found[0]/found[1])
    return dict(error=worst[0], allowed=worst[1], where=worst[2], holds=worst[0]<=worst[1])

def again(case, dtype):
    "Whether two runs give the same bits."
    first,second = (call(case, 'triton', dtype) for _ in range(2))
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    return dict(where=' '.join(differ), holds=not differ)

def memory(case, dtype):
    "How much more memory a call takes whose text is twice as long: 2 where it grows as the text does."
    peaks = []
    for n in (4096, 8192):
        torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
        call(Case(case.name, 1, case.H, case.Hkv, n, 0, case.d, case.sigma, case.window, case.alpha, case.options), 'triton', dtype)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated()/2**20)
    return dict(error=peaks[1]/peaks[0], allowed=2.1, where=f'{peaks[0]:.0f} and {peaks[1]:.0f} MiB', holds=peaks[1]/peaks[0]<2.1)

def refused(case, dtype):
    "Whether the kernels say that they do not compute it, or answer NaN."
    try: found = call(case, 'triton', dtype)
    except ValueError as e: return dict(where=' '.join(str(e).split())[:160], holds=True)
    lost = bool(found['out'].isnan().all())     # nobody waits for the device to look at a number there
    return dict(where='NaN' if lost else 'computed', holds=lost)

def questions(only, part=0, parts=1):
    "(kind, function, case, dtype) of every question, or of each `parts`-th one"
    return [*all_questions(only)][part::parts]

def all_questions(only):
    asked = dict(refused=refused, again=again, memory=memory, right=right)
    for kind,ask in asked.items():
        if only and kind!=only or DRY and kind=='memory': continue
        repeated = [c for c in RIGHT if c.name in ('soft, grouped keys','alpha, soft windows','alpha, causal')]
        cases = dict(right=RIGHT, refused=REFUSED).get(kind, repeated)
        for dtype in DTYPES if kind=='right' else DTYPES[:1]:
            for case in cases: yield kind,ask,case.small() if DRY else case,dtype

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--only', choices=('right','refused','again','memory'), help="one kind of question (default: all)")
    a.add_argument('--to', help="a CSV file to append to (default: none)")
    a.add_argument('--part', type=part_of, default='0/1', help="0/4: the first of four parts, which may run side by side (default: all)")
    a.add_argument('--seconds', type=float, default=1e9, help="ask nothing more after so many")
    a.add_argument('--dry-run', action='store_true', help="toy sizes on a CPU, to see that everything runs")
    args = a.parse_args()
    if not (DRY or torch.cuda.is_available()): sys.exit("benchmarks/gpu_checks.py needs a GPU; --dry-run does not")
    asked = questions(args.only, *args.part)
    ask_all(asked, args.to and os.path.abspath(args.to), args.seconds)
