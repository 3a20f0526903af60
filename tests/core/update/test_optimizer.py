"""Tests of dbrdist.core.update.optimizer."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Parameter, optimizers
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.tape import ops
from dbrdist.core.update import optimizer as base
from dbrdist.core.update.update_rule import UpdateRule
from dbrdist.optimizers import SGD, Adam, MomentumSGD, WeightDecay
from tests.core.core_helpers import with_gradients
from tests.each import each
from tests.optimizers.optimizer_helpers import SHAPES, G, W, link_of, make


@each(interval=[0, -1])
def test_an_interval_of_a_loss_scale_is_one_update_at_least(interval):
    _, optimizer = with_gradients()
    with pytest.raises(ValueError, match=f"interval: expected 1 or more updates, got {interval}"):
        optimizer.loss_scaling(interval)
    optimizer.loss_scaling(1)
    optimizer.check_nan_in_grads()
    optimizer.update_loss_scale()
    assert optimizer._loss_scale == 2.0


def test_what_a_replayed_update_found_moves_the_loss_scale():
    """It doubles until an overflow halves it, and then grows twofold in so many updates as the interval has."""
    link, optimizer = with_gradients()
    optimizer.loss_scaling(interval=2)
    found = []
    for is_there in (False, False, True, False, False, True):
        next(link.params()).grad[...] = np.nan if is_there else 1.0
        if is_there:
            with pytest.warns(RuntimeWarning, match=r"^NaN or infinity in the gradient of /\w+ at loss scale "):
                optimizer.follow_overflow(is_there)
        else:
            optimizer.follow_overflow(is_there)
        found.append(optimizer._loss_scale)
    root = 2.0**0.5
    np.testing.assert_allclose(found, [2.0, 4.0, 2.0, 2 * root, 4.0, 2.0])


def test_an_overflow_that_is_told_counts_though_no_gradient_shows_it():
    _, optimizer = with_gradients()
    optimizer.loss_scaling(interval=2)
    optimizer.follow_overflow(False)
    optimizer.follow_overflow(True)  # what is left of it is not seen in the gradients
    assert optimizer._loss_scale == 1.0


def test_a_constant_loss_scale_does_not_move():
    _, optimizer = with_gradients()
    optimizer.loss_scaling(scale=8.0)
    optimizer.check_nan_in_grads()
    optimizer.update_loss_scale()
    assert optimizer._loss_scale == 8.0
    with pytest.raises(ValueError, match="loss_scale: expected a number above 0 or None, got 0"):
        optimizer.set_loss_scale(0)
    optimizer.set_loss_scale(None)
    optimizer.update_loss_scale()
    assert optimizer._loss_scale is None


def test_a_dynamic_loss_scale_halves_then_grows_by_its_interval():
    link, optimizer = with_gradients()
    optimizer.loss_scaling(4)
    seen = []
    for bad in (False, False, True, False, False, False, False):
        link.b.grad[0] = np.inf if bad else 1
        if bad:
            with pytest.warns(
                RuntimeWarning, match=r"NaN or infinity in the gradient of /b at loss scale 4.0: update 1 "
            ):
                optimizer.check_nan_in_grads()
        else:
            optimizer.check_nan_in_grads()
        assert optimizer.is_safe_to_update() is not bad
        optimizer.update_loss_scale()
        seen.append(optimizer._loss_scale)
    np.testing.assert_allclose(seen, [2, 4, 2, *(2 * 2 ** (n / 4) for n in (1, 2, 3, 4))], rtol=1e-12)


def test_unsafe_gradients_are_found_where_parameters_are_not_updated_together():
    link, optimizer = with_gradients()
    link.W.update_rule.add_hook(lambda rule, p: None, name="own")
    optimizer.loss_scaling()
    link.W.grad[0] = np.nan
    with pytest.warns(RuntimeWarning, match="gradient of /W"):
        optimizer.check_nan_in_grads()
    assert not optimizer.is_safe_to_update()


def test_gradients_of_frozen_parameters_are_no_overflow():
    """They are those of one rank alone, whose loss scale would differ from then on; captured steps see none."""
    link, optimizer = with_gradients()
    link.W.update_rule.enabled = False
    optimizer.loss_scaling()
    link.W.grad[0] = np.nan
    optimizer.check_nan_in_grads()
    assert optimizer.is_safe_to_update()


def test_members_kept_for_old_programs():
    link, optimizer = with_gradients()
    optimizer.use_cleargrads()
    with pytest.raises(ValueError, match=r"use_cleargrads: .* False is not supported"):
        optimizer.use_cleargrads(False)
    link.cleargrads()
    optimizer.reallocate_cleared_grads()
    assert link.W.grad.tolist() == [[0, 0]] * 3
    with pytest.raises(RuntimeError, match=r"SGD: it has no target yet; call optimizer.setup\(link\) first"):
        optimizers.SGD().update()
    with pytest.raises(NotImplementedError):
        dbrdist.Optimizer().update()


def test_a_hook_has_a_name_a_time_and_can_be_called():
    def hook(*args): ...

    for owner in (with_gradients()[1], with_gradients()[0].W.update_rule):
        with pytest.raises(TypeError, match="hook: expected a callable, got int"):
            owner.add_hook(3)
        with pytest.raises(ValueError, match="timing: expected 'pre', 'post' or 'auto', got 'later'"):
            owner.add_hook(hook, timing="later")
        with pytest.raises(ValueError, match=r"hook: it has no name attribute, so give add_hook\(hook, name=...\)"):
            owner.add_hook(type("Nameless", (), {"__call__": hook})())
        with pytest.raises(KeyError, match="no hook named 'hook'"):
            owner.remove_hook("hook")
        for timing in ("pre", "post"):
            owner.add_hook(hook, timing=timing)
            for again in ("pre", "post"):
                with pytest.raises(KeyError, match="a hook named 'hook' is already there"):
                    owner.add_hook(hook, timing=again)
            owner.remove_hook("hook")
        owner.add_hook(hook, "other")
        owner.remove_hook("other")


def test_setup_begins_anew():
    optimizer, calls = MomentumSGD(lr=0.5, momentum=0.5), []
    optimizer.setup(link_of(w=W))
    optimizer.add_hook(lambda o: calls.append("pre"), name="pre")
    optimizer.add_hook(lambda o: calls.append("post"), name="post", timing="post")
    optimizer.target.w.grad = G.copy()
    optimizer.update()
    optimizer.new_epoch()
    assert calls == ["pre", "post"]
    optimizer.setup(link := link_of(w=W))
    assert (optimizer.t, optimizer.epoch) == (0, 0)
    link.w.grad = G.copy()
    optimizer.update()
    assert calls == ["pre", "post"]
    np.testing.assert_allclose(link.w.array, W - 0.5 * G, rtol=1e-15)
    optimizer.add_hook(print, name="pre")  # the name is free again


def test_a_dynamic_loss_scale_stays_within_1_and_the_largest_float16():
    link = link_of(w=np.ones(2))
    optimizer = SGD(lr=0.0).setup(link)
    optimizer.loss_scaling(interval=1000)

    def scale_after(factor):
        optimizer.update(lambda: dbrdist.functions.sum(link.w) * factor)
        saved = dbrdist.serializers.DictionarySerializer()
        optimizer.serialize(saved)
        return float(saved.target["loss_scale"])

    assert [scale_after(1.0) for _ in range(18)] == [*(2.0**i for i in range(1, 16)), *[65504.0] * 3]
    with pytest.warns(RuntimeWarning, match="NaN or infinity in the gradient of /w"):
        falling = [scale_after(math.inf) for _ in range(18)]
    assert falling[:2] == [32752.0, 16376.0]
    assert falling[-2:] == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_gradients_of_16_bits_are_unscaled_for_whoever_looks(dtype, in_fp32):
    link, seen = link_of(w=W.astype(as_dtype(dtype))), []
    optimizer = SGD(lr=0.5).setup(link)
    optimizer.use_fp32_update(in_fp32)
    optimizer.set_loss_scale(16.0)
    for timing in ("pre", "post"):
        optimizer.add_hook(lambda o: seen.append(link.w.grad.astype(float)), name=timing, timing=timing)
    link.w.grad = (G * 16).astype(as_dtype(dtype))
    optimizer.update()
    for g in (*seen, link.w.grad.astype(float)):
        np.testing.assert_array_equal(g, G)
    np.testing.assert_array_equal(link.w.array.astype(float), W - 0.5 * G)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_hooks_too(dtype):
    link = link_of(w=W.astype(as_dtype(dtype)))
    optimizer = SGD(lr=0.5).setup(link)
    optimizer.use_fp32_update()
    optimizer.set_loss_scale(16.0)
    link.w.grad = (G * 16).astype(as_dtype(dtype))
    optimizer.update()
    np.testing.assert_array_equal(link.w.grad.astype(float), G)


def gradients(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape) for shape in shapes]


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


def test_hooks_run_in_order_before_and_after():
    link, calls = make(), []
    optimizer = SGD().setup(link)
    optimizer.add_hook(lambda o: calls.append(("late", o.t)), name="late", timing="post")
    optimizer.add_hook(lambda o: calls.append(("a", o.t)), name="a")
    optimizer.add_hook(lambda o: calls.append(("b", o.t)), name="b", timing="pre")
    for p in link.params():
        p.grad = np.zeros_like(p.array)
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
    with pytest.raises(TypeError, match="optimization target must be a link, got list"):
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


def test_the_base_of_optimizers_calls_its_hooks_with_itself():
    made = dbrdist.Optimizer().setup(L.Linear(2, 3))
    seen = []
    made.add_hook(seen.append, "before")
    made.add_hook(lambda one: seen.append((one, "after")), "after", timing="post")
    made.call_hooks("pre")
    assert seen == [made]
    made.call_hooks("post")
    assert seen == [made, (made, "after")]


def test_the_base_of_optimizers_looks_at_each_gradient():
    link = L.Linear(2, 3)
    made = dbrdist.Optimizer().setup(link)
    made.loss_scaling()
    link.W.grad, link.b.grad = np.zeros((3, 2), np.float32), None
    made.check_nan_in_grads()
    assert made.is_safe_to_update()
    link.W.grad[2, 1] = np.inf
    with pytest.warns(RuntimeWarning, match="gradient of /W at loss scale 1.0: update 1 is left out"):
        made.check_nan_in_grads()
    assert not made.is_safe_to_update()


def test_a_proxy_reads_and_writes_the_value_of_its_name():
    class Mine(base.GradientMethod):
        rule_class = UpdateRule
        rate = base.HyperparameterProxy("lr")

    made = Mine(lr=0.25, other=3)
    assert made.rate == 0.25 and isinstance(Mine.rate, base.HyperparameterProxy)
    made.rate = 0.5
    assert made.hyperparam.get_dict() == {"lr": 0.5, "other": 3}


def test_an_optimizer_begins_at_zero_with_each_target():
    made = dbrdist.Optimizer()
    assert (made.target, made.t, made.epoch, made.is_safe_to_update()) == (None, 0, 0, True)
    made.t, made.epoch = 5, 7
    link = dbrdist.links.Linear(2, 3)
    assert made.setup(link) is made
    made.add_hook(lambda one: None, "mine")
    assert (made.target, made.t, made.epoch) == (link, 0, 0)
    made.new_epoch()
    made.new_epoch(auto=True)
    assert made.epoch == 2
    made.setup(link).add_hook(lambda one: None, "mine")  # hooks of the target before are gone
    with pytest.raises(TypeError, match="optimization target must be a link, got int"):
        made.setup(3)


class _Looked(list):
    """A list that counts who looks at it."""

    def __init__(self, values):
        super().__init__(values)
        self.times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_setup_does_not_walk_millions_of_numbers_that_a_link_keeps():
    rows = [_Looked(range(1000)) for _ in range(1000)]
    net = L.Linear(2, 2)
    net.table = rows
    optimizers.SGD().setup(net)
    assert sum(row.times for row in rows) <= 10


def test_a_saver_of_ones_own_that_does_not_say_so_gets_what_the_velocity_means():
    class Saver:
        def __init__(self, entries, path=""):
            self.entries, self.path = entries, path

        def __getitem__(self, key):
            return Saver(self.entries, f"{self.path}{key.strip('/')}/")

        def __call__(self, key, value):
            self.entries[self.path + key] = value
            return value

    entries = {}
    MomentumSGD(0.1).setup(L.Linear(2, 1)).serialize(Saver(entries))
    assert entries["state_meaning"] == MomentumSGD.rule_class.state_meaning


class Settable(SGD):
    """A program's own, which looks at each assignment."""

    def __init__(self, lr=0.1):
        self.__dict__["assigned"] = []
        super().__init__(lr)

    def __setattr__(self, name, value):
        self.assigned.append(name)
        super().__setattr__(name, value)


