"Around the core: windows of any width, modules beside torch's, derivatives of other kinds, export, distribution, quantisation, types."
import ast, inspect, json, math, os, re, subprocess, sys
from pathlib import Path
from typing import TypeVar, get_type_hints
import pytest, search, torch, torch.nn.functional as F
from torch.testing import assert_close
from dynattn.engine.native import core
from dynattn import Classifier, EncoderConfig, EncoderLayer, PaddingMask, Window, attention, banded_attention, dense_attention

ROOT = Path(__file__).resolve().parents[1]
def heads(*shape, dtype=torch.float32, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

def python(code, **env):
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, **env})
    assert done.returncode==0, done.stdout + done.stderr
    return done.stdout

# ---- windows

WIDTHS = 0., 1e-45, 1e-38, 1e-20, 1e-5, .01, .3, .4, 1., 3., 1e3, 1e20, 1e38
# a ramp has neither a curve nor a steepness, and asks nothing here
SMOOTHINGS = [(name, p, T) for name,kind in search.SMOOTHINGS.items() if kind.curved
              for p in ((1e-6, 1., 1e4) if 'p' in kind.__dataclass_fields__ else (None,))
              for T in (.05, .2, .9, *(() if search.needs_threshold(kind) else (None,)))]

@pytest.mark.parametrize('curve', ['bell', 'normal'])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16], ids=str)
def test_a_window_is_finite_for_any_width_and_between_0_and_1(curve, dtype):
    offsets = torch.arange(-8, 9)
    for smooth, p, T in SMOOTHINGS:
        for unit in ('tokens', 'fraction'):
            sigma = torch.tensor([w for w in WIDTHS if w<=torch.finfo(dtype).max], dtype=dtype, requires_grad=True)
            window = Window(sigma, curve, T, smooth, unit, p=p)
            mask, log_mask, slope = window.mask(offsets, 9), window.log_mask(offsets, 9), window.dmask(offsets, 9)
            gradient, = torch.autograd.grad(mask.sum(), sigma)
            assert ((0<=mask) & (mask<=1+1e-6)).all() and not log_mask.isnan().any() and (log_mask<=1e-6).all(), window
            assert slope.isfinite().all() and gradient.isfinite().all(), window

@pytest.mark.parametrize('window', [Window.report_20220330(.3), Window(.01, 'normal', .3, 'power', p=1000.), Window(1e-20, 'normal', .2, 'tanh', p=1.),
    Window.report_20220330(2., p=50.)], ids=str)
@pytest.mark.parametrize('apply', ['inside', 'after'])
@pytest.mark.parametrize('function', [dense_attention, banded_attention], ids=lambda f: f.__name__)
def test_attention_under_the_reports_windows_is_finite(window, apply, function):
    for dtype in (torch.float32, torch.float16):
        x = heads(1, 1, 9, 4, dtype=dtype)
        sigma = window.sigma.clone().requires_grad_()
        out = function(x, x, x, window=window.replace(sigma=sigma, apply=apply))
        gradient, = torch.autograd.grad(out.square().sum(), sigma)
        assert out.isfinite().all() and gradient.isfinite()

@pytest.mark.parametrize('sigma', [1e6, 1e19, 2e19, 1e30])
@pytest.mark.parametrize('function', [dense_attention, banded_attention], ids=lambda f: f.__name__)
def test_a_power_window_keeps_its_shape_however_wide_it_is(function, sigma):
    "The mask grows with the square of the distance; a factor that all keys share changes nothing and has no slope."
    q, k, v = (c*heads(1, 2, 20, 1, seed=i, dtype=torch.float64) for i, c in enumerate((30, 1, 30)))
    def run(sigma, dtype):
        sigma = torch.tensor(sigma, dtype=dtype, requires_grad=True)
        out = function(q.to(dtype), k.to(dtype), v.to(dtype), window=Window(sigma, smooth='power', p=1000., cut=.8))
        return out, torch.autograd.grad(out.sum(), sigma)[0]
    out, slope = run(sigma, torch.float32)
    assert_close(out.double(), run(1e6, torch.float64)[0], rtol=1e-4, atol=1e-3)
    assert slope.abs()<1e-9

