"""Every figure that a page tells must be one that the page shows or asserts: each number where the page reads measured rows, and
elsewhere each decimal, and each number that describes a picture. What is given, and not measured, stands in `GIVEN` with its
reason. And the list of rows whose code is gone counts what the files hold."""
import bisect, csv, json, os, re, shutil, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT/'benchmarks/results'
NUMBER = re.compile(r'(?<![\w.,])[−-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?![\w])')
SMALL = 13      # whole numbers below are words: two heads, three seeds

def reads_rows(cells):
    "Whether a notebook reads `benchmarks/results`"
    code = '\n'.join(''.join(c['source']) for c in cells if c['cell_type']=='code')
    return re.search(r"\bmeasured\(['\"]|\bread\(['\"]\w+\.csv", code) is not None

def value(text): return abs(float(text.replace(',', '').replace('−', '-')))

def figures(prose):
    "The numbers of a text that are no years, names, code or formulas"
    for pattern in (r'(?s)```.*?```', r'(?s)\$\$.*?\$\$', r'\$[^$]*\$', r'`[^`]*`', r'<[^>]+>', r'\]\([^)]*\)',
                    r'\b\d{4}\.\d{4,5}\b', r'\b(?:1[89]|20)\d\d\b', r'#\d+', r'\b\d+ (?:January|February|March|April|May|June|July|August|September|October|November|December)\b', r'\w*[A-Za-z]\w*[-.]?\d[\w.-]*', r'\b\d[\d.]*-[A-Za-z]\w*'):
        prose = re.sub(pattern, ' ', prose)
    named = r'(?i)\b(chapters?|figure|sections?|lesson|seeds?|part|table|transformers|pytorch|torch|python|triton|version|rows?|layers?|heads?|rank) \d[\d.]*'
    prose = re.sub(named+r'((,| and| or| to) \d[\d.]*)*', ' ', prose)
    prose = re.sub(r'\[\d[\d, ]*\]', ' ', prose)        # a shape, or a link to a chapter
    return [m.group() for m in NUMBER.finditer(prose)]

def told(cells):
    "(cell, figure) of the text, the captions and the texts of pictures"
    of_rows = reads_rows(cells)
    for i,cell in enumerate(cells):
        source,of_picture = ''.join(cell['source']),cell['cell_type']=='code'
        if of_picture: source = '\n'.join(re.findall(r'(?m)^#\| fig-(?:alt|cap): *(.*)', source))
        for figure in figures(source):
            asked = of_rows or of_picture or '.' in figure
            if asked and (value(figure)>=SMALL or value(figure)%1): yield i,figure

def shown(cells):
    "The numbers of the code, without what it says of pictures, and of its outputs; as shares and as per cent"
    texts = []
    for cell in cells:
        if cell['cell_type']!='code': continue
        texts.append(re.sub(r'(?m)^#\|.*', '', ''.join(cell['source'])).replace('_', ''))
        for output in cell.get('outputs', ()):
            data = output.get('data', {})
            texts += [''.join(output.get('text', '')), ''.join(data.get('text/markdown', '')), ''.join(data.get('text/plain', ''))]
    found = {value(x) for text in texts for x in re.findall(r'\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+', text)}
    return sorted(x*scale for x in found for scale in (.01, 1, 100))

def agrees(figure, have):
    "Whether a sorted list holds a number, or one that is rounded to it; whole numbers are not rounded."
    digits = len(figure.partition('.')[2])
    unit = .5000001*10**-digits if digits else 1e-9
    at = bisect.bisect_left(have, value(figure)-unit)
    return at<len(have) and have[at]<=value(figure)+unit

PAGES = {path.relative_to(ROOT/'nbs').as_posix(): json.loads(path.read_text(encoding='utf-8'))['cells']
         for path in sorted((ROOT/'nbs').rglob('*.ipynb'))}

