"""transformers' own tests of its models, with dynattn in place of sdpa.

The tests are not a part of the installed package, so the folder of a checkout of transformers is given; of its version,
or not far from it. Each model's test file runs twice: as it is, and with every model that asks for "sdpa", or has no
preference, computing its attention by "dynattn". A row per model says how many tests pass each way; another file has
each test that does not pass both ways, and why. Rows of other models stay as they are. (Llama 4 has no tests but those
of its full weights.)

    pip install parameterized timeout-decorator pytest-timeout datasets
    python benchmarks/hf_tests.py ../transformers            # writes results/hf_tests.csv and hf_tests_failed.csv
    python benchmarks/hf_tests.py ../transformers --models bert t5 --but compil     # without the tests that compile
"""
import argparse, json, os, re, subprocess, sys, tempfile
from importlib.metadata import version
from pathlib import Path
import torch
from harness import RESULTS, rows_of, write

MODELS = ('bert', 'roberta', 'modernbert', 'vit', 'wav2vec2', 'whisper', 'gpt2', 'llama', 'mistral', 'qwen3', 'gemma2',
          'gemma3', 'gpt_oss', 'cohere2', 't5', 'bart', 'clip')
ROOT = Path(__file__).resolve().parents[1]

class Recorder:
    "A plugin of pytest: replaces the implementation, and keeps what became of each test."
    def __init__(self, way, to): self.way,self.to,self.found = way,Path(to),{}

    def pytest_collection_finish(self, session):
        if self.way!='dynattn': return
        from transformers import PreTrainedModel
        from dynattn import hf
        hf.register()
        usual = PreTrainedModel.get_correct_attn_implementation
        def replaced(model, requested, *args, **kwargs):
            return usual(model, 'dynattn' if requested in (None, 'sdpa') else requested, *args, **kwargs)
        PreTrainedModel.get_correct_attn_implementation = replaced

    def pytest_runtest_setup(self, item):
        "The same random numbers for a test both ways; tests that draw a padding token as text fail either way."
        torch.manual_seed(2)
        common = next((m for name,m in sys.modules.items() if name.endswith('test_modeling_common')), None)
        if common is not None: common.global_rng.seed(2)

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split('::', 1)[-1]
        if report.failed:
            message = ' '.join(str(report.longrepr).split('\nE ')[-1].split())
            self.found[name] = 'failed',re.sub(r'\S*/site-packages/', '', message)  # no place of this machine
        elif report.skipped: self.found.setdefault(name, ('skipped',''))
        elif report.when=='call' and self.found.get(name, ('skipped',))[0]=='skipped': self.found[name] = 'passed',''
        self.to.write_text(json.dumps(self.found), encoding='utf-8')

def run(folder, model, way, seconds, but):
    "What became of each test of a model: {name: (outcome, message)}."
    with tempfile.TemporaryDirectory() as place:
        to = Path(place)/'found.json'
        command = [sys.executable, __file__, str(folder), '--models', model, '--but', but, '--worker', way, str(to)]
        env = dict(os.environ, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(sys.path))
        log = Path(place)/'log'
        with open(log, 'w', encoding='utf-8') as f:
            try: subprocess.run(command, env=env, cwd=folder, stdout=f, stderr=f, timeout=seconds)
            except subprocess.TimeoutExpired: print(f'{model} {way}: stopped after {seconds} s', flush=True)
        if not to.exists(): raise RuntimeError(f'{model} {way}: no test ran; {log.read_text(encoding="utf-8")[-2000:]}')
        return json.loads(to.read_text(encoding='utf-8'))

def work(folder, model, but, way, to):
    "Run one file of tests in this process."
    import pytest
    tests = folder/f'tests/models/{model}/test_modeling_{model}.py'
    options = ['-q', '-p', 'no:cacheprovider', '--timeout', '300', *(['-k', f'not {but}'] if but else [])]
    pytest.main([*options, str(tests)], plugins=[Recorder(way, to)])

# why a test that passes with sdpa does not with dynattn: a part of its message, or of its name
REASONS = {
    'asks for the name "sdpa"': r"sdpa_can_dispatch|can_set_attention_dynamically|config_attn_implementation_setter",
}

def reason(test, message):
    return next((why for why,pattern in REASONS.items() if re.search(pattern, test+' '+message)), 'open')

def compare(model, stock, ours, but):
    "The row of a model, and the rows of its tests that do not pass both ways."
    names = sorted({*stock, *ours})
    nothing = 'not run',''
    def count(found, outcome): return sum(found.get(n, nothing)[0]==outcome for n in names)
    run = sum('skipped' not in (stock.get(n, nothing)[0], ours.get(n, nothing)[0]) for n in names)
    row = dict(transformers=version('transformers'), model=model, left_out=but, run=run, sdpa=count(stock, 'passed'),
               dynattn=count(ours, 'passed'))
    failed = []
    for n in names:
        (before,_),(after,message) = stock.get(n, nothing),ours.get(n, nothing)
        if after==before and after in ('passed', 'skipped'): continue
        why = reason(n, message) if before=='passed' else 'fails with sdpa as well' if after=='failed' else ''
        failed.append(dict(model=model, test=n.split('::')[-1], sdpa=before, dynattn=after, why=why,
                           message=message[:160]))
    return row,failed

def update(path, models, rows):
    "Put the rows of these models into a table, in place of those that it has of them."
    kept = [r for r in rows_of(path) if r['model'] not in models]
    if kept or rows: write(path, sorted(kept+rows, key=lambda r: r['model']))

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('folder', type=Path, help='a checkout of transformers')
    a.add_argument('--models', nargs='+', default=list(MODELS), help='names of folders in tests/models')
    a.add_argument('--but', default='', help='leave out tests with this in their names')
    a.add_argument('--seconds', type=int, default=1200, help='for a file, one way')
    a.add_argument('--to', type=Path, default=RESULTS)
    a.add_argument('--worker', nargs=2, metavar=('WAY', 'FILE'), help=argparse.SUPPRESS)
    args = a.parse_args()
    folder = args.folder.resolve()
    if not (folder/'tests/models').is_dir(): a.error(f'folder: expected a checkout with tests/models, got {folder}')
    if args.worker: return work(folder, args.models[0], args.but, *args.worker)
    for model in args.models:
        try: stock,ours = (run(folder, model, way, args.seconds, args.but) for way in ('sdpa', 'dynattn'))
        except RuntimeError as e:
            print(e, flush=True)
            continue
        row,failed = compare(model, stock, ours, args.but)
        print(row, flush=True)
        for one in failed:
            print('   ', one['test'], one['sdpa'], one['dynattn'], one['why'], one['message'][:120], flush=True)
        update(args.to.absolute()/'hf_tests.csv', [model], [row])
        update(args.to.absolute()/'hf_tests_failed.csv', [model], failed)

if __name__=='__main__': main()