def test_one_sigma_per_query_may_hold_for_all_queries():
    x, sigma = heads(2, 2, 5, 4), heads(2, 2, 1).abs()*3
    assert_close(dense_attention(x, x, x, window=Window(sigma)), dense_attention(x, x, x, window=Window(sigma[..., 0])))

def test_where_the_span_ends_nothing_is_seen_and_nothing_learns():
    "A pair whose mask is 0 is outside: no path computes it, so its slope is the one from the left, 0; the slope lies on the ramp."
    window = Window.span(torch.tensor(0., requires_grad=True), ramp=4)
    offsets = torch.arange(6)
    assert window.mask(offsets).tolist()==[1, .75, .5, .25, 0, 0] and window.half_width()==3
    assert window.dmask(offsets).tolist()==[.25, .25, .25, .25, 0, 0]
    assert_close(torch.autograd.grad(window.mask(offsets).sum(), window.sigma)[0], window.dmask(offsets).sum())

def test_a_class_or_a_word_is_no_window():
    x = heads(1, 1, 3, 4)
    with pytest.raises(TypeError, match='window: expected None, an int, a pair'): attention(x, x, x, window=Window)
    with pytest.raises(TypeError, match='cut: expected a number as threshold'): Window(3., cut=('x', 0))
    with pytest.raises(ValueError, match='impl: expected'): attention(x, x, x, impl=['dense'])

# ---- PyTorch's own attention behind `auto`

@pytest.mark.parametrize('scale', [0., -1., .3])
def test_a_causal_call_with_any_scale(scale):
    x = heads(1, 2, 5, 8)
    assert_close(attention(x, x, x, is_causal=True, scale=scale), dense_attention(x, x, x, is_causal=True, scale=scale))
    assert_close(attention(x, x, x, is_causal=True, scale=scale, impl='sdpa'), dense_attention(x, x, x, is_causal=True, scale=scale))

@pytest.mark.parametrize('d', [3, 8])
def test_forward_mode_and_second_derivatives_of_a_plain_call(d):
    x, t = heads(1, 2, 5, d, dtype=torch.float64), heads(1, 2, 5, d, dtype=torch.float64, seed=1)
    ours, exact = (torch.func.jvp(lambda q: f(q, x, x, is_causal=True), (x,), (t,)) for f in (attention, dense_attention))
    for a, b in zip(ours, exact): assert_close(a, b)
    def curvature(f): return torch.func.grad(lambda q: torch.func.grad(lambda p: f(p, x, x).square().sum())(q).square().sum())(x)
    assert_close(curvature(attention), curvature(dense_attention))
    with pytest.raises(ValueError, match="impl: expected 'auto' or 'dense' in forward mode"): torch.func.jvp(lambda q: attention(q, x, x, impl='sdpa'), (x,), (t,))

# ---- derivatives of other kinds

SELF_ATTENTION = [dict(window=3), dict(window=3, segments=torch.tensor([[0]*20+[1]*20])),
                  dict(window=Window(torch.tensor([2., 3.])), alpha=1.5)]

@pytest.mark.parametrize('options', SELF_ATTENTION, ids=['hard', 'packed', 'entmax'])
def test_one_tensor_as_query_key_and_value(options):
    "Its gradient is the sum of three, with a graph (`create_graph=True`) and for several outputs at once."
    x = heads(1, 2, 40, 4, dtype=torch.float64).requires_grad_()
    out,exact = (attention(x, x, x, impl=impl, **options) for impl in ('banded', 'dense'))
    want, = torch.autograd.grad(exact.square().sum(), x)
    for with_graph in (False, True):
        assert_close(torch.autograd.grad(out.square().sum(), x, retain_graph=True, create_graph=with_graph)[0], want)
    several, = torch.autograd.grad(out, x, torch.stack((2*out, out)).detach(), is_grads_batched=True)
    assert_close(several[0], want)
    assert_close(several[1], want/2)

