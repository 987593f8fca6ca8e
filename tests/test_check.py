"`make check` finds the tests of a chapter by what the chapter exports."
import pytest
import check, freeze

@pytest.mark.parametrize('chapter, test', [('14', 'test_call'), ('46', 'test_cache'), ('38', 'test_narrow'), ('58', 'test_price'),
    ('72', 'test_survey'), ('52', 'test_training'), ('01', 'test_padding'), ('48', 'test_modules'), ('67', 'test_audit')])
def test_the_tests_of_a_chapter(chapter, test):
    found = check.tests_of(check.notebook(chapter))
    assert f'tests/{test}.py' in found and len(found)<=check.MOST, found

def test_a_study_has_none(): assert check.tests_of(check.notebook('13'))==[]

def test_what_a_file_uses():
    text = 'import dynattn.a\nfrom dynattn.a import x, _y\nfrom dynattn import z\ndynattn.w(1)\nfrom other import v'
    assert check.used(text, 'dynattn.a', {'x','z','w','v'})=={'dynattn.a','x','_y','z','w'}

def test_names_that_changed_are_written(tmp_path, monkeypatch, capsys):
    file = tmp_path/'api.txt'
    file.write_text('old\n')
    monkeypatch.setattr(freeze, 'API', file)
    monkeypatch.setattr(freeze, 'api', lambda: 'new\n')
    check.freeze_names()
    assert file.read_text()=='new\n' and {'-old','+new'} <= set(capsys.readouterr().out.split())
    check.freeze_names()
    assert 'the same' in capsys.readouterr().out
