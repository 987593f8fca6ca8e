"""Whatever a public callable is given, it answers, or names the argument, says what it expected and what it got.

Callables are discovered: those in `__all__` of each module, and the methods of the classes among them. One that is
new fails here until it has arguments in `GOOD`, or a reason in `EXEMPT`."""
import fnmatch, inspect, math, pickle, pkgutil, sys
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from pathlib import Path
import numpy as np, pytest, torch
import dynattn
from dynattn import AlphaHead, EncoderConfig, MultiheadAttention, PaddingMask, SigmaHead, SigmaParameter, Window, kinds
from dynattn.cache import WindowedLayer

EXEMPT = { # pattern of names -> why nobody passes them anything of a wrong kind, or who asks
    'hf.*': 'tests/test_hf*.py ask with models',
    'survey.*': 'models of papers, asked by chapter 70',
    'narrow.*': 'a program: its options are checked by test_narrow.py',
    'audit.*': 'a program, checked by test_audit.py',
    'export.*': 'a program; files are checked in test_described.py',
    'train.files*': 'a program, checked by test_training.py',
    'train.training*': 'a program, checked by test_training.py',
    'train.trained*': 'a program, checked by test_training.py',
    'train.encoder.Encoder*.*': 'models, asked by test_encoder.py',
    'train.encoder.Classifier*': 'models, asked by test_encoder.py',
    'train.encoder.refuse_torchs': 'called by constructors, with the names they got',
    'examples.*': 'programs',
    'command.*': 'the command line',
    'runs.*': 'the command line',
    'texts.*': 'the command line',
    'options.*': 'the command line',
    'saved.*': 'files, checked by test_described.py',
    'configs.*': 'configurations of models',
    'plot.*': 'figures of the book',
    'widgets.*': 'figures of the book',
    'docstrings.*': 'called once by each module',
    'modes.*': 'questions without arguments, but for a gradient',
    'kinds.*': 'the checks themselves, tested below',
    'engine.fields.*': 'records between engines',
    'engine.call.*': 'records that `attention` fills, which is asked',
    'engine.plan.*': 'between engines, of checked records',
    'engine.plain.*': 'between engines, of checked records',
    'engine.native.*': 'between engines, of checked records',
    'engine.triton.*': 'between engines, of checked records',
    'engine.faster.*': 'between engines, of checked records',
    'engine.operator.attend_band': 'of a checked record',
    'engine.operator.band_refuses': 'of a checked record',
    'engine.ops.RoutedCall': 'the record of `attention`, which is asked',
    'engine.dense.normalize_rows': 'between engines',
    'engine.dense.row_lse': 'between engines',
    'engine.dense.mix_values': 'between engines',
    'engine.dense.dropout_factors': 'between engines',
    'engine.weights.WindowWeights*': 'what `window_weights` returns',
    'everywhere.*': 'switches without arguments, and a program',
    'parallel.*': 'needs ranks: test_parallel.py asks',
    'cache.turn_rows': 'called by caches with what they hold',
    'cache.state_at': 'called by caches with their own state',
    'cache.check_*': 'what comes from files, test_cache_state.py asks',
    'cache.WindowedLayer.*': 'test_cache_state.py and test_cache.py ask',
    'padding.holds': 'of a condition',
    'padding.no_padding_mask': 'an error, to be raised',
    'modules.with_widths': 'between modules',
    'sigma.as_widths': 'its answer to anything is a tensor, NaN for what is none',
    'sigma.InFloat32*': 'a base class',
    'curve.*': 'formulas of a lesson, which a window calls at each step',
    'smoothing.*': 'formulas of a lesson, which a window calls at each step',
    'family.*': 'the definition that `entmax` is checked against',
    'parts.*': 'formulas of a lesson, which the dense path calls',
    'window.Window.widened': 'called by engines with their dtype',
    'window.between': 'of a tensor, at each call',
    'probe.*': 'asks functions and models of the caller: test_probe.py',
    'modules.MultiheadAttention.merge_masks': 'called by PyTorch',
    'flash_attn.install*': 'a switch: test_flash_attn.py'}

