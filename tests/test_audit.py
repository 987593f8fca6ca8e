"The audit finds faults that were reported in public, rebuilt here in a few lines, and is silent on healthy models."
import ast, inspect, json, math, os, pickle, re, subprocess, sys, warnings
from pathlib import Path
import pytest, torch, torch.nn.functional as F
from torch import nn
from dynattn import Encoder, EncoderConfig, convert
from dynattn.audit import examine
from dynattn.audit.questions import find_layers
from dynattn.audit.subjects import Subject
from dynattn.probe import Answer, depends
from dynattn.command import main
from versions import lacks

sys.path.insert(0, str(Path(__file__).parent))
N,WINDOW = 29,5

def heads(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, 8, generator=g) for _ in range(3)]

def sequence(n=N, width=16): return torch.randn(1, n, width, generator=torch.Generator().manual_seed(0))

def back(q, k):
    "i-j, aligned at the end."
    at = torch.arange(k.shape[2])
    return at[k.shape[2]-q.shape[2]:,None]-at

# ---- faults that were reported, as small as they can be rebuilt

def window_one_too_wide(q, k, v):
    "The kernel counts neighbours, the configuration counts the token itself too."
    d = back(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<=WINDOW))

def empty_row_sees_all(q, k, v):
    "Only what comes before a token; the first has nothing, and finfo.min for all is the same as 0 for all."
    scores = (q @ k.mT).masked_fill(back(q, k)<=0, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v

def step_without_window(q, k, v):
    "A single query goes another way, on which the window is missing."
    if q.shape[2]==1: return F.scaled_dot_product_attention(q, k, v)
    d = back(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<WINDOW))

def ring_with_the_same_window(q, k, v, ranks=3):
    "Each rank gets the keys of the others in turn, and takes the window as if they began where its queries begin."
    size = -(-q.shape[2]//ranks)
    outs = []
    for qs in q.split(size, 2):
        scores = []
        for ks in k.split(size, 2):
            d = torch.arange(qs.shape[2])[:,None]-torch.arange(ks.shape[2])
            scores.append((qs @ ks.mT).masked_fill(d.abs()>=WINDOW, -math.inf))
        outs.append(torch.cat(scores, -1).softmax(-1).nan_to_num() @ v)
    return torch.cat(outs, 2)

def weak_padding_mask(q, k, v, keep=None):
    "-1e-9 where -1e9 was meant."
    scores = q @ k.mT
    if keep is not None: scores = scores.masked_fill(~keep[:,None,None], -1e-9)
    return scores.softmax(-1) @ v

class Model(nn.Module):
    "One layer of plain attention with learned positions, for faults around it."
    def __init__(self, width=16, longest=64):
        super().__init__()
        torch.manual_seed(1)
        self.qkv,self.place = nn.Linear(width, 3*width),nn.Embedding(longest, width)

    def attend(self, x, mask=None):
        q,k,v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

class PositionsFromTheRow(Model):
    "All rows of a batch count their positions from the left edge, whatever padding stands there."
    def forward(self, x, keep=None):
        x = x+self.place(torch.arange(x.shape[1]))
        return self.attend(x, None if keep is None else keep[:,None,None])

class RestartedPositionsOnly(Model):
    "Packed texts get positions of their own, and see each other."
    def forward(self, x, segments=None):
        n = x.shape[1]
        places = torch.arange(n)[None]
        if segments is not None:
            lengths = segments[0].unique_consecutive(return_counts=True)[1]
            places = torch.cat([torch.arange(length) for length in lengths])[None]
        return self.attend(x+self.place(places), torch.ones(n, n).tril().bool())

class MeanOverPadding(Model):
    "Attention knows the padding, the mean behind it does not."
    def forward(self, x, attention_mask=None):
        return self.attend(x, None if attention_mask is None else attention_mask.bool()[:,None,None]).mean(1)

class HeadsOfTheNeighbour(Model):
    "The mask of a batch is repeated for the heads in the wrong order: B, B instead of each row for all of its heads."
    def __init__(self):
        super().__init__()
        self.torchs = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, key_padding_mask=None):
        if key_padding_mask is None: return self.torchs(x, x, x, need_weights=False)[0]
        mask = key_padding_mask[:,None].expand(-1, x.shape[1], -1).repeat(2, 1, 1)
        return self.torchs(x, x, x, attn_mask=mask, need_weights=False)[0]

class SummaryOfTheBlock(Model):
    "The mean of a block of eight is added to each of its tokens, the first ones too."
    def forward(self, x):
        blocks = F.pad(x, (0, 0, 0, -x.shape[1]%8)).unflatten(1, (-1, 8))
        x = x+blocks.mean(2, keepdim=True).expand_as(blocks).flatten(1, 2)[:,:x.shape[1]]
        return self.attend(x, torch.ones(x.shape[1], x.shape[1]).tril().bool())

class SortedByHash(Model):
    "Tokens are sorted by a hash and cut into chunks: all tokens decide who shares one. Inside, only the past counts."
    def forward(self, x, chunk=8):
        q,_,v = self.qkv(x).chunk(3, -1)
        n,width = x.shape[1:]
        order = q.sum(-1).sign().argsort(dim=-1, stable=True)             # [B,N]
        order = F.pad(order, (0, -n%chunk), value=n)                      # n is a token of zeros
        index = order[...,None].expand(-1, -1, width)
        q,v = (F.pad(t, (0, 0, 0, 1)).gather(1, index).unflatten(1, (-1, chunk)) for t in (q, v))
        place = order.unflatten(1, (-1, chunk))
        visible = (place[...,None]>=place[...,None,:]) & (place[...,None,:]<n)
        out = (q @ q.mT).masked_fill(~visible, -math.inf).softmax(-1).nan_to_num() @ v
        return torch.zeros_like(x[:,:1]).expand(-1, n+1, -1).scatter(1, index, out.flatten(1, 2))[:,:n]

def mistral(implementation=None, **options):
    transformers = pytest.importorskip('transformers')
    def lost(module, query, key, value, attention_mask, scaling=None, **kwargs):
        "The window is in the mask that this path does not take."
        several = query.shape[2]>1
        out = F.scaled_dot_product_attention(query, key, value, is_causal=several, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2),None
    if implementation: transformers.AttentionInterface.register(implementation, lost)
    torch.manual_seed(0)
    config = transformers.MistralConfig(**dict(vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW, max_position_embeddings=64) | options)
    model = transformers.MistralForCausalLM(config).eval()
    if implementation: model.set_attn_implementation(implementation)
    return model

def whole_context(tokens=64):
    "Every layer has room for the whole context, whatever its window."
    from transformers.cache_utils import Cache, StaticLayer
    return Cache(layers=[StaticLayer(tokens) for _ in range(2)])

def without_configuration():
    from transformers import DynamicCache
    return DynamicCache()

