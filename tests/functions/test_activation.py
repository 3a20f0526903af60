"""Tests of dbrdist.functions.activation."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each


def test_the_gradient_of_swish_by_beta_does_not_overflow():
    x = np.array([1e20, -1e20, 2e38, 1.0, -2.0], np.float32)
    beta = Variable(np.array(1.5, np.float32))
    y = F.swish(x, beta)
    (g,) = dbrdist.grad([y], [beta], [np.ones_like(x)])
    s = 1 / (1 + np.exp(-1.5 * x.astype("d")[3:]))
    np.testing.assert_allclose(g.array, (x[3:] ** 2 * s * (1 - s)).sum(), rtol=1e-5)  # nothing from where s is 0 or 1


@each(dtype=[np.float32, np.float64], size=[7, 10_000])
def test_softplus_of_a_negative_beta(dtype, size):
    x = Variable(np.linspace(-4, 4, size, dtype=dtype))
    y = F.softplus(x, -2.0)
    np.testing.assert_allclose(y.array, -np.logaddexp(0, -2 * x.array) / 2, rtol=1e-5)
    (g,) = dbrdist.grad([y], [x], [np.ones_like(x.array)])
    np.testing.assert_allclose(g.array, 1 / (1 + np.exp(2 * x.array)), rtol=1e-5)


@each(axis=[0, 1, 2, 3], dtype=["float32", "float64"])
def test_positive_and_negative_parts_of_images_lie_along_the_axis(axis, dtype):
    x = np.random.default_rng(0).standard_normal((6, 8, 20, 30)).astype(dtype)
    y = F.crelu(Variable(x), axis)
    np.testing.assert_array_equal(y.array, np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis))
