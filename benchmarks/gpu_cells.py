"""A chapter's cells, one after the other, where neither nbdev nor Jupyter is installed: `python benchmarks/gpu_cells.py 41`.

Cells flagged `cuda` run where there is a GPU. Each cell is a file, since Triton reads the source of its kernels. A cell that fails is
printed with its error; the next ones run all the same. A row for each cell flagged `cuda`, and for each that failed, goes to the CSV.
With `--part 1/4` it is every fourth of the cells flagged `cuda`, so that four processes compile at once. Without
Matplotlib nothing is drawn."""
import argparse, ast, json, os, re, sys, tempfile, time, traceback, types
from pathlib import Path
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from unittest.mock import MagicMock
import torch
from harness import append, part_of, rows_of

if not torch.cuda.is_available(): os.environ['TRITON_INTERPRET'] = '1'

def without_jupyter():
    "Stand-ins for what pages import to show things."
    try: import IPython.display
    except ImportError:
        display = types.ModuleType('IPython.display')
        display.Markdown = display.HTML = display.SVG = str
        display.display = print
        ipython = types.ModuleType('IPython')
        ipython.get_ipython,ipython.version_info = lambda: None,(9,0)    # Matplotlib asks
        sys.modules |= {'IPython': ipython, 'IPython.display': display}
    sys.modules['matplotlib_inline'] = types.ModuleType('matplotlib_inline')
    try: import matplotlib
    except ImportError:
        drawn = ('matplotlib','matplotlib.patches','dynattn.plot')
        sys.modules |= {name: MagicMock(measured=rows_of, grid=lambda *_,**__: (MagicMock(),MagicMock())) for name in drawn}

CHECKS = ast.Assert,ast.For,ast.With    # what a cell that only makes names does not have

def defines(source):
    "Whether a cell only makes names."
    return not any(isinstance(x, CHECKS) for x in ast.parse(source).body)

def cells(chapter, only_cuda=False, part=0, parts=1):
    "(id, flags, source) of the cells that run here"
    found = 0
    path, = (ROOT/'nbs/engine').glob(f'{chapter}_*.ipynb')
    for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
        source = ''.join(cell['source'])
        if cell['cell_type']!='code' or 'nbdev_export()' in source: continue
        flags = {line[2:].strip().split(':')[0] for line in source.splitlines() if line.startswith('#|')}
        if flags & {'notest','eval','slow'} or 'cuda' in flags and not torch.cuda.is_available(): continue
        source = re.sub(r'^%.*$', '', source, flags=re.M)
        if only_cuda and not (flags & {'cuda','export'} or defines(source)): continue
        if 'cuda' in flags:
            found += 1
            if found%parts!=part: continue
        yield cell['id'],flags,source

def main(chapter, to, only_cuda, part=0, parts=1):
    without_jupyter()
    names,bad,ran = dict(__name__='__main__'),0,0
    with tempfile.TemporaryDirectory() as folder:
        for number,(name,flags,source) in enumerate(cells(chapter, only_cuda, part, parts)):
            file,start,why = Path(folder, f'c{number}_{name}.py'),time.perf_counter(),''
            file.write_text(source, encoding='utf-8')
            try: exec(compile(source, str(file), 'exec'), names)
            except Exception as e:
                why = f'{type(e).__name__}: {" ".join(str(e).split())}'[:160]
                print('-'*20, source, traceback.format_exc(), sep='\n', flush=True)
            ran,bad = ran+1,bad+bool(why)
            if not ('cuda' in flags or why): continue
            seconds = time.perf_counter()-start
            print(chapter, name, 'cuda' if 'cuda' in flags else '', f'{seconds:.1f} s', why or 'passed', flush=True)
            if to: append(to, [dict(kind='cell', case=f'{chapter} {name}', dtype='', error='', allowed='', where=why, holds=not why)], None)
    print(f'chapter {chapter}: {ran-bad} cells passed, {bad} failed')
    sys.exit(bool(bad))

if __name__=='__main__':
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('chapter', choices=('40','41','42'), help="its number")
    a.add_argument('--to', help="a CSV file to append to (default: none)")
    a.add_argument('--cuda', action='store_true', help="only the cells for a GPU, and what makes their names")
    a.add_argument('--part', type=part_of, default='0/1', help="0/4: every fourth of the cells for a GPU (default: all)")
    args = a.parse_args()
    main(args.chapter, args.to and os.path.abspath(args.to), args.cuda, *args.part)
