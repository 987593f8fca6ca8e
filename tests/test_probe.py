"A question to a model finds what it asks for, is silent otherwise, and leaves nothing behind; survey and audit give one answer."
import inspect
import pytest, torch, torch.nn.functional as F
from torch import nn
from dynattn import probe
from dynattn.audit.questions import ask, _sources
from dynattn.audit.subjects import Subject
from dynattn.engine.dense import dense_attention
from dynattn.probe import Answer, Probe, change, dependence, differs, draw, frozen
from dynattn.survey import card, lowrank, memory

N = 12
CAUSAL = sorted((c for c in card.load().values() if card.has_causal(c, 16)), key=lambda c: (c.info.name, c.form))
def name_of(c): return f'{c.info.name} {c.form}'.strip()

def of(f, width=3): return Probe.of(f, torch.empty(1, 1, width))

# ---- survey and audit

@pytest.mark.parametrize('system', CAUSAL, ids=name_of)
def test_survey_and_audit_give_one_answer(system):
    "The law of this chapter: whoever asks, a layer looks ahead or does not."
    n,words = 16,{Answer.NO: {'yes'}, Answer.UNSURE: {'undecided'}, Answer.CHOICE: {'leaks', 'no'}, Answer.YES: {'leaks', 'no'}}
    torch.manual_seed(0)
    layer = system.at(n, causal=True)
    subject, = Subject.parts(layer, torch.empty(1, n, layer.width))
    with torch.no_grad(): found = ask(subject, 'future', n, seeds=1)
    assert str(card.causality(layer, n, seeds=range(1))) in words[found.answer], found
    try: one_by_one = card.streaming(layer, n)
    except NotImplementedError: return
    with torch.no_grad(): assert (ask(subject, 'cached', n).answer==Answer.NO)==(one_by_one<1e-8)

@pytest.mark.parametrize('system', [card.Exact, memory.Luna, lowrank.Nystromformer], ids=name_of)
def test_padding_is_asked_alike(system):
    torch.manual_seed(0)
    def make(): return system.at(N)
    class Blind(nn.Module):
        "Takes a mask and does not use it."
        def __init__(self):
            super().__init__()
            self.inside = make()
        def forward(self, x, padding=None): return self.inside(x)
    for layer,answer in ((make(), Answer.NO), (Blind(), Answer.YES)):
        subject, = Subject.parts(layer, torch.empty(1, N, 16))
        with torch.no_grad(): assert ask(subject, 'padding', N).answer==answer
        assert (card.truncation(layer, N, 7)<1e-9)==(answer==Answer.NO)

# ---- every question says no to a sound model and yes to a broken one

class Kept(nn.Module):
    "Adds the first number of the last call."
    def __init__(self):
        super().__init__()
        self.last = 0.
    def forward(self, x):
        y,self.last = x+self.last,x[0,0,0].item()
        return y

def past(x, keep=None, segments=None):
    "The mean over real tokens of the same text that came before."
    seen = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()[None]
    if keep is not None: seen = seen*keep[:,None].double()
    if segments is not None: seen = seen*(segments[:,:,None]==segments[:,None])
    return seen @ x/seen.sum(-1, keepdim=True).clamp(min=1)

def one_by_one(x): return x.cumsum(1)/torch.arange(1, x.shape[1]+1)[:,None]

FAULTS = { # question -> its numbers, a model that breaks it
    'repeated': ({}, Kept()),
    'future': (dict(t=5), lambda x: past(x.flip(1)).flip(1)),
    'future_gradient': (dict(t=5), lambda x: x+x.mean(1, keepdim=True)),
    'padded': (dict(first=0, last=7), lambda x, keep=None: x-x.mean(1, keepdim=True)),
    'padded_gradient': (dict(first=4, last=N), lambda x, keep=None: past(x)),
    'batched': ({}, lambda x: x-x.mean(0)),
    'batched_padded': (dict(mine=7, its=6), lambda x, keep: past(x, keep)*keep.sum()),
    'packed': (dict(first=5), lambda x, segments=None: past(x)),
    'cached': (dict(steps=lambda x: one_by_one(x).roll(1, 1)), past),
    'pair': (dict(query=3, key=2), past)}
SOUND = dict(cached=dict(steps=one_by_one), pair=dict(query=2, key=3), padded=dict(first=0, last=7))

@pytest.mark.parametrize('name', FAULTS)
def test_a_question_tells_a_fault_from_a_sound_model(name):
    numbers,broken = FAULTS[name]
    question = getattr(probe, name)
    assert differs(*of(broken).outputs(question, N, **numbers))==Answer.YES
    assert differs(*of(past).outputs(question, N, **SOUND.get(name, numbers)))==Answer.NO

def test_every_question_is_tried():
    first = ['f', 'x', 'other']
    public = (getattr(probe, name) for name in probe.__all__)
    asked = {f.__name__ for f in public if inspect.isfunction(f) and list(inspect.signature(f).parameters)[:3]==first}
    assert asked==set(FAULTS)|{'dependence'}

