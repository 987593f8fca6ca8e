"What chapter 52 cannot hold: a process without transformers, the example as a user calls it, a compiled backward pass, copies."
import copy, json, os, random, re, subprocess, sys
from pathlib import Path
import pytest, torch
from torch.testing import assert_close
from dynattn.configs import cache_argument
from versions import handed_on, has_all, lacks, needs, served, tells_texts_apart

ROOT = Path(__file__).resolve().parents[1]
os.environ['HF_HUB_OFFLINE'] = '1'

def _python(*cmd, **env):
    r = subprocess.run([sys.executable, *cmd], capture_output=True, text=True, cwd=ROOT, timeout=600, env={**os.environ, 'PYTHONPATH': str(ROOT), **env})
    return r.returncode, r.stdout + r.stderr

_WITHOUT = """
import sys, dynattn
assert not {"transformers","peft","safetensors"} & sys.modules.keys()
sys.modules["transformers"] = None
from dynattn.options import NarrowOptions
import importlib, pathlib
for ask in (lambda: dynattn.hf, lambda: importlib.import_module("dynattn.hf")):
    try: ask()
    except ImportError as e: assert "pip install 'dynattn[hf]'" in str(e), e
    else: raise AssertionError("imported without transformers")
root = pathlib.Path(dynattn.__file__).parent
paths = [p for room in ("hf", "narrow") for p in sorted((root/room).glob("*.py")) if p.stem!="__init__"]
for path in [*paths, root/"export/graph.py"]:
    try: importlib.import_module(f"dynattn.{path.parent.name}.{path.stem}")
    except ImportError as e: assert "pip install 'dynattn[hf]'" in str(e), (path, e)
    else: raise AssertionError(f"{path} imported without transformers")
assert len(paths)>=12
"""

_BROKEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name=="transformers": raise ImportError("tokenizers<=0.23.0 is required, but found 0.23.3")
sys.meta_path.insert(0, Finder())
try: import dynattn.hf
except ImportError as e: print(e)
"""

def test_a_transformers_that_cannot_be_imported_is_not_called_missing():
    "Where another package is too new for it, we said that transformers was not installed."
    code,out = _python('-c', _BROKEN)
    assert code==0 and 'transformers>=5 cannot be imported: tokenizers<=0.23.0 is required, but found 0.23.3' in out, out

_BY_NAME = """
LINES
config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = transformers.AutoModel.from_config(config, attn_implementation="dynattn")
assert model(torch.arange(9)[None])[0].isfinite().all()
from dynattn.hf.plugin import attend
assert transformers.AttentionInterface()["dynattn"] is attend
"""

@pytest.mark.parametrize('first', ['import dynattn.hf','import transformers'])
def test_importing_hf_makes_its_name_known(first):
    "`attn_implementation='dynattn'` was known from the first use of a function on, so an import alone was not enough."
    lines = first+chr(10)+'import torch, transformers, dynattn.hf'
    code,out = _python('-c', _BY_NAME.replace('LINES', lines))
    assert code==0, out

def test_the_package_does_not_import_transformers_and_names_the_extra():
    code,out = _python('-c', _WITHOUT)
    assert code==0, out

_LOADS = """
import sys
before = set(sys.modules)
LINE
import json
print(json.dumps(sorted(m for m in set(sys.modules)-before if m=='transformers' or m.startswith('dynattn.hf.') or m=='dynattn.narrow')))"""

# a line of a user, and all that it may load of this room, with what these modules need of each other
@pytest.mark.parametrize('line,most', [
    ('from dynattn.options import NarrowConfig', ''),
    ('import dynattn.hf', 'masks layers plugin'),
    ('from dynattn.hf import WindowedCache', 'masks layers plugin windows cache'),
    ('from dynattn.hf import add_windows', 'masks layers plugin windows cache'),
    pytest.param('from dynattn.hf import load', 'masks layers plugin windows cache saving', marks=pytest.mark.slow),
    pytest.param('from dynattn.hf import cost_curves', 'masks layers plugin curves', marks=pytest.mark.slow)])
def test_hf_loads_what_is_used(line, most):
    "A name of `dynattn.hf` is imported with its module when it is first used; the settings of `dynattn narrow` need nothing."
    code,out = _python('-c', _LOADS.replace('LINE', line))
    assert code==0, out
    loaded = set(json.loads(out.splitlines()[-1]))
    wanted = {f'dynattn.hf.{name}' for name in most.split()}
    allowed = wanted | {'transformers'} if wanted else set()
    assert loaded<=allowed, loaded-allowed

def test_hf_names_stand_in_their_modules():
    "What a type checker reads, what `import *` gives, what `dir` and `help` show and what is imported late are the same names."
    import ast, pydoc
    from dynattn import hf
    tree = ast.parse(Path(hf.__file__).read_text(encoding='utf-8'))
    block = next(n for n in tree.body if isinstance(n, ast.If) and 'TYPE_CHECKING' in ast.unparse(n.test))
    read = {a.name: n.module for n in block.body for a in n.names}
    assert read==hf._HOME and set(read)==set(hf.__all__)<=set(dir(hf))
    files = {p.stem for p in Path(hf.__file__).parent.glob('*.py')}-{'__init__'}
    assert files==set(hf._NAMES)
    given:dict = {}
    exec('from dynattn.hf import *', given)
    for name,module in read.items():
        assert given[name] is getattr(getattr(hf, module), name)
        assert name in pydoc.render_doc(hf, renderer=pydoc.plaintext)
    with pytest.raises(ImportError, match="cannot import name 'narow'"): from dynattn.hf import narow # noqa
    with pytest.raises(AttributeError, match="module 'dynattn.hf' has no attribute 'narow'"): hf.narow
    import pickle
    assert pickle.loads(pickle.dumps(hf.Sight(causal=True)))==hf.Sight(causal=True)
    assert pickle.loads(pickle.dumps(hf.add_windows)) is hf.add_windows

@pytest.mark.slow
def test_the_example_trains_saves_and_loads(tmp_path):
    r = random.Random(0)
    lines = [f"{l}\t{' '.join(r.choice(w) for _ in range(r.randint(4, 12)))}" for l,w in (('warm', ('sun','sand','heat')),('cold', ('ice','snow','frost'))) for _ in range(120)]
    (tmp_path/'train.tsv').write_text('\n'.join(lines), encoding='utf-8')
    code,out = _python(str(ROOT/'examples/finetune_hf.py'), str(tmp_path/'train.tsv'), '--out', str(tmp_path/'out'), '--alpha', '--epochs', '4', CUDA_VISIBLE_DEVICES='')
    assert code==0, out
    last = next(l for l in out.splitlines() if l.startswith('accuracy'))
    accuracy,before,after = (float(w.rstrip('%,')) for w in last.replace(';', ' ').split() if w.rstrip(',').endswith('%'))
    assert accuracy>=90 and after<before, last
    from dynattn import hf
    model = hf.load(tmp_path/'out')
    assert model.config.id2label=={0: 'cold', 1: 'warm'} and model.config.dynattn['windows']['penalty']==.01
    assert len(Path(ROOT/'examples/finetune_hf.py').read_text(encoding='utf-8').splitlines())<100

@pytest.mark.slow
def test_the_example_for_images_and_speech_runs():
    code,out = _python(str(ROOT/'examples/vision_windows.py'), '--epochs', '4', CUDA_VISIBLE_DEVICES='')
    assert code==0, out
    widths = [int(line.split('width ')[1].split('%')[0]) for line in out.splitlines() if line.startswith('epoch')]
    accuracy = float(next(line for line in out.splitlines() if line.startswith('accuracy')).split()[1].rstrip('%'))
    assert widths[-1]<widths[0]/2 and accuracy>40, out
    assert out.count('100% of the widths learn')==3

@pytest.fixture(scope='module')
def model():
    from transformers import BertConfig, BertForSequenceClassification
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    return BertForSequenceClassification(config)

@pytest.mark.slow
def test_compiled_gradients_are_the_eager_ones(model):
    "aot_eager traces the backward pass as well, with the price in it."
    from dynattn import hf
    ids = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    batch = dict(input_ids=ids, attention_mask=(torch.arange(13) < torch.tensor([[13],[8]])).long(), labels=torch.tensor([0,1]))
    def gradients(wrap):
        m = hf.add_alpha(hf.add_windows(copy.deepcopy(model), init=3., per='input', penalty=.5), init=1.4).train()
        wrap(m)(**batch).loss.backward()
        return {name: p.grad for name,p in m.named_parameters() if p.grad is not None}
    assert_close(gradients(lambda m: torch.compile(m, fullgraph=True, backend='aot_eager')), gradients(lambda m: m))

def test_a_copy_and_a_pickle_are_whole(model, tmp_path):
    from dynattn import hf
    m = hf.add_windows(copy.deepcopy(model), init=3., penalty=.5).train()
    ids = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = m(ids, labels=torch.tensor([0,1])).loss  # leaves widths with a graph behind
    torch.save(m, tmp_path/'m.pt')
    for other in (copy.deepcopy(m), torch.load(tmp_path/'m.pt', weights_only=False)): assert_close(other(ids, labels=torch.tensor([0,1])).loss, loss)

SMALL = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=24, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2, n_embd=16, n_layer=2, n_head=4, dim=16, hidden_dim=24, n_heads=4, n_layers=2, embedding_size=16,
             num_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, sliding_window=4,
             d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, word_embed_proj_dim=16, ffn_dim=8)

@pytest.mark.parametrize('name', ['roberta','distilbert','electra','albert','bart','opt','gpt_neox','phi3','qwen2','qwen3','gemma','gemma3_text','mixtral','olmo2','stablelm','cohere2'])
def test_more_architectures_are_unchanged(name):
    "The chapter takes six; here are more, with their weights, and with what they hand over beside queries, keys and values."
    from transformers import AutoConfig, AutoModel
    from dynattn import hf
    config = AutoConfig.for_model(name)
    config.pad_token_id = SMALL['pad_token_id']     # StableLM's has no place for it in transformers 5.0
    for key,x in SMALL.items():
        if key in config.attribute_map or hasattr(config, key): setattr(config, key, x)
    if getattr(config, 'layer_types', None): config.layer_types = (['sliding_attention','full_attention']*9)[:2] if 'sliding_attention' in config.layer_types else config.layer_types[:2]
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    ids = torch.randint(3, 99, (2, 13))
    for keep in (torch.arange(13) < torch.tensor([[13],[8]]), torch.arange(13) >= torch.tensor([[0],[5]])):
        batch = dict(input_ids=ids, attention_mask=keep.long(), use_cache=False) | (dict(decoder_input_ids=ids) if config.is_encoder_decoder else {})
        model.set_attn_implementation('eager'); theirs = model(**batch)[0]
        hf.switch(model); ours = model(**batch)[0]
        seen = slice(None) if config.is_encoder_decoder else keep
        assert_close(ours[seen], theirs[seen], rtol=0, atol=1e-5)
    assert hf.report(model, batch).share.max()<=1

def test_every_feature_of_every_model_is_known():
    "A new version of transformers brings new ones; each has to be looked at. The committed table is that of its version."
    import csv, transformers
    sys.path.insert(0, str(ROOT/'benchmarks'))
    try: from hf_features import scan
    finally: sys.path.pop(0)
    found = scan()
    assert sum(row['calls'] for row in found)>(300 if has_all() else 200)
    refused = {row['served'] for row in found if row['served']!='computed'}
    selected = {'refuses indices','refuses block_indices'}       # keys that a layer selects
    assert refused==selected if has_all() else refused<=selected
    of_gpt2 = {'decision_transformer','gpt2'}       # whose eager attention read all from the layer until 5.3
    left = [row for row in found if has_all() or row['model'] not in of_gpt2]
    assert set().union(*(row['attributes'].split() for row in left))=={'sinks'}  # eager reads it from the layer
    with open(ROOT/'benchmarks/results/hf_features.csv', newline='', encoding='utf-8') as f: table = list(csv.DictReader(f))
    if table[0].pop('transformers')!=transformers.__version__: return
    assert [{name: str(row[name]) for name in row} for row in found]==[{name: row[name] for name in found[0]} for row in table]

@pytest.mark.parametrize('options', [{}, dict(scale_attn_weights=False), dict(scale_attn_by_inverse_layer_idx=True),
    dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True), dict(reorder_and_upcast_attn=True)], ids=str)
def test_scores_of_gpt2_are_scaled_as_the_configuration_says(options):
    "GPT-2 of transformers 5.0 passes no factor, its eager attention reads it from the layer."
    from transformers import GPT2Config, GPT2LMHeadModel
    from dynattn import hf
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{k: SMALL[k] for k in SMALL if k.startswith('n_')}, vocab_size=99, n_positions=64, **options)).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(6)
    ids = torch.randint(3, 99, (2, 13))
    eager = model.set_attn_implementation('eager') or model
    theirs,written = eager(ids).logits,eager.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    usual = GPT2LMHeadModel(GPT2Config(**{k: SMALL[k] for k in SMALL if k.startswith('n_')}, vocab_size=99, n_positions=64)).eval()
    usual.load_state_dict(model.state_dict())
    assert options in ({}, dict(reorder_and_upcast_attn=True)) or (usual(ids).logits-theirs).abs().max()>1e-2
    hf.switch(model)
    assert_close(model(ids).logits, theirs, rtol=0, atol=1e-5)
    hf.add_windows(model)      # wide: what they give is the same, by a cache of their own
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), written)

SPARSE = dict(index_topk=5, index_n_heads=2, index_head_dim=8, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
              v_head_dim=8, n_routed_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1, index_block_size=4, index_topk_blocks=2)

REFUSED = dict(deepseek_v32='indices', hy_v4='indices', minimax_m3_vl_text='block_indices', inkling2='sinks')

@pytest.mark.parametrize('name', [*REFUSED, 'granite_swa','deepseek_v4','flint','openai_privacy_filter','gpt_oss'])
def test_logits_beside_the_scores(name):
    "Values, and gradients of all parameters, are those of eager; keys that a layer selects, and a logit per query, are refused."
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from dynattn import hf
    needs(name)
    config = AutoConfig.for_model(name).get_text_config()
    takes = {key: x for key,x in {**SMALL, **SPARSE, 'num_key_value_heads': 4, 'head_dim': 8}.items() if hasattr(config, key)}
    config = type(config)(**takes)
    if name=='minimax_m3_vl_text': config.layer_types = ['minimax_m3_sparse']*len(config.layer_types)
    torch.manual_seed(0)
    auto = AutoModel if type(config) in AutoModel._model_mapping else AutoModelForCausalLM
    with torch.device('meta'): assert sum(p.numel() for p in auto.from_config(config).parameters())<1e6
    model = auto.from_config(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    ids = torch.randint(3, 99, (2, 13))
    keep = torch.arange(13) >= torch.tensor([[0],[5]])
    def run(impl):
        hf.switch(model) if impl=='dynattn' else model.set_attn_implementation(impl)
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=keep.long(), use_cache=False)[0][keep]
        out.square().mean().backward()
        return out.detach(), {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None}
    if name in REFUSED:
        with pytest.raises(ValueError, match=f'^{REFUSED[name]}: expected'): run('dynattn')
        return
    (theirs,their_gradients),(ours,gradients) = run('eager'),run('dynattn')
    assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert_close(gradients, their_gradients, rtol=1e-3, atol=1e-4)

def test_layers_that_leave_queries_out():
    "Gemma 4 slices its mask before the layers that share keys; the prompt is then one query with a past."
    from transformers import AutoConfig, AutoModelForCausalLM
    from dynattn import hf
    needs('gemma4_text')
    sizes = {k: SMALL[k] for k in list(SMALL)[:11]} | dict(num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8)
    config = AutoConfig.for_model('gemma4_text', **sizes, sliding_window=5, vocab_size_per_layer_input=99, global_head_dim=4,
                                  layer_types=['sliding_attention','full_attention']*2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    ids = torch.randint(3, 99, (2, 13))
    keep = torch.arange(13) >= torch.tensor([[0],[5]])
    def generate(**options): return model.generate(ids, attention_mask=keep.long(), max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)
    for cache in ('dynamic','static'):
        model.set_attn_implementation('eager'); usual = generate(cache_implementation=cache)
        hf.switch(model); assert torch.equal(generate(cache_implementation=cache), usual), cache

@pytest.mark.slow
@pytest.mark.parametrize('sliding, windows', [(None,False),(5,False),(None,True)])
def test_compiled_generation_is_the_stock_one(sliding, windows):
    "Eager beside compiled, at two lengths; the chapter counts the graphs."
    from transformers import MistralConfig, MistralForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**{k: SMALL[k] for k in list(SMALL)[:11]}, sliding_window=sliding)).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    if windows: hf.add_windows(model, init=3.)
    ids,keep = torch.randint(3, 99, (2, 13)),(torch.arange(13) >= torch.tensor([[0],[5]])).long()
    def generate(m, n): return m.generate(ids[:,-n:], attention_mask=keep[:,-n:], max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation='static')
    stock = [generate(model, n) for n in (13,9)]  # the second length makes it a symbol
    torch.compiler.reset()
    hf.switch(model); model.forward = torch.compile(model.forward, fullgraph=True, backend='eager')
    for n,out in zip((13,9), stock): assert torch.equal(generate(model, n), out)
    assert len(stock[0].unique())>3

def test_a_compiled_decoder_has_two_graphs():
    """One for the prompt and one for all tokens after it, also where sizes are no symbols: the position is a tensor.
    The cache keeps room: the mask of a full one, which the last token of transformers 5.0 sees, leaves nothing out."""
    from torch._dynamo.testing import CompileCounter
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
    from dynattn import hf
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = hf.add_windows(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), init=3.)
    def generate(m, **kw): return m.generate(torch.arange(3, 15)[None], max_new_tokens=14, do_sample=False, eos_token_id=None, pad_token_id=0, **kw)
    usual,counter = generate(model),CompileCounter()
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=counter, dynamic=False)
    cache = {cache_argument(model.forward): StaticCache(config=model.config, max_cache_len=40)}
    assert torch.equal(generate(model, **cache), usual) and counter.frame_count==2

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name, options', [('Bert', dict(init=3.)), ('Bert', dict(init=3., per='input')), ('Bert', dict(init=.4, unit='fraction')),
                                           ('Llama', dict(init=3.)), ('Llama', {})], ids=str)
def test_a_traced_model_reads_its_mask(name, options):
    "`torch.jit.trace` wrote into its program which texts were padded, and how long they were, when it was traced."
    import transformers
    from dynattn import hf
    torch.manual_seed(0)
    cls = getattr(transformers, 'BertModel' if name=='Bert' else 'LlamaForCausalLM')
    model = cls(getattr(transformers, f'{name}Config')(**{k: SMALL[k] for k in list(SMALL)[:11]})).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    hf.add_windows(model, **options)
    class Program(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, ids, mask=None):
            return self.model(input_ids=ids, attention_mask=mask, **(dict(use_cache=False) if name=='Llama' else {}))[0]
    def text(n): return torch.randint(3, 99, (3, n))
    def masks(n):
        at = torch.arange(n)
        return [(at>=0).expand(3, n).long(), (at<torch.tensor([[n],[n//2],[2]])).long(), (at>=torch.tensor([[0],[n//2],[n-2]])).long()]
    program = Program()
    with torch.no_grad():
        for traced_with in (*masks(13), None):
            traced = torch.jit.trace(program, (text(13),)+(() if traced_with is None else (traced_with,)), check_trace=False)
            for n in (13, 7, 30):
                ids = text(n)
                if traced_with is None: assert_close(traced(ids), program(ids), rtol=1e-4, atol=1e-5)
                else:
                    for mask in masks(n):
                        real = mask.bool()
                        assert_close(traced(ids, mask)[real], program(ids, mask)[real], rtol=1e-4, atol=1e-5)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('options', [None, dict(init=3.), dict(init=3., n_global=2)], ids=str)
@pytest.mark.parametrize('new', [1,3])
def test_a_traced_step_behind_a_cache_of_any_length(new, options):
    "The place of the queries was a constant of the traced program."
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    if options is None: hf.switch(model)
    else: hf.add_windows(model, **options)
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model
        def forward(self, ids, mask, key, value):
            cache = DynamicCache()
            cache.update(key, value, 0)
            return self.model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
    def step(length, padded):
        ids = torch.randint(3, 50, (2, length+new))
        mask = (torch.arange(length+new) >= torch.tensor([[0],[padded]])).long()
        cache = DynamicCache()
        model(ids[:,:length], attention_mask=mask[:,:length], past_key_values=cache)
        return ids[:,length:], mask, cache.layers[0].keys, cache.layers[0].values
    with torch.no_grad():
        for padded in (0,4):
            traced = torch.jit.trace(Step(), step(12, padded), check_trace=False)
            for length in (12,7,30):
                for other in (0,4):
                    inputs = step(length, other)
                    assert_close(traced(*inputs), Step()(*inputs), rtol=1e-4, atol=1e-4)

@pytest.mark.parametrize('where', ['cpu','disk'])
def test_windows_for_weights_that_are_elsewhere(where, tmp_path):
    "Widths were put where accelerate keeps the weights between calls, on the meta device."
    from accelerate import cpu_offload, disk_offload
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    near,ids = hf.add_alpha(hf.add_windows(copy.deepcopy(model), init=3.)),torch.arange(3, 20)[None]
    if where=='cpu': cpu_offload(model, 'cpu')
    else: disk_offload(model, str(tmp_path), 'cpu')
    hf.add_alpha(hf.add_windows(model, init=3.))
    with torch.no_grad(): assert_close(model(ids).logits, near(ids).logits)
    generated = [m.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0) for m in (model, near)]
    assert torch.equal(*generated)

def test_a_collector_that_has_moved_is_reported(monkeypatch):
    from dynattn import hf
    monkeypatch.setattr(hf.plugin, '_collector', None)
    with pytest.warns(UserWarning, match='GPT-2, return no weights'): hf.register()

PACKED = dict(gpt2={}, llama={}, mistral={}, qwen3={}, gemma2={}, llama4_text=dict(attention_chunk_size=3, intermediate_size_mlp=24))

@pytest.mark.parametrize('windows', [False,True])
@pytest.mark.parametrize('name', PACKED)
def test_packed_texts_are_what_they_are_alone(name, windows, monkeypatch):
    """Values and gradients, told apart by positions or by their ends. GPT-2 computes in float64 throughout.
    In transformers 5.0 the eager Llama 4 does not tell them apart by positions, and GPT-2 does not hand on their ends."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from dynattn import hf
    from dynattn.hf import plugin
    config = AutoConfig.for_model(name, **{k: SMALL[k] for k in list(SMALL)[:14]}, **PACKED[name], attn_pdrop=0., resid_pdrop=0., embd_pdrop=0.)
    torch.manual_seed(0)
    dtype,close = (torch.float64,1e-10) if name=='gpt2' else (torch.float32,2e-6)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    ids,lengths = torch.randint(3, 99, (1, 17)),(4,1,7,5)
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    ends = torch.tensor((0,)+lengths).cumsum(0)
    by_positions = dict(position_ids=position, use_cache=False)
    by_ends = dict(position_ids=position, cu_seq_lens_q=ends.int(), cu_seq_lens_k=ends.int())
    apart,by_eager = tells_texts_apart(model, ids, lengths, by_positions)
    hands_on_ends = {'cu_seq_lens_q','cu_seq_lens_k'} <= handed_on(model, dict(input_ids=ids, **by_ends))
    hf.switch(model)
    if windows: hf.add_windows(model, init=3., n_global=0 if name=='llama4_text' else 1).to(dtype)
    taken = []
    monkeypatch.setattr(plugin, 'attention', lambda *a, **k: (taken.append(k), attention(*a, **k))[1])
    from dynattn.engine.ops import attention
    def both(call):
        model.zero_grad()
        out = call()
        (out*out.detach().cos()).sum().backward()
        return out.detach(), {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None}
    alone,usual = both(lambda: torch.cat([model(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1))
    together = model(ids, use_cache=False).logits
    assert (together-alone).abs().max()>1e-3
    if not apart:
        if not windows: assert_close(model(ids, **by_positions).logits, by_eager, rtol=0, atol=close)
        lacks(f'packed texts for {name}')
    taken.clear()
    by = [by_positions] if name=='llama4_text' else [by_positions, by_ends]
    for options in by if hands_on_ends else by[:1]:
        packed,gradients = both(lambda: model(ids, **options).logits)
        assert_close(packed, alone, rtol=0, atol=close)
        for n,g in gradients.items(): assert_close(g, usual[n], rtol=0, atol=close*(1+usual[n].abs().max().item())*10)
    assert taken and all(('segments' in call)==(name!='llama4_text') for call in taken)  # chunks need a square
    if not hands_on_ends: lacks(f'the ends of packed texts for {name}, by positions it holds')

SMALL_T5 = dict(vocab_size=99, num_layers=2, num_heads=4, d_model=16, d_kv=4, d_ff=24, dropout_rate=0., pad_token_id=0,
                decoder_start_token_id=1)

@pytest.mark.parametrize('name, again', [('t5',None), ('t5',True), ('t5',False), ('mt5',None), ('umt5',None), ('udop',None)])
def test_a_bias_by_offset_is_a_vector(name, again, monkeypatch):
    "In float64: values, and gradients of all parameters, are those of eager; with layers computed again as well."
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, UdopForConditionalGeneration
    from dynattn import hf
    from dynattn.hf import plugin
    config = AutoConfig.for_model(name, **SMALL_T5)
    torch.manual_seed(0)
    cls = UdopForConditionalGeneration if name=='udop' else AutoModelForSeq2SeqLM
    model = (cls(config) if name=='udop' else cls.from_config(config)).double()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    ids = torch.randint(3, 99, (2, 13))
    keep = torch.arange(13) < torch.tensor([[13],[8]])
    batch = dict(input_ids=ids, attention_mask=keep.long(), labels=ids[:,:7].clone())
    if not served(model): return
    if name=='udop': batch['bbox'] = torch.randint(0, 900, (2, 13, 4)).sort(-1).values/1000
    def run(impl):
        hf.switch(model) if impl=='dynattn' else model.set_attn_implementation(impl)
        model.zero_grad()
        out = model.train()(**batch, use_cache=False)
        out.loss.backward()
        return out.logits.detach(), {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None}
    theirs,their_gradients = run('eager')
    assert any('relative_attention_bias' in n and g.abs().max()>1e-6 for n,g in their_gradients.items())
    taken = []
    monkeypatch.setattr(plugin, 'attention', lambda *a, **k: (taken.append(k), attention(*a, **k))[1])
    from dynattn.engine.ops import attention
    if again is not None: model.gradient_checkpointing_enable(dict(use_reentrant=again))
    ours,gradients = run('dynattn')
    assert_close(ours, theirs, rtol=0, atol=1e-10)
    assert_close(gradients, their_gradients, rtol=0, atol=1e-10)
    vectors = [k.get('rel_bias') for k in taken]
    assert sum(x is not None for x in vectors) >= (2 if name=='udop' else 4)
    if name!='udop': assert all(x is not None for x in vectors)

def test_leading_tokens_of_layers_that_slide():
    "The cache that generate makes keeps them; transformers' own drop them, with growing and fixed size."
    from transformers import MistralConfig, MistralForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    sizes = {k: SMALL[k] for k in list(SMALL)[:11]}
    model = hf.add_windows(MistralForCausalLM(MistralConfig(**sizes, sliding_window=9)).eval(), init=3., n_global=1)
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    ids,keep = torch.randint(3, 99, (2, 13)),(torch.arange(13) >= torch.tensor([[0],[5]])).long()
    def logits(tokens, **options):
        found = model.generate(ids, attention_mask=keep, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                               output_logits=True, return_dict_in_generate=True, **options)
        return torch.stack(found.logits)
    assert_close(logits(8), logits(8, use_cache=False))
    for cache in ('dynamic','static'):
        assert_close(logits(1, cache_implementation=cache), logits(1, use_cache=False))
        with pytest.raises(ValueError, match='n_global: expected 0 in a layer that slides'):
            logits(8, cache_implementation=cache)

@pytest.mark.parametrize('n_global', [1,2])
def test_a_text_that_begins_after_the_first_piece_of_a_prompt(n_global):
    "A prompt in pieces of four tokens, the first five of a row are padding: its leading tokens come with the second."
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: SMALL[k] for k in list(SMALL)[:11]})).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(5)
    hf.add_windows(model, init=3., n_global=n_global)
    keep = torch.arange(13) >= torch.tensor([[0],[5],[9]])
    options = dict(attention_mask=keep.long(), max_new_tokens=5, min_new_tokens=5, do_sample=False,
                   output_logits=True, return_dict_in_generate=True)
    ids = torch.randint(3, 99, (3, 13))
    def logits(**more): return torch.stack(model.generate(ids, **options, **more).logits)
    whole = logits(use_cache=False)
    for size in (2,4,5,6,13): assert_close(logits(prefill_chunk_size=size), whole, rtol=0, atol=1e-4)

