"Text is read in one place and shown as text: codes, damaged and binary files, rows of JSON lines and Parquet, pieces of tokens."
import codecs, gzip, io, json, os, pickle, random, struct, subprocess, sys, zipfile, zlib
from pathlib import Path
import pytest, torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from dynattn import texts
from dynattn.command import main
from dynattn.saved import UserError
from dynattn.texts import Names, Text, decode, not_a_file, read_text, text_lines

# ---- bytes as text

MARKED = dict(zip(('utf-8-sig', 'utf-16', 'utf-32'), ('utf-8', 'utf-16-le', 'utf-32-le')))
WIDE = 'utf-16-le','utf-16-be','utf-32-le','utf-32-be'
PLAIN = dict(
    german='Größe: 3 €. Grüße aus München, die Straße ist schön; über Nacht fiel Schnee.\r\n', code='def f(x):\n\treturn x + 1  # größer\n',
    french="L'été dernier, les élèves ont mangé des crêpes à volonté.\n", russian='Съешь же ещё этих мягких французских булок, да выпей чаю.\n',
    japanese='吾輩は猫である。名前はまだ無い。\nどこで生れたかとんと見当がつかぬ。\n', chinese='人人生而自由，在尊严和权利上一律平等。\n',
    greek='Όλοι οι άνθρωποι γεννιούνται ελεύθεροι.\n', hebrew='כל בני האדם נולדו בני חורין ושווים.\n', numbers='0.25 1.50\n'*5, emoji='🍎 und 👩‍🚀\n')

@pytest.mark.parametrize('name', PLAIN)
@pytest.mark.parametrize('code', ('utf-8', *MARKED, *WIDE))
def test_every_unicode_code(name, code):
    "Whole, and cut after any byte: a beginning of the text, which loses one letter at most"
    text = PLAIN[name]
    data = text.encode(code)
    assert decode(data)==Text(text, MARKED.get(code, code))
    for n in range(len(data)//2, len(data)):
        cut = decode(data[:n], whole=False).text
        assert text.startswith(cut) and len(cut)>=len(text)*n//len(data)-3, n

@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=('Cs','Cc'))), st.sampled_from(('utf-8', *MARKED)))
def test_any_text_survives_a_code_that_has_a_mark_or_is_utf_8(text, code):
    text = text.removeprefix('\ufeff')
    assert decode(text.encode(code)).text==text

EIGHT = dict(german=('cp1252','latin-1'), french=('cp1252','latin-1'), code=('cp1252',), russian=('cp1251','koi8-r','cp866'),
             japanese=('shift-jis','euc-jp'), chinese=('gb18030','gbk'), greek=('cp1253',), hebrew=('cp1255',))

@pytest.mark.parametrize('name,code', [(name, code) for name,codes in EIGHT.items() for code in codes])
def test_codes_of_eight_bits(name, code):
    "Alone, repeated, and in a long file that is ASCII otherwise"
    text = PLAIN[name].encode(code, 'ignore').decode(code)
    for whole in (text, text*40, 'x = 1\n'*4000+text+'y = 2\n'*4000):
        found = decode(whole.encode(code))
        assert found.text==whole and codecs.lookup(found.code)!=codecs.lookup('utf-8'), found.code
        assert decode(whole.encode(code))==found

@pytest.mark.parametrize('text', ['é', 'ä', 'ß', 'äöü', 'äöüß', 'äöü ÄÖÜ ß', 'café', 'naïve', '¿Qué?', 'señor', 'mean±std', '20°C', '©2020', '½', '£5', 'Øre'])
def test_a_few_western_letters(text):
    "Nothing says otherwise, so it is Windows-1252"
    assert decode(text.encode('cp1252'))==Text(text, 'cp1252')

@pytest.mark.parametrize('text,code', [('Привет', 'cp1251'), ('Привет, мир!', 'koi8-r'), ('東京', 'shift-jis'), ('こんにちは', 'shift-jis'),
                                       ('你好，世界', 'gb18030'), ('안녕하세요', 'cp949')])
def test_a_few_other_letters(text, code): assert decode(text.encode(code)).text==text

