"A letter has one meaning in the ideas, chapters 01 to 23: the one of chapter 98's table."
import re
import pytest
import book, fold
from test_lessons import TERMS, source

QUOTED = '15_reports', '16_before', '17_remarks'       # they carry papers out, and keep their letters
PLUMBING = '00_plot', '04_widgets'
CHAPTERS = [p for p in sorted(book.NBS.glob('[0-2][0-9]_*.ipynb')) if p.stem not in QUOTED+PLUMBING]

# Letters that once had several meanings: the chapters whose formulas have them, each in the meaning of the table or in one
# that the page names beside it
WHERE = {
    'M': '14 21',           # keys; a mask is m
    'R': '02 03',           # recall; the length of a ramp is ℓ
    'T': '11 12 13 14',     # threshold; the real tokens of a batch are N_real, a temperature is θ
    'V': '12 14',           # value of the curve
    'b': '10 18',           # queries of a tile; in 10 the bias of a linear layer; a bell is V
    'h': '',                # a half-width is w, and the end of a mask its edge
    'm': '03 10 12 13 14 18 23',    # mask
    'p': '12 13 14',        # steepness; a weight is a, a position i
    'r': '03 12 22',        # height above the threshold; in 03 a probability, in 22 a sum
    'w': '01 02 11 12 14 18',       # half-width; in 01 and 02 also a layer of Bahdanau's net
    'z': '10 14 21 23',     # dial; a score is s
    }
FORMULA = re.compile(r'\$\$.*?\$\$|\$[^$]+\$', re.S)
NAMES = re.compile(r'\\(?:text|operatorname\*?|mathrm|mathit|mathbb|begin|end)\s*\{[^}]*\}|\\[a-zA-Z]+')

def formulas(text):
    "The formulas of a text, without code and quotations"
    text = re.sub(r'```.*?```|`[^`]*`|<div class="nb-box">.*?</div>', '', text, flags=re.S)
    return FORMULA.findall(text)

def letters(formula):
    "Letters of a formula that neither are an index nor have one"
    return {*re.findall(r"(?<![A-Za-z_])[A-Za-z](?![A-Za-z_])", NAMES.sub(' ', formula))}

def told(path):
    "(cell, formula) of a chapter, above its sources"
    cells = book.read(path)['cells']
    parts = fold.parts([(c['cell_type'], source(c)) for c in cells])
    for cell,part in zip(cells, parts):
        if cell['cell_type']=='markdown' and part not in ('From the sources', 'Solutions'):
            for formula in formulas(source(cell)): yield cell['id'], formula

@pytest.mark.parametrize('path', CHAPTERS, ids=lambda path: path.stem)
def test_a_letter_has_one_meaning(path):
    elsewhere = {letter for letter,chapters in WHERE.items() if path.name[:2] not in chapters.split()}
    wrong = [(id, formula, found) for id,formula in told(path) if (found := letters(formula) & elsewhere)]
    assert not wrong, wrong

@pytest.mark.parametrize('formula,found', [('$M=1-V^p$', 'MVp'), ('$a_{ij}\\,v_j$', ''), ('$\\sum_b n_b$', ''),
    ('$\\text{work} = 2w+1$', 'w'), ('$m_j=\\tanh(p\\,r)$', 'pr')])
def test_letters_are_found(formula, found): assert letters(formula)==set(found)

def test_each_letter_is_in_the_table():
    "What a test allows, a reader can look up"
    table = '\n'.join(source(c) for c in book.read(book.NBS/'98_notation.ipynb')['cells'] if 'SYMBOLS' in source(c))
    names = {n.strip('$ ') for line in table.splitlines() if ' | ' in line for n in line.split(' | ')[0].split(',')}
    assert {letter for letter,chapters in WHERE.items() if chapters} <= names

@pytest.mark.parametrize('path', CHAPTERS, ids=lambda path: path.stem)
def test_a_weight_is_never_p(path):
    "With an index, p is the letter of papers for a weight"
    assert not [(id, formula) for id,formula in told(path) if re.search(r'\bp_', formula)]

def test_each_word_of_the_lessons_is_in_the_table():
    "A reader who forgot a word that a lesson explains finds it in chapter 98, as an entry of its own"
    table = '\n'.join(source(c) for c in book.read(book.NBS/'98_notation.ipynb')['cells'] if 'WORDS = ' in source(c) or 'SYMBOLS = ' in source(c))
    lines = [line.split(' | ') for line in table.splitlines() if line.count(' | ')==2]
    names = ' '.join(name for name,*_ in lines)
    assert not [term for term in TERMS if not re.search(rf'\b{term}\b', names)]
