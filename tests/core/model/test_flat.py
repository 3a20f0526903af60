"""Flat memory: where parameters and gradients lie, and which of them an update moves."""

from __future__ import annotations

import contextlib
import copy
import pickle
import types

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, UpdateRule, Variable
from dbrdist.core.model import flat, parameter
from dbrdist.core.tape import ops
from dbrdist.errors import UsageWarning
from dbrdist.optimizers import LARS, SGD, Adam, MomentumSGD, WeightDecay
from tests.core.core_helpers import two_parameters
from tests.core.model.flat_examples import Net, arrays, assert_moved, give, in_one_run, link_of


# ---- layout ---------------------------------------------------------------------------------------------------------
def test_parameters_lie_in_the_order_of_registration_and_are_aligned():
    net = Net()
    assert [name for name, _ in net.namedparams()] == ["/z", "/a", "/m"]
    (run,) = flat.runs(net.params())
    assert run.params == [net.z, net.a, net.m]
    for p in run.params:
        assert np.shares_memory(p.array, run.data)
        assert p.array.ctypes.data % 64 == 0 and p.node.view.ctypes.data % 64 == 0
        assert p.array.flags.c_contiguous
    np.testing.assert_array_equal(run.data[:6], np.arange(1.0, 7.0))
    assert run.size == 8 + 8 + 9  # each parameter starts at a multiple of 8 float64
    assert run.data[6:8].tolist() == [0, 0]


@pytest.mark.parametrize("count", [1, 5, 3000])
def test_small_and_large_arenas_are_aligned(count):
    params = [Parameter(np.ones(n, np.float32)) for n in (count, 1, count)]
    flat.gather(params)
    assert all(p.array.ctypes.data % 64 == 0 for p in params)


def test_a_shared_parameter_lies_and_moves_once():
    net = dbrdist.Chain()
    with net.init_scope():
        net.a = dbrdist.Link()
        net.b = dbrdist.Link()
        with net.a.init_scope(), net.b.init_scope():
            net.a.W = net.b.W = Parameter(np.array([1.0]))
    optimizer = SGD(lr=1.0).setup(net)
    net.a.W.grad = np.array([0.25])
    optimizer.update()
    assert net.b.W.array == [0.75]
    assert len(flat.gather(net.params())) == 1


def test_values_and_gradients_survive_the_move_and_user_views_are_cut():
    mine = np.array([1.0, 2.0])
    p = Parameter(mine)
    p.grad = np.array([3.0, 4.0])
    flat.gather([p])
    assert not np.shares_memory(p.array, mine)
    np.testing.assert_array_equal(p.array, [1.0, 2.0])
    np.testing.assert_array_equal(p.grad, [3.0, 4.0])
    assert p.grad is p.node.view


def test_types_lie_apart_and_runs_follow_registration_on_every_rank():
    params = [Parameter(np.ones(2, t)) for t in (np.float32, np.float64, np.float16, np.float32, np.float64)]
    for _ in range(5):  # memory addresses differ from rank to rank and must not decide
        held = [np.empty(1000) for _ in range(3)]
        for p in params:
            p.leave_arena()
        assert [r.data.dtype.name for r in flat.runs(params)] == ["float32", "float64", "float16"]
        assert [r.params for r in flat.runs(params)] == [[params[0], params[3]], [params[1], params[4]], [params[2]]]
        del held


# ---- gradients ------------------------------------------------------------------------------------------------------
def test_gradient_is_none_from_cleargrads_until_it_is_written():
    net = Net()
    flat.gather(net.params())
    give(net)
    net.cleargrads()
    assert all(p.grad is None for p in net.params())
    loss = ops.sum(net.a * 3.0)
    loss.backward()
    assert net.a.grad == [3.0] and net.z.grad is None


def test_first_contribution_is_written_into_the_view_and_later_ones_add():
    W = Parameter(np.ones((3, 2)))
    flat.gather([W])
    W.node.view[...] = 99  # what was there must not count
    x = np.arange(6.0).reshape(2, 3)
    y = ops.sum(ops.matmul(x, W))
    y.backward()
    expected = x.T @ np.ones((2, 2))
    assert W.grad is W.node.view
    np.testing.assert_array_equal(W.grad, expected)
    y.backward()
    np.testing.assert_array_equal(W.grad, 2 * expected)


