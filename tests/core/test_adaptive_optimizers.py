"""All update rules at their edges: no gradient yet, eps of 0, gaps, saved states; and what single rules promise."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from optimizer_formulas import CASES, adabound, adam, amsgrad

import dbrdist
from dbrdist import Parameter, optimizers
from dbrdist.optimizers import LAMB, MSVAG, SGD, AdaBound, Adam, AMSBound, AMSGrad, RMSpropGraves
from dbrdist.optimizers.gradient_descent import SGDRule
from dbrdist.optimizers.lars import joint_norms
from tests.each import each

SHAPES = ((4, 3), (5,), (2, 3, 2, 2), ())
OPTIMIZERS = [case[0] for case in CASES]
WITH_EPS = [
    name
    for name in optimizers.__all__
    if hasattr(getattr(optimizers, name), "setup") and "eps" in inspect.signature(getattr(optimizers, name)).parameters
]


def make(dtype=np.float64, shapes=SHAPES):
    random = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(random.normal(size=shape).astype(dtype)))
    return link


def run(link, optimizer, steps, factor=1.0):
    for t in steps:
        random = np.random.default_rng(100 + t)
        for p in link.params():
            p.grad = np.asarray(factor * random.normal(size=p.shape), p.dtype)
        optimizer.update()


def saved(link, optimizer):
    target = dbrdist.serializers.DictionarySerializer()
    link.serialize(target["model"])
    optimizer.serialize(target["optimizer"])
    return dbrdist.serializers.NpzDeserializer(target.target)


def load(source, link, optimizer):
    link.serialize(source["model"])
    optimizer.serialize(source["optimizer"])


def assert_equal(first, second):
    for p, q in zip(first.params(), second.params(), strict=True):
        np.testing.assert_array_equal(p.array, q.array)


# ---- all of them ----------------------------------------------------------------------------------------------------


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


def test_norms_of_several_pairs_stay_in_pairs():
    arrays = [np.array([3.0 * k, 4.0 * k], np.float32) for k in range(1, 7)]
    found = joint_norms(None, list(zip(arrays[::2], arrays[1::2])))
    assert found == [(5.0, 10.0), (15.0, 20.0), (25.0, 30.0)]


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
    decay = {"LAMB": {"weight_decay_rate": 0.0}, "LARS": {"weight_decay": 0.0}}.get(name, {})
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


@each(optimizer=OPTIMIZERS)
def test_a_loss_scale_changes_nothing_in_float64(optimizer):
    links = make(), make()
    run(links[0], optimizer().setup(links[0]), range(4))
    scaled = optimizer().setup(links[1])
    scaled.set_loss_scale(64.0)
    run(links[1], scaled, range(4), factor=64.0)
    assert_equal(*links)


# ---- amsgrad and adabound -------------------------------------------------------------------------------------------


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
    assert Adam(alpha=alpha).adabound is False


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
