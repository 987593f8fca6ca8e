"""One chapter, checked in half a minute: `python tests/check.py 14`, or `make check nb=14`.

Exports all notebooks, runs the chapter, cleans it, writes public names and signatures that changed to tests/api.txt and
shows them, and runs the tests that use what the chapter exports, with those that a push asks of every change."""
import ast, difflib, re, subprocess, sys
from functools import cache
from pathlib import Path
import freeze, house

BIN = Path(sys.executable).parent
ALWAYS = 'test_house.py', 'test_in_sync.py'
LONG = 'test_search.py', 'test_notebooks.py'       # minutes
MOST = 6                                           # files of tests, those that use most of it

def notebook(number):
    "The chapter of that number, or of that path"
    def is_it(path):
        name = path.relative_to(freeze.ROOT/'nbs').as_posix()
        return name==number or path.name.startswith(f'{number}_') and not name.startswith('guide/')
    found = [path for path in (freeze.ROOT/'nbs').rglob('*.ipynb') if is_it(path)]
    if len(found)!=1:
        sys.exit("nb: expected the number of a chapter, such as 14, or its path below nbs/, "
                 f"got {number!r}, which {len(found)} have")
    return found[0]

def module_of(path):
    "The module that a chapter exports to, as `dynattn.window`; None for a study"
    found = re.search(r'#\\?\| default_exp ([\w.]+)', path.read_text(encoding='utf-8'))
    return f'dynattn.{found[1]}' if found else None

def used(text, module, names):
    "Which of a module's names a file uses: imported from it or from the package, or as `dynattn.name`"
    modules,taken,dotted = names_in(text)
    found = {name for source,name in taken if source==module or name in names}
    whole = module in modules or any(f'{source}.{name}'==module for source,name in taken)
    return found | (dotted & names) | ({module} if whole else set())

@cache
def importers():
    "Which modules import a module, by its name"
    found = {}
    for name,target,_ in house.imports(house.modules()): found.setdefault(target, set()).add(name)
    return found

@cache
def names_in(test):
    "What a file takes: modules that it imports, (module, name) pairs, and names behind a dot"
    modules,taken,dotted = set(),set(),set()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Import): modules |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or '').startswith('dynattn'):
            taken |= {(node.module, a.name) for a in node.names}
        elif isinstance(node, ast.Attribute): dotted.add(node.attr)
    return modules,taken,dotted

def exported(name):
    "The public names of a module"
    text = (freeze.ROOT/f"{name.replace('.', '/')}.py").read_text(encoding='utf-8')
    listed = re.search(r'^__all__ = (\[.*?\])', text, re.M | re.S)
    return set(ast.literal_eval(listed[1])) if listed else set()

def using(module):
    "Files of tests by how many of a module's names they use, most first"
    names,found = exported(module),{}
    for test in sorted((freeze.ROOT/'tests').glob('test_*.py')):
        if test.name in (*ALWAYS, *LONG): continue
        uses = used(test.read_text(encoding='utf-8'), module, names)
        if uses: found[f'tests/{test.name}'] = len(uses)
    return sorted(found, key=lambda name: (-found[name], name))

def tests_of(path):
    "Files of tests that use what a chapter exports; then those of the modules that import it"
    module = module_of(path)
    if module is None: return []
    found = using(module)
    for name in sorted(importers().get(module, ())): found += using(name)[:1]
    return [*dict.fromkeys(found)][:MOST]

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
    asked = [f'tests/{name}' for name in ALWAYS]+tests_of(path)
    run(sys.executable, '-m', 'pytest', '-q', '-x', '-n', 'auto', *asked)

if __name__=='__main__': main(*sys.argv[1:])
