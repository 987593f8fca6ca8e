"What practitioners stumbled over, and what a report found right: each test is named after its report."
import copy, inspect
import pytest, torch
from torch import nn
from dynattn import PaddingMask, Window, attention

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
    hf.narrow(narrowed, [dict(input_ids=IDS.repeat(1, 4))], .5, steps=1, places=4)
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
