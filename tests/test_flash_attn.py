"""flash_attn's interface against dense attention in float64, written here from the package's documentation; and as programs
use it: installed under its names, with padding taken out, in transformers, in the attention of nanochat."""
import importlib, importlib.metadata, inspect, math, random, subprocess, sys
from types import SimpleNamespace
import pytest, torch, torch.nn.functional as F
from torch.testing import assert_close
from dynattn import PaddingMask, dense_attention, flash_attn as fa

WIDE = dict(dtype=torch.float64)
INSTALLED = importlib.util.find_spec('flash_attn') is not None     # the real one
no_other = pytest.mark.skipif(INSTALLED, reason='flash_attn itself is installed')

# ---- the oracle: one text, queries [N,H,d], keys [M,Hkv,d], all pairs

def dense(q, k, v, scale=None, causal=False, window=(-1,-1), softcap=0., slopes=None, sink=None):
    "Output [N,H,dv] and log of the sum [H,N]."
    (n,h,d),(m,kv,_) = q.shape,k.shape
    k,v = (x.repeat_interleave(h//kv, 1) for x in (k, v))
    scores = torch.einsum('nhd,mhd->hnm', q, k)*(d**-.5 if scale is None else scale)
    if softcap>0: scores = softcap*torch.tanh(scores/softcap)
    place,key = torch.arange(n)[:,None]+m-n,torch.arange(m)[None]
    left,right = window[0],0 if causal else window[1]
    see = torch.ones(n, m, dtype=torch.bool)
    if left>=0: see &= key>=place-left
    if right>=0: see &= key<=place+right
    if slopes is not None: scores = scores-slopes.double()[:,None,None]*(place-key).abs()
    scores = scores.masked_fill(~see, -math.inf)
    if sink is not None: scores = torch.cat((scores, sink.double()[:,None,None].expand(h, n, 1)), -1)
    empty = ~see.any(-1)
    scores = scores.masked_fill(empty[None,:,None], 0.)
    lse = scores.logsumexp(-1) if scores.shape[-1] else torch.zeros(h, n, **WIDE)
    weights = torch.softmax(scores, -1)[...,:m].masked_fill(empty[None,:,None], 0.)
    return torch.einsum('hnm,mhd->nhd', weights, v),lse.masked_fill(empty, math.inf)

class Case:
    "Random options of a call."
    def __init__(self, seed):
        self.r,self.g = random.Random(seed),torch.Generator().manual_seed(seed)
        r = self.r
        self.b,self.kv,self.d = r.choice((1,2,3)),r.choice((1,2,3)),r.choice((1,8,17,32,64))
        self.h,self.dv = self.kv*r.choice((1,2,4)),r.choice((self.d, self.d, 5))
        self.causal = r.random()<.5
        self.window = r.choice(((-1,-1), (-1,-1), (0,0), (3,-1), (-1,4), (5,2), (17,0), (100,100), (40,7)))
        self.softcap,self.scale = r.choice((0.,0.,15.)),r.choice((None,None,.3))
        self.sink = self.randn(self.h) if r.random()<.2 else None
        self.slopes = None
    def randn(self, *shape): return torch.randn(shape, generator=self.g, **WIDE)
    def leaf(self, *shape): return self.randn(*shape).requires_grad_()
    def give_slopes(self, rows):
        kind = self.r.choice(('none','none','one','each'))
        if kind!='none': self.slopes = torch.rand(((rows,self.h) if kind=='each' else (self.h,)), generator=self.g, **WIDE)
    def slopes_of(self, row): return self.slopes if self.slopes is None or self.slopes.dim()==1 else self.slopes[row]
    @property
    def words(self):
        "As the package has them."
        return dict(softmax_scale=self.scale, causal=self.causal, window_size=self.window, softcap=self.softcap)
    def dense(self, q, k, v, row=0):
        return dense(q, k, v, self.scale, self.causal, self.window, self.softcap, self.slopes_of(row), self.sink)

def agree(seed, out, lse, want, want_lse, leaves=()):
    def close(a, b): assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f'seed {seed}: {m}')
    close(out, want)
    close(lse, want_lse)
    if leaves:
        dout = torch.randn(want.shape, generator=torch.Generator().manual_seed(seed), **WIDE)
        for a,b in zip(*(torch.autograd.grad(x, leaves, dout, materialize_grads=True) for x in (out, want))): close(a, b)

def lengths(c, texts): return [c.r.choice((0, 1, 7, 40, 90)) for _ in range(texts)]
def ends(sizes): return torch.tensor([0, *sizes]).cumsum(0).int()

# ---- whole batches

def batches(seed, three=False, packed=None):
    c = Case(seed)
    n = c.r.choice((1,2,5,33,70,130))
    m = n if packed=='qkv' or c.r.random()<.5 else c.r.choice((1,4,33,61,129))
    if packed: c.sink,c.dv = None,c.d
    if packed=='qkv': c.h = c.kv
    if not three: c.give_slopes(c.b)
    q,k,v = c.leaf(c.b, n, c.h, c.d),c.leaf(c.b, m, c.kv, c.d),c.leaf(c.b, m, c.kv, c.dv)
    words = c.words
    if not three: words['alibi_slopes'] = c.slopes
    if not packed: words['s_aux'] = c.sink
    f = dict(qkv=fa.flash_attn_3_qkvpacked_func if three else fa.flash_attn_qkvpacked_func, kv=fa.flash_attn_kvpacked_func).get(
        packed, fa.flash_attn_3_func if three else fa.flash_attn_func)
    given = dict(qkv=(torch.stack((q,k,v), 2) if packed=='qkv' else None,), kv=(q,torch.stack((k,v), 2) if packed=='kv' else None)).get(packed, (q,k,v))
    out,lse,*rest = f(*given, **words, return_attn_probs=True)
    assert rest==([] if three else [None]) and not lse.requires_grad
    each = [c.dense(q[b], k[b], v[b], b) for b in range(c.b)]
    agree(seed, out, lse, torch.stack([o for o,_ in each]), torch.stack([l for _,l in each]), (q,k,v))

# ---- texts end to end

def texts(seed, three=False, packed=None):
    c = Case(seed)
    count = c.r.choice((1,2,4))
    of_q = lengths(c, count)
    of_k = of_q if packed=='qkv' or c.r.random()<.4 else lengths(c, count)
    behind = c.r.choice((0,0,3))
    if packed: c.sink,c.dv = None,c.d
    if packed=='qkv': c.h = c.kv
    if not three: c.give_slopes(count)
    q = c.leaf(sum(of_q)+behind, c.h, c.d)
    rows = sum(of_k)+behind*(packed=='qkv' or c.r.random()<.5)
    k,v = c.leaf(rows, c.kv, c.d),c.leaf(rows, c.kv, c.dv)
    at_q = ends(of_q)
    at_k = at_q if of_k is of_q and c.r.random()<.5 else ends(of_k)
    used_q,used_k,words = of_q,of_k,c.words
    if three:
        if c.r.random()<.4: used_k = [c.r.randint(0, x) for x in of_k]; words['seqused_k'] = torch.tensor(used_k).int()
        if c.r.random()<.3: used_q = [c.r.randint(0, x) for x in of_q]; words['seqused_q'] = torch.tensor(used_q).int()
    else: words['alibi_slopes'] = c.slopes
    if not packed: words['s_aux'] = c.sink
    most = max(of_q),max(of_k)
    if packed=='qkv': out,lse,*_ = fa.flash_attn_varlen_qkvpacked_func(torch.stack((q,k,v), 1), at_q, most[0], **words, return_attn_probs=True)
    elif packed=='kv': out,lse,*_ = fa.flash_attn_varlen_kvpacked_func(q, torch.stack((k,v), 1), at_q, at_k, *most, **words, return_attn_probs=True)
    else:
        f = fa.flash_attn_3_varlen_func if three else fa.flash_attn_varlen_func
        out,lse,*_ = f(q, k, v, at_q, at_k, *most, **words, return_attn_probs=True)
    outs,sums = [],[]
    for t in range(count):
        a,b = int(at_q[t]),int(at_k[t])
        o,l = c.dense(q[a:a+used_q[t]], k[b:b+used_k[t]], v[b:b+used_k[t]], t)
        missing = of_q[t]-used_q[t]
        outs.append(F.pad(o, (0,0,0,0,0,missing)))
        sums.append(F.pad(l, (0,missing), value=math.inf))
    assert out.shape[0]==lse.shape[1]==len(q) and not out[sum(of_q):].any() and lse[:,sum(of_q):].isposinf().all()
    agree(seed, out[:sum(of_q)], lse[:,:sum(of_q)], torch.cat(outs), torch.cat(sums, 1), (q,k,v))

def pages_of_texts(seed):
    "The keys of packed texts in pages."
    c = Case(seed)
    count,page = c.r.choice((1,2,4)),c.r.choice((4,16))
    c.give_slopes(count)
    of_q,of_k = lengths(c, count),[c.r.randint(0, 6*page) for _ in range(count)]
    table = torch.randperm(6*count+2, generator=c.g)[:6*count].view(count, 6).int()
    k,v = c.leaf(6*count+2, page, c.kv, c.d),c.leaf(6*count+2, page, c.kv, c.dv)
    q = c.leaf(sum(of_q), c.h, c.d)
    out,lse,_ = fa.flash_attn_varlen_func(q, k, v, ends(of_q), ends(of_k), 1, 1, **c.words, alibi_slopes=c.slopes, s_aux=c.sink,
                                          return_attn_probs=True, block_table=table)
    each,at = [],ends(of_q)
    for t in range(count):
        rows = [x[table[t].long()].flatten(0, 1)[:of_k[t]] for x in (k, v)]
        each.append(c.dense(q[at[t]:at[t+1]], *rows, t))
    agree(seed, out, lse, torch.cat([o for o,_ in each]), torch.cat([l for _,l in each], 1), (q,k,v))

# ---- a cache

def turned(x, cos, sin, places, interleaved):
    "Entry by entry."
    y,r = x.clone(),cos.shape[1]
    for e in range(r):
        a,b = (2*e,2*e+1) if interleaved else (e,e+r)
        c,s = cos[places,e][:,None],sin[places,e][:,None]
        y[...,a],y[...,b] = x[...,a]*c-x[...,b]*s,x[...,a]*s+x[...,b]*c
    return y

def caches(seed, three=False):
    c = Case(seed)
    r,places = c.r,64
    n,new = r.choice((1,1,3,16)),0
    paged,turns = r.random()<.4,r.random()<.4
    if turns: c.d = c.dv = r.choice((8,16,32))
    if turns or r.random()<.6: new = n if r.random()<.8 else r.choice((1,2,5))
    if not three: c.give_slopes(c.b)
    sizes = [r.randint(1, places-new)]*c.b if r.random()<.4 else [r.randint(0, places-new) for _ in range(c.b)]
    q = c.randn(c.b, n, c.h, c.d)
    k,v = (c.randn(c.b, new, c.kv, d) for d in (c.d, c.dv)) if new else (None,None)
    words = c.words | dict(k=k, v=v, s_aux=c.sink)
    if not three: words['alibi_slopes'] = c.slopes
    pad = [0]*c.b
    if paged:
        table = torch.randperm(4*c.b+3, generator=c.g)[:4*c.b].view(c.b, 4).int()
        cache = [c.randn(4*c.b+3, 16, c.kv, d) for d in (c.d, c.dv)]
        words['page_table' if three else 'block_table'] = table
        def row(x, b): return x[table[b].long()].flatten(0, 1)
    else:
        cache,index = [c.randn(c.b+2, places, c.kv, d) for d in (c.d, c.dv)],None
        if r.random()<.4: index = words['cache_batch_idx'] = torch.randperm(c.b+2, generator=c.g)[:c.b].int()
        if r.random()<.4:
            pad = [r.randint(0, size) for size in sizes]
            words['cache_leftpad'] = torch.tensor(pad).int()
        def row(x, b): return x[b if index is None else int(index[b])]
    cos = sin = None
    if turns:
        angles = 6*torch.rand(places+16, r.choice((4, c.d//2)), generator=c.g, **WIDE)
        cos,sin = angles.cos(),angles.sin()
        words |= dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=r.random()<.5)
    before = [[row(x, b).clone() for b in range(c.b)] for x in cache]
    looks = c.causal or max(c.window)>=0
    each = []
    for b in range(c.b):
        keys,values,own = before[0][b],before[1][b],q[b]
        at = sizes[b]-pad[b]
        if new:
            turn = turned(k[b], cos, sin, torch.arange(new)+at, words['rotary_interleaved']) if turns else k[b]
            keys[sizes[b]:sizes[b]+new],values[sizes[b]:sizes[b]+new] = turn,v[b]
        if turns: own = turned(own, cos, sin, (torch.arange(n) if looks else torch.zeros(n).long())+at, words['rotary_interleaved'])
        each.append(c.dense(own, keys[pad[b]:sizes[b]+new], values[pad[b]:sizes[b]+new], b))
    given = sizes[0] if len({*sizes})==1 and r.random()<.5 else torch.tensor(sizes).int()
    f = fa.flash_attn_3_with_kvcache if three else fa.flash_attn_with_kvcache
    out,lse = f(q, *cache, cache_seqlens=given, **words, return_softmax_lse=True)
    agree(seed, out, lse, torch.stack([o for o,_ in each]), torch.stack([l for _,l in each]))
    for x,rows in zip(cache, before):
        for b in range(c.b): assert_close(row(x, b), rows[b], rtol=1e-12, atol=1e-12)

FUNCTIONS = dict(
    func=batches, kvpacked=lambda s: batches(s, packed='kv'), qkvpacked=lambda s: batches(s, packed='qkv'),
    varlen=texts, varlen_kvpacked=lambda s: texts(s, packed='kv'), varlen_qkvpacked=lambda s: texts(s, packed='qkv'),
    varlen_pages=pages_of_texts, with_kvcache=caches, three_func=lambda s: batches(s, three=True),
    three_qkvpacked=lambda s: batches(s, three=True, packed='qkv'), three_varlen=lambda s: texts(s, three=True),
    three_with_kvcache=lambda s: caches(s, three=True))

@pytest.mark.parametrize('name', FUNCTIONS)
def test_some_calls(name):
    for seed in range(15): FUNCTIONS[name](seed)

@pytest.mark.slow
@pytest.mark.parametrize('name', FUNCTIONS)
def test_three_hundred_calls(name):
    for seed in range(15, 315): FUNCTIONS[name](seed)

@pytest.mark.parametrize('dtype, near', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_other_dtypes(dtype, near):
    g = torch.Generator().manual_seed(0)
    q,k,v = (torch.randn(2, n, h, 16, generator=g).to(dtype) for n,h in ((9,4), (20,2), (20,2)))
    out,lse,_ = fa.flash_attn_func(q, k, v, causal=True, window_size=(5,0), return_attn_probs=True)
    assert out.dtype==dtype and lse.dtype==torch.float32
    for b in range(2):
        want,sums = dense(q[b].double(), k[b].double(), v[b].double(), causal=True, window=(5,0))
        assert_close(out[b].double(), want, rtol=near, atol=near)
        assert_close(lse[b].double(), sums, rtol=1e-5, atol=1e-5)

# ---- the two halves of a call

def parts_of(size, r): return sorted({0, size, *(r.randint(0, size) for _ in range(2))})

def halves(seed):
    "Keys in parts, outputs merged by the logs of their sums, gradients of each part: together those of all keys."
    c = Case(seed)
    c.causal,c.window,c.dv = False,(-1,-1),c.d              # a part of the keys begins anew
    n,m = c.r.choice((1,5,33)),c.r.choice((1,4,61))
    q,k,v = c.leaf(c.b, n, c.h, c.d),c.leaf(c.b, m, c.kv, c.d),c.leaf(c.b, m, c.kv, c.dv)
    each = [dense(q[b], k[b], v[b], c.scale, softcap=c.softcap) for b in range(c.b)]
    want,sums = (torch.stack(x) for x in zip(*each))
    words = dict(dropout_p=0., softmax_scale=c.scale, causal=False, window_size_left=-1, window_size_right=-1, softcap=c.softcap, alibi_slopes=None)
    cuts = parts_of(m, c.r)
    held = [(k[:,a:b],v[:,a:b]) for a,b in zip(cuts, cuts[1:])]
    found = [fa._flash_attn_forward(q, *x, **words, return_softmax=False) for x in held]
    assert all(rest==[None,None] and not out.requires_grad for out,_,*rest in found)
    lse = torch.stack([x for _,x,*_ in found]).logsumexp(0)
    out = sum(x*(own-lse).exp().mT[...,None] for x,own,*_ in found)
    agree(seed, out, lse, want.detach(), sums.detach())
    dout = c.randn(*want.shape)
    dq,dk,dv = torch.autograd.grad(want, (q,k,v), dout)
    ours = torch.zeros_like(q),*torch.full((2,*k.shape), math.nan, **WIDE)
    for (a,b),x in zip(zip(cuts, cuts[1:]), held):
        of_q = torch.full_like(q, math.nan)
        d = fa._flash_attn_backward(dout, q, *x, out, lse, of_q, ours[1][:,a:b], ours[2][:,a:b], **words, deterministic=False)
        assert_close(d, (dout*out).sum(-1).mT)
        ours[0].add_(of_q)
    for a,b in zip(ours, (dq,dk,dv)): assert_close(a, b.detach(), rtol=1e-9, atol=1e-9, msg=lambda m: f'seed {seed}: {m}')

def whole_halves(seed):
    "All keys at once, with whatever options: rows without a key, windows, slopes, texts of other lengths, rows behind the last."
    c = Case(seed)
    c.sink = None
    packed = c.r.random()<.6
    count = c.r.choice((1,2,4))
    c.give_slopes(count if packed else c.b)
    words = dict(dropout_p=0., softmax_scale=c.scale, causal=c.causal, window_size_left=c.window[0], window_size_right=c.window[1],
                 softcap=c.softcap, alibi_slopes=c.slopes)
    if packed:
        of_q,of_k = lengths(c, count),lengths(c, count)
        q,k,v = c.leaf(sum(of_q)+3, c.h, c.d),c.leaf(sum(of_k)+2, c.kv, c.d),c.leaf(sum(of_k)+2, c.kv, c.dv)
        at = ends(of_q),ends(of_k),max(of_q),max(of_k)
        first,second = fa._flash_attn_varlen_forward,fa._flash_attn_varlen_backward
        each = [c.dense(q[a:b], k[x:y], v[x:y], t) for t,(a,b,x,y) in enumerate(zip(at[0], at[0][1:], at[1], at[1][1:]))]
        want = F.pad(torch.cat([o for o,_ in each]), (0,0,0,0,0,3))
        sums = F.pad(torch.cat([l for _,l in each], 1), (0,3), value=math.inf)
    else:
        q,k,v = c.leaf(c.b, c.r.choice((1,33,70)), c.h, c.d),c.leaf(c.b, m := c.r.choice((1,33,61)), c.kv, c.d),c.leaf(c.b, m, c.kv, c.dv)
        at,first,second = (),fa._flash_attn_forward,fa._flash_attn_backward
        words |= dict(return_softmax=False)
        each = [c.dense(q[b], k[b], v[b], b) for b in range(c.b)]
        want,sums = (torch.stack(x) for x in zip(*each))
    out,lse,*_ = first(q, k, v, *at, **words)
    agree(seed, out, lse, want.detach(), sums.detach())
    words.pop('return_softmax', None)
    dout = c.randn(*want.shape)
    ours = [torch.full_like(x, math.nan) for x in (q,k,v)]
    second(dout, q, k, v, out, lse, *ours, *at, **words, deterministic=True)
    for a,b in zip(ours, torch.autograd.grad(want, (q,k,v), dout, materialize_grads=True)):
        assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f'seed {seed}: {m}')

@pytest.mark.parametrize('check', [halves,whole_halves])
def test_halves_of_a_call(check):
    for seed in range(30): check(seed)

def test_halves_drop_the_same_weights():
    torch.manual_seed(0)
    q,k,v = torch.randn(3, 2, 40, 2, 8, **WIDE).requires_grad_()
    words = 0.3,None,True,-1,-1,0.,None
    state = torch.get_rng_state()
    out,lse,_,random_state = fa._flash_attn_forward(q, k, v, *words, False)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    want,*_ = fa.flash_attn_func(q, k, v, .3, causal=True, return_attn_probs=True)
    assert_close(out, want)
    dout,ours = torch.randn_like(out),[torch.empty_like(x) for x in (q,k,v)]
    before = torch.get_rng_state()
    fa._flash_attn_backward(dout, q, k, v, out, lse, *ours, *words, False, random_state)
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(after, state)
    for a,b in zip(ours, torch.autograd.grad(want, (q,k,v), dout)): assert_close(a, b)
    with pytest.raises(TypeError, match='rng_state: expected that of the first half'):
        fa._flash_attn_backward(dout, q, k, v, out, lse, *ours, *words, False)

def test_a_refused_second_half_writes_nothing():
    x = torch.randn(2, 5, 2, 8)
    out,lse,*_ = fa._flash_attn_forward(x, x, x, 0., None, False, -1, -1, 0., None, False)
    good = dict(dout=x, q=x, k=x, v=x, out=out, softmax_lse=lse, dq=torch.zeros_like(x), dk=torch.zeros_like(x), dv=torch.zeros_like(x),
                dropout_p=0., softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0., alibi_slopes=None, deterministic=False)
    for name,bad in dict(dout=x[:,:1], out=x[...,:1], softmax_lse=lse[...,:1], dq=x[:1], dk=x[:,:,:1], dv=torch.zeros(1, 5, 2, 8).expand(2, -1, -1, -1)).items():
        with pytest.raises(ValueError, match=f'{name}: expected'): fa._flash_attn_backward(**good | {name: bad})
    with pytest.raises(TypeError, match='dq: expected a floating Tensor'): fa._flash_attn_backward(**good | dict(dq=x.int()))
    with pytest.raises(ValueError, match='leftpad_k: expected None'):
        fa._flash_attn_varlen_forward(x[0], x[0], x[0], *[torch.tensor([0,5])]*2, 5, 5, 0., None, False, leftpad_k=torch.zeros(1))
    assert not any(good[name].any() for name in ('dq','dk','dv'))
    fa._flash_attn_backward(**good | dict(dk=None))
    assert good['dq'].any() and good['dv'].any() and not good['dk'].any()

# ---- turned by position

@pytest.mark.parametrize('interleaved', [False,True])
def test_turned_by_position(interleaved):
    c = Case(0)
    angles = 6*c.randn(20, 3)
    x = c.leaf(3, 7, 2, 8)
    def want(x, places): return turned(x, angles.cos(), angles.sin(), places, interleaved)
    first = torch.tensor([0,4,13]).int()
    got = fa.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=first)
    by_hand = torch.stack([want(row, torch.arange(7)+at) for row,at in zip(x, first.tolist())])
    assert_close(got, by_hand)
    dout = c.randn(*x.shape)
    assert_close(*(torch.autograd.grad(y, x, dout)[0] for y in (got, by_hand)))
    texts = fa.apply_rotary_emb(x.flatten(0, 1), angles.cos(), angles.sin(), interleaved, seqlen_offsets=first, cu_seqlens=torch.tensor([0,7,14,21]))
    assert_close(texts, by_hand.flatten(0, 1))
    y = x.detach().clone()
    assert fa.apply_rotary_emb(y, angles.cos(), angles.sin(), interleaved, True, first) is y and torch.equal(y, got)

@pytest.mark.parametrize('interleaved', [False,True])
def test_turned_below_and_back(interleaved):
    "As ESM C calls it: packed, in place, with another order of arguments; ESM C learns through it."
    c = Case(1)
    angles = 6*c.randn(20, 4)
    x,cu = c.leaf(9, 3, 2, 8),torch.tensor([0,4,9]).int()
    want = torch.stack([*(turned(x[:,i], angles.cos(), angles.sin(), torch.cat((torch.arange(4),torch.arange(5))), interleaved) for i in (0,1)),x[:,2]], 1)
    y = x*1
    for i in (0,1): fa.apply_rotary(y[:,i], angles.cos(), angles.sin(), 0, cu, 5, interleaved, True)
    assert_close(y, want)
    dout = c.randn(*x.shape)
    assert_close(*(torch.autograd.grad(z, x, dout)[0] for z in (y, want)))
    back = fa.apply_rotary(y[:,0], angles.cos(), angles.sin(), cu_seqlens=cu, max_seqlen=5, interleaved=interleaved, conjugate=True)
    assert_close(back, x[:,0])

@pytest.mark.parametrize('words', [
    {}, dict(seqlen_offsets=3), dict(seqlen_offsets=torch.tensor([1,8])), dict(cu_seqlens=torch.tensor([0,4,9]).int(), max_seqlen=5),
    dict(cu_seqlens=torch.tensor([0,4,9]).int(), seqlen_offsets=torch.tensor([1,8]))])
def test_turned_in_one_compiled_graph(words):
    c = Case(2)
    angles,x = 6*c.randn(20, 4),c.randn(2, 9, 2, 8)
    if 'cu_seqlens' in words: x = x[0]
    def f(x): return fa.apply_rotary_emb(x, angles.cos(), angles.sin(), **words)
    torch._dynamo.reset()
    assert_close(torch.compile(f, backend='aot_eager', fullgraph=True)(x), f(x))

def complex_turn(x, places, base=10_000, dim=None, interleaved=False, scale_base=None, middle=0):
    "Heads [...,N,H,d] turned as complex numbers at places [N] or [B,N]; with `scale_base`, and a negative one for keys, stretched."
    r = dim or x.shape[-1]
    pair = torch.arange(r//2, **WIDE)
    turn = torch.exp(1j*places.double()[...,None,None]*base**(-2*pair/r))
    if scale_base is not None: turn = turn*((2*pair+.4*r)/(1.4*r))**((places.double()[...,None,None]-middle)/scale_base)
    first = x[...,:r].unflatten(-1, (r//2,2) if interleaved else (2,r//2))
    a,b = first.unbind(-1 if interleaved else -2)
    both = torch.complex(a, b)*turn
    both = torch.stack((both.real,both.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((both,x[...,r:]), -1)

ROTARY = dict(rtol=0, atol=3e-6)    # tables are made in float32, as there: an angle of some tens is off by some millionths

@pytest.mark.parametrize('seed', range(40))
def test_the_module_turns_as_complex_numbers(seed):
    "Queries, keys and values in one tensor of either layout, or queries beside keys and values; in place, with gradients."
    c = Case(seed)
    r = c.r
    b,n,kv,h = r.choice((1,3)),r.choice((1,2,7,19)),c.kv,c.h
    d = r.choice((4,10,16))
    dim,base,interleaved = r.choice((d,2,d//2//2*2 or 2)),r.choice((10_000,500.)),r.random()<.5
    scale_base,layout = r.choice((None,None,16,512)),r.choice(('five','four','kv'))
    offset = r.choice((0,0,3,torch.tensor([r.randrange(9) for _ in range(b)])))
    most = r.choice((None,30))
    if layout=='five': kv = h
    q,k,v = c.leaf(b, n, h, d),c.leaf(b, n, kv, d),c.leaf(b, n, kv, d)
    module = fa.RotaryEmbedding(dim, base, interleaved, scale_base)
    first = torch.as_tensor(offset).reshape(-1)
    size = max(n+int(first.max()), most or 0)
    words = dict(base=base, dim=dim, interleaved=interleaved)
    places = first[:,None]+torch.arange(n)
    shrinks = None if scale_base is None else -scale_base
    want = [complex_turn(x, places, scale_base=s, middle=size//2, **words) for x,s in ((q,scale_base), (k,shrinks))]+[v]
    if layout=='kv':
        given = q*1,torch.stack((k,v), 2)
        out = module(*given, offset, most)
        got = out[0],*out[1].unbind(2)
    elif layout=='four':
        given = torch.cat((q,k,v), 2),
        out = module(*given, None, offset, most, h),
        got = out[0].split((h,kv,kv), 2)
    else:
        given = torch.stack((q,k,v), 2),
        out = module(*given, seqlen_offset=offset, max_seqlen=most),
        got = out[0].unbind(2)
    assert all(x is y for x,y in zip(given, out))
    tolerance = dict(rtol=0, atol=3e-6*max(1, max(x.abs().max().item() for x in want)))
    for x,y in zip(got, want): assert_close(x, y, **tolerance)
    dout = [c.randn(*x.shape) for x in want]
    for x,y in zip(torch.autograd.grad(got, (q,k,v), dout), torch.autograd.grad(want, (q,k,v), dout)): assert_close(x, y, rtol=1e-5, atol=3e-5)
    assert module._seq_len_cached==size and not module.state_dict() and not [*module.parameters()]

def test_scores_of_xpos_depend_on_the_distance():
    "Whatever the place, and wherever the middle of the table is; the factor falls with the distance."
    x = torch.ones(1, 12, 1, 8, **WIDE)
    for most in (None, 40):
        q,kv = fa.RotaryEmbedding(8, scale_base=4)(x.clone(), torch.stack((x,x), 2), max_seqlen=most)
        scores = q[0,:,0]@kv[0,:,0,0].T
        for i in range(12):
            for j in range(i+1): assert_close(scores[i,j], scores[i-j,0], rtol=1e-4, atol=1e-4)
        pair = torch.arange(4, **WIDE)
        want = [(2*((2*pair+3.2)/11.2)**(t/4)*(t*10_000**(-pair/4)).cos()).sum() for t in range(12)]
        assert_close(scores[:,0], torch.stack(want), rtol=1e-4, atol=1e-4)

IN_PLACE = {
    'leaf': lambda x: x,
    'view of a leaf': lambda x: x[:,1:],
    'no leaf': lambda x: x*1,
    'view': lambda x: (x*1)[:,1:],
    'one of several views': lambda x: (x*1).chunk(2)[1],
    'one of several views of a leaf': lambda x: x.split(1)[0]}

@pytest.mark.parametrize('kind', IN_PLACE)
@pytest.mark.parametrize('call', ['x','qkv','kv','module'])
def test_in_place_whatever_autograd_says(kind, call):
    "The package's kernel writes behind autograd's back, so programs give it what PyTorch refuses: mamba's attention, contrastors and MPT those of a split."
    c = Case(0)
    leaf = c.leaf(2, 5, 3 if call!='kv' else 2, 2, 8) if call!='x' else c.leaf(2, 5, 2, 8)
    angles = torch.arange(9.)[:,None]*10_000**(-torch.arange(0, 8, 2)/8)
    tables = angles.cos(),angles.sin()
    f = dict(x=lambda x: fa.apply_rotary_emb(x, *tables, inplace=True), qkv=lambda x: fa.apply_rotary_emb_qkv_(x, *tables),
             kv=lambda x: fa.apply_rotary_emb_kv_(x, *tables), module=lambda x: fa.RotaryEmbedding(8)(x))[call]
    def want(x):
        place = torch.arange(x.shape[1])
        if call=='x': return complex_turn(x, place)
        turned = {0} if call=='kv' else {0,1}
        return torch.stack([complex_turn(y, place) if i in turned else y for i,y in enumerate(x.unbind(2))], 2)
    other = leaf.detach().clone().requires_grad_()
    wanted = want(IN_PLACE[kind](other))
    dout = c.randn(*wanted.shape)
    expected = torch.autograd.grad(wanted, other, dout)[0]
    x = IN_PLACE[kind](leaf)
    at = x.data_ptr()
    out = f(x)
    assert_close(out, wanted, **ROTARY)
    assert torch.equal(x, out) and x.data_ptr()==at
    assert_close(torch.autograd.grad(out, leaf, dout)[0], expected, **ROTARY)
    with torch.no_grad(): y = IN_PLACE[kind](other); assert f(y) is y

def test_what_lies_beside_may_be_used_after_a_write():
    "The second of two views was refused once the first had been written to."
    c = Case(1)
    x = c.leaf(1, 6, 3, 4)
    angles = torch.outer(torch.arange(6.), torch.tensor([1.,.01]))
    tables = angles.cos(),angles.sin()
    q,kv = (x*1).split((1,2), 2)
    q = fa.apply_rotary_emb(q, *tables, inplace=True)
    kv = fa.apply_rotary_emb_kv_(kv.unsqueeze(3), *tables)
    want = complex_turn(x[:,:,:2], torch.arange(6))
    assert_close(torch.cat((q,kv[:,:,0]), 2), want, **ROTARY)
    assert_close(*(torch.autograd.grad(y, x)[0] for y in (q.sum()+kv.sum(), want.sum()+x[:,:,2:].sum())), **ROTARY)

@pytest.mark.parametrize('kind', ['leaf','no leaf','view'])
@pytest.mark.parametrize('call', ['qkv','kv','module','split'])
def test_the_module_in_one_compiled_graph(kind, call):
    c = Case(2)
    angles = torch.arange(9.)[:,None]*torch.tensor([1.,.1,.01,.001])
    tables = angles.cos(),angles.sin()
    module = fa.RotaryEmbedding(8, scale_base=16)
    def split(x):
        q,kv = (x*1).flatten(2, 3).split((2,4), 2)
        return module(q, kv.unflatten(2, (2,2)), seqlen_offset=3)
    f = dict(qkv=lambda x: fa.apply_rotary_emb_qkv_(x, *tables, seqlen_offsets=torch.tensor([1,3])), kv=lambda x: fa.apply_rotary_emb_kv_(x[:,:,1:], *tables),
             module=lambda x: module(x, max_seqlen=9), split=split)[call]
    x = c.randn(2, 5, 3, 2, 8)
    found = []
    for compiled in (False,True):
        torch._dynamo.reset()
        leaf = x.clone().requires_grad_()
        given = IN_PLACE[kind](leaf)
        out = (torch.compile(f, backend='aot_eager', fullgraph=True) if compiled else f)(given)
        outs = out if isinstance(out, tuple) else (out,)
        grad = torch.autograd.grad(sum((y*y.detach().cos()).sum() for y in outs), leaf)[0]
        found.append((*outs,given.detach(),grad))
    assert_close(*found)

def test_the_tables_grow_and_follow():
    module = fa.RotaryEmbedding(8)
    x = torch.randn(1, 5, 3, 2, 8)
    module(x.clone())
    first = module._cos_cached
    module(x[:,:2].clone(), seqlen_offset=3)
    assert module._cos_cached is first and module._seq_len_cached==5
    module(x.clone(), seqlen_offset=1)
    assert len(module._cos_cached)==6 and torch.equal(module._cos_cached[:5], first)
    module(x.to(torch.bfloat16))
    assert module._cos_cached.dtype==torch.bfloat16 and module._seq_len_cached==5
    for dtype in (torch.float32,torch.float16):
        with torch.inference_mode(): module(x.to(dtype))
        leaf = x.clone().to(dtype).requires_grad_()
        module.eval()(leaf*1).sum().backward()
        assert leaf.grad is not None
    half = fa.RotaryEmbedding(8).to(torch.bfloat16)     # positions are counted in float32, whatever the buffers are
    assert_close(half(x.clone()), module(x.clone()), rtol=0, atol=0)
    rounded = fa.RotaryEmbedding(8, pos_idx_in_fp32=False).to(torch.bfloat16)
    rounded(torch.zeros(1, 300, 3, 2, 8))
    assert torch.equal(rounded._cos_cached[257], rounded._cos_cached[256])  # as bfloat16 has no 257
    half(torch.zeros(1, 300, 3, 2, 8))
    assert not torch.equal(half._cos_cached[257], half._cos_cached[256])

def test_a_subclass_has_frequencies_of_its_own():
    "As contrastors and StripedHyena write theirs."
    class Slower(fa.RotaryEmbedding):
        def _compute_inv_freq(self, device=None): return super()._compute_inv_freq(device)/2
    x = torch.randn(1, 8, 3, 2, 8, **WIDE)
    assert_close(Slower(8)(x.clone())[:,::2], fa.RotaryEmbedding(8)(x[:,::2].clone()), rtol=0, atol=0)

def test_rows_of_a_table_for_each_token():
    "As BD3-LM and Duo call `apply_rotary_emb_torch`; the result has the wider dtype, as there."
    c = Case(3)
    x,angles = c.leaf(2, 5, 3, 8),6*c.randn(2, 5, 3)
    for interleaved in (False,True):
        got = fa.apply_rotary_emb_torch(x, angles.cos(), angles.sin(), interleaved)
        want = torch.stack([turned(x[b], angles[b].cos(), angles[b].sin(), torch.arange(5), interleaved) for b in (0,1)])
        assert_close(got, want)
        assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))
    assert fa.apply_rotary_emb_torch(x.half(), angles[0].cos().float(), angles[0].sin().float()).dtype==torch.float32

R = torch.zeros(2, 5, 3, 2, 8)
T = torch.ones(5, 4)
@pytest.mark.parametrize('call,error,said', [
    (lambda: fa.RotaryEmbedding(7), ValueError, 'dim: expected an even number from 2 on, got 7'),
    (lambda: fa.RotaryEmbedding(8, 0), ValueError, 'base: expected a number above 0'),
    (lambda: fa.RotaryEmbedding(8, scale_base=-1), ValueError, 'scale_base: expected None or a number above 0'),
    (lambda: fa.RotaryEmbedding(8, 1e4, False, None, True), TypeError, 'device: expected .*pos_idx_in_fp32'),
    (lambda: fa.RotaryEmbedding(10)(R), ValueError, 'cos: expected .* r <= 8'),
    (lambda: fa.RotaryEmbedding(8)(R, seqlen_offset=-1), ValueError, 'seqlen_offset: expected'),
    (lambda: fa.RotaryEmbedding(8)(R, seqlen_offset=torch.tensor([1])), ValueError, r'seqlen_offset: expected an int Tensor \[2\]'),
    (lambda: fa.RotaryEmbedding(8)(R[:,:,0]), TypeError, 'num_heads_q: expected an int'),
    (lambda: fa.RotaryEmbedding(8)(R.long()), TypeError, 'qkv: expected a floating tensor'),
    (lambda: fa.RotaryEmbedding(8)(R[:,:,:2]), ValueError, r'qkv: expected \[B,N,3,H,d\], or'),
    (lambda: fa.RotaryEmbedding(8)(R[:,:,0], R), ValueError, r'kv: expected \[B,N,2,H,d\]'),
    (lambda: fa.RotaryEmbedding(8)(R.to('meta'), seqlen_offset=torch.tensor([1,2], device='meta')), ValueError, 'max_seqlen: expected an int beside'),
    (lambda: fa.apply_rotary_emb_qkv_(R[:,:,0], T, T, num_heads_q=1), ValueError, 'num_heads_q: expected as many heads'),
    (lambda: fa.apply_rotary_emb_qkv_(R[:,:,0], T, T, num_heads_q=3), ValueError, 'num_heads_q: expected an int from 0 to 2'),
    (lambda: fa.apply_rotary_emb_qkv_(R, T, T, T[:3], T[:3]), ValueError, 'cos_k: expected .* S > 4'),
    (lambda: fa.apply_rotary_emb_qkv_(R, T, T, seqlen_offsets=1), ValueError, 'cos: expected .* S > 5'),
    (lambda: fa.apply_rotary_emb_kv_(R, T, T), ValueError, r'kv: expected \[B,N,2,H,d\]'),
    (lambda: fa.apply_rotary_emb(R[:,:,0].int(), T, T), TypeError, 'x: expected a floating tensor'),
    (lambda: fa.apply_rotary_emb_torch(R[:,:,0], T[:4], T[:4]), ValueError, r'cos: expected \[N,r/2\] or \[B,N,r/2\] with B,N=\(2, 5\)'),
    (lambda: fa.apply_rotary_emb_torch(R[:,:,0], T, T[:,:2]), ValueError, 'sin: expected'),
    (lambda: fa.apply_rotary_emb_torch(R[:,:,0], torch.ones(5, 5), torch.ones(5, 5)), ValueError, 'cos: expected .* r <= 8')])
def test_rotary_refuses_by_name_and_changes_nothing(call, error, said):
    R.copy_(torch.arange(R.numel()).view(R.shape))
    before = R.clone()
    with pytest.raises(error, match=said): call()
    assert torch.equal(R, before)

def test_a_refused_half_leaves_the_other():
    "Queries were turned before the keys beside them were refused."
    q = torch.randn(1, 5, 2, 8)
    before = q.clone()
    with pytest.raises(ValueError, match='kv: expected'): fa.RotaryEmbedding(8)(q, torch.randn(1, 5, 3, 2, 8))
    assert torch.equal(q, before)

# ---- what programs do with a result

@pytest.mark.parametrize('dropout_p', [0.,.1])
def test_heads_are_joined_by_view(dropout_p):
    "Wherever the queries lie; where no core computes dropout, the result lay as heads, then tokens, and `view` raised."
    for N,M in ((5,5), (4,9), (0,3)):
        q,k = torch.randn(2, 4, N, 8).transpose(1, 2),torch.randn(2, 2, M, 8).transpose(1, 2)
        for x,y in ((q,k), (q.contiguous(),k.contiguous())):
            fa.flash_attn_func(x, y, y, dropout_p).view(2, N, 32)
            fa.flash_attn_3_func(x, y, y).view(2, N, 32)
            fa.flash_attn_with_kvcache(x, y, y).view(2, N, 32)
            fa.flash_attn_func(x, y, y, dropout_p, return_attn_probs=True)[0].view(2, N, 32)

def test_a_cache_without_memory():
    "Tensors without values have no address; two of them were taken for one."
    q,new,k,v = (torch.empty(2, n, 2, 8, device='meta') for n in (1,1,9,9))
    assert fa.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=4).shape==q.shape
    with pytest.raises(ValueError, match='v_cache: expected memory of its own'): fa.flash_attn_with_kvcache(q, k, k, new, new, cache_seqlens=4)

# ---- dropout, and what is of no effect or refused

def test_dropout_drops_weights():
    torch.manual_seed(0)
    q = torch.randn(1, 200, 2, 8)
    v = torch.eye(200)[None,:,None].expand(1, 200, 2, 200)
    whole,some = fa.flash_attn_func(q, q, v),fa.flash_attn_func(q, q, v, .25)
    kept = some!=0
    assert .2<1-kept.float().mean()<.3
    assert_close(some, whole*kept/.75)
    cu = torch.tensor([0,80,200])
    some = fa.flash_attn_varlen_func(q[0], q[0], v[0], cu, cu, 120, 120, .25)
    assert .2<1-(some!=0).float().sum()/(2*(80*80+120*120))<.3

def test_signatures_are_the_packages():
    "In their order, up to what is ours."
    def names(f): return [p.name for p in inspect.signature(f).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    tail = 'dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs'.split()
    cu = 'cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k'.split()
    assert names(fa.flash_attn_func)==['q','k','v',*tail]
    assert names(fa.flash_attn_qkvpacked_func)==['qkv',*tail] and names(fa.flash_attn_kvpacked_func)==['q','kv',*tail]
    assert names(fa.flash_attn_varlen_func)==['q','k','v',*cu,*tail,'block_table']
    assert names(fa.flash_attn_varlen_kvpacked_func)==['q','kv',*cu,*tail]
    assert names(fa.flash_attn_varlen_qkvpacked_func)==['qkv','cu_seqlens','max_seqlen',*tail]
    sides = 'dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes'.split()
    back = 'dout q k v out softmax_lse dq dk dv'.split()
    assert names(fa._flash_attn_forward)==['q','k','v',*sides,'return_softmax']
    assert names(fa._flash_attn_backward)==[*back,*sides,'deterministic','rng_state']
    more = 'return_softmax block_table leftpad_k seqused_k zero_tensors num_splits'.split()
    assert names(fa._flash_attn_varlen_forward)==['q','k','v',*cu,*sides,*more]
    assert names(fa._flash_attn_varlen_backward)==[*back,*cu,*sides,'deterministic','rng_state','zero_tensors']
    cache = 'q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale '\
            'causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse'
    assert names(fa.flash_attn_with_kvcache)==cache.split()
    turn = 'cos sin interleaved inplace seqlen_offsets cu_seqlens max_seqlen'.split()
    assert names(fa.apply_rotary_emb)==['x',*turn] and names(fa.apply_rotary_emb_torch)==['x',*turn[:3]]
    assert names(fa.apply_rotary_emb_qkv_)=='qkv cos sin cos_k sin_k interleaved seqlen_offsets num_heads_q'.split()
    assert names(fa.apply_rotary_emb_kv_)=='kv cos sin interleaved seqlen_offsets'.split()
    assert names(fa.RotaryEmbedding)=='dim base interleaved scale_base device'.split()
    assert names(fa.RotaryEmbedding.forward)=='self qkv kv seqlen_offset max_seqlen num_heads_q'.split()
    three = 'softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic '\
            'sm_margin return_attn_probs'.split()
    assert names(fa.flash_attn_3_func)==['q','k','v',*three]
    assert names(fa.flash_attn_3_varlen_func)==['q','k','v',*cu,'seqused_q','seqused_k',*three]
    cache = 'q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q '\
            'cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk '\
            'softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse'
    assert names(fa.flash_attn_3_with_kvcache)==cache.split()

def test_what_tunes_a_gpu_changes_nothing():
    q = torch.randn(2, 5, 2, 8)
    want = fa.flash_attn_func(q, q, q, causal=True)
    assert torch.equal(fa.flash_attn_func(q, q, q, causal=1, deterministic=True), want)
    assert torch.equal(fa.flash_attn_3_func(q, q, q, causal=True, num_splits=4, pack_gqa=True, sm_margin=8, deterministic=True), want)
    assert torch.equal(fa.flash_attn_with_kvcache(q, q, q, causal=True, num_splits=3), want)

X = torch.zeros(2, 5, 2, 8)
REFUSED = [
    (lambda: fa.flash_attn_func(X[0], X[0], X[0]), ValueError, r'q: expected \[B,N,H,d\], got shape \(5, 2, 8\)'),
    (lambda: fa.flash_attn_func(X, X, None), TypeError, r'v: expected a Tensor \[B,N,H,d\], got NoneType'),
    (lambda: fa.flash_attn_func(X, X, X, window_size=4), ValueError, 'window_size: expected a pair'),
    (lambda: fa.flash_attn_func(X, X, X, window_size=(1.,0)), TypeError, 'window_size: expected a pair of ints'),
    (lambda: fa.flash_attn_func(X, X, X, softcap=None), TypeError, 'softcap: expected a finite number'),
    (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=torch.ones(3)), ValueError, 'alibi_slopes: expected'),
    (lambda: fa.flash_attn_func(X, X, X, dropout_p=2.), ValueError, 'dropout_p: expected'),
    (lambda: fa.flash_attn_func(X, X, X, softmax_scale='x'), TypeError, 'softmax_scale: expected'),
    (lambda: fa.flash_attn_qkvpacked_func(X), ValueError, r'qkv: expected \[B,N,3,H,d\]'),
    (lambda: fa.flash_attn_kvpacked_func(X, torch.zeros(2, 5, 3, 2, 8)), ValueError, r'kv: expected \[B,N,2,H,d\]'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[0], X[0], torch.tensor([0,6]), torch.tensor([0,5]), 5, 5), ValueError, 'cu_seqlens_q: expected ends'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[0], X[0], torch.tensor([0,5]), torch.tensor([0,2,5]), 5, 5), ValueError, 'cu_seqlens_k: expected 1 texts'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[0], X[0], [0,5], [0,5], 5, 5), TypeError, 'cu_seqlens_q: expected an int Tensor'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[0], X[0], torch.tensor([0]), torch.tensor([0]), 5, 5), TypeError, 'cu_seqlens_q: expected an int Tensor .* one text'),
    (lambda: fa.flash_attn_varlen_func(X, X, X, torch.tensor([0,2]), torch.tensor([0,2]), 5, 5), ValueError, r'q: expected \[total,H,d\]'),
    (lambda: fa.flash_attn_3_varlen_func(X[0], X[0], X[0], *[torch.tensor([0,5])]*2, 5, 5, seqused_k=torch.tensor([6])), ValueError, 'seqused_k: expected'),
    (lambda: fa.flash_attn_3_func(X, X, X, qv=X), ValueError, 'qv: expected None'),
    (lambda: fa.flash_attn_3_func(X, X, X, q_descale=torch.ones(2)), ValueError, 'q_descale: expected None'),
    (lambda: fa.flash_attn_3_func(X, X, X, attention_chunk=4), ValueError, 'attention_chunk: expected 0'),
    (lambda: fa.flash_attn_3_with_kvcache(X, X, X, rotary_seqlens=torch.ones(2)), ValueError, 'rotary_seqlens: expected None'),
    (lambda: fa.flash_attn_3_with_kvcache(X, X, X, cu_seqlens_q=torch.ones(2)), ValueError, 'cu_seqlens_q: expected None'),
    # hostile tests of issue 65: what was taken without a word, or refused in the words of another function
    (lambda: fa.flash_attn_func(X, X[:1], X), ValueError, 'k: expected a batch of 2'),
    (lambda: fa.flash_attn_func(X[:1], X, X), ValueError, 'k: expected a batch of 1'),
    (lambda: fa.flash_attn_func(X[:,:,:1], X, X), ValueError, 'k: expected a number of heads that divides H=1'),
    (lambda: fa.flash_attn_func(X, X, X[:,:,:1]), ValueError, 'v: expected 2 heads'),
    (lambda: fa.flash_attn_func(X, X, X, softcap=math.nan), ValueError, 'softcap: expected a finite number'),
    (lambda: fa.flash_attn_func(X, X, X, softmax_scale=math.inf), ValueError, 'softmax_scale: expected'),
    (lambda: fa.flash_attn_func(X, X, X, s_aux=[1.,1.]), TypeError, 's_aux: expected a floating Tensor'),
    (lambda: fa.flash_attn_func(X, X, X, s_aux=torch.ones(2, device='meta')), ValueError, 's_aux: expected a tensor on cpu'),
    (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=torch.full((2,), math.nan)), ValueError, 'alibi_slopes: expected finite'),
    (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=torch.full((2,), math.inf)), ValueError, 'alibi_slopes: expected finite'),
    (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=torch.ones(2).cfloat()), TypeError, 'alibi_slopes: expected a floating'),
    (lambda: fa.flash_attn_func(X, X, X, alibi_slopes=torch.ones(2, device='meta')), ValueError, 'alibi_slopes: expected a tensor on cpu'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[0], X[0], *[torch.tensor([0,5], device='meta')]*2, 5, 5), ValueError, 'cu_seqlens_q: expected a tensor on cpu'),
    (lambda: fa.flash_attn_varlen_func(X[0], X, X[:,:4], *[torch.tensor([0,5])]*2, 5, 5, block_table=torch.zeros(1, 1).int()), ValueError, 'v: expected'),
    (lambda: fa.flash_attn_varlen_func(X[0], X[:,:0], X[:,:0], *[torch.tensor([0,5])]*2, 5, 5, block_table=torch.zeros(1, 1).int()), ValueError, 'k: expected pages of one place'),
    (lambda: fa.flash_attn_varlen_func(X[0], X, X, *[torch.tensor([0,5])]*2, 5, 5, block_table=[[0]]), ValueError, 'block_table: expected an int Tensor'),
    (lambda: fa.flash_attn_3_qkvpacked_func(X, num_heads_q='2'), TypeError, 'num_heads_q: expected an int'),
    (lambda: fa.flash_attn_3_qkvpacked_func(X, num_heads_q=0), ValueError, 'num_heads_q: expected an int from 1'),
    (lambda: fa.unpad_input_for_concatenated_sequences(X, torch.full((2,5), 2)), ValueError, 'attention_mask_in_length: expected lengths >= 0, 5 in a row'),
    (lambda: fa.unpad_input_for_concatenated_sequences(X, torch.ones(2, 5)), ValueError, 'attention_mask_in_length: expected an int Tensor'),
    (lambda: fa.install('transformers'), TypeError, 'transformers: expected a bool')]
