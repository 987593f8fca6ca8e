"A wrong call gets the same clear error whoever would compute it; a right one may be written as for PyTorch's own function."
import inspect, math, re
import numpy as np
import pytest, torch, torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close
import dynattn
from dynattn import PaddingMask, Window, attention, attention_weights, banded_attention, dense_attention
from dynattn.engine.call import Call
from dynattn.modules import MultiheadAttention
from dynattn.engine.native import core
from dynattn.sigma import SigmaParameter

B, H, N, D = 2, 4, 6, 8

def heads(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (B, H, N, D)), generator=generator).to(dtype)

X = heads()
MUTATED = Window.default(torch.ones(H))
MUTATED.sigma[1] = math.nan
NEGATIVE = Window.default(torch.ones(H))
NEGATIVE.sigma[0] = -1.
META = dict(device='meta')

WRONG = [ # what is changed in a call, the kind of error, the argument it names
    (dict(q=[1.]), TypeError, 'q'), (dict(q=np.ones((B, H, N, D))), TypeError, 'q'), (dict(q=None), TypeError, 'q'),
    (dict(k=None), TypeError, 'k'), (dict(v=None), TypeError, 'v'), (dict(v='x'), TypeError, 'v'),
    (dict(q=X.int()), TypeError, 'q'), (dict(q=X > 0), TypeError, 'q'), (dict(q=X.to(torch.complex64)), TypeError, 'q'),
    (dict(k=X.double()), TypeError, 'k'), (dict(v=X.half()), TypeError, 'v'),
    (dict(q=X[0, 0, 0]), ValueError, 'q'), (dict(k=X[0, 0, 0]), ValueError, 'k'),
    (dict(k=X[[0, 1, 0]]), ValueError, 'k'), (dict(v=X[[0, 1, 0]]), ValueError, 'k'),
    (dict(k=X[:, :3], v=X[:, :3]), ValueError, 'k'), (dict(k=X[:, :0], v=X[:, :0]), ValueError, 'k'),
    (dict(v=X[:, :3]), ValueError, 'v'), (dict(k=X[..., :4]), ValueError, 'k'), (dict(v=X[:, :, :5]), ValueError, 'v'),
    (dict(k=X.to('meta')), ValueError, 'k'), (dict(v=X.to('meta')), ValueError, 'v'),
    (dict(attn_mask=torch.ones(N, N)), ValueError, 'attn_mask'), (dict(attn_mask=torch.ones(N, N).int()), TypeError, 'attn_mask'),
    (dict(attn_mask=torch.ones(N, N).to(torch.complex64)), TypeError, 'attn_mask'), (dict(attn_mask='causal'), TypeError, 'attn_mask'),
    (dict(attn_mask=torch.ones(5, N).bool()), ValueError, 'attn_mask'), (dict(attn_mask=torch.ones(N, N, **META)), ValueError, 'attn_mask'),
    (dict(attn_mask=causal_lower_right(3, 3)), ValueError, 'attn_mask'),
    (dict(dropout_p='x'), TypeError, 'dropout_p'), (dict(dropout_p=True), TypeError, 'dropout_p'), (dict(dropout_p=-.1), ValueError, 'dropout_p'),
    (dict(dropout_p=1.1), ValueError, 'dropout_p'), (dict(dropout_p=math.nan), ValueError, 'dropout_p'), (dict(dropout_p=False), TypeError, 'dropout_p'),
    (dict(is_causal='yes'), TypeError, 'is_causal'), (dict(is_causal=1), TypeError, 'is_causal'),
    (dict(enable_gqa=2), TypeError, 'enable_gqa'), (dict(return_weights='no'), TypeError, 'return_weights'),
    (dict(scale='1'), TypeError, 'scale'), (dict(scale=math.nan), ValueError, 'scale'), (dict(scale=math.inf), ValueError, 'scale'),
    (dict(scale=[1]), TypeError, 'scale'), (dict(scale=torch.ones(1)), TypeError, 'scale'), (dict(scale=True), TypeError, 'scale'),
    (dict(padding=torch.ones(B, N).bool()), TypeError, 'padding'), (dict(padding=PaddingMask(torch.ones(B, 5).bool())), ValueError, 'padding'),
    (dict(padding=PaddingMask(torch.ones(B, N, **META).bool())), ValueError, 'padding'),
    (dict(window=-1), ValueError, 'window'), (dict(window=True), TypeError, 'window'), (dict(window=2.5), TypeError, 'window'),
    (dict(window='3'), TypeError, 'window'), (dict(window=(1,)), ValueError, 'window'), (dict(window=(1, -2)), ValueError, 'window'),
    (dict(window=(1, 2.)), TypeError, 'window'), (dict(window=Window.default(torch.ones(3))), ValueError, 'window'),
    (dict(window=Window.default(torch.ones(3, H))), ValueError, 'window'), (dict(window=Window.default(torch.ones(B, H, 5))), ValueError, 'window'),
    (dict(window=MUTATED), ValueError, 'window'), (dict(window=NEGATIVE), ValueError, 'window'),
    (dict(window=Window.default(torch.ones(H, **META))), ValueError, 'window'),
    (dict(alpha='1.5'), TypeError, 'alpha'), (dict(alpha=True), TypeError, 'alpha'), (dict(alpha=.9), ValueError, 'alpha'),
    (dict(alpha=math.nan), ValueError, 'alpha'), (dict(alpha=math.inf), ValueError, 'alpha'), (dict(alpha=torch.ones(H).int()), TypeError, 'alpha'),
    (dict(alpha=torch.ones(3)), ValueError, 'alpha'), (dict(alpha=torch.full((H,), .5)), ValueError, 'alpha'),
    (dict(alpha=torch.tensor([1., 2., math.nan, 1.])), ValueError, 'alpha'), (dict(alpha=torch.ones(H, **META)), ValueError, 'alpha'),
    (dict(n_global=-1), ValueError, 'n_global'), (dict(n_global=1.), TypeError, 'n_global'), (dict(n_global=True), TypeError, 'n_global'),
    (dict(n_global=10**30), ValueError, 'n_global'), (dict(q_offset=1.5), TypeError, 'q_offset'), (dict(q_offset=True), TypeError, 'q_offset'),
    (dict(q_offset=-10**30), ValueError, 'q_offset'),
    (dict(dropout_p=torch.tensor([.1, .2])), TypeError, 'dropout_p'), (dict(q_offset=torch.tensor([0, 1])), TypeError, 'q_offset'),
    (dict(n_global=torch.tensor([0, 1])), TypeError, 'n_global'), (dict(q=X.to(torch.float8_e4m3fn)), TypeError, 'q'),
    (dict(q=X.to_sparse()), TypeError, 'q'), (dict(v=X.to_sparse()), TypeError, 'v'), (dict(query=X), TypeError, 'q'),
    (dict(rel_bias=torch.ones(H, 4)), ValueError, 'rel_bias'), (dict(rel_bias=torch.ones(3, 3)), ValueError, 'rel_bias'),
    (dict(rel_bias=torch.ones(H, 3).int()), TypeError, 'rel_bias'), (dict(rel_bias=[1.]), TypeError, 'rel_bias'),
    (dict(rel_bias=torch.ones(H, 3, **META)), ValueError, 'rel_bias'),
    (dict(segments=torch.ones(B, N)), TypeError, 'segments'), (dict(segments=torch.zeros(B, 5).int()), ValueError, 'segments'),
    (dict(segments=torch.zeros(B, N).int(), q_offset=1), ValueError, 'segments'), (dict(segments=torch.tensor([0, 6])), ValueError, 'segments'),
    (dict(segments=torch.arange(N).flip(0).expand(B, N)), ValueError, 'segments'),
    (dict(segments=torch.zeros(B, N).int(), window=Window.default(.5, 'fraction')), ValueError, 'window'),
    (dict(sink=torch.ones(3)), ValueError, 'sink'), (dict(sink=torch.ones(H).int()), TypeError, 'sink'), (dict(sink=1.), TypeError, 'sink'),
    (dict(softcap=0.), ValueError, 'softcap'), (dict(softcap='x'), TypeError, 'softcap'), (dict(softcap=math.nan), ValueError, 'softcap'),
    (dict(widow=3), TypeError, 'widow'),
    (dict(segments=torch.tensor([[0, 0, 4, 4, 1, 1]]*B, dtype=torch.uint8)), ValueError, 'segments'),
    (dict(scale=10**400), ValueError, 'scale'), (dict(alpha=10**400), ValueError, 'alpha'),
]

