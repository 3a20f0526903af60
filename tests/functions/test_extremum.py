"""Tests of dbrdist.functions.extremum."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
from tests.each import each


@each(name=["max", "min"], dtype=["f", "d", "e"], keepdims=[False, True], width=[2, 4, 8, 9])
def test_extrema_along_a_short_last_axis(name, dtype, keepdims, width):
    """Ties share the gradient, NaN wins and takes it, whichever way is taken for the length of the axis."""
    x = np.random.default_rng(0).integers(-3, 4, (50, 40, width)).astype(dtype)
    x[3, 4, 1], x[5, 6, 0], x[7, 8] = np.nan, np.inf, -np.inf
    v = dbrdist.Variable(x)
    y = getattr(F, name)(v, -1, keepdims)
    expected = getattr(x, name)(-1, keepdims=True)
    np.testing.assert_array_equal(y.array, expected if keepdims else expected[..., 0])
    y.grad = gy = np.random.default_rng(1).standard_normal(y.shape).astype(dtype)
    y.backward()
    is_chosen = (x == expected) | (np.isnan(x) & np.isnan(expected))
    np.testing.assert_array_equal(v.grad, np.where(is_chosen, gy.reshape(expected.shape), 0))
    assert y.dtype == v.grad.dtype == x.dtype


def test_the_second_derivative_along_a_short_axis():
    x = dbrdist.Variable(np.random.default_rng(0).standard_normal((2000, 3)))
    y = F.sum(F.max(F.square(x), 1))
    (g,) = dbrdist.grad([y], [x], enable_double_backprop=True)
    (gg,) = dbrdist.grad([F.sum(F.square(g))], [x])
    largest = np.square(x.array) == np.square(x.array).max(1, keepdims=True)
    np.testing.assert_allclose(gg.array, 8 * x.array * largest)
