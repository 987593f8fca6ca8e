"""Who imports whom, and what makes a room hard to read: `python tests/house.py` prints counts and what stands behind them.

`tests/house.json` holds the most that each list may have; lines, definitions and cells have no ceiling.
`python tests/house.py --lower` writes what it counts now, and refuses to raise a number. A number is raised by hand, in
a commit that says why."""
import ast, json, re, sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILING = ROOT/'tests/house.json'
ROOMS = [            # an import goes to its own room or to an earlier one
    ('tools', 'docstrings kinds modes'),
    ('ideas', 'widgets padding parts metrics sigma curve smoothing window chunks family alpha sparsity plot'),
    ('engine', 'engine'),
    ('layers', 'saved configs cache modules probe parallel flash_attn everywhere'),
    ('library', 'options hf survey'),
    ('programs', 'texts runs command train narrow export audit')]
ASKED = dict(        # of who made a list longer
    upward='import from chapters with a lower number', lazy='import at the top of the module',
    circles='let one of them not import the other', folders='let one of them not import the other',
    downstairs='import from the same room or an earlier one', homeless='give the module a room',
    borrowed='use a public name of the other module', packed='write an assignment for each value, or a record with names',
    unused='leave the import out', unread='leave the argument out, or read it',
    idle='let a module read the field (`c.name`), or leave it out: its bounds alone change nothing')
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef

@dataclass
class Module:
    name:str            # dynattn.engine.geometry
    path:Path
    chapter:int|None    # the number of its notebook; None where it is written by hand
    tree:ast.Module

    @property
    def counts(self): return self.path.name!='__init__.py' and '.survey' not in self.name

def modules(root=ROOT):
    "Every module of the package by name, without nbdev's index"
    found = {}
    for path in sorted((root/'dynattn').rglob('*.py')):
        if path.name=='_modidx.py': continue
        text = path.read_text(encoding='utf-8')
        name = '.'.join(path.relative_to(root).with_suffix('').parts).removesuffix('.__init__')
        chapter = re.search(r'File to edit: .*?nbs/(?:.*/)?(\d+)_', text)
        found[name] = Module(name, path, int(chapter[1]) if chapter else None, ast.parse(text))
    return found

def targets(node, module, known):
    "Modules of ours that an import statement names"
    if isinstance(node, ast.Import): return [a.name for a in node.names if a.name in known]
    base = node.module or ''
    if node.level:
        here = module.name.split('.')
        package = here if module.path.name=='__init__.py' else here[:-1]
        base = '.'.join(package[:len(package)-node.level+1]+([node.module] if node.module else []))
    named = [f'{base}.{a.name}' if f'{base}.{a.name}' in known else base for a in node.names]
    return [name for name in named if name in known]

def imports(known):
    "(module, module that it imports, inside a function?), between modules that have a file of their own"
    for module in known.values():
        if module.path.name=='__init__.py': continue
        functions = [n for n in ast.walk(module.tree) if isinstance(n, DEFINITIONS[:2])]
        inside = {id(n) for f in functions for n in ast.walk(f)}
        for node in ast.walk(module.tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
            for target in targets(node, module, known):
                if target!=module.name and known[target].path.name!='__init__.py': yield module.name, target, id(node) in inside

def folder(name): return '.'.join(name.split('.')[:2])       # a module at the top is a folder of its own

def room(module):
    "The number of the room that a module is in; the package itself, its command and its examples are above all"
    place = folder(module).partition('.')[2]
    return next((i for i,(_,names) in enumerate(ROOMS) if place in names.split()), len(ROOMS))

def reachable(edges, start):
    "Everything that `start` imports, directly or through others"
    found,todo = set(),[start]
    while todo:
        for name in edges.get(todo.pop(), ()):
            if name not in found: found.add(name); todo.append(name)
    return found

def circles(edges):
    "Groups of modules that import each other"
    reach = {name: reachable(edges, name) for name in edges}
    groups = {tuple(sorted({name, *(other for other in reach[name] if name in reach.get(other, ()))}))
              for name in edges if name in reach[name]}
    return sorted(' <-> '.join(group) for group in groups)

def borrowed(module):
    "Private names that a module takes from another one of ours"
    if 'triton' in module.name: return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or '').startswith('dynattn')): continue
        for alias in node.names:
            if alias.name.startswith('_') and not alias.name.startswith('__'):
                yield f'{module.name}: {alias.name}'

def packed(module):
    "Assignments of three or more values in one line"
    if 'triton' in module.name: return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple): continue
        if any(isinstance(t, ast.Tuple) and len(t.elts)>2 for t in node.targets):
            yield f'{module.name}:{node.lineno}'

def unused(module):
    "Names that a module imports and does not use; `import dynattn.x` alone may be for what it registers"
    if module.path.name=='__init__.py': return
    inner = ast.walk(module.tree)
    used = {x.id if isinstance(x, ast.Name) else x.value for x in inner if isinstance(x, (ast.Name, ast.Constant))}
    for node in module.tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)): continue
        for alias in node.names:
            name = alias.asname or alias.name
            if '.' not in name and name not in used: yield f'{module.name}: {name}'

