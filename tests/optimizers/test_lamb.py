"""Tests of dbrdist.optimizers.lamb."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.optimizers import LAMB
from tests.optimizers.optimizer_helpers import make, run


@pytest.mark.parametrize("skip", [True, False])
def test_lamb_trusts_with_1_where_a_norm_is_zero(skip):
    link = make(shapes=((2, 3), (4,)))
    made = LAMB(alpha=0.1, weight_decay_rate=0.0, skip_vectors=skip).setup(link)
    link.p0.array[...] = 0
    before = link.p1.array.copy()
    link.p0.grad, link.p1.grad = np.full((2, 3), 2.0), np.zeros(4)
    made.update()
    np.testing.assert_allclose(link.p0.array, np.full((2, 3), -0.1 * 2 / (2 + 1e-6)), rtol=1e-12)
    np.testing.assert_array_equal(link.p1.array, before)


def test_lamb_moves_by_alpha_times_the_norm():
    link = make()
    made = LAMB(alpha=0.1, skip_vectors=False).setup(link)
    before = [p.array.copy() for p in link.params()]
    run(link, made, range(1))
    for p, w in zip(link.params(), before):
        assert np.linalg.norm(p.array - w) == pytest.approx(0.1 * np.linalg.norm(w), rel=1e-12)
