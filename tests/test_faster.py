"Plain calls: the table is what the rows say, the choice is the call's, and the values are the same."
import sys, types
from itertools import product
import pytest, torch, torch.nn.functional as F
from torch.testing import assert_close
from conftest import ROOT
from dynattn import PaddingMask, attention, dense_attention, native
from dynattn.engine import faster, ops
from dynattn.engine.ops import choose

sys.path.insert(0, str(ROOT/'benchmarks'))
import plain

@pytest.fixture
def always(monkeypatch): monkeypatch.setattr(ops, 'core_is_faster', lambda *args, **kwargs: True)

def leaves(N=40, M=None, d=16, dtype=torch.float64, Hkv=4, B=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, n, d, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for h,n in ((4,N),(Hkv,M or N),(Hkv,M or N))]

def test_the_table_is_what_the_rows_say():
    "`python benchmarks/plain.py --store` wrote it"
    assert faster.LEAST_PAIRS==plain.table(plain.rows_of(plain.FILE))

def test_where_the_core_is_chosen_no_row_is_slower():
    "For every row of the file: chosen means at most 1.05 of PyTorch's time"
    for row in plain.rows_of(plain.FILE):
        if row['mask'] not in ('','causal','padding','padding half'): continue
        q = torch.empty(*(int(row[x]) for x in 'BHNd'), dtype=getattr(torch, row['dtype']), device='meta')
        k = torch.empty(*(int(row[x]) for x in 'BHMd'), device='meta')
        with pytest.MonkeyPatch.context() as m:
            m.setattr(faster, 'instruction_set', lambda *_: row['set'])
            chosen = faster.core_is_faster(q, k, row['mask']=='causal', row['gradient']=='1', padded='padding' in row['mask'])
        assert not chosen or float(row['ratio'])<=1.05, row

def test_prog5_a_narrow_window_has_lines_of_its_own(monkeypatch):
    "It sees a quarter of the pairs or fewer; what holds for a causal call holds for it, too"
    monkeypatch.setattr(faster, 'instruction_set', lambda *_: 'a')
    x = torch.empty(1, 1, 64, 8)
    for causal_least,narrow_least,chosen in ((None,None,False), (None,4096,True), (9999,4096,True), (4096,9999,True), (None,9999,False)):
        lines = {('a','float32',kind,False,'many'): n for kind,n in ((True,causal_least),('narrow',narrow_least)) if n}
        monkeypatch.setattr(faster, 'LEAST_PAIRS', lines)
        assert faster.core_is_faster(x, x, True, narrow=True)==chosen
        assert faster.core_is_faster(x, x, True)==(causal_least==4096)
    row = dict(set='a', dtype='bfloat16', mask='window 64', gradient='0', B='1', H='1', Hkv='1', d='8', ratio='.5')
    assert plain.table([row | dict(N='512', M='512')])=={('a','bfloat16','narrow',False,'many'): 512*512}
    assert plain.table([row | dict(N='256', M='256')])=={}