BAND = dict(window=(WINDOW-1, 0), causal=True)
GITHUB = 'https://github.com/'
REPORTED = dict( # name -> address below GITHUB, the model and an example, promises, the question that finds it
    window_one_too_wide=('huggingface/transformers/issues/39408',
        lambda: (window_one_too_wide, heads()), BAND, 'window'),
    window_lost_on_a_path=('unslothai/unsloth/pull/8253',
        lambda: (mistral('lost'), None), {}, 'window'),
    window_that_was_switched_off=('huggingface/transformers/issues/38002',
        lambda: (mistral(use_sliding_window=False), None), {}, 'window'),
    ring_hands_the_window_on=('open-lm-engine/lm-engine/pull/447',
        lambda: (ring_with_the_same_window, heads()), dict(window=WINDOW-1), 'window'),
    empty_row_sees_all=('pytorch/pytorch/issues/41508',
        lambda: (empty_row_sees_all, heads()), dict(causal=True), 'future'),
    summary_of_a_block=('karpathy/nanochat/issues/844',
        lambda: (SummaryOfTheBlock(), sequence()), dict(causal=True), 'future'),
    membership_leaks=('lucidrains/reformer-pytorch/issues/69',
        lambda: (SortedByHash(), sequence(72)), dict(causal=True), 'future'),
    weak_padding_mask=('Shujun-He/RibonanzaNet/issues/5',
        lambda: (weak_padding_mask, heads()), {}, 'padding'),
    mean_counts_padding=('HKUDS/LightRAG/pull/3675',
        lambda: (MeanOverPadding(), sequence()), {}, 'padding'),
    positions_of_left_padding=('unslothai/unsloth/issues/3699',
        lambda: (PositionsFromTheRow(), sequence()), dict(left_padding=True), 'left_padding'),
    mask_of_the_neighbour=('line/lighthouse/pull/77',
        lambda: (HeadsOfTheNeighbour(), sequence()), {}, 'batch'),
    packed_texts_see_each_other=('huggingface/nanoVLM/pull/204',
        lambda: (RestartedPositionsOnly(), sequence()), dict(causal=True), 'packed'),
    cache_forgets_the_window=('karpathy/nanochat/issues/452',
        lambda: (step_without_window, heads()), BAND | dict(cached=True), 'cached'),
    cache_without_configuration=('huggingface/transformers/pull/40039',
        lambda: (mistral(), None), dict(cache=without_configuration), 'memory'),
    cache_for_the_whole_context=('google/gemma.cpp/issues/1016',
        lambda: (mistral(), None), dict(cache=whole_context), 'memory'),
)

@pytest.mark.parametrize('name', REPORTED)
def test_a_reported_fault_is_found_and_its_code_shows_it(name):
    address,make,promises,question = REPORTED[name]
    model,example = make()
    found = examine(model, example, **promises)
    assert found.status==1 and question in {f.check for f in found.broken}, found
    for f in found.broken: assert shows(f, model), f.code

def shows(finding, model):
    "Whether the program of a finding runs, without this package, and shows it."
    assert finding.code and 'dynattn' not in finding.code
    told = dict(model=model)
    exec(finding.code, told)
    return told['change']==0 if 'expected: above 0' in finding.code else told['change']>1e-9

def test_the_chapter_names_every_report():
    text = (Path(__file__).parents[1]/'nbs/audit/69_report.ipynb').read_text(encoding='utf-8')
    assert not [address for address,*_ in REPORTED.values() if GITHUB+address not in text]

def test_each_fault_goes_when_it_is_mended():
    def right(q, k, v):
        d = back(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<WINDOW))
    assert examine(right, heads(), window=(WINDOW-1, 0), causal=True, cached=True).ok
    def padded(q, k, v, keep=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if keep is None else keep[:,None,None])
    assert examine(padded, heads(), left_padding=True).ok
    assert examine(mistral(), None, packed=True).ok

# ---- what is healthy

HEALTHY = ['bert','modernbert','llama','mistral','gemma2','gpt2','t5','whisper','vit']

@pytest.mark.parametrize('name', HEALTHY)
def test_silent_on_healthy_models(name):
    pytest.importorskip('transformers')
    import test_hf_common
    found = examine(test_hf_common.build(name))
    assert found.ok, found
    assert [layer.by_weights for layer in found.layers]==[True]*(4 if name in ('t5','whisper') else 2)
    assert json.dumps(found.to_json())

def encoder(**options):
    torch.manual_seed(0)
    return Encoder(EncoderConfig(dim=16, heads=2, layers=2, **options)).eval()

def converted(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 8, batch_first=True)
    return convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), **options).eval()

def windowed(name, **options):
    pytest.importorskip('transformers')
    import test_hf_common
    from dynattn import hf
    model = test_hf_common.build(name)
    hf.add_windows(model, **options)
    return model

def ids(n): return torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(0))

OURS = dict( # every kind of model that this package makes, and an example of n tokens
    learned=(lambda: encoder(window='learned', init_width=3.), ids),
    wide=(lambda: encoder(window='learned', init_width=40., n_global=2), ids),
    predicted=(lambda: encoder(window='predicted', init_width=9.), ids),
    alpha=(lambda: encoder(window='learned', init_width=6., alpha='learned'), ids),
    causal=(lambda: encoder(window=4, causal=True, cls=False, n_global=0), ids),
    patches=(lambda: encoder(window='learned', init_width=3., patch=4), ids),
    converted=(lambda: converted(window='learned'), sequence),
    converted_alpha=(lambda: converted(window=7, alpha='learned'), sequence),
    bert=(lambda: windowed('bert', init=30., n_global=1, edge='hard'), lambda n: None),
    llama=(lambda: windowed('llama', init=35., n_global=1, edge='hard'), lambda n: None),
    mistral=(lambda: windowed('mistral', init=20., n_global=1), lambda n: None))

@pytest.mark.parametrize('name', OURS)
def test_our_own_models_keep_their_promises_at_three_lengths(name):
    make,example = OURS[name]
    model = make()
    promises = dict(cached=False) if name=='mistral' else {}     # its cache refuses a leading token in a layer that slides
    for n in (9, 37, 50):
        found = examine(model, example(n), n=n, longest=64, **promises)
        hidden = any(promise.tokens>layer.n for layer in found.layers for promise in layer.promised)
        assert found.layers and all(layer.promised[0] for layer in found.layers), found
        if hidden and not found.ok: # a class token stands in front, so heads are not watched at other lengths
            assert found.status==3 and {f.check for f in found.findings if f.status!='noted'}=={'length'}, found
        else: assert found.ok, found

def test_heads_of_many_widths_keep_their_promises_beyond_the_length_that_was_looked_at():
    "As `narrow` makes them: promises are not cut at the length, and a leading token is no part of a window."
    from dynattn.hf.narrowing import set_widths
    model = windowed('llama', init=5., n_global=1, edge='hard')
    set_widths(model, [[3, 12, 34, 35], [20, 36, 47, 60]])
    found = examine(model, longest=64)
    assert found.ok and len({reach.left for layer in found.layers for reach in layer.reach})>3, found

def test_a_promise_that_our_own_model_breaks():
    found = examine(encoder(window=5, n_global=0), ids(31), window=3)
    finding, = found.broken
    assert finding.check=='window' and '5 back, 5 ahead; promised is 3 back, 3 ahead' in finding.sentence
    told = dict(model=encoder(window=5, n_global=0))
    exec(finding.code, told)
    assert told['change']>1e-9

def test_silent_on_clean_forms_of_the_survey_and_loud_on_leaks():
    from dynattn.survey import card, learned, memory
    torch.manual_seed(0)
    for system in (card.Exact, learned.ReformerExact, learned.RoutingArgmax, memory.Luna):
        found = examine(system.at(24, causal=True), sequence(24))
        assert found.ok and found.answers['future'][1], found
    leaks = examine(learned.Routing.at(36, causal=True), sequence(36))
    assert [f.check for f in leaks.broken]==['future'], leaks

# ---- sound

