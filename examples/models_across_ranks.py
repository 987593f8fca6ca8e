"""A model of transformers on several processes, each with its part of the sequence.

    torchrun --nproc-per-node 2 examples/models_across_ranks.py [--tokens 4096] [--model FOLDER]

The text is random ids. Without `--model` the model is a small Llama with windows and a seed. Every process prints its
time and the largest difference from the model in one process, divided by the largest logit. Chapter 82 tells how it
works; for a model of your own, import `parallelize`."""
import argparse, datetime, sys, time

def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=int, default=4096)
    parser.add_argument('--model', help='a folder or a name that transformers resolves')
    return parser.parse_args()

if __name__=='__main__': OPTIONS = arguments()      # `--help` needs no package

from contextvars import ContextVar
from dataclasses import dataclass
import torch, torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers import LlamaForCausalLM
from dynattn import PaddingMask, hf, parallel
from dynattn.configs import argument_names, one_cache
from dynattn.hf.layers import Added, Learned, attention_layers
from dynattn.hf.masks import Sight, sight_mask
from dynattn.hf.plugin import LayerCall

NAME = 'dynattn_ranks'
RUNNING:ContextVar = ContextVar('what computes attention in the call of a model that is running', default=None)

@dataclass(eq=False)
class Part:
    "A call of a model with one rank's part of the sequence."
    ranks: parallel.Ranks # the group, and what it exchanges
    length: int|Tensor # real tokens of the whole sequence: a number, or [B,1] where there is padding
    padded: bool # whether any rank holds padding

    def predicted(self, head, q, keep):
        "As `Learned.values`; what is predicted comes from the first token, on rank 0."
        values = Learned.values(head, q, None)
        return values if values.dim()==1 else parallel.from_rank(values, 0, self.ranks.group)

    def attention(self, call): # of this rank's part -> [B,H,n,dv]
        "Attention to the whole sequence."
        call.refuse_special('across ranks', 'call the model in one process')
        if call.dropout:
            raise ValueError(f"dropout: expected 0 across ranks, got {call.dropout}; set it to 0 or call eval()")
        q,s,n = call.q,call.sight,call.q.shape[2]
        options = dict(window=s.window, is_causal=s.causal, scale=call.scaling) | call.own_terms()
        if self.padded:
            real = torch.ones(len(q), n, dtype=torch.bool, device=q.device) if s.keep is None else s.keep
            options['padding'] = PaddingMask(real)
        if call.learned is not None: options |= call.learned(q, n, s, self.predicted, self.length)
        return parallel.attention(q, call.k, call.v, self.ranks.group, sums=False, **options)

@dataclass(eq=False)
class Mask:
    "Takes the place of a mask; a layer that is computed again gets the same one."
    sight: Sight
    part: object # with a method `attention`

def mask_of_call(*args, **kwargs):
    "The function that transformers calls where it would build a mask."
    return Mask(sight_mask(*args, **kwargs), RUNNING.get())

def attend(module, query, key, value, attention_mask, scaling=None, dropout=0., is_causal=None, **terms):
    "The function that a layer calls."
    Added.refuse_lost(module)
    if not isinstance(attention_mask, Mask) or attention_mask.part is None:
        raise ValueError("model: expected a call of the whole model, and masks by transformers' functions, got a call "
                         f"of one layer, or other masks, in {type(module).__name__}")
    call = LayerCall(module, query, key, value, attention_mask.sight, scaling, dropout, terms)
    return attention_mask.part.attention(call).transpose(1, 2).contiguous(), None

def tokens_of(kwargs): # [B,n] or [B,n,D]
    tokens = kwargs.get('input_ids')
    return kwargs.get('inputs_embeds') if tokens is None else tokens

def described(kwargs):
    "[tokens, rows, whether there is padding, whether a text begins late] of this rank's call."
    tokens,mask = tokens_of(kwargs),kwargs.get('attention_mask')
    if not isinstance(tokens, Tensor):
        raise TypeError(f"input_ids: expected a tensor [B,n], got {type(tokens).__name__}")
    if one_cache(dict(kwargs), 'cache') is not None:
        raise ValueError("cache: expected None across ranks, got a cache; nothing is generated there")
    if kwargs.get('output_attentions'):
        raise ValueError("output_attentions: expected False across ranks, got True; a rank has its own keys only")
    b,n = tokens.shape[:2]
    if mask is None:
        if kwargs.get('position_ids') is not None:
            raise ValueError("position_ids: expected None across ranks, or an attention_mask beside them, got ids "
                             "alone, which may tell packed texts apart")
        return [n, b, False, False]
    if not isinstance(mask, Tensor) or tuple(mask.shape)!=(b, n):
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: expected [B,n]={b,n}, this rank's part, or None, got {got}")
    keep = mask.bool()
    return [n, b, not keep.all(), n>0 and not keep[:,0].all()]

