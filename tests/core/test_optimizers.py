"""Optimizers over several steps against a few lines of plain NumPy in float64 that share no code with them."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from optimizer_formulas import CASES

import dbrdist
from dbrdist import Parameter
from dbrdist.core import ops
from dbrdist.core.backend import as_dtype
from dbrdist.core.serializer import load_npz, save_npz
from dbrdist.optimizers import (
    LARS,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    AdamW,
    AMSGrad,
    CorrectedMomentumSGD,
    GradientClipping,
    GradientHardClipping,
    MomentumSGD,
    RMSprop,
    RMSpropGraves,
    WeightDecay,
    schedules,
)
from tests.each import each

SHAPES = ((4, 3), (5,), (2, 3, 2, 2), ())


def make(dtype=np.float64, shapes=SHAPES):
    random = np.random.default_rng(0)
    link = dbrdist.Link()
    with link.init_scope():
        for i, shape in enumerate(shapes):
            setattr(link, f"p{i}", Parameter(random.normal(size=shape).astype(dtype)))
    return link


def gradients(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape) for shape in shapes]


# ---- formulas --------------------------------------------------------------------------------------------------------


@each(**{"optimizer, formula": CASES, "dtype, tolerance": [(np.float64, 1e-13), (np.float32, 1e-5)]})
def test_optimizer_equals_the_formula_over_eight_steps(optimizer, formula, dtype, tolerance):
    link = make(dtype)
    optimizer = optimizer().setup(link)
    expected = [p.array.astype(np.float64) for p in link.params()]
    states = [{} for _ in expected]
    for t in range(1, 9):
        gs = gradients(t)
        for p, g in zip(link.params(), gs):
            p.grad = g.astype(dtype)
        optimizer.update()
        expected = [formula(w, g.astype(dtype).astype(float), s, t) for w, g, s in zip(expected, gs, states)]
        for p, w in zip(link.params(), expected):
            assert p.dtype == dtype
            np.testing.assert_allclose(p.array, w, rtol=tolerance, atol=tolerance)
    assert optimizer.t == 8


@each(**{"optimizer, formula": CASES})
def test_large_parameters_are_updated_piece_by_piece_alike(optimizer, formula):
    shapes = ((300, 250), (7,), (40, 1000))
    link = make(shapes=shapes)
    optimizer = optimizer().setup(link)
    expected = [p.array.copy() for p in link.params()]
    states = [{} for _ in expected]
    for t in (1, 2, 3):
        gs = gradients(t, shapes)
        for p, g in zip(link.params(), gs):
            p.grad = g
        optimizer.update()
        expected = [formula(w, g, s, t) for w, g, s in zip(expected, gs, states)]
    for p, w in zip(link.params(), expected):
        np.testing.assert_allclose(p.array, w, rtol=1e-12, atol=1e-13)


@each(**{"optimizer, formula": CASES})
def test_gradients_are_left_as_they_were(optimizer, formula):
    link = make()
    optimizer = optimizer().setup(link)
    seen = []
    optimizer.add_hook(lambda o: seen.append(o.target.p0.grad.copy()), name="post", timing="post")
    for p, g in zip(link.params(), gradients(1)):
        p.grad = g
    optimizer.update()
    for p, g in zip(link.params(), gradients(1)):
        np.testing.assert_array_equal(p.grad, g)
    np.testing.assert_array_equal(seen[0], gradients(1)[0])


@each(optimizer=[case[0] for case in CASES], dtype=["float16", "bfloat16"])
def test_16_bit_parameters_follow_float64_within_their_precision(optimizer, dtype):
    dtype = dbrdist.get_dtype(dtype)
    narrow, wide = make(dtype), make(np.float64)
    pair = [(link, optimizer().setup(link)) for link in (narrow, wide)]
    for p, q in zip(narrow.params(), wide.params()):
        q.array[...] = p.array
    for t in range(3):
        for link, o in pair:
            for p, g in zip(link.params(), gradients(t)):
                p.grad = g.astype(dtype).astype(p.dtype)
            o.update()
    eps = 2.0**-10 if dtype == np.float16 else 2.0**-7
    for p, q in zip(narrow.params(), wide.params()):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.array.astype(np.float64), q.array, rtol=12 * eps, atol=12 * eps)


# ---- published numbers ----------------------------------------------------------------------------------------------


def follow(optimizer, gradients_, lrs=None, start=0.0):
    link = dbrdist.Link()
    with link.init_scope():
        link.w = Parameter(np.array([start]))
    optimizer.setup(link)
    out = []
    for i, g in enumerate(gradients_):
        if lrs is not None:
            optimizer.lr = lrs[i]
        link.w.grad = np.array([float(g)])
        optimizer.update()
        out.append(float(link.w.array[0]))
    return out, link


def run_steps(optimizer, dtype, hooks=(), steps=8, wide=False, prepare=None):
    """Some steps from 16-bit values and gradients; ``wide`` holds both in float32 arrays."""
    link = make(dtype)
    if wide:
        for p in link.params():
            p.array = p.array.astype(np.float32)
    made = optimizer().setup(link)
    if not wide:
        made.use_fp32_update()
    for hook in hooks:
        made.add_hook(hook())
    if prepare is not None:
        prepare(made, link)
    for step in range(steps):
        for p, g in zip(link.params(), gradients(step)):
            p.grad = g.astype(dtype).astype(p.dtype)
        made.update()
    return made, link


class HalveGradients:
    """A hook in Chainer's form, which knows nothing of flat memory; halving is exact in every type."""

    name = "HalveGradients"
    call_for_each_param = True
    timing = "pre"

    def __call__(self, rule, param):
        param.grad *= param.dtype.type(0.5)


