"The faults of mutants.py can still be put in; `python tests/mutants.py` shows that the tests notice them."
import pytest
import mutants

def test_there_are_sixty(): assert len(set(mutants.MUTANTS))==len(mutants.MUTANTS)>=60

@pytest.mark.slow       # nightly: a change of a line should not have to look here
@pytest.mark.parametrize('name, text, fault', mutants.MUTANTS, ids=[f'{name}-{i}' for i,(name,*_) in enumerate(mutants.MUTANTS)])
def test_a_fault_still_has_its_place(name, text, fault):
    assert text!=fault and mutants.problem(name, text, fault) is None, mutants.problem(name, text, fault)
