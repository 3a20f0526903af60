"""Tests of dbrdist.functions.sparse."""

import numpy as np

import dbrdist.functions as F
from dbrdist.core.array import array_operations as arrays
from dbrdist.utils import CooMatrix
from tests.each import each


@each(**{"columns, is_by_row": [(2047, False), (2048, True)]}, num_rows=[1, 3])
def test_sparse_rows_with_many_products_are_taken_one_by_one(columns, is_by_row, num_rows, monkeypatch):
    found, scattered = [], arrays.scattered
    monkeypatch.setattr(arrays, "scattered", lambda *xs: found.append(1) or scattered(*xs))
    dense = np.random.default_rng(0).standard_normal((num_rows, columns))
    diagonal = CooMatrix(np.arange(1.0, num_rows + 1), np.arange(num_rows), np.arange(num_rows), (num_rows, num_rows))
    expected = dense * np.arange(1.0, num_rows + 1)[:, None]
    np.testing.assert_array_equal(F.sparse_matmul(diagonal, dense).array, expected)
    assert bool(found) != is_by_row
