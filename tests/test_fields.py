"The table of fields: what follows from it, the C++ record beside it, and the exercise of CONTRIBUTING.md."
import ast, json, os, re, shutil, subprocess, sys
from itertools import product
from types import SimpleNamespace
import pytest, torch
import house, sanitize_native
from dynattn.engine.call import Call
from dynattn.engine.fields import LEARNS, PER_HEAD, Arguments, Inputs, Plan, in_order, lacking, wanted_names
from dynattn.engine.native import core
from dynattn.engine.plan import prepare

ROOT = house.ROOT

def test_the_definition_reads_every_option():
    "The dense path refuses nothing, so an option that it does not read would be passed over."
    text = (ROOT/'dynattn/engine/dense.py').read_text(encoding='utf-8')
    read = set(re.findall(r'call\.(\w+)', text)) | {'scale', 'enable_gqa'} # `call.factor`, and heads are repeated anyway
    unread = lacking('').keys()-read
    assert not unread, f'chapter 25 reads no `call.NAME` of {sorted(unread)}, and would compute as if they were not given'

def test_what_learns_comes_first():
    assert list(LEARNS)==list(Inputs._fields[:len(LEARNS)])
    assert PER_HEAD==dict(sigma=0, table=1, alpha=0, rel_bias=1, sink=0)

def every_tensor():
    "A call with every tensor that one may have, but a mask of pairs."
    ids = torch.zeros(1, 6, dtype=torch.long)
    tensors = dict.fromkeys(('q','k','v'), torch.ones(1, 2, 6, 4))
    tensors |= dict(alpha=torch.ones(2), rel_bias=torch.zeros(2, 3), sink=torch.zeros(2), segments=ids, key_segments=ids)
    return {name: x.clone() for name,x in tensors.items()}

def test_every_tensor_of_a_call_reaches_the_engines():
    "One that `prepare` did not hand on would be passed over by all but the dense path."
    of_engines = {*Inputs._fields} & {*Arguments.__annotations__}
    _,x = prepare(Call(**every_tensor()))    # which works out `q_offsets` from the ids
    assert of_engines=={name for name in Arguments.__annotations__ if getattr(x, name, None) is not None}

def test_every_tensor_made_under_inference_mode_is_copied_where_something_learns():
    "Autograd keeps none of them."
    with torch.inference_mode(): made = every_tensor() | dict(attn_mask=torch.zeros(6, 6))
    call = Call(**made | dict(q=made['q'].clone().requires_grad_()))
    tensors = {name: x for name,x in vars(call).items() if isinstance(x, torch.Tensor)}
    assert tensors.keys()==made.keys() | {'q_offsets'}
    assert not [name for name,x in tensors.items() if x.is_inference()]

def test_gradients_go_by_name_whichever_are_wanted():
    "For every choice of fields, in whatever order an engine returns them."
    for needs in product((False, True), repeat=len(LEARNS)):
        wanted = wanted_names(needs)
        assert in_order({name: name for name in reversed(LEARNS)}, wanted)==[
            name if need else None for name,need in zip(LEARNS, needs)]
        assert in_order({name: name for name in wanted}, wanted)==[name if name in wanted else None for name in LEARNS]
        for name in wanted:
            with pytest.raises(ValueError, match=f'got none for {name}$'): in_order(dict.fromkeys(wanted, 1) | {name: None}, wanted)
    with pytest.raises(ValueError, match='got bump, dq$'): in_order(dict(q=1, dq=1, bump=1), ('q',))
    for n in (len(LEARNS)-1, len(LEARNS)+1):
        with pytest.raises(ValueError): wanted_names([True]*n)

