"""What the primitives do to bare arrays, where it takes more than a line: layouts, 16-bit types, faster ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import (
    Array,
    accumulation_dtype,
    capturing,
    channels_last,
    empty,
    empty_as,
    fill,
    get_array_module,
    lies_as_images,
    zeros,
    zeros_as,
)
from dbrdist.core.array.config import config
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, elementwise, fused, kernels
from dbrdist.core.array.ordered_sums import add_in_order
from dbrdist.core.array.sums import read_only, sum_over, sum_rows
from dbrdist.core.array.types import DType, Index, IntArray, Module, RealArray

_SELECT_ELEMENTS = 4096  # below, one call of NumPy's takes less time than several


def chosen(condition: Array, a: Array, b: Array) -> Array:
    """a where ``condition`` holds, else b; both of one type.

    NumPy's ``where`` branches at each element: with a random condition 2^20 of them take 3.8 ms, and joining bits 0.6.
    """
    xp = get_array_module(condition)
    dtype = getattr(a, "dtype", None)
    is_one_type = dtype in _BITS and hasattr(b, "dtype") and b.dtype == dtype  # to NumPy None is float64
    if xp is np and condition.size >= _SELECT_ELEMENTS and is_one_type:
        return fused(_joined, condition, _bits_of(a), _bits_of(b)).view(dtype)
    y = elementwise(xp.where, condition, a, b)
    if xp is not np and y.dtype.kind == "f":  # CuPy 14 has no bfloat16 here and chooses among float32
        narrow = [v.dtype for v in (a, b) if hasattr(v, "dtype")]
        if all(d.kind == "V" for d in narrow):
            return elementwise(lambda v: v.astype(narrow[0]), y)
    return y


_BITS = {np.dtype(np.float32): np.dtype(np.int32), np.dtype(np.float64): np.dtype(np.int64)}


def _bits_of(a: Array) -> Array:
    """An array or NumPy scalar as integers of its width."""
    return a.view(_BITS[a.dtype])


def _joined(condition: IntArray, a: IntArray, b: IntArray) -> IntArray:
    mask = condition.astype(a.dtype)
    out = mask if mask.ndim else None  # one value, however often repeated, comes as a number
    mask = np.negative(mask, out=out)  # all bits, or none
    if not b.ndim and not b:
        return a & mask
    if not a.ndim and not a:
        return b & np.invert(mask, out=out)
    return b ^ ((a ^ b) & mask)


def converted(x: Array, dtype: DType) -> Array:
    """A copy of x in another type: NumPy rounds float32 to 16 bits in ten times an instruction's time."""
    kernel = kernels.get("convert")
    y = None if kernel is None or type(x) is not np.ndarray or x.size < KERNEL_ELEMENTS else kernel(x, dtype)
    return elementwise(lambda v: v.astype(dtype), x) if y is None else y


_MANY_POWERS = 1 << 10


def power_of(x: Array, c: float) -> Array:
    """x^c. With an integer, NumPy takes 15 times as long for negative elements as for their absolute values."""
    is_slow = type(c) in (int, float) and c not in (-1, 0, 1, 2) and c == c // 1
    if not is_slow or type(x) is not np.ndarray or x.dtype.char not in "fd" or x.size < _MANY_POWERS:
        return x**c
    y = np.absolute(x) ** c
    return np.copysign(y, x, out=y) if c % 2 else y


def are_images(x: Array) -> bool:
    """True if four axes lie as images do."""
    return x.ndim == 4 and lies_as_images(x)


def reshaped(x: Array, shape: tuple[int, ...], to_images: bool) -> Array:
    y = x.reshape(shape)
    return channels_last(y) if to_images else y


# Up to this many elements a gather takes less time than NumPy needs to set up a broadcast.
_GATHER_ELEMENTS = 256


@lru_cache(maxsize=64)
def per_row(num_rows: int, num_columns: int) -> Any:
    """The index that makes a vector (N,) on the host an operand beside an (N, K) array."""
    if num_rows * num_columns > _GATHER_ELEMENTS:
        return slice(None), None
    return read_only(np.repeat(np.arange(num_rows), num_columns).reshape(num_rows, num_columns))


@lru_cache(maxsize=64)
def per_column(num_rows: int, num_columns: int) -> Array | slice:
    """The index that makes a vector (K,) on the host an operand beside an (N, K) array."""
    if num_rows * num_columns > _GATHER_ELEMENTS:
        return slice(None)
    return read_only(np.tile(np.arange(num_columns), (num_rows, 1)))


