"""Activations."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, empty_as, get_array_module
from dbrdist.core.array.elementwise import elementwise, fused
from dbrdist.core.array.observed import observed
from dbrdist.core.array.types import Number
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import Operands, expected, floating, one_of
from dbrdist.core.tape.elementwise_table import function, public, row, together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.math import max, minimum
from dbrdist.functions.rectifier import ReLUGradient
from dbrdist.functions.shapes import one_axis
from dbrdist.functions.special import ndtr, normal_density

sigmoid = function(
    "sigmoid",
    lambda x: _logistic(x),
    lambda y: ops.mul(y, ops.sub(1.0, y)),
    "Logistic function, y = 1 / (1 + exp(-x)), elementwise, accurate where that is near 0.",
)


def _logistic(x: Any) -> Array:
    """Not by tanh(x / 2) / 2 + 1 / 2, which has no right digit where the result is small."""
    with np.errstate(over="ignore"):  # 1 / inf is the right result
        return np.reciprocal(np.exp(-x) + 1)


tanh = public(ops.tanh)


class Softmax(FunctionNode):
    """y = exp(x) / sum exp(x) along an axis; gx = y (gy - sum(y gy))"""

    operands = Operands("softmax", x="float")
    gives_new = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        return (kernels.softmax(xs[0], self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (y,), gy = self.retained_outputs(), gys[0]
        if not self._on_variables:
            return (kernels.softmax_backward(y, gy, self.axis),)
        g = ops.mul(y, gy)
        return (ops.sub(g, ops.mul(y, ops.sum(g, self.axis, True))),)


class LogSoftmax(FunctionNode):
    """y = x - ln sum exp(x) along an axis; gx = gy - exp(y) sum(gy)"""

    operands = Operands("log_softmax", x="float")
    gives_new = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        return (kernels.log_softmax(xs[0], self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (y,), gy = self.retained_outputs(), gys[0]
        if not self._on_variables:
            return (kernels.log_softmax_backward(y, gy, self.axis),)
        return (ops.sub(gy, ops.mul(ops.exp(y), ops.sum(gy, self.axis, True))),)


def _axis_of(function: str, x: Operand, axis: int) -> int:
    ndim = len(x.shape)
    if type(axis) is not int:
        return one_axis(function, ndim, axis)
    if not -ndim <= axis < ndim:
        raise expected(function, "axis", f"from {-ndim} to {ndim - 1} for x of shape {x.shape}", axis)
    return axis % ndim


def softmax(x: Operand, axis: int = 1) -> Variable:
    """y = exp(x) / sum exp(x) along an axis, without overflow; the result sums to one along it.

    Args:
        x: scores, of a floating type.
        axis: axis of the classes; default 1.

    Example:
        >>> F.softmax(np.array([[0.0, 0.0]])).array
        array([[0.5, 0.5]])
    """
    return Softmax(_axis_of("softmax", x, axis)).apply((x,))[0]


def log_softmax(x: Operand, axis: int = 1) -> Variable:
    """y = x - ln sum exp(x) along an axis: the logarithm of :func:`softmax`, accurate where that is near zero.

    Args:
        x: scores, of a floating type.
        axis: axis of the classes; default 1.

    Example:
        >>> F.log_softmax(np.zeros((1, 2))).array.round(4)
        array([[-0.6931, -0.6931]])
    """
    return LogSoftmax(_axis_of("log_softmax", x, axis)).apply((x,))[0]


softplus = function(
    "softplus",
    lambda x, beta: (
        (np.maximum if beta >= 0 else np.minimum)(x, 0.0) + (_rest(x) if beta == 1 else _rest(x * beta) / beta)
    ),
    lambda x, beta: sigmoid.primitive(ops.mul(x, beta)),
    "y = ln(1 + exp(beta x)) / beta, a smooth relu, elementwise.",
    beta=1.0,
)


def _rest(x: Array) -> Array:
    """What softplus lies above relu: ln(1 + exp(-|x|))."""
    return np.log1p(np.exp(-abs(x)))


leaky_relu = function(
    "leaky_relu",
    lambda x, slope: np.maximum(x, x * slope) if 0 <= slope <= 1 else ops.where(x >= 0, x, x * slope),
    lambda gy, x, slope: ops.where(_is_positive(x), gy, ops.mul(gy, slope)),
    "x where x >= 0, else slope x, elementwise (Maas et al. 2013).",
    slope=0.2,
)
elu = function(
    "elu",
    lambda x, alpha: _elu_of(x, np.expm1(np.minimum(x, 0.0)), alpha),  # exp of large values would overflow
    lambda gy, x, alpha: ops.mul(gy, _elu_slope(x, alpha)),
    "x where x >= 0, else alpha (exp(x) - 1), elementwise (Clevert et al. 2015).",
    alpha=1.0,
)
selu = function(
    "selu",
    lambda x, alpha, scale: np.maximum(x, 0.0) * scale + np.expm1(np.minimum(x, 0.0)) * (alpha * scale),
    lambda gy, x, alpha, scale: ops.mul(gy, ops.mul(_elu_slope(x, alpha), scale)),
    "scale times elu(x, alpha), elementwise: keeps mean 0 and variance 1 (Klambauer et al. 2017).",
    alpha=1.6732632423543772,
    scale=1.0507009873554805,
)
clipped_relu = function(
    "clipped_relu",
    lambda x, z: np.clip(x, 0.0, z),
    lambda gy, x, z: ops.where(_lies_within(x, 0.0, z), gy, 0.0),
    "min(max(x, 0), z), elementwise.",
    domain=(-30.0, 30.0),
    is_one_pass=True,
    z=20.0,
)
relu6 = function(
    "relu6",
    lambda x: np.clip(x, 0.0, 6.0),
    lambda gy, x: ops.where(_lies_within(x, 0.0, 6.0), gy, 0.0),
    "min(max(x, 0), 6), elementwise.",
    domain=(-9.0, 9.0),
    is_one_pass=True,
)
hard_sigmoid = function(
    "hard_sigmoid",
    lambda x: np.minimum(np.maximum(x * 0.2 + 0.5, 0.0), 1.0),
    lambda gy, x: ops.where(_lies_within(x, -2.5, 2.5), ops.mul(gy, 0.2), 0.0),
    "0.2 x + 0.5 held between 0 and 1, elementwise.",
    domain=(-4.0, 4.0),
)


def _is_positive(x: Operand) -> Array:
    return elementwise(lambda v: v >= 0, as_array(x))


def _is_at_most(x: Operand, high: float) -> Array:
    return elementwise(lambda v: v <= high, as_array(x))


def _lies_within(x: Operand, low: float, high: float) -> Array:
    return elementwise(lambda v: (v > low) & (v < high), as_array(x))


def _elu_of(x: Array, below: Array, alpha: float) -> Array:
    """x from 0 on, alpha times ``below`` else, which is 0 there and never less than x."""
    return np.maximum(x, below) if alpha == 1 else np.maximum(x, 0.0) + below * alpha


def _elu_slope(x: Operand, alpha: float) -> Operand:
    """1 for x from 0 on, alpha exp(x) below, without overflow above."""
    slope = ops.exp(minimum.primitive(x, 0.0))
    return slope if alpha == 1 else ops.where(_is_positive(x), slope, ops.mul(slope, alpha))


def prelu(x: Operand, W: Operand) -> Variable:
    """x where x >= 0, else W x; the axes of W are those of x from 1 on (He et al. 2015).

    Args:
        x: array or Variable of a floating type.
        W: slopes for x < 0; their axes are those of x from 1 on.

    Example:
        >>> F.prelu(np.array([[2.0, -2.0]]), np.array([0.1, 0.1])).array
        array([[ 2. , -0.2]])
    """
    x, W = together("prelu", x=x, W=W)
    stop = 1 + len(W.shape)
    if x.shape[1:stop] != tuple(W.shape):
        raise expected("prelu", "W", f"the axes of x (shape {x.shape}) from 1 on", W)
    slopes = ops.reshape(W, (1, *W.shape, *(1,) * (x.ndim - stop)) if W.shape else ())
    return ops.where(observed(np.greater_equal, x.array, 0), x, ops.mul(x, slopes))


class Swish(FunctionNode):
    """y = x s(beta x), s the logistic function; with e = gy x s (1 - s): gx = gy s + beta e, gbeta = the sum of x e"""

    operands = Operands("swish", x="float", beta="float")

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, beta = xs
        if beta.shape[1:] == x.shape[1:] and beta.ndim == x.ndim:
            made = kernels.of_rows("swish_rows", (x, beta), beta.size)
            if made is not None:
                self.s = None
                return (made[0].reshape(x.shape),)
        self.s = fused(lambda x, beta: sigmoid.primitive(x * beta), *xs)
        return (elementwise(np.multiply, xs[0], self.s),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        (x, beta), gy = self.retained_inputs(), gys[0]
        if self.s is None and not self._on_variables:
            made = kernels.of_rows("swish_rows_backward", (x, gy, beta), beta.size)
            if made is not None:
                gx, products = (a.reshape(x.shape) for a in made)
                return tuple(ops.sum_to(products, beta.shape) if i else gx for i in wanted)
        s = sigmoid.primitive(ops.mul(x, beta)) if self._on_variables or self.s is None else self.s
        e = _in_steps(lambda gy, x, s: ops.mul(ops.mul(ops.mul(gy, s), ops.sub(1.0, s)), x), gy, x, s)
        rules = (
            lambda: _in_steps(lambda gy, s, e, beta: ops.add(ops.mul(gy, s), ops.mul(e, beta)), gy, s, e, beta),
            lambda: ops.sum_to(ops.mul(e, x), beta.shape),
        )
        return tuple(rules[i]() for i in wanted)


def _in_steps(formula: Any, *xs: Operand) -> Operand:
    """A formula of primitives: of arrays block by block where they are large, of Variables as it stands."""
    return formula(*xs) if any(isinstance(x, Variable) for x in xs) else fused(formula, *xs)


def _swish_slope(z: Operand) -> Operand:
    """d/dx of x s(z), s the logistic function and z = beta x: s + z s (1 - s)."""
    s = sigmoid.primitive(z)
    return ops.mul(s, ops.add(ops.mul(z, ops.sub(1.0, s)), 1.0))


def swish(x: Operand, beta: Operand) -> Variable:
    """x sigmoid(beta x) (Ramachandran et al. 2017).

    Args:
        x: array or Variable of a floating type, shape (N, ...).
        beta: factors whose axes are those of x from 1 on; a 0-d array for one factor.

    Raises:
        ValueError: the axes of beta are not those of x from 1 on.

    Example:
        >>> F.swish(np.array([[1.0, -1.0]]), np.array(0.0)).array
        array([[ 0.5, -0.5]])
    """
    x, beta = together("swish", x=x, beta=beta)
    stop = 1 + beta.ndim
    if x.shape[1:stop] != beta.shape:
        raise expected("swish", "beta", f"the axes of x (shape {x.shape}) from 1 on", beta)
    if type(beta.array) is np.ndarray and not beta.shape and not beta.requires_grad:
        return silu(x, beta.array)
    beta = ops.reshape(beta, (1, *beta.shape, *(1,) * (x.ndim - stop)) if beta.shape else ())
    return Swish().apply((x, beta))[0]


silu = function(
    "silu",
    lambda x, beta: x * sigmoid.primitive(x * beta),
    lambda x, beta: _swish_slope(ops.mul(x, beta)),
    "x sigmoid(beta x), elementwise: swish with a number for beta (Elfwing et al. 2017).",
    beta=1.0,
)
mish = function(
    "mish",
    lambda x: x * np.tanh(softplus.primitive(x, 1.0)),
    lambda x: _mish_slope(x, ops.tanh(softplus.primitive(x, 1.0))),
    "x tanh(softplus(x)), elementwise (Misra 2019).",
)
hardswish = function(
    "hardswish",
    lambda x: x * np.minimum(np.maximum(x * (1 / 6) + 0.5, 0.0), 1.0),
    lambda gy, x: ops.where(
        _lies_within(x, -3.0, 3.0),
        ops.mul(gy, ops.add(ops.mul(x, 1 / 3), 0.5)),
        ops.where(_is_at_most(x, -3.0), 0.0, gy),
    ),
    "x times x / 6 + 1 / 2 held between 0 and 1, elementwise: a cheap silu (Howard et al. 2019).",
    domain=(-4.0, 4.0),
)
_gelu = row(
    "gelu",
    lambda x: x * ndtr.primitive(x),
    lambda x: ops.add(ndtr.primitive(x), ops.mul(x, normal_density(x))),
    "x ndtr(x), elementwise.",
)
_gelu_by_tanh = row(
    "gelu_by_tanh",
    lambda x: x * _logistic(_gelu_argument(x)),
    lambda x: _gelu_slope(x, sigmoid.primitive(_gelu_argument(x))),
    "x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, elementwise.",
)


def _mish_slope(x: Operand, t: Operand) -> Operand:
    """d/dx of x t, t = tanh(ln(1 + exp x)): t + x (1 - t^2) sigmoid(x)."""
    return ops.add(t, ops.mul(x, ops.mul(ops.sub(1.0, ops.mul(t, t)), sigmoid.primitive(x))))


_TWICE = 2 * math.sqrt(2 / math.pi)


def _gelu_argument(x: Operand) -> Operand | Number:
    """z with (1 + tanh(z / 2)) / 2 = sigmoid(z)"""
    return ops.mul(x, ops.add(ops.mul(ops.mul(x, x), 0.044715 * _TWICE), _TWICE))


def _gelu_slope(x: Operand, s: Operand) -> Operand:
    """d/dx of x s, s = sigmoid(a x + b x^3): s (1 + x (1 - s) (a + 3 b x^2))."""
    inner = ops.add(ops.mul(ops.mul(x, x), 3 * 0.044715 * _TWICE), _TWICE)
    return ops.mul(s, ops.add(ops.mul(ops.mul(x, inner), ops.sub(1.0, s)), 1.0))


def gelu(x: Operand, approximate: str = "none") -> Variable:
    """x times the probability that a standard normal number is at most x, elementwise (Hendrycks and Gimpel 2016).

    ``approximate='tanh'`` takes x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 for it, which networks published
    with that formula need; ``'none'`` is exact, and faster where SciPy is installed.

    Args:
        x: array or Variable of a floating type, any shape.
        approximate: 'none' for the exact function, 'tanh' for the approximation; default 'none'.

    Example:
        >>> F.gelu(np.array([-1.0, 0.0, 1.0])).array.round(4)
        array([-0.1587,  0.    ,  0.8413])
    """
    one_of("gelu", "approximate", ("none", "tanh"), approximate)
    return (_gelu_by_tanh if approximate == "tanh" else _gelu).row.applied((x,))


class CReLU(FunctionNode):
    """y = relu(x) and relu(-x) one after another along an axis"""

    gives_new = True

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def halves(self, y: Operand) -> tuple[Operand, Operand]:
        """The parts of y for x and for -x."""
        n, lead = y.shape[self.axis] // 2, (slice(None),) * self.axis
        return ops.getitem(y, (*lead, slice(None, n))), ops.getitem(y, (*lead, slice(n, None)))

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_outputs((0,))
        (x,), axis, xp = xs, self.axis, get_array_module(xs[0])
        made = kernels.of_rows("crelu", (x,), math.prod(x.shape[axis:]))
        if made is not None:
            return (made[0].reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :]),)
        y = empty_as(x, (*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :]), x.dtype)
        above, below = self.halves(y)
        zero = x.dtype.type(0)
        xp.maximum(x, zero, out=above)
        xp.subtract(zero, x, out=below)  # NumPy 2.4's negative misreads some strides where it writes to others
        xp.maximum(below, zero, out=below)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        y = as_array(self.retained_outputs()[0])
        if not self._on_variables:
            shape = self.inputs[0].shape
            made = kernels.of_rows("crelu_backward", (y, gys[0]), math.prod(shape[self.axis :]))
            if made is not None:
                return (made[0].reshape(shape),)
        parts = zip(self.halves(y), self.halves(gys[0]))
        above, below = (call(ReLUGradient(y), gy) for y, gy in parts)
        return (ops.sub(above, below),)


def crelu(x: Operand, axis: int = 1) -> Variable:
    """relu(x) and relu(-x) one after another along an axis (Shang et al. 2016).

    Args:
        x: array or Variable of a floating type.
        axis: axis along which both halves are concatenated; default 1.

    Example:
        >>> F.crelu(np.array([[1.0, -2.0]])).array
        array([[1., 0., 0., 2.]])
    """
    floating("crelu", x=x)
    return CReLU(_axis_of("crelu", x, axis)).apply((x,))[0]


def maxout(x: Operand, pool_size: int, axis: int = 1) -> Variable:
    """The maximum of each ``pool_size`` neighbours along an axis (Goodfellow et al. 2013).

    Args:
        x: array or Variable of a floating type.
        pool_size: number of neighbours, a divisor of the length of the axis.
        axis: axis of the neighbours; default 1.

    Example:
        >>> F.maxout(np.array([[1.0, 3.0, 5.0, 2.0]]), 2).array
        array([[3., 5.]])
    """
    floating("maxout", x=x)
    x = as_variable(x)
    axis = _axis_of("maxout", x, axis)
    pool_size = operator.index(pool_size)
    if pool_size <= 0 or x.shape[axis] % pool_size:
        raise expected("maxout", "pool_size", f"a divisor of the {x.shape[axis]} elements along axis {axis}", pool_size)
    split = (*x.shape[:axis], x.shape[axis] // pool_size, pool_size, *x.shape[axis + 1 :])
    return max(ops.reshape(x, split), axis=axis + 1)