def unread(module):
    "Arguments that a private function, which is only called and never handed on, does not read"
    called = {id(x.func) for x in ast.walk(module.tree) if isinstance(x, ast.Call)}
    handed_on = {x.id for x in ast.walk(module.tree) if isinstance(x, ast.Name) and id(x) not in called}
    for f in module.tree.body:
        if not isinstance(f, DEFINITIONS[:2]) or not f.name.startswith('_') or f.decorator_list or f.name in handed_on: continue
        if len(f.body)==1 and ast.get_docstring(f): continue    # a place that another module fills
        read = {x.id for x in ast.walk(f) if isinstance(x, ast.Name)}
        for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs):
            if a.arg not in read and not a.arg.startswith('_'): yield f'{module.name}:{f.lineno} {f.name}: {a.arg}'

HOLDS_SETTINGS = re.compile(r'(self\.)?(c|o|config|options)|self')     # what a module calls them
BOUNDS = 'check', '_rules', '__post_init__'     # of a settings class: a field that only they read changes nothing

def settings(known):
    "name -> (module, class) of every class of settings: a dataclass called `…Config` or `…Options`"
    found = {node.name: (module, node) for module in known.values() for node in module.tree.body if isinstance(node, ast.ClassDef)}
    return {name: x for name,x in found.items() if re.search('(Config|Options)$', name) and 'dataclass' in map(decorator, x[1].decorator_list)}

def decorator(node): return ast.unparse(node).partition('(')[0].rpartition('.')[2]

def family(name, classes):
    "A settings class, those that it is made from and those that are made from it"
    bases = {kind: {ast.unparse(base) for base in node.bases} & classes.keys() for kind,(_,node) in classes.items()}
    children = {kind: {other for other in classes if kind in bases[other]} for kind in classes}
    return {name} | reachable(bases, name) | reachable(children, name)

def fields_read(module):
    "Fields that a module reads of what it calls its settings, apart from their bounds"
    bounds = {id(x) for f in ast.walk(module.tree) if isinstance(f, ast.FunctionDef) and f.name in BOUNDS for x in ast.walk(f)}
    reads = (x for x in ast.walk(module.tree) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Load) and id(x) not in bounds)
    return {x.attr for x in reads if HOLDS_SETTINGS.fullmatch(ast.unparse(x.value))}

def names_in(module):
    return {x.name if isinstance(x, (ast.alias, ast.ClassDef)) else x.id for x in ast.walk(module.tree)
            if isinstance(x, (ast.alias, ast.ClassDef, ast.Name))}

def idle(known):
    "Fields of a settings class that no module reads which has the class, its base or one made from it, and no other settings"
    classes = settings(known)
    for name,(home,node) in classes.items():
        kin = family(name, classes)
        others = {module.name for other,(module,_) in classes.items() if other not in kin}
        users = [m for m in known.values() if m is home or m.name not in others and names_in(m) & kin]
        read = set().union(*map(fields_read, users))
        for field in (x.target.id for x in node.body if isinstance(x, ast.AnnAssign)):
            if field not in read: yield f'{home.name}.{name}: {field}'

def found(root=ROOT):
    "The culprits of each kind"
    known = modules(root)
    core = [m for m in known.values() if m.counts]
    arrows = sorted(set(imports(known)))
    edges = {}
    for name,target,_ in arrows: edges.setdefault(name, set()).add(target)
    between = {}
    for name,target,_ in arrows:
        if folder(name)!=folder(target): between.setdefault(folder(name), set()).add(folder(target))
    def later(name, target):
        numbers = known[name].chapter, known[target].chapter
        return None not in numbers and numbers[1]>numbers[0]
    return dict(
        upward=sorted({f'{name} -> {target}' for name,target,_ in arrows if later(name, target)}),
        lazy=[f'{name} -> {target}' for name,target,inside in arrows if inside],
        circles=circles(edges), folders=circles(between),
        downstairs=[f'{name} -> {target}' for name,target,_ in arrows if room(target)>room(name)],
        homeless=[f'{m.name}: its folder, or its name at the top, goes into ROOMS of tests/house.py'
                  for m in known.values() if m.chapter is not None and room(m.name)==len(ROOMS)],
        borrowed=[x for m in core for x in borrowed(m)],
        packed=[x for m in core for x in packed(m)],
        unused=[x for m in known.values() for x in unused(m)],
        unread=[x for m in core for x in unread(m)],
        idle=[*idle(known)])

def counts(found): return {name: len(x) for name,x in found.items()}

if __name__=='__main__':
    now = found()
    for name,x in now.items():
        print(f'{name:12} {len(x)}' + (f'   {ASKED[name]}' if x else ''))
        print(*(f'    {line}' for line in x), sep='\n')
    if '--lower' in sys.argv:
        ceiling = json.loads(CEILING.read_text()) if CEILING.exists() else counts(now)
        higher = {name: f'{len(x)} > {ceiling[name]}' for name,x in now.items() if len(x)>ceiling.get(name, len(x))}
        if higher: sys.exit(f'above the ceiling, which is raised by hand: {higher}')
        CEILING.write_text(json.dumps(counts(now), indent=1)+'\n')
