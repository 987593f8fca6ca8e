"""What a cache holds: any state is refused or means what its description says, and what refuses or is interrupted changes nothing.

`python tests/test_cache_state.py SECONDS [EVERY]` changes every entry of the states of all configurations, or every
so-manieth, and then two entries at a time for so many seconds."""
import copy, itertools, json, math, os, random, re, subprocess, sys, time
from functools import cache
from pathlib import Path
from unittest import mock
import pytest, torch
from torch.testing import assert_close
from dynattn import Window, dense_attention
from dynattn.cache import WindowedLayer, _check_reached, check_rows, check_state, turn_rows
from dynattn.engine.native import core
from dynattn.padding import PaddingMask
from dynattn.saved import read_weights, write_weights

os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]
WIDTHS = torch.tensor([2.,5.,9.,1.])

# ---- layers of many kinds, and states of them

def tokens(n, heads, batch=2, seed=0, dtype=torch.float64, d=4):
    return torch.randn(batch, heads, n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))

def text(layer, first, n, batch=2, dtype=torch.float64):
    "q, k and v of n tokens from position `first` on."
    return [tokens(first+n, heads, batch, seed, dtype)[:,:,first:] for seed,heads in enumerate((layer.heads, layer.kv_heads, layer.kv_heads))]

def grown(options, then=lambda layer: None, n=23, batch=2, dtype=torch.float64, keep=None, steps=2):
    "A layer after a prompt and some steps, on which `then` was called."
    layer = WindowedLayer(**options)
    for first,count in [(0,n), *((n+i,1) for i in range(steps))]:
        layer.attend(*text(layer, first, count, batch, dtype), None if keep is None else keep[:,:first+count])
    then(layer)
    return layer

def recorded(layer):
    layer.record_past = True
    layer.attend(*text(layer, layer.seen, 3))

LEFT = torch.arange(60)>=torch.tensor([[0],[7]])
CONFIGS = dict(
    one_width=lambda: grown(dict(heads=2, window=8)),
    per_head=lambda: grown(dict(heads=4, window=Window.default(WIDTHS))),
    grouped=lambda: grown(dict(heads=4, kv_heads=2, window=Window.span(WIDTHS, 3.))),
    unlimited=lambda: grown(dict(heads=4, window=None)),
    leading=lambda: grown(dict(heads=4, kv_heads=2, window=Window.default(WIDTHS), n_global=3)),
    short=lambda: grown(dict(heads=2, window=2, n_global=6), n=2, steps=1),
    padded=lambda: grown(dict(heads=4, kv_heads=2, window=Window.default(WIDTHS), n_global=3), keep=LEFT),
    entmax=lambda: grown(dict(heads=4, window=4, alpha=torch.tensor([1.,1.3,1.5,2.]))),
    sink=lambda: grown(dict(heads=4, window=(5,0), sink=torch.tensor([.1,-2.,3.,0.]), softcap=2., scale=.4)),
    batch=lambda: grown(dict(heads=2, window=3), batch=5),
    nothing=lambda: grown(dict(heads=2, window=3), batch=0),
    cropped=lambda: grown(dict(heads=2, window=9), lambda layer: layer.crop(2)),
    turned=lambda: grown(dict(heads=4, window=Window.default(WIDTHS), n_global=2), lambda layer: layer.select(torch.tensor([1,0,1]))),
    recorded=lambda: grown(dict(heads=4, window=Window.default(WIDTHS)), recorded),
    single=lambda: grown(dict(heads=2, window=0), dtype=torch.float32),
    half=lambda: grown(dict(heads=2, window=5), dtype=torch.bfloat16))

def keep_of(name, batch, n):
    "Which of n tokens are real; None where all are."
    return LEFT[:batch,:n] if name=='padded' and batch==2 and n<=LEFT.shape[1] else None

def bias_of(layer, h, offset): # of head `h`, at offsets
    window = layer.options['window']
    if window is None: return torch.zeros(offset.shape, dtype=torch.float64)
    if isinstance(window, tuple): return torch.where(offset>=-window[0], 0., -math.inf).double()
    return window.replace(sigma=window.sigma[h].double()).log_mask(offset)

