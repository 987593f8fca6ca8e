"""Caches: `generate` with any of them gives what it gives without one, whatever autocast and the dtype of the model."""
import copy, os
from contextlib import nullcontext
from functools import cache
from unittest import mock
import pytest, torch
from torch.testing import assert_close
from dynattn import Window, dense_attention
from dynattn.cache import WindowedLayer
from dynattn.engine.native import core
from dynattn.configs import cache_argument
from test_hf_common import GROUPED, IDS, TEXT

os.environ['HF_HUB_OFFLINE'] = '1'
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2) # of all experts: the choice of one is no continuous function
ARCHITECTURES = dict(
    Llama=GROUPED, Mistral=dict(**GROUPED, sliding_window=9), Qwen2={k: x for k,x in GROUPED.items() if k!='head_dim'}, Qwen3=GROUPED,
    Gemma2=dict(**GROUPED, sliding_window=9, attn_logit_softcapping=.5), GptOss=dict(**GROUPED, **EXPERTS, sliding_window=9),
    GPT2=dict(**IDS, n_embd=16, n_layer=2, n_head=4, n_positions=64), GPTNeoX=TEXT, Phi=TEXT, Olmo=TEXT, Olmo2=TEXT, Granite=TEXT)
WAYS = dict(none=dict(use_cache=False), ours={}, dynamic=dict(cache_implementation='dynamic'), static=dict(cache_implementation='static'))
MODES = [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, None),
         (torch.bfloat16, torch.bfloat16), (torch.float64, None), (torch.float64, torch.bfloat16)] # model, autocast

@cache
def model_and_text(name):
    "A tiny random model of two layers with windows of 2 to 13 tokens, a batch with padding on the left, and what it is made to write."
    transformers = pytest.importorskip('transformers')
    from dynattn import hf
    torch.manual_seed(0)
    head = 'LMHeadModel' if name=='GPT2' else 'ForCausalLM'
    config = getattr(transformers, name+'Config')(**ARCHITECTURES[name], experts_implementation='eager') # which takes float64 too
    model = getattr(transformers, name+head)(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    ids,keep = torch.randint(3, 99, (2, 31)),torch.arange(31)>=torch.tensor([[0],[5]])
    plain = model(ids, attention_mask=keep.long()).logits
    hf.add_windows(model, init=[[3.,5.,2.,13.],[9.,2.,6.,4.]])
    with torch.no_grad(): cut = model(ids, attention_mask=keep.long(), use_cache=False).logits
    assert (cut-plain)[keep].abs().max()>.1*plain[keep].abs().max() # the windows cut something
    return model,ids,keep.long()

@cache
def logits(name, dtype, autocast, way):
    "[B,12,V] of each token that `generate` writes; which ones it writes is given, so that a tie changes nothing."
    model,ids,keep = model_and_text(name)
    def forced(seen, scores): return torch.zeros_like(scores).scatter(1, ids[:,seen.shape[1]:seen.shape[1]+1], 1.)
    with torch.autocast('cpu', autocast) if autocast else nullcontext():
        out = copy.deepcopy(model).to(dtype).generate(
            ids[:,:19], attention_mask=keep[:,:19], max_new_tokens=12, do_sample=False, eos_token_id=None,
            logits_processor=[forced], output_logits=True, return_dict_in_generate=True, **WAYS[way])
    assert torch.equal(out.sequences, ids)
    return torch.stack(out.logits, 1)

QUICK = [('Llama',True), ('Llama',False), ('Gemma2',True)] # with the core, or without it
CASES = [pytest.param(name, native, marks=() if (name,native) in QUICK else pytest.mark.slow) for name in ARCHITECTURES for native in (True,False)]

@pytest.mark.parametrize('dtype, autocast', MODES, ids=lambda x: str(x).removeprefix('torch.'))
@pytest.mark.parametrize('name, native', CASES)
def test_every_cache_gives_what_none_gives(name, native, dtype, autocast):
    "The error against float64 is at most three times that without a cache, and some roundings."
    with nullcontext() if native else mock.patch.object(core, 'library', lambda: None):
        exact,without = logits(name, torch.float64, None, 'none'),logits(name, dtype, autocast, 'none')
        allowed = 3*(without-exact).abs().max()+8*torch.finfo(autocast or dtype).eps*exact.abs().max()
        assert allowed<exact.abs().max()/4
        for way in WAYS:
            try: found = (logits if native else logits.__wrapped__)(name, dtype, autocast, way)
            except RuntimeError as e: # transformers' static cache takes keys and values of one dtype only
                assert way=='static' and autocast and 'dtype' in str(e)
                continue
            assert found.dtype==without.dtype and (found-exact).abs().max()<allowed, way

# ---- the cache that `generate` makes, in transformers 5.0 too, where it makes none and leaves it to `forward`

NEW = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True)

