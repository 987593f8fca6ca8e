"Packaging reads everything from settings.ini, nbdev's one place for it."
import os, platform, re, shlex, sys, zlib
from configparser import ConfigParser
from pathlib import Path
from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ini = ConfigParser(delimiters=['='])
ini.read('settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
def words(key): return shlex.split(cfg.get(key, ''))

RUN = 'viz', 'train', 'hf', 'narrow', 'export'    # what the chapters need
GROUPS = *RUN, 'smollm2', 'oracles', 'test', 'docs', 'dev'
extras = {o: words(f'{o}_requirements') for o in GROUPS}
def add(extra, *others): extras[extra] = sorted({r for o in (extra, *others) for r in extras[o]})
add('test', *RUN)
add('docs', *RUN)
add('dev', 'test', 'docs', 'oracles')     # and `smollm2` for itself: it compiles llama.cpp
raw = cfg['git_url'].replace('github.com', 'raw.githubusercontent.com') + '/' + cfg['branch']
readme = Path('README.md').read_text(encoding='utf-8')
readme = re.sub(r'\]\((nbs/[^)]*)\)', rf']({raw}/\1)', readme)         # PyPI has no nbs/

# `python -m dynattn.examples`; what `dynattn.plot.measured` reads, on any page
EXAMPLES = sorted(Path('examples').glob('*.py'))
RESULTS = sorted(Path('benchmarks/results').glob('*.csv'))

class with_examples(build_py):
    """Examples and measurements lie beside the package here, and in it in a wheel.

    nbdev's index of the documentation stays here."""
    def find_package_modules(self, package, package_dir):
        found = [m for m in super().find_package_modules(package, package_dir) if m[1]!='_modidx']
        if package!=f"{cfg['lib_path']}.examples": return found
        return found+[(package, path.stem, str(path)) for path in EXAMPLES]

    def run(self):
        super().run()
        if self.editable_mode: return
        folder = Path(self.build_lib)/cfg['lib_path']/'results'
        self.mkpath(str(folder))
        for path in RESULTS: self.copy_file(str(path), str(folder/path.name))

# the CPU core: one C++ file, once for each instruction set, as plain shared libraries that ctypes
# loads. These flags stand behind Python's own, whose -fwrapv costs AVX2 a quarter of its speed; on
# Linux a library holds those it was compiled with: for Apple's systems clang 14 refuses that
SOURCE = 'dynattn/engine/native/core.cpp'
FLAGS = ['-std=c++17', '-O3', '-g0', '-fno-wrapv', '-ffp-contract=fast', '-fno-math-errno',
         '-fno-trapping-math', '-fvisibility=hidden', '-Wno-psabi',
         f'-DSOURCE={zlib.crc32(Path(SOURCE).read_bytes())}']   # tells a library of an older file
if sys.platform=='linux': FLAGS += ['-frecord-gcc-switches']
SETS = dict(generic=[])
if os.environ.get('DYNATTN_MACHINE', platform.machine()) in ('x86_64', 'AMD64'):
    SETS['avx2'] = ['-march=x86-64-v3']
    SETS['avx512'] = ['-march=x86-64-v4', '-mprefer-vector-width=512']
    SETS['bf16'] = [*SETS['avx512'], '-mavx512bf16']
    SETS['amx'] = [*SETS['bf16'], '-mamx-tile', '-mamx-bf16']
CORE = [Extension(f'dynattn.engine.native.core_{name}', [SOURCE], language='c++', optional=True,
                  extra_compile_args=FLAGS+flags, extra_link_args=['-pthread'])
        for name,flags in SETS.items()]
if sys.platform=='win32': CORE = []        # no compiler of Windows takes its vectors

class core_ext(build_ext):
    "No Python in them: one name for every Python, objects of their own for each instruction set"
    def get_ext_filename(self, name): return os.path.join(*name.split('.'))+'.so'
    def get_export_symbols(self, ext): return []
    def build_extension(self, ext):
        temp = self.build_temp
        self.build_temp = os.path.join(temp, ext.name)
        try: super().build_extension(ext)
        finally: self.build_temp = temp

class core_wheel(bdist_wheel):
    "One wheel per platform, for every Python"
    def get_tag(self): return 'py3','none',super().get_tag()[2]

setup(
    name=cfg['lib_name'], version=cfg['version'],
    description=cfg['description'], keywords=cfg['keywords'],
    long_description=readme, long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'],
    license='Apache-2.0', license_files=['LICENSE'],
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path']+'.*']),
    package_data={cfg['lib_path']: ['py.typed', '*.js']}, python_requires='>='+cfg['min_python'],
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research',
                 'Programming Language :: Python :: 3'],
    install_requires=words('requirements'), extras_require=extras,
    entry_points={
        'console_scripts': words('console_scripts'),
        # for the links of the site; nbdev passes over it where there is no index
        'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    ext_modules=CORE,
    cmdclass=dict(build_py=with_examples, build_ext=core_ext, bdist_wheel=core_wheel),
    project_urls={
        'Documentation': cfg['doc_host']+cfg['doc_baseurl'],
        'Changelog': f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md"},
)
