"What takes too long for the chapter: a byte model with all its parts, compiled while it trains."
import pytest, torch
from torch.testing import assert_close
from dynattn import Classifier, EncoderConfig, PaddingMask

def gradients(f, model, ids, padding):
    model.zero_grad()
    f(ids, padding).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]

@pytest.mark.slow
def test_a_model_with_patches_grams_and_windows_compiles_as_one_graph_in_training():
    torch.manual_seed(0)
    model = Classifier(EncoderConfig(dim=8, heads=2, layers=1, patch=4, grams=(2,3), init_width=3., classes='ab')).train()
    ids,padding = torch.randint(256, (3,40)),PaddingMask.from_lengths(torch.tensor([40,17,1]))
    want = gradients(model, model, ids, padding)
    got = gradients(torch.compile(model, fullgraph=True, backend='aot_eager'), model, ids, padding)
    for a,b in zip(got, want, strict=True): assert_close(a, b)
    assert all((g!=0).any() for g in want[:3])
