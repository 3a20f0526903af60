"""What plans over flat memory rest on, gaps between parameters, and parameters that are shared."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import threading
import weakref

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, UpdateRule
from dbrdist.core.model import flat, versions
from dbrdist.core.update.update_rule import Hyperparameter
from dbrdist.optimizers import (
    LARS,
    SGD,
    Adam,
    AdamW,
    CorrectedMomentumSGD,
    CorrectedNesterovAG,
    GradientClipping,
    GradientHardClipping,
    MomentumSGD,
    NesterovAG,
    WeightDecay,
)
from dbrdist.optimizers.gradient_descent import SGDRule
from tests.core.model.flat_examples import Net, after, arrays, assert_moved, give, link_of
from tests.each import each


@each(
    rule=[SGD, MomentumSGD, CorrectedMomentumSGD, NesterovAG, CorrectedNesterovAG, Adam, AdamW, LARS],
    hook=[WeightDecay(0.1), GradientHardClipping(0.5, 1.0), GradientClipping(0.1)],
)
def test_gaps_stay_zero_under_every_rule_and_hook(rule, hook):
    net = Net()
    optimizer = rule().setup(net)
    optimizer.add_hook(hook)
    for _ in range(3):
        give(net)
        optimizer.update()
        assert_gaps_are_zero(net)


def assert_gaps_are_zero(net):
    """No element of an arena that belongs to no parameter holds anything, in values, gradients and states."""
    (run,) = flat.runs(net.params())
    wholes = [run.arena.data, run.arena.grad]
    for name in net.z.update_rule.state or ():
        whole = net.z.update_rule.joint[0].arrays[name]
        assert np.shares_memory(whole, net.m.update_rule.state[name]) and not whole[run.gaps].any()
    taken = np.zeros(run.arena.data.size, bool)
    for p in run.params:
        taken[p.slot.start : p.slot.stop] = True
    assert not taken.all()
    for whole in wholes:
        assert not whole[~taken].any()


def test_gaps_stay_zero_whatever_users_rules_and_hooks_do():
    class Rule(UpdateRule):
        state_names = ("s",)

        def step(self, hp, t, p, g, *state):
            p += 1.0
            state[0][...] = 7.0

    class Noise:
        name, timing, call_for_each_param = "Noise", "pre", True

        def __call__(self, rule, p):
            raise AssertionError("there is a form for runs")

        def flat(self, run):
            run.grad += 1.0
            run.data -= 1.0

    def by_runs(optimizer):
        for run in optimizer.runs():
            run.grad += 1.0

    net = Net()
    optimizer = SGD().setup(net)
    for p in net.params():
        p.update_rule = Rule(optimizer.hyperparam)
    before = arrays(net)
    optimizer.add_hook(Noise())
    optimizer.add_hook(by_runs, name="runs")
    seen = []
    optimizer.add_hook(lambda o: seen.append([a.copy() for r in o.runs() for a in (r.grad, r.data)]), name="look")
    give(net)
    optimizer.update()
    assert_gaps_are_zero(net)
    grad, data = seen[0]
    assert np.count_nonzero(grad) == 6 + 1 + 9
    for a in (grad, data):
        assert not a[6:8].any() and not a[9:16].any()
    for name, p in net.namedparams():
        np.testing.assert_array_equal(p.array, before[name])  # one less by the hook, one more by the rule
        assert (p.update_rule.state["s"] == 7).all()


def test_a_formula_derived_from_ours_makes_no_promise_of_zeros():
    class Drift(SGDRule):
        def step(self, hp, t, p, g, *state):
            p += 1.0

    class Drifting(SGD):
        rule_class = Drift

    net = Net()
    optimizer = Drifting().setup(net)
    before = arrays(net)
    give(net)
    optimizer.update()
    assert_gaps_are_zero(net)
    np.testing.assert_array_equal(net.a.array, before["/a"] + 1.0)


def test_clipping_after_clipping_does_not_count_the_gaps():
    """An elementwise bound above zero, then the norm: of sixteen elements, not of what lies between them, too."""
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    optimizer.add_hook(GradientHardClipping(0.5, 1.0))
    optimizer.add_hook(GradientClipping(1.0))
    for p in net.params():
        p.grad = np.zeros(p.shape)
    before = arrays(net)
    optimizer.update()
    for name, p in net.namedparams():
        np.testing.assert_allclose(before[name] - p.array, np.full(p.shape, 0.5 / math.sqrt(16 * 0.25)))


# ---- plans rest on what is their own --------------------------------------------------------------------------------
def plans(monkeypatch):
    """A list that grows by one at each planning."""
    made = []
    plan = flat.runs
    monkeypatch.setattr(flat, "runs", lambda *args, **options: made.append(1) or plan(*args, **options))
    return made


def with_rule(parameter, optimizer):
    parameter.update_rule = optimizer.create_update_rule()
    return parameter


def test_changes_elsewhere_invalidate_nothing(monkeypatch):
    net = Net()
    optimizer = Adam().setup(net)
    give(net)
    optimizer.update()
    made = plans(monkeypatch)
    other = Net()
    theirs = SGD()
    for change in (
        lambda: Parameter(np.ones(3)),
        lambda: Parameter(1.0).initialize((2,)),
        lambda: Net(),
        lambda: theirs.setup(other),
        lambda: other.disable_update(),
        lambda: other.enable_update(),
        lambda: setattr(other.z, "array", np.ones((1, 1))),
        lambda: other.z.update_rule.add_hook(lambda rule, p: None, name="h"),
        lambda: setattr(other.z.update_rule.hyperparam, "lr", 2.0),
        lambda: copy.deepcopy(net),
        lambda: net.copy("share"),
    ):
        change()
        give(net)
        optimizer.update()
    assert made == []
    assert optimizer.t == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda net, o: setattr(net.a, "array", np.ones(3)),
        lambda net, o: setattr(net.m, "initializer", 1.0) or net.m.initialize((1,)),
        lambda net, o: setattr(net.a.update_rule, "enabled", False),
        lambda net, o: net.a.update_rule.add_hook(lambda rule, p: None, name="h"),
        lambda net, o: setattr(net.a.update_rule.hyperparam, "alpha", 2.0),
        lambda net, o: setattr(net.a.update_rule, "hyperparam", Hyperparameter(o.hyperparam)),
        lambda net, o: net.a.update_rule.use_fp32_update(),
        lambda net, o: setattr(net.a, "update_rule", o.create_update_rule()),
        lambda net, o: delattr(net, "a"),
        lambda net, o: setattr(net, "a", with_rule(Parameter(np.ones(2)), o)),
        lambda net, o: o.setup(net),
        lambda net, o: net.a.update(),
    ],
)
def test_changes_of_its_own_are_noticed(change, monkeypatch):
    net = Net()
    optimizer = Adam().setup(net)
    give(net)
    optimizer.update()
    made = plans(monkeypatch)
    change(net, optimizer)
    give(net)
    optimizer.update()
    assert made == [1]
    give(net)
    optimizer.update()
    assert made == [1]


class Line(dbrdist.Link):
    """One parameter, and nothing to compute."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.w = Parameter(np.ones(2))

    def forward(self, x):
        return x


