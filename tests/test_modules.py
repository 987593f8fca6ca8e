"The double of nn.MultiheadAttention beside the original, inside PyTorch's own layers, compiled, exported, copied and wrapped."
import copy, inspect, io, itertools, pickle, random, warnings
import pytest
import torch
from torch import nn
from torch.testing import assert_close
import dynattn
from dynattn.modules import MultiheadAttention, convert

D, H, B, N, M = 12, 4, 2, 7, 5


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pair(**options):
    "The original and its double with the same weights, in float64."
    theirs = nn.MultiheadAttention(D, H, dtype=torch.float64, **options)
    ours = MultiheadAttention(D, H, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def masks(kind_of_keys, kind_of_pairs, batched, n, m):
    "A mask of each kind in which no query is left without a key."
    keys = pairs = None
    if kind_of_keys is not None:
        keys = torch.rand(*((B,) if batched else ()), m) < .4
        keys[..., 0] = False
        if kind_of_keys == 'float': keys = torch.zeros(keys.shape, dtype=torch.float64).masked_fill(keys, -torch.inf) + torch.randn(m)
    if kind_of_pairs is not None:
        shape = (n, m) if kind_of_pairs.endswith('2') else (B*H if batched else H, n, m)
        pairs = torch.rand(shape) < .4
        pairs[..., 0] = False
        if kind_of_pairs.startswith('float'):
            pairs = torch.zeros(shape, dtype=torch.float64).masked_fill(pairs, -torch.inf) + torch.randn(shape)
    return keys, pairs


def same(theirs, ours, inputs, **options):
    "Results, weights and every gradient are equal."
    found = []
    for module in (theirs, ours):
        leaves = [x.detach().requires_grad_() for x in inputs]
        shared = {}
        args = [shared.setdefault(id(x), leaf) for x, leaf in zip(inputs, leaves)]  # what was one tensor still is
        out, weights = module(*args, **options)
        loss = out.square().sum() + (0 if weights is None else weights.pow(3).sum())
        grads = torch.autograd.grad(loss, [*shared.values(), *module.parameters()], allow_unused=True)
        found.append((out, weights, *grads))
    for a, b in zip(*found):
        assert (a is None) == (b is None)
        if a is not None: assert_close(b, a, rtol=1e-10, atol=1e-12)


OPTIONS = [dict(), dict(bias=False), dict(add_bias_kv=True), dict(add_zero_attn=True),
           dict(add_bias_kv=True, add_zero_attn=True, bias=False), dict(kdim=6, vdim=9), dict(kdim=6, add_bias_kv=True)]


def every_three_meet(cases):
    "Of these cases, enough that any three values which meet in one of all meet in one of them."
    met, kept = set(), []
    for case in random.Random(0).sample(cases, len(cases)):
        threes = set(itertools.combinations(enumerate(case), 3))
        if threes - met: kept.append(case)
        met |= threes
    return kept

WEIGHTS = dict(no=dict(need_weights=False), mean=dict(need_weights=True), heads=dict(need_weights=True, average_attn_weights=False))
CASES = [case for case in itertools.product(range(len(OPTIONS)), (False, True), (None, 'bool', 'float'), (None, 'bool2', 'bool3', 'float2', 'float3'),
                                            (True, False), WEIGHTS, ('self', 'memory', 'three'))
         if case[-1] == 'three' or 'kdim' not in OPTIONS[case[0]]]
SOME = every_three_meet(CASES)


@pytest.mark.filterwarnings('ignore:Support for mismatched')
@pytest.mark.parametrize('chosen', range(len(OPTIONS)))
@pytest.mark.parametrize('cases', [SOME, pytest.param(CASES, marks=pytest.mark.slow)], ids=['some', 'all'])
def test_equals_the_original(chosen, cases):
    for _, batch_first, keys_kind, pairs_kind, batched, weights, what in [c for c in cases if c[0] == chosen]:
        theirs, ours = pair(batch_first=batch_first, **OPTIONS[chosen])
        m = N if what == 'self' else M
        keys, pairs = masks(keys_kind, pairs_kind, batched, N, m)
        def make(n, width):
            shape = (n, width) if not batched else (B, n, width) if batch_first else (n, B, width)
            return torch.randn(shape, dtype=torch.float64)
        query = make(N, D)
        key = query if what == 'self' else make(m, theirs.kdim)
        value = key if what != 'three' else make(m, theirs.vdim)
        same(theirs, ours, (query, key, value), key_padding_mask=keys, attn_mask=pairs, **WEIGHTS[weights])


def test_starts_equal():
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(D, H, add_bias_kv=True)
    torch.manual_seed(3)
    ours = MultiheadAttention(D, H, add_bias_kv=True)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for a, b in zip(theirs.state_dict().values(), ours.state_dict().values()): assert torch.equal(a, b)
    theirs.load_state_dict(ours.state_dict())
    for name in ('embed_dim', 'kdim', 'vdim', 'num_heads', 'head_dim', 'dropout', 'batch_first', 'add_zero_attn', '_qkv_same_embed_dim'):
        assert getattr(ours, name) == getattr(theirs, name)
    assert isinstance(ours, nn.MultiheadAttention)


@pytest.mark.parametrize('need_weights', [True, False])
def test_dead_rows_are_the_difference(need_weights):
    theirs, ours = pair(batch_first=True)
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    ignored = torch.zeros(B, N, dtype=torch.bool)
    ignored[0] = True
    out, weights = ours(x, x, x, key_padding_mask=ignored, need_weights=need_weights)
    assert_close(out[0], ours.out_proj.bias.expand(N, D))
    if need_weights: assert (weights[0] == 0).all() and theirs(x, x, x, key_padding_mask=ignored)[0][0].isnan().all()
    out.sum().backward()
    assert x.grad.isfinite().all() and (x.grad[0] == 0).all()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


def windowed_reference(module, x, keep=None, causal=False):
    "A window and alpha written out for one batch-first self-attention, with the package's scalar functions only."
    q, k, v = torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    heads = [t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v)]
    scores = heads[0] @ heads[1].mT / (D//H)**.5
    i = torch.arange(x.shape[1])
    offset = i[None] - i[:, None]
    if module.window=='predicted': fade = dynattn.Window.default(module.sigma_head(x[:, 0])).log_mask(offset)
    elif module.window=='learned': fade = dynattn.Window.default(module.sigma_head()).log_mask(offset)[0]
    elif isinstance(module.window, dynattn.Window): fade = module.window.log_mask(offset).expand(1, H, -1, -1)[0]
    else:
        left, right = module.window if isinstance(module.window, tuple) else (module.window, module.window)
        fade = torch.zeros(offset.shape, dtype=torch.float64).masked_fill((offset < -left) | (offset > right), -torch.inf)
    leading = (i < module.n_global)[None] | (i < module.n_global)[:, None]
    scores = scores + fade.masked_fill(leading, 0.)
    if causal: scores = scores.masked_fill(offset > 0, -torch.inf)
    if keep is not None: scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(dead, 0.)
    weights = scores.softmax(-1) if module.alpha_head is None else dynattn.entmax(scores, module.alpha_head()[:, None, None])
    weights = weights.masked_fill(dead, 0.)
    out = (weights @ heads[2]).transpose(1, 2).flatten(2)
    return module.out_proj(out), weights.mean(1)


REACH = [dict(window='learned', init_width=2.), dict(window='learned', init_width=[1., 2., 3., 9.], n_global=1), dict(window=2),
         dict(window=(1, 0)), dict(window='learned', init_width=3., alpha='learned'), dict(window=2, alpha=2.),
         dict(window='predicted', init_width=[1., 2., 3., 9.]), dict(window='predicted', init_width=2., alpha='learned', n_global=1),
         dict(window=dynattn.Window.span(torch.tensor([1., 2., 3., 4.]), ramp=2)), dict(window=dynattn.Window.default(2.), alpha=1.5)]


def telling(module):
    "The module, whose predicted widths differ from sequence to sequence."
    if module.window=='predicted': nn.init.normal_(module.sigma_head.linear.weight, std=.3)
    return module


@pytest.mark.parametrize('reach', REACH, ids=str)
@pytest.mark.parametrize('padded', [False, True])
@pytest.mark.parametrize('causal', [False, True])
def test_windows(reach, padded, causal):
    ours = telling(MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, **reach))
    x = torch.randn(B, 9, D, dtype=torch.float64, requires_grad=True)
    keep = torch.arange(9) < torch.tensor([[9], [4]]) if padded else None
    options = dict(key_padding_mask=None if keep is None else ~keep)
    if causal: options |= dict(attn_mask=torch.ones(9, 9, dtype=torch.bool).triu(1))
    want, weights = windowed_reference(ours, x, keep, causal)
    inputs = [x, *ours.parameters()]
    want_grads = torch.autograd.grad(want.square().sum(), inputs, allow_unused=True)
    for more in (dict(need_weights=False), dict(need_weights=True), *([dict(need_weights=False, is_causal=True)] if causal else [])):
        out, got = ours(x, x, x, **options, **more)
        assert_close(out, want, rtol=1e-9, atol=1e-11)
        if got is not None: assert_close(got, weights, rtol=1e-9, atol=1e-11)
        for a, b in zip(torch.autograd.grad(out.square().sum(), inputs, allow_unused=True), want_grads):
            assert (a is None) == (b is None)
            if a is not None: assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize('batch_first', [False, True])