def tensor(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(0))
q = tensor(1, 2, 6, 8)
weights = tensor(1, 2, 6, 6).softmax(-1)
heads = dict(q=q, k=q, v=q)
keep = torch.ones(1, 6, dtype=torch.bool)
def mask(): return PaddingMask(keep)
def layer(): return MultiheadAttention(8, 2, batch_first=True)
rows,packed = tensor(1, 6, 2, 8),tensor(6, 2, 8)
ends = torch.tensor([0, 6], dtype=torch.int32)
texts = dict(cu_seqlens_q=ends, cu_seqlens_k=ends)
def cached(): return dict(q=rows[:,:1], k_cache=rows.clone(), v_cache=rows.clone())
FLASH = {f'flash_attn.{name}': arguments for name,arguments in dict(
    flash_attn_func=lambda: dict.fromkeys('qkv', rows), flash_attn_3_func=lambda: dict.fromkeys('qkv', rows),
    flash_attn_qkvpacked_func=lambda: dict(qkv=tensor(1, 6, 3, 2, 8)), flash_attn_kvpacked_func=lambda: dict(q=rows, kv=tensor(1, 6, 2, 2, 8)),
    flash_attn_3_qkvpacked_func=lambda: dict(qkv=tensor(1, 6, 3, 2, 8)),
    flash_attn_varlen_func=lambda: dict.fromkeys('qkv', packed) | texts, flash_attn_3_varlen_func=lambda: dict.fromkeys('qkv', packed) | texts,
    flash_attn_varlen_qkvpacked_func=lambda: dict(qkv=tensor(6, 3, 2, 8), cu_seqlens=ends),
    flash_attn_varlen_kvpacked_func=lambda: dict(q=packed, kv=tensor(6, 2, 2, 8), **texts),
    flash_attn_with_kvcache=cached, flash_attn_3_with_kvcache=cached,
    apply_rotary_emb=lambda: dict(x=rows, cos=tensor(6, 2), sin=tensor(6, 2)),
    apply_rotary=lambda: dict(x=rows, cos=tensor(6, 2), sin=tensor(6, 2)),
    apply_rotary_emb_torch=lambda: dict(x=rows, cos=tensor(6, 2), sin=tensor(6, 2)),
    apply_rotary_emb_qkv_=lambda: dict(qkv=tensor(1, 6, 4, 8), cos=tensor(6, 2), sin=tensor(6, 2), num_heads_q=2),
    apply_rotary_emb_kv_=lambda: dict(kv=tensor(1, 6, 2, 2, 8), cos=tensor(6, 2), sin=tensor(6, 2)),
    RotaryEmbedding=lambda: dict(dim=4), get_alibi_slopes=lambda: dict(nheads=2), MHA=lambda: dict(embed_dim=8, num_heads=2),
    FlashSelfAttention=dict, FlashCrossAttention=dict, SelfAttention=dict, CrossAttention=dict,
    unpad_input=lambda: dict(hidden_states=tensor(1, 6, 2), attention_mask=keep), pad_input=lambda: dict(hidden_states=tensor(6, 2), indices=torch.arange(6), batch=1, seqlen=6),
    unpad_input_for_concatenated_sequences=lambda: dict(hidden_states=tensor(1, 6, 2), attention_mask_in_length=torch.tensor([[2, 3, 0, 0, 0, 0]])),
    index_first_axis=lambda: dict(x=tensor(6, 2), indices=torch.arange(3)),
    index_put_first_axis=lambda: dict(values=tensor(3, 2), indices=torch.arange(3), first_axis_dim=6)).items()}

