"""Every causal architecture of the installed transformers, tiny: is it the stock model's, with windows and without?

Each is built from its own configuration, made small, in a process of its own. A cell of the table is "same" (as the stock
model), "refused: …" (by name, with what works), "stock: …" (the stock model itself cannot do this), or what is wrong:
"WRONG: …" and "error: …". `test_architectures.py` reads the table.

    python tests/architectures.py                       # writes benchmarks/results/hf_architectures.csv
    python tests/architectures.py llama lfm2            # these rows only; the others stay
    python tests/architectures.py llama lfm2 --show     # prints whole rows, writes nothing
"""
import argparse, contextlib, copy, csv, json, os, re, signal, sys, tempfile, traceback, warnings
from pathlib import Path

os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT/'benchmarks/results/hf_architectures.csv'
SECONDS = 240 # for an architecture
VOCABULARY = 97

# sizes by the names that configurations use; a configuration takes those that it has and that are not None
SIZES = dict(
    vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    forced_eos_token_id=None, forced_bos_token_id=None, eod_token_id=2, sep_token_id=2, cls_token_id=1,
    max_position_embeddings=256, n_positions=256, n_ctx=256, max_seq_len=256, max_target_positions=256,
    hidden_size=32, d_model=32, n_embd=32, emb_dim=32, dim=32, embedding_size=32, word_embed_proj_dim=32,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, encoder_layers=2,
    num_decoder_layers=2, num_encoder_layers=2, num_layers_per_stack=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, encoder_attention_heads=4,
    num_decoder_attention_heads=4, num_encoder_attention_heads=4, attention_heads=4, num_key_value_heads=2,
    num_kv_heads=2, swa_num_attention_heads=4, swa_num_key_value_heads=2, head_dim=8, swa_head_dim=8,
    global_head_dim=8, kv_channels=8, dim_head=8, attention_head_dim=8, attention_hidden_size=32,
    intermediate_size=48, n_inner=48, ffn_dim=48, decoder_ffn_dim=48, encoder_ffn_dim=48, ffn_hidden_size=48, dff=48,
    dim_ff=48, intermediate_size_mlp=48, dense_intermediate_size=48, moe_intermediate_size=16, expert_ffn_hidden_size=16,
    shared_expert_intermediate_size=16, shared_intermediate_size=16, shared_experts_intermediate_size=16,
    moe_shared_expert_intermediate_size=16, block_multiple_of=8,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    moe_topk=2, num_experts_per_token=2, n_group=1, topk_group=1, num_expert_group=1, zero_expert_num=2,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, first_k_dense_replace=1, num_dense_layers=1,
    moe_layer_start_index=1, moe_layer_end_index=1,
    q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, qk_head_dim=8,
    o_lora_rank=8, o_groups=2, gated_norm_rank=4, index_topk=64, index_n_heads=2, index_head_dim=8, index_block_size=4,
    index_topk_blocks=2, rotary_dim=4, laurel_rank=4,
    sliding_window=5, window_size=5, attention_chunk_size=7, attention_window_size=5, local_attention=10,
    sliding_window_size=5, local_attention_window_len=16, keep_window_size=64, max_window_layers=1,
    num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY,
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_head_dim=8, linear_num_heads=4,
    mamba_d_state=8, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_ssm=64, mamba_chunk_size=8,
    mamba_dt_rank=4, mamba_num_heads=8, mamba_head_dim=8, n_mamba_heads=2, n_groups=1, ssm_state_size=8, state_size=8,
    time_step_rank=4, chunk_size=8, lru_width=32, d_rel=4, rel_extent=16,
    dim_model_base=32, ple_embed_dim=8, ngram_vocab_size_base=97, split_ngram_parts=2, hc_lowrank=8,
    make_ngram_vocab_size_divisible_by=1, prompt_mid_dim=8, prompt_length=4, attention_head_size=8,
    block_size=4, num_random_blocks=1, backbone_hidden_size=32, num_centroids=8, centroid_intermediate_top_k=4,
    input_embedding_size=32, output_embedding_size=32, feed_forward_size=48, encoder_hash_byte_group_vocab=31,
    pronunciation_embed_dim=8, pronunciation_vocab_size=97, shape_embed_dim=8, shape_vocab_size=97,
    decoder_vocab_size=VOCABULARY, unpadded_vocab_size=VOCABULARY, max_source_positions=32, num_mel_bins=8,
    image_size=12, patch_size=4, num_channels=3, vision_output_dim=32, out_hidden_size=32, projection_dim=32,
    depth=2, suppress_tokens=None, begin_suppress_tokens=None,
)
SHARING = dict(num_hidden_layers=4, layer_types=['sliding_attention','full_attention']*2)
# what an architecture needs beside that, of its whole configuration or of the text's part
MORE = dict(
    bamba=dict(attn_layer_indices=[1]),
    cohere_compass_text=dict(layer_types=['full_attention','sliding_attention'], sliding_window=5, rope_parameters={
        kind: dict(rope_type='default', rope_theta=1e4) for kind in ('full_attention','sliding_attention')}),
    deepseek_v2=dict(num_experts_per_tok=2),
    dots1=dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
               num_key_value_heads=2),
    gemma4=dict(text_config=SHARING),
    gemma4_text=SHARING,
    gemma4_unified=dict(text_config=SHARING),
    gemma4_unified_text=SHARING,
    gpt_neo=dict(attention_types=[[['global','local'],1]]),
    granitemoehybrid=dict(layer_types=['linear_attention','full_attention']),
    hrm_text=dict(num_hidden_layers=8, num_layers_per_stack=1),
    hunyuan_v1_dense=dict(head_dim=8),
    hunyuan_v1_moe=dict(head_dim=8),
    jamba=dict(attn_layer_period=2, attn_layer_offset=1),
    lfm2=dict(layer_types=['conv','full_attention','conv'], num_hidden_layers=3),
    lfm2_moe=dict(layer_types=['conv','full_attention','conv'], num_hidden_layers=3),
    longcat_flash=dict(head_dim=4),
    mllama=dict(text_config=dict(num_hidden_layers=3, cross_attention_layers=[1])),
    mamba2=dict(num_heads=8),
    ministral=dict(head_dim=8, layer_types=['sliding_attention','full_attention']),
    nemotron=dict(num_key_value_heads=2),
    qwen4_exp=dict(text_config=dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=64,
                                    indexer_compress_ratio=4)),
    qwen4_exp_text=dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=64,
                        indexer_compress_ratio=4),
    recurrent_gemma=dict(num_hidden_layers=3),
    reformer=dict(axial_pos_shape=[16,16], axial_pos_embds_dim=[16,16], is_decoder=True),
    xmod=dict(default_language='en_XX'),
    zamba=dict(attention_hidden_size=64, attention_head_dim=16, num_hidden_layers=4,
               layers_block_type=['linear_attention','hybrid','linear_attention','hybrid']),
    zaya=dict(num_experts_per_tok=1),
)

