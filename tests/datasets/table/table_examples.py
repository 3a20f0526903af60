"""A table whose columns say when they are read."""

from __future__ import annotations

import numpy as np

from dbrdist.dataset import TabularDataset

X, Y, Z = np.arange(20.0).reshape(10, 2), list("abcdefghij"), np.arange(10) ** 2


class Table(TabularDataset):
    """As a user writes one; notes what was asked for."""

    def __init__(self, mode=tuple):
        self.asked = []
        self._mode = mode

    def __len__(self):
        return 10

    @property
    def keys(self):
        return ("x", "y", "z")

    @property
    def mode(self):
        return self._mode

    def get_examples(self, indices, key_indices):
        self.asked.append((indices, key_indices))
        rows = range(10)[slice(None) if indices is None else indices] if not isinstance(indices, list) else indices
        assert all(type(i) is int and 0 <= i < 10 for i in rows)
        columns = (X[list(rows)], [Y[i] for i in rows], Z[list(rows)])
        return columns if key_indices is None else tuple(columns[k] for k in key_indices)
