"""Texts of queries and of keys that differ, an offset for each, and the log of each row's sum: every engine against the
dense path, in float64, with the gradients of everything that learns."""
import random
import pytest, torch
from torch.testing import assert_close
from dynattn import PaddingMask, Window, attention, banded_attention, dense_attention, window_weights
from dynattn.engine.native import core
from dynattn.engine.ops import impls

WIDE = dict(dtype=torch.float64)

@pytest.fixture(params=['core', 'plain'])
def engine(request, monkeypatch):
    if request.param=='core' and core.library() is None: pytest.skip('no compiled core')
    if request.param=='plain': monkeypatch.setattr(core, 'library', lambda: None)

def ends(lengths): return torch.tensor([0, *lengths]).cumsum(0)

def some_texts(r): # -> N, M, options of packed texts
    count = r.choice((1, 2, 5))
    of_q,of_k = ([r.choice((0, 1, 5, 40, 90)) for _ in range(count)] for _ in 'qk')
    if not any(of_q): of_q[0] = 7
    options = dict(segments=ends(of_q), key_segments=ends(of_k))
    offsets = r.choice(('last aligned', 'last aligned', 'any', 'none'))
    if offsets=='last aligned': options['q_offsets'] = torch.tensor(of_k)-torch.tensor(of_q)
    if offsets=='any': options['q_offsets'] = torch.tensor([r.randint(-20, 20) for _ in of_q])
    return sum(of_q),sum(of_k),options

def some_rows(r, b): # -> N, M, options of rows with an offset each
    n,m = r.choice((1, 1, 3, 33, 100)),r.choice((1, 7, 64, 130))
    options = dict(q_offsets=torch.tensor([r.randint(-10, m+10) for _ in range(b)]))
    if r.random()<.5: options['padding'] = PaddingMask.from_lengths(torch.tensor([r.randint(0, m) for _ in range(b)]), m)
    return n,m,options

def some_call(seed): # -> q, k, v, what else learns, options
    r,g = random.Random(seed),torch.Generator().manual_seed(seed)
    def leaf(*shape, by=1.): return (by*torch.randn(shape, generator=g, **WIDE)).requires_grad_()
    kv,b = r.choice((1, 2)),r.choice((1, 2, 3))
    h,packed = kv*r.choice((1, 2)),r.random()<.5
    if packed: b = 1
    n,m,options = some_texts(r) if packed else some_rows(r, b)
    d,dv = r.choice((1, 5, 16)),r.choice((3, 16))
    options |= dict(is_causal=r.random()<.5, n_global=r.choice((0, 0, 1, 3)), softcap=r.choice((None, None, 3.)))
    learned = []
    def learns(x): learned.append(x); return x
    kind = r.choice(('none', 'hard', 'default', 'table'))
    if kind=='hard': options['window'] = r.choice((0, 3, (5,None), (None,2), (17,1)))
    if kind in ('default','table'):
        sigma = learns((9*torch.rand(r.choice(((h,), (b,h))), generator=g, **WIDE)).requires_grad_())
        of_table = dict(smooth='gaussian', apply=r.choice(('inside','after')))
        options['window'] = Window(sigma, **of_table) if kind=='table' else Window.default(sigma)
    if r.random()<.3: options['rel_bias'] = learns(leaf(b, h, 9))
    if r.random()<.3: options['sink'] = learns(leaf(h))
    if r.random()<.2: options['alpha'] = r.choice((1.3, 1.5, 2.))
    else: options['return_lse'] = r.random()<.8
    return (leaf(b, h, n, d),leaf(b, kv, m, d),leaf(b, kv, m, dv)),learned,options

def worked(f, x, learned, options):
    "Output, lse and all gradients."
    results = found = f(*x, **options)
    if not options.get('return_lse'): results = (found,)
    g = torch.Generator().manual_seed(1)
    finite = [r.masked_fill(r.isinf(), 0.) for r in results]
    douts = [torch.randn(r.shape, generator=g, **WIDE) for r in results]
    return *results,*torch.autograd.grad(finite, [*x, *learned], douts, materialize_grads=True)

def same(seed):
    x,learned,options = some_call(seed)
    want = worked(dense_attention, x, learned, options)
    for a,b in zip(worked(banded_attention, x, learned, options), want, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: f'seed {seed}, {options}: {m}')

def test_the_band_is_the_dense_path(engine):
    for seed in range(40): same(seed)

@pytest.mark.slow
def test_the_band_is_the_dense_path_in_many_calls(engine):
    for seed in range(40, 340): same(seed)

