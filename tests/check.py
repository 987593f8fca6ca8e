"""One chapter, checked in half a minute: `python tests/check.py 14`, or `make check nb=14`.

Exports all notebooks, runs the chapter, cleans it, runs the tests that `mutants.py` names for its module, and shows what
changed in the public names and signatures."""
import difflib, re, subprocess, sys
from pathlib import Path
import freeze, mutants

BIN = Path(sys.executable).parent

def notebook(number):
    "The chapter of that number, or of that path"
    names = {p: p.relative_to(freeze.ROOT/'nbs').as_posix() for p in (freeze.ROOT/'nbs').rglob('*.ipynb')}
    found = [p for p,name in names.items() if name==number or p.name.startswith(f'{number}_') and not name.startswith('guide/')]
    if len(found)!=1: sys.exit(f"nb: expected the number of a chapter, such as 14, or its path below nbs/, got {number!r}, which {len(found)} have")
    return found[0]

def tests_of(path):
    "Files of tests beside the chapter itself"
    module = re.search(r'#\\?\| default_exp ([\w.]+)', path.read_text(encoding='utf-8'))
    if not module: return []
    named = mutants.TESTS.get(module[1]) or mutants.TESTS.get(module[1].split('.')[0], [])
    return [f'tests/{n}' for n in named if n.endswith('.py') and n!='test_search.py']        # which draws for a minute

def run(*command):
    print('$', *(Path(c).name if c==command[0] else c for c in map(str, command)), flush=True)
    if subprocess.run(command, cwd=freeze.ROOT).returncode: sys.exit(1)

def main(number):
    path = notebook(number)
    run(BIN/'nbdev_export')
    run(BIN/'nbdev_test', '--path', path.relative_to(freeze.ROOT))
    run(BIN/'nbdev_clean', '--fname', path)
    changed = list(difflib.unified_diff(freeze.API.read_text(encoding='utf-8').splitlines(), freeze.api().splitlines(), 'tests/api.txt', 'now', n=0, lineterm=''))
    print(*changed or ['the public names and signatures are the same'], sep='\n')
    if found := tests_of(path): run(sys.executable, '-m', 'pytest', '-q', '-x', '-n', 'auto', *found)

if __name__=='__main__': main(*sys.argv[1:])
