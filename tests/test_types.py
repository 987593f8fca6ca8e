"""What type checkers and editors see of the package: `tests/user.py`, completion, and classes that stand whole."""
import ast, inspect, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest
import dynattn
from dynattn import Window
from dynattn.cache import WindowedLayer

ROOT = Path(__file__).resolve().parent.parent
USER = ROOT/'tests'/'user.py'
LINES = {n: line for n,line in enumerate(USER.read_text(encoding='utf-8').splitlines(), 1)}
TYPES = {n: line.rpartition('# ')[2] for n,line in LINES.items() if line.strip().startswith('reveal_type(')}
WRONG = [n for n,line in LINES.items() if line.endswith(': wrong')]

def _short(found): # a type, as a checker names it
    return re.sub(r'\b[A-Za-z_]\w*\.(?=\w)', '', found).replace('Unknown', 'Any')

def test_the_file_asks_for_types_and_has_mistakes(): assert len(TYPES)>=16 and len(WRONG)>=8

@pytest.mark.slow
def test_mypy_in_strict_mode(tmp_path):
    pytest.importorskip('mypy')
    copied = shutil.copy(USER, tmp_path)
    options = ['--strict', '--follow-imports=silent', '--ignore-missing-imports', '--no-pretty']
    done = subprocess.run([sys.executable, '-m', 'mypy', *options, copied], capture_output=True, text=True, cwd=tmp_path,
                          env=os.environ | dict(MYPYPATH=str(ROOT)))
    said = re.findall(r'^[^\n]*user\.py:(\d+): (note|error): (.*)$', done.stdout, re.M)
    types = {int(n): _short(text.split('"')[1]) for n,kind,text in said if text.startswith('Revealed type is')}
    assert types==TYPES, done.stdout+done.stderr
    assert [int(n) for n,kind,_ in said if kind=='error']==WRONG, done.stdout

@pytest.mark.slow
def test_pyright_in_strict_mode(tmp_path):
    "Parameters without a whole type make some of our methods partly unknown to it; that is left out."
    pytest.importorskip('pyright')
    shutil.copy(USER, tmp_path)
    settings = dict(include=['user.py'], extraPaths=[str(ROOT)], typeCheckingMode='strict')
    (tmp_path/'pyrightconfig.json').write_text(json.dumps(settings))
    command = [sys.executable, '-m', 'pyright', '--outputjson', '--pythonpath', sys.executable, '-p', str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout[done.stdout.index('{'):])['generalDiagnostics']
    told = [(row['range']['start']['line']+1, row['severity'], row.get('rule', ''), row['message']) for row in found]
    types = {n: _short(text.rpartition(' is "')[2].rstrip('"')) for n,kind,_,text in told if kind=='information'}
    assert types==TYPES, done.stdout
    errors = [n for n,kind,rule,_ in told if kind=='error' and not rule.startswith('reportUnknown')]
    assert sorted(errors)==WRONG, done.stdout

@pytest.mark.slow
def test_scripts_call_what_the_package_has(tmp_path):
    """Experiments, benchmarks and examples run rarely: a parameter that came or went must show without them. Only calls that
    lack an argument, or name one that is not there, count; what other libraries take is not followed."""
    pytest.importorskip('mypy')
    settings = ['[mypy]', 'ignore_missing_imports = True', 'check_untyped_defs = True', 'follow_imports = silent',
                '[mypy-transformers.*]', 'follow_imports = skip']
    (tmp_path/'mypy.ini').write_text('\n'.join(settings))
    command = [sys.executable, '-m', 'mypy', '--no-pretty', '--config-file', tmp_path/'mypy.ini', '--cache-dir', tmp_path/'cache']
    done = subprocess.run([*command, 'experiments', 'benchmarks', 'examples'], capture_output=True, text=True, cwd=ROOT)
    assert 'checked ' in done.stdout, done.stdout+done.stderr
    missing = r'^.*: error: (?:Missing (?:named|positional) argument|Unexpected keyword argument).*$'
    found = re.findall(missing, done.stdout, re.M)
    assert not found, '\n'.join(found)

@pytest.mark.parametrize('cls,made', [(Window, 'Window(3.)'), (WindowedLayer, 'WindowedLayer(2)')])
def test_an_editor_completes(cls, made):
    "What jedi, and so IPython and Jupyter, offers behind the dot."
    jedi = pytest.importorskip('jedi')
    text = f"from {cls.__module__} import {cls.__name__}\nmade = {made}\nmade."
    offered = jedi.Script(text, path=ROOT/'tests'/'made.py', project=jedi.Project(ROOT)).complete(3, len('made.'))
    fields = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    public = {name for name in {*dir(cls), *fields} if not name.startswith('_')}
    assert len(public)>8 and public<={c.name for c in offered}

def test_the_package_says_that_it_has_types():
    assert (Path(dynattn.__file__).parent/'py.typed').is_file()

GROW = {'padding.py','smoothing.py','stream.py'} # still, by `@patch`

def _patched(tree): # -> names of functions
    for f in tree.body:
        if not isinstance(f, ast.FunctionDef): continue
        if any(ast.unparse(d).partition('(')[0] in ('patch','patch_to') for d in f.decorator_list): yield f.name

def test_a_class_is_seen_whole():
    "A type checker sees no method that `@patch` adds, and a reader has to look for it."
    paths = [path for path in (ROOT/'dynattn').rglob('*.py') if path.name!='_modidx.py']
    grown = {path.name: [*_patched(ast.parse(path.read_text(encoding='utf-8')))] for path in paths}
    assert {name for name,methods in grown.items() if methods}<=GROW, grown
    assert [*_patched(ast.parse('@patch(cls_method=True)\ndef of(cls:X): pass\n@cache\ndef f(): pass'))]==['of']
