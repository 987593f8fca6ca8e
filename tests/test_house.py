"Imports go one way, and what makes a room hard to read does not grow."
import ast, json, re
import pytest
import book, fold, house

FOUND,CEILING = house.found(),json.loads(house.CEILING.read_text())

@pytest.mark.parametrize('name', FOUND)
def test_at_most_the_ceiling(name):
    listed = '\n'.join(FOUND[name])
    said = f'{name}: {len(FOUND[name])} > {CEILING[name]} by tests/house.json; {house.ASKED[name]}'
    assert len(FOUND[name])<=CEILING[name], f'{said}\n{listed}'

def test_nothing_else_has_a_ceiling(): assert set(CEILING)==set(FOUND)==set(house.ASKED)

FILES = dict(
    a='# File to edit: ../nbs/01_a.ipynb.\nimport dynattn.b\nfrom .b import f, _g\ndef _h(x, y): return f(x)\ndef _i(z): return _h(1, 2)\nkept = _i\n',
    b='# File to edit: ../nbs/02_b.ipynb.\ndef f():\n    import dynattn.c\n    x,y,z = 1,2,3\n',
    c='# File to edit: ../nbs/03_c.ipynb.\nfrom dynattn import a\nclass C:\n    def m(self): pass\n__all__ = ["C"]\n')

def test_what_is_counted(tmp_path):
    "A package of three modules in a circle, two of which import later chapters, one of them inside a function"
    (tmp_path/'dynattn').mkdir()
    for name,text in FILES.items(): (tmp_path/f'dynattn/{name}.py').write_text(text)
    assert house.found(tmp_path)==dict(
        upward=['dynattn.a -> dynattn.b', 'dynattn.b -> dynattn.c'], lazy=['dynattn.b -> dynattn.c'],
        circles=['dynattn.a <-> dynattn.b <-> dynattn.c'], folders=['dynattn.a <-> dynattn.b <-> dynattn.c'],
        downstairs=[], homeless=[f'dynattn.{name}: its folder, or its name at the top, goes into ROOMS of tests/house.py' for name in 'abc'],
        borrowed=['dynattn.a: _g'], packed=['dynattn.b:4'], unused=['dynattn.a: _g', 'dynattn.c: a'], unread=['dynattn.a:4 _h: y'],
        idle=[])

KNOWN = house.modules()

@pytest.mark.parametrize('name', house.settings(KNOWN))
def test_a_setting_that_nothing_reads_is_found(name, monkeypatch):
    "Also where only the bounds or another class's settings of the same name are read"
    module,node = house.settings(KNOWN)[name]
    new = ast.parse('unheard:int = 0\ndef check(self): return self.unheard').body
    monkeypatch.setattr(node, 'body', [*node.body, *new])
    assert [*house.idle(KNOWN)]==[f'{module.name}.{name}: unheard']

def test_which_classes_hold_settings():
    "They are found by their names, so one that is called otherwise would not be looked at"
    assert {*house.settings(KNOWN)}=={'DataConfig', 'EncoderConfig', 'NarrowConfig', 'NarrowOptions', 'TrainConfig'}

def test_an_import_from_a_later_room_is_found(tmp_path):
    for name,text in dict(padding='import dynattn.engine.call\n', **{'engine/call': 'from .. import padding\n'}).items():
        path = tmp_path/f'dynattn/{name}.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert house.found(tmp_path)['downstairs']==['dynattn.padding -> dynattn.engine.call']

def crowded(source):
    "Statements that share a line with the one before them"
    for node in (n for tree in fold.tree(source) for n in ast.walk(ast.Module([tree], []))):
        for name in ('body', 'orelse', 'finalbody'):
            block = getattr(node, name, None) or []
            if isinstance(block, list): yield from (b for a,b in zip(block, block[1:]) if b.lineno==a.end_lineno)

@pytest.mark.parametrize('path', [c.path for c in book.chapters()], ids=str)
def test_a_line_of_a_notebook_has_one_statement(path):
    cells = [book.source(c) for c in book.read(path)['cells'] if c['cell_type']=='code']
    found = [ast.unparse(node) for source in cells if 'nbdev_export' not in source for node in crowded(source)]
    assert found==[]

def test_a_second_statement_in_a_line_is_found():
    assert len([*crowded('def f(x):\n    y = x; return y')])==1 and not [*crowded('def f(x):\n    y = x\n    return y')]

class Imports(ast.NodeTransformer):
    "Takes imports out of a program and keeps their names"
    def __init__(self): self.names = set()
    def visit_Import(self, node):
        self.names |= {(alias.asname or alias.name).split('.')[0] for alias in node.names}
        return ast.Pass()
    visit_ImportFrom = visit_Import

def needless(cells):
    "Names that the cells import and nothing names again, in code or in the text of a program"
    imports,of_package = Imports(),Imports()     # what the package imports is asked of its modules
    trees = [(of_package if cell.startswith('#| export') else imports, tree) for cell in cells for tree in fold.tree(cell)]
    rest = '\n'.join(ast.unparse(taken.visit(tree)) for taken,tree in trees)
    return sorted(name for name in imports.names-{'*'} if not re.search(rf'\b{name}\b', rest))

@pytest.mark.parametrize('path', [c.path for c in book.chapters()], ids=str)
def test_a_notebook_needs_what_it_imports(path):
    cells = [book.source(c) for c in book.read(path)['cells'] if c['cell_type']=='code']
    assert needless(cells)==[]

def test_a_needless_import_is_found():
    cells = ['from a import (\n    b, c)\ndef i(): import d.e as f, g', 'print(c)\nh = "g.x"']
    assert needless(cells)==['b', 'f']
