"""`crop` back to a snapshot: what goes on from there is what a cache gives that never went further.

llama.cpp#14157 and #21831: a cache of windows read the whole prompt again, because keys of the shared beginning had gone."""
import copy
import pytest, torch
from torch.testing import assert_close
from dynattn import Window
from dynattn.cache import WindowedLayer, check_state
from dynattn.engine.native import core
from dynattn.configs import cache_argument

HEADS = 4, 2
SIZES = dict(narrow=dict(window=3), wide=dict(window=40), none=dict(), soft=dict(window=Window.default(torch.tensor([1., 9., 4., 2.]).double())),
             leading=dict(window=5, n_global=3), alpha=dict(window=Window.default(torch.tensor([2., 5., 9., 30.]).double()), alpha=1.5, n_global=2))
CUTS = [(7, 5, 1, 1, 1), (2, 30, 1, 1, 2, 1), (1, 1, 60, 1)]              # calls of so many tokens

@pytest.fixture(params=[True, False], ids=['core', 'pieces'])
def by(request, monkeypatch):
    "With the core, and without it."
    if not request.param: monkeypatch.setattr(core, 'library', lambda: None)

def text(n=140, batch=2):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, n, 6, dtype=torch.float64, generator=draw) for heads in (4, 2, 2)]

def read(layer, qkv, first, counts, keep=None):
    "The outputs of calls of so many tokens, from `first` on."
    found = []
    for n in counts:
        mask = None if keep is None else keep[:,:first+n]
        found.append(layer.attend(*(x[:,:,first:first+n] for x in qkv), mask))
        first += n
    return torch.cat(found, 2)

@pytest.mark.parametrize('padded', [0, 6], ids=['', 'padded'])
@pytest.mark.parametrize('cuts', CUTS, ids=str)
@pytest.mark.parametrize('name', SIZES)
def test_going_on_from_a_snapshot(name, cuts, padded, by):
    "From every snapshot, several times, and after a file: as a layer that never went on (to 1e-12), and no snapshot changed."
    qkv = text()
    keep = None if not padded else torch.arange(140)>=torch.tensor([[0], [padded]])
    layer = WindowedLayer(*HEADS, **SIZES[name], snapshots=8)
    read(layer, qkv, 0, [*cuts, 1, 1, 4, *[1]*25], keep)
    ends = [sum(cuts[:i+1]) for i,n in enumerate(cuts) if n>1]+[sum(cuts)+6]
    assert [one.seen for one in layer.snapshots]==ends
    for end in reversed(ends):
        fresh = WindowedLayer(*HEADS, **SIZES[name])
        read(fresh, qkv, 0, next([*cuts, 1, 1, 4][:i] for i in range(1, 10) if sum([*cuts, 1, 1, 4][:i])==end), keep)
        loaded = WindowedLayer(*HEADS, **SIZES[name], snapshots=8)
        loaded.load_state(*layer.state())
        for one in (layer, copy.copy(layer), loaded):
            for _ in range(2):
                one.crop(one.seen-end)
                assert one.seen==end and one.snapshots[-1].seen==end
                assert_close(read(one, qkv, end, (1, 5, 1, 1), keep), read(copy.deepcopy(fresh), qkv, end, (1, 5, 1, 1), keep), atol=1e-12, rtol=0)
            one.crop(one.seen-end)

@pytest.mark.parametrize('name', SIZES)
def test_the_memory_of_snapshots_is_bounded(name):
    "A snapshot is at most what the windows hold; a head without a window costs nothing."
    qkv = text()
    sizes = {}
    for k in (0, 1, 3):
        layer = WindowedLayer(*HEADS, **SIZES[name], snapshots=k)
        for first in range(0, 140, 7): read(layer, qkv, first, [7])
        sizes[k] = layer.nbytes
        assert len(layer.snapshots)==k
    for k in (1, 3):
        if name=='none': assert sizes[k]==sizes[0]
        else: assert sizes[0]<sizes[k]<=(1+k)*sizes[0]