def named(x):
    options, kind, name = x
    return f"{'-'.join(options)}-{kind.__name__}"

ALL_THREE = attention, dense_attention, banded_attention
ONE_EACH = range(0, len(WRONG), len(WRONG)//12)     # `Call` checks for all three; a dozen show that all three ask it

@pytest.mark.parametrize('function, wrong', [(attention, wrong) for wrong in WRONG] +
                         [(function, WRONG[i]) for function in ALL_THREE[1:] for i in ONE_EACH],
                         ids=lambda x: x.__name__ if callable(x) else named(x))
def test_a_wrong_call_gets_the_same_error_from_all(function, wrong):
    changed, kind, name = wrong
    options = dict(q=X, k=X, v=X) | changed
    with pytest.raises(kind) as error: function(options.pop('q'), options.pop('k'), options.pop('v'), **options)
    assert type(error.value) is kind
    assert re.match(rf'{name}(\.\w+)?: expected .*, got ', str(error.value)), error.value

def test_missing_and_too_many_arguments_are_named():
    with pytest.raises(TypeError, match='v: expected a Tensor .*, got nothing'): attention(X, X)
    with pytest.raises(TypeError, match='padding: expected as a keyword argument'): attention(X, X, X, None, 0., False, None, False, None)
    with pytest.raises(ValueError, match="impl: expected 'auto' or one of .*, got 'fast'"): attention(X, X, X, impl='fast')

@pytest.mark.parametrize('name', ['segments', 'sink', 'softcap', 'rel_bias', 'alpha', 'window'])
def test_a_named_implementation_serves_or_says_why(name):
    option = dict(segments=torch.zeros(B, N).int(), sink=torch.ones(H), softcap=3., rel_bias=torch.zeros(H, 3), alpha=1.5, window=2)[name]
    with pytest.raises(ValueError, match=rf'{name}: expected None for F.scaled_dot_product_attention'): attention(X, X, X, impl='sdpa', **{name: option})

# ---- what PyTorch's function takes

def test_torchs_names_of_the_arguments():
    y = heads(B, H, 5, D, seed=1)
    assert torch.equal(attention(query=X, key=y, value=y, window=2), attention(X, y, y, window=2))

SHAPES = (N, D), (H, N, D), (B, H, N, D), (3, B, H, N, D)

@pytest.mark.parametrize('impl', ['sdpa', 'dense', 'banded'])
@pytest.mark.parametrize('shape', SHAPES, ids=lambda s: f'{len(s)}D')
def test_axes_in_front_as_torch(shape, impl):
    q, k, v = (heads(*shape, dtype=torch.float64, seed=s) for s in range(3))
    assert_close(attention(q, k, v, is_causal=True, impl=impl), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if impl=='banded': return  # a mask of pairs has no band
    square = heads(*shape[:-2], N, N, seed=4)
    for mask in (square > -.5, square, square[..., :1, :] > -.5, square.flatten(0, -3)[0] if len(shape)>2 else square):
        mask = mask | (torch.arange(N)==0) if mask.dtype==torch.bool else mask.double()
        assert_close(attention(q, k, v, mask, impl=impl), F.scaled_dot_product_attention(q, k, v, mask))
    keys = heads(N, seed=5) > 0  # one axis
    expected = dense_attention(q, k, v, keys.expand(N, N))
    for mask in (keys, torch.zeros(N, dtype=q.dtype).masked_fill(~keys, -math.inf)):
        assert_close(attention(q, k, v, mask, impl=impl), expected)
        grad = torch.func.grad(lambda q: attention(q, k, v, mask, impl=impl).square().sum())(q)
        assert_close(grad, torch.func.grad(lambda q: dense_attention(q, k, v, keys.expand(N, N)).square().sum())(q))

@pytest.mark.parametrize('shape', SHAPES[:2], ids=lambda s: f'{len(s)}D')
def test_a_window_with_fewer_axes_and_a_mask(shape):
    q, k, v = (heads(*shape, dtype=torch.float64, seed=s) for s in range(3))
    mask = heads(N, N, seed=5) > 0
    off = torch.arange(N)-torch.arange(N)[:, None]
    seen = mask & (off.abs()<=2)
    expected = F.scaled_dot_product_attention(q, k, v, seen | ~seen.any(-1, keepdim=True)).masked_fill(~seen.any(-1, keepdim=True), 0)
    out, weights = attention(q, k, v, mask, window=2, return_weights=True)
    assert_close(out, expected)
    assert weights.shape==(*shape[:-1], N)

@pytest.mark.parametrize('n, m', [(6, 6), (3, 6), (6, 3)])
@pytest.mark.parametrize('aligned', [causal_lower_right, causal_upper_left], ids=lambda f: f.__name__)
def test_causal_bias_is_its_square(aligned, n, m):
    q, k, v = heads(B, H, n, D), heads(B, H, m, D, seed=1), heads(B, H, m, D, seed=2)
    bias = aligned(n, m)
    square = torch.ones(n, m, dtype=torch.bool).tril(m-n if aligned is causal_lower_right else 0)
    for options in ({}, dict(window=1), dict(rel_bias=heads(H, 3)), dict(is_causal=True), dict(q_offset=1)):
        assert_close(attention(q, k, v, bias, **options), dense_attention(q, k, v, square, **options))
    sees = square.any(-1)
    assert_close(attention(q, k, v, bias)[:, :, sees], F.scaled_dot_product_attention(q, k, v, bias)[:, :, sees])

def test_it_may_stand_in_the_place_of_torchs_function(monkeypatch):
    expected = F.scaled_dot_product_attention(X, X, X, is_causal=True)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', attention)
    assert_close(F.scaled_dot_product_attention(X, X, X, is_causal=True), expected)

@pytest.mark.parametrize('impl', ['sdpa', 'dense'])
def test_the_output_lies_in_memory_as_torchs(impl):
    packed = heads(B, N, 3, H, D).permute(2, 0, 3, 1, 4)  # q, k, v out of one matrix
    padding = PaddingMask(torch.ones(B, N, dtype=torch.bool))
    past = torch.ones(N, N, dtype=torch.bool).tril()
    for mask, options in ((None, {}), (padding.sdpa(), dict(padding=padding)), (past, dict(attn_mask=past))):
        theirs = F.scaled_dot_product_attention(*packed, mask)
        ours = attention(*packed, impl=impl, **options)
        assert ours.stride()==theirs.stride()
        assert_close(ours.transpose(1, 2).view(B, N, H*D), theirs.transpose(1, 2).view(B, N, H*D))

def jagged(lengths, h, seed=0):
    g = torch.Generator().manual_seed(seed)
    texts = [torch.randn(n, h, D, generator=g, dtype=torch.float64) for n in lengths]
    return torch.nested.nested_tensor(texts, layout=torch.jagged, requires_grad=True)

@pytest.mark.parametrize('attend, options', [
    (attention, dict(window=2)), (attention, dict(alpha=1.5)), (attention, dict(window=(1, 0), is_causal=True, n_global=1)), (dense_attention, {}),
    (banded_attention, {}), (attention, dict(impl='dense')), (attention, dict(window=Window.default(torch.ones(H, dtype=torch.float64))))])
def test_jagged_texts_are_texts_alone(attend, options):
    leaves = [jagged((3, 5, 1), h, i) for i,h in enumerate((H, 1, 1))]
    out = attend(*(x.transpose(1, 2) for x in leaves), **options)
    assert out.is_nested and out.layout == torch.jagged and out.shape[0] == 3
    texts = [[t.detach().requires_grad_() for t in x.unbind()] for x in leaves]
    alone = [dense_attention(*(t.transpose(0, 1)[None] for t in text), **{k: x for k,x in options.items() if k != 'impl'})[0] for text in zip(*texts)]
    for mine, theirs in zip(out.unbind(), alone): assert_close(mine, theirs, atol=1e-10, rtol=0)
    grads = torch.autograd.grad(out.transpose(1, 2).values().square().sum(), leaves)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in alone), [t for x in texts for t in x])
    for mine, theirs in zip([t for g in grads for t in g.unbind()], wanted): assert_close(mine, theirs, atol=1e-10, rtol=0)