def described(layer, numbers, tensors, q, k, v, keep): # the newest tokens -> [B,H,n,dv] float64
    "Attention of new tokens to the keys that a state describes, each at its position, by the dense path."
    seen,(batch,_,n,_),lead = numbers['seen'],q.shape,layer.n_global
    q,k,v = q.double(),k.double(),v.double()
    copies = lead if 'padded' in tensors else 0                                # leading keys of each row, wherever it begins
    origin = torch.zeros(batch, dtype=torch.int64) if keep is None else keep.int().argmax(1)
    queries = torch.arange(seen, seen+n)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    for i,group in enumerate(layer.groups):
        start = numbers['start'][i] if seen else lead
        shared = torch.tensor([*range(0 if copies else min(lead, seen)), *range(start, seen), *queries])
        far = origin[:,None]+torch.arange(copies)                              # [B,copies] positions
        place = torch.cat([far, shared.expand(batch, -1)], 1)                  # [B,M]
        twice = torch.cat([far>=start, torch.zeros(batch, len(shared), dtype=torch.bool)], 1)
        offset = place[:,None]-queries[:,None]                                 # [B,n,M]
        is_first = ((place>=origin[:,None]) & (place<origin[:,None]+lead))[:,None]
        see = (offset<=0) & ~twice[:,None]
        if keep is not None: see = see & keep.gather(1, place.clamp(max=seen+n-1))[:,None]
        members = group.kv_heads if isinstance(group.kv_heads, list) else list(range(layer.kv_heads))[group.kv_heads]
        for at,head in enumerate(members):
            old = [tensors[f'{i}.{name}'][:,at:at+1].double() for name in 'kv'] if seen else [x[:,:1,:0] for x in (k, v)]
            keys,values = (torch.cat([x, new[:,head:head+1]], 2) for x,new in zip(old, (k, v)))
            for h in range(head*layer.heads//layer.kv_heads, (head+1)*layer.heads//layer.kv_heads):
                bias = torch.where(see, bias_of(layer, h, offset).masked_fill(is_first, 0.), -math.inf)[:,None]
                alpha,sink = (x[h:h+1].double() if isinstance(x, torch.Tensor) else x for x in (layer.options['alpha'], layer.options['sink']))
                out[:,h:h+1] = dense_attention(q[:,h:h+1], keys, values, attn_mask=bias, alpha=alpha, sink=sink,
                                               scale=layer.options['scale'], softcap=layer.options['softcap'])
    return out

# ---- changes of a state

NUMBERS = 0,-1,10**6,2**31-1,2**31,2**63,10**30,True,False,.5,math.nan,math.inf,'x','3',None,[],{},[0]

def number_changes(x):
    "Other values for an entry, or for one of its own entries."
    if isinstance(x, list):
        for i,y in enumerate(x): yield from ([*x[:i], other, *x[i+1:]] for other in number_changes(y))
        yield from (x[:-1], x+x[-1:], x+[0], tuple(x), x[::-1])
    if type(x) is int: yield from (x+1, x-1, float(x))
    if isinstance(x, float): yield from (x+1, -x, 2*x)
    yield from NUMBERS

def tensor_changes(x):
    "Other tensors, and what is none."
    yield from (x.long(), x.half(), x.double(), x.bool(), x.cfloat(), x.to('meta'), x.to_sparse(), [x], None, 3, x.tolist())
    yield from (x[None], x.flatten(), x[0] if len(x) else x, torch.tensor(1.), x.repeat(*[2]*x.dim()))
    for axis,size in enumerate(x.shape):
        for n in {max(size-1, 0), size+1, 0, 10**9}:
            shape = [n if i==axis else s for i,s in enumerate(x.shape)]
            yield x.narrow(axis, 0, n) if n<=size else x.new_zeros(1).expand(shape) if n>10**6 else x.new_zeros(shape)
    yield from (x.clone()+1, x*0, torch.full_like(x, -1), torch.full_like(x, 10**6), x.flip(0), torch.nn.Parameter(x.double()) if x.is_floating_point() else x.to(torch.int32))
    if x.dim()==4: yield from (x.transpose(1, 2).contiguous().transpose(1, 2), torch.full_like(x, math.nan), x.transpose(1, 2), x[:1].expand(x.shape) if len(x) else x)

def changes(state, other):
    "Every state that differs from `state` in one entry, or has something of `other`; with a name."
    numbers,tensors = state
    for name,x in numbers.items():
        for i,wrong in enumerate(number_changes(x)): yield f'{name} {i}',({**numbers, name: wrong},tensors)
        yield f'no {name}',({key: y for key,y in numbers.items() if key!=name},tensors)
        if name in other[0]: yield f'other {name}',({**numbers, name: other[0][name]},tensors)
    for name,x in tensors.items():
        for i,wrong in enumerate(tensor_changes(x)): yield f'{name} {i}',(numbers,{**tensors, name: wrong})
        yield f'no {name}',(numbers,{key: y for key,y in tensors.items() if key!=name})
        if name in other[1]: yield f'other {name}',(numbers,{**tensors, name: other[1][name]})
        for key,y in tensors.items(): yield f'{name} as {key}',(numbers,{**tensors, name: y})
    some = next(iter(tensors.values()), torch.zeros(1))
    for name in ('9.k','padded','',0): yield f'more {name}',(numbers,{**tensors, name: some})
    yield 'padded',(numbers,{**tensors, 'padded': torch.zeros(len(some), dtype=torch.int64)})
    yield 'more',({**numbers, 'more': 1},tensors)
    for i,wrong in enumerate((None, [], 3, 'x', {})):
        yield f'numbers {i}',(wrong,tensors)
        yield f'tensors {i}',(numbers,wrong)
    yield 'numbers of the other',(other[0],tensors)
    yield 'tensors of the other',(numbers,other[1])
    if numbers['seen']: # the report's: a later first key, and no key at all
        yield 'report',({**numbers, 'start': [10**6]*len(numbers['start'])},{name: x[:,:,:0] if x.dim()==4 else x for name,x in tensors.items()})
        yield 'later',({**numbers, 'start': [x+1 for x in numbers['start']]},{name: x[:,:,:-1] if x.dim()==4 else x for name,x in tensors.items()})

def goes_on(layer, name):
    "Outputs of the next token and two more."
    out = []
    for n in (1, 2):
        batch = layer.batch if layer.seen else 2
        dtype = layer.groups[0].k.dtype if layer.seen else torch.float64
        keep = keep_of(name, batch, layer.seen+n)
        out.append(layer.attend(*text(layer, 30, n, batch, dtype), keep))
    return out

def judge(name, original, changed, which): # a layer, a state that differs from its own
    """Whether the state is refused. A refusal changes nothing; otherwise both engines compute what it says."""
    found = []
    for library in (core.library, lambda: None):
        layer = copy.deepcopy(original)
        before = vars(layer).copy()
        with mock.patch.object(core, 'library', library):
            try: layer.load_state(*changed)
            except (TypeError,ValueError):
                assert all(vars(layer)[entry] is x for entry,x in before.items()), (name, which)
                found.append(None)
                continue
            loaded = copy.deepcopy(layer)
            try: found.append(goes_on(layer, name))
            except (TypeError,ValueError): found.append(None) # keys of another width, say
    assert (found[0] is None)==(found[1] is None), (name, which)
    if found[0] is None: return True
    if not all(x.isfinite().all() for x in changed[1].values()): return False
    q,k,v = text(loaded, 30, 1, loaded.batch if loaded.seen else 2, loaded.groups[0].k.dtype if loaded.seen else torch.float64)
    expected = described(loaded, *changed, q, k, v, keep_of(name, len(q), loaded.seen+1))
    eps = 1e-10 if q.dtype==torch.float64 else 8*torch.finfo(q.dtype).eps
    close = dict(atol=eps*max([1., *(x.double().abs().max().item() for x in changed[1].values() if x.numel())]), rtol=eps)
    for one in found: assert_close(one[0].double(), expected, **close, msg=lambda text: f'{name}, {which}: {text}')
    for one,two in zip(*found): assert_close(one, two, **close, msg=lambda text: f'{name}, {which}: {text}')
    return False

def fuzz(seconds=0., every=1, seed=0):
    "Changed states of all configurations, every so-manieth; afterwards two changes of a state at a time, for so long."
    rng,count,refused = random.Random(seed),0,0
    made = {name: make() for name,make in CONFIGS.items()}
    for name,layer in made.items():
        assert not judge(name, layer, layer.state(), 'as it was')
        later = copy.deepcopy(layer)
        goes_on(later, name)
        for other in (later, made[rng.choice(list(made))]):
            for i,(which,changed) in enumerate(changes(layer.state(), other.state())):
                if i%every!=seed%every: continue
                refused += judge(name, layer, changed, which)
                count += 1
    deadline = time.monotonic()+seconds
    while time.monotonic()<deadline:
        name,other = rng.choice(list(made)),rng.choice(list(made))
        state = made[name].state()
        some = list(changes(state, made[other].state()))
        (first,one),(second,two) = rng.choice(some),rng.choice(some)
        if not all(isinstance(part, dict) for part in (*one, *two)): continue
        both = tuple({**a, **{entry: x for entry,x in b.items() if x is not old.get(entry)}}
                     for a,b,old in zip(one, two, state))
        refused += judge(name, made[name], both, f'{first}, {second}')
        count += 1
    print(f'{count} states, {refused} refused')

# ---- states

@pytest.mark.parametrize('arguments', [pytest.param(['0', '40'], id='some'), pytest.param(['60'], id='all', marks=pytest.mark.slow)])
def test_a_changed_state_is_refused_or_means_what_it_says(arguments):
    "In a process of its own, in which a read outside the buffers would be seen as a crash, or as a wrong value."
    path = os.pathsep.join([str(ROOT),os.environ.get('PYTHONPATH', '')])
    done = subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True)
    assert done.returncode==0, (done.returncode, done.stdout[-2000:], done.stderr[-4000:])
    states,refused = (int(x) for x in re.findall(r'\d+', done.stdout))
    assert 0<states-refused<states/2

