"""Where learned windows and entmax pay: small tasks at 64 times the length of training, and a character language model.

    python experiments/worth.py                                  # everything, five seeds: hours of one core
    python experiments/worth.py --suite tasks --task flip_flop --method softmax learned --seeds 2
    python experiments/worth.py --suite language --seeds 2
    python experiments/worth.py --costs                          # times only: all methods in turn, a few minutes
    python experiments/worth.py --short --to FOLDER              # one task, two seeds, a minute or two

Decoders of two layers and width 64 are trained on 32 to 64 tokens and judged at 64, 256, 1,024 and 4,096. A row per
task, method, seed and length is appended to worth.csv as soon as it is known, with what it cost; a second run goes on
where the first one stopped. All methods of a seed see the same training sequences in the same order and are judged on
the same texts. Times are the processor's, of one thread, since other work may share the machine."""
import argparse, math, statistics, sys, sysconfig, time
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
import torch, torch.nn.functional as F
from torch import Tensor, nn
from dynattn import attention
from dynattn.sparsity import AlphaHead
from dynattn.parts import FeedForward, merge_heads, split_heads
from dynattn.sigma import SigmaHead, SigmaParameter
from dynattn.window import Window
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
from harness import RESULTS, append, count_cpu_time, rows_of
from rivals import Parabola, Pointers
from worth_tasks import ASKED_NOT, TASKS, right_answers

DIM,HEADS,HIDDEN,BATCH = 64,4,128,16
SHORTEST,LONGEST = 32,64                                    # tokens of a training sequence
TESTS = {64: 64, 256: 8, 1024: 2, 4096: 1}                  # length -> sequences that are judged
SLOW_TESTS = {64: 64, 256: 16, 1024: 2}                     # one width per query is computed without a band
WIDTHS = (4, 16, 48)                                        # of the search for the best fixed one
SEARCH_SEED = 100                                           # its texts are no test's
RAMP = 8                                                    # tokens, of adaptive span's mask
SLOPES = dict(half_alibi=(1., .25, 0., 0.), alibi=(.25, .0625, .015625, .00390625))

# ---------------------------------------------------------------- what is compared

@dataclass(frozen=True)
class Method:
    "How far a head looks and how it weighs what it sees."
    window: str = 'none'          # none, fixed, span, learned, predicted, or one of `RIVALS`
    width: int = 0                # half-width of a fixed window; 0: the best one of the search
    alpha: str = 'none'           # none (softmax), fixed (1.5) or learned
    scaled: bool = False          # scores times a learned factor that grows with the length (ASEntmax)

METHODS = dict(
    softmax=Method(), fixed=Method('fixed'), span=Method('span'), learned=Method('learned'),
    predicted=Method('predicted'), entmax=Method(alpha='fixed'), alpha=Method(alpha='learned'),
    learned_alpha=Method('learned', alpha='learned'),
    asentmax=Method(alpha='fixed', scaled=True))
# Published windows with a learned width per head, in the place of `Window.default`; see rivals.py and chapter 16.
RIVALS = dict(boundaries=Pointers(), parabola=Parabola(), bell='gaussian')
SEARCHED = {f'fixed_{w}': Method('fixed', w) for w in WIDTHS}

@dataclass(frozen=True)
class Settings:
    "What a run depends on besides task, method and seed; each is a column."
    positions: str = 'rope'       # rope, half_alibi (two heads with, two without), alibi or none
    price: float = .01            # added to the loss for windows as wide as the sequence
    price_from: float = .25       # share of the training after which the price is asked
    sigma_lr: float = 10.         # rate of what gives the widths, as a multiple of the rate
    init_width: float = 32.       # tokens
    lr: float = 5e-3
    examples: int = 0             # training sequences that are seen again and again; 0: always new ones
    steps: int = 0                # of training; 0: what the task says

def gentle(name, s):
    "Predicted widths collapse at a rate that widths of heads bear; the suite `settings` shows it."
    return replace(s, sigma_lr=1.) if name=='predicted' else s

# ---------------------------------------------------------------- the model

@cache
def _turns(n, half):
    "Cosines and sines of the angles, [N,d/2]."
    rate = 10_000**(-torch.arange(half)/half)
    angle = torch.arange(n)[:,None]*rate
    return angle.cos(), angle.sin()

