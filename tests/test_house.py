"The package may only shrink, unless a commit says why: sizes, imports and long cells stay below a committed ceiling."
import json
import pytest
import house

FOUND,CEILING = house.found(),json.loads(house.CEILING.read_text())

@pytest.mark.parametrize('name', FOUND)
def test_at_most_the_ceiling(name):
    x = FOUND[name]
    listed = '\n'.join(x) if isinstance(x, list) else ''
    assert house.counts(FOUND)[name]<=CEILING[name], f'{name}: {house.counts(FOUND)[name]} > {CEILING[name]} of tests/house.json\n{listed}'

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
        upward=['dynattn.a -> dynattn.b', 'dynattn.b -> dynattn.c'], lazy=['dynattn.b -> dynattn.c'], circles=['dynattn.a <-> dynattn.b <-> dynattn.c'])