def test_a_layer_is_seen_whole():
    "One class, in which every method that a user calls is written down."
    assert WindowedLayer.__bases__==(object,)
    public = {'attend','batch','crop','load_state','nbytes','reset','select','state','to','undo'}
    assert public<=vars(WindowedLayer).keys()

@pytest.mark.slow
def test_mypy_knows_what_a_layer_returns(tmp_path):
    pytest.importorskip('mypy')
    expected = dict(layer='WindowedLayer', attend='Tensor', to='WindowedLayer', batch='int', nbytes='int',
                    state='tuple[dict[Any, Any], dict[Any, Any]]')
    asked = dict(layer='layer', attend='layer.attend(x, x, x)', to="layer.to('cpu')", batch='layer.batch',
                 nbytes='layer.nbytes', state='layer.state()')
    lines = ['import torch', 'from dynattn.cache import WindowedLayer', 'x = torch.zeros(1, 2, 1, 4)',
             'layer = WindowedLayer(2, window=4)', *(f'reveal_type({asked[name]})' for name in expected),
             'layer.crop("1")', 'layer.withdraw()']
    (tmp_path/'use.py').write_text('\n'.join(lines))
    command = [sys.executable, '-m', 'mypy', '--follow-imports=silent', '--ignore-missing-imports', str(tmp_path/'use.py')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, 'MYPYPATH': str(ROOT)})
    shown = re.findall(r'Revealed type is "([^"]*)"', done.stdout)
    names = [re.sub(r'\b[a-z_]+\.', '', one) for one in shown]
    assert dict(zip(expected, names))==expected, done.stdout
    errors = re.findall(r'error: .*\[([a-z-]+)\]', done.stdout)
    assert errors==['arg-type','attr-defined'], done.stdout

