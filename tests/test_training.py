"What the notebooks cannot hold of files, training and the command: processes that are stopped, killed and resumed, and exit statuses."
import errno, json, os, pty, random, re, shlex, shutil, signal, socket, subprocess, sys, termios, threading, time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
import pytest, torch
pytest.importorskip('accelerate'); pytest.importorskip('safetensors')
from dynattn import command, runs, saved
from dynattn.train import files, trained, training
from dynattn.command import main
from dynattn.runs import Run

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
    (root/'pkg0'/os.fsdecode(b'not utf-8 \xff.css')).write_text('.x { margin: 0 }\n'*9)
    return root

def bits(out):
    "All that has to come out the same; times do not"
    rows = [{k:v for k,v in json.loads(l).items() if k!='ms'} for l in (out/'metrics.jsonl').read_text().splitlines()]
    return (out/'model.safetensors').read_bytes(), (out/'split.csv').read_bytes(), rows

@pytest.fixture(scope='session')
def finished(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp('whole')/'run'
    assert main(['train', str(tree), '--out', str(out), '--quiet', *SMALL])==0
    return out

@pytest.fixture(scope='session')
def whole(finished): return bits(finished)

@pytest.fixture
def copy(finished, tmp_path): return shutil.copytree(finished, tmp_path/'copy')

@pytest.fixture
def says(capsys):
    "A command that ends in one line with `part` in it, and a status"
    def run(part, *argv, status=2, **options):
        assert main(list(map(str, argv)), **options)==status
        err = capsys.readouterr().err
        assert part in err and err.count('\n')==1, err
    return run

def child(code, *argv, **env):
    "A process of its own that runs `code` before the command"
    code = f"import os, signal, sys\nfrom dynattn import command\nfrom dynattn.train import files, training\nhooks = []\n{code}\nsys.exit(command.main(sys.argv[1:], callbacks=hooks))"
    return subprocess.run([sys.executable, '-c', code, *map(str, argv)], capture_output=True, text=True, timeout=600, cwd=ROOT, env={**os.environ, **env})

AT = '''
def at(moment, t, x):
    if moment=='before_step' and t.step==4: {what}
hooks.append(at)
'''

@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_checkpoints_and_resume_gives_the_same_bits(tree, whole, tmp_path, number):
    "SIGTERM, which a scheduler sends, ended `train` without a word."
    out = tmp_path/'run'
    r = child(AT.format(what=f'os.kill(os.getpid(), {int(number)})'), 'train', tree, '--out', out, *SMALL)
    assert r.returncode==128+number and 'goes on' in r.stderr and 'Traceback' not in r.stderr, r.stderr
    assert training._saved_state(out)['step']==3
    assert main(['train', str(tree), '--out', str(out), '--resume', '--quiet'])==0   # settings come from the run
    assert bits(out)==whole

def test_sigterm_ends_every_verb_with_a_line_and_a_status(capsys):
    "It was the system's default in all but narrow, judge and export."
    from dynattn.runs import VERBS
    def run(a):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError('it went on')
    for name in VERBS:
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(VERBS, name, VERBS[name]._replace(run=run))
            assert main(shlex.split(VERBS[name].example)[1:])==143     # of the help
        assert capsys.readouterr().err=='dynattn: interrupted\n'
        assert signal.getsignal(signal.SIGTERM)==signal.SIG_DFL

def test_sigterm_waits_for_a_write_where_ctrl_c_is_ignored():
    "As under nohup. It was lost: only Ctrl-C was raised again, which was ignored."
    from dynattn.saved import interrupts_wait, terminable
    before, done = signal.signal(signal.SIGINT, signal.SIG_IGN), []
    try:
        with pytest.raises(KeyboardInterrupt), terminable() as came, interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            done.append(1)
    finally: signal.signal(signal.SIGINT, before)
    assert done==[1] and came==[signal.SIGTERM]

@pytest.mark.skipif(not hasattr(os, 'fork'), reason="processes cannot be forked")
def test_a_forked_process_dies_of_sigterm():
    from dynattn.saved import terminable
    with terminable() as came:
        child = os.fork()
        if not child:
            try: os.kill(os.getpid(), signal.SIGTERM)
            finally: os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])==-signal.SIGTERM
    assert not came

KILL = '''
real, n = os.fsync, [0]
def fsync(fd):
    n[0] += 1
    if n[0]=={at}: os.ftruncate(fd, 100); os.kill(os.getpid(), signal.SIGKILL)
    return real(fd)
files.os.fsync = fsync
'''

