"""Pooling over any number of axes, its inverses, and pyramids of it.

A window is a product of intervals, so its maximum and its mean are taken along one axis after another.
"""

from __future__ import annotations

import itertools
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import array_operations
from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, zeros_as
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, elementwise
from dbrdist.core.array.types import PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.functions.convolution_nd import each_axis, out_size
from dbrdist.functions.pooling import max_pooling_2d


def _windows(
    function: str, ndim: int | None, x: Operand, ksize: Any, stride: Any, pad: Any
) -> tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """x as a Variable, and sizes, steps and padding of its windows for each axis."""
    (x,) = together(function, x=x)
    if x.ndim < 3 or (ndim is not None and x.ndim != ndim + 2):
        raise expected(function, "x", "shape (N, C, ...)" if ndim is None else f"shape (N, C, {ndim} axes)", x)
    k = each_axis(function, "ksize", ksize, x.ndim - 2)
    s = k if stride is None else each_axis(function, "stride", stride, x.ndim - 2)
    p = each_axis(function, "pad", pad, x.ndim - 2)
    if min(*k, *s) < 1 or min(p) < 0:
        raise expected(function, "ksize, stride, pad", "numbers >= 1, and pad >= 0", f"{k}, {s}, {p}")
    return x, k, s, p


def _out_sizes(function: str, x: Any, k: Any, s: Any, p: Any, cover_all: bool) -> tuple[int, ...]:
    """How many windows there are along each axis."""
    sizes = tuple(out_size(n, *window, 1, cover_all) for n, *window in zip(x.shape[2:], k, s, p))
    if min(sizes) < 1:
        raise expected(function, "x", f"no axis shorter than the window {k}", x, "pad it")
    return sizes


