"""Tests of dbrdist.links.connection."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import links as L
from tests.functions import references as R

X2 = np.random.default_rng(1).standard_normal((5, 4)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


def test_linear_and_its_relatives():
    link = L.Linear(4, 3, initialW=0.5, initial_bias=np.arange(3.0))
    close(link(X2), 0.5 * X2.sum(1, keepdims=True) + np.arange(3))
    link = L.Linear(4, 3, nobias=True)
    assert link.b is None
    close(link(X2), R.linear(*wide(X2, link.W)))
    close(L.Linear(4, 3, initialW=np.eye(3, 4))(X2[:, None, :], n_batch_axes=2), X2[:, None, :3])
    link = L.Bilinear(4, 4, 2, nobias=True)
    close(link(X2, X2 + 1), R.bilinear(*wide(X2, X2 + 1, link.W)))
    link = L.Bilinear(4, 4, 2, initialW=0.5, initial_bias=(np.full((4, 2), 2.0), np.full((4, 2), 3.0), np.arange(2.0)))
    close(
        link(X2, X2 + 1),
        R.bilinear(*wide(X2, X2 + 1, np.full((4, 4, 2), 0.5), *map(wide_one, (link.V1, link.V2, link.b)))),
    )
    assert [float(v.array.flat[0]) for v in (link.V1, link.V2, link.b)] == [2, 3, 0]
    ids = np.array([[0, 3], [1, 3]])
    link = L.EmbedID(4, 3, initialW=np.arange(12.0).reshape(4, 3), ignore_label=3)
    close(link(ids), R.embed_id(ids, np.arange(12.0).reshape(4, 3), 3))


def wide_one(a):
    return np.asarray(a.array, np.float64)


def test_linear_is_a_matrix_product(xp):
    link = L.Linear(3, 2).to_device("@numpy" if xp is np else "@cupy:0")
    x = xp.asarray(np.random.default_rng(0).normal(size=(4, 3)), xp.float32)
    y = link(x)
    assert y.dtype == xp.float32
    dbrdist.gradient_check.assert_allclose(y, x @ link.W.array.T + link.b.array, 1e-6)


def test_linear_takes_its_input_size_from_the_first_input():
    link = L.Linear(5)
    assert not link.W.is_initialized
    assert link(np.ones((2, 3, 4), np.float32)).shape == (2, 5)
    assert link.W.shape == (5, 12)
    assert link.in_size == 12
    assert not link.b.array.any()


def test_linear_over_several_batch_axes():
    link = L.Linear(None, 5, initial_bias=1.0)
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    y = link(x, n_batch_axes=2)
    assert y.shape == (2, 3, 5)
    np.testing.assert_allclose(y.array, x @ link.W.array.T + 1, rtol=1e-5, atol=1e-6)


def test_linear_without_bias():
    link = L.Linear(3, 2, nobias=True)
    assert [p.name for p in link.params()] == ["W"]
    assert not link(np.zeros((1, 3), np.float32)).array.any()


def test_given_arrays_and_numbers_are_initial_values():
    W = np.arange(6, dtype=np.float32).reshape(2, 3)
    link = L.Linear(3, 2, initialW=W, initial_bias=0.5)
    np.testing.assert_array_equal(link.W.array, W)
    np.testing.assert_array_equal(link.b.array, [0.5, 0.5])


def test_embed_id_looks_up_and_ignores():
    link = L.EmbedID(5, 3, ignore_label=-1)
    y = link(np.array([[4, -1], [0, 4]]))
    np.testing.assert_array_equal(y.array[0, 0], link.W.array[4])
    assert not y.array[0, 1].any()
    F.sum(y).backward()
    np.testing.assert_array_equal(link.W.grad, np.array([1, 0, 0, 0, 2])[:, None] * np.ones((5, 3)))
    assert 0.6 < L.EmbedID(200, 50).W.array.std() < 1.4


@pytest.mark.parametrize("ids", [[5], [-1]])
def test_embed_id_refuses_unknown_ids(ids):
    with pytest.raises(ValueError, match=r"EmbedID: embed_id: x: expected ids from 0 to 4 .* got ids from"):
        L.EmbedID(5, 3)(np.array(ids))


def test_bilinear_against_einsum():
    link = L.Bilinear(3, 4, 5)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    expected = np.einsum("ni,nj,ijk->nk", a, b, link.W.array) + a @ link.V1.array + b @ link.V2.array
    np.testing.assert_allclose(link(a, b).array, expected, rtol=1e-5, atol=1e-6)


def test_embed_id_of_an_old_pickle_ignores_nothing():
    link = L.EmbedID(3, 2)
    del link.ignore_label
    assert link(np.array([1])).shape == (1, 2)
