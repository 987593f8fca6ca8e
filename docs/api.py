"""The API on the site: an entry beneath the code of every public function and class, and one page that lists them all.

nbdev decides what has an entry. What stands behind the line of a parameter in the source explains it, as for fastcore's
`docments`, which knows one parameter a line."""
import ast, enum, html, inspect, re
from collections import namedtuple
from dataclasses import is_dataclass
from functools import cache, cached_property
from importlib import import_module
from itertools import groupby
from textwrap import dedent
import book, fold
from formulas import inline
from myst import markdown

EMPTY = inspect.Parameter.empty
STARS = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}

@cache
def symbols():
    "(module, name, page, anchor) of everything that nbdev's index has"
    from dynattn._modidx import d
    return [(module, name.removeprefix(module+'.'), *url.split('#'))
            for module,names in d['syms'].items() for name,(url,_) in sorted(names.items())]

@cache
def places():
    "(page, name) -> module"
    return {(page, name): module for module,name,page,_ in symbols()}

def symbol(module, name):
    "The object itself; of a kernel or an operator the Python function"
    found = import_module(module)
    for part in name.split('.'): found = getattr(found, part)
    if isinstance(found, (property,cached_property)): found = plain_function(found)
    return getattr(found, 'fn', getattr(found, '_init_fn', found))

def plain_function(method):
    "The function of a property, class method, static method or operator"
    if isinstance(method, property): method = method.fget
    elif isinstance(method, cached_property): method = method.func
    return getattr(method, '__func__', method)

def parse(found):
    "The definition of a function or class, and the lines of its source"
    source = dedent(inspect.getsource(found))
    return ast.parse(source).body[0], source.splitlines()

def first_line(found):
    "The first paragraph of a docstring as one line"
    return inspect.cleandoc(found.__doc__ or '').split('\n\n')[0].replace('\n', ' ')

# The parameters

def is_record(cls): return is_dataclass(cls) or hasattr(cls, '_fields')

def ours(cls): return [base for base in reversed(cls.__mro__) if base.__module__.startswith('dynattn')]

def comment(lines, number):
    "What stands behind a line, or alone on the line above it"
    above = lines[number-2].strip() if number>1 else ''
    return lines[number-1].partition('# ')[2] or (above[2:] if above.startswith('# ') else '')

def field_comments(cls):
    "What stands behind each field of a dataclass or named tuple"
    node,lines = parse(cls)
    fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return {n.target.id: text for n in fields if (text := comment(lines, n.end_lineno))}

@cache
def comments(found):
    """What stands behind the line of each parameter of a function or class, and behind the result (`return`), to which
    a `def` of one line belongs."""
    if not inspect.isclass(found):
        record = getattr(found, '__delwrap__', None)        # a function of a `Call` has its arguments
        node,lines = parse(inspect.unwrap(found))
        at = {a.arg: a.end_lineno for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        if node.returns or {*at.values()} <= {node.lineno}:
            result = node.returns.end_lineno if node.returns else node.lineno
            at = {name: line for name,line in at.items() if line!=result} | {'return': result}
        own = {name: text for name,line in at.items() if (text := comment(lines, line))}
        return (comments(record) if record else {}) | own
    said = {}
    for cls in ours(found): said |= field_comments(cls) if is_record(cls) else method_comments(cls, '__new__', '__init__')
    said.pop('return', None)
    return said

def method_comments(cls, *names):
    "What stands behind each parameter of a method; a base class explains what its own method shares with it"
    said = {}
    for base in ours(cls):
        for method in (plain_function(vars(base).get(name)) for name in names):
            if inspect.isfunction(method): said |= comments(method)
    return said

def type_text(annotation):
    "An annotation without the modules of its names"
    if annotation in (EMPTY, None): return ''
    text = inspect.formatannotation(annotation).strip("'")
    return re.sub(r'\b(?:[a-z_]\w*\.)+(?=\w)', '', text)

def default_text(default):
    if default is EMPTY: return ''
    if inspect.isroutine(default) or inspect.isclass(default): return default.__name__
    return f'{default:.3g}' if isinstance(default, float) else re.sub(' at 0x[0-9a-f]+', '', repr(default))

Parameter = namedtuple('Parameter', 'name type default meaning')       # the result has no name

def describe(found, said=None):
    """Parameters and result of a function or class; None where Python has no signature of it. `said` is what `comments`
    or `method_comments` found."""
    if inspect.isclass(found) and issubclass(found, enum.Enum): return # names, not arguments
    try: signature = inspect.signature(found)
    except (ValueError, TypeError): return
    said = comments(found) if said is None else said
    rows = [Parameter(STARS.get(p.kind, '')+p.name, type_text(p.annotation), default_text(p.default), said.get(p.name, ''))
            for p in signature.parameters.values() if p.name not in ('self', 'cls')]
    if not any(r.meaning for r in rows): rows = [r for r in rows if not r.name.startswith('*')]
    result = Parameter('', '' if inspect.isclass(found) else type_text(signature.return_annotation), '', said.get('return', ''))
    return rows + [result]*bool(result.type or result.meaning)

class Shown(str): __repr__ = str.__str__

def call_text(found, name):
    "A call with its defaults and without types"
    signature = inspect.signature(found)
    plain = [p.replace(annotation=EMPTY, default=EMPTY if p.default is EMPTY else Shown(default_text(p.default)))
             for p in signature.parameters.values() if p.name not in ('self', 'cls')]
    return f'{name}{signature.replace(parameters=plain, return_annotation=EMPTY)}'

def refusals(node):
    "The errors that a function raises itself, as (type, what was expected), each once; of a class when it is made"
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name in ('__init__', '__post_init__')]
        return [r for n in made for r in refusals(n)]
    found = {}
    for n in ast.walk(node):
        match n:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=kind),
                                        args=[ast.JoinedStr() | ast.Constant(value=str()) as message, *_])):
                text = re.sub(r'=\{[^}]*\}', '', ast.unparse(message).lstrip('f')[1:-1])      # `H={h}` is H
                expected = re.match(r'[\w.]+: expected .+?(?=, got\b|, which\b|$)', text)
                if expected and '{' not in expected[0]: found[kind, expected[0]] = None
    return list(found)

