"""What the book is: its chapters in order, its parts, how long each notebook takes, and the copies for readers.

`chapters()` is the one list that the sidebar (Sphinx's and Quarto's) and the tests go by."""
import json, re
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
PARTS = {           # and the names of their notebooks
    'Guide': r'\d{3}_', 'The idea': r'(0[1-9]|1\d|2[1-3])_', 'The engine room': r'(2[4-9]|3\d|4[0-6])_',
    'Models and tools': r'(4[7-9]|[56]\d|81)_', 'Evidence': '(80|90)_', 'The survey': r'(20|7\d)_',
    'Appendix': '(00|9[1-9])_'}

@dataclass
class Chapter:
    path:Path # of the notebook, from nbs/
    title:str # the first heading
    line:str  # the `>` line beneath
    @property
    def number(self): return number(self.path)
    @property
    def part(self): return next(name for name,numbers in PARTS.items() if re.match(numbers, self.path.name))
    @property
    def page(self): return out_name(self.path).with_suffix('.html').as_posix()

def number(p): return m[1] if (m := re.match(r'(\d\d)_', p.name)) else ''       # the guide's pages have none

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
    return sorted(found, key=lambda c: ([*PARTS].index(c.part), c.path.as_posix()))

def parts():
    "The caption of each part that has chapters, with them"
    cs = chapters()
    return {v: [c for c in cs if c.part==v] for v in PARTS if any(c.part==v for c in cs)}

# What is written out of it, and committed

def sidebar():
    "Quarto's sidebar.yml"
    out = ['# Written by docs/build_site.py', 'website:', '  sidebar:', '    contents:', '      - index.ipynb']
    for name,cs in parts().items():
        out += [f'      - section: "{name}"', '        contents:', *(f'          - {c.path.as_posix()}' for c in cs)]
    return '\n'.join(out) + '\n'

def generated(): return {NBS/'sidebar.yml': sidebar()}

# What a page offers

def times(): return json.loads(TIMES.read_text()) if TIMES.exists() else {}

def duration(p):
    "How long a notebook takes, in words; None when nobody has measured it"
    s = times().get('seconds', {}).get(Path(p).as_posix())
    return None if s is None else f'{s:.0f} s' if s>=1 else 'under a second'

INSTALL = f'''# Colab has torch; this brings the rest, and the figures that chapters read. Elsewhere it does nothing.
import sys
if 'google.colab' in sys.modules:
    get_ipython().system('git clone -q --depth 1 {REPO} /content/dynattn')
    get_ipython().run_line_magic('pip', "install -q '/content/dynattn[viz,train,narrow,oracles]'MORE")
    get_ipython().run_line_magic('cd', '/content/dynattn/nbs')'''
NAMES = {'scikit-learn': 'sklearn'}   # what a package is imported as, where the name does not say it

def taken(p):
    plumbing = re.compile(r'nbdev_export\(|^#\|\s*default_exp', re.M)
    return [c for c in read(p)['cells'] if not plumbing.search(source(c))]

def more(p):
    "Packages for the tests that the notebook imports, and that no extra of the install cell brings"
    imported = {m for c in taken(p) if c['cell_type']=='code'
                for m in re.findall(r'^\s*(?:from|import) +(\w+)', source(c), re.M)}
    brought = ' '.join(cfg[f'{extra}requirements'] for extra in ('', 'viz_', 'train_', 'narrow_', 'oracles_'))
    names = [re.split('[<>=;]', w)[0] for w in cfg.test_requirements.split()]
    return [n for n in names if n not in brought and NAMES.get(n, n.replace('-', '_')) in imported]

def install(p): return INSTALL.replace('MORE', ''.join(f' {n}' for n in more(p)))

def handout(p):
    "The notebook to take away: without nbdev's own cells, and with one in front that installs the package on Colab"
    nb = read(p)
    nb['cells'] = taken(p)
    nb['cells'].insert(1, dict(cell_type='code', execution_count=None, id='install', metadata={}, outputs=[],
                               source=install(p).splitlines(keepends=True)))
    return json.dumps(nb, indent=1, sort_keys=True, ensure_ascii=False) + '\n'

def write_handouts(dest):
    for c in [*chapters(), Chapter(Path('index.ipynb'), '', '')]:
        copy = Path(dest)/c.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(handout(c.path), encoding='utf-8')

def colab(p): return f"https://colab.research.google.com/github/{cfg.user}/{cfg.repo}/blob/gh-pages/notebooks/{p}"