HOOKS = {
    "none": (),
    "flat": (lambda: WeightDecay(0.1), lambda: GradientClipping(2.0)),
    "per parameter": (HalveGradients, lambda: GradientClipping(2.0)),
}


@each(optimizer=[case[0] for case in CASES], dtype=["float16", "bfloat16"], hooks=HOOKS)
def test_16_bit_parameters_updated_in_float32_equal_float32_rounded_once(optimizer, dtype, hooks):
    dtype = as_dtype(dtype)
    _, narrow = run_steps(optimizer, dtype, HOOKS[hooks], steps=4)
    _, wide = run_steps(optimizer, dtype, HOOKS[hooks], steps=4, wide=True)
    for p, q in zip(narrow.params(), wide.params()):
        assert p.dtype == dtype
        np.testing.assert_array_equal(p.array.astype(np.float32), q.array.astype(dtype).astype(np.float32))
        np.testing.assert_array_equal(p.update_rule.state["fp32_param"], q.array)


def test_small_updates_of_16_bit_parameters_add_up_in_float32():
    for in_fp32, expected in ((False, 1.0), (True, 0.99)):
        link = dbrdist.Link()
        with link.init_scope():
            link.w = Parameter(np.ones(3, as_dtype("bfloat16")))
        optimizer = SGD(1e-4).setup(link)
        optimizer.use_fp32_update(in_fp32)
        for _ in range(100):
            link.w.grad = np.ones(3, link.w.dtype)
            optimizer.update()
        assert link.w.array[0].astype(float) == pytest.approx(expected, rel=2**-8)


def test_values_assigned_between_updates_in_float32_are_kept():
    optimizer, link = run_steps(lambda: SGD(0.5), as_dtype("bfloat16"), steps=1)
    link.p1.array[0] = 3.0
    link.p1.grad = np.ones_like(link.p1.array)
    before = link.p1.update_rule.state["fp32_param"].copy()
    optimizer.update()
    after = link.p1.update_rule.state["fp32_param"]
    assert after[0] == 2.5
    np.testing.assert_array_equal(after[1:], before[1:] - 0.5)


