"""Batch normalization and pooling by own kernels against NumPy's in float64, over shapes, types and layouts."""

from __future__ import annotations

import numpy as np
import pytest
from support import images, put

import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.functions.residual import batch_normalization_add_relu
from dbrdist.kernels import PoolGeometry
from dbrdist.kernels.reference import numpy_, numpy_normalization

TYPES = ["float32", "float16", "bfloat16"]
SPATIAL = (0, 2, 3)
# Of images and matrices: channels that are packed and that are not, few and many rows, one column of blocks and more.
SHAPES = [
    (2, 8, 5, 7), (3, 3, 4, 5), (1, 1, 1, 3), (4, 64, 30, 30), (2, 260, 3, 3), (2, 2048, 2, 2), (5, 6), (300, 64),
    (2, 24, 3, 5), (3, 12, 2, 2), (7, 264), (1, 40, 1, 1),
]  # fmt: skip
EPS = 2e-5


@pytest.fixture(autouse=True)
def own_kernels(on):
    if on not in ("cupy", "host-cuda"):
        pytest.skip("the kernels work on CuPy's arrays alone")
    with kernels.use("cuda"):
        yield


def axis_of(shape):
    return SPATIAL if len(shape) == 4 else (0,)


def draw(rng, shape, dtype):
    a = rng.standard_normal(shape).astype(backend.as_dtype(dtype))
    return backend.copy(a) if a.ndim == 4 else a


def roundings(dtype, of_float32=64):
    """The tolerance for results of a type that are summed in float32."""
    return {"float32": of_float32 * 2.0**-23, "float16": 2.0**-9, "bfloat16": 2.0**-6}[dtype]


def assert_near(a, exact, tolerance):
    a = backend.to_cpu(a).astype(np.float64)
    assert a.shape == exact.shape
    assert np.abs(a - exact).max() <= tolerance * max(1.0, np.abs(exact).max())


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_normalization(shape, dtype, relu, device, rng):
    axis, tolerance = axis_of(shape), roundings(dtype)
    x, gy = draw(rng, shape, dtype), draw(rng, shape, dtype)
    x = (x + np.asarray(3, x.dtype)).astype(x.dtype) if x.ndim == 2 else backend.copy(x + x.dtype.type(3))
    gamma, beta = (rng.standard_normal(shape[1]).astype(np.float32) for _ in range(2))
    wide = [a.astype(np.float64) for a in (x, gamma, beta)]
    y, mean, var, saved = numpy_normalization.bn_forward(*wide, EPS, axis, relu)
    on_device = put(device, x, gamma, beta, gy)
    xd, gammad, betad, gyd = on_device
    assert kernels.provider_of("bn_forward", xd, gammad, betad, EPS, axis, relu) == "cuda"
    yd, meand, vard, savedd = kernels.bn_forward(xd, gammad, betad, EPS, relu, axis)
    if relu:
        for a, e in zip(kernels.bn_vectors(savedd, gammad, betad, meand, vard)(), (gammad, betad, meand, vard)):
            np.testing.assert_array_equal(backend.to_cpu(a), backend.to_cpu(e))
    assert yd.dtype == x.dtype and meand.dtype == np.float32
    assert_near(yd, y, tolerance)
    assert_near(meand, mean, 1e-6)
    assert_near(vard, var, 1e-5)
    assert_near(kernels.bn_statistics(xd, axis)[1], var, 1e-5)
    assert_near(kernels.bn_inference(xd, gammad, betad, meand, vard, EPS, relu, axis), y, tolerance)
    # Where the rectified output is close to 0 the two sides may disagree about the mask.
    apart = np.logical_or(not relu, np.abs(numpy_normalization.bn_forward(*wide, EPS, axis, False)[0]) > 1e-3)
    gy *= apart.astype(gy.dtype)
    gyd = put(device, gy)
    exact = numpy_normalization.bn_backward(wide[0], wide[1], mean, var, gy.astype(np.float64), EPS, saved, axis, relu)
    found = kernels.bn_backward(xd, gammad, meand, vard, gyd, EPS, savedd, relu, axis)
    assert_near(found[0], exact[0], 4 * tolerance)
    for a, e in zip(found[1:], exact[1:]):
        assert a.dtype == np.float32
        assert_near(a, e, 1e-5 * np.sqrt(x.size / shape[1]))
    out = device.xp.zeros(2 * shape[1], np.float32)
    again = kernels.bn_backward(
        xd, gammad, meand, vard, gyd, EPS, savedd, relu, axis, out[: shape[1]], out[shape[1] :]
    )  # fmt: skip
    np.testing.assert_array_equal(backend.to_cpu(out), np.concatenate([backend.to_cpu(a) for a in found[1:]]))
    np.testing.assert_array_equal(backend.to_cpu(again[0]), backend.to_cpu(found[0]))
    if not relu:
        for a, e in zip(kernels.bn_sums(xd, meand, vard, gyd, EPS, axis), exact[1:]):
            assert_near(a, e, 1e-5 * np.sqrt(x.size / shape[1]))


