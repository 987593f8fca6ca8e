"""The states of a document of any length, piece by piece and in constant memory.

    python examples/stream.py document.txt [--piece 4096] [--window 64] [--layers 2] [--causal]

An encoder reads its whole input at once, so its memory grows with the document. With windows it need not: a state depends
only on tokens within the combined reach of all layers, and everything older can be dropped. A causal encoder keeps the keys
that its windows still reach. One that looks both ways waits: in a layer whose widest window is w, the state of token i
needs the tokens up to i+w, and the delay adds up over layers.

The encoder here is a fresh one; each line is a piece, with the number of its states and their mean. For an encoder of your
own without a [CLS], which sums up the whole document, import `stream_states`."""
import argparse
from pathlib import Path

def options():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('document', type=Path, help='a file')
    p.add_argument('--piece', type=int, default=4096, help='bytes of a piece [4096]')
    p.add_argument('--window', type=int, default=64, help='tokens that each head sees to a side [64]')
    p.add_argument('--layers', type=int, default=2, help='of the encoder [2]')
    p.add_argument('--causal', action='store_true', help='no token sees later ones')
    return p.parse_args()

if __name__=='__main__': OPTIONS = options()  # before the imports, so that --help needs none of them
import torch, torch.nn.functional as F
from torch import Tensor
from dynattn import Encoder, EncoderConfig, attention
from dynattn.modules import with_widths
from dynattn.parts import merge_heads, split_heads
from dynattn.window import Window

def check(encoder):
    "Refuse options that need the whole document."
    c = encoder.config
    if c.cls:
        raise ValueError("config.cls: expected False for a stream, got True: [CLS] sums up the whole document")
    if c.n_global and not c.causal:
        raise ValueError("config.n_global: expected 0 for a stream that looks both ways, "
                         f"got {c.n_global}: those tokens see the whole document")
    if c.window=='predicted':
        raise ValueError("config.window: expected 'learned', an int or None for a stream, "
                         "got 'predicted': its widths depend on the document")
    if c.window is None and not c.causal:
        raise ValueError("config.window: expected 'learned' or an int for a stream that looks both "
                         "ways, got None: every state needs the whole document")
    if encoder.training and c.dropout:
        raise ValueError("encoder: expected evaluation mode for a stream, got training with dropout; "
                         "call encoder.eval()")

def delay(encoder): # -> tokens, of `config.patch` ids each
    "The number of later tokens that a state needs."
    check(encoder)
    if encoder.config.causal: return 0
    return sum(reach_of(window_of(layer)) for layer in encoder.layers)

def window_of(layer):
    "The window of a layer, as `attention` takes it."
    attn = layer.self_attn
    return with_widths(attn.window, None if attn.sigma_head is None else attn.sigma_head().detach())

def reach_of(window): return int(window.half_width().max()) if isinstance(window, Window) else window

class Waiting:
    "A layer that looks both ways, fed piece by piece: it holds the states that its windows still need."
    def __init__(self, layer):
        self.layer = layer
        self.window = window_of(layer)
        self.reach = reach_of(self.window)
        alpha_head = layer.self_attn.alpha_head
        self.alpha = None if alpha_head is None else alpha_head().detach()
        self.held = None     # [B,n,D] states from position `start`
        self.start = 0
        self.done = 0        # rows before it are out

    def push(self, x, last): # new states [B,n,D]; whether they are the last -> complete rows [B,m,D]
        "The rows whose window is complete; at the end of the document, all that remain."
        self.held = x if self.held is None else torch.cat([self.held, x], 1)
        end = self.start+self.held.shape[1]
        ready = end if last else max(end-self.reach, self.done)
        rows = self.rows(self.done, ready, end) if ready>self.done else x[:,:0]
        needed = max(ready-self.reach, self.start)
        self.held = self.held[:,needed-self.start:].clone()
        self.start,self.done = needed,ready
        return rows

    def rows(self, first, stop, end):
        "The layer's output at positions first..stop-1; states are held up to `end`."
        layer,attn = self.layer,self.layer.self_attn
        first_key,end_key = max(first-self.reach, self.start),min(stop+self.reach, end)
        x = self.held[:,first_key-self.start:end_key-self.start]
        own = slice(first-first_key, stop-first_key)
        projected = F.linear(layer.norm1(x), attn.in_proj_weight, attn.in_proj_bias)
        q,k,v = (split_heads(part, attn.num_heads) for part in projected.chunk(3, -1))
        seen = attention(q[:,:,own], k, v, window=self.window, alpha=self.alpha, q_offset=own.start)
        x = x[:,own] + attn.out_proj(merge_heads(seen))
        return x + layer.feed_forward(layer.norm2(x))

class Causal:
    "A causal layer, fed piece by piece: its cache keeps the keys that its windows still reach."
    def __init__(self, layer): self.layer,self.cache = layer,layer.self_attn.new_cache()
    def push(self, x, last): return self.layer(x, cache=self.cache) if x.shape[1] else x

def pieces_of(chunks, patch): # -> ids [B,n], and whether they are the last
    last = None
    for ids in chunks:
        if not isinstance(ids, Tensor) or ids.dim()!=2:
            got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"chunks: expected tensors of ids [B,n], got {got}")
        if last is not None and last.shape[1]%patch:
            raise ValueError(f"chunks: expected pieces of a multiple of {patch} ids before the last, got {last.shape[1]}")
        if last is not None and len(last)!=len(ids):
            raise ValueError(f"chunks: expected batch {len(last)}, got {len(ids)}")
        if last is not None and last.shape[1]: yield last,False
        last = ids
    if last is not None: yield last,True

def tokens_of(embed, chunks):
    "Tokens [B,n,D] of each piece, and whether it is the last; the embedding gets the earlier ids that it needs."
    held,position = None,0
    for ids,last in pieces_of(chunks, embed.patch):
        whole = ids if held is None else torch.cat([held, ids], 1)
        dropped = 0 if held is None else held.shape[1]//embed.patch
        yield embed(whole, offset=position-dropped)[0][:,dropped:],last
        position += ids.shape[1]//embed.patch
        held = whole[:,max(whole.shape[1]-embed.context, 0):] if embed.context else None

def stages_of(encoder): return [(Causal if encoder.config.causal else Waiting)(layer) for layer in encoder.layers]

@torch.no_grad()
def stream_states(encoder, chunks): # without [CLS]; ids [B,n], n a multiple of `config.patch` in all but the last
    "The states [B,m,D] of a document, piece by piece; put together they are `encoder(ids)` of the whole."
    check(encoder)
    stages = stages_of(encoder)
    for x,last in tokens_of(encoder.embed, chunks):
        for stage in stages: x = stage.push(x, last)
        if x.shape[1]: yield encoder.norm(x)

def bytes_of(path, size): # -> ids [1,n]
    "A file in pieces of `size` bytes."
    with path.open('rb') as f:
        while piece := f.read(size): yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)[None]

def main(a):
    torch.manual_seed(0)
    config = EncoderConfig(layers=a.layers, window=a.window, causal=a.causal, cls=False, n_global=0)
    encoder = Encoder(config).eval()
    print(f'a state is {delay(encoder)} tokens behind the newest')
    for states in stream_states(encoder, bytes_of(a.document, a.piece)):
        print(f'{states.shape[1]:,} states, mean {states.mean():.6f}')

if __name__=='__main__': main(OPTIONS)