@pytest.mark.parametrize('name', ['Gemma2', 'GptOss', 'Llama4'])
def test_generate_beside_soft_caps_sinks_and_chunks(name):
    "A windowed cache serves soft caps and sinks; for chunks `generate` leaves the cache to transformers"
    import transformers
    from dynattn import hf
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=None, bos_token_id=None)
    experts = dict(num_local_experts=2, num_experts_per_tok=1)
    config = dict(Gemma2=lambda: transformers.Gemma2Config(**sizes, sliding_window=6, attn_logit_softcapping=2.),
                  GptOss=lambda: transformers.GptOssConfig(**sizes, **experts, sliding_window=6),
                  Llama4=lambda: transformers.Llama4TextConfig(**sizes, **experts, intermediate_size_mlp=32,
                                                               attention_chunk_size=8))[name]()
    torch.manual_seed(0)
    model = getattr(transformers, f'{name}ForCausalLM')(config).eval()
    hf.add_windows(model, init=3.)
    ids = torch.randint(1, 40, (2, 11))
    def written(**options):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **options)
    assert written().equal(written(use_cache=False))

@pytest.mark.slow
@pytest.mark.parametrize('alpha', [False, True])
def test_compiled_by_default_with_gradients(alpha):
    "`torch.compile` as it comes, inductor: outputs and all gradients, widths included, are those without it"
    from dynattn import hf
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    model = hf.add_windows(LlamaForCausalLM(LlamaConfig(**sizes)), init=3.)
    if alpha: hf.add_alpha(model, init=1.3)
    ids = torch.randint(3, 99, (2,13))
    def run(f):
        model.zero_grad()
        out = f(input_ids=ids, labels=ids)
        out.loss.backward()
        return out.logits.detach(), {name: p.grad.clone() for name,p in model.named_parameters()}
    (expected,gradients),(logits,found) = run(model),run(torch.compile(model))
    assert_close(logits, expected, rtol=0, atol=1e-5)
    assert_close(found, gradients, rtol=1e-4, atol=1e-5)
    assert gradients['model.layers.0.self_attn.dynattn.sigma_head.z'].abs().min()>0

