"""Arithmetic, elementary functions and reductions.

Elementwise functions are rows: formula, partial derivatives, docstring (``core.rows``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.array_operations import row_starts
from dbrdist.core.array.backend import Array, accumulation_dtype, is_array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.observed import observed, observed_index
from dbrdist.core.array.sums import logarithm as logarithm
from dbrdist.core.array.sums import wide_sum, with_all_digits
from dbrdist.core.array.types import Number
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating, wrong_shape, wrong_type
from dbrdist.core.tape.elementwise_table import function, public, row, together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.extremum import Extremum
from dbrdist.functions.products import WeightedMean
from dbrdist.functions.products import batch_matmul as batch_matmul
from dbrdist.functions.products import matmul as matmul
from dbrdist.functions.products import tensordot as tensordot

# ---- elementary functions -------------------------------------------------------------------------------------------

sin = function("sin", np.sin, lambda x: cos.primitive(x), "Sine, elementwise.")
cos = function("cos", np.cos, lambda gy, x: ops.neg(ops.mul(gy, sin.primitive(x))), "Cosine, elementwise.")
tan = function("tan", np.tan, lambda y: ops.add(ops.mul(y, y), 1.0), "Tangent, elementwise.", has_steps=True)
sinh = function("sinh", np.sinh, lambda x: cosh.primitive(x), "Hyperbolic sine, elementwise.")
cosh = function("cosh", np.cosh, lambda x: sinh.primitive(x), "Hyperbolic cosine, elementwise.")


def _one_minus_square(x: Any) -> Any:
    """1 - x^2, accurate where x is near 1."""
    return ops.mul(ops.sub(1.0, x), ops.add(1.0, x))


arcsin = function(
    "arcsin", np.arcsin, lambda gy, x: ops.div(gy, ops.sqrt(_one_minus_square(x))),
    "Inverse sine, elementwise, for -1 <= x <= 1.", domain=(-0.7, 0.7), has_steps=True,
)  # fmt: skip
arccos = function(
    "arccos", np.arccos, lambda gy, x: ops.neg(ops.div(gy, ops.sqrt(_one_minus_square(x)))),
    "Inverse cosine, elementwise, for -1 <= x <= 1.", domain=(-0.7, 0.7), has_steps=True,
)  # fmt: skip
arctan = function(
    "arctan",
    np.arctan,
    lambda gy, x: ops.div(gy, ops.add(ops.mul(x, x), 1.0)),
    "Inverse tangent, elementwise.",
    has_steps=True,
)
arctan2 = function(
    "arctan2",
    np.arctan2,
    lambda gy, x1, x2: ops.div(ops.mul(gy, x2), ops.add(ops.mul(x1, x1), ops.mul(x2, x2))),
    lambda gy, x1, x2: ops.neg(ops.div(ops.mul(gy, x1), ops.add(ops.mul(x1, x1), ops.mul(x2, x2)))),
    "The angle of the point (x2, x1) in radians, from -pi to pi, elementwise.",
    args="x1 x2",
    domain=(0.5, 2.0),
    has_steps=True,
)
arctanh = function(
    "arctanh", np.arctanh, lambda gy, x: ops.div(gy, _one_minus_square(x)),
    "Inverse hyperbolic tangent, elementwise, for -1 < x < 1.", domain=(-0.7, 0.7), has_steps=True,
)  # fmt: skip
expm1 = function("expm1", np.expm1, lambda x: ops.exp(x), "exp(x) - 1, accurate near 0, elementwise.")
log1p = function(
    "log1p", np.log1p, lambda gy, x: ops.div(gy, ops.add(x, 1.0)), "ln(1 + x), accurate near 0, elementwise.",
    domain=(-0.5, 2.0),
)  # fmt: skip
log2 = function(
    "log2", np.log2, lambda gy, x: ops.div(gy, ops.mul(x, math.log(2))), "Logarithm to base 2, elementwise.",
    domain=(0.5, 2.0),
)  # fmt: skip
log10 = function(
    "log10", np.log10, lambda gy, x: ops.div(gy, ops.mul(x, math.log(10))), "Logarithm to base 10, elementwise.",
    domain=(0.5, 2.0),
)  # fmt: skip
rsqrt = function(
    "rsqrt", lambda x: 1.0 / np.sqrt(x), lambda gy, x, y: ops.mul(gy, ops.div(ops.mul(y, -0.5), x)),
    "1 / sqrt(x), elementwise.", domain=(0.5, 2.0),
)  # fmt: skip
square = function("square", np.square, lambda x: ops.mul(x, 2.0), "x^2, elementwise.")
squared_difference = function(
    "squared_difference",
    lambda x1, x2: np.square(x1 - x2),
    lambda x1, x2: ops.mul(ops.sub(x1, x2), 2.0),
    "(x1 - x2)^2, elementwise, with broadcasting.",
    args="x1 x2",
    of_difference=True,
)
maximum = function(
    "maximum",
    np.maximum,
    lambda gy, x1, x2: ops.where(_holds(np.greater_equal, x1, x2), gy, 0.0),
    lambda gy, x1, x2: ops.where(_holds(np.greater_equal, x1, x2), 0.0, gy),
    "The larger of two arguments, elementwise, with broadcasting; equal elements give their gradient to x1.",
    args="x1 x2",
)
minimum = function(
    "minimum",
    np.minimum,
    lambda gy, x1, x2: ops.where(_holds(np.less_equal, x1, x2), gy, 0.0),
    lambda gy, x1, x2: ops.where(_holds(np.less_equal, x1, x2), 0.0, gy),
    "The smaller of two arguments, elementwise, with broadcasting; equal elements give their gradient to x1.",
    args="x1 x2",
)
clipped = row(
    "clip",
    lambda x, x_min, x_max: _between_bounds(x, x_min, x_max),
    lambda gy, x, x_min, x_max: ops.where(_holds(_between, x, x_min, x_max), gy, 0.0),
    "x limited to x_min to x_max, elementwise; None means no bound.",
    is_one_pass=True,
    x_min=-0.9,
    x_max=1.2,
)
exp_difference = row(
    "exp_difference", lambda a, b: np.exp(a - b), lambda y: y, lambda gy, y: ops.neg(ops.mul(gy, y)), "exp(a - b)",
    args="a b",
)  # fmt: skip
scaled_exp_difference = row(
    "scaled_exp_difference",
    lambda a, b, c: np.exp(a - b) * c,
    lambda y: y,
    lambda gy, y: ops.neg(ops.mul(gy, y)),
    lambda a, b: exp_difference(a, b),
    "exp(a - b) c",
    args="a b c",
)
linear_interpolate = function(
    "linear_interpolate",
    lambda p, x, y: p * x + (1.0 - p) * y,
    lambda x, y: ops.sub(x, y),
    lambda p: p,
    lambda p: ops.sub(1.0, p),
    "p x + (1 - p) y, elementwise.",
    args="p x y",
    has_loop_for_each=True,
)

exp, log, sqrt, absolute = (public(r) for r in (ops.exp, ops.log, ops.sqrt, ops.absolute))


def _holds(relation: Any, *xs: Operand | Number | None) -> Array:
    """A relation between the values of arrays or Variables, as an array of bool."""
    return elementwise(relation, *(as_array(x) for x in xs))


def _constant(formula: Any, x: Operand) -> Variable:
    """A step function: its derivative is zero wherever there is one, so no graph is kept."""
    y = observed(formula, as_array(x))
    return as_variable(y if is_array(y) else np.asarray(y))  # without axes NumPy gives a number


def sign(x: Operand) -> Variable:
    """-1, 0 or 1, elementwise; without gradient.

    Args:
        x: array or Variable of numbers, any shape.

    Example:
        >>> F.sign(np.array([-2.0, 0.0, 3.0])).array
        array([-1.,  0.,  1.])
    """
    return _constant(np.sign, x)


def floor(x: Operand) -> Variable:
    """Rounded down to an integer, elementwise; without gradient.

    Args:
        x: array or Variable of numbers, any shape.

    Example:
        >>> F.floor(np.array([1.7, -1.2])).array
        array([ 1., -2.])
    """
    return _constant(np.floor, x)


def ceil(x: Operand) -> Variable:
    """Rounded up to an integer, elementwise; without gradient.

    Args:
        x: array or Variable of numbers, any shape.

    Example:
        >>> F.ceil(np.array([1.2, -1.2])).array
        array([ 2., -1.])
    """
    return _constant(np.ceil, x)


def fix(x: Operand) -> Variable:
    """Rounded towards zero to an integer, elementwise; without gradient.

    Args:
        x: array or Variable of numbers, any shape.

    Example:
        >>> F.fix(np.array([1.7, -1.7])).array
        array([ 1., -1.])
    """
    return _constant(np.trunc, x)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def add(*xs: Variable) -> Variable:
    """The sum of one or more arguments that broadcast; arrays alone are promoted to their common type.

    Args:
        xs: arrays or Variables that broadcast.

    Example:
        >>> F.add(np.ones(2), np.ones(2), np.ones(2)).array
        array([3., 3.])
    """
    if not xs:
        raise expected("add", "xs", "at least one argument", "none")
    if len(xs) > 1 and not any(isinstance(x, Variable) for x in xs):
        xs = tuple(as_variable(x) if is_array(x) else x for x in xs)
    y = as_variable(xs[0])
    for x in xs[1:]:
        y = ops.add(y, x)
    return y


def _between(x: Array, low: float, high: float | None) -> Array:
    inside = np.ones_like(x, bool) if low is None else x >= low
    return inside if high is None else inside & (x <= high)


def _between_bounds(x: Array, low: float, high: float | None) -> Array:
    if low is None:
        return np.minimum(x, x.dtype.type(high))
    return np.maximum(x, x.dtype.type(low)) if high is None else np.clip(x, x.dtype.type(low), x.dtype.type(high))


def clip(x: Operand, x_min: float | None, x_max: float | None) -> Variable:
    """x limited to ``x_min`` to ``x_max``, elementwise; None means no bound.

    Args:
        x: array or Variable of a floating type.
        x_min: lower bound; None for none.
        x_max: upper bound; None for none.

    Example:
        >>> F.clip(np.array([-2.0, 0.5, 2.0]), -1.0, 1.0).array
        array([-1. ,  0.5,  1. ])
    """
    if x_min is None and x_max is None:
        raise expected("clip", "x_min, x_max", "at least one bound", "None and None")
    if x_min is not None and x_max is not None and x_min > x_max:
        raise expected("clip", "x_min", f"at most x_max = {x_max}", x_min)
    return clipped.row.applied((x,), (x_min, x_max))


def fmod(x: Operand, divisor: Operand | Number) -> Variable:
    """The exact remainder of x / divisor with the sign of x, elementwise; ``x % divisor`` has that of the divisor.

    Args:
        x: dividend.
        divisor: divisor, which broadcasts with x.

    Example:
        >>> F.fmod(np.array([5.0, -5.0]), np.array([3.0, 3.0])).array
        array([ 2., -2.])
    """
    if is_array(x) and is_array(divisor):  # neither's type decides alone
        divisor = as_variable(divisor)
    return ops.remainder(as_variable(x), divisor, np.fmod)


def scale(x: Operand, y: Operand, axis: int = 1) -> Variable:
    """x times y, whose axes are those of x from ``axis`` on.

    Args:
        x: array or Variable.
        y: array or Variable whose shape is that of x from axis on.
        axis: first axis of x to which y belongs; default 1.

    Example:
        >>> F.scale(np.ones((1, 2)), np.array([2.0, 3.0])).array
        array([[2., 3.]])
    """
    x, y = together("scale", "number", x=x, y=y)
    return ops.mul(x, _aligned("scale", x, y, axis))


def bias(x: Operand, y: Operand, axis: int = 1) -> Variable:
    """x plus y, whose axes are those of x from ``axis`` on.

    Args:
        x: array or Variable.
        y: array or Variable whose shape is that of x from axis on.
        axis: first axis of x to which y belongs; default 1.

    Example:
        >>> F.bias(np.zeros((1, 2)), np.array([1.0, 2.0])).array
        array([[1., 2.]])
    """
    x, y = together("bias", "number", x=x, y=y)
    return ops.add(x, _aligned("bias", x, y, axis))


def _aligned(function: str, x: Variable, y: Variable, axis: int) -> Variable:
    stop = axis + len(y.shape)
    if x.shape[axis:stop] != tuple(y.shape):
        raise wrong_shape(function, "y", f"the axes of x (shape {x.shape}) from {axis} on", y)
    return ops.reshape(y, (1,) * axis + tuple(y.shape) + (1,) * (x.ndim - stop))


# ---- reductions -----------------------------------------------------------------------------------------------------


def checked_axis(function: str, x: Operand, axis: Any) -> Any:
    """None, or the axes as a tuple of numbers from 0."""
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, tuple) or (isinstance(axis, list) and not as_chainer[0]) else (axis,)
    for a in axes:
        if not isinstance(a, (int, np.integer)):
            raise wrong_type(function, "axis", "an int, a tuple of ints or None", axis)
        if not -x.ndim <= a < x.ndim:
            raise expected(function, "axis", f"from {-x.ndim} to {x.ndim - 1} for x of shape {x.shape}", repr(axis))
    found = tuple(operator.index(a) % x.ndim for a in axes)
    if len(set(found)) != len(found):
        raise expected(function, "axis", "each axis once", repr(axis))
    return found


def sum(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable:
    """The sum over all elements, or over an axis or a tuple of axes.

    Args:
        x: array or Variable of a floating type.
        axis: axis or tuple of axes; None for all.
        keepdims: keep the reduced axes with length 1; default False.

    Example:
        >>> F.sum(np.array([[1.0, 2.0], [3.0, 4.0]]), axis=0).array
        array([4., 6.])
    """
    x = as_variable(x)
    return ops.sum(x, checked_axis("sum", x, axis), keepdims)


def mean(
    x: Operand, axis: int | Sequence[int] | None = None, weights: Operand | None = None, keepdims: bool = False
) -> Variable:
    """The mean over all elements, or over an axis or a tuple of axes.

    Args:
        x: array or Variable of a floating type, any shape.
        axis: an axis or a tuple of axes; None takes all.
        weights: weights w, the result is sum(w x) / sum(w); in the shape of x, or of the length of the one axis given.
        keepdims: keep the axes that were averaged, with length 1.

    Raises:
        ValueError: ``weights`` has another shape.

    Example:
        >>> F.mean(np.array([[1.0, 2.0], [3.0, 6.0]]), axis=0).array
        array([2., 4.])
    """
    x = as_variable(x)
    axes = checked_axis("mean", x, axis)
    if weights is None:
        return ops.mean(x, axes, keepdims)
    if axes is not None and len(axes) == 1 and weights.shape == (x.shape[axes[0]],):
        weights = ops.reshape(weights, tuple(n if i in axes else 1 for i, n in enumerate(x.shape)))
    elif weights.shape != x.shape:
        want = f"shape {x.shape} to match x, or the length of the one axis given"
        raise expected("mean", "weights", want, weights)
    x, w = together("mean", x=x, weights=weights)
    dtype, wide = x.dtype, accumulation_dtype(x.dtype)  # of 16 bits sums overflow where the mean does not
    x, w = ops.cast(x, wide), ops.broadcast_to(ops.cast(w, wide), x.shape)
    return ops.cast(WeightedMean(axes, keepdims).apply((x, w))[0], dtype)


def average(
    x: Operand, axis: int | Sequence[int] | None = None, weights: Operand | None = None, keepdims: bool = False
) -> Variable:
    """The mean, weighted or not; the same as :func:`mean`.

    Args:
        x: array or Variable of a floating type, any shape.
        axis: an axis or a tuple of axes; None takes all.
        weights: weights in the shape of x, or of the length of the one axis given; None weighs all alike.
        keepdims: keep the axes that were averaged, with length 1.

    Example:
        >>> F.average(np.array([1.0, 5.0]), weights=np.array([3.0, 1.0]))
        variable(2.0)
    """
    return mean(x, axis, weights, keepdims)


def max(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable:
    """The maximum over all elements, or over an axis or a tuple of axes; all that are equal get the gradient.

    Args:
        x: array or Variable of a floating type.
        axis: axis or tuple of axes; None for all.
        keepdims: keep the reduced axes with length 1; default False.

    Example:
        >>> F.max(np.array([[1.0, 3.0], [4.0, 2.0]]), axis=1).array
        array([3., 4.])
    """
    x = as_variable(x)
    return Extremum("max", checked_axis("max", x, axis), keepdims).apply((x,))[0]


def min(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable:
    """The minimum over all elements, or over an axis or a tuple of axes; all that are equal get the gradient.

    Args:
        x: array or Variable of a floating type.
        axis: axis or tuple of axes; None for all.
        keepdims: keep the reduced axes with length 1; default False.

    Example:
        >>> F.min(np.array([[1.0, 3.0], [4.0, 2.0]]), axis=1).array
        array([1., 2.])
    """
    x = as_variable(x)
    return Extremum("min", checked_axis("min", x, axis), keepdims).apply((x,))[0]


def argmax(x: Operand, axis: int | None = None) -> Variable:
    """The index of the maximum, over all elements or along an axis; without gradient.

    Args:
        x: array or Variable of numbers.
        axis: axis along which to search; None for the index in the flattened array.

    Example:
        >>> F.argmax(np.array([[1.0, 3.0], [4.0, 2.0]]), axis=1).array
        array([1, 0], dtype=int32)
    """
    return _index("argmax", x, axis)


def argmin(x: Operand, axis: int | None = None) -> Variable:
    """The index of the minimum, over all elements or along an axis; without gradient.

    Args:
        x: array or Variable of numbers.
        axis: axis along which to search; None for the index in the flattened array.

    Example:
        >>> F.argmin(np.array([[1.0, 3.0], [4.0, 2.0]]), axis=1).array
        array([0, 1], dtype=int32)
    """
    return _index("argmin", x, axis)


def _index(name: str, x: Any, axis: int | None) -> Variable:
    x = as_array(x)
    if axis is not None:
        (axis,) = checked_axis(name, x, axis)
    return as_variable(observed_index(name, x, axis))


class LogSumExp(FunctionNode):
    """y = m + ln sum exp(x - m) over axes, m the greatest; gx = exp(x - m) gy / sum exp(x - m), 0 where all x are -inf

    Not exp(x - y): y is rounded, where it is large or of 16 bits by so much that the exponential is far off.
    """

    gives_new = True

    def __init__(self, axis: tuple[int, ...] | None) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = xs
        self.retain_inputs((0,))
        wide = x.astype(accumulation_dtype(x.dtype), copy=False)
        self.shift = greatest(wide, self.axis)
        self.total = sum_of_exp(wide, self.shift, self.axis)
        axes = tuple(range(x.ndim)) if self.axis is None else self.axis
        y = log_of_sum(self.total, wide, self.shift, axes) + self.shift
        return (y.reshape([n for i, n in enumerate(x.shape) if i not in axes]).astype(x.dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,), total = self.retained_inputs(), self.total
        x, gy = (ops.cast(v, total.dtype) for v in (x, ops.reshape(gys[0], total.shape)))
        if self._on_variables:
            total = SumOfExp(self.axis, self.shift).apply((x,))[0]
        total = ops.where(_holds(np.equal, total, 0), 1.0, total)
        return (scaled_exp_difference(x, self.shift, ops.div(gy, total)),)


class SumOfExp(FunctionNode):
    """y = sum exp(x - m) over axes, which stay as 1, for the m of :class:`LogSumExp`; gx = exp(x - m) gy"""

    gives_new = True

    def __init__(self, axis: tuple[int, ...] | None, shift: Array) -> None:
        self.axis = axis
        self.shift = shift

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        return (sum_of_exp(xs[0], self.shift, self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = self.retained_inputs()
        return (scaled_exp_difference(x, self.shift, gys[0]),)


def greatest(x: Array, axis: tuple[int, ...] | None) -> Array:
    """The maximum over axes, which stay as 1; infinities as the largest finite numbers, so that differences from it are
    not NaN.
    """
    if axis == (1,) and x.ndim == 2 and isinstance(x, np.ndarray) and x.size:  # half the time
        return _finite(x.reshape(-1).take(x.argmax(1) + row_starts(*x.shape))[:, None])
    return _finite(x.max(axis=axis, keepdims=True))


_einsum: Callable[..., Array] = np.einsum  # whose own overloads take mypy half a minute


def sum_of_exp(x: Array, shift: Array, axis: tuple[int, ...] | None) -> Array:
    """sum exp(x - shift) over axes, which stay as 1; x in the type of sums."""
    terms = exp_difference(x, shift)
    if axis == (1,) and x.ndim == 2 and isinstance(x, np.ndarray) and x.size:  # to multiply by ones: half the time
        # dot, as fast, has warned of invalid values although all were finite
        return _einsum("ij,j->i", terms, np.ones(x.shape[1], x.dtype))[:, None]
    return wide_sum(terms, axis, True)


def log_of_sum(total: Array, x: Array, shift: Array, axis: tuple[int, ...]) -> Array:
    """ln of :func:`sum_of_exp`, with all digits where one of the terms is nearly all of it."""
    return with_all_digits(logarithm(total), total, lambda rows: exp_difference(x[rows], shift[rows]), axis)


def _finite(a: Array) -> Array:
    largest = np.finfo(a.dtype).max
    return elementwise(lambda v: np.clip(v, -largest, largest), a)


def logsumexp(x: Operand, axis: int | Sequence[int] | None = None) -> Variable:
    """ln of the sum of exp(x) over all elements, or over axes, without overflow.

    Args:
        x: array or Variable of a floating type.
        axis: axis or tuple of axes; None for all.

    Example:
        >>> F.logsumexp(np.array([1000.0, 1000.0])).array.round(4)
        np.float64(1000.6931)
    """
    floating("logsumexp", x=x)
    x = as_variable(x)
    return LogSumExp(checked_axis("logsumexp", x, axis)).apply((x,))[0]
