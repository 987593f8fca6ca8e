"Windows and entmax in models of transformers: a cache, windows that pretrained models learn, models across ranks."
from .plugin import (
    Learned, Report, Sight, add_alpha, add_windows, attend, mean_width, penalise, register, report, sight, switch)
from .saving import auto_class, load, load_adapter, lora_config, save
from .cache import WindowedCache
from .narrowing import Narrowed, narrow
from .parallel import parallelize