GOOD = { # arguments of a call that is answered; (object, arguments) for a method
    'padding.padding_mask': lambda: dict(lengths=torch.tensor([2, 3])),
    'padding.masked_softmax': lambda: dict(scores=weights),
    'padding.PaddingMask': lambda: dict(keep=keep),
    'padding.PaddingMask.from_lengths': lambda: dict(lengths=torch.tensor([2, 3])),
    'padding.PaddingMask.from_keep': lambda: dict(mask=keep),
    'padding.PaddingMask.from_hf': lambda: dict(mask=keep),
    'padding.PaddingMask.from_ignore': lambda: dict(mask=keep),
    'padding.PaddingMask.from_additive': lambda: dict(mask=torch.zeros(1, 6)),
    'flash_attn.RotaryEmbedding.forward': lambda: (dynattn.flash_attn.RotaryEmbedding(8), dict(qkv=tensor(1, 6, 4, 8), num_heads_q=2)),
    'flash_attn.MHA.forward': lambda: (dynattn.flash_attn.MHA(8, 2), dict(x=tensor(1, 6, 8))),
    'flash_attn.MHA.allocate_inference_cache': lambda: (dynattn.flash_attn.MHA(8, 2), dict(batch_size=1, max_seqlen=4)),
    'flash_attn.FlashSelfAttention.forward': lambda: (dynattn.flash_attn.FlashSelfAttention(), dict(qkv=tensor(1, 6, 3, 2, 8))),
    'flash_attn.FlashCrossAttention.forward': lambda: (dynattn.flash_attn.FlashCrossAttention(), dict(q=rows, kv=tensor(1, 6, 2, 2, 8))),
    'flash_attn.SelfAttention.forward': lambda: (dynattn.flash_attn.SelfAttention(), dict(qkv=tensor(1, 6, 3, 2, 8))),
    'flash_attn.CrossAttention.forward': lambda: (dynattn.flash_attn.CrossAttention(), dict(q=rows, kv=tensor(1, 6, 2, 2, 8))),
    'padding.PaddingMask.additive': lambda: (mask(), {}),
    'padding.PaddingMask.to': lambda: (mask(), dict(device='cpu')),
    'padding.PaddingMask.sdpa': lambda: (mask(), {}),
    'padding.PaddingMask.pack': lambda: (mask(), dict(x=tensor(1, 6, 2))),
    'padding.PaddingMask.unpack': lambda: (mask(), dict(x=tensor(6, 2))),
    'padding.PaddingMask.zero': lambda: (mask(), dict(x=tensor(1, 6, 2))),
    'metrics.window_recall': lambda: dict(weights=weights, mask=weights>.1),
    'metrics.window_precision': lambda: dict(weights=weights, mask=weights>.1),
    'metrics.confusion_matrix': lambda: dict(y_true=[0, 1, 1], y_pred=[0, 1, 0]),
    **{f'metrics.{name}': lambda: dict(cm=[[1, 0], [1, 1]]) for name in ('precision', 'recall', 'f1', 'accuracy', 'class_metrics')},
    'sigma.sigma_link': lambda: dict(z=tensor(3)),
    'sigma.sigma_unlink': lambda: dict(sigma=tensor(3).abs()+1),
    'sigma.SigmaHead': lambda: dict(D=8, H=2),
    'sigma.SigmaHead.forward': lambda: (SigmaHead(8, 2), dict(x=tensor(1, 8))),
    'sigma.SigmaParameter': lambda: dict(H=2),
    'sigma.SigmaParameter.forward': lambda: (SigmaParameter(2), {}),
    'window.Window': lambda: dict(sigma=3.),
    'window.Window.default': lambda: dict(sigma=3.),
    'window.Window.span': lambda: dict(width=3., ramp=2.),
    'window.Window.report_20220330': lambda: dict(sigma=.4, p=2., T=.5),
    'window.Window.report_20220413': lambda: dict(sigma=.4, p=2., T=.5),
    'window.Window.mask': lambda: (Window(3.), dict(offsets=torch.arange(4))),
    'window.Window.log_mask': lambda: (Window(3.), dict(offsets=torch.arange(4))),
    'window.Window.dmask': lambda: (Window(3.), dict(offsets=torch.arange(4))),
    'window.Window.half_width': lambda: (Window(3.), {}),
    'window.Window.bounds': lambda: (Window(3.), {}),
    'window.Window.scale': lambda: (Window(3.), {}),
    'window.Window.replace': lambda: (Window(3.), {}),
    'window.Window.edge': lambda: (Window(3.), {}),
    'window.Window.penalty': lambda: (Window(3.), {}),
    'alpha.entmax': lambda: dict(scores=weights),
    'sparsity.topk_softmax': lambda: dict(scores=weights, k=2),
    'sparsity.support_size': lambda: dict(weights=weights),
    'sparsity.entropy': lambda: dict(weights=weights),
    'sparsity.AlphaHead': lambda: dict(H=2),
    'sparsity.AlphaHead.forward': lambda: (AlphaHead(2, 8), dict(x=tensor(1, 8))),
    'engine.dense.dense_attention': lambda: heads,
    'engine.dense.attention_weights': lambda: dict(q=q, k=q),
    'engine.operator.banded_attention': lambda: heads | dict(window=2),
    'engine.ops.attention': lambda: heads | dict(window=2),
    'engine.ops.choose': lambda: heads,
    'engine.weights.window_weights': lambda: dict(q=q, k=q, window=2),
    'cache.WindowedLayer': lambda: dict(heads=2),
    'modules.MultiheadAttention': lambda: dict(embed_dim=8, num_heads=2),
    'modules.MultiheadAttention.forward': lambda: (layer(), dict.fromkeys(('query', 'key', 'value'), tensor(1, 6, 8))),
    'modules.MultiheadAttention.new_cache': lambda: (layer(), {}),
    'modules.MultiheadAttention.extra_repr': lambda: (layer(), {}),
    'train.encoder.EncoderLayer': lambda: dict(dim=8, heads=2),
    'train.encoder.EncoderConfig': lambda: dict(vocab=8, dim=8, heads=2, layers=1),
    'train.encoder.Encoder': lambda: dict(config=EncoderConfig(vocab=8, dim=8, heads=2, layers=1)),
    'chunks.chunked_attention': lambda: heads | dict(window=Window.default(2.)),
    **FLASH,
    'modules.convert':
        lambda: dict(model=torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), window='learned')}