@pytest.fixture(params=['as it is', 'makes none'])
def generates(request, monkeypatch):
    "`generate` as the transformers that is installed has it, and as 5.0 has it: a cache that nobody named is made by `forward`."
    transformers = pytest.importorskip('transformers')
    usual = transformers.GenerationMixin._prepare_cache_for_generation
    def prepares(self, options, arguments, *args, **kwargs):
        named = options.cache_implementation is not None or any(arguments.get(name) is not None for name in ('cache', 'past_key_values'))
        return usual(self, options, arguments, *args, **kwargs) if named else None
    if request.param!='as it is': monkeypatch.setattr(transformers.GenerationMixin, '_prepare_cache_for_generation', prepares)

def taken(out): return type(out.get('cache', out.get('past_key_values'))).__name__

@pytest.mark.parametrize('name', ['Llama', 'Mistral', 'GPT2', pytest.param('Gemma2', marks=pytest.mark.slow)])
def test_generate_keeps_what_the_windows_reach(name, generates):
    "tests/test_audit.py of transformers 5.0: `generate` of a narrowed model kept every key."
    model,ids,keep = model_and_text(name)
    text = dict(inputs=ids, attention_mask=keep)
    want = model.generate(**text, **NEW, use_cache=False)
    assert taken(want)=='NoneType'
    expected = dict(WindowedCache={}, DynamicCache=dict(cache_implementation='dynamic'))
    if name!='GPT2': expected |= dict(StaticCache=dict(cache_implementation='static', disable_compile=True))
    for kind,options in expected.items():
        out = model.generate(**text, **NEW, **options)
        assert taken(out)==kind and torch.equal(out.sequences, want.sequences), kind
    beams = {**NEW, 'num_beams': 3}
    assert torch.equal(model.generate(**text, **beams).sequences, model.generate(**text, **beams, use_cache=False).sequences)
    assert taken(model.generate(**text, **NEW, output_attentions=True))!='WindowedCache'  # weights of keys that are gone

def test_generate_leaves_other_caches_alone(generates):
    from transformers import DynamicCache
    model,ids,_ = model_and_text('Llama')
    given = DynamicCache(config=model.config)
    out = model.generate(ids, **NEW, **{cache_argument(model): given})
    assert taken(out)=='DynamicCache' and given.get_seq_length()==ids.shape[1]+5
    class Own(type(model)):
        def _prepare_cache_for_generation(self, *args, **kwargs): pass
    own = copy.deepcopy(model)
    own.__class__ = Own                                              # a model that makes its cache in a way of its own
    from dynattn.hf.cache import hand_out
    hand_out(own)
    assert taken(own.generate(ids, **NEW))!='WindowedCache'

class _AsIn50(torch.nn.Module):
    "An attention layer of transformers 5.0, which takes the function from the registry by its key."
    def forward(self, query, key, value, past_key_values, ALL_ATTENTION_FUNCTIONS, eager):
        attend = eager
        if past_key_values is not None: key, value = past_key_values.update(key, value, 0)
        if self.config._attn_implementation!='eager': attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, query, key, value)

class _ReadsThem(_AsIn50):
    def forward(self, query, key, value, past_key_values, ALL_ATTENTION_FUNCTIONS):
        key, value = past_key_values.update(key, value, 0)
        attend = ALL_ATTENTION_FUNCTIONS['sdpa']
        key = key.repeat(1, 2, 1, 1)
        return attend(self, query, key, value)

class _OtherTable(_AsIn50):
    def forward(self, query, key, value, past_key_values, table):
        key, value = past_key_values.update(key, value, 0)
        attend = table['sdpa']
        return attend(self, query, key, value)

def test_how_a_layer_takes_its_function():
    pytest.importorskip('transformers')
    from transformers.models.llama.modeling_llama import LlamaAttention
    from dynattn.hf.cache import _hands_on
    assert [*map(_hands_on, (LlamaAttention, _AsIn50, _ReadsThem, _OtherTable))]==[True, True, False, False]