def _reach(size: int, num: int, u: int, s: int, p: int) -> tuple[slice, slice]:
    """The windows of ``num`` along an axis whose element u lies within ``size``, and the places of those elements."""
    first = max(0, -((u - p) // s))
    last = max(first, min(num, (size - 1 - u + p) // s + 1))
    start = first * s + u - p
    return slice(first, last), slice(start, start + (last - first - 1) * s + 1 if last > first else start, s)


def _whole(axis: int) -> tuple[slice, ...]:
    return (slice(None),) * axis


class Window(NamedTuple):
    """Windows along an axis: k elements every s, after p zeros; ``num`` of them over ``size`` elements."""

    axis: int
    k: int
    s: int
    p: int
    num: int
    size: int

    def places(self, u: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Indexes of the windows whose element u is no padding, and of those elements."""
        windows, elements = _reach(self.size, self.num, u, self.s, self.p)
        return (*_whole(self.axis), windows), (*_whole(self.axis), elements)

    def on(self, shape: tuple[int, ...], length: int) -> tuple[int, ...]:
        """A shape with another length of the axis."""
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def by_loop(self, name: str, arrays: tuple[Array, ...]) -> tuple[Array, ...] | None:
        """What a compiled loop makes of arrays, flat; None where there is none for them."""
        inner = prod(arrays[0].shape[self.axis + 1 :])
        return kernels.of_rows(name, arrays, self.num * inner, self.size * inner, inner, self.k, self.s, self.p)


class SumAlong(FunctionNode):
    """y = the sum of each window along an axis, or where ``chosen`` is given the element of that number in each"""

    is_linear = True
    gives_new = True

    def __init__(self, window: Window, chosen: Array | None = None) -> None:
        self.window, self.chosen = window, chosen

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        window = self.window
        taps = (window.places(u)[::-1] for u in range(window.k))
        return (_moved(xs[0], window.axis, window.num, taps, self.chosen, 1),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(SpreadAlong(self.window, self.chosen), gys[0]),)


class SpreadAlong(FunctionNode):
    """y = each element at all places of its window, or at the chosen one, overlaps added: the transpose of SumAlong"""

    is_linear = True
    gives_new = True

    def __init__(self, window: Window, chosen: Array | None = None) -> None:
        self.window, self.chosen = window, chosen

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        window = self.window
        if self.chosen is not None and self.chosen.size >= KERNEL_ELEMENTS and self.chosen.flags.c_contiguous:
            made = window.by_loop("spread_along", (self.chosen.view(np.float32), xs[0]))
            if made is not None:
                return (made[0].reshape(window.on(xs[0].shape, window.size)),)
        taps = map(window.places, range(window.k))
        return (_moved(xs[0], window.axis, window.size, taps, self.chosen, 0),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(SumAlong(self.window, self.chosen), gys[0]),)


def _moved(x: Array, axis: int, length: int, taps: Any, chosen: Array, windows: int) -> Array:
    """Pieces of x added up at other places of an axis, summed in the wider type.

    ``taps``: where each piece is and where it goes; ``windows``: which of both counts windows, as ``chosen`` does.
    """
    wide = x.astype(accumulation_dtype(x.dtype), copy=False)
    y = zeros_as(x, (*x.shape[:axis], length, *x.shape[axis + 1 :]), wide.dtype)
    for u, places in enumerate(taps):
        piece = wide[places[0]]
        if chosen is not None:
            piece = array_operations.chosen(chosen[places[windows]] == u, piece, wide.dtype.type(0))
        y[places[1]] += piece
    return y if y.dtype == x.dtype else elementwise(lambda v: v.astype(x.dtype), y)


class LargestAlong(FunctionNode):
    """y = the largest element of each window along an axis, the first of equal ones; NaN counts as the largest"""

    gives_new = True

    def __init__(self, window: Window) -> None:
        self.window = window

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x, window, xp = xs[0], self.window, get_array_module(xs[0])
        made = window.by_loop("largest_along", (x,)) if x.size >= KERNEL_ELEMENTS else None
        if made is not None:
            y, self.chosen = (v.reshape(window.on(x.shape, window.num)) for v in (made[0], made[1].view(np.int32)))
            return (y,)
        starts = np.arange(window.num) * window.s - window.p
        y = x.take(xp.asarray(np.maximum(starts, 0)), window.axis)
        chosen = np.maximum(-starts, 0).astype(np.int32).reshape(-1, *(1,) * (x.ndim - window.axis - 1))
        self.chosen = xp.broadcast_to(xp.asarray(chosen), y.shape).copy()
        for u in range(1, window.k):
            windows, elements = window.places(u)
            candidate, best = x[elements], y[windows]
            is_better = (candidate > best) | ((candidate != candidate) & (best == best))
            best[...] = array_operations.chosen(is_better, candidate, best)
            number = self.chosen[windows]
            number *= ~is_better  # NumPy's where branches at each element
            number += is_better * np.int32(u)
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(SpreadAlong(self.window, self.chosen), gys[0]),)


def max_pooling_nd(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, cover_all: bool = True,
    return_indices: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """The largest element of each window over all axes of x (N, C, ...) after the second.

    ``ksize``, ``stride`` and ``pad``: a number, or one for each axis; ``stride`` None means ``ksize``. ``cover_all``
    and ``return_indices`` as in :func:`max_pooling_2d`; a place in a window is counted in C order.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default True.
        return_indices: also return the position of each maximum in its window; default False.

    Example:
        >>> F.max_pooling_nd(np.array([[[1.0, 3.0, 5.0, 2.0]]]), 2).array
        array([[[3., 5.]]])
    """
    return _max("max_pooling_nd", None, x, ksize, stride, pad, cover_all, return_indices)


def max_pooling_1d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, cover_all: bool = True,
    return_indices: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """The largest element of each window of x (N, C, L); see :func:`max_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default True.
        return_indices: also return the position of each maximum in its window; default False.

    Example:
        >>> F.max_pooling_1d(np.array([[[1.0, 3.0, 5.0, 2.0]]]), 2).array
        array([[[3., 5.]]])
    """
    return _max("max_pooling_1d", 1, x, ksize, stride, pad, cover_all, return_indices)


def max_pooling_3d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, cover_all: bool = True,
    return_indices: bool = False,
) -> Variable | tuple[Variable, Array]:  # fmt: skip
    """The largest element of each window of x (N, C, D, H, W); see :func:`max_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        cover_all: let the last window reach beyond the input, so that every element is covered; default True.
        return_indices: also return the position of each maximum in its window; default False.

    Example:
        >>> F.max_pooling_3d(np.ones((1, 1, 4, 4, 4)), 2).shape
        (1, 1, 2, 2, 2)
    """
    return _max("max_pooling_3d", 3, x, ksize, stride, pad, cover_all, return_indices)


def _max(
    function: str,
    ndim: int | None,
    x: Operand,
    ksize: Any,
    stride: Any,
    pad: Any,
    cover_all: bool,
    return_indices: bool,
) -> Variable | tuple[Variable, Array]:
    x, k, s, p = _windows(function, ndim, x, ksize, stride, pad)
    out = _out_sizes(function, x, k, s, p, cover_all)
    if any(q >= n or (num - 1) * m - q >= size for n, m, q, num, size in zip(k, s, p, out, x.shape[2:])):
        raise expected(
            function, "ksize, stride, pad, cover_all", f"windows that each see a part of x of shape {x.shape}",
            f"{k}, {s}, {p}, {cover_all}", "a window without elements has no largest one: pad less, or cover_all=False",
        )  # fmt: skip
    y = x
    for i in range(x.ndim - 3, -1, -1):  # the last axis first: of equal elements the first in C order is chosen
        y = LargestAlong(Window(i + 2, k[i], s[i], p[i], out[i], x.shape[i + 2])).apply((y,))[0]
    return (y, _places(as_array(x), as_array(y), k, s, p)) if return_indices else y


def _places(x: Array, y: Array, k: tuple[int, ...], s: tuple[int, ...], p: tuple[int, ...]) -> Array:
    """Where in its window each maximum lies."""
    xp = get_array_module(x)
    found = xp.zeros(y.shape, np.int32)
    is_open = xp.ones(y.shape, bool)
    for place, offset in enumerate(itertools.product(*map(range, k))):
        inside, elements = _seen(x, y.shape[2:], offset, s, p)
        here = is_open.copy()
        here[...] = False
        largest = y[inside]
        is_largest = (elements == largest) | ((elements != elements) & (largest != largest))  # NaN is the largest
        here[inside] = is_largest & is_open[inside]
        xp.copyto(found, place, where=here)
        is_open &= ~here
    return found


def _seen(
    x: Array, sizes: tuple[int, ...], offset: tuple[int, ...], s: tuple[int, ...], p: tuple[int, ...]
) -> tuple[Any, Any]:
    """The windows that have an element of x at ``offset``, and those elements."""
    windows, elements = [slice(None)] * 2, [slice(None)] * 2
    for numbers in zip(x.shape[2:], sizes, offset, s, p):
        for places, found in zip((windows, elements), _reach(*numbers)):
            places.append(found)
    return tuple(windows), ops.getitem(x, tuple(elements))


def average_pooling_nd(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, pad_value: int | None = 0
) -> Variable:
    """The mean of each window over all axes of x (N, C, ...) after the second.

    ``pad_value``: 0 counts padding as zeros; None leaves it out of the mean. The rest as in :func:`max_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        pad_value: 0 counts padding as zeros, None leaves it out of the mean.

    Example:
        >>> F.average_pooling_nd(np.array([[[1.0, 3.0, 5.0, 7.0]]]), 2).array
        array([[[2., 6.]]])
    """
    return _average("average_pooling_nd", None, x, ksize, stride, pad, pad_value)


def average_pooling_1d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, pad_value: int = 0
) -> Variable:
    """The mean of each window of x (N, C, L); see :func:`average_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        pad_value: 0 counts padding as zeros, None leaves it out of the mean.

    Example:
        >>> F.average_pooling_1d(np.array([[[1.0, 3.0, 5.0, 7.0]]]), 2).array
        array([[[2., 6.]]])
    """
    return _average("average_pooling_1d", 1, x, ksize, stride, pad, pad_value)


def average_pooling_3d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, pad_value: int = 0
) -> Variable:
    """The mean of each window of x (N, C, D, H, W); see :func:`average_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.
        pad_value: 0 counts padding as zeros, None leaves it out of the mean.

    Example:
        >>> F.average_pooling_3d(np.ones((1, 1, 4, 4, 4)), 2).shape
        (1, 1, 2, 2, 2)
    """
    return _average("average_pooling_3d", 3, x, ksize, stride, pad, pad_value)


def _average(
    function: str,
    ndim: int | None,
    x: Operand,
    ksize: PerAxis,
    stride: PerAxis | None,
    pad: PerAxis,
    pad_value: int | None,
) -> Any:
    x, k, s, p = _windows(function, ndim, x, ksize, stride, pad)
    if pad_value not in (0, None):
        raise expected(function, "pad_value", "0 or None", repr(pad_value))
    out = _out_sizes(function, x, k, s, p, False)
    y = ops.cast(x, accumulation_dtype(x.dtype))
    for i in range(x.ndim - 2):
        y = ops.mul(call(SumAlong(Window(i + 2, k[i], s[i], p[i], out[i], x.shape[i + 2])), y), 1.0 / k[i])
        if pad_value is None:
            start = np.arange(y.shape[i + 2]) * s[i] - p[i]
            seen = np.minimum(start + k[i], x.shape[i + 2]) - np.maximum(start, 0)
            share = get_array_module(y).asarray(k[i] / seen, y.dtype)
            y = ops.mul(y, share.reshape((-1, *(1,) * (y.ndim - i - 3))))
    return ops.cast(y, x.dtype)


# ---- back to the size before ----------------------------------------------------------------------------------------


def _before(
    function: str,
    x: Any,
    k: tuple[int, ...],
    s: tuple[int, ...],
    p: tuple[int, ...],
    outsize: PerAxis | None,
    cover_all: bool,
) -> tuple[int, ...]:
    """The sizes before pooling: ``outsize``, or the smallest ones."""
    sizes = x.shape[2:]
    if outsize is None:
        shift = [step - 1 if cover_all else 0 for step in s]
        return tuple(step * (n - 1) + size - d - 2 * q for n, size, step, q, d in zip(sizes, k, s, p, shift))
    out = each_axis(function, "outsize", outsize, len(sizes))
    fitting = tuple(out_size(o, size, step, q, 1, cover_all) for o, size, step, q in zip(out, k, s, p))
    if min(out) < 1 or fitting != sizes:
        raise expected(function, "outsize", f"sizes whose pooling has the sizes {sizes} of x", str(out))
    return out


def unpooling_nd(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, outsize: PerAxis | None = None,
    cover_all: bool = True,
) -> Variable:  # fmt: skip
    """Each element of x (N, C, ...) at all places of its window, overlaps added.

    ``outsize``: the sizes before pooling, of which several give the sizes of x; None for the smallest. The rest as of
    :func:`max_pooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: elements cut off on both sides; default 0.
        outsize: sizes of the result; None for the smallest.
        cover_all: the rounding of the pooling that is undone; default True.

    Example:
        >>> F.unpooling_nd(np.array([[[1.0, 2.0]]]), 2, cover_all=False).array
        array([[[1., 1., 2., 2.]]])
    """
    return _unpooling("unpooling_nd", None, x, ksize, stride, pad, outsize, cover_all)


def unpooling_1d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, outsize: PerAxis | None = None,
    cover_all: bool = True,
) -> Variable:  # fmt: skip
    """Each element of x (N, C, L) at all places of its window, overlaps added; see :func:`unpooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: elements cut off on both sides; default 0.
        outsize: sizes of the result; None for the smallest.
        cover_all: the rounding of the pooling that is undone; default True.

    Example:
        >>> F.unpooling_1d(np.array([[[1.0, 2.0]]]), 2, cover_all=False).array
        array([[[1., 1., 2., 2.]]])
    """
    return _unpooling("unpooling_1d", 1, x, ksize, stride, pad, outsize, cover_all)


def unpooling_2d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, outsize: PerAxis | None = None,
    cover_all: bool = True,
) -> Variable:  # fmt: skip
    """Each element of x (N, C, H, W) at all places of its window, overlaps added; see :func:`unpooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: elements cut off on both sides; default 0.
        outsize: sizes of the result; None for the smallest.
        cover_all: the rounding of the pooling that is undone; default True.

    Example:
        >>> F.unpooling_2d(np.array([[[[1.0, 2.0]]]]), 2, cover_all=False).array[0, 0]
        array([[1., 1., 2., 2.],
               [1., 1., 2., 2.]])
    """
    return _unpooling("unpooling_2d", 2, x, ksize, stride, pad, outsize, cover_all)


def unpooling_3d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, outsize: PerAxis | None = None,
    cover_all: bool = True,
) -> Variable:  # fmt: skip
    """Each element of x (N, C, D, H, W) at all places of its window, overlaps added; see :func:`unpooling_nd`.

    Args:
        x: array or Variable of a floating type (N, C, ...).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: elements cut off on both sides; default 0.
        outsize: sizes of the result; None for the smallest.
        cover_all: the rounding of the pooling that is undone; default True.

    Example:
        >>> F.unpooling_3d(np.ones((1, 1, 2, 2, 2)), 2, cover_all=False).shape
        (1, 1, 4, 4, 4)
    """
    return _unpooling("unpooling_3d", 3, x, ksize, stride, pad, outsize, cover_all)


def _unpooling(
    function: str,
    ndim: int | None,
    x: Operand,
    ksize: Any,
    stride: Any,
    pad: Any,
    outsize: PerAxis | None,
    cover_all: bool,
) -> Any:
    x, k, s, p = _windows(function, ndim, x, ksize, stride, pad)
    out = _before(function, x, k, s, p, outsize, cover_all)
    y = x
    for i, size in enumerate(out):
        y = call(SpreadAlong(Window(i + 2, k[i], s[i], p[i], x.shape[i + 2], size)), y)
    return y


def _placed(x: Variable, axis: int, u: int, s: int, p: int, size: int) -> Any:
    """The elements of x along an axis at the places j s + u - p of ``size``; those outside fall away."""
    windows, elements = _reach(size, x.shape[axis], u, s, p)
    part = ops.getitem(x, (*_whole(axis), windows))
    return ops.scatter(part, (*_whole(axis), elements), (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def upsampling_2d(
    x: Operand, indexes: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0,
    outsize: PerAxis | None = None, cover_all: bool = True,
) -> Variable:  # fmt: skip
    """Each element of x at the place in its window that ``indexes`` names; overlaps are added.

    Args:
        x: pooled images, shape (N, C, H, W).
        indexes: places u * kw + v within the windows, integers in the shape of x, as returned by
            ``max_pooling_2d(..., return_indices=True)``.
        ksize, stride, pad: those of the pooling, each a number or a pair for rows and columns; ``stride`` None means
            ``ksize``.
        outsize: height and width of the result; None derives them from the other arguments.
        cover_all: whether the pooling let its last window reach beyond the image.

    Raises:
        ValueError: ``indexes`` has another shape than x, or places outside of the window.

    Example:
        >>> x = np.arange(16.0).reshape(1, 1, 4, 4)
        >>> y, indexes = F.max_pooling_2d(x, 2, return_indices=True)
        >>> F.upsampling_2d(y, indexes, 2, outsize=(4, 4)).array[0, 0]
        array([[ 0.,  0.,  0.,  0.],
               [ 0.,  5.,  0.,  7.],
               [ 0.,  0.,  0.,  0.],
               [ 0., 13.,  0., 15.]])
    """
    x, k, s, p = _windows("upsampling_2d", 2, x, ksize, stride, pad)
    indexes = as_array(indexes)
    if getattr(indexes, "shape", None) != x.shape or indexes.dtype.kind not in "iu":
        raise expected("upsampling_2d", "indexes", f"integers of shape {x.shape} as x", indexes)
    if indexes.size and (int(indexes.min()) < 0 or int(indexes.max()) >= k[0] * k[1]):
        raise expected("upsampling_2d", "indexes", f"places from 0 to {k[0] * k[1] - 1} in a window {k}", indexes)
    h, w = _before("upsampling_2d", x, k, s, p, outsize, cover_all)
    y = None
    for place in range(k[0] * k[1]):
        u, v = divmod(place, k[1])
        part = ops.where(indexes == place, x, 0.0)  # 0 times what is not finite would be NaN
        part = _placed(_placed(part, 2, u, s[0], p[0], h), 3, v, s[1], p[1], w)
        y = part if y is None else ops.add(y, part)
    return y


def spatial_pyramid_pooling_2d(x: Operand, pyramid_height: int, pooling: Any = None) -> Variable:
    """The largest elements in 1, 2 x 2, 4 x 4, ... windows (He et al. 2014, arXiv:1406.4729).

    The result has the same length for images of any size.

    Args:
        x: images, shape (N, C, H, W).
        pyramid_height: the number of levels P; H and W are at least 2^(P - 1).
        pooling: 'max', or None for the same.

    Returns:
        A Variable of shape (N, C (1 + 4 + ... + 4^(P - 1)), 1, 1).

    Raises:
        ValueError: the image is too small for ``pyramid_height``, or ``pooling`` is unknown.

    Example:
        >>> F.spatial_pyramid_pooling_2d(np.zeros((1, 2, 7, 9)), 2).shape
        (1, 10, 1, 1)
    """
    (x,) = together("spatial_pyramid_pooling_2d", x=x)
    if pooling not in (None, "max"):
        raise expected("spatial_pyramid_pooling_2d", "pooling", "'max'", repr(pooling))
    finest = 2 ** (pyramid_height - 1)
    if x.ndim != 4 or pyramid_height < 1 or min(x.shape[2:]) < finest:
        what = f"shape (N, C, H, W) with H and W at least {max(finest, 1)} for pyramid_height={pyramid_height}"
        raise expected("spatial_pyramid_pooling_2d", "x", what, x)
    levels = []
    for level in range(pyramid_height):
        bins = 2**level
        ksize = [-(-size // bins) for size in x.shape[2:]]
        pad = [(k * bins - size) // 2 for k, size in zip(ksize, x.shape[2:])]
        # Where the first window is in the padding, so is the last.
        if any((bins - 1) * k - q >= size for q, k, size in zip(pad, ksize, x.shape[2:])):
            what = f"rows and columns of which each of {bins} windows of {ksize[0]} x {ksize[1]} sees some"
            raise expected("spatial_pyramid_pooling_2d", "x", what, x, "choose a lower pyramid_height, or resize x")
        y = max_pooling_2d(x, tuple(ksize), None, tuple(pad), True)
        levels.append(ops.reshape(y, (x.shape[0], x.shape[1] * bins * bins)))  # -1 would not do for an empty batch
    y = ops.concat(levels, axis=1)
    return ops.reshape(y, (*y.shape, 1, 1))