def test_rounding_is_no_dependence_and_doubt_is_said():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    delta = torch.zeros_like(x)
    delta[5] = 1
    noisy = depends(lambda x: x[:3]+1e-12*torch.sin(1e9*x[5]), x, delta)
    assert set(noisy.tolist())=={Answer.UNSURE}

class OwnAttention(Model):
    "Neither a kernel nor a softmax that could be watched."
    def forward(self, x):
        q,k,v = self.qkv(x).chunk(3, -1)
        d = back(q[None], k[None])
        weights = torch.exp(q @ k.mT/4)*((d>=0) & (d<=3))
        return weights/weights.sum(-1, keepdim=True) @ v

def test_attention_that_cannot_be_watched_is_measured_by_change():
    model = nn.Sequential(OwnAttention(), nn.Linear(16, 16), OwnAttention())
    found = examine(model, sequence(13), causal=True, window=2)
    seen = [(layer.name, layer.by_weights, layer.reach[0].left) for layer in found.layers]
    assert seen==[('0', False, 3), ('2', False, 3)]
    finding, = found.broken
    assert shows(finding, model)

def test_torchs_own_encoder_and_nothing_is_left_behind():
    from dynattn.engine import ops
    impls,default = dict(ops.impls),torch.get_default_dtype()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 8, batch_first=True), 2)
    found = examine(encoder, sequence(11))
    assert found.ok and [len(layer.reach) for layer in found.layers]==[2, 2] and found.answers['padding']==(Answer.NO, True)
    assert ops.impls==impls and torch.get_default_dtype()==default and next(encoder.parameters()).dtype==torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())

def test_a_question_that_fails_is_not_measured():
    def fragile(x, keep=None):
        if keep is not None: raise RuntimeError('no padding today')
        return x
    found = examine(fragile, sequence(9))
    assert found.status==3 and any(f.status=='not measured' and 'no padding today' in f.sentence for f in found.findings)

class Wrapped(Model):
    "Attention whose output is changed by `change`."
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x): return self.change(self.attend(x))

@pytest.mark.parametrize('change,said', [
    (lambda y: y.transpose(0, 1), 'begin with an axis of 9'), (lambda y: (100*y).long(), 'torch.int64'),
    (lambda y: y.mean(1), 'no output for each'), (lambda y: torch.cat((y, y), 1), 'no output for each')],
    ids=['transposed','integers','one','twice'])
def test_outputs_that_cannot_be_compared_are_not_measured(change, said):
    found = examine(Wrapped(change), sequence(9), causal=True)
    assert any(f.status=='not measured' and said in f.sentence for f in found.findings), found
    assert 'no promise is broken' not in str(found)
    assert examine(Wrapped(change), sequence(9)).status==(0 if 'for each' in said else 3)

def test_nothing_to_look_at_is_not_measured():
    found = examine(lambda x: x.cumsum(1).mean(1), sequence(9))
    assert found.status==3 and 'no attention was found' in str(found) and 'no promise is broken' not in str(found)

class Stateful(Model):
    "Adds something of the last call."
    last = 0.
    def forward(self, x):
        y = self.attend(x)+self.last
        self.last = .1*y.mean().item()
        return y

def test_a_model_that_keeps_something_leaks_nothing():
    found = examine(Stateful(), sequence(9))
    assert found.status==3 and not found.broken and list(found.answers)==['repeated'], found
    finding, = [f for f in found.findings if f.status=='not measured']
    assert finding.check=='repeated' and shows(finding, Stateful())

@pytest.mark.parametrize('make,said', [
    (lambda: nn.Linear(16, 16, device='meta'), 'model: expected parameters with values'),
    (lambda: torch.jit.script(nn.Linear(16, 16)), 'model: expected a module whose calls can be watched')],
    ids=['meta','scripted'])
def test_what_cannot_be_run_is_refused(make, said):
    with pytest.raises((TypeError, ValueError), match=said): examine(make(), sequence(9))

def test_a_model_that_raises_is_not_measured():
    class Fails(Exception): pass
    def fails(x): raise Fails('no memory today')
    for model,said in ((fails, 'Fails: no memory today'), (lambda x: 'words', 'expected an output with a tensor in it')):
        found = examine(model, sequence(9))
        assert found.status==3 and said in str(found), found

def per_layer(windows, **options):
    "One window for each layer; the model reads the one that all share, its cache reads these."
    if not hasattr(pytest.importorskip('transformers').PretrainedConfig, 'per_layer_config'):
        lacks('per_layer_config')
    model = mistral(per_layer_config={i: dict(sliding_window=w) for i,w in enumerate(windows)})
    if options: model.config.allow_global_per_layer_attribute_access = True
    return model

def test_windows_of_single_layers_are_those_of_the_configuration(tmp_path, capsys):
    found = examine(per_layer([4, 12]))
    assert found.status==3 and 'AmbiguousGlobalPerLayerAttributeError' in str(found), found # its forward pass raises it
    found = examine(per_layer([4, 12], reads=True))
    assert [layer.promised[0].left for layer in found.layers]==[3, 11]
    assert [(row.tokens, row.promised, row.kept) for row in found.memory]==[(4, 4, True), (12, 12, True)], found.memory
    assert [f.check for f in found.broken]==['window','window','cached']  # the mask has 5 tokens for both
    per_layer([4, 12]).save_pretrained(tmp_path)
    assert main(['audit', str(tmp_path), '--quiet'])==3

def test_what_raises_elsewhere_has_the_status_of_a_gap(tmp_path, capsys):
    (tmp_path/'odd.py').write_text('def model(): return 1/0')
    assert main(['audit', f'{tmp_path}/odd.py:model', '--quiet'])==3
    assert 'ZeroDivisionError' in capsys.readouterr().err

def static(model):
    from transformers import StaticCache
    return lambda: StaticCache(config=model.config, max_cache_len=64)

def test_caches_that_keep_what_their_windows_promise():
    model = mistral()
    for cache in (None, static(model)):
        found = examine(model, cache=cache)
        assert found.ok and [(row.tokens, row.promised, row.held) for row in found.memory]==[(5, 5, 5*2*2*4*4)]*2, found
    from dynattn.hf.narrowing import set_widths
    model = windowed('llama', init=5., n_global=1, edge='hard')
    set_widths(model, [[3, 3, 8, 8], [3, 3, 60, 60]])
    found = examine(model, longest=64)
    assert found.ok and found.memory[0].promised==(5+10)/2 and found.memory[0].tokens<=(5+10)/2+8, found  # spare places
    del model._prepare_cache_for_generation                      # and with it the WindowedCache
    found = examine(model, longest=64)
    assert {f.check for f in found.broken}=={'memory'}, found

def test_a_cache_that_never_dropped_its_past_is_found():
    "Speculative decoding keeps the past until it is told how much was accepted; here nobody tells."
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicSlidingWindowLayer
    model = mistral()
    if not hasattr(DynamicSlidingWindowLayer, 'activate_past_recording'): lacks('layers of a cache that record their past')
    def recorded():
        cache = DynamicCache(config=model.config)
        for layer in cache.layers: layer.activate_past_recording()
        return cache
    found = examine(model, cache=recorded)
    finding, = found.broken
    assert 'model.layers.0-1.self_attn: after 37 tokens the cache of a layer holds 37; its windows promise 5.' in str(found)
    assert finding.check=='memory' and '1 promise is broken' in str(found) and 'def make(): ...' in finding.code
    assert [row['held'] for row in found.to_json()['memory']]==[37*2*2*4*4]*2

