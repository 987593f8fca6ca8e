"""The API on the site: an entry beneath the code of every public function and class, and one page that lists them all.

nbdev decides what has an entry, and fastcore's `docments` reads what stands behind each parameter in the source."""
import ast, enum, html, inspect, re
from dataclasses import dataclass, is_dataclass
from functools import cache, cached_property
from importlib import import_module
from itertools import groupby
from textwrap import dedent
from fastcore.docments import docments
import book
from formulas import inline
from myst import markdown

ROOT = book.cfg.config_path
EMPTY = inspect.Parameter.empty
STARS = {inspect.Parameter.VAR_POSITIONAL: '*', inspect.Parameter.VAR_KEYWORD: '**'}

@cache
def places():
    "(page, name) -> (module, file) of every symbol"
    from dynattn._modidx import d
    return {(url.partition('#')[0], name.removeprefix(module+'.')): (module, file)
            for module,names in d['syms'].items() for name,(url,file) in names.items()}

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

@cache
def definitions(file):
    "Every function and class at the top of a module, by name"
    tree = ast.parse((ROOT/file).read_text(encoding='utf-8'))
    return {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}

def first_line(node):
    "The first paragraph of a docstring as one line"
    return (ast.get_docstring(node) or '').split('\n\n')[0].replace('\n', ' ')

# The parameters

def is_record(cls): return is_dataclass(cls) or hasattr(cls, '_fields')

def field_comments(cls):
    "What stands behind each field of a dataclass or named tuple"
    source = dedent(inspect.getsource(cls))
    lines = source.splitlines()
    fields = [n for n in ast.parse(source).body[0].body if isinstance(n, ast.AnnAssign)]
    behind = {n.target.id: lines[n.end_lineno-1].encode()[n.end_col_offset:].decode() for n in fields}
    return {name: text.partition('# ')[2] for name,text in behind.items() if '# ' in text}

def mend(said, function):
    """What `docments` reads, for all parameters of a line that has one comment, positional-only ones included. What
    stands behind a `def` of one line is about the result."""
    source = dedent(inspect.getsource(function))
    lines,node = source.splitlines(),ast.parse(source).body[0]
    args = node.args
    plain = args.posonlyargs+args.args
    defaults = [None]*(len(plain)-len(args.defaults))+args.defaults
    pairs = [*zip(plain, defaults), *zip(args.kwonlyargs, args.kw_defaults)]
    pairs += [(arg, None) for arg in (args.vararg, args.kwarg) if arg]
    at = {arg.arg: (default or arg).end_lineno for arg,default in pairs}
    if at and max(at.values())==node.lineno and not node.returns:
        return {'return': next((text for text in said.values() if text), '')}
    behind = {at[name]: text for name,text in said.items() if text and name in at}
    behind |= {at[arg.arg]: lines[at[arg.arg]-1].partition('# ')[2] for arg in args.posonlyargs}
    return said | {name: behind.get(line) for name,line in at.items() if not said.get(name)}

@cache
def comments(found):
    "What stands behind each parameter of a function or class, and behind the result (`return`)"
    if not inspect.isclass(found):
        record = getattr(found, '__delwrap__', None)        # a function of a `Call` has its arguments
        function = inspect.unwrap(found)
        own = mend(docments(function, args_kwargs=True), function)
        own = {name: text for name,text in own.items() if text}
        return {**(comments(record) if record else {}), **own}
    said = {}
    for cls in reversed(found.__mro__):
        if not cls.__module__.startswith('dynattn'): continue
        if is_record(cls): said |= field_comments(cls)
        else:
            for made in ('__new__', '__init__'):
                if made in vars(cls): said |= comments(plain_function(vars(cls)[made]))
    said.pop('return', None)
    return said

def method_comments(cls, name):
    "What stands behind each parameter of a method; a base class explains what its own method shares with it"
    said = {}
    for base in reversed(cls.__mro__):
        method = plain_function(vars(base).get(name)) if base.__module__.startswith('dynattn') else None
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

@dataclass
class Parameter:
    name:str    # with the stars of `*args` and `**options`
    type:str
    default:str # '' where there is none
    meaning:str # the comment behind it

@dataclass
class Described:
    parameters:list
    returns:str # the type of the result
    result:str  # the comment behind it