def test_a_file_of_another_dtype_is_refused(tmp_path):
    model,ids,_ = model_and_text('Llama')
    from dynattn.hf import WindowedCache
    kept = WindowedCache(model)
    with torch.no_grad(): model(ids[:,:19], **{cache_argument(model): kept})
    kept.save(tmp_path/'talk')
    half = copy.deepcopy(model).bfloat16()
    again = WindowedCache.load(tmp_path/'talk', half)
    with torch.no_grad(), pytest.raises(ValueError, match='k: expected .*float32.*got .*bfloat16'): half(ids[:,19:20], **{cache_argument(half): again})

def test_a_cache_from_a_file_is_one_like_any_other(tmp_path):
    "Before its first call, too: rows move, it can be written again, and tokens are not taken back without a word."
    model,ids,_ = model_and_text('Llama')
    from dynattn.hf import WindowedCache
    from dynattn.hf.cache import _KEEPS
    kept,order = WindowedCache(model),torch.tensor([1,0])
    with torch.no_grad(): model(ids[:,:19], **{cache_argument(model): kept})
    def goes_on(cache, rows):
        with torch.no_grad(): return model(ids[rows,19:21], **{cache_argument(model): cache}).logits
    for name,move,rows in (('again',lambda c: None,[0,1]), ('order',lambda c: c.reorder_cache(order),[1,0]),
                           ('some',lambda c: c.batch_select_indices(order[:1]),[1]), ('more',lambda c: c.batch_repeat_interleave(2),[0,0,1,1])):
        live = copy.deepcopy(kept)
        live.save(tmp_path/'talk')
        loaded = WindowedCache.load(tmp_path/'talk', model)
        move(live)
        move(loaded)
        loaded.save(tmp_path/name)
        expected = goes_on(live, rows)
        for cache in (loaded, WindowedCache.load(tmp_path/name, model)): assert torch.equal(goes_on(cache, rows), expected), name
    loaded = WindowedCache.load(tmp_path/'talk', model)
    loaded.crop(19 if _KEEPS else 0)                                 # takes back none: until transformers 5.0 it says what remains
    with pytest.raises(RuntimeError, match='cache: expected a call of the model'): loaded.crop(-1)
    for cache in (loaded, kept, WindowedCache(model)):
        with pytest.raises(ValueError, match='tokens_to_remove: expected 0 or less'): cache.crop('1')
        for wrong in ('1', 0):
            with pytest.raises(ValueError, match='repeats: expected an int'): cache.batch_repeat_interleave(wrong)

@pytest.fixture(params=[True, False], ids=['core','pieces'])
def by(request, monkeypatch):
    "With the core, and without it."
    if not request.param: monkeypatch.setattr(core, 'library', lambda: None)

def some(n, heads=4, batch=2, d=8, dtype=torch.float32, seed=0): return torch.randn(batch, heads, n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))

def prompted(n=9, heads=4, **options):
    layer = WindowedLayer(heads, **dict(window=3) | options)
    layer.attend(some(n), some(n), some(n))
    return layer

WRONG = dict( # the next token after a prompt of 9, on what the message begins with
    wide_q=(lambda x: (some(1, d=64), x, x), 'k: expected width'),
    wide_qk=(lambda x: (some(1, d=64), some(1, d=64), x), 'k: expected batch 2, width 8'),
    narrow_v=(lambda x: (x, x, x[...,:1]), 'v: expected batch 2, width 8'),
    half=(lambda x: (x.half(), x.half(), x.half()), 'k: expected .* torch.float32'),
    double=(lambda x: (x.double(), x.double(), x.double()), 'k: expected .* torch.float32'),
    mixed=(lambda x: (x, x, x.bfloat16()), 'v: expected torch.float32 as q'),
    heads=(lambda x: (x, x[:,:2], x[:,:2]), r'k: expected \[2,4,1,d\]'),
    batch=(lambda x: (x[:1], x[:1], x[:1]), 'k: expected batch 2'),
    tokens=(lambda x: (x, x.repeat(1, 1, 2, 1), x.repeat(1, 1, 2, 1)), r'k: expected \[2,4,1,d\]'),
    axes=(lambda x: (x[0], x[0], x[0]), 'q: expected'), no_tensor=(lambda x: (x, x, [1]), 'v: expected a Tensor'))

