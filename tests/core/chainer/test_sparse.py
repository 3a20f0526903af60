"""Sparse matrices: what they hold, their order, and products with them."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.chainer import sparse
from dbrdist.utils import CooMatrix, get_order, to_coo
from tests.each import each

A = np.array([[0.0, 2, 0, 0], [-1, 0, 0, 3], [0, 0, 0, 0]], np.float32)


def test_the_example_of_the_docs():
    x = to_coo(np.array([[0, 2, 0], [-1, 0, 0]], np.float32))
    np.testing.assert_array_equal(x.data.array, [2, -1])
    np.testing.assert_array_equal(x.row, [0, 1])
    np.testing.assert_array_equal(x.col, [1, 0])
    assert x.row.dtype == x.col.dtype == np.int32
    assert x.shape == (2, 3)
    assert x.order == "C"
    assert not x.data.requires_grad


@each(x=[A, np.stack([A, A * 0, A[::-1]]), A * 0, np.zeros((0, 2, 3), "f")], ldnz=[None, 1, 9])
def test_there_and_back(x, ldnz):
    coo = to_coo(x, ldnz, requires_grad=True)
    np.testing.assert_array_equal(coo.to_dense(), x)
    most = max([int(np.count_nonzero(m)) for m in (x if x.ndim == 3 else [x])], default=0)
    assert coo.data.shape[-1] == max(most, ldnz or 0)
    assert coo.data.requires_grad


def test_padding_is_none():
    coo = to_coo(A, 5)
    np.testing.assert_array_equal(coo.row, [0, 1, 1, -1, -1])
    np.testing.assert_array_equal(coo.data.array, [2, -1, 3, 0, 0])


@pytest.mark.parametrize(
    "row, col, order",
    [
        ([0, 1, 1], [2, 0, 2], "C"),
        ([1, 0, 1], [0, 2, 2], "F"),
        ([0, 1, 0], [0, 0, 2], "F"),
        ([0, 1, 0], [2, 0, 1], "other"),
        ([], [], "C"),
        ([0, 1, -1], [2, 0, -1], "C"),
        ([[0, 1], [1, 0]], [[0, 1], [0, 1]], "F"),
        ([[0, 1], [0, 0]], [[0, 1], [0, 1]], "C"),
    ],
)
def test_order(row, col, order):
    row, col = np.array(row, np.int32), np.array(col, np.int32)
    assert get_order(row, col) == order
    assert CooMatrix(np.ones(row.shape, "f"), row, col, (3, 3)).order == order
    assert CooMatrix(np.ones(row.shape, "f"), row, col, (3, 3), "other").order == "other"


def ints(*values):
    return np.array(values, np.int32)


WRONG = [
    (lambda: CooMatrix(np.ones((1, 1, 1)), ints(0), ints(0), (2, 2)), "data: expected 1 axis"),
    (lambda: CooMatrix(np.ones(2), ints(0), ints(0, 1), (2, 2)), r"row: expected integers of shape \(2,\)"),
    (lambda: CooMatrix(np.ones(1), ints(0), np.ones(1), (2, 2)), "col: expected integers"),
    (lambda: CooMatrix(np.ones(1), ints(0), ints(0), (2,)), "shape: expected two numbers from 1 on"),
    (lambda: CooMatrix(np.ones(1), ints(0), ints(0), (2, 0)), "shape: expected two numbers from 1 on"),
    (lambda: CooMatrix(np.ones(1), ints(2), ints(0), (2, 2)), "row: expected numbers below 2"),
    (lambda: CooMatrix(np.ones(1), ints(0), ints(0), (2, 2), "c"), "order: expected 'C'"),
    (lambda: get_order(ints(0), ints(0, 1)), r"col: expected shape \(1,\)"),
    (lambda: get_order(ints(0), ints(-1)), "row, col: expected both below 0"),
    (lambda: to_coo(np.ones(3)), "x: expected a matrix"),
    (lambda: F.sparse_matmul(A, A.T), "a, b: expected one CooMatrix among them, got none"),
    (lambda: F.sparse_matmul(to_coo(A), to_coo(A.T)), "a, b: expected one CooMatrix among them, got two"),
    (lambda: F.sparse_matmul(to_coo(A), A), "b: expected 4 rows or columns to match"),
    (lambda: F.sparse_matmul(A, to_coo(A)), "a: expected 3 rows or columns to match"),
    (lambda: F.sparse_matmul(to_coo(A), A.T[None]), "b: expected a matrix beside the sparse one"),
    (lambda: F.sparse_matmul(to_coo(A[None]), np.ones((2, 4, 1), "f")), "b: expected a batch of 1 matrices"),
    (lambda: F.sparse_matmul(to_coo(A), A.T.astype(int)), "b: expected a floating type"),
]


@pytest.mark.parametrize("call, message", WRONG)
def test_wrong_arguments_are_refused_in_words(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_only_entries_take_a_gradient():
    coo, b = to_coo(A, 5, requires_grad=True), Variable(np.arange(8, dtype=np.float32).reshape(4, 2))
    y = F.sparse_matmul(coo, b)
    np.testing.assert_array_equal(y.array, A @ b.array)
    F.sum(y).backward()
    np.testing.assert_array_equal(coo.data.grad, [*b.array.sum(1)[[1, 0, 3]], 0, 0])
    np.testing.assert_array_equal(b.grad, np.broadcast_to(A.sum(0)[:, None], (4, 2)))
    assert F.sparse_matmul(to_coo(A), b.array).requires_grad is False


@pytest.mark.slow
@each(shape=[(), (2,)], num_rows=[3, 4000])
def test_products_with_long_and_short_rows(shape, num_rows):
    """Few rows with much to add up are products of their own; the values and gradients are those of dense matrices."""
    rng = np.random.default_rng(0)
    dense = np.zeros((*shape, num_rows, 50))
    dense[..., rng.integers(0, num_rows, 120), rng.integers(0, 50, 120)] = rng.standard_normal(120)
    dense[..., 1, :] = 0  # a row without entries
    coo, b, gy = (
        to_coo(dense, 130, True),
        Variable(rng.standard_normal((*shape, 50, 300))),
        rng.standard_normal((*shape, num_rows, 300)),
    )
    y = F.sparse_matmul(coo, b)
    y.grad = gy
    y.backward()
    np.testing.assert_allclose(y.array, dense @ b.array, atol=1e-12)
    np.testing.assert_allclose(b.grad, np.swapaxes(dense, -1, -2) @ gy, atol=1e-12)
    found = CooMatrix(coo.data.grad, coo.row, coo.col, coo.shape).to_dense()
    np.testing.assert_allclose(found, np.where(dense != 0, gy @ np.swapaxes(b.array, -1, -2), 0), atol=1e-10)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_sparse_matrices_are_refused_by_what_is_wrong_in_them():
    zero = np.zeros(2, np.int32)
    one = CooMatrix(ones(2), zero, zero, (1, 1))
    assert one.to_dense().tolist() == [[2]] and one.order == "C"
    for arguments, words in (
        ((ones(), zero, zero, (1, 1)), "data: expected 1 axis, or 2 for a batch"),
        ((ones(1, 1, 2), zero, zero, (1, 1)), "data: expected 1 axis, or 2 for a batch"),
        ((ones(2), zero[:1], zero, (1, 1)), r"row: expected integers of shape \(2,\) to match data"),
        ((ones(2), zero, zero.astype("f"), (1, 1)), r"col: expected integers of shape \(2,\) to match data"),
        ((ones(2), zero, zero, (1,)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (0, 1)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (1, 0)), "shape: expected two numbers from 1 on"),
        ((ones(2), zero, zero, (1, 1), "K"), "order: expected 'C', 'F', 'other' or None, got 'K'"),
        ((ones(2), zero + 1, zero, (1, 2)), r"row: expected numbers below 1 for shape \(1, 2\)"),
        ((ones(2), zero, zero + 1, (2, 1)), r"col: expected numbers below 1 for shape \(2, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match="CooMatrix: " + words):
            CooMatrix(*arguments)
    assert CooMatrix(ones(0), zero[:0], zero[:0], (1, 1)).to_dense().tolist() == [[0]]
    assert CooMatrix(ones(1), zero[:1] - 1, zero[:1] - 1, (1, 1)).to_dense().tolist() == [[0]]
    x = np.array([[0, 2.0], [0, 0]])
    assert to_coo(x, 3).row.tolist() == [0, -1, -1] and to_coo(x, 1).data.array.tolist() == [2]
    assert to_coo(np.stack([x, x + 1])).to_dense().tolist() == [x.tolist(), (x + 1).tolist()]


def test_entries_with_a_row_or_a_column_below_zero_are_none():
    row, col = np.array([0, -1, 1, -1], np.int32), np.array([1, 0, -1, -1], np.int32)
    matrix = CooMatrix(np.array([1.0, 2.0, 4.0, 8.0]), row, col, (2, 3), order="other")
    assert matrix.to_dense().tolist() == [[0, 1, 0], [0, 0, 0]] and matrix.order == "other"
    with pytest.raises(ValueError, match="both below 0"):
        get_order(row, col)


def test_matrices_without_entries_have_none():
    empty = to_coo(np.zeros((2, 3)))
    assert empty.data.shape == empty.row.shape == (0,) and empty.to_dense().tolist() == [[0] * 3] * 2
    none = to_coo(np.zeros((0, 2, 3)))
    assert none.data.shape == (0, 0) and none.to_dense().shape == (0, 2, 3) and not none.data.requires_grad
    assert to_coo(np.zeros((0, 2, 3)), 2).data.shape == (0, 2)
    assert to_coo(np.eye(2), requires_grad=True).data.requires_grad


def test_entries_of_batches_have_their_places_in_each_matrix():
    dense = np.zeros((3, 2, 4), "f")
    dense[0, 1, 3], dense[0, 0, 2], dense[2, 1, 0] = 1, 2, 3
    found = sparse.to_coo(dense)
    assert found.data.array.tolist() == [[2, 1], [0, 0], [3, 0]]
    assert found.row.tolist() == [[0, 1], [-1, -1], [1, -1]] and found.row.dtype == np.int32
    assert found.col.tolist() == [[2, 3], [-1, -1], [0, -1]]
    np.testing.assert_array_equal(found.to_dense(), dense)
    assert sparse.to_coo(dense, ldnz=5).data.shape == (3, 5)
    for empty, shape in ((dense[:0], (0, 0)), (dense[1:2], (1, 0)), (dense[1], (0,))):
        assert sparse.to_coo(empty).data.shape == shape
    assert sparse.to_coo(dense[:0], ldnz=2).data.shape == (0, 2)