def rotated(x:Tensor) -> Tensor:
    "Rotary positions: each pair of features [.., i, i+d/2] is turned by an angle that grows with the position."
    half = x.shape[-1]//2
    cos,sin = _turns(x.shape[-2], half)
    a,b = x[...,:half],x[...,half:]
    return torch.cat((a*cos-b*sin, a*sin+b*cos), -1)

class LengthFactor(nn.Module):
    """The factor of a query's scores in adaptively scaled entmax: 1 + beta*log(position)^gamma.

    Vasylenko and others (2025, arXiv 2506.16640) read beta, a softplus, and gamma, a tanh times 2, from the state that
    the query is made of, one of each per head. Positions are counted from 2, so that no logarithm is 0."""
    def __init__(self, heads:int):
        super().__init__()
        self.beta,self.gamma = nn.Linear(DIM, heads),nn.Linear(DIM, heads)

    def forward(self, x:Tensor) -> Tensor: # [B,N,D] -> [B,H,N]
        position = torch.arange(2, x.shape[1]+2, dtype=x.dtype)
        beta = F.softplus(self.beta(x)).mT
        gamma = 2*torch.tanh(self.gamma(x)).mT
        return 1 + beta*torch.log(position)**gamma

class Mixer(nn.Module):
    "Causal attention of one of the methods; notes how far its heads looked."
    def __init__(self, method:Method, s:Settings):
        super().__init__()
        self.method,self.positions,self.seen = method,s.positions,{}
        self.qkv,self.out = nn.Linear(DIM, 3*DIM),nn.Linear(DIM, DIM)
        self.sigma = self.alpha = None
        if method.window in ('span','learned',*RIVALS): self.sigma = SigmaParameter(HEADS, init_width=s.init_width)
        if method.window=='predicted': self.sigma = SigmaHead(DIM, HEADS, init_width=s.init_width)
        if method.alpha!='none': self.alpha = AlphaHead(HEADS, fixed=1.5 if method.alpha=='fixed' else None)
        # As in the authors' code, heads that have ALiBi are not scaled.
        self.with_alibi = sum(slope>0 for slope in SLOPES.get(s.positions, ()))
        self.factor = LengthFactor(HEADS-self.with_alibi) if method.scaled else None

    def reach(self, x):
        "The window, as `attention` takes it."
        kind = self.method.window
        if kind=='none': return None
        if kind=='fixed': return self.method.width
        sigma = self.sigma(x) if kind=='predicted' else self.sigma()      # [B,H,N] or [H]
        if kind in RIVALS: return Window(sigma, smooth=RIVALS[kind])
        return Window.span(sigma, RAMP) if kind=='span' else Window.default(sigma)

    def forward(self, x):
        n = x.shape[1]
        q,k,v = (split_heads(t, HEADS) for t in self.qkv(x).chunk(3, -1))
        if self.positions=='rope': q,k = rotated(torch.cat((q, k))).chunk(2)
        if self.factor is not None:
            near,far = q.split((self.with_alibi, HEADS-self.with_alibi), 1)
            q = torch.cat((near, far*self.factor(x)[...,None]), 1)
        bias = None
        if self.positions in SLOPES:
            distance = torch.arange(1-n, n).abs()
            bias = -torch.tensor(SLOPES[self.positions])[:,None]*distance          # [H,2N-1]
        window,alpha = self.reach(x),None if self.alpha is None else self.alpha()
        self.seen = dict(window=window, alpha=alpha)
        mixed = attention(q, k, v, is_causal=True, window=window, alpha=alpha, rel_bias=bias)
        return self.out(merge_heads(mixed))

    def cost(self, n):
        "The mean half-width as a share of the sequence, with its graph; None where nothing learns it."
        window = self.seen['window']
        return window.penalty(n) if isinstance(window, Window) else None

    def widths(self, n):
        "Half-width of each head and query, [H,N]; the mean over the batch."
        window = self.seen['window']
        if window is None: width = torch.tensor(n-1)
        elif isinstance(window, Window): width = window.half_width(n)
        else: width = torch.tensor(min(window, n-1))
        width = width.double()
        if width.ndim==3: return width.mean(0)
        return width.reshape(-1, 1).expand(HEADS, n)

