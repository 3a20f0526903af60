"""Convolutions over any number of axes, and two special forms over two, all made of the two-dimensional one.

N examples, C channels, O outputs, G groups. A convolution over three axes is a sum of two-dimensional ones, one for
each place along the first axis of the window, over all places of the result at once: so it runs on the same kernels.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dbrdist.core.array.backend import accumulation_dtype, zeros_as
from dbrdist.core.array.types import PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected, floating, wrong_shape
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.functions.connection import activation
from dbrdist.functions.convolution import convolution_2d, deconvolution_2d


def each_axis(function: str, argument: str, value: Any, ndim: int) -> tuple[int, ...]:
    """A number for each of ``ndim`` axes, from one for all or a sequence."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * ndim
    if len(values) != ndim or not all(isinstance(v, (int, np.integer)) for v in values):
        raise expected(function, argument, f"an integer or {ndim} of them", repr(value))
    return tuple(operator.index(v) for v in values)


def out_size(size: int, k: int, s: int, p: int, d: int, cover_all: bool) -> int:
    """How many windows there are along an axis."""
    room = size + 2 * p - (d * (k - 1) + 1)
    return (room + s - 1) // s + 1 if cover_all else room // s + 1


def _operands(function: str, ndim: int | None, x: Operand, W: Operand, b: Any) -> tuple[Any, Any, Any]:
    floating(function, **{"x": x, "W": W, **({} if b is None else {"b": b})})
    x = activation(x)
    ndim = x.ndim - 2 if ndim is None else ndim
    if ndim < 1 or x.ndim != ndim + 2:
        raise expected(function, "x", f"shape (N, C, {ndim} axes)" if ndim > 0 else "shape (N, C, ...)", x)
    if W.ndim != x.ndim:
        raise expected(function, "W", f"{x.ndim} axes, as x has", W)
    return x, W, b


def _geometry(function: str, stride: PerAxis, pad: PerAxis, dilate: PerAxis, ndim: int) -> tuple[tuple[int, ...], ...]:
    """Steps, padding and distances within a window for each axis."""
    s, p, d = (each_axis(function, name, v, ndim) for name, v in (("stride", stride), ("pad", pad), ("dilate", dilate)))
    if min(*s, *d) < 1 or min(p) < 0:
        raise expected(function, "stride, pad, dilate", "numbers >= 1, and pad >= 0", f"{s}, {p}, {d}")
    return s, p, d


def _check_channels(function: str, x: Operand, W: Operand, b: Operand | None, groups: int, outputs: int) -> None:
    """Check that W (inputs and outputs in either order) and b fit x; ``outputs``: the axis of W with the outputs."""
    num_in, num_out = W.shape[1 - outputs], W.shape[outputs]
    num_in, num_out = (num_in, num_out * groups) if outputs else (num_in * groups, num_out)
    if groups < 1 or num_in != x.shape[1] or num_in % groups or num_out % groups or min(W.shape[2:]) < 1:
        axes = "(C, O/groups, windows)" if outputs else "(O, C/groups, windows)"
        raise expected(function, "W", f"shape {axes} for x of shape {x.shape} with groups={groups}", W)
    if b is not None and b.shape != (num_out,):
        raise expected(function, "b", f"shape ({num_out},) to match W", b)


def _wide(x: Operand, W: Operand) -> tuple[Operand, Operand]:
    """Operands for sums of several two-dimensional results, on the host: in 16 bits each would be rounded, and the sum
    after each of them.
    """
    if x.ndim < 5 or x.dtype.itemsize != 2 or not isinstance(as_array(x), np.ndarray):
        return x, W
    dtype = accumulation_dtype(x.dtype)
    return ops.cast(x, dtype), ops.cast(W, dtype)


def _with_bias(y: Variable, b: Variable | None) -> Variable:
    return y if b is None else ops.add(y, ops.reshape(ops.cast(b, y.dtype), (-1, *(1,) * (y.ndim - 2))))