@pytest.mark.parametrize("slices", [np.array([[2, 0, 2]]), (np.array([1, -1]), np.array([1, 1])), np.s_[1:], (0, ...)])
def test_gradients_of_places_are_written_into_the_view_and_added(slices):
    W = Parameter(np.ones((3, 2)))
    flat.gather([W])
    W.node.view[...] = 99  # what was there must not count
    expected = np.zeros((3, 2))
    y = ops.getitem(W, slices)
    weights = np.arange(1.0, y.size + 1).reshape(y.shape)
    np.add.at(expected, slices, weights)
    ops.sum(y * weights).backward()
    assert W.grad is W.node.view
    np.testing.assert_array_equal(W.grad, expected)
    ops.sum(ops.getitem(W, slices) * weights + y * weights).backward()
    assert W.grad is W.node.view
    np.testing.assert_array_equal(W.grad, 3 * expected)


@pytest.mark.parametrize("observed", [False, True])
def test_rules_are_handed_the_view_only_for_a_first_contribution(observed):
    seen = []

    class Scale(dbrdist.FunctionNode):
        writes = True

        def forward(self, xs):
            return (xs[0] * 2.0,)

        def derive(self, wanted, gys, out):
            seen.append(None if out is None else out[0])
            if out is not None and out[0] is not None:
                return (np.multiply(gys[0], 2.0, out=out[0]),)
            return (gys[0] * 2.0,)

    p = Parameter(np.ones(2))
    flat.gather([p])
    y = ops.sum(Scale().apply((p,))[0] + Scale().apply((p,))[0])
    with dbrdist.FunctionHook() if observed else contextlib.nullcontext():
        y.backward()
    assert seen[0] is p.node.view and seen[1] is None
    np.testing.assert_array_equal(p.grad, [4.0, 4.0])


def test_one_parameter_twice_in_one_function_gets_both_shares():
    p = Parameter(np.array([[2.0, 1.0], [0.0, 1.0]]))
    flat.gather([p])
    y = ops.sum(ops.matmul(p, p))
    y.backward()
    ones = np.ones((2, 2))
    np.testing.assert_array_equal(p.grad, ones @ p.array.T + p.array.T @ ones)


def test_grad_function_leaves_flat_memory_alone():
    W = Parameter(np.ones((2, 2)))
    flat.gather([W])
    x = np.array([[1.0, 2.0]])
    y = ops.sum(ops.matmul(x, W))
    (g,) = dbrdist.grad([y], [W])
    expected = g.array.copy()
    assert W.grad is None and not np.shares_memory(g.array, W.node.view)
    ops.sum(ops.matmul(x * 10.0, W)).backward()
    np.testing.assert_array_equal(g.array, expected)


def test_a_differentiable_gradient_comes_home():
    p = Parameter(np.array([3.0]))
    optimizer = SGD(lr=1.0).setup(link_of(p))
    flat.gather([p])
    (p * p).backward(enable_double_backprop=True)
    assert isinstance(p.grad_var, dbrdist.Variable) and p.grad == [6.0]
    optimizer.update()
    assert p.array == [-3.0]


def test_assigned_gradients_are_copied_into_the_view():
    p = Parameter(np.zeros(2))
    flat.gather([p])
    mine = np.array([1.0, 2.0])
    p.grad = mine
    mine[...] = 0
    np.testing.assert_array_equal(p.node.view, [1.0, 2.0])
    with pytest.deprecated_call():
        p.zerograd()
    assert p.grad is p.node.view and not p.grad.any()


# ---- late, unused, frozen -------------------------------------------------------------------------------------------
def test_late_initialisation_enters_at_the_next_update():
    net = Net(lazy=True)
    optimizer = MomentumSGD(lr=0.1).setup(net)
    give(net)
    before = arrays(net)
    optimizer.update()
    assert_moved(net, before, {"/z", "/m"})
    v = net.z.update_rule.state["v"].copy()
    net.a.initialize((4,))
    assert net.a.dtype == np.float32
    net.a.array = np.ones(4)  # another type: an arena of its own
    give(net)
    optimizer.update()
    np.testing.assert_allclose(net.z.update_rule.state["v"], 0.9 * v - 0.1 * 1.0)
    np.testing.assert_allclose(net.a.array, 1 - 0.1 * 2.0)
    assert net.z.update_rule.t == 2 and net.a.update_rule.t == 1


