"""All update rules at their edges: no gradient yet, eps of 0, gaps, saved states; and what single rules promise."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from dbrdist import optimizers
from dbrdist.optimizers import MSVAG, SGD, RMSpropGraves
from dbrdist.optimizers.gradient_descent import SGDRule
from tests.each import each
from tests.optimizers.optimizer_formulas import CASES
from tests.optimizers.optimizer_helpers import make, run, saved

OPTIMIZERS = [case[0] for case in CASES]
WITH_EPS = [
    name
    for name in optimizers.__all__
    if hasattr(getattr(optimizers, name), "setup") and "eps" in inspect.signature(getattr(optimizers, name)).parameters
]


def load(source, link, optimizer):
    link.serialize(source["model"])
    optimizer.serialize(source["optimizer"])


def assert_equal(first, second):
    for p, q in zip(first.params(), second.params(), strict=True):
        np.testing.assert_array_equal(p.array, q.array)


# ---- all of them ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@each(optimizer=OPTIMIZERS)
def test_a_saved_state_goes_on_with_the_same_bits(optimizer):
    straight, first, second = make(np.float32), make(np.float32), make(np.float32)
    run(straight, optimizer().setup(straight), range(7))
    half = optimizer().setup(first)
    run(first, half, range(3))
    resumed = optimizer().setup(second)
    load(saved(first, half), second, resumed)
    assert resumed.hyperparam.get_dict() == half.hyperparam.get_dict()
    run(second, resumed, range(3, 7))
    assert_equal(straight, second)


@each(optimizer=OPTIMIZERS)
def test_gaps_in_flat_memory_stay_zero(optimizer):
    link = make(np.float32)
    made = optimizer().setup(link)
    run(link, made, range(4))
    (part,) = made._plan()
    gaps = part.run.gaps
    assert gaps.size == 4 + 11 + 8
    for a in (part.run.data, part.run.grad, *part.state):
        assert not a[gaps].any()


@each(optimizer=OPTIMIZERS)
def test_a_rule_promises_to_keep_zero_where_it_does(optimizer):
    link = make(np.float32)
    made = optimizer().setup(link)
    for p in link.params():
        p.array[...] = 0
    run(link, made, range(3), factor=0.0)
    kept = not any(a.any() for p in link.params() for a in (p.array, *(p.update_rule.state or {}).values()))
    assert kept == link.p0.update_rule.keeps_zero


def test_the_promise_to_keep_zero_is_inherited_where_the_formula_is():
    class Named(SGDRule):
        state_names = ()

    class Stepping(SGDRule):
        def step(self, hp, t, p, g, *state):
            p += 1

    class SteppingByRun(SGDRule):
        def step_run(self, *arguments):
            raise NotImplementedError

    class Promising(Stepping):
        keeps_zero = True

        def step(self, hp, t, p, g, *state):
            p += g

    rules = SGDRule, Named, Stepping, SteppingByRun, Promising
    assert [rule.keeps_zero for rule in rules] == [True, True, False, False, True]


@each(name=WITH_EPS, dtype=[np.float32, np.float64])
def test_elements_without_a_gradient_stay_where_eps_is_zero(name, dtype):
    link = make(dtype)
    cls = getattr(optimizers, name)
    decay = {
        "LAMB": {"weight_decay_rate": 0.0},
        "LARS": {"weight_decay": 0.0},
        "CorrectedLARS": {"weight_decay": 0.0},
    }.get(name, {})
    made = cls(**{"eps": 0.0, **decay}).setup(link)
    before = link.p0.array.copy()
    for step in range(3):
        for p in link.params():
            p.grad = np.zeros(p.shape, dtype)
        link.p0.grad[0] = step + 1.0
        made.update()
    np.testing.assert_array_equal(link.p0.array[1:], before[1:])
    if name != "AdaDelta":  # which never moves without eps
        assert (link.p0.array[0] < before[0]).all()


@pytest.mark.slow
@each(optimizer=OPTIMIZERS)
def test_equal_large_gradients_stay_finite_in_float32(optimizer):
    """Variances are differences of large equal numbers here, which rounding may take below zero."""
    link = make(np.float32)
    made = optimizer().setup(link)
    for _ in range(200):
        for p in link.params():
            p.grad = np.full(p.shape, 1234.567, np.float32)
        made.update()
    for p in link.params():
        assert np.isfinite(p.array).all()


@pytest.mark.slow
@each(optimizer=OPTIMIZERS)
def test_a_frozen_parameter_and_one_with_hyperparameters_of_its_own(optimizer):
    """The others move as without them; a rule with its neighbours' values moves as they do."""
    plain, mixed = make(), make()
    run(plain, optimizer().setup(plain), range(4))
    made = optimizer().setup(mixed)
    mixed.p1.update_rule.enabled = False
    name, value = next(iter(made.hyperparam.get_dict().items()))
    setattr(mixed.p2.update_rule.hyperparam, name, value)
    before = mixed.p1.array.copy()
    run(mixed, made, range(4))
    np.testing.assert_array_equal(mixed.p1.array, before)
    for p, q in ((plain.p0, mixed.p0), (plain.p2, mixed.p2), (plain.p3, mixed.p3)):
        np.testing.assert_allclose(p.array, q.array, rtol=1e-13, atol=1e-15)


@pytest.mark.slow
@each(optimizer=OPTIMIZERS)
def test_a_loss_scale_changes_nothing_in_float64(optimizer):
    links = make(), make()
    run(links[0], optimizer().setup(links[0]), range(4))
    scaled = optimizer().setup(links[1])
    scaled.set_loss_scale(64.0)
    run(links[1], scaled, range(4), factor=64.0)
    assert_equal(*links)


# ---- single rules ---------------------------------------------------------------------------------------------------
def test_the_first_step_of_msvag_is_that_of_sgd():
    """One gradient has no variance: the factor is 1 to the last bit, not 0/0 or what rounding makes of it."""
    link, other = make(np.float32), make(np.float32)
    run(link, MSVAG(lr=0.5).setup(link), range(1))
    run(other, SGD(lr=0.5).setup(other), range(1))
    for p, q in zip(link.params(), other.params()):
        np.testing.assert_allclose(p.array, q.array, rtol=1e-6, atol=1e-7)


def test_msvag_without_memory_is_sgd():
    link, other = make(), make()
    run(link, MSVAG(lr=0.5, beta=0.0).setup(link), range(4))
    run(other, SGD(lr=0.5).setup(other), range(4))
    for p, q in zip(link.params(), other.params()):
        np.testing.assert_allclose(p.array, q.array, rtol=1e-13)


def test_the_variance_of_equal_gradients_is_zero_and_not_less():
    """n - mean^2 reaches -104 in float32 for gradients of 8968, which eps does not outweigh."""
    link = make(np.float32, ((3,),))
    made = RMSpropGraves(lr=1e-4, momentum=0.0).setup(link)
    for _ in range(500):
        link.p0.grad = np.full(3, 8968.0, np.float32)
        before = link.p0.array.copy()
        made.update()
        step = before - link.p0.array
        assert (step > 0).all() and (step <= 1e-4 * 8968 / math.sqrt(1e-4) * 1.001).all()