@pytest.mark.parametrize('name', FAULTS)
def test_the_source_of_a_question_runs_without_this_package(name):
    "An audit prints it: what is printed is all that it needs."
    numbers,broken = FAULTS[name]
    text = '\n'.join(['import torch', 'from torch import Tensor, nn', *_sources(getattr(probe, name))])
    assert 'dynattn' not in text
    alone = {}
    exec(text, alone)
    x,other = draw(0, [1, N, 3]),draw(1, [1, N, 3])
    expected,found = alone[name](broken, x, other, **numbers)
    assert change(expected.detach(), found.detach())>1e-3

# ---- who depends on whom

@pytest.mark.parametrize('seed', range(5))
def test_the_dependence_of_attention_is_its_mask(seed):
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(N, N, generator=g)<.4) | torch.eye(N, dtype=torch.bool)
    def attend(x): return dense_attention(*[x[:,None]]*3, attn_mask=mask)[:,0]
    f = of(attend)
    assert torch.equal(dependence(f, f.inputs(seed, N), f.others(seed, N)), Answer.YES*mask.to(torch.int8))

@pytest.mark.parametrize('choose', [lambda x: x.argmax(1, keepdim=True).double(), lambda x: x.sort(1).indices.double(),
                                    lambda x: x.sign(), lambda x: (100*x).round(), lambda x: (x>0).double().cumsum(1)],
                         ids=['argmax','sort','sign','round','count'])
def test_selection_is_a_dependence_by_choice(choose):
    f = of(lambda x: choose(x).expand_as(x))
    x = f.inputs(0, N)
    assert Answer.CHOICE in dependence(f, x, -x) and not (dependence(f, x, -x)==Answer.YES).any()
    assert torch.equal(*of(choose).outputs(probe.future_gradient, N, t=4))     # and no gradient shows it

def test_no_gradient_is_no_proof():
    "A layer that computes without gradients: nothing flows, and the past depends on the future all the same."
    @torch.no_grad()
    def hidden(x): return x+x.mean(1, keepdim=True)
    f = of(hidden)
    assert torch.equal(*f.outputs(probe.future_gradient, N, t=4)) and f.depends(probe.future, N, t=4).min()==Answer.YES
    assert card.causality(Wrapped(hidden), N, width=3)=='leaks'

class Wrapped(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x): return self.f(x)

@pytest.mark.parametrize('weight,answer', [(1e-3, Answer.YES), (1e-5, Answer.YES), (1e-30, Answer.NO)])
def test_a_weak_dependence_is_one_and_rounding_is_none(weight, answer):
    assert of(lambda x: x+weight*x.flip(1)).depends(probe.future, N, t=4).max()==answer

def test_a_step_is_not_lost_in_float32():
    "Norms that a model computes in float32 stay in float64."
    f = of(lambda x: (x.float().mean(1, keepdim=True)+x.to(torch.float32)).double())
    assert set(f.depends(probe.future, N, t=4).tolist())=={Answer.YES}

# ---- nothing is left behind

def test_a_probe_changes_nothing():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=.5, batch_first=True).train()
    before,state,default = {k: v.clone() for k,v in layer.state_dict().items()},torch.get_rng_state(),torch.get_default_dtype()
    f = of(layer, 8)
    x = f.inputs(0, N)
    kept = x.clone()
    for name in ('future','padded','batched'): f.outputs(getattr(probe, name), N, **FAULTS[name][0])
    f.depends(probe.future, N, t=3)
    dependence(f, x, f.others(0, N))
    assert layer.training and torch.equal(x, kept) and all(torch.equal(v, before[k]) for k,v in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype()==default
    assert not layer._forward_hooks and next(layer.parameters()).grad is None

def test_a_model_that_raises_leaves_nothing_behind():
    def fails(x): raise KeyError('no')
    state,default = torch.get_rng_state(),torch.get_default_dtype()
    with pytest.raises(KeyError): of(fails).outputs(probe.future, N, t=3)
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype()==default
    assert torch.is_grad_enabled()

def test_dropout_draws_the_same_each_time():
    f = of(lambda x: F.dropout(x, .5, training=True))
    assert torch.equal(f(f.inputs(0, N)), f(f.inputs(0, N)))
    assert differs(*f.outputs(probe.repeated, N))==Answer.NO

@pytest.mark.parametrize('pack', [lambda y: (y,), lambda y: dict(other=torch.ones(1).long(), y=y), lambda y: [y.long(), y]],
                         ids=['tuple','dict','integers first'])
def test_an_output_may_be_packed(pack): assert torch.equal(of(lambda x: pack(x+1))(torch.ones(1, 2, 3)), torch.ones(1, 2, 3)+1)

def test_a_function_stays_as_it_is_and_a_module_is_copied():
    layer = nn.Linear(2, 2)
    assert frozen(past) is past and frozen(layer) is not layer and layer.weight.dtype==torch.float32