def test_a_ring_as_long_as_the_context_is_found(tmp_path, capsys):
    "Every head reads as far as promised, for the mask is right; the ring is longer than any text needs."
    pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    from dynattn import hf
    from dynattn.export import export
    from dynattn.hf.narrowing import set_widths
    model = mistral(max_position_embeddings=256, sliding_window=None)
    hf.add_windows(model, n_global=2)
    set_widths(model, [[3]*4, [5]*2+[math.inf]*2])
    export(model, tmp_path, piece=240)
    command = ['audit', str(tmp_path), '--quiet']
    assert main([*command, '--n', '64'])==0                         # pieces of 240 tokens need that room
    (tmp_path/'onnx_model.json').write_text((tmp_path/'onnx_model.json').read_text().replace('"piece": 240', '"piece": 8'))
    capsys.readouterr()
    assert main(command)==1
    said = capsys.readouterr().out
    assert 'broken: layer 0, width 3: after 64 tokens the cache of a layer holds 245; its windows promise 13.' in said, said
    assert re.search(r'layer 1, width all +256 +all +8,192 *$', said, re.M) and 'a cache holds more' in said, said
    assert main([*command, '--json'])==1
    assert [row['held'] for row in json.loads(capsys.readouterr().out)['memory']]==[8*4*places for places in (2*245, 247, 256)]

def foreign(folder, keeps, order=(0, 1, 2, 3)):
    "A graph whose logits depend on the last token only, and that returns the last `keeps` keys of two layers; their axes."
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    import numpy as np
    helper,kinds = onnx.helper,onnx.TensorProto
    def port(name, kind, *shape): return helper.make_tensor_value_info(name, kind, shape)
    table = np.random.default_rng(0).normal(size=(99, 99)).astype('float32')
    constants = dict(table=table, row=table[:,:4], head=np.array([1]), start=np.array([-keeps]), end=np.array([2**31]), axis=np.array([2]))
    nodes = [helper.make_node('Gather', ['table','input_ids'], ['logits']), helper.make_node('Gather', ['row','input_ids'], ['flat']),
             helper.make_node('Unsqueeze', ['flat','head'], ['new'])]
    ins,outs = [port('input_ids', kinds.INT64, 1, 'n')],[port('logits', kinds.FLOAT, 1, 'n', 99)]
    for name in (f'{i}.{kind}' for i in range(2) for kind in ('key','value')):
        ins.append(port(f'past_key_values.{name}', kinds.FLOAT, 1, 1, 'past', 4))
        outs.append(port(f'present.{name}', kinds.FLOAT, *'abcd'))
        nodes += [helper.make_node('Concat', [f'past_key_values.{name}','new'], [f'all.{name}'], axis=2),
                  helper.make_node('Slice', [f'all.{name}','start','end','axis'], [f'kept.{name}']),
                  helper.make_node('Transpose', [f'kept.{name}'], [f'present.{name}'], perm=order)]
    graph = helper.make_graph(nodes, 'g', ins, outs, initializer=[onnx.numpy_helper.from_array(x, n) for n,x in constants.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=9), folder/'model.onnx')
    return str(folder/'model.onnx')

@pytest.mark.parametrize('keeps,order,status,words', [
    (WINDOW, (0, 1, 2, 3), 0, 'layer 0-1'),
    (10**6, (0, 1, 2, 3), 1, 'broken: layer 0-1: after 256 tokens the cache of a layer holds 256; its windows promise 5.'),
    (10**6, (0, 2, 1, 3), 3, 'not measured: Whether caches keep no more than windows promise: of layer 1, expected arrays [1,1,tokens,size]'),
], ids=['kept','everything','other axes'])
def test_presents_that_hold_everything_are_found(tmp_path, capsys, keeps, order, status, words):
    "A configuration promises a window, the logits are right, and the exporter's caches never shrink."
    transformers = pytest.importorskip('transformers')
    config = transformers.MistralConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, sliding_window=WINDOW)
    graph = foreign(tmp_path, keeps, order)
    assert main(['audit', graph, '--quiet'])==0                     # nothing is promised
    config.save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(['audit', graph, '--quiet'])==status
    assert words in (said := capsys.readouterr().out) and 'depend on 0 of 255 tokens back' in said, said
    assert main(['audit', graph, '--json'])==status
    found = json.loads(capsys.readouterr().out)
    assert found['status']==status and {f['check'] for f in found['findings']}<={'memory'}, found

def test_a_window_that_begins_late_is_found():
    def late(q, k, v):
        d = back(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & ((d<=6) | (k.shape[2]<50)))
    found = examine(late, heads(17), causal=True, longest=100)
    assert {(row.n, row.keys) for row in found.begins.values()}=={(50, 7)}
    for promised,tokens in ((40, 49), (60, 50)): # the window begins too late, and too early
        found = examine(late, heads(17), window=(promised, 0), causal=True, longest=100)
        finding, = found.broken
        told = dict(model=late)
        exec(finding.code, told)
        assert finding.check=='length' and told['x'].shape[1]==tokens and (told['change']==0)==(promised==60)

@pytest.mark.parametrize('options', [dict(window=3), dict(window=(2, 0), is_causal=True, n_global=2),
    dict(alpha=1.5, window=(6, 1))], ids=str)
def test_widths_are_those_of_the_call(options):
    from dynattn import attention
    s, = Subject.parts(lambda q, k, v: attention(q, k, v, **options), heads(23))
    layer, = find_layers(s, 23)
    w = options['window']
    assert {(r.left, r.right) for r in layer.reach}=={(w, w) if isinstance(w, int) else w}

@pytest.mark.parametrize('name', ['Roberta','XLMRoberta','MPNet','Bert'])
def test_padding_behind_leaves_positions_as_the_model_counts_them(name):
    "RoBERTa's first position is 2; padding behind the text does not change it, and no promise is broken."
    transformers = pytest.importorskip('transformers')
    torch.manual_seed(0)
    config = getattr(transformers, name+'Config')(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                  num_attention_heads=2, max_position_embeddings=128)
    assert examine(getattr(transformers, name+'Model')(config).eval()).broken==[]

@pytest.mark.parametrize('wrong,said', [
    (dict(example=None), 'example: expected a tensor'),
    (dict(example=heads()[:2]), 'example: expected a tensor [B,N,...] or three'),
    (dict(example=[t[0] for t in heads()]), 'example: expected q, k and v'),
    (dict(example=heads(), n=2), 'n: expected an int of 4'),
    (dict(example=heads(), window='all'), 'window: expected an int or a pair'),
    (dict(example=heads(), window=-1), 'window: expected an int or a pair')])
def test_bad_input(wrong, said):
    with pytest.raises((TypeError, ValueError), match=said.replace('[', r'\[')): examine(window_one_too_wide, **wrong)


# ---- questions that cannot be asked (practitioner 1: transformers 5.24 renamed an argument, and the audit said that all is well)

