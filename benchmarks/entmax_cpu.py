"""entmax on a CPU beside the entmax package and softmax: check, then time in turn, then append to results/entmax_cpu.csv.

    python benchmarks/entmax_cpu.py --threads 1 --machine "2-core x86 CPU, AVX-512"            # scores [1,8,512,512]
    python benchmarks/entmax_cpu.py --threads 1 --machine "..." --shape 64 8 64 64             # short rows
    python benchmarks/entmax_cpu.py --threads 2 --machine "..." --suite attention --rounds 7   # results/entmax_attention_cpu.csv

The attention suite: alpha learned per head (1.1 to 1.9), no window, 4,096 tokens a batch, forward and forward and backward, beside plain
`F.scaled_dot_product_attention` and `entmax15` of the entmax package between two products. Processor time is counted with one thread.
"""
import argparse, os, statistics, time
from pathlib import Path
import torch, torch.nn.functional as F, entmax as package
from harness import RESULTS, append, own_process
from dynattn import attention, dense_attention
from dynattn.alpha import entmax

SHAPE = (1,8,512,512)  # [B,H,N,M]
OPS = {  # name: (function of the scores and alpha, the peer its time is held against, alpha, alpha learned)
    'softmax':                       (lambda z,a: z.softmax(-1), None, 1., False),
    'entmax 1.3: entmax_bisect 1.3': (lambda z,a: package.entmax_bisect(z, a, dim=-1), None, 1.3, False),
    'dynattn: entmax 1.3':           (lambda z,a: entmax(z, a), 'entmax 1.3: entmax_bisect 1.3', 1.3, False),
    'entmax 1.3: entmax_bisect [H]': (lambda z,a: package.entmax_bisect(z, a[:,None,None], dim=-1), None, 1.3, True),
    'dynattn: entmax [H]':           (lambda z,a: entmax(z, a), 'entmax 1.3: entmax_bisect [H]', 1.3, True),
    'entmax 1.3: entmax15':          (lambda z,a: package.entmax15(z, dim=-1), None, 1.5, False),
    'dynattn: entmax 1.5':           (lambda z,a: entmax(z, a), 'entmax 1.3: entmax15', 1.5, False),
    'entmax 1.3: sparsemax':         (lambda z,a: package.sparsemax(z, dim=-1), None, 2., False),
    'dynattn: entmax 2':             (lambda z,a: entmax(z, a), 'entmax 1.3: sparsemax', 2., False),
}

def inputs(name):
    torch.manual_seed(0)
    f,_,alpha,learned = OPS[name]
    z,g = torch.randn(SHAPE, requires_grad=True),torch.randn(SHAPE)
    if learned: alpha = torch.full(SHAPE[1:2], alpha, requires_grad=True)
    return f,z,g,alpha

def run(f, z, g, alpha):
    z.grad = None
    f(z, alpha).backward(g)

def check(name):
    "Against float64 bisection; raises where it does not hold."
    f,z,_,alpha = inputs(name)
    z,alpha = z[...,:64,:].detach().double(),OPS[name][2]
    exact = package.entmax_bisect(z, alpha, dim=-1, n_iter=100) if alpha>1 else z.softmax(-1)
    got = f(z.float(), torch.full(SHAPE[1:2], alpha) if OPS[name][3] else alpha)
    torch.testing.assert_close(got.double(), exact, atol=2e-6, rtol=0, msg=lambda m: f"{name}: {m}")

def resident(field):
    "VmRSS (now) or VmHWM (the peak) of this process in MB; Linux only."
    return next(int(l.split()[1])/1024 for l in Path('/proc/self/status').read_text().splitlines() if l.startswith(field))

def peak_mb(name):
    "MB beyond scores and gradients, in a process of its own; a first call on few rows has loaded what needs loading."
    f,z,g,alpha = inputs(name)
    run(f, z[:,:,:8].detach().requires_grad_(), g[:,:,:8], alpha)
    z.grad = torch.zeros(SHAPE)
    Path('/proc/self/clear_refs').write_text('5')  # the peak so far is forgotten
    before = resident('VmRSS')
    f(z, alpha).backward(g)
    return resident('VmHWM')-before

def times(rounds):
    "Milliseconds of forward and backward, every operation once a round."
    args,res = {n:inputs(n) for n in OPS},{n:[] for n in OPS}
    for i in range(rounds+1):
        for name in OPS:
            t = time.perf_counter(); run(*args[name]); t = 1e3*(time.perf_counter()-t)
            if i: res[name].append(t)
    return res

