"""Parameters that get new values, shapes and gradients, and where these lie."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest

import dbrdist
from dbrdist import Parameter, UpdateRule
from dbrdist.core.model import flat
from dbrdist.core.tape import ops
from dbrdist.optimizers import SGD, Adam, MomentumSGD
from tests.core.model.flat_examples import Net, after, arrays, assert_moved, give, in_one_run
from tests.each import each


# ---- new values -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4, 5)])
def test_a_parameter_initialised_anew_after_an_update_goes_on_training(shape):
    net = Net()
    optimizer = MomentumSGD(lr=1.0).setup(net)
    net.z.initializer = 3.0
    give(net)
    optimizer.update()
    net.z.initialize(shape)
    np.testing.assert_array_equal(net.z.array, np.full(shape, 3.0))
    assert net.z.dtype == np.float64 and net.z.grad is None
    net.cleargrads()
    ops.sum(net.z * 2.0).backward()
    v = net.z.update_rule.state["v"].copy() if shape == (2, 3) else 0.0
    optimizer.update()
    np.testing.assert_allclose(net.z.array, np.full(shape, 3.0 - 2.0) + 0.9 * v)
    assert in_one_run(*net.params())


def test_bias_corrections_start_anew_with_another_shape():
    net = Net()
    optimizer = Adam(alpha=0.1, eps=0.0).setup(net)
    for _ in range(5):
        give(net)
        optimizer.update()
    net.z.initializer = 3.0
    net.z.initialize((4,))
    give(net)
    optimizer.update()
    np.testing.assert_allclose(net.z.array, np.full(4, 3.0 - 0.1), rtol=1e-12)
    assert (net.z.update_rule.t, net.a.update_rule.t) == (1, 6)


def test_a_gradient_of_the_old_shape_is_forgotten_with_it():
    net = Net()
    optimizer = SGD(lr=1.0).setup(net)
    give(net)
    optimizer.update()
    net.z.array = np.ones((5, 2))
    assert net.z.grad is None
    before = arrays(net)
    net.a.grad = np.ones(1)
    optimizer.update()
    assert_moved(net, before, {"/a", "/m"})
    np.testing.assert_array_equal(net.z.array, np.ones((5, 2)))


def assign(p, value):
    p.array = value


def through_a_file(p, value):
    link, saved = dbrdist.Link(), dbrdist.serializers.DictionarySerializer()
    with link.init_scope():
        link.p = Parameter(value)
    link.serialize(saved)
    name = p.name
    with link.init_scope():
        link.p = p
    link.serialize(dbrdist.serializers.NpzDeserializer(saved.target))
    p.name = name


NEW_VALUES = {
    "array": assign,
    "data": lambda p, value: setattr(p, "data", value),
    "copydata": lambda p, value: p.copydata(dbrdist.Variable(value)),
    "initialize": lambda p, value: p.initialize(value.shape),
    "load": through_a_file,
}


@each(how=NEW_VALUES, num_updates=[0, 1, 3], is_set_up=[True, False])
def test_new_values_between_forward_and_backward_are_an_error(how, num_updates, is_set_up):
    net = after(num_updates, Net()) if is_set_up else Net()
    x = dbrdist.Variable(np.ones((4, 2)))
    y = ops.sum(ops.matmul(x, net.z))
    NEW_VALUES[how](net.z, np.full((2, 3), 7.0))
    with pytest.raises(
        RuntimeError, match=r"MatMul.*: parameter z of shape \(2, 3\) .*assigned new values after forward"
    ):
        y.backward()
    y = ops.sum(ops.matmul(x, net.z))
    y.backward()
    np.testing.assert_allclose(x.grad, np.ones((4, 3)) @ net.z.array.T)


@pytest.mark.parametrize("num_updates", [0, 2])
def test_new_values_where_backward_needs_none_of_the_old_ones_are_no_error(num_updates):
    net = after(num_updates, Net())
    y = ops.sum(net.z + 1.0)
    net.z.array = np.zeros((2, 3))
    y.backward()
    np.testing.assert_array_equal(net.z.grad, np.ones((2, 3)))


def test_what_an_update_assigns_is_no_assignment():
    """Chainer's DCGAN updates one net between two backwards through a shared graph; WGAN clips weights in a hook."""

    class Rule(UpdateRule):
        def update_core(self, param):
            param.array = param.array - param.grad

    def clip(optimizer):
        for p in optimizer.target.params():
            p.array = np.clip(p.array, -2.0, 2.0)

    def clip_one(rule, p):
        p.array = np.clip(p.array, -2.0, 2.0)

    for prepare in (
        lambda o, p: None,
        lambda o, p: setattr(p, "update_rule", Rule(o.hyperparam)),
        lambda o, p: o.add_hook(clip, name="clip"),
        lambda o, p: o.add_hook(clip, name="clip", timing="post"),
        lambda o, p: p.update_rule.add_hook(clip_one, name="clip"),
    ):
        net = Net()
        optimizer = SGD(lr=1.0).setup(net)
        prepare(optimizer, net.z)
        x = dbrdist.Variable(np.ones((4, 2)))
        y = ops.matmul(x, net.z)
        first, second = ops.sum(y), ops.sum(y * 2.0)
        net.cleargrads()
        first.backward()
        optimizer.update()
        second.backward()