def convolution_nd(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0, cover_all: bool = False,
    dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Convolution over all axes of x after the second; as :func:`convolution_2d` over two.

    x (N, C, ...), W (O, C/groups, ...), b (O,); ``stride``, ``pad`` and ``dilate``: a number, or one for each axis.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (O, C/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.convolution_nd(np.arange(4.0).reshape(1, 1, 4), np.ones((1, 1, 2))).array
        array([[[1., 3., 5.]]])
    """
    return _convolution("convolution_nd", None, x, W, b, stride, pad, cover_all, dilate, groups)


def convolution_1d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0, cover_all: bool = False,
    dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Convolution over one axis: x (N, C, L), W (O, C/groups, k), b (O,); see :func:`convolution_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (O, C/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.convolution_1d(np.arange(4.0).reshape(1, 1, 4), np.ones((1, 1, 2))).array
        array([[[1., 3., 5.]]])
    """
    return _convolution("convolution_1d", 1, x, W, b, stride, pad, cover_all, dilate, groups)


def convolution_3d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0, cover_all: bool = False,
    dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Convolution over three axes: x (N, C, D, H, W), W (O, C/groups, kd, kh, kw); see :func:`convolution_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (O, C/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.convolution_3d(np.ones((1, 2, 4, 4, 4)), np.ones((5, 2, 3, 3, 3))).shape
        (1, 5, 2, 2, 2)
    """
    return _convolution("convolution_3d", 3, x, W, b, stride, pad, cover_all, dilate, groups)


def _convolution(
    function: str, ndim: int | None, x: Operand, W: Operand, b: Operand | None, stride: Any, pad: Any,
    cover_all: bool, dilate: PerAxis, groups: int,
) -> Variable:  # fmt: skip
    x, W, b = _operands(function, ndim, x, W, b)
    ndim = x.ndim - 2
    s, p, d = _geometry(function, stride, pad, dilate, ndim)
    groups = operator.index(groups)
    _check_channels(function, x, W, b, groups, outputs=0)
    sizes = [out_size(n, k, *rest, cover_all) for n, k, *rest in zip(x.shape[2:], W.shape[2:], s, p, d)]
    if min(sizes) < 1:
        raise expected(function, "x", f"axes no smaller than the window {W.shape[2:]}", x, "pad it")
    wide_x, wide_W = _wide(x, W)
    return ops.cast(_with_bias(_windows(wide_x, wide_W, s, p, d, cover_all, groups), b), x.dtype)


def _windows(
    x: Operand, W: Operand, s: tuple[int, ...], p: tuple[int, ...], d: tuple[int, ...], cover_all: bool, groups: int
) -> Any:
    """The convolution without bias."""
    ndim = x.ndim - 2
    if ndim == 1:
        y = convolution_2d(
            ops.reshape(x, (*x.shape[:2], 1, x.shape[2])), ops.reshape(W, (*W.shape[:2], 1, W.shape[2])), None,
            (1, s[0]), (0, p[0]), cover_all, dilate=(1, d[0]), groups=groups,
        )  # fmt: skip
        return ops.reshape(y, (*y.shape[:2], y.shape[3]))
    if ndim == 2:
        return convolution_2d(x, W, None, s, p, cover_all, dilate=d, groups=groups)
    n, c, size = x.shape[:3]
    k, num = W.shape[2], out_size(x.shape[2], W.shape[2], s[0], p[0], d[0], cover_all)
    last = s[0] * (num - 1) + d[0] * (k - 1) + 1  # as many elements are seen, padding included
    x = _padded(x, p[0], max(0, last - size - p[0]))
    y = None
    for u in range(k):
        part = ops.getitem(x, (slice(None), slice(None), slice(u * d[0], u * d[0] + s[0] * (num - 1) + 1, s[0])))
        part = ops.reshape(_moved(part, 2, 1), (n * num, c, *x.shape[3:]))
        z = _windows(part, ops.getitem(W, (slice(None), slice(None), u)), s[1:], p[1:], d[1:], cover_all, groups)
        y = z if y is None else ops.add(y, z)
    return _moved(ops.reshape(y, (n, num, *y.shape[1:])), 1, 2)


def _moved(x: Operand, source: int, target: int) -> Any:
    axes = list(range(x.ndim))
    axes.insert(target, axes.pop(source))
    return ops.transpose(x, tuple(axes))


def _padded(x: Operand, before: int, after: int) -> Operand:
    """Zeros in front of the third axis and behind it."""
    if not before and not after:
        return x
    a = as_array(x)
    parts = [zeros_as(a, (*x.shape[:2], n, *x.shape[3:]), x.dtype) for n in (before, after)]
    return ops.concat([parts[0], x, parts[1]], axis=2)


def deconvolution_nd(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0,
    outsize: PerAxis | None = None, dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """The transpose of :func:`convolution_nd`; as :func:`deconvolution_2d` over two axes.

    x (N, C, ...), W (C, O/groups, ...), b (O,); ``outsize``: the sizes of the result, of which several have the same
    convolution; None for the smallest.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (C, O/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        outsize: sizes of the output; None for the smallest that fit.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.deconvolution_nd(np.ones((1, 1, 2)), np.ones((1, 1, 2)), stride=2).shape
        (1, 1, 4)
    """
    return _deconvolution("deconvolution_nd", None, x, W, b, stride, pad, outsize, dilate, groups)


def deconvolution_1d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0,
    outsize: PerAxis | None = None, dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """The transpose of :func:`convolution_1d`: x (N, C, L), W (C, O/groups, k); see :func:`deconvolution_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (C, O/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        outsize: sizes of the output; None for the smallest that fit.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.deconvolution_1d(np.ones((1, 1, 2)), np.ones((1, 1, 2)), stride=2).shape
        (1, 1, 4)
    """
    return _deconvolution("deconvolution_1d", 1, x, W, b, stride, pad, outsize, dilate, groups)


def deconvolution_3d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0,
    outsize: PerAxis | None = None, dilate: PerAxis = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """The transpose of :func:`convolution_3d`: x (N, C, D, H, W), W (C, O/groups, kd, kh, kw).

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (C, O/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        outsize: sizes of the output; None for the smallest that fit.
        dilate: distance between elements of a window; default 1.
        groups: number of groups into which channels are split; default 1.

    Example:
        >>> F.deconvolution_3d(np.ones((1, 2, 2, 2, 2)), np.ones((2, 1, 2, 2, 2)), stride=2).shape
        (1, 1, 4, 4, 4)
    """
    return _deconvolution("deconvolution_3d", 3, x, W, b, stride, pad, outsize, dilate, groups)


def _deconvolution(
    function: str, ndim: int | None, x: Operand, W: Operand, b: Any, stride: PerAxis,
    pad: PerAxis, outsize: PerAxis | None,
    dilate: PerAxis, groups: int,
) -> Variable:  # fmt: skip
    x, W, b = _operands(function, ndim, x, W, b)
    ndim = x.ndim - 2
    s, p, d = _geometry(function, stride, pad, dilate, ndim)
    groups = operator.index(groups)
    _check_channels(function, x, W, b, groups, outputs=1)
    k, sizes = W.shape[2:], x.shape[2:]
    smallest = [s_ * (n - 1) + d_ * (k_ - 1) + 1 - 2 * p_ for n, k_, s_, p_, d_ in zip(sizes, k, s, p, d)]
    out = tuple(smallest) if outsize is None else each_axis(function, "outsize", outsize, ndim)
    for n, k_, s_, p_, d_, o in zip(sizes, k, s, p, d, out):
        if o < 1 or n not in (out_size(o, k_, s_, p_, d_, False), out_size(o, k_, s_, p_, d_, True)):
            raise wrong_shape(function, "outsize", f"sizes whose convolution has the sizes {sizes} of x", str(out))
    wide_x, wide_W = _wide(x, W)
    return ops.cast(_with_bias(_spread_windows(wide_x, wide_W, s, p, d, out, groups), b), x.dtype)


def _spread_windows(
    x: Operand,
    W: Operand,
    s: tuple[int, ...],
    p: tuple[int, ...],
    d: tuple[int, ...],
    out: tuple[int, ...],
    groups: int,
) -> Variable:
    """The transposed convolution without bias."""
    ndim = x.ndim - 2
    if ndim == 1:
        y = deconvolution_2d(
            ops.reshape(x, (*x.shape[:2], 1, x.shape[2])), ops.reshape(W, (*W.shape[:2], 1, W.shape[2])), None,
            (1, s[0]), (0, p[0]), (1, out[0]), dilate=(1, d[0]), groups=groups,
        )  # fmt: skip
        return ops.reshape(y, (*y.shape[:2], y.shape[3]))
    if ndim == 2:
        return deconvolution_2d(x, W, None, s, p, out, dilate=d, groups=groups)
    n, c, size = x.shape[:3]
    k = W.shape[2]
    merged = ops.reshape(_moved(x, 2, 1), (n * size, c, *x.shape[3:]))
    full = max(s[0] * (size - 1) + d[0] * (k - 1) + 1, p[0] + out[0])
    y = None
    for u in range(k):
        z = _spread_windows(merged, ops.getitem(W, (slice(None), slice(None), u)), s[1:], p[1:], d[1:], out[1:], groups)
        z = _moved(ops.reshape(z, (n, size, *z.shape[1:])), 1, 2)
        at = (slice(None), slice(None), slice(u * d[0], u * d[0] + s[0] * (size - 1) + 1, s[0]))
        z = ops.scatter(z, at, (*z.shape[:2], full, *z.shape[3:]))
        y = z if y is None else ops.add(y, z)
    return ops.getitem(y, (slice(None), slice(None), slice(p[0], p[0] + out[0])))


def depthwise_convolution_2d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0
) -> Variable:
    """Each channel convolved by itself with D filters (Sifre 2014).

    Args:
        x: images, shape (N, C, H, W).
        W: filters, shape (D, C, kh, kw).
        b: biases, shape (D C,); None for none.
        stride: step of the window in pixels, a number or a pair for rows and columns.
        pad: zeros on each side in pixels, a number or a pair.

    Returns:
        A Variable of shape (N, D C, OH, OW); the D results of a channel follow each other.

    Raises:
        ValueError: W has another number of channels than x.

    Example:
        >>> F.depthwise_convolution_2d(np.ones((1, 3, 4, 4)), np.ones((2, 3, 3, 3))).shape
        (1, 6, 2, 2)
    """
    x, W, b = _operands("depthwise_convolution_2d", 2, x, W, b)
    depth, channels = W.shape[:2]
    if channels != x.shape[1]:
        raise expected("depthwise_convolution_2d", "W", f"shape (D, {x.shape[1]}, kh, kw) to match x", W)
    filters = ops.reshape(_moved(W, 0, 1), (depth * channels, 1, *W.shape[2:]))
    return convolution_2d(x, filters, b, stride, pad, groups=channels)


def dilated_convolution_2d(
    x: Operand, W: Operand, b: Operand | None = None, stride: PerAxis = 1, pad: PerAxis = 0, dilate: PerAxis = 1,
    cover_all: bool = False,
) -> Variable:  # fmt: skip
    """:func:`convolution_2d` with windows whose elements lie ``dilate`` apart (Yu and Koltun 2016).

    Args:
        x: array or Variable of a floating type (N, C, ...).
        W: filters (O, C/groups, ...).
        b: bias (O,), or None.
        stride: step of the window, a number or one for each axis; default 1.
        pad: zeros added on both sides, a number or one for each axis; default 0.
        dilate: distance between elements of a window; default 1.
        cover_all: let the last window reach beyond the input, so that every element is covered; default False.

    Example:
        >>> F.dilated_convolution_2d(np.ones((1, 1, 7, 7)), np.ones((1, 1, 3, 3)), dilate=2).shape
        (1, 1, 3, 3)
    """
    return convolution_2d(x, W, b, stride, pad, cover_all, dilate=dilate)