def test_lazy_parameter_of_the_same_type_joins_the_arena():
    net = dbrdist.Chain()
    with net.init_scope():
        net.a, net.b, net.c = (Parameter(np.ones(3)), Parameter(np.float64(7.0)), Parameter(np.ones(2)))
    optimizer = SGD(lr=1.0).setup(net)
    give(net)
    optimizer.update()
    net.b.initialize((2,))
    assert net.b.dtype == np.float64
    give(net)
    optimizer.update()
    assert in_one_run(*net.params())
    np.testing.assert_array_equal(net.a.array, [-1.0] * 3)
    np.testing.assert_array_equal(net.b.array, [5.0, 5.0])


def test_an_unused_parameter_counts_as_gradient_zero():
    """Momentum and weight decay go on, as in Chainer."""
    net = Net()
    optimizer = MomentumSGD(lr=1.0, momentum=0.5).setup(net)
    give(net, 1.0)
    start = net.a.array.copy()
    optimizer.update()
    net.cleargrads()
    net.z.grad = np.ones((2, 3))
    optimizer.update()
    np.testing.assert_allclose(net.a.array, start - 2.0 - 1.0)
    optimizer.add_hook(WeightDecay(0.5))
    net.cleargrads()
    w, v = net.a.array.copy(), net.a.update_rule.state["v"].copy()
    optimizer.update()
    np.testing.assert_allclose(net.a.array, w + 0.5 * v - 0.5 * w)


def test_frozen_parameters_cut_the_pass_and_stay():
    net = Net()
    optimizer = MomentumSGD(lr=0.1).setup(net)
    give(net)
    optimizer.update()
    assert len(list(optimizer.runs())) == 1
    net.a.update_rule.enabled = False
    give(net)
    before = arrays(net)
    optimizer.update()
    assert_moved(net, before, {"/z", "/m"})
    assert len(list(optimizer.runs())) == 2
    net.enable_update()
    give(net)
    before = arrays(net)
    optimizer.update()
    assert_moved(net, before, {"/z", "/a", "/m"})
    assert (net.z.update_rule.t, net.a.update_rule.t) == (3, 2)
    net.disable_update()
    before = arrays(net)
    with pytest.warns(UsageWarning, match="all parameters of Net are frozen"):
        optimizer.update()
    assert_moved(net, before, set())
    assert not net.update_enabled


def test_momentum_of_a_frozen_parameter_waits():
    net = Net()
    optimizer = MomentumSGD(lr=0.1, momentum=0.5).setup(net)
    give(net)
    optimizer.update()
    v = net.a.update_rule.state["v"].copy()
    net.a.update_rule.enabled = False
    give(net)
    optimizer.update()
    net.a.update_rule.enabled = True
    np.testing.assert_array_equal(net.a.update_rule.state["v"], v)
    give(net)
    optimizer.update()
    np.testing.assert_allclose(net.a.update_rule.state["v"], 0.5 * v - 0.1 * 2.0)


def test_a_thawed_parameter_has_its_own_step_count():
    """Adam's bias correction follows the updates of the parameter, not of the optimizer."""
    net = Net()
    optimizer = Adam(alpha=0.1, eps=0.0).setup(net)
    net.a.update_rule.enabled = False
    for _ in range(5):
        give(net)
        optimizer.update()
    net.a.update_rule.enabled = True
    start = net.a.array.copy()
    give(net, 7.0)
    optimizer.update()
    np.testing.assert_allclose(net.a.array, start - 0.1, rtol=1e-12)  # as in a first update


def test_own_hyperparameters_and_hooks_cut_the_pass():
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    net.a.update_rule.hyperparam.lr = 10.0
    called = []
    net.m.update_rule.add_hook(lambda rule, p: called.append(p.grad.copy()), name="look")
    start = arrays(net)
    give(net)
    optimizer.update()
    np.testing.assert_allclose(net.z.array, start["/z"] - 1.0)
    np.testing.assert_allclose(net.a.array, start["/a"] - 10 * 2.0)
    np.testing.assert_allclose(net.m.array, start["/m"] - 3.0)
    np.testing.assert_array_equal(called, [np.full((3, 3), 3.0)])
    net.m.update_rule.remove_hook("look")
    optimizer.update()
    assert len(called) == 1


def test_a_hook_that_clears_a_gradient_freezes_the_parameter():
    """Chainer's rules do nothing where the gradient is None."""
    net = Net()
    optimizer = MomentumSGD(lr=0.1).setup(net)
    give(net)
    optimizer.update()
    optimizer.add_hook(lambda optimizer: net.a.cleargrad(), name="freeze")
    give(net)
    before, v = arrays(net), net.a.update_rule.state["v"].copy()
    optimizer.update()
    assert_moved(net, before, {"/z", "/m"})
    np.testing.assert_array_equal(net.a.update_rule.state["v"], v)


