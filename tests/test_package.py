"The wheel: what is in it, and that it works with nothing but what it declares."
import ast, os, re, shutil, subprocess, sys, tarfile, venv, zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import freeze

ROOT = freeze.ROOT
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT/'dynattn').rglob('*.py') if p.name!='_modidx.py')
HEAVY = 'triton', 'transformers', 'matplotlib', 'accelerate', 'nbdev', 'IPython'
def _run(*cmd, **kw):
    r = subprocess.run(cmd, capture_output=True, text=True, **kw)
    assert r.returncode==0, r.stdout + r.stderr
    return r.stdout

@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    "Built from the source distribution, which is built from a copy of what is in the repository"
    d = tmp_path_factory.mktemp('dist')
    shutil.copytree(ROOT, d/'src', ignore=shutil.ignore_patterns('.*', '_*site', '_proc', '_docs', '_sphinx', 'build', 'dist', '*.egg-info', '__pycache__', 'jupyter_execute', 'runs'))
    _run(sys.executable, '-m', 'build', '--no-isolation', '--outdir', d, d/'src')
    return next(d.glob('*.whl'))

FLAGS_THERE = """
import setuptools, sys
from setuptools.command import bdist_wheel, build_ext, build_py # ask for the true platform
sys.platform = sys.argv[1]
setuptools.setup = lambda ext_modules, **ignored: print([core.extra_compile_args for core in ext_modules])
exec(compile(open('setup.py', encoding='utf-8').read(), 'setup.py', 'exec'))
"""

@pytest.mark.skipif(not shutil.which('clang++'), reason='no clang++, which compiles for other systems')
@pytest.mark.parametrize('platform,machine,target', [
    ('darwin', 'arm64', 'arm64-apple-macos11'), ('darwin', 'x86_64', 'x86_64-apple-macos11'),
    ('linux', 'aarch64', 'aarch64-linux-gnu'), ('linux', 'x86_64', 'x86_64-linux-gnu')])
def test_compilers_of_other_systems_take_our_flags(platform, machine, target, tmp_path):
    "Clang 14 refused one for Apple's, so no core was built there, silently"
    there = os.environ | dict(DYNATTN_MACHINE=machine)
    of_cores = ast.literal_eval(_run(sys.executable, '-c', FLAGS_THERE, platform, cwd=ROOT, env=there))
    assert len(of_cores)==(4 if machine=='x86_64' else 1)
    (tmp_path/'a.cpp').write_text('int f(int x) { return x; }')
    for flags in of_cores: _run('clang++', f'--target={target}', '-stdlib=libc++', *flags, '-c', 'a.cpp', cwd=tmp_path)

@pytest.fixture(scope='module')
def python(wheel, tmp_path_factory):
    "An environment with the wheel and the distributions that it declares, and they in turn, without any extra; nothing else"
    d = tmp_path_factory.mktemp('env')
    venv.create(d, with_pip=False, symlinks=True)
    site = next(d.glob('lib/python*/site-packages'))
    with zipfile.ZipFile(wheel) as z: z.extractall(site)
    todo,done = [Distribution.at(next(site.glob('dynattn-*.dist-info')))],set()
    while todo:
        for r in map(Requirement, todo.pop().requires or []):
            if canonicalize_name(r.name) in done or r.marker and not r.marker.evaluate({'extra': ''}): continue
            dist = distribution(r.name); done.add(canonicalize_name(r.name)); todo.append(dist)
            assert r.specifier.contains(dist.version, prereleases=True), f'{r} but {dist.version} is installed'
            for top in {f.parts[0] for f in dist.files if f.parts[0] not in ('..', '__pycache__')}:
                if not (site/top).exists(): (site/top).symlink_to(dist.locate_file(top))
    return d/'bin/python'

@pytest.mark.slow
def test_wheel_holds_the_modules_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    found = {n for n in names if '.dist-info/' not in n}-{f'dynattn/engine/native/core_{level}.so' for level in ('generic','avx2','avx512','bf16','amx')}
    inside = {f'dynattn/examples/{p.name}' for p in (ROOT/'examples').glob('*.py')}
    inside |= {f'dynattn/results/{p.name}' for p in (ROOT/'benchmarks/results').glob('*.csv')}
    inside |= {f'dynattn/{p.name}' for p in (ROOT/'dynattn').glob('*.js')}
    # where a compiler was at hand, its libraries too
    assert found=={*MODULES, *inside, 'dynattn/py.typed', 'dynattn/engine/native/core.cpp'}
    assert any(n.endswith('licenses/LICENSE') for n in names)

