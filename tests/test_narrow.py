"The command `dynattn narrow`: bad input, a run that is killed, and the folder that it leaves."
import json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest, torch
transformers = pytest.importorskip('transformers')
from tokenizers import Tokenizer, models, pre_tokenizers
from dynattn import hf
from dynattn.command import main

ENV = {**os.environ, 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
LETTERS = 'abcdefghijklmnopqrstuvwxyz .,\n'

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with a small Llama, a small BERT and documents."
    root = tmp_path_factory.mktemp('narrow')
    vocabulary = {c: i for i,c in enumerate(['<end>', '<other>', *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token='<other>'))
    letters.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token='<end>', unk_token='<other>')
    torch.manual_seed(0)
    size = dict(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2, max_position_embeddings=256))
    bert = transformers.BertModel(transformers.BertConfig(**size, max_position_embeddings=256))
    for name,model in dict(llama=llama, bert=bert).items():
        model.save_pretrained(root/name)
        tokenizer.save_pretrained(root/name)
    (root/'docs').mkdir()
    for i in range(20): (root/'docs'/f'{i}.txt').write_text(f'the quick brown fox number {"abcdefghijklmnopqrst"[i]} jumps over the lazy dog.\n'*20)
    rows = [json.dumps(dict(body='a line of text that says a little. '*30)) for _ in range(16)]
    (root/'rows.jsonl').write_text('\n'.join(rows))
    return root

def command(place, *options, model='llama', out='out', data='docs'):
    small = dict(steps=6, context=48, judged=3)
    given = {o.split('=')[0].strip('-') for o in options}
    rest = [f'--{k}={v}' for k,v in small.items() if k not in given]
    return ['narrow', str(place/model), f'--data={place/data}', f'--out={place/out}', '--quiet', *rest, *options]

@pytest.mark.parametrize('model', ['llama','bert'])
def test_run(place, model, capsys):
    assert main(command(place, '--keep=0.3', '--json', model=model, out=model+'-out'))==0
    result = json.loads(capsys.readouterr().out)
    assert abs(result['share']-.3)<.02 and result['finished'] and len(result['steps'])==6
    assert {r['way'] for r in result['quality']}=={'learned','one window','one per layer','random'}
    assert {'report.md','result.json','widths.png','quality.png','config.json'} <= {p.name for p in (place/(model+'-out')).iterdir()}
    again = hf.load(place/(model+'-out'))
    widths = [m.dynattn.sigma_head().detach() for m in again.modules() if hasattr(m, 'dynattn')]
    for layer,saved in zip(widths, result['widths']):
        wanted = torch.tensor(saved, dtype=torch.float32).repeat_interleave(len(layer)//len(saved))
        torch.testing.assert_close(layer.clamp(max=1000), wanted.clamp(max=1000))
    assert all(m.dynattn.edge=='hard' for m in again.modules() if hasattr(m, 'dynattn'))

def test_json_lines(place, capsys):
    assert main(command(place, '--field=body', '--steps=2', data='rows.jsonl', out='rows-out'))==0
    assert 'keeps' in capsys.readouterr().out

@pytest.mark.parametrize('options,said', [
    (dict(data='missing'), 'data: expected a folder or a file'),
    (dict(model='missing'), 'model: '),
    (dict(model='docs'), 'model: '),
    (dict(extra=['--keep=0']), 'keep: expected a number above 0'),
    (dict(extra=['--keep=0.01']), 'keep: expected 0.1'),
    (dict(extra=['--keep=x']), '--keep'),
    (dict(extra=['--steps=0']), 'steps: expected a whole number'),
    (dict(extra=['--context=0']), 'context: expected a whole number'),
    (dict(extra=['--context=100000']), 'data: expected documents for at least one text of 100000 tokens'),
    (dict(extra=['--method=x']), 'method: expected distill or loss'),
    (dict(extra=['--sinks=48']), 'sinks: expected 0 or more and fewer than the 48'),
    (dict(extra=['--resume']), 'out: expected a run to go on with'),
    (dict(out='docs'), 'out: expected a new or an empty folder'),
    (dict(data='rows.jsonl'), "line 1: expected a JSON object with 'text'"),
    (dict(extra=['--nonsense']), 'unrecognized arguments')])
def test_bad_input_is_one_line(place, options, said, capsys):
    extra = options.pop('extra', [])
    assert main(command(place, *extra, **{'out': 'bad-out', **options}))==2
    lines = [l for l in capsys.readouterr().err.splitlines() if l]
    assert len(lines)==1 and lines[0].startswith('dynattn: ') and said in lines[0], lines
    assert not (place/'bad-out/model.safetensors').exists()

def start(place, *options, **where):
    return subprocess.Popen([sys.executable, '-m', 'dynattn', *command(place, *options, **where)], env=ENV,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def until(path, process, seconds=90):
    for _ in range(seconds*20):
        if path.exists(): return
        assert process.poll() is None, process.stderr.read()
        time.sleep(.05)
    raise AssertionError(f'{path} never came')

def test_killed_and_resumed(place):
    options = ['--steps=60', '--keep=0.3']
    assert main(command(place, *options, out='whole'))==0
    process = start(place, *options, out='killed')
    until(place/'killed/checkpoint.pt', process)
    process.kill()
    process.wait()
    assert not (place/'killed/result.json').exists()
    assert main(command(place, *options, '--resume', '--keep=0.5', out='killed'))==2
    assert main(command(place, *options, '--resume', out='killed'))==0
    whole,resumed = (json.loads((place/name/'result.json').read_text()) for name in ('whole','killed'))
    assert whole['steps']==resumed['steps'] and whole['widths']==resumed['widths'] and whole['quality']==resumed['quality']

def test_interrupted_keeps_the_widths_so_far(place):
    process = start(place, '--steps=2000', '--keep=0.3', '--json', out='stopped')
    until(place/'stopped/checkpoint.pt', process)
    process.send_signal(signal.SIGINT)
    out,err = process.communicate(timeout=120)
    assert process.returncode==0, err
    result = json.loads(out)
    assert not result['finished'] and 5<=len(result['steps'])<2000 and abs(result['share']-.3)<.02
    hf.load(place/'stopped')