def test_nested_tensors_plain_or_refused():
    nested = jagged((3, 5), H).transpose(1, 2)
    assert_close(attention(nested, nested, nested).values(), F.scaled_dot_product_attention(nested, nested, nested).values())
    strided = torch.nested.nested_tensor([torch.randn(H, n, D) for n in (3, 5)])
    other, row = jagged((5, 3), H).transpose(1, 2), torch.zeros(1, H, 8, D, dtype=torch.float64)
    for args, options, name in (((strided,)*3, dict(window=2), 'q'), ((nested, other, other), dict(window=2), 'k'), ((nested, row, row), dict(window=2), 'k'),
                                ((nested,)*3, dict(window=1, q_offset=1), 'q_offset'), ((nested,)*3, dict(alpha=1.5, return_weights=True), 'return_weights'),
                                ((nested,)*3, dict(segments=torch.tensor([0, 8])), 'segments'), ((jagged((3, 5), H),)*3, dict(window=2), 'q'),
                                ((nested,)*3, dict(padding=PaddingMask(torch.ones(2, 5).bool())), 'padding')):
        with pytest.raises(ValueError, match=f'^{name}: expected'): attention(*args, **options)

# ---- values that used to go wrong

def test_float16_scores_do_not_overflow_before_the_scale():
    big = torch.full((1, 2, 8, 64), 40., dtype=torch.float16)
    for options in (dict(impl='dense'), dict(window=3), dict(impl='dense', alpha=1.5)):
        assert_close(attention(big, big, big, **options), big)