class Decoder(nn.Module):
    "Ids to the logits of what comes next."
    def __init__(self, vocab, layers, method, settings):
        super().__init__()
        self.embed,self.head = nn.Embedding(vocab, DIM),nn.Linear(DIM, vocab)
        self.mixers = nn.ModuleList(Mixer(method, settings) for _ in range(layers))
        self.nets = nn.ModuleList(FeedForward(DIM, HIDDEN) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2*layers+1))

    def forward(self, ids):
        x = self.embed(ids)
        for i,(mixer,net) in enumerate(zip(self.mixers, self.nets)):
            x = x + mixer(self.norms[2*i](x))
            x = x + net(self.norms[2*i+1](x))
        return self.head(self.norms[-1](x))

    def price(self, n):
        "The mean of the layers' costs, or None."
        costs = [c for m in self.mixers if (c := m.cost(n)) is not None]
        return sum(costs)/len(costs) if costs else None

    def share(self, n):
        "Visible pairs over the pairs of causal attention, of the last pass."
        before = torch.arange(n)
        widths = torch.stack([m.widths(n) for m in self.mixers])                   # [L,H,N]
        return ((torch.minimum(widths, before)+1).mean((0,1)).sum()/(before+1).sum()).item()

    def mean_width(self, n): return torch.stack([m.widths(n) for m in self.mixers]).mean().item()

    def mean_alpha(self):
        alphas = [m.seen['alpha'] for m in self.mixers]
        return 1. if alphas[0] is None else torch.stack(alphas).mean().item()

def optimizer(model, s):
    "AdamW, with a rate of its own for what gives the widths and the alphas."
    special = [p for m in model.mixers for source in (m.sigma, m.alpha) if source is not None
               for p in source.parameters()]
    known = {id(p) for p in special}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [dict(params=rest, lr=s.lr)]
    if special: groups.append(dict(params=special, lr=s.lr*s.sigma_lr, weight_decay=0.))
    return torch.optim.AdamW(groups, lr=s.lr, betas=(.9, .98), weight_decay=.01, fused=True)

class Diverged(Exception): "The loss is no number any more."

def train_step(model, opt, ids, labels, price):
    "One step of the optimizer; the loss, without the price of the windows."
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ASKED_NOT)
    total = loss
    if price and (cost := model.price(ids.shape[1])) is not None: total = loss + price*cost
    opt.zero_grad()
    total.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.)
    opt.step()
    return loss.item()

