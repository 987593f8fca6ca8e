"""What the installed transformers has: the one place where its version decides what a test can ask of a model.

settings.ini allows versions since 5.0. Some architectures came later; some got their attention from transformers' table
later, ModernBERT and T5 among them; hybrid models made caches of their own. A test of a model that computes its own
attention asks for the refusal by name: `if not served(model): return`. What an older version lacks leaves a test out by
name. With the version of constraints.txt, or a newer one, nothing may lack: there the same test fails."""
import inspect, re, sys
from pathlib import Path
import pytest, torch

CONSTRAINTS = Path(__file__).resolve().parents[1]/'constraints.txt'

def numbers(version):
    "5.24.0 as (5, 24, 0), to compare."
    return tuple(int(part) for part in re.findall(r'\d+', version)[:3])

def has_all():
    "Whether the installed transformers is so new that it has all that the tests name."
    import transformers
    ours = re.search(r'^transformers==(\S+)', CONSTRAINTS.read_text(encoding='utf-8'), re.M)[1]
    return numbers(transformers.__version__)>=numbers(ours)

def lacks(what):
    "End a test: an older transformers lacks what it needs. A new one may not."
    import transformers
    said = f'transformers {transformers.__version__} lacks {what}'
    if has_all(): pytest.fail(f'{said}, which the version of constraints.txt has')
    pytest.skip(said)

def has(name):
    "Whether this transformers has the class `name`, or an architecture that its configurations call so."
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    return name in CONFIG_MAPPING_NAMES or hasattr(transformers, name)

def needs(name):
    "Leave the test out where this transformers has no such class or architecture."
    if not has(name): lacks(name)

def source_of(model):
    "The text of the file that a model of transformers is from."
    return inspect.getsource(sys.modules[type(model).__module__])

def asks_the_table(model):
    "Whether the attention of a model comes from transformers' table, where `dynattn` is registered."
    return any('ALL_ATTENTION_FUNCTIONS' in source_of(m) for m in model.modules() if hasattr(m, 'config'))    # or a part

def makes_its_own_cache(model):
    "Whether the file of a model has a cache of its own, as those of hybrid models had."
    return re.search(r'^class \w+Cache\b', source_of(model), re.M) is not None

def served(model):
    "Whether `dynattn` can serve a model here; where it cannot, that it refused it by name and left it as it was."
    from dynattn import hf
    if asks_the_table(model): return True
    name = type(model).__name__
    if has_all(): pytest.fail(f'{name} computes its own attention in the version of constraints.txt, too')
    before = model.config._attn_implementation
    refusal = f"^model: expected attention that goes through transformers' interface, got {name}, "
    for change in (hf.switch, hf.add_windows, hf.add_alpha):
        with pytest.raises(ValueError, match=refusal): change(model)
    assert model.config._attn_implementation==before
    assert not any('dynattn' in name for name,_ in model.named_modules())
    return False

def tells_texts_apart(model, ids, lengths, packed):
    "Whether the eager attention of a model sees the texts of a packed row one by one, and what it gives for the row."
    before = model.config._attn_implementation
    model.set_attn_implementation('eager')
    alone = torch.cat([model(text, use_cache=False).logits for text in ids.split(lengths, 1)], 1)
    row = model(ids, **packed).logits
    model.set_attn_implementation(before)
    return torch.allclose(row, alone, rtol=0, atol=1e-5),row

def handed_on(model, batch):
    "The keywords of a call of `model` that reach its attention function."
    from transformers import AttentionInterface
    names = set()
    def attend(module, query, key, value, attention_mask, **given):
        names.update(given)
        return query.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2), None
    AttentionInterface.register('told', attend)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation('told')
        model(**batch)
    finally: model.set_attn_implementation(before)
    return names