def renamed(**names): # old -> new
    "A Mistral whose `forward` spells some arguments in another way, as a version to come may."
    transformers = pytest.importorskip('transformers')
    usual = inspect.signature(transformers.MistralForCausalLM.forward)
    assert set(names)<=set(usual.parameters), usual
    class Renamed(transformers.MistralForCausalLM):
        def forward(self, *args, **kwargs):
            old = {new: name for name,new in names.items()}
            return super().forward(*args, **{old.get(name, name): value for name,value in kwargs.items()})
    parameters = [p.replace(name=names.get(p.name, p.name)) for p in usual.parameters.values()]
    Renamed.forward.__signature__ = usual.replace(parameters=parameters)
    stock = mistral()
    model = Renamed(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    return model

def cache_name():
    from dynattn.configs import cache_argument
    return cache_argument(pytest.importorskip('transformers').MistralForCausalLM.forward)

@pytest.mark.parametrize('name,missing', [
    ('cache', {'cached','memory'}), ('attention_mask', {'padding','left_padding'}), ('use_cache', set()), ('position_ids', set())])
def test_an_argument_of_another_spelling_is_not_measured(name, missing):
    model = renamed(**{cache_name() if name=='cache' else name: 'other'})
    found = examine(model)
    assert {question for question,outcome in found.outcomes.items() if outcome.status=='not measured'}==missing, found
    assert found.status==(3 if missing else 0) and not found.broken, found
    assert ('no promise is broken' in str(found))==(not missing)
    if name=='position_ids': assert found.outcomes['packed'].why.startswith('its forward takes no position_ids')
    if name=='cache': assert examine(model, cache=without_configuration).status==3

def test_what_shows_without_position_ids_is_a_doubt_and_no_fault():
    "GPT-2 counts places from the left, unless it is told where a text begins."
    transformers = pytest.importorskip('transformers')
    import test_hf_common
    model = test_hf_common.build('gpt2')
    assert examine(model).ok
    usual = inspect.signature(transformers.GPT2LMHeadModel.forward)
    class Fewer(transformers.GPT2LMHeadModel):
        def forward(self, *args, **kwargs): return super().forward(*args, **kwargs)
    kept = [p for name,p in usual.parameters.items() if name!='position_ids']
    Fewer.forward.__signature__ = usual.replace(parameters=kept)
    other = Fewer(model.config).eval()
    other.load_state_dict(model.state_dict())
    found = examine(other)
    assert found.status==3 and found.outcomes['left_padding'].status=='not measured', found
    assert 'takes no position_ids' in found.outcomes['left_padding'].why

def test_a_decoder_that_does_not_say_how_it_looks_is_not_measured():
    "Neither is_causal nor is_decoder: nobody knows to which side its window goes."
    model = mistral()
    for module in model.modules():
        if hasattr(module, 'is_causal'): del module.is_causal
    found = examine(model)
    assert found.status==3 and found.outcomes['window'].status=='not measured', found
    assert 'says neither is_causal nor is_decoder' in str(found) and found.outcomes['future'].status=='kept', found

def test_a_layer_in_which_no_attention_is_seen_is_not_measured():
    "A kernel of somebody else's, which neither softmax nor PyTorch's attention goes through."
    class Kernel(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.q_proj,self.o_proj = own.q_proj,own.o_proj
            self.is_causal,self.layer_idx = True,own.layer_idx
        def forward(self, hidden_states, **kwargs): return self.o_proj(self.q_proj(hidden_states)),None
    model = mistral()
    model.model.layers[1].self_attn = Kernel(model.model.layers[1].self_attn)
    found = examine(model)
    assert found.status==3 and 'no attention was seen in model.layers.1.self_attn' in found.outcomes['window'].why, found
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen,self.strange_attention = Model(),type('StrangeAttention', (nn.Module,), dict(forward=lambda self, parts: parts[0]))()
        def forward(self, x): return self.strange_attention((self.seen.attend(x),))
    found = examine(Hidden(), sequence(9), window=(None, None))
    assert found.status==3 and 'no attention was seen in strange_attention' in found.outcomes['window'].why, found

def test_a_refusal_of_what_is_promised_is_not_measured():
    class Refuses(MeanOverPadding):
        def forward(self, x, attention_mask=None):
            if attention_mask is not None: raise ValueError('attention_mask: expected four axes')
            return super().forward(x)
    found = examine(Refuses(), sequence(9))
    assert found.status==3 and 'expected four axes' in found.outcomes['padding'].why, found
    class Without(MeanOverPadding):
        def forward(self, x, attention_mask=None):
            if attention_mask is not None: raise NotImplementedError('no padding here')
            return super().forward(x)
    found = examine(Without(), sequence(9))
    assert found.ok and found.outcomes['padding'].status=='not applicable' and 'no padding here' in str(found), found

def test_kinds_of_attention_that_no_promise_is_known_of_are_not_measured():
    pytest.importorskip('transformers')
    import test_hf_common
    found = examine(test_hf_common.build('llama4'))
    assert found.status==3 and 'chunked_attention, of which no promise is known' in found.outcomes['window'].why, found

# public, third round: hybrids passed with their recurrent layers left out of the table

HYBRIDS = 'lfm2','recurrent_gemma','qwen3_next','jamba','granitemoehybrid','falcon_h1','nemotron_h','mamba2'

def mixing_layers(model, n):
    "Layers of a decoder whose output at the last token changes with an input before it."
    from dynattn.probe import same_numbers
    subject, = Subject.parts(model, None)
    layers = [(name, module) for name,module in subject.model.named_modules() if re.search(r'layers\.\d+$', name)]
    calls = {}
    def keep(module, args, kwargs): calls[module] = args,kwargs
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for _,module in layers]
    found = []
    with torch.no_grad(), same_numbers():
        subject(subject.inputs(0, n))
        for hook in hooks: hook.remove()
        for name,module in layers:
            args,kwargs = calls[module]
            hidden = args[0] if args else kwargs['hidden_states']
            other = hidden.clone()
            other[:,-2] += torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0), dtype=hidden.dtype)
            def last(x):
                more = kwargs if args else kwargs | dict(hidden_states=x)
                out = module(*((x, *args[1:]) if args else ()), **more)
                return (out if isinstance(out, torch.Tensor) else out[0])[:,-1]
            if (last(other)-last(hidden)).abs().max()>1e-9: found.append(name)
    return found

@pytest.mark.parametrize('name', [*HYBRIDS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS[2:])])
def test_every_layer_that_mixes_tokens_is_in_the_table(name):
    pytest.importorskip('transformers')
    from architectures import build
    from versions import needs
    needs(name)
    model = build(name)
    subject, = Subject.parts(model, None)
    with torch.no_grad(): layers = find_layers(subject, 13)
    mixing = mixing_layers(model, 13)
    assert mixing and all(any(f'{layer.name}.'.startswith(f'{place}.') for layer in layers) for place in mixing), (mixing, layers)
    others = [layer for layer in layers if not layer.attends]
    assert others and all(layer.promised==[None] and layer.reach[0].left>0 for layer in others), others

class Recurrent(nn.Module):
    "Attention with a window beside a recurrence, which has a layer of the cache and no window."
    def __init__(self, causal=True):
        super().__init__()
        self.attend,self.recur = OwnAttention(),Recurrence(causal)
    def forward(self, x): return self.recur(self.attend(x))

class Recurrence(nn.Module):
    layer_idx = 0
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
    def forward(self, x): return x+(x.cumsum(1) if self.causal else x.flip(1).cumsum(1).flip(1))

def test_a_window_that_is_promised_for_all_holds_for_recurrences_too():
    free = examine(Recurrent(), sequence(13), causal=True)
    assert free.ok and [layer.attends for layer in free.layers]==[True, False], free
    assert re.search(r'recur +all +all back *\n', str(free)), free
    bound = examine(Recurrent(), sequence(13), causal=True, window=3)
    assert bound.status==1 and 'recur: a query sees all back; promised is 3 back' in str(bound), bound
    ahead = examine(Recurrent(causal=False), sequence(13), causal=True)
    assert ahead.status==1 and ahead.outcomes['future'].status=='broken', ahead

