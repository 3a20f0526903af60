"""Tests of dbrdist.functions.products: means with weights."""

import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from tests.each import each


def exact(x, w, axis, gy):
    """In float64, term by term."""
    total = w.sum(axis, keepdims=True)
    y = (w * x).sum(axis, keepdims=True) / total
    return y, w * gy / total, (x - y) * gy / total


@each(shape=[(3, 5), (40, 300), (2, 30, 200)], axis=[0, 1, -1, None, (0, 1)], dtype=[np.float32, np.float64])
def test_weighted_means_and_gradients(shape, axis, dtype):
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(0.5, 2.0, shape).astype(dtype) for _ in range(2))
    rows = x.ndim - 1 if axis == -1 else axis
    want = exact(x.astype("d"), w.astype("d"), rows, 2.0)
    for keepdims in (False, True):
        for provider in ("loops", "columns"):
            a, b = Variable(x), Variable(w)
            with kernels.use(provider):
                y = F.average(a, axis, b, keepdims)
                y.grad = np.full(y.shape, 2, dtype)
                y.backward()
            assert y.shape == (want[0].shape if keepdims else want[0].squeeze(rows).shape)
            for found, value in zip((y.array.reshape(want[0].shape), a.grad, b.grad), want):
                np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * abs(value).max())


def test_a_gradient_of_one_operand_and_second_derivatives():
    rng = np.random.default_rng(0)
    x, w = (Variable(rng.uniform(0.5, 2.0, (4, 3))) for _ in range(2))
    F.sum(F.average(x, 1, w.array)).backward()
    np.testing.assert_allclose(x.grad, w.array / w.array.sum(1, keepdims=True))
    y = F.sum(F.average(x, 1, w) ** 2)
    gx, gw = dbrdist.grad([y], [x, w], enable_double_backprop=True)
    F.sum(gx * gw).backward()
    assert np.isfinite(w.grad).all()


def test_weights_along_one_axis_and_of_sum_zero():
    x = Variable(np.arange(6.0).reshape(2, 3))
    np.testing.assert_allclose(F.average(x, 0, np.array([1.0, 3.0])).array, [2.25, 3.25, 4.25])
    with np.errstate(all="ignore"):
        assert np.isnan(F.average(x, 0, np.zeros(2)).array).all()
