"What practitioners stumbled over, and what a report found right: each test is named after its report."
import copy, inspect, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest, torch
from torch import nn
from dynattn import PaddingMask, Window, attention

ROOT = Path(__file__).resolve().parents[1]

def model_of(name, **more):
    "A small random model of transformers."
    t = pytest.importorskip('transformers')
    size = dict(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
    torch.manual_seed(0)
    if name=='bert': return t.BertForSequenceClassification(t.BertConfig(**size, **more)).eval()
    if name=='gemma': return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**size, head_dim=8, num_key_value_heads=2, **more)).eval()
    return t.LlamaForCausalLM(t.LlamaConfig(**size, num_key_value_heads=2, **more)).eval()

IDS = torch.randint(60, (2,9), generator=torch.Generator().manual_seed(0))

# ---- windows can be taken away again

def described(model):
    "All that a model is, but the values of its weights."
    return dict(config=model.config.to_dict(), weights=[*model.state_dict()], attributes=[sorted(vars(m)) for m in model.modules()],
                hooks=[len(m._forward_hooks) for m in model.modules()])

def with_both(model):
    from dynattn import hf
    return hf.add_alpha(hf.add_windows(model, init=3., penalty=.1), init=1.5)

@pytest.mark.parametrize('own', ['sdpa','eager'])
@pytest.mark.parametrize('name', ['llama','bert','gemma'])
def test_practitioner_13_a_model_is_as_before_without_its_windows(name, own):
    from dynattn import hf
    plain = model_of(name)
    plain.set_attn_implementation(own)
    want = plain(IDS)[0]
    changes = [lambda m: hf.remove_windows(hf.add_windows(m, init=3., penalty=.1)),
               lambda m: hf.remove_alpha(hf.remove_windows(with_both(m))),
               lambda m: hf.remove_windows(hf.remove_alpha(with_both(m))),
               lambda m: hf.remove_windows(copy.deepcopy(hf.add_windows(m, init=3.)))]
    for change in changes:
        again = change(copy.deepcopy(plain))
        assert described(again)==described(plain)
        assert torch.equal(again(IDS)[0], want)
        hf.add_windows(again)                       # as often as one likes

def test_windows_are_taken_from_a_model_that_was_loaded_or_narrowed(tmp_path):
    from dynattn import hf
    plain = model_of('llama')
    hf.save(hf.add_windows(copy.deepcopy(plain), init=3.), tmp_path/'windows')
    loaded = hf.remove_windows(hf.load(tmp_path/'windows'))
    narrowed = copy.deepcopy(plain)
    hf.narrow(narrowed, [dict(input_ids=IDS.repeat(1, 4))], .5, places=4)
    hf.remove_windows(narrowed)
    for model in (loaded,narrowed):
        assert torch.equal(model(IDS)[0], plain(IDS)[0])
        assert 'dynattn' not in str(model.config.to_dict().get('auto_map')) and not hasattr(model.config, 'dynattn')
        model.save_pretrained(tmp_path/'plain')
        assert type(plain).from_pretrained(tmp_path/'plain').config._attn_implementation=='sdpa'

def test_alpha_stays_where_windows_go():
    from dynattn import hf
    both,alone = with_both(model_of('bert')),hf.add_alpha(model_of('bert'), init=1.5)
    hf.remove_windows(both)
    assert both.config.dynattn.keys()=={'alpha'} and torch.equal(both(IDS)[0], alone(IDS)[0])
    both.train()
    assert both(IDS, labels=torch.zeros(2, dtype=torch.long)).loss.isfinite()       # no price of widths is left

def test_practitioner_13_a_second_add_windows_says_how_to_go_on():
    from dynattn import hf
    model = with_both(model_of('llama'))
    with pytest.raises(ValueError, match=r'remove_windows\(model\) takes them away'): hf.add_windows(model)
    with pytest.raises(ValueError, match=r'remove_alpha\(model\) takes it away'): hf.add_alpha(model)
    hf.remove_alpha(hf.remove_windows(model))
    with pytest.raises(ValueError, match='model: expected one with windows, got one without'): hf.remove_windows(model)
    with pytest.raises(ValueError, match='model: expected one with alpha, got one without'): hf.remove_alpha(model)

# ---- messages that say what to write instead

Q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))

@pytest.mark.parametrize('given', [torch.ones(1, 5), torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.bool), [5]], ids=str)
def test_practitioner_13_padding_names_what_reads_each_convention(given):
    from dynattn import EncoderLayer
    calls = [lambda: attention(Q, Q, Q, padding=given), lambda: EncoderLayer(4, 2)(torch.ones(1, 5, 4), padding=given)]
    for call in calls:
        with pytest.raises(TypeError) as said: call()
        assert all(name in str(said.value) for name in ('padding: expected a PaddingMask', 'from_hf', 'from_keep', 'from_ignore', 'from_lengths'))