def test_keys_of_many_chunks():
    "Gradients of keys are cut into chunks of rows, which have to know where the keys of their texts lie."
    if core.library() is None: pytest.skip('no compiled core')
    g = torch.Generator().manual_seed(1)
    of_q,of_k = (torch.randint(0, 700, (24,), generator=g).tolist() for _ in 'qk')
    x = [torch.randn(1, h, sum(n), 64, generator=g, **WIDE).requires_grad_() for h,n in ((2,of_q), (1,of_k), (1,of_k))]
    options = dict(segments=ends(of_q), key_segments=ends(of_k), return_lse=True)
    for more in (dict(window=2), dict(window=(6,None), is_causal=True, q_offsets=torch.tensor(of_k)-torch.tensor(of_q))):
        texts = zip(*(e.tolist() for e in (options['segments'], options['segments'][1:], options['key_segments'], options['key_segments'][1:])))
        alone = [banded_attention(x[0][:,:,a:b], x[1][:,:,c:d], x[2][:,:,c:d], is_causal='is_causal' in more, window=more['window'],
                                  q_offset=d-c-(b-a) if 'is_causal' in more else 0, return_lse=True) for a,b,c,d in texts]
        want = torch.cat([out for out,_ in alone], 2),torch.cat([lse for _,lse in alone], 2)
        got = banded_attention(*x, **options, **more)
        douts = [torch.randn(t.shape, generator=g, **WIDE) for t in want]
        for a,b in zip((*got, *torch.autograd.grad([t.masked_fill(t.isinf(), 0.) for t in got], x, douts)),
                       (*want, *torch.autograd.grad([t.masked_fill(t.isinf(), 0.) for t in want], x, douts))): assert_close(a, b)

def test_what_lies_behind_a_length_changes_nothing(engine):
    "A cache with room: NaN and other numbers behind the keys of a row."
    g = torch.Generator().manual_seed(0)
    q,k,v = (torch.randn(3, h, n, 8, generator=g) for h,n in ((4,2), (2,20), (2,20)))
    lengths = torch.tensor([2, 11, 20])
    options = dict(padding=PaddingMask.from_lengths(lengths, 20), q_offsets=lengths-2, is_causal=True, return_lse=True)
    clean = banded_attention(q, k, v, **options)
    behind = ~options['padding'].keep[:,None,:,None]
    spoilt = banded_attention(q, k.masked_fill(behind, torch.nan), v.masked_fill(behind, 1e30), **options)
    assert all(torch.equal(a, b) for a,b in zip(clean, spoilt))

def test_a_row_without_a_key(engine):
    "Its output is zero and its lse infinite; neither sends anything back, whatever comes to them."
    x = [torch.ones(1, 1, n, 2, requires_grad=True) for n in (3, 4, 4)]
    sink = torch.zeros(1, requires_grad=True)
    for more,learned in ((dict(), []), (dict(sink=sink), [sink])):
        out,lse = attention(*x, q_offsets=torch.tensor([-2]), is_causal=True, return_lse=True, **more)
        assert not out[0,0,:2].any() and lse[0,0].isinf().tolist()==[True, True, False]
        came = torch.full_like(lse, torch.nan).index_fill(2, torch.tensor(2), 1.)
        grads = torch.autograd.grad((out,lse), [*x, *learned], (torch.ones_like(out),came))
        assert all(g.isfinite().all() for g in grads) and not grads[0][0,0,:2].any()

