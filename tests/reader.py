"""Runs downloaded notebooks as their readers do: Jupyter's shell, an empty folder, and only the packages that the
notebook's own line of `pip install` brings. `Server(extras, more)` speaks as `forked.Server` does."""
import os, sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
import forked

JUPYTER = 'ipykernel', 'matplotlib-inline'
MODULES = 'torch', 'matplotlib.pyplot', 'IPython.core.interactiveshell'

def brought(requirements):
    "Distributions that pip brings for some requirements"
    from packaging.requirements import Requirement
    found,todo = {},[Requirement(r) for r in requirements]
    while todo:
        wanted = todo.pop()
        if wanted.marker and not any(wanted.marker.evaluate({'extra': e}) for e in wanted.extras | {''}): continue
        asked = found.setdefault(wanted.name, set())
        if wanted.name in asked: continue
        try: at = distribution(wanted.name)
        except PackageNotFoundError: continue
        asked.add(wanted.name)
        for line in at.requires or ():
            need = Requirement(line)
            extras = wanted.extras or {''}
            if need.marker is None or any(need.marker.evaluate({'extra': e}) for e in extras):
                need.marker = None
                todo.append(need)
    return [distribution(name) for name,asked in found.items() if asked]

def environment(folder, requirements):
    "A folder with links to what these distributions installed, and to the package; nothing else can be imported from it"
    folder.mkdir()
    for d in brought(requirements):
        for top in {f.parts[0] for f in d.files or () if f.parts[0] not in ('..', '__pycache__') and f.suffix!='.pth'}:
            if not (folder/top).exists(): (folder/top).symlink_to(d.locate_file(top))
    (folder/'dynattn').symlink_to(forked.ROOT/'dynattn')
    return folder

class Server(forked.Server):
    "A process in such an environment, without the folders of this one, that forks for each notebook"
    command = [sys.executable, '-S', '-s', __file__]
    def __init__(self, folder, requirements):
        place = environment(folder, requirements)
        super().__init__(MODULES, PYTHONPATH=str(place), HOME=str(folder.parent), IPYTHONDIR=str(folder.parent/'ipython'))

def code_of(nb):
    "The source of each cell that runs, and whether its page shows it"
    for cell in nb['cells']:
        source = ''.join(cell['source'])
        flags = {line[2:].strip() for line in source.splitlines() if line.startswith('#|')}
        if cell['cell_type']=='code' and not flags & {'slow', 'cuda', 'notest', 'eval: false'}:
            yield source, not flags & {'echo: false', 'include: false'}

def run(path, flags, output):
    """In a fork: runs the notebook in an empty folder and ends the process. Names that only cells without visible code give
    are kept for such cells, since a reader who pastes the page does not have them."""
    import json, signal, tempfile, traceback
    signal.alarm(600)
    for stream in (1, 2): os.dup2(output.fileno(), stream)
    sys.path[:] = [p for p in sys.path if Path(p or '.').resolve()!=Path(__file__).parent]
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance(colors='NoColor', history_length=0)
    shell.history_manager.enabled = False
    nb = json.loads(path.read_text(encoding='utf-8'))
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        aside = {}
        for source,shown in code_of(nb):
            before = set(shell.user_ns)
            if not shown: shell.user_ns.update(aside)
            result = shell.run_cell(source)
            if not result.success:
                print('-'*20, source, sep='\n', flush=True)
                os._exit(1)
            if not shown:
                aside = {name: shell.user_ns.pop(name) for name in set(shell.user_ns)-before}
    sys.stdout.flush()
    os._exit(forked.PASSED)

if __name__=='__main__': forked.serve(sys.argv[1:], run)
