"Windows and entmax in models of transformers: a cache, windows that pretrained models learn."
from .masks import Sight
from .layers import Learned
from .plugin import attend, register, switch
from .windows import (
    HeadReport, add_alpha, add_windows, mean_width, penalise, remove_alpha, remove_windows, report)
from .saving import auto_class, load, save
from .cache import WindowedCache
from .curves import CostCurves, cost_curves
from .looking import Looks, look
from .narrowing import Narrowed, narrow

__all__ = [
    'Learned', 'Sight', 'attend', 'register', 'switch', 'HeadReport', 'add_alpha', 'add_windows', 'mean_width',
    'penalise', 'remove_alpha', 'remove_windows', 'report', 'auto_class', 'load', 'save', 'WindowedCache',
    'CostCurves', 'cost_curves', 'Looks', 'look', 'Narrowed', 'narrow']
