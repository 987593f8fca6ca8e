"""The same classifier of files with four kinds of attention: accuracy, operations, time of a step, memory.

    python benchmarks/training.py                                          # pieces of 512 bytes, three seeds
    python benchmarks/training.py --seeds 0 --crop 4096 --patch 4 --batch 8 --epochs 8 --per-epoch 60 --judged 60   # forty minutes

Rows are appended to results/training.csv. Seeds draw the split, the weights and the order, the same for all four; the files are the same for every seed.
A step's time is that of the processor, not of the clock, since other work may share the machine; one thread.
Each run has a process of its own, whose largest size is the memory.
"""
import argparse, json, statistics, tempfile, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
import torch
from dynattn.train.files import Data, views
from dynattn.train.training import TrainConfig, train
from harness import RESULTS, append, commit, machine

PREDICTED = dict(window='predicted', init_width=16.)
KINDS = dict(dense=dict(window='none'), fixed=dict(window='16'), dynamic=PREDICTED, dynamic_alpha=dict(PREDICTED, alpha='learned'))
SETTINGS = 'epochs per_epoch judged crop patch batch layers dropout sigma_lr'.split()
FIELDS = ('date machine torch commit kind seed epochs crop patch layers accuracy macro_f1 valid_f1 share mflops_a_view dense_mflops_a_view cpu_ms mean_width mean_alpha '
    'per_epoch judged batch dropout sigma_lr steps files majority run_cpu_s memory_mb').split()

class Stopwatch:
    "Milliseconds that the processor was at each step"
    def __init__(self): self.ms = []
    def __call__(self, moment, t, x):
        if moment=='before_step': self.began = time.process_time()
        if moment=='after_step': self.ms.append(1000*(time.process_time()-self.began))

def measure(kind, seed, given, keep):
    "A row, as a process that does nothing else finds it."
    torch.set_num_threads(1)
    c,watch,began = TrainConfig(seed=seed, **given, **KINDS[kind]),Stopwatch(),time.process_time()
    with tempfile.TemporaryDirectory() as out:
        out = Path(keep or out)/f'{kind}_{seed}'
        r = train(c, out, quiet=True, callbacks=[watch])
        best = min(map(json.loads, open(out/'metrics.jsonl', encoding='utf-8')), key=lambda epoch: epoch['valid_loss'])['f1']
    spent = time.process_time()-began
    mean = lambda x: torch.tensor(x).mean().item()
    pieces = sum(len(views(x.data, c.crop)) for x in Data.of(c).splits['test'])
    mflops = {k: f"{r['flops'][k]/pieces/1e6:.3f}" for k in ('windows', 'dense')}
    return dict(kind=kind, seed=seed, machine=machine(), commit=commit(),
        **{k: getattr(c, k) for k in SETTINGS}, steps=r['steps'], files=r['files']['test'], majority=f"{r['majority']:.4f}",
        accuracy=f"{r['accuracy']:.4f}", macro_f1=f"{r['f1']:.4f}", valid_f1=f'{best:.4f}', share=f"{r['share']:.4f}",
        mflops_a_view=mflops['windows'], dense_mflops_a_view=mflops['dense'], cpu_ms=f'{statistics.median(watch.ms):.1f}',
        run_cpu_s=f'{spent:.0f}', memory_mb=f"{r['memory']:.0f}", mean_width=f"{mean(r['widths']):.1f}", mean_alpha=f"{mean(r['alphas']):.3f}")

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--seeds', type=int, nargs='+', default=[0,1,2])
    p.add_argument('--only', nargs='+', choices=KINDS, default=list(KINDS))
    p.add_argument('--to', type=Path, default=RESULTS/'training.csv')
    p.add_argument('--keep', help='where run folders stay (default: nowhere)')
    for f in fields(TrainConfig):
        if f.name in SETTINGS: p.add_argument(f"--{f.name.replace('_','-')}", type=type(f.default), default=f.default)
    a = p.parse_args()
    given = {k: getattr(a, k) for k in SETTINGS}
    for seed in a.seeds:
        for kind in a.only:
            with ProcessPoolExecutor(1, get_context('spawn')) as alone: row = alone.submit(measure, kind, seed, given, a.keep).result()
            append(a.to.absolute(), [row], FIELDS)
            print(kind, seed, *(row[k] for k in ('accuracy','macro_f1','share','cpu_ms','run_cpu_s','memory_mb')), flush=True)

if __name__=='__main__': main()