class Spread:
    "The hooks of a model that `parallelize` was given."
    def __init__(self, model, ranks):
        base = model.base_model
        self.ranks,self.names = ranks,argument_names(base)
        self.learned = [m.dynattn for m in model.modules() if hasattr(m, 'dynattn')]
        rotary = any('rotary' in type(m).__name__.lower() for m in model.modules())
        self.longest = None if rotary else getattr(model.config, 'max_position_embeddings', None)
        base.register_forward_pre_hook(self.enter, with_kwargs=True)
        base.register_forward_hook(self.leave, always_call=True)

    def check(self, lengths, batches, late):
        "Raise, on all ranks, where the parts do not fit together."
        if 0 in lengths:
            raise ValueError(f"input_ids: expected a token or more on each rank, got none on rank {lengths.index(0)}")
        if len(set(batches))>1: raise ValueError(f"input_ids: expected as many rows on all ranks, got {batches}")
        if self.longest is not None and sum(lengths)>self.longest:
            raise ValueError(f"input_ids: expected at most {self.longest} tokens over all ranks, as many as the model "
                             f"has positions, got {sum(lengths)}")
        heads = [head for l in self.learned for head in (l.sigma_head, l.alpha_head) if head is not None]
        predicted = any(hasattr(head, 'linear') or hasattr(head, 'proj') for head in heads)
        if late[0] and (predicted or any(l.n_global for l in self.learned)):
            raise ValueError("attention_mask: expected a real first token in each row, where leading tokens are "
                             "global or widths are predicted from them, got padding; pad on the right")

    def enter(self, base, args, kwargs):
        "Agree on the call, and give it its positions."
        if base.config._attn_implementation!=NAME:
            raise ValueError(f"model: expected attention across ranks, got {base.config._attn_implementation!r}; "
                             "add windows before you parallelize")
        kwargs,error,mine = {**dict(zip(self.names, args)), **kwargs},None,None
        try: mine = described(kwargs)
        except (TypeError,ValueError) as caught: error = caught
        lengths,batches,padded,late = map(list, zip(*self.ranks.told(mine, error)))
        self.check(lengths, batches, late)
        start,length,tokens = sum(lengths[:self.ranks.rank]),sum(lengths),tokens_of(kwargs)
        b,n = tokens.shape[:2]
        if any(padded):
            mask = kwargs.get('attention_mask')
            real = torch.full((b, 1), n, device=tokens.device) if mask is None else mask.bool().sum(1, keepdim=True)
            length = self.ranks.reduced(real, what='lengths of the texts')
        if kwargs.get('position_ids') is None:
            kwargs['position_ids'] = torch.arange(start, start+n, device=tokens.device)[None]
        if 'use_cache' in self.names: kwargs['use_cache'] = False
        RUNNING.set(Part(self.ranks, length, any(padded)))
        return (),kwargs

    def leave(self, base, args, output):
        "The call is over, whatever happened."
        RUNNING.set(None)

class Alone:
    "Stands for attention while a model is tried: no token sees another."
    def __init__(self): self.seen = []

    def attention(self, call):
        groups = call.q.shape[1]//call.k.shape[1]
        q,k,v = call.q,call.k.repeat_interleave(groups, 1),call.v.repeat_interleave(groups, 1)
        self.seen += [x.transpose(1, 2) for x in (q, k, v)]                    # [B,n,H,d]
        return v + q.mean(-1, keepdim=True) + k.mean(-1, keepdim=True)         # [B,H,n,dv]

@torch.no_grad()
def tried(model, ids, first=None, mask=None):
    """All outputs, and queries, keys and values of all layers, each [1,n,...].

    Positions begin at `first`, or as the model has them by itself."""
    alone,options = Alone(),{}
    if first is not None:
        options['position_ids'] = torch.arange(first, first+ids.shape[1], device=ids.device)[None]
    if mask is not None: options['attention_mask'] = mask
    if 'use_cache' in argument_names(model): options['use_cache'] = False
    RUNNING.set(alone)
    try: output = model(input_ids=ids, return_dict=True, **options)
    finally: RUNNING.set(None)
    outputs = {name: x for name,x in output.items() if isinstance(x, Tensor)}
    for key,x in outputs.items():
        if x.shape[:2]!=ids.shape:
            raise ValueError(f"model: expected outputs for each token, got {key} of shape {tuple(x.shape)} "
                             f"from {type(model).__name__}; spread the model without its pooling or its head")
    return [*outputs.values(), *alone.seen]

def alike(a, b, tolerance, part=slice(None)): # two lists of tensors [1,n,...]; of their tokens
    "Whether each pair is equal, up to a share of the largest value."
    def near(x, y): return bool((x-y).abs().max()<=tolerance*y.abs().max())
    return len(a)==len(b) and all(near(x[:,part].double(), y[:,part].double()) for x,y in zip(a, b))