@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.booleans())
@example(b'\xe9', True)
def test_no_letter_is_replaced(data, whole):
    "Any bytes: a text without replacement characters and surrogates, or a reason; the same again"
    found = decode(data, whole)
    assert (found.text is None)==bool(found.why) and decode(data, whole)==found
    if found.text is not None:
        assert '\ufffd' not in found.text or '\ufffd'.encode(found.code, 'ignore') in data
        found.text.encode()

def test_a_replacement_character_of_the_file_stays(): assert decode('a\ufffdb'.encode()).text=='a\ufffdb'

def test_damaged_lines_of_utf_8():
    good = 'größer und kühler\n'.encode()
    for bad in ('kühl\n'.encode('cp1252'), b'\xff\n', 'Übel'.encode()[:1]+b'\n'):
        found = decode(good+bad+good)
        assert found.code=='utf-8' and found.text.count('größer und kühler\n')==2 and '\ufffd' not in found.text
    assert decode(b'\xff\xfe'+b'a\0b\0\0\xd8c\0')==Text(None, 'utf-16-le', 'damaged utf-16-le')

def zipped():
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as file: file.writestr('a.txt', 'text')
    return out.getvalue()
BINARY = dict(zeros=bytes(99), zero=b'\0', png=b'\x89PNG\r\n\x1a\n', jpeg=b'\xff\xd8\xff\xe0\0\x10JFIF', gif=b'GIF89a\1\0\1\0\x80', zlib=zlib.compress(b'text'), gzip=gzip.compress(b'a'*99),
              pdf=b'%PDF-1.7\n1 0 obj\n', elf=Path(sys.executable).resolve().read_bytes()[:4096] if sys.platform=='linux' else b'\x7fELF\2\1\1\0', pickle=pickle.dumps([1, 'a']), zip=zipped(),
              doubles=struct.pack('<50d', *[x/7 for x in range(50)]), names=b'a.txt\0b.txt\0c.txt\0', numbers=struct.pack('<50h', *range(50)), random=random.Random(0).randbytes(500))
@pytest.mark.parametrize('name', BINARY)
def test_binary_files(name): assert decode(BINARY[name])==Text(None, '', 'binary')

def test_only_so_much_is_read(tmp_path):
    (tmp_path/'long.txt').write_text('é'*1000, encoding='utf-8')
    assert [len(read_text(tmp_path/'long.txt', most=n).text) for n in (3, 4, 101)]==[1, 2, 50]
    assert read_text('/dev/zero' if os.path.exists('/dev/zero') else tmp_path).why=='unreadable'
    if hasattr(os, 'mkfifo'):
        os.mkfifo(tmp_path/'pipe')
        assert read_text(tmp_path/'pipe').why=='unreadable' and not_a_file(tmp_path/'pipe')=='something else'

def test_lines_of_a_file_larger_than_its_head(tmp_path):
    "Beyond the first MiB a line of another code is read too"
    path = tmp_path/'long'
    path.write_bytes(b'plain\n'*200_000+'kühl\n'.encode('cp1252')+'kühl\n'.encode())
    assert [*text_lines(path)][-2:]==['kühl\n','kühl\n']
    path.write_bytes('\ufeffä\nö'.encode('utf-16-be'))
    assert [*text_lines(path)]==['ä\n','ö']

def test_without_the_detector_the_reason_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'charset_normalizer', None)
    assert 'charset-normalizer' in decode('Größe und Übergröße'.encode('cp1252')).why
    assert decode('Größe'.encode()).text=='Größe' and decode('Größe'.encode('utf-16')).text=='Größe'

def test_names_by_reason():
    names = Names()
    names.add('binary', [])
    assert not names and str(names)==''
    names.add('binary', [Path('a'), 'b', 'c', 'd'])
    assert names and str(names)=='4 binary (a, b, c and 1 more)' and names.counts=={'binary': 4}

# ---- all verbs read by it

TEXT = 'Grüße aus München: die Straße führt über Brücken, größer als früher und schöner.\n'*3

@pytest.mark.parametrize('code', ['utf-8', 'utf-8-sig', 'utf-16', 'utf-16-le', 'utf-32-be', 'cp1252'])
def test_train_and_predict_learn_from_utf_8(tmp_path, code):
    from dynattn.train.files import read_utf8
    (tmp_path/'a.txt').write_bytes(TEXT.encode(code))
    assert read_utf8(tmp_path/'a.txt', letters=.2)==(TEXT.encode(), MARKED.get(code, code), '')