def test_practitioner_13_a_window_without_a_limit_is_none():
    from dynattn import MultiheadAttention
    from dynattn.cache import WindowedLayer
    for window in ((64,-1), (-1,0), -1):
        for call in (lambda: attention(Q, Q, Q, window=window), lambda: WindowedLayer(2, window=window)):
            with pytest.raises(ValueError, match='window: expected ints >= 0, or None for no limit, got -1.*flash-attn'): call()
        with pytest.raises(ValueError, match='None for no limit'): MultiheadAttention(8, 2, window=window)

def test_practitioner_13_a_module_that_makes_widths_is_called():
    from dynattn import SigmaParameter
    width = SigmaParameter(2)
    for call in (lambda: attention(Q, Q, Q, window=width), lambda: Window.default(width), lambda: Window(width)):
        with pytest.raises(TypeError, match=r'call it: Window.default\(width\(\)\)'): call()
    assert attention(Q, Q, Q, window=Window.default(width())).shape==Q.shape

def test_practitioner_13_parallel_refuses_what_it_does_not_serve_by_name():
    "On all ranks, so that none waits; here there is one."
    code = ("import torch, torch.distributed as dist\nfrom dynattn import parallel\n"
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
            "q = torch.ones(1, 2, 4, 4)\n"
            "for name,x in dict(segments=torch.zeros(1, 4, dtype=torch.long), attn_mask=torch.ones(4, 4).bool(), dropout_p=.1, widow=3).items():\n"
            "    try: parallel.attention(q, q, q, **{name: x})\n"
            "    except TypeError as e: print(e)\n")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600)
    said = done.stdout.splitlines()
    assert [line.partition(':')[0] for line in said]==['segments','attn_mask','dropout_p','widow'], done.stderr
    assert 'give each rank whole texts' in said[0] and all('parallel.attention' in line for line in said)

# ---- what a wheel brings

def test_practitioner_13_examples_run_from_the_package():
    "Their list, and the help of each, which needs no extra."
    def run(*argv): return subprocess.run([sys.executable, '-m', 'dynattn.examples', *argv], capture_output=True, text=True, timeout=600)
    names = [line.split()[0] for line in run().stdout.splitlines() if line.startswith('  ')]
    assert names==sorted(p.stem for p in (ROOT/'examples').glob('*.py'))
    assert 'usage: finetune_hf.py' in run('finetune_hf', '--help').stdout
    assert run('nonsense').returncode==2 and 'expected one of finetune_hf' in run('nonsense').stderr

def test_practitioner_13_measurements_are_read_anywhere(tmp_path, monkeypatch):
    "From an installed package, where no folder above has them."
    pytest.importorskip('matplotlib')
    from dynattn import plot
    with pytest.raises(FileNotFoundError, match='expected it in benchmarks/results'): plot.measured('nothing.csv')
    (tmp_path/'package/results').mkdir(parents=True)
    (tmp_path/'package/results/rows.csv').write_text('a,b\n1,2\n')
    (tmp_path/'empty').mkdir()
    monkeypatch.chdir(tmp_path/'empty')
    monkeypatch.setattr(plot, 'files', lambda name: tmp_path/'package')
    assert plot.measured('rows.csv')==[dict(a='1', b='2')]

def test_practitioner_13_a_page_of_looks_needs_no_matplotlib():
    "The HTML page is written where neither matplotlib nor Pillow is installed."
    pytest.importorskip('transformers')
    code = ("import sys\nfor name in ('matplotlib','PIL'): sys.modules[name] = None\n"
            "import torch, transformers as t\nfrom dynattn import hf\n"
            "size = dict(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)\n"
            "print(hf.look(t.BertModel(t.BertConfig(**size)), torch.arange(9), last=2).page()[:15])\n")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip()=='<!doctype html>', done.stderr

def test_practitioner_13_several_heads_share_a_scale_and_one_colour_bar():
    pytest.importorskip('matplotlib')
    from matplotlib import pyplot as plt
    from dynattn.plot import show_attention
    axes = show_attention(torch.stack((torch.eye(4)*.5, torch.full((4,4), .1))), title=['a','b'])
    assert len(axes)==2 and len(axes[0].figure.axes)==3 and {ax.images[0].get_clim() for ax in axes}=={(0,.5)}
    with pytest.raises(ValueError, match='title: expected one for each of 2 matrices, got 3'): show_attention(torch.ones(2, 3, 3), title=list('abc'))
    plt.close('all')