# what pages say beside their rows: how something was set up, what others wrote, what can be counted by hand
GIVEN = {
    '00_plot.ipynb': '3.99 2.3',                                # roots that are solved for in the text; a constant of colour science
    '10_sigma.ipynb': '31 15 17 2.718 8192 298 302 1.08 123 149',   # places, worked examples, and three figures of Sukhbaatar et al.
    '11_curve.ipynb': '33',                                     # words
    '12_smoothing.ipynb': '0.957',                              # the peak of a density, in chapter 15
    '13_vanishing.ipynb': '31',                                 # the last width of a loop
    '15_reports.ipynb': '31 43 11.5',                           # ends of runs, which chapter 15 asserts as ranges
    '16_before.ipynb': '1.08 31 16',                            # a figure of Sukhbaatar et al.; ends of runs, asserted as ranges
    '17_remarks.ipynb': '0.9',                                  # a worked example
    '18_chunks.ipynb': '3.5',                                   # likewise
    '22_alpha.ipynb': '170,000',                                # by hand: (.9/.2)**8
    '46_cache.ipynb': '256',                                    # a setting of benchmarks/decode.py
    '60_parallel.ipynb': '500,000 1.25 15 99 249',              # read off a model's curve, a division, digits of --double, an exercise
    '80_worth.ipynb': '128',                                    # a setting of experiments/foresight.py
    'engine/31_plan.ipynb': '3.5',                              # a worked example
    'engine/33_native.core.ipynb': '1.05 2.7 2.9',              # a constant of the core; chapter 90 asserts the others
    'engine/36_faster.ipynb': '31',                             # `kind_of_queries`
    'engine/42_triton.entmax.ipynb': '14 66',                   # settings of AdaSplash-2
    'export/68_graph.ipynb': '2,043',                           # a size of --sizes
    'guide/02_heads.ipynb': '30 2,048 1,801 16',                # the model, its texts
    'guide/05_transformers.ipynb': '0.05',                      # a rate of examples/finetune_hf.py
    'guide/06_narrow.ipynb': '2,048 8,128',                     # lengths of rows that are chosen by their checksum
    'guide/07_decode.ipynb': '2,048 8,128',
    'guide/08_long.ipynb': '5,000 100,000',                     # who the page is for
    'guide/13_machines.ipynb': '256',                           # a setting of benchmarks/parallel.py
    'hf/66_narrowing.ipynb': '48 58 49,152 1,024 142 2,048 2,560 960 76',   # defaults, a vocabulary, products, an exercise
    'hf/81_looking.ipynb': '144 95',                            # a product, an exercise
    'narrow/84_judge.ipynb': '40317 960',                       # an example; a distance of the grid
    '45_configs.ipynb': '5.24',                                 # versions
    '92_everywhere.ipynb': '2.11',
    'audit/69_report.ipynb': '36',                              # of 37 tokens, all before the last
    'index.ipynb': '1,000',                                     # about where the rows of worth_costs.csv cross
    'survey/78_sparse.ipynb': '1.88',                           # 1 + sigmoid(2)
    'train/51_files.ipynb': '128',                              # hashes of a curve
    'survey/79_survey.ipynb': '512',                            # where the pictures begin
    'train/52_training.ipynb': '65 1,025',                      # tokens of 512 and of 4,096 bytes
    'train/53_trained.ipynb': '3,400 190 216 97.1 95.3 95.1',   # sizes of an environment; earlier forms of the chapter, on other files
}

@pytest.mark.parametrize('page', PAGES)
def test_figures_are_shown_or_asserted(page):
    "Otherwise put an assertion beside the text, or, if nothing was measured, the number into `GIVEN`."
    have = shown(PAGES[page])
    given = GIVEN.get(page, '').split()
    assert [(i, figure) for i,figure in told(PAGES[page]) if not agrees(figure, have) and figure not in given]==[]

@pytest.mark.parametrize('reads, loose', [("measured('cpu.csv')", ['1,204', '41', '2.9']), ('', ['41', '2.9'])])
def test_a_figure_that_nothing_holds_is_found(reads, loose):
    page = [dict(cell_type='markdown', source=['It takes 3.7 times as long, 1,204 ms, on 2 of 16 threads (2024, [chapter 33](33.ipynb)).']),
            dict(cell_type='code', source=[f'#| fig-alt: "Bars of 41 and 52 ms."\nassert round(x, 2)==3.68 and n==16 {reads}'], outputs=[dict(text=['1,203 and 52'])]),
            dict(cell_type='markdown', source=['It was 2.9 before (arXiv 1905.07799, `4.4`, $5.5$).'])]
    have = shown(page)
    assert [figure for _,figure in told(page) if not agrees(figure, have)]==loose

