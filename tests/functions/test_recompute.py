"""forget: gradients, random numbers, running statistics, memory and parameters as without it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Sequential, Variable, backward, config, grad, optimizers, random, using_config
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.threads import run_threads

X = np.random.default_rng(0).standard_normal((6, 4)).astype("f")


def net():
    random.set_seed(0)
    return Sequential(L.Linear(4, 5), L.BatchNormalization(5), F.relu, lambda h: F.dropout(h, 0.3), L.Linear(5, 3))


def trained(call, steps=3):
    """Losses, parameters and statistics after some steps."""
    model = net()
    optimizer = optimizers.MomentumSGD(0.1).setup(model)
    losses = []
    for _ in range(steps):
        loss = F.sum(call(model, Variable(X)) ** 2)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(loss.array)
    return [*losses, *(p.array.copy() for p in model.params()), model[1].avg_mean, model[1].avg_var]


def test_training_is_that_without_it():
    plain = trained(lambda model, x: model(x))
    for call in (
        lambda model, x: F.forget(model, x),
        lambda model, x: F.forget(lambda h: F.forget(model[1:], h), model[0](x)),
        lambda model, x: F.forget(lambda h: model[1:](h), F.forget(model[0], x.array)),
    ):
        for a, b in zip(trained(call), plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_random_numbers_repeat_and_go_on_from_where_they_were():
    x = Variable(np.ones((50, 4), np.float32))
    y = F.forget(lambda v: F.dropout(v * 3, 0.5), x)
    after = random.get_state()
    F.dropout(x)
    drawn = random.get_state()
    backward([y], [np.ones_like(y.array)])
    assert random.get_state() == drawn != after
    np.testing.assert_array_equal(x.grad, y.array)  # the slope is 3 times the mask, as y is


def test_statistics_move_once():
    model = L.BatchNormalization(4)
    y = F.forget(model, Variable(X))
    mean = model.avg_mean.copy()
    F.sum(y * X).backward()
    np.testing.assert_array_equal(model.avg_mean, mean)
    np.testing.assert_allclose(mean, 0.1 * X.mean(0), rtol=1e-5)


def test_the_switches_are_those_of_the_call():
    link, x = L.BatchNormalization(4), Variable(X)
    with using_config("train", False):
        y = F.forget(lambda v: F.dropout(link(v)), x)
    F.sum(y).backward()
    np.testing.assert_allclose(x.grad, 1 / np.sqrt(1 + 2e-5), rtol=1e-5)
    assert config.train
    assert not config.in_recomputing


def test_what_is_computed_on_the_way_is_let_go():
    seen = []

    def wide(v):
        h = F.exp(v)
        seen.append(weakref.ref(h.node))
        return F.sum(h * h)

    x = Variable(X)
    y = F.forget(wide, x)
    gc.collect()
    assert seen[0]() is None
    y.backward()
    assert [ref() for ref in seen] == [None, None]


def test_functions_of_chainers_form_run_twice_and_no_more():
    calls = []

    def counted(v):
        calls.append((config.in_recomputing, config.enable_backprop))
        return v * v

    x = Variable(X)
    y = F.forget(counted, x)
    F.sum(y).backward()
    assert calls == [(False, False), (True, True)]
    np.testing.assert_allclose(x.grad, 2 * X)


def test_without_a_graph_it_is_a_call():
    with dbrdist.no_backprop_mode():
        y = F.forget(lambda v: v * 2, Variable(X))
    assert y.creator is None
    assert F.forget(lambda v: v * 2, X).creator is None


def test_gradients_reach_what_is_captured_whatever_asks_for_them():
    W, x = Variable(X[:4]), Variable(X)
    h = x * 2.0  # captured, with a history of its own
    outer = W * 3.0

    def inner(v):
        return F.matmul(v * h, outer) + F.matmul(v, W)

    def plain(v):
        return inner(v)

    for make in (lambda: F.forget(inner, x), lambda: plain(x)):
        y = F.sum(make() ** 2)
        found = [g.array for g in grad([y], [x, W, h, outer])]
        x.cleargrad(), W.cleargrad()
        y.backward()
        if make().creator.label == "Forget":
            first, leaves = found, [x.grad.copy(), W.grad.copy()]
    for a, b in zip(first, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(leaves, [x.grad, W.grad], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_second_order_through_parameters():
    """A gradient penalty: what the slope's square gives for W."""
    link = L.Linear(4, 3)
    found = []
    for call in (lambda v: F.forget(lambda u: F.tanh(link(u)), v), lambda v: F.tanh(link(v))):
        x = Variable(X)
        (gx,) = grad([F.sum(call(x))], [x], enable_double_backprop=True)
        link.cleargrads()
        F.sum(gx * gx).backward()
        found.append([x.grad, link.W.grad, link.b.grad])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def learned(comm, call):
    """Weights after some steps in which two links are used twice, once within a part that ``call`` runs."""
    random.set_seed(0)
    model = Chain(a=L.Linear(4, 4), b=L.Linear(4, 4))
    optimizer = optimizers.MomentumSGD(0.1)
    optimizer = optimizer if comm is None else create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    x = X if comm is None else X[comm.rank :: comm.size]
    for _ in range(3):
        h = call(lambda v: model.a(F.tanh(model.b(v))), Variable(x))
        loss = F.mean(model.a(model.b(h)) ** 2)
        model.cleargrads()
        loss.backward()
        optimizer.update()
    return [p.array.copy() for p in model.params()]