def given_names(cls):
    "The names that a configuration's constructor takes."
    import inspect
    return [name for name in inspect.signature(cls.__init__).parameters if name not in ('self','kwargs')]

def per_layer(default, names):
    "The lists with an entry for each layer, cut to a few layers in which every kind of layer occurs."
    total = getattr(default, 'num_hidden_layers', None)
    values = {name: vars(default).get(name) for name in names}
    lists = {name: x for name,x in values.items() if isinstance(x, (list, tuple)) and len(x)==total and total>1}
    kinds = [tuple(str(x[i]) for x in lists.values()) for i in range(total)] if lists else []
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:4]
    while lists and len(chosen)<2: chosen.append(chosen[-1])
    return len(chosen),{name: [SIZES.get(name, x[i]) for i in chosen] for name,x in lists.items()}

def small(default, more):
    "A configuration of the same class with small sizes."
    cls = type(default)
    names = given_names(cls)
    layers,lists = per_layer(default, names)
    values = {name: SIZES[name] for name in names if name in SIZES and vars(default).get(name) is not None}
    if layers:
        values |= lists
        name = default.attribute_map.get('num_hidden_layers', 'num_hidden_layers')
        values[name] = layers
    if vars(default).get('kv_lora_rank') is not None and 'num_key_value_heads' in names: values['num_key_value_heads'] = 4
    rope = getattr(default, 'rope_parameters', None) or {}
    if 'mrope_section' in rope: values['rope_parameters'] = {**rope, 'mrope_section': [2,1,1]}
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None: values[name] = small(part, more.pop(name, {})).to_dict()
    return cls(**{**values, **more})

