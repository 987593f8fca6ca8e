"""Narrowing on trial: what is left of retrieval when every method may spend the same footprint.

    python experiments/narrow_trial.py train --seed 0     a small decoder that can retrieve, in runs/trial
    python experiments/narrow_trial.py trained            rows on the decoders as they are now
    python experiments/narrow_trial.py judge --model 0    every method at every share, on every task
    python experiments/narrow_trial.py export --model 0   the model and its questions, for narrow_peers.py
    python experiments/narrow_trial.py mix --model 0      `narrow` with more and fewer texts that ask for facts
    python experiments/narrow_trial.py lengths --model 0  widths at twice and four times the length they were measured at

Footprint: the keys in memory after each token, summed over all tokens of a text with its prompt, over those of the full
model. Every finished piece appends rows to committed CSVs; started again, the script goes on where it stopped. Widths that
learned, and gates, have rows and are no longer made here.
"""
import argparse, csv, json, math, random, sys, time
from dataclasses import dataclass
from pathlib import Path
import torch, torch.nn.functional as F
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
import trial_models
from narrow import append, rows_of, smollm2, text_of
from narrow_texts import LIST
from harness import commit, folder_of
from dynattn.hf import add_windows
from dynattn.hf.curves import Budget
from dynattn.hf.narrowing import narrow, set_widths, token_losses, without_windows
from dynattn.narrow.judge import _equal, _spent
from dynattn.narrow.recall import facts_to_learn, recall_grid
from dynattn.hf.saving import load_pretrained

SINKS,TEXTS = 4,16
NEAR = (32,128)                     # windows of the heads that are not full, where a head has one of two sizes
TASKS = ('needle','several keys','several values','variables','common words','many questions','copy')
WIDTHS,SCORES,LOSSES = 'narrow_trial_widths.csv','narrow_trial.csv','narrow_trial_texts.csv'
MIXES = 'narrow_mix.csv'

@dataclass(frozen=True)
class Footprint(Budget):
    "Widths cost what they keep over a text's whole life, the prompt included."
    def seen(self, width):
        kept = (width+1+self.sinks).clamp(max=self.n)
        return kept*(kept+1)/2+(self.n-kept)*kept

    def window(self, share):
        "The width that costs `share` if all heads have it."
        return _equal(self, self.scaled(torch.full((1,), self.n*share), share)).item()

def by_layer(width, layers): return width.view(layers, -1).tolist()

# --- the models and their texts ---------------------------------------------

class Subject:
    "A model that is judged, and the texts it is narrowed by and those it is judged on."
    def __init__(self, name, runs, context=2048):
        self.name,self.runs,self.context = name,Path(runs),context
        self.model,self.tokenizer = self.load()
        self.model.eval().requires_grad_(False)
        add_windows(self.model, n_global=SINKS, edge='hard')
        self.layers,self.heads = self.model.config.num_hidden_layers,self.model.config.num_key_value_heads
        self.budget = Footprint(context, SINKS, True)
        self.texts,missing = dict(train=[], test=[]),[]
        for row in csv.DictReader(open(LIST, newline='')):
            try: ids = self.ids(text_of(row))
            except FileNotFoundError:                   # a package, or a version of it, that is not installed here
                missing.append(row['file'])
                continue
            if len(ids)>=2048: self.texts['train' if row['split']=='train' else 'test'].append((row['package'], ids))
        if missing: print(f"{LIST.name}: left out, since they are not here: {', '.join(missing)}", file=sys.stderr, flush=True)
        known = set(self.words('train'))
        self.spoken = dict(train=sorted(known), test=[w for w in self.words('test') if w not in known])

    def load(self):
        if self.name=='smollm2': return load_pretrained(smollm2())
        tokenizer,_ = trial_models.prepare(self.runs)
        return trial_models.finished(int(self.name), self.runs),tokenizer

    def ids(self, text): return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def words(self, split):
        "Words of a split's texts, which name what is asked."
        text = ' '.join(self.tokenizer.decode(ids) for _,ids in self.texts[split])
        return sorted({w for w in text.split() if w.isascii() and w.isalpha() and w.islower() and 4<len(w)<10})

    def filler(self, rng, n, split):
        "n tokens of a split's texts, one after the other from a place drawn at random."
        _,ids = rng.choice(self.texts[split])
        start = rng.randrange(max(len(ids)-n, 1))
        found = ids[start:start+n]
        return found+self.filler(rng, n-len(found), split) if len(found)<n else found

