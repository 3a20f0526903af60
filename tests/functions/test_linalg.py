"""Tests of dbrdist.functions.linalg."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each

SINGULAR = np.array([[1.0, 2.0], [2.0, 4.0]])


def cofactors(a):
    """By their definition."""
    rest = [[np.delete(np.delete(a, i, 0), j, 1) for j in range(len(a))] for i in range(len(a))]
    return np.array(
        [[(-1) ** (i + j) * np.linalg.det(part) for j, part in enumerate(row)] for i, row in enumerate(rest)]
    )


@each(size=[1, 2, 3, 5], rank_off=[1, 2], dtype=["f", "d"])
def test_the_gradient_of_a_determinant_of_zero_are_the_cofactors(size, rank_off, dtype):
    a = np.random.default_rng(size).normal(size=(3, size, size)).astype(dtype)
    a[1, :, :rank_off] = 0  # exactly singular
    x = Variable(a)
    y = F.batch_det(x)
    y.grad = np.array([1, 2, -3], dtype)
    y.backward()
    expected = [scale * cofactors(m) for scale, m in zip((1, 2, -3), a.astype("d"), strict=True)]
    assert x.grad.dtype == a.dtype
    np.testing.assert_allclose(x.grad, expected, rtol=0, atol=(1e-4 if dtype == "f" else 1e-12) * abs(a).max() ** size)


def test_a_determinant_of_zero_has_a_value_and_no_second_gradient():
    a = Variable(SINGULAR)
    y = F.det(a)
    assert abs(y.array) < 1e-15
    with pytest.raises(ValueError, match="inv: a: expected matrices that are not singular"):
        F.det(Variable(np.zeros((2, 2)))).backward(enable_double_backprop=True)


def test_einsum_of_many_terms_over_large_axes():
    """Contracted in a good order, and in each order the gradient is the same."""
    rng = np.random.default_rng(0)
    xs = [Variable(rng.normal(size=(40, 40)).astype("f")) for _ in range(4)]
    y = F.einsum("ij,jk,kl,lm->im", *xs)
    a, b, c, d = (x.array.astype("d") for x in xs)
    np.testing.assert_allclose(y.array, a @ b @ c @ d, rtol=1e-3, atol=1e-2)
    y.grad = np.ones_like(y.array)
    y.backward()
    np.testing.assert_allclose(xs[1].grad, a.T @ np.ones((40, 40)) @ (c @ d).T, rtol=1e-3, atol=0.1)


def test_long_sums_of_16_bits_run_in_a_wider_type():
    x = np.ones(4096, np.float16)
    assert F.cumsum(x).array[-1] == 4096  # 2048 + 1 is 2048 in 16 bits
    assert F.einsum("i,i", x, x).array == 4096
    assert F.batch_l2_norm_squared(x[None]).array == 4096
    assert F.prod(np.array([300, 300, 0.001], np.float16)).array == np.float16(300 * 300 * float(np.float16(0.001)))
    assert F.fft((x, x * 0))[0].array[0] == 4096


def test_einsum_gives_arrays_of_its_own():
    x = Variable(np.ones((2, 3)))
    y = F.einsum("ij->ji", x)
    x.array[...] = 5.0
    assert (y.array == 1.0).all()


@each(**{"n, is_ordered": [(127, False), (128, True)]})
def test_sums_of_many_products_are_taken_in_a_good_order(n, is_ordered, monkeypatch):
    found, einsum = [], np.einsum
    monkeypatch.setattr(np, "einsum", lambda *xs, optimize: found.append(optimize) or einsum(*xs, optimize=optimize))
    a, b = np.ones((n, 2)), np.ones((2, 64))
    np.testing.assert_array_equal(F.einsum("ij,jk->ik", a, b).array, np.full((n, 64), 2.0))
    assert found == [is_ordered]
    F.einsum("ij->ji", np.ones((1 << 7, 1 << 7)))  # of one array there is no order
    assert found[1:] == [False]