def moved_by(optimizer, links):
    for link in links:
        link.w.grad = np.ones(2)
    before = [link.w.array[0] for link in links]
    optimizer.update()
    return [bool(link.w.array[0] != x) for link, x in zip(links, before)]


@pytest.mark.parametrize("make", [dbrdist.ChainList, dbrdist.Sequential])
def test_children_that_come_and_go_are_noticed(make):
    links = a, b, c = Line(), Line(), Line()
    chain = make(a, b)
    optimizer = SGD(lr=1.0).setup(chain)
    c.w.update_rule = optimizer.create_update_rule()
    assert moved_by(optimizer, links) == [True, True, False]
    chain.append(c)
    assert moved_by(optimizer, links) == [True, True, True]
    chain[0] = c
    assert moved_by(optimizer, links) == [False, True, True]
    chain.insert(0, a)
    assert moved_by(optimizer, links) == [True, True, True]


def test_layers_that_go_are_noticed():
    links = a, b, c = Line(), Line(), Line()
    chain = dbrdist.Sequential(a, b, c)
    optimizer = SGD(lr=1.0).setup(chain)
    assert moved_by(optimizer, links) == [True, True, True]
    del chain[0]
    assert moved_by(optimizer, links) == [False, True, True]
    chain.pop()
    assert moved_by(optimizer, links) == [False, True, False]
    chain.clear()
    assert moved_by(optimizer, links) == [False, False, False]


