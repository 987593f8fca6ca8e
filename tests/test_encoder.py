"A byte model compiled while it trains; folders of earlier versions; layers beside PyTorch's."
import json
import pytest, torch
from torch.testing import assert_close
from dynattn import Classifier, EncoderConfig, EncoderLayer, PaddingMask
from dynattn.saved import read_weights, write_weights

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

@pytest.mark.parametrize('window', ['learned', 'predicted', 3, None])
def test_a_folder_of_an_earlier_version_is_the_same_model(window, tmp_path):
    "There `predicted` was `dynamic`, and queries, keys and values had a matrix each."
    torch.manual_seed(0)
    model = Classifier(EncoderConfig(dim=8, heads=2, window=window, init_width=[2.,5.], alpha='learned', classes='ab')).eval()
    model.save_pretrained(tmp_path)
    ids,padding = torch.randint(256, (3,20)),PaddingMask.from_lengths(torch.tensor([20,5,11]))
    earlier = {}
    for name,x in read_weights(tmp_path/'model.safetensors')[0].items():
        stem,found,kind = name.partition('in_proj_')
        if not found: earlier[name] = x
        else: earlier |= {f'{stem}{of}_proj.{kind}': part.clone() for of,part in zip('qkv', x.chunk(3))}
    write_weights(tmp_path/'model.safetensors', earlier)
    config = json.loads((tmp_path/'config.json').read_text())
    if window=='predicted': config['window'] = 'dynamic'
    (tmp_path/'config.json').write_text(json.dumps(config))
    loaded = Classifier.from_pretrained(tmp_path)
    assert loaded.config==model.config and torch.equal(loaded(ids, padding), model(ids, padding))
    with pytest.raises(ValueError, match="window: expected 'learned', 'predicted'"): EncoderLayer(8, 2, window='dynamic')

def test_the_default_is_one_learned_width_per_head_that_starts_wide():
    from inspect import signature
    from dynattn import MultiheadAttention, convert
    from dynattn.train.training import TrainConfig
    assert EncoderConfig().window==TrainConfig(data='').window==signature(EncoderLayer).parameters['window'].default=='learned'
    widths = [EncoderConfig().init_width, TrainConfig(data='').init_width]
    widths += [signature(f).parameters['init_width'].default for f in (EncoderLayer, MultiheadAttention, convert)]
    assert set(widths)=={64.}
    assert_close(EncoderLayer(8, 2)(torch.randn(1, 3, 8), return_sigma=True)[1], torch.full((2,), 64.))
    assert all(signature(f).parameters['window'].default is None for f in (MultiheadAttention, convert)) # PyTorch's double

@pytest.mark.parametrize('window', ['learned', 'predicted', 2, (2,1), None])
@pytest.mark.parametrize('causal', [False, True])
def test_a_layer_notes_the_pairs_that_its_heads_saw(window, causal):
    "Counted beside it, from the weights of its attention"
    torch.manual_seed(0)
    layer,padding = EncoderLayer(8, 2, window=window, init_width=[1.,4.], causal=causal),PaddingMask.from_lengths(torch.tensor([9,4,1]))
    if window=='predicted': torch.nn.init.normal_(layer.self_attn.sigma_head.linear.weight, std=.4)
    x = torch.randn(3, 9, 8)
    _,sigma = layer(x, padding, return_sigma=True)
    h = padding.zero(layer.norm1(padding.zero(x)))
    _,weights = layer.self_attn(h, h, h, average_attn_weights=False, is_causal=causal, padding=padding)
    pairs = padding.keep[:,None,:,None] & (weights>0)
    assert torch.equal(layer.seen['pairs'], pairs.sum((2,3)))
    assert torch.equal(layer.seen['tokens'], padding.lengths) and (sigma is None)==(not isinstance(window, str))
