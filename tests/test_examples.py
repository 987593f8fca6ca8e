"Every example runs as its docstring says, with small settings; those of Hugging Face models are in test_hf."
import csv, os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p.name for p in (ROOT/'examples').glob('*.py'))

@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_is_run_by_a_test(name):
    assert any(f'examples/{name}' in p.read_text(encoding='utf-8') for p in (ROOT/'tests').glob('test_*.py')), name

def test_a_long_document_has_the_same_states_on_any_number_of_processes(tmp_path):
    means = []
    for size in (1, 2):
        table = tmp_path/f'{size}.csv'
        torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(size)]
        command = [*torchrun, 'examples/long_document.py', '--bytes', '20000', '--double', '--to', table]
        r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, 'OMP_NUM_THREADS': '1'})
        assert r.returncode==0, r.stderr
        rows = list(csv.DictReader(table.open()))
        assert [int(row['bytes']) for row in rows]==[20000//size]*size and 'mean of all states' in r.stdout
        means += [row['mean'] for row in rows]
    assert len(set(means))==1, means
