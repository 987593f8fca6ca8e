"""dynattn: Attention that learns how far each head looks and how much it ignores

In softmax attention every head computes a weight for every pair of tokens. Most heads need few of
them. With `dynattn` each head has a window whose width it learns, and only the pairs inside the
windows are computed.

For whom? For long inputs: on a CPU ModernBERT-base's shape reads 8,192 tokens in 0.46 of its time
with the same output, in 0.29 with windows of 1,024. For small caches: decoders that keep what each
head uses. For a look into heads: `dynattn look` shows your model's. Models of PyTorch and Hugging
Face keep their code and weights.

A PyTorch layer: a width per head that learns:

    from dynattn import SigmaParameter, Window, attention
    width = SigmaParameter(4, init_width=32.)                # in your layer: four heads
    out = attention(q, k, v, window=Window.default(width()), is_causal=True)

Hugging Face: any model that uses transformers' attention interface:

    from dynattn import hf
    hf.add_windows(model, init=64., penalty=.01)             # then train as before
    hf.save(model, 'near')                                   # and hf.load('near')

A small cache: each head keeps the keys that its window reaches:

    from dynattn.cache import WindowedLayer
    cache = WindowedLayer(4, window=(64, 0))                 # four heads, 64 tokens back
    out = cache.attend(q, k, v)                              # a prompt, or one new token
"""

__version__ = "0.0.1"
from dynattn.padding import PaddingMask, masked_softmax
from dynattn.engine.dense import dense_attention, attention_weights
from dynattn.metrics import window_recall, window_precision
from dynattn.window import Window
from dynattn.sigma import SigmaHead, SigmaParameter
from dynattn.alpha import entmax
from dynattn.sparsity import topk_softmax, AlphaHead
from dynattn.engine.operator import banded_attention
from dynattn.engine import native
from dynattn.engine.ops import attention
from dynattn.engine.weights import window_weights
from dynattn.modules import MultiheadAttention, convert
from dynattn.train.encoder import EncoderLayer, EncoderConfig, Encoder, Classifier

__all__ = [
    'PaddingMask', 'masked_softmax', 'dense_attention', 'attention_weights', 'window_recall',
    'window_precision', 'Window', 'SigmaHead', 'SigmaParameter', 'entmax',
    'topk_softmax', 'AlphaHead', 'banded_attention', 'native', 'attention', 'window_weights', 'MultiheadAttention', 'convert',
    'EncoderLayer', 'EncoderConfig', 'Encoder', 'Classifier']
