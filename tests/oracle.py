"""What `dynattn.attention` documents, in NumPy and float64: the oracle of `search.py`, with no code of the package.

`Window` and `PaddingMask` take the arguments of their namesakes, so the text of a call can be evaluated twice: once
with the package's classes, once with these. `Attention(**call)` has the output, the weights, the gradients (written by
hand) and a bound of what rounding may do to every entry. Inputs may be complex: `directional` makes a complex step."""
import math
import numpy as np

STEP = 1e-30  # of a complex step: there is no cancellation, so it may be as small as one likes

def array(x):
    "Numbers of any kind as float64 or complex128; `None` stays."
    if x is None: return None
    if hasattr(x, 'detach'):
        x = x.detach().cpu()
        x = x.numpy() if not x.dtype.is_floating_point else x.double().numpy()
    x = np.asarray(x)
    return x if x.dtype==bool or np.iscomplexobj(x) else x.astype(np.float64)

class PaddingMask:
    "`keep` [B,M]: True takes part."
    def __init__(self, keep): self.keep = array(keep).astype(bool)
    @classmethod
    def from_lengths(cls, lengths, n): return cls(np.arange(n) < array(lengths)[:,None])
    @classmethod
    def from_keep(cls, mask): return cls(array(mask)!=0)
    @classmethod
    def from_hf(cls, mask): return cls(array(mask)!=0)
    @classmethod
    def from_ignore(cls, mask): return cls(array(mask)==0)
    @classmethod
    def from_additive(cls, mask):
        mask = array(mask)
        return cls((mask[:,0,0] if mask.ndim==4 else mask)==0)

ENDS_BEHIND = {'edge'} # on the bell these end a token beyond sigma, so |j - i| = sigma takes part
THRESHOLDS = {'edge': math.exp(-.5)} # of those that take one where none is given