@pytest.mark.slow
def test_the_source_builds_without_a_compiler(wheel, tmp_path):
    "The source distribution holds what its own build reads; without a compiler the wheel comes without libraries"
    with tarfile.open(next(wheel.parent.glob('*.tar.gz'))) as t: t.extractall(tmp_path, filter='data')
    source = next(tmp_path.glob('dynattn-*'))
    for name in ('settings.ini','setup.py','README.md','LICENSE','dynattn/engine/native/core.cpp'): assert (source/name).exists(), name
    _run(sys.executable, '-m', 'build', '--wheel', '--no-isolation', '--outdir', tmp_path, source, env={**os.environ, 'CC': '/bin/false', 'CXX': '/bin/false'})
    names = zipfile.ZipFile(next(tmp_path.glob('*.whl'))).namelist()
    assert 'dynattn/engine/native/core.cpp' in names and not any(n.endswith('.so') for n in names)
    with zipfile.ZipFile(next(tmp_path.glob('*.whl'))) as z: z.extractall(tmp_path/'site')
    code = ('import torch, dynattn; q = torch.ones(1, 1, 9, 4); dynattn.attention(q, q, q, window=2, alpha=1.5)\n'
            'print(dynattn.__file__, dynattn.native.info()["why"])')
    said = _run(sys.executable, '-c', code, cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(tmp_path/'site')})
    assert said.startswith(str(tmp_path/'site')) and 'no compiled core: install a C++ compiler' in said

def _python(python, code, tmp_path): return _run(python, '-c', code, cwd=tmp_path, env={k: v for k,v in os.environ.items() if k!='PYTHONPATH'})

@pytest.mark.slow
def test_it_imports_with_only_what_it_declares(python, tmp_path):
    out = _python(python, 'import dynattn, sys; print(dynattn.__file__, *sorted(sys.modules))', tmp_path)
    assert str(python.parent.parent) in out.split()[0]
    assert not set(HEAVY) & set(out.split())
    assert 'audit' in _python(python, 'import sys; from dynattn.command import main; sys.exit(main(["--help"]))', tmp_path)

@pytest.mark.slow
def test_a_module_that_needs_more_says_which_extra_brings_it(python, tmp_path):
    "Every module imports, or names the extra; Triton has none, since CUDA builds of PyTorch bring it"
    mods = [m.removesuffix('.py').removesuffix('/__init__').replace('/', '.') for m in MODULES]
    code = f'''
import importlib
for m in {mods}:
    try: importlib.import_module(m)
    except ImportError as e:
        if 'dynattn[' not in str(e) and 'pip install triton' not in str(e): print(f'{{m}}: {{e}}')'''
    bad = _python(python, code, tmp_path)
    assert not bad, bad

def test_nothing_heavy_is_loaded_where_it_is_installed():
    "The same in this environment, which has them all"
    out = _run(sys.executable, '-c', 'import dynattn, sys; print(*sys.modules)')
    assert not set(HEAVY) & set(out.split())

def test_modules_that_a_program_switches_on_are_there_after_one_import():
    code = ('import dynattn; print(dynattn.flash_attn.install, dynattn.everywhere.on, dynattn.hf.__name__)\n'
            'print(hasattr(dynattn, "no_such_module"), hasattr(dynattn, "plot"))')
    assert _run(sys.executable, '-c', code).split()[-3:]==['dynattn.hf', 'False', 'False']

