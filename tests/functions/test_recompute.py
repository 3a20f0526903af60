"""forget: gradients, random numbers, running statistics, memory and parameters as without it."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import (
    Chain,
    Parameter,
    Sequential,
    Variable,
    backward,
    config,
    grad,
    link_hooks,
    optimizers,
    random,
    using_config,
)
from dbrdist.comm import create_multi_node_optimizer
from dbrdist.comm.communicators.threads import run_threads
from dbrdist.errors import UsageWarning
from dbrdist.functions import noise, sequence_loss
from tests.each import each

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
    with pytest.raises(RuntimeError, match=r"forget: a tuple of Variables or a Variable are expected, but .*ndarray"):
        F.forget(lambda v: v.array, X)


# ---- F.forget with closures, Variables handed on, hooks with a state ----


def plainly(function, *xs):
    return function(*xs)


# Functions of a Variable x and of k and m = 2 k, which they take from outside.
BODIES = {
    "handed on": lambda a, k, m: (a * k, k),
    "handed on alone": lambda a, k, m: k,
    "handed on twice": lambda a, k, m: (k, k, a),
    "computed outside": lambda a, k, m: (m, m * a),
    "its argument": lambda a, k, m: (a, a * a),
    "an alias": lambda a, k, m: (F.reshape(k, k.shape), F.dropout(k, 0.0), a * k),
    "in a list": lambda a, k, m: [k * k, m, a + k],
    "within another": lambda a, k, m: F.forget(lambda b: (k, b * m, b), a),
    "within another, outside": lambda a, k, m: (*F.forget(lambda b: (b * k, m), a), k),
}


@each(name=BODIES, order=[1, 2])
def test_gradients_of_surroundings(name, order):
    found = []
    for way in (plainly, F.forget):
        x, k = (Variable(np.random.default_rng(i).uniform(1, 2, 3)) for i in range(2))
        m = k * 2
        ys = way(lambda a, k=k, m=m: BODIES[name](a, k, m), x)
        ys = ys if isinstance(ys, (tuple, list)) else (ys,)
        total = sum(F.sum(y * y * (i + 3.0)) for i, y in enumerate(ys))
        total.backward(enable_double_backprop=order == 2)
        if order == 2:
            gk, gx = k.grad_var, x.grad_var
            k.cleargrad()
            x.cleargrad()
            terms = [F.sum(g * g * g) for g in (gk, gx) if g is not None]
            sum(terms).backward()
        found.append([None if v.grad is None else v.grad.copy() for v in (x, k)])
    for plain, forgotten in zip(*found):
        assert (plain is None) == (forgotten is None)
        if plain is not None:
            np.testing.assert_allclose(forgotten, plain, rtol=1e-9)


def normalized(seed=0):
    rng = np.random.default_rng(seed)
    link = L.Linear(5, 3, initialW=rng.normal(size=(3, 5)))
    link.add_hook(link_hooks.SpectralNormalization())
    link.W_u[...] = rng.normal(size=3)
    return link


# Calls of a link whose state moves with each of them.
CALLS = {
    "once": lambda way, link, a, b: way(link, a),
    "twice": lambda way, link, a, b: way(lambda a, b: F.concat([link(a) ** 2, F.relu(link(b))]), a, b),
    "thrice, in and out": lambda way, link, a, b: way(lambda a: link(link.W.shape[0] * a), a) + way(link, b) * link(a),
    "within another": lambda way, link, a, b: way(lambda a: way(lambda c: link(c) * link(b), a) + link(a), a),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_hooks_that_move_with_each_call(name):
    a, b = (np.random.default_rng(i + 5).normal(size=(4, 5)).astype("f") for i in range(2))
    found = []
    for way in (plainly, F.forget):
        link = normalized()
        y = CALLS[name](way, link, Variable(a), Variable(b))
        F.sum(y * y).backward()
        found.append((y.array, link.W.grad, link.b.grad, link.W_u))
    for plain, forgotten in zip(*found):
        np.testing.assert_allclose(forgotten, plain, rtol=1e-4, atol=1e-5)


# ---- state that calls leave in links --------------------------------------------------------------------------------


class OwnState(Chain):
    """A program's own recurrent link: a Variable, a count, and states in a list."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.inner, self.outer = L.Linear(4, 4), L.Linear(4, 4)
        self.h, self.count, self.others = None, 0, []

    def forward(self, x):
        self.count += 1
        y = self.inner(x) * float(self.count)
        if self.h is not None:
            y += self.outer(self.h)
        others = self.others or [Variable(np.ones((6, 4), "f"))]
        self.h = F.tanh(y)
        self.others = [self.h * others[0], F.sigmoid(others[-1])]
        return self.h + self.others[0] * self.others[1]