def test_children_of_a_chain_that_are_replaced_or_deleted_are_noticed():
    links = a, b, c = Line(), Line(), Line()
    chain = dbrdist.Chain(first=a, second=b)
    optimizer = SGD(lr=1.0).setup(chain)
    c.w.update_rule = optimizer.create_update_rule()
    assert moved_by(optimizer, links) == [True, True, False]
    chain.second = c
    assert moved_by(optimizer, links) == [True, False, True]
    del chain.first
    assert moved_by(optimizer, links) == [False, False, True]
    with chain.init_scope():
        chain.third = b
    assert moved_by(optimizer, links) == [False, True, True]


def test_freezing_and_thawing_moves_no_state():
    """As a GAN does at each step: the state arrays stay where they are."""
    net = Net()
    optimizer = MomentumSGD(lr=0.1).setup(net)
    give(net)
    optimizer.update()
    reference = copy.deepcopy(optimizer)
    states = {p: p.update_rule.state["v"] for p in net.params()}
    for _ in range(3):
        net.a.update_rule.enabled = False
        for o in (optimizer, reference):
            give(o.target)
        optimizer.update()
        net.a.update_rule.enabled = True
        frozen = reference.target.a.update_rule
        reference.target.a.update_rule = None
        reference.update()
        reference.target.a.update_rule = frozen
        for o in (optimizer, reference):
            give(o.target)
            o.update()
    for p, q in zip(net.params(), reference.target.params()):
        assert p.update_rule.state["v"] is states[p]
        np.testing.assert_array_equal(p.array, q.array)


def test_a_loaded_or_replaced_state_is_used():
    net = Net()
    optimizer = MomentumSGD(lr=1.0, momentum=0.5).setup(net)
    give(net)
    optimizer.update()
    net.a.update_rule.state["v"] = np.array([100.0])
    net.z.update_rule.enabled = False  # plan anew
    net.a.grad = np.zeros(1)
    before = net.a.array.copy()
    optimizer.update()
    np.testing.assert_allclose(net.a.array, before + 50.0)


def test_rules_that_change_places_take_their_state_along():
    net = link_of(Parameter(np.zeros(4)), Parameter(np.zeros(4)))
    optimizer = MomentumSGD(lr=1.0, momentum=0.5).setup(net)
    p, q = net.params()
    p.grad, q.grad = np.full(4, 1.0), np.full(4, 100.0)
    optimizer.update()
    p.update_rule, q.update_rule = q.update_rule, p.update_rule
    for x in (p, q):
        with pytest.deprecated_call():
            x.zerograd()
    optimizer.update()
    np.testing.assert_array_equal(p.array, np.full(4, -1.0 - 50.0))
    np.testing.assert_array_equal(q.array, np.full(4, -100.0 - 0.5))


def test_who_moves_parameters_is_followed():
    """A reduction over more parameters lays them out anew; the optimizer then works in the new place."""
    net = Net()
    optimizer = MomentumSGD(lr=1.0, momentum=0.5).setup(net)
    give(net)
    optimizer.update()
    old = net.z.slot.arena
    flat.gather([Parameter(np.ones(2)), *net.params()])
    assert net.z.slot.arena is not old
    before = net.a.array.copy()
    give(net)
    optimizer.update()
    np.testing.assert_array_equal(net.a.array, before - 2.0 - 1.0)


