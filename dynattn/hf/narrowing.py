"""A pretrained transformer learns how far every head has to look"""
# %%
import math, random
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
import torch, torch.nn.functional as F
from torch import Tensor, nn
from ..encoder import write_atomic
from ..sigma import SigmaParameter
from . import plugin
from .plugin import add_windows, switch

# %%
class KeyHead(NamedTuple):
    "Where a key head stands, and how many query heads share it."
    layer: int
    head: int
    queries: int

def cache_share(
    width:Tensor, # [K] half-width of every key head, in tokens
    n:int, # length of the text
    sinks:int=0, # leading tokens that every query sees
) -> Tensor: # [], differentiable
    "The share of the keys that a causal model keeps after `n` tokens: the window, the token itself and the sinks."
    return (width+1+sinks).clamp(max=n).mean()/n

def pair_share(
    width:Tensor, # [K] half-width of every key head, in tokens
    n:int, # length of the text
    sinks:int=0, # leading tokens that see and are seen by all
) -> Tensor: # [], differentiable
    "The share of all pairs that an encoder's windows leave: an average over queries and heads."
    w = width.clamp(max=n-1)
    inside = (2*w+1)*n - w*(w+1)
    beyond = (n-1-w).clamp(min=0)                   # keys that the first query, or the first key, gains
    return ((inside + 2*sinks*beyond)/n**2).clamp(max=1).mean()

# %%
class HeadWidths(nn.Module):
    "The widths of a layer while they are learned: exp of a slice of one vector, the same for heads that share keys."
    def __init__(self, log_width, start, stop, queries):
        super().__init__()
        self.log_width,self.start,self.stop,self.queries = log_width,start,stop,queries

    def forward(self): # [H]
        return self.log_width[self.start:self.stop].exp().repeat_interleave(self.queries)

# %%
def _attentions(model):
    "The attention modules that have windows."
    return [m for m in model.modules() if getattr(getattr(m, 'dynattn', None), 'sigma_head', None) is not None]

def _key_heads(module):
    "How many key heads a layer has."
    heads = module.dynattn.heads
    groups = getattr(module, 'num_key_value_groups', None)
    if isinstance(groups, int): return heads//groups
    return getattr(module.config, 'num_key_value_heads', None) or heads

@contextmanager
def without_windows(model):
    "The full model, for as long as the block lasts."
    layers = [m.dynattn for m in _attentions(model)]
    heads = [l.sigma_head for l in layers]
    for l in layers: l.sigma_head = None
    try: yield model
    finally:
        for l,head in zip(layers, heads): l.sigma_head = head