@pytest.mark.parametrize('page', PAGES)
def test_a_caption_has_a_picture(page):
    "What a caption or an alt text describes is stored beside it, where both can be compared."
    captioned = [(i, cell) for i,cell in enumerate(PAGES[page]) if re.search(r'(?m)^#\| fig-(?:alt|cap):', ''.join(cell['source']))]
    bare = [i for i,cell in captioned if not any('image/png' in o.get('data', {}) for o in cell['outputs'])]
    assert not bare, f'no picture is stored in the cells {bare}: python tests/outputs.py --store nbs/{page}'

def test_what_is_given_is_told():
    "No number stays in `GIVEN` when its sentence has gone, or when the page shows it"
    for page,numbers in GIVEN.items():
        have,said = shown(PAGES[page]),{figure for _,figure in told(PAGES[page])}
        assert [x for x in numbers.split() if x not in said or agrees(x, have)]==[], page

def lost_rows():
    "file -> (rows whose commit is gone, all rows, those commits), as the README of the results says"
    text = (RESULTS/'README.md').read_text(encoding='utf-8').partition('not in this history')[2]
    for name,lost,of,commits in re.findall(r'^\| `([\w.]+)` \| (\d+) \| (\d+) \| (.*) \|$', text, re.M):
        yield name,int(lost),int(of),re.findall(r'`(\w+)`', commits)

def rows_of(name):
    with (RESULTS/name).open(newline='', encoding='utf-8') as f: return list(csv.DictReader(f))

@pytest.mark.parametrize('name, lost, of, commits', [*lost_rows()], ids=lambda x: x if isinstance(x, str) else '')
def test_rows_whose_code_is_gone_are_counted(name, lost, of, commits):
    rows = rows_of(name)
    assert (sum(r['commit'] in commits for r in rows), len(rows))==(lost, of)
    assert {r['commit'] for r in rows}>={*commits}

def test_rows_whose_code_is_gone_are_listed():
    "Where the history is at hand, as in a clone: every commit of a row is in it, or in the list."
    def git(*words):
        "What git says of this folder, not of one around it; nothing where there is no git."
        try: return subprocess.run(['git', '--git-dir', ROOT/'.git', *words], capture_output=True, text=True).stdout
        except OSError: return ''
    history = git('rev-list', 'HEAD').split()
    if len(history)<100 or git('rev-parse', '--is-shallow-repository').strip()!='false': return
    listed = {name: commits for name,_,_,commits in lost_rows()}
    for path in sorted(RESULTS.glob('*.csv')):
        commits = {r['commit'] for r in rows_of(path.name) if r.get('commit')}
        gone = {c for c in commits if not any(whole.startswith(c) for whole in history)}
        assert gone=={*listed.get(path.name, ())}, path.name

@pytest.mark.parametrize('has_git', [True, False])
def test_a_download_without_git_has_no_commit(tmp_path, has_git):
    "Unpacked inside another repository, rows named a commit of that one."
    around = tmp_path/'.git'
    for folder in ('objects', 'refs'): (around/folder).mkdir(parents=True)
    (around/'HEAD').write_text('1234567'+'0'*33+'\n', encoding='utf-8')
    shutil.copytree(ROOT/'benchmarks', tmp_path/'dynattn main/benchmarks', ignore=shutil.ignore_patterns('results', '__pycache__'))
    env = {**os.environ, **({} if has_git else {'PATH': str(tmp_path)})}
    said = subprocess.run([sys.executable, '-c', 'import harness; print([harness.commit()])'], cwd=tmp_path/'dynattn main/benchmarks',
                          env=env, capture_output=True, text=True)
    assert said.stdout.strip()=="['']", said
