"Windows of other authors, as chapter 16 writes them, work wherever a window does: any engine, the gradient of σ included."
import inspect, json, math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
import pytest, torch
from torch.testing import assert_close
from dynattn import Window, attention, dense_attention
from dynattn import smoothing
import oracle, search

CHAPTER = Path(__file__).resolve().parents[1]/'nbs/16_before.ipynb'

@pytest.fixture(scope='module')
def smoothings():
    "The two classes of the chapter, not left behind in the registry"
    kept = dict(smoothing.SMOOTHINGS)
    names = dict(torch=torch, math=math, dataclass=dataclass, Smoothing=smoothing.Smoothing, register=smoothing.register, __name__='chapter16')
    cells = [''.join(c['source']) for c in json.loads(CHAPTER.read_text(encoding='utf-8'))['cells']]
    for cell in cells:
        if cell.startswith('@register'): exec(cell.split('\n\n')[0], names)
    yield names['Pointers'](1.),names['Pointers'](.4),names['Parabola'](),names['Parabola'](2.)
    smoothing.SMOOTHINGS.clear()
    smoothing.SMOOTHINGS.update(kept)

@pytest.mark.parametrize('which', range(4))
@pytest.mark.parametrize('causal', [False, True])
def test_the_band_agrees_with_the_dense_path(smoothings, which, causal):
    g = torch.Generator().manual_seed(which)
    q,k,v = torch.randn(3, 1, 2, 61, 8, dtype=torch.float64, generator=g).requires_grad_().unbind()
    sigma = torch.tensor([3.3, 9.7], dtype=torch.float64, requires_grad=True)
    window = Window(sigma, smooth=smoothings[which])
    results = []
    for out in (attention(q, k, v, window=window, is_causal=causal, impl='banded'), dense_attention(q, k, v, window=window, is_causal=causal)):
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, sigma))])
    for mine,theirs in zip(*results): assert_close(mine, theirs, rtol=0, atol=1e-10)
    assert results[0][4].abs().min()>0

@pytest.mark.parametrize('which', range(4))
def test_nothing_is_seen_beyond_the_half_width_and_the_slope_is_autograds(smoothings, which):
    sigma = torch.tensor([.6, 4.2, 17.], dtype=torch.float64, requires_grad=True)
    window,offsets = Window(sigma, smooth=smoothings[which]),torch.arange(-80, 81)
    mask = window.mask(offsets)[0]
    assert not mask[offsets.abs()>window.half_width()[:,None]].any() and (mask>=0).all() and (mask<=1).all()
    assert_close(torch.autograd.grad(mask.sum(), sigma)[0], window.dmask(offsets)[0].sum(-1))

def test_every_smoothing_is_named_where_a_window_is_made():
    "A new one passed `make check nb=12`, and neither `help(Window)` nor a random test had heard of it"
    said = inspect.getdoc(Window)
    unnamed = [name for name in search.SMOOTHINGS if f'"{name}"' not in said]
    assert not unnamed, "the comment of `smooth` in the class Window (chapter 14) does not name them"

@pytest.mark.parametrize('name', search.SMOOTHINGS)
def test_the_oracle_has_the_formula_of_every_smoothing(name):
    "One that it had not was a Gaussian to it, and a hundred random calls did not draw it"
    made = search.of_ones(search.SMOOTHINGS[name])
    usual = None if search.needs_threshold(type(made)) else made.check(None)
    assert made.inclusive==(name in oracle.ENDS_BEHIND), f'ENDS_BEHIND of tests/oracle.py: expected {name} {"" if made.inclusive else "not "}to be there'
    assert usual==oracle.THRESHOLDS.get(name), f'THRESHOLDS of tests/oracle.py: expected {usual} for {name}'
    kind,sigma,offsets = search.SMOOTHINGS[name],torch.tensor([.2, 1.7, 6.], dtype=torch.float64),torch.arange(-12, 13)
    cuts = [.3] if search.needs_threshold(kind) else [None, .3] if kind.curved else [None]
    for number,cut,curve in product((.5, 3.), cuts, ('bell','normal') if kind.curved else ('bell',)):
        options = dict(smooth=name, cut=cut, curve=curve, **dict.fromkeys(kind.__dataclass_fields__, number))
        want = oracle.Window(sigma, **options).mask(offsets.numpy()[None], 25)[0,:,0]
        assert_close(Window(sigma, **options).mask(offsets), torch.tensor(want)[None], rtol=1e-12, atol=1e-14)

@dataclass(frozen=True)
class SmoothStep(smoothing.Edge):
    "Made from the default, with a formula of its own, which the engines computed as the default's"
    def of(self, V, T=None):
        r = torch.relu(V-self.check(T))/(1-self.check(T))
        return r**2*(3-2*r)
    def slope_of(self, V, T=None):
        r = torch.relu(V-self.check(T))/(1-self.check(T))
        return 6*r*(1-r)/(1-self.check(T))

def test_a_smoothing_made_from_ours_keeps_its_own_formula():
    g = torch.Generator().manual_seed(0)
    q,k,v = torch.randn(3, 1, 2, 61, 8, dtype=torch.float64, generator=g).unbind()
    def result(smooth, impl):
        sigma = torch.tensor([3.3, 9.7], dtype=torch.float64, requires_grad=True)
        out = attention(q, k, v, window=Window(sigma, smooth=smooth), impl=impl)
        return out,*torch.autograd.grad(out.square().sum(), sigma)
    dense = result(SmoothStep(), 'dense')
    for mine,theirs in zip(result(SmoothStep(), 'banded'), dense): assert_close(mine, theirs, rtol=0, atol=1e-10)
    assert not torch.allclose(dense[0], result(smoothing.Edge(), 'dense')[0])

def test_a_class_made_from_a_window_is_refused():
    "Engines, `replace` and the compiler made a Window of it, without its own mask, and said nothing."
    with pytest.raises(TypeError, match='^Halved: expected a formula of your own as a class of Smoothing'):
        class Halved(Window):
            def log_mask(self, offsets, n=None): return super().log_mask(offsets, n)-1