@pytest.mark.parametrize('alpha', [None, 1.5])
def test_a_function_made_linear(alpha):
    x,t = (heads(1, 2, 6, 4, dtype=torch.float64, seed=seed) for seed in (0, 1))
    def f(q): return attention(q, q, x, window=2, alpha=alpha)
    _,along = torch.func.linearize(f, x)
    assert_close(along(t), torch.func.jvp(f, (x,), (t,))[1])

# ---- kernels, in Triton's interpreter

@pytest.mark.slow
def test_kernels_with_queries_before_the_first_key_and_widths_of_any_shape():
    triton = pytest.importorskip('triton')
    if tuple(int(x) for x in triton.__version__.split('.')[:2]) < (3, 6): pytest.skip('the kernels need Triton 3.6')
    python('''
import torch, dynattn
from torch.testing import assert_close
from dynattn import Window, attention
torch.manual_seed(0)
x = torch.randn(2, 2, 20, 16)
for options in (dict(window=2), dict(window=2, n_global=3), dict(window=(3,1), is_causal=True), dict(window=Window(torch.tensor([2.,5.])), n_global=2)):
    for offset in (-5, -40, 3):
        for alpha in (None, 1.5):
            a,b = (attention(x, x, x, q_offset=offset, alpha=alpha, impl=impl, **options) for impl in ('triton','dense'))
            assert_close(a, b, rtol=1e-4, atol=1e-5)
            p = x.clone().requires_grad_()
            a,b = (torch.autograd.grad(attention(p, p, p, q_offset=offset, alpha=alpha, impl=impl, **options).square().sum(), p)[0] for impl in ('triton','dense'))
            assert_close(a, b, rtol=1e-3, atol=1e-4)
for shape in ((1,), (1,2), (2,1), (1,1)):
    window = Window(torch.full(shape, 3.))
    assert_close(attention(x, x, x, window=window, impl='triton'), attention(x, x, x, window=window, impl='dense'), rtol=1e-4, atol=1e-5)
for alpha in (3., .5, float('nan')):
    try: attention(x, x, x, alpha=torch.tensor([1.5, alpha]), impl='triton')
    except ValueError as e: assert str(e).startswith('alpha: expected'), e
    else: raise AssertionError(alpha)
try: torch.func.jvp(lambda q: attention(q, x, x, window=3, impl='triton'), (x,), (x,))
except ValueError as e: assert "impl: expected 'auto' or 'dense' inside a transform" in str(e)
else: raise AssertionError('jvp')
''', TRITON_INTERPRET='1')

# ---- modules beside torch's

def test_torchs_calls_of_a_layer_are_refused_not_misread():
    layer, x = EncoderLayer(8, 2), heads(2, 5, 8)
    future = torch.ones(5, 5).triu(1).bool()
    for name in ('src_mask', 'mask'):
        with pytest.raises(TypeError, match=f'{name}: expected causal=True'): layer(x, **{name: future})
    with pytest.raises(TypeError, match='is_causal: expected causal=True'): layer(x, is_causal=True)
    with pytest.raises(TypeError, match='from_ignore'): layer(x, src_key_padding_mask=future[:2])
    with pytest.raises(TypeError, match='padding: expected a PaddingMask'): layer(x, future[:2])

def model(**options):
    torch.manual_seed(0)
    made = Classifier(EncoderConfig(dim=16, heads=2, layers=2, window='predicted', init_width=16., classes=('a', 'b'), **options))
    for layer in made.encoder.layers: torch.nn.init.normal_(layer.self_attn.sigma_head.linear.weight, std=.3)
    return made, torch.randint(0, 256, (3, 20)), PaddingMask.from_lengths(torch.tensor([20, 5, 11]))