@pytest.mark.parametrize('case', WRONG)
def test_what_differs_from_what_is_kept_is_refused(case, by):
    "And changes nothing: the next token is as if it had never come."
    layer,x,(make,message) = prompted(),some(1, seed=1),WRONG[case]
    with pytest.raises((TypeError,ValueError), match=message): layer.attend(*make(x))
    assert torch.equal(layer.attend(x, x, x), prompted().attend(x, x, x))

def test_a_batch_of_nothing_is_served(by):
    layer = WindowedLayer(4, 2, window=3)
    for n in (5, 1): assert layer.attend(some(n, batch=0), some(n, 2, 0), some(n, 2, 0)).shape==(0, 4, n, 8)

@pytest.mark.parametrize('autocast', [torch.bfloat16, torch.float16])
def test_prompt_and_steps_return_one_dtype(autocast, by):
    "Under autocast, with q and k in float32 and v already cast, as rotary positions leave them; as without a cache."
    q,k,v = some(20, seed=1),some(20, seed=2),some(20, seed=3).to(autocast)
    layer = WindowedLayer(4, window=Window.default(torch.tensor([1.,3.,6.,9.])))
    with torch.autocast('cpu', autocast):
        out = [layer.attend(*(x[:,:,first:end] for x in (q, k, v))) for first,end in ((0,12), (12,13), (13,14), (14,20))]
    assert {x.dtype for x in out}=={autocast}
    q,k,v = (x.to(autocast).double() for x in (q, k, v))
    assert_close(torch.cat(out, 2).double(), dense_attention(q, k, v, window=layer.options['window'], is_causal=True), atol=.02, rtol=.02)

def test_float64_queries_compute_their_window_in_float64(by):
    "A sigma in float32 is widened, as by `attention`; an alpha, a sink and a soft cap beside it."
    q,k,v = (some(20, dtype=torch.float64, seed=i) for i in range(3))
    options = dict(window=Window.default(torch.tensor([.7,3.1,6.3,9.9])), alpha=torch.tensor([1.,1.3,1.5,2.]),
                   sink=torch.tensor([.1,.2,.3,.4]), softcap=3.3)
    for chosen in ({'window'}, {'window','sink','softcap'}, {'window','alpha'}):
        given = {name: x for name,x in options.items() if name in chosen}
        layer = WindowedLayer(4, **given)
        out = torch.cat([layer.attend(*(x[:,:,first:end] for x in (q, k, v))) for first,end in ((0,9), (9,10), (10,20))], 2)
        assert_close(out, dense_attention(q, k, v, is_causal=True, **given), atol=1e-11, rtol=0)

def test_a_first_token_and_more_leading_places(by):
    q,k,v = (some(9, dtype=torch.float64, seed=i) for i in range(3))
    layer = WindowedLayer(4, window=2, n_global=5)
    out = torch.cat([layer.attend(*(x[:,:,i:i+1] for x in (q, k, v))) for i in range(9)], 2)
    assert_close(out, dense_attention(q, k, v, is_causal=True, window=2, n_global=5), atol=1e-11, rtol=0)

@pytest.mark.parametrize('options, message', [
    (dict(window=(-2,0)), 'window: expected'), (dict(window=1.5), 'window: expected'), (dict(window=(8,)), 'window: expected'),
    (dict(window=(2,3,4)), 'window: expected'), (dict(window=[4,4,4,4]), 'window: expected'), (dict(window=True), 'window: expected'),
    (dict(window=Window.default(torch.ones(3))), 'window: expected'), (dict(heads='4'), 'heads: expected'), (dict(heads=0), 'heads: expected'),
    (dict(kv_heads=3), 'kv_heads: expected'), (dict(kv_heads=2.), 'kv_heads: expected'), (dict(n_global=-1), 'n_global: expected'),
    (dict(alpha=.5), 'alpha: expected'), (dict(alpha=torch.ones(3)), 'alpha: expected'), (dict(sink=torch.ones(3)), 'sink: expected'),
    (dict(softcap=0), 'softcap: expected'), (dict(scale='1'), 'scale: expected')], ids=str)
def test_options_are_checked_when_the_layer_is_made(options, message):
    with pytest.raises((TypeError,ValueError), match=message): WindowedLayer(**dict(heads=4) | options)

