"What was made in one mode is used in another: tensors of an evaluation in training, widths in a model that is cast."
import copy, pickle, warnings
from pathlib import Path
import pytest, torch
from torch import nn
from torch.testing import assert_close
from dynattn import Classifier, EncoderConfig, MultiheadAttention, PaddingMask, SigmaHead, SigmaParameter, Window, attention, attention_weights, convert
from dynattn import modes
from dynattn.alpha import entmax
from dynattn.sigma import InFloat32
from dynattn.sparsity import AlphaHead

B, H, N, D = 2, 2, 20, 8


def made():
    "Everything that a call can hold, and that autograd would have to keep."
    generator = torch.Generator().manual_seed(0)
    def draw(*shape): return torch.randn(*shape, generator=generator)
    return dict(padding=PaddingMask.from_lengths(torch.tensor([N, 9])), window=Window.default(torch.tensor([2., 5.])),
                span=Window.span(torch.tensor([2., 5.]), ramp=4.),
                after=Window(torch.tensor([.2, .5]), 'normal', (.9, 1), 'power', 'fraction', 'after', p=100.),
                segments=torch.tensor([[0]*8 + [1]*12]*B), rel_bias=draw(H, 2*N + 1), sink=draw(H),
                alpha=torch.tensor([1.3, 1.6]), added=draw(B, H, N, N), keys=torch.ones(B, 1, 1, N).bool(),
                k=draw(B, H, N, D), v=draw(B, H, N, D))


HELD = [dict(padding='padding'), dict(window='window'), dict(padding='padding', window='window', is_causal=True),
        dict(window='span'), dict(window='after'), dict(window='window', segments='segments'), dict(segments='segments'),
        dict(rel_bias='rel_bias', window=3), dict(rel_bias='rel_bias'), dict(sink='sink', window='window'), dict(sink='sink'),
        dict(alpha='alpha', window='window'), dict(alpha='alpha'), dict(attn_mask='added'), dict(attn_mask='keys', window=2)]