def test_dynamic_quantisation_to_int8():
    exact, ids, padding = model()
    quantised = torch.ao.quantization.quantize_dynamic(exact.eval(), {torch.nn.Linear}, dtype=torch.qint8)
    assert_close(quantised(ids, padding), exact(ids, padding), rtol=0, atol=.1)

@pytest.mark.slow
def test_fsdp_shards_each_layer_for_itself():
    if torch.__version__ < '2.7': pytest.skip('fully_shard of PyTorch 2.6 does not run on a CPU')
    python('''
import sys; sys.path.insert(0, 'tests')
import torch, torch.distributed as dist, tempfile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from test_rim import model
exact, ids, padding = model()
exact(ids, padding).sum().backward()
gradients = {name: p.grad.clone() for name,p in exact.named_parameters()}
sharded = model()[0]
dist.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)
mesh = init_device_mesh('cpu', (1,))
for layer in sharded.encoder.layers: fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)
out, sigmas = sharded(ids, padding, return_sigma=True)
torch.testing.assert_close(out, exact(ids, padding))
out.sum().backward()
for name,p in sharded.named_parameters(): torch.testing.assert_close(p.grad.full_tensor(), gradients[name])
dist.destroy_process_group()
''')

@pytest.mark.slow
def test_fsdp_shards_each_attention_for_itself():
    "Widths are computed inside `forward`, where the parameters are whole: ours, and the double of nn.MultiheadAttention."
    if torch.__version__ < '2.7': pytest.skip('fully_shard of PyTorch 2.6 does not run on a CPU')
    python('''
import torch, torch.distributed as dist, tempfile
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from dynattn import EncoderLayer, convert
dist.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)
mesh = init_device_mesh('cpu', (1,))
x = torch.randn(2, 9, 16)
def layer(kind):
    torch.manual_seed(0)
    if kind=='double': return convert(nn.TransformerEncoderLayer(16, 2, 32, 0., batch_first=True), window='learned', alpha='learned')
    return EncoderLayer(16, 2, window=kind, init_width=2.)
for kind in ('predicted', 'learned', 'double'):
    exact, sharded = layer(kind), layer(kind)
    want = exact(x)
    want.square().sum().backward()
    fully_shard(sharded.self_attn, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    out = sharded(x)
    torch.testing.assert_close(out, want)
    out.square().sum().backward()
    for (name,p),q in zip(sharded.named_parameters(), exact.parameters()): torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    with torch.no_grad(): torch.testing.assert_close(sharded.eval()(x), exact.eval()(x))
dist.destroy_process_group()
''')

# ---- ONNX

