"Which cells fold on the site, and what the line says that stands for them."
import builtins, html, re
import pytest
import book, fold

pytestmark = pytest.mark.docs

def kind(source, later=(), drawn=False, printed=False):
    line = fold.fold(source, list(later), drawn, printed)
    return line and dict([('✓', 'check'), ('H', 'figure')]).get(line[0], 'code')

def test_checks_fold_and_lessons_do_not():
    assert kind('assert x==1')=='check' and kind('want = f(x)\nassert_close(x, want)')=='check'
    assert kind('for a in 1,2: assert f(a)')=='check' and kind('with expect_fail(ValueError): f()')=='check'
    assert kind('y = f(x)') is None and kind('assert x\ny') is None                # ends in a value
    assert kind('assert x', printed=True) is None                                  # shows something
    assert kind('y = f(x)\nassert y', later=['print(y)']) is None                  # a later cell needs it
    assert kind('y = f(x)\nassert y', later=['y = 2\nprint(y)'])=='check'          # that cell makes its own
    assert kind('#| code-fold: false\nassert x') is None                           # the author says that it is the lesson
    assert kind('class A: pass\nassert A()') is None and kind('%time x') is None
    assert kind('show(x)', drawn=True)=='figure' and kind('#| code-fold: true\nf()')=='code'

def test_the_code_of_the_package_is_on_the_page():
    assert fold.with_code('x = 1')=='x = 1' and fold.with_code('#| exports\nx = 1')=='#| exports\nx = 1'
    assert fold.with_code('#| export\ndef f(): pass')=='#| exports\ndef f(): pass'
    def summary(source): return fold.options(fold.with_code('#| export\n'+source)).get('code-summary')
    assert summary('import re\nfrom math import pi')=='Imports'
    long = '\n'.join(f'    y = {i}' for i in range(20))
    assert summary(f'@patch\ndef f(self:Window):\n{long}')=='Window.f: 22 lines'
    assert summary(f'class A:\n{long}\ndef b(): pass')=='A, b: 22 lines'
    assert summary(f'#| code-fold: false\ndef f():\n{long}') is None

def test_a_part_begins_with_its_heading_and_stands_to_the_next_one():
    cells = [('markdown', '# A'), ('code', 'x'), ('markdown', '## A step'), ('markdown', '## In the library'), ('markdown', '### More'), ('code', '## Solutions')]
    assert [*fold.parts(cells)]==['']*3+['In the library']*3
    assert fold.part('## Solutions\n\nThey are these.')=='Solutions' and not fold.part('### Solutions') and not fold.part('## Solutions of others')

def test_in_a_part_that_folds_long_code_stands_open():
    long = '#| export\ndef f():\n'+'    y = 1\n'*20
    assert 'code-fold' in fold.with_code(long) and 'code-fold' not in fold.with_code(long, 'In the library')
    assert 'code-fold' in fold.with_code('#| export\nimport re', 'In the library')

def test_a_lesson_is_read_slower_and_a_part_says_what_it_has():
    from execnb.nbio import dict2nb, mk_cell
    words = 'word '*240
    cells = [(words, 'markdown'), ('## In the library', 'markdown'), (words, 'markdown'), ('#| export\ndef f(): pass\ndef _g(): pass', 'code'), ('assert x\nassert y', 'code')]
    nb = dict2nb(dict(cells=[mk_cell(*c) for c in cells], metadata={}, nbformat=4, nbformat_minor=5))
    shut = [None]*len(cells)
    assert fold.of_parts(nb, shut)=={'': 2, 'In the library': 1} and fold.summaries(nb, shut)=={'In the library': '`f` · 1 min · 2 checks'}
    nb['cells'] = nb.cells[:1]
    assert fold.of_parts(nb, [None])=={'': 1}          # a chapter without parts is read at the usual pace

@pytest.mark.parametrize('source,read', [
    ('class A:\n    def f(self): return g\n    h = f', {'g'}), ('class A:\n    h = f\n    def f(self): pass', {'f'}),
    ('class A:\n    def f(self): return h()\n    def h(self): pass', {'h'})], ids=['bound before', 'bound behind', 'not seen by its functions'])
def test_a_class_reads_its_own_names(source, read):
    assert fold.reads_and_binds(source)==(read | {'__name__'}, {'A'})      # each class has it of its module

KNOWN = {*dir(builtins), '__file__', '__annotations__', 'get_ipython', 'display'}

@pytest.mark.parametrize('chapter', book.chapters(), ids=lambda c: c.path.name)
def test_code_pasted_from_a_page_finds_every_name_on_it(chapter):
    cells = [book.source(c) for c in book.read(chapter.path)['cells'] if c['cell_type']=='code']
    visible = [fold.without_options(s) for s in cells if not re.match(r'#\|\s*(hide|default_exp)', s)]
    names = [fold.reads_and_binds(s) for s in visible]
    read,bound = (set().union(*sets) for sets in zip(*names))
    assert not read-bound-KNOWN