@pytest.mark.parametrize('call, error, text', REFUSED, ids=[text for *_,text in REFUSED])
def test_refused_by_name(call, error, text):
    with pytest.raises(error, match=text): call()

NEW = torch.ones(2, 2, 2, 8)
REFUSED_CACHES = [
    (dict(k=NEW), 'v: expected one beside k'), (dict(k=NEW, v=NEW), 'cache_seqlens: expected lengths'),
    (dict(k=NEW, v=NEW, cache_seqlens=4), 'cache_seqlens: expected ints from 0 to 3'), (dict(cache_seqlens=-1), 'cache_seqlens: expected'),
    (dict(cache_seqlens=torch.tensor([1.,2.])), 'cache_seqlens: expected an int Tensor'), (dict(cache_seqlens=torch.tensor([1])), 'cache_seqlens: expected an int Tensor'),
    (dict(k=NEW[...,:4], v=NEW, cache_seqlens=1), 'k: expected'), (dict(k=NEW, v=NEW[:,:1], cache_seqlens=1), 'v: expected'),
    (dict(cache_batch_idx=torch.tensor([0,2])), 'cache_batch_idx: expected'), (dict(cache_leftpad=torch.tensor([0,6])), 'cache_leftpad: expected'),
    (dict(cache_leftpad=torch.tensor([0,3]), cache_seqlens=2), 'cache_leftpad: expected at most'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, window_size=3), 'window_size: expected'), (dict(k=NEW, v=NEW, cache_seqlens=1, softmax_scale='x'), 'softmax_scale: expected'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, rotary_cos=torch.ones(2, 4), rotary_sin=torch.ones(2, 4)), 'rotary_cos: expected'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, rotary_cos=torch.ones(9, 4)), 'rotary_sin: expected'),
    (dict(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)), 'rotary_cos: expected None without k'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, alibi_slopes=torch.ones(5)), 'alibi_slopes: expected'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, s_aux=torch.ones(5)), 's_aux: expected'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, block_table=torch.tensor([[0],[2]])), 'block_table: expected pages'),
    (dict(block_table=torch.tensor([[0],[1]]), cache_leftpad=torch.tensor([0,0])), 'cache_leftpad: expected None beside'),
    # hostile tests of issue 65
    (dict(k=NEW.double(), v=NEW.double(), cache_seqlens=1), 'k: expected torch.float32'), (dict(k=NEW, v=NEW.int(), cache_seqlens=1), 'v: expected torch.float32'),
    (dict(k=NEW.to('meta'), v=NEW.to('meta'), cache_seqlens=1), 'k: expected torch.float32 on cpu'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, return_softmax_lse=torch.ones(2)), 'return_softmax_lse: expected a bool'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4), rotary_interleaved=torch.ones(2)), 'rotary_interleaved: expected'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, rotary_cos=torch.ones(9, 4).int(), rotary_sin=torch.ones(9, 4).int()), 'rotary_cos: expected a floating'),
    (dict(k=NEW, v=NEW, cache_seqlens=1, rotary_cos=torch.ones(9, 4, device='meta'), rotary_sin=torch.ones(9, 4, device='meta')), 'rotary_cos: expected a tensor on cpu')]
