"""Continuous distributions of numbers, with their densities as in Johnson, Kotz and Balakrishnan (1994, 1995)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import dbrdist.functions as F
from dbrdist.core.backend import get_array_module
from dbrdist.core.variable import Variable, as_variable
from dbrdist.distributions.base import Distribution, kept, one_of, parameters, value_of

_EULER = float(np.euler_gamma)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _Elementwise(Distribution):
    """One number per distribution."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._like().shape

    def _shape(self, n: int) -> tuple[int, ...]:
        return (n, *self.batch_shape)


class _LocationScale(_Elementwise):
    """loc + scale z, where z has the standard form of the family."""

    support = "real"

    def __init__(self, loc: Any, scale: Any) -> None:
        self.loc, self.scale = parameters(loc, scale)

    @property
    def params(self) -> dict[str, Variable]:
        return {"loc": self.loc, "scale": self.scale}

    def _standard(self, x: Any) -> Variable:
        return (self._outcome(x) - self.loc) / self.scale

    def sample_n(self, n: int) -> Variable:
        return self.loc + self.scale * self._drawn(lambda rng: self._draw(rng, self._shape(n)))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        raise self._not_there("sample_n")


class Normal(_LocationScale):
    """N(loc, scale^2); ``log_scale`` may be given in place of ``scale``."""

    def __init__(self, loc: Any, scale: Any = None, *, log_scale: Any = None) -> None:
        name, value = one_of("Normal", scale=scale, log_scale=log_scale)
        loc, value = parameters(loc, value)
        self.loc = loc
        self.scale = value if name == "scale" else F.exp(value)
        self._log_scale = value if name == "log_scale" else None

    @property
    def log_scale(self) -> Variable:
        """The logarithm of the standard deviation."""
        return F.log(self.scale) if self._log_scale is None else self._log_scale

    @property
    def mean(self) -> Variable:
        return self.loc

    mode = mean

    @property
    def variance(self) -> Variable:
        return F.square(self.scale)

    @property
    def stddev(self) -> Variable:
        return self.scale

    @property
    def entropy(self) -> Variable:
        return self.log_scale + (0.5 + _HALF_LOG_2PI)

    def log_prob(self, x: Any) -> Variable:
        return -0.5 * F.square(self._standard(x)) - self.log_scale - _HALF_LOG_2PI

    def cdf(self, x: Any) -> Variable:
        return F.ndtr(self._standard(x))

    def log_cdf(self, x: Any) -> Variable:
        return F.log_ndtr(self._standard(x))

    def survival_function(self, x: Any) -> Variable:
        return F.ndtr(-self._standard(x))

    def log_survival_function(self, x: Any) -> Variable:
        return F.log_ndtr(-self._standard(x))

    def icdf(self, x: Any) -> Variable:
        return self.loc + self.scale * F.ndtri(self._outcome(x))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.standard_normal(shape)


class Laplace(_LocationScale):
    """Density exp(-|x - loc| / scale) / (2 scale)."""

    @property
    def mean(self) -> Variable:
        return self.loc

    mode = mean

    @property
    def variance(self) -> Variable:
        return 2.0 * F.square(self.scale)

    @property
    def entropy(self) -> Variable:
        return F.log(self.scale) + (1.0 + math.log(2.0))

    def log_prob(self, x: Any) -> Variable:
        return -F.absolute(self._standard(x)) - F.log(2.0 * self.scale)

    def cdf(self, x: Any) -> Variable:
        return self._below(self._standard(x))

    def log_cdf(self, x: Any) -> Variable:
        return self._log_below(self._standard(x))

    def survival_function(self, x: Any) -> Variable:
        return self._below(-self._standard(x))

    def log_survival_function(self, x: Any) -> Variable:
        return self._log_below(-self._standard(x))

    def _below(self, z: Variable) -> Variable:
        is_low = value_of(z) < 0
        tail = 0.5 * F.exp(F.where(is_low, z, -z))
        return F.where(is_low, tail, 1.0 - tail)

    def _log_below(self, z: Variable) -> Variable:
        is_low = value_of(z) < 0
        reach = F.where(is_low, z, -z)  # no absolute value: its slope at 0 is 0
        return F.where(is_low, reach - math.log(2.0), F.log1p(-0.5 * F.exp(reach)))

    def icdf(self, x: Any) -> Variable:
        x = self._outcome(x)
        is_low = value_of(x) < 0.5
        tail = F.log(2.0 * F.where(is_low, x, 1.0 - x))
        return self.loc + self.scale * F.where(is_low, tail, -tail)

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.laplace(size=shape)