def test_train_names_what_it_leaves_out(tmp_path, capsys):
    "practitioner 9: a third of the files was UTF-16, and named nowhere"
    root,out,words = tmp_path/'data',tmp_path/'run','alpha beta gamma delta'.split()
    for p in range(3):
        (root/f'p{p}').mkdir(parents=True)
        for i in range(4):
            for suffix,word in (('.css','margin'), ('.py','return')):
                text = ''.join(f'{word} {words[p]} {words[i]} {k} of {random.Random(f"{suffix}{p}{i}{k}").random()}\n' for k in range(9))
                (root/f'p{p}/{i}{suffix}').write_bytes(text.encode('utf-16' if i==0 else 'utf-8'))
    (root/'p0/pic.css').write_bytes(BINARY['png']+bytes(99))
    assert main(['train', str(root), '--out', str(out), '--min-files', '3', '--dim', '8', '--heads', '2', '--layers', '1', '--epochs', '1', '--batch', '8'])==0
    said = capsys.readouterr().out
    assert 'left out: 1 binary (p0/pic.css)' in said and 'read in other codes than UTF-8: 6 utf-16-le (' in said and ' steps in all' in said
    assert (out/'skipped.csv').read_text(encoding='utf-8').splitlines()==['why,path', 'binary,p0/pic.css']
    assert json.loads((out/'result.json').read_text(encoding='utf-8'))['skipped']=={'binary': 1}
    known,missing = root/'p0/1.css',tmp_path/'missing'
    assert main(['predict', str(known), str(missing), str(root/'p0/1.py'), '--run', str(out)])==3
    shown = capsys.readouterr()
    assert shown.out.count('%')==2 and 'missing: skipped, no such file or folder' in shown.out
    assert f'no class for 1 of the files named: {missing}' in shown.err
    assert main(['predict', str(missing), '--run', str(out)])==2
    assert main(['predict', str(root), '--run', str(out)])==0      # a binary file in a folder is no mistake
    assert main(['predict', str(known), str(root/'p0/pic.css'), '--run', str(out), '--json'])==3

def documents(path, **more):
    from dynattn.narrow.command import _Documents
    from dynattn.options import NarrowConfig
    found = _Documents(NarrowConfig(data=str(path), **more))
    return [*found],found.said()

@pytest.mark.parametrize('code', ['utf-8', 'utf-8-sig', 'utf-16', 'utf-16-be', 'utf-32-le', 'cp1252'])
def test_narrow_reads_every_code(tmp_path, code):
    pytest.importorskip('transformers')
    folder = tmp_path/'docs'
    folder.mkdir()
    (folder/'a.txt').write_bytes(TEXT.encode(code))
    (folder/'b.jsonl').write_bytes(''.join(json.dumps(dict(text=TEXT), ensure_ascii=False)+'\n' for _ in range(2)).encode(code))
    (folder/'c.png').write_bytes(BINARY['png'])
    (folder/'d.txt').write_text('')
    texts,said = documents(folder)
    assert texts==[TEXT]*3 and '1 binary (c.png)' in said and '1 empty (d.txt)' in said
    assert ('other codes' in said)==(not code.startswith('utf-8'))

def test_null_texts_are_left_out_and_counted(tmp_path):
    "hostile 6: learned from as the word None"
    pytest.importorskip('transformers')
    (tmp_path/'rows.jsonl').write_text('{"text": "one"}\n{"text": null}\n\n{"text": " "}\n{"text": "two"}\n')
    assert documents(tmp_path/'rows.jsonl')==(['one','two'], 'left out: 2 null or empty texts (rows.jsonl line 2, rows.jsonl line 4)')
    parquet,pa = pytest.importorskip('pyarrow.parquet'),pytest.importorskip('pyarrow')
    for column in (pa.array(['one', None, 'two']), pa.array(['one', None, 'two']).dictionary_encode(), pa.array(['one', None, 'two'], pa.large_string())):
        parquet.write_table(pa.table(dict(text=column)), tmp_path/'rows.parquet')
        assert documents(tmp_path/'rows.parquet')==(['one','two'], 'left out: 1 null or empty texts (rows.parquet row 2)')
    for column in (pa.array([b'a']), pa.array([1]), pa.array([['a']]), pa.array([dict(a=1)])):
        parquet.write_table(pa.table(dict(text=column)), tmp_path/'rows.parquet')
        with pytest.raises(UserError, match="rows.parquet: expected texts in the column 'text', got"): documents(tmp_path/'rows.parquet')

