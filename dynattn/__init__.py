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
from dynattn.layer import DynamicAttention, EncoderLayer
from dynattn.encoder import EncoderConfig, Encoder, Classifier

__all__ = [
    'PaddingMask', 'masked_softmax', 'dense_attention', 'attention_weights', 'window_recall',
    'window_precision', 'Window', 'SigmaHead', 'SigmaParameter', 'entmax',
    'topk_softmax', 'AlphaHead', 'banded_attention', 'native', 'attention', 'window_weights', 'MultiheadAttention', 'convert',
    'DynamicAttention', 'EncoderLayer', 'EncoderConfig', 'Encoder', 'Classifier']
