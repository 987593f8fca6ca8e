"""Two published windows as smoothings of this package, as in chapter 16; `worth.py` runs them.

What a smoothing leaves out of the paper is said with each."""
import math
from dataclasses import dataclass
import torch
from dynattn.smoothing import Smoothing, register

@register
@dataclass(frozen=True)
class Pointers(Smoothing):
    """The probability that a key lies between two boundaries, each soft by `tau` tokens.

    Nguyen et al. (2020) predict both boundaries by content, for each query and head. Here they
    stand at the same distance σ on both sides of the query."""
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
    """[1 - (x/s)²]₊, the truncated parabola.

    In Martins et al. (2020) it is a density over a continuous text, and is itself the attention.
    Here it is a mask around the query."""
    curved = False
    def check(self, T): return None
    def edge(self, s, T=None, curve='bell', eps=2**-24): return s
    def mask(self, x, s, T=None, curve='bell'): return torch.relu(1-(x/s)**2)
    def slope(self, x, s, T=None, curve='bell'): return torch.where(x.abs()<s, 2*x**2/s**3, 0.)
