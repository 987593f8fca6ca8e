"""What users write, on a GPU: layers, models and caches beside the same program in float64 on the CPU; a row for each.

python benchmarks/gpu_programs.py --to checks.csv    all of them
python benchmarks/gpu_programs.py --only cache       those whose name holds the word
Without a GPU the programs run on the CPU, which says that they are sound themselves. A program gets a device and a dtype and returns
tensors; all its random numbers are drawn on the CPU."""
import argparse, copy, os, sys
from contextlib import contextmanager
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))
import torch
import dynattn
from torch import nn
from dynattn import MultiheadAttention, Window
from dynattn.hf import add_windows
from harness import ask_all, part_of

DEV = 'cuda' if torch.cuda.is_available() else 'cpu'
programs = {}
def program(f): programs[f.__name__.replace('_', ' ')] = f; return f

def draw(*shape, seed=0): return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

def layer(device, dtype, **options):
    torch.manual_seed(0)
    return MultiheadAttention(64, 4, batch_first=True, **options).to(device, dtype)

def to_itself(model, x, **options): return model(x, x, x, need_weights=False, **options)[0]

def square(out): return (out if out.dtype==torch.float64 else out.float()).pow(2).mean()

def trained(model, x, call=to_itself):
    "Output, and the gradients of all parameters, of one step."
    out = call(model, x)
    square(out).backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]

@program
def a_layer_that_learns_widths(device, dtype):
    x = draw(2, 200, 64).to(device, dtype)
    return trained(layer(device, dtype, window='learned', init_width=[4., 20., 90., 400.]), x)

@program
def a_layer_with_widths_from_the_text(device, dtype):
    x = draw(2, 120, 64).to(device, dtype)
    return trained(layer(device, dtype, window='predicted'), x)

@program
def a_layer_that_learns_alpha(device, dtype):
    x = draw(2, 200, 64).to(device, dtype)
    return trained(layer(device, dtype, window='learned', alpha='learned', init_width=30.), x)

@program
def padding(device, dtype):
    x,real = draw(3, 90, 64).to(device, dtype),torch.tensor([90, 41, 7])
    missing = (torch.arange(90)>=real[:,None]).to(device)
    out = to_itself(layer(device, dtype, window=16), x, key_padding_mask=missing)
    return [out[~missing]]

@program
def a_converted_encoder(device, dtype):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0., batch_first=True), 2, enable_nested_tensor=False)
    model = dynattn.convert(model.to(device, dtype), window='learned', init_width=12.)
    return trained(model, draw(2, 150, 64).to(device, dtype), nn.Module.__call__)

@program
def autocast(device, dtype):
    x = draw(2, 200, 64).to(device, torch.float64 if dtype==torch.float64 else torch.float32)
    model = layer(device, x.dtype, window='learned', init_width=20.)
    with torch.autocast(device, torch.bfloat16, enabled=dtype==torch.bfloat16): return trained(model, x)

@program
def a_compiled_layer(device, dtype):
    x = draw(2, 128, 64).to(device, dtype)
    model = layer(device, dtype, window='learned', init_width=20.)
    return trained(model if dtype==torch.float64 else torch.compile(model), x)

