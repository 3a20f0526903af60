"""Sums of many numbers, which in float32 lose digits where they are added one after another."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, is_floating
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, kernels
from dbrdist.core.array.types import DType

if TYPE_CHECKING:
    from collections.abc import Callable


def sum_over(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    """Sums of 16-bit types run in float32 and are narrowed once."""
    if not is_floating(x.dtype):
        return x.sum(axis=axis, keepdims=keepdims)
    y = wide_sum(x, axis, keepdims)
    return y if y.dtype == x.dtype else y.astype(x.dtype)


_MANY_ROWS = 1024
_ROWS_IN_A_SUM = 256  # at least; sums of float32 of so many lose less than a digit
_ELEMENTS_AT_ONCE = 1 << 16  # to which further rows are added; they stay in cache


def wide_sum(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    """Sums of floats, in the type in which they run.

    NumPy adds rows one after another: of 400,000 rows of 8, float32 loses two digits. Many at once, each to its own
    sum, cost none, and take a tenth of the time.
    """
    is_on_host = type(x) is np.ndarray and x.dtype.char in "fd"
    if is_on_host and axis and len(axis) > 1 and x.size >= KERNEL_ELEMENTS and x.flags.c_contiguous:
        last, others = _last_axes(axis, x.ndim)
        if last and others:  # NumPy would add short rows one after another
            total = wide_sum(wide_sum(x, last, True), others, True)
            return total if keepdims else total.reshape([n for i, n in enumerate(x.shape) if i not in last + others])
    y = _by_loops(x, axis) if is_on_host and x.size >= KERNEL_ELEMENTS else None
    if y is not None:
        shape = [1 if axis is None or i in (a % x.ndim for a in axis) else n for i, n in enumerate(x.shape)]
        return y.reshape(shape) if keepdims else y[()]
    rows = _as_rows(x, axis) if axis and is_on_host else None
    if rows is None:
        return x.sum(axis=axis, dtype=accumulation_dtype(x.dtype), keepdims=keepdims)
    gone = {a % x.ndim for a in axis or ()}
    shape = [1 if i in gone else n for i, n in enumerate(x.shape) if keepdims or i not in gone]
    return sum_of_many_rows(rows).reshape(shape)


def mean_over(x: Array, axis: tuple[int, ...] | None, keepdims: bool) -> tuple[Array, float]:
    """The mean over axes, summed and divided in the wider type, and 1 / the number of elements."""
    if _has_images(x, x.shape, axis, keepdims):
        y = kernels["mean_of_images"](x)
        if y is not None:
            return y, 1.0 / (x.shape[2] * x.shape[3])
    total = wide_sum(x, axis, keepdims)
    count = x.size // total.size if total.size else 0
    scale = 1.0 / count if count else float("nan")
    return (total * scale).astype(x.dtype, copy=False), scale


def spread_mean(gy: Array, shape: tuple[int, ...], axis: tuple[int, ...] | None, keepdims: bool) -> Array | None:
    """The gradient of the mean over images of this shape, where a device has a kernel for it; else None."""
    return kernels["mean_of_images_backward"](gy, shape) if _has_images(gy, shape, axis, keepdims) else None


def _has_images(a: Array, shape: tuple[int, ...], axis: tuple[int, ...] | None, keepdims: bool) -> bool:
    is_mean = len(shape) == 4 and axis == (2, 3) and not keepdims
    return is_mean and type(a) is not np.ndarray and "mean_of_images" in kernels


def product_sum(a: Array, b: Array, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    """The sum of a b over axes, of arrays of one shape and a type in which sums run; no product need be kept."""
    of_rows = kernels.get("of_rows")
    is_along_last = a.ndim > 1 and axis in ((-1,), (a.ndim - 1,)) and 0 < a.shape[-1] < _LONG
    if of_rows is not None and is_along_last and a.flags.c_contiguous and b.flags.c_contiguous:
        made = of_rows("dot_of_rows", (a, b), a.shape[-1])
        if made is not None:
            return made[0].reshape(*a.shape[:-1], *(1,) * keepdims)
    return sum_over(a * b, axis, keepdims)


def _last_axes(axis: tuple[int, ...], ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those that end with the last, and the others; none of either where they are all, or wrong ones."""
    axes = {a % ndim for a in axis if -ndim <= a < ndim}
    if len(axes) < len(axis) or len(axes) == ndim:
        return (), ()
    first = ndim
    while first - 1 in axes:
        first -= 1
    return tuple(range(first, ndim)), tuple(sorted(a for a in axes if a < first))


