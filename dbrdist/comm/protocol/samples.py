"""A few elements of an array, by which ranks see whether theirs differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, to_cpu
from dbrdist.core.array.types import HostArray

_NUM_COMPARED = 64
_TOLERANCE, _TOLERANCE_OF_NARROW = 1e-3, 3e-2  # relative to the largest element that is compared


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


def differ(one: HostArray, other: HostArray) -> bool:
    """Whether samples differ by more than rounding: processors of two kinds may round differently."""
    if one.shape != other.shape:
        return True
    is_narrow = one.dtype.kind == "V" or one.dtype.itemsize <= 2
    kind = np.complex128 if one.dtype.kind == "c" else np.float64
    one, other = one.astype(kind), other.astype(kind)
    both = np.abs([one, other])
    scale = np.max(both, initial=0.0, where=np.isfinite(both))
    tolerance = (_TOLERANCE_OF_NARROW if is_narrow else _TOLERANCE) * scale
    return not np.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True)