# --- what is asked: tokens, and where each answer stands --------------------

@dataclass
class Asked:
    "A text, and for each question the tokens of its answer and how far back it stands."
    ids: list
    answers: list   # (first, one past the last, distance)
    begin: int = 0  # of the questions

class Questions:
    "Draws texts of `n` tokens that ask for what stands in them, in RULER's forms; a seed gives the same for every method."
    def __init__(self, subject, split): self.s,self.split = subject,split

    def key(self, rng): return ' '.join(rng.choices(self.s.spoken[self.split], k=2))
    def number(self, rng): return str(rng.randrange(10_000, 100_000))

    def fact(self, rng, key=None):
        "What stands before a value, and the value."
        what = rng.choice(('code','number','key','password'))
        return f'\nThe {what} of {key or self.key(rng)} is ',self.number(rng)

    def place(self, rng, n, facts, questions):
        """Facts [(share of the text before it, string)] in `n` tokens with the questions [(cue, answer, which fact)] at
        the end, or [(share, cue, answer, which fact)] between."""
        facts = [(t, self.s.ids(fact)) for t,fact in facts]
        asked = []
        for cue,answer,which in questions:
            whole,cue = self.s.ids(cue+answer),self.s.ids(cue)
            same = next((i for i,(a,b) in enumerate(zip(cue, whole)) if a!=b), len(cue))
            asked.append((whole, same, which))
        rest = n-sum(len(f) for _,f in facts)-sum(len(a[0]) for a in asked)
        text,ids,starts,at = self.s.filler(rng, rest, self.split),[],{},0
        for i,(t,fact) in sorted(enumerate(facts), key=lambda x: x[1][0]):
            ids += text[at:round(t*rest)]
            at = round(t*rest)
            starts[i] = len(ids)
            ids += fact
        ids,answers = ids+text[at:],[]
        begin = len(ids)
        for whole,same,which in asked:
            start = len(ids)+same
            ids += whole
            answers.append((start, len(ids), start-starts[which]))
        return Asked(ids, answers, begin)

    def needle(self, rng, n, depth):
        before,value = self.fact(rng)
        return self.place(rng, n, [(depth, before+value+'.\n')], [(before, value, 0)])

    def several_keys(self, rng, n, depth):
        "One of eight codes is asked."
        all_facts = [self.fact(rng) for _ in range(8)]
        times = [depth, *(rng.random() for _ in range(7))]
        placed = [(t, before+value+'.\n') for t,(before,value) in zip(times, all_facts)]
        return self.place(rng, n, placed, [(*all_facts[0], 0)])

    def many_questions(self, rng, n, depth=None):
        "Sixteen codes, all of them asked at the end, in another order."
        all_facts = [self.fact(rng) for _ in range(16)]
        placed = [(rng.random(), before+value+'.\n') for before,value in all_facts]
        order = rng.sample(range(16), 16)
        return self.place(rng, n, placed, [(*all_facts[i], i) for i in order])

    def several_values(self, rng, n, depth=None):
        "A key has three values; all are asked."
        before,_ = self.fact(rng)
        values,times = [self.number(rng) for _ in range(3)],sorted(rng.uniform(0, .95) for _ in range(3))
        placed = [(t, before+value+'.\n') for t,value in zip(times, values)]
        return self.place(rng, n, placed, [(before, ', '.join(values), 0)])

    def variables(self, rng, n, depth=None):
        "A variable is given another one's value; the other's number is asked. Two more such pairs stand around."
        facts,asked = [],None
        for pair in range(3):
            a,b = (''.join(rng.choices('ABCDEFGHIJKLMNOPQRSTUVWXYZ', k=3)) for _ in 'ab')
            value,(first,second) = self.number(rng),sorted((rng.random(), rng.random()))
            asked = asked or (f'\nThe value of {b} is', f' {value}', 0)
            facts += [(first, f'\nVAR {a} = {value}.'), (second, f'\nVAR {b} = {a}.')]
        return self.place(rng, n, facts, [asked])

    def common_words(self, rng, n, depth=None):
        "A list of words in which three come up often: those are asked, in the order of their first mention."
        words = rng.sample(self.s.spoken[self.split], 40)
        often,row = words[:3],[*words[3:], *(w for w in words[:3] for _ in range(8))]
        rng.shuffle(row)
        often.sort(key=row.index)
        facts = [(rng.random(), '\nWords: '+', '.join(row)+'.')]
        return self.place(rng, n, facts, [('\nThe three most common words are ', ', '.join(often), 0)])

    def copy(self, rng, n, depth):
        "32 tokens of a text come again: after four of them the others are asked."
        passage,ids = self.s.filler(rng, 32, self.split),self.s.filler(rng, n-64, self.split)
        start = round(depth*(n-64))
        ids = ids[:start]+passage+ids[start:]+passage
        return Asked(ids, [(n-28, n, n-32-start)], n-32)

    def draw(self, task, i, n):
        "Question number i of a task; the depths take turns."
        rng = random.Random(f'{self.split}/{task}/{i}/{n}')
        return getattr(self, task.replace(' ', '_'))(rng, n, (.05, .25, .5, .75, .95)[i%5])