def trained(call, options, source, leaf, others=False):
    "Output and gradient of one of the tensors, with the options of `source`."
    q, k, v = (torch.randn(B, H, N, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    if others: k, v = source['k'], source['v'].clone() if leaf == 'v' else source['v']
    learning = dict(q=q, v=v)[leaf].requires_grad_()
    out = call(q, k, v, **{name: source[x] if isinstance(x, str) else x for name, x in options.items()})
    return out, torch.autograd.grad(out.square().sum(), learning)[0]


SERVED = [(engine, options) for engine in ('auto', 'dense', 'banded') for options in HELD
          if (engine, options) != ('banded', dict(attn_mask='added'))]
SERVED += [('sdpa', options) for options in HELD if options.keys() <= {'attn_mask', 'padding'}]

@pytest.mark.parametrize('engine, options', SERVED, ids=str)
def test_flash_attention_299_what_an_evaluation_made_serves_in_training(engine, options):
    with torch.inference_mode(): old = made()
    def call(*args, **kwargs): return attention(*args, impl=engine, **kwargs)
    for leaf in 'qv':
        for others in (False, True):
            want = trained(call, options, made(), leaf, others)
            for a, b in zip(trained(call, options, old, leaf, others), want): assert_close(a, b)


@pytest.mark.parametrize('options', HELD[:3] + HELD[5:6] + HELD[10:13:2], ids=lambda o: '+'.join(map(str, o.values())))
def test_so_it_does_in_a_compiled_call(options):
    torch._dynamo.reset()
    with torch.inference_mode(): old = made()
    compiled = torch.compile(attention, fullgraph=True, backend='aot_eager')
    for a, b in zip(trained(compiled, options, old, 'q'), trained(attention, options, made(), 'q')): assert_close(a, b)


def test_masks_of_an_evaluation_in_modules_and_in_entmax():
    with torch.inference_mode():
        ignored, pairs, alpha = torch.arange(5) >= torch.tensor([[5], [3]]), torch.ones(5, 5).triu(1).bool(), torch.tensor([1.2, 1.8])
        padding = PaddingMask(~ignored)
    for options in (dict(), dict(window=2), dict(window='learned', alpha='learned')):
        ours, x = MultiheadAttention(D, H, batch_first=True, **options), torch.randn(B, 5, D)
        want = ours(x, x, x, key_padding_mask=ignored.clone(), attn_mask=pairs.clone())[0]
        got = ours(x, x, x, key_padding_mask=ignored, attn_mask=pairs)[0]
        for a, b in zip(torch.autograd.grad(got.sum(), ours.in_proj_weight), torch.autograd.grad(want.sum(), ours.in_proj_weight)): assert_close(a, b)
    scores = torch.randn(B, H, 5, 5, requires_grad=True)
    assert_close(torch.autograd.grad(entmax(scores, alpha).square().sum(), scores)[0],
                 torch.autograd.grad(entmax(scores, alpha.clone()).square().sum(), scores)[0])
    sigma = torch.ones(B, H, 5, requires_grad=True)
    assert torch.autograd.grad(Window.default(sigma).penalty(5, padding), sigma)[0].isfinite().all()


# --- widths and alphas in a model that is cast

CASTS = {'to': lambda m: m.to(torch.bfloat16), 'to float16': lambda m: m.to('cpu', torch.float16), 'half': lambda m: m.half(),
         'bfloat16': lambda m: m.bfloat16(), 'type': lambda m: m.type(torch.bfloat16), 'twice': lambda m: m.half().float().bfloat16(),
         'copied': lambda m: copy.deepcopy(m.bfloat16())}

def holders():
    "Every module of the package that holds widths or alphas, in a layer of PyTorch's."
    learned = convert(nn.TransformerEncoderLayer(16, H, 32, batch_first=True), window='learned', init_width=1001., alpha='learned')
    fixed = convert(nn.TransformerEncoderLayer(16, H, 32, batch_first=True), window='learned', init_width=[301., 5003.], alpha=1.001)
    heads = nn.ModuleList([SigmaHead(16, H, init_width=1001.), AlphaHead(H, D=16, init=1.001), AlphaHead(H, fixed=[1.001, 3.])])
    return nn.ModuleList([learned, fixed, heads])


@pytest.mark.parametrize('cast', CASTS, ids=str)
def test_transformers_29285_a_cast_leaves_widths_and_alphas(cast):
    before = holders()
    after = CASTS[cast](copy.deepcopy(before))
    wide = [name for name, m in before.named_modules() if isinstance(m, InFloat32)]
    assert len(wide) == 7
    for name, tensor in after.state_dict().items():
        held = any(name.startswith(w + '.') for w in wide)
        assert (tensor.dtype == torch.float32) == held, name
        if held: assert_close(tensor, before.state_dict()[name], rtol=0, atol=0)
    x = torch.randn(B, 6, 16).to(after[0].linear1.weight.dtype)
    for layer in after[:2]: assert layer(x).dtype == x.dtype and layer.self_attn.sigma_head().dtype == torch.float32
    for head in after[2][:2]: assert_close(head(x[:, 0]), holders()[2][0 if isinstance(head, SigmaHead) else 1](x[:, 0].float()))


def test_float64_devices_states_and_training():
    module = holders().double()
    assert {t.dtype for t in module.state_dict().values()} == {torch.float64}     # gradcheck needs it
    assert {t.dtype for t in holders().to('meta').bfloat16()[2].state_dict().values()} == {torch.float32}
    stored = {name: t.bfloat16() for name, t in holders().state_dict().items()}
    for assign in (False, True):
        loaded = holders()
        loaded.load_state_dict(stored, assign=assign)
        assert {t.dtype for t in loaded[2].state_dict().values()} == {torch.float32}
    assert stored['2.0.scale'].dtype == torch.bfloat16                            # the caller's own is left alone
    parameter = SigmaParameter(1, init_width=200.).bfloat16()
    optimizer = torch.optim.SGD(parameter.parameters(), lr=1.)
    for _ in range(100):
        optimizer.zero_grad()
        parameter().sum().backward()
        parameter.z.grad.mul_(1e-6)
        optimizer.step()
    assert 1e-3 < 200 - parameter().item() < 10                                   # each step is a millionth of the width
    called = torch.func.functional_call(parameter, {name: t.double() for name, t in parameter.state_dict().items()})
    assert called.dtype == torch.float64


def test_another_default_dtype_and_autocast():
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [SigmaParameter(1, init_width=1001.)(), SigmaHead(D, 1, init_width=1001.)(torch.zeros(1, D)), Window.default(1001.).sigma]
        assert AlphaHead(1, init=1.001)().dtype == torch.float32
    finally: torch.set_default_dtype(torch.float32)
    for sigma in found: assert sigma.dtype == torch.float32 and abs(sigma.item() - 1001) < 1e-3
    with torch.autocast('cpu', torch.bfloat16): assert_close(SigmaHead(D, 1, init_width=1001.)(torch.randn(1, D)), torch.full((1, 1), 1001.))


def test_quantised_linear_layers():
    head = nn.ModuleList([SigmaHead(16, H, init_width=1001.)])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # it moves to another package
        quantised = torch.ao.quantization.quantize_dynamic(head, {nn.Linear}, torch.qint8)
    for dtype in (torch.float32, torch.bfloat16): assert_close(quantised.to(dtype)[0](torch.randn(B, 16).to(dtype)), torch.full((B, H), 1001.))


def _within(way, ask):
    "What a question about PyTorch's mode is answered within a mode of this name."
    told = []
    def f(x):
        told.append(ask())
        return x.sin().sum()
    x = torch.ones(2)
    if way=='plain': f(x)
    if way=='grad': torch.func.grad(f)(x)
    if way=='grad of grad': torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x)
    if way=='vmap': torch.func.vmap(f)(x)
    if way=='jvp': torch.func.jvp(f, (x,), (x,))
    if way=='jvp of jvp': torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (x,))[1], (x,), (x,))
    if way=='dual':
        with torch.autograd.forward_ad.dual_level(): f(x)
    if way=='make_fx': torch.fx.experimental.proxy_tensor.make_fx(f)(x)
    if way=='jit': torch.jit.trace(f, (x,), check_trace=False)
    if way=='fake':
        with torch._subclasses.FakeTensorMode(): f(torch.ones(2))
    return told[0]