@pytest.mark.parametrize('at', [6, pytest.param(8, marks=pytest.mark.slow)])
def test_kill_9_while_a_file_is_written_loses_nothing(tree, whole, tmp_path, at):
    "File 6 is the first checkpoint after the one of step 0; 8 comes later, when the best model is written"
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
        if n[0]==6: raise OSError(errno.ENOSPC, 'No space left on device')
        return real(fd)
    monkeypatch.setattr(files.os, 'fsync', full)
    assert main(['train', str(tree), '--out', str(tmp_path/'run'), '--quiet', *SMALL])==2
    err = capsys.readouterr().err
    assert f'{tmp_path}/run/checkpoint.pt: No space left' in err and err.count('\n')==1
    assert f'; dynattn train --resume --out {tmp_path}/run goes on' in err
    assert training._saved_state(tmp_path/'run')['step']==0 and not list((tmp_path/'run').glob('.*.??*'))
    corrected = training.TrainConfig(data=str(tree), lr=.1)
    assert training._allowed(training._run_of(tmp_path/'run', corrected), False)['step']==0   # counts as no run

def test_what_a_user_can_mend_is_one_line_and_status_2(tree, tmp_path, says):
    tree,out = shutil.copytree(tree, tmp_path/'tree'),tmp_path/'run'
    says('no such file or folder', 'train', tmp_path/'nowhere', '--out', out)
    says(f"{tmp_path/'nowhere'}: holds no trained model", 'predict', '--run', tmp_path/'nowhere', tree)
    says(f"got {tmp_path/'nowhere'}, where there is nothing", 'export', tmp_path/'nowhere', '--out', tmp_path/'onnx')
    says('two classes or more', 'train', tree, '--out', tmp_path/'few', '--min-files', 1000)
    says('no run to resume', 'train', tree, '--out', out, '--resume', *SMALL)
    says('no trained model', 'predict', tree, '--run', tmp_path/'nowhere')
    says('expected a folder, got a file', 'train', tree, '--out', tree/'pkg0'/'0.py')
    out.mkdir(exist_ok=True)
    for name in ('.gitlab-ci.yml', '.env.local', '.config.json.abc_1234'): (out/name).touch()
    assert main(['train', str(tree), '--out', str(out), '--quiet', *SMALL])==0
    assert (out/'.gitlab-ci.yml').exists() and (out/'.env.local').exists() and not (out/'.config.json.abc_1234').exists()
    says('holds a run already', 'train', tree, '--out', out, *SMALL)
    says('a run of other settings: lr was', 'train', tree, '--out', out, '--resume', '--lr', .1)
    says('epochs was 2, is 3', 'train', tree, '--out', out, '--resume', '--epochs', 3)
    (out/'result.json').unlink()
    with Run(out, (), {}).locked(): says('in use', 'train', tree, '--out', out, '--resume', *SMALL)
    (tree/'pkg0'/'0.py').write_text('# other\n'*9)
    says('files have changed', 'train', '--out', out, '--resume')

BAD = dict(labels='colour', crop=0, per_class=0, per_package=-1, per_epoch=0, judged=0, min_files=0, min_packages=-1, seed=-1, dim=7, heads=3, layers=0, patch=0, grams='3;5',
    dropout=1, window='wide', init_width='nan', alpha=.5, price=-1, impl='fast', batch=0, epochs=0, patience=0, lr='inf', sigma_lr=-1, decay='nan', precision='fp8', every=0)

def test_every_option_has_its_bad_value():
    names = {f.name for f in training.dataclasses.fields(training.TrainConfig)} - {'data'}
    assert set(BAD)==names, f'a value out of its bounds in BAD, for each of {sorted(set(BAD)^names)}'

@pytest.mark.parametrize('name', BAD)
def test_a_bad_value_is_told_before_anything_is_read(name, tmp_path, says):
    flag = f"--{name.replace('_', '-')}"
    says(f'dynattn: {flag}: expected ', 'train', tmp_path/'nowhere', '--out', tmp_path/'run', f"{flag}={BAD[name]}")
    assert not (tmp_path/'run').exists()

@pytest.mark.parametrize('window', ['none', '8'])
@pytest.mark.parametrize('name,usual', [('init-width', '64'), ('price', '0.001'), ('sigma-lr', '1')])
def test_an_option_that_no_window_reads_is_refused(window, name, usual, tmp_path, says):
    said = f'--{name}: expected {usual} beside --window {window}, where no width learns, got 3.0'
    says(said, 'train', tmp_path, '--out', tmp_path/'run', '--window', window, f'--{name}', 3)

def test_the_folder_of_another_verb_is_refused_by_name(finished, tree, tmp_path, says):
    "`windows` said of a narrowed model that its configuration was damaged, and `judge` of a classifier that transformers does not know it."
    for made,(name,content,readers) in dict(
            narrow=('settings.json', dict(model='m', context=8, judged=2, keep=.5), 'dynattn judge, look, audit and export read'),
            export=('onnx_model.json', {}, 'dynattn audit reads')).items():
        (tmp_path/made).mkdir()
        (tmp_path/made/name).write_text(json.dumps(content))
        said = f'{tmp_path/made}: expected a folder of dynattn train, got one of dynattn {made}, which {readers}'
        for argv in (['predict', __file__], ['windows', __file__, '--png', tmp_path/'w.png'], ['train', tree], ['train', tree, '--resume']):
            says(said, *argv, '--run', tmp_path/made)
        assert [path.name for path in (tmp_path/made).iterdir()]==[name]
    text,out = tree/'pkg0/0.py',tmp_path/'new'
    for argv in (['export', finished, '--out', out], ['audit', finished], ['look', finished, '--text', text, '--out', tmp_path/'look.html'],
                 ['judge', finished, '--data', tree, '--quiet'], ['narrow', finished, '--data', tree, '--out', out, '--quiet']):
        says(f'{finished}: expected the folder of a model, got one of dynattn train, which dynattn predict and windows read', *argv)