ONE_BY_ONE = '''
import sys, torch
from torch.testing import assert_close
from dynattn import Window, banded_attention, dense_attention
where = sys.argv[1]
torch.manual_seed(0)
leaves = dict(q=torch.randn(2, 4, 20, 16), k=torch.randn(2, 2, 20, 16), v=torch.randn(2, 2, 20, 16),
              sigma=torch.tensor([2.,3.,5.,8.]), alpha=torch.tensor([1.2,1.4,1.6,1.8]), rel_bias=torch.randn(4, 9), sink=torch.randn(4))
calls = [(banded_attention, 'q k v sigma alpha rel_bias sink'), (banded_attention, 'q k v sigma')]
if where=='kernels':
    from dynattn.engine.triton.window import windowed_attention
    from dynattn.engine.triton.entmax import entmax_attention
    calls = [(windowed_attention, 'q k v sigma'), (entmax_attention, 'q k v sigma alpha')]
dout = torch.randn(2, 4, 20, 16)
for f,served in calls:
    served = served.split()
    def grads(f, wanted):
        x = {name: leaves[name].clone().requires_grad_(name in wanted) for name in served}
        options = {name: x[name] for name in ('alpha','rel_bias','sink') if name in x}
        out = f(x['q'], x['k'], x['v'], window=Window(x['sigma']), **options)
        return dict(zip(wanted, torch.autograd.grad(out, [x[name] for name in wanted], dout)))
    want = grads(dense_attention, served)
    runs = [(f, wanted) for wanted in (*([name] for name in served), served[::-1], served[1:], served[3:])]
    if where!='kernels' and len(served)==4: runs.append((torch.compile(f, backend='aot_eager'), served[1:]))
    for run,wanted in runs:
        for name,g in grads(run, wanted).items():
            assert_close(g, want[name], rtol=1e-3, atol=1e-4, msg=lambda m: f'{f.__name__}: {name} of {wanted}: {m}')
'''

def one_by_one(where, root=ROOT, **env):
    return subprocess.run([sys.executable, '-c', ONE_BY_ONE, where], capture_output=True, text=True, cwd=root,
                          env={**os.environ, 'PYTHONPATH': str(root), **env})

@pytest.mark.parametrize('where, env', [
    ('core', {}), ('plain', dict(DYNATTN_NATIVE='0')),
    pytest.param('kernels', dict(TRITON_INTERPRET='1'), marks=pytest.mark.slow)])
def test_each_engine_gives_the_gradient_that_is_asked_for(where, env):
    "Alone, all together, and without the queries'; the oracle is the dense path."
    if where=='kernels': pytest.importorskip('triton')
    done = one_by_one(where, **env)
    assert done.returncode==0, done.stderr

@pytest.mark.slow
@pytest.mark.parametrize('where', ['plain', 'kernels'])
def test_a_field_that_is_new_moves_no_gradient(where, tmp_path):
    "A learned field before the width of the window, which no engine reads."
    if where=='kernels': pytest.importorskip('triton')
    shutil.copytree(ROOT/'dynattn', tmp_path/'dynattn', ignore=shutil.ignore_patterns('*.so', '__pycache__'))
    fields = tmp_path/'dynattn/engine/fields.py'
    text = fields.read_text(encoding='utf-8')
    line = '    sigma:PerHead|None=None #'
    assert text.count(line)==1
    fields.write_text(text.replace(line, f'    bump:PerHead|None=None # new\n{line}'), encoding='utf-8')
    done = one_by_one(where, tmp_path, DYNATTN_NATIVE='0', TRITON_INTERPRET='1')
    assert done.returncode==0, done.stderr

def test_a_field_of_an_engine_has_one_name():
    "An argument that goes on as it is keeps its name; what is made has another."
    kept = {'q', 'k', 'v', 'dropout_p', 'is_causal', 'scale', 'alpha', 'n_global', 'rel_bias', 'q_offset', 'q_offsets',
            'segments', 'key_segments', 'sink', 'softcap', 'return_lse'}
    shared = {*Arguments.__annotations__} & {*Plan._fields, *Inputs._fields}
    assert shared==kept, f'a name of both means the same in both, and then stands in `kept` here: {sorted(shared ^ kept)}'

# ---- the record of the core

def other_library(was, now):
    "The library's own members, of which some text is another one."
    lib = core.library()
    def members(which):
        text = lib.dynattn_members(which).decode()
        assert which or was in text
        return text.replace(was, now, 1).encode()
    return SimpleNamespace(dynattn_members=members, dynattn_sizes=lib.dynattn_sizes)