@program
def checkpointing(device, dtype):
    from torch.utils.checkpoint import checkpoint
    x = draw(2, 100, 64).to(device, dtype).requires_grad_()
    model = layer(device, dtype, window='learned', alpha=1.5)
    out = checkpoint(lambda x: to_itself(model, x), x, use_reentrant=False)
    square(out).backward()
    return [out, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

@program
def a_cache_token_by_token(device, dtype):
    model,x = layer(device, dtype, window=(12, 0)).eval(),draw(2, 50, 64).to(device, dtype)
    cache,out = model.new_cache(),[]
    with torch.no_grad():
        for t in range(50): out.append(to_itself(model, x[:,t:t+1], is_causal=True, cache=cache))
        whole = to_itself(model, x, is_causal=True)
    return [torch.cat(out, 1), whole]

@program
def saved_and_loaded(device, dtype):
    first,second = (layer(device, dtype, window='learned', init_width=w) for w in (5., 50.))
    second.load_state_dict({name: t.cpu() for name,t in first.state_dict().items()})
    x = draw(1, 64, 64).to(device, dtype)
    return [to_itself(second, x), to_itself(copy.deepcopy(second), x)]

@program
def packed_texts(device, dtype):
    q,k,v = (draw(1, 4, 150, 32, seed=seed).to(device, dtype).requires_grad_() for seed in range(3))
    texts = torch.tensor([40, 1, 109])
    segments = torch.arange(3).repeat_interleave(texts)[None].to(device)
    out = dynattn.attention(q, k, v, window=Window(torch.tensor(9., device=device)), segments=segments, is_causal=True)
    square(out).backward()
    return [out, q.grad, k.grad, v.grad]

@program
def weights_of_a_band(device, dtype):
    q,k = (draw(1, 2, 80, 32, seed=seed).to(device, dtype) for seed in range(2))
    return [dynattn.window_weights(q, k, window=7, reduce='distance')]

@program
def what_the_kernels_refuse(device, dtype):
    "Sinks, a soft cap and a bias are computed by another engine."
    q,k,v = (draw(1, 4, 70, 32, seed=seed).to(device, dtype) for seed in range(3))
    with torch.no_grad(): return [dynattn.attention(q, k, v, window=9, **more) for more in (dict(sink=torch.zeros(4, device=device)), dict(softcap=5.))]

def language_model(device, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, attn_implementation='sdpa')
    return LlamaForCausalLM(config).to(device, dtype)

def ids(b, n): return torch.randint(5, 95, (b,n), generator=torch.Generator().manual_seed(0))

@program
def a_language_model_with_windows(device, dtype):
    model,x = add_windows(language_model(device, dtype), init=10.),ids(2, 60).to(device)
    out = model(x, labels=x)
    out.loss.backward()
    return [out.logits, *(p.grad for p in model.parameters() if p.grad is not None)]

@program
def a_language_model_that_generates(device, dtype):
    "Its logits beside a cache that keeps what windows reach."
    model,x = add_windows(language_model(device, dtype), init=10.).eval(),ids(1, 40).to(device)
    found = model.generate(x, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return [found.logits[0]]

@contextmanager
def counted():
    "The names of our kernels that are started meanwhile."
    names = set()
    if DEV=='cpu': yield names; return
    from dynattn.engine.triton import primitives
    start = primitives._start
    def noted(kernel, *args, **arguments):
        names.add(kernel.fn.__name__.strip('_').removesuffix('_kernel'))
        return start(kernel, *args, **arguments)
    primitives._start = noted
    try: yield names
    finally: primitives._start = start

def compare(name, dtype):
    "The largest relative error of what a program returns."
    exact = [t.detach() for t in programs[name]('cpu', torch.float64)]
    with counted() as kernels: found = [t.detach().cpu().double() for t in programs[name](DEV, dtype)]
    if len(exact)!=len(found): raise AssertionError(f'{len(found)} results, and {len(exact)} in float64')
    size = max(t.norm() for t in exact)
    off = max(((a-b.double()).norm()/b.norm().clamp(min=1e-3*size)).item() for a,b in zip(found, exact))
    allowed = 1e-4 if dtype==torch.float32 else .1
    return dict(error=off, allowed=allowed, where=' '.join(sorted(kernels)), holds=off<=allowed)

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--only', default='', help="programs whose name holds this")
    a.add_argument('--to', help="a CSV file to append to (default: none)")
    a.add_argument('--part', type=part_of, default='0/1', help="0/4: the first of four parts, which may run side by side (default: all)")
    args = a.parse_args()
    first,parts = args.part
    asked = [('program', compare, name, dtype) for name in programs if args.only in name for dtype in (torch.float32, torch.bfloat16)]
    ask_all(asked[first::parts], args.to and os.path.abspath(args.to))
