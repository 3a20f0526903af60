"""Arithmetic, elementary functions and reductions.

Elementwise rules give the partial derivative alone; ``core.ops`` brings it to the shape and type of each input.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.core import ops
from dbrdist.core.backend import Array, elementwise, get_array_module
from dbrdist.core.checks import expected
from dbrdist.core.graph import BaseVariable, FunctionNode
from dbrdist.core.ops import Elementwise
from dbrdist.core.variable import Variable, as_array, as_variable

# ---- elementary functions -------------------------------------------------------------------------------------------


class Sin(Elementwise):
    """y = sin x, y' = cos x"""

    keep_in = (0,)
    formula = np.sin

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, _unary(Cos, self.retained_inputs()[0]))


class Cos(Elementwise):
    """y = cos x, y' = -sin x"""

    keep_in = (0,)
    formula = np.cos

    def partial(self, i: int, gy: Any) -> Any:
        return ops.neg(ops.mul(gy, _unary(Sin, self.retained_inputs()[0])))


class Tan(Elementwise):
    """y = tan x, y' = 1 + y^2"""

    keep_out = (0,)
    formula = np.tan

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, ops.add(ops.power(self.retained_outputs()[0], 2), 1.0))


class Arcsin(Elementwise):
    """y = arcsin x, y' = 1 / sqrt(1 - x^2)"""

    keep_in = (0,)
    formula = np.arcsin

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.sqrt(ops.sub(1.0, ops.power(self.retained_inputs()[0], 2))))


class Arccos(Elementwise):
    """y = arccos x, y' = -1 / sqrt(1 - x^2)"""

    keep_in = (0,)
    formula = np.arccos

    def partial(self, i: int, gy: Any) -> Any:
        return ops.neg(ops.div(gy, ops.sqrt(ops.sub(1.0, ops.power(self.retained_inputs()[0], 2)))))


class Arctan(Elementwise):
    """y = arctan x, y' = 1 / (1 + x^2)"""

    keep_in = (0,)
    formula = np.arctan

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.add(ops.power(self.retained_inputs()[0], 2), 1.0))


class Arctan2(Elementwise):
    """y = the angle of (x2, x1); dy/dx1 = x2 / (x1^2 + x2^2), dy/dx2 = -x1 / (x1^2 + x2^2)"""

    keep_in = (0, 1)
    formula = np.arctan2

    def partial(self, i: int, gy: Any) -> Any:
        a, b = self.retained_inputs()
        g = ops.div(gy, ops.add(ops.power(a, 2), ops.power(b, 2)))
        return ops.neg(ops.mul(g, a)) if i else ops.mul(g, b)


class Arctanh(Elementwise):
    """y = artanh x, y' = 1 / (1 - x^2)"""

    keep_in = (0,)
    formula = np.arctanh

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.sub(1.0, ops.power(self.retained_inputs()[0], 2)))


class Sinh(Elementwise):
    """y = sinh x, y' = cosh x"""

    keep_in = (0,)
    formula = np.sinh

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, _unary(Cosh, self.retained_inputs()[0]))


class Cosh(Elementwise):
    """y = cosh x, y' = sinh x"""

    keep_in = (0,)
    formula = np.cosh

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, _unary(Sinh, self.retained_inputs()[0]))


class Log1p(Elementwise):
    """y = ln(1 + x), y' = 1 / (1 + x)"""

    keep_in = (0,)
    formula = np.log1p

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.add(self.retained_inputs()[0], 1.0))


class Expm1(Elementwise):
    """y = exp(x) - 1, y' = y + 1"""

    keep_out = (0,)
    formula = np.expm1

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, ops.add(self.retained_outputs()[0], 1.0))


class Log2(Elementwise):
    """y = log2 x, y' = 1 / (x ln 2)"""

    keep_in = (0,)
    formula = np.log2

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.mul(self.retained_inputs()[0], math.log(2)))


