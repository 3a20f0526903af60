"""Elementwise formulas on arrays: results lie as their operands do, and large ones are worked through block by block.

A formula is a function of arrays of one layout. Images reach it through their N H W C view (see
:mod:`dbrdist.core.array.backend`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import Array, DType, aligned, is_floating, is_of_own_class, lies_as_images

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from typing import Any

    from dbrdist.core.array.types import IntArray


def _nhwc(x: Array) -> Array:
    ndim = getattr(x, "ndim", 0)
    if ndim == 0:
        return x
    if ndim < 4:
        x = x.reshape((1,) * (4 - ndim) + x.shape)
    return x.transpose(0, 2, 3, 1)


_FEW = 1 << 10  # elements up to which an operation is a call of NumPy and little else


def elementwise(formula: Callable[..., Array], *xs: Any) -> Array:
    """``formula(*xs)`` for arrays that broadcast together; the result lies as images where an operand does.

    The formula sees such operands through their N H W C view, so that what it allocates in C order is channels-last.
    NumPy's own functions leave the layout of operands that lie alike as it is.
    """
    if len(xs) == 2 and type(formula) is np.ufunc:
        a, b = xs
        if type(a) is type(b) is np.ndarray:
            if a.size <= _FEW and a.strides == b.strides and a.shape == b.shape:
                return formula(a, b)
            if a.size >= _MANY and formula in _BESIDE and 1 < b.size < a.size:
                made = _with_vector(_BESIDE[formula], a, b)
                if made is not None:
                    return made
    ndim = 0
    for x in xs:
        n = getattr(x, "ndim", 0)
        if n > ndim:
            ndim = n
    if ndim == 4:
        for x in xs:
            if getattr(x, "ndim", 0) == 4 and lies_as_images(x):
                kernel = kernels.get(formula)
                if kernel is not None and _are_alike(*xs):
                    return kernel(*xs)
                return formula(*map(_nhwc, xs)).transpose(0, 3, 1, 2)
    return formula(*xs)


# What computes something faster than NumPy or CuPy does: by formula, for images of one shape and type; for arrays of
# KERNEL_ELEMENTS or more on the host by the name of a row (``core.rows``), or by that name and the place of an operand.
kernels: dict[Hashable, Callable[..., Any]] = {}
KERNEL_ELEMENTS = 1 << 13


def hand_down_kernel(formula: Hashable, kernel: Callable[..., object]) -> None:
    """Called by ``kernels``, which stands above."""
    kernels[formula] = kernel


# NumPy takes twice the time of these loops over rows, which run on all threads.
_BESIDE: dict[Any, str] = {np.add: "add", np.multiply: "mul"}
_MANY = 1 << 16  # elements from which on
_LONG = 64  # elements of a row from which on
_QUIET = {"warn", "ignore"}


def _with_vector(name: str, a: Array, b: Array) -> Array | None:
    """What an operation makes of large ``a`` and a vector along its first or last axes; None where no loop does, and
    where a program has NumPy raise an error, or call something, when a result overflows: loops do neither."""
    if not _QUIET.issuperset(np.geterr().values()):
        return None
    if a.ndim != 4 or not lies_as_images(a):
        decides_layout = b.ndim == a.ndim == 4 and lies_as_images(b)
        return None if decides_layout else _of_rows(name, a, b)
    made = _of_rows(name, _nhwc(a), _nhwc(b))
    return None if made is None else made.transpose(0, 3, 1, 2)


def _of_rows(name: str, a: Array, b: Array) -> Array | None:
    of_rows, ndim = kernels.get("of_rows"), a.ndim
    if of_rows is None or b.ndim > ndim or a.dtype != np.float32 or b.dtype != a.dtype or not a.flags.c_contiguous:
        return None
    shape = (1,) * (ndim - b.ndim) + b.shape
    i, is_row = 0, shape[-1] != 1
    while shape[i] == (1 if is_row else a.shape[i]):  # b is none of one element, and not as large as a
        i += 1
    length = prod(a.shape[i:])
    if shape[i:] != (a.shape[i:] if is_row else (1,) * (ndim - i)) or length < _LONG:
        return None
    made = of_rows(f"{name}_row" if is_row else f"{name}_column", (a, np.ascontiguousarray(b).reshape(-1)), length)
    return None if made is None else made[0].reshape(a.shape)


def _are_alike(a: Array, b: Array) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype and is_of_own_class(a)


_BLOCK_ELEMENTS = 1 << 15  # what a formula of several steps makes of so many elements stays in the cache
# Up to so many, whole arrays of float32 stay in a core's second cache, and blocks only cost: a formula of four steps on
# 10^5 elements takes 58 us at once and 121 in blocks, on 2^20 elements 2050 and 1330.
_AT_ONCE_ELEMENTS = 1 << 18


def fused(formula: Callable[..., Array], *xs: Any) -> Array:
    """As :func:`elementwise`, for a formula of several steps: large arrays are worked through block by block.

    16-bit operands reach the formula as float32, and its result is narrowed once.
    """
    narrow, largest = None, None
    for x in xs:
        if getattr(x, "ndim", 0):
            if largest is None or x.size > largest.size:
                largest = x
            if x.dtype.itemsize == 2 and is_floating(x.dtype):
                narrow = x.dtype
        elif narrow is None and getattr(x, "itemsize", 0) == 2 and is_floating(x.dtype):
            narrow = x.dtype
    if narrow is not None and all(_leaves_type(x, narrow) for x in xs):
        formula = _widened(formula, narrow)
    if type(largest) is not np.ndarray or largest.size <= _AT_ONCE_ELEMENTS:
        return at_once(formula, *xs)
    has_room = all(_broadcasts_to(x, largest.shape) for x in xs)
    return _in_blocks(formula, xs, largest) if has_room else at_once(formula, *xs)


def _leaves_type(x: Array, dtype: DType) -> bool:
    """True unless ``x`` is of another floating type, which an array of ``dtype`` would be promoted to."""
    other = getattr(x, "dtype", dtype)
    return other == dtype or not is_floating(other)


def _broadcasts_to(x: Array, shape: tuple[int, ...]) -> bool:
    """True for numbers, and for arrays that do not enlarge what has this shape."""
    own = getattr(x, "shape", ())
    lead = len(shape) - len(own)
    return lead >= 0 and all(n in (1, m) for n, m in zip(own, shape[lead:]))


def _widened(formula: Callable[..., Array], narrow: DType) -> Callable[..., Array]:
    """The formula in float32 between 16-bit operands and result."""

    def wide(*vs: Array) -> Array:
        y = formula(*[v.astype(np.float32) if getattr(v, "itemsize", 0) == 2 and is_floating(v.dtype) else v
                      for v in vs])  # fmt: skip
        return y.astype(narrow) if is_floating(y.dtype) else y

    return wide


def at_once(formula: Callable[..., Array], *xs: Array) -> Array:
    """As :func:`elementwise`; five axes tell the primitives within the formula that the layout is settled."""
    ndim = 0
    for x in xs:
        n = getattr(x, "ndim", 0)
        if n > ndim:
            ndim = n
    if ndim == 4 and any(getattr(x, "ndim", 0) == 4 and lies_as_images(x) for x in xs):
        views = [_nhwc(x)[None] if getattr(x, "ndim", 0) else x for x in xs]
        return formula(*views)[0].transpose(0, 3, 1, 2)
    return formula(*xs)


def _in_blocks(formula: Callable[..., Array], xs: tuple[Array, ...], largest: Array) -> Array:
    """Cut along the axes of the largest operand's memory, to which all broadcast; at once where that cannot be done."""
    shape, ndim = largest.shape, largest.ndim
    if ndim == 4:
        largest = next((x for x in xs if getattr(x, "shape", ()) == shape and lies_as_images(x)), largest)
    order = np.argsort([-s for s in largest.strides], kind="stable")
    views = [_in_order(x, ndim, order) for x in xs]
    arrays = [v for v in views if getattr(v, "ndim", 0)]
    if arrays and max(v.size for v in arrays) < largest.size:  # the largest is one value repeated
        return at_once(formula, *xs)
    if all(v.shape == arrays[0].shape and v.flags.c_contiguous for v in arrays):
        views = [v.reshape(-1) if getattr(v, "ndim", 0) else v for v in views]
        count, step = largest.size, _BLOCK_ELEMENTS
    else:
        laid = tuple(shape[i] for i in order)
        row = prod(laid[1:])
        if row > _BLOCK_ELEMENTS:
            return at_once(formula, *xs)
        count, step = laid[0], _BLOCK_ELEMENTS // row
    is_cut = [getattr(v, "ndim", 0) > 0 and len(v) > 1 for v in views]
    y = formula(*[v[:step] if cut else v for v, cut in zip(views, is_cut)])
    out = aligned(largest.size, y.dtype).reshape(count, *y.shape[1:])
    out[:step] = y
    for start in range(step, count, step):
        stop = start + step
        out[start:stop] = formula(*[v[start:stop] if cut else v for v, cut in zip(views, is_cut)])
    return out.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def _in_order(x: Array, ndim: int, order: Sequence[int] | IntArray) -> Array:
    """``x`` with ``ndim`` axes in the given order; one value, however often repeated, as a number."""
    if not getattr(x, "ndim", 0):
        return x
    if not any(x.strides):
        return x[(0,) * x.ndim]
    return x.reshape((1,) * (ndim - x.ndim) + x.shape).transpose(order)