def test_an_update_in_float32_may_be_switched_on_and_off_between_updates():
    net = link_of(Parameter(np.zeros(3, np.float16)))
    optimizer = MomentumSGD(lr=1.0, momentum=0.5).setup(net)
    w = v = 0.0
    for k in range(6):
        optimizer.use_fp32_update(k in (1, 2, 4))
        net.p0.grad = np.ones(3, np.float16)
        optimizer.update()
        v = 0.5 * v - 1.0
        w += v
        assert ("fp32_param" in net.p0.update_rule.state) == (k in (1, 2, 4))
        np.testing.assert_array_equal(net.p0.array, np.full(3, w))  # sums of halves are exact in 16 bits


def test_a_copied_rule_leaves_the_joint_state_behind():
    net = Net()
    optimizer = Adam().setup(net)
    give(net)
    optimizer.update()
    for copied in (copy.deepcopy(net.a.update_rule), pickle.loads(pickle.dumps(net.a.update_rule))):
        assert copied.joint is None and copied.state["m"].shape == (1,)
        assert not np.shares_memory(copied.state["m"], net.a.update_rule.state["m"])


def test_one_parameter_updated_alone_keeps_its_own_count():
    """Adam's bias corrections follow each parameter's number of updates."""
    net, twin = Net(), Net()
    optimizers = [Adam(alpha=0.1, eps=0.0).setup(n) for n in (net, twin)]
    for n, o in zip((net, twin), optimizers):
        give(n)
        o.update()
    for _ in range(4):
        net.a.update()
    m = v = 0.0
    w = 2.0
    for t in range(1, 7):
        give(net)
        m, v = 0.9 * m + 0.1 * 2.0, 0.999 * v + 0.001 * 4.0
        w -= 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / math.sqrt(v)
    optimizers[0].update()
    np.testing.assert_allclose(net.a.array, [w], rtol=1e-12)
    assert (net.z.update_rule.t, net.a.update_rule.t) == (2, 6)


# ---- parameters of several links, and shared arrays -----------------------------------------------------------------
def tied():
    net = dbrdist.Chain()
    with net.init_scope():
        net.a, net.b = dbrdist.Link(), dbrdist.Link()
        with net.a.init_scope(), net.b.init_scope():
            net.a.W = net.b.W = Parameter(np.array([1.0]))
    return net


def test_hooks_for_each_parameter_are_called_once_for_each():
    class Decay:
        name, timing, call_for_each_param = "Decay", "pre", True

        def __call__(self, rule, p):
            p.grad += 0.5 * p.array

    net = tied()
    optimizer = SGD(lr=1.0).setup(net)
    optimizer.add_hook(Decay())
    net.a.W.grad = np.array([0.25])
    optimizer.update()
    np.testing.assert_array_equal(net.a.W.array, [1.0 - 0.25 - 0.5])


def test_overflow_in_a_parameter_of_two_links_is_told_once():
    net = tied()
    optimizer = SGD(lr=1.0).setup(net)
    optimizer.loss_scaling()
    net.a.W.grad = np.array([np.inf])
    with pytest.warns(RuntimeWarning, match="gradient of /a/W") as told:
        optimizer.update()
    assert len(told) == 1 and not optimizer.is_safe_to_update()
    optimizer.set_loss_scale(None)
    assert optimizer.is_safe_to_update()
    net.a.W.grad = np.array([1.0])
    optimizer.update()
    assert net.a.W.array == [0.0]


def test_a_parameter_of_two_links_counts_and_adds_once():
    net, other = tied(), tied()
    assert net.count_params() == 1
    net.a.W.grad, other.a.W.grad = np.array([1.0]), np.array([2.0])
    net.addgrads(other)
    np.testing.assert_array_equal(net.b.W.grad, [3.0])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("num_updates", [0, 1])