_LONG = 1 << 16  # elements of a row whose parts are summed by several threads
_PARTS = 32  # as loops over rows have it


def _by_loops(x: Array, axis: tuple[int, ...] | None) -> Array | None:
    """The sums over all axes or some that follow each other, by a compiled loop in NumPy's order; None otherwise."""
    of_rows = kernels.get("of_rows")
    if of_rows is None or not x.flags.c_contiguous:
        return None
    lead = 0
    if axis is not None:
        axes = sorted([a % x.ndim for a in axis if -x.ndim <= a < x.ndim])
        lead = axes[0] if axes else 0
        if not axes or len(axes) < len(axis) or axes != list(range(lead, axes[-1] + 1)):
            return None
        if axes[-1] < x.ndim - 1:
            return _columns_by_loop(of_rows, x, lead, axes[-1] + 1)
    length = prod(x.shape[lead:])
    made = of_rows("sum_of_parts" if length >= _LONG else "sum_of_rows", (x,), length)
    if made is None or length < _LONG:
        return None if made is None else made[0].reshape(x.shape[:lead])
    parts = made[0].reshape(*x.shape[:lead], _PARTS)
    while parts.shape[-1] > 1:
        parts = parts[..., ::2] + parts[..., 1::2]
    return parts[..., 0] + x.dtype.type(0)


_WIDE = 16  # columns from which on NumPy adds row to row; a loop takes them one by one below 64


def _columns_by_loop(of_rows: Any, x: Array, first: int, end: int) -> Array | None:
    """The sums over the axes from first to end, which are not the last, of an array in C order."""
    outer, count, width = prod(x.shape[:first]), prod(x.shape[first:end]), prod(x.shape[end:])
    if width < _WIDE or not count or (outer == 1 and count >= _MANY_ROWS):  # of many rows parts are summed alone
        return None
    made = of_rows("sum_of_columns", (x,), count, outer * width, width)
    return None if made is None else made[0].reshape(x.shape[:first] + x.shape[end:])


def _as_rows(x: Array, axis: tuple[int, ...]) -> Array | None:
    """x as a matrix whose rows are to be added, if it lies so in memory and has many."""
    if x.size < _MANY_ROWS:
        return None
    ndim, shape, count = x.ndim, x.shape, 1
    for a in axis:
        count *= shape[a] if -ndim <= a < ndim else 0
    if count == x.size:  # a single sum, which NumPy adds half by half
        return None
    axes = sorted({a % ndim for a in axis}, key=x.strides.__getitem__, reverse=True) if count >= _MANY_ROWS else ()
    if not axes or len(axes) < len(axis):  # NumPy refuses axes that there are not, or that are named twice
        return None
    kept = [i for i in range(ndim) if i not in axes]
    turned = x.transpose(*axes, *kept)
    return turned.reshape(count, -1) if turned.flags.c_contiguous else None


