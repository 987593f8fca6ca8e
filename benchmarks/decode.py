"""One token at a time: what a token costs, and what the cache holds, after 1k to 128k tokens.

A small Llama (4 layers, 8 heads on 4 key heads of 64) whose heads have windows of mixed widths, beside the same model with
PyTorch's attention and the caches of transformers: `DynamicCache`, `StaticCache`, and one sliding window for all, as Mistral's.

    python benchmarks/decode.py --threads 2    # appends to results/decode.csv; about eight minutes
    python benchmarks/decode.py --upto 8192

Lengths that the file has for this commit and number of threads are left out, so a run that was stopped goes on where it was.
"""
import argparse, statistics, time, warnings
import torch
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache
from transformers.utils import logging
from dynattn import Window, hf
from dynattn.cache import WindowedLayer
from dynattn.configs import cache_argument
from harness import append, commit, machine, rows_of

LAYERS,HEADS,KV_HEADS,WIDTH = 4,8,4,64
MEAN,SINKS = 256,4

def widths(seed=0):
    "[L,H] widths in tokens: from 32 to 1,024, the most of them short, the same number of keys on average as one window of MEAN."
    g = torch.Generator().manual_seed(seed)
    w = 32*32**torch.rand(LAYERS, KV_HEADS, generator=g)
    w = w/w.mean()*MEAN
    return w.repeat_interleave(HEADS//KV_HEADS, 1)

SHAPE = dict(vocab_size=1000, hidden_size=HEADS*WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
             intermediate_size=1024, max_position_embeddings=2**18, eos_token_id=None, bos_token_id=None, pad_token_id=0)

def llama(impl):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    if impl=='dynattn': hf.add_windows(model, init=widths(), n_global=SINKS)
    else: model.set_attn_implementation(impl)
    return model

def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=MEAN+1)).eval()

