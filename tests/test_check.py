"`make check` finds the tests of a chapter by what the chapter exports."
import pytest
import check, freeze, mutants

@pytest.mark.parametrize('chapter, test', [('14', 'test_call'), ('46', 'test_cache'), ('38', 'test_narrow'), ('58', 'test_price'),
    ('72', 'test_survey'), ('52', 'test_training'), ('01', 'test_padding'), ('48', 'test_modules'), ('67', 'test_audit'), ('12', 'test_before')])
def test_the_tests_of_a_chapter(chapter, test):
    found = check.tests_of(check.notebook(chapter))
    assert f'tests/{test}.py' in found and len(found)<=check.MOST+1, found

def test_a_number_needs_no_zero_in_front(): assert check.notebook('3')==check.notebook('03')

def test_a_study_has_none(): assert check.tests_of(check.notebook('13'))==[]

def test_a_new_name_is_asked_for_by_the_tests_of_every_name():
    "A new metric passed `make check nb=03`, and `make test` was red: test_kinds.py had no arguments for it"
    asked = check.of_every_name(check.notebook('03'))
    assert 'tests/test_kinds.py::test_every_public_callable_is_asked_or_has_a_reason' in asked
    assert 'tests/test_help.py::test_each_comment_is_in_the_docstring[dynattn.metrics]' in asked
    for test in asked:
        file,_,name = test.partition('[')[0].partition('::')
        assert f'\ndef {name}(' in (freeze.ROOT/file).read_text(encoding='utf-8'), test
    assert check.of_every_name(check.notebook('13'))==[]

def test_a_name_that_another_module_has_too_is_not_taken_for_it():
    "`make check nb=12` ran 260 tests: `dynattn.hf` has a `register`, too"
    found = check.using('dynattn.smoothing')
    assert [*found]==['tests/test_before.py'] and len(check.tests_of(check.notebook('12')))==2, found
    assert 'tests/test_hf.py' in check.using('dynattn.hf.plugin')

def test_what_a_file_uses():
    text = """
import dynattn, torch.x
import dynattn.padding
import dynattn.hf as room
from dynattn.padding import PaddingMask, _binary
from dynattn import Window, hf
from other import masked_softmax
PaddingMask.from_hf(1).keep, PaddingMask(2), _binary
dynattn.padding.masked_softmax(1), dynattn.PaddingMask
hf.register(), room.register, room.plugin.switch, torch.x.register
Window.default(3)
"""
    assert check.uses(text, 'dynattn.padding')==dict(PaddingMask=3, masked_softmax=1, _binary=1) | {'dynattn.padding': 1}
    assert check.uses(text, 'dynattn.hf.plugin')==dict(register=2, switch=1)
    assert check.uses(text, 'dynattn.window')==dict(Window=1)
    assert not check.uses(text, 'dynattn.smoothing') and not check.uses(text, 'dynattn.pad')

@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_broken_law_of_a_smoothing_is_found_by_what_its_check_runs(tmp_path):
    "A density above 1, which no test of chapter 12's own names meets; `mutants.py` asks for the others"
    fault, = (m for m in mutants.MUTANTS if m[1]=='.clamp(max=1)')
    folder = mutants.copied(tmp_path/'dynattn')
    assert mutants.killed_by(folder, 'smoothing') is None
    mutants.put(folder, *fault)
    assert '12_smoothing' in mutants.killed_by(folder, 'smoothing')

def test_what_takes_seconds_is_asked_first(monkeypatch):
    "A field that no engine read was found after six minutes: xdist began with the longest file"
    ran = []
    monkeypatch.setattr(check, 'run', lambda *words: ran.append([*map(str, words)]))
    monkeypatch.setattr(check, 'freeze_names', lambda: None)
    check.main('20')
    first,then = ran[-2:]
    assert 'tests/test_in_sync.py' in first and not {'tests/test_banded.py', 'tests/test_fields.py'} & {*first}
    assert then.index('tests/test_fields.py')<then.index('tests/test_banded.py') and '--no-loadscope-reorder' in then

def test_names_that_changed_are_written(tmp_path, monkeypatch, capsys):
    file = tmp_path/'api.txt'
    file.write_text('old\n')
    monkeypatch.setattr(freeze, 'API', file)
    monkeypatch.setattr(freeze, 'api', lambda: 'new\n')
    check.freeze_names()
    assert file.read_text()=='new\n' and {'-old','+new'} <= set(capsys.readouterr().out.split())
    check.freeze_names()
    assert 'the same' in capsys.readouterr().out
