"""Weights for the search of the site: how much each page speaks of a word (BM25 over title, line, headings and text).

Sphinx's search knows whether a page has a word and not how often, asks for every word of a query, and orders ties by title."""
import json, math, re
from collections import Counter
from pathlib import Path
from bs4 import BeautifulSoup
from sphinx.search.en import SearchEnglish
import book

FIELDS = {'h1': 12, '.nb-line': 8, 'h2, h3': 5}      # how many times a word of the text a word there counts
LEFT_OUT = '.nb-bar, .headerlink, table.nb-params'
LARGE = re.compile(r'<(svg|script|style|pre)\b.*?</\1>', re.S)      # goes before the page is parsed
GROUPS = {'guide/': 2., 'Understand it': 1.5}      # a page that answers goes before a page that explains, and this before the rest
FOLDED = .5            # how much a word counts in a part of a page that is folded
SYNONYMS = """
sliding local banded: window
span receptive far: window width
mask masked ragged jagged left: padding
kv: cache
sparsemax sparse: entmax
shrink prune compress distil: narrow
context: long
metric f1: precision recall
positional rotary: position
speed slow fast benchmark: time measured
bert gpt llama huggingface pretrained: transformers hugging
checkpoint: save
flex natten xformers: library number
flash flashattention: flash_attn library number
visualise visualize inspect heatmap: look heads
variable varlen unequal: lengths packed
lora: peft
undo revert rollback: crop
laptop: cpu
smaller: small
extend: contribute
""" # what a reader may ask for: what the pages call it
FULL,FLAT = 6,.5       # a count that gives half of a word's weight; how far long pages are held back
LANGUAGE = SearchEnglish({})

def words(text):
    split = re.findall(r'\w+', text.lower().replace('α', 'alpha').replace('σ', 'sigma'))
    return [LANGUAGE.stem(w) for w in split if LANGUAGE.word_filter(w) and not w.isdigit()]

def counts(html):
    "Words of a page with how much they count"
    article = BeautifulSoup(LARGE.sub('', html), 'html.parser').select_one('[role=main]')
    for e in article.select(LEFT_OUT): e.decompose()
    found = Counter(words(article.get_text(' ')))
    for part in article.select('details.nb-part'):
        for w in words(part.get_text(' ')): found[w] -= 1-FOLDED
    for field,times in FIELDS.items():
        for e in article.select(field):
            for w in words(e.get_text(' ')): found[w] += times
    return found

def lessons(): return {c.page.removesuffix('.html') for c in book.chapters() if c.part=='Understand it'}

def synonyms():
    "stem -> stems that mean it, of `SYNONYMS`"
    found = {}
    for line in SYNONYMS.strip().splitlines():
        asked,called = map(words, line.split(':'))
        for word in asked: found[word] = called
    return found

def weights(pages):
    "word -> {page: weight}, of pages as {name: html}"
    found = {name: counts(html) for name,html in pages.items()}
    mean = sum(map(Counter.total, found.values()))/len(found)
    having = Counter(w for c in found.values() for w in c)
    def weight(c, w):
        rare = math.log(1+(len(found)-having[w]+.5)/(having[w]+.5))
        size = 1-FLAT+FLAT*c.total()/mean
        return 100*rare*c[w]/(c[w]+FULL*size)
    path = lessons()
    def factor(name): return GROUPS['Understand it'] if name in path else GROUPS.get(name.partition('/')[0]+'/', 1.)
    kept = {w: {name: x for name,c in found.items() if (x := round(factor(name)*weight(c, w)))} for w in sorted(having)}
    return {w: at for w,at in kept.items() if at}

def install(dest):
    "The page of results ranks by these weights"
    files = {p.relative_to(dest).with_suffix('').as_posix(): p for p in Path(dest).rglob('*.html')}
    pages = {name: p.read_text(encoding='utf-8') for name,p in files.items()
             if name not in ('404', 'search', 'genindex', 'py-modindex', 'api') and not name.startswith(('_', 'part-'))}
    data = json.dumps(weights(pages), separators=(',', ':'), ensure_ascii=False)
    script = Path(__file__).with_suffix('.js').read_text(encoding='utf-8')
    (Path(dest)/'_static/ranking.js').write_text(f'const WEIGHTS = {data};\nconst SYNONYMS = {json.dumps(synonyms())};\n{script}', encoding='utf-8')
    found = Path(dest)/'search.html'
    text = found.read_text(encoding='utf-8')
    found.write_text(text.replace('</body>', '<script src="_static/ranking.js"></script>\n</body>'), encoding='utf-8')
