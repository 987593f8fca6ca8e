"Laws of the survey's systems over many lengths and seeds, and of the chapters that tell of them."
import csv
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from dynattn import PaddingMask
from dynattn.engine.dense import dense_attention
from dynattn.survey import card, fixed, lowrank, memory, recurrence

NBS = Path(__file__).parent.parent / 'nbs'
CHAPTERS = sorted(p for p in NBS.glob('survey/7[1-8]_*.ipynb'))
SYSTEMS = sorted(card.load().values(), key=lambda c: (c.info.row or 99, c.info.name, c.form))
PADDED = [fixed.LocalBlocks, fixed.ImageTransformer, fixed.ImageTransformer2D, fixed.SparseStrided, fixed.SparseFixed,
          fixed.AdaptiveSpan, fixed.BellWindow, memory.Longformer, memory.ETC, memory.ISAB, memory.Luna, lowrank.Linformer,
          lowrank.Synthesizer, lowrank.Nystromformer, lowrank.LongShort, lowrank.LongShortCausal]
SMALL = {fixed.ImageTransformer2D: dict(image_width=6, block=(2, 3), memory=(1, 2)), lowrank.LongShortCausal: dict(segment=4, memory=8, window=3),
         memory.Longformer: dict(window=3), memory.ETC: dict(radius=3)}
name_of = lambda c: f'{c.info.name} {c.form}'.strip()


@pytest.fixture(autouse=True)
def seeded(): torch.manual_seed(0)


@pytest.mark.parametrize('system', PADDED, ids=name_of)
@pytest.mark.parametrize('n,real', [(9, 1), (24, 13), (31, 30)])
def test_padding_is_alone(system, n, real):
    layer = system.at(24, **SMALL.get(system, {})) if n <= 24 else system.at(32, **SMALL.get(system, {}))
    assert card.truncation(layer, n, real) < 1e-9