def test_hostile_1_a_first_key_that_no_query_reaches():
    "The report's program: the core read a million rows in front of the buffer."
    layer = WindowedLayer(2, window=8)
    layer.attend(*torch.randn(3, 1, 2, 40, 8))
    numbers,held = layer.state()
    numbers['start'] = [10**6]
    held = {name: x[:,:,:0] for name,x in held.items()}
    other = WindowedLayer(2, window=8)
    with pytest.raises(ValueError, match=r"numbers\['start'\]\[0\]: expected an int from 0 to 32, got 1000000"): other.load_state(numbers, held)
    assert other.seen==0

@pytest.mark.parametrize('padded, message', [([-1,0], 'positions from 0 to 25, got -1'), ([0,26], 'positions from 0 to 25, got 26'), ([0], r'\[B\]=\(2,\)'),
    ([0,6], 'as they are among the recent ones'), ([0.,7.], 'an int64 Tensor'), (None, 'an int64 Tensor')], ids=str)
def test_left_padding_fits_the_leading_keys(padded, message):
    "A leading key that stands among the recent ones, too, is the same in both places."
    numbers,held = CONFIGS['padded']().state()
    assert held['padded'].tolist()==[0,7]
    numbers['start'] = [0]*len(numbers['start']) # from the first key on
    for name,x in held.items():
        if name=='padded': continue
        k = torch.arange(25.).expand(*x.shape[:2], -1)[...,None].expand(-1, -1, -1, x.shape[3])
        held[name] = torch.cat([torch.stack([k[b,:,at:at+3] for b,at in enumerate((0, 7))]), k], 2)
    check_state(numbers, held)
    with pytest.raises((TypeError,ValueError), match=message):
        check_state(numbers, {**held, 'padded': None if padded is None else torch.tensor(padded)})

@pytest.mark.parametrize('name', CONFIGS)
def test_a_layer_continues_from_its_state(name):
    "As JSON and tensors of a file; its own content stays."
    layer = CONFIGS[name]()
    numbers,held = layer.state()
    again = copy.deepcopy(layer)
    again.reset()
    again.load_state(json.loads(json.dumps(numbers)), held)
    for one,two in zip(goes_on(again, name), goes_on(layer, name)): assert torch.equal(one, two)

def test_the_last_wall_is_in_front_of_the_core():
    "Numbers that no check has seen do not become addresses."
    for wrong in (dict(start=30), dict(start=10**9), dict(k=torch.zeros(2, 2, 3, 4, dtype=torch.float64))):
        layer = CONFIGS['one_width']()
        vars(layer.groups[0]).update(wrong)
        with pytest.raises(RuntimeError, match='groups: expected all keys that positions'): _check_reached(layer, layer.groups, layer.seen)

@pytest.mark.parametrize('rows', [[0,2], [-1], [2**40], [0.,1.], [True,False], [[0]], 0, None, 'meta', 'sparse'], ids=str)
def test_rows_that_do_not_exist_are_refused(rows):
    "And change nothing, in a layer that holds keys."
    if rows=='meta': rows = torch.zeros(1, dtype=torch.int64, device='meta')
    elif rows=='sparse': rows = torch.tensor([0,1]).to_sparse()
    elif rows is not None: rows = torch.tensor(rows)
    layer = CONFIGS['padded']()
    before = vars(layer).copy()
    with pytest.raises((TypeError,ValueError), match='rows: expected'): layer.select(rows)
    assert all(vars(layer)[entry] is x for entry,x in before.items())
    assert check_rows(torch.tensor([], dtype=torch.int64), 0).shape==(0,)

