"""The code of a page, pasted from top to bottom into an empty session, runs.

A notebook's own test runs its hidden cells too; a reader does not have those. What is marked `slow` is left out here: the
notebook's test runs it."""
import json, re
from pathlib import Path
import pytest
import book, forked

ROOT = forked.ROOT
UNSEEN = re.compile(r'^#\|\s*(hide\b|default_exp\b|(echo|include):\s*false)', re.M)
SOON = r'guide/|(engine/)?(0[1-9]|1\d|2[0-5]|4[4-8])_'       # the guide, the idea, and what a reader calls; the others with `make test-all`
PAGES = [pytest.param(c.path.as_posix(), marks=pytest.mark.docs if re.match(SOON, c.path.as_posix()) else pytest.mark.slow)
         for c in book.chapters()]

def seen(path):
    "The notebook with the code that its page shows"
    nb = book.read(path)
    nb['cells'] = [c for c in nb['cells'] if c['cell_type']=='code' and not UNSEEN.search(book.source(c))]
    return nb

@pytest.fixture(scope='module')
def session(tmp_path_factory):
    """A folder with what the pages' code reads, where it may write, and the processes that run it: Triton must be loaded
    after the kernels' chapters choose its interpreter."""
    folder = tmp_path_factory.mktemp('session')/'nbs'
    folder.mkdir()
    for name in ('docs', 'benchmarks', 'examples', 'dynattn'): (folder.parent/name).symlink_to(ROOT/name)
    for p in book.NBS.rglob('*'):
        (folder/p.relative_to(book.NBS)).mkdir() if p.is_dir() else (folder/p.relative_to(book.NBS)).symlink_to(p)
    servers = {}
    def run(path):
        kernels = 'triton' in path
        if kernels not in servers: servers[kernels] = forked.Server(forked.LIGHT if kernels else forked.ALL)
        pasted = (folder/path).with_name(f'pasted_{Path(path).name}')
        pasted.write_text(json.dumps(seen(path)), encoding='utf-8')
        return servers[kernels].run(pasted)
    yield run
    for server in servers.values(): server.close()

@pytest.mark.parametrize('path', PAGES)
def test_what_a_page_shows_runs(path, session):
    passed,said = session(path)
    if not passed: pytest.fail(said, pytrace=False)

@pytest.mark.docs
def test_a_cell_that_the_page_hides_is_left_out():
    cells = ['#| hide\nx = 1', '#| echo: false\nshow()', '#| default_exp a', 'x = 2', '#| export\nx = 3', '#| code-fold: true\nx = 4']
    assert [not UNSEEN.search(source) for source in cells]==[False]*3+[True]*3
