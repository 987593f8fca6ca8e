"""Every item of the book's five sources has a place: a formula, a figure, an example, a question or a remark of theirs, and
the page that has it. When a page loses its item, the test names it; move the item's line here together with its place."""
import json, re
from pathlib import Path
import pytest

NBS = Path(__file__).resolve().parents[1]/'nbs'

# source | item | page, from nbs/ | words of the page, as a regular expression over text and code
ITEMS = r"""
report 1 | the recap: the original prediction is not differentiable | 15_reports | The original method to predict the window size is non-differentiable
report 1 | a standard deviation solves the continuity problem | 15_reports | solves the continuity problem
report 1 | what holds of that, and what does not | 15_reports | true of the curve, not of the mask
report 1 | sigma from [CLS] by a linear layer and a sigmoid | 15_reports | \\sigma=\\mathrm\{Sigmoid\}\(L\(E_\{\[CLS\]\}\)\)
report 1 | the sigmoid as a link | 10_sigma | sigmoid=torch\.sigmoid
report 1 | the density of the normal distribution | 11_curve | def normal\(
report 1 | its formula | 15_reports | frac\{1\}\{\\sigma\\sqrt\{2\\pi\}\}
report 1 | the range of f(x) and of the threshold | 15_reports | The range of \$f\(x\)\$ is \$\[0,1\]\$
report 1 | the threshold, 0.5 as an example | 15_reports | e\.g\. 0\.5
report 1 | the threshold 0.5, measured | 15_reports | near the widest window that it can have, at 0\.484
report 1 | above the threshold the value is kept, else it is 1 | 15_reports | If the value > threshold, retain its value
report 1 | Threshold(V, T, 1) | 12_smoothing | def cut\(
report 1 | M = 1 - V^p | 12_smoothing | def power_mask\(
report 1 | the pseudo-code, as written and as meant | 15_reports | def pseudo_code\(cls_hidden_state, linear_layer
report 1 | the pseudo-code's last line ignores the threshold | 15_reports | does not use `th`
report 1 | 299 tokens at T = 0.9, p = 10000, drawn | 15_reports | 299, 511 and 299 tokens
report 1 | 511 tokens at T = 0.8, drawn | 15_reports | T = 0\.8
report 1 | the unit and sigma that give 299 and 511 | 15_reports | count\(unit, sigma, .8\)==511
report 1 | the example as a preset | 14_window | halves==\[149, 255\]
report 1 | T = 0.9, p = 100, drawn | 15_reports | a smaller exponent lets its top sink
report 1 | p = 100 has a gradient that ignores the edge | 15_reports | Autograd's part is \*alive\*, 311, and it has the \*\*wrong sign\*\*
report 1 | the matrix of 2w by n | 15_reports | \(2w × n\)
report 1 | the matrix of 2w by n, computed | 18_chunks | def chunked_attention\(
report 1 | truncate the non-zero part of M | 18_chunks | Truncate the non-zero part in M
report 1 | to do: in Longformer | survey/72_memory | Apply differentiable attention window to longformer
report 1 | to do: Sparse Sinkhorn Attention | survey/19_sorting | Sinkhorn
report 1 | to do: why the gradient vanished | 13_vanishing | Figure out why the gradient vanished
report 1 | the fresh sigmoid's starts | 15_reports | about one head in ten
report 1 | its gradient, factor by factor | 15_reports | log_slope
report 1 | one repair at a time | 15_reports | bell, slope, p = 10⁴
report 1 | a wider density is a narrower window | 15_reports | a larger \$\\sigma\$ makes it \*narrower\*
report 1 | why the gradient vanished, in short | 15_reports | The gradient vanished because
report 1 | the window as a preset | 14_window | def report_20220330\(
report 2 | the table of four changes | 15_reports | 30 March \| 13 April
report 2 | sigma by a ReLU | 10_sigma | relu=torch\.relu
report 2 | a ReLU's dead zone | 15_reports | dead
report 2 | positions from -1 to 1 | 11_curve | def positions\(
report 2 | one curve for all queries, taken literally | 11_curve | over positions
report 2 | Threshold(V, T, 0) | 12_smoothing | fill
report 2 | M = tanh(pV) | 12_smoothing | class Tanh\(
report 2 | tanh(pV) is a box at T = 0.9 | 15_reports | tanh\(p V′\)
report 2 | mu = 0 | 15_reports | \\mu=0
report 2 | yellow dots at the centre, green dots where not zero | 15_reports | Yellow dots indicate
report 2 | the figure of dots | 18_chunks | '#e0b000'
report 2 | the product with the non-zero part of the right matrix, drawn | 15_reports | the right matrix
report 2 | only multiply the non-zero part | 18_chunks | Only multiply the non-zero part in the right matrix
report 2 | to do: continuing with Longformer, in its own words | survey/72_memory | Continuing apply dynamic window selection to longformer
report 2 | to do: Sparse Sinkhorn Attention | 15_reports | Survey another way to generate the attention mask vector
report 2 | the window as a preset | 14_window | def report_20220413\(
report 2 | its masks in the race | 15_reports | 'tanh, p = 1'
post | why one pads: batches in place of single sequences | 17_remarks | processed separately
post | padding conflicts with attention | 01_padding | (?i)(weight|attention).{0,120}padd|padd.{0,120}weight
post | attention over padded states, drawn | 17_remarks | Attention over the states of an encoder
post | weights of a row sum to one | 01_padding | a_\{?ij
post | Bahdanau's attention | 01_padding | Bahdanau
post | minus infinity before the softmax | 01_padding | def masked_softmax\(
post | True for real tokens, False for padding | 01_padding | def padding_mask\(
post | the printed weights 0.2689 and 0.7311 | 01_padding | \.2689
post | masked_fill and masked_fill_ compared | 17_remarks | masked_fill_\(
post | the mask is the same size as the tensor | 17_remarks | the mask is the same size as the tensor being masked
post | a mask of batch size by source length | 17_remarks | source sentence length
post | method two: freezing | 01_padding | [Ff]reez
post | why freezing defeats batches | 01_padding | torch\.cat
lecture | two types of error, the confusion matrix | 03_metrics | def confusion_matrix\(
lecture | precision and recall | 03_metrics | def precision\(
lecture | the children's swimming party | 03_metrics | swim
lecture | the trade-off | 03_metrics | threshold
lecture | the ethics of Airbnb's algorithm | 03_metrics | Airbnb
lecture | guests, hosts and revenue | 03_metrics | revenue
lecture | convolutions look at local context | 02_parts | [Cc]onvolution
lecture | Attention Is All You Need, 2017 | 02_parts | 1706\.03762
lecture | The bank of the river, the cashier at the bank | 17_remarks | The bank of the river.*The cashier at the bank
lecture | mixing by products, a softmax | 17_remarks | def mixed\(
lecture | weights of 0.4, 0.1 and 0.4 | 17_remarks | 0\.4.*0\.1.*0\.4
lecture | Q K^T over the root of d | 02_parts | \\sqrt ?\{?d
lecture | the root keeps the variance | 02_parts | variance
lecture | a mask for padding | 02_parts | padding:PaddingMask
lecture | causal masks in time series | 17_remarks | in the case of timeseries
lecture | attention preserves dimensions | 02_parts | \[B,H,N,d\]
lecture | several heads | 02_parts | def split_heads\(
lecture | the feed-forward network | 02_parts | linear2
lecture | no idea about position | 17_remarks | no idea about position in time
lecture | waves as a clock | 02_parts | def sinusoidal_positions\(
lecture | waves, added to embeddings | 17_remarks | Waves, added
lecture | the table of 33 systems | survey/79_survey | All 33 rows
lecture | the five names that its table spells otherwise | survey/79_survey | Clusterformer
lecture | the taxonomy's classes | survey/70_card | TAGS = dict\(
lecture | ETC's printed cost | survey/72_memory | prints N_q²
review | softmax never gives zero | 21_family | (?i)never (zero|says no)
review | GPT-2 and top-k | 21_family | GPT-2
review | many small weights add up in long sequences | 21_family | 1,?000
review | zeros save work | 21_family | save work
review | Child et al.'s sparse attention | 23_sparsity | 1904\.10509
review | the figure of the quick brown fox | 23_sparsity | The quick brown
review | entmax for alpha from 1 to 4, drawn | 21_family | from 1 to 4
review | alpha by grid search or by gradient | 23_sparsity | grid search
review | the proposition: entmax as an argmax | 21_family | argm(in|ax)
review | the Jacobian in alpha | 21_family | Proposition
review | the paper, Correia et al. | 21_family | 1909\.00015
"""
LINES = [tuple(part.strip() for part in line.split(' | ', 3)) for line in ITEMS.strip().splitlines()]
LEAST = {'report 1': 25, 'report 2': 15, 'post': 12, 'lecture': 20, 'review': 10}      # items of each

