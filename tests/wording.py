"""Sentences that begin with an inverted clause ("What stands in padding changes nothing"), in all that a reader sees.

`python tests/wording.py` lists them; a test holds their number at zero. Questions and headings are fine, and so are the
titles of papers, which stand in links."""
import ast, json, re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INVERTED = re.compile(r'(What|Whatever|Whoever|Whomever|Whichever)\b')
MARKS = '*_("“`[ '                      # may stand before the first word of a sentence

def prose(markdown):
    "Markdown without code, headings, fences of boxes and links to other sites"
    text = re.sub(r'```.*?```', '', markdown, flags=re.S)
    text = re.sub(r'\[[^\]]*\]\(https?://[^)]*\)', 'link', text)
    return re.sub(r'^(#+ |:{3,}|\s*<).*$', '', text, flags=re.M)

def sentences(text):
    "Paragraphs, list items and cells of tables, cut at full stops"
    for block in re.split(r'\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.) )|\|', text):
        block = re.sub(r'^([-*>]|\d+\.)\s+', '', ' '.join(block.split()))
        for sentence in re.split(r'(?<=[.!?:])[*_)"”]*\s+', block):
            yield sentence.lstrip(MARKS)

def inverted(markdown):
    "The sentences of a text that begin with an inverted clause"
    def is_question(sentence): return sentence.rstrip('*_)"”` ').endswith('?')
    return [s for s in sentences(prose(markdown)) if INVERTED.match(s) and not is_question(s)]

def texts_of_code(source):
    "The strings (docstrings, messages, help), comments and options of a cell or module"
    plain = re.sub(r'^\s*[%!].*$', '', source, flags=re.M)
    try: nodes = [*ast.walk(ast.parse(plain))]
    except SyntaxError: nodes = []
    strings = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    comments = re.findall(r'(?:^|\s)# +(.*)', source)
    options = re.findall(r'^#\|\s*[\w-]+:\s*(.*)', source, re.M)
    return strings+comments+options

def texts():
    "(where, text) of everything that a reader sees"
    for path in sorted((ROOT/'nbs').rglob('*.ipynb')):
        for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
            source = ''.join(cell['source'])
            for text in [source] if cell['cell_type']=='markdown' else texts_of_code(source):
                yield f'{path.name} {cell["id"]}', text
    for path in sorted((ROOT/'dynattn').rglob('_*.py')):        # written by hand; the others come from notebooks
        if path.name!='_modidx.py':
            for text in texts_of_code(path.read_text(encoding='utf-8')): yield path.name, text
    for name in 'README.md', 'CHANGELOG.md', 'CONTRIBUTING.md':
        yield name, (ROOT/name).read_text(encoding='utf-8')

def found(): return [f'{where}: {s}' for where,text in texts() for s in inverted(text)]

if __name__=='__main__':
    lines = found()
    print(*lines, f'{len(lines)} sentences begin with an inverted clause', sep='\n')