class Cauchy(_LocationScale):
    """Density 1 / (pi scale (1 + z^2)) with z = (x - loc) / scale; mean and variance do not exist and are NaN."""

    @property
    def mean(self) -> Variable:
        return as_variable(self.xp.full_like(self.loc.array, np.nan))

    variance = mean

    @property
    def mode(self) -> Variable:
        return self.loc

    @property
    def entropy(self) -> Variable:
        return F.log(4 * math.pi * self.scale)

    def log_prob(self, x: Any) -> Variable:
        return -F.log1p(F.square(self._standard(x))) - F.log(math.pi * self.scale)

    def cdf(self, x: Any) -> Variable:
        return self._below(self._standard(x))

    def survival_function(self, x: Any) -> Variable:
        return self._below(-self._standard(x))

    def _below(self, z: Variable) -> Variable:
        return F.arctan2(self.xp.ones_like(z.array), -z) / math.pi  # arctan(z) / pi + 1/2, exact in the tail

    def icdf(self, x: Any) -> Variable:
        return self.loc + self.scale * F.tan(math.pi * (self._outcome(x) - 0.5))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.standard_cauchy(shape)


class Gumbel(_LocationScale):
    """Density exp(-z - exp(-z)) / scale with z = (x - loc) / scale: the largest of many."""

    @property
    def mean(self) -> Variable:
        return self.loc + _EULER * self.scale

    @property
    def mode(self) -> Variable:
        return self.loc

    @property
    def variance(self) -> Variable:
        return (math.pi**2 / 6) * F.square(self.scale)

    @property
    def entropy(self) -> Variable:
        return F.log(self.scale) + (_EULER + 1.0)

    def log_prob(self, x: Any) -> Variable:
        z = self._standard(x)
        return -(z + F.exp(-z)) - F.log(self.scale)

    def cdf(self, x: Any) -> Variable:
        return F.exp(self.log_cdf(x))

    def log_cdf(self, x: Any) -> Variable:
        return -F.exp(-self._standard(x))

    def survival_function(self, x: Any) -> Variable:
        return -F.expm1(self.log_cdf(x))

    def icdf(self, x: Any) -> Variable:
        return self.loc - self.scale * F.log(-F.log(self._outcome(x)))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return rng.gumbel(size=shape)


class LogNormal(_Elementwise):
    """exp of a Normal(mu, sigma)."""

    support = "positive"

    def __init__(self, mu: Any, sigma: Any) -> None:
        self.mu, self.sigma = parameters(mu, sigma)

    @property
    def params(self) -> dict[str, Variable]:
        return {"mu": self.mu, "sigma": self.sigma}

    @kept
    def _normal(self) -> Normal:
        return Normal(self.mu, self.sigma)

    @property
    def mean(self) -> Variable:
        return F.exp(self.mu + 0.5 * F.square(self.sigma))

    @property
    def mode(self) -> Variable:
        return F.exp(self.mu - F.square(self.sigma))

    @property
    def variance(self) -> Variable:
        return F.expm1(F.square(self.sigma)) * F.square(self.mean)

    @property
    def entropy(self) -> Variable:
        return self._normal.entropy + self.mu

    def log_prob(self, x: Any) -> Variable:
        return self._at_log(lambda log_x: self._normal.log_prob(log_x) - log_x, x, -np.inf)

    def cdf(self, x: Any) -> Variable:
        return self._at_log(self._normal.cdf, x, 0.0)

    def log_cdf(self, x: Any) -> Variable:
        return self._at_log(self._normal.log_cdf, x, -np.inf)

    def survival_function(self, x: Any) -> Variable:
        return self._at_log(self._normal.survival_function, x, 1.0)

    def log_survival_function(self, x: Any) -> Variable:
        return self._at_log(self._normal.log_survival_function, x, 0.0)

    def _at_log(self, function: Callable[[Variable], Variable], x: Any, otherwise: float) -> Variable:
        """``function`` at log(x), ``otherwise`` where x is not above 0."""
        x = self._outcome(x)
        inside = value_of(x) > 0
        return self._within(inside, function(F.log(F.where(inside, x, self.xp.ones_like(x.array)))), otherwise, x)

    def icdf(self, x: Any) -> Variable:
        return F.exp(self._normal.icdf(x))

    def sample_n(self, n: int) -> Variable:
        return F.exp(self._normal.sample_n(n))


