"""What it costs to see the weights of one layer: `python benchmarks/look.py [N ...]`.

Twelve heads of width 64, a causal text, one thread. Peers: transformers' eager attention, whose weights `output_attentions=True`
returns and holds for every layer (BertViz, `pip install bertviz`, and attention rollout read those); the dense path; `window_weights`, held or summed on
the fly, for heads without a window and with 256 tokens back. Each runs in a process of its own, whose peak of memory is told
beside its time; squares that would take more than half of the machine's memory
get a row without figures. What `results/look.csv` has is not measured again."""
import argparse, os, resource, statistics
from importlib.util import find_spec
from types import SimpleNamespace
import torch
import harness

HEADS,WIDTH,BACK = 12,64,256
def eager(q, k):
    "transformers' own function for such a layer."
    from transformers.models.llama.modeling_llama import eager_attention_forward
    n = q.shape[2]
    mask = torch.full((n, n), -torch.inf).triu_(1)[None,None]
    layer = SimpleNamespace(num_key_value_groups=1, training=False)
    return eager_attention_forward(layer, q, k, k, mask, scaling=WIDTH**-.5)[1]

def rollout(q, k):
    "The first layer of attention rollout: the mean over heads, half of it the token itself."
    mean = eager(q, k).mean(1)
    return (mean+torch.eye(q.shape[2]))/2

def bertviz(q, k):
    "The page that BertViz makes of such a layer: the weights as text, for its script to draw."
    from bertviz import head_view
    return head_view([eager(q, k)], [str(i) for i in range(q.shape[2])], html_action='return')

def dense(q, k):
    from dynattn import attention_weights
    return attention_weights(q, k, is_causal=True)

def ours(**options):
    def run(q, k):
        from dynattn import window_weights
        return window_weights(q, k, is_causal=True, **options)
    return run

SQUARES = {'transformers eager': 2, 'attention rollout, one layer': 2, 'BertViz, a page of one layer': 20, 'dense path': 5} # that are in memory at a time
PEERS = dict(zip(SQUARES, (eager,rollout,bertviz,dense)))
PEERS |= {f'window_weights, {BACK} back, kept': ours(window=(BACK,0)),
          f'window_weights, {BACK} back, sums by distance and key': ours(window=(BACK,0), reduce=('distance','received')),
          'window_weights, sums by distance and key': ours(reduce=('distance','received'))}

def measure(name, n):
    "Print the median of the seconds, and the bytes that the first run added to the process at its peak."
    harness.count_cpu_time()
    q,k = torch.randn(2, 1, HEADS, n, WIDTH, generator=torch.Generator().manual_seed(0))
    f = PEERS[name]
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    f(q[:,:,:64], k[:,:,:64])
    before = peak()
    with torch.no_grad(): seconds = [harness.seconds(lambda: f(q, k))]
    added = peak()-before
    while len(seconds)<5 and sum(seconds)<3: seconds.append(harness.seconds(lambda: f(q, k)))
    print(statistics.median(seconds), added*1024)

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('tokens', type=int, nargs='*', default=[1024, 8192, 32768])
    a.add_argument('--one', metavar='PEER', choices=PEERS, help=argparse.SUPPRESS)
    args = a.parse_args()
    if args.one: return measure(args.one, *args.tokens)
    memory = os.sysconf('SC_PAGE_SIZE')*os.sysconf('SC_PHYS_PAGES')
    harness.count_cpu_time()
    done = {(r['n'],r['peer']) for r in harness.rows_of('look.csv')}
    for n in args.tokens:
        for name in PEERS:
            if (str(n),name) in done: continue
            if name.startswith('BertViz') and not find_spec('bertviz'):
                print(f'{n} {name}: not installed')
                continue
            row = dict(n=n, peer=name, ms='', mb='', why='')
            if SQUARES.get(name, 0)*4*HEADS*n*n>memory/2: row['why'] = f'{SQUARES[name]} squares of {4*HEADS*n*n/1e9:.0f} GB'
            else:
                told = harness.own_process(__file__, n, '--one', name).split()
                row |= dict(ms=round(1e3*float(told[0]), 1), mb=round(float(told[1])/2**20, 1))
            print(*row.values(), flush=True)
            harness.append('look.csv', [row], fields=None)

if __name__=='__main__': main()