def test_continuous_batching_never_changes_the_attention():
    "transformers' manager may choose another by name, without windows; a model that had one chosen keeps its own manager"
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    model = copy.deepcopy(hf.add_windows(LlamaForCausalLM(LlamaConfig(**{k: SMALL[k] for k in list(SMALL)[:11]}))))
    greedy = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="for continuous batching, got 'dynattn'; use generate"): model.generate_batch([[3,4,5]], greedy)
    assert model.config._attn_implementation=='dynattn'
    model.set_attn_implementation('sdpa')
    assert type(model.init_continuous_batching(greedy)).__name__=='ContinuousBatchingManager'

@pytest.mark.parametrize('name', ['bart', 't5'])
@pytest.mark.parametrize('n_global', [None, 2])
def test_an_encoder_and_its_decoder_padded_on_the_left(name, n_global):
    "With windows, each row is what it is alone, with a growing cache, a static one and none. BART without positions."
    from test_hf_common import build
    from dynattn import hf
    model = build(name)
    if not served(model): return
    if name=='bart':
        for side in (model.model.encoder, model.model.decoder): side.embed_positions.weight.data.zero_()
    hf.add_windows(model, init=3., n_global=n_global)
    torch.manual_seed(0)
    ids,real = torch.randint(3, 99, (3, 12)),torch.arange(12) >= torch.tensor([0,5,10])[:,None]
    begun,begun_real = torch.randint(3, 99, (3, 9)),torch.arange(9) >= torch.tensor([0,4,7])[:,None]
    for row,first in enumerate((0,4,7)): begun[row,first] = model.config.decoder_start_token_id
    def logits(x, keep, y, y_keep, **options):
        options |= dict(attention_mask=keep.long(), decoder_attention_mask=y_keep.long(), max_new_tokens=8,
                        min_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
        return torch.stack(model.generate(x, decoder_input_ids=y, **options).logits)
    batch = ids.masked_fill(~real, 0),real,begun.masked_fill(~begun_real, 0),begun_real
    together = logits(*batch)
    for options in (dict(cache_implementation='static'), dict(use_cache=False)):
        assert_close(logits(*batch, **options), together, rtol=0, atol=1e-4)
    for row in range(3):
        x,y = ids[row:row+1,real[row]],begun[row:row+1,begun_real[row]]
        alone = logits(x, torch.ones_like(x), y, torch.ones_like(y))
        assert_close(together[:,row], alone[:,0], rtol=0, atol=1e-4)

def test_a_model_put_together_from_two():
    "The layers of an EncoderDecoderModel's encoder keep the configuration of the model that it came from."
    from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel
    from dynattn import hf
    sizes = dict(list(SMALL.items())[:4], intermediate_size=24, max_position_embeddings=64, pad_token_id=0)
    def build(**options):
        torch.manual_seed(0)
        text = BertModel(BertConfig(**sizes, **options))
        writer = BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True, **options))
        for p in (*text.parameters(), *writer.parameters()):
            if p.dim()==2: p.data.mul_(5)
        return EncoderDecoderModel(encoder=text, decoder=writer).eval()
    ids,keep = torch.randint(3, 99, (2, 13)),torch.arange(13) < torch.tensor([[13],[8]])
    def logits(model, rows=slice(None), n=13):
        return model(ids[rows,:n], attention_mask=keep[rows,:n].long(), decoder_input_ids=ids[rows,:5]).logits
    assert_close(logits(hf.switch(build())), logits(build(attn_implementation='eager')), rtol=0, atol=1e-4)
    windows = hf.add_windows(build(), init=3.)
    assert_close(logits(windows)[1:], logits(windows, slice(1, 2), 8), rtol=0, atol=1e-4)

