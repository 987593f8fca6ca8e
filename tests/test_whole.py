"What changes a model changes it in full or not at all, and a checkpoint belongs to one run: reviews/hostile.md 4, 5 and 7."
import copy, inspect, random, signal, sys
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

OURS = str(Path(dynattn.__file__).parent)

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
    "The lines of this package that a call executes, in order: [(file, line)]."
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

def places(seen, count, seed=0):
    "Numbers of lines to interrupt at: the first and the last time of each, or some of them."
    first,last = {},{}
    for i,line in enumerate(seen):
        first.setdefault(line, i)
        last[line] = i
    every = sorted({*first.values(), *last.values()})
    if count is None: return every
    return sorted(random.Random(seed).sample(every, min(count, len(every))))

HOW_MANY = [pytest.param(24, id='some lines'), pytest.param(None, id='all lines', marks=pytest.mark.slow)]
WAYS = [pytest.param(dict(keep=.5), id='share'),
        pytest.param(dict(rise=1., steps=3), id='rise'),
        pytest.param(dict(keep=.5, steps=1, heal=2), id='healed')]

@pytest.mark.parametrize('options', WAYS)
@pytest.mark.parametrize('many', HOW_MANY)
def test_narrow_interrupted_at_any_line(tmp_path, many, options, request):
    if 'heal' in options: pytest.importorskip('peft', reason="peft is not installed; pip install 'dynattn[narrow]' brings it")
    batches,options = texts(3),dict(dict(steps=2), **options)
    def run(model, at): return narrow(model, batches, checkpoint=at, held_out=texts(1, first=9), **options)
    whole = llama()
    wanted = run(whole, tmp_path/'whole.pt')
    before,after = state_of(llama()),state_of(whole)
    seen = count_lines(lambda: run(llama(), tmp_path/'counted.pt'))
    bad = []
    for number in places(seen, many):
        model,at = llama(),tmp_path/f'{number}.pt'
        given = interrupted_at(lambda: run(model, at), number)
        where = f'{Path(seen[number][0]).name}:{seen[number][1]}'
        now = state_of(model)
        if isinstance(given, KeyboardInterrupt) and not same(now, before) and not same(now, after):
            # learned, but not healed: windows like any others
            if any(hasattr(m, 'base_layer') for m in model.modules()): bad.append(f'{where}: updates are left')
        if not same(now, before):
            try:
                hf.save(model, tmp_path/'saved')
                again = hf.load(tmp_path/'saved')
                if not torch.equal(again(**batches[0]).logits, model(**batches[0]).logits): bad.append(f'{where}: not as saved')
            except Exception as e: bad.append(f'{where}: {type(given).__name__}, cannot be saved and loaded: {e}')
        fresh = model if same(now, before) else llama()
        resumed = run(fresh, at)
        if (resumed.widths,resumed.rows,resumed.rise)!=(wanted.widths,wanted.rows,wanted.rise): bad.append(f'{where}: resumed to others')
        if not same(state_of(fresh), after): bad.append(f'{where}: resumed to another model')
    assert not bad, '\n'.join(bad)