def test_a_parameter_that_gets_its_shape_within_forward_is_no_new_value():
    p = Parameter(1.0)
    x = dbrdist.Variable(np.ones((2, 2), np.float32))
    y = ops.matmul(x, x)
    p.initialize((2, 2))
    ops.sum(ops.matmul(y, p)).backward()
    np.testing.assert_array_equal(p.grad, np.full((2, 2), 4.0))


def test_gradients_are_views_from_setup_on_and_copies_are_for_keeping():
    """The same before and after the first update: a gradient is overwritten by the next backward, a copy is not."""
    for num_updates in (0, 1):
        net = after(num_updates, Net())
        ops.sum(net.z * 2.0).backward()
        seen, kept = net.z.grad, net.z.grad.copy()
        net.cleargrads()
        ops.sum(net.z * 5.0).backward()
        assert net.z.grad is seen is net.z.node.view
        np.testing.assert_array_equal(kept, np.full((2, 3), 2.0))


def test_setup_plans_where_every_parameter_has_a_shape():
    net = Net()
    SGD().setup(net)
    assert all(p.slot is not None for p in net.params())
    lazy = Net(lazy=True)
    optimizer = SGD().setup(lazy)
    assert all(p.slot is None for p in lazy.params())
    give(lazy)
    optimizer.update()
    assert lazy.z.slot is not None


def test_arrays_are_freed_as_they_move():
    """At no time do more than the arena and the parameters not yet moved hold memory."""
    size, count = 1 << 16, 8
    params = [Parameter(2.0, (size,)) for _ in range(count)]  # float32
    num_alive = []
    refs = [weakref.ref(p._array) for p in params]
    enter = Parameter.enter_arena

    def watched(self, *args, **kwargs):
        enter(self, *args, **kwargs)
        num_alive.append(sum(r() is not None for r in refs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parameter, "enter_arena", watched)
        flat.gather(params)
    assert num_alive == list(range(count - 1, -1, -1))


def test_memory_comes_from_the_given_allocator():
    asked = []

    def allocate(count, dtype, like):
        asked.append((count, np.dtype(dtype)))
        return np.zeros(count + 3, dtype)[:count]

    params = [Parameter(np.ones(5)), Parameter(np.ones(9)), Parameter(np.ones(2, np.float32))]
    flat.gather(params, allocate)
    assert asked == [(8 + 16, np.float64)] * 2 + [(16, np.float32)] * 2
    assert params[0].slot.arena.data.base.size == 27
    flat.gather(params, allocate)
    assert len(asked) == 4, "what has a place stays there"


@pytest.mark.parametrize("num_updates", [0, 1])
def test_a_gradient_may_be_assigned_as_a_variable(num_updates):
    net = after(num_updates, Net())
    optimizer = SGD(lr=1.0).setup(net)
    before = net.z.array.copy()
    net.z.grad = dbrdist.Variable(np.full((2, 3), 4.0))
    np.testing.assert_array_equal(net.z.grad, np.full((2, 3), 4.0))
    optimizer.update()
    np.testing.assert_array_equal(net.z.array, before - 4.0)


@pytest.mark.parametrize("num_updates", [0, 1])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (3, 2), ()])
def test_copydata_does_not_broadcast(num_updates, shape):
    net = after(num_updates, Net())
    with pytest.raises(ValueError, match=r"parameter z: copydata expected an array of shape \(2, 3\), got \("):
        net.z.copydata(dbrdist.Variable(np.zeros(shape)))
    late = Parameter(1.0)
    late.copydata(net.z)
    assert late.shape == (2, 3) and (late.array == net.z.array).all()
    net.z.copydata(Parameter(1.0))  # nothing to copy
    assert net.z.array[0, 1] == 2.0


def test_an_array_is_no_initial_value_for_another_shape():
    for num_updates in (0, 1):
        with pytest.raises(ValueError, match=r"parameter z: it was made from an array of shape \(2, 3\), so it cannot"):
            after(num_updates, Net()).z.initialize((3,))


def test_what_is_no_array_is_refused():
    p = Parameter(np.ones(2), name="W")
    for value in ([1.0, 2.0], 3.0, dbrdist.Variable(np.ones(2))):
        with pytest.raises(TypeError, match="parameter W: expected an array of NumPy or CuPy, got"):
            p.array = value


def test_memory_is_shared_while_a_parameter_that_lies_there_is():
    """Not one that is gone, or that lies elsewhere by now."""
    params = [Parameter(np.zeros(2, "f")) for _ in range(3)]
    flat.gather(params)
    arena = params[0].slot.arena
    assert not arena.is_shared
    other = copy.copy(params[1])
    assert arena.is_shared and other.is_shared
    params[0].array = np.zeros(3, "f")
    assert arena.is_shared
    gone = copy.copy(params[0])
    del params[1], other
    assert not arena.is_shared and gone.is_shared
    assert [(p is params[1], slot is params[1].slot) for p, slot in arena._placed()] == [(True, True)]