@pytest.mark.parametrize("num_gradients", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_end_of_a_residual_block(shape, dtype, num_gradients, device, rng):
    axis, tolerance = axis_of(shape), roundings(dtype)
    x, added, *gys = (draw(rng, shape, dtype) for _ in range(2 + num_gradients))
    gamma, beta, *running = (rng.standard_normal(shape[1]).astype(np.float32) for _ in range(4))
    wide = [a.astype(np.float64) for a in (x, gamma, beta)]
    normalized, mean, var, saved = numpy_normalization.bn_forward(*wide, EPS, axis, False)
    xd, gammad, betad, addedd, *rest = put(device, x, gamma, beta, added, *gys, *running)
    gysd, runningd = tuple(rest[:-2]), tuple(rest[-2:])
    yd, meand, vard, savedd = kernels.bn_add_relu(
        xd, gammad, betad, addedd, EPS, axis, runningd, 0.75, (0.25, 0.5)
    )  # fmt: skip
    assert savedd[0] == "cuda"
    assert_near(yd, np.maximum(normalized + added.astype(np.float64), 0), tolerance)
    for found, old, new in zip(runningd, running, (0.25 * mean, 0.5 * var)):
        assert_near(found, 0.75 * old + new, 1e-5)
    # Which elements passed is said by the output; of the gradients what is summed is their sum in their own type.
    passed = backend.to_cpu(yd) != 0
    g = passed * (gys[0] + gys[1] if num_gradients == 2 else gys[0]).astype(np.float64)
    exact = numpy_normalization.bn_backward(wide[0], wide[1], mean, var, g, EPS, saved, axis, False)
    for is_ours in (False, True):
        found = kernels.bn_backward_of_sum(
            xd, gammad, meand, vard, yd, gysd, EPS, axis, None, None, is_ours
        )  # fmt: skip
        assert_near(found[0], exact[0], 4 * tolerance)
        for a, e in zip(found[1:3], exact[1:]):
            assert_near(a, e, 1e-5 * np.sqrt(x.size / shape[1]))
        np.testing.assert_array_equal(backend.to_cpu(found[3]).astype(np.float64), g)
        changed = [not np.array_equal(backend.to_cpu(a), b) for a, b in zip(gysd, gys)]
        assert not any(changed[:-1]) and (is_ours or not changed[-1])


def test_the_end_of_a_residual_block_on_the_tape(device, rng, on):
    """The same as the three functions: outputs bit for bit, statistics, gradients of all orders that meet here."""
    values = [images(rng, (4, 8, 6, 6)), images(rng, (4, 8, 6, 6)), *(rng.standard_normal((2, 8)).astype("f"))]

    def run(of_parts):
        x, r, gamma, beta = (Variable(put(device, backend.copy(v))) for v in values)
        running = put(device, np.zeros(8, "f"), np.ones(8, "f"))
        options = {"running_mean": running[0], "running_var": running[1], "eps": EPS}
        if of_parts:
            y = F.relu(F.batch_normalization(x, gamma, beta, **options) + r)
        else:
            y = batch_normalization_add_relu(x, gamma, beta, r, **options)
        loss = F.sum(y * y) + F.sum(F.relu(y - 1))
        loss.backward()
        first = [backend.to_cpu(v.grad) for v in (x, r, gamma, beta)]
        return backend.to_cpu(y.array), [backend.to_cpu(a) for a in running], first

    for found, expected in zip(run(False), run(True)):
        for a, b in zip(*((v,) if isinstance(v, np.ndarray) else v for v in (found, expected))):
            np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_variance_far_from_zero(device, rng):
    """The mean of squares would leave nothing of a variance of 1e-4 beside a mean of 1000."""
    x = (1000 + 0.01 * rng.standard_normal((8, 4, 16, 16))).astype(np.float32)
    mean, var = kernels.bn_statistics(put(device, x))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(backend.to_cpu(mean), wide.mean(SPATIAL), 1e-6)
    np.testing.assert_allclose(backend.to_cpu(var), wide.var(SPATIAL), 1e-3)


def test_what_is_not_finite(device, rng):
    x = images(rng, (4, 4, 6, 6))
    x[0, 0, 0, 0], x[3, 1, 5, 5], x[2, 2, 3, 3] = np.nan, np.inf, -np.inf
    gamma = np.ones(4, np.float32)
    with np.errstate(invalid="ignore"):
        expected = numpy_normalization.bn_forward(x, gamma, gamma, EPS, SPATIAL, True)[:3]
    found = kernels.bn_forward(*put(device, x, gamma, gamma), EPS, True)[:3]
    for a, e in zip(found, expected):
        np.testing.assert_allclose(backend.to_cpu(a), e, 1e-5, 1e-5)


def test_the_same_sums_each_time(device, rng, on):
    x, gy = put(device, images(rng, (16, 64, 28, 28)), images(rng, (16, 64, 28, 28)))
    ones = put(device, np.ones(64, np.float32))
    first = None
    for _ in range(10 if on == "cupy" else 2):  # on the host nothing runs at the same time
        _, mean, var, saved = kernels.bn_forward(x, ones, ones, EPS, True)
        grads = kernels.bn_backward(x, ones, mean, var, gy, EPS, saved, True)
        values = [backend.to_cpu(a) for a in (mean, var, *grads)]
        first = first or values
        for a, b in zip(values, first):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["NCHW", "sliced", "misaligned"])
