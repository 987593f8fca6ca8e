"""`help()` says what a page says: comments of parameters are a part of docstrings.

The oracle is fastcore's `docments`, which parses the source of one function at a time."""
import ast, inspect, pickle, re, subprocess, sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent, fill
from types import FunctionType
import pytest, torch
from fastcore.docments import docments
import dynattn
from dynattn import docstrings

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT/'dynattn'
GENERATED = [p for p in sorted(PACKAGE.rglob('*.py')) if 'File to edit:' in p.read_text(encoding='utf-8')[:400]]
MODULES = ['.'.join(p.relative_to(ROOT).with_suffix('').parts) for p in GENERATED]
TITLE = 'Parameters\n----------\n'

def plain(found):
    "The function of a method, a property or a kernel."
    if isinstance(found, property): found = found.fget
    found = getattr(found, 'func', found) if type(found).__name__=='cached_property' else found
    return getattr(found, '__func__', found)

def public(module):
    """(name, object, its function) of the public functions and classes of a module, and of their public methods.
    Not a private function that a class shows by another name."""
    if '.triton.' in module: pytest.importorskip('triton')
    namespace = vars(import_module(module))
    for name in namespace.get('__all__', ()):
        found = namespace[name]
        if getattr(found, '__module__', None)!=module or not callable(found): continue
        yield name, found, found
        for method,x in vars(found).items() if inspect.isclass(found) else ():
            function = plain(x if isinstance(x, property) else getattr(found, method))
            if not inspect.isfunction(function) or function.__name__!=method: continue
            if method=='__call__' or not method.startswith('_'):
                shown = getattr(found, method)
                yield f'{name}.{method}', shown if isinstance(x, property) else function, function

def is_one_line(function):
    "Whether the body stands behind the `def`, and so the comment behind both is about the result."
    source = inspect.getsource(function)
    node = ast.parse(dedent(source)).body[0]
    return isinstance(node, ast.FunctionDef) and node.body[-1].end_lineno==node.lineno

def without_docstring(function):
    "A copy, for docments reads the docstring too."
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    copy.__signature__ = inspect.signature(function)
    copy.__qualname__ = copy.__name__
    return copy

def explained(found):
    "{name: comment} by docments; a class without a constructor of ours has none."
    if inspect.isclass(found):
        constructor = inspect.unwrap(found.__init__)
        is_generated = is_dataclass(found) and constructor.__code__.co_filename.startswith('<')
        if is_generated: return {name: text.strip() for name,text in docments(found, returns=False).items() if text}
        if not (getattr(constructor, '__module__', None) or '').startswith('dynattn'): return {}
        found = constructor
    function = without_docstring(inspect.unwrap(found))
    said = {name: text.strip() for name,text in docments(function, args_kwargs=True).items() if text and name!='self'}
    return {'return': text for text in said.values()} if is_one_line(function) else said

def lost(found, function):
    "The comments of the source that `help()` does not have at their parameter"
    text = inspect.getdoc(found) or ''
    for name,comment in explained(function).items():
        if name=='return': is_said = inspect.isclass(found) or comment in text.partition('Returns\n-------\n')[2]
        else: is_said = re.search(rf'^.*\b{name}\b.*\n    .*{re.escape(comment)}', text, re.M)
        if not is_said: yield f'{name} # {comment}'

@pytest.mark.parametrize('module', MODULES)
def test_each_comment_is_in_the_docstring(module):
    missing = {name: [*lost(found, function)] for name,found,function in public(module)}
    assert not any(missing.values()), {name: x for name,x in missing.items() if x}

def first_line(x): return (inspect.cleandoc(x.__doc__ or '').splitlines() or [''])[0]

@pytest.mark.parametrize('module', MODULES)
def test_a_docstring_is_our_own(module):
    """`help(MultiheadAttention.forward)` was PyTorch's, where N is the batch, above our own comments, where it is the
    length; that of a property was `bool`'s, the kind of a constant that it stands for."""
    borrowed = []
    for name,_,function in public(module):
        owner,_,method = name.partition('.')
        bases = getattr(import_module(module), owner).__mro__[1:] if method else ()
        for base in bases:
            other = vars(base).get(method)
            is_a_method = callable(other) or isinstance(other, (property, staticmethod, classmethod))
            is_ours = base.__module__.startswith('dynattn') and is_a_method
            if not is_ours and other is not None and first_line(other) and first_line(other) in (function.__doc__ or ''):
                borrowed.append(f'{name}: {first_line(other)}')
    assert not borrowed

def own_sentence(cls, name):
    "The first line of the docstring that `help()` shows for a method or a property, if it is ours."
    for base in cls.__mro__:
        function = plain(vars(base).get(name))    # not a constant, whose docstring is that of its kind
        if not inspect.isfunction(function) or not base.__module__.startswith('dynattn'): continue
        found = first_line(function)
        if found and not found.startswith(('Parameters', 'Returns')): return found
    return ''