def test_every_query_sees_the_extra_keys(batch_first):
    "With a window the learned and the zero key stay in sight; a window over everything changes nothing."
    theirs, _ = pair(add_bias_kv=True, add_zero_attn=True, batch_first=batch_first)
    wide = MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, batch_first=batch_first, dtype=torch.float64, window=N)
    narrow = MultiheadAttention(D, H, add_bias_kv=True, add_zero_attn=True, batch_first=batch_first, dtype=torch.float64, window=0)
    for module in (wide, narrow): module.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D, dtype=torch.float64)
    ignored = torch.arange(N) >= torch.tensor([[N], [3]])
    for kind in (None, 'bool2', 'float3'):
        _, pairs = masks(None, kind, True, N, N)
        x_in = x if batch_first else x.transpose(0, 1)
        for need_weights in (True, False):
            options = dict(attn_mask=pairs, key_padding_mask=ignored, need_weights=need_weights)
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                want = theirs(x_in, x_in, x_in, **options)
            got = wide(x_in, x_in, x_in, **options)
            assert_close(got[0], want[0])
            if need_weights: assert_close(got[1], want[1])
    diagonal = torch.eye(N, dtype=torch.bool).logical_not()
    x_in = x if batch_first else x.transpose(0, 1)
    assert_close(narrow(x_in, x_in, x_in)[0], theirs(x_in, x_in, x_in, attn_mask=diagonal)[0])


