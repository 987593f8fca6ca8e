"""Which code cells fold on the site, and the line that stands for each: checks, and the code of figures.

A reader sees `✓ checked: ` and the sentence that the check proves, and opens it with a click. The sentence is the
comment on the cell's first line, else the last sentence of the text above, else the first condition itself. A cell that
says `#| code-fold: false` stays open, because there the check is the lesson."""
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

def last_sentence(markdown):
    "The last sentence of a text cell, '' where it ends in a list, a table, a formula or a heading"
    text = re.sub(r'^:{3,}.*$', '', markdown, flags=re.M).strip()
    block = re.split(r'\n\s*\n', text)[-1].strip()
    if re.match(r'[-*#|>$]|\d+\.\s|```', block) or block.endswith(('$$', '```')): return ''
    block = re.sub(r'!?\[([^\]]*)\]\([^)]*\)(\{[^}]*\})?', r'\1', ' '.join(block.split()))
    sentence = re.split(r'(?<=[.!?:])\s+(?=[A-Z`$*\[("“α-ω])', block.rstrip(':. '))[-1]
    if sentence.startswith('(') and sentence.endswith(')'): sentence = sentence[1:-1].rstrip('.')
    return re.sub(r'\*\*|(?<!\w)[*_]|[*_](?!\w)', '', sentence) if len(sentence) >= 12 else ''

def comment(source):
    m = re.match(r'#(?!\|)\s*(.+)', without_options(source).lstrip())
    return m[1].strip().rstrip('.:') if m else ''

def explanation(source):
    "The sentences on top of a solution, as one line of text, and the code below; a remark on the code is no sentence"
    m = re.match(r'((?:#(?!\|).*\n)+)\n*', source)
    text = ' '.join(line.lstrip('# ') for line in m[1].splitlines()) if m else ''
    return (text, source[m.end():]) if text.endswith(('.', ':')) else ('', source)

def condition(node):
    "What one check says, in a few words of code"
    match node:
        case ast.Assert(test=test): text = ast.unparse(test)
        case ast.Expr(ast.Call(func=f, args=[a, b, *_])) if ast.unparse(f).endswith('assert_close'):
            text = f'{ast.unparse(a)} ≈ {ast.unparse(b)}'
        case ast.With(items=[ast.withitem(ast.Call(func=f, args=args, keywords=words))]) \
                if 'expect_fail' in ast.unparse(f):
            kind,told = [ast.unparse(a) for a in args[:1]], [ast.unparse(w.value) for w in words if w.arg=='contains']
            text = ': '.join(kind+told)
        case _: text = ast.unparse(node).split('\n')[0]
    text = text.replace('`', "'")
    return text if len(text) <= 72 else text[:69].rstrip() + '…'

def first_condition(source):
    "The first thing tested, as code"
    checks = [n for node in tree(source) for n in ast.walk(node) if is_check(n)]
    inner = [n for n in checks if not isinstance(n, (ast.For, ast.If))] or checks
    return f'`{condition(inner[0])}`' + (f' and {len(inner)-1} more' if len(inner) > 1 else '')

def line(source, before):
    "What a folded check says; `before` is the text directly above it, or ''"
    return '✓ checked: ' + (comment(source) or last_sentence(before) or first_condition(source))

@dataclass
class Fold:
    kind:str # 'check', 'figure' or 'code'
    line:str

def fold(source, before, later, drawn, printed, chapter=''):
    "How a cell folds; None where it stands open"
    opts = options(source)
    if 'code-fold' in opts:
        if opts['code-fold'] in ('false', 'show'): return
        return Fold('code', opts.get('code-summary', 'Show the code'))
    if drawn: return None if chapter in PLOT_CHAPTERS else Fold('figure', 'How it is drawn')
    if not printed and only_checks(source, later): return Fold('check', line(source, before))

# Figures

def caption(opts, number):
    "A figure's caption: `fig-cap`, else the alternative text, whose characters mean themselves"
    text = opts.get('fig-cap') or re.sub(r'([\\*_$<\[\]`{}])', r'\\\1', opts.get('fig-alt', ''))
    return f'**Figure {number}.** {text}'
