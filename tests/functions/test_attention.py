"""Tests of dbrdist.functions.attention."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each


def test_rows_of_one_number():
    x = np.array([[2.0], [-3.0]])
    np.testing.assert_allclose(F.rms_normalization(x, np.ones(1), 0.5).array, x / np.sqrt(x * x + 0.5))
    q, k, v = (np.array([[[a], [b]]]) for a, b in ((1.0, 2.0), (0.5, -1.0), (3.0, 7.0)))
    weights = np.exp(q @ k.swapaxes(1, 2))
    expected = weights / weights.sum(2, keepdims=True) @ v
    np.testing.assert_allclose(F.scaled_dot_product_attention(q, k, v).array, expected)


X = np.random.default_rng(0).standard_normal((3, 5, 8)).astype("f")


@each(dtype=["float16", "float32", "float64"])
def test_no_score_is_lower_than_that_of_a_key_which_must_not_be_seen(dtype):
    q = np.full((1, 2, 4), 70, dtype)  # scores of -19600
    value = np.array([[[1.0], [5.0]]], dtype)
    for mask in (np.array([[True, False]]), np.array([[0.0, -np.inf]], dtype)):
        assert (F.scaled_dot_product_attention(-q, q, value, mask, scale=1.0).array == 1).all()


@each(dtype=["float16", "float64"])
def test_a_query_that_sees_nothing_by_numbers_gets_zeros(dtype):
    x = Variable(X[:, :3].astype(dtype))
    mask = np.where(np.arange(3)[:, None] == 1, -np.inf, np.zeros((3, 3)))
    y = F.scaled_dot_product_attention(x, x, x, mask)
    F.sum(y).backward()
    assert (y.array[:, 1] == 0).all() and y.array[:, [0, 2]].all() and np.isfinite(x.grad).all()
    assert (F.scaled_dot_product_attention(x, X[:, :0].astype(dtype), X[:, :0].astype(dtype)).array == 0).all()


@each(mask=[np.ones((5, 5), np.int64), [[True] * 5] * 5])
def test_masks_are_booleans_or_floating_numbers(mask):
    with pytest.raises(ValueError, match="scaled_dot_product_attention: mask: expected"):
        F.multi_head_attention(X, X, X, 2, mask)