def whole_name(page, method):
    "`Class.method` of a patched method under another decorator, which nbdev names and links by its last part alone"
    found = [name for where,name in places() if where==page and name.endswith('.'+method)]
    if len(found)!=1: raise ValueError(f'{page}: expected one method {method}, got {found}')
    return found[0]

# An entry

def table(rows):
    "Parameters and result as a table; neighbours that say the same share a row"
    def code(text): return text and f'<code>{html.escape(text)}</code>'
    lines = []
    for same in [list(group) for _,group in groupby(rows, lambda r: (not r.name, *r[1:]))]:
        r,names = same[0],', '.join(code(r.name) for r in same)
        cells = names or '<em>returns</em>', code(r.type), code(r.default), inline(r.meaning)
        kind = '' if names else ' class="nb-returns"'
        lines.append(f'<tr{kind}>' + ''.join(f'<td>{c}</td>' for c in cells) + '</tr>')
    head = '<thead><tr><th>Parameter</th><th>Type</th><th>Default</th><th>Meaning</th></tr></thead>'
    return f'<table class="docutils nb-params">{head}<tbody>{"".join(lines)}</tbody></table>'

def raises(found, node):
    "A line that names the errors"
    said = [f'<code>{kind}</code> ({inline(text)})' for kind,text in refusals(node)]
    if hasattr(found, '__delwrap__'):
        said.insert(0, '<code>TypeError</code> and <code>ValueError</code> for an argument that is not as described')
    return f'<p class="nb-raises">Raises {"; ".join(said)}.</p>' if said else ''

def summary(rows):
    names = [f'<code>{html.escape(r.name)}</code>' for r in rows if r.name]
    more = f' and {len(names)-6} more' if len(names) > 6 else ''
    returns = ''.join(f', returns <code>{html.escape(r.type)}</code>' for r in rows if not r.name)
    return f'Parameters {", ".join(names[:6])}{more}{returns}'

def methods(cls):
    "Name, arguments and first line of docstring of the public methods of a class, a private base's counted as its own"
    body = [f for f in parse(cls)[0].body if isinstance(f, ast.FunctionDef)]
    for base in cls.__bases__:
        if base.__name__.startswith('_') and base.__module__==cls.__module__:
            yield from (m for m in methods(base) if m[0] not in {f.name for f in body})
    for f in body:
        if f.name.startswith('_'): continue
        decorators = {ast.unparse(d) for d in f.decorator_list}
        arguments = re.sub(r'^(self|cls)(, )?', '', ast.unparse(f.args))
        shown = '' if decorators & {'property','cached_property'} else f'({arguments})'
        yield f.name, shown, first_line(inspect.getattr_static(cls, f.name))

def method_table(cls, name):
    "The parameters of a method as a fold; '' where the class leaves them to its base"
    method = plain_function(inspect.getattr_static(cls, name))
    own = comments(method) if inspect.isfunction(method) else {}
    rows = describe(method, method_comments(cls, name)) if own else None
    if not rows or not any(r.name.lstrip('*') in own for r in rows): return ''
    return f'<details class="nb-fold"><summary>Parameters of <code>{name}</code></summary>{table(rows)}</details>'

def method_list(cls, name, shown):
    "The methods that have no entry of their own, with their parameters where the source explains them"
    rows = []
    for method,arguments,line in methods(cls):
        if f'{name}.{method}' in shown: continue
        call = f'<code>.{method}<span>{html.escape(arguments)}</span></code>'
        rows.append(f'<dt id="api-{name.lower()}.{method.lower()}">{call}</dt>')
        body = inline(line)+method_table(cls, method)
        if body: rows.append(f'<dd>{body}</dd>')
    return f'<dl class="nb-methods">{"".join(rows)}</dl>' if rows else ''

