"""Which code cells fold on the site, and the line that stands for each: checks, the code of figures, and long code of the
package that the text does not discuss.

A reader sees `✓` and a label, and opens it with a click. The label is the comment of one line that a cell begins with, else
how many assertions there are: nothing is claimed that nobody wrote for this cell. A cell that says `#| code-fold: false`
stays open, because there the check is the lesson."""
import ast, dis, re
from dataclasses import dataclass
from functools import cache
from types import CodeType

CHECK = re.compile(r'(assert|test)_\w+|(grad)+check|check_\w+|matches')
PLOT_CHAPTERS = ('00_plot.ipynb',)      # where the code of a figure is the subject

def options(s): return {k: v.strip('"\'') for k,v in re.findall(r'^#\|\s*([\w-]+)\s*:\s*(.*?)\s*$', s, re.M)}
def without_options(s): return re.sub(r'^#\|.*\n?', '', s, flags=re.M)

def tree(source):
    "The statements of a cell; none where it is not plain Python"
    try: return ast.parse(without_options(source)).body
    except SyntaxError: return []

def is_check(node):
    "Does this statement only test something?"
    match node:
        case ast.Assert(): return True
        case ast.Expr(ast.Call(func=f)): return bool(CHECK.fullmatch(ast.unparse(f).split('.')[-1]))
        case ast.With(items=items, body=body):
            return 'expect_fail' in ast.unparse(items[0]) or 'raises' in ast.unparse(items[0]) or has_check(body)
        case ast.For(body=body) | ast.If(body=body): return has_check(body)
    return False

def has_check(body): return any(map(is_check, body))

def globals_read(code):
    "Global names that a function's code reads, the functions inside it included"
    own = {i.argval for i in dis.get_instructions(code) if i.opname in ('LOAD_GLOBAL', 'LOAD_NAME')}
    return own.union(*(globals_read(c) for c in code.co_consts if isinstance(c, CodeType)))

@cache
def reads_and_binds(source):
    "Names that a cell reads before it gives them a meaning itself, and names that it gives one"
    try: code = compile(without_options(source), 'cell', 'exec')
    except SyntaxError: return set(), set()
    read,bound = set(),set()
    for i in dis.get_instructions(code):
        if i.opname in ('STORE_NAME', 'STORE_GLOBAL'): bound.add(i.argval)
        elif i.opname in ('LOAD_NAME', 'LOAD_GLOBAL'): read |= {i.argval}-bound
        elif isinstance(i.argval, CodeType): read |= globals_read(i.argval)-bound
    return read, bound

def needed(wanted, later):
    "Does one of the later cells read a name out of `wanted` before a cell gives it another meaning?"
    for cell in later:
        read,bound = reads_and_binds(cell)
        if wanted & read: return True
        wanted = wanted-bound
    return False

def only_checks(source, later):
    "Is the cell there for its checks alone: it ends in one, and no later cell needs what it computes on the way?"
    body = tree(source)
    if not body or not is_check(body[-1]): return False
    if any(isinstance(n, ast.ClassDef) for n in body): return False
    return not needed(reads_and_binds(source)[1], later)

# The line

def label(source):
    "The comment that a cell begins with, where it has one line; a longer one is about the code"
    m = re.match(r'# *([^\n]+)\n(?!#)', without_options(source).lstrip())
    return m[1].strip().rstrip('.:') if m else ''

def explanation(source):
    "The sentences on top of a solution, as one line of text, and the code below; a remark on the code is no sentence"
    m = re.match(r'((?:#(?!\|).*\n)+)\n*', source)
    text = ' '.join(line.lstrip('# ') for line in m[1].splitlines()) if m else ''
    return (text, source[m.end():]) if text.endswith(('.', ':')) else ('', source)

def assertions(nodes):
    "How many statements test something; one in a loop counts once"
    count = 0
    for node in nodes:
        inside = [x for name in ('body', 'orelse') for x in getattr(node, name, []) if isinstance(x, ast.stmt)]
        is_leaf = is_check(node) and not (isinstance(node, (ast.For, ast.If, ast.With)) and has_check(inside))
        count += is_leaf or assertions(inside)
    return count

def line(source):
    "What a folded check says"
    count = assertions(tree(source))
    return '✓ '+(label(source) or f'{count} assertion'+'s'*(count!=1))

@dataclass
class Fold:
    kind:str # 'check', 'figure' or 'code'
    line:str

def fold(source, later, drawn, printed, chapter=''):
    "How a cell folds; None where it stands open"
    opts = options(source)
    if 'code-fold' in opts:
        if opts['code-fold'] in ('false', 'show'): return
        return Fold('code', opts.get('code-summary', 'Show the code'))
    if drawn: return None if chapter in PLOT_CHAPTERS else Fold('figure', 'How it is drawn')
    if not printed and only_checks(source, later): return Fold('check', line(source))

# The package's code

OPEN = 12       # lines of an exported cell that stands open without being asked to

def defined(body):
    "What a cell defines, as a reader would name it; a method that is added with `@patch` with its class"
    for node in body:
        if isinstance(node, ast.ClassDef): yield f'class {node.name}'
        elif isinstance(node, ast.FunctionDef):
            first = node.args.args[:1]
            patched = any(ast.unparse(d).startswith('patch') for d in node.decorator_list) and first and first[0].annotation
            yield f'{ast.unparse(first[0].annotation)}.{node.name}' if patched else node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name): yield node.targets[0].id

def with_code(source):
    """An exported cell as one that the page shows: `#| export` hides the code in nbdev, `#| exports` shows it. Imports and
    what is longer than `OPEN` lines fold; `#| exports` in the notebook means that it stands open."""
    if not re.match(r'#\|\s*export\s*$', source.partition('\n')[0]): return source
    rest = source.partition('\n')[2]
    body,lines = tree(rest),len(without_options(rest).splitlines())
    names = list(dict.fromkeys(defined(body)))
    if body and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body): summary = 'Imports'
    elif lines<=OPEN or 'code-fold' in options(rest): summary = None
    else: summary = ', '.join(names[:4])+(' and more' if len(names)>4 else '')+f': {lines} lines'
    shut = f'#| code-fold: true\n#| code-summary: "{summary}"\n' if summary else ''
    return '#| exports\n'+shut+rest

# Figures

def caption(opts, number):
    "A figure's caption: `fig-cap`, else the alternative text, whose characters mean themselves"
    text = opts.get('fig-cap') or re.sub(r'([\\*_$<\[\]`{}])', r'\\\1', opts.get('fig-alt', ''))
    return f'**Figure {number}.** {text}'
