"""What must hold for every architecture of transformers, on tiny models: the same as `eager`, forward and backward, and in use.

    python tests/test_hf_common.py             # the whole matrix, architecture by law, into benchmarks/results/hf_matrix.csv
"""
import copy, csv, os
from pathlib import Path
from unittest import mock
import pytest, torch
from torch.testing import assert_close
from versions import served

os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]

IDS = dict(vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2)
TEXT = dict(**IDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=64)
GROUPED = dict(**TEXT, num_key_value_heads=2, head_dim=4)
PICTURE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=12, patch_size=4)
SPEECH = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, conv_dim=[8]*7,
              num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8, mask_time_prob=0.)
BOTH = dict(**IDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=24, decoder_ffn_dim=24, decoder_start_token_id=1)
ARCHITECTURES = dict( # class and configuration
    bert=('BertForSequenceClassification', TEXT),
    roberta=('RobertaForSequenceClassification', TEXT),
    albert=('AlbertForSequenceClassification', dict(**TEXT, embedding_size=8)),
    electra=('ElectraForSequenceClassification', dict(**TEXT, embedding_size=8)),
    modernbert=('ModernBertForSequenceClassification', dict(**TEXT, cls_token_id=1, sep_token_id=2, local_attention=6, global_attn_every_n_layers=2)),
    vit=('ViTForImageClassification', PICTURE),
    wav2vec2=('Wav2Vec2ForSequenceClassification', SPEECH),
    gpt2=('GPT2LMHeadModel', dict(**IDS, n_embd=16, n_layer=2, n_head=4, n_positions=64)),
    llama=('LlamaForCausalLM', GROUPED),
    mistral=('MistralForCausalLM', dict(**GROUPED, sliding_window=5)),
    qwen3=('Qwen3ForCausalLM', GROUPED),
    gemma2=('Gemma2ForCausalLM', dict(**GROUPED, sliding_window=7, attn_logit_softcapping=.5)),
    gpt_oss=('GptOssForCausalLM', dict(**GROUPED, sliding_window=7, num_local_experts=2, num_experts_per_tok=1)),
    llama4=('Llama4ForCausalLM', dict(**GROUPED, attention_chunk_size=7, intermediate_size_mlp=24, num_local_experts=2)),
    t5=('T5ForConditionalGeneration', dict(**IDS, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=1)),
    bart=('BartForConditionalGeneration', BOTH),
    whisper=('WhisperForConditionalGeneration', dict(**BOTH, num_mel_bins=8, max_source_positions=20, max_target_positions=64,
                                                     begin_suppress_tokens=None)),
)
CONFIGS = dict(llama4='Llama4TextConfig', gpt_oss='GptOssConfig')
NO_DROPOUT = ('hidden_dropout_prob','attention_probs_dropout_prob','attention_dropout','hidden_dropout','dropout','dropout_rate',
              'attn_pdrop','resid_pdrop','embd_pdrop','activation_dropout','feat_proj_dropout','final_dropout','layerdrop','classifier_dropout','classifier_dropout_prob','embedding_dropout',
              'mlp_dropout')
READS_TEXT = [name for name in ARCHITECTURES if name not in ('vit','wav2vec2','whisper')]
WRITES = ['gpt2','llama','mistral','qwen3','gemma2','gpt_oss','llama4','t5','bart','whisper']

def build(name):
    "A tiny random model without dropout whose attention is far from even."
    import transformers
    cls,sizes = ARCHITECTURES[name]
    config_name = CONFIGS.get(name) or cls.split('For')[0].split('LMHead')[0]+'Config'
    config = getattr(transformers, config_name)(**sizes)
    for key in NO_DROPOUT:
        if isinstance(getattr(config, key, None), float): setattr(config, key, 0.)
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    return model

def inputs(name, padded='right'):
    "A batch of two with labels."
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 13), generator=g)
    keep = {'right': torch.arange(13) < torch.tensor([[13],[8]]), 'left': torch.arange(13) >= torch.tensor([[0],[5]])}.get(padded)
    if name=='vit': return dict(pixel_values=torch.randn(2, 3, 12, 12, generator=g), labels=torch.tensor([0,1]))
    if name=='wav2vec2': return dict(input_values=torch.randn(2, 3000, generator=g), labels=torch.tensor([0,1]))
    if name=='whisper': return dict(input_features=torch.randn(2, 8, 40, generator=g), labels=ids)
    text = dict(input_ids=ids) if keep is None else dict(input_ids=ids.masked_fill(~keep, 0), attention_mask=keep.long())
    if name not in WRITES: return text | dict(labels=torch.tensor([0,1]))
    if name in ('t5','bart') or keep is None: return text | dict(labels=ids)
    first = keep & (keep.cumsum(1)==1) # what padding would predict; there eager looks at everything, and dynattn at nothing
    return text | dict(labels=ids.masked_fill(~keep | first, -100))

def use(model, impl):
    from dynattn import hf
    return hf.switch(model) if impl=='dynattn' else model.set_attn_implementation(impl) or model

