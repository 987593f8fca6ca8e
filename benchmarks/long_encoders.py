"""Long documents through encoders on a CPU: time and memory of a call, stock and switched to `dynattn`.

ModernBERT's shapes with random weights: time and memory need no trained ones. Ways: transformers' `sdpa` and `eager`,
`hf.switch` alone (the same output: its own local layers go through the band), and windows of 1,024 tokens on its global
layers; and, as what no attention can save, the model whose attention hands its values on. All ways are timed in turn in
one process; the peak memory is that of a fresh process for each way.

    python benchmarks/long_encoders.py                      # base, 512 to 8,192 tokens, appends to results/long_encoders.csv
    python benchmarks/long_encoders.py --model large --lengths 512 2048 --threads 1 --dtype bfloat16
"""
import argparse, json, re, statistics, time, warnings
from datetime import date
from pathlib import Path
import torch
from transformers import AttentionInterface, ModernBertConfig, ModernBertModel
from transformers.utils import logging
from dynattn import hf
from harness import RESULTS, append, commit, machine, own_process

SHAPES = dict(base=dict(hidden_size=768, num_hidden_layers=22, num_attention_heads=12, intermediate_size=1152),
              large=dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=2624),
              tiny=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64))   # to see that it runs
SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
WAYS = 'sdpa','eager','switched','windows','values'
BATCHES = {'one text': [1.], 'four texts, padded': [1.,.8,.5,.25]}

def model_of(way, shape, dtype):
    torch.manual_seed(0)
    model = ModernBertModel(ModernBertConfig(vocab_size=1000, max_position_embeddings=8192, **SPECIAL, **SHAPES[shape]))
    model = model.to(dtype).eval()
    if way=='windows': return hf.add_windows(model, init=1024., edge='hard')
    if way=='switched': return hf.switch(model)
    model.set_attn_implementation(way)
    return model

def batch_of(kind, tokens):
    shares = BATCHES[kind]
    lengths = torch.tensor([[max(2, int(s*tokens))] for s in shares])
    ids = torch.randint(3, 1000, (len(shares), tokens), generator=torch.Generator().manual_seed(0))
    batch = dict(input_ids=ids)
    if len(shares)>1: batch['attention_mask'] = (torch.arange(tokens) < lengths).long()
    return batch

@torch.inference_mode()
def states(model, batch): return model(**batch).last_hidden_state

def peak_gib(way, args, kind, tokens):
    "Memory that a call takes at most, beyond what the loaded model takes, in a process of its own."
    asked = json.dumps(dict(way=way, shape=args.model, dtype=args.dtype, kind=kind, tokens=tokens, threads=args.threads))
    return float(own_process(__file__, '--one', asked).split()[-1])

def one(way, shape, dtype, kind, tokens, threads):
    torch.set_num_threads(threads)
    model,batch = model_of(way, shape, getattr(torch, dtype)),batch_of(kind, tokens)
    states(model, batch_of(kind, 16))
    Path('/proc/self/clear_refs').write_text('5')  # the peak begins anew here
    before = most()
    states(model, batch)
    print(most()-before)

def most(): # -> GiB
    "The largest memory of this process so far, as Linux knows it."
    status = Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s*(\d+) kB', status)[1])/2**20

def measure(args, kind, tokens):
    "A row for each way; the output is checked where nothing was narrowed."
    ways = [way for way in args.ways if way!='eager' or tokens<=args.eager_upto]
    models = {way: model_of(way, args.model, getattr(torch, args.dtype)) for way in ways}
    batch = batch_of(kind, tokens)
    keep = batch.get('attention_mask', torch.ones_like(batch['input_ids'])).bool()
    usual = states(models['sdpa'], batch)[keep]
    same = models.get('switched', models['sdpa'])
    apart = (states(same, batch)[keep]-usual).abs().max().item()
    assert apart < (1e-4 if args.dtype=='float32' else .2), f'the switched model is {apart} off'
    times = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            start = time.perf_counter()
            states(models[way], batch)
            times[way].append(time.perf_counter()-start)
    del models
    for way in ways:
        seconds = statistics.median(times[way])
        yield dict(date=date.today().isoformat(), machine=machine(), torch=torch.__version__, commit=commit(),
                   model=args.model, dtype=args.dtype, batch=kind, N=tokens, way=way, seconds=round(seconds, 3),
                   ratio=round(seconds/statistics.median(times['sdpa']), 3), apart=f'{apart:.1e}',
                   gib=round(peak_gib(way, args, kind, tokens), 3))

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--model', default='base', choices=list(SHAPES))
    a.add_argument('--lengths', type=int, nargs='+', default=[512,1024,2048,4096,8192])
    a.add_argument('--batches', nargs='+', default=['one text'], choices=list(BATCHES))
    a.add_argument('--ways', nargs='+', default=list(WAYS), choices=WAYS)
    a.add_argument('--dtype', default='float32', choices=['float32','bfloat16'])
    a.add_argument('--threads', type=int, default=torch.get_num_threads())
    a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--eager-upto', type=int, default=4096, help='longest text for eager, whose memory is quadratic')
    a.add_argument('--to', type=Path, default=RESULTS/'long_encoders.csv')
    a.add_argument('--one', help=argparse.SUPPRESS)
    args = a.parse_args()
    warnings.simplefilter('ignore')
    logging.set_verbosity_error()
    hf.register()
    AttentionInterface.register('values', lambda module, q, k, v, mask, **kwargs: (v.transpose(1, 2), None))
    if args.one: return one(**json.loads(args.one))
    torch.set_num_threads(args.threads)
    for kind in args.batches:
        for tokens in args.lengths:
            for row in measure(args, kind, tokens):
                append(args.to.absolute(), [row], list(row))
                print(f"{kind:20}{tokens:>6}{row['way']:>10}{row['seconds']:>9} s{row['ratio']:>7}{row['gib']:>8} GiB", flush=True)

if __name__=='__main__': main()