WRONG = {'{"text": 1}': 'got a number', '{"text": [1]}': 'got a list', '{"text": {}}': 'got an object', '{"text": true}': 'got true or false',
         '{"text": "\\ud800"}': 'half of a pair', '{"text": "a", "text": "b"}': 'a key twice', '{"text": "a", "x": NaN}': 'no JSON', '{"text": "a"': 'got ',
         '{"text": "a", "x": -Infinity}': 'no JSON', '{"x": "a"}': "expected a JSON object with 'text'", '["a"]': "expected a JSON object with 'text'", '"a"': 'JSON object',
         '{"text": "a", "x": '+'7'*9000+'}': 'got ', '{"text": '+'['*20_000: 'got ', '{"text": '+'{"a":'*20_000: 'got '}  # deeper than Python's limit, whatever it is
@pytest.mark.parametrize('line', WRONG, ids=lambda line: line[:24])
def test_a_line_that_is_no_text_is_named(tmp_path, line):
    "hostile 8: raw tracebacks of lone surrogates and deep nesting; objects learned from as Python writes them"
    pytest.importorskip('transformers')
    (tmp_path/'rows.jsonl').write_text('{"text": "one"}\n'+line+'\n')
    with pytest.raises(UserError, match='rows.jsonl: line 2: expected') as e: documents(tmp_path/'rows.jsonl')
    assert WRONG[line] in str(e.value) and len(str(e.value))<400

def test_json_lines_that_are_no_file_of_lines(tmp_path):
    pytest.importorskip('transformers')
    (tmp_path/'rows.jsonl').write_bytes(bytes(99))
    with pytest.raises(UserError, match='expected JSON lines, got a file that is binary'): documents(tmp_path/'rows.jsonl')
    if hasattr(os, 'mkfifo'):
        for kind,wanted in (('jsonl','JSON lines'), ('parquet','a Parquet file')):
            os.mkfifo(tmp_path/f'pipe.{kind}')
            with pytest.raises(UserError, match=f'expected {wanted}'): documents(tmp_path/f'pipe.{kind}')

# ---- the pieces of a text that its tokens are

transformers = pytest.importorskip('transformers')
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from dynattn.hf import looking

SAID = ['the cat sat on the mat and the dog ran to the cat', 'naïve café größer', 'これは日本語です', 'Привет, мир', '🍎 👩‍🚀 \n\t  x = f(1)']*4

def fast(made, **names): return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)

def byte_level(trim=True, prefix=False):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder,made.post_processor = decoders.ByteLevel(),processors.ByteLevel(trim_offsets=trim)
    made.train_from_iterator(SAID, trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    return fast(made)

def metaspace(model='BPE', normal=False):
    "With bytes for letters it does not have, as those of Llama; or a unigram, as those of T5"
    letters = ['<unk>', '<s>', *(f'<0x{i:02X}>' for i in range(256)), *'▁abcdefghijklmnopqrstuvwxyzé日', '▁the', '▁▁']
    if model=='BPE': made = Tokenizer(models.BPE({c: i for i,c in enumerate(letters)}, [], byte_fallback=True, unk_token='<unk>'))
    else: made = Tokenizer(models.Unigram([(c, -1.-i/99) for i,c in enumerate(letters)], unk_id=0, byte_fallback=model=='bytes'))
    if normal: made.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    else: made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    made.post_processor = processors.TemplateProcessing(single='<s> $A', special_tokens=[('<s>', 1)])
    return fast(made, unk_token='<unk>', bos_token='<s>')

def word_piece():
    made = Tokenizer(models.WordPiece(unk_token='[UNK]'))
    made.normalizer,made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True),pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(SAID, trainers.WordPieceTrainer(vocab_size=120, special_tokens=['[UNK]','[CLS]','[SEP]'], show_progress=False))
    made.post_processor = processors.TemplateProcessing(single='[CLS] $A [SEP]', special_tokens=[('[CLS]', 1), ('[SEP]', 2)])
    return fast(made, unk_token='[UNK]', cls_token='[CLS]', sep_token='[SEP]')

