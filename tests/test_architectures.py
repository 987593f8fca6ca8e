"""The committed table of all causal architectures, some of them anew, and `generate` with every place an option may stand in.

`architectures.py` writes the table. A case named after a public report is that report's."""
import copy, inspect
import pytest, torch
from architectures import COLUMNS, NEW, attempt, build, helper, names, prompts, quiet, row, said, table
from versions import asks_the_table, lacks, makes_its_own_cache, needs, served

@pytest.fixture(scope='module', autouse=True)
def version():
    return quiet()

GOOD = 'same', 'refused: ', 'stock: '

def wrong(cells):
    "The cells of a row that are neither the stock model's, nor a refusal by name, nor what the stock model cannot do."
    told = 'model', 'made', 'transformers', 'look', 'cache'
    return {name: x for name,x in cells.items() if name not in told and x and not x.startswith(GOOD)} | {
        name: x for name,x in cells.items() if name in ('look','cache') and x.startswith('error')}

def test_the_table_has_every_architecture_and_nothing_wrong(version):
    rows = table()
    assert not {name: found for name,cells in rows.items() if (found := wrong(cells))}
    made = [cells for cells in rows.values() if not cells['made'].startswith('no: ')]
    assert len(made)>.9*len(rows)
    windowed = [cells for cells in made if cells['cache'].startswith('WindowedCache')]
    assert len(windowed)>100 and all(cells['narrow']=='same' for cells in windowed)
    assert sum(cells['greedy']=='same' for cells in windowed)>=len(windowed)-1  # Moshi's own cache is wrong
    assert {version}!={cells['transformers'] for cells in rows.values()} or set(rows)==set(names())

# what each stands for: a hybrid, both in a layer, windows of its own, layers that share keys, that read them, or the mask
QUICK = dict(lfm2='WindowedCache, 1 of 3 layers', falcon_h1="transformers'", gemma3_text='WindowedCache, 2 of 2 layers',
             gemma4_text="transformers'", diffllama="transformers'", doge=None)

@pytest.mark.parametrize('name', QUICK)
def test_an_architecture(name):
    needs(name)
    cells = row(name, only=('greedy','padded'))
    assert not cells['made'].startswith('no: ') and not wrong(cells), cells
    model = build(name)
    if not asks_the_table(model): assert not served(model) and cells['logits'].startswith('refused: model: ')
    elif QUICK[name] is None: assert cells['logits'].startswith('refused: attention_mask: expected a model that hands')
    elif makes_its_own_cache(model): assert cells['cache']=="transformers'" or cells['cache'].startswith('refused: ')
    else: assert cells['cache']==QUICK[name]

@pytest.mark.slow
@pytest.mark.parametrize('name', names())
def test_every_architecture(name):
    cells = row(name)
    assert not wrong(cells), cells

# ---- options, wherever they stand

def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(sizes | more))).eval()

def narrow(model=None, **more):
    from dynattn import hf
    return hf.add_windows(llama() if model is None else model, init=4., **more)

def taken(out):
    "The name of the class of the cache that a call of `generate` used."
    return type(out.get('cache', out.get('past_key_values'))).__name__

TEXT = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
OPTIONS = dict(plain=({}, 'WindowedCache'), no_cache=(dict(use_cache=False), 'NoneType'),
               dynamic=(dict(cache_implementation='dynamic'), 'DynamicCache'),
               static=(dict(cache_implementation='static', disable_compile=True), 'StaticCache'),
               weights=(dict(output_attentions=True), 'DynamicCache'))

@pytest.mark.parametrize('where', ['by_position','by_name','as_arguments','with_the_model'])
@pytest.mark.parametrize('name', OPTIONS)
def test_options_count_wherever_they_stand(name, where):
    "huggingface/transformers#35679, #35026: a GenerationConfig by position was not seen."
    from transformers import GenerationConfig
    options,expected = OPTIONS[name]
    model = narrow()
    want = model.generate(TEXT, use_cache=False, **NEW)
    settled = NEW | dict(return_dict_in_generate=True) | options
    config = GenerationConfig(**settled)
    if where=='by_position': out = model.generate(TEXT, config)
    elif where=='by_name': out = model.generate(generation_config=config, inputs=TEXT)
    elif where=='as_arguments': out = model.generate(TEXT, **settled)
    else:
        model.generation_config = config
        out = model.generate(TEXT)
    assert torch.equal(out.sequences, want) and taken(out)==expected

def test_an_argument_comes_before_the_configuration():
    from transformers import GenerationConfig
    config = GenerationConfig(**NEW, cache_implementation='static', return_dict_in_generate=True)
    assert taken(narrow().generate(TEXT, config, cache_implementation=None))=='WindowedCache'

def test_embeddings_and_a_function_of_ones_own():
    model = narrow()
    want = model.generate(TEXT, **NEW, use_cache=False)[:,TEXT.shape[1]:]
    told = dict(return_dict_in_generate=True)
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(TEXT), **NEW, **told)
    own = model.generate(TEXT, **NEW, **told, custom_generate=lambda model, input_ids, **more: model._sample(input_ids, **more))
    for out in (embedded, own): assert torch.equal(out.sequences[:,-8:], want) and taken(out)=='WindowedCache'