def try_model(model):
    "Raise unless tokens meet in attention only, and position ids move them."
    name,n,cut = type(model).__name__,12,5
    ids,others = torch.randint(3, model.config.get_text_config().vocab_size, (2, 1, n),
                               generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).device)
    early,late,whole = slice(0, cut),slice(cut, n),tried(model, ids)
    precision = torch.finfo(whole[-1].dtype).eps
    for part,mixed in ((early, torch.cat([ids[:,early], others[:,late]], 1)),
                       (late, torch.cat([others[:,early], ids[:,late]], 1))):
        if not alike(tried(model, mixed), whole, 8*precision, part):
            raise ValueError(f"model: expected tokens that meet in attention only, got {name}, whose tokens "
                             f"{part.start} to {part.stop-1} of {n} change with the others")
    if not alike(tried(model, ids[:,late], cut), [x[:,late] for x in whole], precision**.5):
        raise ValueError(f"model: expected position_ids to say where a token stands, got {name}, whose tokens are "
                         f"others at position_ids {cut} to {n-1} than at these places")
    mask = (torch.arange(n, device=ids.device)>1).long()[None]
    if not alike(*(tried(model, ids, first, mask) for first in (None, 0)), 8*precision, late):
        raise ValueError(f"model: expected places that do not depend on padding, got {name}, which counts real tokens")

def no_generate(*args, **kwargs):
    raise ValueError("model: expected no call of generate across ranks, got one; a new token belongs to one rank, "
                     "and windows need a cache there (dynattn.hf.WindowedCache)")

def refuse_labels(model, args, kwargs):
    if kwargs.get('labels') is not None:
        raise ValueError("labels: expected None across ranks, got a tensor; the target of a rank's last token is on "
                         "the next rank, so compute the loss from the logits")

def refuse_model(model):
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel, got {type(model).__name__}")
    name,parameters = type(model).__name__,argument_names(model.base_model)
    if getattr(model.config, 'is_encoder_decoder', False):
        raise ValueError(f"model: expected an encoder or a decoder, got both in {name}")
    for needed in ('input_ids','position_ids'):
        if needed not in parameters: raise ValueError(f"model: expected one that takes {needed}, got {name}")
    if model.config._attn_implementation==NAME:
        raise ValueError(f"model: expected one that is not parallelized yet, got {name}")
    for m in model.modules():
        kinds = getattr(m, 'rope_type', None) # a word, or a word for each kind of layer
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ('dynamic','longrope'):
                raise ValueError("rope_type: expected angles that depend on a token's position alone, "
                                 f"got {kind!r} from {name}, whose angles depend on the length of the sequence")

def use_ranks(model):
    "Let the layers of a model call `attend`."
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_of_call)
    hf.switch(model) # raises where a model computes its own attention
    for layer in attention_layers(model).values(): layer.config._attn_implementation = NAME
    for m in model.modules():
        if isinstance(m, PreTrainedModel): m.set_attn_implementation(NAME)

def parallelize(
    model:PreTrainedModel, # changed in place, on each rank
    mesh=None, # `DeviceMesh` of one dimension or `ProcessGroup`, its ranks in the sequence's order (default: all)
) -> PreTrainedModel: # the same
    """Let a model work on a sequence that is split over the ranks of `mesh`.

    Each rank calls it with its slices of `input_ids` and `attention_mask`, a token or more, and gets the outputs for
    these tokens. A loss must be a sum over the ranks; `dynattn.parallel.sum_gradients` then adds up the gradients."""
    refuse_model(model)
    ranks,modes = parallel.Ranks(mesh),[(m, m.training) for m in model.modules()]
    use_ranks(model)
    model.eval()
    try: try_model(model)
    except Exception:
        hf.switch(model)
        raise
    finally:
        for m,training in modes: m.training = training
    Spread(model, ranks)
    model.register_forward_pre_hook(refuse_labels, with_kwargs=True)
    for name in ('generate','init_continuous_batching'):
        if hasattr(model, name): setattr(model, name, no_generate)
    return model

def loaded(folder): # or None
    if folder is not None: return AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=999, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=128, max_position_embeddings=65536)
    return hf.add_windows(LlamaForCausalLM(config), init=[8., 32., 64., 256.], n_global=2)

@torch.no_grad()
def main(options):
    dist.init_process_group('gloo', timeout=datetime.timedelta(minutes=10))
    rank,size = dist.get_rank(),dist.get_world_size()
    one,spread = (loaded(options.model).eval() for _ in range(2))
    parallelize(spread)
    ids = torch.randint(3, one.config.vocab_size, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    share = -(-options.tokens//size)
    part = slice(share*rank, share*(rank+1))
    before = time.perf_counter()
    logits = spread(input_ids=ids[:,part]).logits
    took,whole = time.perf_counter()-before,one(input_ids=ids).logits[:,part]
    differ = ((logits-whole).abs().max()/whole.abs().max()).item()
    sys.stdout.write(f'rank {rank}: {logits.shape[1]:,} tokens, {took:.2f} s, largest difference {differ:.1e}\n')
    sys.stdout.flush()
    dist.destroy_process_group()

if __name__=='__main__': main(OPTIONS)
