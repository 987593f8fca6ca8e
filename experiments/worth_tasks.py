"""The small tasks of `worth.py`: a batch of ids and the labels that are asked, at any length.

Each follows a task of the literature and says what was made easier, so that two layers of width 64 learn it at
64 tokens or fewer within seconds. A label stands at the position whose next output is judged; `ASKED_NOT` elsewhere."""
from dataclasses import dataclass
from typing import Callable
import torch
from torch import Tensor

ASKED_NOT = -100     # the label that cross entropy ignores

@dataclass(frozen=True)
class Task:
    "Makes batches of ids and labels [B,N], both in 0..vocab-1."
    vocab: int
    make: Callable    # (generator, batch, n) -> ids, labels
    steps: int        # of training
    balanced: bool = False    # accuracy is the mean of two kinds of positions: the answer repeats, or it changes

# ---------------------------------------------------------------- one answer per position, from nearby

SYMBOLS,LONGEST_RUN = 8,8

def local_count(generator, batch, n):
    """How often has the symbol of this position stood here without a break? The first time is 0.

    As in the ASEntmax study, whose runs go up to 48; ours have 1 to 8 symbols."""
    lengths = torch.randint(1, LONGEST_RUN+1, (batch, n), generator=generator)
    ends = lengths.cumsum(1)                                                     # [B,runs], the first position after
    position = torch.arange(n).expand(batch, n).contiguous()
    run = torch.searchsorted(ends, position, right=True)                         # [B,N], in which run it stands
    starts = ends-lengths
    steps = torch.randint(1, SYMBOLS, (batch, n), generator=generator)   # never 0: runs differ
    symbols = steps.cumsum(1) % SYMBOLS
    return symbols.gather(1, run), position-starts.gather(1, run)

def two_back(generator, batch, n):
    "The symbol two positions before; 16 symbols, as in the ASEntmax study."
    ids = torch.randint(16, (batch, n), generator=generator)
    labels = ids.roll(2, 1)
    labels[:,:2] = ASKED_NOT
    return ids, labels

# ---------------------------------------------------------------- one answer per question, from anywhere

WRITE,IGNORE,READ = 0,1,2
FIRST_BIT = 3      # the ids 3 and 4 are the bits 0 and 1

def flip_flop(generator, batch, n):
    """Pairs of an instruction and a bit; after `READ` stands the bit of the last `WRITE`.

    As Liu and others have it: 80 % of the instructions are to be ignored, 10 % write, 10 % read, the first one
    writes; every read is asked, which trains faster than one question at the end."""
    pairs = (n+1)//2
    draw = torch.rand(batch, pairs, generator=generator)
    order = torch.full((batch, pairs), IGNORE)
    order[draw<.1] = WRITE
    order[draw>=.9] = READ
    order[:,0] = WRITE
    bits = torch.randint(2, (batch, pairs), generator=generator)
    place = torch.where(order==WRITE, torch.arange(pairs), 0).cummax(1).values   # of the last write
    kept = bits.gather(1, place)
    bits = torch.where(order==READ, kept, bits) + FIRST_BIT
    ids = torch.stack((order, bits), 2).flatten(1)[:,:n]
    labels = torch.full((batch, 2*pairs), ASKED_NOT)
    labels[:,::2] = torch.where(order==READ, kept+FIRST_BIT, ASKED_NOT)
    return ids, labels[:,:n]

KEYS,VALUES,PAIRS = 8,8,8
BLANK,FIRST_KEY,FIRST_PAIR = 0,1,1+KEYS      # ids: filling, then the keys, then a key with its value
ANSWERS = FIRST_PAIR+KEYS*VALUES             # the values, which are only answered

def recall(generator, batch, n):
    """Multi-query recall: pairs of a key and its value lie in the first half, the second asks for the values of keys.

    As MQAR has it, but a pair is one token, so that one layer can find it, and every one of the eight keys is there
    once however long the sequence is: only the distance and the filling grow."""
    half = n//2
    slots = torch.rand(batch, half, generator=generator).argsort(1)[:,:PAIRS]            # [B,8], where the pairs stand
    values = torch.randint(VALUES, (batch, KEYS), generator=generator)
    ids = torch.full((batch, n), BLANK)
    ids.scatter_(1, slots, FIRST_PAIR+torch.arange(KEYS)*VALUES+values)
    which = torch.randint(KEYS, (batch, n-half), generator=generator)
    asked = torch.rand(batch, n-half, generator=generator)<.5
    ids[:,half:] = torch.where(asked, FIRST_KEY+which, BLANK)
    labels = torch.full((batch, n), ASKED_NOT)
    labels[:,half:] = torch.where(asked, ANSWERS+values.gather(1, which), ASKED_NOT)
    return ids, labels

# ---------------------------------------------------------------- the whole source is needed

def _answered(source, answer, separator):
    "The source, a separator and all but the last symbol of the answer: what a decoder reads while it answers."
    batch,m = source.shape
    ids = torch.cat((source, torch.full((batch, 1), separator), answer[:,:-1]), 1)      # [B,2m]
    labels = torch.cat((torch.full_like(source, ASKED_NOT), answer), 1)
    return ids, labels

COPIED,SORTED = 64,8       # symbols

def copy(generator, batch, n):
    "The source again; 64 symbols (the ASEntmax study has 32), so that few stand twice at the lengths of training."
    source = torch.randint(COPIED, (batch, n//2), generator=generator)
    return _answered(source, source, COPIED)

def reverse(generator, batch, n):
    "The source from its end to its beginning, 64 symbols as in `copy`."
    source = torch.randint(COPIED, (batch, n//2), generator=generator)
    return _answered(source, source.flip(1), COPIED)

def sort(generator, batch, n):
    "The source in order, 8 symbols (the ASEntmax study has 32)."
    source = torch.randint(SORTED, (batch, n//2), generator=generator)
    return _answered(source, source.sort(1).values, SORTED)

TASKS = dict(
    local_count=Task(SYMBOLS, local_count, 250),
    two_back=Task(16, two_back, 120),
    flip_flop=Task(5, flip_flop, 300),
    recall=Task(ANSWERS+VALUES, recall, 400),
    sort=Task(SORTED+1, sort, 400, balanced=True),
    copy=Task(COPIED+1, copy, 700),
    reverse=Task(COPIED+1, reverse, 1000))

def right_answers(
    task:Task,
    predicted:Tensor, # [B,N] ids
    ids:Tensor, # [B,N]
    labels:Tensor, # [B,N]
) -> tuple: # (accuracy of the answers, share of sequences without a mistake)
    "With the true answers before it a decoder makes no mistake exactly if it makes none on its own."
    asked = labels!=ASKED_NOT
    right = (predicted==labels) & asked
    whole = (right==asked).all(1)[asked.any(1)].float().mean().item()
    if not task.balanced: return (right.sum()/asked.sum()).item(), whole
    repeats = asked & (labels==ids)
    changes = asked & (labels!=ids)
    shares = [(right & kind).sum()/kind.sum() for kind in (repeats, changes) if kind.any()]
    return torch.stack(shares).mean().item(), whole
