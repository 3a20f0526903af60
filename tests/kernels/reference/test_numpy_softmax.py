"""Tests of dbrdist.kernels.reference.numpy_softmax."""

import numpy as np
import pytest

from dbrdist.kernels.reference import numpy_softmax


@pytest.mark.parametrize("divisor", [0, 7])
@pytest.mark.parametrize("labels", [[0, 3, -1, 2, 2], [-1, -1, 1, -1, -1], [-1, -1, -1, -1, -1]])
def test_cross_entropy_is_its_definition(labels, divisor):
    x, t = np.random.default_rng(0).standard_normal((5, 4)) * 3, np.array(labels)
    counts = [i for i in range(5) if t[i] != -1]
    over = divisor or max(len(counts), 1)
    p = np.exp(x) / np.exp(x).sum(1)[:, None]
    expected, gx = 0.0, np.zeros((5, 4))
    for i in counts:
        expected -= np.log(p[i, t[i]]) / over
        gx[i] = (p[i] - np.eye(4)[t[i]]) * 1.5 / over
    y, saved = numpy_softmax.cross_entropy(x, t, -1, divisor)
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    given = numpy_softmax.cross_entropy_backward(x, t, saved, np.array(1.5), -1)
    np.testing.assert_allclose(given, gx, rtol=1e-12, atol=1e-15)


def test_cross_entropy_of_extreme_scores_and_of_labels_that_are_none():
    x = np.array([[1e30, 0, -1e30], [-np.inf, -np.inf, 0], [5, 5, 5]], np.float32)
    y, saved = numpy_softmax.cross_entropy(x, np.array([0, 2, 1]), -1, 0)
    np.testing.assert_allclose(y, np.log(3) / 3, rtol=1e-6)
    assert y.dtype == np.float32
    with np.errstate(over="ignore"):
        y, _ = numpy_softmax.cross_entropy(np.array([[np.inf, 0]]), np.array([1]), -1, 0)
    assert y == np.inf
    for label in (3, -2):  # no class, and not the one to be ignored
        t = np.array([label, 2, 1])
        y, saved = numpy_softmax.cross_entropy(x, t, -1, 0)
        gx = numpy_softmax.cross_entropy_backward(x, t, saved, np.float32(1), -1)
        assert np.isnan(y) and np.isnan(gx[0]).all() and np.isfinite(gx[1:]).all()
    y, saved = numpy_softmax.cross_entropy(x[1:].astype(np.float16), np.array([2, 1]), -1, 0)
    gx = numpy_softmax.cross_entropy_backward(x[1:].astype(np.float16), np.array([2, 1]), saved, np.float16(1), -1)
    assert y.dtype == gx.dtype == np.float16 and saved[0].dtype == saved[1].dtype == np.float32