def test_copies_and_wrapped_models_take_it_too():
    peft = pytest.importorskip('peft')
    model = narrow()
    lora = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type='CAUSAL_LM', r=2, target_modules=['q_proj']))
    want = model.generate(TEXT, **NEW, use_cache=False)
    for m in (copy.deepcopy(model), lora.eval()):
        out = m.generate(input_ids=TEXT, **NEW, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want) and taken(out)=='WindowedCache'

def test_dropout_while_training_takes_all_keys():
    "The last check of c02b: `generate` in training mode raised."
    for dropout,expected in ((.1, 'DynamicCache'), (0., 'WindowedCache')):
        model = narrow(llama(attention_dropout=dropout)).train()
        assert taken(model.generate(TEXT, **NEW, return_dict_in_generate=True))==expected

# ---- refusals, before anything ran

@pytest.mark.parametrize('asks, says', [
    (dict(output_attentions=True), 'output_attentions: expected False with a WindowedCache'),
    (dict(train=True), 'dropout: expected 0 with a WindowedCache'),
    (dict(other=True), 'cache: expected a WindowedCache of 2 layers')])
def test_a_cache_that_does_not_fit_the_call_is_refused_before_anything_ran(asks, says):
    from dynattn import hf
    model = narrow(llama(attention_dropout=.1)).train('train' in asks)
    other = narrow(llama(num_hidden_layers=3)) if 'other' in asks else model
    cache = hf.WindowedCache(other)
    name = 'cache' if 'cache' in inspect.signature(model.forward).parameters else 'past_key_values' # since 5.24
    calls = []
    model.model.register_forward_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match=says):
        model.generate(TEXT, **NEW, **{name: cache}, output_attentions=asks.get('output_attentions', False))
    assert not calls and cache.get_seq_length()==0

@pytest.mark.parametrize('name, says', [('falcon_h1', 'which keeps a'), ('diffllama', 'DiffLlamaAttention may read the keys'),
                                        ('llama4_text', 'which attends in chunks'), ('gemma4_text', 'Gemma4'),
                                        ('hrm_text', 'write to place 0')])
def test_a_model_that_no_windowed_cache_serves_is_refused_by_name(name, says):
    from dynattn import hf
    needs(name)
    model = build(name)
    if not served(model): return
    if makes_its_own_cache(model): says = 'which makes its own cache'
    with pytest.raises(ValueError, match=f'model: expected one whose layers each keep .*{says}.*leave the cache to generate'):
        hf.WindowedCache(hf.switch(model))

# ---- reports

@pytest.mark.parametrize('name', ['lfm2','qwen3_5_text','qwen3_next','bamba','jamba','granitemoehybrid'])
def test_hybrid_models(name):
    "huggingface/transformers#46441, #35876, #47290; Blaizzy/mlx-vlm#1946: alone and in a padded batch."
    needs(name)
    text,two,mask = prompts()
    padded = dict(inputs=two, attention_mask=mask, **NEW)
    model,error = attempt(lambda: build(name))
    if error is None: _,error = attempt(lambda: model.generate(**padded, use_cache=False))
    if error is not None: lacks(f'{name} as it is built here: {error}')
    narrow(model)
    if makes_its_own_cache(model):      # some hand on a square that does not say where its queries stand
        _,error = attempt(lambda: model.generate(**padded))
        if error is not None:
            assert said(error).startswith('refused: '), error
            return
    want = model.generate(**padded, use_cache=False)
    out = model.generate(**padded, return_dict_in_generate=True)
    assert torch.equal(out.sequences, want)
    assert torch.equal(model.generate(text, **NEW)[0,-8:], out.sequences[0,-8:])

@pytest.mark.parametrize('extra', [{}, dict(n_global=2)])
@pytest.mark.parametrize('helped_by', ['stock','windowed','itself'])
def test_assisted_decoding(helped_by, extra):
    "huggingface/transformers#48280, #47447; Blaizzy/mlx-vlm#1715: rejected tokens are taken back, on either side."
    target = narrow(**extra)
    other = dict(stock=helper(llama()), windowed=narrow(helper(llama()), **extra), itself=helper(target))[helped_by]
    text,long = prompts()[0],NEW | dict(max_new_tokens=24)
    assert torch.equal(target.generate(text, assistant_model=other, **long), target.generate(text, use_cache=False, **long))
    stock = llama()
    assert torch.equal(stock.generate(text, assistant_model=other, **long), stock.generate(text, use_cache=False, **long))

def test_prefix_tuning():
    "huggingface/peft#2821, #869: the prefix fills a cache of PEFT's own; ours only had to say that it has no maximum."
    peft = pytest.importorskip('peft')
    from dynattn import hf
    def wrapped(model):
        torch.manual_seed(5)
        return peft.get_peft_model(model, peft.PrefixTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=6)).eval()
    _,two,mask = prompts()
    def written(model): return model.generate(input_ids=two, attention_mask=mask, **NEW)
    assert torch.equal(written(wrapped(hf.add_windows(llama()))), written(wrapped(llama())))