class Slow(transformers.PreTrainedTokenizer):
    "Words in lower case, and their ends: no offsets, and no spaces or accents of its own"
    words = ['[UNK]', '[CLS]', 'the', 'cat', 'gross', '##er', *'abcdefghijklmnopqrstuvwxyz']
    def __init__(self, **names): super().__init__(unk_token='[UNK]', cls_token='[CLS]', **names)
    @property
    def vocab_size(self): return len(self.words)
    def get_vocab(self): return {word: i for i,word in enumerate(self.words)}
    def _tokenize(self, text, **_):
        found = []
        for word in text.lower().split():
            if word=='grosser': found += ['gross', '##er']
            elif word in self.words: found.append(word)
            else: found += word
        return found
    def _convert_token_to_id(self, token): return self.words.index(token) if token in self.words else 0
    def _convert_id_to_token(self, index): return self.words[index]
    def convert_tokens_to_string(self, tokens): return ' '.join(tokens).replace(' ##', '')
    def build_inputs_with_special_tokens(self, ids, other=None): return [1, *ids]

TOKENIZERS = dict(bytes=byte_level, bytes_untrimmed=lambda: byte_level(False), bytes_prefix=lambda: byte_level(True, True), llama=metaspace, llama_normalized=lambda: metaspace('BPE', True),
                  unigram=lambda: metaspace('unigram'), unigram_bytes=lambda: metaspace('bytes'), bert=word_piece, slow=Slow)
MADE = {}
def made(name):
    if name not in MADE: MADE[name] = TOKENIZERS[name]()
    return MADE[name]

def pieces_of(tokenizer, text, most=None):
    "Ids, and pieces without the special tokens of the template, which stand for none"
    ids,tokens = looking._tokens_of_text(tokenizer, text, most)
    names = tokenizer.convert_ids_to_tokens(ids)
    return ids,[token for token,name in zip(tokens, names) if name not in ('<s>','[CLS]','[SEP]') or token!=name]

@pytest.mark.parametrize('name', TOKENIZERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=('Cs',)), max_size=30) | st.text('the cat\né日🍎 \t', max_size=30))
def test_pieces_put_end_to_end_are_the_text(name, text):
    "Any text and any tokenizer, up to a text in which no token has a letter"
    _,pieces = pieces_of(made(name), text)
    assert ''.join(pieces)==text or not any(pieces)
    if name.startswith(('bytes','llama','unigram_bytes')) and text: assert any(pieces)

@pytest.mark.parametrize('name', [name for name in TOKENIZERS if name!='slow'])
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=('Cs',)), max_size=30) | st.text('the cat\né日🍎 \t', max_size=30))
def test_pieces_of_ids_are_what_the_tokenizer_decodes(name, text):
    tokenizer = made(name)
    ids = tokenizer(text, add_special_tokens=False)['input_ids']
    if tokenizer.unk_token_id in ids: return
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if '\ufffd' not in decoded: assert ''.join(looking.text_pieces(tokenizer, ids))==decoded

@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=20), name=st.sampled_from(['bytes','llama']))
def test_ids_that_make_no_letters_show_no_replacement_character(ids, name):
    tokenizer = made(name)
    if name=='bytes': ids = tokenizer.convert_tokens_to_ids([sorted(pre_tokenizers.ByteLevel.alphabet())[i] for i in ids])
    else: ids = [i+2 for i in ids]
    pieces = looking.text_pieces(tokenizer, ids)
    data = bytes(looking._BYTE_OF[c] for c in ''.join(tokenizer.convert_ids_to_tokens(ids))) if name=='bytes' else bytes(i-2 for i in ids)
    assert len(pieces)==len(ids) and ('\ufffd' not in ''.join(pieces) or '\ufffd'.encode() in data)