class Window:
    "The formulas of chapters 11, 12 and 14, evaluated at every pair."
    def __init__(self, sigma, curve='bell', cut=None, smooth='edge', unit='tokens', apply='inside', reach=None, *,
                 p=None, ramp=None, eps=2**-24):
        self.sigma,self.curve,self.smooth,self.unit,self.apply = array(sigma),curve,smooth,unit,apply
        self.reach = (None,None) if reach is None else reach
        self.T = THRESHOLDS.get(smooth) if cut is None else cut[0] if isinstance(cut, tuple) else cut
        self.ends_behind = smooth in ENDS_BEHIND and curve=='bell'
        self.promised = self.ends_behind and cut is None  # |j - i| <= sigma takes part, exactly
        self.p,self.ramp,self.eps = 2. if smooth=='edge' and p is None else p,ramp,eps
    @classmethod
    def default(cls, sigma, unit='tokens', reach=None): return cls(sigma, unit=unit, reach=reach)
    @classmethod
    def span(cls, width, ramp=32, reach=None): return cls(width, smooth='ramp', ramp=ramp, reach=reach)
    @classmethod
    def report_20220330(cls, sigma, p=1e4, T=.9): return cls(sigma, 'normal', (T,1), 'power', 'fraction', 'after', p=p)
    @classmethod
    def report_20220413(cls, sigma, p, T): return cls(sigma, 'normal', (T,0), 'tanh', 'fraction', 'after', p=p)

    def aligned(self, sigma):
        "[H], [B,H] or [B,H,N] to what broadcasts with [B,H,N,M]."
        if sigma.ndim==3: return sigma[...,None]
        return sigma.reshape((1,)*(2-sigma.ndim) + sigma.shape + (1,1))

    @np.errstate(all='ignore')
    def mask(self, offsets, n, sigma=None):
        "[N,M] offsets to the mask [B|1,H|1,N,M], exactly 0 outside."
        sigma = self.aligned(self.sigma if sigma is None else sigma)
        token = 1. if self.unit=='tokens' else 2/max(n, 1)
        x = np.abs(offsets)*token
        m = self.ramp_at(x, sigma) if self.smooth=='ramp' else self.smoothed(x, sigma, token)
        left,right = self.reach
        if left is not None: m = np.where(offsets>=-left, m, 0.)
        return m if right is None else np.where(offsets<=right, m, 0.)

    def ramp_at(self, x, width):
        r = (width + self.ramp - x)/self.ramp
        return np.where(r.real<=0, 0., np.where(r.real>=1, 1., r))

    def curves(self, x, sigma, token):
        "The bell, and V: the bell or the density."
        if self.ends_behind: sigma = sigma + token/math.sqrt(-2*math.log(self.T))
        bell = np.where(x==0, 1., np.exp(-.5*(x/np.where(sigma==0, 1., sigma))**2)*(sigma!=0))
        return bell,bell if self.curve=='bell' else bell/np.where(sigma==0, np.inf, sigma*math.sqrt(2*math.pi))

    def smoothed(self, x, sigma, token):
        bell,V = self.curves(x, sigma, token)
        if self.T is not None: inside = V.real > self.T
        elif self.smooth=='tanh': inside = V.real > min(self.eps/self.p, .5)
        else: inside = (bell.real > self.eps) & ((sigma!=0) | (self.curve=='bell'))
        if self.promised: inside = x < (self.aligned(self.sigma)+token).real
        if self.curve=='normal' and self.smooth!='tanh': V = np.where(V.real<1, V,
            1.)  # a density may be above 1, a mask may not
        if self.smooth=='edge': m = np.tanh(self.p*np.where(V.real>self.T, V-self.T, 0.)/(1-self.T))/math.tanh(self.p)
        elif self.smooth=='power' and self.curve=='bell': # where V rounds to 1, `1 - V**p` would be 0
            m = -np.expm1(-.5*self.p*(x/np.where(sigma==0, 1., sigma))**2)
        elif self.smooth=='power': m = 1 - np.where(inside, V, 1.)**self.p
        elif self.smooth=='tanh': m = np.tanh(self.p*V)
        elif self.smooth=='gaussian': m = V
        else: raise NotImplementedError(f'smooth: expected a formula of the oracle, got {self.smooth!r}, which has none')
        return np.where(inside, m, 0.)

    @np.errstate(all='ignore')
    def slope(self, offsets, n, times=1.):
        "The derivative of the mask in sigma, at `times` its width."
        m = self.mask(offsets, n, times*self.sigma + 1j*STEP).imag/STEP
        return np.where((self.aligned(self.sigma)==0) & (self.smooth not in ('ramp',*ENDS_BEHIND) or self.curve=='normal'),
                        0., m)

    @np.errstate(all='ignore')
    def swing(self, offsets, n):
        "The derivative of V in sigma: tanh' = 1 - tanh^2 is rounded at the size of 1, and multiplied by this."
        token = 1. if self.unit=='tokens' else 2/max(n, 1)
        V = self.curves(np.abs(offsets)*token, self.aligned(self.sigma + 1j*STEP), token)[1]
        return np.nan_to_num(np.abs(V.imag)/STEP)

    def unclear(self, offsets, n, relative):
        "Whether a width that is off by `relative` ends at another token."
        if self.promised and self.unit=='tokens': return False
        token = 1. if self.unit=='tokens' else 2/max(n, 1)
        wide,narrow = (self.mask(offsets, n, self.sigma+s*(self.sigma+token))!=0
                       for s in (relative,-relative))
        exact = self.smooth=='ramp' and self.unit=='tokens' and (self.sigma*4==np.round(self.sigma*4)).all()
        return bool((wide!=narrow).any()) and not exact

    def corner(self, offsets, n):
        "Whether sigma stands so that a token is at a corner of the ramp, which has two slopes."
        if self.smooth!='ramp': return False
        x,width = np.abs(offsets)*(1. if self.unit=='tokens' else 2/max(n, 1)),self.aligned(self.sigma)
        return bool(((np.abs(x-width)<1e-6*(x+1)) | (np.abs(x-width-self.ramp)<1e-6*(x+1))).any())

def log1p_over(t):
    "log(1 + t)/t, 1 at 0."
    near = np.abs(t) < .02
    small,large = np.where(near, t, 0.),np.where(near, 1., t)
    series = sum((-small)**k/(k+1) for k in range(11))
    return np.where(near, series, np.log(1+large)/large if np.iscomplexobj(t) else np.log1p(large)/large)

