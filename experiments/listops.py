"""ListOps as the Long Range Arena generates it, the two predictors that nobody prints beside it, and a small comparison of trained systems.

    python experiments/listops.py                   # baselines at full length (about a minute) and training on short texts (about three)
    python experiments/listops.py baselines         # the first part only
    python experiments/listops.py train             # the second part only
    python experiments/listops.py train --shortest 500 --longest 2000 --dim 512 --heads 8 --layers 4 --steps 5000   # full size, on a GPU

Rows are appended to benchmarks/results/listops.csv.
"""
import argparse, random, sys
from collections import Counter
from pathlib import Path
from statistics import median
import torch, torch.nn.functional as F
from torch import nn
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
from harness import append
from dynattn.parts import FeedForward, sinusoidal_positions
from dynattn import MultiheadAttention
from dynattn.padding import PaddingMask
from dynattn.survey.card import Exact
from dynattn.survey.fixed import LocalBlocks
from dynattn.survey.feature_maps import LinearTransformer
from dynattn.survey.sparse import AdaptivelySparse

OPS = {'[MIN': min, '[MAX': max, '[MED': lambda v: int(median(v)), '[SM': lambda v: sum(v)%10}
VOCAB = {t:i for i,t in enumerate(['.','*',*'0123456789',*OPS,']'])}   # filling, the first token, the rest
DEPTH,ARGS,P_OP = 10,10,.25                                          # of the Arena's generator

class TooLong(Exception): "More tokens than are wanted: the tree would be thrown away."

def tree(rng, room, depth=1):
    "(tokens, value): a digit, or with probability 1/4 an operator with 2 to 10 arguments; gives up beyond `room` tokens."
    if room<1: raise TooLong
    if depth>=DEPTH or rng.random()>P_OP:
        v = rng.randrange(10)
        return [str(v)], v
    tokens,values = [rng.choice(list(OPS))],[]
    for _ in range(rng.randint(2, ARGS)):
        t,v = tree(rng, room-len(tokens)-1, depth+1)
        tokens += t; values.append(v)
    return tokens+[']'], OPS[tokens[0]](values)

def sample(rng, shortest, longest):
    "The first tree whose length lies strictly between the two, and how many were drawn."
    drawn = 0
    while True:
        drawn += 1
        try: tokens,value = tree(rng, longest-1)
        except TooLong: continue
        if shortest<len(tokens)<longest: return tokens, value, drawn

def evaluate(tokens):
    "The value again, read from the tokens with a stack."
    stack = [[]]
    for t in tokens:
        if t in OPS: stack.append([t])
        elif t==']': op,*v = stack.pop(); stack[-1].append(OPS[op](v))
        else: stack[-1].append(int(t))
    return stack[0][0]

def data(n, shortest, longest, seed):
    rng = random.Random(seed)
    out = [sample(rng, shortest, longest) for _ in range(n)]
    if any(evaluate(t)!=v for t,v,_ in out[:100]): raise AssertionError("a tree and its tokens have different values")
    return [(t,v) for t,v,_ in out], n/sum(d for *_,d in out)

def baselines(train, test):
    "Accuracies of the most frequent class, and of the most frequent class given the first token."
    every,by = Counter(v for _,v in train),{}
    for t,v in train: by.setdefault(t[0], Counter())[v] += 1
    best = every.most_common(1)[0][0]
    acc = lambda f: sum(f(t)==v for t,v in test)/len(test)
    return {'majority class': acc(lambda t: best), 'first token': acc(lambda t: by[t[0]].most_common(1)[0][0])}

class OneTensor(MultiheadAttention):
    "Our attention with widths predicted from the first token, which sees all; one tensor in, one out."
    def __init__(self, dim, heads, **options):
        super().__init__(dim, heads, bias=False, batch_first=True, window='predicted', init_width=16., n_global=1, **options)
    def forward(self, x, padding=None): return super().forward(x, x, x, need_weights=False, padding=padding)[0]

SYSTEMS = {  # name -> (D, H) -> layer called as `layer(x, padding=...)`
    'exact attention': Exact,
    'dynamic window': OneTensor,
    'dynamic window, learned alpha': lambda d,h: OneTensor(d, h, alpha='learned'),
    'adaptively sparse': AdaptivelySparse,
    'local attention, blocks of 8': lambda d,h: LocalBlocks(d, h, block=8),
    'linear transformer': LinearTransformer,
}

