"The audit finds faults that were reported in public, rebuilt here in a few lines, and is silent on healthy models."
import json, math, sys
from pathlib import Path
import pytest, torch, torch.nn.functional as F
from torch import nn
from dynattn import Encoder, EncoderConfig, audit
from dynattn.auditing import NO, UNSURE, AttentionFunction, depends, look_at_layers, reach_of
from dynattn.command import main

sys.path.insert(0, str(Path(__file__).parent))
N,WINDOW = 29,5

def heads(n=N, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, 8, generator=g) for _ in range(3)]

def sequence(n=N, width=16): return torch.randn(1, n, width, generator=torch.Generator().manual_seed(0))

def back(q, k):
    "i-j, aligned at the end."
    at = torch.arange(k.shape[2])
    return at[k.shape[2]-q.shape[2]:,None]-at

# ---- faults that were reported, as small as they can be rebuilt

def window_one_too_wide(q, k, v):
    "The kernel counts neighbours, the configuration counts the token itself too."
    d = back(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<=WINDOW))

def empty_row_sees_all(q, k, v):
    "Only what comes before a token; the first has nothing, and finfo.min for all is the same as 0 for all."
    scores = (q @ k.mT).masked_fill(back(q, k)<=0, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v

def step_without_window(q, k, v):
    "A single query goes another way, on which the window is missing."
    if q.shape[2]==1: return F.scaled_dot_product_attention(q, k, v)
    d = back(q, k)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<WINDOW))

def ring_with_the_same_window(q, k, v, ranks=3):
    "Each rank gets the keys of the others in turn, and takes the window as if they began where its queries begin."
    size = -(-q.shape[2]//ranks)
    outs = []
    for qs in q.split(size, 2):
        scores = []
        for ks in k.split(size, 2):
            d = torch.arange(qs.shape[2])[:,None]-torch.arange(ks.shape[2])
            scores.append((qs @ ks.mT).masked_fill(d.abs()>=WINDOW, -math.inf))
        outs.append(torch.cat(scores, -1).softmax(-1).nan_to_num() @ v)
    return torch.cat(outs, 2)

def weak_padding_mask(q, k, v, keep=None):
    "-1e-9 where -1e9 was meant."
    scores = q @ k.mT
    if keep is not None: scores = scores.masked_fill(~keep[:,None,None], -1e-9)
    return scores.softmax(-1) @ v

class Model(nn.Module):
    "One layer of plain attention with learned positions, for faults around it."
    def __init__(self, width=16, longest=64):
        super().__init__()
        torch.manual_seed(1)
        self.qkv,self.place = nn.Linear(width, 3*width),nn.Embedding(longest, width)

    def attend(self, x, mask=None):
        q,k,v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

class PositionsFromTheRow(Model):
    "All rows of a batch count their positions from the left edge, whatever padding stands there."
    def forward(self, x, keep=None):
        x = x+self.place(torch.arange(x.shape[1]))
        return self.attend(x, None if keep is None else keep[:,None,None])

class RestartedPositionsOnly(Model):
    "Packed texts get positions of their own, and see each other."
    def forward(self, x, segments=None):
        n = x.shape[1]
        places = torch.arange(n)[None]
        if segments is not None:
            lengths = segments[0].unique_consecutive(return_counts=True)[1]
            places = torch.cat([torch.arange(length) for length in lengths])[None]
        return self.attend(x+self.place(places), torch.ones(n, n).tril().bool())

class MeanOverPadding(Model):
    "Attention knows the padding, the mean behind it does not."
    def forward(self, x, attention_mask=None):
        return self.attend(x, None if attention_mask is None else attention_mask.bool()[:,None,None]).mean(1)

class HeadsOfTheNeighbour(Model):
    "The mask of a batch is repeated for the heads in the wrong order: B, B instead of each row for all of its heads."
    def __init__(self):
        super().__init__()
        self.torchs = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x, key_padding_mask=None):
        if key_padding_mask is None: return self.torchs(x, x, x, need_weights=False)[0]
        mask = key_padding_mask[:,None].expand(-1, x.shape[1], -1).repeat(2, 1, 1)
        return self.torchs(x, x, x, attn_mask=mask, need_weights=False)[0]

