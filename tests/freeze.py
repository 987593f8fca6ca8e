"""Write the public names and signatures of every module to tests/api.txt, the file that freezes them.

Read from the source, not by importing: fast, and the same on a machine without Triton, transformers or matplotlib."""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
API = ROOT/'tests/api.txt'
DEFS = ast.FunctionDef, ast.AsyncFunctionDef

def signature(f, name, method=False):
    "`name(args) -> result`, without the `self` or `cls` of a method"
    deco, a = {ast.unparse(d) for d in f.decorator_list}, f.args
    if deco & {'property','cached_property','patch(as_prop=True)'}: return name + ('' if f.returns is None else f' -> {ast.unparse(f.returns)}')
    if method and 'staticmethod' not in deco: (a.posonlyargs or a.args)[:1] = []
    return f'{name}({ast.unparse(a)})' + ('' if f.returns is None else f' -> {ast.unparse(f.returns)}')

def record(name, modules):
    "The class that `takes` names, defined in its module or imported from another one of the package"
    for defs in modules:
        if isinstance(defs.get(name), ast.ClassDef): return defs[name]

def arguments(name, modules):
    """The arguments of a dataclass of arguments, as `name:type=default`: first those of the records it builds on, then
    its own; `*` before the named ones"""
    c = record(name, modules)
    base = [a for b in map(ast.unparse, c.bases) for a in arguments(b, modules)]
    own = []
    for n in c.body:
        if not isinstance(n, ast.AnnAssign): continue
        kind = ast.unparse(n.annotation)
        default = '' if n.value is None else ast.unparse(n.value)
        if kind=='KW_ONLY': own.append('*')
        elif 'init=False' not in default: own.append(f"{n.target.id}: {kind}" + (f'={default}' if default else ''))
    return base + own

def taken(f, modules):
    "The signature that `@takes(record)` gives a function, or None"
    for d in f.decorator_list:
        if isinstance(d, ast.Call) and ast.unparse(d.func)=='takes':
            taken_ones = ', '.join(arguments(ast.unparse(d.args[0]), modules))
            return f'{f.name}({taken_ones})' + ('' if f.returns is None else f' -> {ast.unparse(f.returns)}')

def members(c, defs):
    "Public methods and properties of a class, its constructor first as `Class(...)`; a private base's count as its own"
    for b in map(ast.unparse, c.bases):
        if b.startswith('_') and b in defs: yield from (l.replace(b, c.name, 1) for l in members(defs[b], defs))
    for n in c.body:
        if isinstance(n, DEFS) and n.name=='__init__': yield signature(n, c.name, True)
    for n in c.body:
        if isinstance(n, DEFS) and (n.name in ('__call__','forward') or not n.name.startswith('_')):
            yield signature(n, f'{c.name}.{n.name}', True)
        if isinstance(n, ast.AnnAssign) and not n.target.id.startswith('_'): yield f'{c.name}.{ast.unparse(n)}'

def patched(tree):
    "Methods added by fastcore: `@patch` annotates the first argument with the class, `@patch_to` names it"
    for n in tree.body:
        if not isinstance(n, DEFS) or n.name.startswith('_'): continue
        for d in n.decorator_list:
            if ast.unparse(d).startswith('patch_to('): yield signature(n, f'{ast.unparse(d.args[0])}.{n.name}')
            elif ast.unparse(d).startswith('patch'):
                yield signature(n, f'{ast.unparse(n.args.args[0].annotation)}.{n.name}', True)

def definitions(path):
    "Functions and classes of a module by name"
    return {n.name: n for n in ast.parse(path.read_text(encoding='utf-8')).body if isinstance(n, (*DEFS, ast.ClassDef))}

def public(path, modules):
    "One line per public name of a module, sorted; records are looked up in `modules`, the definitions of every module"
    tree = ast.parse(path.read_text(encoding='utf-8'))
    if path.name=='__init__.py':
        late = [n for i in tree.body if isinstance(i, ast.If) and 'TYPE_CHECKING' in ast.unparse(i.test) for n in i.body]
        names = {a.asname or a.name for n in tree.body+late if isinstance(n, ast.ImportFrom) for a in n.names}
        return sorted(n for n in names if not n.startswith('_'))
    defs = {n.name: n for n in tree.body if isinstance(n, (*DEFS, ast.ClassDef))}
    res = list(patched(tree))
    for n in tree.body:
        if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0])=='__all__'): continue
        for name in ast.literal_eval(n.value):
            d = defs.get(name)
            if isinstance(d, ast.ClassDef):
                bases = ', '.join(map(ast.unparse, d.bases))
                res += [f'class {name}({bases})'.replace('()', ''), *members(d, defs)]
            else: res.append(name if d is None else taken(d, modules) or signature(d, name))
    return sorted(set(res), key=lambda s: (s.removeprefix('class ').split('(')[0], not s.startswith('class'), s))

def api():
    "The text of api.txt"
    paths = [p for p in (ROOT/'dynattn').rglob('*.py') if p.name!='_modidx.py']
    mods = {'.'.join(p.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__'): p for p in paths}
    modules = [definitions(p) for p in mods.values()]
    return '\n'.join(f'{m}\n' + ''.join(f'    {l}\n' for l in public(p, modules)) for m,p in sorted(mods.items()))

if __name__=='__main__': API.write_text(api(), encoding='utf-8')