@pytest.mark.parametrize('device', ['nonsense', 3.5, None, torch.float64, torch.zeros(1)], ids=str)
def test_a_device_that_is_none_is_refused(device):
    layer = CONFIGS['one_width']()
    with pytest.raises(TypeError, match='device: expected'): layer.to(device)
    assert layer.groups[0].k.dtype==torch.float64

def test_a_layer_that_is_there_does_not_move():
    "Every step of a model asks for its device: nothing is checked anew, and the last call can be taken back."
    for name in ('padded','per_head'):
        layer = CONFIGS[name]()
        layer.attend(*text(layer, layer.seen, 1), keep_of(name, 2, layer.seen+1))
        before = vars(layer).copy()
        assert layer.to('cpu') is layer and all(vars(layer)[entry] is x for entry,x in before.items())
        layer.undo()
        layer.to('meta')
        assert {x.device.type for g in layer.groups for x in (g.k, g.v)}=={'meta'}

# ---- all or nothing

def interrupted(run, at):
    "Whether `run` was interrupted at line number `at` of those that it reaches in our modules."
    import dynattn.cache, dynattn.saved
    files = {module.__file__ for name,module in sys.modules.items() if name in ('dynattn.cache','dynattn.hf.cache','dynattn.saved')}
    count = 0
    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in files: return None
        if event=='line':
            count += 1
            if count>at: raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try: run()
    except KeyboardInterrupt: return True
    finally: sys.settrace(None)
    return False

def at_every_line(make, run, outputs, step):
    "However many lines of `run` have passed, what `make` made gives its old outputs afterwards, or its new ones."
    new = make()
    run(new)
    allowed = [outputs(make()), outputs(new)]
    for at in itertools.count(0, step):
        one = make()
        if not interrupted(lambda: run(one), at): return
        found = outputs(one)
        assert any(len(found)==len(x) and all(map(torch.equal, found, x)) for x in allowed), f'after {at} lines'

def goes_on_to_30(layer):
    out = []
    while layer.seen<30: out.append(layer.attend(*text(layer, layer.seen, 1, layer.batch if layer.seen else 2), keep_of(layer.name, layer.batch if layer.seen else 2, layer.seen+1)))
    return out

STEPS = [pytest.param(7, id='some'), pytest.param(1, id='all', marks=pytest.mark.slow)]
CHANGES = dict(
    attend=lambda layer: layer.attend(*text(layer, layer.seen, 1), keep_of(layer.name, 2, layer.seen+1)),
    attend_more=lambda layer: layer.attend(*text(layer, layer.seen, 3), keep_of(layer.name, 2, layer.seen+3)),
    crop=lambda layer: layer.crop(1), select=lambda layer: layer.select(torch.tensor([1,0])), to=lambda layer: layer.to('cpu'),
    undo=lambda layer: layer.undo(), reset=lambda layer: layer.reset(), load_state=lambda layer: layer.load_state(*layer.later))

@pytest.mark.parametrize('step', STEPS)
@pytest.mark.parametrize('name', ['per_head','padded','short'])
@pytest.mark.parametrize('change', CHANGES)
def test_a_layer_changes_all_or_nothing(name, change, step):
    "An interruption at any line leaves the old content or the new one."
    def make():
        layer = CONFIGS[name]()
        layer.name = name
        layer.record_past = change=='crop'
        layer.later = later
        return layer
    later = CONFIGS[name]()
    later.attend(*text(later, later.seen, 2), keep_of(name, 2, later.seen+2))
    later = later.state()
    at_every_line(make, CHANGES[change], goes_on_to_30, step)

def test_undo_takes_back_the_last_call():
    "Of one token or of many, once; a prompt too."
    for name in ('per_head','padded','leading','short','unlimited','grouped'):
        for n in (1, 5, 20):
            layer = CONFIGS[name]()
            keep = keep_of(name, 2, layer.seen+n)
            expected = layer.attend(*text(layer, layer.seen, n), keep)
            layer.undo()
            assert torch.equal(layer.attend(*text(layer, layer.seen, n), keep), expected)
            layer.undo()
            with pytest.raises(RuntimeError, match='undo: expected a call of attend just before'): layer.undo()
    layer = WindowedLayer(4, window=2)
    layer.attend(*text(layer, 0, 9))
    layer.undo()
    assert layer.seen==0 and layer.nbytes==0