def train(model, batches, steps, s):
    "Warm-up and cosine; milliseconds of each step and the loss of the last tenth."
    opt = optimizer(model, s)
    warm = max(1, steps//20)
    def rate(step): return min((step+1)/warm, .5+.5*math.cos(math.pi*step/steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    spent,losses = [],[]
    for step in range(steps):
        ids,labels = next(batches)
        began = time.process_time()
        losses.append(train_step(model, opt, ids, labels, s.price if step>=s.price_from*steps else 0.))
        schedule.step()
        spent.append(1000*(time.process_time()-began))
        if not math.isfinite(losses[-1]): raise Diverged
    last = losses[-max(1, steps//10):]
    return spent, sum(last)/len(last)

# ---------------------------------------------------------------- the tasks

def task_batches(task, seed, s):
    "New batches for ever, of one length each; or a few sequences again and again."
    generator = torch.Generator().manual_seed(1000+seed)
    if s.examples:
        kept = [task.make(generator, BATCH, LONGEST) for _ in range(max(1, s.examples//BATCH))]
        while True: yield from kept
    while True:
        n = int(torch.randint(SHORTEST//2, LONGEST//2+1, (), generator=generator))*2
        yield task.make(generator, BATCH, n)

@torch.no_grad()
def judge(model, task, n, count, seed):
    "Accuracy, share without a mistake, and milliseconds of a sequence of `n` tokens."
    generator = torch.Generator().manual_seed(9000+seed)
    ids,labels = task.make(generator, count, n)
    at_once = max(1, min(count, 4096//n))
    predicted,spent = [],[]
    for part in ids.split(at_once):
        began = time.process_time()
        predicted.append(model(part).argmax(-1))
        spent.append(1000*(time.process_time()-began)/len(part))
    accuracy,whole = right_answers(task, torch.cat(predicted), ids, labels)
    return accuracy, whole, statistics.median(spent)

def run_task(suite, name, method_name, method, seed, s):
    "Train once, judge at every length: the rows."
    torch.manual_seed(seed)
    task,began = TASKS[name],time.process_time()
    model = Decoder(task.vocab, 2, method, s)
    common = dict(suite=suite, task=name, method=method_name, seed=seed, width=method.width or '', **asdict(s))
    steps = s.steps or task.steps
    common['steps'] = steps
    try: spent,loss = train(model, task_batches(task, seed, s), steps, s)
    except Diverged: return [dict(common, length=LONGEST, what='diverged')]
    common |= dict(loss=f'{loss:.4f}', step_ms=f'{statistics.median(spent):.2f}',
                   run_s=f'{time.process_time()-began:.1f}')
    rows = []
    tests = SLOW_TESTS if method.window=='predicted' else TESTS
    for n,count in tests.items():
        if suite in ('settings','few') and n>1024: continue
        accuracy,whole,ms = judge(model, task, n, count, seed)
        rows.append(dict(common, length=n, accuracy=f'{accuracy:.4f}', whole=f'{whole:.4f}', infer_ms=f'{ms:.2f}',
            share=f'{model.share(n):.4f}', mean_width=f'{model.mean_width(n):.1f}',
            mean_alpha=f'{model.mean_alpha():.3f}'))
    return rows

# ---------------------------------------------------------------- the language model

CONTEXT,LAYERS,TEXTS = 256,3,4
LANGUAGE_STEPS = dict(language=400, language_long=1600)      # of the two suites
TRAINED_ON = ('argparse','ast','calendar','cmd','configparser','copy','csv','dataclasses','datetime','difflib',
    'doctest','enum','fractions','functools','heapq','inspect','ipaddress','locale','optparse','pathlib','pdb',
    'pickle','platform','pydoc','random','shutil','statistics','subprocess','tarfile','textwrap','threading',
    'tokenize','traceback','typing','uuid','zipfile')
JUDGED_ON = ('ftplib','gettext','imaplib','mailbox','smtplib','turtle')

def standard_library(names):
    "Modules of the standard library as one tensor of bytes [n]."
    folder = Path(sysconfig.get_paths()['stdlib'])
    files = [folder/f'{name}.py' for name in names]
    text = b'\n'.join(f.read_bytes() for f in files if f.exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

def pieces(text, starts):
    "Bytes and the bytes that follow them, [B,context]."
    rows = text[starts[:,None]+torch.arange(CONTEXT+1)]
    return rows[:,:-1], rows[:,1:]

def text_batches(text, seed):
    generator = torch.Generator().manual_seed(1000+seed)
    while True: yield pieces(text, torch.randint(len(text)-CONTEXT, (TEXTS,), generator=generator))

@torch.no_grad()
def bits_per_byte(model, text):
    "Over the second half of 96 pieces, each byte with at least half a context before it; and ms of a piece."
    starts = torch.linspace(0, len(text)-CONTEXT-1, 96).long()
    losses,spent,widths,shares = [],[],[],[]
    for some in starts.split(8):
        ids,labels = pieces(text, some)
        began = time.process_time()
        logits = model(ids)[:,CONTEXT//2:]
        spent.append(1000*(time.process_time()-began)/len(some))
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels[:,CONTEXT//2:].flatten()).item())
        widths.append(torch.stack([m.widths(CONTEXT).mean(-1) for m in model.mixers]))      # [L,H]
        shares.append(model.share(CONTEXT))
    mean = statistics.fmean
    return mean(losses)/math.log(2), statistics.median(spent), mean(shares), torch.stack(widths).mean(0)

def language_runs(suite):
    """(name, method, settings): a frontier for each way to choose a width.

    The long training is run with fewer methods."""
    always = Settings(init_width=64., price_from=0., steps=LANGUAGE_STEPS[suite])
    def with_price(price): return replace(always, price=price)
    free = with_price(0.)
    yield 'softmax', METHODS['softmax'], free
    for width in (4, 8, 16, 64) if suite=='language_long' else (4, 16, 64):
        yield 'fixed', Method('fixed', width), free
    if suite=='language_long':
        for price in (0., .1, 1.): yield 'learned', METHODS['learned'], with_price(price)
        yield 'predicted', METHODS['predicted'], gentle('predicted', with_price(.1))
        return
    for price in (0., .1, .3, 1.): yield 'learned', METHODS['learned'], with_price(price)
    for price in (.1, 1.): yield 'span', METHODS['span'], with_price(price)
    yield 'predicted', METHODS['predicted'], gentle('predicted', with_price(.1))
    yield 'alpha', METHODS['alpha'], free
    yield 'learned_alpha', METHODS['learned_alpha'], with_price(.1)
    for price in (0., 1.): yield 'predicted', METHODS['predicted'], gentle('predicted', with_price(price))

def run_language(name, method, seed, s):
    "One row, and a row for each head's width and alpha."
    torch.manual_seed(seed)
    began = time.process_time()
    model = Decoder(256, LAYERS, method, s)
    common = dict(method=name, seed=seed, width=method.width or '', **asdict(s))
    try: spent,loss = train(model, text_batches(standard_library(TRAINED_ON), seed), s.steps, s)
    except Diverged: return dict(common, what='diverged'), []
    run_s = time.process_time()-began
    bits,ms,share,widths = bits_per_byte(model, standard_library(JUDGED_ON))
    row = dict(common, loss=f'{loss:.4f}', bits=f'{bits:.4f}', share=f'{share:.4f}', infer_ms=f'{ms:.2f}',
        step_ms=f'{statistics.median(spent):.2f}', run_s=f'{run_s:.1f}', mean_alpha=f'{model.mean_alpha():.3f}',
        mean_width=f'{widths.mean().item():.1f}')
    alphas = [m.seen['alpha'] for m in model.mixers]
    heads = [dict(common, layer=layer, head=head, head_width=f'{widths[layer,head].item():.1f}',
                  head_alpha=f'{1. if alphas[layer] is None else alphas[layer][head].item():.3f}')
             for layer in range(LAYERS) for head in range(HEADS)]
    return row, heads

# ---------------------------------------------------------------- times

COST_ROUNDS,COST_WIDTH = 5,32
COSTED = {('step', 64): BATCH, ('step', 1024): 1,                    # what is timed, tokens -> sequences
          ('forward', 64): 1, ('forward', 256): 1, ('forward', 1024): 1, ('forward', 4096): 1}

def in_turn(jobs, rounds):
    "Median milliseconds of each job by name: one call to warm up, then every job once per round."
    spent = {name: [] for name in jobs}
    for job in jobs.values(): job()
    for _ in range(rounds):
        for name,job in jobs.items():
            began = time.process_time()
            job()
            spent[name].append(1000*(time.process_time()-began))
    return {name: statistics.median(found) for name,found in spent.items()}

def cost_rows(rounds=COST_ROUNDS):
    """Untrained models of the same size, all methods in turn: a row for each method, kind of pass and length.

    Every window has a half-width of 32 tokens and keeps it, since the rate is 0. Predicted widths, one per query, are
    computed without a band: a forward pass over 4,096 tokens takes ten seconds and is left out."""
    task,s = TASKS[FOCUS],Settings(init_width=COST_WIDTH, lr=0.)
    methods = {name: replace(m, width=COST_WIDTH) if m.window=='fixed' else m for name,m in METHODS.items()}
    models = {name: Decoder(task.vocab, 2, m, s) for name,m in methods.items()}
    optimizers = {name: optimizer(model, s) for name,model in models.items()}
    rows = []
    for (kind,n),count in COSTED.items():
        ids,labels = task.make(torch.Generator().manual_seed(0), count, n)
        def job(name):
            if kind=='step': return partial(train_step, models[name], optimizers[name], ids, labels, s.price)
            return torch.no_grad()(partial(models[name], ids))
        timed = [name for name,m in methods.items() if n<=1024 or m.window!='predicted']
        found = in_turn({name: job(name) for name in timed}, rounds)
        rows += [dict(what=kind, length=n, sequences=count, method=name, ms=f'{ms:.3f}',
                      times_softmax=f"{ms/found['softmax']:.3f}") for name,ms in found.items()]
    return rows

# ---------------------------------------------------------------- rows

PROVENANCE = 'date machine torch commit'.split()
SETTINGS = [f.name for f in fields(Settings)]
COSTS = 'share mean_width mean_alpha loss step_ms infer_ms run_s what'.split()
TASK_FIELDS = [*PROVENANCE, *'suite task method seed width length accuracy whole'.split(), *COSTS, *SETTINGS]
LANGUAGE_FIELDS = [*PROVENANCE, *'method seed width bits'.split(), *COSTS, *SETTINGS]
COST_FIELDS = [*PROVENANCE, *'what length sequences method ms times_softmax'.split()]
HEAD_FIELDS = [*PROVENANCE, *'method seed width layer head head_width head_alpha'.split(), *SETTINGS]

# ---------------------------------------------------------------- the order of the runs

@dataclass(frozen=True)
class Run:
    suite: str
    task: str
    method_name: str
    method: Method
    seed: int
    settings: Settings

FOCUS = 'flip_flop'       # the task of the settings and of the comparison with little data

# What `dynattn train` does unless told otherwise; its widths begin at 16.
COMMAND = dict(price=.001, price_from=0., sigma_lr=1.)

def setting_runs(seed):
    "One setting at a time is moved away from the defaults; then those of `dynattn train`, with three first widths."
    moved = [dict(), dict(price=0.), dict(price=.1, price_from=0.), dict(price=.1), dict(price=1., price_from=0.),
             dict(price=1.), dict(sigma_lr=1.), dict(sigma_lr=100.), dict(sigma_lr=300.), dict(init_width=2.),
             dict(init_width=2., price=0.), dict(init_width=8.), dict(init_width=16.), dict(init_width=64.)]
    of_command = [dict(COMMAND, init_width=width) for width in (8., 16., 64.)]
    for change in (*moved, *of_command):
        yield Run('settings', FOCUS, 'learned', METHODS['learned'], seed, Settings(**change))
    for change in (dict(), dict(sigma_lr=1.), dict(sigma_lr=100.), dict(price=1., price_from=0.), *of_command):
        yield Run('settings', FOCUS, 'predicted', METHODS['predicted'], seed, Settings(**change))

def few_runs(seed):
    "Two batches of sequences, again and again."
    for name in ('softmax','learned','predicted','alpha','learned_alpha'):
        yield Run('few', FOCUS, name, METHODS[name], seed, gentle(name, Settings(examples=64)))

def rival_runs(seed, tasks):
    "The tasks whose answers lie near, where a window pays, with the settings of `learned`."
    for task in tasks:
        if task in LOCAL_TASKS:
            for name in RIVALS: yield Run('rivals', task, name, Method(name), seed, Settings())

def best_width(rows, task, positions):
    "The narrowest fixed window whose accuracy at the length of training is within a hundredth of the best."
    found = {int(r['width']): float(r['accuracy']) for r in rows
             if r['suite']=='search' and r['task']==task and r['positions']==positions and r['length']==str(LONGEST)}
    best = max(found.values())
    return min(w for w,accuracy in found.items() if accuracy>=best-.01)

def task_runs(seed, tasks, methods, positions, suite):
    s = Settings(positions=positions)
    for task in tasks:
        if 'fixed' in methods and seed==0:
            for name,method in SEARCHED.items(): yield Run('search', task, name, method, SEARCH_SEED, s)
        for name in methods:
            if name=='predicted' and task in LONG_TASKS: continue
            yield Run(suite, task, name, METHODS[name], seed, gentle(name, s))

LONG_TASKS = ('copy','reverse')    # of many steps; not run with a width per query, which has no band and takes long
LOCAL_TASKS = ('local_count','two_back','flip_flop')
# The methods that are run with ALiBi in half of the heads, on the short tasks and on the long ones.
OTHER_POSITIONS = ('softmax','fixed','learned','alpha','learned_alpha','asentmax')
LONG_POSITIONS = ('softmax','alpha','asentmax')

# When the seeds of a suite have their turn: seed s at `first + s*every`, and how many of them there are at most.
@dataclass(frozen=True)
class Turn:
    first: float
    every: float
    seeds: int

TURNS = dict(tasks=Turn(0, 1, 5), language=Turn(.1, 2.5, 5), settings=Turn(.2, 1.5, 5), positions=Turn(.3, 1.5, 5),
             few=Turn(1.1, 1, 5), long=Turn(1.2, 2, 5), language_long=Turn(3, 1, 5), long_positions=Turn(4, 2, 5),
             rivals=Turn(5, 1, 5))

def stage(suite, seed, a):
    "The runs of one suite with one seed."
    short = [t for t in a.task if t not in LONG_TASKS]
    if suite in LANGUAGE_STEPS: return (Run(suite, '', *found[:2], seed, found[2]) for found in language_runs(suite))
    if suite=='settings': return setting_runs(seed)
    if suite=='few': return few_runs(seed)
    if suite=='rivals': return rival_runs(seed, short)
    long = [t for t in a.task if t in LONG_TASKS]
    if suite=='long': return task_runs(seed, long, a.method, a.positions, 'tasks')
    if suite=='long_positions':
        return task_runs(seed, long, [m for m in a.method if m in LONG_POSITIONS], 'half_alibi', 'positions')
    if suite=='positions':
        return task_runs(seed, short, [m for m in a.method if m in OTHER_POSITIONS], 'half_alibi', 'positions')
    return task_runs(seed, short, a.method, a.positions, 'tasks')

def plan(a):
    "All runs, the most telling ones first: whole comparisons of one seed before the next seed."
    stages = [(turn.first+turn.every*seed, suite, seed) for suite,turn in TURNS.items() if suite in a.suite
              for seed in range(min(turn.seeds, a.seeds))]
    return [run for _,suite,seed in sorted(stages) for run in stage(suite, seed, a)]

def perform(run, folder):
    "Compute a run and write its rows."
    method,s = run.method,run.settings
    if run.suite in LANGUAGE_STEPS:
        row,heads = run_language(run.method_name, method, run.seed, s)
        append(folder/'worth_heads.csv', heads, HEAD_FIELDS)
        append(folder/'worth_language.csv', [row], LANGUAGE_FIELDS)
        return row
    if method.window=='fixed' and not method.width:
        method = Method('fixed', best_width(rows_of(folder/'worth.csv'), run.task, s.positions), method.alpha)
    rows = run_task(run.suite, run.task, run.method_name, method, run.seed, s)
    append(folder/'worth.csv', rows, TASK_FIELDS)
    return rows[0] if 'accuracy' not in rows[-1] else {k: ' '.join(r[k] for r in rows) for k in ('accuracy','share')}

def is_done(run, rows, language):
    "Whether the file has the run's rows; the width of a fixed window was found, not asked."
    s = asdict(run.settings)
    asked = dict(method=run.method_name, seed=run.seed)
    if run.method.width: asked['width'] = run.method.width
    if run.suite not in LANGUAGE_STEPS:
        asked |= dict(suite=run.suite, task=run.task)
        if not s['steps']: s['steps'] = TASKS[run.task].steps
    asked |= s
    return any(all(r[k]==str(x) for k,x in asked.items()) for r in (language if run.suite in LANGUAGE_STEPS else rows))

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--task', nargs='+', choices=TASKS, default=list(TASKS))
    p.add_argument('--method', nargs='+', choices=METHODS, default=list(METHODS))
    p.add_argument('--suite', nargs='+', default=list(TURNS), choices=TURNS, help='long: the tasks copy and reverse')
    p.add_argument('--seeds', type=int, default=5)
    p.add_argument('--positions', choices=[*SLOPES,'rope','none'], default=Settings.positions)
    p.add_argument('--to', type=Path, default=RESULTS, help='folder of the CSVs')
    p.add_argument('--short', action='store_true', help='one task, four methods, two seeds')
    p.add_argument('--limit', type=float, help='no run begins after so many seconds of the clock (default: no limit)')
    p.add_argument('--costs', action='store_true', help='only time the methods, into worth_costs.csv')
    a = p.parse_args()
    if a.short:
        a.task,a.method = ['two_back'],['softmax','learned','alpha','learned_alpha']
        a.suite,a.seeds = ['tasks'],2
    count_cpu_time()
    a.to = a.to.absolute()
    if a.costs:
        rows = cost_rows()
        append(a.to/'worth_costs.csv', rows, COST_FIELDS)
        for r in rows: print(*(r[k] for k in 'what length method ms times_softmax'.split()))
        return
    rows,language = rows_of(a.to/'worth.csv'),rows_of(a.to/'worth_language.csv')
    left = [run for run in plan(a) if not is_done(run, rows, language)]
    began = time.perf_counter()
    for i,run in enumerate(left):
        if a.limit is not None and time.perf_counter()-began>a.limit: break
        found = perform(run, a.to)
        each = (time.perf_counter()-began)/(i+1)
        print(run.suite, run.task, run.method_name, run.method.width or '', f'seed {run.seed}',
              *(f'{k} {found[k]}' for k in ('accuracy','bits','share','what') if found.get(k)),
              f'· {len(left)-i-1} runs left, about {each*(len(left)-i-1)/60:.0f} minutes', flush=True)

if __name__=='__main__': main()
