"""Two published windows as smoothings of this package, as chapter 16 has them: what `worth.py` runs beside `Window.default`.

Both let a learned width reach every query in the same way. What is left out is said with each.
"""
import math
from dataclasses import dataclass
import torch
from dynattn.smoothing import Smoothing, register

@register
@dataclass(frozen=True)
class Pointers(Smoothing):
    """The probability that a key lies between two boundaries, each soft by `tau` tokens (Nguyen et al. 2020).

    The authors predict both boundaries from the content, for each query; here they stand at ±σ around it."""
    tau: float = 1.
    curved = False
    def check(self, T): return None
    def tail(self, u): # no `abs`, which has slope 0 where a key stands at the boundary
        return .5*torch.exp(-torch.where(u<0, -u, u)/self.tau)
    def cdf(self, u): return torch.where(u<0, self.tail(u), 1-self.tail(u))
    def pdf(self, u): return self.tail(u)/self.tau
    def edge(self, s, T=None, curve='bell', eps=2**-24): return s-self.tau*math.log(2*eps)
    def mask(self, x, s, T=None, curve='bell'): return self.cdf(s-x)*self.cdf(s+x)
    def slope(self, x, s, T=None, curve='bell'):
        return self.pdf(s-x)*self.cdf(s+x) + self.cdf(s-x)*self.pdf(s+x)

@register
@dataclass(frozen=True)
class Parabola(Smoothing):
    """[1 - (x/s)²]₊, the truncated parabola (Martins et al. 2020).

    There it is a density over a continuous text and is itself the attention; here it is a mask, around the query."""
    curved = False
    def check(self, T): return None
    def edge(self, s, T=None, curve='bell', eps=2**-24): return s
    def mask(self, x, s, T=None, curve='bell'): return torch.relu(1-(x/s)**2)
    def slope(self, x, s, T=None, curve='bell'): return torch.where(x.abs()<s, 2*x**2/s**3, 0.)