WRONG = (lambda layer: layer.crop(layer.seen+1), lambda layer: layer.crop(-1), lambda layer: layer.crop(1.), lambda layer: layer.crop('1'),
         lambda layer: layer.select(torch.tensor([99])), lambda layer: layer.select(torch.tensor([.5])), lambda layer: layer.to('nowhere'),
         lambda layer: layer.load_state({}, {}), lambda layer: layer.load_state({**layer.state()[0], 'seen': 10**6}, layer.state()[1]),
         lambda layer: layer.attend(*text(layer, 0, 1, 7)), lambda layer: layer.attend(*text(layer, 0, 1, 7, torch.float32)),
         lambda layer: layer.attend(*text(layer, 0, 1, layer.batch), torch.ones(1, 1)))

def sequence(seed):
    "Random calls of a layer, right ones and wrong ones; each output is that of dense attention to the same text."
    rng,g = random.Random(seed),torch.Generator().manual_seed(seed)
    kv_heads,n_global,batch = rng.choice([1,2,4]),rng.choice([0,0,1,3]),rng.choice([1,2,3])
    window = rng.choice([None, 0, 5, Window.default(WIDTHS.double()), Window.span(WIDTHS.double(), 2.)])
    options = dict(window=window, n_global=n_global, alpha=rng.choice([None,None,1.5]))
    layer = WindowedLayer(4, kv_heads, **options)
    pad = torch.tensor([rng.choice([0,0,3,8]) for _ in range(batch)])
    held = [torch.zeros(batch, heads, 0, 4, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    layer.record_past = rng.random()<.3
    for _ in range(rng.randint(4, 14)):
        n = held[0].shape[2]
        what = rng.choice(['attend']*4+['crop','select','state','wrong','undo','record'])
        if what=='attend' or not n:
            new = [torch.randn(len(x), x.shape[1], rng.choice([1,1,1,2,9]) if n else 11, 4, dtype=torch.float64, generator=g) for x in held[:1]]
            count = new[0].shape[2]
            new += [torch.randn(len(x), x.shape[1], count, 4, dtype=torch.float64, generator=g) for x in held[1:]]
            before,held = held,[torch.cat(x, 2) for x in zip(held, new)]
            keep = torch.arange(n+count)>=pad[:,None]
            out = layer.attend(*new, keep)
            turned = [turn_rows(x, pad) for x in held]
            expected = turn_rows(dense_attention(*turned, is_causal=True, padding=PaddingMask(turn_rows(keep[:,None,:,None], pad)[:,0,:,0]), **options), -pad)
            real = keep[:,None,n:,None]
            assert_close(out.where(real, 0.), expected[:,:,n:].where(real, 0.), atol=1e-10, rtol=0)
            last = what
            continue
        if what=='crop':
            t = rng.choice([0,1,2,5])
            if t>=n: continue
            try: layer.crop(t)
            except ValueError as e: assert 'expected so few' in str(e)
            else: held = [x[:,:,:n-t] for x in held]
        elif what=='select':
            rows = torch.tensor([rng.randrange(len(pad)) for _ in range(rng.choice([1,2,3]))])
            layer.select(rows)
            pad,held = pad[rows],[x[rows] for x in held]
        elif what=='state':
            numbers,tensors = layer.state()
            recording = layer.record_past
            layer = WindowedLayer(4, kv_heads, **options)
            layer.load_state(json.loads(json.dumps(numbers)), tensors)
            layer.record_past = recording
        elif what=='undo' and last=='attend':
            layer.undo()
            held = before
        elif what=='record': layer.record_past = not layer.record_past
        elif what=='wrong':
            content = vars(layer).copy()
            with pytest.raises((TypeError,ValueError)): rng.choice(WRONG)(layer)
            assert all(vars(layer)[entry] is x for entry,x in content.items())
            continue
        last = what

@pytest.mark.parametrize('native', [True,False], ids=['core','pieces'])
@pytest.mark.parametrize('seeds', [pytest.param(range(60), id='some'), pytest.param(range(1000), id='all', marks=pytest.mark.slow)])
def test_any_sequence_of_calls_is_dense_attention(seeds, native):
    "Refusals in between change nothing."
    with mock.patch.object(core, 'library', core.library if native else lambda: None):
        for seed in seeds: sequence(seed)


# ---- the cache of a model

@cache
def two_layers():
    "A model whose first layer sees everything and whose second one sees few tokens back, and two texts."
    transformers = pytest.importorskip('transformers')
    from dynattn import hf
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16,
        max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval().double()
    hf.add_windows(model, init=[[99.]*4,[2.]*4])
    return model,torch.randint(1, 99, (2, 40))

def read(ids, made):
    "The logits of a call of the model with a cache, whose argument has another name in later releases."
    from dynattn.configs import cache_argument
    model,_ = two_layers()
    with torch.no_grad(): return model(ids, **{cache_argument(model): made}).logits

def kept(n=12, record=False):
    "A cache that holds n tokens of both texts."
    from dynattn.hf import WindowedCache
    model,ids = two_layers()
    made = WindowedCache(model)
    read(ids[:,:n], made)
    if record:
        for layer in made.layers: layer.activate_past_recording()
        read(ids[:,n:n+3], made)
    return made

def lengths(made): return [layer.stored for layer in made.layers]

def next_logits(made):
    """Logits of the next three tokens of the text. A call of the model that finds an interrupted one is made again."""
    ids = two_layers()[1]
    first = made.layers[0]
    if first.restored is not None: rows = len(first.restored[1]['0.k'])
    else: rows = first.windows.batch if first.stored else 2
    def call():
        at = made.get_seq_length()
        return [read(ids[:1,at:at+3].expand(rows, -1), made)]
    try: return call()
    except RuntimeError as e:
        assert 'cache: expected' in str(e)
        return call()

OF_ALL = dict(
    crop=lambda made: made.crop(-2), reorder=lambda made: made.reorder_cache(torch.tensor([1,0])), reset=lambda made: made.reset(),
    select=lambda made: made.batch_select_indices(torch.tensor([1])), repeat=lambda made: made.batch_repeat_interleave(2),
    step=lambda made: model_reads(made, 1), steps=lambda made: model_reads(made, 3))

def model_reads(made, n):
    at = made.get_seq_length()
    read(two_layers()[1][:,at:at+n], made)

@pytest.mark.parametrize('step', STEPS)
@pytest.mark.parametrize('change', OF_ALL)
def test_all_layers_change_or_none(change, step):
    "An interruption at any line; a call of the model that was interrupted is taken back."
    at_every_line(lambda: kept(record=change=='crop'), OF_ALL[change], next_logits, step)

def test_hostile_2_a_refused_crop_leaves_every_layer_whole():
    "The report's: the layers held 10 and 12 tokens, and the next token's logits were off without a word."
    made = kept()
    expected = next_logits(copy.deepcopy(made))
    with pytest.raises(ValueError, match='tokens: expected so few'): made.crop(-2)
    assert lengths(made)==[12,12] and torch.equal(next_logits(made)[0], expected[0])

@pytest.mark.parametrize('wrong', [lambda made: made.crop(-13), lambda made: made.crop('1'), lambda made: made.crop(True), lambda made: made.crop(-1.),
    lambda made: made.reorder_cache(torch.tensor([0,2])), lambda made: made.reorder_cache([0,1]), lambda made: made.reorder_cache(torch.tensor([.5])),
    lambda made: made.batch_select_indices(torch.tensor([-1])), lambda made: made.batch_select_indices(torch.tensor([[0]])),
    lambda made: made.batch_repeat_interleave(0), lambda made: made.batch_repeat_interleave(1.5), lambda made: made.batch_repeat_interleave(True)])
def test_what_refuses_changes_no_layer(wrong, tmp_path):
    "Of a cache that is used, and of one from a file."
    from dynattn.hf import WindowedCache
    made = kept()
    made.save(tmp_path/'talk')
    for one in (made, WindowedCache.load(tmp_path/'talk', two_layers()[0])):
        layers = one.layers
        with pytest.raises((TypeError,ValueError,RuntimeError), match='expected'): wrong(one)
        assert one.layers is layers and lengths(one)==[12,12]
        assert torch.equal(next_logits(one)[0], next_logits(kept())[0])

@pytest.mark.parametrize('layer', [0, 1])
@pytest.mark.parametrize('n', [1, 5, 0], ids=['step','steps','prompt'])
def test_a_call_that_fails_in_a_layer_is_taken_back(layer, n):
    "The next call says so, and the one after it is right."
    from dynattn.hf import WindowedCache
    model,ids = two_layers()
    made,first = (kept(),12) if n else (WindowedCache(model),0)
    expected = next_logits(copy.deepcopy(made))
    after = mock.patch.object(model.model.layers[layer].mlp, 'forward', side_effect=KeyboardInterrupt)
    with after, pytest.raises(KeyboardInterrupt): model_reads(made, n or 12)
    held = lengths(made)
    assert held==[first+(n or 12), first if layer==0 else first+(n or 12)]
    found = next_logits(made)
    if layer==0: assert torch.equal(found[0], expected[0]) # otherwise all layers have read the tokens
    assert len(set(lengths(made)))==1

def test_operations_on_an_interrupted_cache_begin_with_what_all_layers_hold(tmp_path):
    from dynattn.hf import WindowedCache
    model,_ = two_layers()
    for use in (lambda made: made.reorder_cache(torch.tensor([1,0])), lambda made: made.save(tmp_path/'talk')):
        made,whole = kept(),kept()
        mlp = model.model.layers[0].mlp
        with mock.patch.object(mlp, 'forward', side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt): model_reads(made, 5)
        for one in (made, whole): use(one)
        if (tmp_path/'talk').exists(): made = WindowedCache.load(tmp_path/'talk', model)
        assert lengths(made)==[12,12] and torch.equal(next_logits(made)[0], next_logits(whole)[0])

# ---- files

def file_changes(notes, tensors):
    "Other contents of a file, whose sum is right, with a name."
    for i,note in enumerate(notes):
        for name,x in note.items():
            for j,wrong in enumerate(number_changes(x)): yield f'{i} {name} {j}',[*notes[:i],{**note, name: wrong},*notes[i+1:]],tensors
            yield f'{i} without {name}',[*notes[:i],{key: y for key,y in note.items() if key!=name},*notes[i+1:]],tensors
        for j,wrong in enumerate((None, {}, [], 3, 'x', notes)): yield f'note {i} {j}',[*notes[:i],wrong,*notes[i+1:]],tensors
    yield from ((f'notes {i}',wrong,tensors) for i,wrong in enumerate((None, {}, [], 3, 'x', notes[:1], notes*2, [notes], {'0': notes[0]})))
    for name,x in tensors.items():
        yield f'without {name}',notes,{key: y for key,y in tensors.items() if key!=name}
        for j,wrong in enumerate((x[:1], x[:,:1], x[:,:,1:], x[...,:1], x[0], x.half(), x.long(), x.to(torch.float8_e4m3fn), x.bool(), x[:0], x[:,:,:0])):
            yield f'{name} {j}',notes,{**tensors, name: wrong}
    for name in ('2.0.k','0.9.k','x','','0.padded','.0.k','00.0.k','0.0.k.0','-1.0.k'): yield f'more {name}',notes,{**tensors, name: torch.zeros(2)}

def test_a_file_is_refused_or_gives_what_was_saved(tmp_path):
    "Whatever stands in it; an error is one of ours, and names what was expected."
    from dynattn.hf import WindowedCache
    model,_ = two_layers()
    path,count = tmp_path/'talk.safetensors',0
    kept().save(path)
    expected = next_logits(WindowedCache.load(path, model))[0]
    tensors,header = read_weights(path)
    notes = json.loads(header['dynattn'])
    for which,wrong,other in file_changes(notes, tensors):
        write_weights(path, other, dynattn=json.dumps(wrong))
        try: found = next_logits(WindowedCache.load(path, model))
        except (TypeError,ValueError) as e:
            assert 'expected' in str(e), (which, e)
            count += 1
        else: assert torch.equal(found[0], expected), which
    assert count>200
    for text in ('', 'x', '[', '['*10**5, '[[[]]]', '{}', 'null', 'NaN', '1e999', '["\\ud800"]', '[{}, {}, {}]', '"'+'9'*10**4+'"', '9'*10**4):
        write_weights(path, tensors, dynattn=text)
        with pytest.raises(ValueError, match='path: expected a WindowedCache'): WindowedCache.load(path, model)

def test_a_damaged_file_is_refused(tmp_path):
    "Cut off at any place, another kind of file, a header of an odd length or with odd contents."
    from dynattn.hf import WindowedCache
    model,_ = two_layers()
    path = tmp_path/'talk.safetensors'
    kept().save(path)
    data = path.read_bytes()
    def header(text): return len(text).to_bytes(8, 'little')+text
    others = [data[:n] for n in range(0, len(data), 211)]+[data+b'\0', b'x'*len(data), bytes(len(data)), b'\xff'*8+data[8:]]
    others += [header(text)+data for text in (b'', b'{}', b'null', b'[]', b'3', b'{'*10**5, b'{"__metadata__": null}', b'{"__metadata__": []}',
               b'{"__metadata__": {"dynattn": 3}}', b'{"__metadata__": {"dynattn": "[]", "sha256": ""}}', b'{"a": null}',
               b'{"a": {"dtype": "F32", "shape": [1099511627776, 0], "data_offsets": [0, 0]}}', b'{"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}',
               b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 10000000000]}}')]
    for i,wrong in enumerate(others):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match='damaged|another file'): WindowedCache.load(path, model)

def test_layers_of_a_file_that_contradict_each_other_are_refused(tmp_path):
    "Each is right by itself."
    from dynattn.hf import WindowedCache
    model,_ = two_layers()
    path,whole = tmp_path/'talk.safetensors',[]
    for made in (kept(12), kept(13)):
        made.save(path)
        whole.append(read_weights(path))
    tensors = {name: x for i in (0, 1) for name,x in whole[i][0].items() if name.startswith(f'{i}.')}
    write_weights(path, tensors, dynattn=json.dumps([json.loads(whole[i][1]['dynattn'])[i] for i in (0, 1)]))
    with pytest.raises(ValueError, match='layers: expected as many tokens and rows in each'): WindowedCache.load(path, model)

if __name__=='__main__': fuzz(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv)>2 else 1)
