"""The core tests with the oldest and the newest PyTorch: `make matrix`. The tests of models with one version of transformers.

The oldest is the one that settings.ini names, with the oldest Python at hand that it allows; the newest is what pip
finds, with the newest Python at hand. Each has an environment of its own in .matrix/, some gigabytes the first time.
`python tests/matrix.py transformers` takes the version that is installed; jobs of CI install the newest and the oldest.
Not a part of `make test`."""
import argparse, os, re, shutil, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (ROOT/'settings.ini').read_text(encoding='utf-8')
CORE = [f'tests/test_{name}.py' for name in ('call', 'rim', 'padding', 'banded', 'entmax')]
MODELS = [f'tests/test_{name}.py' for name in ('versions', 'hf', 'hf_common', 'hf_mixin', 'hf_saving', 'cache', 'audit', 'architectures')]
TOOLS = ['numpy', 'pytest', 'pytest-timeout', 'hypothesis', 'safetensors']

def setting(pattern): return re.search(pattern, SETTINGS)[1]

def pythons():
    "Interpreters at hand that the package allows, the oldest first."
    first = int(setting(r'min_python = 3\.(\d+)'))
    found = [shutil.which(f'python3.{minor}') for minor in range(first, first+10)]
    works = [p for p in found if p and subprocess.run([p, '-c', ''], capture_output=True).returncode==0]
    return works or [sys.executable]

def environment(name, python, torch):
    "The interpreter of an environment with this PyTorch."
    folder = ROOT/'.matrix'/name
    if not folder.exists(): subprocess.run([python, '-m', 'venv', folder], check=True)
    inside = folder/'bin/python'
    fastcore = setting(r'requirements = .*?(fastcore\S*)')
    subprocess.run([inside, '-m', 'pip', 'install', '-q', '--upgrade', torch, fastcore, *TOOLS], check=True)
    return inside

def check_models():
    "Whether the tests of models pass with the transformers that is installed."
    from importlib.metadata import version
    print(f"transformers {version('transformers')}", flush=True)
    tests = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *MODELS]
    return subprocess.run(tests, cwd=ROOT).returncode==0

def check(name, python, torch):
    "Whether the core tests pass."
    inside = environment(name, python, torch)
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    ask = 'import sys, torch; print(sys.version.split()[0], torch.__version__)'
    versions = subprocess.run([inside, '-c', ask], capture_output=True, text=True, check=True)
    print(f'{name}: Python and PyTorch {versions.stdout.strip()}', flush=True)
    tests = [inside, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', *CORE]
    return subprocess.run(tests, cwd=ROOT, env=env).returncode==0

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('which', nargs='?', choices=['oldest', 'newest', 'transformers'],
                        help='one of the two of PyTorch (default: both), or the tests of models')
    parser.add_argument('--here', action='store_true', help='with the Python that runs this')
    given = parser.parse_args()
    which = given.which
    if which=='transformers': sys.exit(0 if check_models() else 'failed with this transformers')
    oldest = f"torch=={setting(r'requirements = torch>=([0-9.]+)')}.0"
    at_hand = [sys.executable] if given.here else pythons()
    rows = dict(oldest=(at_hand[0], oldest), newest=(at_hand[-1], 'torch'))
    failed = [name for name in rows if which in (None, name) and not check(name, *rows[name])]
    sys.exit(f"failed with the {' and the '.join(failed)}" if failed else 0)