def test_what_is_refused_changes_nothing():
    qkv = text()
    layer = WindowedLayer(*HEADS, window=3, snapshots=2)
    read(layer, qkv, 0, [40, 40, *[1]*30])
    before = layer.state()
    with pytest.raises(ValueError, match=r'tokens: expected so few .* or 30 or 70, back to a snapshot, got 50'): layer.crop(50)
    with pytest.raises(ValueError, match=r'or 70, back to a snapshot, got 90'): layer.crop(90)
    after = layer.state()
    assert before[0]==after[0] and all(torch.equal(x, after[1][name]) for name,x in before[1].items())
    none = WindowedLayer(*HEADS, window=3)
    read(none, qkv, 0, [40, 40, *[1]*30])
    with pytest.raises(ValueError, match=r'still there, got 50'): none.crop(50)
    for wrong in (-1, True, 1.5, None):
        with pytest.raises((TypeError, ValueError), match='snapshots: expected'): WindowedLayer(*HEADS, snapshots=wrong)

def test_rows_and_undo_move_snapshots_too():
    qkv = text()
    layer = WindowedLayer(*HEADS, window=3, n_global=2, snapshots=2)
    read(layer, qkv, 0, [20, 10])
    layer.undo()
    assert [one.seen for one in layer.snapshots]==[20]
    read(layer, qkv, 20, [1]*40)
    layer.select(torch.tensor([1, 0, 1]))
    layer.crop(40)
    fresh = WindowedLayer(*HEADS, window=3, n_global=2)
    read(fresh, qkv, 0, [20])
    turned = [x[[1, 0, 1]] for x in qkv]
    assert_close(read(layer, turned, 20, [3]), read(fresh, qkv, 20, [3])[[1, 0, 1]], atol=1e-12, rtol=0)
    layer.reset()
    assert layer.snapshots==()

def test_an_older_state_has_no_snapshots():
    layer = WindowedLayer(*HEADS, window=3)
    read(layer, text(), 0, [20])
    numbers,tensors = layer.state()
    assert 'snapshots' not in numbers
    other = WindowedLayer(*HEADS, window=3, snapshots=2)
    other.load_state(numbers, tensors)
    assert other.snapshots==()

def wrong_states():
    "A state with two snapshots, changed in one place: what, how."
    def number(name, value, j=0): return lambda n,t: n['snapshots']['held'][j].update({name: value})
    def tensor(f): return lambda n,t: t.update({'snapshot1.0.k': f(t['snapshot1.0.k'])})
    return dict(
        seen_late=number('seen', 999, 1), seen_order=number('seen', 40, 1), seen_zero=number('seen', 0), seen_text=number('seen', 'x'),
        start_far=number('start', [39]), start_list=number('start', 3), start_count=number('start', [1, 2]), more=number('x', 1),
        most=lambda n,t: n['snapshots'].update(most=1), most_text=lambda n,t: n['snapshots'].update(most='3'),
        held=lambda n,t: n['snapshots'].update(held=7), kind=lambda n,t: n.update(snapshots=[1]),
        missing=lambda n,t: t.pop('snapshot0.0.v'), extra=lambda n,t: t.update({'snapshot7.0.k': t['snapshot0.0.k']}),
        odd=lambda n,t: t.update({'snapshotx': t['snapshot0.0.k']}), rows=tensor(lambda x: x[:1]), width=tensor(lambda x: x[...,:3]),
        dtype=tensor(lambda x: x.float()), short=tensor(lambda x: x[:,:,1:]), none=tensor(lambda x: None),
        wide=tensor(lambda x: x[:,:,:1].clone().expand(-1, -1, x.shape[2], -1)))

@pytest.mark.parametrize('name', wrong_states())
def test_a_file_that_contradicts_itself_is_refused(name):
    layer = WindowedLayer(*HEADS, window=3, snapshots=3)
    read(layer, text(), 0, [40, 40, *[1]*30])
    numbers,tensors = copy.deepcopy(layer.state())
    check_state(numbers, tensors)
    wrong_states()[name](numbers, tensors)
    with pytest.raises((TypeError, ValueError)): layer.load_state(numbers, tensors)
    assert layer.seen==110 and len(layer.snapshots)==2

