"""Random calls of `parallel.attention` on one of several ranks, against one process: `python parallel_cases.py RANK SIZE STORE FIRST LAST`."""
import random, sys
from datetime import timedelta
import torch, torch.distributed as dist
from dynattn import PaddingMask, Window, parallel
from dynattn.engine.dense import dense_attention

SUMMED = 'sigma','alpha','rel_bias','sink'

def cut(rng, n, size):
    "Where each rank's part begins: even parts, uneven ones, empty ones."
    how = rng.random()
    if how<.3: inner = [n*(r+1)//size for r in range(size-1)]
    elif how<.8: inner = sorted(rng.randint(0, n) for _ in range(size-1))
    else: inner = sorted(rng.choice([0, n, rng.randint(0, n)]) for _ in range(size-1))
    return [0, *inner, n]

def window_of(kind, sigma):
    if kind=='ramp': return Window.span(sigma, ramp=3.)
    return Window.default(sigma) if sigma is not None else dict(int=3, pair=(2, 5), none=None)[kind]

def drawn(seed, size):
    "Tensors of the whole sequence, what else is asked for, and the parts."
    rng,g = random.Random(seed),torch.Generator().manual_seed(seed)
    def normal(*shape): return torch.randn(shape, generator=g, dtype=torch.float64)
    def uniform(*shape): return torch.rand(shape, generator=g, dtype=torch.float64)
    b,kv,n = rng.choice([1, 2]),rng.choice([1, 2, 3]),rng.choice([1, 5, 13, 30, 61])
    h,d = kv*rng.choice([1, 2]),rng.choice([3, 4])
    kind = rng.choice(['one', 'head', 'batch', 'batch', 'ramp', 'int', 'pair', 'none'])
    shape = dict(one=(), head=(h,), batch=(b,h), ramp=(b,h)).get(kind)
    x = dict(q=normal(b, h, n, d), k=normal(b, kv, n, d), v=normal(b, kv, n, rng.choice([d, 5])))
    if shape is not None: x['sigma'] = uniform(*shape)*8
    options = dict(is_causal=rng.random()<.4, n_global=rng.choice([0, 0, 1, 3, 7]))
    alpha = rng.choice([None, None, 'number', 'head', 'batch'])
    if alpha=='number': options['alpha'] = 1.5
    if alpha in ('head','batch'): x['alpha'] = 1+rng.choice([1, 1, 3])*uniform(*((h,) if alpha=='head' else (b,h)))
    if alpha=='head' and rng.random()<.5: x['alpha'][0] = 1.
    if rng.random()<.4: options['scale'] = .7
    if rng.random()<.2: options['softcap'] = 2.
    if rng.random()<.3: x['sink'] = normal(h)
    if options['n_global']==0 and rng.random()<.3: x['rel_bias'] = normal(h, 9)
    along = {}
    if rng.random()<.5:
        along['padding'] = uniform(b, n)<.7
        for name in ('k','v'): x[name].mT.masked_fill_(~along['padding'][:,None,None], torch.nan)
    return x,options,along,kind,cut(rng, n, size),normal(b, h, n, x['v'].shape[3])

def computed(attend, x, options, along, kind, dout):
    "Output, and gradients of all tensors."
    leaves = {name: t.clone().requires_grad_() for name,t in x.items()}
    given = {name: t for name,t in leaves.items() if name!='sigma'}
    given |= {name: PaddingMask(t) if name=='padding' else t for name,t in along.items()}
    out = attend(**given, window=window_of(kind, leaves.get('sigma')), **options)
    grads = torch.autograd.grad((out*dout).sum(), list(leaves.values()), allow_unused=True)
    return out.detach(),{name: torch.zeros_like(t) if g is None else g for (name,t),g in zip(leaves.items(), grads)}

def check(seed, rank, size):
    x,options,along,kind,parts,dout = drawn(seed, size)
    start,end = parts[rank],parts[rank+1]
    def part(name, t):
        if name in ('q','k','v'): return t[:,:,start:end]
        return t[:,start:end] if name in along else t
    want,wanted = computed(dense_attention, x, options, along, kind, dout)
    mine = [{name: part(name, t) for name,t in some.items()} for some in (x, along)]
    first,second = (computed(parallel.attention, mine[0], options, mine[1], kind, dout[:,:,start:end]) for _ in range(2))
    where = f'seed {seed}, rank {rank} of {size}, parts {parts}, {kind}, {options}, {list(along)}'
    torch.testing.assert_close(first[0], want[:,:,start:end], rtol=0, atol=1e-10, msg=lambda m: f'{where}: out: {m}')
    for name,g in first[1].items():
        torch.testing.assert_close(g, part(name, wanted[name]), rtol=0, atol=1e-10, msg=lambda m: f'{where}: {name}: {m}')
        assert torch.equal(g, second[1][name]), f'{where}: {name} has other bits the second time'
    assert torch.equal(first[0], second[0]), f'{where}: out has other bits the second time'

if __name__=='__main__':
    rank,size,store,first,last = int(sys.argv[1]),int(sys.argv[2]),sys.argv[3],int(sys.argv[4]),int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method='file://'+store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    for seed in range(first, last): check(seed, rank, size)
    print('done', last-first, flush=True)
    dist.destroy_process_group()
