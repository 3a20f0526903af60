"""Random functions. Their bits come from ``core.random`` by row of the global batch, never by rank."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import (
    Array,
    accumulation_dtype,
    device_of,
    full_as,
    get_array_module,
    is_channels_last,
    to_device,
)
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.config import config
from dbrdist.core.array.elementwise import elementwise, fused
from dbrdist.core.array.observed import observed
from dbrdist.core.array.random import Draw, Lines, drawn, next_draw, raw_words
from dbrdist.core.array.types import DType
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating
from dbrdist.core.tape.elementwise_table import from_kernel, together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.repeats import computed_once
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.activation import softmax


def _bits(x: Array, shape: tuple[int, ...] | None = None, is_shared: bool = False) -> Array:
    """32 random bits for each element of x, or of another shape, on the device of x; those of row i belong to the i-th
    example of this rank, or to row i of what all ranks have (``is_shared``).

    4-d rows are drawn in the order H W C, in which they lie in memory.
    """
    shape = x.shape if shape is None else shape
    is_image = len(shape) == 4
    shape = (shape[0], *shape[2:], shape[1]) if is_image else shape
    num_rows = shape[0] if shape else 1
    row = int(np.prod(shape[1:]))
    words = raw_words(num_rows, -(-row // 2), is_shared)
    bits = np.ascontiguousarray(words).view("<u4")[:, :row].reshape(shape)
    if is_image:
        bits = bits.transpose(0, 3, 1, 2)
    return bits if isinstance(x, np.ndarray) else to_device(bits, device_of(x))


class Dropout(FunctionNode):
    """y = x mask, gx = gy mask; the mask holds 0 and 1 / (1 - ratio)"""

    def __init__(self, mask: Array, y: Array | None = None) -> None:
        self.mask = mask
        self.y = y  # the product, where it was made along with the mask

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        if self.y is not None:
            y, self.y = self.y, None
            return (y,)
        return (elementwise(np.multiply, xs[0], self.mask),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Dropout(self.mask), gys[0]),)


def dropout(x: Operand, ratio: float = 0.5, *, mask: Array | None = None, return_mask: bool = False) -> Any:
    """Elements set to zero with probability ``ratio``, the others divided by 1 - ratio (Srivastava et al. 2014).

    Outside of training (``config.train`` False) x is returned unchanged. What is drawn depends on the row in the global
    batch, so that any number of ranks drops the same elements.

    Args:
        x: array or Variable of a floating type, any shape.
        ratio: the probability of zero, from 0 to less than 1.
        mask: a factor for each element, in the shape of x, used instead of a drawn one.
        return_mask: also return the mask; None outside of training.

    Raises:
        ValueError: ``ratio`` is out of range, or ``mask`` has another shape than x.

    Example:
        >>> with dbrdist.using_config("train", False):
        ...     F.dropout(np.ones(3), 0.5).array
        array([1., 1., 1.])
        >>> with dbrdist.using_config("train", True):
        ...     F.dropout(np.ones(3), mask=np.array([0.0, 2.0, 2.0])).array
        array([0., 2., 2.])
    """
    if not 0.0 <= ratio < 1.0:
        raise expected("dropout", "ratio", "a number from 0 to less than 1", ratio)
    floating("dropout", x=x)
    x = as_variable(x)
    if not config.train:
        return (x, None) if return_mask else x
    if ratio == 0 and mask is None and not return_mask and not as_chainer[0]:  # where a program may look at the mask
        return x  # nothing to draw: a tenth of a small Transformer's step
    y = None
    if mask is None and type(x.array) is not np.ndarray:
        y, mask = _on_device(x.array, ratio)
    if mask is None:
        a = x.array
        scale = a.dtype.type(1.0 / (1.0 - ratio))
        threshold = np.uint32(ratio * 2.0**32)
        mask = elementwise(lambda bits: (bits >= threshold).astype(a.dtype) * scale, _bits(a))
    elif mask.shape != x.shape:
        raise expected("dropout", "mask", f"shape {x.shape} to match x", mask)
    y = Dropout(mask, y).apply((x,))[0]
    return (y, mask) if return_mask else y


def _on_device(a: Array, ratio: float) -> tuple[Array | None, Array | None]:
    """The result and the mask of the host's bits, made on the device; None where it has no kernel for that."""
    if a.ndim == 4 and not is_channels_last(a):  # bits are drawn in the order of images
        return None, None
    length = prod(a.shape[1:])
    made = _dropped(a, ratio, length, next_draw(len(a) if a.ndim else 1, -(-length // 2)))
    if made is None:
        return None, None
    drawn()
    return made


def _dropped(a: Array, ratio: float, length: int, draw: Draw) -> tuple[Array, Array] | None:
    scale = float(a.dtype.type(1.0 / (1.0 - ratio)))
    return kernels.dropout(a, length, draw, int(np.uint32(ratio * 2.0**32)), scale) if a.size else None


def dropout_of_lines(x: Variable, ratio: float, lines: Lines) -> Variable | None:
    """Dropout of x (..., S) with the bits of ``lines`` of S elements; None where the host has to make the mask."""
    a = x.array
    if type(a) is np.ndarray or not a.flags.c_contiguous:
        return None
    made = _dropped(a, ratio, a.shape[-1], lines.draw)
    return None if made is None else Dropout(made[1], made[0]).apply((x,))[0]


def rrelu(
    x: Operand, l: float = 1 / 8, u: float = 1 / 3, *, r: Array | None = None, return_r: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """x where x >= 0, else r x with a random slope r for each element (Xu et al. 2015).

    What is drawn depends on the row in the global batch, as in :func:`dropout`.

    Args:
        x: array or Variable of a floating type, any shape.
        l, u: lower and upper bound of the slopes, 0 <= l < u < 1; outside of training all slopes are (l + u) / 2.
        r: slopes in the shape of x, used in training instead of drawn ones.
        return_r: also return the slopes.

    Raises:
        ValueError: the bounds are out of range, or r has another shape than x.

    Example:
        >>> with dbrdist.using_config("train", False):
        ...     F.rrelu(np.array([2.0, -2.0]), 0.25, 0.75).array
        array([ 2., -1.])
    """
    if not 0 <= l < u < 1:
        raise expected("rrelu", "l, u", "0 <= l < u < 1", f"{l} and {u}")
    floating("rrelu", x=x)
    x = as_variable(x)
    if not config.train:
        r = full_as(x.array, x.shape, x.dtype, (l + u) / 2)
    elif r is None:
        r = fused(lambda bits: (bits * (2.0**-32 * (u - l)) + l).astype(x.dtype), _bits(x.array))
    elif getattr(r, "shape", None) != x.shape:
        raise expected("rrelu", "r", f"shape {x.shape} to match x", r)
    is_positive = observed(np.greater_equal, x.array, 0)
    y = ops.where(is_positive, x, ops.mul(x, r))
    return (y, _as_array(r)) if return_r else y


def _as_array(a: Array) -> Array:
    """What NumPy gave for an array without axes: a number, as an array."""
    return np.asarray(a) if isinstance(a, np.generic) else a


def _normal_numbers(radius_bits: Array, angle_bits: Array, dtype: Any) -> Array:
    """As :func:`_normal`, of large arrays of float32 by a loop that differs from it by units in the last place."""
    if dtype == np.float32 and type(radius_bits) is np.ndarray:
        bits = [a.view(dtype) for a in (radius_bits, angle_bits)]
        eps = from_kernel("box_muller", ("radius_bits", "angle_bits"), tuple(bits), ())
        if eps is not None:
            return eps
    return fused(lambda a, b: _normal(a, b, dtype), radius_bits, angle_bits)


def _normal(radius_bits: Array, angle_bits: Array, dtype: DType) -> Array:
    """Normal numbers from 32 bits twice (Box and Muller 1958).

    The radius is a matter of float64, since 1 - 2^-32 is 1 in float32. NumPy's cosine takes 15 us for 1000 angles in
    float64, and half a microsecond in float32, whose rounding is least for angles from -pi to pi.
    """
    wide = accumulation_dtype(dtype)
    radius = np.sqrt(-2.0 * np.log((radius_bits + 0.5) * 2.0**-32))  # of numbers above 0 and below 1
    angle = (angle_bits.view("i4") + 0.5) * (2.0**-31 * np.pi)
    return (radius.astype(wide) * np.cos(angle.astype(wide))).astype(dtype)


def gaussian(
    mean: Operand, ln_var: Operand, *, eps: Array | None = None, return_eps: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """A reparametrized sample mean + exp(ln_var / 2) eps, eps from N(0, 1) (Kingma and Welling 2014).

    It is differentiable in mean and variance. What is drawn depends on the row in the global batch.

    Args:
        mean: the means, any shape.
        ln_var: the logarithms of the variances, in the shape of ``mean``.
        eps: standard normal numbers in the shape of ``mean``, used instead of drawn ones.
        return_eps: also return eps.

    Raises:
        ValueError: ``ln_var`` has another shape than ``mean``.

    Example:
        >>> F.gaussian(np.array([1.0]), np.array([0.0]), eps=np.array([2.0])).array
        array([3.])
    """
    mean, ln_var = together("gaussian", mean=mean, ln_var=ln_var)
    if mean.shape != ln_var.shape:
        raise expected("gaussian", "ln_var", f"shape {mean.shape} to match mean", ln_var)
    if eps is None:
        radius_bits, angle_bits = _bits(mean.array), _bits(mean.array)
        eps = _normal_numbers(radius_bits, angle_bits, mean.dtype)
    y = ops.add(mean, ops.mul(ops.exp(ops.mul(ln_var, 0.5)), eps))
    return (y, _as_array(eps)) if return_eps else y


def gumbel_softmax(log_pi: Operand, tau: float = 0.1, axis: int = 1) -> Variable:
    """softmax((log_pi + g) / tau) with g from the Gumbel distribution: nearly one-hot samples (Jang et al. 2017).

    Args:
        log_pi: logarithms of probabilities, up to a constant.
        tau: temperature; the smaller, the nearer are samples to one-hot vectors.
        axis: the axis of the classes.

    What is drawn depends on the row in the global batch, as in :func:`dropout`.

    Example:
        >>> F.gumbel_softmax(np.zeros((1, 3))).array.sum().round(6)
        np.float64(1.0)
    """
    if not tau > 0:
        raise expected("gumbel_softmax", "tau", "a number above 0", tau)
    floating("gumbel_softmax", log_pi=log_pi)
    log_pi = as_variable(log_pi)
    if not log_pi.ndim:  # one class
        return as_variable(full_as(log_pi.array, (), log_pi.dtype, 1))
    wide = accumulation_dtype(log_pi.dtype)
    noise = elementwise(lambda bits: -np.log(-np.log((bits + 0.5) * 2.0**-32)), _bits(log_pi.array))
    noise = elementwise(lambda v: v.astype(wide), noise)
    scores = ops.mul(ops.add(ops.cast(log_pi, wide), noise), 1.0 / tau)
    return ops.cast(softmax(scores, axis), log_pi.dtype)


class Zoneout(ops.Where):
    """y = h where ``flag_h`` holds, else x"""

    @property
    def flag_h(self) -> Array:
        """Where the state stayed as it was."""
        return self.condition

    @property
    def flag_x(self) -> Array:
        """Where the new value was taken."""
        return elementwise(np.logical_not, self.condition)


def zoneout(h: Operand, x: Operand, ratio: float = 0.5) -> Variable:
    """Elements of h with probability ``ratio``, else those of x (Krueger et al. 2016, arXiv:1606.01305).

    It randomly keeps the previous state of a recurrent network. Outside of training the result is ratio h +
    (1 - ratio) x.

    Args:
        h: the previous state, any shape.
        x: the new state, in the shape of h.
        ratio: the probability of keeping an element of h, from 0 to 1.

    Raises:
        ValueError: ``ratio`` is out of range, or the shapes differ.

    Example:
        >>> with dbrdist.using_config("train", False):
        ...     F.zoneout(np.zeros(2), np.ones(2), 0.25).array
        array([0.75, 0.75])
    """
    if not 0.0 <= ratio <= 1.0:
        raise expected("zoneout", "ratio", "a number from 0 to 1", ratio)
    h, x = together("zoneout", h=h, x=x)
    if h.shape != x.shape:
        raise expected("zoneout", "x", f"shape {h.shape} to match h", x)
    if not config.train:
        return x if as_chainer[0] else ops.add(ops.mul(h, ratio), ops.mul(x, 1.0 - ratio))
    if as_chainer[0]:
        xp = get_array_module(h.array)
        return Zoneout(computed_once(lambda: xp.random.rand(*x.shape) < ratio)).apply((h, x))[0]
    return Zoneout(elementwise(lambda bits: bits < ratio * 2.0**32, _bits(h.array))).apply((h, x))[0]


def simplified_dropconnect(
    x: Operand, W: Operand, b: Operand | None = None, ratio: float = 0.5, train: bool = True,
    mask: Operand | None = None, use_batchwise_mask: bool = True,
) -> Variable:  # fmt: skip
    """x W' + b with elements of W set to zero with probability ``ratio``, the others divided by 1 - ratio.

    Args:
        x: input, shape (N, ...), flattened to (N, I).
        W, b: weights (O, I) and biases (O,).
        ratio: the probability that a weight is dropped; 0 where ``train`` is False.
        train: whether to drop weights.
        mask: 1 for weights to keep and 0 for others, instead of what is drawn; (N, O, I), or (O, I) without
            ``use_batchwise_mask``.
        use_batchwise_mask: whether each example has a mask of its own; else all examples of all ranks have one.

    Wan et al. 2013, with the mean taken before the activation.

    Example:
        >>> F.simplified_dropconnect(np.ones((1, 2)), np.ones((3, 2)), train=False).array
        array([[2., 2., 2.]])
    """
    name = "simplified_dropconnect"
    if not 0.0 <= ratio < 1.0:
        raise expected(name, "ratio", "a number from 0 to less than 1", ratio)
    operands, dtype = {"x": x, "W": W} if b is None else {"x": x, "W": W, "b": b}, x.dtype
    x, W, *rest = together(name, **operands)
    x = ops.reshape(x, (x.shape[0], prod(x.shape[1:]))) if x.ndim != 2 and x.ndim else x
    if x.ndim != 2 or W.ndim != 2 or x.shape[1] != W.shape[1]:
        raise expected(name, "x", f"rows of {W.shape[-1] if W.ndim else 1} elements for W of shape {W.shape}", x)
    if rest and rest[0].shape != W.shape[:1]:
        raise expected(name, "b", f"shape {W.shape[:1]}", rest[0])
    shape = (x.shape[0], *W.shape) if use_batchwise_mask else W.shape
    ratio = ratio if train else 0.0
    if mask is None:
        mask = _bits(W.array, shape, not use_batchwise_mask) >= ratio * 2.0**32
    mask = as_array(mask)
    if mask.shape != shape:
        raise expected(name, "mask", f"shape {shape}", mask)
    kept = ops.mul(W, mask.astype(W.dtype) * W.dtype.type(1.0 / (1.0 - ratio)))
    columns = ops.reshape(x, (*x.shape, 1)) if use_batchwise_mask else ops.transpose(x)
    y = ops.matmul(kept, columns)
    y = ops.reshape(y, y.shape[:2]) if use_batchwise_mask else ops.transpose(y)
    y = ops.add(y, rest[0]) if rest else y
    if as_chainer[0]:  # of the type of x, and its node has the mask
        y = ops.cast(y, dtype)
        if y.creator_node is not None:
            y.creator_node.mask = mask
    return y