def test_a_hook_may_replace_a_gradient():
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)

    def replace(optimizer):
        net.a.grad_var = dbrdist.Variable(np.array([100.0]))

    optimizer.add_hook(replace, name="replace")
    give(net)
    start = net.a.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(net.a.array, start - 100.0)


def test_p_update_alone_without_a_gradient_does_nothing():
    p = Parameter(np.array([1.0]))
    MomentumSGD(lr=1.0).setup(link_of(p))
    p.grad = np.array([1.0])
    p.update()
    assert p.array == [0.0]
    p.cleargrad()
    p.update()
    assert p.array == [0.0]


# ---- replaced arrays ------------------------------------------------------------------------------------------------
def test_an_array_of_the_same_shape_is_copied_into_the_view():
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    give(net)
    optimizer.update()
    (run,) = flat.runs(net.params())
    view = net.a.array
    net.a.array = np.array([50.0])
    assert net.a.array is view and 50.0 in run.data
    give(net)
    optimizer.update()
    assert net.a.array == [48.0]


@pytest.mark.parametrize("new", [np.full(3, 5.0), np.full(1, 5.0, np.float32)])
def test_an_array_of_another_shape_or_type_leaves_the_arena(new):
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    give(net)
    optimizer.update()
    net.a.cleargrad()
    net.a.array = new
    before = arrays(net)
    give(net)
    optimizer.update()
    assert net.a.shape == new.shape and net.a.dtype == new.dtype
    np.testing.assert_allclose(net.a.array, 3.0)
    np.testing.assert_allclose(net.z.array, before["/z"] - 1.0)
    assert in_one_run(net.z, net.a, net.m) == (new.dtype == np.float64)


def test_state_survives_planning_anew():
    net, alone = Net(), Net()
    optimizers = [Adam(alpha=0.1).setup(net), Adam(alpha=0.1).setup(alone)]
    late = Parameter(np.float64(0))
    with net.init_scope():
        net.late = late
        late.update_rule = optimizers[0].create_update_rule()
    for i in range(6):
        if i == 3:
            late.initialize((2,))
        for n, o in zip((net, alone), optimizers):
            n.cleargrads()
            give(n, 1.0 + i)
            o.update()
    for a, b in ((net.z, alone.z), (net.a, alone.a), (net.m, alone.m)):
        np.testing.assert_array_equal(a.array, b.array)


# ---- several optimizers ---------------------------------------------------------------------------------------------
def test_two_optimizers_on_one_link_the_last_setup_holds():
    net = Net()
    first = SGD(lr=1.0).setup(net)
    give(net)
    first.update()
    second = SGD(lr=100.0).setup(net)
    start = net.a.array.copy()
    give(net)
    second.update()
    np.testing.assert_array_equal(net.a.array, start - 200.0)
    give(net)
    with pytest.warns(UsageWarning, match="SGD.update: another optimizer was set up"):
        first.update()  # walks over the parameters' rules, which are the second optimizer's now
    np.testing.assert_array_equal(net.a.array, start - 400.0)


def test_two_optimizers_on_overlapping_links_do_not_disturb_each_other():
    class Pair(dbrdist.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.x, self.y = Net(), Net()

    pair = Pair()
    whole = SGD(lr=1.0).setup(pair)
    part = SGD(lr=10.0).setup(pair.y)
    for _ in range(3):
        start = arrays(pair)
        give(pair.x)
        give(pair.y)
        whole.update()
        np.testing.assert_allclose(pair.x.z.array, start["/x/z"] - 1.0)
        np.testing.assert_allclose(pair.y.z.array, start["/y/z"] - 10.0)
        part.update()
        np.testing.assert_allclose(pair.y.z.array, start["/y/z"] - 20.0)
        np.testing.assert_allclose(pair.x.z.array, start["/x/z"] - 1.0)


# ---- copies ---------------------------------------------------------------------------------------------------------
def trained(rule=MomentumSGD):
    net = Net()
    optimizer = rule().setup(net)
    give(net)
    optimizer.update()
    return net, optimizer


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.copy("copy")]
)
def test_copies_of_a_link_have_their_own_memory(duplicate):
    net, optimizer = trained()
    other = duplicate(net)
    for (_, p), (_, q) in zip(net.namedparams(), other.namedparams()):
        np.testing.assert_array_equal(p.array, q.array)
        np.testing.assert_array_equal(p.grad, q.grad)
        assert not np.shares_memory(p.array, q.array) and q.slot is None
    start = arrays(other)
    give(net)
    optimizer.update()
    assert_moved(other, start, set())
    again = MomentumSGD(lr=1.0).setup(other)
    give(other)
    again.update()
    np.testing.assert_allclose(other.z.array, start["/z"] - 1.0)
    assert in_one_run(*other.params())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_an_optimizer_train_their_own_target(duplicate):
    net, optimizer = trained(Adam)
    other = duplicate(optimizer)
    assert other._parts == [], "a plan holds the arrays of the original"
    start = arrays(net)
    for o in (other, optimizer):
        give(o.target)
        o.update()
    np.testing.assert_array_equal(other.target.z.array, net.z.array)
    assert other.target is not net and other.t == 2
    assert not np.array_equal(start["/z"], net.z.array)


