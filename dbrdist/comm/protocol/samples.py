"""A few elements of an array, by which ranks see whether theirs differ."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, to_cpu
from dbrdist.core.array.types import HostArray

_NUM_COMPARED = 64
_TOLERANCE, _TOLERANCE_OF_NARROW = 1e-3, 3e-2  # relative to the largest element that is compared


@functools.lru_cache(1024)
def places(shape: tuple[int, ...], count: int) -> Any:
    """An index for some elements at even distances, the first among them, whatever the order of memory."""
    size = int(np.prod(shape, dtype=np.int64))
    count = min(size, count)
    if not shape:
        return (np.newaxis,)
    return np.unravel_index([size * k // count for k in range(count)], shape)


def some(array: Array) -> HostArray:
    """Elements at even distances, as a 1-d array in host memory."""
    return to_cpu(array[places(array.shape, _NUM_COMPARED)]) if array.size else np.empty(0, np.uint8)


def magnitude(values: HostArray) -> float:
    """The largest finite absolute value, 0 where there is none."""
    found = np.abs(_widened(values))
    return float(np.max(found, initial=0.0, where=np.isfinite(found)))


def differ(one: HostArray, other: HostArray, scale: float = 0.0) -> bool:
    """Whether samples differ by more than rounding: processors of two kinds may round differently.

    ``scale`` is the magnitude that the elements had at other times: those that pass zero keep the error they had.
    """
    return first_difference(one, other, scale) >= 0


def first_difference(one: HostArray, other: HostArray, scale: float = 0.0) -> int:
    """The position of the first element that differs by more than rounding, -1 where none does."""
    if one.shape != other.shape:
        return 0
    is_narrow = one.dtype.kind == "V" or one.dtype.itemsize <= 2
    scale = max(scale, magnitude(one), magnitude(other))
    tolerance = (_TOLERANCE_OF_NARROW if is_narrow else _TOLERANCE) * scale
    is_close = np.isclose(_widened(one), _widened(other), rtol=0.0, atol=tolerance, equal_nan=True)
    return -1 if is_close.all() else int(np.argmin(is_close))


def _widened(values: HostArray) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