def filled_windows(model, keys, values):
    "A `WindowedCache` that has seen these keys [1,Hkv,M,d]."
    cache = hf.WindowedCache(model)
    for layer,module in zip(cache.layers, model.model.layers):
        learned = module.self_attn.dynattn
        window = Window.default(learned.sigma_head())
        layer.windows = WindowedLayer(HEADS, KV_HEADS, window=window, n_global=learned.n_global, scale=WIDTH**-.5)
        layer.lazy_initialization(keys, values)
        for at in range(0, keys.shape[2], 8192):   # queries do not matter here
            k,v = keys[:,:,at:at+8192],values[:,:,at:at+8192]
            layer.windows.attend(k.repeat_interleave(HEADS//KV_HEADS, 1), k, v)
    return cache

def filled(cache, keys, values):
    "A cache of transformers that has seen these keys."
    for layer in range(LAYERS): cache.update(keys, values, layer)
    return cache

def size(cache):
    "Bytes of keys and values."
    if isinstance(cache, hf.WindowedCache): return cache.nbytes
    return sum(x.numel()*x.element_size() for l in cache.layers for x in (l.keys, l.values))

def stepper(model, cache, seen):
    "Each call generates one more token."
    token,state,past = torch.ones(1, 1, dtype=torch.long),dict(seen=seen),{cache_argument(model): cache}
    def step():
        at = torch.tensor([[state['seen']]])
        model(token, **past, position_ids=at, use_cache=True, logits_to_keep=1)
        state['seen'] += 1
    return step

def attention_steps(seen, keys, values):
    "What attention and its cache take for one layer and token, without the rest of the model."
    q,k = torch.randn(1, HEADS, 1, WIDTH),torch.randn(1, KV_HEADS, 1, WIDTH)
    window = Window.default(widths()[0])
    kept = WindowedLayer(HEADS, KV_HEADS, window=window, n_global=SINKS)
    kept.attend(keys.repeat_interleave(HEADS//KV_HEADS, 1), keys, values)
    grown = DynamicCache()
    grown.update(keys, values, 0)
    def dynamic():
        full_k,full_v = grown.update(k, k, 0)
        F.scaled_dot_product_attention(q, full_k, full_v, enable_gqa=True)
    one = [x[:,:,-MEAN-1:].contiguous() for x in (keys, values)]
    return {'dynattn.WindowedCache': lambda: kept.attend(q, k, k),
            'SDPA, DynamicCache': dynamic,
            'SDPA, all keys': lambda: F.scaled_dot_product_attention(q, keys, values, enable_gqa=True),
            'SDPA, one window for all': lambda: F.scaled_dot_product_attention(q, *one, enable_gqa=True)}

def medians(fns, rounds):
    "Median seconds of each, in turn."
    for fn in fns.values():
        for _ in range(3): fn()
    taken = {name: [] for name in fns}
    for _ in range(rounds):
        for name,fn in fns.items():
            start = time.perf_counter(); fn(); taken[name].append(time.perf_counter()-start)
    return {name: statistics.median(x) for name,x in taken.items()}

def same_tokens():
    "The windowed cache writes what a full one does under the same windows; else nothing is measured."
    model,prompt = llama('dynattn'),torch.randint(1, 1000, (1, 1500), generator=torch.Generator().manual_seed(1))
    full = model.generate(prompt, max_new_tokens=20, do_sample=False, cache_implementation='dynamic')
    assert torch.equal(full, model.generate(prompt, max_new_tokens=20, do_sample=False))

def measured():
    "The lengths of the cache that this commit has on this machine already."
    return {int(row['N']) for row in rows_of('decode.csv') if (row['commit'],row['machine'])==(commit(),machine())}

@torch.no_grad()
def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--upto', type=int, default=2**17)
    a.add_argument('--rounds', type=int, default=30)
    a.add_argument('--threads', type=int, default=torch.get_num_threads())
    args = a.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter('ignore'); logging.set_verbosity_error()
    done = measured()
    same_tokens()
    case = dict(B=1, H=HEADS, d=WIDTH, w=MEAN, dtype='float32')
    for seen in (2**10, 2**13, 2**15, 2**17):
        if seen>args.upto: break
        if seen in done: continue
        keys,values = torch.randn(2, 1, KV_HEADS, seen, WIDTH)
        ours,stock,sliding = llama('dynattn'),llama('sdpa'),mistral()
        static = StaticCache(config=stock.config, max_cache_len=seen+200)
        caches = {'dynattn.WindowedCache': (ours, filled_windows(ours, keys, values)),
                  'SDPA, DynamicCache': (stock, filled(DynamicCache(config=stock.config), keys, values)),
                  'SDPA, StaticCache': (stock, filled(static, keys, values)),
                  'SDPA, one window for all': (sliding, filled(DynamicCache(config=sliding.config), keys, values))}
        held = {name: size(cache) for name,(_,cache) in caches.items()}
        rows = []
        for what,fns in (('token', {name: stepper(model, cache, seen) for name,(model,cache) in caches.items()}),
                         ('attention', attention_steps(seen, keys, values))):
            for name,s in medians(fns, args.rounds).items():
                mb = held[name]/1e6 if what=='token' else None
                rows.append({**case, 'suite': 'decode', 'op': name, 'pass': what, 'N': seen, 'ms': round(s*1e3, 4), 'mb': mb})
                print(f"{seen:7} {what:9} {name:26} {s*1e3:8.3f} ms" + (f" {mb:9.2f} MB" if mb else ''), flush=True)
        del caches
        if seen<=2**13:
            prompt = torch.randint(1, 1000, (1, seen))
            fns = {name: (lambda m=model: m(prompt, use_cache=True, logits_to_keep=1)) for name,model in
                   (('dynattn.WindowedCache', ours), ('SDPA, DynamicCache', stock), ('SDPA, one window for all', sliding))}
            fns['dynattn.WindowedCache'] = lambda: ours(prompt, **{cache_argument(ours): hf.WindowedCache(ours)}, logits_to_keep=1)
            for name,s in medians(fns, 3).items():
                rows.append({**case, 'suite': 'decode', 'op': name, 'pass': 'prefill', 'N': seen, 'ms': round(s*1e3, 3)})
                print(f"{seen:7} prefill   {name:26} {s*1e3:8.1f} ms", flush=True)
        append('decode.csv', rows)

if __name__=='__main__': main()