class OwnInt(int): pass
class OwnText(str): pass
WRONG = ( # or right, by chance: what every argument is given once
    # texts, numbers, None and containers
    'x', b'x', -1, 1.5, -1., 10**30, 3+1j, math.nan, math.inf, None, True, [], [1,'a'], ('a', 2), {}, {1}, range(3),
    # objects, types, and classes made from a kind that is right
    object(), int, ..., Path('x'), torch.float16, OwnInt(2), OwnText('x'),
    # numbers of other libraries
    np.float32(.5), np.float64(1.5), np.int64(2), np.bool_(True), np.array(2), np.array([1.,2.]), np.str_('x'),
    Fraction(1, 2), Fraction(10**400), Decimal('1.5'),
    # tensors: empty, of whole numbers, and such as are no numbers
    torch.empty(0), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.complex64),
    torch.tensor(True), torch.tensor(1+0j), torch.zeros(2, 2).to_sparse())

def modules():
    "(name without the package's, module) of all that can be imported without an extra"
    for found in pkgutil.walk_packages(dynattn.__path__, 'dynattn.'):
        name = found.name.removeprefix('dynattn.')
        if reason(name+'.x') or '__main__' in name or '_modidx' in name or name.startswith('engine.native.'): continue
        yield name, import_module(found.name)

def reason(name): return next((why for pattern,why in EXEMPT.items() if fnmatch.fnmatchcase(name, pattern)), None)

def discovered():
    "{name: callable} of functions, classes and their public methods"
    found = {}
    for name,module in modules():
        for public in getattr(module, '__all__', ()):
            x = getattr(module, public)
            if not callable(x) or getattr(x, '__module__', None)!=module.__name__: continue
            found[f'{name}.{public}'] = x
            for method,f in vars(x).items() if isinstance(x, type) else ():
                is_function = inspect.isfunction(f) or isinstance(f, (staticmethod, classmethod))
                if is_function and not method.startswith('_'): found[f'{name}.{public}.{method}'] = getattr(x, method)
    return {name: x for name,x in found.items() if not reason(name)}

FOUND = discovered()
ITS_OWN = {('engine.dense.dense_attention', 'normalizer')} # a function of the user's, whose errors are its own

def prepared(name):
    "(callable, arguments) of a call that is answered"
    good = GOOD[name]()
    if not isinstance(good, tuple): return FOUND[name], dict(good)
    owner,arguments = good
    return getattr(owner, name.split('.')[-1]), dict(arguments)

def shown(x): return f'{type(x).__name__} of shape {tuple(x.shape)}' if isinstance(x, torch.Tensor) else repr(x)[:40]

