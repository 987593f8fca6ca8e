"""SmolLM2-135M learns how far its heads have to look: widths, quality on texts kept apart, and the time of a token.

Every finished piece appends its rows to a committed CSV; started again, the script goes on where it stopped.
The texts are files of the Python environment, `narrow_texts.csv`; no package is in two of its splits.
"""
import argparse, csv, random, statistics, sys, sysconfig, time
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
sys.path.insert(0, str(Path(__file__).parent))
from harness import RESULTS, commit, date, machine
from dynattn.hf import WindowedCache, add_windows
from dynattn.hf.narrowing import (Distance, NarrowOptions, Narrower, WidthVector, cache_share, set_widths, token_losses,
    without_windows)
from dynattn.hf.plugin import record_edge

HERE = Path(__file__).parent
CONTEXT,SINKS,LONG,STEPS = 2048,4,8192,24
PREFIXES = (1024,2048,4096,8192)

# share, seed, and the share whose widths it begins with; others begin with equal ones
PLAN = [(.40, 0, None), (.25, 0, .40), (.15, 0, .25), (.10, 0, .15), (.25, 1, None), (.25, 2, None)]

def rows_of(name):
    path = RESULTS/name
    return list(csv.DictReader(open(path, newline=''))) if path.exists() else []

def append(name, rows):
    path = RESULTS/name
    new = not path.exists()
    same = dict(date=date.today().isoformat(), machine=machine(), torch=torch.__version__, commit=commit())
    with open(path, 'a', newline='') as f:
        writer = csv.DictWriter(f, [*same, *rows[0]], lineterminator='\n')
        if new: writer.writeheader()
        writer.writerows({**same, **row} for row in rows)

def text_of(row):
    root = sysconfig.get_paths()['stdlib' if row['root']=='stdlib' else 'purelib']
    text = Path(root, row['file']).read_text(encoding='utf-8', errors='replace')
    return text.split('\n\n', 1)[1] if row['file'].endswith('METADATA') else text