def layers(**options):
    "PyTorch's layers, each with a call."
    make = dict(d_model=D, nhead=H, dim_feedforward=16, dropout=0., dtype=torch.float64, **options)
    tokens = torch.randn(B, 9, D, dtype=torch.float64) if options.get('batch_first') else torch.randn(9, B, D, dtype=torch.float64)
    memory = torch.randn_like(tokens)
    ignored = torch.arange(9) >= torch.tensor([[9], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    encoder_layer = nn.TransformerEncoderLayer(**make)
    decoder_layer = nn.TransformerDecoderLayer(**make)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        transformer = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **make)
        encoder = nn.TransformerEncoder(encoder_layer, 2)
    return [
        (encoder_layer, lambda m: m(tokens, src_key_padding_mask=ignored)),
        (encoder_layer, lambda m: m(tokens)),
        (encoder, lambda m: m(tokens)),
        (encoder, lambda m: m(tokens, src_key_padding_mask=ignored)),
        (encoder, lambda m: m(tokens, mask=causal, is_causal=True)),
        (encoder, lambda m: m(tokens, mask=causal, src_key_padding_mask=torch.zeros(B, 9, dtype=torch.float64).masked_fill(ignored, -torch.inf))),
        (decoder_layer, lambda m: m(tokens, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=ignored)),
        (nn.TransformerDecoder(decoder_layer, 2), lambda m: m(tokens, memory, tgt_mask=causal)),
        (transformer, lambda m: m(tokens, memory, src_key_padding_mask=ignored, memory_key_padding_mask=ignored)),
    ]


MODES = ['train', 'eval', 'eval without gradients', 'inference mode']


def in_mode(mode, module, call):
    module.train(mode == 'train')
    if mode == 'inference mode':
        with torch.inference_mode(): return call(module).clone()
    with torch.set_grad_enabled(mode != 'eval without gradients'): return call(module).detach()


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('options', [dict(batch_first=True), dict(batch_first=False), dict(batch_first=True, norm_first=True),
                                     dict(batch_first=True, activation='gelu'), dict(batch_first=True, bias=False)], ids=str)
def test_inside_torchs_layers(mode, options):
    for module, call in layers(**options):
        want = in_mode(mode, module, call)
        got = in_mode(mode, convert(copy.deepcopy(module)), call)
        assert_close(got, want)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('reach', [dict(window='learned', init_width=1.), dict(window=1), dict(alpha=2.)], ids=str)
def test_no_shortcut_past_forward(mode, batch_first, reach):
    "What PyTorch's fused inference computes would have no window: every mode gives what training gives."
    for module, call in layers(batch_first=batch_first):
        ours = convert(copy.deepcopy(module), **reach)
        want = in_mode('train', ours, call)
        got = in_mode(mode, ours, call)
        ignored = torch.arange(9) >= torch.tensor([[9], [4]])
        if not batch_first: ignored = ignored.T
        assert_close(got[~ignored], want[~ignored])  # the nested way leaves zeros in padding
        assert not torch.allclose(want, in_mode('train', module, call))


def test_the_last_guard():
    layer = convert(nn.TransformerEncoderLayer(D, H, batch_first=True), window=1).eval()
    layer.self_attn._forward_pre_hooks.clear()
    with torch.no_grad(), pytest.raises(RuntimeError, match='window, alpha: expected'): layer(torch.randn(B, N, D))


@pytest.mark.parametrize('layout', [torch.strided, torch.jagged])
@pytest.mark.parametrize('reach', [dict(), dict(window=1)], ids=str)
@pytest.mark.filterwarnings('ignore:The PyTorch API of nested')
def test_nested(layout, reach):
    ours = MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, **reach)
    rows = [torch.randn(n, D, dtype=torch.float64) for n in (5, 1, 7)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    out, weights = ours(nested, nested, nested)
    assert out.is_nested and out.layout == layout and weights.shape == (3, 7, 7)
    for got, row in zip(out.unbind(), rows): assert_close(got, ours(row, row, row)[0])
    with pytest.raises(ValueError, match='expected None beside nested tensors'):
        ours(nested, nested, nested, key_padding_mask=torch.zeros(3, 7, dtype=torch.bool))


LEARNED = dict(window='learned', init_width=2., alpha='learned')
PREDICTED = dict(window='predicted', init_width=2., alpha='learned')
SHAPED = dict(window=dynattn.Window.span(torch.tensor([1., 2., 3., 4.]), ramp=2))


def test_state_both_ways():
    theirs = nn.MultiheadAttention(D, H)
    ours = MultiheadAttention(D, H, **LEARNED)
    with torch.no_grad(): ours.sigma_head.z.fill_(.7)
    with pytest.raises(RuntimeError, match='Missing key.*sigma_head.z'): ours.load_state_dict(theirs.state_dict())
    with torch.no_grad(): ours.sigma_head.z.fill_(.7)
    missing = ours.load_state_dict(theirs.state_dict(), strict=False).missing_keys  # the widths stay
    assert 'sigma_head.z' in missing and all(name.startswith(('sigma_head','alpha_head')) for name in missing)
    assert (ours.sigma_head.z == .7).all() and torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert 'sigma_head.z' in ours.state_dict()
    with pytest.raises(RuntimeError, match='Unexpected key.*sigma_head'): theirs.load_state_dict(ours.state_dict())
    part = {k: v for k, v in ours.state_dict().items() if k != 'sigma_head.z'}
    with pytest.raises(RuntimeError, match='Missing key.*sigma_head.z'): ours.load_state_dict(part)
    with torch.device('meta'): empty = MultiheadAttention(D, H, **LEARNED)
    empty.load_state_dict(ours.state_dict(), assign=True)
    x = torch.randn(N, B, D)
    assert torch.equal(empty(x, x, x)[0], ours(x, x, x)[0])
    with torch.device('meta'): empty = MultiheadAttention(D, H, **LEARNED)
    with pytest.raises(RuntimeError, match='Missing key.*sigma_head'): empty.load_state_dict(theirs.state_dict(), assign=True)


@pytest.mark.parametrize('reach', [dict(), LEARNED], ids=str)
def test_copies(reach):
    ours = MultiheadAttention(D, H, **reach)
    x = torch.randn(N, B, D)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x, x, x)[0], ours(x, x, x)[0])
        twin.in_proj_weight.data.zero_()
        assert not torch.equal(twin(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize('reach', [dict(), LEARNED, dict(window=2)], ids=str)
def test_dropout_and_modes(reach):
    ours = MultiheadAttention(D, H, dropout=.5, **reach)
    x = torch.randn(N, B, D)
    assert not torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(D, H, dropout=.25)
        self.again = self.first
        self.rows = nn.ModuleList([nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, D)])


def test_convert_keeps():
    tree = Tree().double().eval()
    tree.first.in_proj_weight.requires_grad_(False)
    seen = []
    tree.first.register_forward_hook(lambda *a: seen.append(1))
    optimizer = torch.optim.SGD(tree.parameters(), 1.)
    before = dict(tree.named_parameters())
    assert convert(tree, window='learned', alpha='learned', init_width=3.) is tree
    after = dict(tree.named_parameters())
    assert all(after[name] is p for name, p in before.items()) and after.keys() - before.keys() == {
        'first.sigma_head.z', 'first.alpha_head.a', 'rows.0.sigma_head.z', 'rows.0.alpha_head.a'}
    assert all(p.dtype == torch.float64 for p in after.values()) and not tree.first.in_proj_weight.requires_grad
    assert tree.first is tree.again and type(tree.first) is MultiheadAttention and not tree.first.sigma_head.training
    x = torch.randn(N, B, D, dtype=torch.float64)
    tree.again(x, x, x)
    assert seen == [1] and optimizer.param_groups[0]['params'][0] is tree.first.in_proj_weight
    alone = nn.MultiheadAttention(D, H)
    assert convert(alone) is alone and isinstance(alone, MultiheadAttention)


def test_convert_refuses():
    class Mine(nn.MultiheadAttention): pass
    model = nn.ModuleList([nn.MultiheadAttention(D, H), Mine(D, H)])
    with pytest.raises(TypeError, match="model: expected nn.MultiheadAttention itself, got Mine at '1'"): convert(model)
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match='model: expected one with an nn.MultiheadAttention'): convert(nn.Linear(2, 2))
    with pytest.raises(TypeError, match='model: expected an nn.Module, got int'): convert(3)
    two = nn.ModuleList([nn.MultiheadAttention(D, H), nn.MultiheadAttention(D, 2)])
    with pytest.raises(ValueError, match='init_width'): convert(two, window='learned', init_width=[1., 2., 3., 4.])
    assert type(two[0]) is nn.MultiheadAttention