def sum_of_many_rows(x: Array) -> Array:
    """The sums over the first axis of a matrix in C order: of 256 rows to 511 each, until few are left."""
    while x.size and len(x) >= _MANY_ROWS:
        count, width = x.shape
        parts, blocks = parts_of_rows(count, width)
        whole = count // parts * parts
        y = x[:whole].reshape(parts // blocks, -1, blocks * width).sum(1).reshape(-1, width)
        y[: count - whole] += x[whole:]
        x = y
    return x.sum(0)


def parts_of_rows(count: int, width: int) -> tuple[int, int]:
    """Into how many sums :func:`sum_of_many_rows` first adds so many rows, and how many of them take turns.

    The rows that are left at the end are added to the first sums. Of few rows there is one sum, or none (0, 0) where
    NumPy has an order of its own.
    """
    if count < _MANY_ROWS:
        return (1, 1) if width >= _WIDE else (0, 0)
    blocks = max(min(count // _ROWS_IN_A_SUM, _ELEMENTS_AT_ONCE // width), 1)
    return count // (blocks * _ROWS_IN_A_SUM) * blocks, blocks


def square_sum(x: Array) -> Array:
    """The sum of the squares of a vector, a scalar; parts are summed alone, so that many squares lose no digits."""
    if type(x) is not np.ndarray or x.size <= _ELEMENTS_AT_ONCE:
        return x.dot(x)
    parts = (x[i : i + _ELEMENTS_AT_ONCE] for i in range(0, x.size, _ELEMENTS_AT_ONCE))
    return x.dtype.type(sum([float(part.dot(part)) for part in parts]))


_NEAR_ONE = 1.25  # sums of powers below it are of one large term, and the others are to be added alone


def logarithm(total: Array) -> Array:
    """ln of sums that may be 0: -inf then, without a warning."""
    with np.errstate(divide="ignore"):
        return get_array_module(total).log(total)


def with_all_digits(logs: Array, total: Array, powers: Callable[[Any], Array], axis: tuple[int, ...]) -> Array:
    """logs, which are the logarithms of sums ``total`` of powers over axes that stay as 1, with digits near 0 as well.

    The greatest power is 1. Where it is nearly all of the sum, the logarithm is that of 1 + the sum of the others: in
    float32 1 + 1e-9 is 1. ``powers`` gives those of some rows, or all, in an array that may be written over.
    """
    if type(total) is not np.ndarray or not (total < _NEAR_ONE).any():  # a look at a GPU's numbers would wait for them
        return logs
    near: Any = (total >= 1) & (total < _NEAR_ONE)
    rows: Any = ...
    if total.ndim == 2 and axis == (1,) and not near.all():
        rows = near[:, 0].nonzero()[0]
    others = powers(rows)
    with np.errstate(all="ignore"):  # of sums that are not near 1 anything may come
        others *= others < 1
    part: Any = logs[rows]
    np.log1p(wide_sum(others, axis, True), out=part, where=near[rows])
    if rows is not ...:
        logs[rows] = part
    return logs


def log_of_shares(shares: Array, greatest: Array) -> Array:
    """ln of the greatest of shares (M, K) that add up to 1, with digits near 0 as well; shares may be written over."""
    logs = np.log(greatest)
    near: Any = greatest > 1 / _NEAR_ONE
    if near.any():
        rows: Any = ... if near.all() else near[:, 0].nonzero()[0]
        others = shares[rows]
        others *= others < 0.5
        logs[rows] = np.log1p(-others.sum(axis=1, keepdims=True))
    return logs


_KEPT_ONES = 1 << 14  # longer vectors of ones are not kept


@lru_cache(maxsize=64)
def ones(n: int, dtype: DType) -> Array:
    """A vector of ones on the host that is not to be changed."""
    return read_only(np.ones(n, dtype))


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """The sum over the first axis of a matrix, such as a bias' gradient: BLAS takes half the time of ``x.sum(0)``."""
    dtype = x.dtype
    if dtype.char not in "fd":
        return sum_over(x, (0,), False)
    if len(x) > _KEPT_ONES and type(x) is np.ndarray and x.flags.c_contiguous:
        return sum_of_many_rows(x)
    weights = ones(len(x), dtype) if len(x) <= _KEPT_ONES else np.ones(len(x), dtype)
    room: Any = out if out is not None and out.dtype is dtype else None
    return weights.dot(x, room)


def read_only(a: Array) -> Array:
    """The array itself, which is not to be changed from here on."""
    a.flags.writeable = False
    return a