ANSWERS = dict( # question -> modes in which it is answered with something else than outside of all
    transforming={'grad': True, 'grad of grad': True, 'vmap': True, 'jvp': True, 'jvp of jvp': True},
    transformed={'grad': True, 'grad of grad': True, 'vmap': True, 'jvp': True, 'jvp of jvp': True, 'dual': True},
    in_forward_mode={'jvp': True, 'jvp of jvp': True, 'dual': True},
    grad_levels={'grad': 1, 'grad of grad': 2},
    forward_levels={'jvp': 1, 'jvp of jvp': 2},
    recorded={'make_fx': True, 'jit': True},
    traced_by_jit={'jit': True},
    dispatched={'make_fx': True, 'fake': True},
    exporting={})

WAYS = ['plain', 'grad', 'grad of grad', 'vmap', 'jvp', 'jvp of jvp', 'dual', 'make_fx', 'jit', 'fake']

@pytest.mark.parametrize('question', ANSWERS)
@pytest.mark.parametrize('way', WAYS)
def test_each_question_about_the_mode(question, way):
    ask = getattr(modes, question)
    outside = ask()
    assert not outside and _within(way, ask)==ANSWERS[question].get(way, outside)
    assert ask()==outside

def test_every_question_is_asked_here():
    assert {*modes.__all__}=={*ANSWERS, 'holds_several_gradients', 'lasting', 'uncompiled'}

# --- what is made under torch.device('meta'), to be filled from a file later

DEFERRED = dict(
    widths=lambda: SigmaParameter(H), widths_of_heads=lambda: SigmaParameter(H, init_width=[3., 9.]),
    sigmoid=lambda: SigmaParameter(H, 'sigmoid', scale=90.), fractions=lambda: SigmaParameter(H, unit='fraction'),
    predicted=lambda: SigmaHead(D, H), alphas=lambda: AlphaHead(H), fixed=lambda: AlphaHead(H, fixed=1.5),
    window=lambda: MultiheadAttention(D, H, window=Window.default(3.)), span=lambda: MultiheadAttention(D, H, window=Window.span(3., ramp=2.)),
    learned=lambda: MultiheadAttention(D, H, window='learned', alpha=1.5))

@pytest.mark.parametrize('name', DEFERRED)
@pytest.mark.parametrize('filled', ['empty', 'assigned'])
def test_numbers_keep_their_values_under_the_device_meta(name, filled):
    "A module of widths ended in an error of PyTorch's, and a window of a number could not be moved to a device again."
    want = DEFERRED[name]()
    with torch.device('meta'): made = DEFERRED[name]()
    assert all(t.is_meta for t in made.state_dict().values())
    if filled=='empty': made.to_empty(device='cpu')
    made.load_state_dict(want.state_dict(), assign=filled=='assigned')
    x = torch.randn(5, B, D)
    def results(m): return m(x, x, x) if isinstance(m, MultiheadAttention) else [m(x[0]) if isinstance(m, SigmaHead) else m()]
    for a,b in zip(results(made), results(want)): assert torch.equal(a, b)

def test_a_tensor_of_the_device_meta_has_no_values_to_start_from():
    nothing = torch.ones(H, device='meta')
    with pytest.raises(ValueError, match='init_width: expected widths with values'): SigmaParameter(H, init_width=nothing)
    with pytest.raises(ValueError, match='window: expected a Window whose sigma has values'):
        MultiheadAttention(D, H, window=Window.default(nothing))
    with torch.device('meta'): made = MultiheadAttention(D, H, window=Window.default(torch.ones(H)))
    with pytest.raises(ValueError, match='window: expected a Window whose sigma has values'): made.to_empty(device='cpu')