# public, third round: T5Gemma 2 joins two masks by `torch.cat` and ended in PyTorch's own error; `mask==0` was False, unasked

READ = dict(join=lambda s, x: torch.cat((s, x), -1), where=lambda s, x: torch.where(s, x, x), fill=lambda s, x: x.masked_fill(s, 0),
            inverse=lambda s, x: 1.-s, minus=lambda s, x: x-s, plus=lambda s, x: x+s, times=lambda s, x: x*s, equal=lambda s, x: s==0,
            unequal=lambda s, x: s!=0, below=lambda s, x: s<0, both=lambda s, x: s&x, turned=lambda s, x: ~s, like=lambda s, x: x==s)

@pytest.mark.parametrize('name', READ)
def test_a_model_that_reads_its_mask_is_told_so_by_name(name):
    from dynattn.hf import Sight
    with pytest.raises(TypeError, match='^attention_mask: expected a model that hands its mask on'):
        READ[name](Sight(torch.ones(2, 5, dtype=torch.bool)), torch.zeros(2, 1, 5, 5, dtype=torch.bool))

def test_masks_are_compared_as_tuples_and_with_none():
    from dynattn.hf import Sight
    sight = Sight(causal=True)
    assert sight==Sight(causal=True) and sight!=Sight() and hash(sight)==hash(Sight(causal=True))
    assert sight!=None and None!=sight