def test_layouts(layout, device, rng, xp):
    shape = (2, 8, 6, 5)
    x, gy = images(rng, shape, "float16"), images(rng, shape, "float16")
    gamma, beta = (rng.standard_normal(8).astype(np.float32) for _ in range(2))

    def moved(a):
        a = put(device, a)
        n, c, h, w = a.shape
        if layout == "NCHW":
            return xp.ascontiguousarray(a)
        if layout == "sliced":
            view = xp.zeros((n + 1, h + 3, w + 1, c + 2), a.dtype)[1:, 2:-1, :-1, 1:-1].transpose(0, 3, 1, 2)
        else:
            view = xp.zeros(a.size + 1, a.dtype)[1:].reshape(n, h, w, c).transpose(0, 3, 1, 2)
        view[...] = a
        return view

    wide = [a.astype(np.float64) for a in (x, gamma, beta)]
    y, mean, var, saved = numpy_normalization.bn_forward(*wide, EPS, SPATIAL, False)
    yd, meand, vard, savedd = kernels.bn_forward(moved(x), *put(device, gamma, beta), EPS)
    assert_near(yd, y, 2.0**-9)
    assert backend.is_channels_last(yd)
    gx = numpy_normalization.bn_backward(wide[0], wide[1], mean, var, gy.astype("d"), EPS, saved, SPATIAL, False)[0]
    assert_near(kernels.bn_backward(moved(x), put(device, gamma), meand, vard, moved(gy), EPS, savedd)[0], gx, 2.0**-8)
    pool = PoolGeometry("max", 3, 3, 2, 2, 1, 1)
    yp, places = numpy_.pool_forward(x.astype("d"), pool)
    ypd, placesd = kernels.pool_forward(moved(x), pool)
    assert_near(ypd, yp, 0)
    gp = images(rng, yp.shape, "float16")
    gxp = numpy_.pool_backward(gp.astype("d"), shape, places, pool)
    assert_near(kernels.pool_backward(moved(gp), shape, placesd, pool), gxp, 2.0**-9)


