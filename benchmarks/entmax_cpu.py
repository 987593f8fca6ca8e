"""entmax on a CPU beside the entmax package and softmax: check, then time in turn, then append to results/entmax_cpu.csv.

    python benchmarks/entmax_cpu.py --threads 1 --machine "2-core x86 CPU, AVX-512"
"""
import argparse, csv, datetime, os, statistics, subprocess, sys, time
from pathlib import Path
import torch, entmax as package
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

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--threads', type=int, default=1); p.add_argument('--rounds', type=int, default=15)
    p.add_argument('--machine', default='unnamed CPU'); p.add_argument('--peak', help=argparse.SUPPRESS)
    p.add_argument('--out', type=Path, default=Path(__file__).parent/'results'/'entmax_cpu.csv')
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    if a.peak: return print(peak_mb(a.peak))
    for name in OPS: check(name)
    load = os.getloadavg()[0]  # of the machine before the run: more than a little, and only the ratios mean something
    ms = times(a.rounds)
    git = subprocess.run(['git','rev-parse','--short','HEAD'], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    median,fresh = statistics.median,not a.out.exists()
    with open(a.out, 'a', newline='') as file:
        w = csv.writer(file, lineterminator='\n')
        if fresh: w.writerow('date machine load threads torch commit op shape dtype pass ms peak_mb copies_of_scores vs_softmax peer vs_peer'.split())
        for name,(_,peer,*_) in OPS.items():
            mb = float(subprocess.run([sys.executable,__file__,'--threads',str(a.threads),'--peak',name], capture_output=True, text=True, check=True).stdout)
            against = lambda o: round(median(x/y for x,y in zip(ms[name], ms[o])), 3)
            row = [datetime.date.today(), a.machine, round(load, 1), a.threads, torch.__version__, git, name, 'x'.join(map(str, SHAPE)), 'float32', 'fwd+bwd',
                   round(median(ms[name]), 2), round(mb, 1), round(mb/(torch.Size(SHAPE).numel()*4/2**20), 2), against('softmax'), peer, peer and against(peer)]
            w.writerow(row); print(f'{name:32s}{row[10]:9.1f} ms {mb:7.1f} MB  {row[13]:7.2f} x softmax', f'{row[15]:6.3f} x {peer}' if peer else '')

if __name__=='__main__': main()