class Learned(torch.nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.kind, self.options = kind, options
        self.width = torch.nn.Parameter(torch.tensor([1.3, 4., 0., 2.]))
    def forward(self, x, sigma, keep):
        window = dict(own=lambda: Window.default(self.width), given=lambda: Window.default(sigma), span=lambda: Window.span(self.width, 4),
            share=lambda: Window.default(self.width/10, 'fraction'))[self.kind]()
        return attention(x, x, x, window=window, padding=PaddingMask(keep), **self.options)

def onnx_inputs(b, n): return heads(b, 4, n, 8), heads(b, 4, seed=1).abs()*5, torch.arange(n) < torch.arange(n-b, n)[:, None]

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['own', 'given', 'span', 'share'])
def test_onnx_runtime_agrees(kind, tmp_path):
    pytest.importorskip('onnxscript')
    runtime = pytest.importorskip('onnxruntime')
    module = Learned(kind).eval()  # impl='auto' becomes the dense path there
    batch, length = torch.export.Dim('batch', min=2, max=64), torch.export.Dim('length', min=2, max=4096)
    shapes = {0: batch, 2: length}, {0: batch}, {0: batch, 1: length}
    torch.onnx.export(module, onnx_inputs(3, 32), tmp_path/'m.onnx', dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(tmp_path/'m.onnx')
    names = {i.name for i in session.get_inputs()}
    for b, n in ((3, 32), (2, 50), (4, 17)):
        inputs = onnx_inputs(b, n)
        found, = session.run(None, {name: x.numpy() for name, x in zip(('x', 'sigma', 'keep'), inputs) if name in names})
        assert_close(torch.from_numpy(found), module(*inputs).detach(), rtol=0, atol=1e-5)

@pytest.mark.slow
def test_a_classifier_in_onnx_runtime(tmp_path):
    "A whole model: its widths are predicted, and noted for the penalty."
    pytest.importorskip('onnxscript')
    runtime = pytest.importorskip('onnxruntime')
    exact, ids, padding = model()
    exact.eval()
    torch.onnx.export(exact, (ids, padding), tmp_path/'m.onnx', dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path/'m.onnx')
    names = [i.name for i in session.get_inputs()]
    found, = session.run(None, dict(zip(names, (ids.numpy(), padding.keep.numpy()))))
    assert_close(torch.from_numpy(found), exact(ids, padding).detach(), rtol=0, atol=1e-5)

@pytest.mark.slow
def test_what_onnx_has_no_word_for_is_refused():
    pytest.importorskip('onnxscript')
    for options, says in ((dict(alpha=1.5), 'alpha: expected None in an export to ONNX'), (dict(impl='banded'), "use impl='dense'")):
        with pytest.raises(Exception) as error: torch.onnx.export(Learned('own', **options).eval(), onnx_inputs(3, 32), dynamo=True, verbose=False)
        chain, found = error.value, []
        while chain is not None: found.append(str(chain)); chain = chain.__cause__ or chain.__context__
        assert any(says in text for text in found), found

# ---- types

def test_public_functions_say_what_they_return():
    "Type checkers take the result of a function without a return annotation for Any. Generators say it in a comment."
    silent = []
    def check(f, where):
        skipped = f.name.startswith('_') or f.name in ('forward', 'backward') or any(isinstance(x, (ast.Yield, ast.YieldFrom)) for x in ast.walk(f))
        if f.returns is None and not skipped: silent.append(f'{where}{f.name}')
    for path in sorted((ROOT/'dynattn').rglob('*.py')):
        if path.name in ('_modidx.py', '__init__.py') or 'survey' in str(path): continue
        tree = ast.parse(path.read_text(encoding='utf-8'))
        public = {name for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0])=='__all__' for name in ast.literal_eval(node.value)}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in public:
                for f in node.body:
                    if isinstance(f, ast.FunctionDef): check(f, f'{path.name}: {node.name}.')
            if isinstance(node, ast.FunctionDef):
                patched = 'patch' in ' '.join(map(ast.unparse, node.decorator_list))
                owner = ast.unparse(node.args.args[0].annotation) if patched and node.args.args and node.args.args[0].annotation else ''
                if node.name in public or patched and not owner.startswith('_'): check(node, f'{path.name}: ')
    assert not silent, silent

def test_type_checkers_see_every_method_of_a_public_class():
    "A public class is seen whole: it does not grow by `@patch`, which type checkers and completion do not follow."
    grown = []
    trees = {path: ast.parse(path.read_text(encoding='utf-8')) for path in sorted((ROOT/'dynattn').rglob('*.py')) if path.name!='_modidx.py'}
    for path,tree in trees.items():
        if path.name=='__init__.py': # without `__all__`, a strict type checker takes what it imports for its own
            top = [*tree.body, *(node for x in tree.body if isinstance(x, ast.If) for node in x.body)]
            ours = [node for node in top if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith('dynattn'))]
            # `import x as x` says that it is to be seen, as of a module that is imported when it is asked for
            names = [alias.name for node in ours for alias in node.names if alias.asname!=alias.name]
            public = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0])=='__all__']
            assert not names or sorted(names)==sorted(*public), path
        for f in tree.body:
            if not isinstance(f, ast.FunctionDef) or f.name.startswith('_'): continue
            for decorator in map(ast.unparse, f.decorator_list):
                if not decorator.startswith('patch'): continue
                name = decorator[9:].split(',')[0] if decorator.startswith('patch_to(') else ast.unparse(f.args.args[0].annotation)
                if not name.startswith('_'): grown.append(f'{path.name}: {name}.{f.name}')
    assert not grown, grown

