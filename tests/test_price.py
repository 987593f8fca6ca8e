"""The price of widths acts exactly once in each step of an optimiser: with SGD of rate 1 it moves a width by minus its gradient."""
import copy, functools, os, pickle, subprocess, sys, warnings
from pathlib import Path
from types import SimpleNamespace
import pytest, torch
from torch.testing import assert_close
transformers = pytest.importorskip('transformers')
from transformers import BertConfig, BertForSequenceClassification, BertModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from dynattn import hf
from dynattn.hf import windows
from dynattn.hf.layers import attention_layers

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64, pad_token_id=0)
WEIGHT = 3.

def _model(kind='classes', **options):
    torch.manual_seed(0)
    if kind=='llama': model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1, bos_token_id=1, eos_token_id=2))
    else:
        cls = BertModel if kind=='bare' else BertForSequenceClassification
        model = cls(BertConfig(**TINY, hidden_dropout_prob=0., attention_probs_dropout_prob=0.))
    return hf.add_windows(model, **(dict(init=6.) | options))

def _texts(kind='classes'):
    g = torch.Generator().manual_seed(1)
    batch = dict(input_ids=torch.randint(3, 97, (4, 20), generator=g))
    if kind!='llama': batch['attention_mask'] = (torch.arange(20) < torch.tensor([20, 7, 12, 16])[:,None]).long()
    if kind=='classes': batch['labels'] = torch.tensor([0, 1, 1, 0])
    if kind=='llama': batch['labels'] = batch['input_ids']
    return batch

def _parts(batch, n): return [{name: x[i::n] for name,x in batch.items()} for i in range(n)]
def _widths(model): return {name: p for name,p in model.named_parameters() if '.sigma_head.' in name}
def _sgd(model): return torch.optim.SGD(model.parameters(), 1.)

def _due(model, calls):
    "The gradient of the price by autograd, from a copy without one: the mean over calls."
    plain = copy.deepcopy(model)
    plain._forward_hooks.clear()
    names,params = zip(*_widths(plain).items())
    for p in params: p.requires_grad_()
    total = 0.
    for batch in calls:
        plain(**batch)
        total = total + hf.mean_width(plain)
    return dict(zip(names, torch.autograd.grad(WEIGHT*total/len(calls), params)))

def _moved(model, train):
    model.train()
    before = {name: p.detach().clone() for name,p in _widths(model).items()}
    train(model)
    return {name: p.detach()-before[name] for name,p in _widths(model).items()}

def _check(train, calls, model=None, kind='classes', prepare=lambda m: m, atol=1e-6, **options):
    "`train` with and without the price: the difference is minus what is due."
    base = model or _model(kind, penalty=WEIGHT, **options)
    without = copy.deepcopy(base)
    without._forward_hooks.clear()
    with_price,plain = _moved(prepare(copy.deepcopy(base)), train),_moved(prepare(without), train)
    due = _due(base, calls)
    for name,grad in due.items():
        at = next(n for n in with_price if n.endswith(name))
        assert_close(with_price[at]-plain[at], -grad.float(), rtol=0, atol=atol, msg=lambda m: f'{name}: {m}')
        assert grad.abs().max()>1e-4, name

BATCH = _texts()
LOOPS = {}
def loop(calls):
    "A loop of one's own: with the calls that it makes in training."
    def keep(f):
        LOOPS[f.__name__] = (f, calls)
        return f
    return keep

@loop([BATCH])
def plain(m):
    opt = _sgd(m)
    m(**BATCH).loss.backward()
    opt.step()

@loop(_parts(BATCH, 4))
def accumulated_and_divided(m):
    opt = _sgd(m)
    for part in _parts(BATCH, 4): (m(**part).loss/4).backward()
    opt.step()

@loop(_parts(BATCH, 4))
def accumulated_and_summed(m):
    opt = _sgd(m)
    for part in _parts(BATCH, 4): m(**part).loss.backward()
    opt.step()

@loop(_parts(BATCH, 2))
def one_backward_of_two_calls(m):
    opt = _sgd(m)
    sum(m(**part).loss for part in _parts(BATCH, 2)).backward()
    opt.step()