def test_data_that_cannot_be_read_leaves_no_folder(tmp_path, says):
    "`dynattn train nowhere --out runs/new` left runs/new with a lock in it"
    says('no such file or folder', 'train', tmp_path/'nowhere', '--out', tmp_path/'runs'/'new', *SMALL)
    assert not (tmp_path/'runs').exists()
    (tmp_path/'mine').mkdir()
    says('no such file or folder', 'train', tmp_path/'nowhere', '--out', tmp_path/'mine', *SMALL)
    assert (tmp_path/'mine').is_dir()

def test_a_folder_that_another_process_took_away_is_not_locked(tmp_path, monkeypatch):
    run = Run(tmp_path/'new', (), {})
    def taken_away(*_): (tmp_path/'new/.lock').unlink()
    monkeypatch.setattr(runs.fcntl, 'flock', taken_away)
    with pytest.raises(saved.UserError, match='in use by another process'):
        with run.locked(): pass

def test_what_is_no_number_is_told_too(says): says("--batch: invalid int value: 'many'", 'train', '--batch', 'many')

def test_a_loss_that_is_no_number_ends_the_run_and_leaves_a_checkpoint(tree, tmp_path, says):
    says('not a finite number; try a smaller --lr', 'train', tree, '--out', tmp_path/'run', '--quiet', *SMALL, '--lr', 1e30, '--every', 1)
    assert training._saved_state(tmp_path/'run')['step']>=1

@pytest.mark.parametrize('name', ['checkpoint.pt', 'settings.json', 'model.safetensors', 'config.json', 'result.json'])
def test_a_damaged_file_of_a_run_is_named(name, copy, tree, says):
    whole = (copy/name).read_bytes()
    file,resume = tree/'pkg0'/'0.py',('train', tree, '--out', copy, '--resume')
    users = {'checkpoint.pt': [resume], 'result.json': [resume], 'settings.json': [resume, ('predict', file, '--run', copy)]}
    for content in (whole[:len(whole)//2], b'', b'{"colour": 3}'):
        (copy/name).write_bytes(content)
        for argv in users.get(name, [('predict', file, '--run', copy), ('windows', file, '--run', copy)]): says(f'{copy}: damaged {name}', *argv)

def test_a_finished_run_stays_as_it_is_and_may_be_told_from_elsewhere(tree, copy, capsys, monkeypatch):
    before = (copy/'result.json').read_bytes()
    monkeypatch.chdir(tree.parent)
    for data in (tree.name, f'{tree.name}/'): assert main(['train', data, '--out', str(copy), '--resume', '--every', '7', '--patience', '5', *SMALL[:-4]])==0
    assert 'finished' in capsys.readouterr().out and (copy/'result.json').read_bytes()==before

def test_ctrl_c_where_no_step_is_taken(tree, copy, tmp_path, monkeypatch, says):
    def interrupted(*_, **__): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(files.Data, 'of', interrupted)
        says('dynattn: interrupted\n', 'train', tree, '--out', tmp_path/'run', '--quiet', *SMALL, status=130)
        m.setattr(trained, 'read_utf8', interrupted)
        says('dynattn: interrupted\n', 'predict', tree, '--run', copy, status=130)
    (copy/'result.json').unlink()
    def at_the_test(moment, t, x):
        if moment=='before_judge': interrupted()
    says(f'interrupted; dynattn train --resume --out {copy} goes on', 'train', '--out', copy, '--resume', '--quiet', status=130, callbacks=[at_the_test])
    assert main(['train', '--out', str(copy), '--resume', '--quiet'])==0
    assert json.loads((copy/'result.json').read_text())['ms']>0   # though no step was taken

@contextmanager
def stdin(path):
    "Standard input comes from a file"
    old = os.dup(0)
    with open(path, 'rb') as f: os.dup2(f.fileno(), 0)
    try: yield
    finally: os.dup2(old, 0); os.close(old)

def test_standard_input_names_and_pictures(tree, finished, tmp_path, capsys, says):
    run,css,binary = str(finished),tree/'pkg0'/'0.css',tmp_path/'binary'
    binary.write_bytes(bytes(99))
    os.mkfifo(tmp_path/'pipe')
    with stdin(css): assert main(['predict', '-', '--run', run])==0
    with stdin(css): assert main(['windows', '-', '--run', run, '--png', str(tmp_path/'w.png')])==0
    with stdin(binary): assert main(['predict', '-', str(tmp_path/'pipe'), str(binary), '--run', run])==1
    assert main(['predict', str(tree), '--run', run])==0
    said = capsys.readouterr()
    assert '-: skipped, binary' in said.out and 'pipe: skipped, unreadable' in said.out and 'not utf-8' in said.out and not said.err
    c,wrong = training.TrainConfig(),[(str(p), 'a', 'b') for p in (tree/'pkg0').glob('not*')]
    training._report(dict(json.loads((finished/'result.json').read_text()), wrong=wrong), c, training._run_of(shutil.copytree(finished, tmp_path/'report'), c))
    assert b'not utf-8 \xff.css' in (tmp_path/'report'/'report.md').read_bytes() and b'not utf-8 \xff.css' in (finished/'split.csv').read_bytes()
    for png in ('no/such/folder.png', 'w.jpeg'): says('--png: expected a name that ends in .png', 'windows', css, '--run', run, '--png', png)
    for path,got in ((tree, 'a folder'), ('nowhere', 'no such file')): says(f'expected a file, got {got}', 'windows', path, '--run', run, '--png', tmp_path/'w.png')
    with pytest.raises(SystemExit, match='0'): main(['--version'])

def test_on_a_terminal_there_is_a_bar(tree, tmp_path, monkeypatch):
    master,slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 120))
    shown = []
    def read():
        while b'END' not in b''.join(shown[-2:]): shown.append(os.read(master, 4096))
    reader = threading.Thread(target=read); reader.start()
    with os.fdopen(slave, 'w') as screen:
        monkeypatch.setattr(sys, 'stderr', screen)
        try: assert main(['train', str(tree), '--out', str(tmp_path/'run'), *SMALL])==0
        finally: screen.write('END'); screen.flush(); reader.join()
    text = b''.join(shown).decode()
    steps = json.loads((tmp_path/'run'/'result.json').read_text())['steps']
    assert '\rtrain:' in text and f'/{steps} ' in text
    assert 'loss ' in text and 'accuracy ' in text and 'mean width ' in text