@pytest.mark.slow
def test_mypy_follows_the_arguments_and_the_methods(tmp_path):
    pytest.importorskip('mypy')
    (tmp_path/'use.py').write_text('''
import torch
from dynattn import PaddingMask, SigmaParameter, Window, attention, banded_attention, dense_attention
from dynattn.cache import WindowedLayer
x = torch.ones(1, 2, 3, 4)
WindowedLayer(2, window=4).attend(x, x, x)
WindowedLayer(2, breadth=4)
reveal_type(attention(x, x, x, window=Window.default(3.), padding=PaddingMask.from_lengths(torch.tensor([3])), impl="dense"))
reveal_type(Window.default(3.))
reveal_type(Window.default(3.).half_width(4))
reveal_type(PaddingMask.from_lengths(torch.tensor([3])).counts)
reveal_type(WindowedLayer(2, window=4).attend(x, x, x))
reveal_type(SigmaParameter(4)())
reveal_type(attention(x, x, x))
reveal_type(attention(x, x, x, window=3, return_weights=True))
reveal_type(dense_attention(x, x, x))
reveal_type(dense_attention(x, x, x, return_weights=True))
attention(x, x, x, widow=3)
dense_attention(x, x, x, scale="1")
banded_attention(x, x, x, impl="dense")
''')
    for path in sorted((ROOT/'nbs').glob('guide/*.ipynb')): # what users write
        cells = [''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
        if not any('transformers' in cell for cell in cells): (tmp_path/f'page{path.name[:2]}.py').write_text('\n'.join(cells), encoding='utf-8')
    done = subprocess.run([sys.executable, '-m', 'mypy', '--strict', '--follow-imports=silent', '--ignore-missing-imports', *map(str, sorted(tmp_path.glob('*.py')))], capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, 'MYPYPATH': str(ROOT)})
    said = [line.split(': ', 1)[1] for line in done.stdout.splitlines() if 'use.py' in line]
    shown = [re.sub(r'[a-z_]+\.', '', line.split('"')[1]) for line in said if 'Revealed' in line]
    both = 'tuple[Tensor, Tensor]'
    assert shown==['Tensor', 'Window', *['Tensor']*5, both, 'Tensor', both] and 'does not explicitly export' not in done.stdout, done.stdout
    assert len(list(tmp_path.glob('page*.py')))>5 and '[attr-defined]' not in done.stdout, done.stdout
    errors = [line for line in said if line.startswith('error')]
    wrong = 'argument "breadth"', 'types "Tensor", "Tensor", "Tensor", "int"', 'types "Tensor", "Tensor", "Tensor", "str"', 'argument "impl"'
    assert len(errors)==4 and all(w in line for w,line in zip(wrong, errors)), done.stdout

def test_practitioner_7_what_changes_a_model_returns_its_type():
    "So that a type checker finds `generate` on what `add_windows` returns."
    pytest.importorskip('transformers')
    from dynattn import convert, hf
    from dynattn.cache import WindowedLayer
    for f in (hf.switch, hf.add_windows, hf.add_alpha, hf.remove_windows, hf.remove_alpha, convert):
        takes,returns = (get_type_hints(f)[name] for name in ('model','return'))
        assert takes is returns and isinstance(takes, TypeVar) and takes.__bound__ is torch.nn.Module, f.__name__
    own = [x for name,x in inspect.signature(WindowedLayer.__init__).parameters.items() if name!='self']
    assert not [x.name for x in own if x.annotation is x.empty]