# --- what a layer notes of a call outlives the transforms around it, or is not noted

def _call(model, P, ids): return torch.func.functional_call(model, P, (ids,))
def _parameters(model): return {name: p.detach() for name,p in model.named_parameters()}

TRANSFORMS = dict( # (model, ids): a call of the model that leaves no gradient behind
    grad=lambda m, ids: torch.func.grad(lambda P: _call(m, P, ids).sum())(_parameters(m)),
    vmap=lambda m, ids: torch.func.vmap(lambda row: _call(m, _parameters(m), row[None]))(ids),
    jvp=lambda m, ids: torch.func.jvp(lambda P: _call(m, P, ids), *[(_parameters(m),)]*2),
    each=lambda m, ids: torch.func.vmap(torch.func.grad(lambda P, row: _call(m, P, row[None]).sum()), (None, 0))(_parameters(m), ids),
    make_fx=lambda m, ids: torch.fx.experimental.proxy_tensor.make_fx(m, tracing_mode='fake', _allow_non_fake_inputs=True)(ids),
    fake=lambda m, ids: _faked(m, ids))

def _faked(model, ids):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode: model(mode.from_tensor(ids))

@pytest.mark.parametrize('window', ['learned', 'predicted'])
@pytest.mark.parametrize('way', TRANSFORMS)
def test_a_transform_leaves_nothing_in_a_layer(way, window):
    "Tensors that die with a transform stayed in the layers: no copy could be made, or saved, and reading them failed."
    sizes = dict(vocab=20, dim=8, heads=2, layers=1, window=window, init_width=3., alpha='learned', classes=('a', 'b'))
    model,ids = Classifier(EncoderConfig(**sizes)),torch.randint(0, 20, (2, 7))
    want = copy.deepcopy(model)
    TRANSFORMS[way](model, ids)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))): assert_close(copied(ids), want(ids))
    try: model.widths(), model.alphas(), model.share(), model.flops()
    except RuntimeError as e: assert 'expected a call before' in str(e)
    assert_close(model(ids), want(ids))
    assert_close(model.widths(), want.widths())

def test_what_outlives_a_transform():
    made = {}
    def note(name):
        def f(x):
            made[name] = modes.lasting((x*2).detach())
            return x.sum()
        return f
    x = torch.arange(3.)
    note('plain')(x)
    torch.func.grad(note('grad'))(x)
    torch.func.grad(lambda x: torch.func.grad(note('twice'))(x).sum())(x)
    torch.func.vmap(note('vmap'))(x)
    torch.func.vmap(torch.func.grad(note('each')))(x)
    with torch._subclasses.FakeTensorMode() as mode: note('fake')(mode.from_tensor(x))
    assert {name for name,value in made.items() if value is None}=={'vmap', 'each', 'fake'}
    for name in ('plain','grad','twice'): assert_close(made[name]+0, x*2)

def test_a_batch_of_gradients_is_told():
    told = []
    class Tells(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g):
            told.append(modes.holds_several_gradients(g))
            return g
    x = torch.ones(2, requires_grad=True)
    Tells.apply(x).sum().backward()
    torch.autograd.grad(Tells.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert told==[False, True]

# the most that others may ask; everywhere.py imports the dispatcher's keys
PRIVATE = {'engine/operator.py': 1, 'cache.py': 1, 'everywhere.py': 1}

def test_nobody_else_asks_for_private_state():
    root = Path(modes.__file__).parents[1]
    found = {str(p.relative_to(root)).replace('\\', '/'): p.read_text(encoding='utf-8').count('torch._C') for p in root.rglob('*.py')}
    more = {name: count for name,count in found.items() if count>PRIVATE.get(name, 0) and not name.startswith(('modes','survey'))}
    assert not more

def test_autocast_leaves_the_dense_path_its_float32():
    "Scores beyond 65,504, which float16 does not have, gave NaN"
    q,k,v = (torch.full((1,2,20,64), x) for x in (100., 100., 1.))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    options = dict(attn_mask=mask, rel_bias=torch.zeros(2, 3))
    with torch.autocast('cpu', dtype=torch.float16):
        out,weights = attention(q, k, v, **options),attention_weights(q, k, **options)
        alone = attention(q, k, v, **options, alpha=1.5)
    assert out.dtype==weights.dtype==alone.dtype==torch.float16
    for x in (out, alone): assert_close(x, torch.ones_like(x))
    assert_close(weights.float().sum(-1), torch.ones(1, 2, 20), atol=.01, rtol=0)