@pytest.mark.parametrize('words, text', REFUSED_CACHES, ids=[text for _,text in REFUSED_CACHES])
def test_a_refused_call_leaves_the_cache(words, text):
    cache = torch.randn(2, 2, 5, 2, 8)
    before = cache.clone()
    with pytest.raises((TypeError,ValueError), match=text): fa.flash_attn_with_kvcache(torch.ones(2, 2, 2, 8), *cache, **words)
    assert torch.equal(cache, before)

def odd_caches():
    one = torch.zeros(2, 5, 2, 8)
    with torch.inference_mode(): apart = torch.zeros(2, 5, 2, 8),torch.zeros(2, 5, 2, 8)
    return dict(shorter=(one.clone(), one[:,:3].clone()), rows=(one.clone(), one[:1].clone()), heads=(one.clone(), one[:,:,:1].clone()), same=(one, one),
                expanded=(one[:1].expand_as(one), one.clone()), inference=apart)
@pytest.mark.parametrize('name, text', dict(shorter='v_cache: expected', rows='v_cache: expected', heads='v_cache: expected', same='v_cache: expected memory of its own',
                                            expanded='k_cache: expected memory of its own', inference='k_cache: expected an ordinary tensor').items())
def test_hostile_65_a_cache_that_cannot_be_written(name, text):
    "Nothing is written into the keys where the values do not fit, and no place stands for two."
    caches = odd_caches()[name]
    with pytest.raises(ValueError, match=text): fa.flash_attn_with_kvcache(torch.ones(2, 2, 2, 8), *caches, NEW, NEW, cache_seqlens=3)
    assert not caches[0].any() and not caches[1].any()

