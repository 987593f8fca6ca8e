"Quarto's markdown, as far as the notebooks use it, turned into MyST, which Sphinx reads."
import re
from pathlib import Path
from book import BASE, out_name

FENCE = re.compile(r'\s*(`{3,}|~{3,})')

def attr(s, name, default=None):
    m = re.search(rf'\b{name}="([^"]*)"', s) or re.search(rf'\b{name}=(\S+)', s)
    return m[1] if m else default

def inline(l, up, resolve):
    "References, equation labels and links of one line; `up` is the relative way to the site's root"
    l = re.sub(r'\$\$\s*\{#(eq-[\w-]+)\}', r'$$ (\1)', l)
    l = re.sub(r'(?<![\w`])@(eq-[\w-]+)', r'{eq}`\1`', l)
    named = dict(fig='the figure', tbl='the table')
    l = re.sub(r'(?<![\w`])@(fig|tbl)-([\w-]+)', lambda m: f'[{named[m[1]]}](#{m[1]}-{m[2]})', l)
    l = re.sub(r'(?<![\w`])@(sec-[\w-]+)', r'{ref}`\1`', l)
    l = re.sub(r'\{target=[^}]*\}', '{.nb-source}', l)
    # a private name has no place on the site
    l = re.sub(r'\[(`(?:[^`]*\.)?_[^`]+`)\]\(' + re.escape(BASE) + r'[^)]*\)', r'\1', l)
    def entry(m):
        place = resolve(m[1], m[2])
        if not place: return f'`{m[1]}`'
        place = f'{up}{place}'.replace('.html#', '.html#api-')
        return f'<a class="nb-sym" href="{place}"><code>{m[1]}</code></a>'
    l = re.sub(r'\[`([^`]+)`\]\(' + re.escape(BASE) + r'([^)]*)\)', entry, l)
    l = re.sub(r'\[([^\]]*)\]\(' + re.escape(BASE) + r'([^)]*)\)', rf'<a href="{up}\2">\1</a>', l)
    return re.sub(r'\]\(([^):]*\.ipynb)', lambda m: f']({out_name(Path(m[1])).as_posix()}', l)

def figure(l):
    "An image with attributes, alone on its line: a figure when it has a label, else a plain image of that width"
    m = re.fullmatch(r'\s*!\[([^\]]*)\]\(([^)\s]*)\)\{([^}]*)\}\s*', l)
    if not m: return
    cap,src,a = m.groups(); label = re.search(r'#(fig-[\w-]+)', a)
    kind = 'figure' if label else 'image'
    classes = ' '.join(re.findall(r'(?<!\S)\.([\w-]+)', a))
    opts = dict(name=label and label[1], alt=attr(a, 'fig-alt', cap), width=attr(a, 'width'), **{'class': classes})
    return [f'```{{{kind}}} {src}', *(f':{k}: {v}' for k,v in opts.items() if v), *(['', cap] if label else []), '```']

def caption(out, l):
    "A table's caption stands below it in Quarto, around it in MyST"
    m = re.match(r':\s+(.*?)\s*(?:\{#(tbl-[\w-]+)\})?\s*$', l)
    i = len(out)
    while i and isinstance(out[i-1], str) and not out[i-1].strip(): i -= 1
    if not m or not i or not str(out[i-1]).startswith('|'): return False
    while i and isinstance(out[i-1], str) and out[i-1].startswith('|'): i -= 1
    out.insert(i, f':::{{table}} {m[1]}\n' + (f':name: {m[2]}\n' if m[2] else '')); out.append(':::')
    return True

def markdown(src, up, resolve=lambda name, place: place):
    """Quarto flavoured markdown to MyST. `resolve` is given the name of a symbol and the place that nbdev links it to, and
    returns the place that is meant here; None: the word is no symbol."""
    out,fence = [],None
    for l in src.splitlines():
        if m := FENCE.match(l):
            if fence is None: fence = m[1]
            elif l.strip().startswith(fence): fence = None; out.append(l); continue
        if fence: out.append(l); continue
        if l.startswith(':::'): raise ValueError(f'a box is <div class="nb-box"> or <details>, which Jupyter shows too: {l}')
        elif m := re.match(r'(#+\s.*?)\s*\{#([\w.-]+)[^}]*\}\s*$', l): out += [f'({m[2]})=', inline(m[1], up, resolve)]
        elif l.startswith(': ') and caption(out, l): pass
        elif f := figure(l): out += f
        else: out.append(inline(l, up, resolve))
    return '\n'.join(map(str, out))
