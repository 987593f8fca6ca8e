"What chapter 52 cannot hold: a process without transformers, the example as a user calls it, a compiled backward pass, copies."
import copy, os, random, subprocess, sys
from pathlib import Path
import pytest, torch
from torch.testing import assert_close

ROOT = Path(__file__).resolve().parents[1]
os.environ['HF_HUB_OFFLINE'] = '1'

def _python(*cmd, **env):
    r = subprocess.run([sys.executable, *cmd], capture_output=True, text=True, cwd=ROOT, timeout=600, env={**os.environ, 'PYTHONPATH': str(ROOT), **env})
    return r.returncode, r.stdout + r.stderr

def test_the_package_does_not_import_transformers():
    code,out = _python('-c', 'import dynattn, sys; assert not {"transformers","peft","safetensors"} & sys.modules.keys()')
    assert code==0, out

def test_without_transformers_the_extra_is_named():
    code,out = _python('-c', 'import sys; sys.modules["transformers"] = None; import dynattn.hf')
    assert code and "pip install 'dynattn[hf]'" in out

def test_the_example_trains_saves_and_loads(tmp_path):
    r = random.Random(0)
    lines = [f"{l}\t{' '.join(r.choice(w) for _ in range(r.randint(4, 12)))}" for l,w in (('warm', ('sun','sand','heat')),('cold', ('ice','snow','frost'))) for _ in range(120)]
    (tmp_path/'train.tsv').write_text('\n'.join(lines), encoding='utf-8')
    code,out = _python(str(ROOT/'examples/finetune_hf.py'), str(tmp_path/'train.tsv'), '--out', str(tmp_path/'out'), '--alpha', '--lr', '3e-3', '--epochs', '4', CUDA_VISIBLE_DEVICES='')
    assert code==0, out
    last = next(l for l in out.splitlines() if l.startswith('accuracy'))
    accuracy,before,after = (float(w.rstrip('%,')) for w in last.replace(';', ' ').split() if w.rstrip(',').endswith('%'))
    assert accuracy>=90 and after<before, last
    from dynattn import hf
    model = hf.load(tmp_path/'out')
    assert model.config.id2label=={0: 'cold', 1: 'warm'} and model.config.dynattn['windows']['penalty']==.1
    assert len(Path(ROOT/'examples/finetune_hf.py').read_text(encoding='utf-8').splitlines())<100

@pytest.fixture(scope='module')
def model():
    from transformers import BertConfig, BertForSequenceClassification
    torch.manual_seed(0)
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=0., attention_probs_dropout_prob=0.)
    return BertForSequenceClassification(config)

def test_compiled_gradients_are_the_eager_ones(model):
    "aot_eager traces the backward pass as well, with the price in it."
    from dynattn import hf
    ids = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    batch = dict(input_ids=ids, attention_mask=(torch.arange(13) < torch.tensor([[13],[8]])).long(), labels=torch.tensor([0,1]))
    def gradients(wrap):
        m = hf.add_alpha(hf.add_windows(copy.deepcopy(model), init=3., per='input', penalty=.5), init=1.4).train()
        wrap(m)(**batch).loss.backward()
        return {name: p.grad for name,p in m.named_parameters() if p.grad is not None}
    assert_close(gradients(lambda m: torch.compile(m, fullgraph=True, backend='aot_eager')), gradients(lambda m: m))

def test_a_copy_and_a_pickle_are_whole(model, tmp_path):
    from dynattn import hf
    m = hf.add_windows(copy.deepcopy(model), init=3., penalty=.5).train()
    ids = torch.randint(3, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    loss = m(ids, labels=torch.tensor([0,1])).loss  # leaves widths with a graph behind
    torch.save(m, tmp_path/'m.pt')
    for other in (copy.deepcopy(m), torch.load(tmp_path/'m.pt', weights_only=False)): assert_close(other(ids, labels=torch.tensor([0,1])).loss, loss)