def configuration(name):
    "Of an architecture, by its name in transformers' list."
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    more = copy.deepcopy(MORE.get(name, {}))
    default = CONFIG_MAPPING[name](**more.pop('default', {}))
    return small(default, more)

def without_dropout(config):
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for key,x in vars(part).items() if part is not None else ():
            if 'drop' in key and isinstance(x, float): setattr(part, key, 0.)

def build(name):
    "A tiny random model, in which attention is far from even."
    import torch
    from transformers import AutoModelForCausalLM
    config = configuration(name)
    without_dropout(config)
    if hasattr(config, 'is_decoder'): config.is_decoder = True
    config._experts_implementation = 'eager'
    with torch.device('meta'): size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size>1e7: raise ValueError(f'still {size/1e6:.1f} million parameters')
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(3)
    return model

NEW = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)

def prompts():
    "One text, and a batch whose first row begins with padding."
    import torch
    g = torch.Generator().manual_seed(3)
    text = torch.randint(3, VOCABULARY, (1, 19), generator=g)
    text[:,12:] = text[:,:7]  # what a lookup in the prompt finds
    two = torch.cat([torch.zeros(1, 4, dtype=torch.long), text], 1).repeat(2, 1)
    two[1] = torch.randint(3, VOCABULARY, (23,), generator=g)
    mask = torch.ones_like(two)
    mask[0,:4] = 0
    return text,two,mask

def helper(model):
    "A model that often, not always, writes what `model` writes."
    import torch
    other = copy.deepcopy(model)
    torch.manual_seed(9)
    for name,p in other.named_parameters():
        if '.dynattn.' not in name and p.dim()==2: p.data += .2*p.data.std()*torch.randn_like(p)
    other.generation_config.num_assistant_tokens = 3
    other.generation_config.num_assistant_tokens_schedule = 'constant'
    other.generation_config.assistant_confidence_threshold = 0.
    return other

def reused(model, text, **options):
    "Two questions to one prompt, whose cache is copied; the tokens of both."
    import torch
    first = model.generate(text[:,:12], return_dict_in_generate=True, **{**NEW, 'max_new_tokens': 1}, **options)
    cache = first.get('past_key_values', first.get('cache'))
    name = 'cache' if 'cache' in first else 'past_key_values'
    ends = text[:,12:15],text[:,14:17]
    whole = [torch.cat([first.sequences[:,:12], x], 1) for x in ends]
    return torch.cat([model.generate(x, **{name: copy.deepcopy(cache)}, **NEW, **options)[:,-8:] for x in whole])

def ways():
    "How to generate: name -> function of (a model, the stock model) that returns tokens."
    import torch
    text,two,mask = prompts()
    one,many = dict(inputs=text, attention_mask=torch.ones_like(text)),dict(inputs=two, attention_mask=mask)
    def run(batch, **options): return lambda model, stock: model.generate(**batch, **{**NEW, **options})
    def sampled(model, stock):
        torch.manual_seed(5)
        return model.generate(**many, **{**NEW, 'do_sample': True, 'num_return_sequences': 2})
    return dict(
        greedy=run(one),
        dynamic=run(one, cache_implementation='dynamic'),
        static=run(one, cache_implementation='static', disable_compile=True),
        no_cache=run(one, use_cache=False),
        padded=run(many),
        beams=run(many, num_beams=3),
        sampled=sampled,
        pieces=run(one, prefill_chunk_size=5),
        lookup=run(one, prompt_lookup_num_tokens=3),
        assisted=lambda model, stock: model.generate(**one, **NEW, assistant_model=helper(stock)),
        reuse=lambda model, stock: reused(model, text),
        prefix=lambda model, stock: prefixed(model).generate(input_ids=two, attention_mask=mask, **NEW))

