"""Discrete distributions (Johnson, Kemp and Kotz 2005)."""

from __future__ import annotations

from typing import Any

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array.backend import get_array_module
from dbrdist.core.array.types import Array, Number
from dbrdist.core.tape.variable import Operand, Variable, as_variable
from dbrdist.core.usage.mistakes import warn
from dbrdist.distributions.base import (
    Distribution,
    UnivariateDistribution,
    kept,
    on_host,
    one_of,
    parameters,
    register_kl,
    see_parameters,
    value_of,
    xlogy,
)


def _xlogx(p: Variable) -> Variable:
    """p log(p), and 0 where p is 0"""
    return xlogy(p, p)


def _xlog1my(a: Variable, p: Variable) -> Variable:
    """a log(1 - p), and 0 where a is 0 and p is 1"""
    a, p = F.broadcast(a, p)
    is_void = (a.array == 0) & (p.array == 1)
    return a * F.log1p(-F.where(is_void, get_array_module(p).zeros_like(p.array), p))


def _times(x: Variable, y: Variable) -> Variable:
    """x y, and 0 where x is 0 though y is infinite"""
    xp = get_array_module(y)
    is_void = (value_of(x) == 0) & xp.isinf(y.array)
    return x * F.where(is_void, xp.zeros_like(y.array), y)


class Bernoulli(UnivariateDistribution):
    """1 with probability p, else 0.

    Args:
        p: the probabilities of 1, from 0 to 1, any shape.
        logit: log(p / (1 - p)), instead of p.
        binary_check: True gives outcomes other than 0 and 1 the probability 0; False takes numbers between them as
            given, as in the cross entropy of pictures with grey values, and gives those beyond the probability 0.

    Raises:
        ValueError: not exactly one of p and logit is given, or a parameter on the host is out of range.

    Example:
        >>> d = D.Bernoulli(np.array([0.25]))
        >>> d.prob(np.array([1.0])).array, d.mean.array
        (array([0.25]), array([0.25]))
    """

    support = "{0, 1}"

    def __init__(
        self, p: Operand | Number | None = None, logit: Operand | Number | None = None, binary_check: bool = False
    ) -> None:
        name, value = one_of("Bernoulli", p=p, logit=logit)
        (value,) = parameters(value)
        if name == "p":
            see_parameters(self, highest=1.0, p=value)
        self._given = {name: value}
        self.binary_check = binary_check

    @kept
    def p(self) -> Variable:
        """The probability of 1."""
        return self._given["p"] if "p" in self._given else F.exp(-F.softplus(-self._given["logit"]))

    @kept
    def logit(self) -> Variable:
        """log(p / (1 - p))"""
        return self._given["logit"] if "logit" in self._given else F.log(self.p) - F.log1p(-self.p)

    @property
    def params(self) -> dict[str, Variable]:
        return dict(self._given)

    @property
    def mean(self) -> Variable:
        return self.p

    @property
    def mode(self) -> Variable:
        return as_variable((self.p.array >= 0.5).astype(self.p.dtype))

    @property
    def variance(self) -> Variable:
        return self.p * self._q

    @property
    def _q(self) -> Variable:
        """The probability of 0, exact also where that of 1 rounds to 1."""
        return 1.0 - self.p if "p" in self._given else F.exp(-F.softplus(self.logit))

    @property
    def entropy(self) -> Variable:
        return -self._mixed(self.p, self._q)

    def _mixed(self, x: Variable, y: Variable) -> Variable:
        """x log(p) + y log(1 - p), exact at both ends"""
        if "p" in self._given:
            return xlogy(x, self.p) + _xlog1my(y, self.p)
        return -(_times(x, F.softplus(-self.logit)) + _times(y, F.softplus(self.logit)))

    def log_prob(self, x: Operand | Number) -> Variable:
        x = self._outcome(x)
        inside = self._is_outcome(x)
        held = F.where(inside, x, self.xp.zeros_like(x.array))  # what is infinite would be added to its opposite
        return self._within(inside, self._mixed(held, 1.0 - held), x=x)

    def _is_outcome(self, x: Operand | Number) -> Array:
        values = value_of(x)
        return (values == 0) | (values == 1) if self.binary_check else (values >= 0) & (values <= 1)

    def prob(self, x: Operand | Number) -> Variable:
        x = self._outcome(x)
        inside = self._is_outcome(x)
        held = F.where(inside, x, self.xp.zeros_like(x.array))
        return self._within(inside, held * self.p + (1.0 - held) * (1.0 - self.p), 0.0, x)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.random(self._shape(n)) < on_host(self.p))