class SummaryOfTheBlock(Model):
    "The mean of a block of eight is added to each of its tokens, the first ones too."
    def forward(self, x):
        blocks = F.pad(x, (0, 0, 0, -x.shape[1]%8)).unflatten(1, (-1, 8))
        x = x+blocks.mean(2, keepdim=True).expand_as(blocks).flatten(1, 2)[:,:x.shape[1]]
        return self.attend(x, torch.ones(x.shape[1], x.shape[1]).tril().bool())

class SortedByHash(Model):
    "Tokens are sorted by a hash and cut into chunks: all tokens decide who shares one. Inside, only the past counts."
    def forward(self, x, chunk=8):
        q,_,v = self.qkv(x).chunk(3, -1)
        n,width = x.shape[1:]
        order = q.sum(-1).sign().argsort(dim=-1, stable=True)             # [B,N]
        order = F.pad(order, (0, -n%chunk), value=n)                      # n is a token of zeros
        index = order[...,None].expand(-1, -1, width)
        q,v = (F.pad(t, (0, 0, 0, 1)).gather(1, index).unflatten(1, (-1, chunk)) for t in (q, v))
        place = order.unflatten(1, (-1, chunk))
        visible = (place[...,None]>=place[...,None,:]) & (place[...,None,:]<n)
        out = (q @ q.mT).masked_fill(~visible, -math.inf).softmax(-1).nan_to_num() @ v
        return torch.zeros_like(x[:,:1]).expand(-1, n+1, -1).scatter(1, index, out.flatten(1, 2))[:,:n]

def mistral(implementation=None, **options):
    transformers = pytest.importorskip('transformers')
    def lost(module, query, key, value, attention_mask, scaling=None, **kwargs):
        "The window is in the mask that this path does not take."
        several = query.shape[2]>1
        out = F.scaled_dot_product_attention(query, key, value, is_causal=several, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2),None
    if implementation: transformers.AttentionInterface.register(implementation, lost)
    torch.manual_seed(0)
    config = transformers.MistralConfig(vocab_size=99, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW, max_position_embeddings=64, **options)
    model = transformers.MistralForCausalLM(config).eval()
    if implementation: model.set_attn_implementation(implementation)
    return model

BAND = dict(window=(WINDOW-1, 0), causal=True)
GITHUB = 'https://github.com/'
REPORTED = dict( # name -> address below GITHUB, the model and an example, promises, the question that finds it
    window_one_too_wide=('huggingface/transformers/issues/39408',
        lambda: (window_one_too_wide, heads()), BAND, 'window'),
    window_lost_on_a_path=('unslothai/unsloth/pull/8253',
        lambda: (mistral('lost'), None), {}, 'window'),
    window_that_was_switched_off=('huggingface/transformers/issues/38002',
        lambda: (mistral(use_sliding_window=False), None), {}, 'window'),
    ring_hands_the_window_on=('open-lm-engine/lm-engine/pull/447',
        lambda: (ring_with_the_same_window, heads()), dict(window=WINDOW-1), 'window'),
    empty_row_sees_all=('pytorch/pytorch/issues/41508',
        lambda: (empty_row_sees_all, heads()), dict(causal=True), 'future'),
    summary_of_a_block=('karpathy/nanochat/issues/844',
        lambda: (SummaryOfTheBlock(), sequence()), dict(causal=True), 'future'),
    membership_leaks=('lucidrains/reformer-pytorch/issues/69',
        lambda: (SortedByHash(), sequence(72)), dict(causal=True), 'future'),
    weak_padding_mask=('Shujun-He/RibonanzaNet/issues/5',
        lambda: (weak_padding_mask, heads()), {}, 'padding'),
    mean_counts_padding=('HKUDS/LightRAG/pull/3675',
        lambda: (MeanOverPadding(), sequence()), {}, 'padding'),
    positions_of_left_padding=('unslothai/unsloth/issues/3699',
        lambda: (PositionsFromTheRow(), sequence()), dict(left_padding=True), 'left_padding'),
    mask_of_the_neighbour=('line/lighthouse/pull/77',
        lambda: (HeadsOfTheNeighbour(), sequence()), {}, 'batch'),
    packed_texts_see_each_other=('huggingface/nanoVLM/pull/204',
        lambda: (RestartedPositionsOnly(), sequence()), dict(causal=True), 'packed'),
    cache_forgets_the_window=('karpathy/nanochat/issues/452',
        lambda: (step_without_window, heads()), BAND | dict(cached=True), 'cached'),
)

