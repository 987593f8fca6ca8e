"""What the outcome of a test may not depend on: the variable CI, earlier runs, the load of the machine, and free ports.

What is drawn at random comes from a seed. Hypothesis draws constants of the modules that are loaded as well, so a test
that has to *find* something is given as many examples as leave no doubt (`test_search.py`)."""
import os, re, subprocess, sys
from pathlib import Path
import pytest
from hypothesis import settings

HERE = Path(__file__).parent
TESTS = sorted(HERE.glob('*.py'))
PATIENCE = 300      # seconds: less is a guess at how fast a machine is

def lines(pattern, leave=()):
    "`file: line` where a pattern stands, but for some files"
    files = [path for path in TESTS if path.name not in {'test_luck.py', *leave}]
    return [f'{path.name}: {line.strip()}' for path in files for line in path.read_text(encoding='utf-8').splitlines()
            if re.search(pattern, line)]

def test_hypothesis_draws_the_same_everywhere():
    now = settings()
    assert (now.derandomize, now.deadline, now.database)==(True, None, None)

@pytest.mark.slow
@pytest.mark.parametrize('ci', ['', '1'])
def test_the_variable_ci_changes_nothing(ci):
    env = {name: x for name,x in os.environ.items() if name!='CI'} | ({'CI': ci} if ci else {})
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:xdist', '-p', 'no:cacheprovider', f'{__file__}::test_hypothesis_draws_the_same_everywhere']
    r = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=600, env=env)
    assert r.returncode==0, r.stdout

def test_no_limit_is_a_guess_at_the_speed_of_a_machine():
    "Of a process, in seconds; a browser's are milliseconds, a download may be given up"
    found = lines(r'timeout=(timedelta\(seconds=)?\d+', leave=('test_browser.py', 'conftest.py', 'test_hf_mixin.py'))
    given = {line: int(re.search(r'timeout=(?:timedelta\(seconds=)?(\d+)', line)[1]) for line in found}
    of_ranks = [line for line in found if 'timedelta' in line]         # how long one waits for the others to come
    short = [line for line,seconds in given.items() if seconds<(120 if line in of_ranks else PATIENCE)]
    assert len(found)>20 and short==['forked.py: self.process.wait(timeout=60)'], short      # which has nothing left to do

def test_no_port_is_chosen_by_hand():
    "`--standalone` lets torchrun find one; a fixed one may be taken"
    assert not lines(r'MASTER_PORT.{1,6}[1-9]\d*|master[-_]port|:29500')
    assert not [line for line in lines('torch.distributed.run') if '--standalone' not in line]

def test_no_time_is_that_of_the_wall_where_it_is_compared():
    "What a process takes is counted in its own processor time"
    assert not lines(r'assert .*(perf_counter|monotonic|time\.time)\(\)', leave=('test_parallel.py',))
    assert not lines(r'timeit\.(timeit|repeat)\((?!.*process_time)')

def test_what_is_drawn_at_random_has_a_seed():
    unseeded = []
    for path in TESTS:
        text = path.read_text(encoding='utf-8')
        if re.search(r'\brandom\.(choice|randrange|randint|shuffle|sample|random)\(', text):
            if not re.search(r'random\.seed\(|Random\(\d', text): unseeded.append(path.name)
        unseeded += [path.name for _ in re.findall(r'random\.Random\(\)|default_rng\(\)', text) if path.name!='test_luck.py']
    assert not unseeded, unseeded
