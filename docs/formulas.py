"Formulas are drawn when the site is built: a page loads no MathJax, and the text does not move when they appear."
import html, json, re, subprocess
from importlib.metadata import files
from pathlib import Path
import playwright

FORMULA = re.compile(r'(<(span|div) class="math notranslate nohighlight"[^>]*>)'
                     r'(<span class="eqno">.*?</span>)?(.*?)(</\2>)', re.S)
MATHJAX = next(f for f in files('sphinx-mathjax-offline') if f.name=='node-main.js').locate().parent
DRIVER  = Path(playwright.__file__).parent/'driver'     # playwright brings a Node of its own

def inline(text):
    "A line of plain text with `code`, [links](https://...) and $formulas$ as HTML"
    text = re.sub(r'`([^`]+)`', r'<code>\1</code>', html.escape(text))
    text = re.sub(r'\[([^\]]+)\]\((https?://[^)\s]+)\)', r'<a href="\2">\1</a>', text)
    return re.sub(r'\$([^$]+)\$', r'<span class="math notranslate nohighlight">\\(\1\\)</span>', text)

def tex(text):
    r"The formula between `\(` and `\)` or between `\[` and `\]`, and whether it stands on a line of its own"
    text = html.unescape(text).strip()
    if text[:2] not in (r'\(', r'\['): raise ValueError(f'not a formula: {text}')
    return dict(tex=text[2:-2].strip(), display=text.startswith(r'\['))

def draw(formulas):
    "The pictures of each page's formulas, with the outlines of letters that they share, by one Node process"
    node = next(DRIVER.glob('node*'))
    command = [node, Path(__file__).with_suffix('.js'), MATHJAX]
    r = subprocess.run(command, input=json.dumps(formulas), capture_output=True, encoding='utf-8', timeout=900)
    if r.returncode: raise RuntimeError(f'MathJax: {r.stderr}')
    return json.loads(r.stdout)

def replace(page, drawn):
    "The page with its formulas drawn; each picture carries its source for readers who listen"
    sources,pictures = [tex(m[4]) for m in FORMULA.finditer(page)], iter(drawn['formulas'])
    for source,picture in zip(sources, drawn['formulas']):
        wrong = re.search('data-mjx-error="([^"]*)"', picture)
        if wrong: raise ValueError(f'{source["tex"]}: {html.unescape(wrong[1])}')
    def one(m):
        label = html.escape(tex(m[4])['tex'])
        return m[1] + (m[3] or '') + next(pictures).replace('role="img"', f'role="img" aria-label="{label}"', 1) + m[5]
    page = FORMULA.sub(one, page)
    glyphs = f'<svg class="nb-glyphs" aria-hidden="true">{drawn["glyphs"]}</svg>'
    return re.sub(r'(<body[^>]*>)', lambda m: m[1]+glyphs, page, count=1)

def draw_all(dest):
    "Draw every formula of the site in `dest`"
    pages = {p: p.read_text(encoding='utf-8') for p in Path(dest).rglob('*.html')}
    formulas = {str(p): [tex(m[4]) for m in FORMULA.finditer(t)] for p,t in pages.items()}
    drawn = draw({n: f for n,f in formulas.items() if f})
    for p,t in pages.items():
        if str(p) not in drawn: continue
        try: p.write_text(replace(t, drawn[str(p)]), encoding='utf-8')
        except ValueError as e: raise ValueError(f'{p.name}: {e}') from None
