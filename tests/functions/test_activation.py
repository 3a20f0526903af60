"""Tests of dbrdist.functions.activation."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable


def test_the_gradient_of_swish_by_beta_does_not_overflow():
    x = np.array([1e20, -1e20, 2e38, 1.0, -2.0], np.float32)
    beta = Variable(np.array(1.5, np.float32))
    y = F.swish(x, beta)
    (g,) = dbrdist.grad([y], [beta], [np.ones_like(x)])
    s = 1 / (1 + np.exp(-1.5 * x.astype("d")[3:]))
    np.testing.assert_allclose(g.array, (x[3:] ** 2 * s * (1 - s)).sum(), rtol=1e-5)  # nothing from where s is 0 or 1