def test_float16_scores_beyond_the_largest_float16():
    q, k, v = (heads(1, 2, 6, D, dtype=torch.float16, seed=s)*(60 if s<2 else 1) for s in range(3))
    for options in ({}, dict(alpha=1.5), dict(window=2), dict(rel_bias=torch.zeros(2, 3))):
        out = dense_attention(q, k, v, scale=2., **options)
        assert_close(out, dense_attention(q.double(), k.double(), v.double(), scale=2., **options).half(), rtol=1e-2, atol=1e-2)

def test_forward_mode_in_a_width_of_half_precision():
    x = heads(1, H, 9, D)
    for dtype in (torch.float16, torch.bfloat16):
        found = [torch.func.jvp(lambda s: f(x, x, x, window=Window.default(s)), (torch.ones(H, dtype=d)*2,), (torch.ones(H, dtype=d),))[1]
            for f, d in ((attention, dtype), (banded_attention, dtype), (dense_attention, torch.float32))]
        for tangent in found[:2]: assert_close(tangent, found[2])

def test_one_sigma_for_every_implementation():
    "A width in bfloat16 beside float64: all see the same number."
    x = heads(1, H, 40, D, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        window = Window.default(torch.tensor([1.1, 2.3, 4.7, 9.9]).to(dtype))
        exact = dense_attention(x, x, x, window=Window.default(window.sigma.double()))
        for f in (dense_attention, banded_attention): assert_close(f(x, x, x, window=window), exact, rtol=0, atol=1e-12)

def test_a_float16_width_gets_the_largest_number_not_infinity():
    x = heads(1, 1, 64, D)
    for f in (dense_attention, banded_attention):
        sigma = torch.ones(1, dtype=torch.float16, requires_grad=True)
        gradient, = torch.autograd.grad((f(x, x, x, window=Window.default(sigma))*1e6).square().sum(), sigma)
        assert gradient.isfinite().all() and gradient.abs()==65504

@pytest.mark.parametrize('impl', ['dense', 'banded'])
def test_a_float16_width_is_compiled_with_the_same_gradient(impl):
    x, sigma = heads(1, 2, 9, D), torch.tensor([1.5, 3.]).half().requires_grad_()
    def run(sigma): return attention(x, x, x, window=Window(sigma, smooth='gaussian'), impl=impl).square().sum()
    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    assert_close(torch.autograd.grad(compiled(sigma), sigma), torch.autograd.grad(run(sigma), sigma))

def test_the_bias_of_half_precision_sums_its_gradient_in_float32():
    x, bias = heads(1, 1, 200, D, dtype=torch.bfloat16), torch.zeros(1, 3, dtype=torch.bfloat16, requires_grad=True)
    exact_bias = torch.zeros(1, 3, dtype=torch.float64, requires_grad=True)
    up = heads(1, 1, 200, D, seed=3)
    exact, = torch.autograd.grad((dense_attention(*[x.double()]*3, rel_bias=exact_bias)*up.double()).sum(), exact_bias)
    ours, = torch.autograd.grad((dense_attention(x, x, x, rel_bias=bias)*up.to(torch.bfloat16)).sum(), bias)
    assert (ours.double()-exact).norm() < .03*exact.norm()

def test_a_row_that_a_soft_window_blanks_is_zero_even_for_a_query_of_nan():
    padding = PaddingMask.from_lengths(torch.tensor([N, 1]))
    q = X.clone()
    q[1, :, 4] = math.nan  # reaches nothing: the only key is four tokens away
    for f in (dense_attention, banded_attention):
        out = f(q, X, X, padding=padding, window=Window.default(torch.ones(H)))
        assert not out[1, :, 4].any() and out.isfinite().all()

def test_a_number_of_width_zero_and_no_keys_at_all():
    assert_close(attention(X[..., :0], X[..., :0], X), X.mean(2, keepdim=True).expand_as(X))
    for window in (None, 2, Window.default(.5, 'fraction')):
        out = dense_attention(X, X[:, :, :0], X[:, :, :0], window=window)
        assert out.shape==X.shape and not out.any()

@pytest.mark.parametrize('n', [1, 2, 5])
@pytest.mark.parametrize('options', [{}, dict(softcap=5.), dict(alpha=1.5)], ids=str)
def test_a_window_in_fractions_is_one_of_all_keys_whatever_a_causal_query_sees(n, options):
    q, k = heads(B, H, n, D, dtype=torch.float64), heads(B, H, 9, D, dtype=torch.float64, seed=1)
    for sigma in (torch.full((H,), .4), torch.full((B, H, n), .4)):
        for window in (Window.default(sigma, 'fraction'), Window(sigma, smooth='gaussian', unit='fraction', apply='after')):
            for offset in (0, 3):
                calls = [attention(q, k, k, window=window, is_causal=True, q_offset=offset, impl=impl, **options)
                         for impl in ('auto', 'dense')]
                assert_close(*calls)

def test_alpha_of_one_is_softmax_and_numbers_of_numpy_are_numbers():
    assert Call(X, X, X, alpha=1).alpha is None and Call(X, X, X, alpha=1.).alpha is None
    assert_close(attention(X, X, X, alpha=np.float64(1.5), scale=np.float32(.25), window=np.int64(2)), attention(X, X, X, alpha=1.5, scale=.25, window=2))

# ---- what is new in the dense path

def test_cu_seqlens_are_segments():
    x = heads(1, H, 9, D, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2]])
    ends = torch.tensor([0, 3, 8, 9], dtype=torch.int32)
    assert torch.equal(dense_attention(x, x, x, segments=ends), dense_attention(x, x, x, segments=ids))
    parts = [dense_attention(*[x[:, :, a:b]]*3, window=1, n_global=1) for a, b in ((0, 3), (3, 8), (8, 9))]
    assert_close(dense_attention(x, x, x, segments=ends, window=1, n_global=1), torch.cat(parts, 2))

