"""Tests of dbrdist.optimizers.adam."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dbrdist.optimizers import AdaBound, Adam, AMSBound, AMSGrad
from tests.optimizers.optimizer_formulas import adabound, adam, amsgrad
from tests.optimizers.optimizer_helpers import G, W, follow, link_of, make, run, saved


def load(source, link, optimizer):
    link.serialize(source["model"])
    optimizer.serialize(source["optimizer"])


def assert_equal(first, second):
    for p, q in zip(first.params(), second.params(), strict=True):
        np.testing.assert_array_equal(p.array, q.array)


def expected(formula, steps, **values):
    """p0 of ``make()`` after some steps; ``formula`` by step where it changes."""
    link = make()
    w, s = link.p0.array.copy(), {}
    for t in steps:
        g = np.random.default_rng(100 + t).normal(size=w.shape)
        w = formula(w, g, s, t + 1, **values)
    return w


def test_amsgrad_of_one_parameter_alone():
    link = make()
    made = Adam(alpha=0.01, beta2=0.5).setup(link)
    link.p2.update_rule.hyperparam.amsgrad = True
    run(link, made, range(5))
    assert set(link.p2.update_rule.state) == {"m", "v", "vhat"} and set(link.p0.update_rule.state) == {"m", "v"}
    np.testing.assert_allclose(link.p0.array, expected(adam, range(5), alpha=0.01, b2=0.5), rtol=1e-13)


def test_amsgrad_switched_on_later_begins_there():
    link, other = make(), make()
    made = Adam(alpha=0.01, beta2=0.5).setup(link)
    run(link, made, range(3))
    before = link.p0.array.copy()
    m, v = (link.p0.update_rule.state[n].copy() for n in "mv")
    made.amsgrad = True
    again = Adam().setup(other)
    load(saved(link, made), other, again)  # saved between the switch and the next update
    s = {"m": m, "all v": [v]}
    w = before
    for t in range(3, 8):
        w = amsgrad(w, np.random.default_rng(100 + t).normal(size=w.shape), s, t + 1, alpha=0.01, b2=0.5)
    for net, optimizer in ((link, made), (other, again)):
        run(net, optimizer, range(3, 8))
        np.testing.assert_allclose(net.p0.array, w, rtol=1e-12)
    straight = make()
    unsaved = Adam(alpha=0.01, beta2=0.5).setup(straight)
    run(straight, unsaved, range(3))
    unsaved.amsgrad = True
    run(straight, unsaved, range(3, 8))
    assert_equal(straight, link)
    made.amsgrad = False  # and off again
    run(link, made, range(8, 9))
    assert set(link.p0.update_rule.state) >= {"m", "v"}


def test_loading_tells_whether_amsgrad_is_on():
    link, other = make(), make()
    made = AMSGrad(0.01, beta2=0.5).setup(link)
    run(link, made, range(4))
    again = Adam().setup(other)
    run(other, again, range(1))  # it has a state already, without the largest v
    load(saved(link, made), other, again)
    for net, optimizer in ((link, made), (other, again)):
        run(net, optimizer, range(4, 8))
    assert_equal(link, other)


@pytest.mark.parametrize("cls", [AdaBound, AMSBound])
def test_the_final_rate_follows_alpha(cls):
    """A schedule that divides alpha by ten divides final_lr with it, also after a restart."""
    link, other = make(), make()
    made = cls(alpha=0.1, final_lr=0.05, gamma=100.0).setup(link)
    run(link, made, range(2))
    made.alpha = 0.01
    again = cls(alpha=7.0).setup(other)
    load(saved(link, made), other, again)
    before = link.p0.array.copy()
    m = link.p0.update_rule.state["m"].copy()
    g = np.random.default_rng(102).normal(size=m.shape)
    for net, optimizer in ((link, made), (other, again)):
        run(net, optimizer, range(2, 3))
        rate = (before - net.p0.array) / (0.9 * m + 0.1 * g)  # by now the interval is narrow
        np.testing.assert_allclose(rate, 0.005, rtol=0.01)


def test_adabound_without_speed_is_adam():
    link = make()
    run(link, AdaBound(alpha=0.01, gamma=0.0).setup(link), range(5))
    np.testing.assert_allclose(link.p0.array, expected(adam, range(5), alpha=0.01), rtol=1e-13)


def test_adabound_switched_on_later():
    link = make()
    made = Adam(alpha=0.01).setup(link)
    made.adabound, made.gamma = True, 0.5
    run(link, made, range(5))
    np.testing.assert_allclose(link.p0.array, expected(adabound, range(5), alpha=0.01, gamma=0.5), rtol=1e-13)


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_adabound_needs_a_rate_to_be_in_proportion_to(alpha):
    for cls in (AdaBound, AMSBound):
        with pytest.raises(ValueError, match=f"{cls.__name__}: alpha: expected a number above 0"):
            cls(alpha=alpha)
    assert Adam(alpha=0.0).adabound is False


def test_adam_keeps_eps_apart_from_the_root():
    link = link_of(w=W)
    optimizer = Adam(alpha=0.5, beta1=0.5, beta2=0.75, eps=2.0).setup(link)
    link.w.grad = G.copy()
    optimizer.update()
    step = 0.5 * math.sqrt(0.25) / 0.5 * (0.5 * G) / (np.sqrt(0.25 * G * G) + 2.0)
    np.testing.assert_allclose(link.w.array, W - step, rtol=1e-13)


def test_adam_does_not_feel_the_scale_of_gradients():
    for scale in (1e-3, 1.0, 1e4):
        (w,), _ = follow(Adam(alpha=0.01), [scale])
        np.testing.assert_allclose(w, -0.01, rtol=1e-3)
