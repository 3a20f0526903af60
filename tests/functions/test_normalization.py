"""Tests of dbrdist.functions.normalization."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend, sums
from tests.each import each
from tests.functions.image_helpers import check_gradients, draw
from tests.kernels.cpu.test_loops import compiled

RNG = np.random.default_rng(0)


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_axes_may_be_any_sequence():
    x = RNG.standard_normal((4, 3, 2))
    expected = F.batch_normalization(x, ones_of(3, dtype=float), ones_of(3, dtype=float), axis=(0, 2)).array
    for axis in ([0, 2], (0, 2), range(0, 3, 2)):
        y = F.batch_normalization(x, ones_of(3, dtype=float), ones_of(3, dtype=float), axis=axis)
        np.testing.assert_array_equal(y.array, expected)


@each(of=["x", "gamma", "beta"], **{"shape, axis": [((5, 3), (0,)), ((4, 3, 2), (0, 2)), ((1, 3), (0,))]})
def test_each_gradient_of_a_normalization_can_be_derived_by_itself(of, shape, axis):
    """Against central differences: what the gradients of the others would have added must not come in."""
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal(shape), "gamma": rng.uniform(0.5, 2, 3), "beta": rng.standard_normal(3)}
    values["gy"] = rng.standard_normal(shape)
    weights = rng.standard_normal(values[of].shape)

    def first(values):
        vs = {name: Variable(a) for name, a in values.items()}
        y = F.batch_normalization(vs["x"], vs["gamma"], vs["beta"], eps=1e-3, axis=axis)
        (g,) = dbrdist.grad([y], [vs[of]], [vs["gy"]], enable_double_backprop=True)
        return vs, F.sum(g * weights)

    vs, total = first(values)
    found = dict(zip(vs, dbrdist.grad([total], list(vs.values()))))
    for name, a in values.items():
        expected = np.zeros(a.shape)
        for i in np.ndindex(a.shape):
            for sign in (1, -1):
                moved = a.copy()
                moved[i] += sign * 1e-5
                expected[i] += sign * float(first({**values, name: moved})[1].array) / 2e-5
        actual = np.zeros(a.shape) if found[name] is None else found[name].array
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7, err_msg=f"{of}, {name}")


@pytest.mark.parametrize(
    ("shape", "axis"), [((4, 3, 2, 5), None), ((6, 3), None), ((5, 2, 3, 2), 0), ((3, 2, 4), (0, 2)), ((2, 3, 4), None)]
)
@pytest.mark.parametrize("fixed", [False, True])
def test_batch_normalization_gradients(shape, axis, fixed):
    kept = shape[1:] if axis == 0 else shape[1:2]
    x, gamma, beta = draw(0, *shape), draw(1, *kept), draw(2, *kept)
    if fixed:
        inputs = [x, gamma, beta, draw(3, *kept), draw(4, *kept) ** 2 + 0.5]
        check_gradients(lambda *xs: F.fixed_batch_normalization(*xs, eps=0.1, axis=axis), inputs)
    else:
        check_gradients(lambda *xs: F.batch_normalization(*xs, eps=0.1, axis=axis), [x, gamma, beta])


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(shape=[(300, 70), (8, 20, 9, 11), (2100, 33)])
def test_gradients_with_given_statistics_have_the_bits_of_numpys_formula(shape):
    """By a compiled loop, also where something is not finite; near those of float64."""
    x, gy = (
        backend.channels_last(a) if a.ndim == 4 else a
        for a in (draw(0, *shape).astype("f"), draw(1, *shape).astype("f"))
    )
    kept = shape[1:2]
    vectors = [draw(2, *kept), draw(3, *kept), draw(4, *kept), draw(5, *kept) ** 2 + 0.5]

    def step(dtype):
        operands = [Variable(a.astype(dtype)) for a in (x, *vectors)]
        y = F.fixed_batch_normalization(*operands)
        dbrdist.backward([y], [gy.astype(dtype)])
        return [v.grad for v in operands]

    rows = x.reshape(-1, shape[1]) if x.ndim == 2 else x.transpose(0, 2, 3, 1)
    ones = np.ones(kept, "f")
    sizes = rows.size // shape[1], shape[1]
    numbers = *sizes, *sums.parts_of_rows(*sizes)
    assert kernels.of_rows("fixed_normalization_backward", (rows, rows, ones, ones), *numbers) is not None
    for a, b in zip(step("f"), step("d")):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-3)
    for value in (0.0, np.nan, np.inf):
        x[3, 5], gy[7, 2] = value, -value
        ours = step("f")
        with kernels.use("onednn"):
            theirs = step("f")
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a, b)


def test_running_statistics_are_unbiased_and_an_empty_batch_moves_nothing():
    x, one = draw(0, 4, 3, 2, 2), np.ones(3)
    mean, var = np.zeros(3), np.ones(3)
    F.batch_normalization(x, one, one, running_mean=mean, running_var=var, decay=0.75)
    np.testing.assert_allclose(mean, 0.25 * x.mean((0, 2, 3)))
    np.testing.assert_allclose(var, 0.75 + 0.25 * x.var((0, 2, 3), ddof=1))
    before = mean.copy(), var.copy()
    F.batch_normalization(x[:0], one, one, running_mean=mean, running_var=var)
    np.testing.assert_array_equal((mean, var), before)


LARGE = (4, 16, 10, 10)


def normalized(read, **kwargs):
    """A net with BN, ReLU and an addition; ``read`` looks at intermediate results at some point."""
    x = Variable(draw(0, *LARGE).astype("f"))
    z = Variable(draw(1, *LARGE).astype("f"))
    gamma, beta = Variable(draw(2, 16).astype("f")), Variable(draw(3, 16).astype("f"))
    h = F.batch_normalization(x, gamma, beta, **kwargs)
    seen = [h.array.copy()] if read == "before" else []
    y = F.relu(h)
    if read in ("after", "twice"):
        seen.append(h.array.copy())
    s = h + z
    if read == "twice":
        seen.append(h.array.copy())
        seen.append(s.array.copy())
    t = F.relu(s)
    out = y * t
    out.grad = draw(4, *LARGE).astype("f")
    out.backward()
    return [out.array, x.grad, z.grad, gamma.grad, beta.grad], seen


@pytest.mark.parametrize("read", ["never", "after", "twice"])
def test_reading_intermediate_results_changes_nothing(read):
    expected, before = normalized("before")
    values, seen = normalized(read)
    for actual, wanted in zip(values, expected):
        np.testing.assert_allclose(actual, wanted, atol=2e-5 * np.abs(wanted).max())
    for a in seen[:2]:
        np.testing.assert_array_equal(a, before[0])


def test_relu_after_batch_normalization_is_one_kernel(monkeypatch):
    """Once a ReLU has taken the output of a gamma, the next one finds its result there."""
    from dbrdist import kernels

    x, gamma = Variable(draw(0, *LARGE).astype("f")), Variable(np.ones(16, "f"))
    F.relu(F.batch_normalization(x * 1.0, gamma, gamma))
    calls = []
    forward, backward = kernels.bn_forward, kernels.bn_backward
    monkeypatch.setattr(kernels, "bn_forward", lambda *a: calls.append(("forward", a[4])) or forward(*a))
    monkeypatch.setattr(kernels, "bn_backward", lambda *a: calls.append(("backward", a[7])) or backward(*a))
    monkeypatch.setattr("dbrdist.functions.rectifier.relu_forward", None)
    monkeypatch.setattr("dbrdist.functions.rectifier.relu_backward", None)
    y = F.relu(F.batch_normalization(x * 1.0, gamma, gamma))
    y.grad = y.array
    y.backward()
    assert calls == [("forward", True), ("backward", True)]
    assert x.grad is not None


def test_relu_after_fixed_batch_normalization_is_one_kernel(monkeypatch):
    x, one, gamma = draw(0, *LARGE).astype("f"), np.ones(16, "f"), Variable(np.ones(16, "f"))

    def net():
        return F.relu(F.fixed_batch_normalization(Variable(x) * 1.0, gamma, 0 * one, 0 * one, one, eps=0.0))

    with dbrdist.no_backprop_mode():
        net()
        monkeypatch.setattr("dbrdist.functions.rectifier.relu_forward", None)
        y = net()
    np.testing.assert_allclose(y.array, np.maximum(x, 0), atol=1e-6)


@pytest.mark.slow
def test_second_derivatives_of_batch_normalization_make_no_cycle():
    """The graph dies by reference count, compiled as well: closures would keep it."""
    gc.collect()
    gc.disable()
    try:
        x, gamma, beta = Variable(draw(0, 4, 3, 5, 5)), Variable(draw(1, 3)), Variable(draw(2, 3))
        for function in (
            lambda: F.batch_normalization(x, gamma, beta),
            lambda: F.fixed_batch_normalization(x, gamma, beta, np.zeros(3), np.ones(3)),
        ):
            y = function()
            (gx,) = dbrdist.grad([F.sum(y * y * y)], [x], enable_double_backprop=True)
            (ggx,) = dbrdist.grad([F.sum(gx * gx)], [x], enable_double_backprop=True)
            F.sum(ggx * ggx).backward()
            nodes = [weakref.ref(v.creator) for v in (y, gx, ggx)]
            del y, gx, ggx
            assert [n() for n in nodes] == [None] * 3
    finally:
        gc.enable()


class Meeting:
    """Adds up vectors over threads, all of which bring one."""

    def __init__(self, size):
        self.vectors, self.barrier = [None] * size, threading.Barrier(size)

    def share(self, rank):
        def add(a):
            assert a.dtype == np.float64
            self.vectors[rank] = a
            self.barrier.wait(10)
            total = sum(self.vectors)
            self.barrier.wait(10)
            return total

        return add


@pytest.mark.parametrize("shape", [(7, 3, 4, 5), (9, 4)])
@pytest.mark.parametrize("dtype", ["f", "d"])
def test_parts_of_a_batch_are_normalized_together(shape, dtype):
    """Three parts of 2, 4 and the rest, with a large mean, against the whole batch in float64."""
    from dbrdist.functions.normalization import SharedBatchNormalization

    x, gy, gamma, beta = draw(0, *shape) + 50, draw(1, *shape), draw(2, shape[1]), draw(3, shape[1])
    whole = Variable(x), Variable(gamma), Variable(beta)
    y = F.batch_normalization(*whole, eps=1e-3)
    y.grad = gy
    y.backward()
    cuts, meeting, axis = [slice(0, 2), slice(2, 6), slice(6, None)], Meeting(3), (0, *range(2, len(shape)))

    def work(rank):
        part = [Variable(a.astype(dtype)) for a in (x[cuts[rank]], gamma, beta)]
        z = F.relu(SharedBatchNormalization(1e-3, axis, meeting.share(rank)).apply(tuple(part))[0])
        h = SharedBatchNormalization(1e-3, axis, meeting.share(rank)).apply(tuple(part))[0]
        h.grad = gy[cuts[rank]].astype(dtype)
        h.backward()
        return [h.array, part[0].grad, part[1].grad, part[2].grad, z.array]

    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(work, range(3)))
    ys, gxs, ggammas, gbetas, zs = zip(*parts)
    tolerance = 1e-9 if dtype == "d" else 2e-3
    np.testing.assert_allclose(np.concatenate(ys), y.array, atol=tolerance)
    np.testing.assert_allclose(np.concatenate(zs), np.maximum(y.array, 0), atol=tolerance)
    np.testing.assert_allclose(np.concatenate(gxs), whole[0].grad, atol=tolerance)
    np.testing.assert_allclose(sum(ggammas), whole[1].grad, atol=tolerance * 10)
    np.testing.assert_allclose(sum(gbetas), whole[2].grad, atol=tolerance * 10)


def test_second_derivatives_over_parts_are_refused():
    from dbrdist.functions.normalization import SharedBatchNormalization

    x, one = Variable(draw(0, 4, 3)), Variable(np.ones(3))
    y = SharedBatchNormalization(1e-3, (0,), lambda a: a).apply((x, one, one))[0]
    (gx,) = dbrdist.grad([F.sum(y * y)], [x], enable_double_backprop=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        F.sum(gx * gx).backward()


X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def test_corrections_are_constants_for_gradients():
    x, gamma, beta = Variable(X.astype("d")), Variable(np.arange(1.0, 5)), Variable(np.zeros(4))
    mean, var = np.full(4, 0.2), np.full(4, 1.5)
    gy = np.random.default_rng(1).standard_normal(X.shape)
    y = F.batch_renormalization(x, gamma, beta, 9, 9, 1e-3, mean, var)
    y.grad = gy
    y.backward()
    deviation = np.sqrt(1.5 + 1e-3)
    r = np.sqrt(X.astype("d").var((0, 2, 3)) + 1e-3) / deviation
    d = (X.astype("d").mean((0, 2, 3)) - 0.2) / deviation
    plain = Variable(X.astype("d"))
    scale, shift = Variable(gamma.array * r), Variable(gamma.array * d)
    z = F.batch_normalization(plain, scale, shift, eps=1e-3)
    z.grad = gy
    z.backward()
    np.testing.assert_allclose(y.array, z.array, rtol=1e-10)
    np.testing.assert_allclose(x.grad, plain.grad, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(gamma.grad, scale.grad * r + shift.grad * d, rtol=1e-8)
    np.testing.assert_allclose(beta.grad, shift.grad, rtol=1e-10)


@each(offset=[0, 3e3, 3e5], provider=[None, "numpy", "columns"])
def test_a_normalization_of_a_millionth_is_that_of_one(offset, provider):
    """Powers of two are exact: no number in the computation may stand for a size of its input, but eps."""
    rng, scale = np.random.default_rng(0), 2.0**-20
    functions = {
        "batch": lambda x, eps: F.batch_normalization(x, np.ones(8, "f"), np.zeros(8, "f"), eps=eps),
        "group": lambda x, eps: F.group_normalization(x, 4, np.ones(8, "f"), np.zeros(8, "f"), eps=eps),
        "layer": lambda x, eps: F.layer_normalization(
            F.reshape(x, (-1, 144)), np.ones(144, "f"), np.zeros(144, "f"), eps
        ),
    }
    for name, function in functions.items():
        x, gy = (rng.standard_normal((8, 8, 12, 12)).astype("f") for _ in range(2))
        found = []
        for factor in (1.0, scale):
            v = dbrdist.Variable((x + np.float32(offset)) * np.float32(factor))
            with kernels.use(*[provider] * (provider is not None)):
                y = function(v, 1e-5 * factor**2)
                y.grad = gy.reshape(y.shape)
                y.backward()
            found.append((y.array, v.grad * np.float32(factor)))
        for one, small in zip(*found):
            np.testing.assert_allclose(small, one, rtol=1e-6, atol=1e-6, err_msg=name)