def deformed(y, eps):
    "[1 + eps y]^(1/eps), 0 where the bracket is negative, exp(y) at eps = 0."
    t = eps*y
    alive = (t.real > -1) & np.isfinite(y.real)
    y,t = np.where(alive, y, 0.),np.where(alive, t, 0.)
    return np.where(alive, np.exp(np.minimum(y.real, 700.)*log1p_over(t) if not np.iscomplexobj(y)
                                  else y*log1p_over(t)), 0.)

def slopes(p, eps):
    "p^(2 - alpha) on the support."
    alive = p.real>0
    return np.where(alive, np.where(alive, p, 1.)**(1-eps), 0.)

def threshold(x, eps):
    "c with sum of `deformed(x - c, eps)` = 1 for rows whose largest entry is 0: halving, then Newton's steps."
    real,e = x.real,np.real(eps)
    lo = np.zeros(real.shape[:-1]+(1,))
    convex = bool((e<=1).all())  # then Newton's steps from below are monotone
    hi = lo + np.where(e==0, math.log(max(real.shape[-1], 2)),
                       -np.expm1(-e*math.log(max(real.shape[-1], 2)))/np.where(e==0, 1., e))
    for _ in range(12 if convex else 56):
        mid = (lo+hi)/2
        over = deformed(real-mid, e).sum(-1, keepdims=True) >= 1
        lo,hi = np.where(over, mid, lo),np.where(over, hi, mid)
    for _ in range(7 if convex else 0):
        p = deformed(real-lo, e)
        lo = lo + (p.sum(-1, keepdims=True)-1)/slopes(p, e).sum(-1, keepdims=True)
    if not (np.iscomplexobj(x) or np.iscomplexobj(eps)): return lo
    c = lo.astype(complex)
    for _ in range(3):
        p = deformed(x-c, eps)
        c = c + (p.sum(-1, keepdims=True)-p.real.sum(-1, keepdims=True))/slopes(p, eps).sum(-1, keepdims=True)
    return c

def fold(g, shape):
    "`g` summed to `shape`, which broadcasts to it."
    g = g.sum(tuple(range(g.ndim-len(shape))))
    axes = tuple(i for i,n in enumerate(shape) if n==1 and g.shape[i]!=1)
    return g.sum(axes, keepdims=True).reshape(shape)

