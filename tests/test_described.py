"A file that a verb reads is checked against one description: damaged ones end in one line (reviews/hostile.md 8)."
import copy, dataclasses, json, math, random
import pytest, torch
transformers = pytest.importorskip('transformers')
from dynattn.command import main
from dynattn.hf.curves import Budget
from dynattn.narrow import command as narrow_command
from dynattn.narrow.judge import Report
from dynattn.options import NarrowConfig
from dynattn.runs import Run
from dynattn.saved import Field, UserError, check_value, option_fields, read_json
from dynattn.train import training

VALUES = [None, True, 0, -1, 1.5, math.nan, math.inf, 2**70, 10**400, '', 'x', 'a'*1000, [], [[]], [None], {}, {'x': {}}, [[[[1]]]]]

def mutations(value, path=()):
    "(path, a copy with another value there or without it), for every part of a JSON value."
    def at(root, path):
        for key in path: root = root[key]
        return root
    def parts(x, path):
        yield path
        items = x.items() if isinstance(x, dict) else enumerate(x[:2]) if isinstance(x, list) else ()
        for key,inner in items: yield from parts(inner, (*path, key))
    for where in list(parts(value, ()))[1:]:
        for new in (*VALUES, 'missing'):
            changed = copy.deepcopy(value)
            holder = at(changed, where[:-1])
            if new=='missing': del holder[where[-1]]
            else: holder[where[-1]] = new
            yield where,changed

def texts_of(value):
    "Files that hold a value that is nearly right, and files that are nearly no file."
    whole = json.dumps(value)
    for where,changed in mutations(value): yield json.dumps(changed).encode()
    for new in VALUES: yield json.dumps(new).encode()
    rng = random.Random(0)
    for _ in range(40): yield whole[:rng.randrange(len(whole))].encode()
    for _ in range(40):
        data = bytearray(whole.encode())
        data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data)
    yield from (b'', b'\xff\xfe', b'['*100_000, b'{"a":'*10_000, b'1'*5000, b'\x00'*100, whole.encode('utf-16'), b'"\\ud800"')

HEALED = dict(rows=[dict(step=0, loss=1.)], before=[1., 2.], after=[.5, 1.], kept=True)
REPORT = json.loads(json.dumps(dataclasses.asdict(Report(
    causal=True, n=64, sinks=4, share=.25, widths=[[3, 20]], quality=[dict(way='one per head', share=.25, changes=[.1])], judged=1,
    model='some/where', config=dataclasses.asdict(NarrowConfig()), healed=HEALED))))
CLASS = dict(precision=.5, recall=.5, f1=.5, support=2)
RESULT = dict(classes=['a','b'], accuracy=.5, f1=.5, majority=.5, share=.3, per_class=dict(a=CLASS, b=CLASS), confusion=[[1,1],[1,1]])

def ends_in_one_line(path, value, read):
    "`read()` gives something or a `UserError` of one line, whatever is in the file."
    count = 0
    for data in texts_of(value):
        path.write_bytes(data)
        try: read()
        except UserError as e:
            assert '\n' not in str(e) and path.name in str(e) or 'holds a run of other settings' in str(e) or ': expected' in str(e), e
            assert len(str(e))<1500, e
            count += 1
    assert count>20                                            # most of them are refused
    path.write_text(json.dumps(value))

def test_the_result_of_narrow(tmp_path):
    REPORT['model'] = str(tmp_path)
    ends_in_one_line(tmp_path/'result.json', REPORT, lambda: narrow_command._original(tmp_path))
    assert narrow_command._original(tmp_path)==str(tmp_path)

def test_the_settings_of_narrow(tmp_path):
    settings = dict(model='x', **dataclasses.asdict(NarrowConfig()))
    run = Run(tmp_path, ('settings.json',), settings)
    ends_in_one_line(tmp_path/'settings.json', settings, lambda: narrow_command._check_out(run, True))
    narrow_command._check_out(run, True)

def test_the_index_of_sentence_transformers(tmp_path):
    index = [dict(idx=0, path=''), dict(idx=1, path='1_Pooling')]
    ends_in_one_line(tmp_path/'modules.json', index, lambda: list(narrow_command._named_files(tmp_path)))

