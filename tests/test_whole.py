"What changes a model changes it in full or not at all, and a checkpoint belongs to one run: reviews/hostile.md 4, 5 and 7."
import math, random, re, signal, sys
from pathlib import Path
import pytest, torch
transformers = pytest.importorskip('transformers')
from torch import nn
from transformers import AttentionInterface, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
import dynattn
from dynattn import hf
from dynattn.hf.curves import cost_curves
from dynattn.hf.healing import heal
from dynattn.hf.narrowing import narrow, set_widths
from dynattn.saved import DamagedFile, interrupts_wait, read_state, write_state

PACKAGE = Path(dynattn.__file__).parent
OURS = str(PACKAGE/'hf'), str(PACKAGE/'saved.py'), str(PACKAGE/'modules.py')  # what changes models

def llama(seed=0, **other):
    torch.manual_seed(seed)
    size = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, max_position_embeddings=64, attn_implementation='sdpa')
    model = LlamaForCausalLM(LlamaConfig(**{**size, **other})).eval()
    with torch.no_grad():
        for p in model.parameters(): p.mul_(6)
    return model

def bert(seed=0):
    torch.manual_seed(seed)
    return BertModel(BertConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                num_attention_heads=2, max_position_embeddings=64, attn_implementation='sdpa')).eval()

def texts(count=2, n=12, rows=1, first=0):
    return [dict(input_ids=torch.randint(0, 16, (rows, n), generator=torch.Generator().manual_seed(first+i)))
            for i in range(count)]

def state_of(model):
    "Everything a caller could see of a model."
    def plain(x): return {k: plain(v) for k,v in x.items()} if isinstance(x, dict) else str(x)
    def hooks(m): return sum(len(x) for name,x in vars(m).items() if name.endswith('_hooks') and x)
    def own(m): return sorted(name for name,x in vars(m).items() if not isinstance(x, (dict, torch.Tensor, nn.Module)))
    modules = [(name, type(m).__qualname__, m.training, hooks(m), own(m)) for name,m in model.named_modules()]
    tensors = {name: (x.dtype, x.detach().clone()) for name,x in model.state_dict().items()}
    learns = {name: p.requires_grad for name,p in model.named_parameters()}
    config = getattr(model, 'config', None)
    implementation = getattr(config, '_attn_implementation', None)
    return modules, tensors, learns, config and plain(config.to_dict()), implementation, 'generate' in vars(model)

def same(a, b):
    return (a[0]==b[0] and a[2:]==b[2:] and a[1].keys()==b[1].keys()
            and all(x[0]==b[1][name][0] and torch.equal(x[1], b[1][name][1]) for name,x in a[1].items()))

def count_lines(call):
    "The lines of ours that a call executes, in order: [(file, line)]."
    seen = []
    def local(frame, event, arg):
        if event=='line': seen.append((frame.f_code.co_filename, frame.f_lineno))
        return local
    def trace(frame, event, arg): return local if frame.f_code.co_filename.startswith(OURS) else None
    sys.settrace(trace)
    try: call()
    finally: sys.settrace(None)
    return seen

def interrupted_at(call, number):
    "What `call` returns if a KeyboardInterrupt comes before that line, or the exception."
    left = number
    def local(frame, event, arg):
        nonlocal left
        if event=='line':
            left -= 1
            if left<0:
                sys.settrace(None)
                frame.f_trace = None
                raise KeyboardInterrupt
        return local
    def trace(frame, event, arg): return local if frame.f_code.co_filename.startswith(OURS) else None
    sys.settrace(trace)
    try: return call()
    except KeyboardInterrupt as e: return e
    finally: sys.settrace(None)

def places(seen, part):
    "Numbers of lines to interrupt at: some, or a part of all; of each line the first and the last time."
    first,last = {},{}
    for i,line in enumerate(seen):
        first.setdefault(line, i)
        last[line] = i
    every = sorted({*first.values(), *last.values()})
    if part=='some': return sorted(random.Random(0).sample(every, min(8, len(every))))
    return every[part::PARTS]

PARTS = 8
PART = ['some', *(pytest.param(i, marks=pytest.mark.slow) for i in range(PARTS))]
WAYS = [pytest.param(dict(keep=.5, heal=0), id='share'),
        pytest.param(dict(rise=1., heal=0), id='rise'),
        pytest.param(dict(keep=.5, heal=2), id='healed')]

