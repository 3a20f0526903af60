"""Continuous distributions over intervals, with their densities as in Johnson, Kotz and Balakrishnan (1994, 1995)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array.types import Number
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import refuse
from dbrdist.distributions.base import (
    UnivariateDistribution,
    log_1m_exp,
    log_beta,
    on_host,
    parameters,
    see_parameters,
    value_of,
    xlogy,
)

# Pickles made before these had a file of their own name them here.
from dbrdist.distributions.location_scale import Cauchy as Cauchy
from dbrdist.distributions.location_scale import Gumbel as Gumbel
from dbrdist.distributions.location_scale import Laplace as Laplace
from dbrdist.distributions.location_scale import LogNormal as LogNormal
from dbrdist.distributions.location_scale import Normal as Normal

_EULER = float(np.euler_gamma)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Uniform(UnivariateDistribution):
    """Equal density from ``low`` to ``high``, or from ``loc`` to ``loc + scale``.

    Args:
        loc: lower bounds, together with ``scale``.
        scale: widths of the intervals.
        low: lower bounds, together with ``high``.
        high: upper bounds. The two that are given broadcast against each other.

    Raises:
        ValueError: neither low and high nor loc and scale are given, or more than one pair.

    Example:
        >>> d = D.Uniform(low=0.0, high=4.0)
        >>> float(d.prob(1.0).array), float(d.mean.array)
        (0.25, 2.0)
    """

    def __init__(
        self,
        *,
        loc: Operand | Number | None = None,
        scale: Operand | Number | None = None,
        low: Operand | Number | None = None,
        high: Operand | Number | None = None,
    ) -> None:
        by_ends = low is not None and high is not None and loc is None and scale is None
        by_scale = loc is not None and scale is not None and low is None and high is None
        if not (by_ends or by_scale):
            raise ValueError("Uniform: expected the arguments low and high, or loc and scale")
        if by_ends:
            self.low, self.high = parameters(low, high)
            self.loc, self.scale = self.low, self.high - self.low
            width = value_of(self.scale)
            if isinstance(width, np.ndarray) and bool((width < 0).any()):  # on a GPU nobody waits for a look
                refuse(ValueError(f"Uniform: expected low <= high, got {low!r} and {high!r}"))
        else:
            self.loc, self.scale = parameters(loc, scale)
            see_parameters(self, scale=self.scale)
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

    def log_prob(self, x: Operand | Number) -> Variable:
        value = value_of(self._outcome(x))
        inside = (value >= self.low.array) & (value <= self.high.array)
        return self._within(inside, F.broadcast_to(-F.log(self.scale), inside.shape), x=value)

    def cdf(self, x: Operand | Number) -> Variable:
        return F.clip((self._outcome(x) - self.low) / self.scale, 0.0, 1.0)

    def survival_function(self, x: Operand | Number) -> Variable:
        return F.clip((self.high - self._outcome(x)) / self.scale, 0.0, 1.0)

    def log_cdf(self, x: Operand | Number) -> Variable:
        return self._log_of_share(self.cdf(x), self.survival_function(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return self._log_of_share(self.survival_function(x), self.cdf(x))

    def _log_of_share(self, share: Variable, rest: Variable) -> Variable:
        """log(share), where share + rest = 1, from the smaller of both."""
        is_small = value_of(share) < 0.5
        half = self.xp.full_like(share.array, 0.5)
        with np.errstate(divide="ignore"):
            return F.where(is_small, F.log(F.where(is_small, share, half)), F.log1p(-F.where(is_small, half, rest)))

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: self.low + self.scale * p)

    def sample_n(self, n: int) -> Variable:
        return self.low + self.scale * self._drawn(lambda rng: rng.random(self._shape(n)))


class _Positive(UnivariateDistribution):
    """Outcomes above 0."""

    support = "positive"

    def log_prob(self, x: Operand | Number) -> Variable:
        x = self._outcome(x)
        inside = (value_of(x) >= 0) & (value_of(x) < np.inf)
        return self._within(inside, self._log_density(F.where(inside, x, self.xp.ones_like(x.array))), x=x)

    def _log_density(self, x: Variable) -> Variable:
        raise self._not_there("log_prob")


class Exponential(_Positive):
    """The exponential distribution with density lam exp(-lam x) for x >= 0.

    Args:
        lam: the rates above 0, any shape.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Exponential(2.0)
        >>> float(d.mean.array), float(d.variance.array)
        (0.5, 0.25)
    """

    def __init__(self, lam: Operand | Number) -> None:
        (self.lam,) = parameters(lam)
        see_parameters(self, lam=self.lam)

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

    def _log_density(self, x: Variable) -> Variable:
        return F.log(self.lam) - self.lam * x

    def cdf(self, x: Operand | Number) -> Variable:
        return -F.expm1(self.log_survival_function(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return log_1m_exp(self.log_survival_function(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return F.exp(self.log_survival_function(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return -self.lam * F.relu(self._outcome(x))

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: -F.log1p(-p) / self.lam, at_1=np.inf)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.standard_exponential(self._shape(n))) / self.lam


class Gamma(_Positive):
    """The gamma distribution with density x^(k - 1) exp(-x / theta) / (Gamma(k) theta^k).

    Samples carry no gradient to k.

    Args:
        k: the shapes above 0.
        theta: the scales above 0; k and theta broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Gamma(2.0, 3.0)
        >>> float(d.mean.array), float(d.variance.array)
        (6.0, 18.0)
    """

    def __init__(self, k: Operand | Number, theta: Operand | Number) -> None:
        self.k, self.theta = parameters(k, theta)
        see_parameters(self, k=self.k, theta=self.theta)

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
        return self.theta * self._drawn(lambda rng: rng.standard_gamma(on_host(self.k), self._shape(n)))


class Chisquare(_Positive):
    """The distribution of the sum of the squares of k standard normal numbers.

    Args:
        k: the degrees of freedom above 0, any shape.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Chisquare(3.0)
        >>> float(d.mean.array), float(d.variance.array)
        (3.0, 6.0)
    """

    def __init__(self, k: Operand | Number) -> None:
        (self.k,) = parameters(k)
        see_parameters(self, k=self.k)

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
        return self._drawn(lambda rng: rng.chisquare(on_host(self.k), self._shape(n)))


class Beta(UnivariateDistribution):
    """The beta distribution with density x^(a - 1) (1 - x)^(b - 1) / B(a, b) on [0, 1].

    Samples carry no gradient.

    Args:
        a, b: the two shapes above 0, which broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Beta(2.0, 2.0)
        >>> float(d.mean.array), round(float(d.prob(0.5).array), 4)
        (0.5, 1.5)
    """

    support = "[0, 1]"

    def __init__(self, a: Operand | Number, b: Operand | Number) -> None:
        self.a, self.b = parameters(a, b)
        see_parameters(self, a=self.a, b=self.b)

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

    def log_prob(self, x: Operand | Number) -> Variable:
        given = self._outcome(x)
        inside = (value_of(given) >= 0) & (value_of(given) <= 1)
        x = F.where(inside, given, self.xp.full_like(given.array, 0.5))
        density = xlogy(self.a - 1.0, x) + xlogy(self.b - 1.0, 1.0 - x)
        return self._within(inside, density - log_beta(self.a, self.b), x=given)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.beta(on_host(self.a), on_host(self.b), self._shape(n)))


class Pareto(UnivariateDistribution):
    """The Pareto distribution with density alpha scale^alpha / x^(alpha + 1) for x >= scale.

    Args:
        scale: the lower bounds, above 0.
        alpha: the exponents above 0; both broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Pareto(1.0, 3.0)
        >>> float(d.mean.array)
        1.5
    """

    support = "[scale, inf]"

    def __init__(self, scale: Operand | Number, alpha: Operand | Number) -> None:
        self.scale, self.alpha = parameters(scale, alpha)
        see_parameters(self, scale=self.scale, alpha=self.alpha)

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

    def log_prob(self, x: Operand | Number) -> Variable:
        inside, seen = self._seen(x)
        density = F.log(self.alpha) + self.alpha * F.log(self.scale) - (self.alpha + 1.0) * F.log(seen)
        return self._within(inside, density, x=self._outcome(x))

    def cdf(self, x: Operand | Number) -> Variable:
        return -F.expm1(self.log_survival_function(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return log_1m_exp(self.log_survival_function(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return F.exp(self.log_survival_function(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        inside, seen = self._seen(x)
        return self._within(inside, self.alpha * (F.log(self.scale) - F.log(seen)), 0.0, self._outcome(x))

    def _seen(self, x: Operand | Number) -> tuple[Any, Variable]:
        """Which outcomes are possible, and x with ``scale`` for those that are not."""
        x = self._outcome(x)
        inside = value_of(x) >= self.scale.array
        return inside, F.where(inside, x, F.broadcast_to(self.scale, inside.shape))

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: self.scale * F.exp(-F.log1p(-p) / self.alpha), at_1=np.inf)

    def sample_n(self, n: int) -> Variable:
        return self.scale * F.exp(self._drawn(lambda rng: rng.standard_exponential(self._shape(n))) / self.alpha)