def describe(found, said=None):
    """Parameters and result of a function or class; None where Python has no signature of it. `said` is what `comments`
    or `method_comments` found."""
    if inspect.isclass(found) and issubclass(found, enum.Enum): return # names, not arguments
    try: signature = inspect.signature(found)
    except (ValueError, TypeError): return
    said = comments(found) if said is None else said
    shown = [p for p in signature.parameters.values() if p.name not in ('self', 'cls')]
    rows = [Parameter(name=STARS.get(p.kind, '')+p.name, type=type_text(p.annotation), default=default_text(p.default),
                      meaning=said.get(p.name) or '') for p in shown]
    if not any(r.meaning for r in rows): rows = [r for r in rows if not r.name.startswith('*')]
    returns = '' if inspect.isclass(found) else type_text(signature.return_annotation)
    return Described(rows, returns, said.get('return', ''))

def call_text(found, name):
    "A call with its defaults and without types"
    plain = []
    for p in inspect.signature(found).parameters.values():
        if p.name in ('self', 'cls'): continue
        if p.kind is p.KEYWORD_ONLY and not any(word.startswith('*') for word in plain): plain.append('*')
        default = '' if p.default is EMPTY else f'={default_text(p.default)}'
        plain.append(STARS.get(p.kind, '')+p.name+default)
    return f"{name}({', '.join(plain)})"

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

def alike(r): return r.type, r.default, r.meaning

def table(described):
    "Parameters and result as a table; neighbours that say the same share a row"
    def row(r, kind='', names=()):
        shown = ', '.join(f'<code>{html.escape(name)}</code>' for name in names or [r.name])
        cells = (shown, r.type and f'<code>{html.escape(r.type)}</code>',
                 r.default and f'<code>{html.escape(r.default)}</code>', inline(r.meaning))
        return f'<tr{kind}>' + ''.join(f'<td>{c}</td>' for c in cells) + '</tr>'
    groups = [list(same) for _,same in groupby(described.parameters, alike)]
    rows = [row(same[0], names=[r.name for r in same]) for same in groups]
    if described.returns:
        result = Parameter('returns', described.returns, '', described.result)
        rows.append(row(result, ' class="nb-returns"').replace('<code>returns</code>', '<em>returns</em>'))
    head = '<thead><tr><th>Parameter</th><th>Type</th><th>Default</th><th>Meaning</th></tr></thead>'
    return f'<table class="docutils nb-params">{head}<tbody>{"".join(rows)}</tbody></table>'

def raises(found, node):
    "A line that names the errors"
    said = [f'<code>{kind}</code> ({inline(text)})' for kind,text in refusals(node)] if node else []
    if hasattr(found, '__delwrap__'):
        said.insert(0, '<code>TypeError</code> and <code>ValueError</code> for an argument that is not as described')
    return f'<p class="nb-raises">Raises {"; ".join(said)}.</p>' if said else ''

def summary(described):
    names = [f'<code>{html.escape(r.name)}</code>' for r in described.parameters]
    more = f' and {len(names)-6} more' if len(names) > 6 else ''
    returns = f', returns <code>{html.escape(described.returns)}</code>' if described.returns else ''
    return f'Parameters {", ".join(names[:6])}{more}{returns}'

def methods(node, file):
    "Name, arguments and first line of docstring of the public methods of a class, a private base's counted as its own"
    if not isinstance(node, ast.ClassDef): return
    own = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
    for base in node.bases:
        name = ast.unparse(base)
        if name.startswith('_'): yield from (m for m in methods(definitions(file).get(name), file) if m[0] not in own)
    for f in node.body:
        if not isinstance(f, ast.FunctionDef) or f.name.startswith('_'): continue
        decorators = {ast.unparse(d) for d in f.decorator_list}
        arguments = re.sub(r'^(self|cls)(, )?', '', ast.unparse(f.args))
        yield f.name, '' if decorators & {'property','cached_property'} else f'({arguments})', first_line(f)

def method_table(cls, name):
    "The parameters of a method as a fold; '' where the class leaves them to its base"
    method = plain_function(inspect.getattr_static(cls, name))
    own = comments(method) if inspect.isfunction(method) else {}
    described = describe(method, method_comments(cls, name)) if own else None
    if not described or not any(r.name.lstrip('*') in own for r in described.parameters): return ''
    return f'<details class="nb-fold"><summary>Parameters of <code>{name}</code></summary>{table(described)}</details>'