@pytest.mark.parametrize('options', WAYS)
@pytest.mark.parametrize('part', PART)
def test_narrow_interrupted_at_any_line(tmp_path, part, options):
    if options['heal']: pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    batches = texts(3)
    def run(model, at): return narrow(model, batches, checkpoint=at, held_out=texts(1, first=9), **options)
    whole = llama()
    wanted = run(whole, tmp_path/'whole.pt')
    before,after = state_of(llama()),state_of(whole)
    seen = count_lines(lambda: run(llama(), tmp_path/'counted.pt'))
    bad = []
    for number in places(seen, part):
        model,at = llama(),tmp_path/f'{number}.pt'
        given = interrupted_at(lambda: run(model, at), number)
        where = f'{Path(seen[number][0]).name}:{seen[number][1]}'
        now = state_of(model)
        if isinstance(given, KeyboardInterrupt) and not same(now, before) and not same(now, after):
            # narrowed, but not healed: windows like any others
            if any(hasattr(m, 'base_layer') for m in model.modules()): bad.append(f'{where}: updates are left')
        if not same(now, before):
            try:
                hf.save(model, tmp_path/'saved')
                again = hf.load(tmp_path/'saved')
                if not torch.equal(again(**batches[0]).logits, model(**batches[0]).logits): bad.append(f'{where}: not as saved')
            except Exception as e: bad.append(f'{where}: {type(given).__name__}, cannot be saved and loaded: {e}')
        fresh = model if same(now, before) else llama()
        resumed = run(fresh, at)
        if (resumed.widths,resumed.healed,resumed.rise)!=(wanted.widths,wanted.healed,wanted.rise): bad.append(f'{where}: resumed to others')
        if not same(state_of(fresh), after): bad.append(f'{where}: resumed to another model')
    assert not bad, '\n'.join(bad)

@pytest.mark.parametrize('part', PART)
def test_curves_interrupted_at_any_line(tmp_path, part):
    def run(model, at): return cost_curves(model, texts(2), checkpoint=at, places=4)
    model = llama()
    before,wanted = state_of(model),run(model, tmp_path/'whole.pt')
    assert same(state_of(model), before)                     # as it was after a run that ended, too
    for number in places(count_lines(lambda: run(model, tmp_path/'counted.pt')), part):
        at = tmp_path/f'{number}.pt'
        interrupted_at(lambda: run(model, at), number)
        assert same(state_of(model), before)
        assert torch.equal(run(model, at).text, wanted.text)

class Twice(nn.Module):
    "A model of PyTorch's own."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x

CHANGES = dict(
    add_windows=(llama, lambda m: hf.add_windows(m, penalty=.1)),
    add_windows_per_input=(bert, lambda m: hf.add_windows(m, per='input', unit='fraction')),
    add_alpha=(llama, hf.add_alpha),
    switch=(llama, hf.switch),
    set_widths=(lambda: hf.add_windows(llama()), lambda m: set_widths(m, [[3.], [5., 7.]])),
    convert=(Twice, lambda m: dynattn.convert(m, window='learned', alpha='learned')))

