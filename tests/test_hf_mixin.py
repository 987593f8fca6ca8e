"""transformers' own common tests of its models, on tiny models whose attention is dynattn wherever it would be sdpa.

They are in transformers' source distribution, not in the package that is installed, so pip fetches that once, into
.matrix/. `benchmarks/hf_tests.py` runs all tests of a model, from a checkout.
The comparison with eager lets a fifth of a batch differ, and pads one text of seven; the laws in test_hf_common.py
see padding that is lost."""
import importlib, importlib.util, os, re, shutil, subprocess, sys, tarfile, types, unittest
from importlib.metadata import version
from pathlib import Path
import pytest

os.environ['HF_HUB_OFFLINE'] = '1'
ROOT = Path(__file__).resolve().parents[1]
transformers = pytest.importorskip('transformers')
pytestmark = pytest.mark.slow       # pip's download
from test_hf_common import ARCHITECTURES, build, inputs
from versions import served

def source(place):
    "The folder with the tests of the installed transformers, fetched if it is not there."
    name = f"transformers-{version('transformers')}"
    folder = ROOT/'.matrix'/name
    if folder.exists(): return folder
    fetch = [sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '--no-build-isolation', '--no-binary', ':all:',
             '--retries', '0', '--timeout', '10', '-d', str(place), name.replace('-', '==')]
    subprocess.run(fetch, check=True, capture_output=True, timeout=90)
    with tarfile.open(place/f'{name}.tar.gz') as archive:
        tests = [x for x in archive.getmembers() if x.name.startswith(f'{name}/tests/') and x.name.endswith('.py')]
        archive.extractall(place, tests, filter='data')
    folder.parent.mkdir(exist_ok=True)
    shutil.move(place/name, folder)
    return folder

def stand_in(name, **content):
    "A module that the tests import and these do not need: other tests, or a decorator that makes several of one."
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules.setdefault(name, module)

def common_tests(folder):
    "The module of transformers with its common tests."
    package = types.ModuleType('transformers_tests')
    package.__path__ = [str(folder/'tests')]
    sys.modules['transformers_tests'] = package
    class parameterized:
        @staticmethod
        def expand(*args, **kwargs): return lambda test: None
    if importlib.util.find_spec('parameterized') is None: stand_in('parameterized', parameterized=parameterized)
    stand_in('transformers_tests.exporters')
    stand_in('transformers_tests.exporters.test_export', ExportTesterMixin=type('ExportTesterMixin', (), {}))
    stand_in('transformers_tests.generation')
    stand_in('transformers_tests.generation.test_utils', GenerationTesterMixin=type('GenerationTesterMixin', (), {}))
    return importlib.import_module('transformers_tests.test_modeling_common')

class Tester:
    "Makes the configuration and the inputs of a tiny model."
    is_training,batch_size = True,2

    def __init__(self, name): self.name,self.seq_length = name,10 if name=='vit' else 13

    def prepare_config_and_inputs_for_common(self):
        batch = {key: x for key,x in inputs(self.name, 'right').items() if key!='labels'}
        if self.name in ('t5','bart'): batch['decoder_input_ids'] = batch['input_ids'].clone()
        if self.name=='whisper': batch['decoder_input_ids'] = inputs(self.name)['labels']
        return build(self.name).config, batch

@pytest.fixture(scope='module')
def mixin(tmp_path_factory, request):
    folder = source(tmp_path_factory.mktemp('source'))
    for path in (folder/'tests').glob('*.py'):          # its own markers, which are strict here
        for name in set(re.findall(r'\bmark\.(\w+)', path.read_text())): request.config.addinivalue_line('markers', name)
    return common_tests(folder)

@pytest.fixture
def named_dynattn(monkeypatch):
    "Every model that asks for sdpa, or for nothing, gets dynattn."
    from transformers import PreTrainedModel
    from dynattn import hf
    hf.register()
    usual = PreTrainedModel.get_correct_attn_implementation
    given = []
    def replaced(model, requested, *args, **kwargs):
        name = 'dynattn' if requested in (None, 'sdpa') else requested
        given.append(usual(model, name, *args, **kwargs))
        return given[-1]
    monkeypatch.setattr(PreTrainedModel, 'get_correct_attn_implementation', replaced)
    return given

MODELS = ['bert','roberta','modernbert','vit','wav2vec2','gpt2','llama','mistral','qwen3','gemma2','gpt_oss','t5',
          'bart','whisper']
TESTS = ['equals_eager','test_batching_equivalence','test_training',
         'test_training_gradient_checkpointing_use_reentrant_false']

@pytest.mark.parametrize('test', TESTS)
@pytest.mark.parametrize('name', MODELS)
def test_common(name, test, mixin, named_dynattn, monkeypatch):
    if not served(build(name)): return
    cls = getattr(transformers, ARCHITECTURES[name][0])
    monkeypatch.setattr(cls, '_supports_sdpa', True)  # Gemma 2 and GPT-OSS have False, which would end the test
    class Case(mixin.ModelTesterMixin, unittest.TestCase):
        all_model_classes,is_encoder_decoder = (cls,),name in ('t5','bart','whisper')
        def runTest(self): pass
        def _prepare_for_class(self, batch, model_class, return_labels=False):
            batch = super()._prepare_for_class(batch, model_class, return_labels)
            if return_labels and name=='whisper': batch['labels'] = inputs(name)['labels']
            return batch
        def equals_eager(self):
            for side,dtype in (('left','fp32'),('right','fp32'),('right','bf16')):
                mixin._test_eager_matches_sdpa_inference(self, test, dtype, side, True, False, False)
    case = Case()
    case.model_tester = Tester(name)
    getattr(case, test)()
    assert 'dynattn' in named_dynattn