@loop(_parts(BATCH, 2))
def two_calls_then_two_backwards(m):
    opt = _sgd(m)
    losses = [m(**part).loss for part in _parts(BATCH, 2)]
    for loss in losses: loss.backward()
    opt.step()

@loop([BATCH])
def gradients_divided_by_hand(m):
    opt = _sgd(m)
    m(**BATCH).loss.backward()
    for p in m.parameters():
        if p.grad is not None: p.grad /= 8
    opt.step()

@loop([BATCH])
def cleared_between_call_and_backward(m):
    opt = _sgd(m)
    loss = m(**BATCH).loss
    opt.zero_grad()
    loss.backward()
    opt.step()

@loop([BATCH])
def cleared_with_zeros(m):
    opt = _sgd(m)
    m(**_parts(BATCH, 2)[1]).loss.backward()
    opt.zero_grad(set_to_none=False)
    m(**BATCH).loss.backward()
    opt.step()

@loop([BATCH])
def a_batch_thrown_away(m):
    opt = _sgd(m)
    m(**_parts(BATCH, 2)[1]).loss.backward()
    opt.zero_grad()
    m(**BATCH).loss.backward()
    opt.step()

@loop([BATCH])
def cleared_before_the_step(m):
    opt = _sgd(m)
    m(**BATCH).loss.backward()
    opt.zero_grad()
    opt.step()

@loop([BATCH])
def evaluated_between(m):
    opt = _sgd(m)
    loss = m(**BATCH).loss
    m.eval()(**_parts(BATCH, 2)[1])
    m.train()
    loss.backward()
    with torch.no_grad(): m(**_parts(BATCH, 2)[1])
    opt.step()

@loop([BATCH])
def own_loss(m):
    opt = _sgd(m)
    m(**BATCH).logits.square().sum().backward()
    opt.step()

@loop([BATCH])
def outputs_as_a_tuple(m):
    opt = _sgd(m)
    m(**BATCH, return_dict=False)[0].backward()
    opt.step()

@loop([BATCH])
def clipped(m):
    opt = _sgd(m)
    (100*m(**BATCH).loss).backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), .01)
    opt.step()

@loop(_parts(BATCH, 2))
def clipped_after_each_part(m):
    opt = _sgd(m)
    for part in _parts(BATCH, 2):
        (m(**part).loss/2).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), .01)
    opt.step()

def _scaled(m, opt, clip=None):
    scaler = torch.amp.GradScaler('cpu', init_scale=2.**16)
    for part in _parts(BATCH, 2): scaler.scale(m(**part).loss/2).backward()
    if clip:
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
    scaler.step(opt)

@loop(_parts(BATCH, 2))
def scaled(m): _scaled(m, _sgd(m))
@loop(_parts(BATCH, 2))
def scaled_and_clipped(m): _scaled(m, _sgd(m), .01)
@loop(_parts(BATCH, 2))
def scaled_and_fused(m): _scaled(m, torch.optim.SGD(m.parameters(), 1., fused=True))

@loop([BATCH])
def a_closure(m):
    opt = _sgd(m)
    def closure():
        opt.zero_grad()
        loss = m(**BATCH).loss
        loss.backward()
        return loss
    opt.step(closure)

@loop([BATCH])
def two_optimisers(m):
    widths = [*_widths(m).values()]
    rest = [p for p in m.parameters() if all(p is not w for w in widths)]
    opts = [torch.optim.SGD(rest, 1.), *(torch.optim.SGD([w], 1.) for w in widths)]
    m(**BATCH).loss.backward()
    for opt in opts: opt.step()

@loop([BATCH])
def a_step_within_the_backward_pass(m):
    def step(p):
        torch.optim.SGD([p], 1.).step()
        p.grad = None
    for p in m.parameters(): p.register_post_accumulate_grad_hook(step)
    m(**BATCH).loss.backward()

@loop([BATCH])
def by_hand(m):
    m(**BATCH).loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None: p -= p.grad

@loop(_parts(BATCH, 2))
def by_hand_accumulated(m):
    for part in _parts(BATCH, 2): (m(**part).loss/2).backward()
    with torch.no_grad():
        for p in m.parameters():
            if p.grad is not None: p -= p.grad

