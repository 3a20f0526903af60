"""Distributions of vectors, and of several independent numbers taken as one outcome."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array.types import Number
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.distributions.base import (
    Distribution,
    as_parameter,
    in_one_type,
    kept,
    kl_divergence,
    on_host,
    register_kl,
    value_of,
    xlogy,
)

_FROM_ONE = 1e-2  # how far the sum of probabilities may be from 1, which rounded ones are


class Dirichlet(Distribution):
    """The Dirichlet distribution over probabilities x with sum 1, density prod x_i^(alpha_i - 1) / B(alpha).

    Samples carry no gradient.

    Args:
        alpha: the concentrations above 0, the last axis over the components.

    Raises:
        ValueError: alpha has no axis.

    Example:
        >>> d = D.Dirichlet(np.array([1.0, 3.0]))
        >>> d.mean.array
        array([0.25, 0.75])
    """

    support = "[0, 1]"

    def __init__(self, alpha: Operand | Number) -> None:
        self.alpha = as_parameter(alpha)
        if not self.alpha.ndim:
            raise ValueError("Dirichlet: alpha: expected at least one axis, the last over the components")

    @property
    def params(self) -> dict[str, Variable]:
        return {"alpha": self.alpha}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.alpha.shape[:-1]

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.alpha.shape[-1:]

    @property
    def alpha0(self) -> Variable:
        """The sum of alpha."""
        return F.sum(self.alpha, axis=-1)

    @property
    def mean(self) -> Variable:
        return self.alpha / F.expand_dims(self.alpha0, -1)

    @property
    def mode(self) -> Variable:
        excess = self.alpha - 1.0
        inside = (self.alpha.array > 1).all(axis=-1, keepdims=True)  # else it is at an end, or there is none
        return self._within(inside, excess / F.sum(excess, axis=-1, keepdims=True), np.nan)

    @property
    def variance(self) -> Variable:
        mean = self.mean
        return mean * (1.0 - mean) / (F.expand_dims(self.alpha0, -1) + 1.0)

    @property
    def entropy(self) -> Variable:
        total = self.alpha0
        sums = F.sum((self.alpha - 1.0) * F.digamma(self.alpha), axis=-1)
        return self._log_norm + (total - float(self.event_shape[0])) * F.digamma(total) - sums

    @property
    def _log_norm(self) -> Variable:
        return F.sum(F.lgamma(self.alpha), axis=-1) - F.lgamma(self.alpha0)

    def log_prob(self, x: Operand | Number) -> Variable:
        x = self._outcome(x)
        value = value_of(x)
        inside = ((value >= 0) & (value <= 1)).all(axis=-1) & (abs(value.sum(axis=-1) - 1) < _FROM_ONE)
        x = F.where(inside[..., None], x, self.xp.full_like(x.array, 0.5))
        y = F.sum(xlogy(self.alpha - 1.0, x), axis=-1) - self._log_norm
        return self._within(self.xp.broadcast_to(inside, y.shape), y, x=value.sum(axis=-1))

    def sample_n(self, n: int) -> Variable:
        def draw(rng: np.random.Generator) -> Any:
            alpha, shape = on_host(self.alpha), (n, *self.alpha.shape)
            # The logarithm of a gamma variable, of which that of a small alpha is often 0 in float64.
            log_g = np.log(rng.standard_gamma(alpha + 1.0, shape)) - rng.standard_exponential(shape) / alpha
            g = np.exp(log_g - log_g.max(axis=-1, keepdims=True))
            return g / g.sum(axis=-1, keepdims=True)

        return self._drawn(draw)


class MultivariateNormal(Distribution):
    """The normal distribution of vectors, N(loc, L L^T).

    Args:
        loc: the means, shape (..., K).
        scale_tril: the lower triangular matrices L, shape (..., K, K); what is above the diagonal does not count.

    Raises:
        ValueError: ``scale_tril`` is missing or does not match loc.

    Example:
        >>> d = D.MultivariateNormal(np.zeros(2), scale_tril=np.eye(2))
        >>> d.log_prob(np.zeros(2)).array.round(4)
        np.float64(-1.8379)
    """

    support = "real"

    def __init__(self, loc: Any, *, scale_tril: Any = None) -> None:
        if scale_tril is None:
            raise ValueError("MultivariateNormal: scale_tril: expected a lower triangular matrix, got None")
        self.loc, self.scale_tril = in_one_type(loc, scale_tril)
        k = self.loc.shape[-1] if self.loc.ndim else None
        if k is None or self.scale_tril.shape != (*self.loc.shape, k):
            raise ValueError(
                "MultivariateNormal: scale_tril: expected the shape of loc and one axis more of the same length, got "
                f"{self.scale_tril.shape} for loc of shape {self.loc.shape}"
            )

    @property
    def params(self) -> dict[str, Variable]:
        return {"loc": self.loc, "scale_tril": self.scale_tril}

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.loc.shape[:-1]

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self.loc.shape[-1:]

    @property
    def mean(self) -> Variable:
        return self.loc

    mode = mean

    @kept
    def _lower(self) -> Variable:
        """L with zeros above its diagonal, whatever stood there."""
        k = self.event_shape[0]
        return self.scale_tril * self.xp.tril(self.xp.ones((k, k), self.loc.dtype))

    @property
    def _log_det(self) -> Variable:
        """log det L"""
        return F.sum(F.log(F.absolute(F.diagonal(self.scale_tril, 0, -2, -1))), axis=-1)

    @property
    def covariance(self) -> Variable:
        return F.matmul(self._lower, F.swapaxes(self._lower, -2, -1))

    @property
    def variance(self) -> Variable:
        return F.sum(F.square(self._lower), axis=-1)

    @property
    def entropy(self) -> Variable:
        return self._log_det + 0.5 * self.event_shape[0] * (1.0 + math.log(2 * math.pi))

    @kept
    def _inverse(self) -> Variable:
        k = self.event_shape[0]
        return F.reshape(F.batch_inv(F.reshape(self._lower, (-1, k, k))), self.scale_tril.shape)

    def log_prob(self, x: Operand | Number) -> Variable:
        x = self._outcome(x)
        inside = ~self.xp.isinf(value_of(x)).any(axis=-1)
        x = F.where(inside[..., None], x, self.xp.zeros_like(x.array))
        z = F.sum(self._inverse * F.expand_dims(x - self.loc, -2), axis=-1)
        y = -0.5 * F.sum(F.square(z), axis=-1) - self._log_det - 0.5 * self.event_shape[0] * math.log(2 * math.pi)
        return self._within(self.xp.broadcast_to(inside, y.shape), y)

    def sample_n(self, n: int) -> Variable:
        z = self._drawn(lambda rng: rng.standard_normal((n, *self.loc.shape)))
        return self.loc + F.sum(self._lower * F.expand_dims(z, -2), axis=-1)


class Independent(Distribution):
    """A distribution whose last batch axes count as one outcome, with independent parts.

    Args:
        distribution: the distribution of the parts.
        reinterpreted_batch_ndims: how many of its last batch axes are one outcome; None takes all but the first.

    Raises:
        ValueError: the distribution has fewer batch axes.

    Example:
        >>> d = D.Independent(D.Normal(np.zeros((5, 3)), np.ones((5, 3))))
        >>> d.batch_shape, d.event_shape
        ((5,), (3,))
    """

    def __init__(self, distribution: Distribution, reinterpreted_batch_ndims: int | None = None) -> None:
        ndim = len(distribution.batch_shape)
        number = max(0, ndim - 1) if reinterpreted_batch_ndims is None else reinterpreted_batch_ndims
        if not 0 <= number <= ndim:
            raise ValueError(
                f"Independent: reinterpreted_batch_ndims: expected a number from 0 to {ndim}, the batch axes of the "
                f"distribution, got {number}"
            )
        self.distribution = distribution
        self.reinterpreted_batch_ndims = number

    @property
    def params(self) -> dict[str, Variable]:
        return self.distribution.params

    @property
    def batch_shape(self) -> tuple[int, ...]:
        shape = self.distribution.batch_shape
        return shape[: len(shape) - self.reinterpreted_batch_ndims]

    @property
    def event_shape(self) -> tuple[int, ...]:
        shape = self.distribution.batch_shape
        return shape[len(shape) - self.reinterpreted_batch_ndims :] + self.distribution.event_shape

    @property
    def support(self) -> str:
        return self.distribution.support

    @property
    def mean(self) -> Variable:
        return self.distribution.mean

    @property
    def mode(self) -> Variable:
        return self.distribution.mode

    @property
    def variance(self) -> Variable:
        return self.distribution.variance

    @property
    def stddev(self) -> Variable:
        return self.distribution.stddev

    @property
    def covariance(self) -> Variable:
        """The covariance within each part of an outcome, in blocks on a diagonal."""
        inner = self.distribution
        k, size = math.prod(inner.event_shape), math.prod(self.event_shape)
        parts = inner.covariance if inner.event_shape else inner.variance
        blocks = F.reshape(parts, (*self.batch_shape, size // max(k, 1), 1, k, k))
        apart = self.xp.eye(size // max(k, 1), dtype=blocks.dtype)[:, :, None, None]
        return F.reshape(F.swapaxes(blocks * apart, -3, -2), (*self.batch_shape, size, size))

    @property
    def entropy(self) -> Variable:
        return self._summed(self.distribution.entropy)

    def log_prob(self, x: Operand | Number) -> Variable:
        return self._summed(self.distribution.log_prob(x))

    def cdf(self, x: Operand | Number) -> Variable:
        return self._multiplied(self.distribution.cdf(x))

    def log_cdf(self, x: Operand | Number) -> Variable:
        return self._summed(self.distribution.log_cdf(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        """The probability of an outcome above ``x`` in all its parts."""
        return self._multiplied(self.distribution.survival_function(x))

    def log_survival_function(self, x: Operand | Number) -> Variable:
        return self._summed(self.distribution.log_survival_function(x))

    def icdf(self, x: Operand | Number) -> Variable:
        raise NotImplementedError("Independent: a vector of probabilities has no single inverse")

    def sample_n(self, n: int) -> Variable:
        return self.distribution.sample_n(n)

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-self.reinterpreted_batch_ndims, 0))

    def _summed(self, y: Variable) -> Variable:
        return F.sum(y, axis=self._axes()) if self._axes() else y

    def _multiplied(self, y: Variable) -> Variable:
        return F.prod(y, axis=self._axes()) if self._axes() else y


@register_kl(Dirichlet, Dirichlet)
def _kl_dirichlet(p: Dirichlet, q: Dirichlet) -> Variable:
    weights = F.digamma(p.alpha) - F.expand_dims(F.digamma(p.alpha0), -1)
    return q._log_norm - p._log_norm + F.sum((p.alpha - q.alpha) * weights, axis=-1)


@register_kl(MultivariateNormal, MultivariateNormal)
def _kl_multivariate_normal(p: MultivariateNormal, q: MultivariateNormal) -> Variable:
    between = F.matmul(q._inverse, p._lower)
    z = F.sum(q._inverse * F.expand_dims(p.loc - q.loc, -2), axis=-1)
    sums = F.sum(F.square(between), axis=(-2, -1)) + F.sum(F.square(z), axis=-1)
    return q._log_det - p._log_det + 0.5 * (sums - float(p.event_shape[0]))


@register_kl(Independent, Independent)
def _kl_independent(p: Independent, q: Independent) -> Variable:
    if p.reinterpreted_batch_ndims != q.reinterpreted_batch_ndims:
        raise ValueError(
            "kl_divergence: expected two Independent with the same reinterpreted_batch_ndims, got "
            f"{p.reinterpreted_batch_ndims} and {q.reinterpreted_batch_ndims}"
        )
    return p._summed(kl_divergence(p.distribution, q.distribution))
