__version__ = "0.0.1"
from dynattn import _moved
from dynattn.padding import PaddingMask, masked_softmax
from dynattn.dense import dense_attention, attention_weights, MultiHeadAttention
from dynattn.metrics import window_recall, window_precision
from dynattn.window import Window
from dynattn.sigma import SigmaHead, SigmaParameter
from dynattn.alpha import entmax, sparsemax, entmax15, topk_softmax, AlphaHead
from dynattn.sorting import sinkhorn, sinkhorn_attention
from dynattn.band.attention import banded_attention
from dynattn.ops import attention
from dynattn.modules import MultiheadAttention, convert
from dynattn.encoder import DynamicAttention, EncoderLayer, EncoderConfig, Encoder, Classifier
from dynattn.auditing import audit