@pytest.mark.skipif(not native.info()['native'], reason='no compiled core')
@pytest.mark.parametrize('faster_here', [True, False])
def test_padding_in_half_precision_is_chosen_by_the_table(monkeypatch, faster_here):
    "In float32 the mask that PyTorch would need costs more than the core"
    monkeypatch.setattr(ops, 'core_is_faster', lambda *args, **kwargs: faster_here)
    padding = PaddingMask(torch.arange(40)<torch.tensor([[40],[25]]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q,k,v = leaves(dtype=dtype)
        chosen = 'banded' if faster_here or dtype==torch.float32 else 'sdpa'
        assert choose(q, k, v, padding=padding)==chosen
        exact = dense_attention(q.double(), k.double(), v.double(), padding=padding)
        assert_close(attention(q, k, v, padding=padding).double(), exact, atol=2e-2, rtol=0)

@pytest.mark.parametrize('mask', ['padding', 'padding half'])
def test_padding_has_lines_of_its_own(monkeypatch, mask):
    "Its own line alone, as padding has to be found first; without one, that of a plain call"
    monkeypatch.setattr(faster, 'instruction_set', lambda *_: 'a')
    x = torch.empty(1, 1, 64, 8)
    for plain_least,padded_least,chosen in ((None,None,False), (None,4096,True), (9999,4096,True), (4096,9999,False), (4096,None,True), (None,9999,False)):
        lines = {('a','float32',kind,False,'many'): n for kind,n in ((False,plain_least),('padded',padded_least)) if n}
        monkeypatch.setattr(faster, 'LEAST_PAIRS', lines)
        assert faster.core_is_faster(x, x, padded=True)==chosen
        assert faster.core_is_faster(x, x)==(plain_least==4096)
    row = dict(set='a', dtype='bfloat16', mask=mask, gradient='1', B='2', H='1', Hkv='1', d='8', N='512', M='512', ratio='.5')
    assert plain.table([row])=={('a','bfloat16','padded',True,'many'): 2*512*512}
    assert plain.table([row, row | dict(ratio='1.1')])=={}

@pytest.mark.parametrize('tiles', [False, True])
@pytest.mark.parametrize('of_core', ['amx', 'bf16', 'avx512', 'avx2'])
def test_prog5_a_pytorch_with_tiles_is_another_machine(monkeypatch, of_core, tiles):
    "It multiplies bfloat16 several times as fast, so an AVX-512 core has lines of its own there"
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: tiles, raising=False)
    found = faster._set_of.__wrapped__(type('', (), dict(_name=f'core_{of_core}.so')))
    assert found==('avx512+amx' if tiles and of_core in ('avx512','bf16') else of_core)
    q = torch.empty(1, 8, 2048, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(faster, 'instruction_set', lambda *_: found)
    assert faster.core_is_faster(q, q)==(found in ('avx512','bf16'))

def test_a_table_of_rows():
    "The least pairs above the last row that was slower; none where the last one was"
    def row(n, ratio, mask='', **more):
        return dict(set='a', dtype='float32', mask=mask, gradient='0', B='1', H='1', Hkv='1', N=str(n), M='64', d='8', ratio=str(ratio)) | more
    many = ('a','float32',False,False,'many')
    assert plain.table([row(16, 2.), row(32, .9), row(64, 1.1), row(128, .5), row(256, 1.)])=={many: 128*64}
    assert plain.table([row(40, .5), row(48, 1.01)])=={}
    assert plain.table([row(128, .5), row(128, 1.2, B='2'), row(512, .7)])=={many: 512*64}  # another row, more pairs
    assert plain.table([row(64, .5, 'bias'), row(64, .5, 'window 64')])=={}
    assert plain.table([row(1, .5, H='4')])=={('a','float32',False,False,'shared'): 256}
    assert plain.table([row(1, .5), row(4, .5), row(64, .5, 'causal'), row(64, .5, gradient='1')])=={
        ('a','float32',False,False,'few'): 256, ('a','float32',False,False,'one'): 64,
        ('a','float32',False,True,'many'): 4096, ('a','float32',True,False,'many'): 4096}

def test_a_causal_call_without_a_line_takes_that_of_the_others(monkeypatch):
    monkeypatch.setattr(faster, 'instruction_set', lambda *_: 'a')
    x = torch.empty(1, 1, 64, 8)
    for plain_least,causal_least,chosen in ((None,None,False), (4096,None,True), (None,4096,True), (4096,9999,False), (9999,4096,True), (9999,9999,False)):
        lines = {('a','float32',causal,False,'many'): n for causal,n in ((False,plain_least),(True,causal_least)) if n}
        monkeypatch.setattr(faster, 'LEAST_PAIRS', lines)
        assert faster.core_is_faster(x, x, True)==chosen
        assert faster.core_is_faster(x, x, False)==(plain_least==4096)
        assert not faster.core_is_faster(x, x, True, learns=True)

def test_processors_with_tiles_are_a_set_of_their_own(monkeypatch):
    "PyTorch multiplies bfloat16 in tiles there, which took a third of the core's time"
    for name,tiles,expected in (('amx',True,'amx'), ('avx512',True,'avx512+amx'), ('avx512',False,'avx512'), ('bf16',True,'avx512+amx'), ('bf16',False,'bf16'), ('avx2',True,'avx2')):
        monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: tiles)
        lib = types.SimpleNamespace(_name=f'some/core_{name}.so')
        assert faster._set_of.__wrapped__(lib)==expected

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_newest_query_of_a_cache_is_a_plain_call(monkeypatch, dtype):
    "Causality hides nothing from it, so that the table decides; with an empty one PyTorch computes it"
    monkeypatch.setattr(faster, 'LEAST_PAIRS', {})
    q,k,v = leaves(1, 40, dtype=dtype)
    newest,older = dict(is_causal=True, q_offset=39),dict(is_causal=True, q_offset=38)
    assert choose(q, k, v, **newest)==choose(q, k, v)=='sdpa'
    assert choose(q, k, v, **older)==('banded' if native.info()['native'] else 'sdpa')
    for options in (newest, older, dict(is_causal=True, q_offset=50)):
        for impl in ('auto','sdpa'):
            exact = dense_attention(q.double(), k.double(), v.double(), **options)
            assert_close(attention(q, k, v, **options, impl=impl).double(), exact, atol=.02, rtol=.02)

@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('N,M,Hkv', [(40,40,4), (1,70,2), (5,30,1), (70,33,2)])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_calls_by_the_core(always, dtype, N, M, Hkv, causal):
    "Output and gradients of the dense path in float64, by whoever computes"
    x = leaves(N, M, dtype=dtype, Hkv=Hkv)
    exact = [t.detach().double().requires_grad_() for t in x]
    out,want = attention(*x, is_causal=causal),dense_attention(*exact, is_causal=causal)
    back = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
    tolerance = dict(atol=64*torch.finfo(dtype).eps, rtol=64*torch.finfo(dtype).eps)
    assert choose(*x, is_causal=causal)==('banded' if native.info()['native'] else 'sdpa')
    assert_close(out.double(), want, **tolerance)
    grads = zip(torch.autograd.grad(out, x, back.to(dtype)), torch.autograd.grad(want, exact, back))
    for a,b in grads: assert_close(a.double(), b, **tolerance)

def test_the_choice_is_of_the_call_and_not_of_the_moment(monkeypatch):
    "Twice the same bits; with the table empty, PyTorch's bits"
    x = leaves(dtype=torch.float32)
    for lines in ({}, {(faster.instruction_set(),'float32',c,True,'many'): 0 for c in (False,True)}):
        monkeypatch.setattr(faster, 'LEAST_PAIRS', lines)
        assert torch.equal(attention(*x), attention(*x))
        served = bool(lines) and native.info()['native']
        assert torch.equal(attention(*x), F.scaled_dot_product_attention(*x))!=served

@pytest.mark.parametrize('dynamic', [None, True])
def test_compiled_as_in_eager_mode(monkeypatch, dynamic):
    "The same implementation in every size, also where sizes are symbols"
    instructions = faster.instruction_set()     # without a core there is no line
    lines = {(instructions,'float32',False,learns,'many'): 2*4*40*40 for learns in (False,True) if instructions}
    monkeypatch.setattr(faster, 'LEAST_PAIRS', lines)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x).sin(), backend='aot_eager', fullgraph=True, dynamic=dynamic)
    for N in (50,60,20,30,70):
        x = leaves(N, dtype=torch.float32)
        a,b = compiled(*x),attention(*x).sin()
        assert torch.equal(a, b)
        for s,t in zip(torch.autograd.grad(a.sum(), x), torch.autograd.grad(b.sum(), x)): assert_close(s, t)
    torch._dynamo.reset()