class Restored(SGD):
    """A program's own, which restores its state itself."""

    def __setstate__(self, state):
        self.__dict__.update(state)


def stepped(optimizer):
    link = L.Linear(2, 1, initialW=1.0)
    optimizer.setup(link).update(lambda: ops.sum(link(np.ones((3, 2), np.float32)) ** 2))
    return link.W.array.tolist()


@each(
    copied=[
        copy.copy,
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: pickle.loads(pickle.dumps(x, 0)),
    ]
)
def test_a_copy_of_a_subclass_that_looks_at_assignments_steps(copied):
    assert stepped(copied(Settable())) == stepped(SGD(0.1))


@each(kind=[SGD, Restored])
def test_what_a_version_pickled_that_had_fewer_attributes_steps(kind):
    state = kind(0.1).__getstate__()
    for name in ("_copying", "_params_at_setup", "_first_updates"):
        del state[name]
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(state)
    assert stepped(optimizer) == stepped(SGD(0.1))


@each(hooks=[(), (WeightDecay(0.1),)], scale=[None, 2.0])
def test_each_update_counts_once(hooks, scale):
    optimizer = SGD(0.1).setup(L.Linear(2, 3))
    for hook in hooks:
        optimizer.add_hook(hook)
    if scale is not None:
        optimizer.set_loss_scale(scale)
    for t in (1, 2, 3):
        for p in optimizer.target.params():
            p.grad = np.ones_like(p.array)
        optimizer.update()
        assert optimizer.t == t and all(p.update_rule.t == t for p in optimizer.target.params())


@each(auto=[False, True], of_updater=[False, True])
def test_a_program_of_chainer_counts_epochs_in_one_way(auto, of_updater, monkeypatch):
    """By hand, or by an updater where the optimizer says so; other programs in either."""
    for is_chainers in (False, True):
        optimizer = base.Optimizer()
        optimizer.epoch, optimizer.use_auto_new_epoch = 3, of_updater
        with monkeypatch.context() as patch:
            patch.setattr(base, "as_chainer", [is_chainers])
            if is_chainers and auto != of_updater:
                who = "the program counts the epochs: new_epoch" if auto else "an updater counts the epochs"
                with pytest.raises(RuntimeError, match=f"new_epoch: use_auto_new_epoch is {of_updater}, so that {who}"):
                    optimizer.new_epoch(auto)
                assert optimizer.epoch == 3
            else:
                optimizer.new_epoch(auto)
                assert optimizer.epoch == 4