def parameters(f):
    found = inspect.signature(f).parameters.values()
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

def names(name, f, arguments): # what an error may begin with
    of_attention = [] if name in FLASH else inspect.signature(dynattn.attention).parameters # which has its own
    return {*parameters(f), *of_attention, *arguments}

def complaint(name, parameter, value):
    "None where all is well; else what is wrong with the answer."
    f,arguments = prepared(name)
    arguments[parameter] = value
    try:
        with torch.no_grad(): f(**arguments)
    except (TypeError, ValueError, NotImplementedError) as e:
        said = str(e).split(':')[0].split('[')[0].split('.')[0].split(',')[0].strip()
        if said in names(name, f, arguments) and 'expected' in str(e): return None
        return f'{name}({parameter}={shown(value)}): {type(e).__name__}: {str(e)[:160]}'
    except Exception as e:
        if 'NVIDIA driver' in str(e): return None       # a GPU is asked of a PyTorch for GPUs, which knows that there is none
        return f'{name}({parameter}={shown(value)}): {type(e).__name__}: {str(e)[:160]}'

def test_every_public_callable_is_asked_or_has_a_reason():
    asked = {name for name in FOUND if any(fnmatch.fnmatchcase(name, pattern) for pattern in GOOD)}
    new = sorted(FOUND.keys()-asked)
    assert not new, f'no arguments in GOOD of tests/test_kinds.py, and no reason in EXEMPT: {new}'
    for pattern in EXEMPT: assert EXEMPT[pattern], pattern

@pytest.mark.parametrize('name', GOOD)
def test_a_good_call_is_answered(name):
    f,arguments = prepared(name)
    f(**arguments)

@pytest.mark.parametrize('name', GOOD)
def test_every_argument_of_every_kind_is_answered_or_named(name):
    f,_ = prepared(name)
    wrong = [found for parameter in parameters(f) if (name, parameter) not in ITS_OWN
             for value in WRONG if (found := complaint(name, parameter, value))]
    assert not wrong, '\n'.join(wrong)

@kinds.checked(k=1, p=(0, 1), level=kinds.ANY, name=...)
def sample(x:torch.Tensor, k:int, p:float=0., level:float=0., mask:torch.Tensor|None=None, which:str|int|None=None, flag:bool=False, name:str=''):
    "What is checked."
    return x*k

@pytest.mark.parametrize('arguments,error,said', [
    (dict(k=0), ValueError, 'k: expected an int from 1 to 2147483647, got 0'), (dict(k=2**31), ValueError, 'k: expected an int from 1'),
    (dict(k=True), TypeError, 'k: expected an int from 1 to 2147483647, got True'), (dict(k=1.), TypeError, 'k: expected an int'),
    (dict(p=1.5), ValueError, 'p: expected a number from 0 to 1, got 1.5'), (dict(p=math.nan), ValueError, 'p: expected a number from 0 to 1, got nan'),
    (dict(p=True), TypeError, 'p: expected'), (dict(level='x'), TypeError, "level: expected a number, got 'x'"),
    (dict(level=2**63), ValueError, 'write it as a float'), (dict(mask=3), TypeError, 'mask: expected a tensor or None, got 3'),
    (dict(which=1.5), TypeError, 'which: expected an int, a str or None, got 1.5'), (dict(flag=1), TypeError, 'flag: expected a bool, got 1'),
    (dict(x=[1.]), TypeError, 'x: expected a tensor, got [1.0]')])
def test_an_annotation_is_a_check(arguments, error, said):
    with pytest.raises(error) as caught: sample(**dict(x=torch.ones(2), k=2) | arguments)
    assert said in str(caught.value)

def test_true_is_no_number_of_tokens():
    for wrong in (True, np.bool_(True), 1.):
        with pytest.raises(TypeError, match='n: expected an int, got'): kinds.integer('n', wrong, 0)
        with pytest.raises(TypeError, match='n: expected an int, got'): Window(3.).half_width(wrong)