for _reentrant in (True, False):
    def _again(m, reentrant):
        m.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        if reentrant: m.enable_input_require_grads()
        accumulated_and_summed(m)
    LOOPS[f'checkpointed_reentrant_{_reentrant}'] = (functools.partial(_again, reentrant=_reentrant), _parts(BATCH, 4))

KINDS = dict(head={}, hard=dict(edge='hard', unit='fraction', init=.3), predicted=dict(per='input'),
             share=dict(per='input', unit='fraction', init=.3))
NEED_A_GRADIENT = {'by_hand', 'by_hand_accumulated', 'a_step_within_the_backward_pass'} # which a hard edge has not

@pytest.mark.parametrize('name', LOOPS)
def test_any_loop_moves_a_width_by_its_price_once(name): _check(*LOOPS[name])

@pytest.mark.slow
@pytest.mark.parametrize('kind', list(KINDS)[1:])
def test_and_with_widths_of_any_kind(kind):
    for name,(train,calls) in LOOPS.items():
        if kind!='hard' or name not in NEED_A_GRADIENT: _check(train, calls, **KINDS[kind])

def test_gradients_after_a_backward_pass_have_the_price():
    "Public report c02b: what stands in `.grad`, for a bare encoder, part of a larger model, and both ways of checkpointing."
    batch = _texts('bare')
    for again in (None, True, False):
        base = _model('bare', penalty=WEIGHT).train()
        due = _due(base, [batch])
        if again is not None: base.gradient_checkpointing_enable(dict(use_reentrant=again)); base.enable_input_require_grads()
        grads = []
        for on in (True, False):
            m = copy.deepcopy(base)
            if not on: m._forward_hooks.clear()
            m(**batch).last_hidden_state.square().mean().backward()
            grads.append({name: p.grad for name,p in _widths(m).items()})
        for name,want in due.items(): assert_close(grads[0][name]-grads[1][name], want, rtol=0, atol=1e-7)

def _trainer(model, folder, batch, size, steps, loss=None, **options):
    rows = [{name: x[i] for name,x in batch.items()} for i in range(4)]
    args = TrainingArguments(str(folder), per_device_train_batch_size=size, gradient_accumulation_steps=steps, max_steps=1, report_to=[], use_cpu=True,
                             lr_scheduler_type='constant', save_strategy='no', disable_tqdm=True, logging_strategy='no', **dict(max_grad_norm=0.) | options)
    opt = _sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.)
    trainer = Trainer(model, args, train_dataset=rows, compute_loss_func=loss, optimizers=(opt, schedule))
    return trainer.train()

def _own(outputs, labels, num_items_in_batch=None): return outputs.logits.square().mean()

TRAINERS = dict(at_once=(4, 1, {}), one_by_one=(1, 4, {}), two_by_two=(2, 2, {}), smoothed=(1, 4, dict(label_smoothing_factor=.1)), own_loss=(1, 4, dict(loss=_own)),
                clipped=(1, 4, dict(max_grad_norm=.01)), not_across_devices=(1, 4, dict(average_tokens_across_devices=False)),
                checkpointed=(1, 4, dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=True))))

@pytest.mark.parametrize('kind', ['llama','classes'])
@pytest.mark.parametrize('name', TRAINERS)
def test_a_trainer_moves_a_width_by_its_price_once(name, kind, tmp_path):
    "Public reports c01 (accumulation) and c02 (label smoothing, a loss of one's own)."
    size,steps,options = TRAINERS[name]
    batch = _texts(kind)
    _check(lambda m: _trainer(m, tmp_path, batch, size, steps, **options), [batch], kind=kind)

def test_a_trainer_logs_the_price_once(tmp_path):
    batch = _texts('llama')
    losses = [_trainer(_model('llama', penalty=WEIGHT), tmp_path, batch, *how).training_loss for how in ((4, 1), (1, 4))]
    assert abs(losses[0]-losses[1])<1e-4
    assert losses[0]-_trainer(_model('llama'), tmp_path, batch, 4, 1).training_loss > .5

