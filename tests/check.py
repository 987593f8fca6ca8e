"""One chapter, checked: `python tests/check.py 14`, or `make check nb=14`.

Exports all notebooks, runs the chapter, cleans it, writes public names and signatures that changed to tests/api.txt and
shows them, and runs the tests that a push asks of every change and of every public name: a minute or two. Then come the
tests that use what the chapter exports, those that use most of it first: seconds for a lesson, up to ten minutes for the
engine or a program."""
import ast, difflib, re, subprocess, sys
from collections import Counter
from functools import cache
from pathlib import Path
import freeze, house

BIN = Path(sys.executable).parent
ALWAYS = 'test_house.py', 'test_in_sync.py'
OF_EVERY_NAME = 'test_kinds.py::test_every_public_callable_is_asked_or_has_a_reason', 'test_help.py::test_every_chapter_ends_with_it'
OF_EVERY_MODULE = 'test_help.py::test_each_comment_is_in_the_docstring', 'test_help.py::test_a_docstring_is_our_own'
LONG = 'test_search.py', 'test_notebooks.py'       # minutes
OF_THE_SITE = 'test_browser.py', 'test_fold.py', 'test_site.py', 'test_widgets.py'     # these need the extra `docs`
MOST = 4                                           # files of tests, those that use it most, and one of who imports it

def notebook(number):
    "The chapter of that number, 3 as well as 03, or of that path"
    def is_it(path):
        name = path.relative_to(freeze.ROOT/'nbs').as_posix()
        return name==number or path.name.startswith(f'{number:0>2}_') and not name.startswith('guide/')
    found = [path for path in (freeze.ROOT/'nbs').rglob('*.ipynb') if is_it(path)]
    if len(found)!=1:
        sys.exit("nb: expected the number of a chapter, such as 14, or its path below nbs/, "
                 f"got {number!r}, which {len(found)} have")
    return found[0]

def module_of(path):
    "The module that a chapter exports to, as `dynattn.window`; None for a study"
    found = re.search(r'#\\?\| default_exp ([\w.]+)', path.read_text(encoding='utf-8'))
    return f'dynattn.{found[1]}' if found else None

def uses(text, module):
    "How often a file uses each name of a module, wherever it takes it from; the module's own, where it takes all of it"
    inside = [path for path in map(home, paths_in(text)) if path==module or path.startswith(f'{module}.')]
    return Counter(path.removeprefix(f'{module}.').split('.')[0] if path!=module else module for path in inside)

def home(path):
    "`dynattn.Window.default` as `dynattn.window.Window.default`"
    for end in range(len(path), 0, -1):
        if path[end:end+1] in ('', '.') and path[:end] in homes(): return homes()[path[:end]]+path[end:]
    return path

@cache
def importers():
    "Which modules import a module, by its name"
    found = {}
    for name,target,_ in house.imports(house.modules()): found.setdefault(target, set()).add(name)
    return found

@cache
def homes():
    "Where a name stands that a package takes from its modules: `dynattn.Window` is `dynattn.window.Window`"
    found = {}
    for path in (freeze.ROOT/'dynattn').rglob('__init__.py'):
        package = '.'.join(path.parent.relative_to(freeze.ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if not isinstance(node, ast.ImportFrom): continue
            source = f"{package}.{node.module or ''}".rstrip('.') if node.level==1 else node.module
            for name in node.names: found[f'{package}.{name.asname or name.name}'] = f'{source}.{name.name}'
    return found

@cache
def paths_in(text):
    "Each use of the package in a file, with a dot behind each module: `dynattn.hf.register`"
    tree = ast.parse(text)
    bound,found = {},[]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split('.')[0]!='dynattn': continue
                bound[name.asname or 'dynattn'] = name.name if name.asname else 'dynattn'
                found.append(name.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0]=='dynattn':
            for name in node.names: bound[name.asname or name.name] = f'{node.module}.{name.name}'
    inner = set()       # `dynattn.hf` of `dynattn.hf.register`
    for node in ast.walk(tree):     # outer ones come first
        if not isinstance(node, (ast.Attribute, ast.Name)) or id(node) in inner: continue
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
            inner.add(id(node))
        if isinstance(node, ast.Name) and node.id in bound: found.append('.'.join([bound[node.id], *reversed(names)]))
    return found

def using(module):
    "Files of tests by how many of a module's names they use, and how often, most first"
    found = {}
    for test in sorted((freeze.ROOT/'tests').glob('test_*.py')):
        if test.name in (*ALWAYS, *LONG, *OF_THE_SITE): continue
        times = uses(test.read_text(encoding='utf-8'), module)
        if times: found[f'tests/{test.name}'] = len(times), times.total()
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))

def tests_of(path):
    "Files of tests that use what a chapter exports, and the one that most uses the modules that import it"
    module = module_of(path)
    if module is None: return []
    direct = [*using(module)][:MOST]
    around = Counter()
    for name in importers().get(module, ()): around.update({test: times for test,(_,times) in using(name).items()})
    others = sorted(set(around)-set(direct), key=lambda test: (-around[test], test))
    return direct+others[:1]

def of_every_name(path):
    "Tests that discover what all chapters export: a name that is new is asked for there, though no test uses it yet"
    module = module_of(path)
    if module is None: return []
    return [*(f'tests/{test}' for test in OF_EVERY_NAME), *(f'tests/{test}[{module}]' for test in OF_EVERY_MODULE)]

def run(*command):
    print('$', *(Path(c).name if c==command[0] else c for c in map(str, command)), flush=True)
    if subprocess.run(command, cwd=freeze.ROOT).returncode: sys.exit(1)

def freeze_names():
    "Write the public names to tests/api.txt, and show what changed: a change that was not meant is seen here"
    before,now = freeze.API.read_text(encoding='utf-8'),freeze.api()
    if before==now: return print('the public names and signatures are the same')
    print(*difflib.unified_diff(before.splitlines(), now.splitlines(), 'before', 'now', n=0, lineterm=''), sep='\n')
    freeze.API.write_text(now, encoding='utf-8')
    print('written to tests/api.txt: put a name that was not meant back, and run this again')

def main(number):
    path = notebook(number)
    run(BIN/'nbdev_export')
    run(BIN/'nbdev_test', '--path', path.relative_to(freeze.ROOT))
    run(BIN/'nbdev_clean', '--fname', path)
    freeze_names()
    def tests(*asked): run(sys.executable, '-m', 'pytest', '-q', '-x', '-n', 'auto', '--no-loadscope-reorder', *asked)
    tests(*(f'tests/{name}' for name in ALWAYS), *of_every_name(path))
    if users := tests_of(path): # xdist alone would begin with the longest file
        print('\nall is well so far; the tests that use what the chapter exports may take minutes')
        tests(*users)

if __name__=='__main__': main(*sys.argv[1:])