def test_shared_copies_see_updates_whoever_updates():
    """Chainer's examples evaluate with ``model.copy()``, made before the first update."""
    net = Net()
    shown = net.copy()
    optimizer = SGD(lr=1.0).setup(net)
    give(net)
    start = net.a.array.copy()
    optimizer.update()
    np.testing.assert_array_equal(shown.a.array, start - 2.0)
    assert shown.a.grad is None or shown.a.grad is not net.a.grad
    own = SGD(lr=10.0).setup(shown)
    for p in shown.params():
        p.grad = np.ones(p.shape)
    own.update()
    np.testing.assert_array_equal(net.a.array, start - 12.0)
    np.testing.assert_array_equal(shown.a.array, start - 12.0)
    with net.init_scope():
        net.extra = Parameter(np.zeros(2))
    net.extra.update_rule = optimizer.create_update_rule()
    give(net)
    optimizer.update()  # plans anew: the memory moves, and the copy follows
    np.testing.assert_array_equal(shown.a.array, net.a.array)
    for p in shown.params():
        p.grad = np.ones(p.shape)
    own.update()
    np.testing.assert_array_equal(net.a.array, start - 24.0)
    shown.a.array = np.array([7.0])  # assignment ends the sharing, as in Chainer
    assert net.a.array == start - 24.0


def test_shared_copies_take_no_memory_of_their_own():
    alone, link = (link_of(Parameter(np.ones(2)), Parameter(np.ones(3))) for _ in range(2))
    both = dbrdist.ChainList(link, link.copy("share"))
    flat.gather(alone.params())
    flat.gather(both.params())
    arenas = [p.slot.arena.data for p in (*alone.params(), *both.params())]
    assert arenas[0] is arenas[1] and arenas[2] is arenas[3] and arenas[2].size == arenas[0].size
    for p, data in zip(both.params(), arenas[2:]):
        assert np.shares_memory(p.array, arenas[2]) and np.shares_memory(data, arenas[2])


def test_shared_copies_in_one_target_get_both_updates():
    link = link_of(Parameter(np.array([1.0, 1.0])))
    both = dbrdist.ChainList(link, link.copy("share"))
    optimizer = SGD(lr=1.0).setup(both)
    for k in (1, 2):
        for i, p in enumerate(both.params()):
            p.grad = np.full(2, 10.0**i)
        optimizer.update()
        np.testing.assert_array_equal(both[0].p0.array, [1 - 11.0 * k] * 2)
        np.testing.assert_array_equal(both[1].p0.array, [1 - 11.0 * k] * 2)


# ---- custom rules and LARS ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["update_core", "update_core_cpu"])
def test_custom_rule_with_init_state_and_update_core(method):
    class Rule(UpdateRule):
        def init_state(self, param):
            self.state["s"] = np.zeros_like(param.array)

    def core(self, param):
        if param.grad is None:
            return
        self.state["s"] += param.grad
        param.array -= self.hyperparam.lr * self.state["s"]

    setattr(Rule, method, core)
    net = Net()
    optimizer = SGD(lr=0.1).setup(net)
    net.a.update_rule = Rule(optimizer.hyperparam)
    start = arrays(net)
    for _ in range(2):
        give(net)
        optimizer.update()
    np.testing.assert_allclose(net.z.array, start["/z"] - 0.2)
    np.testing.assert_allclose(net.a.array, start["/a"] - 0.1 * 2 - 0.1 * 4)
    assert net.a.update_rule.t == 2
    saved = dbrdist.serializers.DictionarySerializer()
    net.a.update_rule.serialize(saved)
    fresh = Rule(optimizer.hyperparam)
    fresh.serialize(dbrdist.serializers.NpzDeserializer(saved.target))
    np.testing.assert_array_equal(fresh.state["s"], [4.0])
    assert fresh.t == 2


