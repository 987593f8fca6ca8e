"Efficient transformers, one small implementation each, with every column of the survey's table measured."
from .card import (
    AttentionLayer, Cost, Info, Layer, Verdict, causality, complexity, decodes, equivariance, exactness,
    format_table, load, measure, picture, prefix, register, streaming, table, truncation)

__all__ = [
    'AttentionLayer', 'Cost', 'Info', 'Layer', 'Verdict', 'causality', 'complexity', 'decodes', 'equivariance',
    'exactness', 'format_table', 'load', 'measure', 'picture', 'prefix', 'register', 'streaming',
    'table', 'truncation']