class Log10(Elementwise):
    """y = log10 x, y' = 1 / (x ln 10)"""

    keep_in = (0,)
    formula = np.log10

    def partial(self, i: int, gy: Any) -> Any:
        return ops.div(gy, ops.mul(self.retained_inputs()[0], math.log(10)))


class Square(Elementwise):
    """y = x^2, y' = 2 x"""

    keep_in = (0,)
    formula = np.square

    def partial(self, i: int, gy: Any) -> Any:
        return ops.mul(gy, ops.mul(self.retained_inputs()[0], 2.0))


def _unary(cls: type[Elementwise], x: Any) -> Any:
    """Array in, array out; Variable in, Variable out: for rules."""
    return cls().apply((x,))[0] if isinstance(x, BaseVariable) else elementwise(cls.formula, x)


def sin(x: Any) -> Any:
    """Sine, elementwise."""
    return Sin().apply((x,))[0]


def cos(x: Any) -> Any:
    """Cosine, elementwise."""
    return Cos().apply((x,))[0]


def tan(x: Any) -> Any:
    """Tangent, elementwise."""
    return Tan().apply((x,))[0]


def arcsin(x: Any) -> Any:
    """Inverse sine, elementwise, for -1 <= x <= 1."""
    return Arcsin().apply((x,))[0]


def arccos(x: Any) -> Any:
    """Inverse cosine, elementwise, for -1 <= x <= 1."""
    return Arccos().apply((x,))[0]


def arctan(x: Any) -> Any:
    """Inverse tangent, elementwise."""
    return Arctan().apply((x,))[0]


def arctan2(x1: Any, x2: Any) -> Any:
    """The angle of the point (x2, x1) in radians, from -pi to pi, elementwise."""
    return Arctan2().apply((x1, x2))[0]


def arctanh(x: Any) -> Any:
    """Inverse hyperbolic tangent, elementwise, for -1 < x < 1."""
    return Arctanh().apply((x,))[0]


def sinh(x: Any) -> Any:
    """Hyperbolic sine, elementwise."""
    return Sinh().apply((x,))[0]


def cosh(x: Any) -> Any:
    """Hyperbolic cosine, elementwise."""
    return Cosh().apply((x,))[0]


def exp(x: Any) -> Any:
    """e to the x, elementwise."""
    return ops.Exp().apply((x,))[0]


def expm1(x: Any) -> Any:
    """exp(x) - 1 without cancellation near 0, elementwise."""
    return Expm1().apply((x,))[0]


def log(x: Any) -> Any:
    """Natural logarithm, elementwise."""
    return ops.Log().apply((x,))[0]


def log1p(x: Any) -> Any:
    """ln(1 + x) without cancellation near 0, elementwise."""
    return Log1p().apply((x,))[0]


def log2(x: Any) -> Any:
    """Logarithm to base 2, elementwise."""
    return Log2().apply((x,))[0]


def log10(x: Any) -> Any:
    """Logarithm to base 10, elementwise."""
    return Log10().apply((x,))[0]


