"""The code of a page, pasted from top to bottom into an empty session, runs.

A notebook's own test runs its hidden cells too; a reader does not have those. What is marked `slow` is left out here: the
notebook's test runs it."""
import json, re
import pytest
import book, forked

pytestmark = pytest.mark.docs
ROOT = forked.ROOT
UNSEEN = re.compile(r'^#\|\s*(hide\b|default_exp\b|(echo|include):\s*false)', re.M)
PAGES = [c.path.as_posix() for c in book.chapters() if re.match(r'\d{3}_|0[1-9]_|1\d_|2[0-5]_|4[4-8]_', c.path.name)]

def seen(path):
    "The notebook with the code that its page shows"
    nb = book.read(path)
    nb['cells'] = [c for c in nb['cells'] if c['cell_type']=='code' and not UNSEEN.search(book.source(c))]
    return nb

@pytest.fixture(scope='module')
def session(tmp_path_factory):
    "A folder beside what the pages' code reads, where it may write, and the process that runs it"
    folder = tmp_path_factory.mktemp('session')/'nbs'
    folder.mkdir()
    for name in ('docs', 'benchmarks', 'examples'): (folder.parent/name).symlink_to(ROOT/name)
    server = forked.Server(forked.ALL)
    yield folder,server
    server.close()

@pytest.mark.parametrize('path', PAGES)
def test_what_a_page_shows_runs(path, session):
    folder,server = session
    (folder/path).write_text(json.dumps(seen(path)), encoding='utf-8')
    passed,said = server.run(folder/path)
    if not passed: pytest.fail(said, pytrace=False)

def test_a_cell_that_the_page_hides_is_left_out():
    cells = ['#| hide\nx = 1', '#| echo: false\nshow()', '#| default_exp a', 'x = 2', '#| export\nx = 3', '#| code-fold: true\nx = 4']
    assert [not UNSEEN.search(source) for source in cells]==[False]*3+[True]*3