def test_files_that_cannot_be_used_are_counted(tmp_path, monkeypatch):
    for p in range(6):
        (tmp_path/f'p{p}').mkdir()
        for i in range(4):
            for suffix in TEXT: (tmp_path/f'p{p}'/f'{i}{suffix}').write_text(f'{suffix} {p} {i} '*20)
    (tmp_path/'p0'/'loop').symlink_to(tmp_path, target_is_directory=True)
    (tmp_path/'p0'/'dangling.py').symlink_to(tmp_path/'nothing')
    (tmp_path/'p1'/'empty.py').write_text('')
    os.mkfifo(tmp_path/'p1'/'pipe.py')
    (tmp_path/'p1'/'bin.py').write_bytes(bytes(200))
    (tmp_path/'p1'/'table.css').write_text('0.25 1.50e+3\n'*20)
    (tmp_path/'p1'/'copy.py').write_bytes((tmp_path/'p2'/'0.py').read_bytes())
    d = files.Data.of(training.TrainConfig(data=str(tmp_path), min_files=10))
    assert d.skipped.counts=={'unreadable': 2, 'empty or short': 1, 'binary': 1, 'numbers': 1, 'duplicate': 1}
    packages = [{x.package for x in items} for items in d.splits.values()]
    assert not packages[0]&packages[1] and not packages[0]&packages[2] and not packages[1]&packages[2] and all(packages)

def test_links_do_not_lead_out_of_the_folder(tmp_path):
    "A link to a sibling folder, one back up, and one to a file outside; a link to a file inside is a file"
    inside,outside = tmp_path/'texts',tmp_path/'private'
    for folder in (inside, outside):
        folder.mkdir()
        (folder/'a.txt').write_text('words '*20)
    for name,target in dict(loop=tmp_path, sibling=outside).items(): (inside/name).symlink_to(target, target_is_directory=True)
    (inside/'b.txt').symlink_to(outside/'a.txt')
    (inside/'c.txt').symlink_to('a.txt')
    assert [str(path.relative_to(inside)) for path in files.walk(inside)]==['a.txt', 'c.txt']
    (tmp_path/'named').symlink_to(inside, target_is_directory=True)
    assert [path.name for path in files.walk(tmp_path/'named')]==['a.txt', 'c.txt']   # the folder itself may be a link

def test_resume_without_a_checkpoint_says_how_to_begin(tree, finished, tmp_path, says):
    "As a full disk leaves it: settings, and nothing to go on from"
    run = tmp_path/'run'
    run.mkdir()
    shutil.copy(finished/'settings.json', run)
    says('no checkpoint to resume from; without --resume it begins anew', 'train', tree, '--resume', '--out', run)
    assert main(['train', str(tree), '--out', str(run), '--quiet', *SMALL])==0
    (run/'checkpoint.pt').unlink()
    says('no checkpoint to resume from; another --out begins anew', 'train', tree, '--resume', '--out', run)

def test_a_configuration_that_is_a_list(finished, tmp_path, says):
    run = shutil.copytree(finished, tmp_path/'run')
    (run/'config.json').write_text('[1, 2]')
    says('damaged config.json: text: expected an object, got a list', 'predict', __file__, '--run', run)