def test_what_was_learned_is_not_converted_again():
    for learned in (dict(window='learned'), dict(alpha='learned')):
        model = convert(nn.TransformerEncoderLayer(D, H), **learned)
        before = dict(model.named_parameters())
        with pytest.raises(ValueError, match="model: expected attention without learned parts, got .*_head at 'self_attn'"):
            convert(model, window='learned', alpha='learned')
        assert all(p is before[name] for name, p in model.named_parameters())
    assert convert(convert(nn.MultiheadAttention(D, H), window=3, alpha=1.5), window=2).window == 2  # nothing learned


def test_a_forward_put_in_by_hand_is_not_converted():
    model = nn.TransformerEncoderLayer(D, H)
    original = model.self_attn.forward
    model.self_attn.forward = lambda *args, **options: original(*args, **options)
    with pytest.raises(TypeError, match="model: expected the forward of nn.MultiheadAttention, got another one at 'self_attn'"):
        convert(model, window=1)
    assert type(model.self_attn) is nn.MultiheadAttention


def test_a_class_of_the_same_name_is_told_apart():
    with pytest.raises(TypeError, match=r'got torch\.\S+quantizable\S+\.MultiheadAttention at'):
        convert(nn.ModuleList([torch.ao.nn.quantizable.MultiheadAttention(D, H)]))


def test_memory_has_no_window():
    model = convert(nn.TransformerDecoderLayer(D, H, batch_first=True), window=1)
    assert model.self_attn.window == 1 and model.multihead_attn.window is None
    out = model(torch.randn(B, 4, D), torch.randn(B, 9, D))
    assert out.shape == (B, 4, D)


