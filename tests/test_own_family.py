"A model family outside of transformers, written down here: what CONTRIBUTING.md says of it is all that it needs."
import os
import pytest, torch
from torch import nn
from torch.testing import assert_close

os.environ['HF_HUB_OFFLINE'] = '1'
transformers = pytest.importorskip('transformers')
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from dynattn import hf

class OwnConfig(PretrainedConfig):
    "Its sizes have names of their own, which `attribute_map` translates"
    model_type = 'own_family'
    attribute_map = dict(hidden_size='width', num_attention_heads='heads', num_hidden_layers='depth')
    def __init__(self, width=16, heads=4, depth=2, **others):
        self.width,self.heads,self.depth = width,heads,depth
        super().__init__(**others)

class NamelessConfig(OwnConfig):
    model_type = 'nameless_family'
    attribute_map = {}
    def __init__(self, width=16, heads=4, depth=2, **others): super().__init__(width, heads, depth, **others)

def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0., **others):
    scores = query@key.mT*scaling
    if attention_mask is not None: scores = scores+attention_mask
    weights = scores.softmax(-1)
    return (weights@value).transpose(1, 2).contiguous(),weights

class Attention(nn.Module):
    is_causal = True
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.width, 3*config.width)
        self.out = nn.Linear(config.width, config.width)
    def heads(self, x): return self.qkv(x).unflatten(-1, (3, self.config.heads, -1)).permute(2, 0, 3, 1, 4)
    def forward(self, x):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        q,k,v = self.heads(x)
        return self.out(attend(self, q, k, v, None, scaling=q.shape[-1]**-.5)[0].flatten(2))

class Indirect(Attention):
    "It asks the table outside of its `forward`"
    def attend(self, *args, **options): return ALL_ATTENTION_FUNCTIONS.get_interface('sdpa', eager_attention_forward)(self, *args, **options)
    def forward(self, x):
        q,k,v = self.heads(x)
        return self.out(self.attend(q, k, v, None, scaling=q.shape[-1]**-.5)[0].flatten(2))

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _supports_sdpa = _supports_attention_backend = True
    attention = Attention
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(31, config.width)
        self.layers = nn.ModuleList([self.attention(config) for _ in range(config.depth)])
        self.post_init()
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers: x = x+layer(x)
        return BaseModelOutput(x)

class NamelessModel(OwnModel): config_class = NamelessConfig
class IndirectModel(OwnModel): attention = Indirect

def made(cls):
    torch.manual_seed(0)
    model = cls(cls.config_class()).eval()
    for p in model.parameters():
        if p.dim()==2: p.data.mul_(9)
    return model

IDS = torch.arange(3, 22)[None]

@torch.no_grad()
def states(model): return model(IDS)[0]

def test_a_family_of_ones_own_is_switched_gets_windows_and_is_saved(tmp_path):
    "`load` asked transformers for the configuration, which advised to update transformers"
    stock,model = made(OwnModel),hf.switch(made(OwnModel))
    assert_close(states(model), states(stock))
    hf.add_windows(model, init=2.)
    assert (states(model)-states(stock)).abs().max()>.01
    loss = model.train()(IDS)[0].square().sum()
    loss.backward()
    assert all(p.grad.abs().sum()>0 for name,p in model.named_parameters() if '.dynattn.' in name)
    model.eval()
    hf.save(model, tmp_path)
    assert_close(states(hf.load(tmp_path, OwnModel)), states(model))
    with pytest.raises(ValueError, match='own_family'): hf.load(tmp_path)    # whose class nobody names
    for layers in (hf.look(model, IDS[0]).layers, [*model.layers]): assert len(layers)==2

@pytest.mark.parametrize('cls, said', [
    (NamelessModel, 'model: expected the number and the width of the heads from layers.0 or its configuration'),
    (IndirectModel, "model: expected attention that goes through transformers' interface, got IndirectModel, which computes its own, or asks "
                    "for it outside of its layers' `forward`")])
def test_what_a_family_of_ones_own_lacks_is_said(cls, said):
    before = states(made(cls))
    model = made(cls)
    with pytest.raises(ValueError, match=said): hf.add_windows(model)
    assert torch.equal(states(model), before)