def entry(output, page, up, shown, sourced, used):
    """What stands for a `show_doc` output: a heading with the anchor of nbdev's index; beneath it call, docstring,
    parameters and methods. Where the page shows the source (`sourced`), call and docstring are in it, and the table
    folds.
    `shown` are all entries of the page, `used` those that the page uses."""
    text = ''.join(output['data']['text/markdown'])
    link,level,name,rest = re.match(r'---\n+(\[source\]\S+\{[^}]*\}\s*)?(#+) (\S+)\s*(.*)', text, re.S).groups()
    name = name.replace('\\_', '_')
    if any(part.startswith('_') for part in name.split('.')): return ''     # nbdev shows methods patched into private classes
    if (page, name) not in places(): link,name = '',whole_name(page, name)
    anchor = name.lower()
    found = symbol(places()[page, name], name)
    described = describe(found)
    explained = described and any(r.meaning for r in described)
    parts = []
    if explained: parts.append(table(described))
    if errors := raises(found, parse(found)[0]): parts.append(errors)
    example = f'<a href="#use-{anchor}">where this page uses it</a>'
    if name in used: parts.append(f'<p class="nb-raises">Example: {example}.</p>')
    body = ''.join(parts)
    if name in sourced and explained:
        opening = f'<details class="nb-fold" data-of="api-{anchor}"><summary>{summary(described)}</summary>'
        body = f'{opening}{body}</details>'
    elif name in sourced: body = ''
    else:
        call = f'<p class="nb-call"><code>{html.escape(call_text(found, name))}</code></p>' if described is not None else ''
        docstring = re.sub('```.*?```', '', rest, count=1, flags=re.S) if found.__doc__ else ''
        body = f'{call}\n\n{markdown(docstring.strip(), up)}\n\n{body}'
    listed = method_list(found, name, shown) if inspect.isclass(found) else ''
    kind = 'nb-api nb-brief' if name in sourced and not listed else 'nb-api'
    fence,escaped = ':'*14,name.replace('_', r'\_')
    source = markdown(link or '', up)
    inside = '\n\n'.join(part for part in (source, body, listed) if part)
    # the anchor stands before the heading, because a section of the page may have the symbol's name
    box = f'\n\n{fence}{{container}} {kind}\n{inside}\n{fence}' if inside else ''
    return f'<span id="api-{anchor}"></span>\n\n{level} {escaped}{box}'

def sources_shown(nb):
    "Names of the functions and classes whose source the page shows"
    for c in nb.cells:
        s = ''.join(c.get('source',''))
        if c.cell_type=='code' and not re.search(r'^#\|\s*(echo|include):\s*false', s, re.M): yield from fold.defined(s)

def source_line(output):
    "The line of the source that an entry links to, by which entries are sorted"
    return int(([0] + re.findall(r'#L(\d+)\)', ''.join(output['data']['text/markdown'])[:400]))[-1])

# The page of all entries

def anchors(src):
    "The entries of each page"
    return {p.relative_to(src).with_suffix('').as_posix(): {*re.findall(r'id=\\?"api-([^"\\]+)', p.read_text(encoding='utf-8'))}
            for p in src.rglob('*.ipynb')}

def entries(src):
    "Module, name, place and first line of every public function and class that has an entry on a page"
    found = anchors(src)
    for module,name,page,anchor in symbols():
        if '.' in name or name.startswith('_') or anchor not in found.get(page.removesuffix('.html'), ()): continue
        yield module, name, f'{page}#api-{anchor}', first_line(symbol(module, name))

def write_page(src):
    "The names that `import dynattn` brings, then those of every module in the order of the chapters"
    import dynattn
    def listed(found):
        links = ((f'<a class="nb-sym" href="{place}"><code>{name}</code></a>', line) for _,name,place,line in found)
        rows = ''.join(f'<tr><td>{link}</td><td>{inline(line)}</td></tr>' for link,line in links)
        table = f'<table class="docutils nb-index"><tbody>{rows}</tbody></table>'
        return [f'<div class="table-wrapper">{table}</div>', '']
    pages = {c.page: c for c in book.chapters()}
    found = sorted(entries(src), key=lambda e: list(pages).index(e[2].partition('#')[0]))
    top = [e for e in found if getattr(getattr(dynattn, e[1], None), '__module__', None)==e[0]]
    out = ['# API', '', '<p class="nb-line">Every public function and class, by module, with its chapter.</p>', '',
           '## dynattn', '', 'What most programs need, at the top of the package:', '', *listed(top)]
    for page,c in pages.items():
        mine = [e for e in found if e[2].partition('#')[0]==page]
        chapter = f'<p>Chapter <a href="{page}">{c.number} {html.escape(c.title)}</a></p>'
        if mine: out += [f'## {mine[0][0]}', '', chapter, '', *listed(mine)]
    (src/'api.md').write_text('\n'.join(out), encoding='utf-8')

def settle_links(src):
    "A link to a symbol that has no entry on its page leads to the page"
    found = anchors(src)
    def settled(m): return m[0] if m[3] in found.get(m[2], ()) else f'{m[1]}{m[2]}.html'
    for p in src.rglob('*.ipynb'):
        text = p.read_text(encoding='utf-8')
        p.write_text(re.sub(r'((?:\.{1,2}/)*)([\w./]+)\.html#api-([\w.]+)', settled, text), encoding='utf-8')