def test_a_window_set_later():
    ours, fixed = MultiheadAttention(D, H, window='learned', init_width=9.), MultiheadAttention(D, H, window=1)
    fixed.load_state_dict({name: x for name, x in ours.state_dict().items() if not name.startswith('sigma_head')})
    x = torch.randn(N, B, D)
    ours.window = 1
    assert_close(ours(x, x, x), fixed(x, x, x))
    fixed.window = 'learned'
    with pytest.raises(TypeError, match="window: expected .*, got 'learned'"): fixed(x, x, x)


def test_flags_that_are_numbers():
    theirs, ours = pair()
    x, later = torch.randn(N, B, D, dtype=torch.float64), torch.ones(N, N, dtype=torch.bool).triu(1)
    for need_weights in (0, 1, None): same(theirs, ours, (x, x, x), need_weights=need_weights, attn_mask=later)


@pytest.mark.parametrize('need_weights', [True, False])
def test_extra_keys_stay_visible_under_the_causal_promise(need_weights):
    "PyTorch's kernel would hide them."
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    x, later = torch.randn(N, B, D, dtype=torch.float64), torch.ones(N, N, dtype=torch.bool).triu(1)
    want = theirs(x, x, x, attn_mask=later)[0]
    assert_close(ours(x, x, x, attn_mask=later, is_causal=True, need_weights=need_weights)[0], want)


@pytest.mark.parametrize('reach,need_weights', [(dict(), False), (LEARNED, True), (LEARNED, False), (dict(window=2, n_global=1), False),
                                                (dict(alpha=1.5), False)], ids=str)
@pytest.mark.filterwarnings('ignore')
def test_a_traced_program_computes_other_lengths(reach, need_weights):
    "Windows and alphas of `torch.jit.trace` were those of the traced length, or no numbers at all."
    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = MultiheadAttention(D, H, batch_first=True, **reach)
        def forward(self, x, ignored):
            return [y for y in self.attn(x, x, x, key_padding_mask=ignored, need_weights=need_weights) if y is not None]

    def batch(n): return torch.randn(3, n, D, requires_grad=True), torch.arange(n) >= torch.tensor([[n], [n//2], [0]])
    module = Self()
    parameters = list(module.parameters())
    for traced_at, n, grad in ((1, 11, False), (N, 40, True), (N, 300, False)):
        with torch.set_grad_enabled(grad):
            program = torch.jit.trace(module, batch(traced_at), check_trace=False)
            x, ignored = batch(n)
            found = []
            for f in (program, module):
                results = f(x, ignored)
                loss = sum(y.square().sum() for y in results)
                found.append((*results, *(torch.autograd.grad(loss, [x, *parameters], allow_unused=True) if grad else ())))
            for a, b in zip(*found):
                assert (a is None) == (b is None)
                if a is not None: assert_close(a, b, rtol=1e-4, atol=1e-4)


BAD = [
    (dict(window='wide'), ValueError, "window: expected 'learned'"), (dict(window=-1), ValueError, 'window: expected'),
    (dict(window=True), ValueError, 'window: expected'), (dict(window=(1, 2, 3)), ValueError, 'window: expected'),
    (dict(alpha=.5), ValueError, 'alpha: expected'), (dict(alpha='entmax'), ValueError, 'alpha: expected'),
    (dict(n_global=-1), ValueError, 'n_global: expected'), (dict(n_global='x'), TypeError, 'n_global: expected'),
]


@pytest.mark.parametrize('options,error,words', BAD, ids=str)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words): MultiheadAttention(D, H, **options)


def test_bad_calls():
    ours = MultiheadAttention(D, H, batch_first=True)
    x = torch.randn(B, N, D)
    with pytest.raises(ValueError, match='query: expected width 12'): ours(x[..., :5], x, x)
    with pytest.raises(ValueError, match='key: expected batch 2'): ours(x, x[:1], x[:1])
    with pytest.raises(ValueError, match='value: expected'): ours(x, x, x[:, :3])
    with pytest.raises(ValueError, match=r'attn_mask: expected \[N,M\]'): ours(x, x, x, attn_mask=torch.zeros(N, 3))
    with pytest.raises(ValueError, match=r'attn_mask: expected'): ours(x, x, x, attn_mask=torch.zeros(B, N, N))
    with pytest.raises(TypeError, match='attn_mask: expected a bool'): ours(x, x, x, attn_mask=torch.zeros(N, N, dtype=torch.int))
    with pytest.raises(ValueError, match=r'key_padding_mask: expected \[B,M\]'): ours(x, x, x, key_padding_mask=torch.zeros(N, B).bool())
    with pytest.raises(TypeError, match='key_padding_mask: expected a bool'): ours(x, x, x, key_padding_mask=torch.zeros(B, N).int())
    later = torch.ones(N, N, dtype=torch.bool).triu(1)  # PyTorch's asks for it; here is_causal says it all
    for weights in (True, False):
        options = dict(is_causal=True, need_weights=weights)
        assert_close(ours(x, x, x, **options)[0], ours(x, x, x, attn_mask=later, **options)[0])
    windowed = MultiheadAttention(D, H, batch_first=True, window=2)
    windowed.own_keys = True
    with pytest.raises(ValueError, match='key: expected as many positions'): windowed(x, x[:, :3], x[:, :3])


class Decoder(nn.Module):
    "A layer of one's own, as in DETR: positions are added to queries and keys, and both attentions are plain modules."
    def __init__(self):
        super().__init__()
        self.itself,self.memory = (nn.MultiheadAttention(D, H, batch_first=True) for _ in range(2))

    def forward(self, x, memory, position, **options):
        at = x + position
        x = x + self.itself(at, at, x, need_weights=False, **options)[0]
        return x + self.memory(x, memory, memory, need_weights=False)[0]


@pytest.mark.parametrize('length', [N, N + 4])
def test_transformer_engine_629_a_memory_of_the_same_length_gets_no_window(length):
    layer, x, memory, position = Decoder(), torch.randn(B, N, D), torch.randn(B, length, D), torch.randn(N, D)
    outside = (torch.arange(N)[:, None] - torch.arange(N)).abs() > 2
    want = layer(x, memory, position, attn_mask=outside)
    with pytest.warns(UserWarning, match='key: another tensor than query'):
        assert_close(convert(layer, window=2)(x, memory, position), want)
    layer.memory.own_keys = False
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert_close(layer(x, memory, position), want)


def test_the_same_memory_is_the_same_sequence():
    "A checkpoint of the older kind hands on three detached tensors; a clone is another sequence unless the module says otherwise."
    from torch.utils.checkpoint import checkpoint
    ours = MultiheadAttention(D, H, batch_first=True, window=1, dropout=0.)
    x = torch.randn(B, N, D, requires_grad=True)
    grads = []
    for call in (ours, lambda *args: checkpoint(ours, *args, use_reentrant=True)):
        grads.append(torch.autograd.grad(call(x, x, x)[0].square().sum(), [x, *ours.parameters()]) if call is ours else None)
        if call is not ours:
            call(x, x, x)[0].square().sum().backward()
            grads[-1] = [x.grad, *(p.grad for p in ours.parameters())]
    for a, b in zip(*grads): assert_close(a, b)
    for unbatched in (x, x[0]):
        assert_close(torch.compile(ours, fullgraph=True, backend='eager')(unbatched, unbatched, unbatched)[0], ours(unbatched, unbatched, unbatched)[0])
    want = ours(x, x, x)[0]
    with pytest.warns(UserWarning, match='own_keys'): assert not torch.allclose(ours(x, x.clone(), x.clone())[0], want)
    ours.own_keys = True
    assert_close(ours(x, x.clone(), x.clone())[0], want)


@pytest.mark.parametrize('reach', [dict(), LEARNED, PREDICTED, SHAPED, dict(window=2, n_global=1)], ids=str)
def test_functional_transforms(reach):
    ours = telling(MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, **reach))
    parameters = dict(ours.named_parameters())
    x = torch.randn(3, N, D, dtype=torch.float64)

    def run(parameters, one): return torch.func.functional_call(ours, parameters, (one, one, one), dict(need_weights=False))[0]
    want = torch.stack([run(parameters, one) for one in x])
    assert_close(torch.func.vmap(run, (None, 0))(parameters, x), want)
    grads = torch.func.vmap(torch.func.grad(lambda p, one: run(p, one).square().sum()), (None, 0))(parameters, x)
    total = torch.autograd.grad(want.square().sum(), list(parameters.values()))
    for a, b in zip(grads.values(), total): assert_close(a.sum(0), b)


@pytest.mark.parametrize('reach', [dict(), LEARNED, PREDICTED], ids=str)
def test_gradcheck(reach):
    ours = telling(MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64, **{**reach, **({'alpha': 1.5} if reach else {})}))
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    parameters = [p for p in ours.parameters()]
    torch.autograd.gradcheck(lambda x, *_: ours(x, x, x, need_weights=False)[0], (x, *parameters))
    torch.autograd.gradcheck(lambda x, *_: ours(x, x, x)[1], (x, *parameters))