def test_exported_and_transformed_plain_calls_are_pytorchs(always):
    class Whole(torch.nn.Module):
        def forward(self, q, k, v): return attention(q, k, v)
    x = tuple(t.detach() for t in leaves(dtype=torch.float32))
    sizes = [{0: torch.export.Dim('b'), 2: torch.export.Dim('n')}]*3
    program = torch.export.export(Whole(), x, dynamic_shapes=sizes)
    assert 'aten.scaled_dot_product_attention.default' in [str(n.target) for n in program.graph.nodes]
    twice = torch.vmap(attention)(*(torch.stack((t,t)) for t in x))
    assert_close(twice[1], attention(*x))
    grad = torch.func.grad(lambda q: attention(q, *x[1:]).sum())(x[0])
    assert grad.shape==x[0].shape

def test_masks_of_pairs_stay_with_pytorch(always):
    q,k,_ = leaves(dtype=torch.float32)
    assert choose(q, k, k, attn_mask=torch.ones(40, 40, dtype=torch.bool))=='sdpa'

@pytest.mark.slow
def test_the_benchmark_runs():
    "Every way and kind of call is checked and timed once"
    rows = list(plain.measure([(1,2,128,128,8),(1,2,1,64,8)], [torch.float32,torch.bfloat16], 1))
    assert {(r['way'],r['mask']) for r in rows}>=set(product(['everywhere'], ['','causal','padding','window 64','bias']))
    assert all(r['ratio']>0 and set(r)<=set(plain.FIELDS) for r in rows)

@pytest.mark.skipif(not native.info()['native'], reason='there is no core that could serve')
def test_prog6_values_of_another_width_are_not_pytorchs(monkeypatch):
    "PyTorch's kernel has no such call, and its products need the square of pairs"
    monkeypatch.setattr(ops, 'core_is_faster', lambda *args, **kwargs: False)
    q,k,v = leaves()
    for width,expected in ((16,'sdpa'),(5,'banded')): assert choose(q, k, v[...,:width], is_causal=True)==expected
    x = q,k,v[...,:5]
    assert_close(attention(*x, is_causal=True), F.scaled_dot_product_attention(*x, is_causal=True))
    off,on = (torch.autograd.grad(f(*x, is_causal=True).square().sum(), (q,k,v)) for f in (F.scaled_dot_product_attention,attention))
    for a,b in zip(off, on): assert_close(a, b)