class Uniform(_Elementwise):
    """Equal density from ``low`` to ``high``; or from ``loc`` to ``loc + scale``."""

    def __init__(self, *, loc: Any = None, scale: Any = None, low: Any = None, high: Any = None) -> None:
        by_ends = low is not None and high is not None and loc is None and scale is None
        by_scale = loc is not None and scale is not None and low is None and high is None
        if not (by_ends or by_scale):
            raise ValueError("Uniform: expected the arguments low and high, or loc and scale")
        if by_ends:
            self.low, self.high = parameters(low, high)
            self.loc, self.scale = self.low, self.high - self.low
        else:
            self.loc, self.scale = parameters(loc, scale)
            self.low, self.high = self.loc, self.loc + self.scale

    @property
    def params(self) -> dict[str, Variable]:
        return {"low": self.low, "high": self.high}

    @property
    def support(self) -> str:
        return "[low, high]"

    @property
    def mean(self) -> Variable:
        return 0.5 * (self.low + self.high)

    mode = mean  # as good as any other point

    @property
    def variance(self) -> Variable:
        return F.square(self.scale) / 12.0

    @property
    def entropy(self) -> Variable:
        return F.log(self.scale)

    def log_prob(self, x: Any) -> Variable:
        value = value_of(self._outcome(x))
        inside = (value >= self.low.array) & (value <= self.high.array)
        return self._within(inside, F.broadcast_to(-F.log(self.scale), inside.shape), x=value)

    def cdf(self, x: Any) -> Variable:
        return F.clip((self._outcome(x) - self.low) / self.scale, 0.0, 1.0)

    def icdf(self, x: Any) -> Variable:
        return self.low + self.scale * self._outcome(x)

    def sample_n(self, n: int) -> Variable:
        return self.low + self.scale * self._drawn(lambda rng: rng.random(self._shape(n)))


class _Positive(_Elementwise):
    """Outcomes above 0."""

    support = "positive"

    def log_prob(self, x: Any) -> Variable:
        x = self._outcome(x)
        inside = value_of(x) >= 0
        return self._within(inside, self._log_density(F.where(inside, x, self.xp.ones_like(x.array))), x=x)

    def _log_density(self, x: Variable) -> Variable:
        raise self._not_there("log_prob")


class Exponential(_Elementwise):
    """Density lam exp(-lam x) for x >= 0."""

    support = "positive"

    def __init__(self, lam: Any) -> None:
        (self.lam,) = parameters(lam)

    @property
    def params(self) -> dict[str, Variable]:
        return {"lam": self.lam}

    @property
    def mean(self) -> Variable:
        return 1.0 / self.lam

    @property
    def mode(self) -> Variable:
        return as_variable(self.xp.zeros_like(self.lam.array))

    @property
    def variance(self) -> Variable:
        return 1.0 / F.square(self.lam)

    @property
    def entropy(self) -> Variable:
        return 1.0 - F.log(self.lam)

    def log_prob(self, x: Any) -> Variable:
        x = self._outcome(x)
        return self._within(value_of(x) >= 0, F.log(self.lam) - self.lam * x, x=x)

    def cdf(self, x: Any) -> Variable:
        return -F.expm1(self.log_survival_function(x))

    def survival_function(self, x: Any) -> Variable:
        return F.exp(self.log_survival_function(x))

    def log_survival_function(self, x: Any) -> Variable:
        return -self.lam * F.relu(self._outcome(x))

    def icdf(self, x: Any) -> Variable:
        return -F.log1p(-self._outcome(x)) / self.lam

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.standard_exponential(self._shape(n))) / self.lam


class Gamma(_Positive):
    """Density x^(k - 1) exp(-x / theta) / (Gamma(k) theta^k); samples carry no gradient to k."""

    def __init__(self, k: Any, theta: Any) -> None:
        self.k, self.theta = parameters(k, theta)

    @property
    def params(self) -> dict[str, Variable]:
        return {"k": self.k, "theta": self.theta}

    @property
    def mean(self) -> Variable:
        return self.k * self.theta

    @property
    def mode(self) -> Variable:
        return F.relu(self.k - 1.0) * self.theta

    @property
    def variance(self) -> Variable:
        return self.mean * self.theta

    @property
    def entropy(self) -> Variable:
        return self.k + F.log(self.theta) + F.lgamma(self.k) + (1.0 - self.k) * F.digamma(self.k)

    def _log_density(self, x: Variable) -> Variable:
        return xlogy(self.k - 1.0, x) - x / self.theta - F.lgamma(self.k) - self.k * F.log(self.theta)

    def sample_n(self, n: int) -> Variable:
        return self.theta * self._drawn(lambda rng: rng.standard_gamma(_on_host(self.k), self._shape(n)))


class Chisquare(_Positive):
    """The sum of the squares of k standard normal numbers."""

    def __init__(self, k: Any) -> None:
        (self.k,) = parameters(k)

    @property
    def params(self) -> dict[str, Variable]:
        return {"k": self.k}

    @property
    def mean(self) -> Variable:
        return self.k

    @property
    def mode(self) -> Variable:
        return F.relu(self.k - 2.0)

    @property
    def variance(self) -> Variable:
        return 2.0 * self.k

    @property
    def entropy(self) -> Variable:
        h = 0.5 * self.k
        return h + math.log(2.0) + F.lgamma(h) + (1.0 - h) * F.digamma(h)

    def _log_density(self, x: Variable) -> Variable:
        h = 0.5 * self.k
        return xlogy(h - 1.0, x) - 0.5 * x - h * math.log(2.0) - F.lgamma(h)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.chisquare(_on_host(self.k), self._shape(n)))


