"""The runs of `make demo` with several seeds, and Magika, Google's model for file types, on the same test files.

    dynattn train --seed 1 --out runs/seed1       # and others
    python experiments/file_types.py runs/demo runs/seed1 runs/seed2

Needs `pip install magika==1.0.3`, in any environment: it reads the folders of runs and imports nothing of ours.
Magika has 216 types. `by_name` counts an answer as right if its name belongs to the class; `grouped` also counts
templates as html and .ini as prose, a grouping that was chosen after its answers were seen.
Rows are written to benchmarks/results/file_types.csv.
"""
import argparse, csv, hashlib, json, subprocess, time
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parents[1]/'benchmarks/results'
FIELDS = 'date commit seed files majority accuracy macro_f1 magika by_name grouped magika_ms_a_file'.split()
BY_NAME = dict(C='c cpp', html='html', javascript='javascript', json='json jsonl', prose='markdown rst txt',
               python='python')
GROUPED = dict(BY_NAME, html='html jinja twig erb', prose='markdown rst txt ini')

def test_files(run):
    "(label, path) of each file that the run was tested on, as it was then."
    with open(run/'split.csv', newline='', encoding='utf-8', errors='surrogateescape') as f:
        for row in csv.DictReader(f):
            if row['split']!='test': continue
            data = Path(row['path']).read_bytes()[:2**16]
            if hashlib.sha1(data).hexdigest()!=row['sha1']:
                raise SystemExit(f"{row['path']}: expected the file of the run, got one that has changed since")
            yield row['label'],row['path']

def compared(run, magika, commit):
    "A row: how many of the test files of a run it and Magika classified correctly."
    files = list(test_files(run))
    began = time.process_time()
    answers = [magika.identify_path(path).output.label for _,path in files]
    spent = time.process_time()-began
    def share(names): return sum(a in names[label].split() for (label,_),a in zip(files, answers))/len(files)
    r = json.loads((run/'result.json').read_text())
    if r['files']['test']!=len(files): raise SystemExit(f"{run}: expected {r['files']['test']} files, got {len(files)}")
    return dict(date=date.today(), commit=commit, seed=r['seed'], files=len(files), majority=f"{r['majority']:.4f}",
        accuracy=f"{r['accuracy']:.4f}", macro_f1=f"{r['f1']:.4f}", magika=version('magika'),
        by_name=f'{share(BY_NAME):.4f}', grouped=f'{share(GROUPED):.4f}',
        magika_ms_a_file=f'{1000*spent/len(files):.1f}')

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument('runs', nargs='+', type=Path)
    p.add_argument('--to', type=Path, default=RESULTS/'file_types.csv')
    p.add_argument('--commit', help='of the runs (default: of this folder)')
    a = p.parse_args()
    from magika import Magika
    head = ['git', '--git-dir', RESULTS.parents[1]/'.git', 'rev-parse', '--short', 'HEAD']
    commit = a.commit or subprocess.run(head, capture_output=True, text=True).stdout.strip()
    magika = Magika()
    magika.identify_bytes(b'warm up\n'*99)
    rows = [compared(run, magika, commit) for run in a.runs]
    with open(a.to, 'w', newline='') as f:
        w = csv.DictWriter(f, FIELDS, lineterminator='\n')
        w.writeheader()
        w.writerows(rows)

if __name__=='__main__': main()