@each(optimizer=[case[0] for case in CASES])
def test_rules_of_their_own_and_chainer_rules_are_updated_in_float32_alike(optimizer):
    dtype = as_dtype("bfloat16")

    def alone(made, link):
        for p in link.params():
            p.update_rule.add_hook(lambda rule, param: None, name="nothing")

    _, narrow = run_steps(optimizer, dtype, prepare=alone)
    _, wide = run_steps(optimizer, dtype, wide=True)
    for p, q in zip(narrow.params(), wide.params()):
        np.testing.assert_array_equal(p.update_rule.state["fp32_param"], q.array)
        np.testing.assert_array_equal(p.array.astype(np.float32), q.array.astype(dtype).astype(np.float32))


def test_chainer_rule_sees_a_float32_parameter():
    seen = []

    class Rule(dbrdist.UpdateRule):
        def init_state(self, param):
            self.state["m"] = np.zeros_like(param.array)

        def update_core(self, param):
            seen.append((param.dtype, param.grad.dtype, self.state["m"].dtype))
            param.array -= param.grad

    class Plain(dbrdist.GradientMethod):
        def create_update_rule(self):
            return Rule()

    _, link = run_steps(Plain, as_dtype("float16"), steps=1)
    assert set(seen) == {(np.dtype("f"),) * 3} and link.p0.dtype == np.float16
    wanted = make(np.float16).p0.array.astype(np.float32) - gradients(0)[0].astype(np.float16)
    np.testing.assert_array_equal(link.p0.array, wanted.astype(np.float16))


@pytest.mark.parametrize("optimizer", [lambda: SGD(0.01), lambda: MomentumSGD(0.01, 0.9)], ids=["SGD", "MomentumSGD"])
def test_state_in_float32_is_saved_and_resumed_exactly(optimizer, tmp_path):
    dtype = as_dtype("bfloat16")
    _, link = run_steps(optimizer, dtype, steps=8)
    half, link_half = run_steps(optimizer, dtype, steps=4)
    save_npz(tmp_path / "model.npz", link_half)
    save_npz(tmp_path / "optimizer.npz", half)
    again, link_again = run_steps(optimizer, dtype, steps=0)  # as after a restart: no state yet
    load_npz(tmp_path / "model.npz", link_again)
    load_npz(tmp_path / "optimizer.npz", again)
    for step in range(4, 8):
        for p, g in zip(link_again.params(), gradients(step)):
            p.grad = g.astype(dtype)
        again.update()
    for p, q in zip(link_again.params(), link.params()):
        np.testing.assert_array_equal(p.update_rule.state["fp32_param"], q.update_rule.state["fp32_param"])


class Pull:
    """A hook that pulls every parameter to zero."""

    name = "Pull"
    call_for_each_param = True

    def __init__(self, timing):
        self.timing = timing

    def __call__(self, rule, param):
        param.array *= param.dtype.type(0.5)


class FlatPull(Pull):
    """The same on flat memory."""

    def flat(self, run):
        run.data[...] *= run.data.dtype.type(0.5)


@pytest.mark.parametrize("timing", ["pre", "post"])
@pytest.mark.parametrize("hook", [Pull, FlatPull])
def test_hooks_that_change_parameters_are_heard_in_float32(hook, timing):
    _, link = run_steps(lambda: SGD(0.0), as_dtype("bfloat16"), [lambda: hook(timing)], steps=3)
    for p, q in zip(link.params(), make(as_dtype("bfloat16")).params()):
        np.testing.assert_array_equal(p.array.astype(np.float32), q.array.astype(np.float32) / 8)


def test_loss_scale_is_divided_out_in_float32():
    link = dbrdist.Link()
    with link.init_scope():
        link.w = Parameter(np.zeros(2, np.float16))
    optimizer = SGD(2.0**10).setup(link)
    optimizer.use_fp32_update()
    optimizer.set_loss_scale(2.0**12)
    link.w.grad = np.full(2, 2.0**-14, np.float16)  # 2^-26 without the scale, which float16 does not have
    optimizer.update()
    np.testing.assert_array_equal(link.w.array, np.full(2, -(2.0**-16), np.float16))


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


