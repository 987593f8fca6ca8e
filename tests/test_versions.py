"What tests ask of a version of transformers: every model that they name is there and served, or is refused by name."
import pytest, torch
pytest.importorskip('transformers')
import versions
from test_hf_common import ARCHITECTURES, build
from versions import asks_the_table, handed_on, has, has_all, lacks, numbers, served

@pytest.mark.parametrize('name', ARCHITECTURES)
def test_a_model_is_served_or_refused_by_name(name):
    assert served(build(name))==asks_the_table(build(name))

def test_versions_are_compared_by_their_numbers():
    assert numbers('5.4.0')<numbers('5.24.0')<=numbers('5.24.0.dev0') and numbers('5.0')<numbers('5.0.1')

@pytest.mark.parametrize('newest', [True, False])
def test_a_new_version_may_lack_nothing(newest, monkeypatch):
    monkeypatch.setattr(versions, 'has_all', lambda: newest)
    with pytest.raises(pytest.fail.Exception if newest else pytest.skip.Exception, match='lacks a model'): lacks('a model')

def test_a_model_without_the_table_is_found(monkeypatch):
    "And a refusal that does not come is a failure"
    model = build('llama')
    monkeypatch.setattr(versions, 'asks_the_table', lambda model: False)
    monkeypatch.setattr(versions, 'has_all', lambda: False)
    with pytest.raises(pytest.fail.Exception, match='DID NOT RAISE'): served(model)

def test_what_a_model_hands_on():
    model,ids = build('llama'),torch.arange(3, 9)[None]
    before = model.config._attn_implementation
    names = handed_on(model, dict(input_ids=ids, position_ids=torch.arange(6)[None], use_cache=False))
    assert 'position_ids' in names or not has_all()
    assert model.config._attn_implementation==before and 'dropout' in names

def test_an_architecture_is_known_by_either_name():
    assert has('bert') and has('BertModel') and not has('no_such_model')