class Study:
    "The model, its texts and where checkpoints go."
    def __init__(self, folder, runs):
        self.runs = Path(runs)
        self.runs.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        add_windows(self.model, n_global=SINKS)
        self.texts = {}
        for row in csv.DictReader(open(HERE/'narrow_texts.csv', newline='')):
            ids = tokenizer(text_of(row), return_tensors='pt').input_ids[:,:LONG if row['split']=='long' else CONTEXT]
            self.texts.setdefault(row['split'], []).append((row['package'], ids))
        self.batches = [dict(input_ids=ids) for _,ids in self.texts['train']]
        saved = self.runs/'full_hidden.pt'
        self.full_hidden = torch.load(saved) if saved.exists() else {}
        self.layers = self.model.config.num_hidden_layers

    def learned(self, keep, seed):
        "The widths [K] of a finished run, or None."
        rows = [r for r in rows_of('narrow_widths.csv') if (float(r['keep']),int(r['seed']))==(keep,seed)]
        return torch.tensor([float(r['width']) for r in rows]) if rows else None

    def learn(self, keep, seed, before):
        "Widths at the share `keep`, from equal ones or from those of another share."
        if self.learned(keep, seed) is not None: return
        options = NarrowOptions(keep=keep, steps=STEPS, sinks=SINKS, seed=seed)
        record_edge(self.model, 'soft')
        vector = WidthVector(self.model, CONTEXT)
        distance = Distance(self.model, self.batches, options)
        distance.hidden = self.full_hidden
        run = Narrower(vector, distance, len(self.batches), options)
        if before is not None: run.begin_with(self.learned(before, seed))
        checkpoint = self.runs/f'narrow_{keep}_{seed}.pt'
        if checkpoint.exists(): run.restore(torch.load(checkpoint))
        while len(run.rows)<options.steps:
            start = time.process_time()
            row = run.step()
            row['seconds'] = round(time.process_time()-start, 2)
            print(keep, seed, row, flush=True)
            if len(run.rows)%2==0: torch.save(run.state(), checkpoint)
        append('narrow_steps.csv', [dict(keep=keep, seed=seed, **row) for row in run.rows])
        widths = vector.widths().round().tolist()
        heads = len(widths)//self.layers
        append('narrow_widths.csv', [dict(keep=keep, seed=seed, layer=i//heads, head=i%heads, width=w)
                                     for i,w in enumerate(widths)])
        torch.save(self.full_hidden, self.runs/'full_hidden.pt')

    def widths(self, method, keep, seed, n):
        """[K] widths of a way to spend the share `keep`, for texts of `n` tokens.

        A head that learned to see the whole training context has no limit; the others spend as much at `n`."""
        method = method.removesuffix(', soft')
        learned = self.learned(keep, seed)
        learned[learned>=.97*CONTEXT] = n-1-SINKS
        per_layer = learned.view(self.layers, -1)
        if method=='learned': return learned
        if method=='one': return torch.full_like(learned, round(learned.mean().item()))
        if method=='layer': return per_layer.mean(1, keepdim=True).expand_as(per_layer).flatten().round()
        order = list(range(len(learned)))
        random.Random(seed).shuffle(order)
        return learned[order]

    def judge(self, method, keep=1., seed=0, split='test'):
        "Append the loss of every text of a split under some windows, over each prefix of a text."
        done = {(r['text'],int(r['n'])) for r in rows_of('narrow_quality.csv')
                if (r['method'],float(r['keep']),int(r['seed']),r['split'])==(method,keep,seed,split)}
        prefixes = [n for n in PREFIXES if n<=(CONTEXT if split=='test' else LONG)]
        if split=='test': prefixes = [CONTEXT]
        for package,ids in self.texts[split]:
            if (package,prefixes[-1]) in done: continue
            start = time.process_time()
            if method=='full':
                widths = None
                with without_windows(self.model): losses = token_losses(self.model, ids)
            else:
                widths = self.widths(method, keep, seed, prefixes[-1])
                set_widths(self.model, widths.view(self.layers, -1).tolist(), 'soft' if 'soft' in method else 'hard')
                losses = token_losses(self.model, ids)
            seconds = round(time.process_time()-start, 2)
            append('narrow_quality.csv', [dict(method=method, keep=keep, seed=seed, split=split, text=package, n=n,
                share=1. if widths is None else round(cache_share(widths, n, SINKS).item(), 5),
                loss=round(losses[:n-1].double().mean().item(), 6), seconds=seconds) for n in prefixes])
            print(method, keep, seed, split, package, losses.mean().item(), seconds, flush=True)

    @torch.no_grad()
    def decode(self, keep, n=LONG-64, tokens=24):
        "The time of a token after `n` others, full model and narrowed in turn."
        if any(float(r['keep'])==keep for r in rows_of('narrow_decode.csv')): return
        from transformers import DynamicCache
        ids = self.texts['long'][0][1][:,:n]
        set_widths(self.model, self.widths('learned', keep, 0, LONG).view(self.layers, -1).tolist())
        caches = {}
        with without_windows(self.model):
            caches['full'] = DynamicCache(config=self.model.config)
            self.model(ids, past_key_values=caches['full'], logits_to_keep=1)
        caches['learned'] = WindowedCache(self.model)
        self.model(ids, past_key_values=caches['learned'], logits_to_keep=1)
        nbytes = dict(full=sum(l.keys.nbytes+l.values.nbytes for l in caches['full'].layers),
                      learned=caches['learned'].nbytes)
        seconds = dict(full=[], learned=[])
        word = ids[:,-1:]
        for _ in range(tokens):
            with without_windows(self.model): seconds['full'].append(self.timed(word, caches['full']))
            seconds['learned'].append(self.timed(word, caches['learned']))
        rows = [dict(keep=keep, method=name, n=n, cache_bytes=nbytes[name], threads=torch.get_num_threads(),
                     ms=round(1000*statistics.median(s), 2), fastest_ms=round(1000*min(s), 2), tokens=tokens)
                for name,s in seconds.items()]
        append('narrow_decode.csv', rows)

    def timed(self, word, cache):
        start = time.perf_counter()
        self.model(word, past_key_values=cache)
        return time.perf_counter()-start

def plan(study):
    "The most telling pieces first."
    study.learn(*PLAN[0])
    study.judge('full')
    for method in ('learned','one'): study.judge(method, .40)
    study.learn(*PLAN[1])
    for method in ('learned','one','learned, soft','layer','random'): study.judge(method, .25)
    for method in ('learned','full','one'): study.judge(method, .25 if method!='full' else 1., split='long')
    study.decode(.25)
    study.learn(*PLAN[2])
    for method in ('learned','one'): study.judge(method, .15)
    study.learn(*PLAN[3])
    for method in ('learned','one'): study.judge(method, .10)
    for keep,seed,before in PLAN[4:]:
        study.learn(keep, seed, before)
        study.judge('learned', keep, seed)
    for keep in (.40,.15,.10):
        for method in ('layer','random'): study.judge(method, keep)
    for method in ('layer','random'): study.judge(method, .25, split='long')

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--model', required=True, help='a folder with SmolLM2-135M as transformers saves it')
    p.add_argument('--runs', default='runs/narrow', help='where checkpoints go')
    a = p.parse_args()
    torch.set_num_threads(1)
    plan(Study(a.model, a.runs))