@pytest.mark.parametrize(
    ("lr", "w", "rate"), [(1.0, (3.0, 4.0), 0.00499875031242), (11.0, (3.0, 4.0), 0.0549862534), (1.0, (0.0, 0.0), 1.0)]
)
def test_lars_trust_ratio(lr, w, rate):
    g = (0.6, 0.8)
    link = dbrdist.Link()
    with link.init_scope():
        link.W = Parameter(np.array([w]))
        link.b = Parameter(np.array(w))
    optimizer = LARS(lr=lr, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.001).setup(link)
    link.W.grad, link.b.grad = np.array([g]), np.array(g)
    optimizer.update()
    w, g = np.array(w), np.array(g)
    np.testing.assert_allclose(link.W.array[0], w - rate * (g + 5e-5 * w), rtol=1e-9)
    np.testing.assert_allclose(link.b.array, w - lr * g, rtol=1e-14)  # a bias: trust 1, no decay
    link.W.zerograd()
    before = link.W.array.copy()
    v = link.W.update_rule.state["v"].copy()
    optimizer.update()
    np.testing.assert_allclose(link.W.array, before + 0.9 * v - lr * 5e-5 * before, rtol=1e-12)  # zero g: trust 1


def test_adam_does_not_feel_the_scale_of_gradients():
    for scale in (1e-3, 1.0, 1e4):
        (w,), _ = follow(Adam(alpha=0.01), [scale])
        np.testing.assert_allclose(w, -0.01, rtol=1e-3)


def test_goyal_warm_up():
    """8,192 images, 157 iterations an epoch: 0.1 to 3.2 in 5 epochs, then a tenth at 30, 60, 80."""
    f = schedules.warmup(schedules.step(3.2, 0.1, [30, 60, 80]), 5, start=0.1)
    at = [f(i / 157) for i in (0, 157, 314, 785)]
    np.testing.assert_allclose(at, [0.1, 0.72, 1.34, 3.2], rtol=1e-12)
    np.testing.assert_allclose(np.diff([f(i / 157) for i in range(786)]), 3.1 / 785, rtol=1e-9)
    epochs = (29.99, 30, 59.99, 60, 79.99, 80)
    np.testing.assert_allclose([f(e) for e in epochs], [3.2, 0.32, 0.32, 0.032, 0.032, 0.0032], rtol=1e-12)


def test_akiba_steps():
    """Akiba et al. 2017 multiply the rate at epochs 40, 70 and 85; here by a tenth each time."""
    f = schedules.step(6.4, 0.1, [40, 70, 85])
    epochs = (0, 39.99, 40, 69.99, 70, 84.99, 85, 90)
    np.testing.assert_allclose([f(e) for e in epochs], [6.4, 6.4, 0.64, 0.64, 0.064, 0.064, 0.0064, 0.0064], rtol=1e-12)


def test_ffcv_schedule_repeats_the_published_log():
    f = schedules.warmup(schedules.polynomial(1.7, 16, begin=2), 2, start=1.7e-4)
    np.testing.assert_allclose([f(0), f(1), f(2), f(16)], [1.7e-4, 0.850085, 1.7, 0.0], rtol=1e-12)
    last = [f(e + 311 / 312) for e in (0, 1, 15)]
    np.testing.assert_allclose(last, [0.847360913, 1.697275913, 0.000389194], rtol=2e-6)


@pytest.mark.parametrize(
    ("peak", "half", "middle"), [(21.2, 10.6, 5.300075), (17, 8.5, 4.250075), (24.699, 12.3495, 6.174825)]
)
def test_mlperf_schedule(peak, half, middle):
    f = schedules.warmup(schedules.polynomial(peak, 72, power=2, end=1e-4, begin=18), 18)
    np.testing.assert_allclose([f(9), f(18), f(45), f(72), f(80)], [half, peak, middle, 1e-4, 1e-4], rtol=1e-12)


