"How the book is worded: no sentence begins with an inverted clause."
import pytest
import wording

pytestmark = pytest.mark.docs

@pytest.mark.parametrize('text,n', [
    ('What stands in padding changes nothing.', 1), ('Fine. **Whatever the order**, it holds.', 1), ('- What is left out: much.', 1),
    ('What does it cost?', 0), ('## What it costs', 0), ('It shows what it costs.', 0), ('[What Can 8 Tokens Do?](https://x.org)', 0)])
def test_inverted_sentences_are_found(text, n): assert len(wording.inverted(text))==n

def test_no_sentence_begins_with_an_inverted_clause():
    found = wording.found()
    assert not found, '\n'.join(found)