@pytest.mark.skipif(core.library() is None, reason='no compiled core')
@pytest.mark.parametrize('was, now, name', [
    ('q_offset, n_global', 'n_global, q_offset', 'q_offset'), ('softcap', 'cap', 'softcap'), ('seed, ', '', 'seed'),
    ('fraction;', 'fraction; double unheard;', 'unheard'), (' threads;', ' threads, cores;', 'cores'), ('Int left', 'double left', 'left'),
    ('PerHead sigma', 'Rows sigma', 'sigma')])
def test_another_record_is_refused_by_name(was, now, name):
    assert core._mismatch(core.library()) is None
    assert repr(name) in core._mismatch(other_library(was, now))

@pytest.mark.skipif(core.library() is None, reason='no compiled core')
def test_another_version_is_not_loaded_and_says_so(monkeypatch):
    monkeypatch.setattr(core, '_CALL', core._CALL | {'unheard': 'd'})
    for asked in ('1','generic'):
        monkeypatch.setenv('DYNATTN_NATIVE', asked)
        core.library.cache_clear()
        try:
            if asked=='1': assert core.library() is None and "expected ('unheard', 'd')" in core.info()['why']
            else:
                with pytest.raises(OSError, match=r"expected \('unheard', 'd'\)"): core.library()
        finally: core.library.cache_clear(); core._others.clear()

@pytest.mark.parametrize('platform, way_out', [('linux', '--force-reinstall --no-deps --no-cache-dir'), ('win32', 'none for Windows')])
def test_without_a_core_the_way_to_one_is_said(monkeypatch, platform, way_out):
    """"Run pip install again" did nothing: the requirement is satisfied, and pip keeps the wheel that it built without a
    compiler. Where no library of another version lies, `of another version: {}` stood behind it."""
    monkeypatch.setattr(core, '_candidates', lambda: [])
    monkeypatch.setattr(core.sys, 'platform', platform)
    for asked in ('1','generic'):
        monkeypatch.setenv('DYNATTN_NATIVE', asked)
        core.library.cache_clear()
        try:
            if asked=='1': assert core.info()['why'].startswith('no compiled core: ') and core.info()['why'].endswith(way_out)
            else:
                with pytest.raises(OSError, match="got none: 'generic'$"): core.library()
        finally: core.library.cache_clear()

@pytest.mark.skipif(core.library() is None, reason='no compiled core')
def test_a_library_of_an_older_core_is_refused(monkeypatch):
    "Its record may be the same while its functions have changed: what then ran ended in a segmentation fault."
    lib = core.library()
    built = lib.dynattn_source()
    assert core._mismatch(lib) is None
    same = dict(dynattn_members=lib.dynattn_members, dynattn_sizes=lib.dynattn_sizes)
    assert 'checksum' in core._mismatch(SimpleNamespace(**same))
    assert 'of another' in core._mismatch(SimpleNamespace(**same, dynattn_source=lambda: built+1))
    assert core._mismatch(SimpleNamespace(**same, dynattn_source=lambda: 0)) is None         # built by hand, as sanitizers do

# ---- the way of a call

def test_the_figure_shows_the_imports():
    "Every arrow is an import, and every import between these modules is an arrow or follows from some."
    cells = json.loads((ROOT/'nbs/engine/20_fields.ipynb').read_text(encoding='utf-8'))['cells']
    text = next(s for c in cells if (s := ''.join(c['source'])) and '\nWAY = (' in s)
    arrows = {tuple(arrow.split()) for arrow in ast.literal_eval(re.search(r'WAY = (\(.*?\))', text, re.S)[1])}
    def short(name): return 'triton' if '.triton' in name else name.removeprefix('dynattn.engine.')
    def ours(name): return name.startswith('dynattn.engine.')
    imports = {(short(b),short(a)) for a,b,_ in house.imports(house.modules()) if ours(a) and ours(b)}
    imports -= {(a,b) for a,b in imports if a==b}
    assert not arrows-imports
    edges = {}
    for a,b in arrows: edges.setdefault(a, set()).add(b)
    assert not [(a,b) for a,b in imports if b not in house.reachable(edges, a)]

# ---- an option, from start to end

