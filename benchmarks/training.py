"""The same classifier of files with four kinds of attention, three seeds each: accuracy, operations, time of a step.

    python benchmarks/training.py [--epochs 3] [--seeds 0 1 2] [--only dense fixed ...]

Rows are appended to results/training.csv. Seeds draw the files, the split, the weights and the order, the same for all four.
A step's time is that of the processor, not of the clock, since other work may share the machine; one thread.
"""
import argparse, csv, statistics, tempfile, time
from datetime import date
from pathlib import Path
import torch
from dynattn import training
from dynattn.training import TrainConfig, train
from harness import RESULTS, commit, machine

KINDS = dict(dense=dict(window='none'), fixed=dict(window='16'), dynamic=dict(), dynamic_alpha=dict(alpha='learned'))
FIELDS = 'date machine torch commit kind seed epochs crop patch layers accuracy macro_f1 valid_f1 share mflops_a_view dense_mflops_a_view cpu_ms mean_width mean_alpha'.split()

def timed(step, ms):
    "`train_step` that notes how long the processor was at it"
    def run(t, batch):
        start = time.process_time(); loss = step(t, batch); ms.append(1000*(time.process_time()-start))
        return loss
    return run

def measure(kind, seed, epochs):
    c,ms,step = TrainConfig(seed=seed, epochs=epochs, **KINDS[kind]),[],training.train_step
    training.train_step = timed(step, ms)
    try:
        with tempfile.TemporaryDirectory() as out: r = train(c, Path(out), quiet=True); best = training._saved_state(Path(out))['best']
    finally: training.train_step = step
    mean = lambda x: torch.tensor(x).mean().item()
    views = sum(len(training.views(x.data, c.crop)) for x in training.load_data(c).splits['test'])
    return dict(date=date.today(), machine=machine(), torch=torch.__version__, commit=commit(), kind=kind, seed=seed, epochs=epochs, crop=c.crop, patch=c.patch, layers=c.layers,
        accuracy=f"{r['accuracy']:.4f}", macro_f1=f"{r['f1']:.4f}", valid_f1=f'{best:.4f}', share=f"{r['share']:.4f}", mflops_a_view=f"{r['flops']['windows']/views/1e6:.3f}",
        dense_mflops_a_view=f"{r['flops']['dense']/views/1e6:.3f}", cpu_ms=f'{statistics.median(ms):.1f}', mean_width=f"{mean(r['widths']):.1f}", mean_alpha=f"{mean(r['alphas']):.3f}")

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('--epochs', type=int, default=3)
    p.add_argument('--seeds', type=int, nargs='+', default=[0,1,2])
    p.add_argument('--only', nargs='+', choices=KINDS, default=list(KINDS))
    a = p.parse_args()
    path = RESULTS/'training.csv'
    for seed in a.seeds:
        for kind in a.only:
            row,new = measure(kind, seed, a.epochs),not path.exists()
            with open(path, 'a', newline='') as f:
                w = csv.DictWriter(f, FIELDS)
                if new: w.writeheader()
                w.writerow(row)
            print(kind, seed, row['accuracy'], row['macro_f1'], row['share'], row['cpu_ms'], flush=True)

if __name__=='__main__': main()
