"""Sums of what belongs to one place, in one order whatever the device does: where a GPU's own way is by atomic adds."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module
from dbrdist.core.array.types import Index, Module


def add_in_order(y: Array, slices: Index, x: Array) -> None:
    """``add.at(y, slices, x)`` into zeros on a GPU, with the same bits each time."""
    xp = get_array_module(y)
    places: tuple[Any, ...] = slices if isinstance(slices, tuple) else (slices,)
    if all(getattr(p, "dtype", None) is not None and p.dtype.kind in "iu" and p.ndim for p in places):
        rows = _row_numbers(xp, places, y.shape)  # each index stands for a whole row
        width = int(np.prod(y.shape[len(places) :], dtype=np.int64))
        shape = (*rows.shape, *y.shape[len(places) :])
    else:
        rows, width = xp.arange(y.size).reshape(y.shape)[slices], 1
        shape = rows.shape
    if not rows.size or not width:
        return
    values = xp.broadcast_to(x, shape).reshape(rows.size, width)
    num_rows = y.size // width
    total = _summed(xp, rows.reshape(-1), values, num_rows)
    y[...] = total.reshape(y.shape)


def _row_numbers(xp: Module, places: tuple[Index, ...], shape: tuple[int, ...]) -> Array:
    """The number of the row for each tuple of indexes; negative ones count from the end."""
    rows: Any = 0
    for p, n in zip(places, shape):
        at = xp.asarray(p).astype(np.int64)
        rows = rows * n + at % n
    return rows


def _summed(xp: Module, rows: Array, values: Array, num_rows: int) -> Array:
    """For each row number the sum of its values: neighbours are added in pairs, fours, eights, ..."""
    count = rows.size
    order = (rows * count + xp.arange(count)).argsort()  # of one row in the order of the values
    rows, sums = rows[order], values[order]
    step = 1
    while step < count:
        is_same = rows[:-step] == rows[step:]
        following = xp.where(is_same[:, None], sums[step:], sums.dtype.type(0))
        sums[:-step] += following
        step *= 2
    is_first = xp.ones(count, bool)
    is_first[1:] = rows[1:] != rows[:-1]
    out = xp.zeros((num_rows + 1, values.shape[1]), values.dtype)  # the last row takes what is not the first of its own
    out[xp.where(is_first, rows, num_rows)] = sums
    return out[:-1]
