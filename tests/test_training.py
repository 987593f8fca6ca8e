"What a notebook cannot hold of training: processes that are stopped, killed and gone on with, and the exit status of the command."
import errno, json, os, random, shutil, signal, socket, subprocess, sys
from pathlib import Path
import pytest
pytest.importorskip('accelerate'); pytest.importorskip('safetensors')
from dynattn import training, encoder
from dynattn.training import main, locked

ROOT = Path(__file__).resolve().parents[1]
SMALL = '--crop 48 --dim 8 --heads 2 --layers 1 --grams 2 --patch 4 --min-files 12 --per-package 20 --batch 8 --epochs 2 --every 3 --impl dense'.split()
WORDS = 'alpha beta gamma delta epsilon zeta'.split()
TEXT = {'.py': lambda r: f'def {r.choice(WORDS)}(x): return x+{r.randrange(99999)}\n', '.css': lambda r: f'.{r.choice(WORDS)} {{ margin: {r.randrange(99999)}px }}\n'}

@pytest.fixture(scope='session')
def tree(tmp_path_factory):
    "Two kinds of files in six packages"
    root,r = tmp_path_factory.mktemp('files'),random.Random(0)
    for p in range(6):
        (root/f'pkg{p}').mkdir()
        for i in range(5):
            for suffix,line in TEXT.items(): (root/f'pkg{p}'/f'{i}{suffix}').write_text(''.join(line(r) for _ in range(r.randrange(3, 9))))
    return root

def bits(out):
    "All that has to come out the same; times do not"
    rows = [{k:v for k,v in json.loads(l).items() if k!='ms'} for l in (out/'metrics.jsonl').read_text().splitlines()]
    return (out/'model.safetensors').read_bytes(), (out/'split.csv').read_bytes(), rows

@pytest.fixture(scope='session')
def whole(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')/'run'
    assert main(['train', str(tree), '--out', str(out), '--quiet', *SMALL])==0
    return bits(out)

def child(code, *argv, **env):
    "A process of its own that runs `code` before the command"
    code = f"import os, signal, sys\nfrom dynattn import training, encoder\n{code}\nsys.exit(training.main(sys.argv[1:]))"
    return subprocess.run([sys.executable, '-c', code, *map(str, argv)], capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **env})

AT = '''
step = training.train_step
def hook(t, batch):
    if t.step==4: {what}
    return step(t, batch)
training.train_step = hook
'''

@pytest.mark.parametrize('name,status', [('SIGTERM', 143), ('SIGINT', 130)])
def test_a_signal_writes_a_checkpoint_and_resume_gives_the_same_bits(tree, whole, tmp_path, name, status):
    out = tmp_path/'run'
    r = child(AT.format(what=f'os.kill(os.getpid(), signal.{name})'), 'train', tree, '--out', out, *SMALL)
    assert r.returncode==status and 'goes on' in r.stderr and 'Traceback' not in r.stderr, r.stderr
    assert training._saved_state(out)['step']==5
    assert main(['train', str(tree), '--out', str(out), '--resume', '--quiet'])==0   # settings come from the run
    assert bits(out)==whole

KILL = '''
real, n = os.fsync, [0]
def fsync(fd):
    n[0] += 1
    if n[0]=={at}: os.ftruncate(fd, 100); os.kill(os.getpid(), signal.SIGKILL)
    return real(fd)
encoder.os.fsync = fsync
'''

@pytest.mark.parametrize('at', [5, 7])
def test_kill_9_while_a_file_is_written_loses_nothing(tree, whole, tmp_path, at):
    "File 5 is the first checkpoint after the one of step 0; 7 comes later, when the best model is written"
    out = tmp_path/'run'
    r = child(KILL.format(at=at), 'train', tree, '--out', out, '--quiet', *SMALL)
    assert r.returncode==-signal.SIGKILL and list(out.glob('.*.??*')), r.stderr
    state = training._saved_state(out)
    assert state is not None and state['step']<10
    assert main(['train', str(tree), '--out', str(out), '--resume', '--quiet', *SMALL])==0
    assert bits(out)==whole and not list(out.glob('.*.??*'))

def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays(tree, tmp_path, monkeypatch, capsys):
    real,n = os.fsync,[0]
    def full(fd):
        n[0] += 1
        if n[0]==5: raise OSError(errno.ENOSPC, 'No space left on device')
        return real(fd)
    monkeypatch.setattr(encoder.os, 'fsync', full)
    assert main(['train', str(tree), '--out', str(tmp_path/'run'), '--quiet', *SMALL])==2
    err = capsys.readouterr().err
    assert 'No space left' in err and err.count('\n')==1
    assert training._saved_state(tmp_path/'run')['step']==0 and not list((tmp_path/'run').glob('.*.??*'))

