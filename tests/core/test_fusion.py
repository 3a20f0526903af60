"""Last passes that wait for a ReLU: values and gradients are those of separate calls, whoever reads first."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Parameter, Variable
from dbrdist.core import backend, flat, fusion, ops
from dbrdist.core.fusion import Pending
from dbrdist.optimizers import SGD

SHAPE = (2, 16, 16, 16)  # large enough to wait


def inputs(dtype=np.float32):
    random = np.random.default_rng(0)
    out = []
    for _ in range(2):
        a = backend.empty(SHAPE, dtype)
        a[...] = random.normal(size=SHAPE)
        out.append(Variable(a))
    return out


def activations(dtype=np.float32):
    """Two leaves and two results of functions, as after convolutions."""
    a, b = inputs(dtype)
    return a, b, a * 1.5, b * 0.5


def expected(a, b):
    """The sum, its ReLU and the gradients for a gradient of y, in plain NumPy."""
    h = a.array * np.float32(1.5) + b.array * np.float32(0.5)
    return h, np.maximum(h, 0)


def is_pending(v):
    return v._array.__class__ is Pending


def assert_gradients(a, b, gy, h):
    gh = np.where(h > 0, gy, 0)
    np.testing.assert_array_equal(a.grad, gh * np.float32(1.5))
    np.testing.assert_array_equal(b.grad, gh * np.float32(0.5))


def weights():
    return np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)


@pytest.mark.parametrize("reads", ["never", "before", "after", "twice"])
def test_add_relu_equals_separate_calls(reads):
    a, b, p, q = activations()
    expected_h, expected_y = expected(a, b)
    h = p + q
    assert is_pending(h) and h.shape == SHAPE and h.dtype == np.float32
    if reads in ("before", "twice"):
        np.testing.assert_array_equal(h.array, expected_h)
        assert not is_pending(h)
    y = F.relu(h)
    assert is_pending(h) == (reads in ("never", "after"))
    if reads in ("after", "twice"):
        np.testing.assert_array_equal(h.array, expected_h)
    np.testing.assert_array_equal(y.array, expected_y)
    assert backend.is_channels_last(y.array) and backend.is_channels_last(h.array)
    y.grad = gy = weights()
    y.backward()
    assert_gradients(a, b, gy, expected_h)


def test_the_sum_used_by_relu_and_by_another_function():
    a, b, p, q = activations(np.float64)
    h = p + q
    y = ops.sum(F.relu(h) * 2.0) + ops.sum(h * h)
    y.backward()
    s = a.array * 1.5 + b.array * 0.5
    np.testing.assert_allclose(a.grad, 1.5 * (2.0 * (s > 0) + 2 * s), rtol=1e-14)


def test_two_relus_of_one_sum():
    a, b, p, q = activations()
    h, expected_y = p + q, expected(a, b)[1]
    y, z = F.relu(h), F.relu(h)
    np.testing.assert_array_equal(y.array, expected_y)
    np.testing.assert_array_equal(z.array, expected_y)
    total = y + z
    total.grad = gy = weights()
    total.backward()
    assert_gradients(a, b, gy + gy, expected(a, b)[0])


def test_backward_computes_what_is_pending():
    _, _, p, q = activations()
    h = p + q
    ops.sum(p).backward()
    assert h._array._finisher is None, "whoever changes arrays after backward must not change the sum"


def test_gradient_with_respect_to_the_intermediate():
    _, _, p, q = activations()
    h = p + q
    y = F.relu(h)
    gy = weights()
    gh, gp = dbrdist.grad([y], [h, p], [Variable(gy)])
    expected_gh = np.where(h.array > 0, gy, 0)
    np.testing.assert_array_equal(gh.array, expected_gh)
    np.testing.assert_array_equal(gp.array, expected_gh)
    y.grad = gy
    y.backward(retain_grad=True)
    np.testing.assert_array_equal(h.grad, expected_gh)


def test_second_order_through_the_fused_pass():
    a, b, p, q = activations(np.float64)
    y = F.relu(p + q)
    (ga,) = dbrdist.grad([ops.sum(y * y)], [a], enable_double_backprop=True)
    (gga,) = dbrdist.grad([ops.sum(ga)], [a])
    s = a.array * 1.5 + b.array * 0.5
    np.testing.assert_allclose(ga.array, 1.5 * 2 * np.maximum(s, 0), rtol=1e-14)
    np.testing.assert_allclose(gga.array, np.where(s > 0, 1.5 * 2 * 1.5, 0.0), rtol=1e-14)


class Shift(dbrdist.FunctionNode):
    """y = x + w with a last pass that reads the parameter late, as batch normalization does"""

    def forward(self, xs):
        self.xs = xs
        return (Pending(self, xs[0].shape, xs[0].dtype, fuses_gradient=False),)

    def finish(self, add_relu):
        y = self.xs[0] + self.xs[1]
        return y if add_relu is None else np.maximum(y, 0)

    def derive(self, wanted, gys, out):
        return tuple(gys[0] if i == 0 else ops.sum_to(gys[0], (1,)) for i in wanted)


def shift(w, x):
    return Shift().apply((x, w))[0]


@pytest.mark.parametrize("way", ["assign", "in place", "update"])
def test_a_parameter_change_comes_after_the_pending_pass(way):
    link = dbrdist.Link()
    with link.init_scope():
        link.w = Parameter(np.array([1.0]))
    optimizer = SGD(lr=1.0).setup(link)
    link.w.grad = np.array([5.0])
    flat.gather(link.params())  # where an assigned array is copied into the same memory
    y = shift(link.w, np.zeros((3,)))
    assert is_pending(y)
    if way == "assign":
        link.w.array = np.array([-4.0])
    elif way == "in place":
        link.w.array[...] = -4.0
    else:
        optimizer.update()
    assert link.w.array == [-4.0]
    np.testing.assert_array_equal(y.array, [1.0, 1.0, 1.0])


def test_dropped_unread_costs_nothing_and_holds_nothing():
    a, b, p, q = activations()
    gc.collect()
    gc.disable()
    try:
        h = p + q
        gone = [weakref.ref(h._array), weakref.ref(h.creator)]
        del h
        assert [r() for r in gone] == [None, None]
        y = F.relu(p + q)
        fusion.flush()
        np.testing.assert_array_equal(y.array, expected(a, b)[1])
    finally:
        gc.enable()


def test_a_fused_sum_lets_go_of_its_inputs():
    class Owner(np.ndarray):
        pass

    a, b = inputs()
    p = Variable(a.array.view(Owner)) * 1.0
    q = b * 1.0
    y = F.relu(p + q)
    gone = weakref.ref(p.array)
    del p, q
    assert gone() is None and y.shape == SHAPE


def test_inference_loops_do_not_collect_dead_entries():
    _, _, p, q = activations()
    with dbrdist.no_backprop_mode():
        for _ in range(1000):
            _ = F.relu(p + q)
    assert len(fusion._waiting.refs) < 300


def test_leaves_small_and_mixed_sums_do_not_wait():
    a, b, p, q = activations()
    assert not is_pending(a + b), "the user may change a leaf's array at any time"
    assert not is_pending(p[:, :, :4, :4] + q[:, :, :4, :4])
    assert not is_pending(p + ops.cast(q, np.dtype(np.float64)))
    assert not is_pending(p + q[:, :1])


def test_function_hooks_see_the_fused_relu():
    class Names(dbrdist.FunctionHook):
        name = "Names"

        def __init__(self):
            self.seen = []

        def forward_postprocess(self, function, in_data):
            self.seen.append(function.label)

    _, _, p, q = activations()
    with Names() as hook:
        F.relu(p + q)
    assert hook.seen == ["add", "ReLU"]