def test_hostile_65_no_query_is_turned():
    cache = torch.zeros(2, 2, 5, 2, 8)
    assert fa.flash_attn_with_kvcache(torch.ones(2, 0, 2, 8), *cache, NEW[:,:0], NEW[:,:0], *torch.ones(2, 9, 4), cache_seqlens=3).shape==(2, 0, 2, 8)

@pytest.mark.parametrize('looks, places', [(dict(), [5,5,5]), (dict(causal=True), [5,6,7]), (dict(window_size=(4,0)), [5,6,7])])
@pytest.mark.parametrize('interleaved', [True, False])
def test_where_queries_are_turned(looks, places, interleaved):
    "At their own places if they look to one side or near, else all at that of the first, which follows the cache."
    g = torch.Generator().manual_seed(0)
    q,k,v = torch.randn(3, 1, 3, 2, 8, generator=g, **WIDE)
    cache,angles = torch.randn(2, 1, 9, 2, 8, generator=g, **WIDE),6*torch.rand(9, 4, generator=g, **WIDE)
    tables = angles.cos(),angles.sin()
    out = fa.flash_attn_with_kvcache(q, *cache, k, v, *tables, cache_seqlens=5, rotary_interleaved=interleaved, **looks)
    assert_close(cache[0,0,5:8], turned(k[0], *tables, torch.arange(5, 8), interleaved))
    words = dict(causal=looks.get('causal', False), window=looks.get('window_size', (-1,-1)))
    want,_ = dense(turned(q[0], *tables, torch.tensor(places), interleaved), cache[0,0,:8], cache[1,0,:8], **words)
    assert_close(out[0], want)