def test_a_recurrence_that_cannot_run_alone_is_in_the_table_and_named():
    class Dependent(Recurrence):
        within = False
        def forward(self, x):
            if not Dependent.within: raise RuntimeError('only within the model')
            return super().forward(x)
    class Whole(Recurrent):
        def forward(self, x):
            Dependent.within = True
            try: return super().forward(x)
            finally: Dependent.within = False
    model = Whole()
    model.recur = Dependent(causal=True)
    free = examine(model, sequence(13), causal=True)
    assert [layer.name for layer in free.layers if not layer.attends]==['recur'], free
    assert free.status==0 and 'recur: it could not be run alone' in str(free), free
    bound = examine(model, sequence(13), causal=True, window=3)
    assert bound.status!=0 and 'recur: it could not be run alone' in str(bound), bound

class WithinAttention(nn.Module):
    "It cannot be run alone."
    whole = None
    def forward(self, x):
        if not self.whole.runs: raise KeyError('only within the model')
        return x.cumsum(1)

class Within(nn.Module):
    runs = False
    def __init__(self):
        super().__init__()
        self.first,self.other = WithinAttention(),WithinAttention()
        for attention in (self.first, self.other): object.__setattr__(attention, 'whole', self)
    def forward(self, x):
        self.runs = True
        try: return x+self.other(self.first(x))
        finally: self.runs = False

def test_an_attention_that_cannot_be_run_alone_is_in_the_table_as_unknown():
    free = examine(Within(), sequence(13), causal=True)
    assert [(layer.name, layer.known) for layer in free.layers]==[('first', False), ('other', False)], free
    assert [row[2] for row in free.table()]==['unknown', 'unknown'], free
    assert free.status==3 and free.outcomes['future'].status=='kept', free
    bound = examine(Within(), sequence(13), causal=True, window=3)
    of_length = bound.outcomes['length']
    assert of_length.status=='not measured' and 'first and 1 more nothing is known' in of_length.why, bound
    measured = bound.plot()[0].images[0].get_array()
    assert measured.mask.all() or all(math.isnan(x) for x in measured.flatten()), measured

def test_a_module_with_a_layer_of_the_cache_that_mixes_nothing_is_no_layer():
    model = Recurrent()
    model.recur = nn.Linear(16, 16)
    model.recur.layer_idx = 0
    assert [layer.name for layer in examine(model, sequence(13)).layers if not layer.attends]==[]

# public, third round: fifty architectures whose inputs have no known shape ended in a raw AttributeError

UNKNOWN = dict(parakeet_encoder='says max_source_positions', wav2vec2_bert='says num_mel_bins',
               siglip2_vision_model='says image_size', fsmt='an encoder that is a model of transformers',
               canine='one table of input embeddings', ibert='one table of input embeddings')

@pytest.mark.parametrize('name', UNKNOWN)
def test_a_model_whose_inputs_have_no_known_shape_is_refused_by_name(name):
    transformers = pytest.importorskip('transformers')
    from architectures import configuration
    from versions import needs
    name,said = name.replace('_bert', '-bert'),UNKNOWN[name]
    needs(name)
    model = transformers.AutoModel.from_config(configuration(name))
    with pytest.raises(TypeError, match=f'^model: expected .*{said}'): examine(model)

def test_a_picture_has_three_channels_where_a_configuration_does_not_say():
    transformers = pytest.importorskip('transformers')
    config = transformers.Blip2VisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                            image_size=12, patch_size=4)
    model = transformers.Blip2VisionModel(config)
    subject, = Subject.parts(model, None)
    assert subject.shape==[1, 3, 12, 12]
    with torch.no_grad(): layers = find_layers(subject, 10)
    assert len(layers)==2 and all(reach.regular and reach.left==9 for layer in layers for reach in layer.reach), layers

# public, third round: windows that a configuration names in words of its own were called broken promises

@pytest.mark.parametrize('name', ['gpt_neo','longt5'])
def test_windows_in_words_of_their_own_are_read(name):
    transformers = pytest.importorskip('transformers')
    if name=='gpt_neo':
        config = transformers.GPTNeoConfig(vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48, window_size=5,
                                           attention_types=[[['global','local'],1]], max_position_embeddings=64)
        model,expected = transformers.GPTNeoModel(config),[(None, 0), (4, 0)]
    else:
        config = transformers.LongT5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, local_radius=5)
        model,expected = transformers.LongT5EncoderModel(config),[(5, 5)]*2
    found = examine(model, n=17)
    assert [layer.promised[0][:2] for layer in found.layers]==expected and not found.broken, found
    # now the promise, or what is seen, is another
    if name=='gpt_neo': model.h[1].attn.attention.bias.copy_(torch.ones(64, 64).tril().bool())
    else: model.encoder.block[1].layer[0].LocalSelfAttention.local_radius = 3
    assert any(f.check=='window' for f in examine(model, n=17).broken)

def test_a_model_whose_forward_takes_no_embeddings_is_refused():
    with pytest.raises(TypeError, match='model: expected a forward that takes inputs_embeds'): examine(renamed(inputs_embeds='other'))

def test_what_nobody_answered_is_not_measured():
    from dynattn.audit.report import EVERY, Examination, Outcome
    nothing = Examination('model', 9, [], {}, {}, [], [])
    assert nothing.status==3 and set(nothing.outcomes)==set(EVERY) and 'no promise is broken' not in str(nothing)
    for missing in EVERY: # each alone
        told = {question: Outcome('kept') for question in EVERY if question!=missing}
        found = Examination('model', 9, [], {}, {}, [], [], told)
        assert found.status==3 and found.outcomes[missing].status=='not measured' and 'no promise is broken' not in str(found)
    assert Examination('model', 9, [], {}, {}, [], [], {question: Outcome('kept') for question in EVERY}).ok

def test_every_question_of_every_model_has_an_outcome():
    for model,example in ((mistral(), None), (window_one_too_wide, heads()), (Model_of_ids(), ids(9))):
        found = examine(model, example)
        assert all(outcome.status!='not measured' for outcome in found.outcomes.values()), found
        assert all(outcome.why for outcome in found.outcomes.values() if outcome.status=='not applicable')
        assert set(found.to_json()['outcomes'])==set(found.outcomes) and json.dumps(found.to_json())

class Model_of_ids(Model):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)
    def forward(self, x): return self.attend(self.table(x))

def test_a_model_that_raises_anything_is_not_measured():
    class Odd(Exception): pass
    class Fails(MeanOverPadding):
        def forward(self, x, attention_mask=None):
            if attention_mask is not None: raise Odd('another day')
            return super().forward(x)
    found = examine(Fails(), sequence(9))
    assert found.outcomes['padding'].status=='not measured' and found.status==3 and 'another day' in str(found)
    assert found.outcomes['repeated'].status=='kept'  # the other questions were asked all the same

# practitioner 10: a row "sees all back, promised 34 back" above "no promise is broken"