@torch.no_grad()
def answered(model, asked):
    "For each answer: whether all its tokens are the likeliest ones, the share that are, the mean loss."
    ids = torch.tensor([asked.ids])
    hidden = model.base_model(input_ids=ids)[0][0]
    for start,stop,_ in asked.answers:
        logits = model.get_output_embeddings()(hidden[start-1:stop-1]).float()
        target = ids[0,start:stop]
        right = logits.argmax(-1)==target
        yield int(right.all()),right.double().mean().item(),F.cross_entropy(logits, target).item()

# --- two sizes: everything or a short window

def two_sizes(full_first, near, budget, share, layers):
    "Widths at a footprint: as many heads of an order as can be full, the others have windows that spend the rest."
    k = len(full_first)
    near_cost = budget.share(torch.tensor([float(near)])).item()
    full = max(int(k*(share-near_cost)/(1-near_cost)+1e-9), 0)
    width = torch.full((k,), float(budget.most))
    width[full_first[full:]] = budget.window(min((share-full/k)*k/(k-full), 1.))
    return by_layer(width, layers)

# --- the methods: each gives widths by layer at a footprint -----------------

class Calibration:
    """Texts to choose widths on: `text` alone; half of them with `facts` that are asked again; `asked`, the same and the
    answers weigh as much as the text."""
    def __init__(self, subject, kind, texts=40):
        self.subject,self.kind = subject,kind
        rng,questions = random.Random('calibration/'+('text' if kind=='text' else 'facts')),Questions(subject, 'train')
        self.asked = [questions.many_questions(rng, subject.context) if kind!='text' and i%2 else
                      Asked(subject.filler(rng, subject.context, 'train'), []) for i in range(texts)]
        self.batches = [self.batch(a) for a in self.asked]

    def batch(self, text):
        ids,marks = torch.tensor([text.ids]),torch.zeros(1, len(text.ids), dtype=torch.bool)
        for start,stop,_ in text.answers: marks[0,start-1:stop-1] = self.kind=='asked'
        return dict(input_ids=ids, asked=marks)

    def loss(self, texts):
        "Of the answers where there are some, as NLL-guided layers are chosen; else of all tokens."
        chosen = [a for a in self.asked if bool(a.answers)==(self.kind!='text')][:texts]
        found = []
        for asked in chosen:
            losses = token_losses(self.subject.model, torch.tensor([asked.ids]))
            at = [i-1 for start,stop,_ in asked.answers for i in range(start, stop)] or list(range(len(losses)))
            found.append(losses[at].mean().item())
        return sum(found)/len(found)

def loss_with(subject, calibration, width, texts=4):
    set_widths(subject.model, by_layer(width, subject.layers))
    return calibration.loss(texts)

@torch.no_grad()
def layers_by_loss(subject, calibration, near):
    "Layers in the order in which windows hurt them alone, as heads."
    rises = []
    for layer in range(subject.layers):
        width = torch.full((subject.layers, subject.heads), float(subject.budget.most))
        width[layer] = near
        rises.append(loss_with(subject, calibration, width.flatten()))
    order = torch.tensor(rises).argsort(descending=True)
    return (order[:,None]*subject.heads+torch.arange(subject.heads)).flatten()

@torch.no_grad()
def greedy_heads(subject, calibration, near):
    "Key heads, the last one that a window was given first: each time the one whose window hurts least."
    width,given = torch.full((subject.layers*subject.heads,), float(subject.budget.most)),[]
    while len(given)<len(width):
        rises = {}
        for head in set(range(len(width)))-set(given):
            tried = width.clone()
            tried[head] = near
            rises[head] = loss_with(subject, calibration, tried, texts=2)
        given.append(min(rises, key=rises.get))
        width[given[-1]] = near
    return torch.tensor(given[::-1])