def test_lars_has_one_trust_ratio_per_parameter_of_a_run():
    net = Net()
    optimizer = LARS(lr=1.0, momentum=0.9, weight_decay=5e-5, trust_coefficient=0.001).setup(net)
    before = arrays(net)
    give(net)
    assert len(list(optimizer.runs())) == 1
    optimizer.update()
    for name, g in (("z", 1.0), ("m", 3.0)):
        w = before["/" + name]
        gradient = np.full(w.shape, g)
        w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((gradient**2).sum())
        trust = 0.001 * w_norm / (g_norm + 5e-5 * w_norm)
        np.testing.assert_allclose(getattr(net, name).array, w - trust * (gradient + 5e-5 * w), rtol=1e-14)
    np.testing.assert_allclose(net.a.array, before["/a"] - 2.0)  # a vector: trust 1, no decay


def test_a_gradient_that_is_not_in_flat_memory_stays_where_it_is():
    a, b = two_parameters()
    a.cleargrad()
    a.slot.arena.move_gradients(np.zeros(len(a.slot.arena.grad)))
    assert a.grad is None and b.grad.tolist() == [9, 10]


def test_shards_have_the_gaps_and_layers_that_lie_in_them():
    link = dbrdist.Link(a=(5,), b=(2, 9), c=(16,), d=())
    for p in link.params():
        p.array, p.grad = np.ones(p.shape, "f"), np.ones(p.shape, "f")
    one = SGD(lr=0.0).setup(link)
    one.update()
    (run,) = one.runs()
    free = np.ones(run.size, bool)
    for _, where in run.layers():
        free[where] = False
    assert free.any() and run.gaps.tolist() == np.flatnonzero(free).tolist()
    for begin, end in ((0, run.size), (3, 20), (5, 16), (6, 6), (16, 40), (17, run.size)):
        shard = flat.Shard(run, begin, end, list)
        assert shard.size == end - begin and np.shares_memory(shard.data, run.data) == (end > begin)
        assert shard.gaps.tolist() == np.flatnonzero(free[begin:end]).tolist()
        taken = np.zeros(end - begin, bool)
        for (p, where), (q, whole) in zip(shard.layers(), run.layers(), strict=True):
            assert p is q and where.stop - where.start == max(min(whole.stop, end) - max(whole.start, begin), 0)
            taken[where] = True
        assert (taken == ~free[begin:end]).all()


def test_arrays_are_alike_in_shape_type_and_place(monkeypatch):
    class OnDevice(types.SimpleNamespace):
        shape, dtype = (2,), np.dtype("f")

    first, second = OnDevice(at="a"), OnDevice(at="b")
    monkeypatch.setattr(parameter, "is_array", lambda a: isinstance(a, (np.ndarray, OnDevice)))
    monkeypatch.setattr(parameter, "device_of", lambda a: getattr(a, "at", "host"))
    host = np.zeros(2, "f")
    assert parameter._alike(host, host + 1) and parameter._alike(first, OnDevice(at="a"))
    for other in (first, np.zeros(3, "f"), np.zeros(2)):
        assert not parameter._alike(host, other)
        assert not parameter._alike(other, host)
    assert not parameter._alike(first, second) and not parameter._alike(None, host)


def test_who_asks_for_flat_memory_may_write_there_at_any_time():
    a, _ = two_parameters()
    arena = a.slot.arena
    before = arena.num_writes
    assert arena.lend() is arena._data and not arena.is_handed_out and arena.num_writes == before
    assert arena.data is arena._data and arena.is_handed_out and arena.num_writes > before
    arena.is_handed_out, before, memory = False, arena.num_writes, arena._data.copy()
    arena.data = memory
    assert arena.is_handed_out and arena.num_writes > before and arena.lend() is memory


def test_gradients_are_brought_into_flat_memory_wherever_they_lie():
    params = [dbrdist.Parameter(np.zeros(2, "f")) for _ in range(4)]
    flat.gather(params)
    first, second, third, fourth = params
    first.grad_var = Variable(np.array([1, 2], "f"))
    second.node.gradient = np.array([3, 4], "f")
    third.node.view[...] = 9  # left from before; there is none now
    fourth.grad = np.array([5, 6], "f")
    flat.collect_gradients(params)
    assert [p.grad.tolist() for p in params] == [[1, 2], [3, 4], [0, 0], [5, 6]]
    assert all(p.node.gradient is p.node.view for p in params)