def test_gradients_that_travel_early_wait_for_all_uses():
    """Weights are among the inputs of the forgotten part, so that a walk which announces gradients sees all uses."""
    alone = learned(None, lambda f, v: f(v))
    for weights in run_threads(2, learned, F.forget, timeout_seconds=60):
        for a, b in zip(weights, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    link = L.Linear(4, 4)
    assert {n.name for n in F.forget(link, Variable(X)).creator.inputs} >= {"W", "b"}


def test_several_outputs_of_which_some_are_used():
    x = Variable(X)
    a, b, c = F.forget(lambda v: (v * 2, Variable(X), v), x)
    F.sum(a + b + c).backward()
    np.testing.assert_allclose(x.grad, 3)
    x.cleargrad()
    F.sum(b).backward()
    assert x.grad is None or not x.grad.any()


def test_labels_stay_integers():
    t = np.array([0, 1, 2, 0, 1, 2])
    x = Variable(X)
    F.forget(F.softmax_cross_entropy, x, t).backward()
    expected = Variable(X)
    F.softmax_cross_entropy(expected, t).backward()
    np.testing.assert_allclose(x.grad, expected.grad, rtol=1e-6)


def test_links_that_learn_their_size_from_the_first_batch():
    link = L.Linear(None, 3)
    F.sum(F.forget(link, Variable(X))).backward()
    np.testing.assert_allclose(link.W.grad, np.broadcast_to(X.sum(0), (3, 4)), rtol=1e-5)


def test_an_error_in_the_repeated_call_leaves_everything_as_it_was():
    link, calls = L.Linear(4, 3), []

    def once(v):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("no second time")
        return link(v)

    y = F.forget(once, Variable(X))
    node, state = link.W.node, random.get_state()
    with pytest.raises(ValueError, match="no second time"):
        F.sum(y).backward()
    assert link.W.node is node
    assert random.get_state() == state
    assert not config.in_recomputing


def test_new_values_between_forward_and_backward_are_refused():
    link = L.Linear(4, 3)
    y = F.sum(F.forget(link, Variable(X)))
    link.W.array = np.zeros((3, 4), np.float32)
    with pytest.raises(RuntimeError, match="assigned new values after forward"):
        y.backward()


def test_what_is_no_variable_is_refused():
    with pytest.raises(TypeError, match="forget: expected func to return a Variable or several, got ndarray"):
        F.forget(lambda v: v.array, X)