def test_a_copy_a_pickle_and_a_loaded_model_have_the_price(tmp_path):
    base = _model(penalty=WEIGHT)
    base.train()(**BATCH).loss.backward()
    _check(plain, [BATCH], base)
    _check(plain, [BATCH], pickle.loads(pickle.dumps(base)))
    hf.save(base, tmp_path)
    _check(plain, [BATCH], hf.load(tmp_path))

def test_prices_add_up_and_each_handle_takes_its_own_back():
    base = _model(penalty=1.)
    _check(plain, [BATCH], (lambda m: (hf.penalise(m, 2.), m)[1])(copy.deepcopy(base)))
    taken_back = copy.deepcopy(base)
    first,second = hf.penalise(taken_back, 2.),hf.penalise(taken_back, 5.)
    second.remove()
    _check(plain, [BATCH], taken_back)
    first.remove()
    taken_back._forward_hooks.clear()
    moved = [_moved(m, plain) for m in (taken_back, _model())]
    assert_close(moved[0], moved[1], rtol=0, atol=0)

def test_a_price_of_a_part_and_of_a_wrapper():
    part = _model()
    hf.penalise(part.bert, WEIGHT)
    without = copy.deepcopy(part)
    without.bert._forward_hooks.clear()
    class Around(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
        def forward(self, **batch): return self.inner.forward(**batch)          # which skips the hooks of `inner`
    around = Around(_model(penalty=WEIGHT))
    due = _due(_model(), [BATCH])
    for name,grad in due.items():
        at = _moved(copy.deepcopy(part), plain)[name]-_moved(copy.deepcopy(without), plain)[name]
        assert_close(at, -grad, rtol=0, atol=1e-6)
        at = _moved(copy.deepcopy(around), plain)[f'inner.{name}']-_moved(copy.deepcopy(without), plain)[name]
        assert_close(at, -grad, rtol=0, atol=1e-6)

def test_one_module_of_widths_in_all_layers():
    "Public report c25, with a price."
    tied = _model()
    layers = [m.dynattn for m in tied.modules() if hasattr(m, 'dynattn')]
    for l in layers: l.sigma_head = layers[0].sigma_head
    hf.penalise(tied, WEIGHT)
    _check(accumulated_and_divided, _parts(BATCH, 4), tied)

@pytest.mark.parametrize('targets, options', [(dict(target_modules=['query'], modules_to_save=['dynattn']), {}),
                                              (dict(target_modules=['query','linear']), dict(per='input'))])
def test_peft_around_a_model_with_a_price(targets, options):
    peft = pytest.importorskip('peft')
    texts = {name: x for name,x in BATCH.items() if name!='labels'}
    def wrap(m):
        torch.manual_seed(2)
        lora = peft.get_peft_model(m, peft.LoraConfig(r=2, init_lora_weights=False, **targets))
        for p in lora.parameters(): p.data = p.data.double()
        return lora
    base = _model('bare', penalty=WEIGHT, **options)
    moves = []
    for on in (True, False):
        m = wrap(copy.deepcopy(base)).train()
        if not on: hf_model(m)._forward_hooks.clear()
        learned = {name: p for name,p in m.named_parameters() if p.requires_grad and 'sigma_head' in name}
        before = {name: p.detach().clone() for name,p in learned.items()}
        opt = _sgd(m)
        for part in _parts(texts, 2): m(**part).last_hidden_state.square().mean().backward()
        opt.step()
        moves.append({name: p.detach()-before[name] for name,p in learned.items()})
    same = wrap(copy.deepcopy(base)).eval()
    total = 0.
    for part in _parts(texts, 2):
        same(**part)
        total = total+WEIGHT*hf.mean_width(same)/2
    params = [dict(same.named_parameters())[name] for name in learned]
    for name,due in zip(learned, torch.autograd.grad(total, params)):
        assert_close(moves[0][name]-moves[1][name], -due, rtol=0, atol=1e-6)
        assert due.abs().max()>1e-4

def hf_model(m): return next(x for x in m.modules() if isinstance(x, transformers.PreTrainedModel))

def test_widths_that_are_made_of_other_parameters():
    "Behind `register_parametrization` a width had no price, and the warning named the optimiser."
    from torch.nn.utils import parametrize
    class Twice(torch.nn.Module):
        def forward(self, z): return 2*z
    model = _model(penalty=WEIGHT)
    for layer in attention_layers(model).values(): parametrize.register_parametrization(layer.dynattn.sigma_head, 'z', Twice())
    def train(m):
        optimizer = _sgd(m)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            for _ in range(2):
                optimizer.zero_grad()
                m(**_texts()).loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            m(**_texts()).loss.backward()
    model.train()
    train(model)
    plain = copy.deepcopy(model)
    plain._forward_hooks.clear()
    plain.zero_grad()
    (plain(**_texts()).loss + WEIGHT*hf.mean_width(plain)).backward()
    found,due = ([p.grad for p in _widths(m).values()] for m in (model, plain))
    assert len(found)==2 and all(grad.abs().min()>0 for grad in due)
    assert_close(found, due)

def test_lbfgs_sees_gradient_and_value():
    "Each closure has the price once, in the gradient and in the value, whether a loss shows it or not."
    for kind in ('classes','bare'):
        m,seen = _model(kind, penalty=WEIGHT).train(),[]
        for name,p in m.named_parameters(): p.requires_grad_('sigma_head' in name)
        opt,batch = torch.optim.LBFGS(_widths(m).values(), lr=1., max_iter=3, line_search_fn='strong_wolfe'),_texts(kind)
        def closure():
            opt.zero_grad()
            out = m(**batch)
            loss = out.loss if kind=='classes' else out.last_hidden_state.square().mean()
            loss.backward()
            seen.append(loss.item()+(0. if kind=='classes' else WEIGHT*hf.mean_width(m).item()))
            return loss
        assert abs(opt.step(closure).item()-seen[0])<1e-6 and min(seen)<seen[0]-.01

def _told(train):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        train()
    return [str(w.message) for w in told if str(w.message).startswith('penalty: ')]

def test_a_price_that_cannot_act_says_so_once():
    def frozen():
        m = _model(penalty=WEIGHT).train()
        for p in _widths(m).values(): p.requires_grad_(False)
        for _ in range(3): plain(m)
    def not_held():
        m = _model(penalty=WEIGHT).train()
        opt = _sgd(m.classifier)
        for _ in range(3):
            m(**BATCH).loss.backward()
            opt.step()
    def elsewhere():
        m = _model(penalty=WEIGHT).train()
        m.set_attn_implementation('eager')
        for _ in range(3): plain(m)
    expected = [(frozen, 'penalty: expected widths that learn'), (not_held, 'penalty: expected an optimiser'), (elsewhere, 'penalty: expected a call in training')]
    for train,begin in expected:
        told = _told(train)
        assert len(told)==1 and told[0].startswith(begin), (train, told)
    for name,(train,_) in LOOPS.items(): assert not _told(lambda: train(_model(penalty=WEIGHT).train())), name

def test_another_model_trains_as_without_a_price():
    "One with a price, called and waiting, changes neither the gradients nor the warnings of another."
    def train(m):
        assert not _told(lambda: [plain(m) for _ in range(2)])
    waiting = _model(penalty=WEIGHT).train()
    alone = _moved(_model(), train)
    loss = waiting(**BATCH).loss
    assert not _told(lambda: assert_close(_moved(_model(), plain), _moved(_model(), plain), rtol=0, atol=0))
    loss.backward()
    assert waiting.bert.encoder.layer[0].attention.self.dynattn.owed is not None and alone

@pytest.mark.slow
def test_a_compiled_model_has_its_price_once():
    def prepare(m): return torch.compile(m, fullgraph=True, backend='aot_eager')
    _check(accumulated_and_divided, _parts(BATCH, 4), prepare=prepare)
    _check(accumulated_and_summed, _parts(BATCH, 4), prepare=prepare, per='input')

def _transformed(way, model):
    "A call of the model in training that leaves no gradient behind."
    P = {name: p.detach() for name,p in model.named_parameters()}
    ids = BATCH['input_ids']
    def call(P, ids): return torch.func.functional_call(model, P, (ids,)).logits
    if way=='grad': torch.func.grad(lambda P: call(P, ids).sum())(P)
    if way=='vmap': torch.func.vmap(lambda row: call(P, row[None]))(ids)
    if way=='fake':
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            q,k,v = torch.ones(3, 4, 2, 20, 8)    # not by the model: transformers 5.0 reads a number from its mask
            for layer in attention_layers(model).values(): hf.attend(layer, q, k, v, hf.Sight())

@pytest.mark.parametrize('per', ['head', 'input'])
@pytest.mark.parametrize('way', ['grad', 'vmap', 'fake'])
def test_a_call_in_a_transform_leaves_the_price_of_the_next_step(way, per):
    "A fake call took the price away without a word; one under vmap ended the next step in an error of PyTorch's."
    batch = {name: x for name,x in BATCH.items() if name!='attention_mask'}
    changed,plainly = (_model(init=6., penalty=WEIGHT, per=per).train() for _ in range(2))
    _transformed(way, changed)
    copy.deepcopy(changed)
    for m in (changed, plainly):
        opt = _sgd(m)
        m(**batch).loss.backward()
        opt.step()
    for name,p in _widths(plainly).items(): assert_close(_widths(changed)[name], p, rtol=0, atol=1e-6)

def test_a_mean_width_that_died_with_its_transform_is_refused_by_name():
    m = _model(per='input')
    for way in ('vmap','fake'):
        _transformed(way, m)
        with pytest.raises(RuntimeError, match='model: expected a last call whose widths have values'): hf.mean_width(m)
    m(**BATCH)
    assert hf.mean_width(m)>0

def _compiled_step(m, opt): # PyTorch's own recipe for a compiled optimiser
    step = torch.compile(opt.step, backend='eager')
    for _ in range(2):
        opt.zero_grad()
        m(**BATCH).loss.backward()
        step()

def _compiled_whole(m, opt):
    @torch.compile(backend='eager')
    def step():
        opt.zero_grad()
        m(**BATCH).loss.backward()
        opt.step()
    for _ in range(2): step()

def _compiled_closure(m, opt):
    def closure():
        opt.zero_grad()
        loss = m(**BATCH).loss
        loss.backward()
        return loss
    step = torch.compile(opt.step, backend='eager')
    for _ in range(2): step(closure)

_SLOWLY = [(_compiled_closure, 'head'), (_compiled_whole, 'head'), (_compiled_step, 'input')]

@pytest.mark.parametrize('train, per', [(_compiled_step, 'head'), *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOWLY)])
def test_a_compiled_step_gives_each_layer_its_own_price(train, per):
    "The compiler took the parameters of one shape for each other: a layer got the price of another."
    torch._dynamo.reset()
    # the price of a width depends on it, so that the layers are told apart
    compiled,plainly = (_model(init=[[2., 3.], [9., 14.]], penalty=WEIGHT, per=per).train() for _ in range(2))
    train(compiled, _sgd(compiled))
    opt = _sgd(plainly)
    for _ in range(2):
        opt.zero_grad()
        plainly(**BATCH).loss.backward()
        opt.step()
    for name,p in _widths(plainly).items():
        assert_close(_widths(compiled)[name], p, rtol=0, atol=1e-5, msg=lambda m, name=name: f'{name}: {m}')

