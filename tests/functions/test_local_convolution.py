"""Tests of dbrdist.functions.local_convolution."""

import numpy as np

import dbrdist.functions as F

X = np.random.default_rng(0).standard_normal((2, 3, 5, 6)).astype("f")


def test_zero_offsets_give_a_convolution():
    W, b = np.random.default_rng(1).standard_normal((4, 3, 3, 2)).astype("f"), np.arange(4, dtype="f")
    y = F.convolution_2d(X, W, b, (2, 1), (1, 2))
    moved = F.deformable_convolution_2d_sampler(X, np.zeros((2, 12, *y.shape[2:]), "f"), W, b, (2, 1), (1, 2))
    np.testing.assert_allclose(moved.array, y.array, rtol=1e-4, atol=1e-5)


def test_equal_filters_everywhere_give_a_convolution():
    W = np.random.default_rng(1).standard_normal((4, 3, 3, 2)).astype("f")
    y = F.convolution_2d(X, W, stride=2)
    local = np.broadcast_to(W[:, None, None], (4, *y.shape[2:], *W.shape[1:]))
    np.testing.assert_allclose(F.local_convolution_2d(X, local, stride=2).array, y.array, rtol=1e-4, atol=1e-5)