class Beta(_Elementwise):
    """Density x^(a - 1) (1 - x)^(b - 1) / B(a, b) on [0, 1]; samples carry no gradient."""

    support = "[0, 1]"

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = parameters(a, b)

    @property
    def params(self) -> dict[str, Variable]:
        return {"a": self.a, "b": self.b}

    @property
    def mean(self) -> Variable:
        return self.a / (self.a + self.b)

    @property
    def mode(self) -> Variable:
        inside = (self.a.array > 1) & (self.b.array > 1)  # else it is at an end, or there is none
        return self._within(inside, (self.a - 1.0) / (self.a + self.b - 2.0), np.nan)

    @property
    def variance(self) -> Variable:
        total = self.a + self.b
        return self.a * self.b / (F.square(total) * (total + 1.0))

    @property
    def entropy(self) -> Variable:
        total = self.a + self.b
        sums = (self.a - 1.0) * F.digamma(self.a) + (self.b - 1.0) * F.digamma(self.b)
        return log_beta(self.a, self.b) - sums + (total - 2.0) * F.digamma(total)

    def log_prob(self, x: Any) -> Variable:
        given = self._outcome(x)
        inside = (value_of(given) >= 0) & (value_of(given) <= 1)
        x = F.where(inside, given, self.xp.full_like(given.array, 0.5))
        density = xlogy(self.a - 1.0, x) + xlogy(self.b - 1.0, 1.0 - x)
        return self._within(inside, density - log_beta(self.a, self.b), x=given)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.beta(_on_host(self.a), _on_host(self.b), self._shape(n)))


class Pareto(_Elementwise):
    """Density alpha scale^alpha / x^(alpha + 1) for x >= scale."""

    support = "[scale, inf]"

    def __init__(self, scale: Any, alpha: Any) -> None:
        self.scale, self.alpha = parameters(scale, alpha)

    @property
    def params(self) -> dict[str, Variable]:
        return {"scale": self.scale, "alpha": self.alpha}

    @property
    def mean(self) -> Variable:
        a = self.alpha
        return self._within(a.array > 1, a * self.scale / (a - 1.0), np.inf)

    @property
    def mode(self) -> Variable:
        return self.scale

    @property
    def variance(self) -> Variable:
        a = self.alpha
        return self._within(a.array > 2, F.square(self.scale / (a - 1.0)) * a / (a - 2.0), np.inf)

    @property
    def entropy(self) -> Variable:
        return F.log(self.scale) - F.log(self.alpha) + 1.0 / self.alpha + 1.0

    def log_prob(self, x: Any) -> Variable:
        inside, seen = self._seen(x)
        density = F.log(self.alpha) + self.alpha * F.log(self.scale) - (self.alpha + 1.0) * F.log(seen)
        return self._within(inside, density, x=self._outcome(x))

    def cdf(self, x: Any) -> Variable:
        return -F.expm1(self.log_survival_function(x))

    def survival_function(self, x: Any) -> Variable:
        return F.exp(self.log_survival_function(x))

    def log_survival_function(self, x: Any) -> Variable:
        inside, seen = self._seen(x)
        return self._within(inside, self.alpha * (F.log(self.scale) - F.log(seen)), 0.0, self._outcome(x))

    def _seen(self, x: Any) -> tuple[Any, Variable]:
        """Which outcomes are possible, and x with ``scale`` for those that are not."""
        x = self._outcome(x)
        inside = value_of(x) >= self.scale.array
        return inside, F.where(inside, x, F.broadcast_to(self.scale, inside.shape))

    def icdf(self, x: Any) -> Variable:
        return self.scale * F.exp(-F.log1p(-self._outcome(x)) / self.alpha)

    def sample_n(self, n: int) -> Variable:
        return self.scale * F.exp(self._drawn(lambda rng: rng.standard_exponential(self._shape(n))) / self.alpha)


def log_beta(a: Variable, b: Variable) -> Variable:
    """The logarithm of the beta function"""
    return F.lgamma(a) + F.lgamma(b) - F.lgamma(a + b)


def xlogy(a: Variable, x: Variable) -> Variable:
    """a log(x), and 0 where both are 0"""
    a, x = F.broadcast(a, x)
    is_void = (a.array == 0) & (x.array == 0)
    return a * F.log(F.where(is_void, get_array_module(x).ones_like(x.array), x))


def _on_host(p: Variable) -> Any:
    """A parameter as NumPy's generators take it."""
    a = p.array
    return np.asarray(a if isinstance(a, np.ndarray) else a.get(), np.float64)