def prefixed(model):
    "A model with prefix tuning."
    import peft, torch
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.PrefixTuningConfig(task_type='CAUSAL_LM', num_virtual_tokens=6)).eval()

def said(error):
    "An error in the words of a cell: a refusal of ours names an argument and what it expected."
    text = ' '.join(str(error).split())
    ours = re.match(r'[\w.]+: expected ', text) and isinstance(error, (TypeError,ValueError))
    return f"refused: {text[:160]}" if ours else f"error: {type(error).__name__}: {text[:120]}"

def attempt(function):
    "(what it returns, None), or (None, the error)."
    import torch
    try:
        with torch.no_grad(): return function(),None
    except Exception as e:
        if os.environ.get('SHOW'): traceback.print_exc()
        return None,e

def compared(stock, ours, near=None):
    "The cell of two attempts."
    import torch
    (expected,stock_error),(got,error) = stock,ours
    if stock_error is not None:
        text = ' '.join(str(stock_error).split())
        return f"stock: {type(stock_error).__name__}: {text[:80]}"
    if error is not None: return said(error)
    if near is not None:
        far = (expected-got).abs().max().item()
        return 'same' if far<=near else f'WRONG: off by {far:.1e}'
    return 'same' if torch.equal(expected, got) else f'WRONG: {expected[0,-8:].tolist()} became {got[0,-8:].tolist()}'

def steady(stock, wide):
    """Whether the stock model writes the same tokens with its cache and without. Where it does not, and the model with
    windows writes those without a cache, the stock model is wrong, and no cell can compare with it."""
    import torch
    text = dict(inputs=prompts()[0], **NEW)
    (cached,_),(bare,_),(ours,_) = (attempt(lambda: model.generate(**text, **more)) for model,more in
                                    ((stock, {}), (stock, dict(use_cache=False)), (wide, {})))
    unequal = cached is not None and bare is not None and not torch.equal(cached, bare)
    return not (unequal and ours is not None and torch.equal(ours, bare))

def logits(model, batch): return lambda: model(**batch).logits

def handed_out(model):
    "The cache that `generate` takes for a model with windows."
    text = prompts()[0]
    out = model.generate(text, return_dict_in_generate=True, **NEW)
    cache = out.get('past_key_values', out.get('cache'))
    if type(cache).__name__!='WindowedCache': return "transformers'"
    kept = [type(layer).__name__=='_KeptLayer' for layer in cache.layers]
    return f'WindowedCache, {sum(kept)} of {len(kept)} layers'

COLUMNS = ('logits','look','convert','cache',*('greedy','dynamic','static','no_cache','padded','beams','sampled','pieces',
           'lookup','assisted','reuse','prefix'),'helper','narrow','narrow_padded','narrow_lookup','narrow_assisted')

