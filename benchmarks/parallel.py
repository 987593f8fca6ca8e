"""Bytes and time of a windowed sequence on 1 to 4 processes of this machine: halo, all-gather of the keys, ring.

    python benchmarks/parallel.py [--tokens 65536 262144] [--ranks 1 2 4] [--rounds 3]

Each process has one thread. The three ways are checked against one process first. Rows are appended to
results/parallel.csv; rows that are there for this commit are not measured again."""
import argparse, datetime, statistics, subprocess, sys, tempfile, time
from harness import append, commit, rows_of
import torch, torch.distributed as dist
import dynattn
from dynattn import Window, parallel

WIDTHS = [16., 64., 64., 256.]
HEADS,WIDTH = len(WIDTHS),32

sent = []
post = dist.batch_isend_irecv
def counting(steps):
    sent.extend(s.tensor.numel()*s.tensor.element_size() for s in steps if s.op is dist.isend)
    return post(steps)
dist.batch_isend_irecv = counting

def halo(q, k, v, sigma, rank, size):
    return parallel.attention(q, k, v, window=Window.default(sigma))

def gathered(q, k, v, sigma, rank, size):
    "Every rank gets every key."
    mine = torch.cat([k, v], 3)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    sent.append(mine.numel()*4*(size-1))
    k,v = torch.cat(parts, 2).split(k.shape[3], 3)
    return dynattn.attention(q, k, v, window=Window.default(sigma), q_offset=rank*q.shape[2])

def ring(q, k, v, sigma, rank, size):
    "Every part passes every rank; a rank keeps those that its windows reach, its neighbours'."
    held,passing = {rank: (k,v)},torch.cat([k, v], 3)
    for step in range(1, size):
        coming = torch.empty_like(passing)
        ops = [dist.P2POp(dist.irecv, coming, (rank-1)%size), dist.P2POp(dist.isend, passing, (rank+1)%size)]
        for work in dist.batch_isend_irecv(ops): work.wait()
        passing,owner = coming,(rank-step)%size
        if abs(owner-rank)==1: held[owner] = coming.split(k.shape[3], 3)
    k,v = (torch.cat([held[r][i] for r in sorted(held)], 2) for i in (0, 1))
    return dynattn.attention(q, k, v, window=Window.default(sigma), q_offset=(rank-min(held))*q.shape[2])

WAYS = dict(halo=halo, gathered=gathered, ring=ring)

def work(rank, size, store, tokens, rounds):
    "What each process does; rank 0 prints the rows."
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method='file://'+store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=300))
    torch.manual_seed(0)
    sigma,n = torch.tensor(WIDTHS),tokens//size
    q,k,v = torch.randn(3, 1, HEADS, tokens, WIDTH)
    whole = dynattn.attention(q, k, v, window=Window.default(sigma))[:,:,rank*n:rank*n+n]
    q,k,v = (x[:,:,rank*n:rank*n+n].clone() for x in (q, k, v))
    for name,way in WAYS.items():
        torch.testing.assert_close(way(q, k, v, sigma, rank, size), whole, rtol=1e-4, atol=1e-5)
    times,counts = {name: [] for name in WAYS},{}
    with torch.no_grad():
        for _ in range(rounds):
            for name,way in WAYS.items():
                sent.clear()
                dist.barrier()
                before = time.perf_counter()
                way(q, k, v, sigma, rank, size)
                took = torch.tensor([time.perf_counter()-before, float(sum(sent))], dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(took[0].item())
                counts[name] = int(took[1])
    if rank==0:
        for name in WAYS: print(name, tokens, size, counts[name], f'{statistics.median(times[name])*1e3:.2f}', flush=True)
    dist.destroy_process_group()

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=int, nargs='+', default=[2**16, 2**17, 2**18, 2**19])
    parser.add_argument('--ranks', type=int, nargs='+', default=[1, 2, 4])
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--work', nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        rank,size,store,tokens,rounds = options.work
        return work(int(rank), int(size), store, int(tokens), int(rounds))
    uneven = [(n, size) for n in options.tokens for size in options.ranks if n%size]
    if uneven: parser.error('--tokens: expected multiples of the ranks, got {} for {}'.format(*uneven[0]))
    done = {(r['commit'], r['tokens'], r['ranks']) for r in rows_of('parallel.csv')}
    for tokens in options.tokens:
        for size in options.ranks:
            if (commit(), str(tokens), str(size)) in done: continue
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, '--work']
                started = [subprocess.Popen([*command, str(r), str(size), f'{folder}/store', str(tokens), str(options.rounds)],
                                            stdout=subprocess.PIPE, text=True) for r in range(size)]
                answers = [p.communicate()[0] for p in started]
            if any(p.returncode for p in started): sys.exit(f'{tokens} tokens on {size} ranks failed')
            names = 'way','tokens','ranks','bytes','ms'
            append('parallel.csv', [dict(zip(names, line.split(), strict=True)) for line in answers[0].splitlines()], fields=None)
            print(answers[0], end='')

if __name__=='__main__': main()
