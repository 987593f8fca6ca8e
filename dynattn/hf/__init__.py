"Windows and entmax in models of transformers, and a cache that keeps what the windows reach."
from .plugin import (Learned, Report, Sight, add_alpha, add_windows, attend, load, mean_width, penalise, register, report, save,
                     sight, switch)
from .cache import WindowedCache