class Methods:
    "Widths of every method, made once and kept in a CSV with what they cost."
    def __init__(self, subject, seed):
        self.subject,self.seed,self.kinds = subject,seed,{}

    def calibration(self, kind):
        if kind not in self.kinds: self.kinds[kind] = Calibration(self.subject, kind)
        return self.kinds[kind]

    def saved(self, method, share):
        found = [r for r in rows_of(WIDTHS) if (r['model'],int(r['n']),r['method'],float(r['share']),int(r['seed']))
                 ==(self.subject.name,self.subject.context,method,share,self.seed)]
        width = torch.tensor([float(r['width']) for r in found])
        return (by_layer(width, self.subject.layers),float(found[0]['core_seconds'])) if found else None

    def widths(self, method, share):
        "Widths by layer, and the core-seconds it took to choose them."
        found = self.saved(method, share)
        if found: return found
        start = time.process_time()
        layers = self.choose(method, share)
        seconds = round(time.process_time()-start, 1)
        append(WIDTHS, [dict(model=self.subject.name, n=self.subject.context, method=method, share=share, seed=self.seed, layer=i, head=j, width=w,
                             core_seconds=seconds) for i,layer in enumerate(layers) for j,w in enumerate(layer)])
        return self.saved(method, share)

    def choose(self, method, share):
        s,budget = self.subject,self.subject.budget
        if method=='one window': return by_layer(torch.full((s.layers*s.heads,), budget.window(share)), s.layers)
        if method.startswith('every fifth layer full'):     # what `layer_types` and `sliding_window` of a configuration can say
            full = torch.arange(s.layers)%5==4
            near = budget.window((share-full.float().mean().item())/(~full).float().mean().item())
            return [[math.inf if whole else near]*s.heads for whole in full]
        name,kind = method.split(', ')[:2]
        if name.split()[0] in ('learned','gates'):
            raise SystemExit(f'{method}: its widths learned; benchmarks/results/README.md names the commit')
        if name in ('one per layer','random'):
            return _spent(budget, self.widths(f'learned, {kind}', share)[0], name, self.seed)
        name,near = name.rsplit(' ', 1)
        order = self.order(name, kind, int(near))
        return two_sizes(order, int(near), budget, share, s.layers)

    def order(self, name, kind, near):
        "The order of heads that does not depend on the share: taken from any share that was made."
        key = (name, kind, near)
        if key not in self.kinds:
            make = dict(layers=layers_by_loss, greedy=greedy_heads)[name]
            self.kinds[key] = make(self.subject, self.calibration(kind), near)
        return self.kinds[key]

METHODS = ('full','one window','learned, text','learned, facts','gates 32, facts','gates 128, facts','layers 32, facts',
           'greedy 32, facts','one per layer, facts','random, facts','gates 32, text','gates 128, text','greedy 32, text',
           'layers 32, text','one per layer, text','random, text')

# --- judging ----------------------------------------------------------------