@lru_cache(maxsize=64)
def row_starts(num_rows: int, num_columns: int) -> Array:
    """Where each row of a C-ordered (N, K) array starts, shape (N,)."""
    return read_only(np.arange(num_rows) * num_columns)


@lru_cache(maxsize=64)
def mean_weights(n: int, dtype: DType) -> Array:
    """1 / n, n times on the host: the product with a vector is its mean."""
    return read_only(np.full(n, 1.0 / n, dtype))


def summed_to(x: Array, shape: tuple[int, ...]) -> Array:
    lead = x.ndim - len(shape)
    if lead == 1 and x.ndim == 2 and type(x) is np.ndarray and x.shape[1:] == shape:
        return sum_rows(x)
    axes = tuple(range(lead)) + tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
    y = sum_over(x, axes, True)
    return y.reshape(shape) if lead else y


_AT_ONCE = 8


def concatenated(xs: Sequence[Array], axis: int) -> Array:
    axis = axis % xs[0].ndim
    xp = get_array_module(*xs)
    if xs[0].ndim == 4 and any(map(are_images, xs)):  # along the same axis of the N H W C views
        return elementwise(lambda *vs: _side_by_side(xp, vs, (0, 3, 1, 2)[axis]), *xs)
    return _side_by_side(xp, xs, axis)


def _side_by_side(xp: Module, xs: Sequence[Array], axis: int) -> Array:
    """In a captured step eight at once: CuPy copies the addresses of more small arrays from the host."""
    while len(xs) > _AT_ONCE and capturing.is_on:
        xs = [xp.concatenate(xs[i : i + _AT_ONCE], axis=axis) for i in range(0, len(xs), _AT_ONCE)]
    return xp.concatenate(xs, axis=axis)


def item(x: Array, slices: Index) -> Array:
    y = x[slices]
    if y.ndim == 4 and not is_basic(slices) and are_images(x):
        return channels_last(y)  # index arrays make a copy in any order
    return y


def is_basic(slices: Index) -> bool:
    """Whether an index gives a view."""
    parts = slices if isinstance(slices, tuple) else (slices,)
    return all(p is None or p is Ellipsis or isinstance(p, (int, np.integer, slice)) for p in parts)


def scattered(x: Array, slices: Index, shape: tuple[int, ...], to_images: bool, out: Array | None = None) -> Array:
    xp = get_array_module(x)
    is_view = is_basic(slices)
    dtype = x.dtype if is_view else accumulation_dtype(x.dtype)
    is_whole = is_view and x.size == prod(shape)  # each element has its place, in another order
    if out is not None and out.dtype == dtype:
        y = out
        if not is_whole:
            fill(y, 0)
    elif is_whole:
        y = empty(shape, dtype, x) if to_images else empty_as(x, shape, dtype)
    else:
        y = zeros(shape, dtype, x) if to_images else zeros_as(x, shape, dtype)
    if is_view:
        y[slices] = x
        return y
    wide = x.astype(y.dtype, copy=False)
    if not isinstance(y, np.ndarray) and config.cudnn_deterministic:
        add_in_order(y, slices, wide)
    elif not _placed_by_row(y, slices, wide):
        xp.add.at(y, slices, wide)
    return y if y.dtype == x.dtype else elementwise(lambda v: v.astype(x.dtype), y)


_ALL = slice(None)
_SCATTER_ELEMENTS = 1 << 12  # below, one call takes less time than several
_SCATTER_BLOCK = 1 << 20
_SCATTER_WIDTH = 64  # elements of a row from which on rows are added at once
_SCATTER_ROUNDS = 32


def _placed_by_row(y: Array, slices: Index, x: Array) -> bool:
    """``np.add.at(y, slices, x)`` into zeros for arrays of integers, in its order; False where that does not apply.

    NumPy adds to rows slowly. Here a round adds at once one row to each place: 700 rows of 650 take 0.5 ms, element by
    element 1.5, and with ``np.add.at`` 3.3. What is left after some rounds, and what is narrow, goes by elements. A
    compiled loop takes axes before those that are indexed as well.
    """
    places: tuple[Any, ...] = slices if isinstance(slices, tuple) else (slices,)
    if type(y) is not np.ndarray or x.size < _SCATTER_ELEMENTS or not y.flags.c_contiguous or len(places) > y.ndim:
        return False
    lead = 0
    while lead < len(places) and type(places[lead]) is slice and places[lead] == _ALL:
        lead += 1
    places = places[lead:]
    if not places or not all(type(p) is np.ndarray and p.dtype.kind in "iu" for p in places):
        return False
    sizes = y.shape[lead : lead + len(places)]
    try:
        wide = [p.astype(np.intp, copy=False) for p in places]  # the type of p may not hold the length
        around = [np.where(p < 0, p + n, p) for p, n in zip(wide, sizes)]
        rows = np.ravel_multi_index(np.broadcast_arrays(*around), sizes)
    except ValueError:  # out of bounds: add.at says which
        return False
    rest = y.shape[lead + len(places) :]
    pick_rows = kernels.get("pick_rows")
    if pick_rows is not None and x.shape == (*y.shape[:lead], *rows.shape, *rest) and x.dtype == y.dtype:
        whole = prod(y.shape[:lead]), prod(sizes), prod(rest)
        terms = np.ascontiguousarray(x).reshape(whole[0], rows.size, whole[2])
        if pick_rows(y.reshape(whole), rows.reshape(-1), terms, True):
            return True
    if lead:
        return False
    width = int(np.prod(rest))
    values: Any = np.broadcast_to(x, (*rows.shape, *rest)).reshape(rows.size, width)
    rows, flat = rows.reshape(-1), y.reshape(-1)
    if width >= _SCATTER_WIDTH:
        rows, values = _in_rounds(flat.reshape(-1, width), rows, values)
    _by_elements(flat, rows, values, width)
    return True


