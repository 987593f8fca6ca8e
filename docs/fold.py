"""Which code cells fold on the site, and the line that stands for each: checks, the code of figures, and long code of the
package that the text does not discuss.

A reader sees `✓` and a label, and opens it with a click. The label is the comment of one line that a cell begins with, else
how many assertions there are: nothing is claimed that nobody wrote for this cell. A cell that says `#| code-fold: false`
stays open, because there the check is the lesson."""
import ast, dis, re
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
        case ast.With(items=[item, *_]): return any(word in ast.unparse(item) for word in ('expect_fail', 'raises'))
    return False

def checks(*nodes):
    "How many statements in them test something; one in a loop counts once"
    return sum(is_check(n) for node in nodes for n in ast.walk(node))

def globals_read(code):
    "Global names that the code of a function or class reads, the functions inside it included"
    own,bound = set(),set()
    for i in dis.get_instructions(code):
        if i.opname=='STORE_NAME': bound.add(i.argval)         # in the body of a class, which may read it below
        elif i.opname in ('LOAD_GLOBAL', 'LOAD_NAME'): own |= {i.argval}-bound
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
    if not body or not (is_check(body[-1]) or isinstance(body[-1], (ast.With, ast.For, ast.If)) and checks(body[-1])): return False
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

def line(source):
    "What a folded check says"
    count = checks(*tree(source))
    return '✓ '+(label(source) or f'{count} assertion'+'s'*(count!=1))

def fold(source, later, drawn, printed, chapter=''):
    "The line of a cell that folds; None where it stands open"
    opts = options(source)
    if 'code-fold' in opts:
        return None if opts['code-fold'] in ('false', 'show') else opts.get('code-summary', 'Show the code')
    if drawn: return None if chapter in PLOT_CHAPTERS else 'How it is drawn'
    if not printed and only_checks(source, later): return line(source)

# The parts of a chapter

SECOND = 'Two kinds of error'   # a second, optional lesson, which chapter 03 has
PARTS = 'Your turn', SECOND, 'In the library', 'From the sources', 'Solutions'     # headings of the second level, in this order
FOLDED = PARTS[2:]              # lessons and their exercise stand open

def part(source):
    "The part that a Markdown cell begins, or ''"
    m = re.fullmatch(r'## (.+)', source.strip().partition('\n')[0])
    return m[1] if m and m[1] in PARTS else ''

def parts(sources):
    "Of each cell (its kind, its text): the part that it belongs to; '' in the lesson, and in a chapter without parts"
    at = ''
    for kind,source in sources:
        if kind=='markdown': at = part(source) or at
        yield at

# The package's code

OPEN = 12       # lines of an exported cell that stands open without being asked to

def defined(source):
    "The functions and classes at the top of a cell; a method that is added with `@patch` as `Class.name`"
    return [f'{cls}.{name}' if cls else name for name,cls in re.findall(r'^(?:def|class) (\w+)(?:\(self:(\w+))?', source, re.M)]

def with_code(source, at=''):
    """An exported cell as one that the page shows: `#| export` hides the code in nbdev, `#| exports` shows it. Imports and
    what is longer than `OPEN` lines fold; `#| exports` in the notebook means that it stands open. In a part that folds
    (`at`) only imports do, because its reader came for the code."""
    if not re.match(r'#\|\s*export\s*$', source.partition('\n')[0]): return source
    rest = source.partition('\n')[2]
    body,lines = tree(rest),len(without_options(rest).splitlines())
    names = list(dict.fromkeys(defined(rest))) or ['Code']
    if body and all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in body): summary = 'Imports'
    elif lines<=OPEN or at in FOLDED or 'code-fold' in options(rest): summary = None
    else: summary = ', '.join(names[:4])+(' and more' if len(names)>4 else '')+f': {lines} lines'
    shut = f'#| code-fold: true\n#| code-summary: "{summary}"\n' if summary else ''
    return '#| exports\n'+shut+rest

# Figures

def caption(opts, number):
    "A figure's number, and what to conclude from it; what is drawn stands in the alternative text"
    return ' '.join(filter(None, (f'**Figure {number}.**', opts.get('fig-cap'))))

# A whole page

PACE = 240,30             # words and lines of code that are read in a minute
STUDIED = 120,10          # in a lesson, whose every line is followed

def folds(nb, chapter):
    "How each cell of a notebook folds (None: it stands open or is text) and whether it draws"
    sources = [''.join(c.get('source','')) for c in nb.cells]
    for i,(c,s) in enumerate(zip(nb.cells, sources)):
        drawn = any(k.startswith('image/') for o in c.get('outputs', []) for k in o.get('data', {}))
        later = [t for d,t in zip(nb.cells[i+1:], sources[i+1:]) if d.cell_type=='code']
        code = c.cell_type=='code'
        yield (fold(s, later, drawn, bool(c.get('outputs')), chapter) if code else None), drawn

def minutes(cells, folded, pace=PACE):
    "Time to read the text of some cells and the code that stands open"
    words = sum(len(''.join(c.source).split()) for c in cells if c.cell_type=='markdown')
    shown = [''.join(c.source) for c,f in zip(cells, folded) if c.cell_type=='code' and not f]
    shown = [s for s in shown if 'false' not in (options(s).get('echo'), options(s).get('include')) and not re.match(r'#\|\s*hide\b', s)]
    lines = sum(bool(line.strip()) for s in shown for line in without_options(s).splitlines())
    return max(1, round(words/pace[0] + lines/pace[1]))

def places(nb): return [*parts([(c.cell_type, ''.join(c.source)) for c in nb.cells])]

def of_parts(nb, folded):
    "part -> minutes to read it, with the lesson under ''; one entry for a chapter without parts"
    at = places(nb)
    def chosen(part): return [(c,f) for c,f,a in zip(nb.cells, folded, at) if a==part]
    def pace(part): return STUDIED if part in ('', 'Your turn') and 'In the library' in at else PACE
    return {part: minutes(*zip(*chosen(part)), pace(part)) for part in dict.fromkeys(at)}

def summaries(nb, folded):
    "What the folded parts of a chapter say while they are shut"
    at,read = places(nb),of_parts(nb, folded)
    found = {}
    for part in FOLDED:
        sources = [''.join(c.source) for c,a in zip(nb.cells, at) if a==part and c.cell_type=='code']
        names = [n for s in sources if re.match(r'#\|\s*exports?\b', s) for n in defined(s) if not re.match(r'_|.*\._', n)]
        asserted = sum(checks(*tree(s)) for s in sources)
        more = f' and {len(names)-3} more' if len(names)>3 else ''
        told = [', '.join(f'`{n}`' for n in names[:3])+more, f'{read.get(part)} min', f'{asserted} checks' if asserted else '']
        if part in at: found[part] = ' · '.join(filter(None, told))
    return found