@pytest.mark.slow
@pytest.mark.parametrize('page', sorted(p.name for p in (ROOT/'nbs/guide').glob('*.ipynb')))
def test_practitioner_13_a_guide_page_runs_from_what_a_wheel_holds(page, tmp_path):
    "In an empty folder, as a reader copies its cells."
    package = tmp_path/'installed/dynattn'
    shutil.copytree(ROOT/'dynattn', package, ignore=shutil.ignore_patterns('__pycache__', '_modidx.py'))
    for script in (ROOT/'examples').glob('*.py'): shutil.copy(script, package/'examples')
    shutil.copytree(ROOT/'benchmarks/results', package/'results')
    cells = [''.join(c['source']) for c in json.loads((ROOT/'nbs/guide'/page).read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code']
    mine = [cell for cell in cells if not re.search(r'nbdev_export\(|^#\| (slow|cuda|eval: false)', cell, re.M)]
    (tmp_path/'empty').mkdir()
    (tmp_path/'empty/page.py').write_text('\n\n'.join(mine), encoding='utf-8')
    done = subprocess.run([sys.executable, 'page.py'], cwd=tmp_path/'empty', capture_output=True, text=True, timeout=600,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path/'installed')})
    assert done.returncode==0, done.stderr[-3000:]

def test_what_is_no_model_is_refused_by_name():
    pytest.importorskip('transformers')
    from dynattn import hf
    for f in (hf.switch, hf.add_windows, hf.add_alpha, hf.remove_windows, hf.remove_alpha):
        for wrong in ('bert-base-uncased', None, 3, nn.Linear):
            with pytest.raises(TypeError, match='model: expected a model of transformers, got'): f(wrong)

# ---- what the public reports found right

def normal(*shape, seed=0, dtype=torch.float64): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)

@pytest.mark.parametrize('alpha', [None,1.5])
def test_pytorch_153799_steep_biases_and_massive_keys(alpha):
    "Scores of 1e5 neither overflow nor spoil a gradient."
    q,k,v = normal(1, 2, 40, 8),normal(1, 2, 40, 8, seed=1),normal(1, 2, 40, 8, seed=2)
    k[:,:,3] *= 1e4
    bias = normal(2, 21, seed=3)*1e5
    found = []
    for impl in ('banded','dense'):
        leaves = [x.clone().requires_grad_() for x in (q,k,v,bias)]
        out = attention(*leaves[:3], rel_bias=leaves[3], window=(9,0), alpha=alpha, impl=impl)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a,b in zip(*found): torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)

def test_fla_431_masks_with_holes():
    "Keys that take no part are as good as absent, wherever they stand."
    q,k,v = (normal(1, 2, 30, 8, seed=i) for i in range(3))
    keep = torch.rand(1, 30, generator=torch.Generator().manual_seed(0))>.4
    out = attention(q, k, v, padding=PaddingMask(keep), is_causal=True)
    pairs = torch.ones(30, 30).bool().tril()[:,keep[0]]
    alone = attention(q, k[:,:,keep[0]], v[:,:,keep[0]], attn_mask=pairs)
    torch.testing.assert_close(out, alone)

def test_keys_values_52_learning_with_kept_keys():
    "The second half of a text, beside kept keys, has the gradients that it has in the whole text."
    q,k,v = (normal(1, 2, 24, 8, seed=i) for i in range(3))
    options = dict(window=(7,0), is_causal=True)
    whole = [x.clone().requires_grad_() for x in (q,k,v)]
    part = [x.clone().requires_grad_() for x in (q[:,:,12:],k,v)]
    wants = torch.autograd.grad(attention(*whole, **options)[:,:,12:].square().sum(), whole)
    found = torch.autograd.grad(attention(*part, q_offset=12, **options).square().sum(), part)
    for a,b in zip(found, (wants[0][:,:,12:], *wants[1:])): torch.testing.assert_close(a, b)

def test_attention_gym_187_many_documents_in_one_row():
    "3,000 documents of ten tokens, each as if it were alone; no square of the row."
    from test_banded import Largest
    documents,length = 3000,10
    q,k,v = (normal(1, 1, documents*length, 4, seed=i, dtype=torch.float32) for i in range(3))
    ends = torch.arange(0, (documents+1)*length, length, dtype=torch.int32)
    with Largest() as seen: out = attention(q, k, v, segments=ends, is_causal=True)
    alone = attention(*(x.view(documents, 1, length, 4) for x in (q,k,v)), is_causal=True)
    torch.testing.assert_close(out.view_as(alone), alone, rtol=1e-5, atol=1e-5)
    assert seen.most < 40*q.numel()

def test_entmax_39_alpha_never_falls_below_1():
    "However far an optimiser pushes it."
    from dynattn import AlphaHead, entmax
    head = AlphaHead(2, init=1.2)
    for p in head.parameters(): p.data.sub_(1e4)
    assert 1<=head().min()<=head().max()<=2
    with pytest.raises(ValueError, match='alpha: expected'): entmax(torch.zeros(3), .99)

def test_transformers_36150_a_decoder_made_bidirectional():
    "`is_causal=False` on its layers: every token sees both sides, and padding changes nothing."
    model = model_of('llama')
    model.set_attn_implementation('sdpa')
    for layer in model.model.layers: layer.self_attn.is_causal = False
    mask = torch.ones(2, 1, 9, 9).bool()
    want = model(IDS, attention_mask=mask)[0]
    from dynattn import hf
    torch.testing.assert_close(hf.switch(model)(IDS, attention_mask=mask)[0], want, rtol=1e-4, atol=1e-4)