def test_a_large_package_does_not_fill_the_test(tmp_path):
    for p,n in [('giant', 90), *((f'p{i}', 7) for i in range(12))]:
        (tmp_path/p).mkdir()
        for i in range(n):
            for suffix in TEXT: (tmp_path/p/f'{i}{suffix}').write_text(f'{suffix} {p} {i} '*20)
    for seed in range(5):
        d = files.Data.of(training.TrainConfig(data=str(tmp_path), min_files=10, judged=20, seed=seed))
        assert sum(x.package=='giant' for x in d.splits['train'])==180
        for s in ('valid','test'):
            n = Counter((x.label, x.package) for x in d.splits[s])
            assert len(n)>=4 and max(n.values())<=4 and all(sum(k for (l,_),k in n.items() if l==label)<=20 for label in d.classes)

def test_without_the_extra_its_name_is_told(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'accelerate', None)
    assert main(['train', str(tree), '--out', str(tmp_path/'run'), *SMALL])==2
    assert "pip install 'dynattn[train]'" in capsys.readouterr().err

def port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def averaged(c, n):
    "The weights of `n` steps of two processes, taken by one: it halves the sum of the gradients that both would have"
    from accelerate import Accelerator
    other = []
    class First(Accelerator):
        num_processes = 2
        def backward(self, loss):
            loss.backward()
            for p,g in zip(ranks[0].model.parameters(), other, strict=True): p.grad = (p.grad+g)/2
    class Second(Accelerator):
        num_processes,process_index = 2,1
        def backward(self, loss): loss.backward(); other[:] = [p.grad.clone() for p in ranks[1].model.parameters()]
    ranks = [training.Trainer(c, files.Data.of(c), '.', kind(cpu=True)) for kind in (First, Second)]
    for epoch in range(c.epochs):
        for first,second in zip(*(t.batches(epoch) for t in ranks), strict=True):
            ranks[1].model.load_state_dict(ranks[0].model.state_dict())
            ranks[1].take_step(second); ranks[0].take_step(first)
            if ranks[0].step==n: return ranks[0].model.state_dict()

