"Packaging reads everything from settings.ini, nbdev's one place for it."
import re, shlex
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

ini = ConfigParser(delimiters=['='])
ini.read('settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
def words(key): return shlex.split(cfg.get(key, ''))

extras = {o: words(f'{o}_requirements') for o in ('viz', 'train', 'hf', 'narrow', 'oracles', 'dev')}
extras['dev'] = sorted({r for o in ('viz', 'train', 'hf', 'dev') for r in extras[o]})       # `oracles` adds the packages that the survey's slow cells ask
raw = cfg['git_url'].replace('github.com', 'raw.githubusercontent.com') + '/' + cfg['branch']
readme = re.sub(r'\]\((nbs/[^)]*)\)', rf']({raw}/\1)', Path('README.md').read_text(encoding='utf-8'))   # PyPI has no nbs/

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0', license_files=['LICENSE'],
    long_description=readme, long_description_content_type='text/markdown',
    packages=find_packages(include=[cfg['lib_path'], cfg['lib_path']+'.*']), package_data={cfg['lib_path']: ['py.typed', 'widgets.js']}, python_requires='>='+cfg['min_python'],
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Science/Research', 'Programming Language :: Python :: 3'],
    install_requires=words('requirements'), extras_require=extras,
    entry_points={'console_scripts': words('console_scripts'),
        'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},      # lets nbdev link to these docs, here and from other packages
    project_urls={'Documentation': cfg['doc_host']+cfg['doc_baseurl'], 'Changelog': f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md"},
)
