"""What becomes of a velocity without gradients: it ends at 0, not among the numbers that are slow to compute with."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import dbrdist
from dbrdist.core.array import backend
from dbrdist.optimizers import LARS, CorrectedMomentumSGD, CorrectedNesterovAG, MomentumSGD, NesterovAG
from dbrdist.optimizers.gradient_descent import MomentumSGDRule, sweep
from tests.each import each
from tests.optimizers.optimizer_helpers import follow

CASES = (
    lambda: MomentumSGD(0.1, 0.9),
    lambda: CorrectedMomentumSGD(0.1, 0.9),
    lambda: NesterovAG(0.1, 0.9),
    lambda: CorrectedNesterovAG(0.1, 0.9),
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


def test_the_smallest_normal_number_stays():
    for dtype in (np.float32, np.float64):
        tiny = np.finfo(dtype).tiny
        v = np.array([tiny, -tiny, tiny / 2, -tiny / 2, 0, 1], dtype)
        for t in (63, 65):
            before = v.copy()
            sweep(v, t)
            np.testing.assert_array_equal(v, before)
        sweep(v, 64)
        np.testing.assert_array_equal(v, np.array([tiny, -tiny, 0, 0, 0, 1], dtype))


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


class NarrowRule(MomentumSGDRule):
    def init_state(self, param):
        self.state["v"] = np.zeros_like(param.array)


@each(dtype=[np.float16, backend.as_dtype("bfloat16")])
def test_a_velocity_of_16_bits_stays(dtype):
    """Numbers below its smallest normal one, 6e-5 in float16, still move a parameter."""
    rule, param = NarrowRule(), dbrdist.Parameter(np.ones(3, dtype))
    rule.hyperparam.lr, rule.hyperparam.momentum = 1.0, 1.0
    param.grad = np.full(3, 1e-5, dtype)
    for _ in range(64):
        rule.update(param)
    np.testing.assert_allclose(rule.state["v"].astype("d"), -64e-5, rtol=0.2)


@pytest.mark.slow
def test_a_sweep_takes_little_memory():
    """LARS looks at all parameters of a layer together, but computes in pieces."""
    link = dbrdist.Link()
    with link.init_scope():
        link.p = dbrdist.Parameter(np.ones((1024, 1024), np.float32))
    optimizer = LARS(0.1, 0.9).setup(link)
    peaks = []
    for k in range(64):
        link.p.grad = np.ones_like(link.p.array)
        if k > 61:
            tracemalloc.start()
        optimizer.update()
        if k > 61:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 20)


def test_momentum_sgd_at_learning_rate_6_4():
    """Akiba et al. 2017 with alpha_SGD = 1: g = 1, 1 moves to -6.4 and -18.56."""
    np.testing.assert_allclose(follow(MomentumSGD(lr=6.4, momentum=0.9), [1, 1])[0], [-6.4, -18.56], rtol=1e-14)


def test_momentum_correction_when_the_learning_rate_changes():
    """Goyal et al. 2017, section 2.1: equation 9 needs no correction, equation 10 does."""
    lrs = [0.1, 0.1, 1, 1]
    np.testing.assert_allclose(
        follow(CorrectedMomentumSGD(0.1, 0.9), [1] * 4, lrs)[0], [-0.1, -0.29, -3.0, -6.439], rtol=1e-12
    )
    uncorrected, _ = follow(MomentumSGD(0.1, 0.9), [1] * 4, lrs)
    np.testing.assert_allclose(uncorrected, [-0.1, -0.29, -1.461, -3.5149], rtol=1e-12)


def test_nesterovs_momentum_needs_no_correction_either():
    """PyTorch's form, by hand: u = 1, 1.9, 2.71, 3.439 and steps of lr (1 + 0.9 u)."""
    lrs = [0.1, 0.1, 1, 1]
    steps = np.array(lrs) * (1 + 0.9 * np.array([1, 1.9, 2.71, 3.439]))
    found, _ = follow(CorrectedNesterovAG(0.1, 0.9), [1] * 4, lrs)
    np.testing.assert_allclose(found, -np.cumsum(steps), rtol=1e-12)
    other, _ = follow(NesterovAG(0.1, 0.9), [1] * 4, lrs)
    np.testing.assert_allclose(found[:2], other[:2], rtol=1e-12)  # the same while the rate stays
    assert abs(found[3] - other[3]) > 1
