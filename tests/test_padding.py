"Property tests of the padding mask: any shape, any mask, any dtype."
import copy, pickle
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from dynattn.engine.native import core
from dynattn.engine.ops import attention
from dynattn.padding import PaddingMask, masked_softmax, padding_mask

SETTINGS = settings(deadline=None, derandomize=True)   # how many examples: conftest.py
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64

@st.composite
def masks(draw, least=0):
    "A keep mask [B,N], empty batches, empty rows and non-contiguous storage included"
    B,N = draw(st.integers(least, 5)), draw(st.integers(least, 7))
    bits = draw(st.lists(st.booleans(), min_size=B*N, max_size=B*N))
    keep = torch.tensor(bits, dtype=torch.bool).view(B, N)
    return keep.T.contiguous().T if draw(st.booleans()) else keep

@SETTINGS
@given(masks(), st.sampled_from(FLOATS))
def test_every_convention_round_trips(keep, dtype):
    p = PaddingMask(keep)
    assert (p.additive(dtype)[p.ignore]==-torch.inf).all()
    for other in (PaddingMask.from_keep(p.keep.int()), PaddingMask.from_hf(p.keep.long()), PaddingMask.from_ignore(p.ignore), PaddingMask.from_ignore(p.ignore.int()),
                  PaddingMask.from_additive(p.additive(dtype)), PaddingMask.from_additive(p.additive(dtype)[:,None,None]), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert other==p and hash(other)==hash(p)
    assert p.sdpa().shape==(keep.shape[0], 1, 1, keep.shape[1]) and repr(p).startswith('PaddingMask(B=')
    assert p & p == p and not (p & PaddingMask(p.ignore)).keep.any()

@SETTINGS
@given(masks(), st.sampled_from(FLOATS), st.sampled_from([(), (3,), (2, 3)]))
def test_unpack_undoes_pack(keep, dtype, tail):
    p, x = PaddingMask(keep), torch.randn(*keep.shape, *tail).to(dtype)
    x = x.masked_fill(p.ignore.view(*keep.shape, *[1]*len(tail)), torch.nan).requires_grad_()
    packed, before = p.pack(x), x.detach().clone()
    assert packed.shape==(keep.sum(), *tail) and not packed.isnan().any()
    assert_close(packed, x[keep], rtol=0, atol=0)
    assert_close(p.unpack(packed), p.zero(x), rtol=0, atol=0)
    assert (p.unpack(packed, fill=-7.)[p.ignore]==-7).all()
    assert_close(p.zero(x[:,None], dim=2)[:,0], p.zero(x), rtol=0, atol=0)
    (g,) = torch.autograd.grad(p.unpack(packed).sum(), x)
    assert_close(g, keep.view(*keep.shape, *[1]*len(tail)).expand_as(x).to(dtype), rtol=0, atol=0)
    assert_close(x.detach(), before, rtol=0, atol=0, equal_nan=True)
    starts = p.cu_seqlens
    assert starts.dtype==torch.int32 and starts[0]==0 and starts[-1]==keep.sum() and torch.equal(starts.diff().long(), p.counts)

@SETTINGS
@given(st.lists(st.integers(0, 6), max_size=5), st.integers(0, 3))
def test_lengths_round_trip(lengths, spare):
    n = max(lengths, default=0) + spare
    p = PaddingMask.from_lengths(torch.tensor(lengths, dtype=torch.long), n)
    assert p.lengths.tolist()==lengths and p.keep.shape==(len(lengths), n)
    for row,l in zip(p.keep.tolist(), lengths): assert row==[True]*l + [False]*(n-l)
    assert spare or torch.equal(padding_mask(torch.tensor(lengths, dtype=torch.int32)), p.keep)

@SETTINGS
@given(masks())
def test_lengths_never_lie(keep):
    p = PaddingMask(keep)
    if all(row==sorted(row, reverse=True) for row in keep.tolist()): assert torch.equal(p.lengths, p.counts)
    else:
        with pytest.raises(ValueError, match='real tokens first'): p.lengths

@SETTINGS
@given(masks(1), st.sampled_from(FLOATS), st.sampled_from([0., 1e4, -1e4]), st.integers(0, 1))
def test_masked_softmax_is_softmax_of_what_is_kept(keep, dtype, offset, dim):
    s = (torch.randn(keep.shape) + offset).to(dtype).masked_fill(~keep, torch.nan).requires_grad_()
    w = masked_softmax(s, keep, dim)
    for si,wi,k in zip(*(t.movedim(dim, -1) for t in (s, w, keep))): assert_close(wi[k], si[k].softmax(-1))
    assert (w[~keep]==0).all()
    (g,) = torch.autograd.grad(w, s, torch.randn_like(w))
    assert (g[~keep]==0).all() and g.isfinite().all()
    added = torch.zeros(keep.shape, dtype=dtype, requires_grad=True)
    (g,) = torch.autograd.grad(masked_softmax(added + PaddingMask(keep).additive(dtype), dim=dim), added, torch.randn_like(w))
    assert (g[~keep]==0).all() and g.isfinite().all()

def test_errors_name_the_argument():
    ok = torch.ones(2, 3, dtype=torch.bool)
    p = PaddingMask(ok)
    for error,call in ((TypeError, lambda: padding_mask(torch.ones(2))), (ValueError, lambda: padding_mask(torch.ones(2, 2, dtype=torch.int))), (ValueError, lambda: padding_mask([-1, 2])),
                       (TypeError, lambda: PaddingMask(ok.int())), (ValueError, lambda: PaddingMask(ok[0])), (ValueError, lambda: PaddingMask.from_hf(ok[None])), (ValueError, lambda: PaddingMask.from_keep(2*ok.int())), (ValueError, lambda: PaddingMask.from_additive(ok.float())),
                       (TypeError, lambda: PaddingMask.from_additive(ok)), (ValueError, lambda: PaddingMask.from_additive(torch.zeros(2, 1, 3, 3))), (ValueError, lambda: PaddingMask.from_additive(torch.full((2, 3), torch.nan))),
                       (TypeError, lambda: p.additive(torch.int64)), (ValueError, lambda: p.pack(torch.ones(3, 2))), (ValueError, lambda: p.unpack(torch.ones(5))), (ValueError, lambda: p.zero(torch.ones(2, 2, 3))),
                       (ValueError, lambda: p & PaddingMask(ok[:1])), (TypeError, lambda: p & ok), (TypeError, lambda: masked_softmax(torch.ones(3, dtype=torch.int)))):
        with pytest.raises(error): call()

LARGE = [(torch.float64,1e200), (torch.float32,1e30), (torch.bfloat16,1e30), (torch.float16,6e4)]

@pytest.mark.parametrize('dtype,large', LARGE, ids=str)
@pytest.mark.parametrize('impl', ['auto','dense','banded'])
def test_large_numbers_in_padding_change_nothing(dtype, large, impl):
    "Products of padded queries and padded keys overflow; the rest of the batch must not see it."
    n,real = 9,3
    x = torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    padding = PaddingMask.from_lengths(torch.tensor([real,n]), n)
    def outcome(x):
        x = x.clone().requires_grad_()
        out = attention(x, x, x, padding=padding, impl=impl)
        grad, = torch.autograd.grad(torch.where(padding.keep[:,None,:,None], out, 0.).sum(), x)
        return out[0,:,:real],out[1],grad[0,:,:real],grad[1]
    spoiled = torch.where(padding.keep[:,None,:,None], x, large)
    rounding = 4*torch.finfo(dtype).eps
    for found,expected in zip(outcome(spoiled), outcome(x)): assert_close(found, expected, rtol=rounding, atol=4*rounding)

@pytest.mark.parametrize('n,window', [(9,None), (300,20), (2500,30)])
@pytest.mark.parametrize('native', [True,False])
def test_large_numbers_in_padding_of_a_band(n, window, native, monkeypatch):
    "Products of a padded query overflow; its row must not spoil the gradients of the others."
    if not native: monkeypatch.setattr(core, 'library', lambda: None)
    real = n//3
    x = torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(0))
    padding = PaddingMask.from_lengths(torch.tensor([real,n]), n)
    keep = padding.keep[:,None,:,None]
    def outcome(x):
        x = x.clone().requires_grad_()
        out = attention(x, x, x, padding=padding, window=window, impl='banded')
        grad, = torch.autograd.grad(torch.where(keep, out, 0.).sum(), x)
        return out[0,:,:real],out[1],grad[0,:,:real],grad[1]
    for found,expected in zip(outcome(torch.where(keep, x, 1e30)), outcome(x)): assert_close(found, expected)
