"""What a function changes on a model for a while it puts back exactly, also after an error or Ctrl-C; what changes a model for good does
all of it or nothing. And numbers, direction and keys are read from the part that attends."""
import copy, json
import pytest, torch
import transformers as T
from torch import nn
from torch.testing import assert_close
from dynattn import convert, hf, saved
from dynattn.audit import examine
from dynattn.hf.layers import attention_layers, frozen, looks_back, said_causal
from dynattn.hf.narrowing import Reference, set_widths, token_losses, without_windows
from dynattn.configs import most_tokens, part_config
from dynattn.narrow.judge import quality

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
IDS = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(0))
TEXTS = [dict(input_ids=IDS.roll(i)[None]) for i in range(4)]


class Fuse(nn.Module):
    "An activation that raises an error at its n-th call."
    def __init__(self):
        super().__init__()
        self.left = [10**9, RuntimeError]

    def forward(self, x):
        self.left[0] -= 1
        if self.left[0] < 0: raise self.left[1]('blown')
        return nn.functional.silu(x)


def llama(windows=False):
    "In the middle of training: some parts in eval mode, some parameters that do not learn, a buffer and hooks of the user's own."
    torch.manual_seed(0)
    model = T.LlamaForCausalLM(T.LlamaConfig(**SIZES, attn_implementation='sdpa'))
    if windows: hf.add_windows(model, init=8., edge='hard')
    fuse = Fuse()
    for layer in model.model.layers: layer.mlp.act_fn = fuse
    model.train()
    model.model.layers[0].eval()
    model.get_input_embeddings().eval()
    model.model.norm.weight.requires_grad_(False)
    model.register_buffer('own', torch.zeros(2))
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def fingerprint(model):
    "All that a user could find changed."
    own = {name: (type(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
           for name, m in model.named_modules()}
    learns = {name: (p.requires_grad, p.dtype, p.device, id(p), p.grad is None) for name, p in model.named_parameters()}
    state = {name: x.clone() for name, x in model.state_dict().items()}
    configs = {name: (m.config._attn_implementation, json.dumps(m.config.to_dict(), default=str, sort_keys=True))
               for name, m in model.named_modules() if 'config' in vars(m)}
    return own, learns, configs, json.dumps(model.generation_config.to_dict(), default=str), state


def assert_unchanged(before, model):
    after = fingerprint(model)
    for a, b in zip(before[:-1], after[:-1]): assert a == b
    assert before[-1].keys() == after[-1].keys()
    for name, x in before[-1].items(): assert torch.equal(x, after[-1][name]), name


def judged(model):
    "The judges of a model that was narrowed."
    found = hf.narrowing.Narrowed([[8., 8.], [8., 8.]], hf.curves.Budget(24, 0, True), 0., True, None, None)
    quality(model, found, TEXTS[:1], (.5,))

LOOKS = dict(look=lambda m: hf.look(m, IDS), cost_curves=lambda m: hf.cost_curves(m, TEXTS[:2]), examine=lambda m: examine(m))
LOOKS_AT_WINDOWS = dict(look=LOOKS['look'], report=lambda m: hf.report(m, TEXTS[0]), reference=lambda m: Reference(m, TEXTS[:2]).changes(),
                        quality=judged, token_losses=lambda m: token_losses(m, IDS[None]),
                        frozen=lambda m: _inside(frozen, m), without_windows=lambda m: _inside(without_windows, m))

def _inside(context, model):
    with context(model): model(IDS[None])

ALL = [pytest.param(name, windows, act, marks=[pytest.mark.slow]*(name == 'examine'), id=name+' with windows'*windows)
       for windows, acts in ((False, LOOKS), (True, LOOKS_AT_WINDOWS)) for name, act in acts.items()]

@pytest.mark.parametrize('name, windows, act', ALL)
def test_lightning_18930_a_look_leaves_the_model_as_it_was(name, windows, act):
    model = llama(windows)
    before = fingerprint(model)
    act(model)
    assert_unchanged(before, model)


@pytest.mark.parametrize('kind', [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize('name, windows, act', [case for case in ALL if not case.marks])
def test_so_does_a_look_that_fails(name, windows, act, kind):
    for calls in (0, 1, 3):
        model = llama(windows)
        before = fingerprint(model)
        fuse = model.model.layers[0].mlp.act_fn
        fuse.left[:] = [calls, kind]
        try: act(model)
        except kind: pass
        fuse.left[:] = [10**9, kind]
        assert_unchanged(before, model)


def test_a_run_that_fails_leaves_no_windows():
    def narrowed(most):
        "The calls of a run, or of its start up to so many, after which it fails."
        model,seen = llama(),[]
        def count(*_):
            seen.append(len(seen))
            if len(seen)>most: raise RuntimeError('blown')
        counted = model.model.layers[0].mlp.act_fn.register_forward_hook(count)
        before = fingerprint(model)
        try: hf.narrow(model, TEXTS, keep=.5, held_out=TEXTS[:1])
        except RuntimeError as e:
            assert 'blown' in str(e)
            assert_unchanged(before, model)
        counted.remove()
        return len(seen)
    whole = narrowed(10**9)
    assert whole>12                                      # curves, healing, and what is held out
    for most in (0, 3, whole//2, whole-1): assert narrowed(most)==most+1
    model = llama()
    hf.narrow(model, TEXTS, keep=.5)
    assert [m.training for m in model.model.layers] == [False, True] and not model.model.norm.weight.requires_grad
    assert model.config.dynattn['windows']['edge'] == 'hard'


REFUSED = [lambda m: hf.add_windows(m, unit='words'), lambda m: hf.add_windows(m, penalty=-1.), lambda m: hf.add_windows(m, init=[1.]*3),
           lambda m: hf.add_windows(m, per='input'), lambda m: hf.add_alpha(m, init=3.), lambda m: hf.add_windows(m, n_global=-1)]

@pytest.mark.parametrize('act', REFUSED, ids=map(str, range(len(REFUSED))))
def test_what_is_refused_changes_nothing(act):
    model = llama()
    before = fingerprint(model)
    with pytest.raises(ValueError): act(model)
    assert_unchanged(before, model)


def test_widths_that_do_not_fit_change_nothing():
    model = llama(windows=True)
    before = fingerprint(model)
    with pytest.raises(ValueError, match='widths: expected a divisor'): set_widths(model, [[1., 2.], [1., 2., 3.]])
    assert_unchanged(before, model)


def test_convert_is_all_or_nothing(monkeypatch):
    from dynattn import modules
    model = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3)])
    before = [(name, type(m), sorted(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()]
    equip, left = modules._equip, [2]
    def interrupted(*args, **kwargs):
        left[0] -= 1
        equip(*args, **kwargs)
        if not left[0]: raise KeyboardInterrupt
    monkeypatch.setattr(modules, '_equip', interrupted)
    with pytest.raises(KeyboardInterrupt): convert(model, window='learned')
    assert [(name, type(m), sorted(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()] == before


@pytest.mark.parametrize('again', [False, True], ids=['once', 'Ctrl-C while it is put back'])
def test_everything_that_a_block_may_change(again, monkeypatch):
    model = llama()
    before = fingerprint(model)
    restore, left = saved.ModelState._restore, [again]
    def interrupted(self):
        if left[0]:
            left[0] = False
            raise KeyboardInterrupt
        restore(self)
    monkeypatch.setattr(saved.ModelState, '_restore', interrupted)
    with pytest.raises(KeyboardInterrupt if again else RuntimeError):
        with saved.as_it_was(model):
            hf.add_windows(model, init=4., penalty=.1)
            hf.add_alpha(model)
            model.model.layers[0].self_attn.q_proj = nn.Linear(32, 32)
            model.register_buffer('more', torch.ones(1))
            model.own.add_(1.)
            model.config.use_cache = False
            model.generation_config.max_length = 7
            model.eval().requires_grad_(False)
            raise RuntimeError
    assert_unchanged(before, model)


# --- which configuration

TEXT = dict(SIZES, max_position_embeddings=32768, num_hidden_layers=1)
VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)

def llava():
    return T.LlavaForConditionalGeneration(T.LlavaConfig(text_config=T.LlamaConfig(**TEXT), image_token_index=96, vision_feature_layer=-1,
                                                         vision_config=T.CLIPVisionConfig(**VISION, projection_dim=16)))

def gemma3():
    text = T.Gemma3TextConfig(**TEXT, head_dim=8, layer_types=['full_attention'])
    return T.Gemma3ForConditionalGeneration(T.Gemma3Config(text_config=text, vision_config=T.SiglipVisionConfig(**VISION), mm_tokens_per_image=4,
                                                           image_token_id=96, boi_token_id=95, eoi_token_id=94))

def t5(): return T.T5Model(T.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2))

def whisper():
    return T.WhisperModel(T.WhisperConfig(vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, num_mel_bins=8,
                          decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=3000, max_target_positions=448,
                          pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1))

def clip():
    text = dict(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=1500,
                bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=dict(VISION), projection_dim=16))

MODELS = dict(llava=(llava, 'language_model', 32768), gemma3=(gemma3, 'language_model', 32768), t5=(t5, 'encoder', 100_000),
              whisper=(whisper, 'encoder', 3000), clip=(clip, 'text_model', 1500))

@pytest.mark.parametrize('name', MODELS)
def test_lm_evaluation_harness_3916_the_default_width_sees_all_that_a_part_can_take(name):
    make, part, longest = MODELS[name]
    stock = make()
    if not attention_layers(stock): pytest.skip('this version of transformers computes the attention itself')
    model = hf.add_windows(stock)
    layers = {at: m.dynattn for at, m in model.named_modules() if hasattr(m, 'dynattn')}
    assert layers.keys() == attention_layers(model, itself=True).keys()
    of_part = [learned for at, learned in layers.items() if part in at]
    assert of_part
    for learned in of_part:
        window = learned.window(learned.sigma_head(), None)
        assert window.mask(torch.tensor([1. - longest])).min() > .99


def test_the_default_of_llava_changes_nothing_beyond_the_outer_number():
    torch.manual_seed(0)
    stock = llava().eval()
    model = hf.add_windows(copy.deepcopy(stock))
    ids = torch.randint(3, 90, (1, 9000), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(): assert_close(model(input_ids=ids, logits_to_keep=1).logits, stock(input_ids=ids, logits_to_keep=1).logits, rtol=0, atol=1e-5)


def test_the_configuration_of_a_part():
    model = llava()
    names = attention_layers(model)
    text = next(name for name in names if 'language' in name)
    picture = next(name for name in names if 'vision' in name)
    assert part_config(model, text).max_position_embeddings == 32768 and part_config(model, picture).image_size == 16
    assert most_tokens(model.config) == 32768 and most_tokens(t5().config) is None
    with pytest.raises(ValueError, match='batches: expected texts that call every attention, got text 0, which leaves out .*vision'):
        hf.cost_curves(model.eval(), TEXTS[:1])


# --- causal or not

def test_transformers_48172_without_a_mask_and_without_a_word_every_key_is_seen():
    from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    hf.register()
    config = MllamaTextConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, cross_attention_layers=[1],
                              vocab_size=97, intermediate_size=48)
    x, other, out = torch.randn(2, 6, 32), torch.randn(2, 9, 32), {}
    for way in ('eager', 'dynattn'):
        torch.manual_seed(1)
        config._attn_implementation = way
        out[way] = MllamaTextCrossAttention(config, layer_idx=1).eval()(x, cross_attention_states=other)[0]
    assert_close(out['dynattn'], out['eager'])


class Own(nn.Module):
    "An attention of one's own on the interface."
    def forward(self, x): return hf.plugin.attend(self, x, x, x, None, scaling=.5)[0].transpose(1, 2)

def test_an_attention_of_ones_own():
    x, own = torch.randn(1, 2, 5, 8), Own()
    hf.plugin._warn_direction.cache_clear()
    with pytest.warns(UserWarning, match='is_causal: Own passes no attention_mask'): free = own(x)
    assert_close(free, nn.functional.scaled_dot_product_attention(x, x, x, scale=.5))
    own.is_causal = True
    assert_close(own(x), nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=.5))
    own.is_causal = False
    assert_close(own(x), free)


SILENT = {'AlignTextSelfAttention', 'ClapTextSelfAttention', 'DogeAttention', 'LayoutLMSelfAttention', 'MarkupLMSelfAttention',
          'MllamaVisionAttention', 'MllamaTextCrossAttention', 'SplinterSelfAttention'} # of transformers 5.0 to 5.24

def test_a_decoder_that_does_not_say_so_is_read_from_its_masks():
    sizes = {name: x for name, x in SIZES.items()}
    doge = T.DogeModel(T.DogeConfig(**sizes))
    assert {type(m).__name__ for m in attention_layers(doge).values()} <= SILENT
    for name, m in attention_layers(doge).items(): assert said_causal(m) is None and looks_back(doge, name)
    layout = T.LayoutLMModel(T.LayoutLMConfig(**{k: x for k, x in sizes.items() if k != 'num_key_value_heads'}))
    for name, m in attention_layers(layout).items(): assert said_causal(m) is None and not looks_back(layout, name)
    bart = T.BartModel(T.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=99,
                                    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16))
    for name in attention_layers(bart): assert looks_back(bart, name) == (name == 'decoder.layers.0.self_attn')


# --- one width for several layers

@pytest.mark.parametrize('kind', ['module', 'tensor', 'layer'])
def test_transformers_33807_widths_that_layers_share_are_saved_and_shared_again(tmp_path, kind):
    torch.manual_seed(0)
    model = hf.add_windows(T.LlamaForCausalLM(T.LlamaConfig(**SIZES)).eval(), init=5.)
    def learned(model): return [layer.self_attn.dynattn for layer in model.model.layers]
    first, second = learned(model)
    if kind == 'module': second.sigma_head = first.sigma_head
    if kind == 'tensor': second.sigma_head.z = first.sigma_head.z
    if kind == 'layer': model.model.layers[1].self_attn.dynattn = first
    with torch.no_grad(): first.sigma_head.z.add_(1.)
    want = model(IDS[None]).logits
    hf.save(model, tmp_path/'saved')
    again = hf.load(tmp_path/'saved').eval()
    assert_close(again(IDS[None]).logits, want)
    a, b = learned(again)
    assert a.sigma_head.z is b.sigma_head.z and (kind == 'tensor' or a.sigma_head is b.sigma_head)
    if kind == 'layer': return
    b.sigma_head = copy.deepcopy(b.sigma_head)                       # on their own again
    again.save_pretrained(tmp_path/'apart')
    a, b = learned(hf.load(tmp_path/'apart'))
    assert a.sigma_head.z is not b.sigma_head.z


def test_a_name_that_is_none_is_refused(tmp_path):
    model = hf.add_windows(T.LlamaForCausalLM(T.LlamaConfig(**SIZES)), init=5.)
    hf.save(model, tmp_path)
    written = json.loads((tmp_path/'config.json').read_text())
    for shared in (['x'], {'lm_head': 'model.embed_tokens'}, {'model.layers.0.self_attn.dynattn.z': 'nothing'}, {'model.layers.0.self_attn.dynattn': 3}):
        (tmp_path/'config.json').write_text(json.dumps({**written, 'dynattn': {**written['dynattn'], 'shared': shared}}))
        with pytest.raises(ValueError, match='dynattn: expected'): hf.load(tmp_path)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_model_that_is_cast_keeps_its_widths(dtype, tmp_path):
    for width in (301., 1001., 5003.):
        model = hf.add_windows(T.LlamaForCausalLM(T.LlamaConfig(**SIZES)), init=width, edge='hard').to(dtype)
        hf.save(model, tmp_path/'saved')
        for one in (model, copy.deepcopy(model), hf.load(tmp_path/'saved'), hf.load(tmp_path/'saved', dtype=dtype)):
            learned = one.model.layers[0].self_attn.dynattn
            assert learned.window(learned.sigma_head(), None).half_width().tolist() == [width]*4
        assert model(IDS[None]).logits.dtype == dtype


# --- masks that a model makes by itself

MASKS = dict(layoutlm='LayoutLMModel', markuplm='MarkupLMModel')

def own_mask(name):
    config = T.AutoConfig.for_model(name, vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
                                    hidden_dropout_prob=0., attention_probs_dropout_prob=0., max_position_embeddings=64, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(T, MASKS[name])(config).eval().double()
    for p in model.parameters():
        if p.dim() == 2: p.data.mul_(5)
    return model

@pytest.mark.parametrize('name', MASKS)
def test_a_model_that_makes_its_own_mask_of_padding_finds_where_a_text_begins(name):
    "Padding in front was taken for the leading token that all queries see."
    model = hf.add_windows(own_mask(name), init=2., n_global=2, edge='hard').double()
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(2))
    at = torch.arange(2, 14)[None]
    with torch.no_grad():
        alone = model(ids, attention_mask=torch.ones_like(ids), position_ids=at)[0]
        width = hf.mean_width(model)
        for left, right in ((3, 0), (0, 3), (1, 2)):
            def padded(x, value): return torch.nn.functional.pad(x, (left, right), value=value)
            out = model(padded(ids, 0), attention_mask=padded(torch.ones_like(ids), 0), position_ids=padded(at, 2))[0]
            assert_close(out[:, left:left+12], alone)
            assert_close(hf.mean_width(model), width)  # a share of the real tokens
    # a text is measured in blocks of 32 queries
    curves = hf.cost_curves(own_mask(name).float(), [dict(input_ids=torch.randint(3, 99, (2, 48)), attention_mask=torch.ones(2, 48).long())])
    assert curves.text.isfinite().all()

def test_traced_where_padding_cannot_be_read_leading_tokens_are_refused():
    model = hf.add_windows(own_mask('layoutlm'), init=2.)
    ids = torch.randint(3, 99, (1, 12))
    with pytest.raises(Exception, match='n_global: expected 0 in a program that is traced'):
        torch.export.export(model, (ids,), dict(attention_mask=torch.ones_like(ids)))