def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch, **({'use_cache': False} if 'use_cache' in model.config else {})).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n,p in model.named_parameters() if p.grad is not None}

def same(ours, theirs): assert_close(ours, theirs, rtol=1e-3, atol=2e-5)

def in_float64(name):
    "A model and its softmax, which many take in float32 whatever the model is; so are the grouped products of experts."
    model = build(name).double().train()
    model.config._experts_implementation = 'eager'
    return model, mock.patch('torch.nn.functional.softmax', lambda x, dim=-1, dtype=None: x.softmax(dim))

def forward_and_backward(name):
    "Loss and all gradients are those of eager, in training mode, without padding and with it on either side."
    model,softmax = in_float64(name)
    sides = ('no','right') if name=='modernbert' else ('no','right','left') if name in READS_TEXT else ('no',)
    for padded in sides: # ModernBERT reads its class off position 0, which may see no token at all where it is padding
        batch = {key: x.double() if x.is_floating_point() else x for key,x in inputs(name, padded).items()}
        with softmax: theirs,ours = (loss_and_gradients(use(model, impl), batch) for impl in ('eager','dynattn'))
        assert any(g.abs().max()>1e-4 for g in theirs[1].values())
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)

def weights_on_request(name):
    "`output_attentions` gives the weights that eager gives, where tokens are real."
    model,found = build(name),{}
    batch = inputs(name, 'no')
    with torch.no_grad():
        for impl in ('eager','dynattn'):
            out = use(model, impl)(**batch, output_attentions=True)
            found[impl] = [w for key in out if 'attentions' in key for w in out[key]]
    assert found['eager'] and len(found['eager'])==len(found['dynattn'])
    same(found['dynattn'], found['eager'])

def generation(name):
    "Greedy and with beams, with growing and fixed caches and without one: the tokens of eager."
    batch = {k: x for k,x in inputs(name, 'left').items() if k!='labels'}
    ways = [{}, dict(num_beams=3), dict(use_cache=False), dict(cache_implementation='static')]
    model = build(name)
    for way in ways:
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, **way)
        theirs,ours = (use(model, impl).generate(**batch, **options) for impl in ('eager','dynattn'))
        assert torch.equal(ours, theirs), way

def checkpointing(name):
    "Layers computed again on the way back give the same gradients."
    model = use(build(name), 'dynattn').train()
    batch = inputs(name)
    usual = loss_and_gradients(model, batch)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        same(loss_and_gradients(model, batch), usual)

def windows_learn(name):
    "Wide windows change nothing to speak of, narrow ones do; every width gets a gradient or is named; saved and loaded, all is there."
    import tempfile
    from dynattn import hf
    model = build(name)
    batch = inputs(name, 'right')
    plain = loss_and_gradients(use(model, 'dynattn'), batch)[0]
    wide = loss_and_gradients(hf.add_windows(copy.deepcopy(model)), batch)[0]
    narrow = hf.add_windows(model, init=2.)
    loss,gradients = loss_and_gradients(narrow, batch)
    assert (wide-plain).abs() < .02*(1+plain) and loss!=plain
    widths = {n: g for n,g in gradients.items() if 'dynattn' in n}
    assert widths and any(g.abs().max()>0 for g in widths.values()) and all(g.isfinite().all() for g in widths.values())
    with tempfile.TemporaryDirectory() as folder:
        hf.save(narrow, folder)
        again = hf.load(folder)
    with torch.no_grad(): assert_close(again(**batch).loss, narrow(**batch).loss)

LAWS = dict(forward_and_backward=list(ARCHITECTURES), weights_on_request=list(ARCHITECTURES), generation=WRITES,
            checkpointing=[name for name in ARCHITECTURES if name!='albert'], windows_learn=list(ARCHITECTURES)) # it has none
LAW = dict(forward_and_backward=forward_and_backward, weights_on_request=weights_on_request, generation=generation,
           checkpointing=checkpointing, windows_learn=windows_learn)
CASES = [(name,law) for law,names in LAWS.items() for name in names]

QUICK = 'bert', 'modernbert', 'llama', 'gemma2', 'gpt_oss', 't5'     # a push; the others in `make test-all`

@pytest.mark.parametrize('name, law', [pytest.param(name, law, marks=() if name in QUICK else pytest.mark.slow) for name,law in CASES])
def test_law(name, law):
    if served(build(name)): LAW[law](name)

def main():
    import transformers
    transformers.logging.set_verbosity_error()
    found = {name: dict(transformers=transformers.__version__, model=name) for name in ARCHITECTURES}
    for name,law in CASES:
        try: LAW[law](name); found[name][law] = 'holds'
        except Exception as e: found[name][law] = f"{type(e).__name__}: {' '.join(str(e).split())[:90]}"
        print(f'{name:12} {law:22} {found[name][law]}', flush=True)
    with open(ROOT/'benchmarks/results/hf_matrix.csv', 'w', newline='', encoding='utf-8') as f:
        table = csv.DictWriter(f, ['transformers','model',*LAWS], lineterminator='\n')
        table.writeheader()
        table.writerows(found.values())

if __name__=='__main__': main()