def test_other_schedules():
    assert schedules.constant(0.1)(7) == 0.1
    np.testing.assert_allclose(schedules.exponential(1.0, 0.97)(2), 0.9409)
    f = schedules.cosine(2.0, 10, end=1.0)
    np.testing.assert_allclose([f(0), f(5), f(10), f(11)], [2, 1.5, 1, 1])
    assert schedules.warmup(f, 0) is f
    np.testing.assert_allclose([schedules.stairs(2.0, 0.1, 1.5)(e) for e in (0, 1.4, 1.5, 3.1)], [2, 2, 0.2, 0.02])
    np.testing.assert_allclose([schedules.inverse(36.0, 0.5, 2)(e) for e in (0, 2, 4)], [36, 9, 4])
    np.testing.assert_allclose([schedules.polynomial(1.0, 3, end=5.0, begin=3)(e) for e in (2, 3, 3.1)], [1, 1, 5])


# ---- hooks, update, loss scale --------------------------------------------------------------------------------------


def test_weight_decay_adds_to_the_gradient():
    link = make()
    optimizer = SGD(lr=0.1).setup(link)
    optimizer.add_hook(WeightDecay(0.5))
    before = [p.array.copy() for p in link.params()]
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for p, w, g in zip(link.params(), before, gradients(0)):
        np.testing.assert_allclose(p.array, w - 0.1 * (g + 0.5 * w), rtol=1e-14)


def test_weight_decay_of_one_rule_alone():
    link = make()
    optimizer = SGD(lr=0.1).setup(link)
    link.p0.update_rule.add_hook(WeightDecay(0.5))
    before = [p.array.copy() for p in link.params()]
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for i, (p, w, g) in enumerate(zip(link.params(), before, gradients(0))):
        np.testing.assert_allclose(p.array, w - 0.1 * (g + (0.5 * w if i == 0 else 0)), rtol=1e-14)


@pytest.mark.parametrize("threshold", [0.5, 1e9])
def test_gradient_clipping_by_the_joint_norm(threshold):
    link = make()
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientClipping(threshold))
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    total = math.sqrt(sum(float((g**2).sum()) for g in gradients(0)))
    for p, g in zip(link.params(), gradients(0)):
        np.testing.assert_allclose(p.grad, g * min(1.0, threshold / total), rtol=1e-13)


def test_gradient_hard_clipping():
    link = make()
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(GradientHardClipping(-0.1, 0.2))
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    for p, g in zip(link.params(), gradients(0)):
        np.testing.assert_array_equal(p.grad, np.clip(g, -0.1, 0.2))


def test_hooks_run_in_order_before_and_after():
    link, calls = make(), []
    optimizer = SGD().setup(link)
    optimizer.add_hook(lambda o: calls.append(("late", o.t)), name="late", timing="post")
    optimizer.add_hook(lambda o: calls.append(("a", o.t)), name="a")
    optimizer.add_hook(lambda o: calls.append(("b", o.t)), name="b", timing="pre")
    optimizer.update()
    assert calls == [("a", 0), ("b", 0), ("late", 1)]
    with pytest.raises(KeyError, match="already there"):
        optimizer.add_hook(print, name="a")
    optimizer.remove_hook("a")
    with pytest.raises(KeyError, match="no hook named 'a'"):
        optimizer.remove_hook("a")
    with pytest.raises(ValueError, match="timing: expected"):
        optimizer.add_hook(print, name="c", timing="sometimes")
    with pytest.raises(TypeError, match="expected a callable"):
        optimizer.add_hook(3)


def test_a_hook_for_each_parameter_in_chainer_form():
    class Halve:
        name, call_for_each_param = "Halve", True

        def __call__(self, rule, param):
            param.grad *= 0.5

    link = make()
    optimizer = SGD(lr=1.0).setup(link)
    optimizer.add_hook(Halve())
    before = link.p0.array.copy()
    for p, g in zip(link.params(), gradients(0)):
        p.grad = g
    optimizer.update()
    np.testing.assert_allclose(link.p0.array, before - 0.5 * gradients(0)[0], rtol=1e-15)


def test_update_with_a_loss_function():
    link = make(shapes=((3,),))
    optimizer = SGD(lr=0.5).setup(link)
    before = link.p0.array.copy()
    link.p0.grad = np.full(3, 1e6)  # must be forgotten

    def loss(x, factor):
        return ops.sum(link.p0 * x) * factor

    optimizer.update(loss, np.array([1.0, 2.0, 3.0]), factor=2.0)
    np.testing.assert_allclose(link.p0.array, before - np.array([1.0, 2.0, 3.0]), rtol=1e-14)