def test_a_model_that_joins_its_masks_is_refused_by_name():
    import transformers
    from architectures import configuration
    from dynattn import hf
    needs('t5gemma2')
    model = transformers.AutoModel.from_config(configuration('t5gemma2')).eval()
    hf.switch(model)
    ids = torch.arange(3, 12)[None]
    with pytest.raises(TypeError, match='^attention_mask: expected a model that hands its mask on'): model(input_ids=ids, decoder_input_ids=ids)

@pytest.mark.parametrize('name', ['Gemma3','PaliGemma'])
@pytest.mark.parametrize('options', [{}, dict(init=2., n_global=0)], ids=str)
def test_images_whose_tokens_see_each_other(name, options):
    """`generate` took a `WindowedCache`, which refused the mask of the image; PaliGemma's layers call themselves not causal,
    and had no windows behind the first call."""
    import transformers
    from dynattn import hf
    needs(f'{name}ForConditionalGeneration')
    sizes = {k: SMALL[k] for k in list(SMALL)[:11]}
    image = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4, model_type='siglip_vision_model')
    own = dict(text_config=dict(sizes, model_type='gemma3_text', sliding_window=4, layer_types=['sliding_attention','full_attention']), mm_tokens_per_image=4,
               image_token_id=98) if name=='Gemma3' else dict(text_config=dict(sizes, model_type='gemma'), projection_dim=16, image_token_index=98)
    torch.manual_seed(0)
    model = getattr(transformers, f'{name}ForConditionalGeneration')(getattr(transformers, f'{name}Config')(vision_config=image, **own)).eval().double()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(4)
    ids = torch.randint(3, 97, (2, 11))
    ids[:,1:5] = 98
    of_image = name=='Gemma3'
    kinds = (ids==98).long() if of_image else torch.zeros_like(ids)    # PaliGemma's prompt sees all of itself
    batch = dict(pixel_values=torch.randn(2, 3, 8, 8).double(), attention_mask=torch.ones_like(ids))
    hf.add_windows(model, **options)
    text,types = ids,kinds
    for _ in range(8):
        logits = model(input_ids=text, token_type_ids=types, pixel_values=batch['pixel_values'], use_cache=False).logits[:,-1]
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
        types = torch.cat([types, torch.full((2, 1), int(not of_image))], 1)
    def generate(**more): return model.generate(input_ids=ids, token_type_ids=kinds, **batch, max_new_tokens=8, do_sample=False, eos_token_id=None, **more)
    assert torch.equal(generate(), text) and torch.equal(generate(cache_implementation='static'), text)
    given = {cache_argument(model.forward): hf.WindowedCache(model)}
    with pytest.raises(ValueError, match="^token_type_ids: expected None with a WindowedCache.*see each other.*cache_implementation='dynamic'"): generate(**given)