# %%
class HeadVector:
    "One number for every key head of a model, as the logarithm of its width, in place of the widths of `add_windows`."
    def __init__(self, model, width):
        self.modules = _attentions(model)
        self.counts = [_key_heads(m) for m in self.modules]
        self.log_width = nn.Parameter(torch.full((sum(self.counts),), math.log(width)))
        start = 0
        for module,count in zip(self.modules, self.counts):
            module.dynattn.sigma_head = HeadWidths(self.log_width, start, start+count, module.dynattn.heads//count)
            start += count

    def widths(self): return self.log_width.detach().exp()

    @torch.no_grad()
    def set(self, widths): self.log_width.copy_(torch.as_tensor(widths, dtype=torch.float32).log())

# %%
class _MassByDistance:
    "Takes the weights of each layer as they are computed and keeps how much of them lies at which distance."
    def __init__(self, counts, sinks): self.counts,self.sinks,self.layers = list(counts),sinks,[]

    def append(self, seen):
        _,weights,_ = seen                                           # [B,H,N,M]
        b,h,n,m = weights.shape
        weights = weights.sum(0)
        weights[:,:,:self.sinks] = 0
        distance = (torch.arange(n)[:,None]-torch.arange(m)).abs()
        mass = torch.zeros(h, m).scatter_add_(1, distance.flatten().expand(h, -1), weights.flatten(1))
        count = self.counts[len(self.layers)]
        self.layers.append(mass.view(count, h//count, m).mean(1)/(b*n))

@torch.no_grad()
def mass_by_distance(
    model, # with windows
    batches, # a few are enough
    sinks:int, # leading keys, which are not counted
) -> Tensor: # [K,N]
    "How much of a head's attention lies at which distance in the full model, averaged over queries and texts."
    counts = [_key_heads(m) for m in _attentions(model)]
    total = 0
    for batch in batches:
        seen = _MassByDistance(counts, sinks)
        plugin._watch.append(seen)
        try:
            with without_windows(model): model.base_model(**_inputs(batch))
        finally: plugin._watch.remove(seen)
        total = total + torch.cat(seen.layers)
    return total/len(batches)

def widths_by_mass(
    mass:Tensor, # [K,N]
    lost:float, # the mass that may lie beyond the window
) -> Tensor: # [K]
    "The least width of every key head that leaves no more than `lost` outside."
    beyond = mass.flip(1).cumsum(1).flip(1)                          # at this distance or further
    return (beyond>lost).sum(1).clamp(min=1).float()

def _inputs(batch): return {k: v for k,v in batch.items() if k!='labels'}

# %%
def bisect(
    f, # increasing
    low:float, high:float,
    target:float,
) -> float:
    "Where `f` reaches `target`."
    for _ in range(60):
        middle = (low+high)/2
        low,high = (middle,high) if f(middle)<target else (low,middle)
    return high

# %%
@dataclass(frozen=True)
class Options:
    "Everything that the learned widths depend on, beside model and texts."
    keep: float = .25       # the share of the keys that is kept at the training context
    steps: int = 60         # texts that are learned from
    sinks: int = 4          # leading tokens that every query sees
    places: int = 512       # places of a text whose predictions are compared
    lr: float = .1          # rate of the logarithm of a width
    method: str = 'distill' # 'distill': stay close to the full model; 'loss': the model's own loss
    descent: float = .5     # part of the steps in which the share falls to `keep`
    memory: float = .9      # of the gradient that the multiplier is computed from
    seed: int = 0           # of the order of texts and of the places

# %%
def _hidden(model, batch):
    "The last hidden states [B,N,D]."
    return model.base_model(**_inputs(batch))[0]

def _logits(model, hidden):
    "Predictions from hidden states."
    logits = model.get_output_embeddings()(hidden)
    cap = getattr(model.config.get_text_config(), 'final_logit_softcapping', None)
    return logits if cap is None else cap*torch.tanh(logits/cap)

def _pooled(hidden, batch):
    "The mean of a text's real tokens [B,D]."
    mask = batch.get('attention_mask')
    if mask is None: return hidden.mean(1)
    real = mask[...,None].to(hidden.dtype)
    return (hidden*real).sum(1)/real.sum(1)

# %%
class Narrower:
    "The state of a run: widths, optimiser and what happened so far."
    def __init__(self, model, batches, options, causal=True):
        self.model,self.batches,self.options,self.causal = model,batches,options,causal
        self.n = max(b['input_ids'].shape[1] for b in batches)
        self.vector = HeadVector(model, self.n/4)
        self.most = self.n-1-(options.sinks if causal else 0)
        self.teacher = {}
        self.adam = torch.optim.Adam([self.vector.log_width], lr=options.lr, betas=(.9,.99))
        self.gradient = torch.zeros_like(self.vector.log_width)
        self.rows,self.step_number,self.first_share = [],0,None

    def share_of(self, width):
        return (cache_share if self.causal else pair_share)(width, self.n, self.options.sinks)

    def start_from(self, widths):
        "Begin with these widths [K]."
        self.vector.set(widths.clamp(1, self.most))
        self.first_share = self.share_of(self.vector.widths()).item()

    def start_by_mass(self, mass, share):
        "Begin where every head loses the same mass of attention, at this share."
        lost = bisect(lambda x: -self.share_of(widths_by_mass(mass, x).clamp(max=self.most)).item(), 0., 1., -share)
        self.start_from(widths_by_mass(mass, lost))

    def project(self, share):
        "All widths times one factor, so that the share is met."
        log_width,highest = self.vector.log_width,math.log(self.most)
        def moved(shift): return (log_width.detach()+shift).clamp(0, highest)
        shift = bisect(lambda x: self.share_of(moved(x).exp()).item(), -highest, highest, share)
        with torch.no_grad(): log_width.copy_(moved(shift))

    def target(self, step):
        "The share after a step: it falls geometrically in the first part of the run."
        o = self.options
        done = min((step+1)/max(o.descent*o.steps, 1), 1)
        return self.first_share*(o.keep/self.first_share)**done

    def places(self, batch, step):
        "The places of a batch, as indices into [B*N], that a step compares."
        generator = torch.Generator().manual_seed(self.options.seed*1_000_003+step)
        real = batch.get('attention_mask', torch.ones_like(batch['input_ids'])).flatten().nonzero()[:,0]
        return real[torch.randperm(len(real), generator=generator)[:self.options.places]].sort().values

    def order(self, step):
        "Which text a step reads; every pass over them has an order of its own."
        count = len(self.batches)
        shuffled = list(range(count))
        random.Random(f'{self.options.seed}/{step//count}').shuffle(shuffled)
        return shuffled[step%count]

    def full(self, i):
        "The full model's hidden states of text `i`, computed once."
        if i not in self.teacher:
            with torch.no_grad(), without_windows(self.model): self.teacher[i] = _hidden(self.model, self.batches[i])
        return self.teacher[i]

    def loss(self, i, step):
        "How far the narrowed model is from the full one on text `i`."
        batch = self.batches[i]
        if self.options.method=='loss': return self.model(**batch).loss
        full,hidden = self.full(i),_hidden(self.model, batch)
        if not self.causal: return (1-F.cosine_similarity(_pooled(hidden, batch), _pooled(full, batch))).mean()
        at = self.places(batch, step)
        with torch.no_grad(): wanted = _logits(self.model, full.flatten(0, 1)[at]).log_softmax(-1)
        given = _logits(self.model, hidden.flatten(0, 1)[at]).log_softmax(-1)
        return F.kl_div(given, wanted, log_target=True, reduction='batchmean')

    def multiplier(self, price):
        "The Lagrange multiplier with which the mean gradient leaves the share as it is, at least 0."
        return max(-(self.gradient@price/(price@price)).item(), 0.)

    def step(self):
        "Learn from one text."
        o,log_width,step = self.options,self.vector.log_width,self.step_number
        i = self.order(step)
        loss = self.loss(i, step)
        gradient, = torch.autograd.grad(loss, log_width)
        price, = torch.autograd.grad(self.share_of(log_width.exp()), log_width)
        self.gradient.mul_(o.memory).add_(gradient, alpha=1-o.memory)
        correction = 1-o.memory**(step+1)
        multiplier = self.multiplier(price)/correction
        log_width.grad = gradient+multiplier*price
        for group in self.adam.param_groups: group['lr'] = o.lr*(.05+.95*math.cos(math.pi/2*step/o.steps)**2)
        self.adam.step()
        self.project(self.target(step))
        self.step_number += 1
        self.rows.append(dict(step=step, text=i, loss=loss.item(), multiplier=multiplier,
                              share=self.share_of(self.vector.widths()).item()))
        return self.rows[-1]

    def state(self):
        return dict(log_width=self.vector.log_width.detach().clone(), adam=self.adam.state_dict(), gradient=self.gradient.clone(),
                    rows=self.rows, step=self.step_number, first_share=self.first_share, options=asdict(self.options))

    def restore(self, state):
        with torch.no_grad(): self.vector.log_width.copy_(state['log_width'])
        self.adam.load_state_dict(state['adam'])
        self.gradient.copy_(state['gradient'])
        self.rows,self.step_number,self.first_share = state['rows'],state['step'],state['first_share']

# %%
@torch.no_grad()
def token_losses(
    model, # causal
    ids:Tensor, # [1,N]
    chunk:int=512, # places whose predictions are held at a time
) -> Tensor: # [N-1]
    "Minus the log-probability of every token after the first."
    hidden,after = _hidden(model, dict(input_ids=ids))[0,:-1],ids[0,1:]
    parts = zip(hidden.split(chunk), after.split(chunk))
    return torch.cat([F.cross_entropy(_logits(model, h), y, reduction='none') for h,y in parts])