def method_list(cls, node, file, name, shown):
    "The methods that have no entry of their own, with their parameters where the source explains them"
    rows = []
    for method,arguments,line in methods(node, file):
        if f'{name}.{method}' in shown: continue
        call = f'<code>.{method}<span>{html.escape(arguments)}</span></code>'
        rows.append(f'<dt id="api-{name.lower()}.{method.lower()}">{call}</dt>')
        body = (inline(line) if line else '')+method_table(cls, method)
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
    module,file = places()[page, name]
    found = symbol(module, name)
    node,described = definitions(file).get(name),describe(found)
    explained = described and any(r.meaning for r in described.parameters) or described and described.result
    parts = []
    if explained: parts.append(table(described))
    if errors := raises(found, node): parts.append(errors)
    example = f'<a href="#use-{anchor}">where this page uses it</a>'
    if name in used: parts.append(f'<p class="nb-raises">Example: {example}.</p>')
    body = ''.join(parts)
    if name in sourced and explained:
        opening = f'<details class="nb-fold" data-of="api-{anchor}"><summary>{summary(described)}</summary>'
        body = f'{opening}{body}</details>'
    elif name in sourced: body = ''
    else:
        call = f'<p class="nb-call"><code>{html.escape(call_text(found, name))}</code></p>' if described else ''
        docstring = re.sub('```.*?```', '', rest, count=1, flags=re.S) if found.__doc__ else ''
        body = f'{call}\n\n{markdown(docstring.strip(), up)}\n\n{body}'
    listed = method_list(found, node, file, name, shown) if node else ''
    kind = 'nb-api nb-brief' if name in sourced and not listed else 'nb-api'
    fence,escaped = ':'*14,name.replace('_', r'\_')
    source = markdown(link or '', up)
    inside = '\n\n'.join(part for part in (source, body, listed) if part)
    # the anchor stands before the heading, because a section of the page may have the symbol's name
    box = f'\n\n{fence}{{container}} {kind}\n{inside}\n{fence}' if inside else ''
    return f'<span id="api-{anchor}"></span>\n\n{level} {escaped}{box}'

def sources_shown(nb):
    "Names of the functions and classes whose source the page shows; `@patch`ed ones as `Class.name`"
    for c in nb.cells:
        s = ''.join(c.get('source',''))
        if c.cell_type!='code' or re.search(r'^#\|\s*(echo|include):\s*false', s, re.M): continue
        for name,cls in re.findall(r'^(?:def|class) (\w+)(?:\(self:(\w+))?', s, re.M):
            yield f'{cls}.{name}' if cls else name

def source_line(output):
    "The line of the source that an entry links to, by which entries are sorted"
    return int(([0] + re.findall(r'#L(\d+)\)', ''.join(output['data']['text/markdown'])[:400]))[-1])

# The page of all entries

def entries(src):
    "Module, name, place and first line of every public function and class that has an entry on a page"
    from dynattn._modidx import d
    texts = {p.relative_to(src).with_suffix('').as_posix(): p.read_text(encoding='utf-8') for p in src.rglob('*.ipynb')}
    found = {page: set(re.findall(r'<span id=\\?"api-([^"\\]+)', text)) for page,text in texts.items()}
    for module,names in d['syms'].items():
        for name,(url,file) in sorted(names.items()):
            page,_,anchor = url.partition('#')
            short = name.removeprefix(module+'.')
            has_entry = anchor in found.get(page.removesuffix('.html'), ())
            if '.' in short or short.startswith('_') or not has_entry: continue
            node = definitions(file).get(short)
            yield module, short, f'{page}#api-{anchor}', first_line(node) if node else ''

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
    texts = {p: p.read_text(encoding='utf-8') for p in src.rglob('*.ipynb')}
    found = {p.relative_to(src).with_suffix('').as_posix(): set(re.findall(r'id=\\?"api-([^"\\]+)', t)) for p,t in texts.items()}
    def settled(m): return m[0] if m[3] in found.get(m[2], ()) else f'{m[1]}{m[2]}.html'
    for p,t in texts.items():
        p.write_text(re.sub(r'((?:\.{1,2}/)*)([\w./]+)\.html#api-([\w.]+)', settled, t), encoding='utf-8')
