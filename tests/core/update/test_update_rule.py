"""Tests of dbrdist.core.update.update_rule."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import Parameter, optimizers
from dbrdist.core.array import backend
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.files.serializer import load_npz, save_npz
from dbrdist.core.update import pieces as update_pieces
from dbrdist.core.update import update_rule
from dbrdist.core.update.update_rule import FP32_PARAM, Hyperparameter, UpdateRule
from dbrdist.optimizers import SGD, GradientClipping, MomentumSGD, WeightDecay
from dbrdist.optimizers.gradient_descent import MomentumSGDRule
from tests.core.core_helpers import two_parameters, with_gradients
from tests.each import each
from tests.optimizers.optimizer_formulas import CASES
from tests.optimizers.optimizer_helpers import SHAPES, G, W, link_of, make


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_hook_of_one_rule_is_called_before_or_after_its_update_alone():
    link, optimizer = with_gradients()
    seen = []
    for timing in ("pre", "post"):
        link.W.update_rule.add_hook(
            lambda rule, p, timing=timing: seen.append((timing, p.name, float(p.array[0, 0]))), timing, timing
        )
    optimizer.update()
    assert seen == [("pre", "W", 1.0), ("post", "W", 0.5)]


def test_a_rule_updates_one_parameter_unless_it_is_off():
    link, _ = with_gradients()
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 1 and link.b.array[0] == 1
    link.W.update_rule.enabled = False
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 1
    link.W.update_rule.enabled = True
    link.W.cleargrad()
    link.W.update()
    assert link.W.array[0, 0] == 0.5 and link.W.update_rule.t == 2
    Parameter(ones(2)).update()  # no rule
    late = L.Linear(None, 3)
    optimizers.SGD().setup(late)
    late.W.update()
    assert late.W.update_rule.t == 0


@each(shape=[None, (2,)])
def test_hooks_of_a_rule_that_initializes_its_parameter(shape):
    """Both are called around the update, whether the parameter has a shape or not."""
    called = []

    class Initializing(dbrdist.UpdateRule):
        def update_core(self, param):
            called.append("update")
            if not param.is_initialized:
                param.initialize((2,))

    param, rule = Parameter(0.5, shape), Initializing()
    for timing in ("post", "pre"):
        rule.add_hook(lambda rule, param, timing=timing: called.append((timing, param)), timing, timing)
    rule.update(param)
    assert called == [("pre", param), "update", ("post", param)] and rule.t == 1
    np.testing.assert_array_equal(param.array, [0.5, 0.5])


def test_a_rule_without_a_formula_says_so():
    rule = dbrdist.UpdateRule()
    p = Parameter(ones(2))
    p.update_rule, p.grad = rule, ones(2)
    with pytest.raises(NotImplementedError, match="UpdateRule defines neither step nor update_core"):
        p.update()


def test_numbers_of_rules_are_shown_by_name():
    hp = update_rule.Hyperparameter()
    hp.b, hp.a = 2, 1.5
    assert repr(hp) == "Hyperparameter(a=1.5, b=2)"


@each(size=[update_rule.CHUNK_ELEMENTS - 1, update_rule.CHUNK_ELEMENTS, update_rule.CHUNK_ELEMENTS + 1, 5])
def test_lent_memory_has_size_and_type(size):
    for dtype in (np.float32, np.float64):
        a = update_rule.workspace(np.empty(size, dtype))
        a[:] = 1
        assert a.shape == (size,) and a.dtype == dtype
        again = update_rule.workspace(np.empty(size, dtype))
        assert again.shape == (size,) and np.shares_memory(a, again) == (size <= update_rule.CHUNK_ELEMENTS)


def test_lent_memory_is_forgotten_from_some_number_on(monkeypatch):
    monkeypatch.setattr(update_pieces, "_MAX_LENT", 3)
    monkeypatch.setattr(update_pieces, "_scratch", update_pieces._Scratch())
    for n in range(1, 9):
        assert update_rule.workspace(np.empty(n)).shape == (n,)
        assert len(update_pieces._scratch.lent) <= 3
    assert sorted(update_pieces._scratch.lent) == [7, 8]


@pytest.mark.parametrize("of_rule", [False, True])
@each(dtype=["float32", "float64"])
def test_an_array_as_a_hyperparameter_is_read_at_each_update(of_rule, dtype):
    link = link_of(w=W.astype(dtype))
    optimizer = MomentumSGD(9.0, momentum=np.array(0.0)).setup(link)
    lr = np.array(0.5)
    (link.w.update_rule.hyperparam if of_rule else optimizer).lr = lr
    expected = W
    for rate in (0.5, 0.25, 2.0):
        lr[...] = rate
        link.w.grad = G.astype(dtype)
        optimizer.update()
        expected = expected - rate * G
        np.testing.assert_array_equal(link.w.array, expected)
    assert optimizer.momentum.shape == ()
    assert (link.w.update_rule.hyperparam if of_rule else optimizer).lr is lr


def test_arrays_as_hyperparameters_go_through_a_snapshot_a_copy_and_a_pickle(tmp_path):
    link = link_of(w=W)
    optimizer = MomentumSGD(np.array(0.5), np.float64(0.25)).setup(link)
    dbrdist.serializers.save_npz(tmp_path / "state.npz", optimizer)
    loaded = MomentumSGD(np.array(1.0)).setup(link_of(w=W))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded):
        if other is loaded:
            dbrdist.serializers.load_npz(tmp_path / "state.npz", other)
        assert (float(other.lr), float(other.momentum)) == (0.5, 0.25)
        other.target.w.grad = G.copy()
        before = other.target.w.array.copy()
        other.update()
        np.testing.assert_array_equal(other.target.w.array, before - 0.5 * G)


def test_arrays_are_found_among_the_values_of_any_ancestor():
    oldest = Hyperparameter()
    oldest.lr = np.array([0.5])
    youngest = Hyperparameter(Hyperparameter(oldest))
    assert type(youngest.in_numbers().lr) is float
    oldest.lr[:] = 0.25
    assert youngest.in_numbers().lr == 0.25


def gradients(step, shapes=SHAPES):
    random = np.random.default_rng(100 + step)
    return [random.normal(size=shape) for shape in shapes]


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_rule_with_one_formula_has_it_on_every_device():
    class Half(UpdateRule):
        def step(self, hp, t, p, g, *state):
            p -= 0.5 * g

    for name in ("update_core", "update_core_cpu", "update_core_gpu"):
        a, _ = two_parameters()
        rule = Half()
        rule._state = {}
        getattr(rule, name)(a)
        assert a.array.tolist() == [[-2, -1.5, -1]]


def test_a_state_is_cut_once():
    rule, p = MomentumSGDRule(), Parameter(np.arange(6.0).reshape(2, 3))
    rule.ensure_state(p)
    rule.state["v"][...] = [[10, 11, 12], [13, 14, 15]]
    rule.ensure_state(p, (1, 4))
    assert rule.state["v"].tolist() == [11, 12, 13]
    rule.ensure_state(p, (1, 4))
    for other in ((0, 4), (1, 3), None):
        with pytest.raises(RuntimeError, match=r"has the state of the elements \(1, 4\) of its parameter"):
            rule.ensure_state(p, other)
    fresh = MomentumSGDRule()
    fresh.ensure_state(p, (4, 6))
    assert fresh.state["v"].tolist() == [0, 0]


def test_numbers_of_a_rule_are_themselves_unless_an_array_is_among_them():
    parent = Hyperparameter()
    parent.lr = 0.5
    child = Hyperparameter(parent)
    child.decay = 2
    assert child.in_numbers() is child and parent.in_numbers() is parent
    parent.lr = np.array([0.25], np.float64)
    found = child.in_numbers()
    assert found is not child and found.get_dict() == {"lr": 0.25, "decay": 2}
    assert type(found.lr) is float


class Records(dict):
    """A serializer that loads what it was given, or notes what it is told."""

    def __init__(self, is_loading, **values):
        super().__init__(values)
        self.is_loading = is_loading

    def __call__(self, name, value):
        if not self.is_loading:
            self[name] = value
        return self.get(name, value)


def test_a_divided_state_is_saved_as_a_whole_or_not_at_all():
    rule = UpdateRule()
    rule.t, rule._state, rule.piece = 4, {"v": np.ones(2)}, slice(0, 2)
    with pytest.raises(RuntimeError, match=r"divided over ranks; save it inside `with optimizer.whole_state\(\):`"):
        rule.serialize(Records(is_loading=False))
    rule.serialize(Records(is_loading=True, t=9, v=np.full(5, 3.0)))
    assert rule.piece is None and rule.t == 9 and rule.state["v"].tolist() == [3.0] * 5
    written = Records(is_loading=False)
    rule.serialize(written)
    assert written["t"] == 9 and written["v"].tolist() == [3.0] * 5


@each(of=["grad", "grad_var"])
def test_a_hook_before_the_update_may_give_another_gradient(of):
    p = dbrdist.Parameter(np.array([1, 2], "f"))
    rule = p.update_rule = SGD(1).create_update_rule()
    rule.hyperparam.lr = 0.5
    rule.add_hook(lambda rule, p: setattr(p, of, getattr(p, of) * 10), "tenfold", "pre")
    p.grad = np.array([1, -1], "f")
    p.update()
    assert p.array.tolist() == [-4, 7] and rule.t == 1


@each(dtype=["float16", "bfloat16"])
def test_a_copy_in_float32_follows_what_is_assigned_between_updates(dtype):
    dtype = backend.as_dtype(dtype)
    p = dbrdist.Parameter(np.array([1, 2], dtype))
    rule = p.update_rule = SGD(1).create_update_rule()
    rule.use_fp32_update()
    rule.add_hook(lambda rule, p: None, "none", "pre")  # updated alone
    small = 2.0**-14  # lost in 16 bits beside 1, and kept in float32
    for _ in range(2):
        p.grad = np.array([small, 0], dtype)
        rule.hyperparam.lr = 1
        rule.update(p)
    assert p.array.astype("f").tolist() == [1, 2]
    np.testing.assert_array_equal(rule.state[FP32_PARAM], np.array([1 - 2 * small, 2], "f"))
    p.array[1] = 5
    p.grad = np.array([0, 1], dtype)
    rule.update(p)
    assert p.array.astype("f").tolist() == [1, 4]
    np.testing.assert_array_equal(rule.state[FP32_PARAM], np.array([1 - 2 * small, 4], "f"))


def test_a_rule_without_an_optimizer_serves_among_others():
    class Minus(UpdateRule):
        def step(self, hp, t, p, g, *state):
            assert isinstance(hp, Hyperparameter)
            p -= g

    link = dbrdist.Link()
    with link.init_scope():
        link.a, link.b = (dbrdist.Parameter(np.zeros(2, "f")) for _ in range(2))
    optimizer = SGD(0.5).setup(link)
    link.b.update_rule = Minus()
    for p in link.params():
        p.grad = np.ones(2, "f")
    optimizer.update()
    assert link.a.array.tolist() == [-0.5, -0.5] and link.b.array.tolist() == [-1, -1]


def test_states_stay_where_they_are_while_their_neighbours_do():
    """Also behind the first of an arena, which a frozen parameter cuts."""
    link = dbrdist.Link(a=(20,), b=(20,), c=(20,), d=(20,))
    for p in link.params():
        p.array, p.grad = np.ones(p.shape, "f"), np.ones(p.shape, "f")
    optimizer = MomentumSGD(lr=0.1).setup(link)
    optimizer.update()
    link.b.update_rule.enabled = False
    for p in link.params():
        p.grad = np.ones(p.shape, "f")
    optimizer.update()
    joint = {name: getattr(link, name).update_rule.joint for name in "acd"}
    assert joint["c"][0] is joint["d"][0] and joint["c"][1] == link.c.slot.start > 0
    assert joint["d"][1] == link.d.slot.start and joint["a"][1] == link.a.slot.start