@pytest.mark.parametrize("has_second", [True, False])
def test_copies_of_links_that_share_arrays_share_them_too(duplicate, num_updates, has_second):
    link = link_of(Parameter(np.array([1.0, 2.0])))
    both = dbrdist.ChainList(link, link.copy("share"))
    if has_second:
        SGD().setup(both[1])
    after(num_updates, both)
    before = both[0].p0.array.copy()
    new = duplicate(both)
    new[0].p0.array[...] += 1.0
    np.testing.assert_array_equal(new[1].p0.array, before + 1.0)
    for _ in range(2):
        optimizer = SGD(lr=1.0).setup(new)
        for p in new.params():
            p.grad = np.ones(2)
        start = new[0].p0.array.copy()
        optimizer.update()
        np.testing.assert_array_equal(new[0].p0.array, start - 2.0)
        np.testing.assert_array_equal(new[1].p0.array, start - 2.0)
    np.testing.assert_array_equal(both[0].p0.array, before)
    np.testing.assert_array_equal(both[1].p0.array, before)
    one = duplicate(both[1])
    one.p0.array[...] = 9.0
    assert (both[0].p0.array == before).all()


# ---- life and death, threads, processes -----------------------------------------------------------------------------
def test_what_was_trained_dies_by_reference_count():
    """Links, parameters, arenas and states are in no cycle: their memory is free once nobody holds them."""

    def train():
        net = Net()
        optimizer = Adam().setup(net)
        optimizer.add_hook(WeightDecay(0.1))
        for enabled in (True, False, True):
            net.a.update_rule.enabled = enabled
            give(net)
            optimizer.update()
        shown = net.copy()
        return [weakref.ref(x) for x in (net, net.z, net.z.slot.arena, optimizer, net.a.update_rule, shown, shown.z)]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in train()] == [None] * 7
    finally:
        gc.enable()


def test_a_plan_unpickled_elsewhere_still_holds(monkeypatch):
    """Counts of changes are those of a process; what comes from another one must not look changed for ever."""
    net = Net()
    optimizer = Adam().setup(net)
    for _ in range(3):
        net.a.update_rule.enabled = not net.a.update_rule.enabled
        give(net)
        optimizer.update()
    data = pickle.dumps(optimizer)
    monkeypatch.setattr(versions, "_last", 0)
    monkeypatch.setattr(versions, "_numbers", itertools.count(1))
    again = pickle.loads(data)
    other = SGD().setup(Net())
    made = plans(monkeypatch)
    for _ in range(3):
        give(other.target)
        other.update()
        other.target.a.update_rule.enabled = not other.target.a.update_rule.enabled  # a change elsewhere
        give(again.target)
        again.update()
    assert len(made) == 1 + 3


def test_threads_train_models_of_their_own():
    def run(seed, out):
        net = Net()
        optimizer = Adam(alpha=0.01).setup(net)
        for k in range(60):
            give(net, 1.0 + seed)
            optimizer.update()
            if k % 7 == seed:
                net.a.update_rule.enabled = not net.a.update_rule.enabled
            if k % 11 == seed:
                Parameter(np.ones(2))
                net.m.array = np.full((3, 3), 0.5)
        out[seed] = arrays(net)

    alone, together = {}, {}
    for seed in range(4):
        run(seed, alone)
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed in range(4):
        for name in alone[seed]:
            np.testing.assert_array_equal(together[seed][name], alone[seed][name])


@pytest.mark.parametrize("new", [np.zeros(3), np.zeros(1, np.float32)])
def test_a_hook_may_give_a_parameter_another_shape_or_type(new):
    """Its gradient was that of the old values: it is left out of this update and takes part in the next."""
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    optimizer.add_hook(lambda o: setattr(net.a, "array", new) if o.t == 0 else None, name="h")
    give(net)
    before = arrays(net)
    optimizer.update()
    np.testing.assert_array_equal(net.a.array, np.zeros_like(new))
    np.testing.assert_array_equal(net.z.array, before["/z"] - 1.0)
    net.cleargrads()
    net.a.grad = np.ones_like(new)
    optimizer.update()
    np.testing.assert_array_equal(net.a.array, -np.ones_like(new))


def test_a_target_that_is_replaced_is_updated_from_then_on():
    first, second = Net(), Net()
    optimizer = SGD(lr=1.0).setup(first)
    give(first)
    optimizer.update()
    for p in second.params():
        p.update_rule = optimizer.create_update_rule()
    optimizer.target = second
    before = arrays(first)
    give(first)
    give(second)
    optimizer.update()
    assert_moved(first, before, set())
    assert second.a.array == [0.0]