def test_what_a_user_can_mend_is_one_line_and_status_2(tree, tmp_path, capsys):
    tree,out = shutil.copytree(tree, tmp_path/'tree'),tmp_path/'run'
    def says(part, *argv):
        assert main(list(map(str, argv)))==2
        err = capsys.readouterr().err
        assert part in err and err.count('\n')==1, err
    says('no such file or folder', 'train', tmp_path/'nowhere', '--out', out)
    says('two classes or more', 'train', tree, '--out', tmp_path/'few', '--min-files', 1000)
    says("window: expected dynamic", 'train', tree, '--out', out, '--window', 'wide')
    says('num_heads', 'train', tree, '--out', out, '--heads', 3)
    says('no checkpoint', 'train', tree, '--out', out, '--resume', *SMALL)
    says('no trained model', 'predict', tree, '--run', tmp_path/'nowhere')
    says('no finished run', 'compare', tmp_path)
    assert main(['train', str(tree), '--out', str(out), '--quiet', *SMALL])==0
    says('holds a run already', 'train', tree, '--out', out, *SMALL)
    says('another configuration: lr was', 'train', tree, '--out', out, '--resume', '--lr', .1)
    with locked(out): says('in use', 'train', tree, '--out', out, '--resume', *SMALL)
    (tree/'pkg0'/'0.py').write_text('# other\n'*9)
    says('files have changed', 'train', '--out', out, '--resume')

def test_files_that_cannot_be_used_are_counted(tmp_path, monkeypatch):
    for p in range(6):
        (tmp_path/f'p{p}').mkdir()
        for i in range(4):
            for suffix in TEXT: (tmp_path/f'p{p}'/f'{i}{suffix}').write_text(f'{suffix} {p} {i} '*20)
    (tmp_path/'p0'/'loop').symlink_to(tmp_path, target_is_directory=True)
    (tmp_path/'p0'/'dangling.py').symlink_to(tmp_path/'nothing')
    (tmp_path/'p1'/'empty.py').write_text('')
    (tmp_path/'p1'/'bin.py').write_bytes(bytes(200))
    (tmp_path/'p1'/'table.css').write_text('0.25 1.50e+3\n'*20)
    (tmp_path/'p1'/'copy.py').write_bytes((tmp_path/'p2'/'0.py').read_bytes())
    d = training.load_data(training.TrainConfig(data=str(tmp_path), min_files=10))
    assert +d.skipped=={'unreadable': 1, 'empty or short': 1, 'binary': 1, 'numbers': 1, 'duplicate': 1}
    packages = [{x.package for x in items} for items in d.splits.values()]
    assert not packages[0]&packages[1] and not packages[0]&packages[2] and not packages[1]&packages[2] and all(packages)

def test_a_large_package_does_not_fill_the_test(tmp_path):
    for p,n in [('giant', 90), *((f'p{i}', 7) for i in range(12))]:
        (tmp_path/p).mkdir()
        for i in range(n):
            for suffix in TEXT: (tmp_path/p/f'{i}{suffix}').write_text(f'{suffix} {p} {i} '*20)
    for seed in range(5):
        d = training.load_data(training.TrainConfig(data=str(tmp_path), min_files=10, judged=20, seed=seed))
        assert sum(x.package=='giant' for x in d.splits['train'])==180
        for s in ('valid','test'):
            n = training.Counter((x.label, x.package) for x in d.splits[s])
            assert len(n)>=4 and max(n.values())<=4 and all(sum(k for (l,_),k in n.items() if l==label)<=20 for label in d.classes)

def test_without_the_extra_its_name_is_told(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'accelerate', None)
    assert main(['train', str(tree), '--out', str(tmp_path/'run'), *SMALL])==2
    assert "pip install 'dynattn[train]'" in capsys.readouterr().err

def test_two_processes_share_the_work(tree, tmp_path):
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    out,argv = tmp_path/'run',['train', tree, '--out', tmp_path/'run', *SMALL]
    code = "import sys; from dynattn.training import main; sys.exit(main(sys.argv[1:]))"
    env = lambda rank: {**os.environ, 'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'ACCELERATE_USE_CPU': 'true'}
    both = [subprocess.Popen([sys.executable, '-c', code, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env(r)) for r in range(2)]
    said = [p.communicate(timeout=120) for p in both]
    assert [p.returncode for p in both]==[0, 0], said
    assert 'Accuracy' in said[0][0] and not said[1][0]
    r = json.loads((out/'result.json').read_text())
    assert r['steps']*2*8 <= 2*2*r['files']['train']   # half of the steps each

def test_off_a_terminal_it_prints_plain_lines_and_nothing_to_stderr(tree, tmp_path):
    r = child('', 'train', tree, '--out', tmp_path/'run', *SMALL)
    assert r.returncode==0 and not r.stderr and '\r' not in r.stdout, r.stderr
    assert r.stdout.count('epoch ')==2 and 'report.md' in r.stdout
    out = sorted(p.name for p in (tmp_path/'run').iterdir())
    assert {'checkpoint.pt', 'config.json', 'metrics.jsonl', 'model.safetensors', 'report.md', 'result.json', 'settings.json', 'split.csv', 'confusion.png', 'widths.png'} <= set(out)