@pytest.mark.parametrize('name', REPORTED)
def test_a_reported_fault_is_found_and_its_code_shows_it(name):
    address,make,promises,question = REPORTED[name]
    model,example = make()
    found = audit(model, example, **promises)
    assert not found.ok and question in {f.check for f in found.broken}, found
    for f in found.broken:
        if not f.code: continue
        assert 'dynattn' not in f.code and compile(f.code, name, 'exec')
        told = dict(audited=model.double().eval() if isinstance(model, nn.Module) else model)
        code = '\n'.join(line for line in f.code.splitlines() if not line.startswith('from test_audit import'))
        exec(code, told)
        assert told['change']==0 if 'expected: above 0' in f.code else told['change']>1e-9, f.code

def test_the_chapter_names_every_report():
    text = (Path(__file__).parents[1]/'nbs/58_auditing.ipynb').read_text(encoding='utf-8')
    assert not [address for address,*_ in REPORTED.values() if GITHUB+address not in text]

def test_each_fault_goes_when_it_is_mended():
    def right(q, k, v):
        d = back(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & (d<WINDOW))
    assert audit(right, heads(), window=(WINDOW-1, 0), causal=True, cached=True).ok
    def padded(q, k, v, keep=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if keep is None else keep[:,None,None])
    assert audit(padded, heads(), left_padding=True).ok
    assert audit(mistral(), None, packed=True).ok

# ---- what is healthy

HEALTHY = ['bert','modernbert','llama','mistral','gemma2','gpt2','t5','whisper','vit']

@pytest.mark.parametrize('name', HEALTHY)
def test_silent_on_healthy_models(name):
    pytest.importorskip('transformers')
    import test_hf_common
    found = audit(test_hf_common.build(name))
    assert found.ok and not [f for f in found.findings if f.status=='undecided'], found
    assert [layer.way for layer in found.layers]==['weights']*(4 if name in ('t5','whisper') else 2)
    assert json.dumps(found.to_json())

@pytest.mark.parametrize('options', [dict(window='learned', init_width=3.), dict(window=None, causal=True, cls=False)],
    ids=str)
def test_silent_on_our_own_encoder(options):
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(dim=16, heads=2, layers=2, **options))
    found = audit(encoder, torch.randint(0, 256, (1, 31)), longest=31)
    assert found.ok and found.layers and all(layer.promised[0] for layer in found.layers), found

def test_silent_on_clean_forms_of_the_survey_and_loud_on_leaks():
    from dynattn.survey import card, learned, memory
    torch.manual_seed(0)
    for system in (card.Exact, learned.ReformerExact, learned.RoutingArgmax, memory.Luna):
        found = audit(system.at(24, causal=True), sequence(24))
        assert found.ok and found.answers['future'][1], found
    leaks = audit(learned.Routing.at(36, causal=True), sequence(36))
    assert [f.check for f in leaks.broken]==['future'], leaks

# ---- sound

def test_rounding_is_no_dependence_and_doubt_is_said():
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    delta = torch.zeros_like(x)
    delta[5] = 1
    noisy = depends(lambda x: x[:3]+1e-12*torch.sin(1e9*x[5]), x, delta)
    assert set(noisy.tolist())=={UNSURE}

class OwnAttention(Model):
    "Neither a kernel nor a softmax that could be watched."
    def forward(self, x):
        q,k,v = self.qkv(x).chunk(3, -1)
        d = back(q[None], k[None])
        weights = torch.exp(q @ k.mT/4)*((d>=0) & (d<=3))
        return weights/weights.sum(-1, keepdim=True) @ v

def test_attention_that_cannot_be_watched_is_measured_by_change():
    model = nn.Sequential(OwnAttention(), nn.Linear(16, 16), OwnAttention())
    found = audit(model, sequence(13), causal=True, window=2)
    seen = [(layer.name, layer.way, layer.reach[0].left) for layer in found.layers]
    assert seen==[('0', 'module', 3), ('2', 'module', 3)]
    code, = {f.code for f in found.broken}
    told = dict(audited=model.double())
    exec(code, told)
    assert told['change']>1e-9

def test_torchs_own_encoder_and_nothing_is_left_behind():
    from dynattn import ops
    impls,default = dict(ops.impls),torch.get_default_dtype()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 8, batch_first=True), 2)
    found = audit(encoder, sequence(11))
    assert found.ok and [len(layer.reach) for layer in found.layers]==[2, 2] and found.answers['padding']==(NO, True)
    assert ops.impls==impls and torch.get_default_dtype()==default and next(encoder.parameters()).dtype==torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())