# ---- the cache of a model

def model(**more):
    transformers = pytest.importorskip('transformers')
    from dynattn import hf
    torch.manual_seed(0)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    found = transformers.LlamaForCausalLM(config).eval().double()
    return hf.add_windows(found, init=[[5., 12., 3., 40.], [9., 2., 60., 7.]], **{'n_global': 2, **more})

def take_back(cache, tokens):
    "In transformers 5.0 `crop` takes how many remain, or how many go below zero."
    cache.crop(-tokens)

def test_a_conversation_goes_back_to_its_prompt(tmp_path):
    from dynattn.hf import WindowedCache
    m = model()
    name = cache_argument(m)
    ids = torch.randint(1, 99, (2, 200), generator=torch.Generator().manual_seed(3))
    def feed(cache, first, stop):
        with torch.no_grad(): return m(ids[:,first:stop], **{name: cache}).logits
    kept = WindowedCache(m, snapshots=2)
    feed(kept, 0, 90)
    for i in range(90, 150): feed(kept, i, i+1)
    kept.save(tmp_path/'talk')
    loaded = WindowedCache.load(tmp_path/'talk', m)
    for cache in (kept, loaded, copy.deepcopy(kept)):
        assert cache.snapshots==[90] and cache.get_seq_length()==150
        if cache is not loaded:
            with pytest.raises(ValueError, match='tokens: expected so few .* or 60, back to a snapshot, got 140'): take_back(cache, 140)
        take_back(cache, 60)
        fresh = WindowedCache(m)
        feed(fresh, 0, 90)
        assert torch.equal(feed(cache, 160, 180), feed(fresh, 160, 180)) and cache.snapshots==[90, 110]
        take_back(cache, 20)
        assert cache.get_seq_length()==90 and cache.snapshots==[90]
    again = dict(max_new_tokens=12, do_sample=False)
    text = torch.cat([ids[:,:90], ids[:,120:130]], 1)
    assert torch.equal(m.generate(text, **again, **{name: kept}), m.generate(text, **again, use_cache=False))

@pytest.mark.parametrize('snapshots', [0, 2])
def test_hostile_46_a_text_that_the_cache_has_passed_is_refused(snapshots):
    "`generate` would read it once more behind what the cache holds, without a word."
    from dynattn.hf import WindowedCache
    m = model()
    name = cache_argument(m)
    ids = torch.randint(1, 99, (2, 60), generator=torch.Generator().manual_seed(3))
    few = dict(max_new_tokens=5, do_sample=False)
    kept = WindowedCache(m, snapshots=snapshots)
    out = m.generate(ids[:,:30], **few, **{name: kept})
    held = kept.get_seq_length()
    for text in (ids[:,:20], out[:,:held], ids[:,40:43]):
        with pytest.raises(ValueError, match=f'input_ids: expected the {held} tokens'): m.generate(text, **few, **{name: kept})
    assert kept.get_seq_length()==held
    more = torch.cat([out, ids[:,30:33]], 1)
    assert torch.equal(m.generate(more, **few, **{name: kept}), m.generate(more, **few, use_cache=False))

def test_models_with_other_states_refuse_snapshots():
    transformers = pytest.importorskip('transformers')
    from dynattn import hf
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    hybrid = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes, layer_types=['conv', 'full_attention', 'conv'])).eval()
    hf.add_windows(hybrid, init=5.)
    with pytest.raises(ValueError, match='snapshots: expected 0|which makes its own cache'): hf.WindowedCache(hybrid, snapshots=1)
    for wrong in (-1, 1.5, 'x'):
        with pytest.raises((TypeError, ValueError), match='snapshots: expected'): hf.WindowedCache(model(), snapshots=wrong)