def sources(page):
    "The cells of a page"
    cells = json.loads((NBS/f'{page}.ipynb').read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells]

@pytest.fixture(scope='module')
def text():
    "page -> all its text and code"
    pages = {}
    def text(page):
        if page not in pages:
            pages[page] = '\n'.join(sources(page))
        return pages[page]
    return text

@pytest.mark.parametrize('line', LINES, ids=lambda line: f'{line[0]}: {line[1]}')
def test_an_item_of_a_source_has_its_place(line, text):
    source,item,page,words = line
    assert re.search(words, text(page)), f'{source}: "{item}" has no place on {page} any more ({words})'

def test_each_source_is_listed_whole():
    found = {source: sum(line[0]==source for line in LINES) for source in LEAST}
    assert {line[0] for line in LINES}=={*LEAST} and all(found[source]>=least for source,least in LEAST.items()), found

def test_the_pages_of_the_table_of_sources_are_those_of_the_items():
    "What chapter 99 says of a source names the pages that have its items"
    table = next(text for text in sources('99_references') if '| source |' in text)
    rows = dict(zip(LEAST, [line for line in table.splitlines() if line.startswith('| ')][1:]))
    for source,row in rows.items():
        named = set(re.findall(r'\((?:survey/)?(\d\d)_', row))
        lo_hi = [(int(a), int(b)) for a,b in re.findall(r'\((?:survey/)?(\d\d)_[\w.]+\) to \[\d\d\]\((?:survey/)?(\d\d)_', row)]
        for _,item,page,*_ in (line for line in LINES if line[0]==source):
            number = page.rpartition('/')[2][:2]
            assert number in named or any(a<=int(number)<=b for a,b in lo_hi), f'99 does not name {number} for {source}: {item}'