SCRIPT = '''
import sys, torch
from itertools import product
from dynattn import attention, banded_attention, dense_attention
from dynattn.engine.native import core
from dynattn.engine.plan import prepare
assert core.library() is not None and 'bump : float' in attention.__doc__
torch.manual_seed(0)
def drawn(n): # queries, of 40 keys; one is what a model asks that writes, which the core computes in another way
    return [torch.randn(2, 2, length, 8, dtype=torch.float64).requires_grad_() for length in (n, 40, 40)]
sink = torch.randn(2, dtype=torch.float64)
def both(f, **options):
    out = f(*x, **options)
    return out, *torch.autograd.grad(out.square().sum(), x)
def by_plain(*x, **options):
    core.library,kept = lambda: None,core.library
    try: return banded_attention(*x, **options)
    finally: core.library = kept
compiled = torch.compile(banded_attention, backend='aot_eager')
OPTIONS = dict(), dict(window=3), dict(window=3, n_global=2, is_causal=True), dict(window=5, alpha=1.5), dict(softcap=2.)
for x,options in product(map(drawn, (40, 1, 3)), OPTIONS):
    torch.compiler.reset() # else what is compiled for others counts, up to a limit
    want = both(dense_attention, sink=sink-.7, **options)
    for f in (dense_attention, banded_attention, by_plain, compiled, attention):
        for a,b in zip(both(f, sink=sink, bump=.7, **options), want): torch.testing.assert_close(a, b)
assert not torch.equal(want[0], dense_attention(*x, sink=sink, **options))
x,options = [t.bfloat16() for t in drawn(40)],dict(is_causal=True, scale=1.3) # some processors have products of these
with torch.no_grad():
    want = dense_attention(*(t.double() for t in x), sink=sink-.7, **options)
    got = banded_attention(*x, sink=sink.bfloat16(), bump=.7, **options)
torch.testing.assert_close(got.double(), want, rtol=0, atol=.03)
for error,text,options in ((ValueError, 'bump: expected 0.0 for F.scaled_dot_product_attention, got 0.5', dict(bump=.5, impl='sdpa')),
                           (TypeError, "bump: expected a finite number, got 'x'", dict(bump='x'))):
    try: attention(*x, **options)
    except error as e: assert text in str(e), e
    else: raise AssertionError(text)
'''

def exercise():
    "File -> [(line to look for, line to put below)], as CONTRIBUTING.md has them."
    text = re.search(r'```diff\n(.*?)```', (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8'), re.S)[1]
    found,context = {},None
    for line in text.splitlines():
        if line.startswith('--- '): steps = found.setdefault(line[4:], [])
        elif line.startswith('+'): steps.append((context,line[1:]))
        else: context = line.strip().removesuffix(' …')
    return found

def applied(text, steps):
    lines = text.splitlines()
    for context,new in steps:
        at = [i for i,line in enumerate(lines) if line.strip().startswith(context)]
        assert len(at)==1, (context,at)
        lines.insert(at[0]+1, new)
    return '\n'.join(lines)+'\n'

def module(path): # of a notebook
    return re.sub(r'nbs/engine/\d+_(.*)\.ipynb', r'dynattn/engine/\1.py', path)

def test_the_exercise_finds_its_places():
    found = exercise()
    assert len(found)==4
    for path,steps in found.items(): applied((ROOT/module(path)).read_text(encoding='utf-8'), steps)

@pytest.mark.slow
@pytest.mark.skipif(core.library() is None, reason='no compiled core')
def test_an_option_in_five_files(tmp_path):
    shutil.copytree(ROOT/'dynattn', tmp_path/'dynattn', ignore=shutil.ignore_patterns('*.so', '__pycache__'))
    for path,steps in exercise().items():
        p = tmp_path/module(path)
        p.write_text(applied(p.read_text(encoding='utf-8'), steps), encoding='utf-8')
    built = sanitize_native.build(tmp_path, '', path=tmp_path/'dynattn/engine/native/core.cpp')
    def run(script, lib): return subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, 'DYNATTN_NATIVE': str(lib), 'PYTHONPATH': str(tmp_path)})
    done = run(SCRIPT, built)
    assert done.returncode==0, done.stderr
    old = run('from dynattn.engine.native import core; core.library()', core.library()._name) # the core without the option
    assert "expected ('bump', 'd')" in old.stderr