@pytest.mark.parametrize('alpha', [None, 1.5])
def test_sink_and_softcap_have_the_derivatives_of_numbers(alpha):
    q, k, v = (heads(1, 2, 3, 2, dtype=torch.float64, seed=s).requires_grad_() for s in range(3))
    sink = torch.tensor([.3, -1.], dtype=torch.float64, requires_grad=True)
    padding = PaddingMask.from_lengths(torch.tensor([2]), 3)
    def f(q, k, v, sink): return dense_attention(q, k, v, padding=padding, window=(0, 1), alpha=alpha, sink=sink, softcap=1.5)
    assert torch.autograd.gradcheck(f, (q, k, v, sink))
    assert not f(q, k, v, sink)[0, :, 2].any()  # no key, whatever the sink

# ---- without data, compiled, exported

@pytest.mark.parametrize('impl', ['auto', 'dense', 'banded'])
@pytest.mark.parametrize('window', [None, 2, 'soft'])
def test_meta_gives_shapes(impl, window):
    x = X.to('meta')
    window = Window.default(torch.ones(H, **META)) if window=='soft' else window
    out = attention(x, x, x[..., :3], window=window, impl=impl)
    assert out.is_meta and out.shape==(B, H, N, 3)

def soft(q, sigma, keep, impl): return attention(q, q, q, padding=PaddingMask(keep), window=Window.default(sigma), impl=impl)

