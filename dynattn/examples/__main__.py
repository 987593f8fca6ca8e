"""List the examples, or run one: `python -m dynattn.examples finetune_hf train.tsv --model tiny`.

On several processes: `torchrun --nproc-per-node 2 -m dynattn.examples long_document`."""
import ast, os, runpy, sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

def examples():
    """The scripts by name. A wheel has them beside this file; in a checkout they lie in its folder
    `examples`."""
    def scripts(folder):
        paths = sorted(folder.glob('*.py'))
        return {path.stem: path for path in paths if not path.stem.startswith('_')}
    return scripts(HERE) or scripts(HERE.parents[1]/'examples')

def first_line(path):
    "The first line of its docstring."
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
    return docstring.partition('\n')[0].rstrip(':')

def listing():
    "All examples, one on a line."
    found = examples()
    width = max(map(len, found))
    rows = [f'  {name:{width}}  {first_line(path)}' for name,path in found.items()]
    usage = 'usage: python -m dynattn.examples NAME [options]; NAME --help shows the options of one'
    return '\n'.join([usage, '', *rows])

def main(argv):
    "Exit status."
    if not argv or argv[0] in ('-h','--help'):
        try: print(listing(), flush=True)
        except BrokenPipeError:  # `| head` has read enough; the interpreter is not to try again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    name,*rest = argv
    path = examples().get(name.removesuffix('.py'))
    if path is None:
        names = ', '.join(examples())
        print(f'dynattn.examples: expected one of {names}, got {name!r}', file=sys.stderr)
        return 2
    sys.argv = [str(path), *rest]
    runpy.run_path(str(path), run_name='__main__')
    return 0

if __name__=='__main__': sys.exit(main(sys.argv[1:]))