def test_lengths_are_read_at_once():
    "Programs keep one tensor of lengths and add to it in place."
    cache,sizes = torch.zeros(2, 1, 6, 1, 4),torch.zeros(1, dtype=torch.int32)
    said = torch.randn(3, 1, 6, 1, 4)
    for i in range(6):
        q,k,v = (x[:,i:i+1] for x in said)
        out = fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=sizes, causal=True)
        sizes += 1
    assert_close(out, fa.flash_attn_func(*said, causal=True)[:,-1:])

def test_compiled():
    def f(q, k, v, cu): return fa.flash_attn_varlen_func(q, k, v, cu, cu, 9, 9, causal=True, window_size=(3,0))
    compiled = torch.compile(f, backend='aot_eager', fullgraph=True, dynamic=True)
    for sizes in ([3,4], [5,1,6]):
        q,k,v = torch.randn(3, sum(sizes), 2, 8)
        assert_close(compiled(q, k, v, ends(sizes)), f(q, k, v, ends(sizes)))
    g = torch.compile(lambda q: fa.flash_attn_func(q, q, q, causal=True, window_size=(3,0), return_attn_probs=True)[:2], backend='aot_eager', fullgraph=True)
    q = torch.randn(2, 9, 2, 8)
    for a,b in zip(g(q), fa.flash_attn_func(q, q, q, causal=True, window_size=(3,0), return_attn_probs=True)): assert_close(a, b)