@pytest.mark.parametrize('impl', [*(pytest.param(impl, marks=pytest.mark.slow) for impl in ('auto', 'dense')), 'banded'])
def test_compiled_with_dynamic_shapes(impl):
    torch.compiler.reset()
    compiled = torch.compile(soft, fullgraph=True, dynamic=True, backend='aot_eager')
    for b, n in ((2, 32), (3, 41), (4, 17)):
        q, sigma = heads(b, H, n, D), heads(b, H).abs()*5
        keep = torch.arange(n) < torch.arange(n-b, n)[:, None]
        assert_close(compiled(q, sigma, keep, impl), soft(q, sigma, keep, impl))

def count(function, calls):
    "Graphs that are made for these calls."
    torch.compiler.reset()
    graphs = []
    def backend(graph, _): graphs.append(graph); return graph
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for args in calls: assert_close(compiled(*args), function(*args))
    return len(graphs)

def test_head_counts_and_int_windows_do_not_compile_anew():
    kv = heads(B, 2, 32, D)
    assert count(lambda q: attention(q, kv, kv), [(heads(B, h, 32, D),) for h in (4, 8, 2, 6)]) <= 2
    x = heads(1, 2, 300, D)
    for impl in ('dense', 'auto'): assert count(lambda w: attention(x, x, x, window=w, impl=impl), [(w,) for w in range(2, 13)]) <= 2

class Soft(torch.nn.Module):
    def __init__(self, impl): super().__init__(); self.impl = impl
    def forward(self, q, sigma, padding): return attention(q, q, q, padding=padding, window=Window.default(sigma), impl=self.impl)

@pytest.mark.parametrize('impl', ['auto', 'dense', 'banded'])
def test_exported_with_dynamic_batch_and_length(impl):
    "A `PaddingMask` is an input of the program; the batch may equal the number of heads, then and later."
    batch, length = torch.export.Dim('batch', min=2, max=64), torch.export.Dim('length', min=2, max=4096)
    def inputs(b, n): return heads(b, H, n, D), heads(b, H, seed=1).abs()*5, PaddingMask(torch.arange(n) < torch.arange(n-b, n)[:, None])
    shapes = {0: batch, 2: length}, {0: batch}, [{0: batch, 1: length}]
    program = torch.export.export(Soft(impl), inputs(3, 32), dynamic_shapes=shapes).module()
    for b, n in ((2, 40), (4, 33), (5, 300)): assert_close(program(*inputs(b, n)), Soft('dense')(*inputs(b, n)))

class Windowed(torch.nn.Module):
    def forward(self, q, window): return attention(q, q, q, window=window)

@pytest.mark.parametrize('options', [{}, dict(reach=(None, 0)), dict(smooth='ramp', ramp=2.), dict(smooth='power', p=9., cut=.8, apply='after')], ids=str)
def test_a_window_is_an_input_of_a_saved_program(options, tmp_path):
    window = Window(torch.tensor([1., 3., 2., 0.])[:H], **options)
    program = torch.export.export(Windowed(), (X, window))
    torch.export.save(program, tmp_path/'program.pt2')
    other = window.replace(sigma=window.sigma+1)
    assert_close(torch.export.load(tmp_path/'program.pt2').module()(X, other), Windowed()(X, other))