def test_errors_say_what_to_do():
    with pytest.raises(RuntimeError, match=r"call optimizer.setup\(link\) first"):
        SGD().update()
    with pytest.raises(RuntimeError, match="setup"):
        SGD().add_hook(print, name="p")
    with pytest.raises(TypeError, match="expected a Link, got list"):
        SGD().setup([])
    with pytest.raises(AttributeError, match="no hyperparameter named 'speed'"):
        _ = SGD().hyperparam.speed
    with pytest.raises(ValueError, match="above 0"):
        SGD().set_loss_scale(0)


def test_constant_loss_scale_changes_nothing_in_float64():
    results = []
    for scale in (None, 1024.0):
        link = make()
        optimizer = MomentumSGD(lr=0.1).setup(link)
        optimizer.add_hook(WeightDecay(0.01))
        optimizer.set_loss_scale(scale)
        for _ in range(3):
            optimizer.update(lambda link=link: ops.sum(link.p0 * link.p0) + ops.sum(ops.exp(link.p1)))
        results.append([p.array.copy() for p in link.params()])
    for a, b in zip(*results):
        np.testing.assert_array_equal(a, b)


def test_loss_scale_saves_what_underflows_in_float16():
    link = make(np.float16, ((2,),))
    optimizer = SGD(lr=1.0).setup(link)
    before = link.p0.array.copy()
    grads = []
    optimizer.add_hook(lambda o: grads.append(float(link.p0.grad[0])), name="look")

    def loss():  # on the way the gradient is 2^-26, which float16 does not have
        return ops.sum(link.p0 * 2.0**6 * 2.0**-13 * 2.0**-13)

    for scale in (None, 1024.0):
        optimizer.set_loss_scale(scale)
        optimizer.update(loss)
    assert grads == [0.0, 2.0**-20]
    assert before.dtype == np.float16


def test_dynamic_loss_scale_skips_overflows_and_recovers():
    link = make(shapes=((2,),))
    optimizer = SGD(lr=0.1).setup(link)
    optimizer.loss_scaling(interval=2)
    scales, bad = [], {4}
    for i in range(1, 8):
        factor = float("inf") if i in bad else 1.0
        before = link.p0.array.copy()
        if i in bad:
            with pytest.warns(RuntimeWarning, match=r"gradient of /p0 at loss scale 8.0: update 4 is left out"):
                optimizer.update(lambda f=factor: ops.sum(link.p0) * f)
            np.testing.assert_array_equal(link.p0.array, before)
            assert not optimizer.is_safe_to_update()
        else:
            optimizer.update(lambda f=factor: ops.sum(link.p0) * f)
            np.testing.assert_allclose(link.p0.array, before - 0.1, rtol=1e-14)
            assert optimizer.is_safe_to_update()
        scales.append(optimizer._loss_scale)
    np.testing.assert_allclose(scales, [2, 4, 8, 4, 4 * 2**0.5, 8, 8 * 2**0.5], rtol=1e-12)


def test_a_dynamic_loss_scale_is_saved():
    def run(optimizer, factors):
        for factor in factors:
            optimizer.update(lambda f=factor: ops.sum(optimizer.target.p0) * f)

    first = SGD().setup(make(shapes=((2,),)))
    first.loss_scaling(interval=2)
    run(first, [1.0, 1.0])
    with pytest.warns(RuntimeWarning, match="at loss scale 4.0: update 3 is left out"):
        run(first, [float("inf")])
    run(first, [1.0])
    saved = dbrdist.serializers.DictionarySerializer()
    first.serialize(saved)
    second = SGD().setup(make(shapes=((2,),)))
    second.loss_scaling(interval=2)
    second.serialize(dbrdist.serializers.NpzDeserializer(saved.target))
    for optimizer in (first, second):
        run(optimizer, [1.0])
    assert first._loss_scale == second._loss_scale
    assert math.isclose(first._loss_scale, 4.0)
    constant = SGD().setup(make(shapes=((2,),)))
    constant.set_loss_scale(8.0)
    constant.serialize(other := dbrdist.serializers.DictionarySerializer())
    assert "loss_scale" in saved.target and "loss_scale" not in other.target