@pytest.mark.parametrize('slopes', [0, 1, 2], ids=['', 'shared', 'each'])
@pytest.mark.parametrize('of_k, rows_k', [([3,2,4], 12), ([2,0,5], 7), (None, 9)], ids=str)
def test_hostile_65_rows_behind_the_last_text_in_a_compiled_program(of_k, rows_k, slopes):
    "They are zero as in eager mode, though nobody can read where the last text ends."
    torch._dynamo.reset()
    at_q = ends([3,0,4])
    at_k = at_q if of_k is None else ends(of_k)
    q,k,v = torch.randn(9, 4, 8),torch.randn(rows_k, 2, 8),torch.randn(rows_k, 2, 8)
    steep = [None, torch.rand(4), torch.rand(3, 4)][slopes]
    def f(q, k, v, at_q, at_k): return fa.flash_attn_varlen_func(q, k, v, at_q, at_k, 9, 9, causal=True, alibi_slopes=steep, return_attn_probs=True)[:2]
    want = f(q, k, v, at_q, at_k)
    assert not want[0][7:].any() and want[1][:,7:].isposinf().all()
    for a,b in zip(torch.compile(f, backend='aot_eager', fullgraph=slopes<2)(q, k, v, at_q, at_k), want): assert_close(a, b)

def test_hostile_65_shapes_of_tensors_without_values():
    at = torch.tensor([0,3,5], device='meta')
    q,k = torch.zeros(7, 4, 8, device='meta'),torch.zeros(9, 2, 8, device='meta')
    out,lse,_ = fa.flash_attn_varlen_func(q, k, k, at, at, 9, 9, causal=True, return_attn_probs=True)
    assert out.is_meta and out.shape==(7, 4, 8) and lse.shape==(4, 7)

# ---- padding taken out and put back

@pytest.mark.parametrize('kind', ['bool','int32','int64'])
def test_padding_round_trip(kind):
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 9, generator=g)<.6
    mask[1] = False
    x = torch.randn(4, 9, 2, 3, generator=g, requires_grad=True)
    rows,indices,cu,longest,used = fa.unpad_input(x, mask.to(getattr(torch, kind)))
    assert cu.dtype==used.dtype==torch.int32 and indices.dtype==torch.int64 and longest==int(mask.sum(1).max())
    assert torch.equal(rows, x[mask]) and used.tolist()==cu.diff().tolist()==mask.sum(1).tolist()
    back = fa.pad_input(rows, indices, 4, 9)
    assert torch.equal(back, x*mask[...,None,None])
    back.sum().backward()
    assert torch.equal(x.grad, mask[...,None,None].expand_as(x).float())
    assert torch.equal(fa.index_first_axis(x.detach().flatten(0, 1), indices), rows)

def test_texts_in_padded_rows():
    "By the example in the package's documentation: each text sees itself."
    lengths = torch.tensor([[2,3,0,0,0,0], [3,2,0,0,0,0], [6,0,0,0,0,0]])
    x = torch.randn(3, 6, 2, 8)
    rows,indices,at,longest = fa.unpad_input_for_concatenated_sequences(x, lengths)
    assert at.tolist()==[0,2,5,8,10,16] and longest==6 and at.dtype==torch.int32
    assert torch.equal(fa.pad_input(rows, indices, 3, 6)[0,:5], x[0,:5]) and torch.equal(rows[5:8], x[1,:3])
    assert [len(t) for t in fa.unpad_input_for_concatenated_sequences(x, torch.zeros(3, 6).int())[:3]]==[0,0,1]

def test_places_that_are_not_used():
    mask = torch.tensor([[1,1,0,0],[1,0,0,0]])
    unused = torch.tensor([[0,0,1,0],[0,1,0,0]])
    rows,_,cu,longest,used = fa.unpad_input(torch.arange(8.).view(2, 4), mask, unused)
    assert rows.tolist()==[0,1,2,4,5] and cu.tolist()==[0,3,5] and longest==3 and used.tolist()==[2,1]

def test_padded_and_unpadded_forms_agree():
    "As ModernBERT computes: the rows without padding, and the batch with it."
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(20)<torch.tensor([20,7,13])[:,None]
    x = torch.randn(3, 20, 3, 4, 8, generator=g)
    rows,indices,cu,longest,*_ = fa.unpad_input(x, mask)
    for window in ((-1,-1), (4,4)):
        out = fa.pad_input(fa.flash_attn_varlen_qkvpacked_func(rows, cu, longest, window_size=window), indices, 3, 20)
        for b,n in enumerate((20,7,13)): assert_close(out[b,:n], fa.flash_attn_qkvpacked_func(x[b:b+1,:n], window_size=window)[0])

# ---- under the package's names

@no_other
def test_install_and_off_again():
    path,names = list(sys.meta_path),{*sys.modules}
    with fa.install():
        import flash_attn, flash_attn_interface
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        assert flash_attn.flash_attn_func is fa.flash_attn_func and flash_attn_interface.flash_attn_func is fa.flash_attn_3_func
        assert flash_attn.__version__==importlib.metadata.version('flash_attn')==importlib.metadata.version('flash-attn')
        assert importlib.util.find_spec('flash_attn.bert_padding') and importlib.util.find_spec('flash_attn_interface')
        assert 'flash-attn' in importlib.metadata.packages_distributions()['flash_attn']
        with pytest.raises(ModuleNotFoundError, match='flash_attn.ops.rms_norm: not among .*torch.nn.LayerNorm'): importlib.import_module('flash_attn.ops.rms_norm')
        with pytest.raises(ModuleNotFoundError, match='flash_attn.ops.triton.layer_norm: not among'): importlib.import_module('flash_attn.ops.triton.layer_norm')
        with pytest.raises(ModuleNotFoundError, match='flash_attn.losses: .*torch.nn.CrossEntropyLoss'): exec('from flash_attn.losses.cross_entropy import CrossEntropyLoss', {})
        with pytest.raises(ModuleNotFoundError, match="No module named 'flash_attn.cute'"): importlib.import_module('flash_attn.cute')
        rotary = importlib.import_module('flash_attn.layers.rotary')
        for name in 'apply_rotary_emb apply_rotary_emb_torch apply_rotary_emb_qkv_ apply_rotary_emb_kv_ RotaryEmbedding'.split():
            assert getattr(rotary, name) is getattr(fa, name)
        with pytest.raises(importlib.metadata.PackageNotFoundError): importlib.metadata.version('no-package-of-this-name')
        assert importlib.metadata.version('torch')
    assert sys.meta_path==path and not {name for name in {*sys.modules}-names if name.startswith('flash_attn')}
    with pytest.raises(ModuleNotFoundError): importlib.import_module('flash_attn')
    with pytest.raises(importlib.metadata.PackageNotFoundError): importlib.metadata.version('flash_attn')

@no_other
def test_installed_twice():
    "The names stay until the last one is taken off, in whatever order."
    one,two = fa.install(),fa.install()
    one.remove()
    one.remove()
    import flash_attn
    assert flash_attn.flash_attn_func is fa.flash_attn_func
    two.remove()
    with pytest.raises(ModuleNotFoundError): importlib.import_module('flash_attn')