def attention_ops(N, H, d):
    "Queries, keys, values and alpha of 4,096 tokens, and each way of attention."
    torch.manual_seed(0)
    q,k,v = (torch.randn(4096//N, H, N, d, requires_grad=True) for _ in range(3))
    alpha = torch.linspace(1.1, 1.9, H).requires_grad_()
    return (q,k,v,alpha), {
        'SDPA': lambda: F.scaled_dot_product_attention(q, k, v),
        'dynattn: alpha [H]': lambda: attention(q, k, v, alpha=alpha),
        'dynattn: alpha 1.5': lambda: attention(q, k, v, alpha=1.5),
        'entmax 1.3: entmax15': lambda: package.entmax15(q@k.mT*d**-.5, dim=-1)@v,
    }

def check_attention():
    "Against the dense path in float64; raises where it does not hold."
    (q,k,v,alpha),_ = attention_ops(128, 4, 32)
    q,k,v = (x[:2].detach() for x in (q, k, v))
    exact = dense_attention(q.double(), k.double(), v.double(), alpha=alpha.detach().double())
    torch.testing.assert_close(attention(q, k, v, alpha=alpha.detach()).double(), exact, atol=5e-6, rtol=0)

def time_attention(N, H, d, rounds, threads):
    "Median ms of (forward, both) for each way, in turn."
    clock = time.process_time if threads==1 else time.perf_counter
    tensors,ways = attention_ops(N, H, d)
    g,res = torch.randn_like(tensors[0]),{name:[] for name in ways}
    for i in range(rounds+1):
        for name,f in ways.items():
            for x in tensors: x.grad = None
            start = clock(); out = f(); middle = clock(); out.backward(g); end = clock()
            if i: res[name].append((1e3*(middle-start), 1e3*(end-start)))
    return {name:[statistics.median(x) for x in zip(*t)] for name,t in res.items()}

ROWS = 'date machine load threads torch commit op shape dtype pass ms peak_mb copies_of_scores vs_softmax peer vs_peer'.split()
ATTENTION = 'date machine load threads torch commit op N batch H d dtype fwd_ms both_ms fwd_vs_sdpa both_vs_sdpa'.split()

def attention_suite(a, about):
    check_attention()
    for H,d in ((8,64),(12,32)):
        for N in (32,64,128,256,512,1024):
            if N>a.upto: break
            ms = time_attention(N, H, d, a.rounds, a.threads)
            for name,pair in ms.items():
                ratios = [round(x/y, 2) for x,y in zip(pair, ms['SDPA'])]
                row = dict(op=name, N=N, batch=4096//N, H=H, d=d, dtype='float32', **dict(zip(ATTENTION[12:], [*(round(x, 2) for x in pair), *ratios])))
                append('entmax_attention_cpu.csv', [about | row], ATTENTION)
                print(f'N {N:5} H {H:3} d {d:3} {name:24}{pair[0]:9.1f} {pair[1]:9.1f} ms {ratios[0]:6.2f} {ratios[1]:6.2f} x SDPA', flush=True)

def main():
    global SHAPE
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--threads', type=int, default=1)
    p.add_argument('--rounds', type=int, default=15)
    p.add_argument('--machine', default='unnamed CPU')
    p.add_argument('--shape', type=int, nargs=4, default=SHAPE)
    p.add_argument('--suite', choices=('rows', 'attention'), default='rows')
    p.add_argument('--upto', type=int, default=1024, help='no longer text in the suite attention [1024]')
    p.add_argument('--out', type=Path, default=RESULTS/'entmax_cpu.csv')
    p.add_argument('--peak', help=argparse.SUPPRESS)
    a = p.parse_args()
    SHAPE = tuple(a.shape)
    torch.set_num_threads(a.threads)
    if a.peak: return print(peak_mb(a.peak))
    load = os.getloadavg()[0]  # of the machine before the run: more than a little, and only the ratios mean something
    about = dict(machine=a.machine, load=round(load, 1), threads=a.threads)
    if a.suite=='attention': return attention_suite(a, about)
    for name in OPS: check(name)
    ms,median = times(a.rounds),statistics.median
    for name,(_,peer,*_) in OPS.items():
        mb = float(own_process(__file__, '--threads', a.threads, '--shape', *SHAPE, '--peak', name))
        against = lambda o: round(median(x/y for x,y in zip(ms[name], ms[o])), 3)
        row = dict(zip(ROWS[6:], [name, 'x'.join(map(str, SHAPE)), 'float32', 'fwd+bwd', round(median(ms[name]), 2), round(mb, 1),
            round(mb/(torch.Size(SHAPE).numel()*4/2**20), 2), against('softmax'), peer, peer and against(peer)]))
        append(a.out.absolute(), [about | row], ROWS)
        print(f"{name:32s}{row['ms']:9.1f} ms {mb:7.1f} MB  {row['vs_softmax']:7.2f} x softmax", f"{row['vs_peer']:6.3f} x {peer}" if peer else '')

if __name__=='__main__': main()
