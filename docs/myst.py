"Quarto's markdown, as far as the notebooks use it, turned into MyST, which Sphinx reads."
import re
from pathlib import Path
from book import BASE, out_name

FENCE = re.compile(r'\s*(`{3,}|~{3,})')
QUARTO = re.compile(r':::|: |!\[.*\)\{|.*\{#(eq|fig|tbl|sec)-|.*(?<![\w`])@(eq|fig|tbl|sec)-')     # boxes, captions, labels and references

SYMBOL = re.compile(r'\[`([^`]+)`\]\(' + re.escape(BASE) + r'([^)]*)\)')
NESTED = re.compile(r'\[((?:[^\[\]]|' + SYMBOL.pattern + r')*)\]\([^):]*\.ipynb[^)]*\)')

def one_link(m, resolve):
    """nbdev links a symbol inside the words of a link, too, and a link in a link is an empty one beside it. Where the words are
    symbols only, each leads to its entry; otherwise the words lead where they say."""
    if not SYMBOL.search(m[1]): return m[0]
    alone = not re.search(r'\w', SYMBOL.sub('', m[1])) and all(resolve(*x.groups()) for x in SYMBOL.finditer(m[1]))
    return m[1] if alone else m[0].replace(m[1], SYMBOL.sub(r'`\1`', m[1]), 1)

def inline(l, up, resolve):
    "Links of one line; `up` is the relative way to the site's root"
    l = re.sub(r'\{target=[^}]*\}', '{.nb-source}', l)
    # a private name has no place on the site
    l = re.sub(r'\[(`(?:[^`]*\.)?_[^`]+`)\]\(' + re.escape(BASE) + r'[^)]*\)', r'\1', l)
    l = NESTED.sub(lambda m: one_link(m, resolve), l)
    def entry(m):
        place = resolve(m[1], m[2])
        if not place: return f'`{m[1]}`'
        place = f'{up}{place}'.replace('.html#', '.html#api-')
        return f'<a class="nb-sym" href="{place}"><code>{m[1]}</code></a>'
    l = re.sub(r'\[`([^`]+)`\]\(' + re.escape(BASE) + r'([^)]*)\)', entry, l)
    l = re.sub(r'\[([^\]]*)\]\(' + re.escape(BASE) + r'([^)]*)\)', rf'<a href="{up}\2">\1</a>', l)
    return re.sub(r'\]\(([^):]*\.ipynb)', lambda m: f']({out_name(Path(m[1])).as_posix()}', l)

def markdown(src, up, resolve=lambda name, place: place):
    """Quarto flavoured markdown to MyST. `resolve` is given the name of a symbol and the place that nbdev links it to, and
    returns the place that is meant here; None: the word is no symbol."""
    out,fence = [],None
    for l in src.splitlines():
        if m := FENCE.match(l):
            if fence is None: fence = m[1]
            elif l.strip().startswith(fence): fence = None; out.append(l); continue
        if fence: out.append(l); continue
        if QUARTO.match(l): raise ValueError(f'expected plain Markdown, links and <div class="nb-box">, which Jupyter shows too: {l}')
        out.append(inline(l, up, resolve))
    return '\n'.join(out)
