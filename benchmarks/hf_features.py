"""What every model of the installed transformers hands to its attention function, and what its own eager attention reads.

Reads all modeling files (nothing is imported or run) and writes a row per file: the keywords of its calls beyond queries, keys,
values, mask, scale and dropout (`passed`), the arguments of its eager attention (`read`), attributes of the layer that it reads
(`attributes`), how the layer tells implementations apart by their name (`by_name`), and what dynattn makes of it (`served`).

    python benchmarks/hf_features.py           # prints the table of features, writes results/hf_features.csv
"""
import argparse, ast, re
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from harness import RESULTS, write

ORDINARY = {'module', 'query', 'key', 'value', 'query_states', 'key_states', 'value_states', 'attention_mask', 'scaling',
            'dropout', 'is_causal'}
LOOKED_UP = 'get_interface(', 'ALL_ATTENTION_FUNCTIONS['
ALWAYS_THERE = {'training', 'num_key_value_groups', 'head_dim'}

def interface_names(tree):
    "Names to which a file assigns what `get_interface` returns, or, in transformers 5.0, an entry of the table."
    def is_looked_up(value):
        if isinstance(value, ast.Subscript): return getattr(value.value, 'id', None)=='ALL_ATTENTION_FUNCTIONS'
        return isinstance(value, ast.Call) and getattr(value.func, 'attr', None)=='get_interface'
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not is_looked_up(node.value): continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]: yield target.id

def passed_keywords(tree):
    "Keywords of all calls of the attention function."
    names = set(interface_names(tree))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in names]
    return {k.arg for call in calls for k in call.keywords if k.arg}-ORDINARY, len(calls)

def eager_functions(tree):
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and 'eager' in n.name and 'attention' in n.name]

def arguments(function): return {a.arg for a in function.args.args+function.args.kwonlyargs}

def attributes_of_the_layer(function):
    "Attributes of `module` that the function reads."
    return {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute) and getattr(n.value, 'id', None)=='module'}

def compared_names(tree):
    "Names of implementations that the file compares `_attn_implementation` with."
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or getattr(node.left, 'attr', None)!='_attn_implementation': continue
        for constant in ast.walk(node):
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str): found.add(constant.value)
    return found

def parse_relevant(source):
    "The top-level parts of a file that can hold something for the table; parsing all of them takes ten times as long."
    parts = re.split(r'^(?=@|class |def )', source, flags=re.M)
    relevant = [part for part in parts if any(mark in part for mark in (*LOOKED_UP,'_attn_implementation','eager'))]
    try: return ast.parse(''.join(part for part in relevant if not part.startswith('@')))
    except SyntaxError: return ast.parse(source)  # a string holds what looks like a definition

def features(path):
    "One row of the table, or None where a file does not use the interface."
    source = path.read_text(encoding='utf-8')
    if not any(mark in source for mark in LOOKED_UP): return None
    tree = parse_relevant(source)
    passed,calls = passed_keywords(tree)
    eager = eager_functions(tree)
    read = set().union(*map(arguments, eager)) - ORDINARY
    attributes = set().union(*map(attributes_of_the_layer, eager)) - ALWAYS_THERE
    row = dict(model=path.stem.removeprefix('modeling_'), calls=calls, passed=passed, read=read, attributes=attributes,
               by_name=compared_names(tree), served=served(passed, read))
    return {name: ' '.join(sorted(x)) if isinstance(x, set) else x for name,x in row.items()}

def served(passed, read):
    "What dynattn does with the keywords that change a result: computes all, or the names of those it refuses."
    from dynattn.hf.plugin import _COMPUTED, _FOREIGN, _HARMLESS, _PACKING
    known = {*_COMPUTED, *_HARMLESS, *_PACKING}
    return 'refuses '+' '.join(sorted((passed | read)-known)) if (passed | read)-known or passed & {*_FOREIGN} else 'computed'

def scan():
    "All rows, by model."
    models = Path(find_spec('transformers').origin).parent/'models'
    rows = [features(path) for path in sorted(models.glob('*/modeling_*.py'))]
    return [row for row in rows if row is not None]

def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--to', type=Path, default=RESULTS/'hf_features.csv')
    args = a.parse_args()
    rows = scan()
    write(args.to.absolute(), ({'transformers': version('transformers'), **row} for row in rows))
    print(f"{len(rows)} files, {sum(row['calls'] for row in rows)} calls, {sum(row['served']=='computed' for row in rows)} computed")
    for column in ('passed', 'read', 'attributes', 'by_name'):
        counts = Counter(name for row in rows for name in row[column].split())
        print(f'\n{column}:')
        for name,n in counts.most_common():
            models = [row['model'] for row in rows if name in row[column].split()]
            print(f"{n:5} {name:18} {' '.join(models[:8])}{' ...' if n>8 else ''}")

if __name__=='__main__': main()