@pytest.fixture
def asked(monkeypatch):
    "The groups that were asked for a sum, in one process, as if a second one had the same texts; two real ones follow."
    groups = []
    def reduce(total, group):
        groups.append(group)
        total.mul_(2)
    around = SimpleNamespace(process_group='both')
    monkeypatch.setattr(windows.dist, 'all_reduce', reduce)
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, '_get_active_ddp_module', lambda: around)
    return groups

def test_processes_agree_before_they_step(asked):
    _check(accumulated_and_divided, _parts(BATCH, 4))
    assert asked==['both']

def test_processes_agree_whatever_else_one_of_them_keeps(asked):
    "A model that one process alone has, called and never stepped, would make it wait for the others for ever."
    waiting = _model(penalty=WEIGHT).train()
    waiting(**BATCH)
    without_a_price = _model().train()
    plain(without_a_price)
    taken_back = _model(penalty=WEIGHT).train()
    taken_back._forward_hooks.clear()
    plain(taken_back)
    assert not asked
    m = _model(penalty=WEIGHT).train()
    opt = _sgd(m)
    m(**BATCH).loss.backward()
    opt.step()
    assert asked==['both']
    opt.step()              # nothing is due
    assert asked==['both']

def test_processes_agree_for_each_optimiser(asked):
    "Two optimisers share the widths: each step agrees on its own."
    def two_optimisers(m):
        first,second = [p for p in _widths(m).values() if p.requires_grad]
        others = [p for p in m.parameters() if p is not first and p is not second]
        both = [torch.optim.SGD(part, 1.) for part in ([first, *others], [second])]
        m(**BATCH).loss.backward()
        for opt in both: opt.step()
    _check(two_optimisers, [BATCH])
    assert asked==['both']*2

