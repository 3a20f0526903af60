"""Normalization of each example by itself: of rows and groups of channels, by length, by neighbouring channels.

Legend: mean and var are those of what is averaged, s = 1 / sqrt(var + eps), x_hat = (x - mean) s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import Array, accumulation_dtype, copy, zeros_as
from dbrdist.core.array.config import using_config
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS
from dbrdist.core.array.observed import observed
from dbrdist.core.array.types import Destinations
from dbrdist.core.tape import ops
from dbrdist.core.tape.backprop import grad
from dbrdist.core.tape.checks import Operands, expected, floating
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.normalization import in_types_of_inputs
from dbrdist.functions.shapes import one_axis


class LayerNormalization(FunctionNode):
    """y = gamma x_hat + beta for each row of x (N, K) with its own mean and variance

    With g = gamma gy, gx = s (g - mean(g) - x_hat mean(g x_hat)).
    """

    operands = Operands("layer_normalization", x="float", gamma="float", beta="float")
    writes = gives_new = True

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        y, self.mean, self.var = kernels.ln_forward(*xs, self.eps)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...], out: Destinations) -> tuple[Array | None, ...]:
        x, gamma = self.retained_inputs()
        if not self._on_variables and type(gys[0]) is not np.ndarray:
            room = {} if out is None else dict(zip(wanted, out))
            made = kernels.ln_backward_into(x, gamma, self.mean, self.var, gys[0], self.eps, room.get(1), room.get(2))
            if made is not None:
                return in_types_of_inputs(self, wanted, [made[i] for i in wanted])
        node = LayerNormalizationGradient(self.mean, self.var, self.eps)
        grads = (node.apply if self._on_variables else node.forward)((x, gamma, gys[0]))
        return in_types_of_inputs(self, wanted, [grads[i] for i in wanted])


class LayerNormalizationGradient(FunctionNode):
    """The gradients of x, gamma and beta, of x, gamma and gy; the tape derives them from their formula"""

    def __init__(self, mean: Array, var: Array, eps: float) -> None:
        self.mean = mean
        self.var = var
        self.eps = eps

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1, 2))
        x, gamma, gy = xs
        return kernels.ln_backward(x, gamma, self.mean, self.var, gy, self.eps)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        higher = self._on_variables
        inputs = [x if higher else Variable(x) for x in self.retained_inputs()]
        with using_config("enable_backprop", True):
            outputs = self.composed(*inputs)
        used = [i for i, g in enumerate(gys) if g is not None]
        grads = grad(
            [outputs[i] for i in used], inputs, [as_variable(gys[i]) for i in used], enable_double_backprop=higher
        )
        return tuple([grads[i] if higher or grads[i] is None else grads[i].array for i in wanted])

    def composed(self, x: Variable, gamma: Variable, gy: Variable) -> tuple[Variable, Variable, Variable]:
        """The formula in primitives."""
        centered = ops.sub(x, ops.mean(x, 1, True))
        s = ops.power(ops.add(ops.mean(ops.mul(centered, centered), 1, True), self.eps), -0.5)
        x_hat, g = ops.mul(centered, s), ops.mul(gy, gamma)
        spread = ops.add(ops.mean(g, 1, True), ops.mul(x_hat, ops.mean(ops.mul(g, x_hat), 1, True)))
        return ops.mul(s, ops.sub(g, spread)), ops.sum(ops.mul(gy, x_hat), 0), ops.sum(gy, 0)


def layer_normalization(x: Operand, gamma: Operand, beta: Operand, eps: float = 1e-5) -> Variable:
    """Normalize each row of x (N, K) with its own mean and variance, then scale and shift (Ba et al. 2016).

    Args:
        x: input of shape (N, K).
        gamma, beta: scale and shift, of shape (K,).
        eps: added to the variance.

    Example:
        >>> F.layer_normalization(np.array([[1.0, 3.0]]), np.ones(2), np.zeros(2)).array.round(3)
        array([[-1.,  1.]])
    """
    if len(x.shape) != 2:
        raise expected("layer_normalization", "x", "2 axes", x, "reshape it")
    for name, a in (("gamma", gamma), ("beta", beta)):
        if tuple(a.shape) != tuple(x.shape[1:]):
            raise expected("layer_normalization", name, f"shape {tuple(x.shape[1:])} as a row of x", a)
    return LayerNormalization(eps).apply((x, gamma, beta))[0]


def _numbers(shape: tuple[int, ...], groups: int, eps: float) -> tuple[float, ...]:
    """What loops over groups take: the elements of a group, the channels, the elements of a channel, eps."""
    plane = prod(shape[2:])
    return shape[1] // groups * plane, shape[1], plane, eps


def _by_loop(name: str, arrays: tuple[Array, ...], numbers: tuple[float, ...]) -> tuple[Array, ...] | None:
    """What a compiled loop makes of arrays of float32 that lie channel after channel; None where there is none."""
    x = arrays[0]
    if type(x) is not np.ndarray or x.size < KERNEL_ELEMENTS or not x.flags.c_contiguous or are_images(x):
        return None
    if any(type(a) is not np.ndarray or a.dtype != np.float32 for a in arrays):
        return None
    made: tuple[Array, ...] | None = kernels.of_rows(name, arrays, *numbers)
    return made


class GroupNormalization(FunctionNode):
    """y = gamma x_hat + beta for the channels of x (N, C, ...), where each group of them has its own mean and variance

    With g = gamma gy, gx = s (g - mean(g) - x_hat mean(g x_hat)). By compiled loops.
    """

    operands = Operands("group_normalization", x="float", gamma="float", beta="float")
    gives_new = True

    def __init__(self, groups: int, eps: float, made: tuple[Array, ...]) -> None:
        self.groups = groups
        self.eps = eps
        self.y, self.mean, self.var = made
        self.length = self.y.size // self.mean.size  # of a group

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        y, self.y = self.y, None
        return (y.reshape(xs[0].shape),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        x, gamma = self.retained_inputs()
        grads = None if self._on_variables else self._looped(x, gamma, gys[0])
        if grads is None:
            grads = self._composed(x, gamma, gys[0])
        return tuple([grads[i] for i in wanted])

    def _looped(self, x: Array, gamma: Array, gy: Array) -> tuple[Array, ...] | None:
        numbers = _numbers(x.shape, self.groups, self.eps)
        gy = np.require(gy, np.float32, "CA")
        made = _by_loop("normalize_groups_backward", (x, gy, self.mean, self.var, gamma), numbers)
        if made is None:
            return None
        gx, ggamma, gbeta = made
        if numbers[2] == 1:
            gbeta = gy  # the loop writes none
        return gx.reshape(x.shape), *[ops.sum_to(v.reshape(x.shape[:2]), gamma.shape) for v in (ggamma, gbeta)]

    def _composed(self, x: Variable, gamma: Variable, gy: Variable) -> tuple[Variable, ...]:
        """By the formula: for derivatives of higher order, and where no loop is left."""
        higher = self._on_variables
        inputs = [as_variable(v) for v in (x, gamma)]
        with using_config("enable_backprop", True):
            zero = zeros_as(inputs[1].array, gamma.shape, gamma.dtype)
            y = _normalized_in_groups(inputs[0], self.groups, inputs[1], zero, self.eps)
        grads = grad([y], inputs, [as_variable(gy)], enable_double_backprop=higher)
        gbeta = ops.sum(gy, (0, *range(2, x.ndim)))
        return *[g if higher else g.array for g in grads], gbeta


def group_normalization(x: Operand, groups: int, gamma: Operand, beta: Operand, eps: float = 1e-5) -> Variable:
    """Normalize the channels of each example in groups, then scale and shift each channel (Wu and He 2018).

    Args:
        x: input of shape (N, C, ...).
        groups: into how many groups of neighbours the C channels are divided.
        gamma, beta: scale and shift, of shape (C,).
        eps: added to the variance.

    Example:
        >>> F.group_normalization(np.arange(4.0).reshape(1, 4), 2, np.ones(4), np.zeros(4)).array.round(3)
        array([[-1.,  1., -1.,  1.]])
    """
    name = "group_normalization"
    floating(name, x=x)
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise expected(name, "x", "at least 2 axes", x)
    if not isinstance(groups, (int, np.integer)) or groups < 1 or shape[1] % (groups := int(groups)):
        raise expected(name, "groups", f"a divisor of the {shape[1]} channels of x", groups)
    for what, a in (("gamma", gamma), ("beta", beta)):
        if tuple(a.shape) != shape[1:2]:
            raise expected(name, what, f"shape {shape[1:2]}, one number for each channel of x", a)
    made = _by_loop("normalize_groups", tuple(map(as_array, (x, gamma, beta))), _numbers(shape, groups, eps))
    if made is not None:
        return GroupNormalization(groups, eps, made).apply((x, gamma, beta))[0]
    return _normalized_in_groups(as_variable(x), groups, gamma, beta, eps)


def _normalized_in_groups(x: Variable, groups: int, gamma: Operand, beta: Operand, eps: float) -> Variable:
    """The formula in primitives."""
    shape = tuple(x.shape)
    wide = ops.cast(x, accumulation_dtype(x.dtype))
    rows = ops.reshape(wide, (shape[0], groups, prod(shape[1:]) // groups))
    mean = ops.mean(rows, 2, True)
    centered = ops.sub(rows, mean)
    s = ops.power(ops.add(ops.mean(ops.mul(centered, centered), 2, True), eps), -0.5)
    scale = ops.mul(_per_channel(s, shape), ops.reshape(gamma, (1, shape[1], *(1,) * (len(shape) - 2))))
    y = ops.mul(ops.sub(wide, _per_channel(mean, shape)), scale)  # of x as it lies in memory
    y = ops.add(y, ops.reshape(beta, (1, shape[1], *(1,) * (len(shape) - 2))))
    return ops.cast(y, x.dtype)


def _per_channel(v: Variable, shape: tuple[int, ...]) -> Variable:
    """A value for each group (N, G, 1), beside the channels of x."""
    n, groups, _ = v.shape
    return ops.reshape(ops.broadcast_to(v, (n, groups, shape[1] // groups)), (*shape[:2], *(1,) * (len(shape) - 2)))


# ---- by length and by neighbouring channels


def normalize(x: Operand, eps: float = 1e-5, axis: int | Sequence[int] = 1) -> Variable:
    """x / (|x| + eps) with the Euclidean length over an axis or a tuple of axes.

    Args:
        x: array or Variable of a floating type.
        eps: added to the length; default 1e-05.
        axis: axis or tuple of axes over which the length is taken; default 1. Without any, each element has its own.

    Example:
        >>> F.normalize(np.array([[3.0, 4.0]])).array.round(3)
        array([[0.6, 0.8]])
    """
    floating("normalize", x=x)
    x = as_variable(x)
    if not isinstance(axis, int) and not hasattr(axis, "__iter__"):
        axis = one_axis("normalize", x.ndim, axis)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if any(not -x.ndim <= a < x.ndim for a in axes) or len({a % x.ndim for a in axes}) < len(axes):
        raise expected("normalize", "axis", f"different axes from {-x.ndim} to {x.ndim - 1}", repr(axis))
    wide = ops.cast(x, accumulation_dtype(x.dtype))
    square = ops.sum(ops.mul(wide, wide), axes, True)
    is_zero = observed(
        np.equal, as_array(square), 0
    )  # the root has no derivative there, and the quotient has one: 1 / eps
    length = ops.where(is_zero, 0.0, ops.sqrt(ops.where(is_zero, 1.0, square)))
    return ops.cast(ops.div(wide, ops.add(length, eps)), x.dtype)


class ChannelWindow(FunctionNode):
    """y_c = the sum of x over channels c - reach to c + reach, those that there are; its own transpose"""

    is_linear = True

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = xs
        y = copy(x)
        for i in range(1, min(self.reach, x.shape[1] - 1) + 1):
            y[:, i:] += x[:, :-i]
            y[:, :-i] += x[:, i:]
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(ChannelWindow(self.reach), gys[0]),)


def local_response_normalization(
    x: Operand, n: int = 5, k: float = 2, alpha: float = 1e-4, beta: float = 0.75
) -> Variable:
    """x / (k + alpha s)^beta with s the sum of x^2 over n neighbouring channels (Krizhevsky et al. 2012, section 3.3).

    Args:
        x: input of shape (N, C, ...).
        n: the number of channels, n // 2 on each side.
        k, alpha, beta: as in the formula.

    Example:
        >>> F.local_response_normalization(np.ones((1, 8, 1, 1)), n=5, k=1, alpha=1.0).array[0, :3, 0, 0].round(4)
        array([0.3536, 0.2991, 0.2608])
    """
    floating("local_response_normalization", x=x)
    x = as_variable(x)
    if x.ndim < 2:
        raise expected("local_response_normalization", "x", "at least 2 axes", x)
    if n < 1:
        raise expected("local_response_normalization", "n", "a number from 1 on", n)
    wide = ops.cast(x, accumulation_dtype(x.dtype))
    total = ChannelWindow(operator.index(n) // 2).apply((ops.mul(wide, wide),))[0]
    return ops.cast(ops.mul(wide, ops.power(ops.add(ops.mul(total, alpha), k), -beta)), x.dtype)