@no_other
@pytest.mark.parametrize('name', ['flash_attn','flash_attn_interface','flash_attn_3'])
def test_a_real_package_is_never_replaced(tmp_path, monkeypatch, name):
    (tmp_path/f'{name}.py').write_text('real = True\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=f'{name}: expected no package of that name'): fa.install()
    assert importlib.import_module(name).real and not {'flash_attn','flash_attn_interface','flash_attn_3'}-{name} & {*sys.modules}
    del sys.modules[name]

@no_other
def test_a_program_needs_one_line(tmp_path):
    "In a fresh interpreter, which imports the package first of all after it."
    program = tmp_path/'program.py'
    program.write_text('import dynattn.flash_attn; dynattn.flash_attn.install()\nimport torch\nfrom flash_attn import flash_attn_func\n'
                       'q = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)\nprint(flash_attn_func(q, q, q, causal=True).sum().item())\n')
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode==0 and float(done.stdout)==64., done.stderr

@no_other
def test_hostile_65_whatever_the_order_transformers_is_as_before():
    pytest.importorskip('transformers')
    places = fa._of_transformers()
    def now(): return [id(x[name] if isinstance(x, dict) else getattr(x, name)) for x,name,_ in places]
    before,path = now(),list(sys.meta_path)
    for order in ((0,1,2), (2,1,0), (1,0,2)):
        made = [fa.install(transformers=flag) for flag in (True,False,True)]
        for i in order:
            assert now()!=before if any(x.transformers for x in fa.install._here) else now()==before
            made[i].remove()
        assert now()==before and sys.meta_path==path and fa.install._here==[]

@no_other
def test_hostile_65_modules_are_found_anew():
    "A program may load them again, or take them out of `sys.modules`, as test runners do."
    with fa.install():
        import flash_attn.bert_padding
        flash_attn.flash_attn_func = None
        assert importlib.reload(flash_attn).flash_attn_func is fa.flash_attn_func
        for name in [name for name in sys.modules if name.startswith('flash_attn')]: del sys.modules[name]
        assert importlib.import_module('flash_attn.bert_padding').pad_input is fa.pad_input
        assert importlib.metadata.version('Flash.Attn')==fa.VERSION
        assert importlib.util.find_spec('flash_attn.losses') is None and importlib.util.find_spec('flash_attn.ops.rms_norm') is None
    assert 'flash_attn' not in sys.modules

@no_other
def test_host3_a_missing_name_says_whose_module_it_is():
    "It was 'unknown location'."
    with fa.install():
        with pytest.raises(ImportError, match=r"'_get_block_size_n' from 'flash_attn.flash_attn_interface' \(.*dynattn.flash_attn.py\)"):
            exec('from flash_attn.flash_attn_interface import _get_block_size_n', {})
        with pytest.raises(ImportError, match=r"'flash_attn_combine' from 'flash_attn_interface' \(.*dynattn.flash_attn.py\)"):
            exec('from flash_attn_interface import flash_attn_combine', {})

@no_other
def test_names_that_programs_import():
    "Counted in 37 public programs: ring attention, context parallelism, reinforcement learning."
    with fa.install():
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _wrapped_flash_attn_forward
        assert _wrapped_flash_attn_forward is fa._flash_attn_forward and _flash_attn_varlen_backward is fa._flash_attn_varlen_backward
        import flash_attn.bert_padding as padding
        assert not hasattr(padding, 'no_such_name')
        from flash_attn.ops.triton.rotary import apply_rotary       # ESM C
        assert apply_rotary is fa.apply_rotary
        assert importlib.util.find_spec('flash_attn_3') is not None # diffusers
        assert importlib.metadata.version('flash_attn_3')==importlib.import_module('flash_attn_3').__version__==fa.VERSION_3
        owners = importlib.metadata.packages_distributions()
        assert all('flash-attn-3' in owners[name] for name in ('flash_attn_3','flash_attn_interface')) and 'flash-attn' in owners['flash_attn']
        from flash_attn_3.flash_attn_interface import flash_attn_varlen_func # Megatron
        assert flash_attn_varlen_func is fa.flash_attn_3_varlen_func
        if importlib.util.find_spec('einops') is not None: assert padding.rearrange is importlib.import_module('einops').rearrange

# ---- modules of attention

def reference_mha(module, x, x_kv=None, *, keep=None, window=None, causal=False, slopes=None, turn=None):
    "What `MHA` stands for: its linear layers and the dense attention, [B,N,D]"
    kv_of = x if x_kv is None else x_kv
    h,hk,d = module.num_heads,module.num_heads_kv,module.head_dim
    if module.cross_attn: q,kv = module.Wq(x),module.Wkv(kv_of)
    else: q,kv = module.Wqkv(x).split((h*d,2*hk*d), -1)
    q,(k,v) = q.unflatten(-1, (h,d)),kv.unflatten(-1, (2,hk,d)).unbind(2)
    if turn is not None: q,k = (turn(t, torch.arange(t.shape[1])) for t in (q,k))
    n,m = q.shape[1],k.shape[1]
    bias = None if slopes is None else -slopes[:,None]*torch.arange(-max(n, m), max(n, m)+1).abs()
    padding = None if keep is None else PaddingMask.from_keep(keep)
    out = dense_attention(*(t.transpose(1, 2) for t in (q,k,v)), is_causal=causal, q_offset=m-n, window=window, rel_bias=bias,
                          padding=padding, scale=module.inner_attn.softmax_scale)
    return module.out_proj(out.transpose(1, 2).flatten(-2))

@pytest.mark.parametrize('seed', range(40))
def test_a_layer_is_dense_attention_between_its_linear_layers(seed):
    "Output and all gradients in float64: heads of keys in groups, other keys, windows, slopes, positions, masks, residuals"
    r,g = random.Random(seed),torch.Generator().manual_seed(seed)
    h = r.choice((1,2,6))
    d,flash,cross,causal = r.choice((4,8)),r.random()<.5,r.random()<.3,r.random()<.5
    words = dict(num_heads_kv=r.choice((None,*(i for i in (1,2,3) if h%i==0))), cross_attn=cross, causal=causal, use_flash_attn=flash,
                 softmax_scale=r.choice((None,.3)), qkv_proj_bias=r.random()<.5, checkpointing=r.random()<.3, return_residual=r.random()<.3)
    turn = window = slopes = keep = None
    if not cross and r.random()<.5:
        words |= dict(rotary_emb_dim=4, rotary_emb_interleaved=r.random()<.5)
        turn = lambda x, place: complex_turn(x, place, dim=4, interleaved=words['rotary_emb_interleaved'])
    if flash and r.random()<.5: words |= dict(window_size=(window := (2,1)))
    if flash and r.random()<.5:
        words |= dict(use_alibi=True)
        slopes = torch.tensor(fa.get_alibi_slopes(h), **WIDE)
    torch.manual_seed(seed)
    module = fa.MHA(h*d, h, **words).double()
    n = r.choice((1,3,7))
    m = n+r.choice((0,2,5)) if cross else n
    x,x_kv = (torch.randn(2, size, h*d, generator=g, **WIDE).requires_grad_() for size in (n,m))
    given = dict(x_kv=x_kv) if cross else {}
    if not flash and not causal and r.random()<.6: given |= dict(key_padding_mask=(keep := torch.arange(m)<torch.tensor([[m],[max(m-2, 1)]])))
    want = reference_mha(module, x, x_kv if cross else None, keep=keep, window=window, causal=causal, slopes=slopes, turn=turn)
    got = module(x, **given)
    if words['return_residual']: got,same = got; assert same is x
    tolerance = dict(rtol=0, atol=1e-9 if turn is None else 2e-5) # tables of angles are made in float32
    assert_close(got, want, **tolerance)
    leaves = [x,*([x_kv] if cross else []),*module.parameters()]
    dout = torch.randn(got.shape, generator=g, **WIDE)
    for a,b in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout)): assert_close(a, b, **tolerance)

def test_a_layer_has_the_names_of_the_packages():
    "A `state_dict` of one fits the other; buffers are not in it"
    assert [*fa.MHA(8, 2, use_flash_attn=True, use_alibi=True, rotary_emb_dim=4).state_dict()]==['Wqkv.weight','Wqkv.bias','out_proj.weight','out_proj.bias']
    assert [*fa.MHA(8, 2, cross_attn=True, qkv_proj_bias=False).state_dict()]==['Wq.weight','Wkv.weight','out_proj.weight','out_proj.bias']
    assert fa.MHA(8, 4, num_heads_kv=2).Wqkv.weight.shape==(16,8)
    assert fa.MHA(8, 2, dtype=torch.bfloat16).allocate_inference_cache(3, 5).shape==(3,5,2,2,4)

def test_packed_texts_in_a_layer():
    torch.manual_seed(0)
    module = fa.MHA(8, 2, causal=True, use_flash_attn=True).double()
    x = torch.randn(9, 8, **WIDE)
    ends = torch.tensor([0,2,9], dtype=torch.int32)
    want = torch.cat([module(x[None,a:b])[0] for a,b in ((0,2),(2,9))])
    assert_close(module(x, cu_seqlens=ends, max_seqlen=7), want)
    grouped = fa.MHA(8, 4, num_heads_kv=2, use_flash_attn=True).double()
    want = torch.cat([grouped(x[None,a:b])[0] for a,b in ((0,2),(2,9))])
    assert_close(grouped(x, cu_seqlens=ends, max_seqlen=7), want)

class Record:
    "As the package's `InferenceParams`"
    def __init__(self, rows, most, lengths=None):
        self.max_batch_size,self.max_seqlen,self.lengths_per_sample = rows,most,lengths
        self.seqlen_offset = self.batch_size_offset = 0
        self.key_value_memory_dict = {}

@pytest.mark.parametrize('words', [{}, dict(use_flash_attn=True), dict(use_flash_attn=True, window_size=(2,0)), dict(num_heads_kv=1, use_flash_attn=True),
                                   dict(num_heads_kv=1), dict(use_flash_attn=True, use_alibi=True)], ids=str)
@pytest.mark.parametrize('turned', [0, 4])
def test_a_layer_step_by_step_is_the_layer(words, turned):
    torch.manual_seed(0)
    module = fa.MHA(16, 4, layer_idx=7, causal=True, rotary_emb_dim=turned, **words).double()
    x = torch.randn(2, 7, 16, **WIDE)
    record,steps = Record(2, 8),[]
    with torch.no_grad():
        for first,end in ((0,3),(3,4),(4,6),(6,7)):
            record.seqlen_offset = first
            steps.append(module(x[:,first:end], inference_params=record))
        assert_close(torch.cat(steps, 1), module(x), rtol=0, atol=1e-5 if turned else 1e-9)
        assert record.key_value_memory_dict[7].shape==(2,8,2,module.num_heads_kv,4)
        record.seqlen_offset = 8
        with pytest.raises(ValueError, match='inference_params|cache_seqlens'): module(x[:,:1], inference_params=record)

def test_rows_of_a_layer_have_lengths_of_their_own():
    torch.manual_seed(0)
    module = fa.MHA(16, 4, layer_idx=0, causal=True, rotary_emb_dim=4, use_flash_attn=True).double()
    x = torch.randn(2, 5, 16, **WIDE)
    record = Record(2, 8)
    with torch.no_grad():
        module(x[:,:4], inference_params=record)
        record.seqlen_offset,record.lengths_per_sample = 4,torch.tensor([2,4])
        step = module(x[:,4:], inference_params=record)
        for row,length in enumerate((2,4)):
            whole = module(torch.cat((x[row:row+1,:length],x[row:row+1,4:]), 1))
            assert_close(step[row,0], whole[0,-1], rtol=0, atol=1e-5)

def test_slopes_of_any_number_of_heads():
    "As the paper's code: of the next power of two every other one, where the number is none"
    assert fa.get_alibi_slopes(4)==[.25,.0625,.015625,.00390625]
    assert fa.get_alibi_slopes(6)==fa.get_alibi_slopes(4)+fa.get_alibi_slopes(8)[::2][:2]
    assert fa.get_alibi_slopes(12)==fa.get_alibi_slopes(8)+fa.get_alibi_slopes(16)[::2][:4] and len(fa.get_alibi_slopes(1))==1