def test_an_encoder_gets_no_cache_of_windows():
    "A layer of the cache looks back only, and so did BERT's layers with it."
    from transformers import BertConfig, BertModel
    from dynattn import hf
    model = hf.add_windows(BertModel(BertConfig(**{k: SMALL[k] for k in ('vocab_size','hidden_size','num_hidden_layers','intermediate_size')}, num_attention_heads=2)).eval(), init=3.)
    ids = torch.randint(3, 99, (2, 13))
    with torch.no_grad(), pytest.raises(ValueError, match='expected one that looks back only with a WindowedCache.*BertSelfAttention'):
        model(ids, **{cache_argument(model.encoder.layer[0].forward): hf.WindowedCache(model)})

def test_a_cache_of_windows_names_another_attention():
    "A model that reads its keys ended in `'_NewKeys' object has no attribute 'shape'`."
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    model = hf.add_windows(LlamaForCausalLM(LlamaConfig(**{k: SMALL[k] for k in list(SMALL)[:11]})).eval())
    cache = hf.WindowedCache(model)
    model.set_attn_implementation('eager')
    with torch.no_grad(), pytest.raises(AttributeError, match="^cache: expected a model whose attention is 'dynattn'"):
        model(torch.randint(3, 99, (1, 5)), **{cache_argument(model.forward): cache})