# ---- the signature

@pytest.mark.parametrize('function', [attention, dense_attention, banded_attention], ids=lambda f: f.__name__)
def test_help_says_what_each_argument_means(function):
    parameters = inspect.signature(function).parameters
    text = inspect.getdoc(function)
    of_call = list(inspect.signature(Call).parameters)
    assert list(parameters)[:len(of_call)]==of_call
    for name in parameters:
        lines = text.split(f'\n{name} : ')[1].split('\n')
        assert lines[1].startswith('    ') and len(lines[1])>12, name

@pytest.mark.parametrize('made', [Window, SigmaParameter, dynattn.convert], ids=lambda f: f.__name__)
def test_help_names_each_argument(made):
    text = inspect.getdoc(made)
    assert all(re.search(rf'\b{name}\b', text) for name in inspect.signature(made).parameters if name!='model'), text

def test_the_weights_alone():
    weights = attention_weights(X, X, window=2)
    assert_close(weights@X, dense_attention(X, X, X, window=2))
    with pytest.raises(ValueError, match='expected neither dropout_p'): attention_weights(X, X, dropout_p=.1)

def test_a_record_is_made_for_next_to_nothing():
    "Beside a call on 16 tokens a record takes less than 0.6 of it (0.3, measured)."
    import time, timeit
    x = heads(1, 8, 16, 64)
    with torch.no_grad():
        def seconds(f): return timeit.timeit(f, time.process_time, number=200)       # of this process: others may run
        turns = [(seconds(lambda: Call(x, x, x)), seconds(lambda: F.scaled_dot_product_attention(x, x, x))) for _ in range(7)]
    record,plain = (min(taken) for taken in zip(*turns))
    assert record < .6*plain

SPREAD = {'batch of q': ((1,4,5,8),(2,4,6,8),(2,4,6,8)), 'batch of k': ((2,4,5,8),(1,4,6,8),(2,4,6,8)), 'a head of v': ((2,4,5,8),(2,4,6,8),(2,1,6,8)),
    'a head of q': ((2,1,5,8),(2,4,6,8),(2,4,6,8)), 'q [N,d]': ((5,8),(2,4,6,8),(2,4,6,8)), 'q [H,N,d]': ((4,5,8),(2,4,6,8),(2,4,6,8)),
    'k and v [H,M,d]': ((2,4,5,8),(4,6,8),(4,6,8)), 'five axes': ((3,1,4,5,8),(3,2,4,6,8),(1,2,4,6,8))}
@pytest.mark.parametrize('options', [{}, dict(window=2), dict(is_causal=True, q_offset=1, alpha=1.5)], ids=str)
@pytest.mark.parametrize('shapes', SPREAD.values(), ids=SPREAD.keys())
def test_shapes_broadcast_as_in_pytorch(shapes, options):
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes]
    want = F.scaled_dot_product_attention(*x)
    out = attention(*x, **options)
    assert out.shape==want.shape
    if options: # the same call with the axes written out
        batch = torch.broadcast_shapes(*(t.shape[:-2] for t in x))
        want = attention(*(t.expand(*batch, *t.shape[-2:]).contiguous() for t in x), **options)
    assert_close(out, want)
    go = torch.randn(want.shape, generator=g, dtype=torch.float64)
    for a,b in zip(torch.autograd.grad(out, x, go), torch.autograd.grad(want, x, go)): assert_close(a, b)

def test_key_and_value_heads_may_differ():
    q,k,v = (torch.randn(2, h, 5, 8) for h in (8, 4, 2))
    assert_close(attention(q, k, v, enable_gqa=True), F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert_close(attention(q, k, v, window=2), attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(4, 1), window=2))

def test_a_number_without_axes_is_a_scale():
    assert torch.equal(attention(X, X, X, scale=torch.tensor(.5)), attention(X, X, X, scale=.5))
    with pytest.raises(TypeError, match='scale: expected a finite number'): attention(X, X, X, scale=torch.tensor(.5, requires_grad=True))

def test_jagged_texts_may_be_causal():
    texts = [torch.randn(4, n, 8) for n in (5, 1, 3)]
    jagged = torch.nested.nested_tensor([t.transpose(0, 1) for t in texts], layout=torch.jagged).transpose(1, 2)
    for text,out in zip(texts, attention(jagged, jagged, jagged, is_causal=True).transpose(1, 2).unbind()):
        assert_close(out.transpose(0, 1), attention(text, text, text, is_causal=True))

