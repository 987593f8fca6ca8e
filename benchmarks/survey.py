"""The survey's table and the causality of published packages, measured and written to results/survey.csv and results/survey_packages.csv.

    python benchmarks/survey.py            # the table and FLOPs from 2^9 to 2^20, on the meta device: about two minutes
    python benchmarks/survey.py new        # only systems that were registered since
    python benchmarks/survey.py packages   # what is installed of the packages that say causal=True; the rows of others stay
"""
import argparse, warnings
from functools import partial
from importlib.metadata import version
import torch, torch.nn.functional as F
from torch import nn
import harness
from dynattn.survey.card import Cost, causality, complexity, evaluate, in_order, load, measure

NS = tuple(2**i for i in range(9, 21))
KEEP = 'row name form tags complexity decode measured flops poly peak causal change exact limit softmax note'.split()

def cost_at(system, causal, n):
    "FLOPs and peak bytes at one length, counted on the meta device; empty where the system cannot have this length."
    try:
        cost = complexity(system, (n,), causal=causal)
    except (RuntimeError, ValueError):
        return '', ''
    return cost.flops[0], cost.peak[0]

def flops_at(system, cost, causal, n):
    "Exact: from the polynomial where there is one, else counted."
    return int(evaluate(cost.poly, n)) if cost.poly else cost_at(system, causal, n)[0]

def new():
    "The systems without a row in the file."
    known = {(r['name'], r['form']) for r in harness.rows_of('survey.csv')}
    return [system for key,system in load().items() if key not in known]

def table(systems):
    for system in in_order(systems):
        row = measure(system)
        causal = row['measured'] == 'causal'
        cost = Cost(row['Ns'], row['flops_at'], row['peak_at'])
        kept = {k: row[k] for k in KEEP}
        longest = row['Ns'][-1]
        yield kept | {'longest': longest, 'peak_at_longest': row['peak_at'][-1]} | {f'flops_{n}': flops_at(system, cost, causal, n) for n in NS}

class Layer(nn.Module):
    "A package's layer, [1,N,D] -> [1,N,D]."
    def __init__(self, make, call=lambda f,x: f(x)): super().__init__(); self.made,self.call = make(),call
    def forward(self, x): return self.call(self.made, x)

def heads(x): return x.unflatten(-1, (2,-1)).transpose(1, 2)
def whole(y): return y.transpose(1, 2).flatten(2)

def reformer():
    from reformer_pytorch import LSHSelfAttention
    return LSHSelfAttention(16, heads=2, bucket_size=4, n_hashes=1, causal=True)

def reformer_hf():
    from transformers import ReformerConfig
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention
    return LSHSelfAttention(ReformerConfig(is_decoder=True, hidden_size=16, num_attention_heads=2, attention_head_size=8, lsh_attn_chunk_length=4, num_buckets=4, num_hashes=1, lsh_attention_probs_dropout_prob=0.))

def routing():
    from routing_transformer.routing_transformer import KmeansAttention
    layer = KmeansAttention(4, 8, 2, 8, causal=True, shared_qk=True, num_mem_kv=0).train(False)
    layer.kmeans.initted = torch.tensor(True); layer.kmeans.means.copy_(F.normalize(torch.randn(2, 4, 8), dim=-1))
    return layer

def sinkhorn():
    from sinkhorn_transformer.sinkhorn_transformer import SinkhornSelfAttention
    return SinkhornSelfAttention(16, bucket_size=4, max_seq_len=32, heads=2, causal=True)

def performer(**kwargs):
    from performer_pytorch import SelfAttention
    return SelfAttention(16, heads=2, causal=True, dim_head=8, **kwargs)

def linear():
    from linear_attention_transformer.linear_attention_transformer import SelfAttention
    return SelfAttention(16, 2, causal=True)

def local():
    from local_attention import LocalAttention
    return LocalAttention(window_size=4, causal=True, look_backward=1)

def keys():
    from product_key_memory import PKM
    return PKM(16, heads=2, num_keys=16, topk=4, dim_head=8)

def experts():
    from mixture_of_experts import MoE
    return MoE(16, num_experts=4)

def st_moe():
    from st_moe_pytorch import MoE
    return MoE(16, num_experts=4)

first = lambda f,x: f(x)[0]
PACKAGES = [  # distribution, what, layer, call
    ('reformer-pytorch', 'LSHSelfAttention', reformer, lambda f,x: f(x)),
    ('transformers', 'Reformer LSHSelfAttention, is_decoder', reformer_hf, lambda f,x: f(x).hidden_states),
    ('routing-transformer', 'KmeansAttention', routing, lambda f,x: whole(f(*[heads(x)]*3)[0])),
    ('sinkhorn-transformer', 'SinkhornSelfAttention', sinkhorn, lambda f,x: f(x)),
    ('performer-pytorch', 'SelfAttention, softmax features', performer, lambda f,x: f(x)),
    ('performer-pytorch', 'SelfAttention, generalised (ReLU) features', partial(performer, generalized_attention=True), lambda f,x: f(x)),
    ('linear-attention-transformer', 'SelfAttention', linear, lambda f,x: f(x)),
    ('local-attention', 'LocalAttention', local, lambda f,x: whole(f(*[heads(x)]*3))),
    ('product-key-memory', 'PKM, LayerNorm', keys, lambda f,x: f(x)),
    ('mixture-of-experts', 'MoE, top 2', experts, first),
    ('st-moe-pytorch', 'MoE, top 2', st_moe, first),
]

def packages(trials):
    "A row for each layer; what is not installed keeps its row."
    known = {(r['package'], r['layer']): r for r in harness.rows_of('survey_packages.csv')}
    for name,what,make,call in PACKAGES:
        torch.manual_seed(0)
        try: layer = Layer(make, call)
        except ImportError:
            print(f'{name} is not installed')
            if (name,what) in known: yield known[name,what]
            continue
        found = [causality(layer, 32, width=16, seeds=[s]) for s in range(trials)]
        worst = max(found, key=lambda v: (['yes','leaks','no'].index(v), v.change))
        yield dict(package=name, version=version(name), layer=what, verdict=str(worst), leaking=sum(v!='yes' for v in found), trials=trials, change=f"{max(v.change for v in found):.2g}", torch=torch.__version__)

if __name__=='__main__':
    warnings.simplefilter('ignore')
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('what', nargs='?', choices=('all','new','packages'), default='all')
    a.add_argument('--trials', type=int, default=20, help='weights that each package is asked with [20]')
    args = a.parse_args()
    if args.what=='all': harness.write('survey.csv', table(load().values()))
    elif args.what=='new': harness.write('survey.csv', [*harness.rows_of('survey.csv'), *table(new())])
    else: harness.write('survey_packages.csv', packages(args.trials))