def test_a_question_that_fails_is_said_to_be_undecided():
    def fragile(x, keep=None):
        if keep is not None: raise RuntimeError('no padding today')
        return x
    found = audit(fragile, sequence(9))
    assert found.ok and any(f.status=='undecided' and 'no padding today' in f.sentence for f in found.findings)

def test_a_window_that_begins_late_is_found():
    def late(q, k, v):
        d = back(q, k)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(d>=0) & ((d<=6) | (k.shape[2]<50)))
    found = audit(late, heads(17), causal=True, longest=100)
    assert {begin for begin in found.begins.values()}=={(50, 7)}
    for promised,tokens in ((40, 49), (60, 50)): # the window begins too late, and too early
        found = audit(late, heads(17), window=(promised, 0), causal=True, longest=100)
        finding, = found.broken
        told = dict(audited=late)
        exec(finding.code, told)
        assert finding.check=='length' and told['x'].shape[1]==tokens and (told['change']==0)==(promised==60)

@pytest.mark.parametrize('options', [dict(window=3), dict(window=(2, 0), is_causal=True, n_global=2),
    dict(alpha=1.5, window=(6, 1))], ids=str)
def test_widths_are_those_of_the_call(options):
    from dynattn import attention
    s = AttentionFunction(lambda q, k, v: attention(q, k, v, **options), heads(23))
    layer, = look_at_layers(s, 23, None)
    w = options['window']
    assert {(r.left, r.right) for r in layer.reach}=={(w, w) if isinstance(w, int) else w}

@pytest.mark.parametrize('wrong,said', [
    (dict(example=None), 'example: expected a tensor'),
    (dict(example=heads()[:2]), 'example: expected a tensor [B,N,...] or three'),
    (dict(example=[t[0] for t in heads()]), 'example: expected q, k and v'),
    (dict(example=heads(), n=2), 'n: expected an int of 4'),
    (dict(example=heads(), window='all'), 'window: expected an int or a pair')])
def test_bad_input(wrong, said):
    with pytest.raises((TypeError, ValueError), match=said.replace('[', r'\[')): audit(window_one_too_wide, **wrong)


# ---- the command

def write_models(folder):
    (folder/'models.py').write_text("""
import torch, torch.nn.functional as F

def causal(q, k, v): return F.scaled_dot_product_attention(q, k, v, is_causal=True)
def everything(q, k, v): return F.scaled_dot_product_attention(q, k, v)
def example(): return tuple(torch.randn(1, 2, 9, 4) for _ in range(3))
def sound(): return causal, example(), dict(causal=True)
def broken(): return everything, example(), dict(causal=True)
""")
    return folder/'models.py'

def test_the_command_and_its_exit_status(tmp_path, capsys):
    path = write_models(tmp_path)
    assert main(['audit', f'{path}:sound', '--quiet'])==0
    assert 'no promise is broken' in capsys.readouterr().out
    assert main(['audit', f'{path}:broken', '--quiet', '--json', '--png', str(tmp_path/'heads.png')])==1
    told = json.loads(capsys.readouterr().out)
    assert not told['ok'] and told['answers']['future']==dict(answer='yes', promised=True)
    assert (tmp_path/'heads.png').read_bytes().startswith(b'\x89PNG')
    assert main(['audit', f'{path}:broken', '--quiet', '--code'])==1
    assert 'expected: 0' in capsys.readouterr().out

@pytest.mark.parametrize('name,said', [
    ('none.py:f', 'model: expected a file'), ('models.py:f', 'model: expected a function of'),
    ('models.py:example', 'model: expected example to return a model')])
def test_what_cannot_be_audited_is_one_line(tmp_path, capsys, name, said):
    write_models(tmp_path)
    assert main(['audit', str(tmp_path/name), '--quiet'])==2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith('dynattn: ') and said in line

def test_a_folder_with_windows_needs_no_tokenizer(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM
    from dynattn import hf
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)).eval()
    hf.add_windows(model, init=5., edge='hard')
    model.save_pretrained(tmp_path)
    assert main(['audit', str(tmp_path), '--quiet'])==0
    assert '5 back  5 back' in capsys.readouterr().out