@pytest.mark.parametrize("dtype", TYPES)
def test_running_statistics(dtype, device, rng):
    running = [rng.random(300).astype(backend.as_dtype(dtype)) for _ in range(2)]
    batch = [rng.random(300).astype(np.float32) for _ in range(2)]
    there = put(device, *running)
    kernels.bn_move(*there, *put(device, *batch), 0.9, (0.1, 0.12))
    for a, r, v, weight in zip(there, running, batch, (0.1, 0.12)):
        assert_near(a, 0.9 * r.astype("d") + weight * v.astype("d"), roundings(dtype, 2))


POOLS = {
    "3x3": PoolGeometry("max", 3, 3, 2, 2, 1, 1),
    "2x2": PoolGeometry("max", 2, 2, 2, 2),
    "overlaps": PoolGeometry("max", 3, 2, 1, 1, 1, 0),
    "gaps": PoolGeometry("max", 1, 2, 3, 3),
    "cover_all": PoolGeometry("max", 3, 3, 2, 2, 0, 0, True),
    "windows in the padding": PoolGeometry("max", 1, 1, 4, 4, 0, 0, True),
    "much padding": PoolGeometry("max", 2, 2, 1, 1, 2, 2),
    "whole image": PoolGeometry("max", 7, 6, 7, 6),
    "large": PoolGeometry("max", 17, 17, 1, 1, 8, 8),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(2, 8, 7, 7), (3, 5, 2, 3), (1, 4, 33, 33), (2, 3, 1, 1)])
def test_means_of_images(shape, dtype, device, rng):
    x, gy = images(rng, shape, dtype), draw(rng, shape[:2], dtype)
    v = Variable(put(device, x))
    y = F.mean(v, (2, 3))
    y.grad = put(device, gy)
    y.backward()
    assert_near(y.array, x.astype("d").mean((2, 3)), roundings(dtype))
    exact = np.broadcast_to(gy.astype("d")[:, :, None, None] / (shape[2] * shape[3]), shape)
    assert_near(v.grad, exact, roundings(dtype))


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("name", POOLS)
def test_pooling(name, channels, dtype, kind, device, rng):
    g = POOLS[name]._replace(kind=kind)
    x = images(rng, (2, channels, 7, 6), dtype)
    x[0, 0, :3] = 1  # ties: the first counts
    y, places = numpy_.pool_forward(x.astype("d"), g)
    gy = images(rng, y.shape, dtype)
    xd, gyd = put(device, x, gy)
    assert kernels.provider_of("pool_forward", xd, g) == "cuda"
    yd, saved = kernels.pool_forward(xd, g)
    assert_near(yd, np.maximum(y, -1e9), 0 if kind == "max" else roundings(dtype, 8)) if np.isfinite(y).all() else None
    np.testing.assert_array_equal(np.isinf(backend.to_cpu(yd).astype("d")), np.isinf(y))
    if kind == "max":
        np.testing.assert_array_equal(
            backend.to_cpu(kernels.pool_indices(saved, y.shape, g)), places.transpose(0, 3, 1, 2)
        )
    gx = numpy_.pool_backward(gy.astype("d"), x.shape, places, g)
    assert_near(kernels.pool_backward(gyd, x.shape, saved, g), gx, roundings(dtype, 8))


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("shape", [(4, 3, 8, 5), (3, 4, 7, 8), (1, 6, 4, 4), (4, 8, 5, 3)])
def test_threads_read_neighbouring_channels_alone(shape, kind, device, rng):
    """Four at a time where four divide their number, whatever else it divides."""
    g = PoolGeometry(kind, 2, 3, 1, 2, 1, 1)
    x = images(rng, shape)
    y, places = numpy_.pool_forward(x.astype("d"), g)
    gy = images(rng, y.shape)
    yd, saved = kernels.pool_forward(put(device, x), g)
    assert_near(yd, y, roundings("float32", 8))
    gx = numpy_.pool_backward(gy.astype("d"), shape, places, g)
    assert_near(kernels.pool_backward(put(device, gy), shape, saved, g), gx, roundings("float32", 8))