class Model(nn.Module):
    "Tokens, waves, `layers` of pre-norm mixing and feed-forward, the mean of the real positions, ten classes."
    def __init__(self, make, dim, heads, layers):
        super().__init__()
        self.embed,self.head = nn.Embedding(len(VOCAB), dim),nn.Linear(dim, 10)
        self.mix,self.ff = nn.ModuleList(make(dim, heads) for _ in range(layers)),nn.ModuleList(FeedForward(dim, 2*dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2*layers+1))

    def forward(self, ids):
        padding = PaddingMask.from_keep(ids!=0)
        x = self.embed(ids)+sinusoidal_positions(ids.shape[1], self.embed.embedding_dim, device=ids.device)
        for i,(mix,ff) in enumerate(zip(self.mix, self.ff)):
            x = x+mix(self.norms[2*i](x), padding=padding)
            x = x+ff(self.norms[2*i+1](x))
        x = self.norms[-1](x)*padding.keep[...,None]
        return self.head(x.sum(1)/padding.keep.sum(1, keepdim=True))

def tensors(rows, device):
    ids = torch.zeros(len(rows), 1+max(len(t) for t,_ in rows), dtype=torch.long)
    for i,(t,_) in enumerate(rows): ids[i,:len(t)+1] = torch.tensor([VOCAB[o] for o in ['*',*t]])
    return ids.to(device), torch.tensor([v for _,v in rows], device=device)

def train(make, a, train_rows, test_rows):
    "(accuracy on the test set, parameters)"
    torch.manual_seed(a.seed)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = Model(make, a.dim, a.heads, a.layers).to(device)
    opt = torch.optim.AdamW(model.parameters(), a.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, a.steps, pct_start=.1)
    g,(ids,want) = torch.Generator().manual_seed(a.seed),tensors(train_rows, device)
    for _ in range(a.steps):
        at = torch.randint(len(ids), (a.batch,), generator=g).to(device)
        loss = F.cross_entropy(model(ids[at]), want[at])
        opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.); opt.step(); sched.step()
    model.eval()
    with torch.no_grad(): hits = [(model(i).argmax(-1)==v).float() for i,v in zip(*(x.split(256) for x in tensors(test_rows, device)))]
    return torch.cat(hits).mean().item(), sum(p.numel() for p in model.parameters())

FIELDS = 'date machine torch commit part system shortest longest train test dim heads layers steps batch lr seed parameters accuracy'.split()

def note(rows):
    rows = list(rows)
    append('listops.csv', rows, FIELDS)
    for r in rows: print(r, flush=True)

def row(part, name, acc, a, shortest, longest, n_train, n_test, **more):
    return dict(part=part, system=name, shortest=shortest, longest=longest, train=n_train, test=n_test, seed=a.seed, accuracy=f'{acc:.4f}', **more)

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('part', nargs='?', choices=('all','baselines','train'), default='all')
    for name,value in dict(shortest=8, longest=33, train=8000, test=2000, full=20000, dim=64, heads=4, layers=2, steps=400, batch=32, seed=0).items(): p.add_argument(f'--{name}', type=int, default=value)
    p.add_argument('--lr', type=float, default=2e-3); p.add_argument('--systems', nargs='*', default=list(SYSTEMS))
    a = p.parse_args()
    if a.part!='train':
        rows,accepted = data(a.full, 500, 2000, a.seed)
        print(f"{accepted:.1%} of the trees have between 500 and 2000 tokens, {sum(len(t) for t,_ in rows)/len(rows):.0f} in the mean")
        half = len(rows)//2
        note(row('full length', k, v, a, 500, 2000, half, len(rows)-half) for k,v in baselines(rows[:half], rows[half:]).items())
    if a.part!='baselines':
        rows,_ = data(a.train+a.test, a.shortest, a.longest, a.seed+1)
        split = rows[:a.train],rows[a.train:]
        sizes = (a.shortest, a.longest, a.train, a.test)
        note(row('short', k, v, a, *sizes) for k,v in baselines(*split).items())
        for name in a.systems:
            acc,parameters = train(SYSTEMS[name], a, *split)
            note([row('short', name, acc, a, *sizes, dim=a.dim, heads=a.heads, layers=a.layers, steps=a.steps, batch=a.batch, lr=a.lr, parameters=parameters)])

if __name__=='__main__': main()
