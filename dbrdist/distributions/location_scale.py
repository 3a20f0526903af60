"""Distributions over the whole line, and LogNormal: with location and scale, densities as in Johnson et al. (1994)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array.types import Number
from dbrdist.core.array.user_line import warn_user
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.distributions.base import (
    UnivariateDistribution,
    kept,
    log_1m_exp,
    one_of,
    parameters,
    see_parameters,
    value_of,
)

if TYPE_CHECKING:
    from dbrdist.core.array.types import Array

_EULER = float(np.euler_gamma)
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class _LocationScale(UnivariateDistribution):
    """loc + scale z, where z has the standard form of the family."""

    support = "real"

    def __init__(self, loc: Operand | Number, scale: Operand | Number) -> None:
        self.loc, self.scale = parameters(loc, scale)
        see_parameters(self, scale=self.scale)

    @property
    def params(self) -> dict[str, Variable]:
        return {"loc": self.loc, "scale": self.scale}

    def _standard(self, x: Operand | Number) -> Variable:
        return (self._outcome(x) - self.loc) / self.scale

    def sample_n(self, n: int) -> Variable:
        return self.loc + self.scale * self._drawn(lambda rng: self._draw(rng, self._shape(n)))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        raise self._not_there("sample_n")


class Normal(_LocationScale):
    """The normal distribution N(loc, scale^2).

    Args:
        loc: the means, any shape.
        scale: the standard deviations above 0; broadcasts against loc.
        log_scale: the logarithms of the standard deviations, instead of ``scale``.

    Raises:
        ValueError: not exactly one of ``scale`` and ``log_scale`` is given, or a parameter on the host is out of range.

    Example:
        >>> d = D.Normal(np.zeros(2), np.array([1.0, 2.0]))
        >>> d.log_prob(np.zeros(2)).array.round(4), d.variance.array
        (array([-0.9189, -1.6121]), array([1., 4.]))
    """

    def __init__(
        self, loc: Operand | Number, scale: Operand | Number | None = None, *, log_scale: Operand | Number | None = None
    ) -> None:
        name, value = one_of("Normal", scale=scale, log_scale=log_scale)
        loc, value = parameters(loc, value)
        self.loc = loc
        self.scale = value if name == "scale" else F.exp(value)
        if name == "scale":
            see_parameters(self, scale=value)
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

    def log_prob(self, x: Operand | Number) -> Variable:
        return -0.5 * F.square(self._standard(x)) - self.log_scale - _HALF_LOG_2PI

    def cdf(self, x: Operand | Number) -> Variable:
        return F.ndtr(self._standard(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return F.log_ndtr(self._standard(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return F.ndtr(-self._standard(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return F.log_ndtr(-self._standard(x))

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: self.loc + self.scale * F.ndtri(p), -np.inf, np.inf)

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(shape)


class Laplace(_LocationScale):
    """The Laplace distribution with density exp(-|x - loc| / scale) / (2 scale).

    Args:
        loc: the locations, any shape.
        scale: the scales above 0; loc and scale broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Laplace(0.0, 1.0)
        >>> float(d.prob(0.0).array), float(d.variance.array)
        (0.5, 2.0)
    """

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

    def log_prob(self, x: Operand | Number) -> Variable:
        return -F.absolute(self._standard(x)) - F.log(2.0 * self.scale)

    def cdf(self, x: Operand | Number) -> Variable:
        return self._below(self._standard(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return self._log_below(self._standard(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return self._below(-self._standard(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return self._log_below(-self._standard(x))

    def _below(self, z: Variable) -> Variable:
        is_low = value_of(z) < 0
        tail = 0.5 * F.exp(F.where(is_low, z, -z))
        return F.where(is_low, tail, 1.0 - tail)

    def _log_below(self, z: Variable) -> Variable:
        is_low = value_of(z) < 0
        reach = F.where(is_low, z, -z)  # no absolute value: its slope at 0 is 0
        return F.where(is_low, reach - math.log(2.0), F.log1p(-0.5 * F.exp(reach)))

    def icdf(self, x: Operand | Number) -> Variable:
        def standard(p: Variable) -> Variable:
            is_low = value_of(p) < 0.5
            tail = F.log(2.0 * F.where(is_low, p, 1.0 - p))
            return self.loc + self.scale * F.where(is_low, tail, -tail)

        return self._quantile(x, standard, -np.inf, np.inf)

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.laplace(size=shape)


class Cauchy(_LocationScale):
    """The Cauchy distribution with density 1 / (pi scale (1 + z^2)), z = (x - loc) / scale.

    Mean and variance do not exist: they are NaN, with a RuntimeWarning.

    Args:
        loc: the locations, any shape.
        scale: the scales above 0; loc and scale broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Cauchy(0.0, 1.0)
        >>> round(float(d.prob(0.0).array), 4)
        0.3183
    """

    @property
    def mean(self) -> Variable:
        return self._undefined("mean")

    @property
    def variance(self) -> Variable:
        return self._undefined("variance")

    def _undefined(self, what: str) -> Variable:
        warn_user(f"the {what} of the Cauchy distribution is undefined: NaN", RuntimeWarning)
        return as_variable(self.xp.full_like(self.loc.array, np.nan))

    @property
    def mode(self) -> Variable:
        return self.loc

    @property
    def entropy(self) -> Variable:
        return F.log(4 * math.pi * self.scale)

    def log_prob(self, x: Operand | Number) -> Variable:
        z = self._standard(x)
        is_far = abs(value_of(z)) > 1  # whose square may be more than the type holds
        near, far = (F.where(is_far == holds, z, self.xp.ones_like(z.array)) for holds in (False, True))
        beyond = 2.0 * F.log(F.absolute(far)) + F.log1p(F.square(1.0 / far))
        return -F.where(is_far, beyond, F.log1p(F.square(near))) - F.log(math.pi * self.scale)

    def cdf(self, x: Operand | Number) -> Variable:
        return self._below(self._standard(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return self._below(-self._standard(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return self._log_below(self._standard(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return self._log_below(-self._standard(x))

    def _log_below(self, z: Variable) -> Variable:
        is_low = value_of(z) < 0
        with np.errstate(divide="ignore"):
            low = F.log(self._below(F.where(is_low, z, -z)))
            return F.where(is_low, low, F.log1p(-self._below(F.where(is_low, z, -z))))

    def _below(self, z: Variable) -> Variable:
        return F.arctan2(self.xp.ones_like(z.array), -z) / math.pi  # arctan(z) / pi + 1/2, exact in the tail

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: self.loc + self.scale * self._standard_quantile(p), -np.inf, np.inf)

    def _standard_quantile(self, p: Variable) -> Variable:
        """tan(pi (p - 1/2)): near an end as the cotangent of the angle to it, of which more digits are known."""
        value = value_of(p)
        is_low, is_high = value < 0.25, value > 0.75
        inner = self.xp.full_like(p.array, 0.5)
        middle = F.tan(math.pi * (F.where(is_low | is_high, inner, p) - 0.5))
        tail = 1.0 / F.tan(math.pi * F.where(is_low, p, F.where(is_high, 1.0 - p, inner * 0.5)))
        return F.where(is_low, -tail, F.where(is_high, tail, middle))

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.standard_cauchy(shape)


class Gumbel(_LocationScale):
    """The Gumbel distribution with density exp(-z - exp(-z)) / scale, z = (x - loc) / scale: the largest of many.

    Args:
        loc: the locations, any shape.
        scale: the scales above 0; loc and scale broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Gumbel(0.0, 1.0)
        >>> round(float(d.mean.array), 4)
        0.5772
    """

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

    def log_prob(self, x: Operand | Number) -> Variable:
        z = self._standard(x)
        inside = value_of(z) > -np.inf
        z = F.where(inside, z, self.xp.ones_like(z.array))
        with np.errstate(over="ignore"):
            return self._within(inside, -(z + F.exp(-z)) - F.log(self.scale), x=self._outcome(x))

    def cdf(self, x: Operand | Number) -> Variable:
        return F.exp(self.log_cdf(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return -F.exp(-self._standard(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        return -F.expm1(self.log_cdf(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        z = self._standard(x)
        far = F.maximum(z, self.xp.full_like(z.array, 15.0))  # ln(1 - exp(-u)) = ln u - u / 2 + ..., u = exp(-z)
        near = log_1m_exp(-F.exp(-F.minimum(z, self.xp.full_like(z.array, 15.0))))
        return F.where(value_of(z) > 15, -far - F.exp(-far) * 0.5, near)

    def icdf(self, x: Operand | Number) -> Variable:
        return self._quantile(x, lambda p: self.loc - self.scale * F.log(-F.log(p)), -np.inf, np.inf)

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return rng.gumbel(size=shape)


class LogNormal(UnivariateDistribution):
    """The distribution of exp(y) for a normal y.

    Args:
        mu: the means of y, any shape.
        sigma: the standard deviations of y, above 0; mu and sigma broadcast against each other.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.LogNormal(0.0, 1.0)
        >>> round(float(d.mean.array), 4)
        1.6487
    """

    support = "positive"

    def __init__(self, mu: Operand | Number, sigma: Operand | Number) -> None:
        self.mu, self.sigma = parameters(mu, sigma)
        see_parameters(self, sigma=self.sigma)

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

    def log_prob(self, x: Operand | Number) -> Variable:
        return self._at_log(lambda log_x: self._normal.log_prob(log_x) - log_x, x, -np.inf)

    def cdf(self, x: Operand | Number) -> Variable:
        return self._at_log(self._normal.cdf, x, 0.0)

    def log_cdf(self, x: Operand | Number) -> Variable:
        return self._at_log(self._normal.log_cdf, x, -np.inf)

    def survival_function(self, x: Operand | Number) -> Variable:
        return self._at_log(self._normal.survival_function, x, 1.0)

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return self._at_log(self._normal.log_survival_function, x, 0.0)

    def _at_log(self, function: Callable[[Variable], Variable], x: Operand | Number, otherwise: float) -> Variable:
        """``function`` at log(x), ``otherwise`` where x is not above 0."""
        x = self._outcome(x)
        inside = value_of(x) > 0
        return self._within(inside, function(F.log(F.where(inside, x, self.xp.ones_like(x.array)))), otherwise, x)

    def icdf(self, x: Operand | Number) -> Variable:
        return F.exp(self._normal.icdf(x))

    def sample_n(self, n: int) -> Variable:
        return F.exp(self._normal.sample_n(n))
