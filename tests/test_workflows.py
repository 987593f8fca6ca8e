"The workflows cannot run here: they are linted, and what they call must exist."
import pkgutil, re, subprocess, sys
import pytest, yaml
import freeze, machines, matrix
from dynattn.command import _overview

ROOT = freeze.ROOT
FLOWS = sorted((ROOT/'.github/workflows').glob('*.yml'))
TARGETS = re.findall(r'[a-z./-]+', ' '.join(re.findall(r'^([a-z./ -]+):', (ROOT/'Makefile').read_text(), re.M)))

def test_all_are_there(): assert [p.stem for p in FLOWS]==['ci','docs','nightly','release']

@pytest.mark.parametrize('path', FLOWS, ids=lambda p: p.stem)
def test_workflow_is_well_formed(path):
    flow = yaml.safe_load(path.read_text())
    assert set(flow) <= {'name', True, 'permissions', 'concurrency', 'jobs'} and flow[True] and flow['permissions']     # YAML reads `on` as True
    for job in flow['jobs'].values():
        assert job['runs-on'] and job['steps']
        for s in job['steps']:
            assert ('uses' in s) != ('run' in s), s
            if 'uses' in s: assert re.fullmatch(r'[\w-]+/[\w/-]+@[\w/.-]+|docker://[\w/-]+:[\w.]+', s['uses']), s
            for t in re.findall(r'\bmake ([\w./-]+)', s.get('run', '')): assert t in TARGETS
    assert '\t' not in path.read_text()

def test_ci_covers_the_pythons_of_settings():
    vs = yaml.safe_load((ROOT/'.github/workflows/ci.yml').read_text())['jobs']['test']['strategy']['matrix']['python']
    least = re.search(r'min_python = (\S+)', (ROOT/'settings.ini').read_text())[1]
    assert all(isinstance(v, str) for v in vs) and vs[0]==least      # an unquoted 3.10 would be 3.1

def test_ci_runs_the_models_with_the_newest_transformers_and_the_night_with_the_oldest():
    ci,nightly = (yaml.safe_load((ROOT/f'.github/workflows/{name}.yml').read_text())['jobs']['transformers'] for name in ('ci','nightly'))
    steps = [[step.get('run') for step in job['steps'] if 'run' in step] for job in (ci, nightly)]
    assert 'pip install --upgrade transformers' in steps[0] and all(runs[-1]=='python tests/matrix.py transformers' for runs in steps)
    versions = nightly['strategy']['matrix']['version']
    least = re.search(r'hf_requirements = transformers>=(\S+)', (ROOT/'settings.ini').read_text())[1]
    assert versions[0].startswith(f'{least}.') and all((ROOT/path).is_file() for path in matrix.MODELS)

def test_every_machine_has_its_night():
    jobs = yaml.safe_load((ROOT/'.github/workflows/nightly.yml').read_text())['jobs']
    assert jobs['machines']['strategy']['matrix']['machine']==list(machines.MACHINES)

@pytest.mark.docs
def test_workflows_fit_the_schema_of_github():
    "As a package has it, without a network; actionlint, which knows more, is a step of the CI"
    r = subprocess.run([sys.executable, '-m', 'check_jsonschema', '--builtin-schema', 'vendor.github-workflows', *FLOWS], capture_output=True, text=True)
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.parametrize('path', ['SECURITY.md', 'CONTRIBUTING.md', '.github/ISSUE_TEMPLATE/bug.yml'])
def test_what_the_pages_of_the_repository_ask_for_exists(path):
    text = (ROOT/path).read_text(encoding='utf-8')
    verbs, = (action.choices for action in _overview()._actions if action.dest=='verb')
    asked = re.findall(r'`dynattn ([a-z]+)', text)
    assert set(asked)<=set(verbs) and (asked or path=='CONTRIBUTING.md'), asked
    for name in re.findall(r'\bdynattn(?:\.\w+)+(?=\()', text): assert callable(pkgutil.resolve_name(name)), name

def test_the_readme_names_its_two_commands_and_ci_calls_the_second():
    text = (ROOT/'README.md').read_text(encoding='utf-8')
    demo,test = re.search(r'^make demo +# (.+)\nmake test +# (.+)$', text, re.M).groups()   # side by side, with what they take
    assert 'minute' in demo and 'minutes' in test
    assert re.search(r'^pip install torch --index-url \S+/cpu$', text, re.M)     # PyTorch's CPU build
    assert (ROOT/'.ci/run').read_text(encoding='utf-8').splitlines()[-1]=='exec make test'
