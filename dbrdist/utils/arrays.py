"""Small helpers for arrays."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, is_array
from dbrdist.core.tape import ops


def force_array(x: Any, dtype: Any = None) -> Array:
    """``x`` as an array (of ``dtype``, if given): sums and comparisons in NumPy may give scalars."""
    if np.isscalar(x):
        return np.array(x, dtype)
    return x if dtype is None else x.astype(dtype, copy=False)


def force_type(dtype: Any, value: Any) -> Any:
    """A number as a scalar of ``dtype``, an array in that type; Variables stay as they are."""
    if np.isscalar(value):
        return np.dtype(dtype).type(value)
    return value.astype(dtype, copy=False) if is_array(value) else value


def size_of_shape(shape: tuple[int, ...]) -> int:
    """How many elements an array of this shape has."""
    return prod(shape)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """``x`` added up over the axes that broadcasting from ``shape`` would make."""
    get_array_module(x)
    return ops.sum_to(x, tuple(shape))