class Judge:
    def __init__(self, subject, methods, samples):
        self.subject,self.methods,self.samples = subject,methods,samples
        self.questions = Questions(subject, 'test')

    def done(self, name, **which):
        return any(all(str(r[k])==str(v) for k,v in which.items()) for r in rows_of(name))

    def set(self, method, share):
        "Give the model these widths; what its rows say about them."
        s = self.subject
        which = dict(model=s.name, method=method, share=share, seed=self.methods.seed)
        if method=='full': return dict(which, footprint=1., cache_share=1., core_seconds=0.)
        layers,seconds = self.methods.widths(method, share)
        layers = [[math.floor(w) if w<s.budget.most else math.inf for w in layer] for layer in layers]
        for module in s.model.modules():
            if hasattr(module, 'dynattn'): module.dynattn.n_global = 0 if 'no leading tokens' in method else SINKS
        set_widths(s.model, layers)
        width = torch.tensor([float(w) for layer in layers for w in layer]).clamp(max=s.budget.most)
        return dict(which, footprint=round(s.budget.share(width).item(), 5),
                    cache_share=round(Budget(s.context, SINKS, True).share(width).item(), 5), core_seconds=seconds)

    def forward(self, method):
        return without_windows(self.subject.model) if method=='full' else torch.no_grad()

    def row(self, found):
        "The answers that are about as far back: `right` has a digit for each, in the same order for every method."
        distance,right,tokens,loss = (sum(x)/len(found) for x in zip(*found))
        return dict(distance=round(distance), samples=len(found), score=round(right, 4), tokens_right=round(tokens, 4),
                    loss=round(loss, 4), right=''.join(str(f[1]) for f in found))

    def tasks(self, method, share, n, tasks=TASKS):
        about = self.set(method, share)
        for task in tasks:
            which = dict({k: about[k] for k in ('model','method','share','seed')}, task=task, n=n)
            if self.done(SCORES, **which): continue
            found = {}
            for i in range(self.samples):
                asked = self.questions.draw(task, i, n)
                with self.forward(method): scores = list(answered(self.subject.model, asked))
                for score,(_,_,distance) in zip(scores, asked.answers):
                    found.setdefault(min(5*distance//n, 4), []).append((distance, *score))
            rows = [dict(about, task=task, n=n, **self.row(found[part])) for part in sorted(found)]
            append(SCORES, rows)
            print(*which.values(), *(f"{r['distance']}: {r['score']}" for r in rows), flush=True)

    @torch.no_grad()
    def texts(self, method, share, n):
        about = self.set(method, share)
        which = dict({k: about[k] for k in ('model','method','share','seed')}, n=n)
        if self.done(LOSSES, **which): return
        rows = []
        for package,ids in self.subject.texts['test']:
            with self.forward(method): losses = token_losses(self.subject.model, torch.tensor([ids[:n]]))
            rows.append(dict(about, n=n, text=package, loss=round(losses.double().mean().item(), 5)))
        append(LOSSES, rows)
        print(*which.values(), sum(r['loss'] for r in rows)/len(rows), flush=True)

def judge(a):
    subject = Subject(a.model, a.runs, a.context)
    run = Judge(subject, Methods(subject, a.seed), a.samples)
    for share in a.shares:
        for method in a.methods or METHODS:
            of = 1. if method=='full' else share
            run.texts(method, of, a.context)
            run.tasks(method, of, a.context, a.tasks or TASKS)

# --- `narrow` itself: the mix of its texts, and other lengths than it was narrowed at

class Narrowing:
    "Widths by `narrow` at a share of the cache, and what they cost, on the questions of chapter 65."
    def __init__(self, a):
        self.subject,self.seed,self.share = Subject(a.model, a.runs),a.seed,a.shares[0]
        self.filler = [i for _,ids in self.subject.texts['test'] for i in ids]

    def done(self, **which):
        return any(all(r[k]==str(v) for k,v in which.items()) for r in rows_of(MIXES))

    def narrowed(self, n, facts):
        "[K] widths from the curves of some texts; a share of them asks for facts again."
        s,rng = self.subject,random.Random(f'{n}/{self.seed}')
        texts = [s.filler(rng, n, 'train') for _ in range(TEXTS)]
        asks = [int((i+1)*facts)>int(i*facts) for i in range(TEXTS)]
        batches = [facts_to_learn(s.tokenizer, text, n, rng) if ask else dict(input_ids=torch.tensor([text]))
                   for text,ask in zip(texts, asks)]
        start = time.process_time()
        found = narrow(s.load()[0], batches, self.share, sinks=SINKS, seed=self.seed)
        self.seconds = round(time.process_time()-start, 1)
        return torch.tensor([w for layer in found.widths for w in layer]).clamp(max=found.budget.most)

    @torch.no_grad()
    def judge(self, width, n, **about):
        "Append the loss of the judging texts and the share of right answers; no width: the full model."
        s,budget = self.subject,Budget(n, SINKS, True)
        if width is not None: set_widths(s.model, by_layer(torch.where(width>=.97*budget.most, math.inf, width), s.layers))
        with without_windows(s.model) if width is None else torch.no_grad():
            grid = recall_grid(s.model, s.tokenizer, self.filler, [n], number=16)
            losses = [token_losses(s.model, torch.tensor([ids[:n]])).mean().item() for _,ids in s.texts['test']]
        right = grid.right[0]
        append(MIXES, [dict(model=s.name, seed=self.seed, keep=self.share, **about, n=n,
            share=1. if width is None else round(budget.share(width).item(), 4), loss=round(sum(losses)/len(losses), 5),
            recall=round(grid.found, 4), questions=sum(grid.numbers[0]),
            right=' '.join(f'{x:.3f}' for x in right), losses=' '.join(f'{x:.5f}' for x in losses))])
        print(about, n, sum(losses)/len(losses), right, flush=True)

def mix(a):
    run,n = Narrowing(a),a.context
    ways = dict(model=a.model, what='mix', seed=a.seed, keep=run.share, n=n)
    if not run.done(**ways, way='full'): run.judge(None, n, what='mix', learned_at=n, facts='', way='full', core_seconds=0.)
    for facts in (0., .25, .5, .75):
        if run.done(**ways, way='curves', facts=facts): continue
        width = run.narrowed(n, facts)
        run.judge(width, n, what='mix', learned_at=n, facts=facts, way='curves', core_seconds=run.seconds)

def lengths(a):
    "Fixed widths, widths that grow with the length, and widths a + b N through those of two lengths."
    run,short = Narrowing(a),min(a.context, 512)
    at_length = 'curves at this length'
    if run.done(model=a.model, what='lengths', seed=a.seed, keep=run.share, way=at_length): return
    half,whole = run.narrowed(short//2, .5),run.narrowed(short, .5)
    everything = whole>=.97*Budget(short, SINKS, True).most
    for n in (short, 2*short, 4*short):
        budget = Budget(n, SINKS, True)
        line = (whole+(whole-half)*(n-short)/(short-short//2)).clamp(1, budget.most)
        ways = {'full': None, 'fixed': whole, 'a + b N': line, at_length: whole if n==short else run.narrowed(n, .5)}
        ways = {way: w if w is None else w.masked_fill(everything, budget.most) if way in ('fixed','a + b N') else w
                for way,w in ways.items()}
        ways['in proportion'] = budget.scaled(ways['fixed'], run.share)
        ways['a + b N, in proportion'] = budget.scaled(ways['a + b N'], run.share)
        for way,width in ways.items(): run.judge(width, n, what='lengths', learned_at=short, facts=.5, way=way, core_seconds=0.)

def trained(a):
    "What the decoders' training took so far, as rows."
    rows = []
    there = [seed for seed in trial_models.SHAPES if (Path(a.runs)/f'decoder{seed}.pt').exists()]
    if not there: sys.exit(f'{a.runs}: expected what `narrow_trial.py train` writes, got no decoder')
    for seed in there:
        state = torch.load(Path(a.runs)/f'decoder{seed}.pt')
        model,config = trial_models.finished(seed, a.runs),trial_models.shape(seed)
        rows.append(dict(model=seed, parameters=sum(p.numel() for p in model.parameters()), layers=config.num_hidden_layers,
            key_heads=config.num_key_value_heads, steps=state['done'], tokens=state['tokens'],
            longest=trial_models.STAGES[state['stage']], core_minutes=round(state['seconds']/60, 1)))
    append('narrow_trial_models.csv', rows)

def export(a):
    "The model as a folder, and what it is asked."
    subject = Subject(a.model, a.runs, a.context)
    questions,folder = Questions(subject, 'test'),Path(a.runs)/f'exported{a.model}'
    model,_ = subject.load()
    model.save_pretrained(folder)
    subject.tokenizer.save_pretrained(folder)      # KVzip reads it
    asked = [dict(task=task, n=a.context, texts=[vars(questions.draw(task, i, a.context)) for i in range(a.samples)])
             for task in a.tasks or TASKS]
    (folder/'asked.json').write_text(json.dumps(asked))

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=('train','trained','judge','export','mix','lengths'))
    p.add_argument('--seed', type=int, default=0, help='which decoder is trained; of the order of the texts')
    p.add_argument('--steps', type=int, default=6000, help='of training: started again with fewer, it ends there')
    p.add_argument('--model', default='0', help='0 or 1, a decoder trained here, or smollm2')
    p.add_argument('--shares', type=float, nargs='*', default=[.25,.10,.50])
    p.add_argument('--context', type=int, default=2048, help='tokens of a text, to narrow by and to judge by')
    p.add_argument('--methods', nargs='*')
    p.add_argument('--tasks', nargs='*')
    p.add_argument('--samples', type=int, default=40, help='texts for each task and length')
    p.add_argument('--runs', default='runs/trial', help='where models and checkpoints go')
    a = p.parse_args()
    torch.set_num_threads(1)
    commit()
    if a.what=='train': trial_models.train(a.seed, a.runs, a.steps)
    else: dict(judge=judge, export=export, trained=trained, mix=mix, lengths=lengths)[a.what](a)