@pytest.mark.slow
def test_torchrun_goes_on_with_what_two_processes_began(tree, tmp_path, says):
    "What both have learnt is what one learns from the mean of their gradients"
    out,argv = tmp_path/'run',['train', tree, '--out', tmp_path/'run', *SMALL]
    code = f"import os, signal, sys\nfrom dynattn import command\nfrom dynattn.train import training\nhooks = []\n{AT.format(what='os.kill(os.getpid(), signal.SIGKILL)')}\nsys.exit(command.main(sys.argv[1:], callbacks=hooks))"
    at = str(port())
    env = lambda rank: {**os.environ, 'OMP_NUM_THREADS': '1', 'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': at, 'ACCELERATE_USE_CPU': 'true'}
    both = [subprocess.Popen([sys.executable, '-c', code, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env(r)) for r in range(2)]
    said = [p.communicate(timeout=600) for p in both]
    assert [p.returncode for p in both]==[-9, -9], said
    assert training._saved_state(out)['step']==3
    says('processes were 2, are 1', 'train', '--out', out, '--resume', '--quiet')
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']   # which is torchrun
    r = subprocess.run([*launch, '-m', 'dynattn', 'train', '--resume', '--out', out], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert r.returncode==0 and r.stdout.count('Accuracy')==1, r.stderr
    state = training._saved_state(out)
    assert state['step']*2*8 <= 2*2*json.loads((out/'result.json').read_text())['files']['train']   # half of the steps each
    c = training.TrainConfig(**training.TrainConfig.of_run(out))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)   # as the processes had: the bias of the keys has no gradient but rounding, which Adam makes large
    try: both = averaged(c, state['step'])
    finally: torch.set_num_threads(threads)
    for name,want in both.items(): torch.testing.assert_close(state['model'][name], want, rtol=1e-3, atol=1e-5)

@pytest.mark.slow
def test_off_a_terminal_it_prints_plain_lines_and_nothing_to_stderr(tree, tmp_path):
    r = child('', 'train', tree, '--out', tmp_path/'run', *SMALL)
    assert r.returncode==0 and not r.stderr and '\r' not in r.stdout, r.stderr
    assert r.stdout.count('epoch ')==2 and 'report.md' in r.stdout
    out = sorted(p.name for p in (tmp_path/'run').iterdir())
    assert {'checkpoint.pt', 'config.json', 'metrics.jsonl', 'model.safetensors', 'report.md', 'result.json', 'settings.json', 'split.csv', 'confusion.png', 'widths.png'} <= set(out)

@pytest.mark.parametrize('name', ['checkpoint.pt', 'model.safetensors'])
def test_a_file_that_broke_off_at_any_byte_is_named(name, copy, tree, says):
    "Every length of the first and last hundred bytes, and a few hundred between them"
    whole = (copy/name).read_bytes()
    lengths = {*range(100), *range(100, len(whole), max(1, len(whole)//200)), *range(len(whole)-100, len(whole))}
    for n in sorted(lengths):
        (copy/name).write_bytes(whole[:n])
        with pytest.raises(saved.DamagedFile, match=f'damaged {name}'):
            training._saved_state(copy) if name=='checkpoint.pt' else trained._load_run(copy)
    argv = ('train', tree, '--out', copy, '--resume') if name=='checkpoint.pt' else ('predict', tree, '--run', copy)
    says(f'{copy}: damaged {name}: ', *argv)

@pytest.mark.parametrize('name', ['checkpoint.pt', 'model.safetensors'])
def test_a_changed_byte_anywhere_is_named(name, copy):
    "In tensors too, where the file can still be read; what is neither name nor number may change"
    whole = (copy/name).read_bytes()
    def load(): return training._saved_state(copy)['model'] if name=='checkpoint.pt' else trained._load_run(copy)[0].state_dict()
    want,noticed = load(),0
    for k in range(20):
        at = (2*k+1)*len(whole)//40
        (copy/name).write_bytes(whole[:at]+bytes([whole[at]^1])+whole[at+1:])
        try: got = load()
        except saved.DamagedFile as e:
            assert f'damaged {name}' in str(e)
            noticed += 1
        else: assert got.keys()==want.keys() and all(torch.equal(got[k], want[k]) for k in want)
    assert noticed>=15

def test_weights_without_a_checksum_are_read(copy):
    "As those of earlier versions are"
    from safetensors.torch import load, save
    state = load((copy/'model.safetensors').read_bytes())
    (copy/'model.safetensors').write_bytes(save(state))
    assert torch.equal(trained._load_run(copy)[0].state_dict()['head.bias'], state['head.bias'])

def test_the_log_comes_from_the_checkpoint(copy):
    want = bits(copy)
    (copy/'metrics.jsonl').write_text('null'); (copy/'result.json').unlink()
    assert main(['train', '--out', str(copy), '--resume', '--quiet'])==0 and bits(copy)==want

@pytest.mark.parametrize('option,value', [('layers', 10**8), ('layers', 10**5), ('dim', 10**8), ('dim', 10**5), ('patch', 10**8), ('lr', 1e300), ('sigma_lr', 1e300), ('init_width', 1e300), ('alpha', 1e300)])
def test_what_no_memory_or_number_holds_is_told_at_once(option, value, tmp_path, says):
    began = time.process_time()
    flag = f"--{option.replace('_', '-')}"
    says(f"{'--dim' if option=='patch' else flag}: expected ", 'train', tmp_path, '--out', tmp_path/'run', *SMALL, flag, value)
    assert time.process_time()-began<5

@pytest.mark.parametrize('change', [dict(n_global=-1), dict(n_global='x'), dict(n_global=None), dict(n_global=10**20), dict(dropout=float('nan')), dict(dropout='x'), dict(cls='x'),
    dict(causal=None), dict(checkpoint=[1]), dict(hidden=[]), dict(hidden=0), dict(dim=0), dict(heads=True), dict(layers=10**8), dict(layers='many'), dict(layers=2.5), dict(dim=10**9), dict(heads=10**8), dict(hidden=-1), dict(patch=10**7), dict(classes=5),
    dict(grams=[3]*10**4), dict(grams=[10**9]), dict(buckets=10**12), dict(vocab=10**12), dict(init_width='x'), dict(alpha=[]), dict(layers=None)])
def test_a_configuration_that_its_weights_do_not_fit_is_named_at_once(change, copy, tree, says):
    config = json.loads((copy/'config.json').read_text())
    (copy/'config.json').write_text(json.dumps({**config, **change}))
    began = time.process_time()
    says(f'{copy}: damaged config.json', 'predict', tree, '--run', copy)
    assert time.process_time()-began<10

@pytest.mark.parametrize('n', [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 6, 7)), 5])
def test_a_disk_that_is_full_at_any_write_leaves_a_run_that_goes_on(n, tree, whole, tmp_path, monkeypatch, capsys):
    real,out,count = os.fsync,tmp_path/'run',[0]
    def full(fd):
        count[0] += 1
        if count[0]>=n: raise OSError(errno.ENOSPC, 'No space left on device')
        return real(fd)
    with monkeypatch.context() as m:
        m.setattr(files.os, 'fsync', full)
        assert main(['train', str(tree), '--out', str(out), '--quiet', *SMALL])==2
    err = capsys.readouterr().err
    assert err.count('\n')==1 and f'dynattn: {out}/' in err and ': No space left on device' in err, err
    assert ('goes on' in err)==(out/'checkpoint.pt').exists()
    again = ['--resume'] if 'goes on' in err else []
    assert main(['train', str(tree), '--out', str(out), '--quiet', *again, *SMALL])==0
    assert bits(out)==whole

def test_predict_in_batches_says_what_it_says_of_each_alone(tree, finished, tmp_path, capsys):
    odd = tmp_path/'two\nlines.css'
    odd.write_text('.a { margin: 0 }\n'*9)
    (tmp_path/'binary').write_bytes(bytes(99))
    argv = ['predict', str(tree), str(tmp_path), '--run', str(finished)]
    assert main([*argv, '--json'])==0
    rows = [json.loads(l) for l in capsys.readouterr().out.splitlines()]
    assert len(rows)==63 and [r['error'] for r in rows if r['kind'] is None]==['binary'] and rows[-1]['path']==str(odd)
    for r in rows[::7]:
        [(_,kind,p)] = trained.predict([r['path']], finished)
        assert kind==r['kind'] and abs(p-r['probability'])<1e-6
    assert main(argv)==0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines)==63 and 'two\\nlines.css: css' in lines[-1]

def test_folders_that_cannot_be_read_and_links_that_lead_nowhere(tree, finished, tmp_path, monkeypatch, capsys, says):
    folder,loop = tmp_path/'links',tmp_path/'links'/'loop.py'
    folder.mkdir()
    says('links: expected files, got a folder without any', 'predict', folder, '--run', finished)
    loop.symlink_to(loop)
    (folder/'gone.py').symlink_to(tmp_path/'gone')
    shutil.copy(tree/'pkg0'/'0.py', folder/'whole.py')
    assert main(['predict', str(folder), '--run', str(finished)])==0
    said = capsys.readouterr().out
    assert 'gone.py: skipped, unreadable' in said and 'loop.py: skipped, unreadable' in said and 'whole.py: ' in said
    says('loop.py: no such file or folder', 'train', loop, '--out', tmp_path/'run', *SMALL)
    usual = os.scandir
    def locked_up(path='.'):        # that folder only: Python 3.14 asks it for all that a Path lists
        if str(path)!=str(folder): return usual(path)
        raise PermissionError(errno.EACCES, 'Permission denied', str(path))
    monkeypatch.setattr(os, 'scandir', locked_up)
    says(f'{folder}: Permission denied', 'predict', folder, '--run', finished)
    says(f'{folder}: Permission denied', 'train', folder, '--out', tmp_path/'run', *SMALL)

def test_a_name_with_a_line_break_stays_on_its_line(finished, tmp_path, says):
    run = shutil.copytree(finished, tmp_path/'ru\nn')
    says('no\\nfile: no such file', 'predict', tmp_path/'no\nfile', '--run', run)
    says('.jpg', 'windows', __file__, '--run', run, '--png', tmp_path/'a\nb.jpg')
    (run/'config.json').write_text('{')
    says('ru\\nn: damaged config.json', 'predict', __file__, '--run', run)

def test_lines_come_as_soon_as_a_batch_has_them(tree, finished, monkeypatch):
    "The first answer is out before the second batch is read"
    read,at_first = trained.read_utf8,[]
    monkeypatch.setattr(trained, 'read_utf8', lambda *a, **k: (at_first.append(1), read(*a, **k))[1])
    answers = trained.predict([tree], finished, batch=5)
    next(answers)
    assert len(at_first)==5

def test_classes_do_not_depend_on_the_seed(tmp_path):
    "A class in six packages is in or out for every seed"
    for label,sizes in {'.py': [8]*12, '.css': [9]*12, '.pyx': [20, 10, 9, 8, 8, 7]}.items():
        for p,n in enumerate(sizes):
            (tmp_path/f'p{p}').mkdir(exist_ok=True)
            for i in range(n): (tmp_path/f'p{p}'/f'{i}{label}').write_text(f'{label} {p} {i} '*20)
    for least,want in ((10, ('css','python')), (6, ('css','cython','python'))):
        data = [files.Data.of(files.DataConfig(data=str(tmp_path), min_packages=least, seed=s)) for s in range(8)]
        assert {d.classes for d in data}=={want}
        assert len({tuple(x.path for x in d.splits['test']) for d in data})>1

def test_the_help_shows_each_verb_with_an_example(capsys):
    with pytest.raises(SystemExit, match='0'): main(['--help'])
    said = capsys.readouterr().out
    for what,example in [(v.what, v.example) for v in command.VERBS.values()]: assert what in ' '.join(said.split()) and example in said
    for name in [*command.VERBS]:
        with pytest.raises(SystemExit, match='0'): main([name, '--help'])
        said = capsys.readouterr().out
        assert f'dynattn {name}' in said and '(default' not in said and not re.search(r' X$| X  ', said, re.M)
        assert len(re.findall(r'\[\d[\d.]*[],]', said))>={'train': 20, 'narrow': 7, 'export': 1}.get(name, 0)   # defaults in one form

def test_each_verb_is_called_somewhere():
    "A new one passed every check without a call of it"
    places = [*Path(__file__).parent.glob('test_*.py'), *(Path(__file__).resolve().parents[1]/'nbs').rglob('*.ipynb')]
    texts = [path.read_text(encoding='utf-8') for path in places]
    def called(verb): return re.compile(rf"main\(\['{verb}', (?!'--help)|_{verb}_verb\([^a]")
    silent = [verb for verb in command.VERBS if not any(called(verb).search(text) for text in texts)]
    assert not silent, f"no test and no chapter calls them as main(['{silent[0]}', ...])"

HOSTILE = '<img src=x onerror=alert(1)>', '# | $x ![y](http:z) `c`\x1b]0;title\x07', '\u202egnp.txt\x1b[2J'

def test_names_from_strangers_are_no_markup_and_move_no_cursor(tmp_path, capsys):
    "Classes, files and runs with such names, through all three verbs"
    root,out,r = tmp_path/'files',tmp_path/'ru\x1b[31mn\n# <b>',random.Random(0)
    for label,word in zip(HOSTILE, WORDS):
        for i in range(18):
            file = root/label/f'{i}\n# <i>{label}'
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f'{word} {r.randrange(10**9)} '*9)
    assert main(['train', str(root), '--labels', 'folder', '--out', str(out), *SMALL, '--epochs', '1', '--lr', '1e-9'])==0
    assert main(['predict', str(root), '--run', str(out)])==0
    assert main(['windows', str(file), '--run', str(out), '--png', str(tmp_path/'\x1b[31m.png')])==0
    assert main(['predict', str(root/'\x1b[2J'), '--run', str(out)])==2
    said = capsys.readouterr()
    for text in said: assert text.replace('\n', '').isprintable(), text
    lines = said.out.splitlines()
    assert len([line for line in lines if 'skipped' in line or line.endswith('%')])==54 and not any(line.startswith('# <') for line in lines)
    report = (out/'report.md').read_text()
    assert len(json.loads((out/'result.json').read_text())['wrong'])>1 and '<' not in report.partition('```json')[0]
    assert [line for line in report.splitlines() if line.startswith('#')]==['# Which kind of file is this?', '## Every misclassified file', '## The run']
    assert len(re.findall(r'(?<!\\)\]\(', report))==report.count('.png)')==2 and '\x1b' not in report
    rows = [line for line in report.splitlines() if line.startswith('| ')]
    assert len(rows)==5 and all(len(re.findall(r'(?<!\\)\|', row))==6 for row in rows), rows

