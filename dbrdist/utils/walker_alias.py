"""Sampling from a discrete distribution in constant time per draw (Walker 1974; Vose 1991)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array import backend, random
from dbrdist.core.array.backend import Array
from dbrdist.core.model.device_resident import DeviceResident, DeviceResidentsVisitor


class WalkerAlias(DeviceResident):
    """Draws integers i with probability ``probs[i] / sum(probs)``.

    Each of n columns has the share 1/n: a part of it belongs to the number itself and the rest to one other, its
    alias. A draw takes a column and then one of the two. Draws come from ``dbrdist.random``.

    Args:
        probs: weights of the numbers 0 to n - 1, an array of n numbers of 0 or more, not all zero.

    Raises:
        ValueError: ``probs`` has another shape or other numbers.

    Example:
        >>> dbrdist.utils.WalkerAlias([0.0, 1.0]).sample((2, 2))
        array([[1, 1],
               [1, 1]], dtype=int32)
    """

    def __init__(self, probs: Any) -> None:
        p = np.asarray(backend.to_cpu(probs) if backend.is_array(probs) else probs, np.float64)
        if p.ndim != 1 or not p.size:
            raise ValueError(f"WalkerAlias: probs: expected an array of one axis, not empty, got shape {p.shape}")
        if not (np.isfinite(p).all() and (p >= 0).all() and p.sum() > 0):
            raise ValueError("WalkerAlias: probs: expected numbers >= 0 that are not all zero")
        share = p / p.sum() * p.size  # 1 where a column is exactly full
        threshold, alias = np.ones(p.size), np.arange(p.size)
        small = [i for i in range(p.size) if share[i] < 1]
        large = [i for i in range(p.size) if share[i] >= 1]
        while small and large:
            i, j = small.pop(), large[-1]
            threshold[i], alias[i] = share[i], j
            share[j] -= 1 - share[i]
            if share[j] < 1:
                small.append(large.pop())
        self.threshold: Array = threshold
        self.values: Array = alias

    @property
    def use_gpu(self) -> bool:
        """True if the tables are on a GPU."""
        return self.device.module == "cupy"

    def device_resident_accept(self, visitor: DeviceResidentsVisitor) -> None:
        super().device_resident_accept(visitor)
        self.threshold, self.values = visitor.visit_array(self.threshold), visitor.visit_array(self.values)

    def sample(self, shape: int | tuple[int, ...]) -> Array:
        """An int32 array of this ``shape`` of numbers drawn independently, on the device of the tables."""
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        rows = shape[0] if shape else 1
        words = random.raw_words(rows, prod(shape[1:]))
        place = (words >> np.uint64(11)) * (len(self.threshold) / 2.0**53)  # a number from 0 to n
        column = place.astype(np.int64)
        height, column = self.device.send((place - column).reshape(shape)), self.device.send(column.reshape(shape))
        xp = backend.get_array_module(column)
        drawn = xp.where(height < self.threshold[column], column, self.values[column])
        return drawn.astype(np.int32)

    def sample_cpu(self, shape: int | tuple[int, ...]) -> Array:
        """``sample`` of a ``shape`` for tables on the host."""
        return self.sample(shape)

    def sample_gpu(self, shape: int | tuple[int, ...]) -> Array:
        """``sample`` of a ``shape`` for tables on a GPU."""
        return self.sample(shape)
