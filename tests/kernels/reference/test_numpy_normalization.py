"""Tests of dbrdist.kernels.reference.numpy_normalization."""

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.kernels.reference import numpy_normalization

NORMALIZATIONS = [((4, 3, 5, 2), (0, 2, 3)), ((7, 3), (0,)), ((3, 2, 4, 2), (0,)), ((3, 2, 4), (0, 2)), ((2, 3), (1,))]


@pytest.mark.parametrize(("shape", "axis"), NORMALIZATIONS)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_normalization_matches_finite_differences(shape, axis, relu):
    rng = np.random.default_rng(3)
    kept = tuple(n for i, n in enumerate(shape) if i not in axis)
    expand = tuple(1 if i in axis else n for i, n in enumerate(shape))
    x, gamma, beta = rng.standard_normal(shape), rng.standard_normal(kept), rng.standard_normal(kept)

    def formula(x, gamma, beta):
        y = (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-3)
        y = y * gamma.reshape(expand) + beta.reshape(expand)
        return np.maximum(y, 0) if relu else y

    y, mean, var, saved = numpy_normalization.bn_forward(x, gamma, beta, 1e-3, axis, relu)
    np.testing.assert_allclose(y, formula(x, gamma, beta), atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(axis), atol=1e-13)
    np.testing.assert_allclose(var, x.var(axis), atol=1e-13)
    inferred = numpy_normalization.bn_inference(x, gamma, beta, mean, var, 1e-3, axis, relu)
    np.testing.assert_allclose(inferred, y, atol=1e-12)

    gy = rng.standard_normal(shape)
    grads = numpy_normalization.bn_backward(x, gamma, mean, var, gy, 1e-3, saved, axis, relu)
    for i, grad in enumerate(grads):
        direction, inputs = rng.standard_normal(grad.shape), [x, gamma, beta]
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(inputs)
            moved[i] = moved[i] + step * direction
            ends.append(np.sum(gy * formula(*moved)))
        assert np.sum(grad * direction) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_variance_of_a_large_mean_is_stable():
    x = np.array([1e4, 1e4 + 1, 1e4 + 2], np.float32).reshape(3, 1)
    one = np.ones(1, np.float32)
    _, _, var, _ = numpy_normalization.bn_forward(x, one, one, 1e-5, (0,), False)
    assert var[0] == pytest.approx(2 / 3, rel=1e-6)


def test_statistics_of_many_rows_are_exact_to_float32():
    x = np.random.default_rng(0).standard_normal((50_001, 3), dtype=np.float32) + np.float32(3)
    one = np.ones(3, np.float32)
    _, mean, var, _ = numpy_normalization.bn_forward(x, one, one, 1e-5, (0,), False)
    np.testing.assert_allclose(mean, x.mean(0, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(var, x.var(0, dtype=np.float64), rtol=1e-6)


def test_statistics_of_an_empty_batch_are_zero():
    one = np.ones(3, np.float32)
    x = np.zeros((0, 3, 4, 4), np.float32)
    y, mean, var, saved = numpy_normalization.bn_forward(x, one, one, 1e-5, (0, 2, 3), True)
    gx, ggamma, gbeta = numpy_normalization.bn_backward(x, one, mean, var, y, 1e-5, saved, (0, 2, 3), True)
    assert y.shape == gx.shape == x.shape
    assert not np.any([mean, var, ggamma, gbeta])


@pytest.mark.parametrize("shape", [(4, 0, 8, 8), (300, 0), (0, 3, 8, 8)])
def test_normalization_of_images_without_channels_or_of_no_images_is_empty(shape):
    x, ones, axis = np.zeros(shape, np.float32), np.ones(shape[1], np.float32), (0, *range(2, len(shape)))
    y, mean, var, saved = kernels.bn_forward(x, ones, ones, 1e-5, False, axis)
    gx, ggamma, gbeta = kernels.bn_backward(x, ones, mean, var, x, 1e-5, saved, False, axis)
    assert y.shape == gx.shape == shape
    assert all(v.shape == (shape[1],) and not v.any() for v in (mean, var, ggamma, gbeta))


def test_running_statistics_move_by_their_own_weights():
    mean, var = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    numpy_normalization.bn_move(mean, var, np.array([10.0, 20.0]), np.array([30.0, 40.0]), 0.5, (0.25, 0.125))
    np.testing.assert_array_equal(mean, [3.0, 6.0])
    np.testing.assert_array_equal(var, [5.25, 7.0])
