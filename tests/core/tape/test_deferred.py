"""Tests of dbrdist.core.tape.deferred: gradients that a rule leaves to be written later, in host memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Parameter, optimizers
from dbrdist.core.tape import deferred
from dbrdist.core.tape.function_node import FunctionNode

written = []  # the jobs of each call of a writer


@pytest.fixture(autouse=True)
def nothing_waits():
    written.clear()
    yield
    assert not deferred.waiting


def write(jobs):
    written.append(len(jobs))
    for value, target in jobs:
        target[...] = value


class WrittenLater(FunctionNode):
    """y = p x, whose gradient of p in flat memory is written later; ``look`` is called after the rule."""

    writes = True

    def __init__(self, look=None):
        self.look = look

    def forward(self, xs):
        self.retain_inputs((0, 1))
        return (xs[0] * xs[1],)

    def derive(self, wanted, gys, out):
        p, x = self.retained_inputs()
        grads = []
        for k, i in enumerate(wanted):
            g = gys[0] * (p if i else x)
            target = None if out is None else out[k]
            if i == 0 and target is not None:
                target[...] = np.nan
                g = deferred.write_later(write, (g, target), target)
            grads.append(g)
        if self.look is not None:
            self.look()
        return tuple(grads)


class Products(dbrdist.Chain):
    def __init__(self, num=3):
        super().__init__()
        with self.init_scope():
            for i in range(num):
                setattr(self, f"p{i}", Parameter(np.full(2, 2.0 + i)))

    @property
    def all(self):
        return list(self.params(include_uninit=False))


@pytest.fixture
def net():
    made = Products()
    optimizers.SGD().setup(made)
    return made


def loss_of(net, looks=(None, None, None)):
    h = dbrdist.Variable(np.array([1.0, 3.0]))
    for p, look in zip(net.all, looks, strict=True):
        h = WrittenLater(look).apply((p, h))[0]
    return F.sum(h)


def check(net, times=1.0):
    """Each gradient is the product of all others and x."""
    values = [p.array for p in net.all]
    for i, p in enumerate(net.all):
        others = np.prod([v for k, v in enumerate(values) if k != i], axis=0)
        np.testing.assert_allclose(p.grad, times * others * np.array([1.0, 3.0]))


def test_all_are_written_at_the_end_of_the_pass(net):
    net.cleargrads()
    loss_of(net).backward()
    assert written == [3]
    check(net)


def test_a_second_contribution_waits_for_the_first(net):
    net.cleargrads()
    (loss_of(net) + loss_of(net)).backward()
    check(net, 2.0)
    loss_of(net).backward()  # and one of another pass
    check(net, 3.0)


def test_a_rule_that_looks_at_gradients_finds_them(net):
    seen = []
    net.cleargrads()
    loss_of(net, (None, lambda: seen.append(net.p2.grad.copy()), None)).backward()
    np.testing.assert_allclose(seen, [[6.0, 18.0]])
    check(net)


def test_a_hook_of_functions_finds_them(net):
    class Hook(dbrdist.FunctionHook):
        def backward_postprocess(self, function, in_data, out_grad):
            if net.p2.grad is not None:
                assert not np.isnan(net.p2.node.gradient).any()

    net.cleargrads()
    with Hook():
        loss_of(net).backward()
    check(net)


def test_what_waits_is_written_where_the_pass_fails(net):
    def fail():
        raise RuntimeError("a rule")

    net.cleargrads()
    with pytest.raises(RuntimeError, match="a rule"):
        loss_of(net, (fail, None, None)).backward()
    assert not np.isnan([net.p1.node.gradient, net.p2.node.gradient]).any()


def test_a_target_that_waits_already_is_written_before(net):
    target = np.zeros(2)
    deferred.write_later(write, (1.0, target), target)
    deferred.write_later(write, (2.0, target), target)
    assert written == [1]
    deferred.write_all()
    assert written == [1, 1] and (target == 2).all()


def test_no_more_than_some_wait_at_a_time():
    targets = [np.zeros(1) for _ in range(deferred._MOST + 1)]
    for target in targets:
        deferred.write_later(write, (1.0, target), target)
    assert written == [deferred._MOST]
    deferred.write_all()
    assert all(target == 1 for target in targets)


def test_threads_write_their_own():
    mine, other = np.zeros(1), np.zeros(1)
    deferred.write_later(write, (1.0, mine), mine)
    thread = threading.Thread(target=lambda: (deferred.write_later(write, (2.0, other), other), deferred.write_all()))
    thread.start()
    thread.join()
    assert other == 2 and mine == 0
    deferred.write_all()
    assert mine == 1


# ---- gradients of slices


def slices_of(x, indices, values):
    """The gradient of x after a pass through slices whose gradients repeat ``values``."""
    parts = [x[i] for i in indices]
    dbrdist.backward(parts, [np.resize(np.array(v, x.dtype), p.shape) for v, p in zip(values, parts)])
    return x.grad


SLICES = {
    "rows": [0, 1, 2, 0],
    "columns": [(slice(None), i) for i in (3, 4, 3)],
    "one over the other": [slice(0, 9), slice(5, 20), (Ellipsis, slice(2, 7))],
    "among each other": [(slice(None), slice(0, None, 2)), (slice(None), slice(1, None, 2)), slice(None, None, -1)],
    "numbers": [(2, 3), (2, 4), (2, 3), 2],
    "a number later": [0, 1, (0, 3), (5, 5)],
    "new axes": [(None, 3), (4, None), (slice(None), None, 5)],
    "an array of indices": [0, np.array([1, 1, 0]), 1],
    "nothing": [slice(0, 0), 1, slice(0, 0), 1],
}


@pytest.mark.parametrize("dtype", ["f", "d", "e"])
@pytest.mark.parametrize("name", SLICES)
def test_gradients_of_slices_have_the_bits_of_a_sum_of_arrays(name, dtype):
    """Zeros have their signs: a sum is -0 only where all that is added is."""
    x, values = dbrdist.Variable(np.ones((100, 90), dtype)), [(-0.0, 1.0, -3.0), (-0.0, 2.0), (4.0, -0.0), (-0.0,)]
    found = slices_of(x, SLICES[name], values)
    wanted = np.full(x.shape, -0.0, dtype)
    for index, value in zip(SLICES[name], values):
        placed = np.zeros(x.shape, dtype)
        np.add.at(placed, index, np.resize(np.array(value, dtype), placed[index].shape))
        if not isinstance(index, np.ndarray):
            placed[index] = np.resize(np.array(value, dtype), placed[index].shape)  # which keeps a -0
        wanted += placed
    assert found.dtype == wanted.dtype and found.tobytes() == wanted.tobytes()


def test_gradients_of_slices_are_added_in_one_array(monkeypatch):
    made, place = [], deferred.scattered
    monkeypatch.setattr(deferred, "scattered", lambda *args: made.append(args[1]) or place(*args))
    x = dbrdist.Variable(np.ones((128, 128), "f"))
    slices_of(x, [(slice(None), i) for i in range(128)], [(i,) for i in range(128)])
    assert len(made) == 1
    assert (x.grad == np.arange(128)).all()


def test_a_gradient_from_before_the_pass_is_left_as_it_is():
    x = dbrdist.Variable(np.ones((100, 100), "f"))
    before = slices_of(x, [0, 1], [(1.0,), (2.0,)])
    after = slices_of(x, [1, 2, 3], [(4.0,), (8.0,), (16.0,)])
    assert before[:4, 0].tolist() == [1, 2, 0, 0] and after[:4, 0].tolist() == [1, 6, 8, 16]


def test_a_gradient_that_a_hook_keeps_is_left_as_it_is():
    x, kept = dbrdist.Variable(np.ones((100, 100), "f")), []

    class Keeps(dbrdist.FunctionHook):
        def backward_preprocess(self, function, in_data, out_grad):
            if x.grad is not None:
                kept.append((x.grad, x.grad.copy()))

    with Keeps():
        slices_of(x, [0, 1, 2], [(1.0,), (2.0,), (4.0,)])
    assert len(kept) == 2 and all((now == then).all() for now, then in kept)
    assert x.grad[:4, 0].tolist() == [1, 2, 4, 0]


def test_the_gradient_of_a_slice_by_a_pass_to_chosen_variables():
    x = dbrdist.Variable(np.ones((100, 100), "f"))
    (gx,) = dbrdist.grad([F.sum(x[0] * 2.0) + F.sum(x[1] * 3.0)], [x])
    assert x.grad is None and gx.array[:3, 0].tolist() == [2, 3, 0]
