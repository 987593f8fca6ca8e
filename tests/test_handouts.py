"""A page's notebook, downloaded alone, runs from top to bottom in an empty folder, with the packages that its first cell names
and no others: no nbdev, no repository, and no names of cells whose code the page does not show.

What is marked `slow` is left out here: the notebook's own test runs it."""
import json, os, re
from pathlib import Path
import pytest
import book, reader

# The guide, the idea, what a reader calls, and what looks into other chapters; the others with `make test-all`
SOON = r'guide/|index|(engine/)?(0[1-9]|1\d|2[0-5]|4[4-8]|9[89])_'

def wanted(path):
    "What the page's line of `pip install` brings, and Jupyter"
    names = ['requirements', *(f'{extra}_requirements' for extra in book.extras(path))]
    packages = [re.split('[<>=; ]', r)[0] for name in names for r in book.cfg.get(name).split()]
    return (*sorted(packages), *book.more(path), *reader.JUPYTER)

NAMES = sorted((c.path for c in [*book.chapters(), book.Chapter(Path('index.ipynb'), '', '')]), key=lambda p: (wanted(p), 'triton' in p.name))
PAGES = [pytest.param(p, id=p.as_posix(), marks=pytest.mark.docs if re.match(SOON, p.as_posix()) else pytest.mark.slow) for p in NAMES]

@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "Runs a page's notebook. Pages of one environment stand together, and Triton must be loaded after the kernels' chapters choose its interpreter"
    servers = {}
    def run(path):
        key = wanted(path), 'triton' in path.name
        if key not in servers:
            while servers: servers.popitem()[1].close()
            servers[key] = reader.Server(tmp_path_factory.mktemp('reader')/'packages', wanted(path))
        notebook = tmp_path_factory.mktemp('download')/path.name
        notebook.write_text(book.handout(path), encoding='utf-8')
        return servers[key].run(notebook)
    yield run
    for server in servers.values(): server.close()

@pytest.mark.parametrize('path', PAGES)
def test_a_downloaded_page_runs_alone(path, run):
    passed,said = run(path)
    if not passed: pytest.fail(said[-4000:], pytrace=False)

@pytest.mark.docs
def test_the_environment_has_nothing_else(tmp_path):
    "And a page that needs the repository, nbdev or a cell without visible code fails"
    server = reader.Server(tmp_path/'packages', ('torch', 'numpy', 'fastcore', 'matplotlib', *reader.JUPYTER))
    def passes(*cells):
        path = tmp_path/'page.ipynb'
        path.write_text(json.dumps(dict(cells=[dict(cell_type='code', source=s) for s in cells])))
        return server.run(path)[0]
    assert passes('import dynattn.plot, fastcore, torch', 'import os; assert not os.listdir()', '#| slow\n1/0')
    for wrong in ('import nbdev', 'import drawings', 'import pytest', 'import transformers', 'open("../benchmarks/cpu.py")'): assert not passes(wrong)
    assert not passes('#| echo: false\nx = 1', 'x') and passes('x = 1', '#| echo: false\nx+1')
    server.close()