def test_the_result_of_train(tmp_path):
    def read(): training._summary(training._read_result(tmp_path))
    ends_in_one_line(tmp_path/'result.json', RESULT, read)
    read()

def test_the_settings_of_train(tmp_path):
    settings = dataclasses.asdict(training.TrainConfig())
    ends_in_one_line(tmp_path/'settings.json', settings, lambda: training.TrainConfig.of_run(tmp_path))
    assert training.TrainConfig.of_run(tmp_path)==settings

def test_no_model_is_fetched_because_a_file_names_it(tmp_path, monkeypatch):
    "judge took the model of a stranger's result.json, names of the Hub included"
    asked = []
    def load(name, **options):
        asked.append(name)
        raise UserError('stop')
    monkeypatch.setattr(narrow_command, 'load_pretrained', load)
    (tmp_path/'result.json').write_text(json.dumps(dict(REPORT, model='someone/model')))
    with pytest.raises(UserError, match="model: expected the folder that the model was made from, got 'someone/model', which is not here; --model"):
        narrow_command._original(tmp_path)
    assert narrow_command._original(tmp_path, 'someone/model')=='someone/model'          # confirmed
    for kept in (False, None):
        healed = kept if kept is None else dict(HEALED, kept=False)
        (tmp_path/'result.json').write_text(json.dumps(dict(REPORT, model='someone/model', healed=healed)))
        assert narrow_command._original(tmp_path) is None
    assert not asked

def test_judge_confirms_by_model(capsys):
    with pytest.raises(SystemExit): main(['judge', '--help'])
    assert '--model ORIGINAL' in capsys.readouterr().out

@pytest.mark.parametrize('special', ['/dev/zero', '.'])
def test_only_files_are_read(special, tmp_path):
    (tmp_path/'result.json').symlink_to(special)
    with pytest.raises(UserError, match='expected a file'): read_json(tmp_path/'result.json', {})

def test_a_description_names_the_part():
    for value,field,said in [
            (dict(a=[1, 'x']), Field(dict, inside=dict(a=Field(list, each=Field(int)))), r"a\[1\]: expected a whole number, got 'x'"),
            (dict(a=dict(b=None)), Field(dict, inside=dict(a=Field(dict, inside=dict(b=Field(str))))), 'a.b: expected a text, got None'),
            (True, Field(int), 'expected a whole number, got True'), (math.nan, Field(float), 'expected a finite number'),
            (10**400, Field(float), 'expected a finite number'), ({}, Field(dict, inside=dict(b=Field(str))), 'b: expected a text, got none')]:
        with pytest.raises(ValueError, match=said): check_value(value, field, '')
    check_value(dict(keep=None, heal=3), Field(dict, inside=option_fields(NarrowConfig)), '')

@pytest.mark.parametrize('most', [2**70, 2**63, -5])
def test_look_with_a_limit_that_is_none(most):
    "`look` with `max_position_embeddings: 2**70`"
    from tokenizers import Tokenizer, models, pre_tokenizers
    from dynattn.hf.looking import look
    words = Tokenizer(models.WordLevel(dict(a=0, b=1), unk_token='a'))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token='a')
    size = dict(vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)).eval()
    model.config.max_position_embeddings = most
    assert len(look(model, 'a b a', tokenizer).ids)==3          # -5 limits nothing: the tokenizer's own limit counts

def test_nested_texts_with_grouped_heads():
    "a raw error of PyTorch's, with no option"
    from dynattn import attention
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randn(n, h, 8, generator=generator) for n in (5, 7)] for h in (4, 2)]
    q,k = (torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in rows)
    for options in ({}, dict(is_causal=True), dict(enable_gqa=True), dict(window=2)):
        plain = {name: x for name,x in options.items() if name!='enable_gqa'}
        for out,a,b in zip(attention(q, k, k, **options).transpose(1, 2).unbind(), *rows):
            a,b = (x.transpose(0, 1)[None] for x in (a, b))
            torch.testing.assert_close(out, attention(a, b, b, **plain)[0].transpose(0, 1))
    strided = [torch.nested.nested_tensor([x.transpose(0, 1).contiguous() for x in part]) for part in rows]
    with pytest.raises(ValueError, match='q: expected'): attention(strided[0], strided[1], strided[1])