def test_what_an_annotation_allows_passes():
    x = torch.ones(2)
    for arguments in (dict(p=torch.tensor(.5)), dict(level=math.nan), dict(level=-math.inf), dict(mask=x), dict(which='w'), dict(which=2),
                      dict(flag=True), dict(name=3), dict(p=1)): assert torch.equal(sample(x, 2, **arguments), 2*x)
    import numpy
    assert torch.equal(sample(x, numpy.int64(2), numpy.float64(.5)), 2*x)

@kinds.checked()
def passed_on(p:float, k:int, each:float|torch.Tensor=0., *, which:float|None=None): return p,k,each,which

def test_hostile_66_numbers_of_other_libraries_arrive_as_pytorchs():
    "A Fraction or a scalar of NumPy is a number everywhere, and PyTorch takes none of them; no argument of the caller changes."
    given = dict(each=np.float32(.5), which=Fraction(1, 4))
    found = passed_on(Fraction(1, 2), np.int64(3), **given)
    assert found==(.5, 3, .5, .25) and [*map(type, found)]==[float, int, float, float]
    assert type(given['each']) is np.float32
    assert [*map(type, passed_on(np.float64(2), True+1, torch.ones(()), which=None))]==[np.float64, int, torch.Tensor, type(None)]
    with pytest.raises(ValueError, match='p: expected a finite number'): passed_on(Fraction(10**400), 1)

@pytest.mark.parametrize('x, said', [(torch.zeros(2, 2).to_sparse(), 'each: expected a dense tensor'), (torch.tensor(True), 'each: expected'), (torch.tensor(1j), 'each: expected')], ids=str)
def test_hostile_66_tensors_of_numbers_are_dense_and_neither_bools_nor_complex(x, said):
    with pytest.raises(TypeError, match=said): passed_on(1., 1, x)

def test_positions_count_as_names_do():
    with pytest.raises(ValueError, match='k: expected'): sample(torch.ones(2), 0)
    with pytest.raises(TypeError, match='missing'): sample(torch.ones(2))
    with pytest.raises(TypeError, match='unexpected keyword'): sample(torch.ones(2), 1, other=2)

def test_bounds_of_nothing_are_a_mistake():
    with pytest.raises(TypeError, match="bounds: expected names of arguments, got .'m'"): kinds.checked(m=1)(lambda k: k)

def test_signature_help_and_pickling_stay():
    assert sample.__doc__=='What is checked.' and [*inspect.signature(sample).parameters][:3]==['x', 'k', 'p']
    assert [*inspect.signature(SigmaHead).parameters]==['D', 'H', 'link', 'init_width', 'scale', 'floor', 'unit']
    assert 'model width' in SigmaHead.__doc__ and 'divides D' in MultiheadAttention.__doc__
    again = pickle.loads(pickle.dumps(SigmaParameter(2)))
    assert torch.equal(again(), SigmaParameter(2)()) and pickle.loads(pickle.dumps(dynattn.masked_softmax)) is dynattn.masked_softmax

def test_a_compiled_program_holds_none_of_it():
    whole = torch.compile(lambda x: sample(x, 2)+1, fullgraph=True, backend='eager')
    assert torch.equal(whole(torch.ones(2)), torch.full((2,), 3.))
    torch.compiler.reset()

def test_attention_pays_nothing_for_the_decorator():
    "On the path of a call no checked function runs, whatever the engine."
    seen,file = set(),kinds.__file__
    def watch(frame, event, arg):
        if event=='call' and frame.f_code.co_filename==file and frame.f_code.co_name=='call': seen.add(frame.f_back.f_code.co_filename)
    window,pad = Window.default(torch.tensor([2., 3.])),mask()
    calls = [dict(), dict(window=2), dict(window=window), dict(alpha=1.5), dict(padding=pad), dict(padding=pad, window=window, alpha=1.5),
             dict(is_causal=True, dropout_p=.1), dict(alpha=1.5, impl='dense'), dict(window=window, impl='dense'), dict(padding=pad, impl='dense'),
             dict(alpha=torch.tensor([1.5, 2.]), window=2), dict(sink=torch.zeros(2), softcap=2.)]
    for options in calls:
        sys.setprofile(watch)
        try: dynattn.attention(q, q, q, **options)
        finally: sys.setprofile(None)
    assert not seen, seen