@pytest.mark.parametrize('use, message', [
    (lambda l, x: l.attend(x, x, x, [True]*3), 'keep: expected a bool Tensor'), (lambda l, x: l.attend(x, x, x, torch.ones(2, 10)), 'keep: expected'),
    (lambda l, x: l.select([0]), 'rows: expected'), (lambda l, x: l.select(torch.tensor([0,2])), 'rows: expected'),
    (lambda l, x: l.select(torch.tensor([True,False])), 'rows: expected'), (lambda l, x: l.crop('1'), 'tokens: expected'),
    (lambda l, x: l.crop(-1), 'tokens: expected'), (lambda l, x: l.crop(10), 'tokens: expected'), (lambda l, x: WindowedLayer(4).batch, 'batch: expected'),
    (lambda l, x: l.attend(x.requires_grad_(), x, x), 'q: expected tensors without a graph'),
    (lambda l, x: l.load_state(None, {}), 'numbers: expected the first'), (lambda l, x: l.load_state({}, {}), 'numbers: expected the first'),
    (lambda l, x: l.load_state(l.state()[0], None), 'tensors: expected the second'), (lambda l, x: l.load_state(l.state()[0], {}), 'tensors: expected the second'),
    (lambda l, x: l.load_state(l.state()[0], l.state()[1] | {'0.v': l.state()[1]['0.v'][:1]}), r"tensors\['0.v'\]: expected floating \[2, 4, 3, 'd'\]"),
    (lambda l, x: l.load_state(l.state()[0], l.state()[1] | {'0.v': l.state()[1]['0.v'].half()}), r"tensors\['0.v'\]: expected torch.float32")])
def test_wrong_uses_are_named(use, message):
    with pytest.raises((TypeError,ValueError,RuntimeError), match=message): use(prompted(), some(1))

def test_a_state_is_a_copy_that_fits_its_layer(by):
    "A layer that continues from it, or goes back, does not change it; one with other leading tokens does not take it."
    x,y = some(1, seed=1),some(1, seed=2)
    layer,(usual,other) = prompted(),(WindowedLayer(4, window=3) for _ in range(2))
    layer.attend(x, x, x)
    state = layer.state()
    usual.load_state(*state)
    expected = usual.attend(y, y, y)
    for one in (layer, other):
        if one is other: one.load_state(*state)
        one.crop(1)
        one.attend(y, y, y)
    again = WindowedLayer(4, window=3)
    again.load_state(*state)
    assert torch.equal(again.attend(y, y, y), expected)
    for options in (dict(n_global=2), dict(kv_heads=2), dict(alpha=1.5), dict(window=Window.default(3.)), dict(sink=torch.zeros(4))):
        with pytest.raises(ValueError, match=rf"numbers\['({'|'.join(options)})'\]: expected .* as in this layer"): WindowedLayer(4, **dict(window=3) | options).load_state(*state)
    empty = WindowedLayer(4, window=3)
    again.load_state(*empty.state())
    assert torch.equal(again.attend(y, y, y), empty.attend(y, y, y))

def test_a_cache_of_another_kind_is_refused():
    from dynattn import MultiheadAttention
    layer,x = MultiheadAttention(8, 2, batch_first=True, window=3),torch.randn(1, 4, 8)
    with pytest.raises(TypeError, match='cache: expected one from new_cache, got dict'):
        layer(x, x, x, is_causal=True, need_weights=False, cache={})

def test_a_call_that_fails_may_be_repeated(by, monkeypatch):
    "The tokens of a call that was interrupted come again, a prompt or one more token."
    x,place = some(1, seed=1),'_by_pieces' if core.library() is None else '_addresses'
    for first,name in ((True,'_prompt'), (False,place)):
        layer = WindowedLayer(4, window=3) if first else prompted()
        with monkeypatch.context() as m:
            m.setattr(f'dynattn.cache.{name}', mock.Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt): layer.attend(*[some(9)]*3) if first else layer.attend(x, x, x)
        if first: layer.attend(*[some(9)]*3)
        assert torch.equal(layer.attend(x, x, x), prompted().attend(x, x, x))

def test_a_step_that_fails_drops_no_keys(by, monkeypatch):
    "The one before it can still be taken back, though the buffer was full and the keys had moved."
    x,y = some(1, seed=1),some(1, seed=2)
    place = '_by_pieces' if core.library() is None else '_addresses'
    for steps in range(1, 20):
        layer,other = prompted(),prompted()
        for _ in range(steps): layer.attend(x, x, x)
        for _ in range(steps-1): other.attend(x, x, x)
        numbers,_ = layer.state()
        with monkeypatch.context() as m:
            m.setattr(f'dynattn.cache.{place}', mock.Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError): layer.attend(x, x, x)
        assert layer.state()[0]==numbers
        layer.undo()
        assert torch.equal(layer.attend(y, y, y), other.attend(y, y, y))