@pytest.mark.parametrize('wrong', [
    (lambda: Window(10**400), ValueError, 'sigma'), (lambda: Window(1., p=10**400), ValueError, 'p'),
    (lambda: PaddingMask.from_keep(None), TypeError, 'mask'), (lambda: PaddingMask.from_lengths(None), TypeError, 'lengths'),
    (lambda: PaddingMask.from_lengths('3'), TypeError, 'lengths'), (lambda: SigmaParameter(-1), ValueError, 'H'),
    *((lambda w=w: SigmaParameter(2, init_width=w), ValueError, 'init_width') for w in (math.inf, 10**400, 'x')),
    (lambda: MultiheadAttention(8, 2, window='learned', init_width=10**400), ValueError, 'init_width'),
    (lambda: MultiheadAttention(8, 2, alpha=math.inf), ValueError, 'alpha'), (lambda: MultiheadAttention(8, 2, alpha=10**400), ValueError, 'alpha'),
], ids=lambda wrong: wrong[2])
def test_numbers_out_of_range_are_refused_by_the_argument_that_holds_them(wrong):
    call, kind, name = wrong
    with pytest.raises(kind, match=rf'^{name}: expected .*, got '): call()

@pytest.mark.parametrize('ends', [[0, 5, 3, 6], [0, 6, 6, 5]])
@pytest.mark.parametrize('dtype', [torch.uint8, torch.int32])
def test_ends_that_decrease_are_refused_in_every_dtype(ends, dtype):
    with pytest.raises(ValueError, match='segments'): attention(X[:1], X[:1], X[:1], segments=torch.tensor(ends, dtype=dtype))

@pytest.mark.parametrize('native', [True, False])
@pytest.mark.parametrize('b, h, n, m', [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0)])
def test_a_call_of_nothing_has_a_gradient(native, b, h, n, m, monkeypatch):
    if not native: monkeypatch.setattr(core, 'library', lambda: None)
    q, k = torch.randn(b, h, n, 4, requires_grad=True), torch.randn(b, h, m, 4, requires_grad=True)
    sigma = torch.full((h,), 2., requires_grad=True)
    out = banded_attention(q, k, k, window=Window(sigma))
    assert out.shape == q.shape
    for leaf,g in zip((q, k, sigma), torch.autograd.grad(out.sum(), (q, k, sigma))): assert torch.equal(g, torch.zeros_like(leaf))

@pytest.mark.parametrize('native', [True, False])
@pytest.mark.parametrize('sigma', [torch.tensor(2.), torch.full((2,), 2.)], ids=['one', 'each'])
@pytest.mark.parametrize('kind', [Window.default, lambda sigma: Window.span(sigma, 4), lambda sigma: Window.report_20220330(sigma, 2., .1).replace(unit='tokens')],
                         ids=['default', 'span', 'after'])
@pytest.mark.parametrize('options', [{}, dict(q_offset=1), dict(segments=torch.tensor([0,2,3]))], ids=str)
def test_host3_a_width_that_no_query_uses_has_a_gradient(native, sigma, kind, options, monkeypatch):
    "All queries are global: its gradient is zero with either engine, also where nothing else learns."
    if not native: monkeypatch.setattr(core, 'library', lambda: None)
    q,leaf = torch.randn(1, 2, 3, 4),sigma.clone().requires_grad_()
    window = kind(leaf)
    results = banded_attention(q, q, q, window=window, n_global=4, return_lse=True, **options)
    for x,want in zip(results, dense_attention(q, q, q, window=window, n_global=4, return_lse=True, **options)):
        assert_close(x, want)
        assert torch.equal(torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0], torch.zeros_like(leaf))

@pytest.mark.parametrize('softcap', [1e300, 3e38, 1e-300])
@pytest.mark.parametrize('alpha', [None, 1.5])
def test_a_softcap_that_float32_cannot_hold(softcap, alpha):
    "So high a cap does nothing; under so low a one all keys are alike."
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    want = attention(*(x.double() for x in (q if softcap > 1 else 0*q, k, v)), window=3, alpha=alpha)
    for function in (banded_attention, dense_attention):
        torch.testing.assert_close(function(q, k, v, window=3, alpha=alpha, softcap=softcap).double(), want, rtol=1e-5, atol=1e-5)

@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_the_gradient_of_alpha_beside_a_mask_of_pairs_in_half_precision(dtype):
    "A small rest of large terms, summed in float32."
    q, k, v, dout = torch.randn(4, 2, 4, 64, 32).to(dtype)
    mask = torch.rand(64, 64) > .3
    def of_alpha(wide):
        alpha = torch.full((4,), 1.5, dtype=torch.promote_types(wide, torch.float32), requires_grad=True)
        out = attention(*(x.to(wide) for x in (q, k, v)), mask, alpha=alpha)
        assert out.dtype == wide
        return torch.autograd.grad(out, alpha, dout.to(wide))[0].double()
    torch.testing.assert_close(of_alpha(dtype), of_alpha(torch.float64), rtol=0, atol=2e-3)