def row(name, only=None):
    "The cells of an architecture."
    import torch, dynattn
    from dynattn import hf
    from dynattn.modules import convert
    found = dict(model=name)
    stock,error = attempt(lambda: build(name))
    if error is not None: return found | dict(made=f"no: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
    text,two,mask = prompts()
    batch = dict(input_ids=two, attention_mask=mask)
    expected = attempt(logits(stock, batch))
    if expected[1] is not None: return found | dict(made=f"no: {said(expected[1])}")
    if not expected[0][mask.bool()].isfinite().all(): return found | dict(made='no: its logits are not finite')
    found['made'] = type(stock).__name__
    model = build(name)
    found['convert'] = compared(expected, attempt(lambda: convert(build(name), window=3)(**batch).logits))
    _,error = attempt(lambda: hf.switch(model))
    if error is not None: return found | dict(logits=said(error))
    def real(x): return (x[0] if x[0] is None else x[0][mask.bool()]),x[1]
    scale = expected[0][mask.bool()].abs().max().item()
    ours = attempt(logits(model, batch))
    found['logits'] = compared(real(expected), real(ours), near=1e-4*max(scale, 1))
    if ours[1] is not None and found['logits'].startswith('refused'):
        return found | dict(look=said(attempt(lambda: hf.look(model, text[0]))[1]))
    looks,error = attempt(lambda: hf.look(model, text[0]))
    found['look'] = said(error) if error is not None else f'{len(looks.layers)} layers'
    wide,error = attempt(lambda: hf.add_windows(copy.deepcopy(model)))
    if error is not None: return found | dict(greedy=said(error))
    cache,error = attempt(lambda: handed_out(wide))
    found['cache'] = said(error) if error is not None else cache
    for way,generate in ways().items():
        if only and way not in only: continue
        peft = way=='prefix'
        with contextlib.redirect_stdout(open(os.devnull, 'w')):
            theirs = attempt(lambda: generate(copy.deepcopy(stock) if peft else stock, stock))
            found[way] = compared(theirs, attempt(lambda: generate(copy.deepcopy(wide) if peft else wide, stock)))
    if not steady(stock, wide):
        for way,cell in found.items():
            if str(cell).startswith('WRONG'): found[way] = 'stock: writes other tokens with its own cache than without'
    one = dict(inputs=text, attention_mask=torch.ones_like(text), **NEW)
    many = dict(inputs=two, attention_mask=mask, **NEW)
    narrow = hf.add_windows(copy.deepcopy(model), init=4.)
    found['helper'] = compared(attempt(lambda: stock.generate(**one, assistant_model=helper(stock))),
                               attempt(lambda: stock.generate(**one, assistant_model=helper(narrow))))
    every = attempt(lambda: narrow.generate(**one, use_cache=False))
    found['narrow'] = compared(every, attempt(lambda: narrow.generate(**one)))
    found['narrow_padded'] = compared(attempt(lambda: narrow.generate(**many, use_cache=False)),
                                      attempt(lambda: narrow.generate(**many)))
    for way,more in dict(lookup=dict(prompt_lookup_num_tokens=3), assisted=dict(assistant_model=helper(narrow))).items():
        with_stock = attempt(lambda: stock.generate(**one, **(more if way=='lookup' else dict(assistant_model=helper(stock)))))
        if with_stock[1] is not None: found[f'narrow_{way}'] = compared(with_stock, every)
        else: found[f'narrow_{way}'] = compared(every, attempt(lambda: narrow.generate(**one, **more)))
    return found

def in_a_process(name):
    "`row` in a fork, which may take its time, or die."
    with tempfile.TemporaryFile('w+') as answer:
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            try: json.dump(row(name), answer)
            except BaseException as e: json.dump(dict(model=name, made=f'no: {said(e)}'), answer)
            answer.flush()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answer.seek(0)
        text = answer.read()
    return json.loads(text) if text else dict(model=name, made=f'no: ended with {status}')

def names():
    "All causal architectures of the installed transformers."
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

def quiet():
    "One thread, no warnings, and the imports that every fork would repeat."
    import torch, transformers, transformers.generation.utils, dynattn.hf, peft
    torch.set_num_threads(1)
    warnings.filterwarnings('ignore')
    transformers.logging.set_verbosity_error()
    return transformers.__version__

def table(path=TABLE):
    "The rows of a table, by architecture."
    if not path.exists(): return {}
    with open(path, newline='', encoding='utf-8') as f: return {row['model']: row for row in csv.DictReader(f)}

def keep(path, row):
    "Put a row into a table, in place of that of the same architecture; those that transformers no longer has go."
    rows = table(path) | {row['model']: row}
    with open(path, 'w', newline='', encoding='utf-8') as f:
        out = csv.DictWriter(f, ['transformers','model','made',*COLUMNS], lineterminator='\n', restval='')
        out.writeheader()
        out.writerows(rows[name] for name in names() if name in rows)

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('names', nargs='*', help='architectures (default: all)')
    a.add_argument('--to', type=Path, default=TABLE)
    a.add_argument('--show', action='store_true', help='print the rows, write nothing')
    args = a.parse_args()
    version = quiet()
    for name in args.names or names():
        found = dict(transformers=version) | in_a_process(name)
        bad = {key: x for key,x in found.items() if str(x).startswith(('WRONG','error'))}
        print(json.dumps(found if args.show else dict(model=name, made=found['made'], **bad)), flush=True)
        if not args.show: keep(args.to, found)

if __name__=='__main__': main()