def test_not_a_number_is_the_largest(device, rng):
    g = PoolGeometry("max", 3, 3, 2, 2, 1, 1)
    x = images(rng, (2, 4, 9, 9))
    x[0, 1, 4, 4], x[1, 2, 0, 0], x[0, 3, 8, 8] = np.nan, np.inf, -np.inf
    y, places = numpy_.pool_forward(x, g)
    yd, saved = kernels.pool_forward(put(device, x), g)
    np.testing.assert_array_equal(backend.to_cpu(yd), y)
    np.testing.assert_array_equal(backend.to_cpu(kernels.pool_indices(saved, y.shape, g)), places.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("kh", "kw", "itemsize"), [(16, 16, 1), (1, 257, 4), (257, 1, 4), (2, 3, 1)])
def test_places_in_a_window_have_the_bytes_that_they_need(kh, kw, itemsize, device, rng):
    g = PoolGeometry("max", kh, kw, 1, 1)
    x = images(rng, (1, 4, kh + 1, kw + 1))
    y, places = numpy_.pool_forward(x, g)
    yd, saved = kernels.pool_forward(put(device, x), g)
    assert saved[1].dtype.itemsize == itemsize
    np.testing.assert_array_equal(backend.to_cpu(yd), y)
    np.testing.assert_array_equal(backend.to_cpu(kernels.pool_indices(saved, y.shape, g)), places.transpose(0, 3, 1, 2))


def test_second_derivatives_of_pooling(device, rng):
    a = images(rng, (2, 4, 7, 7))

    def gradients(place, dtype):
        x = Variable(place.send(backend.copy(a.astype(dtype))))
        y = F.sum(F.max_pooling_2d(x, 3, 2) ** 3) + F.sum(F.average_pooling_2d(x, 3, 2) ** 3)
        y.backward(enable_double_backprop=True)
        gx = x.grad_var
        x.cleargrad()
        F.sum(gx**2).backward()
        return backend.to_cpu(x.grad).astype("d")

    exact = gradients(backend.get_device("@numpy"), "float64")
    np.testing.assert_allclose(gradients(device, "float32"), exact, 1e-4, 1e-4 * np.abs(exact).max())


def test_an_output_that_a_relu_takes_is_never_written(device, rng, on, monkeypatch):
    """Its memory is made, for whoever asks, and nobody does."""
    if on != "cupy":
        pytest.skip("arrays of the host have no memory of their own here")
    calls = []
    written = kernels.bn_inference
    monkeypatch.setattr(kernels, "bn_inference", lambda *a: calls.append(a) or written(*a))
    gamma, beta = (Variable(put(device, np.ones(64, np.float32))) for _ in range(2))
    for _ in range(3):
        x = Variable(put(device, images(rng, (2, 64, 16, 16))))
        y = F.relu(F.batch_normalization(F.max_pooling_2d(x, 2, 2), gamma, beta))
        F.sum(F.relu(y * 2)).backward()
    assert calls == []


def test_what_the_kernels_do_not_take(device, rng):
    """Other types, other axes and empty batches."""
    x, ones = put(device, images(rng, (2, 4, 3, 3), "float64"), np.ones(4))
    assert kernels.provider_of("bn_forward", x, ones, ones, EPS, SPATIAL, False) == "numpy"
    assert kernels.provider_of("pool_forward", x, POOLS["2x2"]) == "numpy"
    single = x.astype("f")
    assert kernels.provider_of("bn_forward", single, single[0], single[0], EPS, (0,), False) == "numpy"
    empty = single[:0]
    y, mean, *_ = kernels.bn_forward(empty, ones.astype("f"), ones.astype("f"), EPS)
    assert y.shape == (0, 4, 3, 3) and not backend.to_cpu(mean).any()
