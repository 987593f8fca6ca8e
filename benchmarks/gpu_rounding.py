"""How far σ's gradient is off when δ comes from an output in bfloat16, recomputed in float64: no GPU, half a minute.

python benchmarks/gpu_rounding.py       a row for each size of a tile, into benchmarks/results/gpu_rounding.csv
The case is that of chapter 41 over 131,072 tokens. The output is rounded where the kernel rounds it: each weight beside the greatest
score that a row has seen so far, then the sum. All else is exact, so what is off is these roundings' doing."""
import argparse, math, os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
import torch
from dynattn.window import Window
from harness import append

N,D,ROWS = 131_072,64,64
SIGMA = torch.tensor([64.,700.], dtype=torch.float64)

def gradients(head, keys):
    "σ's gradient of one head, exact, and with the rounded output."
    window = Window(SIGMA[head])
    reach = math.ceil(SIGMA[head].item()+1)-1
    offsets = torch.arange(-reach-ROWS-keys, reach+ROWS+keys+1)
    mask,slope = window.mask(offsets),window.dmask(offsets).where(window.mask(offsets)>0, 0.)
    exact = rounded = 0.
    for first in range(0, N, ROWS):
        low,high = max(0, (first-reach)//keys*keys),min(N, -(-(first+ROWS+reach)//keys)*keys)
        Q,dO = (t[0,head,first:first+ROWS].double() for t in (q,dout))
        K,V = (t[0,head,low:high].double() for t in (k,v))
        at = torch.arange(low, high)-torch.arange(first, first+ROWS)[:,None]-offsets[0]
        m,dm,scores = mask[at],slope[at],Q@K.T*(D**-.5*math.log2(math.e))
        seen = scores.where(m>0, -math.inf).unflatten(1, (-1, keys)).amax(2).cummax(1).values   # by tile
        last,shift = seen[:,-1:],seen.where(seen>-math.inf, 0.).repeat_interleave(keys, 1)
        weights,shrink = m*torch.exp2(scores-shift),torch.exp2(seen-last).repeat_interleave(keys, 1)
        total = (weights*shrink).sum(1, keepdim=True)
        e,g = torch.exp2(scores-last)/total,dO@V.T
        out = (weights.bfloat16().double()*shrink)@V/total
        for_mean = (m*e*g).sum(1, keepdim=True),(out.bfloat16().double()*dO).sum(1, keepdim=True)
        exact,rounded = (x+(e*dm*(g-mean)).sum().item() for x,mean in zip((exact,rounded), for_mean))
    return exact,rounded

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--tokens', type=int, default=N)
    N = a.parse_args().tokens
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    q,k,v,dout = (torch.randn(1, 2, N, D, generator=draw).bfloat16() for _ in range(4))
    for keys in (64, 32):
        exact,rounded = torch.tensor([gradients(head, keys) for head in range(2)]).T
        off = (rounded-exact).norm()/exact.norm()
        append('gpu_rounding.csv', [dict(keys=keys, exact=' '.join(f'{x:.4f}' for x in exact), rounded=' '.join(f'{x:.4f}' for x in rounded), off=f'{off:.4f}')], None)
        print(keys, exact, rounded, off)
