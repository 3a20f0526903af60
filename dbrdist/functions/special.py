"""Special functions: those of error and of the normal distribution, and those of gamma.

SciPy computes them (CuPy on a GPU); ``erf``, ``erfc`` and ``ndtr`` run without SciPy too, one number at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, is_array
from dbrdist.core.array.scipy_parts import special_function
from dbrdist.core.array.types import Number
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import Operands, expected
from dbrdist.core.tape.elementwise_table import from_kernel, function, row
from dbrdist.core.tape.variable import Operand, Variable, as_array


def _scipy(name: str) -> Callable[..., Array]:
    """The formula of a row: a function of SciPy, which is loaded at the first call."""

    def formula(*xs: Array | Number) -> Array:
        return special_function(name, get_array_module(*xs).__name__)(*xs)

    return formula


def _bell(x: Operand, height: float, rate: float) -> Operand:
    """height exp(rate x^2)"""
    return ops.mul(ops.exp(ops.mul(ops.mul(x, x), rate)), height)


def normal_density(x: Operand) -> Operand | Number:
    """exp(-x^2 / 2) / sqrt(2 pi)"""
    return _bell(x, 1 / math.sqrt(2 * math.pi), -0.5)


# ---- error functions ------------------------------------------------------------------------------------------------

_SLOPE = 2 / math.sqrt(math.pi)  # of erf at 0

erf = function(
    "erf", _scipy("erf"), lambda x: _bell(x, _SLOPE, -1.0),
    "Error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to x, elementwise.", has_steps=True,
)  # fmt: skip
erfc = function(
    "erfc", _scipy("erfc"), lambda x: _bell(x, -_SLOPE, -1.0),
    "1 - erf(x), accurate where that is near 0, elementwise.", has_steps=True,
)  # fmt: skip
erfcx = function(
    "erfcx", _scipy("erfcx"), lambda x, y: ops.sub(ops.mul(ops.mul(x, y), 2.0), _SLOPE),
    "exp(x^2) erfc(x), which neither overflows nor vanishes for large x, elementwise; needs SciPy.", has_steps=True,
)  # fmt: skip
erfinv = function(
    "erfinv", _scipy("erfinv"), lambda y: _bell(y, 1 / _SLOPE, 1.0),
    "The inverse of erf, for -1 <= x <= 1, elementwise; needs SciPy.", domain=(-0.7, 0.7), has_steps=True,
)  # fmt: skip
erfcinv = function(
    "erfcinv", _scipy("erfcinv"), lambda y: _bell(y, -1 / _SLOPE, 1.0),
    "The inverse of erfc, for 0 <= x <= 2, elementwise; needs SciPy.", domain=(0.3, 1.7), has_steps=True,
)  # fmt: skip

# ---- the normal distribution ----------------------------------------------------------------------------------------

ndtr = function(
    "ndtr",
    lambda x: _scipy("erfc")(x * -math.sqrt(0.5)) * 0.5,
    lambda x: normal_density(x),
    "The probability that a standard normal number is at most x, elementwise.",
)
ndtri = function(
    "ndtri", _scipy("ndtri"), lambda y: _bell(y, math.sqrt(2 * math.pi), 0.5),
    "The inverse of ndtr, for 0 <= x <= 1, elementwise; needs SciPy.", domain=(0.1, 0.9), has_steps=True,
)  # fmt: skip
log_ndtr = function(
    "log_ndtr", _scipy("log_ndtr"), lambda x: _hazard(x),
    "ln ndtr(x), accurate where ndtr(x) is near 0, elementwise; needs SciPy.", has_steps=True,
)  # fmt: skip
_hazard: Any = row(
    "hazard",
    lambda x: math.sqrt(2 / math.pi) / _scipy("erfcx")(x * -math.sqrt(0.5)),
    lambda x, y: ops.neg(ops.mul(y, ops.add(x, y))),
    "The normal density divided by ndtr(x): the derivative of ln ndtr(x).",
)

# ---- gamma ----------------------------------------------------------------------------------------------------------

lgamma = function(
    "lgamma", _scipy("gammaln"), lambda x: digamma.primitive(x),
    "ln |gamma(x)|, elementwise; needs SciPy.", domain=(0.5, 2.0), has_steps=True,
)  # fmt: skip
digamma = function(
    "digamma", _scipy("digamma"), lambda x: _polygamma(_beside(x, 1.0), x),
    "The derivative of lgamma, elementwise; needs SciPy.", domain=(0.5, 2.0), has_steps=True,
)  # fmt: skip
_polygamma: Any = row(
    "polygamma",
    lambda n, x: _polygamma_of(n, x),
    None,
    lambda gy, n, x: ops.mul(gy, _polygamma(ops.add(n, 1.0), x)),
    "The n-th derivative of digamma.",
    args="n x",
    kind="number",
    domain=((1.0, 3.0), (0.5, 2.0)),
)
_zeta: Any = row(
    "zeta",
    _scipy("zeta"),
    None,
    lambda gy, x, q: ops.neg(ops.mul(gy, ops.mul(x, _zeta(ops.add(x, 1.0), q)))),
    "The sum of (k + q)^-x over k = 0, 1, 2, ...",
    args="x q",
    kind="number",
    domain=((1.5, 3.0), (0.5, 2.0)),
)


def _polygamma_of(n: Array, x: Array) -> Array:
    """-(-1)^n n! zeta(n + 1, x), digamma where n = 0"""
    sign = n % 2 * 2 - 1
    if isinstance(n, (np.ndarray, np.generic)) and n.size == 1 and n != 0:  # nearly always: x may have many elements
        is_first = n == 1 and type(x) is np.ndarray and x.dtype == np.float32
        lone = (x, np.broadcast_to(np.float32(1), x.shape)) if is_first else ()
        y = from_kernel(("digamma", 0), ("x", "gy"), lone, ()) if lone else None
        return y if y is not None else sign * _scipy("gamma")(n + 1) * _scipy("zeta")(n + 1, x)
    return ops.where(n == 0, _scipy("digamma")(x), sign * _scipy("gamma")(n + 1) * _scipy("zeta")(n + 1, x))


_ORDER_AND_X = Operands("polygamma", n="number", x="float")
_X_AND_Q = Operands("zeta", x="number", q="float")


def _beside(x: Operand, n: Array | Number) -> Any:
    """An array as it is, a number as an array where x lies: on a GPU, rules of every order want it there."""
    return n if is_array(n) else get_array_module(x).asarray(n, x.dtype)


def polygamma(n: Any, x: Operand) -> Variable:
    """The n-th derivative of digamma, elementwise, with broadcasting. It needs SciPy.

    Args:
        n: integers from 0; take no gradient.
        x: array or Variable of a floating type.

    Raises:
        ValueError: n has numbers that are no integers from 0.

    Example:
        >>> F.polygamma(1, np.array([1.0])).array.round(4)
        array([1.6449])
    """
    _ORDER_AND_X.check(0, n)
    _ORDER_AND_X.check(1, x)
    n = as_array(n)
    is_on_host = isinstance(n, (int, float, np.ndarray, np.generic))  # a look at a GPU would wait for it
    if is_on_host and not np.all((np.asarray(n) >= 0) & (np.mod(n, 1) == 0)):
        raise expected("polygamma", "n", "integers from 0", n)
    return _polygamma.row.applied((_beside(x, n), x))


def zeta(x: Any, q: Operand) -> Variable:
    """Hurwitz's zeta function, the sum of (k + q)^-x over k = 0, 1, 2, ..., elementwise, with broadcasting.

    It needs SciPy.

    Args:
        x: exponents above 1; take no gradient.
        q: offsets above 0.

    Example:
        >>> F.zeta(2.0, np.array([1.0])).array.round(4)
        array([1.6449])
    """
    _X_AND_Q.check(0, x)
    _X_AND_Q.check(1, q)
    return _zeta.row.applied((_beside(q, as_array(x)), q))