def sqrt(x: Any) -> Any:
    """Square root, elementwise."""
    return ops.Sqrt().apply((x,))[0]


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x), elementwise."""
    return ops.div(1.0, sqrt(x))


def square(x: Any) -> Any:
    """x^2, elementwise."""
    return Square().apply((x,))[0]


def absolute(self: Any) -> Any:
    """|x|, elementwise; the derivative at 0 is 0."""
    return ops.Absolute().apply((self,))[0]


def _constant(formula: Any, x: Any) -> Variable:
    """A step function: its derivative is zero wherever there is one, so no graph is kept."""
    return as_variable(elementwise(formula, as_array(x)))


def sign(x: Any) -> Any:
    """-1, 0 or 1, elementwise; without gradient."""
    return _constant(np.sign, x)


def floor(x: Any) -> Any:
    """The next integer below, elementwise; without gradient."""
    return _constant(np.floor, x)


def ceil(x: Any) -> Any:
    """The next integer above, elementwise; without gradient."""
    return _constant(np.ceil, x)


def fix(x: Any) -> Any:
    """The next integer towards zero, elementwise; without gradient."""
    return _constant(np.trunc, x)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def add(*xs: Any) -> Any:
    """The sum of one or more arguments that broadcast."""
    if not xs:
        raise expected("add", "xs", "at least one argument", "none")
    y = as_variable(xs[0])
    for x in xs[1:]:
        y = ops.add(y, x)
    return y


class Maximum(Elementwise):
    """y = max(a, b); equal elements give their gradient to a"""

    keep_in = (0, 1)
    formula = np.maximum

    def partial(self, i: int, gy: Any) -> Any:
        a, b = (as_array(x) for x in self.retained_inputs())
        zero = gy.dtype.type(0)
        chosen = elementwise(np.greater_equal, a, b)
        return ops.where(chosen, zero, gy) if i else ops.where(chosen, gy, zero)


class Minimum(Elementwise):
    """y = min(a, b); equal elements give their gradient to a"""

    keep_in = (0, 1)
    formula = np.minimum

    def partial(self, i: int, gy: Any) -> Any:
        a, b = (as_array(x) for x in self.retained_inputs())
        zero = gy.dtype.type(0)
        chosen = elementwise(np.less_equal, a, b)
        return ops.where(chosen, zero, gy) if i else ops.where(chosen, gy, zero)


def maximum(x1: Any, x2: Any) -> Any:
    """The greater of two arguments, elementwise, with broadcasting."""
    return Maximum().apply((x1, x2))[0]


def minimum(x1: Any, x2: Any) -> Any:
    """The lesser of two arguments, elementwise, with broadcasting."""
    return Minimum().apply((x1, x2))[0]


class Clip(FunctionNode):
    """y = x between two bounds; gx = gy where x lies between them (bounds included), else 0"""

    def __init__(self, low: Any, high: Any) -> None:
        self.low = low
        self.high = high

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        low, high = self.low, self.high
        x = xs[0]
        self.inside = elementwise(lambda v: _between(v, low, high), x)
        return (elementwise(lambda v: _clipped(v, low, high), x),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        return (ops.where(self.inside, gys[0], gys[0].dtype.type(0)),)


def _between(x: Array, low: Any, high: Any) -> Array:
    inside = np.ones_like(x, bool) if low is None else x >= low
    return inside if high is None else inside & (x <= high)


def _clipped(x: Array, low: Any, high: Any) -> Array:
    if low is not None:
        x = np.maximum(x, x.dtype.type(low))
    return x if high is None else np.minimum(x, x.dtype.type(high))


def clip(x: Any, x_min: float | None, x_max: float | None) -> Any:
    """x held between ``x_min`` and ``x_max``, elementwise; None is no bound."""
    if x_min is None and x_max is None:
        raise expected("clip", "x_min, x_max", "at least one bound", "None and None")
    if x_min is not None and x_max is not None and x_min > x_max:
        raise expected("clip", "x_min", f"at most x_max = {x_max}", x_min)
    return Clip(x_min, x_max).apply((x,))[0]


def fmod(x: Any, divisor: Any) -> Any:
    """The remainder of x / divisor with the sign of x, elementwise."""
    x = as_variable(x)
    steps = elementwise(lambda a, b: np.trunc(a / b), x.array, as_array(divisor))
    return ops.sub(x, ops.mul(divisor, steps))


def squared_difference(x1: Any, x2: Any) -> Any:
    """(x1 - x2)^2, elementwise."""
    return square(ops.sub(as_variable(x1), x2))


def linear_interpolate(p: Any, x: Any, y: Any) -> Any:
    """p x + (1 - p) y, elementwise."""
    p = as_variable(p)
    return ops.add(ops.mul(p, x), ops.mul(ops.sub(1.0, p), y))


def scale(x: Any, y: Any, axis: int = 1) -> Any:
    """x times y, whose axes are those of x from ``axis`` on."""
    x = as_variable(x)
    return ops.mul(x, _aligned("scale", x, y, axis))


def bias(x: Any, y: Any, axis: int = 1) -> Any:
    """x plus y, whose axes are those of x from ``axis`` on."""
    x = as_variable(x)
    return ops.add(x, _aligned("bias", x, y, axis))


def _aligned(function: str, x: Variable, y: Any, axis: int) -> Any:
    stop = axis + len(y.shape)
    if x.shape[axis:stop] != tuple(y.shape):
        raise expected(function, "y", f"the axes of x (shape {x.shape}) from {axis} on", y)
    return ops.reshape(y, (1,) * axis + tuple(y.shape) + (1,) * (x.ndim - stop))


# ---- reductions -----------------------------------------------------------------------------------------------------


def _checked_axis(function: str, x: Any, axis: Any) -> Any:
    """None, or the axes as a tuple of numbers from 0."""
    if axis is None:
        return None
    axes = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    for a in axes:
        if not isinstance(a, (int, np.integer)):
            raise TypeError(f"{function}: axis: expected an int, a tuple of ints or None, got {axis!r}")
        if not -x.ndim <= a < x.ndim:
            raise expected(function, "axis", f"from {-x.ndim} to {x.ndim - 1} for x of shape {x.shape}", repr(axis))
    found = tuple(int(a) % x.ndim for a in axes)
    if len(set(found)) != len(found):
        raise expected(function, "axis", "each axis once", repr(axis))
    return found


def sum(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """The sum over all elements, or over an axis or a tuple of axes."""
    x = as_variable(x)
    return ops.sum(x, _checked_axis("sum", x, axis), keepdims)


def mean(x: Any, axis: Any = None, weights: Any = None, keepdims: bool = False) -> Any:
    """The mean over all elements, or over an axis or a tuple of axes.

    ``weights``: sum(w x) / sum(w); of the shape of x, or where one axis is given of that axis' length.
    """
    x = as_variable(x)
    axes = _checked_axis("mean", x, axis)
    if weights is None:
        return ops.mean(x, axes, keepdims)
    if axes is not None and len(axes) == 1 and weights.shape == (x.shape[axes[0]],):
        weights = ops.reshape(as_variable(weights), tuple(n if i in axes else 1 for i, n in enumerate(x.shape)))
    elif weights.shape != x.shape:
        want = f"shape {x.shape} as of x, or the length of the one axis given"
        raise expected("mean", "weights", want, weights)
    w = ops.broadcast_to(as_variable(weights), x.shape)
    return ops.div(ops.sum(ops.mul(x, w), axes, keepdims), ops.sum(w, axes, keepdims))


def average(x: Any, axis: Any = None, weights: Any = None, keepdims: bool = False) -> Any:
    """The mean; see :func:`mean`."""
    return mean(x, axis, weights, keepdims)


class Extremum(FunctionNode):
    """y = the maximum or minimum over axes; every element that equals it gets the gradient"""

    def __init__(self, name: str, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.name = name
        self.axis = axis
        self.keepdims = keepdims

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        y = getattr(x, self.name)(axis=self.axis, keepdims=True)
        self.chosen = elementwise(np.equal, x, y)
        axes = tuple(range(x.ndim)) if self.axis is None else self.axis
        self.kept_shape = y.shape
        return (y if self.keepdims else y.reshape([n for i, n in enumerate(x.shape) if i not in axes]),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        gy = ops.broadcast_to(ops.reshape(gys[0], self.kept_shape), self.chosen.shape)
        return (ops.where(self.chosen, gy, gy.dtype.type(0)),)


def max(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """The maximum over all elements, or over an axis or a tuple of axes; all that are equal get the gradient."""
    x = as_variable(x)
    return Extremum("max", _checked_axis("max", x, axis), keepdims).apply((x,))[0]


def min(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """The minimum over all elements, or over an axis or a tuple of axes; all that are equal get the gradient."""
    x = as_variable(x)
    return Extremum("min", _checked_axis("min", x, axis), keepdims).apply((x,))[0]


def argmax(x: Any, axis: int | None = None) -> Any:
    """The index of the maximum, over all elements or along an axis; without gradient."""
    return _index("argmax", x, axis)


def argmin(x: Any, axis: int | None = None) -> Any:
    """The index of the minimum, over all elements or along an axis; without gradient."""
    return _index("argmin", x, axis)


def _index(name: str, x: Any, axis: int | None) -> Variable:
    x = as_array(x)
    if axis is not None:
        (axis,) = _checked_axis(name, x, axis)
    y = getattr(x, name)(axis=axis)
    return as_variable(get_array_module(x).asarray(y, np.int32))


def logsumexp(x: Any, axis: Any = None) -> Any:
    """ln of the sum of exp(x) over all elements, or over axes, without overflow."""
    x = as_variable(x)
    axes = _checked_axis("logsumexp", x, axis)
    shift = x.array.max(axis=axes, keepdims=True)
    total = ops.sum(exp(ops.sub(x, shift)), axes)
    return ops.add(ops.log(total), shift.reshape(total.shape))


# ---- matrix products ------------------------------------------------------------------------------------------------


def matmul(a: Any, b: Any, transa: bool = False, transb: bool = False) -> Any:
    """The matrix product of the last two axes, the others broadcasting; ``transa``, ``transb`` swap them first.

    A vector counts as a row on the left and as a column on the right.
    """
    a, b = as_variable(a), as_variable(b)
    if not a.ndim or not b.ndim:
        raise expected("matmul", "b" if a.ndim else "a", "at least one axis", b if a.ndim else a)
    if transa and a.ndim > 1:
        a = ops.swap(a)
    if transb and b.ndim > 1:
        b = ops.swap(b)
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise expected("matmul", "b", f"{a.shape[-1]} rows to match a of shape {a.shape}", b)
    return ops.matmul(a, b)


def batch_matmul(a: Any, b: Any, transa: bool = False, transb: bool = False) -> Any:
    """Products of N pairs of matrices, a (N, M, K), b (N, K, L); an argument of two axes holds N columns."""
    a, b = as_variable(a), as_variable(b)
    a, b = (ops.reshape(v, (*v.shape, 1)) if v.ndim == 2 else v for v in (a, b))
    if a.shape[0] != b.shape[0]:
        raise expected("batch_matmul", "b", f"{a.shape[0]} matrices as in a", b)
    return matmul(a, b, transa, transb)


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """The sum of products over axes: the last ``axes`` of a with the first of b, or two lists of axes."""
    a, b = as_variable(a), as_variable(b)
    if isinstance(axes, int):
        left, right = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        left, right = ((v,) if isinstance(v, int) else tuple(v) for v in axes)
    left, right = tuple(i % a.ndim for i in left), tuple(i % b.ndim for i in right)
    if [a.shape[i] for i in left] != [b.shape[i] for i in right]:
        raise expected("tensordot", "b", f"axes {right} that match axes {left} of a of shape {a.shape}", b)
    rows = tuple(i for i in range(a.ndim) if i not in left)
    columns = tuple(i for i in range(b.ndim) if i not in right)
    common = math.prod(a.shape[i] for i in left)
    a2 = ops.reshape(ops.transpose(a, rows + left), (math.prod(a.shape[i] for i in rows), common))
    b2 = ops.reshape(ops.transpose(b, right + columns), (common, math.prod(b.shape[i] for i in columns)))
    return ops.reshape(ops.matmul(a2, b2), tuple(a.shape[i] for i in rows) + tuple(b.shape[i] for i in columns))