@pytest.mark.slow
def test_importing_costs_less_than_a_tenth_of_a_second_beyond_torch(tmp_path):
    """Of processor time, with bytecode at hand as an installation has it; the least of five, for another process may take
    the caches. A processor that takes long for PyTorch may take a twentieth of that."""
    shutil.copytree(ROOT/'dynattn', tmp_path/'dynattn', ignore=shutil.ignore_patterns('__pycache__'))
    _run(sys.executable, '-m', 'compileall', '-q', tmp_path/'dynattn')
    code = ('import time; start = time.process_time(); import torch; began = time.process_time(); import dynattn\n'
            'print(time.process_time()-began, began-start, dynattn.__file__)')
    said = [_run(sys.executable, '-c', code, cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(tmp_path)}).split() for _ in range(5)]
    assert all(where.startswith(str(tmp_path)) for _,_,where in said)
    ours,torchs = (min(float(row[i]) for row in said) for i in (0, 1))
    assert ours<max(.1, torchs/20), said

@pytest.mark.slow
def test_the_lines_of_the_readme_run(python, tmp_path):
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    blocks = [b.split('```')[0] for b in text.split('```python\n')[1:]]
    assert blocks
    _python(python, '\n'.join(blocks), tmp_path)

def _refusals():
    "file:line and words of every TypeError and ValueError that the package raises"
    for f in sorted((ROOT/'dynattn').rglob('*.py')):
        for n in ast.walk(ast.parse(f.read_text(encoding='utf-8'))):
            if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call) and getattr(n.exc.func, 'id', '') in ('TypeError','ValueError'):
                yield f'{f.name}:{n.lineno}', ast.unparse(n.exc.args[0])

# words that stand behind the name of a file, a line or a layer in another error, or that come from a sentence made elsewhere
PARTS = {'why', 'head.why', "'expected finite logits, got some that are not'", "f'config.json: {type(e).__name__}: {e}'",
    "f'expected an object, got {type(found).__name__}'", "f'caches: expected keys.{name} and values.{name} with the same numbers'",
    'f"{wants}, or take all keys with cache_implementation=\'dynamic\'"', "f'layer {i}: {e}'", "f'{_READ}values{_INSTEAD}'",
    "'rows: expected records'", "f'expected a text in {field!r}, got {got}'",
    "f'expected a text in {field!r}, got half of a pair of surrogates'", "f'{constant}, which is no JSON'",
    "f'expected a JSON object with {field!r}'", "'a key twice'", "f'expected a JSON object with {field!r}, got {got}'",
    'f"{name}{(\': \' if name else \'\')}expected {field.expected}, got {got:.40}"', "f'expected at most {most:,} bytes, got more'",
    "f'expected values by name, got a {type(state).__name__}'", "f'damaged {head.code}'",
    "f'{e}; heal=0 leaves the weights alone'"}

def test_refusals_name_the_argument_what_was_expected_and_what_came():
    said = list(_refusals())
    form = r"""f?['"][\w{}\[\]., !'"\\]+: expected .*\bgot\b"""
    bad = [s for s in said if s[1] not in PARTS and not re.match(form, s[1])]
    assert len(said)>100 and not bad, bad
    assert PARTS<={words for _,words in said}, PARTS-{words for _,words in said}

def opened(path):
    "Calls that read or write text: (line, the call)"
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if not isinstance(node, ast.Call): continue
        given = {k.arg for k in node.keywords}
        name = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
        modes = [x.value for x in (*node.args, *(k.value for k in node.keywords if k.arg=='mode')) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        is_text = isinstance(node.func, ast.Attribute) and name in ('read_text', 'write_text') or name=='open' and not any(re.fullmatch('[rwax]b|b[rwax]', mode) for mode in modes)
        of_another = name=='open' and getattr(getattr(node.func, 'value', None), 'id', '') in ('Image', 'os')
        if is_text and not of_another and 'encoding' not in given: yield node.lineno,ast.unparse(node)

def test_text_is_utf8_whatever_the_machines_locale_says():
    "On Windows a file without an encoding is read as cp1252, and one with a sigma in it cannot be written"
    said = [f'{path.relative_to(ROOT)}:{line} {call}' for folder in ('dynattn', 'docs', 'examples', 'benchmarks')
            for path in sorted((ROOT/folder).rglob('*.py')) for line,call in opened(path)]
    elsewhere = '/proc/', 'cpu.read_text()', "'.lock'"     # of Linux alone, and a file without text
    assert not [x for x in said if not any(name in x for name in elsewhere)]