@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='pipes with a name')
def test_a_pipe_is_written_to_and_stays(tmp_path):
    "`--out /dev/null` of root left a file there."
    pipe,got = tmp_path/'pipe',[]
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    saved.write_atomic(pipe, 'all of it')
    reader.join(5)
    assert got==[b'all of it'] and pipe.is_fifo() and os.listdir(tmp_path)==['pipe']

@pytest.mark.skipif(os.name!='posix', reason='pipes of Linux and macOS')
@pytest.mark.parametrize('argv', [['--help'], ['train', '--help'], ['printed']])
def test_a_reader_that_has_read_enough_is_no_error(argv):
    "`dynattn windows FILE --run RUN | true` ended with status 120 and with a traceback of Python's own"
    code = "import sys; from dynattn.command import main; from dynattn.runs import verb\n" \
           "verb('printed', '', '')(lambda a: print('a short line'))\nsys.exit(main(sys.argv[1:]))"
    reader,writer = os.pipe()
    os.close(reader)
    buffered = {name: x for name,x in os.environ.items() if name!='PYTHONUNBUFFERED'}
    with os.fdopen(writer, 'wb') as pipe:
        done = subprocess.run([sys.executable, '-c', code, *argv], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=600, cwd=ROOT, env=buffered)
    assert (done.returncode, done.stderr)==(0, '')

