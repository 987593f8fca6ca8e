"""The plug-in beside transformers' sdpa on whole models: without windows, and with the default ones, so wide that
nothing changes.

MiniLM's shape, a small ModernBERT and a small Llama; prefill and a training step; padded and not. And T5's encoder at
2,048 tokens beside transformers' eager, which is what computes its bias; its windows see 128 tokens on either side. All
ways are timed in turn in one process on one thread, in time of the process; a row is the median ratio of its rounds.

    python benchmarks/hf_speed.py              # writes results/hf_speed.csv
    python benchmarks/hf_speed.py --rounds 5 --models T5    # its rows; those of other models stay
"""
import argparse, statistics, time, warnings
from datetime import date
from pathlib import Path
import torch
from transformers import (BertConfig, BertModel, LlamaConfig, LlamaModel, ModernBertConfig, ModernBertModel,
                          T5Config, T5EncoderModel)
from transformers.utils import logging
from dynattn import hf
from harness import RESULTS, commit, machine, rows_of, write

SIZES = dict(vocab_size=1000, num_hidden_layers=4, max_position_embeddings=2048, pad_token_id=0)
MODELS = {
    'MiniLM': lambda: BertModel(BertConfig(**SIZES, hidden_size=384, num_attention_heads=12, intermediate_size=1536)),
    'ModernBERT': lambda: ModernBertModel(ModernBertConfig(**SIZES, hidden_size=384, num_attention_heads=6,
                                                           intermediate_size=576, bos_token_id=1, eos_token_id=2,
                                                           cls_token_id=1, sep_token_id=2)),
    'Llama': lambda: LlamaModel(LlamaConfig(**SIZES, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
                                            intermediate_size=1024, bos_token_id=1, eos_token_id=2)),
    'T5': lambda: T5EncoderModel(T5Config(vocab_size=1000, num_layers=4, num_heads=8, d_model=512, d_kv=64, d_ff=1024,
                                          dropout_rate=0.)),
}
SHAPES = ((4, 256),) # texts and tokens
LONG = ((1, 2048),)
NARROW = 128 # tokens on either side, for T5

def ways(make, stock):
    "The same weights, computed by the stock implementation, by the plug-in, and with windows."
    models = {}
    for way in ('stock', 'dynattn', 'windows'):
        torch.manual_seed(0)
        model = make().eval()
        if way=='windows': hf.add_windows(model, init=NARROW if stock=='eager' else None)
        else: model.set_attn_implementation(stock if way=='stock' else way)
        models[way] = model
    return models

def step(model, batch, train):
    "One call, and the gradients if asked."
    if not train:
        with torch.no_grad(): return model(**batch, **no_cache(model))[0]
    model.zero_grad()
    out = model(**batch, **no_cache(model))[0]
    out.square().mean().backward()
    return out.detach()

def no_cache(model): return {'use_cache': False} if 'use_cache' in model.config else {}

def ratios(models, batch, train, rounds):
    "Seconds of each way over those of the stock one, the median over rounds; that one is timed before and after each."
    keep = batch.get('attention_mask', torch.ones_like(batch['input_ids'])).bool()
    usual = step(models['stock'], batch, train)[keep]
    assert (step(models['dynattn'], batch, train)[keep]-usual).abs().max() < 1e-4*(1+usual.abs().max())
    step(models['windows'], batch, train)
    def seconds(way):
        start = time.process_time()
        step(models[way], batch, train)
        return time.process_time()-start
    found = {way: [] for way in models}
    for _ in range(rounds):
        before = seconds('stock')
        for way in ('dynattn', 'windows'):
            taken = seconds(way)
            after = seconds('stock')
            found[way].append(taken/((before+after)/2))
            before = after
        found['stock'].append(before)
    return {way: statistics.median(x) for way,x in found.items()}

def batches(texts, tokens):
    "Without padding, and with texts of half the length and more."
    ids = torch.randint(3, 1000, (texts, tokens), generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(tokens/2, tokens, texts).long()[:,None]
    yield 'none', dict(input_ids=ids)
    if texts>1: yield 'right', dict(input_ids=ids, attention_mask=(torch.arange(tokens) < lengths).long())

def measure(name, rounds):
    "All rows of a model."
    stock = 'eager' if name=='T5' else 'sdpa'
    models = ways(MODELS[name], stock)
    usual = dict(date=date.today().isoformat(), machine=machine(), torch=torch.__version__, commit=commit(), model=name)
    for texts,tokens in LONG if name=='T5' else SHAPES:
        for padding,batch in batches(texts, tokens):
            for train in (False, True):
                found = ratios(models, batch, train, rounds)
                for way in ('dynattn', 'windows'):
                    row = usual | dict(B=texts, N=tokens, padding=padding, train=train, way=way, stock=stock,
                                       ratio=round(found[way], 3), stock_ms=round(found['stock']*1e3, 1))
                    kind = 'train' if train else 'prefill'
                    print(f"{name:11}{texts}x{tokens:<5}{padding:6}{kind:8}{way:8}{found[way]:6.2f}", flush=True)
                    yield row

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--rounds', type=int, default=11)
    a.add_argument('--models', nargs='+', default=list(MODELS), choices=list(MODELS))
    a.add_argument('--to', type=Path, default=RESULTS/'hf_speed.csv')
    args = a.parse_args()
    warnings.simplefilter('ignore')
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    hf.register()
    rows = [row for name in args.models for row in measure(name, args.rounds)]
    others = [row for row in rows_of(args.to.absolute()) if row['model'] not in args.models]
    write(args.to.absolute(), [*others, *rows], list(rows[0]))

if __name__=='__main__': main()