def test_the_table_says_which_windows_a_length_can_test():
    from dynattn.hf.narrowing import set_widths
    model = windowed('llama', init=5., n_global=4, edge='hard')
    set_widths(model, [[3, 12, 34, 35], [20, 36, 47, 60]])
    found = examine(model, longest=64)
    said = str(found)
    assert re.search(r'all back +34 back +shows from 40 tokens on', said) and re.search('60 back +wider than any text', said), said
    assert '37 tokens are too few to show 4 windows, of which only the last query was tested; --n 53 shows them whole' in said
    assert 'no text shows 1 window, for the model reads 64 tokens at most' in said and found.ok
    longer = str(examine(model, n=53, longest=64))
    assert 'too few' not in longer and 'shows from' not in longer, longer

def test_windows_that_no_length_shows_are_not_said_to_be_kept():
    wide = examine(windowed('llama'))          # the default: eight times as wide as the longest text
    assert wide.ok and wide.outcomes['length'].status=='not applicable' and 'reads' in wide.outcomes['length'].why
    hidden = examine(OwnAttention(), sequence(13), causal=True, window=40)
    assert hidden.status!=0 and 'no promise is broken' not in str(hidden), hidden

def test_the_longest_text_is_that_of_the_part_that_reads_it():
    "public C: of a model in parts the outer configuration has no length, and a million was taken."
    transformers = pytest.importorskip('transformers')
    from types import SimpleNamespace
    from dynattn.audit.report import _most_tokens
    llava = transformers.LlavaConfig(text_config=dict(model_type='llama', max_position_embeddings=64))
    # Whisper hears 1,500 frames and writes 64 tokens
    configs = llava,transformers.GPT2Config(n_positions=64),transformers.WhisperConfig(max_target_positions=64),transformers.T5Config()
    found = [_most_tokens(SimpleNamespace(model=SimpleNamespace(config=config))) for config in configs]
    assert found==[64, 64, 1500, math.inf] and _most_tokens(SimpleNamespace(model=window_one_too_wide))==math.inf

# ---- damaged folders of `dynattn export` (hostile 8: 63 of 112 ended in a traceback)

def damaged(folder, draws): # -> {what was done: (file, its bytes)}
    "Missing and wrong values, huge numbers, files cut off and with changed bits."
    from random import Random
    text,graph = ((folder/name).read_bytes() for name in ('onnx_model.json','model.onnx'))
    whole,random,cases = json.loads(text),Random(0),{}
    def note(name, change):
        found = json.loads(text)
        change(found)
        cases[f'json {name}'] = 'onnx_model.json',json.dumps(found).encode()
    odd = [None, True, -1, 0, 3.5, 10**6, 2**64, 10**30, math.nan, 'x', [], {}, [1], [None]]
    for values,place in ((whole, lambda found: found), (whole['caches'][-1], lambda found: found['caches'][-1])):
        for name in values:
            note(f'without {name}', lambda found: place(found).pop(name))
            for value in odd[::1 if draws>40 else 3]: note(f'{name}={value!r}', lambda found: place(found).update({name: value}))
    note('a cache less', lambda found: found['caches'].pop())
    note('a cache twice', lambda found: found['caches'].append(found['caches'][0]))
    for other in (b'', b'[]', b'null', b'{', b'['*100_000, b'\xff\xfe', b'{"format":'+b'9'*5000+b'}'):
        cases[f'json {other[:9]}'] = 'onnx_model.json',other
    for name,data in (('onnx_model.json', text), ('model.onnx', graph)):
        for i in range(draws):
            bits = bytearray(data)
            for _ in range(random.choice((1, 1, 20))): bits[random.randrange(len(bits))] ^= 1<<random.randrange(8)
            cases[f'{name} changed {i}'] = name,bytes(bits)
            cases[f'{name} cut {i}'] = name,data[:random.randrange(len(data))]
    return cases

DAMAGE = """
import contextlib, io, pickle, resource, sys, traceback
from pathlib import Path
# a damaged size may ask for any memory: it is refused here, and no other program is killed for it
resource.setrlimit(resource.RLIMIT_AS, (12*2**30, 12*2**30))
from dynattn.command import main
from dynattn.export import OnnxModel
folder = Path(sys.argv[1])
for name,(file,data) in pickle.loads((folder/'cases').read_bytes()).items():
    usual = (folder/file).read_bytes()
    (folder/file).write_bytes(data)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try: status = main(['audit', str(folder), '--quiet'])
        except BaseException as e: status = f'raised {e!r}'
        try: OnnxModel(folder).feed([1, 2, 3])
        except ValueError as e: reads = str(e)
        except BaseException as e: reads = f'raised {e!r}'
        else: reads = ''
    (folder/file).write_bytes(usual)
    print(repr((name, status, err.getvalue(), reads)), flush=True)
print('end')
"""

def small_export(folder):
    pytest.importorskip('onnx'), pytest.importorskip('onnxruntime')
    from dynattn.export import export
    from dynattn.hf.narrowing import set_widths
    model = windowed('llama', n_global=2, edge='hard')
    set_widths(model, [[3, 3, 9, 9], [5, 5, math.inf, math.inf]])
    return export(model, folder, piece=8)

@pytest.mark.parametrize('draws', [15, pytest.param(200, marks=pytest.mark.slow)])
def test_a_damaged_folder_is_refused_in_one_line(tmp_path, draws):
    cases = damaged(small_export(tmp_path), draws)
    (tmp_path/'cases').write_bytes(pickle.dumps(cases))
    run = subprocess.run([sys.executable, '-c', DAMAGE, str(tmp_path)], capture_output=True, text=True)
    lines = run.stdout.splitlines()
    assert run.returncode==0 and lines[-1:]==['end'] and len(lines)==len(cases)+1, (lines[-1:], run.stderr[-500:])
    refused = 0
    for name,status,err,reads in map(ast.literal_eval, lines[:-1]):
        assert status in (0, 1, 2, 3) and 'Traceback' not in err and not reads.startswith('raised'), (name, status, err, reads)
        if status==2:
            assert len(err.splitlines())==1 and re.search('onnx_model.json|model.onnx', err), (name, err)
            refused += 1
    assert refused>len(cases)/2

def test_a_folder_whose_numbers_differ_from_its_graph_is_refused(tmp_path):
    from dynattn.export import OnnxModel
    path = small_export(tmp_path)/'onnx_model.json'
    whole = json.loads(path.read_text())
    for name,value in (('heads', 3), ('slots', 2**20), ('dim', 8)):
        other = json.loads(json.dumps(whole))
        for entry in other['caches'][:2]: entry[name] = value
        path.write_text(json.dumps(other))
        with pytest.raises(ValueError, match='damaged model.onnx: keys.0.3: expected .*, as onnx_model.json says'): OnnxModel(tmp_path)

@pytest.mark.parametrize('option', ['--window=0', '--longest=0', '--causal', '--code'])
def test_an_option_that_an_exported_folder_does_not_read_is_refused(tmp_path, capsys, option):
    "A promise of 0 tokens was no promise: every window was said to be read as promised."
    assert main(['audit', str(small_export(tmp_path)), '--quiet', option])==2
    assert f"{option.partition('=')[0]}: expected none for an exported graph" in capsys.readouterr().err

@pytest.mark.parametrize('file', ['onnx_model.json','model.onnx','model.onnx.data'])
def test_a_folder_that_lacks_a_file_is_refused_in_one_line(tmp_path, capsys, file):
    (small_export(tmp_path)/file).unlink()
    capsys.readouterr()
    assert main(['audit', str(tmp_path), '--quiet'])==2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('dynattn: '), line

# ---- the name of the cache