@pytest.mark.parametrize('system', [c for c in SYSTEMS if issubclass(c, fixed.Pattern)], ids=name_of)
@pytest.mark.parametrize('n', [1, 10, 24, 37])
def test_a_pattern_is_its_mask(system, n):
    for causal in (False, True):
        layer = system.at(24, causal=causal, **SMALL.get(system, {})).double()
        q, k, v = torch.randn(3, 2, 2, n, 8, dtype=torch.float64)
        window = layer.window() if isinstance(layer, fixed.SoftWindow) else None
        want = dense_attention(q, k, v, attn_mask=layer.mask(n), window=window)
        torch.testing.assert_close(layer.attend(q, k, v), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize('system', [c for c in SYSTEMS if card.has_causal(c)], ids=name_of)
def test_a_causal_form_equals_its_limit(system):
    assert card.check_limit(system, causal=True) is None or card.limit_of(system)
    exact = card.exactness(system, causal=True)
    assert exact is None or exact < 1e-9


@pytest.mark.parametrize('system,causal', [(c, causal) for c in SYSTEMS for causal in (False, True)[:1 + card.has_causal(c)]],
                         ids=lambda o: name_of(o) if isinstance(o, type) else 'causal' if o else 'all')
def test_every_parameter_gets_a_gradient(system, causal):
    layer = system.at(64, causal=causal).double().train()
    outputs = layer(torch.randn(2, 64, 16, dtype=torch.float64))
    losses = [o.square().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
    if layer.aux_loss is not None: losses.append(layer.aux_loss)
    sum(losses).backward()
    assert not [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()]


def test_no_class_says_softmax_and_is_another(): # the law that keeps the column honest
    class Flattered(card.Exact):
        limit = 'softmax attention'
        def attend(self, q, k, v, *, padding=None): return super().attend(q, k, v.tanh(), padding=padding)
        def reference(self, x, *, padding=None): return self(x)
    assert card.exactness(Flattered) == 0
    with pytest.raises(ValueError, match='limit'): card.check_limit(Flattered)


@pytest.mark.parametrize('make,tokens', [
    (lambda: memory.ETC(16, 2, radius=2), 64),
    (lambda: memory.Longformer(16, 2, window=2), 64),
    (lambda: memory.BigBird(16, 2, block=4, random=1), 64),
    (lambda: memory.Luna(16, 2), 64),
    (lambda: memory.ETC(16, 2, radius=2, causal=True), 7),
    (lambda: fixed.LocalBlocks(16, 2, block=8), 8),
    (lambda: lowrank.LongShort(16, 2, window=4), 64),
], ids=['ETC', 'Longformer', 'BigBird', 'Luna', 'ETC, causal', 'local blocks', 'Long-Short'])
def test_reach_of_three_layers(make, tokens):
    stack = card.Stack(make(), make(), make())
    assert int(card.reach(stack, 64, 40).sum()) == tokens


def test_the_gradient_goes_through_the_global_tokens():
    stack = card.Stack(*[memory.ETC(16, 2, radius=1) for _ in range(2)]).double()
    x = torch.randn(1, 12, 16, dtype=torch.float64, requires_grad=True)
    y, _ = stack(x, torch.randn(1, 2, 16, dtype=torch.float64))
    g, = torch.autograd.grad(y[:, 0].sum(), x)
    assert g.abs().amax(-1).min() > 0


@pytest.mark.parametrize('blocks', [1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize('drawn', [0, 1, 3, 50])
def test_a_plan_has_every_block_once(blocks, drawn):
    for seed in range(5):
        plan = memory.random_plan(blocks, drawn, seed)
        assert plan.shape == (blocks, 5 + drawn) and plan.max() < blocks
        for i, row in enumerate(plan.tolist()):
            seen = [b for b in row if b >= 0]
            fixed_blocks = {b for b in (0, i - 1, i, i + 1, blocks - 1) if 0 <= b < blocks}
            assert len(seen) == len(set(seen)) and fixed_blocks <= set(seen)
            assert len(seen) == min(len(fixed_blocks) + drawn, blocks)


def test_a_plan_is_linear():
    peaks = []
    for blocks in (4096, 8192, 16384):
        with card.PeakBytes() as memory_used: memory.random_plan(blocks, 3)
        peaks.append(memory_used.peak / blocks)
    assert max(peaks) < 1.1 * min(peaks)


@pytest.mark.parametrize('limit', [None, 0, 4, 12])
@pytest.mark.parametrize('rank,window', [(1, 1), (3, 5), (2, 30)])
def test_long_short_token_by_token(limit, rank, window):
    layer = lowrank.LongShortCausal(16, 2, rank=rank, window=window, segment=4, memory=limit)
    assert card.streaming(layer, 27) < 1e-10 and card.prefix(layer, 27) < 1e-10 and card.causality(layer, 27) == 'yes'


def test_compression_learns_from_its_own_loss_alone():
    layer = recurrence.Compressive(16, 2, segment_len=8, memory=8)
    y = layer(torch.randn(2, 40, 16))
    main = torch.autograd.grad(y.sum(), layer.conv.parameters(), allow_unused=True, retain_graph=True)
    rest = [p for n, p in layer.named_parameters() if not n.startswith('conv')]
    assert main == (None, None)
    assert all(g is None for g in torch.autograd.grad(layer.aux_loss, rest, allow_unused=True, retain_graph=True))
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(layer.aux_loss, layer.conv.parameters()))


def sections(path): # of a notebook, from one second-level heading to the next
    text = '\n'.join(''.join(c['source']) for c in json.loads(path.read_text(encoding='utf-8'))['cells'])
    return re.split(r'(?m)^## ', text)[1:]


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_links_the_papers_of_its_cards(path):
    "What is built stands beside its source."
    text = '\n'.join(sections(path))
    sources = re.findall(r'info = Info\("[^)]*?"(\d{4}\.\d{4,5})"', text)
    unlinked = [source for source in sources if f'arxiv.org/abs/{source}' not in text]
    assert sources and not unlinked, f'no section of the chapter links https://arxiv.org/abs/… of {unlinked}'


def test_the_paper_of_every_system_is_on_the_list():
    "Chapter 99 let a system pass whose number stood on its card alone"
    listed = (NBS / '99_references.ipynb').read_text(encoding='utf-8')
    missing = sorted({c.info.source for c in SYSTEMS if f'| {c.info.source}' not in listed and c.info.source})
    assert not missing, f'PAPERS of chapter 99 has no line of {missing}'


FIGURE = re.compile(r'(?m)^#\| fig-alt: .{40,}\n#\| fig-cap: .{20,}')
WORDS = range(40, 140)  # of an idea: some sentences, not a page


def read(path): return [(c['cell_type'], ''.join(c['source'])) for c in json.loads(path.read_text(encoding='utf-8'))['cells']]


def of_systems(cells):
    "heading -> cells of each section of the second level that has code of its own"
    found = {}
    for kind, text in cells:
        if kind == 'markdown' and text.startswith('## '):
            section = found.setdefault(text.strip(), [])
        elif found:
            section.append((kind, text))
    return {heading: section for heading, section in found.items()
            if any(re.match(r'### .* in code$', text) for kind, text in section if kind == 'markdown')}


def misplaced(cells):
    "The parts of a system's section that do not stand where a reader expects them: idea, figure, formula, code"
    for heading, section in of_systems(cells).items():
        at = next(i for i, (kind, text) in enumerate(section) if kind == 'markdown' and re.match(r'### .* in code$', text))
        kinds = [kind for kind, _ in section[:at]]
        if kinds != ['markdown', 'code', 'markdown']:
            if kinds != ['markdown'] or 'figure above' not in section[0][1]:
                yield f'{heading}: expected an idea, a figure and a formula before the code, got {kinds}'
                continue
        else:
            if '$$' in section[0][1] or len(section[0][1].split()) not in WORDS: yield f'{heading}: the idea is not told in a few sentences'
            if not FIGURE.search(section[1][1]): yield f'{heading}: no figure with an alternative text and a caption'
            if 'dynattn' in section[1][1]: yield f'{heading}: the figure needs the package'
        formula = section[at - 1][1]
        said = re.sub(r'\$\$.*?\$\$', ' ', formula, flags=re.S)
        if '$$' not in formula or len(said.split()) < 30: yield f'{heading}: no formula whose symbols are said in words'
    sections_of_systems = [text for section in of_systems(cells).values() for _, text in section]
    for kind, text in cells:
        if '@register' in text and 'row=' in text and text not in sections_of_systems: yield f'a system without a section: {text[:60]}'


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_system_opens_with_idea_figure_and_formula(path): assert [*misplaced(read(path))] == []


def test_all_rows_of_the_table_have_a_section():
    code = '\n'.join(text for path in CHAPTERS for section in of_systems(read(path)).values() for _, text in section)
    assert {int(row) for row in re.findall(r'info = Info\(.*?row=(\d+)', code, flags=re.S)} == set(range(1, 34))
    assert sum(len(of_systems(read(path))) for path in CHAPTERS) >= 34


@pytest.mark.parametrize('path', CHAPTERS, ids=lambda p: p.stem)
def test_a_system_that_opens_otherwise_is_found(path):
    cells = read(path)
    at = next(i for i, (kind, text) in enumerate(cells) if kind == 'markdown' and re.match(r'### .* in code$', text))
    no_figure = cells[:at - 2] + cells[at - 1:]
    no_caption = [(kind, text.replace('#| fig-cap', '# fig-cap')) for kind, text in cells]
    no_words = cells[:at - 1] + [('markdown', '$$x$$')] + cells[at:]
    code_first = cells[:at - 3] + [('code', '#| exports\nx = 1')] + cells[at - 3:]
    assert all([*misplaced(wrong)] for wrong in (no_figure, no_caption, no_words, code_first))


@pytest.mark.slow
def test_every_system_is_measured(): # `make test` asks no newcomer to measure
    with open(NBS.parent / 'benchmarks/results/survey.csv', newline='') as f: known = {(r['name'], r['form']) for r in csv.DictReader(f)}
    new = [name_of(c) for c in SYSTEMS if (c.info.name, c.form) not in known]
    assert not new, f'run `python benchmarks/survey.py new`, then `python tests/outputs.py --store nbs/survey/79_survey.ipynb`: {new}'


@pytest.mark.skipif(not importlib.util.find_spec('reformer_pytorch'), reason='needs pip install dynattn[oracles]')
def test_what_the_chapters_compare_with_is_there(): # where the extra is installed, no comparison is skipped
    for path in CHAPTERS:
        for module in re.findall(r'optional\(\\"([\w.]+)', path.read_text(encoding='utf-8')): importlib.import_module(module)


def test_what_chapter_79_prints_is_what_the_cards_say():
    cells = json.loads((NBS / 'survey/79_survey.ipynb').read_text(encoding='utf-8'))['cells']
    shown = ''.join(''.join(o.get('data', {}).get('text/markdown', '')) for c in cells for o in c.get('outputs', []))
    own_reason = {'exact buckets', 'argmax', 'token by token'}  # in the chapter itself
    stale = [c.info.name for c in SYSTEMS if c.info.row and c.form not in own_reason and c.info.note not in shown]
    assert not stale, f'run chapter 79 anew: {stale}'
    with open(NBS.parent / 'benchmarks/results/survey.csv', newline='') as f: rows = list(csv.DictReader(f))
    raised = lambda text: re.sub(r'\^([\d.]+)', r'<sup>\1</sup>', text).replace(' ', '\u00a0')
    assert all(raised(r['poly']) in shown for r in rows if r['flops'] in ('N', 'N^2'))

@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('parts', [(part,) for part in lowrank.Synthesizer.PARTS]+[('random','dense'), ('factorised random','vanilla')])
def test_synthesizer_reads_a_padded_batch_as_each_text_alone(parts, causal):
    "Random scores are the same for all texts, also where their padding differs."
    torch.manual_seed(0)
    layer = lowrank.Synthesizer(8, 2, causal=causal, length=16, parts=parts).double()
    x,lengths = torch.randn(3, 10, 8, dtype=torch.float64),(10, 7, 4)
    keep = torch.arange(10)<torch.tensor(lengths)[:,None]
    out = layer(x, padding=PaddingMask(keep))
    for i,n in enumerate(lengths): torch.testing.assert_close(out[i,:n], layer(x[i:i+1,:n])[0])