@pytest.mark.skipif(os.name!='posix', reason='pipes of Linux and macOS')
def test_a_reader_of_the_list_of_examples_may_leave():
    reader,writer = os.pipe()
    os.close(reader)
    buffered = {name: x for name,x in os.environ.items() if name!='PYTHONUNBUFFERED'}
    with os.fdopen(writer, 'wb') as pipe:
        done = subprocess.run([sys.executable, '-m', 'dynattn.examples'], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=600, cwd=ROOT, env=buffered)
    assert (done.returncode, done.stderr)==(0, '')

@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='a device of Linux')
def test_an_answer_that_cannot_be_written_is_an_error_in_one_line():
    buffered = {name: x for name,x in os.environ.items() if name!='PYTHONUNBUFFERED'}
    with open('/dev/full', 'wb') as full:
        done = subprocess.run([sys.executable, '-m', 'dynattn', '--version'], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, cwd=ROOT, env=buffered)
    assert (done.returncode, done.stderr)==(2, 'dynattn: [Errno 28] No space left on device\n')

@pytest.mark.parametrize('closed,status', [(1, 0), (2, 2)], ids=['stdout','stderr'])
def test_a_stream_that_was_closed_is_no_error(closed, status):
    "As a service has none; `predict` ended with status 1 and said nothing, for Python has no object there."
    code = (f"import os, sys; os.close({closed}); os.execv(sys.executable, "
            f"[sys.executable, '-m', 'dynattn', *{[['--version'], ['predict', 'nowhere']][closed-1]!r}])")
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr)==(status, '', '')

def test_the_overview_fits_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '60')
    with pytest.raises(SystemExit, match='0'): main(['--help'])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line)<=60 or line.startswith(16*' '+'dynattn ') for line in lines) and len(lines)>20    # an example is for copying
