"""Small helpers for arrays."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, is_array
from dbrdist.core.tape import ops


def force_array(x: Any, dtype: Any = None) -> Array:
    """``x`` as an array (of ``dtype``, if given): sums and comparisons in NumPy may give scalars.

    Args:
        x: an array or a scalar.
        dtype: the type; None keeps that of x.

    Example:
        >>> dbrdist.utils.force_array(np.float32(1.5))
        array(1.5, dtype=float32)
    """
    if np.isscalar(x):
        return np.array(x, dtype)
    return x if dtype is None else x.astype(dtype, copy=False)


def force_type(dtype: Any, value: Any) -> Any:
    """A number as a scalar of ``dtype``, an array in that type; Variables stay as they are.

    Args:
        dtype: the type.
        value: a number, an array or a Variable.

    Example:
        >>> dbrdist.utils.force_type(np.float32, 1.5)
        np.float32(1.5)
    """
    if np.isscalar(value):
        return np.dtype(dtype).type(value)
    return value.astype(dtype, copy=False) if is_array(value) else value


def size_of_shape(shape: tuple[int, ...]) -> int:
    """How many elements an array of this shape has.

    Args:
        shape: the lengths of the axes.

    Example:
        >>> dbrdist.utils.size_of_shape((2, 3))
        6
    """
    return prod(shape)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """``x`` added up over the axes that broadcasting from ``shape`` would make.

    Args:
        x: the array.
        shape: a shape that broadcasts to that of x.

    Raises:
        ValueError: ``shape`` does not broadcast to that of x.

    Example:
        >>> dbrdist.utils.sum_to(np.ones((2, 3)), (1, 3))
        array([[2., 2., 2.]])
    """
    get_array_module(x)
    return ops.sum_to(x, tuple(shape))