class Stacked(Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.lower, self.upper = L.LSTM(4, 4), L.StatefulGRU(4, 4)

    def forward(self, x):
        return self.upper(F.dropout(self.lower(x), 0.3))


def within_another(f, *xs):
    return F.forget(lambda *vs: F.forget(f, *vs), *xs)


RECURRENT = [L.LSTM, L.StatefulGRU, L.StatefulMGU, L.StatefulPeepholeLSTM, L.StatefulZoneoutLSTM]
ENDS = {
    "all": lambda model, ys: sum(F.sum(y * y * (i + 1)) for i, y in enumerate(ys)),
    "last": lambda model, ys: F.sum(ys[-1] ** 2),
    "state": lambda model, ys: F.sum(model.h * model.h) if hasattr(model, "h") else F.sum(model.upper.h ** 2),
}  # fmt: skip


@each(kind=[*range(len(RECURRENT)), OwnState, Stacked], end=sorted(ENDS), way=[F.forget, within_another])
def test_recurrent_links(kind, end, way):
    """Of a sequence, with and without it: values, states, and gradients through the states of earlier calls."""
    xs = np.random.default_rng(0).normal(size=(4, 6, 4)).astype("f")
    found = []
    for call in (plainly, way):
        random.set_seed(0)
        model = RECURRENT[kind](4, 4) if isinstance(kind, int) else kind()
        inputs = [Variable(x) for x in xs]
        ys = [call(model, x) if i != 1 else model(x) for i, x in enumerate(inputs)]
        ENDS[end](model, ys).backward()
        state = model if hasattr(model, "h") else model.lower
        count = getattr(model, "count", 0)
        found.append([count, state.h.array, *(v.grad for v in (*model.params(), *inputs))])
    for plain, forgotten in zip(*found, strict=True):
        np.testing.assert_allclose(forgotten, plain, rtol=1e-4, atol=1e-5)


def test_states_are_those_of_the_call_after_backward():
    link = L.LSTM(4, 4)
    y = F.forget(link, Variable(X))
    h, c = link.h, link.c
    F.sum(y).backward()
    assert link.h is h
    assert link.c is c
    node = weakref.ref(y.node.creator_node)
    link.reset_state()
    del y, h, c
    assert node() is None


@each(closure=[False, True])
def test_truncated_backward_releases_the_steps_before(closure):
    link, cell, nodes = L.LSTM(4, 4), L.StatelessLSTM(4, 4), []
    c = h = Variable(np.zeros((6, 4), "f"))
    for _ in range(4):
        if closure:
            c, h = F.forget(lambda x, c=c, h=h: cell(c, h, x), X)
        else:
            h = F.forget(link, X)
        nodes.append(weakref.ref(h.node.creator_node))
        loss = F.sum(h)
        loss.backward()
        loss.unchain_backward()
    del loss
    assert [node() is None for node in nodes[:-1]] == [True] * 3


def test_what_a_classifier_keeps_has_a_graph():
    model = L.Classifier(L.Linear(4, 3))
    F.forget(lambda x: model(x, np.arange(6) % 3), Variable(X))
    model.loss.backward()
    forgotten = model.predictor.W.grad
    model.cleargrads()
    model(X, np.arange(6) % 3).backward()
    np.testing.assert_allclose(forgotten, model.predictor.W.grad, rtol=1e-5, atol=1e-7)


def test_reports_count_once():
    model, seen, again = L.Classifier(L.Linear(4, 3)), {}, {}
    reporter = dbrdist.Reporter()
    reporter.add_observer("main", model)
    with reporter.scope(seen):
        loss = F.forget(lambda x: model(x, np.arange(6) % 3), Variable(X))
    with reporter.scope(again):
        loss.backward()
    assert "main/loss" in seen
    assert again == {}


def test_a_gradient_of_one_number():
    x = Variable(X)
    y = F.forget(F.sum, x)
    (y * y).backward()
    np.testing.assert_allclose(x.grad, np.full(X.shape, 2 * X.sum()), rtol=1e-5)


@each(draw=[lambda: np.random.rand(6, 4), lambda: np.full((6, 4), float(next(COUNTER)))])
def test_other_values_in_the_repeated_call_are_warned_of(draw):
    x = Variable(X)
    y = F.forget(lambda v: v * draw().astype("f"), x)
    with pytest.warns(UsageWarning, match="func gave other values when it was called again for backward"):
        F.sum(y).backward()


@each(dtype=["bfloat16", np.float16, np.float32, np.float64])
def test_a_loops_variable_that_has_moved_on_is_warned_of(dtype):
    """Each lambda sees its last value when it is called again."""
    dtype = np.dtype(getattr(ml_dtypes, dtype) if isinstance(dtype, str) else dtype)
    x = Variable(np.random.default_rng(0).normal(size=(6, 4)).astype(dtype))
    y, z = x, x
    for scale in (1, 2, 3):
        y = F.forget(lambda a: F.tanh(a * scale), y)  # noqa: B023
        z = F.forget(lambda a, scale=scale: F.tanh(a * scale), z)
    with pytest.warns(UsageWarning, match=r"a loop's variable \(write lambda x, i=i"):
        F.sum(y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.sum(z).backward()


@each(dtype=[np.float16, np.float32])
def test_values_that_differ_by_a_twentieth_are_warned_of(dtype):
    """A hundred roundings of float16: only bfloat16, of eight bits, may differ so much."""
    scales = iter((1.0, 1.05))
    y = F.forget(lambda a: a * next(scales), Variable(np.random.default_rng(0).normal(size=(6, 4)).astype(dtype)))
    with pytest.warns(UsageWarning, match="func gave other values"):
        F.sum(y).backward()


COUNTER = itertools.count(1)


# How a link may keep what is needed later, and how to find it there.
KEPT = {
    "appended": (lambda link, h: (setattr(link, "kept", []), link.kept.append(h)), lambda kept: kept[0]),
    "pairs": (lambda link, h: setattr(link, "kept", [(h, h * 2)]), lambda kept: kept[0][0] * kept[0][1]),
    "dict": (lambda link, h: setattr(link, "kept", {"h": h}), lambda kept: kept["h"]),
    "filled": (lambda link, h: (setattr(link, "kept", {}), link.kept.update(h=h)), lambda kept: kept["h"]),
}


@each(kind=sorted(KEPT))
def test_gradients_pass_through_nested_states(kind):
    keep, find = KEPT[kind]
    link, found = L.Linear(4, 3), []

    def called(x):
        h = F.tanh(link(x))
        keep(link, h)
        return h * 1

    for call in (called, lambda x: F.forget(called, x)):
        link.cleargrads()
        y = call(X)
        (F.sum(y) + F.sum(find(link.kept) ** 2)).backward()
        found.append(link.W.grad.copy())
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_a_container_that_holds_itself_is_no_state():
    link = Chain()

    def called(x):
        link.tree = {"children": []}
        link.tree["children"].append(link.tree)
        return x * 2

    x = Variable(X)
    F.sum(F.forget(called, x)).backward()
    assert (x.grad == 2).all() and link.tree["children"] == [link.tree]


class MadeByFirstCall(Chain):
    """It makes its parameters, a link and a count of NumPy's when it sees the first input."""

    def __init__(self):
        super().__init__()
        self.lstm, self.W, self.count = None, None, np.int64(0)

    def forward(self, x):
        if self.lstm is None:
            with self.init_scope():
                self.lstm, self.W = L.LSTM(x.shape[1], 3), Parameter(np.float32(0.5), (3,))
        self.count = self.count + 1
        return self.lstm(x) * F.broadcast_to(self.W, (len(x), 3)) * float(self.count)


def test_what_the_first_call_makes_stays():
    found = []
    for call in (plainly, F.forget):
        random.set_seed(0)
        link = MadeByFirstCall()
        sum(F.sum(call(link, X)) for _ in range(2)).backward()
        found.append((link.count, link.lstm.h.array, *(p.grad for _, p in sorted(link.namedparams()))))
    assert len(found[1]) == 6
    for plain, forgotten in zip(*found, strict=True):
        np.testing.assert_allclose(forgotten, plain, rtol=1e-4, atol=1e-5)


@each(as_in_chainer=[False, True])
def test_numbers_of_numpy_are_drawn_once(as_in_chainer, monkeypatch):
    """Those of a sampler, and of zoneout in programs of Chainer."""
    monkeypatch.setattr(noise, "as_chainer", [as_in_chainer])
    monkeypatch.setattr(sequence_loss, "as_chainer", [as_in_chainer])
    W, sampler = Parameter(X), lambda shape: np.random.randint(0, 6, shape)

    def called(x):
        return F.negative_sampling(F.zoneout(x, x * 2), np.arange(6) % 3, W, sampler, 3)

    x = Variable(X)
    y = F.forget(called, x)  # which warns of other values
    y.backward()
    assert x.grad is not None and W.grad is not None


def test_corrections_of_renormalization_are_those_of_the_first_call():
    found = []
    for call in (plainly, F.forget):
        link, x = L.BatchRenormalization(4, 3.0, 5.0), Variable(X)
        F.sum(call(link, x) ** 3).backward()
        found.append((x.grad, link.gamma.grad, link.beta.grad, link.avg_mean, link.avg_var))
    for plain, forgotten in zip(*found):
        np.testing.assert_allclose(forgotten, plain, rtol=1e-5, atol=1e-6)
