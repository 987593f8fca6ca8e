"""What a window costs on this machine: PyTorch's attention with a mask, FlexAttention, and dynattn.

    python -m dynattn.examples window_costs                       # 4,096 tokens, 256 back; a table
    python -m dynattn.examples window_costs --out window.png      # and a picture (needs dynattn[viz])
    python -m dynattn.examples window_costs --tokens 8192 --window 128 --backward

A causal text: each token sees itself and those of its window. The ways in turn, the median of some rounds.
"""
import argparse, platform, statistics, sys, time

def arguments(argv=None):
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--tokens', type=int, default=4096)
    a.add_argument('--window', type=int, default=256, help='tokens back that a token sees')
    a.add_argument('--heads', type=int, default=12)
    a.add_argument('--width', type=int, default=64, help='of a head')
    a.add_argument('--backward', action='store_true', help='gradients too')
    a.add_argument('--threads', type=int, help='of PyTorch and of the core; else as many as PyTorch takes')
    a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--out', help='a picture, .png or .svg')
    args = a.parse_args(argv)
    for name in ('tokens','window','heads','width','threads','rounds'):
        value = getattr(args, name)
        if value is not None and value<1: a.error(f'--{name}: expected at least 1, got {value}')
    return args

if __name__=='__main__': args = arguments()     # before PyTorch is imported
import torch, torch.nn.functional as F
from dynattn import attention, native

def near(n, back):
    "The mask of a window, as fallbacks of FlashAttention build it for every call."
    i = torch.arange(n)
    behind = i[:,None]-i
    return (behind>=0) & (behind<=back)

def flex(n, back):
    "FlexAttention with the window as a block mask, compiled; or None and why it cannot run."
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    def see(b, h, i, j): return (i>=j) & (i-j<=back)
    try:
        blocks = create_block_mask(see, None, None, n, n, device='cpu')
        compiled = torch.compile(flex_attention)
        return (lambda q, k, v: compiled(q, k, v, block_mask=blocks)),''
    except Exception as e: return None,f'{type(e).__name__}'

def ways(n, back, backward):
    "name -> function of q, k and v; what is missing, with the reason."
    def masked(q, k, v): return F.scaled_dot_product_attention(q, k, v, attn_mask=near(n, back))
    def whole(q, k, v): return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    def ours(q, k, v): return attention(q, k, v, window=(back,0), is_causal=True)
    found = {'PyTorch, the window as a mask': masked, 'PyTorch, no window': whole}
    missing = {}
    compiled,why = (None,'has no backward on a CPU') if backward else flex(n, back)
    if compiled: found['FlexAttention, compiled'] = compiled
    else: missing['FlexAttention'] = why
    return found | {f'dynattn, window=({back}, 0)': ours},missing

def seconds(fn, tensors, backward):
    "Of one call, with the gradients if asked for."
    start = time.perf_counter()
    out = fn(*tensors)
    if backward: torch.autograd.grad(out.sum(), tensors)
    return time.perf_counter()-start

def measure(n, back, heads, width, backward, rounds):
    "name -> median seconds, and what could not run."
    g = torch.Generator().manual_seed(0)
    q,k,v = (torch.randn(1, heads, n, width, generator=g, requires_grad=backward) for _ in range(3))
    found,missing = ways(n, back, backward)
    outputs = {}
    for name in list(found):
        try: outputs[name] = found[name](q, k, v).detach()           # compiles, and warms up
        except Exception as e: missing[name] = type(e).__name__; del found[name]
    with_window = [out for name,out in outputs.items() if 'no window' not in name]
    for other in with_window[1:]: torch.testing.assert_close(other, with_window[0], rtol=1e-3, atol=1e-4)
    times = {name: [] for name in found}
    for _ in range(rounds):
        for name,fn in found.items(): times[name].append(seconds(fn, (q, k, v), backward))
    return {name: statistics.median(t) for name,t in times.items()},missing

def processor():
    "Its name, in its own words."
    try: return next(line.split(':')[1].strip() for line in open('/proc/cpuinfo') if line.startswith('model name'))
    except (OSError, StopIteration): return platform.processor() or platform.machine()

def draw(times, title, path):
    "Bars, the shortest time last."
    try: import matplotlib.pyplot as plt
    except ImportError: sys.exit("--out: expected matplotlib to be installed for a picture; it comes with `pip install 'dynattn[viz]'`")
    fig,ax = plt.subplots(figsize=(7, .5*len(times)+1))
    names,values = list(times),[1e3*t for t in times.values()]
    colors = ['tab:blue' if 'dynattn' in name else 'tab:gray' for name in names]
    bars = ax.barh(names, values, color=colors)
    ax.bar_label(bars, [f'{v:,.0f} ms' if v>=10 else f'{v:.1f} ms' for v in values], padding=3)
    ax.invert_yaxis()
    ax.set_title(title, fontsize=9, loc='left')
    ax.spines[['top','right','bottom']].set_visible(False)
    ax.set_xticks([])
    ax.margins(x=.15)
    fig.tight_layout()
    fig.savefig(path, dpi=150)

def main(args):
    if args.threads: torch.set_num_threads(args.threads)
    times,missing = measure(args.tokens, args.window, args.heads, args.width, args.backward, args.rounds)
    what = 'forward and backward' if args.backward else 'forward'
    title = (f"{args.tokens:,} tokens, {args.window} back, {args.heads} heads of {args.width}, float32, {what}\n"
             f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}")
    print(title)
    least = min(times.values())
    width = max(map(len, times))
    for name,t in times.items(): print(f'  {name:{width}}  {1e3*t:9.1f} ms  {t/least:6.1f}')
    for name,why in missing.items(): print(f'  {name}: not measured, {why}')
    core = native.info()
    if not core['native']: print(f"  dynattn ran without its core: {core['why']}")
    if args.out:
        draw(times, title, args.out)
        print(f'wrote {args.out}')

if __name__=='__main__': main(args)