class Geometric(UnivariateDistribution):
    """The number of trials up to the first success: 1, 2, ...

    Args:
        p: the probability of success in each trial, from 0 to 1, any shape.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Geometric(0.5)
        >>> float(d.prob(2.0).array), float(d.mean.array)
        (0.25, 2.0)
    """

    support = "positive integer"

    def __init__(self, p: Operand | Number) -> None:
        (self.p,) = parameters(p)
        see_parameters(self, highest=1.0, p=self.p)

    @property
    def params(self) -> dict[str, Variable]:
        return {"p": self.p}

    @property
    def mean(self) -> Variable:
        return 1.0 / self.p

    @property
    def mode(self) -> Variable:
        return as_variable(self.xp.ones_like(self.p.array))

    @property
    def variance(self) -> Variable:
        return (1.0 - self.p) / F.square(self.p)

    @property
    def entropy(self) -> Variable:
        return -(_xlogx(self.p) + _xlog1my(1.0 - self.p, self.p)) / self.p

    def log_prob(self, x: Operand | Number) -> Variable:
        value = value_of(self._outcome(x))
        inside = (value >= 1) & (value < np.inf) & (value == self.xp.floor(value))
        failures = as_variable(self.xp.where(inside, value - 1, 0).astype(self.p.dtype))
        return self._within(inside, _xlog1my(failures, self.p) + F.log(self.p), x=value)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.geometric(on_host(self.p), self._shape(n)))


class Poisson(UnivariateDistribution):
    """The number of independent events: 0, 1, ...

    Args:
        lam: the expected numbers above 0, any shape.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.Poisson(2.0)
        >>> round(float(d.prob(0.0).array), 4), float(d.mean.array)
        (0.1353, 2.0)
    """

    support = "non negative integer"

    def __init__(self, lam: Operand | Number) -> None:
        (self.lam,) = parameters(lam)
        see_parameters(self, lam=self.lam)

    @property
    def params(self) -> dict[str, Variable]:
        return {"lam": self.lam}

    @property
    def mean(self) -> Variable:
        return self.lam

    @property
    def mode(self) -> Variable:
        return F.floor(self.lam)

    @property
    def variance(self) -> Variable:
        return self.lam

    def log_prob(self, x: Operand | Number) -> Variable:
        value = value_of(self._outcome(x))
        inside = (value >= 0) & (value < np.inf) & (value == self.xp.floor(value))
        count = as_variable(self.xp.where(inside, value, 0).astype(self.lam.dtype))
        return self._within(inside, xlogy(count, self.lam) - F.lgamma(count + 1.0) - self.lam, x=value)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: rng.poisson(on_host(self.lam), self._shape(n)))


_MOST_OFF = 0.02  # by which rounded probabilities, also of 16 bits, may miss 1


def _see_sums(name: str, p: Any) -> None:
    """Warn of probabilities of all categories that do not add up to 1; on a GPU nobody waits for a look."""
    if not isinstance(p, np.ndarray) or not p.size:
        return
    sums = p.sum(axis=-1, dtype=np.float64)
    if (abs(sums - 1) > _MOST_OFF).any():
        got = f"{sums.min():.4g}" if sums.min() == sums.max() else f"{sums.min():.4g} to {sums.max():.4g}"
        warn(f"{name}: p: the probabilities add up to {got} instead of 1; divide them by their sum, or give scores")