def _in_rounds(y: RealArray, rows: IntArray, values: RealArray) -> tuple[IntArray, RealArray]:
    """Add to zeros y (V, E) in each round the next value of every place; the rows and values that are left."""
    order = np.argsort(rows, kind="stable")
    ascending, along = rows[order], np.arange(len(rows))
    is_first = np.diff(ascending, prepend=-1) != 0
    turn = np.empty_like(along)
    turn[order] = along - np.maximum.accumulate(np.where(is_first, along, 0))
    for k in range(min(int(turn.max()) + 1, _SCATTER_ROUNDS)):
        taken = np.flatnonzero(turn == k)
        sums = values[taken]
        sums += y[rows[taken]] if k else 0  # which makes 0.0 of -0.0, as additions do
        y[rows[taken]] = sums
    left = np.flatnonzero(turn >= _SCATTER_ROUNDS)
    return rows[left], values[left]


def _by_elements(y: RealArray, rows: IntArray, values: RealArray, width: int) -> None:
    """Add values (N, width) to the rows of y, which is flat."""
    starts, columns = rows.reshape(-1, 1) * width, np.arange(width)
    step = max(_SCATTER_BLOCK // max(width, 1), 1)
    for first in range(0, len(rows), step):
        block = slice(first, first + step)
        np.add.at(y, (starts[block] + columns).reshape(-1), values[block].reshape(-1))


_LARGE_STACK = 1 << 19  # multiplications from which on a kernel for stacks of matrices may take less time


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """16-bit products are summed in float32.

    NumPy has no 16-bit GEMM. CuPy 14 has one for two matrices; stacks it widens too, and bfloat16 stacks it refuses:
    a kernel takes those.
    """
    if a.dtype.itemsize == 2 or b.dtype.itemsize == 2:
        dtype = np.result_type(a.dtype, b.dtype)
        wide = accumulation_dtype(dtype)
        if wide != dtype and (isinstance(a, np.ndarray) or not a.ndim == b.ndim == 2):
            if type(a) is not np.ndarray and a.dtype == b.dtype and min(a.ndim, b.ndim) > 1 and np.matmul in kernels:
                made: Array | None = kernels[np.matmul](a, b)
                if made is not None:
                    return made
            return product(a.astype(wide), b.astype(wide)).astype(dtype)
    if type(a) is not np.ndarray and capturing.product is not None and min(a.ndim, b.ndim) > 1:
        return capturing.product(a, b, out)
    if a.ndim == 2 and b.ndim == 2:
        return a.dot(b, out) if out is not None and out.dtype == a.dtype == b.dtype else a.dot(b)
    if a.ndim > 2 and b.ndim > 2 and a.size * b.shape[-1] >= _LARGE_STACK and np.matmul in kernels:
        y: Array = kernels[np.matmul](a, b)
        if y is not None:
            return y
    return get_array_module(a).matmul(a, b)


def are_dense_parts(parts: Sequence[Array], whole: Array, count: int) -> bool:
    """True for dense parts of an array on the host none of which, of ``count``, keeps far more memory than its own."""
    least = whole.size // (2 * count)
    return all(type(a) is np.ndarray and a.flags.c_contiguous and a.size >= least for a in parts)


def is_dense_alone(a: Array, source: Array, owns_source: bool) -> bool:
    """True for a dense array on the host that is no view of ``source``, or of one that nobody else has."""
    return type(a) is np.ndarray and a.flags.c_contiguous and (owns_source or not np.may_share_memory(a, source))
