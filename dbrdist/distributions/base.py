"""What a distribution is, and divergences between two of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import dbrdist.functions as F
from dbrdist.core.array import backend, random
from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.types import Number
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.core.usage.mistakes import refuse

SampleShape = int | Sequence[int]


class Distribution:
    """A batch of probability distributions with Variables as parameters, differentiable in them.

    An element of a sample has the shape ``event_shape``; there are ``batch_shape`` distributions side by side.

    Example:
        >>> class Point(dbrdist.distribution.Distribution):
        ...     batch_shape = ()
        ...     params = {"at": dbrdist.as_variable(np.zeros(()))}
        ...     def log_prob(self, x):
        ...         return dbrdist.as_variable(np.where(np.asarray(x) == 0, 0.0, -np.inf))
        >>> Point().prob(0.0).array
        array(1.)
    """

    def _not_there(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not define {what}")

    @property
    def params(self) -> dict[str, Variable]:
        """The parameters by name."""
        raise self._not_there("params")

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of the distributions side by side."""
        raise self._not_there("batch_shape")

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The shape of one outcome."""
        return ()

    @property
    def xp(self) -> Any:
        """The array module of the parameters."""
        return backend.get_array_module(*self.params.values())

    @property
    def support(self) -> str:
        """Which outcomes have a density or probability above 0, in words."""
        raise self._not_there("support")

    @property
    def mean(self) -> Variable:
        """The mean of each distribution."""
        raise self._not_there("mean")

    @property
    def mode(self) -> Variable:
        """The outcome of the highest density or probability."""
        raise self._not_there("mode")

    @property
    def variance(self) -> Variable:
        """The variance of each distribution."""
        raise self._not_there("variance")

    @property
    def stddev(self) -> Variable:
        """The square root of the variance."""
        return F.sqrt(self.variance)

    @property
    def covariance(self) -> Variable:
        """The covariance of the components of an outcome."""
        raise self._not_there("covariance")

    @property
    def entropy(self) -> Variable:
        """The entropy in nats."""
        raise self._not_there("entropy")

    def log_prob(self, x: Operand | Number) -> Variable:
        """The logarithm of the density or probability at ``x`` (sample_shape + batch_shape + event_shape)."""
        raise self._not_there("log_prob")

    def prob(self, x: Operand | Number) -> Variable:
        """The density or probability at ``x``, shaped as for :meth:`log_prob`."""
        return F.exp(self.log_prob(x))

    def cdf(self, x: Operand | Number) -> Variable:
        """The probability of an outcome up to ``x``, which is broadcast against the parameters."""
        raise self._not_there("cdf")

    def log_cdf(self, x: Operand | Number) -> Variable:
        """The logarithm of :meth:`cdf` at ``x``."""
        with np.errstate(divide="ignore"):
            return F.log(self.cdf(x))

    def survival_function(self, x: Operand | Number) -> Variable:
        """The probability of an outcome above ``x``."""
        return 1.0 - self.cdf(x)

    def log_survival_function(self, x: Operand | Number) -> Variable:
        """The logarithm of :meth:`survival_function` at ``x``."""
        with np.errstate(divide="ignore"):
            return F.log(self.survival_function(x))

    def icdf(self, x: Operand | Number) -> Variable:
        """The outcome at which :meth:`cdf` is ``x``; NaN where ``x`` is outside [0, 1]."""
        raise self._not_there("icdf")

    def perplexity(self, x: Operand | Number) -> Variable:
        """exp(-log_prob(``x``))."""
        return F.exp(-self.log_prob(x))

    def sample(self, sample_shape: SampleShape = ()) -> Variable:
        """Independent outcomes: shape ``sample_shape + batch_shape + event_shape``."""
        shape = (sample_shape,) if isinstance(sample_shape, (int, np.integer)) else tuple(sample_shape)
        drawn = self.sample_n(prod(shape))
        return F.reshape(drawn, shape + drawn.shape[1:])

    def sample_n(self, n: int) -> Variable:
        """``n`` independent outcomes, along a new first axis. Draws come from ``dbrdist.random``."""
        raise self._not_there("sample_n")

    # ---- for the distributions themselves ---------------------------------------------------------------------------

    def _like(self) -> Variable:
        """The parameter whose type, shape and device outcomes follow."""
        return next(iter(self.params.values()))

    def _outcome(self, x: Any) -> Variable:
        """What is asked about as a Variable; numbers, lists and integers in the type of the parameters."""
        if not (isinstance(x, Variable) or backend.is_array(x)):
            x = self.xp.asarray(x, self._like().dtype)
        x = as_variable(x)
        return x if backend.is_floating(x.dtype) else F.cast(x, self._like().dtype)

    def _drawn(self, draw: Callable[[np.random.Generator], Array], dtype: DTypeLike | None = None) -> Variable:
        """What ``draw`` makes of a generator, on the device of the parameters and in their type or ``dtype``."""
        like = self._like()
        words = random.raw_words(1, 4)[0]
        a = np.asarray(draw(np.random.Generator(np.random.Philox(key=words[:2], counter=words))))
        return as_variable(backend.device_of(like.array).send(a.astype(like.dtype if dtype is None else dtype)))

    def _within(
        self, holds: Array, y: Variable, otherwise: float = -np.inf, x: Operand | Number | None = None
    ) -> Variable:
        """y where ``holds``, NaN where ``x`` is, else a constant; a gradient comes from y alone."""
        y, rest = as_variable(y), self.xp.asarray(otherwise)
        if x is not None:
            rest = self.xp.where(value_of(x) == value_of(x), rest, np.nan)
        return F.where(holds, y, rest.astype(y.dtype))

    def _quantile(
        self, x: Operand | Number, formula: Callable[[Variable], Variable], at_0: float | None = None,
        at_1: float | None = None,
    ) -> Variable:  # fmt: skip
        """``formula`` at the probabilities x, NaN where x is none, and these values where it has no finite one."""
        p = self._outcome(x)
        value = value_of(p)
        inside = (value >= 0) & (value <= 1)
        rest = self.xp.where(inside, 0.0, np.nan)
        for end, y in ((0, at_0), (1, at_1)):
            if y is not None:
                rest = self.xp.where(value == end, y, rest)
                inside = inside & (value != end)
        y = formula(F.where(inside, p, self.xp.full_like(p.array, 0.5)))
        inside, rest = (self.xp.broadcast_to(a, y.shape) for a in (inside, rest))
        return F.where(inside, y, rest.astype(y.dtype))


def log_1m_exp(y: Variable) -> Variable:
    """log(1 - exp(y)) for y below 0, accurate near 0 and for large -y."""
    xp = get_array_module(y)
    is_near = y.array > -math.log(2.0)
    with np.errstate(divide="ignore"):
        near = F.log(-F.expm1(F.where(is_near, y, xp.full_like(y.array, -1.0))))
    return F.where(is_near, near, F.log1p(-F.exp(F.where(is_near, xp.full_like(y.array, -1.0), y))))


def as_parameter(x: Any, dtype: DTypeLike = np.float32) -> Variable:
    """A parameter of a distribution as a Variable of a floating type; numbers, lists and integers in ``dtype``."""
    if not isinstance(x, Variable):
        x = x if backend.is_array(x) else np.asarray(x, None if hasattr(x, "dtype") else dtype)
        x = as_variable(x)
    return x if backend.is_floating(x.dtype) else F.cast(x, dtype)


def in_one_type(*xs: Operand | Number) -> list[Variable]:
    """Parameters of one distribution; what has no floating type of its own takes that of the others, or float32."""
    found = [x.dtype for x in xs if hasattr(x, "dtype") and backend.is_floating(x.dtype)]
    return [as_parameter(x, found[0] if found else np.float32) for x in xs]


def parameters(*xs: Any) -> list[Variable]:
    """Parameters of one distribution, broadcast against each other."""
    return list(F.broadcast(*in_one_type(*xs))) if len(xs) > 1 else [as_parameter(xs[0])]


def see_parameters(distribution: Distribution, highest: float = np.inf, **given: Variable) -> None:
    """Refuse parameters below 0 or, beyond rounding, above ``highest``; on a GPU nobody waits for a look."""
    for name, value in given.items():
        a = value_of(value)
        if isinstance(a, np.ndarray) and a.size and (a.min() < 0 or a.max() > highest * (1 + 1e-5)):
            words = "0 or more" if highest == np.inf else f"from 0 to {highest:g}"
            refuse(expected(type(distribution).__name__, name, words, f"numbers from {a.min()} to {a.max()}"))


def one_of(name: str, **given: Operand | Number | None) -> tuple[str, Any]:
    """The one parameter that was given of several, as (name, value)."""
    found = [(key, value) for key, value in given.items() if value is not None]
    if len(found) != 1:
        what = "both" if found else "none"
        raise ValueError(f"{name}: expected one of the arguments {' and '.join(given)}, got {what}")
    return found[0]


def value_of(x: Any) -> Array:
    """The array of a Variable, or x."""
    return as_array(x)


kept = functools.cached_property

_KL: dict[tuple[type, type], Callable[[Any, Any], Variable]] = {}


def register_kl(Dist1: type, Dist2: type) -> Callable[[Any], Any]:
    """Decorator: the function computes the Kullback-Leibler divergence of a ``Dist1`` from a ``Dist2``.

    Args:
        Dist1: the class of the first distribution; its subclasses are included.
        Dist2: the class of the second one.

    Example:
        >>> class Point(dbrdist.distribution.Distribution):
        ...     pass
        >>> @dbrdist.distribution.register_kl(Point, Point)
        ... def of_points(p, q):
        ...     return dbrdist.as_variable(np.zeros(()))
        >>> dbrdist.distribution.kl_divergence(Point(), Point()).array
        array(0.)
    """

    def register(function: Any) -> Any:
        _KL[Dist1, Dist2] = function
        return function

    return register


def kl_divergence(dist1: Distribution, dist2: Distribution) -> Variable:
    """The Kullback-Leibler divergence of the first distribution from the second, in nats (Kullback and Leibler 1951).

    It is the mean of log p1(x) - log p2(x) under the first.

    Args:
        dist1: the distribution of p1, over which the mean is taken.
        dist2: the distribution of p2.

    Returns:
        A Variable of their batch shape.

    Raises:
        NotImplementedError: no divergence of these two is known; see :func:`register_kl`.

    Example:
        >>> dbrdist.distribution.kl_divergence(D.Normal(2.0, 1.0), D.Normal(0.0, 1.0)).array
        array(2., dtype=float32)
    """
    for first in type(dist1).__mro__:
        for second in type(dist2).__mro__:
            if (first, second) in _KL:
                return _KL[first, second](dist1, dist2)
    raise NotImplementedError(
        f"kl_divergence: no divergence of {type(dist1).__name__} and {type(dist2).__name__} is known; "
        "register one with @dbrdist.distribution.register_kl"
    )


def cross_entropy(dist1: Distribution, dist2: Distribution) -> Variable:
    """The mean of -log p2(x) under the first distribution, in nats: its entropy and the divergence together.

    Args:
        dist1: the distribution over which the mean is taken.
        dist2: the distribution of p2.

    Returns:
        A Variable of their batch shape.

    Raises:
        NotImplementedError: no divergence of these two is known; see :func:`register_kl`.

    Example:
        >>> dbrdist.distribution.cross_entropy(D.Normal(0.0, 1.0), D.Normal(0.0, 1.0)).array.round(4)
        np.float32(1.4189)
    """
    return dist1.entropy + kl_divergence(dist1, dist2)


class UnivariateDistribution(Distribution):
    """One number per distribution."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self._like().shape

    def _shape(self, n: int) -> tuple[int, ...]:
        return (n, *self.batch_shape)


def log_beta(a: Variable, b: Variable) -> Variable:
    """The logarithm of the beta function"""
    return F.lgamma(a) + F.lgamma(b) - F.lgamma(a + b)


def xlogy(a: Variable, x: Variable) -> Variable:
    """a log(x), and 0 where both are 0"""
    a, x = F.broadcast(a, x)
    is_void = (a.array == 0) & (x.array == 0)
    return a * F.log(F.where(is_void, get_array_module(x).ones_like(x.array), x))


def on_host(p: Variable) -> Any:
    """A parameter as NumPy's generators take it."""
    a = p.array
    return np.asarray(a if isinstance(a, np.ndarray) else a.get(), np.float64)


def __getattr__(name: str) -> Any:
    if name == "Elementwise":  # as it was called once
        return UnivariateDistribution
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