def members(cls):
    "Names of the public methods and properties of a class, also those of a base of ours."
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        is_public = name=='__call__' or not name.startswith('_')
        is_code = inspect.isfunction(plain(vars(owner).get(name)))
        if is_public and is_code and owner.__module__.startswith('dynattn'): yield name

@pytest.mark.parametrize('module', MODULES)
def test_every_public_name_has_a_sentence(module):
    "113 methods, properties and functions had none, or rows of parameters without one."
    without = []
    for name,found,_ in public(module):
        if '.' in name: continue
        first = first_line(found)
        # a dataclass without a docstring gets its signature as one
        if not first or first.startswith((f'{name}(', 'Parameters', 'Returns')): without.append(name)
        for member in members(found) if inspect.isclass(found) else ():
            if not own_sentence(found, member): without.append(f'{name}.{member}')
    assert not without

def test_names_of_one_line_share_its_comment():
    "Each had a row with the whole comment: `share` was said to be half-widths"
    Budget = import_module('dynattn.hf.curves').Budget
    assert 'width, share : Tensor, float\n    [K] half-widths in tokens; 0 to 1' in Budget.scaled.__doc__

def test_a_docstring_of_attention_is_not_indented():
    for f in (dynattn.banded_attention, dynattn.attention, dynattn.dense_attention):
        said = f.__doc__.partition('\nParameters\n')[0].splitlines()
        assert not [line for line in said if line.startswith(' ')]