_RANKS = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_price import *
from test_price import _model, _texts, _parts, _moved, _sgd, _due, _widths
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.fsdp import fully_shard
dist.init_process_group('gloo')
rank,world = dist.get_rank(),dist.get_world_size()
mine = _parts(BATCH, 2)[rank]                         # ranks have texts of other lengths

def wrapped(m):
    ddp = DistributedDataParallel(m)
    opt = _sgd(ddp)
    parts = _parts(mine, 2)
    with ddp.no_sync(): ddp(**parts[0]).loss.backward()
    ddp(**parts[1]).loss.backward()
    opt.step()
def wrapped_and_checkpointed(m):
    m.gradient_checkpointing_enable(dict(use_reentrant=True))
    m.enable_input_require_grads()
    ddp = DistributedDataParallel(m, static_graph=True)
    opt = _sgd(ddp)
    ddp(**mine).loss.backward()
    opt.step()
def wrapped_and_scaled(m):
    ddp = DistributedDataParallel(m)
    opt,scaler = _sgd(ddp),torch.amp.GradScaler('cpu', init_scale=2.**16)
    scaler.scale(ddp(**mine).last_hidden_state.square().mean() if isinstance(m, BertModel) else ddp(**mine).loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), .01)
    scaler.step(opt)
def averaged_by_hand(m):
    opt = _sgd(m)
    m(**mine).loss.backward()
    for p in m.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world
    opt.step()
