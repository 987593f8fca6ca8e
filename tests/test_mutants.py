"The faults of mutants.py can still be put in; `python tests/mutants.py` shows that the tests notice them."
import pytest
import mutants, mutants_core, sanitize_native

def test_there_are_sixty(): assert len(set(mutants.MUTANTS))==len(mutants.MUTANTS)>=60

@pytest.mark.slow       # nightly: a change of a line should not have to look here
@pytest.mark.parametrize('name, text, fault', mutants.MUTANTS, ids=[f'{name}-{i}' for i,(name,*_) in enumerate(mutants.MUTANTS)])
def test_a_fault_still_has_its_place(name, text, fault):
    assert text!=fault and mutants.problem(name, text, fault) is None, mutants.problem(name, text, fault)

@pytest.mark.slow
def test_a_fault_of_the_core_still_has_its_place():
    source = sanitize_native.SOURCE.read_text(encoding='utf-8')
    lost = [text for text,fault in mutants_core.MUTANTS if text==fault or source.count(text)!=1]
    assert not lost, lost