@pytest.mark.parametrize('path', GENERATED, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_chapter_ends_with_it(path):
    lines = path.read_text(encoding='utf-8').rstrip().splitlines()
    assert lines[-1]=='explain_parameters(__name__)', f'{path.name}: explain_parameters(__name__) in the last exported cell'

SOURCE = '''
from dataclasses import dataclass
from fastcore.basics import patch, patch_to

def lines(
    a:int, # one
    # above
    b='#, (', # not the text: #2
    *rest:float, # more
    c:dict[str,int]=dict(x=(1, 2)), # three # hashes
    **options, # others
) -> 'dict[str,int]': # a result
    "Lines."

def grouped(x, y, z:int=0, # both, and z
    last=None, # no comma
    ) -> tuple: # (x, y)
    """Grouped.

    More."""

def short(x): return [x, # a list
    1] # no comment of the result
def of_result(x): return x # the same
def above_only(
    # of x
    x,
    plain=1,
): "Above."
def nothing(x): "Nothing."
def several(
    call:dict[
        str, # keys
        int], # values
): pass
def register(cls, # a class
): pass

class Base:
    "Base."
    kind:str # no parameter
    def __init__(self,
        width:int, # of the base
    ): pass
    def run(self,
        x, # input
    ) -> int: # output
        "Runs."
    @staticmethod
    def made(
        n, # how many
    ): "Made."
    @property
    def size(self) -> int: # tokens
        "Size."

class Same(Base): "The same arguments."
class Other(Base):
    "Another."
    def __init__(self, width, depth): # as they come
        pass
    def run(self,
        x, # another input
    ): return x
@dataclass
class Record:
    "A record."
    a:int # first
    # above b
    b:str='#' # second
    c:int=0
@dataclass
class More(Record):
    "More."
    d:float=1. # fourth

@patch
def patched(self:Base,
    y:int, # a number
) -> None:
    "Patched."
@patch(cls_method=True)
def from_text(cls:Base,
    text:str, # of a file
): "From text."
@patch_to(Record, static_method=True)
def still(
    t, # time
): "Still."
from dynattn.docstrings import explain_parameters
explain_parameters(__name__)
'''

@pytest.fixture(scope='module')
def sample(tmp_path_factory):
    place = tmp_path_factory.mktemp('help')
    (place/'sample_of_help.py').write_text(SOURCE, encoding='utf-8')
    with pytest.MonkeyPatch.context() as mp:
        mp.syspath_prepend(str(place))
        yield import_module('sample_of_help')
    sys.modules.pop('sample_of_help')

RESULT = 'Returns\n-------\n'

@pytest.mark.parametrize('name,expected', [
    ('lines', 'Lines.\n\n'+TITLE+'a : int\n    one\nb\n    not the text: #2\n*rest : float\n    more\n'
              'c : dict[str,int]\n    three # hashes\n**options\n    others\n\n'+RESULT+'dict[str,int]\n    a result'),
    ('grouped', 'Grouped.\n\nMore.\n\n'+TITLE+'x, y\n    both, and z\nz : int\n    both, and z\nlast\n    no comma\n\n'
                +RESULT+'tuple\n    (x, y)'),
    ('of_result', RESULT+'the same'),
    ('short', RESULT+'a list'),
    ('above_only', 'Above.\n\n'+TITLE+'x\n    of x'),
    ('nothing', 'Nothing.'),
    ('several', TITLE+'call : dict[ str, int]\n    keys values'),
    ('register', TITLE+'cls\n    a class'),
    ('Base', 'Base.\n\n'+TITLE+'width : int\n    of the base'),
    ('Same', 'The same arguments.\n\n'+TITLE+'width : int\n    of the base'),
    ('Base.run', 'Runs.\n\n'+TITLE+'x\n    input\n\n'+RESULT+'int\n    output'),
    ('Other.run', 'Runs.\n\n'+TITLE+'x\n    another input'),
    ('Base.made', 'Made.\n\n'+TITLE+'n\n    how many'),
    ('Base.size', 'Size.\n\n'+RESULT+'int\n    tokens'),
    ('Base.patched', 'Patched.\n\n'+TITLE+'y : int\n    a number'),
    ('Base.from_text', 'From text.\n\n'+TITLE+'text : str\n    of a file'),
    ('Record.still', 'Still.\n\n'+TITLE+'t\n    time'),
    ('Record', 'A record.\n\n'+TITLE+'a : int\n    first\nb : str\n    second'),
    ('More', 'More.\n\n'+TITLE+'a : int\n    first\nb : str\n    second\nd : float\n    fourth'),
])
def test_which_comment_belongs_to_which_parameter(sample, name, expected):
    found = sample
    for part in name.split('.'): found = getattr(found, part)
    assert inspect.getdoc(found)==expected

@pytest.mark.parametrize('name', ['engine.ops.RoutedCall', 'engine.dense._DenseCall', 'train.training.TrainConfig'])
def test_comments_of_fields_are_those_of_docments(name):
    """`docments` parses a whole module for each record: of four, it took longer than the rest of `import dynattn`."""
    module,_,cls = name.rpartition('.')
    record = getattr(import_module(f'dynattn.{module}'), cls)
    expected = {}
    for base in reversed(record.__mro__[:-1]):
        expected |= {name: text.strip() for name,text in docments(base, returns=False).items() if text}
    found = docstrings.field_comments(record)
    taken = inspect.signature(record).parameters
    assert {name: found[name] for name in found if name in taken}==expected and len(expected)>15
    assert not docstrings.field_comments(type('Local', (), {}))

def test_a_second_import_adds_nothing(sample):
    before = inspect.getdoc(sample.lines)
    docstrings.explain_parameters('sample_of_help')
    assert inspect.getdoc(sample.lines)==before

def test_nothing_but_docstrings_changes():
    window = dynattn.Window(torch.tensor(2.))
    assert pickle.loads(pickle.dumps(dynattn.entmax)) is dynattn.entmax and pickle.loads(pickle.dumps(window)).sigma==2
    assert '# -inf takes no part' in inspect.getsource(dynattn.entmax)
    assert 'Parameters' not in inspect.getsource(dynattn.entmax)
    assert list(inspect.signature(dynattn.entmax).parameters)==['scores', 'alpha', 'dim']

@pytest.mark.parametrize('options', [('-OO',), ()])
def test_without_docstrings_or_in_a_program_it_does_nothing(options, tmp_path):
    "`-OO` leaves docstrings out; a module that runs as a program is not read"
    program = tmp_path/'program.py'
    program.write_text('def f(x, # a number\n): pass\n'
                       'from dynattn.docstrings import explain_parameters\n'
                       'explain_parameters(__name__)\n'
                       'from dynattn.padding import PaddingMask\n'
                       'print(f.__doc__, PaddingMask.from_lengths.__doc__ is None)')
    run = subprocess.run([sys.executable, *options, program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split()==['None', str(bool(options))]

def test_where_no_source_can_be_read_docstrings_stay(monkeypatch, sample):
    monkeypatch.setattr(sample.__spec__.loader, 'get_source', lambda name: None)
    before = sample.nothing.__doc__
    docstrings.explain_parameters('sample_of_help')
    assert sample.nothing.__doc__==before

def first_screen(text):
    "README up to its installation as plain text: the title, what it is for, and the example with what it gives"
    head = text.partition('\n## Install')[0]
    title,line = re.match(r'# (\S+)\n\n> (.*)\n', head).groups()
    parts = [f'{title}: {line}']
    for part in re.split(r'\n\n+', head)[2:]:
        if part.startswith(('<!--', '![', '|', '## ')): continue
        part = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', part)
        if part.startswith('```'): part = '\n'.join('    '+x for x in part.splitlines()[1:-1])
        elif not part.startswith('    '): part = fill(part.replace('**', '').replace('*', ''), 100)
        parts.append(part)
    return '\n\n'.join(parts)

def test_the_package_says_what_the_first_screen_of_the_readme_says():
    "`python tests/test_help.py` prints what `dynattn/__init__.py` must begin with"
    assert inspect.getdoc(dynattn)==first_screen((ROOT/'README.md').read_text(encoding='utf-8'))

if __name__=='__main__': print(first_screen((ROOT/'README.md').read_text(encoding='utf-8')))