def test_new_epoch_and_saved_state_resume_exactly():
    def run(link, optimizer, steps):
        for t in steps:
            for p, g in zip(link.params(), gradients(t)):
                p.grad = g
            optimizer.update()

    straight = make()
    run(straight, o := Adam().setup(straight), range(6))
    first = make()
    run(first, optimizer := Adam().setup(first), range(3))
    optimizer.new_epoch()
    optimizer.alpha = 0.001
    saved = dbrdist.serializers.DictionarySerializer()
    first.serialize(saved["model"])
    optimizer.serialize(saved["optimizer"])
    second = make()
    resumed = Adam(alpha=7).setup(second)
    load = dbrdist.serializers.NpzDeserializer(saved.target)
    second.serialize(load["model"])
    resumed.serialize(load["optimizer"])
    assert (resumed.t, resumed.epoch, resumed.alpha) == (3, 1, 0.001)
    run(second, resumed, range(3, 6))
    for p, q in zip(straight.params(), second.params()):
        np.testing.assert_array_equal(p.array, q.array)
    assert o.t == resumed.t


# ---- a second opinion -----------------------------------------------------------------------------------------------


def _torch():
    try:
        import torch
    except ImportError:
        if os.environ.get("DBRDIST_REQUIRE_TORCH"):
            raise
        pytest.skip("PyTorch is not installed; set DBRDIST_REQUIRE_TORCH=1 to make this fail")
    return torch


@pytest.mark.torch
@pytest.mark.parametrize(
    "name", ["SGD", "MomentumSGD", "AdamW", "Adam", "AMSGrad", "AdaGrad", "AdaDelta", "RMSprop", "RMSpropGraves"]
)
def test_optimizer_equals_torch(name):
    torch = _torch()
    ours, theirs = {
        "SGD": (SGD(lr=0.1), lambda ps: torch.optim.SGD(ps, lr=0.1)),
        "MomentumSGD": (MomentumSGD(0.1, 0.9), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
        "Adam": (Adam(alpha=0.01, eps=0.0), lambda ps: torch.optim.Adam(ps, lr=0.01, eps=0.0)),
        "AMSGrad": (
            AMSGrad(alpha=0.01, beta2=0.6, eps=0.0),
            lambda ps: torch.optim.Adam(ps, lr=0.01, betas=(0.9, 0.6), eps=0.0, amsgrad=True),
        ),
        "AdaGrad": (AdaGrad(lr=0.1, eps=0.01), lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=0.01)),
        "AdaDelta": (AdaDelta(0.8, 1e-3), lambda ps: torch.optim.Adadelta(ps, lr=1.0, rho=0.8, eps=1e-3)),
        "RMSprop": (RMSprop(0.02, 0.8, 0.1), lambda ps: torch.optim.RMSprop(ps, lr=0.02, alpha=0.8, eps=0.1)),
        "RMSpropGraves": (  # torch adds eps to the root
            RMSpropGraves(0.01, 0.8, 0.5, 0.0),
            lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=0.8, eps=0.0, momentum=0.5, centered=True),
        ),
        "AdamW": (  # torch multiplies the decay by the learning rate, eta does not reach alpha's part alone
            AdamW(alpha=0.01, eps=0.0, weight_decay_rate=0.01 * 0.1),
            lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=0.0, weight_decay=0.1),
        ),
    }[name]
    link = make()
    ours.setup(link)
    params = [torch.nn.Parameter(torch.tensor(p.array.copy())) for p in link.params()]
    optimizer = theirs(params)
    for t in range(5):
        for p, q, g in zip(link.params(), params, gradients(t)):
            p.grad, q.grad = g.copy(), torch.tensor(g)
        ours.update()
        optimizer.step()
    for p, q in zip(link.params(), params):
        np.testing.assert_allclose(p.array, q.detach().numpy(), rtol=1e-12, atol=1e-14)