@pytest.mark.slow
def test_mypy_knows_the_models_type(tmp_path):
    "What the guide's pages and a practitioner write about models of transformers, and one mistake."
    pytest.importorskip('mypy')
    (tmp_path/'user.py').write_text('''
import torch
from torch import nn
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from dynattn import convert, hf
llama = LlamaForCausalLM(LlamaConfig())
ids = torch.ones(1, 3, dtype=torch.long)
reveal_type(hf.add_windows(llama))
hf.add_windows(llama).generate(ids)
hf.add_windows(hf.add_alpha(hf.switch(llama)), init=32.).generate(ids, max_new_tokens=5)
hf.remove_windows(llama).generate(ids)
hf.load("folder").generate(ids)
reveal_type(convert(nn.TransformerEncoderLayer(8, 2), window=4))
hf.add_windows(llama).generates(ids)
''')
    command = [sys.executable, '-m', 'mypy', '--follow-imports=silent', '--ignore-missing-imports', str(tmp_path/'user.py')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env={**os.environ, 'MYPYPATH': str(ROOT)})
    shown = re.findall(r'Revealed type is "[a-z_.]+\.(\w+)"', done.stdout)
    assert shown==['LlamaForCausalLM','TransformerEncoderLayer'], done.stdout
    errors = [line for line in done.stdout.splitlines() if ': error: ' in line and 'Invalid self argument' not in line]
    assert len(errors)==1 and ':14: error: ' in errors[0], done.stdout      # the others are transformers' own: stock models have them

@pytest.mark.parametrize('core', [{}, dict(DYNATTN_NATIVE='0')], ids=['core','plain'])
def test_no_mode_of_the_first_call_changes_what_follows(core):
    "Under another default dtype or device, in inference mode and under autocast the first call is like any other."
    code = ("import torch\nfrom dynattn import Window, attention\n"
            "q = torch.randn(2, 2, 9, 4, device='cpu')\nfound = []\n"
            "def call(): found.append(attention(q, q, q, window=Window.default(torch.full((2,), 3., dtype=torch.float32, device='cpu')), alpha=1.5))\n"
            "torch.set_default_dtype(torch.float64)\ncall()\ntorch.set_default_dtype(torch.float32)\n"
            "with torch.device('meta'): call()\nwith torch.inference_mode(): call()\n"
            "call()\nprint(all(torch.equal(x, found[-1]) for x in found))")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600, env=os.environ|core)
    assert done.stdout.strip()=='True', done.stderr

def _rows_lost(case, impl, native, monkeypatch):
    if not native: monkeypatch.setattr(core, 'library', lambda: None)
    return (~attention(**case, impl=impl).isfinite()).any(-1)[0,0].nonzero()[:,0].tolist()

@pytest.mark.parametrize('impl,native', [('auto', True), ('banded', True), ('banded', False), ('dense', True)])
@pytest.mark.parametrize('which', 'qkv')
@pytest.mark.parametrize('window', [4, Window.default(torch.tensor(4.)), (3, 0)])
@pytest.mark.parametrize('alpha', [None, 1.5])
def test_what_is_not_finite_reaches_those_who_see_it_and_no_others(impl, native, which, window, alpha, monkeypatch):
    seen = {'q': [20]}.get(which, [*range(20, 24)] if window==(3, 0) else [*range(16, 25)])
    for bad in (float('nan'), float('inf'), -float('inf')):
        case = dict(zip('qkv', torch.randn(3, 1, 1, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()))
        case[which][0,0,20,3] = bad
        lost = _rows_lost(dict(case, window=window, alpha=alpha), impl, native, monkeypatch)
        assert lost==seen, (bad, lost)