SHOWN = {'bytes': ['n','a','ï','','v','e'], 'llama': ['','n','a','ï','','v','e'], 'unigram': ['','n','a','ï','v','e'], 'bert': ['n','a','ï','v','e']}
@pytest.mark.parametrize('name', ['bytes','llama'])
def test_a_shared_letter_stands_at_its_first_token(name):
    "ecco#51: `é` was shown as ['é', '�'], and `the cat` as `tthe cat`"
    tokenizer = made(name)
    for text in ('é日🍎', 'the cat'):
        ids,pieces = pieces_of(tokenizer, text)
        assert ''.join(pieces)==text and not any('\ufffd' in p for p in pieces)
    ids,tokens = looking._tokens_of_text(tokenizer, 'xü', None)
    assert tokens[-2:]==['ü',''] and looking._tokens_of_ids(tokenizer, ids)[-2:]==['ü','']

def test_words_keep_their_case_accents_and_spaces():
    ids,tokens = looking._tokens_of_text(made('bert'), ' The  CÄT\n', None)
    assert tokens[0]=='[CLS]' and tokens[-1]=='[SEP]' and ''.join(tokens[1:-1])==' The  CÄT\n'
    ids,tokens = looking._tokens_of_text(made('slow'), 'The  CÄT Größer é x', None)
    assert tokens[0]=='[CLS]' and ''.join(tokens[1:])=='The  CÄT Größer é x' and tokens[1]=='The'

@pytest.mark.parametrize('name', TOKENIZERS)
def test_a_text_that_is_cut_has_the_pieces_of_its_beginning(name):
    text = 'the cat sat on the mat '*9
    _,pieces = pieces_of(made(name), text, 12)
    assert text.startswith(''.join(pieces)) and 4<len(''.join(pieces))<len(text)/2

@pytest.mark.parametrize('text', ['\x1b[31m', '\u202eabc', '\u0301', '\u2066x\u2069', '\x00', '\u200b', '\u200d', '\ufeff', '\x85', '\r', '\u2028', '\U000e0001'])
def test_nothing_on_a_page_is_invisible_or_turns_the_line(text):
    shown = looking._visible(text)
    assert shown!=text and shown.isprintable() and not any(c in shown for c in '\x1b\u202e\u2066\u2069\u200b\ufeff\u2028')

def test_a_page_of_odd_tokens_is_whole():
    "Nothing that a token holds ends the script or breaks the file"
    ids = torch.arange(4)
    w = torch.rand(1, 4, 4).softmax(-1)
    found = looking.Looks(ids, ['</script><script>alert(1)', '\u202e\ud800', '', '\u0301'], ['a'], [w.sum(1)], [w.sum(1)], [w[:,:,0]], [w])
    page = found.page()
    assert page.count('</script>')==1 and '\u202e' not in page and page.encode()

# ---- `dynattn look`

@pytest.mark.parametrize('code', ['utf-8', 'utf-8-sig', 'utf-16', 'cp1252'])
def test_look_reads_every_code(tmp_path, capsys, code):
    "code2prompt#30: a page of replacement characters, and status 0"
    config = transformers.LlamaConfig(vocab_size=400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=512)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path/'model')
    made('bytes').save_pretrained(tmp_path/'model')
    (tmp_path/'a.txt').write_bytes('Größe und Übergröße'.encode(code))
    call = ['look', str(tmp_path/'model'), '--text', str(tmp_path/'a.txt'), '--out', str(tmp_path/'a.html')]
    assert main(call)==0
    said = capsys.readouterr().out
    assert ('read as' in said)==(not code.startswith('utf-8'))
    page = (tmp_path/'a.html').read_text(encoding='utf-8')
    assert '\\u00f6' in page and '\\ufffd' not in page and '\ufffd' not in page and '\\ufeff' not in page

@pytest.mark.parametrize('data,why', [(bytes(99), 'binary'), (b'', 'empty'), (None, 'no such file')])
def test_look_at_no_text(tmp_path, capsys, data, why):
    if data is not None: (tmp_path/'a.txt').write_bytes(data)
    assert main(['look', str(tmp_path), '--text', str(tmp_path/'a.txt'), '--out', str(tmp_path/'a.html')])==2
    said = capsys.readouterr().err
    assert 'a.txt: expected a text' in said and why in said and said.count('\n')==1