def sharded(m):
    for layer in m.bert.encoder.layer: fully_shard(layer)
    fully_shard(m)
    opt = _sgd(m)
    m(**mine).loss.backward()
    opt.step()

def whole(x): return x.full_tensor() if hasattr(x, 'full_tensor') else x
def moves(train, on, **options):
    m = _model(penalty=WEIGHT, **options).train()
    if not on: m._forward_hooks.clear()
    before = {name: p.detach().clone() for name,p in _widths(m).items()}
    train(m)
    return {name: whole(p.detach())-before[name] for name,p in _widths(m).items()}

for options in ({}, dict(per='input')):
    due = {train: _due(_model(penalty=WEIGHT, **options), calls) for train,calls in
           {wrapped: _parts(BATCH, 2)[0:0] or [p for half in _parts(BATCH, 2) for p in _parts(half, 2)],
            wrapped_and_checkpointed: _parts(BATCH, 2), wrapped_and_scaled: _parts(BATCH, 2), averaged_by_hand: _parts(BATCH, 2), sharded: _parts(BATCH, 2)}.items()}
    for train,wanted in due.items():
        on,off = moves(train, True, **options),moves(train, False, **options)
        for name,want in wanted.items():
            torch.testing.assert_close(on[name]-off[name], -want, rtol=0, atol=1e-6, msg=lambda m: f'{train.__name__} {name} {m}')
            others = [torch.empty_like(on[name]) for _ in range(world)]
            dist.all_gather(others, on[name].contiguous())
            assert all(torch.equal(x, others[0]) for x in others), train.__name__
if rank==0: print('RIGHT')
dist.destroy_process_group()
"""

@pytest.mark.slow
def test_two_processes_move_a_width_by_its_price_once(tmp_path):
    "Public report c01b: `DistributedDataParallel`, FSDP2, gradients averaged by hand; the ranks stay equal."
    (tmp_path/'ranks.py').write_text(_RANKS)
    run = subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2', str(tmp_path/'ranks.py'), str(ROOT/'tests')],
                         capture_output=True, text=True, env=os.environ | dict(OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]])))
    assert 'RIGHT' in run.stdout, run.stdout[-2000:]+run.stderr[-4000:]