TOKENS = torch.ones(1, 4, 8)
@pytest.mark.parametrize('call,error,said', [
    (lambda: fa.MHA(8, 3), ValueError, 'num_heads: expected a divisor of 8'),
    (lambda: fa.MHA(8, 4, num_heads_kv=3), ValueError, 'num_heads_kv: expected a divisor of 4'),
    (lambda: fa.MHA(8, 2, dwconv=True), ValueError, 'dwconv: expected False'),
    (lambda: fa.MHA(8, 2, use_alibi=True), ValueError, 'use_alibi: expected False without use_flash_attn'),
    (lambda: fa.MHA(8, 2, window_size=(2,0)), ValueError, 'window_size: expected .* without use_flash_attn'),
    (lambda: fa.MHA(8, 2, cross_attn=True, rotary_emb_dim=4), ValueError, 'rotary_emb_dim: expected 0 with cross_attn'),
    (lambda: fa.MHA(8, 2)(TOKENS[...,:6]), ValueError, r'x: expected \[B,N,8\]'),
    (lambda: fa.MHA(8, 2)(TOKENS, x_kv=TOKENS), ValueError, 'x_kv: expected None without cross_attn'),
    (lambda: fa.MHA(8, 2)(TOKENS[0], cu_seqlens=torch.tensor([0,4])), ValueError, 'cu_seqlens: expected None without use_flash_attn'),
    (lambda: fa.MHA(8, 2, use_flash_attn=True)(TOKENS, key_padding_mask=torch.ones(1, 4, dtype=torch.bool)), ValueError, 'key_padding_mask: expected None with'),
    (lambda: fa.MHA(8, 2)(TOKENS, key_padding_mask=torch.ones(1, 3, dtype=torch.bool)), ValueError, 'key_padding_mask: expected a Tensor'),
    (lambda: fa.MHA(8, 2)(TOKENS, inference_params=Record(1, 4)), ValueError, 'inference_params: expected None without a layer_idx'),
    (lambda: fa.MHA(8, 2, layer_idx=0)(TOKENS, inference_params=Record(1, 3)), ValueError, 'inference_params: expected a cache for 1 rows of 4 tokens'),
    (lambda: fa.FlashSelfAttention(window_size=3), ValueError, 'window_size: expected a pair')])
def test_a_layer_refuses_by_name(call, error, said):
    with pytest.raises(error, match=said): call()

@no_other
def test_prog6_modules_that_programs_import():
    "UniRig takes `MHA`, nanotron a function, InternEvo the attention inside; what is not attention says so"
    with fa.install():
        from flash_attn.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention, flash_attn_varlen_kvpacked_func
        assert MHA is fa.MHA and FlashSelfAttention is fa.FlashSelfAttention and flash_attn_varlen_kvpacked_func is fa.flash_attn_varlen_kvpacked_func
        for name,other in (('modules.mlp','torch.nn'), ('flash_attention','flash_attn.modules.mha'), ('flash_attn_triton','flash_attn.flash_attn_func')):
            with pytest.raises(ModuleNotFoundError, match=f'flash_attn.{name}: .*{other}'): importlib.import_module(f'flash_attn.{name}')

# ---- transformers

@no_other
def test_programs_ask_transformers_for_it():
    "As models that come with their own code do; who keeps the function hears no once it is removed."
    pytest.importorskip('transformers')
    with fa.install(transformers=True):
        from transformers.utils import is_flash_attn_2_available as kept
        assert kept()
    import transformers.utils
    assert not kept() and not transformers.utils.is_flash_attn_2_available()

def tiny(name):
    tf = pytest.importorskip('transformers')
    sizes = dict(vocab_size=100, hidden_size=64, num_attention_heads=4, intermediate_size=64)
    ends_of_text = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    grouped = dict(num_key_value_heads=2, num_hidden_layers=2)
    config = dict(
        modernbert=lambda: tf.ModernBertConfig(**sizes, num_hidden_layers=4, local_attention=16, cls_token_id=1, sep_token_id=2, **ends_of_text),
        llama=lambda: tf.LlamaConfig(**sizes, **grouped, **ends_of_text),
        mistral=lambda: tf.MistralConfig(**sizes, **grouped, sliding_window=8, **ends_of_text),
        gemma2=lambda: tf.Gemma2Config(**sizes, **grouped, head_dim=16, sliding_window=8, **ends_of_text))[name]()
    torch.manual_seed(0)
    return tf.AutoModel.from_config(config).eval()

@no_other
@pytest.mark.parametrize('version', [2, 3])
@pytest.mark.parametrize('name', ['modernbert','llama','mistral','gemma2'])
def test_transformers_takes_it_for_the_package(name, version):
    "A padded batch, against its own attention; and with a training step."
    model = tiny(name)
    ids = torch.randint(3, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0,25:] = 0
    def run(kind):
        model.set_attn_implementation(kind)
        out = model(input_ids=ids, attention_mask=mask).last_hidden_state*mask[...,None]
        model.zero_grad()
        out.square().mean().backward()
        return out,[p.grad.clone() for p in model.parameters() if p.grad is not None]
    if not model._can_set_attn_implementation():            # ModernBERT before it took transformers' interface
        with fa.install(transformers=True), pytest.raises(ValueError, match='attn_implementation: expected'):
            type(model)._from_config(model.config, attn_implementation=f'flash_attention_{version}')
        return
    want,grads = run('eager')
    with fa.install(transformers=True):
        got,ours = run(f'flash_attention_{version}')
        assert model.config._attn_implementation==f'flash_attention_{version}'
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    for a,b in zip(ours, grads, strict=True): assert_close(a, b, rtol=1e-3, atol=1e-4)

@no_other
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_host3_transformers_needs_no_linear_layer(dtype):
    "GPT-2 projects by convolutions; transformers looked for a linear layer, and a bare StopIteration came out."
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=100, n_embd=64, n_head=4, n_layer=2, attn_pdrop=0.)
    model = tf.GPT2Model(config).eval().to(dtype)
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation('eager')
    want = model(ids).last_hidden_state
    with fa.install(transformers=True):
        model.set_attn_implementation('flash_attention_2')
        got = model(ids).last_hidden_state
    near = 1e-4 if dtype==torch.float32 else 5e-2
    assert_close(got, want, rtol=near, atol=near)

@no_other
def test_transformers_generates():
    tf = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = tf.MistralConfig(vocab_size=100, hidden_size=64, num_attention_heads=4, intermediate_size=64, num_key_value_heads=2,
                              num_hidden_layers=2, sliding_window=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = tf.MistralForCausalLM(config).eval()
    ids = torch.randint(3, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0,:6],mask[0,:6] = 0,0                                  # padded on the left
    def run(): return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=None)
    model.set_attn_implementation('eager')
    want = run()
    with fa.install(transformers=True):
        model.set_attn_implementation('flash_attention_2')
        assert torch.equal(run(), want)

@no_other
def test_transformers_is_as_before():
    import transformers.modeling_flash_attention_utils as flash
    model = tiny('llama')
    def state(): return {name: getattr(flash, name) for name in vars(flash) if name.startswith('is_flash')},vars(type(model).__mro__[-2]).keys()
    before = state()
    with fa.install(transformers=True): model.set_attn_implementation('flash_attention_2')
    model.set_attn_implementation('eager')
    assert state()==before
    with pytest.raises((ImportError,ValueError)): model.set_attn_implementation('flash_attention_2')
    with fa.install():                                         # the names alone do not stand for a GPU
        with pytest.raises((ImportError,ValueError)): model.set_attn_implementation('flash_attention_2')

# ---- nanochat: how its training and its engine call version 3

@no_other
def test_discrete_diffusion_turns_and_attends():
    "What SEDD, MDLM and BD3-LM do in each layer, beside the dense attention of complex numbers; with gradients."
    c = Case(5)
    weight,x = c.leaf(48, 16),c.randn(2, 7, 16)
    angles = torch.outer(torch.arange(7, **WIDE), 10_000**-(torch.arange(4, **WIDE)/4))
    with fa.install():
        import flash_attn, flash_attn.layers.rotary
        qkv = (x@weight.T).unflatten(2, (3,2,8))
        qkv = flash_attn.layers.rotary.apply_rotary_emb_qkv_(qkv, angles.cos(), angles.sin())
        cu_seqlens = torch.arange(0, 3*7, 7, dtype=torch.int32)
        out = flash_attn.flash_attn_interface.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_seqlens, 7, 0., causal=False)
    q,k,v = (x@weight.T).unflatten(2, (3,2,8)).unbind(2)
    q,k = (complex_turn(y, torch.arange(7)) for y in (q,k))
    want = torch.cat([dense(q[b], k[b], v[b])[0] for b in (0,1)])
    assert_close(out, want)
    dout = c.randn(*out.shape)
    assert_close(*(torch.autograd.grad(y, weight, dout)[0] for y in (out, want)))

def rotary_free_attention(flash, x, weights, window, cache=None, at=0):
    "The attention of a nanochat layer, without its rotary positions: training, and decoding with a cache."
    b,n,_ = x.shape
    q,k,v = ((x@w).view(b, n, -1, 16) for w in weights)
    if cache is None: y = flash.flash_attn_func(q, k, v, causal=True, window_size=window)
    else: y = flash.flash_attn_with_kvcache(q, *cache, k=k, v=v, cache_seqlens=torch.full((b,), at, dtype=torch.int32), causal=True, window_size=window)
    return y.flatten(2)

@pytest.mark.parametrize('window', [(-1,0), (5,0), (64,0)])
def test_as_nanochat_calls_it(window):
    "A whole text, and the same text as a prompt, a chunk and single tokens: every step is the whole's."
    flash = SimpleNamespace(flash_attn_func=fa.flash_attn_3_func, flash_attn_with_kvcache=fa.flash_attn_3_with_kvcache)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 32, generator=g)
    weights = [torch.randn(32, 16*h, generator=g) for h in (4,2,2)]
    whole = rotary_free_attention(flash, x, weights, window)
    cache = torch.full((2, 2, 30, 2, 16), torch.nan)
    at = 0
    for size in (10, 5, *[1]*9):
        part = rotary_free_attention(flash, x[:,at:at+size], weights, window, cache, at)
        assert_close(part, whole[:,at:at+size], rtol=1e-4, atol=1e-4)
        at += size

@pytest.mark.parametrize('wants_lse', [False, True])
def test_a_call_is_computed_once(monkeypatch, wants_lse):
    "Asked for its `lse`, it was computed twice, with two draws of dropout"
    calls = []
    real = fa.attention
    monkeypatch.setattr(fa, 'attention', lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    q,k,v = torch.randn(3, 2, 20, 4, 16)
    ends = torch.tensor([0,20,40], dtype=torch.int32)
    fa.flash_attn_func(q, k, v, return_attn_probs=wants_lse)
    fa.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 20, 20, return_attn_probs=wants_lse)
    fa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=wants_lse)
    assert len(calls)==3

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_slopes_of_alibi_are_multiplied_in_float64_beside_float64(dtype):
    "Their bias is a slope times a distance, and nothing is rounded to the dtype of the slopes."
    from dynattn import attention
    q,k,v = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (1, 700, 700))
    slopes = torch.tensor([.3141592,.2718281]).to(dtype)
    bias = -slopes.double()[:,None,None]*torch.arange(699, -1, -1)
    expected = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias[None], impl='dense')
    assert_close(fa.flash_attn_func(q, k, v, alibi_slopes=slopes), expected.transpose(1, 2), atol=1e-12, rtol=0)