def test_every_exported_cell_is_on_its_page(site):
    for c in book.chapters():
        page = re.sub(r'\s+', '', html.unescape(re.sub('<[^>]+>', '', (site[0]/c.page).read_text(encoding='utf-8'))))
        for cell in book.read(c.path)['cells']:
            source = book.source(cell)
            if cell['cell_type']!='code' or not re.match(r'#\|\s*exports?\n', source): continue
            code = re.sub(r'\s+', '', fold.without_options(source))
            assert code in page, f'{c.path}: {source[:200]}'

@pytest.mark.parametrize('source,want', [
    ('# rows sum to one.\nassert x', 'rows sum to one'), ('# one line\n# of two\nassert x', '1 assertion'),
    ('#| hide\nassert x', '1 assertion'), ('assert a\nassert b', '2 assertions'),
    ('for a in 1,2:\n    assert f(a)\n    if a: assert_close(a, b)\nassert c', '3 assertions'),
    ('with expect_fail(ValueError, contains="got 3"): f()', '1 assertion'),
    ('with no_grad():\n    x = f()\n    assert x\n    assert y', '2 assertions'), ('assert gradcheck(f, x)', '1 assertion')])
def test_the_line(source, want): assert fold.line(source)=='✓ '+want

def test_the_words_of_a_solution_stand_above_its_code(site):
    assert fold.explanation('# Both, as\n# `a` is b.\n\nx = 1 # c\n')==('Both, as `a` is b.', 'x = 1 # c\n')
    assert fold.explanation('# a remark\nx = 1')==('', '# a remark\nx = 1') and fold.explanation('x')==('', 'x')
    text = (site[0]/'survey/learned.html').read_text(encoding='utf-8')
    assert '<summary>Solution</summary>\n<p>Five: r rounds' in text

def test_a_caption_does_not_repeat_what_is_drawn():
    assert fold.caption({'fig-alt': 'a'}, '2.1')=='**Figure 2.1.**'
    assert fold.caption({'fig-alt': 'a', 'fig-cap': 'See *b*.'}, '2.1')=='**Figure 2.1.** See *b*.'

def test_every_figure_says_what_to_conclude():
    "A caption of its own, which is not the alternative text"
    silent = []
    for c in book.chapters():
        for cell in book.read(c.path)['cells']:
            opts = fold.options(book.source(cell)) if cell['cell_type']=='code' else {}
            if 'fig-alt' in opts and opts.get('fig-cap', opts['fig-alt'])==opts['fig-alt']:
                silent.append(f'{c.path} {cell["id"]}')
    assert not silent, f'no `#| fig-cap:` of its own: {silent}'

def test_pages_fold_and_number(site):
    "Every figure is on its page, with its number in order and a caption; checks are folded"
    for c in book.chapters():
        text = (site[0]/c.page).read_text(encoding='utf-8')
        figures = re.findall(r'<figure.*?</figure>', text, re.S)
        drawn = sum(any('image/png' in o.get('data', {}) for o in cell.get('outputs', [])) for cell in book.read(c.path)['cells'])
        numbers = [re.findall(r'<strong>Figure ([\d.]+)\.</strong>', f) for f in figures]
        assert numbers==[[f'{c.number}.{i+1}'.lstrip('.')] for i in range(drawn)] and all('<img' in f for f in figures), c.path
    text = (site[0]/'reports.html').read_text(encoding='utf-8')
    assert text.count('<details class="nb-fold nb-check">') >= 5 and 'Toggle hidden content' not in text

def test_the_parts_of_a_lesson_fold(site):
    "Three shut parts below each lesson, each with its section inside, and a line that says what it has"
    for path in (*book.LESSONS, *book.BEHIND):
        text = (site[0]/book.out_name(path).with_suffix('.html')).read_text(encoding='utf-8')
        parts = re.findall(r'<details class="nb-part"><summary>.*?aria-level="2">([^<]+)</span>.*?</summary>\s*<section id="([^"]+)">', text)
        assert [name for name,_ in parts]==[*fold.FOLDED] and [i for _,i in parts]==['in-the-library', 'from-the-sources', 'solutions']
        told = re.findall(r'<span class="nb-part-told">(.*?)</span></summary>', text)
        exports = path.stem!='13_vanishing'      # a study, which adds no names to the package
        assert bool(re.match(r'<code>\w+', told[0]))==exports and all(re.search(r'\d+ min', t) for t in told)
        badge = int(re.search(r'<strong>(?:Lesson \d of 6|Behind the lessons)</strong> · (\d+) minutes', text)[1])
        assert re.search(rf'lesson {badge} min( · second lesson \d+ min)? · library', text)
    assert 'nb-part' not in (site[0]/'reports.html').read_text(encoding='utf-8')

def test_a_solution_folds_with_what_it_prints(site):
    text = (site[0]/'cache.html').read_text(encoding='utf-8')
    folded = re.findall(r'<summary>Solution</summary>(.*?)</details>', text, re.S)
    assert sum('(122, 67)' in f for f in folded)==1==text.count('(122, 67)')