@pytest.mark.parametrize('reach', [dict(), LEARNED, PREDICTED, SHAPED, dict(window=2)], ids=str)
def test_autocast_and_checkpointing(reach):
    from torch.utils.checkpoint import checkpoint
    ours = MultiheadAttention(D, H, batch_first=True, add_bias_kv=True, **reach)
    x = torch.randn(B, N, D, requires_grad=True)
    want = ours(x, x, x, need_weights=False)[0]
    with torch.autocast('cpu', torch.bfloat16): half = ours(x, x, x, need_weights=False)[0]
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), want, atol=.02, rtol=.05)
    again = checkpoint(lambda x: ours(x, x, x, need_weights=False)[0], x, use_reentrant=False)
    assert_close(torch.autograd.grad(again.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize('reach', [LEARNED, PREDICTED, *(pytest.param(reach, marks=pytest.mark.slow) for reach in (dict(), SHAPED, dict(window=2)))], ids=str)
def test_compiled_and_exported(reach):
    torch._dynamo.reset()
    layer = convert(nn.TransformerEncoderLayer(D, H, 16, 0., batch_first=True), **reach).eval()
    ours = telling(layer.self_attn)
    x = torch.randn(B, N, D)
    ignored = torch.arange(N) >= torch.tensor([[N], [3]])
    compiled = torch.compile(ours, fullgraph=True, backend='eager')
    for options in (dict(need_weights=False), dict(key_padding_mask=ignored), dict(key_padding_mask=ignored, need_weights=False)):
        for a, b in zip(compiled(x, x, x, **options), ours(x, x, x, **options)):
            if a is not None: assert_close(a, b)
    whole = torch.compile(layer, fullgraph=True, backend='eager')
    with torch.no_grad(): assert_close(whole(x, src_key_padding_mask=ignored), layer(x, src_key_padding_mask=ignored))
    assert_close(whole(x), layer(x))

    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = ours
        def forward(self, x, ignored): return self.attn(x, x, x, key_padding_mask=ignored, need_weights=False)[0]
    batch, length = torch.export.Dim('batch', min=2), torch.export.Dim('length', min=4)
    program = torch.export.export(Self(), (x, ignored), dynamic_shapes=dict(x={0: batch, 1: length}, ignored={0: batch, 1: length}))
    long = torch.randn(3, 11, D)
    hidden = torch.arange(11) >= torch.tensor([[11], [3], [6]])
    assert_close(program.module()(long, hidden), Self()(long, hidden))


# ---- what a call takes beside PyTorch's arguments

WAYS = dict(LEARNED=LEARNED, PREDICTED=PREDICTED, SHAPED=SHAPED, fixed=dict(window=2, n_global=1), pair=dict(window=(3, 1)), plain=dict(), alpha=dict(alpha=1.5))


@pytest.mark.parametrize('batch_first', [False, True])
@pytest.mark.parametrize('way', WAYS)
def test_a_padding_mask_is_the_mask_of_keys_and_what_stands_in_padding_changes_nothing(way, batch_first):
    ours = telling(MultiheadAttention(D, H, batch_first=batch_first, dtype=torch.float64, **WAYS[way]))
    keep = torch.tensor([[True]*N, [True]*3+[False]*(N-3)])
    padding, mask = dynattn.PaddingMask(keep), ~keep
    x = torch.randn(B, N, D, dtype=torch.float64)
    def call(x, **options):
        x = x if batch_first else x.transpose(0, 1)
        out = ours(x, x, x, need_weights=False, **options)[0]
        return (out if batch_first else out.transpose(0, 1))[keep]
    want = call(x, key_padding_mask=mask)
    wanted = torch.autograd.grad(want.square().sum(), list(ours.parameters()))
    for rubbish in (torch.nan, torch.inf, 7.):
        spoiled = x.masked_fill(mask[..., None], rubbish).requires_grad_()
        got = call(spoiled, padding=padding)
        assert_close(got, want)
        *grads, of_input = torch.autograd.grad(got.square().sum(), [*ours.parameters(), spoiled])
        for a, b in zip(grads, wanted): assert_close(a, b)
        assert not of_input[mask].any()


def test_a_padding_mask_of_another_sequence_leaves_the_queries_alone():
    ours = MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    x, memory = torch.randn(B, 3, D, dtype=torch.float64), torch.randn(B, N, D, dtype=torch.float64)
    padding = dynattn.PaddingMask.from_lengths(torch.tensor([N, 2]))
    assert_close(ours(x, memory, memory, padding=padding)[0], ours(x, memory, memory, padding.ignore)[0])
    same_length = torch.randn(B, N, D, dtype=torch.float64)
    assert_close(ours(same_length, memory, memory, padding=padding)[0], ours(same_length, memory, memory, padding.ignore)[0])
    with pytest.raises(ValueError, match=r'padding: expected \[B,M\]=\(2, 3\)'): ours(x, x, x, padding=padding)
    with pytest.raises(TypeError, match='padding: expected a PaddingMask'): ours(memory, memory, memory, padding=padding.keep)
    with pytest.raises(ValueError, match='key_padding_mask: expected None beside padding'): ours(memory, memory, memory, padding.ignore, padding=padding)


@pytest.mark.parametrize('way', [way for way in WAYS if way!='PREDICTED'])
@pytest.mark.parametrize('batch_first', [False, True])
def test_with_a_cache_the_pieces_are_the_whole(way, batch_first):
    ours = MultiheadAttention(D, H, batch_first=batch_first, dtype=torch.float64, **WAYS[way]).eval()
    x, options = torch.randn(B, 19, D, dtype=torch.float64), dict(need_weights=False, is_causal=True)
    axis = 1 if batch_first else 0
    text = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        want = ours(text, text, text, **options)[0]
        for sizes in ([19], [1]*19, [8, 1, 1, 4, 5]):
            cache, parts = ours.new_cache(), text.split(sizes, axis)
            got = torch.cat([ours(part, part, part, cache=cache, **options)[0] for part in parts], axis)
            assert_close(got, want)
        cache, alone = ours.new_cache(), x[0]
        got = torch.cat([ours(part, part, part, cache=cache, **options)[0] for part in alone.split(5)])
        assert_close(got, ours(alone, alone, alone, **options)[0])


def test_a_cache_serves_all_of_a_call_or_says_what_it_does_not():
    ours, x = MultiheadAttention(D, H, batch_first=True, window=2, dropout=.5), torch.randn(B, N, D)
    options = dict(need_weights=False, is_causal=True)
    refused = dict(need_weights=dict(options, need_weights=True), is_causal=dict(options, is_causal=False), dropout=options,
                   attn_mask=dict(options, attn_mask=torch.zeros(N, N)), sigma=dict(options, sigma=torch.ones(H)),
                   key_padding_mask=dict(options, key_padding_mask=torch.zeros(B, N, dtype=torch.bool)),
                   padding=dict(options, padding=dynattn.PaddingMask.from_lengths(torch.tensor([N, N]))))
    for name, given in refused.items():
        cache = ours.new_cache()
        with pytest.raises(ValueError, match=f'{name}: expected'): ours.train(name=='dropout')(x, x, x, cache=cache, **given)
        assert cache.seen==0
    with pytest.raises(ValueError, match='key, value: expected the very tensor'): ours(x, x.clone(), x, cache=ours.new_cache(), **options)
    for wrong in (dict(window='predicted'), dict(add_bias_kv=True), dict(add_zero_attn=True)):
        with pytest.raises(ValueError, match='for a cache'): MultiheadAttention(D, H, **wrong).new_cache()


@pytest.mark.parametrize('way', ['LEARNED', 'PREDICTED', 'SHAPED', 'fixed', 'plain'])
def test_widths_of_a_call_stand_in_for_the_modules_own(way):
    ours = telling(MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, **WAYS[way]))
    x = torch.randn(B, N, D, dtype=torch.float64)
    for sigma in (torch.tensor([1., 2., 0., 9.], dtype=torch.float64), 4*torch.rand(B, H, dtype=torch.float64)):
        sigma = sigma.requires_grad_()
        out, weights, (used, alpha) = ours(x, x, x, average_attn_weights=False, sigma=sigma, return_heads=True)
        assert used is sigma and (alpha is None)==(ours.alpha_head is None)
        assert torch.autograd.grad(out.square().sum(), sigma)[0].abs().sum()>0
        shape = ours.window if way=='SHAPED' else dynattn.Window.default(1.)
        outside = torch.arange(N)-torch.arange(N)[:, None]
        far = shape.replace(sigma=sigma).mask(outside)==0
        leading = torch.arange(N)<ours.n_global
        assert not weights[(far & ~leading & ~leading[:, None]).expand_as(weights)].any()
    with pytest.raises(ValueError, match='key: expected as many positions'): ours(x, x[:, :3], x[:, :3], sigma=sigma)


@pytest.mark.parametrize('bias', [True, False])
def test_a_state_with_a_matrix_for_each_projection_is_loaded(bias):
    "As earlier versions, and many models, save it; inside a model too, and strictly."
    theirs = nn.Sequential(nn.Linear(2, 2), MultiheadAttention(D, H, bias=bias, window='learned'))
    apart = {}
    for name, x in theirs.state_dict().items():
        stem, found, kind = name.partition('in_proj_')
        if not found: apart[name] = x
        else: apart |= {f'{stem}{of}_proj.{kind}': part for of, part in zip('qkv', x.chunk(3))}
    ours, before = nn.Sequential(nn.Linear(2, 2), MultiheadAttention(D, H, bias=bias, window='learned')), dict(apart)
    assert ours.load_state_dict(apart)==([], []) and apart.keys()==before.keys()
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True): assert torch.equal(a, b)
    del apart['1.k_proj.weight']
    with pytest.raises(RuntimeError, match='1.q_proj.weight'): ours.load_state_dict(apart)