class Categorical(Distribution):
    """One of n categories: the number i with probability p[..., i].

    Args:
        p: the probabilities, the last axis over the categories.
        logit: scores whose softmax is p, instead of p.

    Raises:
        ValueError: p and logit are both given or both missing, or without an axis, or a parameter on the host is out of
            range.

    Example:
        >>> d = D.Categorical(np.array([0.25, 0.75]))
        >>> d.prob(np.array(1)).array
        array(0.75)
    """

    support = "{0, ..., n - 1}"

    def __init__(self, p: Operand | Number | None = None, *, logit: Operand | Number | None = None) -> None:
        name, value = one_of(type(self).__name__, p=p, logit=logit)
        (value,) = parameters(value)
        if not value.ndim:
            raise ValueError(f"{type(self).__name__}: {name}: expected at least one axis, the last over the categories")
        if name == "p":
            see_parameters(self, highest=1.0, p=value)
            _see_sums(type(self).__name__, value_of(value))
        self._given = {name: value}

    @kept
    def p(self) -> Variable:
        """The probabilities, over the last axis."""
        return self._given["p"] if "p" in self._given else F.softmax(self._given["logit"], axis=-1)

    @kept
    def log_p(self) -> Variable:
        """The logarithms of the probabilities."""
        return F.log(self._given["p"]) if "p" in self._given else F.log_softmax(self._given["logit"], axis=-1)

    @property
    def params(self) -> dict[str, Variable]:
        return dict(self._given)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._like().shape[:-1]

    @property
    def mode(self) -> Variable:
        return F.argmax(self.p, axis=-1)

    @property
    def entropy(self) -> Variable:
        return -F.sum(_xlogx(self.p), axis=-1)

    def log_prob(self, x: Operand | Number) -> Variable:
        xp = self.xp
        value = xp.asarray(value_of(x))
        table = self.p if "p" in self._given else self.log_p
        categories = table.shape[-1]
        inside = (value >= 0) & (value < categories) & (value == xp.floor(value))
        index = xp.where(inside, value, 0).astype(np.int64)
        shape = np.broadcast_shapes(index.shape, self.batch_shape)
        table = F.broadcast_to(table, (*shape, categories))
        index = xp.broadcast_to(index, shape)
        picked = table[(*(xp.arange(k).reshape([k if i == j else 1 for j in range(len(shape))])
                          for i, k in enumerate(shape)), index)]  # fmt: skip
        if "p" in self._given:  # the logarithm of what is asked for alone: that of others may be infinite
            picked = F.log(F.where(inside, picked, xp.ones_like(picked.array)))
        return self._within(inside, picked, x=value)

    def _draw(self, rng: np.random.Generator, n: int) -> Any:
        share = np.cumsum(on_host(self.p), axis=-1)
        height = rng.random((n, *self.batch_shape, 1)) * share[..., -1:]
        return (height >= share).sum(axis=-1)

    def sample_n(self, n: int) -> Variable:
        return self._drawn(lambda rng: self._draw(rng, n), np.int32)


class OneHotCategorical(Categorical):
    """One of n categories as a vector: a single 1 at the place i with probability p[..., i].

    Args:
        p: the probabilities, the last axis over the categories.

    Raises:
        ValueError: a parameter on the host is out of range.

    Example:
        >>> d = D.OneHotCategorical(np.array([0.25, 0.75]))
        >>> d.prob(np.array([0.0, 1.0])).array
        array(0.75)
    """

    support = "unit vectors"

    def __init__(self, p: Operand | Number) -> None:
        super().__init__(p)

    @property
    def event_shape(self) -> tuple[int, ...]:
        return self._like().shape[-1:]

    @property
    def mean(self) -> Variable:
        return self.p

    @property
    def mode(self) -> Variable:
        return as_variable(self._one_hot(self.p.array.argmax(axis=-1)))

    @property
    def variance(self) -> Variable:
        return self.p * (1.0 - self.p)

    def _one_hot(self, index: Any) -> Array:
        xp = self.xp
        return (index[..., None] == xp.arange(self.p.shape[-1])).astype(self.p.dtype)

    def log_prob(self, x: Operand | Number) -> Variable:
        value = value_of(self._outcome(x))
        is_unit = ((value == 0) | (value == 1)).all(axis=-1) & (value.sum(axis=-1) == 1)
        y = super().log_prob(value.argmax(axis=-1))
        return self._within(self.xp.broadcast_to(is_unit, y.shape), y, x=value.sum(axis=-1))

    def sample_n(self, n: int) -> Variable:
        return as_variable(self._one_hot(self._drawn(lambda rng: self._draw(rng, n), np.int32).array))


# ---- divergences ----------------------------------------------------------------------------------------------------


@register_kl(Bernoulli, Bernoulli)
def _kl_bernoulli(p: Bernoulli, q: Bernoulli) -> Variable:
    return -q._mixed(p.p, p._q) - p.entropy  # the cross entropy, less the entropy


@register_kl(Geometric, Geometric)
def _kl_geometric(p: Geometric, q: Geometric) -> Variable:
    failures = 1.0 / p.p - 1.0  # on average
    return _xlog1my(failures, p.p) - _xlog1my(failures, q.p) + F.log(p.p) - F.log(q.p)


@register_kl(Poisson, Poisson)
def _kl_poisson(p: Poisson, q: Poisson) -> Variable:
    return _xlogx(p.lam) - xlogy(p.lam, q.lam) - p.lam + q.lam


@register_kl(Categorical, Categorical)
def _kl_categorical(p: Categorical, q: Categorical) -> Variable:
    cross = xlogy(p.p, q.p) if "p" in q.params else _times(p.p, q.log_p)
    return F.sum(_xlogx(p.p) - cross, axis=-1)