def test_a_query_that_is_lost(engine):
    "Its output and its lse are NaN, and it changes no gradient of others."
    q,k,v = (torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    lost = q.clone()
    lost[0,0,2] = torch.nan
    def run(q):
        x = [t.clone().requires_grad_() for t in (q, k, v)]
        out,lse = attention(*x, window=1, return_lse=True)
        g = torch.ones(5).index_fill(0, torch.tensor(2), 0.)
        return out,lse,torch.autograd.grad((out,lse), x[1:], (g[:,None].expand_as(out),g.expand_as(lse)))
    (out,lse,of_lost),(_,_,of_whole) = run(lost),run(q)
    assert out.isnan().all(-1)[0,0].tolist()==lse.isnan()[0,0].tolist()==[False, False, True, False, False]
    for a,b in zip(of_lost, of_whole): assert_close(a, b)

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
def test_the_log_of_the_sum_is_not_rounded(engine, dtype):
    "In half precision it is a number of float32, of the scores as they are."
    q,k = (torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (9, 30))
    _,lse = banded_attention(q, k, k, return_lse=True)
    assert lse.dtype==torch.float32
    assert_close(lse.double(), (q.double()@k.double().mT/4).logsumexp(-1), rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize('options, error, text', [
    (dict(q_offsets=torch.tensor([1])), ValueError, r'q_offsets: expected shape \[B\]=\(2,\), got \(1,\)'),
    (dict(q_offsets=torch.tensor([1., 2.])), TypeError, 'q_offsets: expected an int Tensor'),
    (dict(q_offset=torch.tensor([1, 2])), TypeError, 'q_offset: expected an int, got a tensor .*; q_offsets takes'),
    (dict(q_offsets=[1, 2]), TypeError, 'q_offsets: expected an int Tensor'),
    (dict(q_offsets=torch.tensor([1, 2]), q_offset=1), ValueError, 'q_offset: expected 0 where q_offsets is given'),
    (dict(q_offsets=torch.tensor([1, 2**40])), ValueError, 'q_offsets: expected ints from'),
    (dict(key_segments=torch.zeros(2, 6).long()), ValueError, 'key_segments: expected None without segments'),
    (dict(segments=torch.zeros(2, 6).long(), key_segments=torch.zeros(2, 5).long()), ValueError, 'key_segments: expected ids'),
    (dict(segments=torch.zeros(2, 6).long(), key_segments=torch.tensor([0, 6])), ValueError, 'key_segments: expected ids, or cu_seqlens'),
    (dict(segments=torch.zeros(2, 6).long(), key_segments=torch.zeros(2, 6)), TypeError, 'key_segments: expected an int Tensor'),
    (dict(segments=torch.zeros(2, 6).long(), key_segments=torch.tensor([[0,0,0,0,2,1]]*2)), ValueError, 'key_segments: expected ids that do not'),
    (dict(segments=torch.zeros(2, 6).long(), q_offsets=torch.tensor([0, 0])), ValueError, 'q_offsets: expected None beside ids'),
    (dict(segments=torch.zeros(2, 6).long(), q_offset=1), ValueError, 'segments: expected q_offset=0, got 1; q_offsets'),
    (dict(return_lse=True, alpha=1.5), ValueError, 'return_lse: expected False where alpha is given'),
    (dict(return_lse=1), TypeError, 'return_lse: expected a bool'),
    (dict(return_lse=True, impl='sdpa'), ValueError, 'return_lse: expected False for F.scaled'),
    (dict(q_offsets=torch.tensor([1, 2]), impl='sdpa'), ValueError, 'q_offsets: expected None for F.scaled')], ids=str)
def test_refused_by_name(options, error, text):
    x = torch.zeros(2, 1, 6, 4)
    with pytest.raises(error, match=text): attention(x, x, x, **options)

@pytest.mark.parametrize('name, value', [('q_offsets', torch.tensor([1, 2])), ('return_lse', True)])
def test_who_lacks_it_says_so(name, value):
    x = torch.zeros(2, 1, 6, 4)
    with pytest.raises(ValueError, match=f'{name}: expected'): window_weights(x, x, **{name: value})
    primitives = pytest.importorskip('dynattn.engine.triton.primitives')
    from dynattn.engine.call import Call
    assert primitives._option_refused(Call(x, x, x, window=2, **{name: value})).startswith(f'{name}: expected')

def test_texts_of_other_numbers():
    one = torch.zeros(1, 1, 6, 4)
    with pytest.raises(ValueError, match='key_segments: expected ids, or cu_seqlens of as many texts'):
        attention(one, one, one, segments=torch.tensor([0, 2, 6]), key_segments=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match='key_segments: expected cu_seqlens from 0 to M=6'):
        attention(one, one, one, segments=torch.tensor([0, 2, 6]), key_segments=torch.tensor([0, 2, 5]))

def test_every_engine_is_asked():
    "What is new is computed or refused by each implementation, and never passed over."
    x = torch.randn(2, 1, 6, 4)
    want = dense_attention(x, x, x, q_offsets=torch.tensor([1, 2]), is_causal=True)
    for name in impls:
        try: got = attention(x, x, x, q_offsets=torch.tensor([1, 2]), is_causal=True, impl=name)
        except ValueError as e: assert str(e).split(':')[0] in ('q_offsets','q','impl'), e
        else: assert_close(got, want)

def test_compiled():
    "One program for any number of texts, of any lengths."
    def f(q, k, v, of_q, of_k, at):
        return banded_attention(q, k, v, window=2, segments=of_q, key_segments=of_k, q_offsets=at, return_lse=True)
    compiled = torch.compile(f, backend='aot_eager', fullgraph=True, dynamic=True)
    g = torch.Generator().manual_seed(0)
    for of_q,of_k in (([3,4,9], [5,2,7]), ([1,0,8,6,2], [4,4,0,9,3])):
        x = [torch.randn(1, h, sum(n), 8, generator=g).requires_grad_() for h,n in ((2,of_q), (1,of_k), (1,of_k))]
        texts = ends(of_q),ends(of_k),torch.tensor(of_k)-torch.tensor(of_q)
        def worked(f):
            out,lse = f(*x, *texts)
            return out,lse,*torch.autograd.grad((out,lse.masked_fill(lse.isinf(), 0.)), x, (torch.ones_like(out),torch.ones_like(lse)))
        for a,b in zip(worked(compiled), worked(f)): assert_close(a, b)
