"""Tests of dbrdist.functions.attention."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array.backend import as_dtype
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


def exact(q, k, v, gy, added):
    """y, and the gradients of q, k and v, in float64."""
    q, k, v, gy = (a.astype(np.float64) for a in (q, k, v, gy))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]) + added
    w = np.exp(scores - scores.max(2, keepdims=True))
    w /= w.sum(2, keepdims=True)
    gw = gy @ v.swapaxes(1, 2)
    gs = w * (gw - (w * gw).sum(2, keepdims=True)) / np.sqrt(q.shape[2])
    return w @ v, gs @ k, gs.swapaxes(1, 2) @ q, w.swapaxes(1, 2) @ gy


@each(dtype=["float16", "bfloat16"], num=[20, 512])
def test_scores_of_16_bit_types_are_those_of_float32(dtype, num):
    """Scores near 40 were off by 0.02, or 0.13 in bfloat16, and weights by 2 or 13 %; from 65,504 on they were NaN."""
    dtype = as_dtype(dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    rng = np.random.default_rng(0)
    q, k, v, gy = ((rng.standard_normal((2, num, 16)) * n).astype(dtype) for n in (3, 3, 1, 1))
    hidden = np.where(np.tril(np.ones((num, num), bool)), 0, -np.inf)
    for mask, is_causal, added in ((None, False, 0), (None, True, hidden), (hidden == 0, False, hidden)):
        xs = [Variable(a) for a in (q, k, v)]
        y = F.scaled_dot_product_attention(*xs, mask, is_causal=is_causal)
        y.grad = gy
        y.backward()
        for found, wanted in zip((y.array, *(x.grad for x in xs)), exact(q, k, v, gy, added)):
            assert found.dtype == dtype
            np.testing.assert_allclose(found.astype(float), wanted, rtol=eps, atol=eps * np.abs(wanted).max() / 30)
    high = F.multi_head_attention(q[:, :5] * dtype.type(60), k[:, :5] * dtype.type(60), v[:, :5], 1)
    assert np.isfinite(high.array.astype(float)).all()


@each(shape=[(), (3, 1, 1)])
def test_a_scale_may_be_learned(shape):
    """A Variable was taken for its number, and got no gradient."""
    x = np.random.default_rng(1).standard_normal((3, 5, 4))
    scale = Variable(np.full(shape, 0.7))
    y = F.scaled_dot_product_attention(x, x[:, ::-1], x, is_causal=True, scale=scale)
    np.testing.assert_allclose(y.array, F.scaled_dot_product_attention(x, x[:, ::-1], x, None, 0, True, 0.7).array)
    F.sum(y * x).backward()
    high, low = (F.scaled_dot_product_attention(x, x[:, ::-1], x, None, 0, True, 0.7 + d).array for d in (1e-6, -1e-6))
    wanted = ((high - low) * x).sum((1, 2), keepdims=True) / 2e-6
    np.testing.assert_allclose(scale.grad, wanted if shape else wanted.sum(), rtol=1e-6)