@pytest.mark.parametrize('part', ['some', pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', CHANGES)
def test_a_change_interrupted_at_any_line(name, part, monkeypatch):
    monkeypatch.setitem(globals(), 'PARTS', 1)
    make,change = CHANGES[name]
    model = make()
    seen = count_lines(lambda: change(model))
    before,after = state_of(make()),state_of(model)
    for number in places(seen, part):
        model = make()
        given = interrupted_at(lambda: change(model), number)
        now = state_of(model)
        assert same(now, before) or same(now, after), f'{Path(seen[number][0]).name}:{seen[number][1]}'
        assert same(now, after) or isinstance(given, KeyboardInterrupt)
        if same(now, before): change(model)
        assert same(state_of(model), after)

@pytest.mark.parametrize('wrong', [
    lambda m: hf.add_windows(m, init=[1., 2., 3.]), lambda m: hf.add_windows(m, init=float('nan')),
    lambda m: hf.add_alpha(m, init='x'), lambda m: hf.add_windows(m, edge='x'),
    lambda m: narrow(m, texts(1), curves='x'), lambda m: narrow(m, texts(1), keep=2.), lambda m: narrow(m, [])])
def test_what_is_refused_changes_nothing(wrong):
    model = llama()
    before = state_of(model)
    with pytest.raises((TypeError, ValueError)): wrong(model)
    assert same(state_of(model), before)

def test_wrong_widths_change_nothing():
    model = hf.add_windows(llama())
    before = state_of(model)
    for widths in ([[3.], [float('nan')]], [[3.], ['x']], [[3.], [-1.]], [[3.], [1., 2., 3.]], [[3.]]):
        with pytest.raises(ValueError, match='widths: expected'): set_widths(model, widths)
        assert same(state_of(model), before)

def test_load_interrupted_leaves_nothing_behind(tmp_path):
    hf.save(hf.add_windows(llama(), init=5.), tmp_path)
    wanted = state_of(hf.load(tmp_path))
    for number in places(count_lines(lambda: hf.load(tmp_path)), 'some'):
        interrupted_at(lambda: hf.load(tmp_path), number)
        assert same(state_of(hf.load(tmp_path)), wanted)
        assert torch.get_default_dtype()==torch.float32 and torch.tensor(0.).device.type=='cpu'

def test_a_signal_waits_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    "reviews/practitioner.md 3: a second Ctrl-C ended a run without a checkpoint"
    from dynattn import saved
    write = saved.write_state
    def write_and_interrupt(path, state):
        signal.raise_signal(signal.SIGINT)
        write(path, state)
    monkeypatch.setattr(saved, 'write_state', write_and_interrupt)
    file = saved.Checkpoint(tmp_path/'run.pt', {}, ['step'])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt): file.write(dict(step=3))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally: signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert file.read()==dict(step=3)

# ---- a checkpoint belongs to one run: reviews/hostile.md 5

MARKS = [torch.zeros(1, 12, dtype=torch.bool), torch.zeros(1, 12, dtype=torch.bool)]
MARKS[1][0,8:10] = True

def marked(batch, at): return dict(batch, asked=MARKS[at])
def real(batch, count): return dict(batch, attention_mask=(torch.arange(12)<count).long()[None])

def one_weight_changed():
    model = llama()
    with torch.no_grad(): model.model.layers[1].mlp.up_proj.weight[3,5] += 1e-3
    return model

def one_setting_changed(): return llama(rms_norm_eps=1e-5)

OTHERS = {
    'weights': (one_weight_changed, texts(2), {}),
    'architecture': (one_setting_changed, texts(2), {}),
    'texts.input_ids': (llama, [texts(2)[0], texts(1, first=5)[0]], {}),
    'texts.batches': (llama, [dict(input_ids=torch.cat([b['input_ids'] for b in texts(2)]))], {}),
    'texts.asked': (llama, [texts(2)[0], marked(texts(2)[1], 1)], {}),
    'texts.attention_mask': (llama, [texts(2)[0], real(texts(2)[1], 10)], {}),
    'sinks was': (llama, texts(2), dict(sinks=1)), 'seed was': (llama, texts(2), dict(seed=1)),
    'places was': (llama, texts(2), dict(places=3))}
OF_NARROW = {
    **OTHERS, 'texts.batches': (*OTHERS['texts.batches'][:2], dict(heal=1)), 'keep was': (llama, texts(2), dict(keep=.6)), 'heal was': (llama, texts(2), dict(heal=1)),
    'answers was': (llama, texts(2), dict(answers=.6)), 'sizes was': (llama, texts(2), dict(sizes='1,2,full'))}

def refused_by_name(files, run, others):
    run(llama(), texts(2), {})
    whole = [at.read_bytes() for at in files]
    names = '|'.join(at.name for at in files)
    for name,(make,batches,options) in others.items():
        model = make()
        before = state_of(model)
        with pytest.raises(ValueError, match=f'checkpoint: expected one of this run, got ({names}) of another: .*{name}'):
            run(model, batches, options)
        assert same(state_of(model), before) and [at.read_bytes() for at in files]==whole, name

def test_curves_of_another_run_are_refused(tmp_path):
    at = tmp_path/'curves.pt'
    def run(model, batches, options): return cost_curves(model, batches, checkpoint=at, **dict(dict(places=4), **options))
    refused_by_name([at], run, OTHERS)
    assert torch.equal(run(llama(), texts(2), {}).text, cost_curves(llama(), texts(2), places=4).text)

def test_narrowing_of_another_run_is_refused(tmp_path):
    pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    at = tmp_path/'run.pt'
    def run(model, batches, options, checkpoint=at):
        usual = dict(keep=.5, heal=2, places=4, held_out=texts(1, first=9))
        return narrow(model, batches, checkpoint=checkpoint, **dict(usual, **options))
    refused_by_name([tmp_path/'run.curves.pt', tmp_path/'run.heal.pt'], run, OF_NARROW)
    again,alone = (run(llama(), texts(2), {}, checkpoint) for checkpoint in (at, None))
    assert (again.widths,again.healed)==(alone.widths,alone.healed)
    for name,options in dict(curves=dict(curves=cost_curves(llama(), texts(2), sinks=4, places=4)),
                             held_out=dict(held_out=texts(1, first=8))).items():
        with pytest.raises(ValueError, match=f'got run.heal.pt of another: .*{name}'): run(llama(), texts(2), options)

def test_another_share_needs_no_other_curves(tmp_path):
    def run(keep, **options): return narrow(llama(), texts(2), keep=keep, checkpoint=tmp_path/'run.pt', **options)
    run(.5)
    whole,told = (tmp_path/'run.curves.pt').read_bytes(),[]
    found = run(.6, answers=1., on_progress=lambda *what: told.append(what))
    assert told==[('curves', 2, 2)] and (tmp_path/'run.curves.pt').read_bytes()==whole and found.share()>.5

def test_a_checkpoint_of_a_learner_is_refused(tmp_path):
    at,model = tmp_path/'run.pt',llama()
    at.write_bytes(b'whatever it was')
    before = state_of(model)
    with pytest.raises(ValueError, match='checkpoint: expected the name of a run of this version, got run.pt, in which an earlier'):
        narrow(model, texts(2), keep=.5, checkpoint=at)
    assert same(state_of(model), before) and [path.name for path in tmp_path.iterdir()]==['run.pt']

def test_healing_of_another_run_is_refused(tmp_path):
    pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    from dynattn.hf.narrowing import Distance
    from dynattn.options import NarrowOptions
    at = tmp_path/'heal.pt'
    def windowed(make=llama): return hf.add_windows(make(), init=3., edge='hard').requires_grad_(False)
    def run(model=None, **options):
        model = windowed() if model is None else model
        distance = Distance(model, texts(2), NarrowOptions(places=4))
        return heal(model, distance, checkpoint=at, measure=lambda: [1.], **dict(dict(steps=2, depends=dict(texts='a')), **options))
    run()
    for name,options in {'weights': dict(model=windowed(one_weight_changed)), 'architecture': dict(model=windowed(one_setting_changed)),
                         'texts was': dict(depends=dict(texts='b')), 'steps was': dict(steps=1), 'rate was': dict(rate=1e-2),
                         'rank was': dict(rank=4), 'seed was': dict(seed=1)}.items():
        with pytest.raises(ValueError, match=f'got heal.pt of another: .*{name}'): run(**options)
    wider = windowed()
    set_widths(wider, [[4., 4.]]*2)
    with pytest.raises(ValueError, match='got heal.pt of another: .*weights'): run(wider)

def test_a_checkpoint_from_a_stranger_is_read_with_care(tmp_path):
    pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    def run(): return narrow(llama(), texts(2), keep=.5, heal=2, places=4, held_out=texts(1, first=9), checkpoint=tmp_path/'run.pt')
    wanted = run()
    for at in (tmp_path/'run.curves.pt', tmp_path/'run.heal.pt'):
        whole = read_state(at)
        less = [{k: v for k,v in whole.items() if k!=name} for name in whole if name!='seconds']    # an earlier version had none
        other = dict(updates=[None, 3, [], [torch.zeros(1)]*len(whole.get('updates', [])), [x*torch.nan for x in whole.get('updates', [])]],
                     rows=[None, 5, [3]], adam=[None, {}, 3], text=[None, 3, torch.zeros(1), torch.full((2,3), torch.nan)], done=['x', None, -1],
                     counts=[None, []], record=[None, [], {}, 3], seconds=[None, 'x', 3, -1., math.nan])
        more = [{**whole, name: value} for name,values in other.items() if name in whole for value in values]
        for state in [*less, *more]:
            write_state(at, state)
            with pytest.raises((DamagedFile, ValueError), match=f'damaged {at.name}|checkpoint: expected'): run()
        write_state(at, whole)
    assert run().healed==wanted.healed

# ---- curves are finite, or refused by name: reviews/hostile.md 4

ROW = texts(1)[0]['input_ids']
BAD_TEXTS = {
    'got padding only in row 1 of text 1': dict(input_ids=ROW.repeat(2, 1), attention_mask=torch.tensor([[1], [0]]).repeat(1, 12)),
    'got padding only in row 0 of text 1': dict(input_ids=ROW, attention_mask=torch.zeros(1, 12)),
    'expected one token or more, got none in text 1': dict(input_ids=ROW[:,:0]),
    'got none in text 1': dict(input_ids=ROW[:0]),
    'expected tokens from 0 to 15, which the model has, got 16 in text 1': dict(input_ids=ROW.clamp(min=15)+1),
    'got -1 in text 1': dict(input_ids=ROW-ROW-1),
    'at most the 64 tokens that the model takes, got 120 in text 1': dict(input_ids=ROW.repeat(1, 10)),
    'expected asked like input_ids': dict(input_ids=ROW, asked=torch.zeros(12, dtype=torch.bool)),
    'expected attention_mask like input_ids': dict(input_ids=ROW, attention_mask=torch.ones(1, 1, 12, 12)),
    'expected asked where there are tokens': dict(input_ids=ROW, asked=MARKS[1], attention_mask=1-MARKS[1].long())}

@pytest.mark.parametrize('said', BAD_TEXTS)
@pytest.mark.parametrize('run', [cost_curves, narrow])
def test_a_text_that_cannot_be_measured_is_refused(said, run):
    for model in (llama(), bert()):
        before = state_of(model)
        with pytest.raises(ValueError, match=said.replace('(', r'\(')): run(model, [texts(1)[0], BAD_TEXTS[said]])
        assert same(state_of(model), before)
    with pytest.raises(TypeError, match='expected whole numbers as input_ids'): run(llama(), [dict(input_ids=ROW.float())])

def broken(make, where, value):
    model = make()
    with torch.no_grad(): model.get_parameter(where).view(-1)[0] = value
    return model

@pytest.mark.parametrize('where', ['model.layers.0.self_attn.q_proj.weight', 'model.layers.1.mlp.down_proj.weight', 'lm_head.weight',
                                   'model.norm.weight', 'model.embed_tokens.weight'])
@pytest.mark.parametrize('value', [float('nan'), float('inf'), 3e38])
def test_a_model_whose_numbers_end_is_refused(where, value):
    model = broken(llama, where, value)
    before = state_of(model)
    batches = [dict(input_ids=torch.zeros(1, 12, dtype=torch.long)), *texts(1)]    # token 0: the row that is broken
    for run in (cost_curves, narrow):
        try: found = run(model, batches, **(dict(keep=.6) if run is narrow else {}))   # a quarter of 12 tokens is refused
        except ValueError as e:
            assert re.search(r'model: expected finite .* text \d, got nan or inf from ', str(e)), e
            assert value==value or where.removesuffix('.weight') in str(e), e
            assert [x for x in state_of(model) if type(x) is not dict]==[x for x in before if type(x) is not dict]
        else: # large, and no number overflowed
            widths = found.widths(.5) if run is cost_curves else found.widths
            assert value==3e38 and all(w==w for layer in widths for w in layer)

def test_a_broken_encoder_is_refused():
    model = broken(bert, 'encoder.layer.0.output.dense.weight', float('nan'))
    for run in (cost_curves, narrow):
        with pytest.raises(ValueError, match='expected finite predictions of text 0, got nan or inf from encoder.layer.0.output.dense'):
            run(model, texts(1), **(dict(keep=.6) if run is narrow else {}))

@pytest.mark.parametrize('batches', [
    pytest.param([dict(input_ids=torch.full((2, 12), 3))]*2, id='all tokens equal'), pytest.param([texts(1)[0]]*3, id='equal texts'),
    pytest.param([marked(texts(1)[0], 0)], id='no mark asks'), pytest.param([marked(texts(1)[0], 1)], id='all ask'),
    pytest.param([real(texts(1)[0], 1), texts(1)[0]], id='one token'), pytest.param([*texts(1, n=12), *texts(1, n=3)], id='other lengths')])
def test_odd_texts_have_finite_curves(batches):
    for make in (llama, bert):
        if make is bert and 'asked' in batches[0]: continue
        curves = cost_curves(make(), batches)
        assert all(w==w and w>=1 for layer in curves.widths(.6) for w in layer)
        found = narrow(make(), batches, keep=.6)
        assert found.finished and all(w==w and w>=1 for layer in found.widths for w in layer)

def test_tokens_that_are_never_predicted_do_not_matter():
    "A vocabulary that was filled up has logits of -inf."
    def padded():
        model = llama()
        bias = torch.zeros(16)
        bias[12:] = -torch.inf
        model.lm_head = nn.Linear(8, 16)
        with torch.no_grad(): model.lm_head.bias.copy_(bias)
        return model
    pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    found = narrow(padded(), texts(2), keep=.5, held_out=texts(1, first=9))
    assert found.finished and all(w==w for layer in found.widths for w in layer)
    assert found.healed.after and all(r['loss']==r['loss'] for r in found.healed.rows)