def test_a_shape_moves_with_its_module_and_stays_precise():
    ours = MultiheadAttention(D, H, batch_first=True, window=dynattn.Window.span(torch.tensor([1.3, 300., 301., 9.])))
    width = ours.window.sigma.clone()
    assert torch.equal(ours.bfloat16().window.sigma, width) and torch.equal(ours.half().float().window.sigma, width)
    assert ours.double().window.sigma.dtype==torch.float64
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        x = torch.randn(B, N, D, dtype=torch.float64)
        assert torch.equal(twin(x, x, x)[0], ours(x, x, x)[0])
    assert ours.to('meta').window.sigma.device.type=='cpu'   # its numbers are nowhere else
    assert not any('window' in name for name in ours.state_dict())


def test_an_implementation_is_asked_for_by_its_name():
    x = torch.randn(B, N, D)
    for impl in ('dense', 'banded', 'auto'):
        ours = MultiheadAttention(D, H, batch_first=True, window=2, impl=impl)
        ours.load_state_dict(MultiheadAttention(D, H).state_dict())
        assert ours(x, x, x, need_weights=False)[0].shape==x.shape
    with pytest.raises(ValueError, match='window: expected None for F.scaled'): MultiheadAttention(D, H, batch_first=True, window=2, impl='sdpa')(x, x, x)
    for wrong in ('fast', None, 3):
        with pytest.raises(ValueError, match="impl: expected 'auto' or one of"): MultiheadAttention(D, H, impl=wrong)


def test_a_word_for_widths_is_written_once_and_explained_everywhere(monkeypatch):
    "A new word was refused by `dynattn train`, which had a list of its own, and help named the old two"
    from dynattn.modules import WIDTHS
    from dynattn.train.training import TrainConfig
    public = MultiheadAttention, convert, dynattn.EncoderLayer, dynattn.EncoderConfig, TrainConfig
    silent = [f'{word!r} in {f.__module__}.{f.__name__}' for word in WIDTHS for f in public if word not in inspect.getdoc(f)]
    assert not silent, f'the comments of `window` do not name them: {silent}'
    known = ', '.join(map(repr, WIDTHS))
    monkeypatch.setitem(WIDTHS, 'alike', lambda heads, dim, init_width: dynattn.SigmaParameter(1, init_width=init_width))
    TrainConfig(window='alike').check()
    layer = MultiheadAttention(8, 2, window='alike', init_width=3.)
    assert layer.sigma_head().tolist()==[3.] and layer.new_cache()
    with pytest.raises(ValueError, match=f"window: expected {known}, 'alike', an int"): MultiheadAttention(8, 2, window='other')
