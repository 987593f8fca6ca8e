"""`experiments/narrow_trial.py`: questions that their texts answer, footprints against a plain count, equal footprints."""
import random, sys
from pathlib import Path
import pytest, torch
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/'experiments'), str(ROOT/'benchmarks')]
pytest.importorskip('transformers')
import narrow_trial as trial

class Letters:
    "A token for every character."
    def ids(self, text): return [ord(c) for c in text]
    def filler(self, rng, n, split): return [ord(c) for c in rng.choices('abc. \n', k=n)]
    spoken = dict(test=[f'word{a}{b}' for a in 'abcdefg' for b in 'abcdefg'])

def text(ids): return ''.join(map(chr, ids))

@pytest.mark.parametrize('task', trial.TASKS)
def test_the_text_holds_the_answer_where_it_says(task):
    questions = trial.Questions(Letters(), 'test')
    for i in range(5):
        asked = questions.draw(task, i, 3000)
        assert len(asked.ids)==3000 and asked==questions.draw(task, i, 3000)
        for start,stop,distance in asked.answers:
            assert asked.begin<start<stop<=3000
            answer,fact = text(asked.ids[start:stop]),text(asked.ids[start-distance:asked.begin])
            if task=='copy': assert fact[:stop-start]==answer
            elif task=='common words': assert all(8==fact.count(f' {word}') for word in answer.split(', '))
            elif task=='variables': assert f' = {answer.strip()}.' in fact
            else: assert all(len(value)==5 and f'{value}.\n' in fact for value in answer.split(', '))

def test_a_footprint_counts_the_keys_after_every_token():
    n,widths = 100,torch.tensor([3., 40., 95.])
    kept = sum(min(t, int(w)+1+4) for w in widths for t in range(1, n+1))
    budget = trial.Footprint(n, 4, True)
    assert budget.share(widths).item()==pytest.approx(kept/(3*n*(n+1)/2), rel=1e-6)
    assert budget.share(torch.tensor([budget.window(.3)])).item()==pytest.approx(.3, abs=1e-4)

@pytest.mark.parametrize('share', [.1, .25, .5])
@pytest.mark.parametrize('near', [8, 32])
def test_two_sizes_spend_the_whole_share(share, near):
    budget,order = trial.Footprint(512, 4, True),torch.randperm(24)
    layers = trial.two_sizes(order, near, budget, share, 6)
    width = torch.tensor(layers).flatten()
    assert budget.share(width).item()==pytest.approx(share, abs=1e-3)
    full = (width==budget.most).nonzero()[:,0]
    assert set(full.tolist())==set(order[:len(full)].tolist()) and width.unique().numel()<=2
