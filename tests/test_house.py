"The package does not grow unnoticed: sizes stay near a committed ceiling, imports and long cells below it."
import json
import pytest
import house

FOUND,CEILING = house.found(),json.loads(house.CEILING.read_text())

@pytest.mark.parametrize('name', FOUND)
def test_at_most_the_ceiling(name):
    x = FOUND[name]
    listed = '\n'.join(x) if isinstance(x, list) else ''
    most = house.allowed(CEILING[name], x)
    assert house.counts(FOUND)[name]<=most, f'{name}: {house.counts(FOUND)[name]} > {most} by tests/house.json\n{listed}'

def test_nothing_else_has_a_ceiling(): assert set(CEILING)==set(FOUND)

FILES = dict(a='# File to edit: ../nbs/01_a.ipynb.\nfrom .b import f\n', b='# File to edit: ../nbs/02_b.ipynb.\ndef f():\n    import dynattn.c\n',
             c='# File to edit: ../nbs/03_c.ipynb.\nfrom dynattn import a\nclass C:\n    def m(self): pass\n__all__ = ["C"]\n')

def test_what_is_counted(tmp_path):
    "A package of three modules in a circle, two of which import later chapters, one of them inside a function"
    (tmp_path/'dynattn').mkdir()
    (tmp_path/'nbs').mkdir()
    for name,text in FILES.items(): (tmp_path/f'dynattn/{name}.py').write_text(text)
    (tmp_path/'dynattn/core.cpp').write_text('int x;\nint y;\n')
    cells = [dict(cell_type='code', id='long', source=['#| export\n']+['x = 1\n']*30), dict(cell_type='code', id='short', source=['#| export\n', 'x = 1'])]
    (tmp_path/'nbs/01_a.ipynb').write_text(json.dumps(dict(cells=cells)))
    found = house.found(tmp_path)
    assert found==dict(lines=12, definitions=3, public=1, long_cells=['01_a.ipynb long: 32 lines'],
        upward=['dynattn.a -> dynattn.b', 'dynattn.b -> dynattn.c'], lazy=['dynattn.b -> dynattn.c'], circles=['dynattn.a <-> dynattn.b <-> dynattn.c'],
        folders=['dynattn.a <-> dynattn.b <-> dynattn.c'], downstairs=[])

def test_an_import_from_a_later_room_is_found(tmp_path):
    for name,text in dict(padding='import dynattn.engine.call\n', **{'engine/call': 'from .. import padding\n'}).items():
        path = tmp_path/f'dynattn/{name}.py'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path/'nbs').mkdir()
    assert house.found(tmp_path)['downstairs']==['dynattn.padding -> dynattn.engine.call']

def test_sizes_have_room_and_lists_have_none(): assert (house.allowed(100, 3), house.allowed(100, []))==(102, 100)