def test_a_text_needs_a_tokenizer():
    "The error was one of the hub, about an empty name."
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    with pytest.raises(ValueError, match='^tokenizer: expected one, for the model was loaded by no name'):
        hf.look(LlamaForCausalLM(LlamaConfig(**{k: SMALL[k] for k in list(SMALL)[:11]})), 'a text')

def test_a_cache_goes_on_with_the_windows_that_it_was_begun_with():
    "Another model's windows, and some that were added anew, were passed over silently; a copy of the model has the same."
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**{k: SMALL[k] for k in list(SMALL)[:11]})).eval()
    model,wider = (hf.add_windows(copy.deepcopy(plain), init=width) for width in (3., 8.))
    ids = torch.randint(3, 99, (1, 20))
    def call(model, cache, ids):
        with torch.no_grad(): return model(ids, **{cache_argument(model.forward): cache}).logits
    cache = hf.WindowedCache(model)
    call(model, cache, ids[:,:18])
    with pytest.raises(RuntimeError, match='^cache: expected windows that stand still.*make a new cache'): call(wider, cache, ids[:,18:19])
    whole = call(model, None, ids)
    assert_close(call(copy.deepcopy(model), cache, ids[:,18:19]), whole[:,18:19])        # nothing was lost
    hf.add_windows(hf.remove_windows(model), init=8.)
    with pytest.raises(RuntimeError, match='got changed ones'): call(model, cache, ids[:,19:])
    cache.reset()
    assert_close(call(model, cache, ids), call(wider, None, ids))
