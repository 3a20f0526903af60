"""Arrays read with strides of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import ops
from dbrdist.core.backend import get_array_module
from dbrdist.core.checks import expected
from dbrdist.core.variable import as_variable


def as_strided(x: Any, shape: Any, strides: Any, storage_offset: int | None = None) -> Any:
    """y[i, j, ...] = element storage_offset + i strides[0] + j strides[1] + ... of x.

    Args:
        x: any array, whose elements are counted in C order, however they lie in memory.
        shape: shape of the result.
        strides: for each axis the distance of its elements, in elements of x; 0 repeats, below 0 goes back.
        storage_offset: the first element; None for 0.

    The gradients of an element that is read several times add up.
    """
    x = as_variable(x)
    shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    strides = (int(strides),) if isinstance(strides, (int, np.integer)) else tuple(int(n) for n in strides)
    if len(shape) != len(strides):
        raise expected(
            "as_strided", "strides", f"a number for each axis of shape {shape}, which are from 0 on", strides
        )
    if min(shape, default=0) < 0:
        raise expected("as_strided", "shape", "lengths from 0 on", shape)
    start = 0 if storage_offset is None else int(storage_offset)
    reach = [(n - 1) * step for n, step in zip(shape, strides)]
    low, high = (start + sum(f(v, 0) for v in reach) for f in (min, max))
    if 0 not in shape and not 0 <= low <= high < x.size:
        got = f"elements {low} to {high}"
        raise expected("as_strided", "strides", f"elements from 0 to {x.size - 1} of x of shape {x.shape}", got)
    xp = get_array_module(x.array)
    index = xp.full((1,) * len(shape), start, np.int64)
    for axis, (n, step) in enumerate(zip(shape, strides)):
        index = index + (xp.arange(n) * step).reshape((-1,) + (1,) * (len(shape) - axis - 1))
    return ops.getitem(ops.reshape(x, (x.size,)), index.reshape(shape))