def test_generate_with_windows_takes_a_cache_under_every_name_that_transformers_knows():
    "practitioner 2: a warning at every call, and a user's own cache was said to be given twice."
    from dynattn import hf
    from dynattn.configs import generate_cache_argument
    model,prompt = windowed('llama', init=5., edge='hard'),ids(9)%99
    def write(**options):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter('always')
            return model.generate(prompt, max_new_tokens=6, do_sample=False, **options),[str(w.message) for w in said]
    usual,said = write()
    assert not any('past_key_values' in text for text in said), said
    name = generate_cache_argument(model)
    for word in {name, 'past_key_values'}:
        own = hf.WindowedCache(model)
        given,said = write(**{word: own})
        assert torch.equal(given, usual) and own.get_seq_length()>9 and not any('Both' in text for text in said), said
        assert word!=name or not any('past_key_values' in text for text in said), said

@pytest.mark.parametrize('name', ['mistral','gpt2','t5','whisper'])
def test_an_audit_warns_of_nothing(name):
    pytest.importorskip('transformers')
    import test_hf_common
    model = test_hf_common.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter('error', FutureWarning)
        warnings.simplefilter('error', DeprecationWarning)
        found = examine(model)
    assert found.ok and found.outcomes['cached'].status=='kept', found

# ---- the command

def write_models(folder):
    (folder/'models.py').write_text("""
import torch, torch.nn.functional as F

def causal(q, k, v): return F.scaled_dot_product_attention(q, k, v, is_causal=True)
def everything(q, k, v): return F.scaled_dot_product_attention(q, k, v)
def example(): return tuple(torch.randn(1, 2, 9, 4) for _ in range(3))
def sound(): return causal, example(), dict(causal=True)
def broken(): return everything, example(), dict(causal=True)
def unsaid(): return everything, example()
def alone(): return torch.nn.Linear(3, 3)
def pooled(): return (lambda x: x.mean(1)), torch.randn(1, 9, 4)
""")
    return folder/'models.py'

def test_the_command_and_its_exit_status(tmp_path, capsys):
    path = write_models(tmp_path)
    assert main(['audit', f'{path}:sound', '--quiet'])==0
    assert 'no promise is broken' in capsys.readouterr().out
    assert main(['audit', f'{path}:broken', '--quiet', '--json', '--png', str(tmp_path/'heads.png')])==1
    told = json.loads(capsys.readouterr().out)
    assert not told['ok'] and told['answers']['future']==dict(answer='yes', promised=True)
    assert (tmp_path/'heads.png').read_bytes().startswith(b'\x89PNG')
    assert main(['audit', f'{path}:unsaid', '--quiet'])==0
    assert main(['audit', f'{path}:unsaid', '--quiet', '--causal'])==1
    assert main(['audit', f'{path}:unsaid', '--quiet', '--window', '2,0'])==1
    assert 'promised is 2 back.' in capsys.readouterr().out
    assert main(['audit', f'{path}:pooled', '--quiet'])==3
    assert 'not measured' in capsys.readouterr().out

def printed(capsys, *argv):
    "The programs that `--code` prints, in another process and folder, each with nothing but its own names; what each says."
    assert main(['audit', *map(str, argv), '--code'])==1
    programs = ['# '+p for p in capsys.readouterr().out.split('\n# ')[1:]]
    run = f"for p in {programs!r}: exec(p, dict(__name__='__main__')); print('end')"
    said = subprocess.run([sys.executable, '-c', run], capture_output=True, text=True, check=True, cwd='/').stdout.split('end\n')
    assert len(said)==len(programs)+1
    return said[:-1]

def test_every_printed_program_runs(tmp_path, capsys):
    path = write_models(tmp_path)
    said = printed(capsys, f'{path}:broken')
    assert len(said)==1 and all(float(line.split()[-1])>1e-9 for line in said), said

def test_the_program_about_a_folder_with_windows_runs(tmp_path, capsys):
    windowed('llama', init=5., edge='hard').save_pretrained(tmp_path)
    said = printed(capsys, tmp_path, '--window', '3,0', '--n', 16, '--longest', 16)
    assert said and all(float(line.split()[-1])>1e-9 for line in said), said

def test_progress_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('dynattn.runs.time.monotonic', iter(range(0, 10**6, 5)).__next__)
    main(['audit', f'{write_models(tmp_path)}:sound'])
    assert 'audit: ' in capsys.readouterr().err

def test_without_transformers_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'transformers', None)
    assert main(['audit', 'some/folder', '--quiet'])==2
    line, = capsys.readouterr().err.splitlines()
    assert "pip install 'dynattn[hf]'" in line

def test_names_of_strangers_are_escaped():
    kind = type('Evil\x1b[31m\n# heading', (Model,), dict(forward=lambda self, x: self.attention(x)))
    model = kind()
    model.add_module('attention', nn.Module())
    model.attention = type('Attention', (Model,), dict(forward=lambda self, x: self.attend(x)))()
    model._modules['evil\x1b[2J\n# title'] = model._modules.pop('attention')
    kind.attention = property(lambda self: self._modules['evil\x1b[2J\n# title'])
    found = str(examine(model, sequence(9), causal=True, window=1))
    assert '\x1b' not in found and '\n# ' not in found and r'evil\x1b' in found

@pytest.mark.parametrize('name,said', [
    ('none', 'model: expected a folder or a name, got'), ('none.py:f', 'model: expected a file'), ('models.py:f', 'model: expected a function of'),
    ('models.py:example', 'model: expected example to return a model'),
    ('models.py:alone', 'example: expected a tensor [B,N,...] or q, k and v with this model, got NoneType')])
def test_what_cannot_be_audited_is_one_line(tmp_path, capsys, name, said):
    write_models(tmp_path)
    assert main(['audit', str(tmp_path/name), '--quiet'])==2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('dynattn: ') and said in line

def test_a_folder_with_windows_needs_no_tokenizer(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)).eval()
    hf.add_windows(model, init=5., edge='hard')
    model.save_pretrained(tmp_path)
    assert main(['audit', str(tmp_path), '--quiet'])==0
    assert '5 back  5 back' in capsys.readouterr().out

# an installer's round: what the command does with a place, a length and a bar

@pytest.mark.parametrize('png', ['heads.jpg', 'no/such/folder/heads.png', '.'])
def test_a_picture_that_cannot_be_written_is_refused_before_the_audit(png, capsys):
    "The audit ran for minutes and its report was lost; a name that ends in .jpg got the bytes of a PNG."
    assert main(['audit', 'there-is-no-such-model', '--png', png])==2
    assert capsys.readouterr().err.startswith('dynattn: --png: expected a name that ends in .png')

@pytest.mark.parametrize('longest', [0, -5, 2.5, '64', True])
def test_a_length_that_is_none_is_refused(longest):
    "A text was no length, and the question was 'not asked'; a length below 1 counted as that of the example."
    with pytest.raises(ValueError, match='^longest: expected an int of 1 or more tokens, got'):
        examine(torch.nn.Identity(), torch.zeros(1, 5, 2), longest=longest)

def test_a_quiet_audit_has_no_bar_of_transformers(tmp_path, capsys):
    from transformers import BertConfig, BertModel
    from transformers.utils import logging
    sizes = dict(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertModel(BertConfig(**sizes, max_position_embeddings=16)).save_pretrained(tmp_path)
    logging.enable_progress_bar()
    capsys.readouterr()
    assert main(['audit', str(tmp_path), '--quiet', '--n', '4']) in (0, 3)
    assert 'Loading' not in capsys.readouterr().err