def test_a_call_that_fails_as_it_drops_keys_takes_no_tokens(by, monkeypatch):
    "There is no memory for the shorter buffers: the call may be repeated."
    x,layer = some(5, seed=1),prompted()
    with monkeypatch.context() as m:
        m.setattr('dynattn.cache._trim', mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError): layer.attend(x, x, x)
    assert layer.seen==9 and torch.equal(layer.attend(x, x, x), prompted().attend(x, x, x))

def test_a_cache_of_inference_mode_goes_on_outside(by):
    "A prompt, an order of the rows or a step under one mode, the next tokens under another, and back."
    rows,modes = torch.tensor([1,0]),(torch.inference_mode,torch.no_grad,torch.enable_grad)
    for first in modes:
        for n_global in (0, 2):
            layer,other = (WindowedLayer(4, window=3, n_global=n_global) for _ in range(2))
            for i in range(24):
                x = some(9 if i==0 else 1, seed=i)
                if i==12:
                    with first(): layer.select(rows)
                    other.select(rows)
                with (first if i==0 else modes[i//3%3])(): out = layer.attend(x, x, x)
                assert torch.equal(out, other.attend(x, x, x))

@pytest.mark.skipif(core.library() is None, reason='no compiled core')
def test_keys_of_another_dtype_at_the_same_place_have_addresses_of_their_own():
    "Memory that was freed is taken anew: by narrower numbers, whose heads lie nearer to each other."
    memory = torch.zeros(2, 4096)
    layer = WindowedLayer(4, window=3)
    for dtype in (torch.float32, torch.bfloat16):
        layer.reset()
        first,next_ = some(9, dtype=dtype),some(1, dtype=dtype, seed=1)
        layer.attend(first, first, first)
        group, = layer.groups
        for name,rows in zip('kv', memory.view(dtype)):
            x = getattr(group, name)
            place = rows[:x.numel()].view(x.shape)
            setattr(group, name, place.copy_(x))
        found = layer.attend(next_, next_, next_)
        both = torch.cat([first, next_], 2).double()
        expected = dense_attention(both, both, both, is_causal=True, window=3)[:,:,-1:]
        assert_close(found.double(), expected, atol=.02, rtol=0)

def test_a_call_of_no_tokens_changes_nothing(by):
    "With leading tokens of rows that are padded on the left, too."
    keep,none,x = torch.arange(9)>=torch.tensor([[0],[4]]),some(0),some(1, seed=1)
    for n_global in (0, 3):
        found = []
        for calls in (1, 2):
            layer = WindowedLayer(4, window=3, n_global=n_global)
            layer.attend(some(9), some(9), some(9), keep)
            for _ in range(calls-1): assert layer.attend(none, none, none, keep).shape==(2, 4, 0, 8)
            found.append(layer.attend(x, x, x, torch.cat([keep, torch.ones(2, 1, dtype=torch.bool)], 1)))
        assert layer.seen==10 and torch.equal(*found)

@pytest.mark.parametrize('options', [dict(window=5), dict(window=5, n_global=2), dict()], ids=str)
def test_a_compiled_program_breaks_at_a_layer(options):
    "Its graphs have none of what the layer does, whose sizes change with every token; the results are the eager ones."
    sizes = []
    def counting(graph, inputs):
        sizes.append(sum(node.op.startswith('call') for node in graph.graph.nodes))
        return graph.forward
    layer,other = WindowedLayer(4, **options),WindowedLayer(4, **options)
    torch.compiler.reset()
    step = torch.compile(lambda x: layer.attend(x, x, x)*2, backend=counting)
    for i in range(20):
        x = some(9 if i==0 else 1, seed=i)
        assert torch.equal(step(x), other.attend(x, x, x)*2)
    if hasattr(torch._C._dynamo.eval_frame, 'set_code_exec_strategy'): # as `modes.uncompiled` has it
        assert sizes and max(sizes)==1
    whole = torch.compile(lambda x: layer.attend(x, x, x), backend='eager', fullgraph=True)
    with pytest.raises(Exception, match='attend'): whole(some(1))
    assert layer.seen==other.seen
