"""What oneDNN loses: NaN, which its ReLUs and maxima take for the smaller operand, and windows of minus infinity."""

from __future__ import annotations

from math import isfinite

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import HostArray

_BF16_INFINITY = 0x7F80  # as an integer; NaN lies above


def is_finite(x: HostArray) -> bool:
    """True if no element of a dense array is NaN or infinite; reads it once, in a fifth to a half of a ReLU's time."""
    row = memory_row(x)
    if x.dtype == np.float32:
        with np.errstate(all="ignore"):
            return isfinite(row.dot(row)) or bool(np.isfinite(row).all())  # the squares may overflow
    largest, largest_negative = row.view(np.int16).max(), row.view(np.uint16).max()
    return bool(largest < _BF16_INFINITY and largest_negative < _BF16_INFINITY + 0x8000)


def is_above_lowest(x: HostArray) -> bool:
    """False if an element of a dense array is NaN, infinite or the type's lowest number, and for some large numbers."""
    row = memory_row(x)
    if x.dtype == np.float32:
        with np.errstate(all="ignore"):
            return isfinite(row.dot(row))
    largest, largest_negative = row.view(np.int16).max(), row.view(np.uint16).max()
    return bool(largest < _BF16_INFINITY and largest_negative < _BF16_INFINITY + 0x8000 - 1)


def memory_row(x: HostArray) -> HostArray:
    """The elements of a dense array in the order of memory, as a view."""
    if x.ndim == 4 and not x.flags.c_contiguous:
        x = backend.channels_last(x).transpose(0, 2, 3, 1)
    return x.reshape(-1)


def normalizes_finitely(gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float) -> bool:
    """True if finite elements are normalized to numbers, infinite ones at most."""
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(var + np.float32(eps))
        return isfinite(mean.dot(scale) + beta.dot(beta))