class Attention:
    "One call, worked out."
    @np.errstate(all='ignore')
    def __init__(self, q, k, v, attn_mask=None, dropout_p=0., is_causal=False, scale=None, enable_gqa=False, *,
                 padding=None, window=None, alpha=None,
                 n_global=0, rel_bias=None, q_offset=0, segments=None, sink=None, softcap=None, return_weights=False):
        self.q,self.k,self.v = array(q),array(k),array(v)
        (self.B,self.H,self.N,self.d),(self.G,self.M) = self.q.shape,self.k.shape[1:3]
        self.scale = self.d**-.5 if scale is None and self.d else 1. if scale is None else scale
        self.lost = ~np.isfinite(self.q).all(-1, keepdims=True)  # queries that are not finite
        self.q = np.where(self.lost, 0., self.q)
        self.keep = None if padding is None else padding.keep
        if self.keep is not None: self.k,self.v = (np.where(self.keep[:,None,:,None], x, 0.) for x in (self.k,self.v))
        self.offsets = np.arange(self.M) - np.arange(self.N)[:,None] - q_offset
        self.segments = None if segments is None else ids_of(array(segments), self.N)
        self.everywhere = self.leading(n_global, q_offset)
        self.window = window if isinstance(window, Window) else None
        self.mask = self.window.mask(self.offsets, self.M) if self.window else None
        self.attn_mask,self.rel_bias = array(attn_mask),array(rel_bias)
        self.alpha,self.sink,self.softcap,self.dropped = array(alpha),array(sink),softcap,dropout_p==1
        see = self.sight(is_causal, window)
        scores = np.where(see, self.products() + self.biases(), -np.inf)
        self.m = None if self.mask is None else np.where(self.everywhere, 1., self.mask)
        if self.inside:
            scores = np.where(self.m.real>0, scores+np.log(np.where(self.m.real>0, self.m, 1.)), -np.inf)
        self.scores = np.broadcast_to(scores, (self.B,self.H,self.N,self.M))
        self.whole = self.rows()      # [B,H,N,M], or [B,H,N,M+1] where the sink is one more key
        self.p = self.whole[...,:self.M]
        self.weights = self.p if not self.m_after else self.p*self.m
        if self.dropped: self.weights = self.weights*0.
        self.see = np.broadcast_to(see, self.p.shape)
        self.corners = self.window is not None and self.window.corner(self.offsets, self.M)
        self.empty = ~(self.scores.real>-np.inf).any(-1, keepdims=True)
        self.out = np.where(self.lost & ~self.empty, np.nan, self.weights@self.spread(self.v))

    @property
    def inside(self): return self.window is not None and self.window.apply=='inside'
    @property
    def m_after(self): return self.window is not None and self.window.apply=='after'
    @property
    def mask_is_added(self): return self.attn_mask is not None and self.attn_mask.dtype!=bool
    @property
    def eps(self):
        "alpha - 1, [B|1,H|1,1,1]"
        if self.alpha is None: return np.zeros((1,1,1,1))
        return self.alpha.reshape((1,)*(2-self.alpha.ndim) + self.alpha.shape + (1,1)) - 1

    def spread(self, x): return np.repeat(x, self.H//max(self.G, 1), 1)
    def gathered(self, g): return g.reshape(self.B, self.G, self.H//self.G, *g.shape[2:]).sum(2)
    def products(self):
        s = self.q@self.spread(self.k).swapaxes(-1, -2)*self.scale
        self.bent = None if self.softcap is None else np.tanh(s/self.softcap)
        return s if self.bent is None else self.softcap*self.bent

    def leading(self, n_global, q_offset):
        "Pairs of which one is among the leading tokens, of the sequence or of its segment."
        i,j = np.arange(self.N) + q_offset,np.arange(self.M)
        if self.segments is not None:
            first = (self.segments[:,None,:]<self.segments[:,:,None]).sum(-1)          # [B,N] where its segment begins
            i,j = (np.arange(self.N)-first for _ in 'ij')
            return (i<n_global)[:,None,:,None] | (j<n_global)[:,None,None,:]
        return ((0<=i) & (i<n_global))[:,None] | (j<n_global)

    def sight(self, causal, window):
        "Which pairs may meet, by everything that is hard."
        see = np.ones((1,1,self.N,self.M), bool)
        if window is not None and self.window is None:
            left,right = (window,window) if isinstance(window, int) else window
            if left is not None: see = see & (self.offsets>=-left)
            if right is not None: see = see & (self.offsets<=right)
        see = see | self.everywhere
        if causal: see = see & (self.offsets<=0)
        if self.segments is not None: see = see & (self.segments[:,None,:,None]==self.segments[:,None,None,:])
        if self.keep is not None: see = see & self.keep[:,None,None]
        if self.attn_mask is None: return see
        return see & (self.attn_mask!=-np.inf if self.mask_is_added else self.attn_mask)

    def columns(self):
        "The entry of the bias that each pair reads."
        r = self.rel_bias.shape[-1]//2
        return np.clip(self.offsets, -r, r)+r

    def biases(self):
        total = np.zeros((1,1,1,1))
        if self.mask_is_added: total = total + np.where(self.attn_mask==-np.inf, 0., self.attn_mask)
        return total if self.rel_bias is None else total + self.rel_bias[...,self.columns()]

    def rows(self):
        "Weights before a window that stands after the softmax; remembers x - c."
        scores = self.scores
        if self.sink is not None:
            beside = np.broadcast_to(self.sink[None,:,None,None], (self.B,self.H,self.N,1))
            scores = np.concatenate((scores, beside), -1)
        self.all_scores = scores
        if not scores.shape[-1]:
            self.y = scores
            return scores*0.
        top = scores.real.max(-1, keepdims=True)
        x = np.where(top>-np.inf, scores-np.where(top>-np.inf, top, 0.), -np.inf)
        some = np.where(top>-np.inf, x, 0.)  # an empty row is solved like any other, and then left out
        c = np.log(np.exp(some).sum(-1, keepdims=True)) if self.alpha is None else threshold(some, self.eps)
        self.y = some-c
        p = np.exp(self.y) if self.alpha is None else self.repaired(deformed(self.y, self.eps))
        return np.where(top>-np.inf, p, 0.)

    def repaired(self, p):
        "Far above alpha = 2 a rounding of c is more than one of the weights; that they sum to one tells them better."
        if np.iscomplexobj(p): return p
        s = slopes(p, self.eps)
        total = s.sum(-1, keepdims=True)
        over = (p.sum(-1, keepdims=True)-1)/np.where(total>0, total, 1.)
        return np.where(np.real(self.eps)>1, np.maximum(p-s*over, 0.), p)

    def alpha_slope(self):
        "The derivative of the weights in alpha, by a complex step in the solver."
        if not self.M: return self.p
        some = np.where((self.all_scores>-np.inf).any(-1, keepdims=True), self.y, 0.)
        eps = np.broadcast_to(self.eps, (self.B,self.H,1,1)) + 1j*STEP
        top = some.max(-1, keepdims=True)
        return np.where(self.empty, 0., (deformed(some-top-threshold(some-top, eps), eps).imag/STEP)[...,:self.M])

    def gradients(self, dout):
        "Those of every input, by name."
        dout = np.where(self.lost | self.dropped, 0., array(dout))
        v = self.spread(self.v)
        dweights = dout@v.swapaxes(-1, -2)
        dp = dweights*self.m if self.m_after else dweights
        s_all = slopes(self.whole, self.eps)
        s,total = s_all[...,:self.M],s_all.sum(-1, keepdims=True)
        at = s.argmax(-1)[...,None] if self.M else None
        beside = np.take_along_axis(dp, at, -1) if self.M else 0.  # next to the mean if one slope is far above all
        whole_s = np.where(total==0, 1., total)
        apart = ((s*(dp-beside)).sum(-1, keepdims=True) - s_all[...,self.M:].sum(-1, keepdims=True)*beside)/whole_s
        mean = (s*dp).sum(-1, keepdims=True)/whole_s  # `apart+beside`, but right to the last digit when it is small
        ds = s*(dp-beside-apart)
        self.parts = dict(dout=dout, dweights=dweights, dp=dp, s=s, mean=mean, ds=ds,
                          total=np.where(total==0, 1., total))
        dproducts = self.scale*ds*(1. if self.bent is None else 1-self.bent**2)
        grads = dict(q=dproducts@self.spread(self.k), k=self.gathered(dproducts.swapaxes(-1, -2)@self.q),
                     v=self.gathered(self.weights.swapaxes(-1, -2)@dout))
        if self.keep is not None:
            for x in 'kv': grads[x] = np.where(self.keep[:,None,:,None], grads[x], 0.)
        if self.window is not None:
            of_mask = self.to_mask(ds, dweights*self.p)
            grads['sigma'] = self.to_sigma(of_mask, self.window.slope(self.offsets, self.M))
        if self.alpha is not None: grads['alpha'] = fold((dp*self.alpha_slope()).sum((-1,-2)), self.alpha.shape)
        if self.rel_bias is not None: grads['rel_bias'] = self.to_bias(ds)
        if self.sink is not None: grads['sink'] = -(s_all[...,self.M:]*mean).sum((0,2,3))
        if self.mask_is_added: grads['attn_mask'] = fold(ds, self.attn_mask.shape)
        return grads

    def to_mask(self, ds, by_weight):
        g = np.where(self.m>0, ds/np.where(self.m>0, self.m, 1.), 0.) if self.inside else by_weight
        return np.where(self.everywhere, 0., g)

    def to_sigma(self, g, slope):
        g = np.broadcast_to(g*slope, self.p.shape)
        shape = self.window.sigma.shape
        return fold(g.sum(-1), shape) if len(shape)==3 else fold(g.sum((-1,-2)), shape)

    def to_bias(self, ds):
        g = np.zeros((self.B,self.H,self.rel_bias.shape[-1]))
        np.add.at(g, (slice(None),slice(None),self.columns()), ds)
        return fold(g, self.rel_bias.shape)

    @np.errstate(all='ignore')
    def bounds(self, eps, eps_mask, tiny=0.):
        "How far rounding moves `out`, and each gradient if `gradients` was called, by name; see `Bounds`."
        found = Bounds(self, eps, eps_mask, tiny)
        self.vw = found.weights
        res = dict(out=found.of_out())
        if not hasattr(self, 'parts'): return res
        res |= found.of_gradients()
        self.sizes = dict(rel_bias=self.to_bias(found.size) if self.rel_bias is not None else 0.,
                          attn_mask=res.get('attn_mask', 0.)/eps)
        return res

class Bounds:
    """How far rounding by `eps`, and by `eps_mask` in the window, can move each entry of a result, to first order.

    A name that ends in `_moved` is such a bound; `a` is the `Attention`. The order is that of the computation: scores,
    weights, output, then the gradient of the scores, and from it those of the inputs."""
    STRETCH = 6.    # as far as the margin goes: close to the end of the support the weights are far from linear

    def __init__(self, a, eps, eps_mask, tiny):
        self.a,self.eps,self.eps_mask,self.tiny = a,eps,eps_mask,tiny
        # of a sum; half precision adds up in float32
        self.eps_sum = eps if eps>1e-4 else eps*max(1., math.sqrt(max(a.N, a.M))/3)
        self.k,self.v = np.abs(a.spread(a.k)),np.abs(a.spread(a.v))
        self.seen = a.scores>-np.inf
        if a.window is not None: self.move_window()
        self.move_scores()
        self.move_weights()

    def move_window(self):
        "The mask, of its own roundings and of its width's."
        window,offsets,m = self.a.window,self.a.offsets,self.a.M
        self.slope = np.abs(window.slope(offsets, m))
        self.drift = np.abs(window.slope(offsets, m, 1+1e-4) - window.slope(offsets, m, 1-1e-4))/1e-4
        width = window.aligned(window.sigma)
        self.mask_moved = self.eps_mask*(1+(window.p or 0)+self.slope*(1+width))

    def move_scores(self):
        "Each score, and the row's threshold or log of its sum, which all scores of the row move."
        a,eps = self.a,self.eps
        reach = np.abs(a.q)@self.k.swapaxes(-1, -2)*abs(a.scale)
        moved = eps*(2+reach+np.abs(a.biases()))
        if a.window is not None and a.inside:
            live = np.where(a.m>0, a.m, 1.)
            moved = moved + np.where(a.everywhere, 0., self.mask_moved/live + eps*np.abs(np.log(live)))
        if a.softcap is not None: moved = moved + eps*a.softcap
        moved = np.minimum(np.broadcast_to(moved, a.p.shape), 30.)
        self.slopes = slopes(a.p, a.eps)
        total = slopes(a.whole, a.eps).sum(-1, keepdims=True)
        of_sink = 0. if a.sink is None else eps*np.abs(a.sink)[:,None,None]
        self.row_moved = (self.slopes*moved).sum(-1, keepdims=True)/np.where(total==0, 1., total) + of_sink
        self.scores_moved = moved + self.row_moved

    def move_weights(self):
        "Weights before and after a window that multiplies them, and their slopes."
        a,eps,tiny = self.a,self.eps,self.tiny
        y = a.y[...,:a.M]
        self.high,self.low = (np.where(self.seen, deformed(y+sign*self.STRETCH*self.scores_moved, a.eps), 0.)
                              for sign in (1,-1))
        of_scores = np.minimum(self.high-self.low, 1.)/self.STRETCH
        self.before_mask = of_scores + np.where(self.seen, self.eps_sum*a.p + tiny, 0.)
        self.slopes_high,self.slopes_low = slopes(self.high, a.eps),slopes(self.low, a.eps)
        up,down = (np.minimum(np.abs(other-self.slopes), 1e6) for other in (self.slopes_high,self.slopes_low))
        self.slopes_moved = (up+down)/self.STRETCH + eps*self.slopes + np.where(self.seen, tiny, 0.)
        self.weights = self.before_mask
        if a.m_after:
            of_mask = a.p*np.where(a.everywhere, 0., self.mask_moved)
            self.weights = self.before_mask*np.abs(a.m) + of_mask
        if a.dropped: self.weights = self.weights*0.

    def of_out(self): return self.weights@self.v + self.eps*np.abs(self.a.weights)@self.v + self.tiny

    def move_gradient_of_weights(self):
        "`dp`: the products of the upstream gradient with the values, times a mask that comes after."
        a = self.a
        self.wide = np.abs(a.parts['dout'])@self.v.swapaxes(-1, -2)
        self.dp_moved = 2*self.eps*self.wide + self.tiny
        if a.m_after:
            of_mask = self.wide*np.where(a.everywhere, 0., self.mask_moved)
            self.dp_moved = self.dp_moved*np.abs(a.m) + of_mask

    def move_gradient_of_scores(self):
        "`ds`, slope times (dp - mean): the mean of the row, then each key, and keys that enter the support or leave it."
        a,eps,tiny = self.a,self.eps,self.tiny
        size = {name: np.abs(x) for name,x in a.parts.items()}
        apart = np.abs(a.parts['dp']-a.parts['mean'])
        edge = self.seen & (a.eps>1) & (self.low==0) & (self.high>0)
        at_edge = self.at_the_edge(edge)
        slopes_moved = np.where(edge, 0., self.slopes_moved)
        of_dp = (a.parts['s']*(self.dp_moved+self.eps_sum*size['dp'])).sum(-1, keepdims=True)/size['total']
        of_slopes = (slopes_moved*apart).sum(-1, keepdims=True)/size['total']
        mean_moved = of_dp + of_slopes + at_edge['mean']/self.STRETCH
        # a stored log of the row's sum is rounded, too
        level = np.abs(np.where(self.seen, a.scores, 0.)).max(-1, keepdims=True, initial=0.)
        mean_moved = mean_moved + min(eps, 2.**-24)*level*size['mean']
        slope = np.where(edge, 0., a.parts['s'])
        each = slope*(self.dp_moved+mean_moved+eps*(size['dp']+size['mean'])) + np.where(self.seen, tiny, 0.)
        each = each + slopes_moved*(apart+self.dp_moved+mean_moved)     # a key just outside may come inside
        self.ds_moved = each + at_edge['ds']/self.STRETCH + np.where(edge, at_edge['total']*self.dp_moved, 0.)
        self.size = size['ds'] + self.ds_moved      # at most
        if a.sink is None: return
        slack = np.abs(mean_moved)+self.eps_sum*size['mean']
        of_mean = (slopes(a.whole, a.eps)[...,a.M:]*(slack+eps*size['mean'])).sum((0,2,3))
        of_slope = (slopes_moved*size['mean']).sum((0,2,3))
        self.sink_moved = of_mean + of_slope + at_edge['sink'].sum((0,2,3))/self.STRETCH

    def of_gradients(self):
        "By the names of the inputs."
        a,eps,tiny = self.a,self.eps,self.tiny
        self.move_gradient_of_weights()
        self.move_gradient_of_scores()
        each = self.ds_moved + self.eps_sum*self.size
        scaled = abs(a.scale)*each
        by_values = self.weights + eps*np.abs(a.weights)
        res = dict(
            q=scaled@self.k + tiny,
            k=a.gathered(scaled.swapaxes(-1, -2)@np.abs(a.q)) + tiny,
            v=a.gathered(by_values.swapaxes(-1, -2)@np.abs(a.parts['dout'])) + tiny)
        if a.window is not None: res['sigma'] = self.of_sigma()
        if a.alpha is not None: res['alpha'] = self.of_alpha()
        # many roundings to half precision cancel in a long sum, if it is not itself one in half precision
        if a.rel_bias is not None: res['rel_bias'] = a.to_bias(each) if eps<1e-4 else 2*np.sqrt(a.to_bias(each**2))
        if a.mask_is_added: res['attn_mask'] = fold(each, a.attn_mask.shape)
        if a.sink is not None: res['sink'] = self.sink_moved
        return res

    def of_sigma(self):
        a,eps_mask = self.a,self.eps_mask
        by_mask = a.to_mask(self.ds_moved, self.dp_moved*a.p+np.abs(a.parts['dweights'])*self.before_mask)
        relative = eps_mask*(2+1/np.where(a.m>0, a.m, 1.)) if a.inside else eps_mask
        size = np.where(a.everywhere, 0., a.to_mask(self.size, self.wide*a.p))
        steep = (a.window.p or 0)/(1-(a.window.T or 0))*(1+a.window.swing(a.offsets, a.M))
        slope_moved = eps_mask*(1+self.slope*(1+self.slope)+self.drift+steep)
        terms = (by_mask, self.slope), (size*(relative+self.eps), self.slope), (size, slope_moved)
        return sum(a.to_sigma(g, rate) for g,rate in terms) + self.tiny

    def of_alpha(self):
        a = self.a
        squared_log = np.log(np.where(a.p>0, a.p, 1.))**2
        of_scores = ((self.ds_moved+self.eps*self.size)*(1+squared_log)).sum((-1,-2))
        of_weights = (self.before_mask*self.wide).sum((-1,-2))
        return fold(of_scores, a.alpha.shape) + fold(of_weights, a.alpha.shape) + self.tiny

    def at_the_edge(self, edge):
        """How far the gradients may be moved by keys that rounding takes into the support or out of it, for alpha > 2.

        There the slope of a key jumps from 0 to infinity as it enters, so the slopes of the others bound the change,
        not its own: with the slope x of such a key and S of all sure ones its gradient is x S/(x + S) times the
        difference to their mean, at most S times that, and the mean moves by no more than the difference. Two such
        keys may have any slope beside each other, up to that of the smallest weight that is told from zero."""
        a,e = self.a,self.a.eps
        dp,mean_before = a.parts['dp'],a.parts['mean']
        alone = np.zeros((1,1,1,0)) if a.sink is None else a.y[...,a.M:]
        low,high = (deformed(alone+sign*self.STRETCH*self.row_moved, e) for sign in (-1,1))
        sink = (e>1) & (low==0) & (high>0)
        sure = np.where(edge, 0., np.maximum(self.slopes_low, np.maximum(self.slopes, self.slopes_high)))
        total = sure.sum(-1, keepdims=True)
        mean = np.where(total>0, (sure*dp).sum(-1, keepdims=True)/np.where(total>0, total, 1.), mean_before)
        apart = np.where(edge, np.abs(dp-mean), 0.)
        of_sink = np.where(sink, np.abs(mean), 0.).sum(-1, keepdims=True)
        largest = np.maximum(apart.max(-1, keepdims=True, initial=0.), of_sink)
        steepest = (2.**-53 if self.eps<2.**-40 else 2.**-24)**(1/np.maximum(e, 1.)-1)
        several = edge.sum(-1, keepdims=True)+sink.sum(-1, keepdims=True) > 1
        ds = total*apart + np.where(several & edge, steepest*largest, 0.)
        moved = np.where(largest>0, largest+np.abs(mean-mean_before), 0.)
        of_sink = total*of_sink + np.where(several & (of_sink>0), steepest*largest, 0.)
        return dict(mean=moved, ds=ds, total=total, sink=of_sink)

def ids_of(segments, n):
    "cu_seqlens to ids; ids stay."
    return segments if segments.ndim==2 else np.searchsorted(segments[1:], np.arange(n), side='right')[None]

def attention(*args, **call): return Attention(*args, **call).out

def directional(call, name, direction):
    "The derivative of the output when the input `name` moves along `direction`, by a complex step."
    step = 1j*STEP*array(direction)
    if name=='sigma':
        window = Window.__new__(Window)
        window.__dict__.update(call['window'].__dict__, sigma=call['window'].sigma+step)
        moved = dict(call, window=window)
    else: moved = dict(call, **{name: array(call[name])+step})
    return Attention(**moved).out.imag/STEP
