"""What becomes of a velocity without gradients: it ends at 0, not among the numbers that are slow to compute with."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist.optimizers import LARS, CorrectedMomentumSGD, MomentumSGD, NesterovAG
from tests.each import each

CASES = (
    lambda: MomentumSGD(0.1, 0.9),
    lambda: CorrectedMomentumSGD(0.1, 0.9),
    lambda: NesterovAG(0.1, 0.9),
    lambda: LARS(0.1, 0.9, weight_decay=0.0),
)


def trained(make, dtype, num_updates, first):
    """A parameter and its velocity after one gradient and as many updates, all others without one."""
    link = dbrdist.Link()
    with link.init_scope():
        link.p = dbrdist.Parameter(np.array([1.0, -2.0, 3.0], dtype))
    optimizer = make().setup(link)
    for k in range(num_updates):
        link.p.grad = np.array([first, -first, 1.0] if k == 0 else [0.0, 0.0, 0.01], dtype)
        optimizer.update()
    return link.p.array, link.p.update_rule.state["v"]


@each(make=CASES, dtype=[np.float32, np.float64])
def test_a_velocity_without_gradients_ends_at_zero(make, dtype):
    tiny = np.finfo(dtype).tiny
    values, v = trained(make, dtype, 64, 30 * tiny)  # 0.9 ** 64 is 0.001
    assert np.all(v[:2] == 0) and abs(v[2]) > 1e-5
    np.testing.assert_array_equal(values[:2], np.array([1, -2], dtype))
    _, v = trained(make, dtype, 63, 30 * tiny)  # until then it is what the formula says
    assert np.all(abs(v[:2]) > 0) and np.all(abs(v[:2]) < tiny)


@each(make=CASES, dtype=[np.float32, np.float64])
def test_a_velocity_of_normal_numbers_stays(make, dtype):
    _, v = trained(make, dtype, 64, 1e5 * np.finfo(dtype).tiny)
    assert np.all(abs(v[:2]) >= np.finfo(dtype).tiny)


@each(make=CASES)
def test_what_is_not_finite_stays(make):
    with np.errstate(all="ignore"):
        _, v = trained(make, np.float32, 130, np.inf)
    assert not np.isfinite(v[:2]).any()
