"""Sums of images and the backward pass of a ReLU over a sum, which residual blocks consist of, and the cross entropy of
large scores, by own CUDA kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import images, put

import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.core.tape.variable import Variable
from dbrdist.kernels.table import KEYS

TYPES = ["float64", "float32", "float16", "bfloat16"]
SHAPES = [(1,), (5,), (1027,), (3, 4), (70_001,), (2, 3, 5, 7), (2, 8, 3, 3)]
LARGE = (2, 8, 128, 129)  # from 2^18 elements on a ReLU takes two gradients


@pytest.fixture
def types(on):
    """Those that the device has."""
    return TYPES[1:] if on == "host-cuda" else TYPES


@pytest.fixture
def served(on):
    """``served(kernel, *arguments)``: where own kernels run, the provider ``cuda`` must take them."""

    def check(kernel, *arguments):
        if on in ("cupy", "host-cuda"):
            assert kernels.provider_of(kernel, *arguments) == "cuda"

    return check


def draw(rng, shape, dtype, count):
    """Arrays that lie as images where they have four axes."""
    dtype = backend.as_dtype(dtype)
    if len(shape) == 4:
        return [images(rng, shape, dtype) for _ in range(count)]
    return [rng.standard_normal(shape).astype(dtype) for _ in range(count)]


def assert_same(a, expected):
    """On whichever side ``a`` lies."""
    assert (a.shape, a.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(*(v.astype(np.float64) for v in (backend.to_cpu(a), expected)))


def rounded_sum(a, b):
    """In the type of a, rounded once."""
    return (a.astype(np.float64) + b.astype(np.float64)).astype(a.dtype)


def test_sums(types, device, rng, served):
    """The layout stays; NaN and infinity are carried."""
    for dtype in types:
        for shape in SHAPES:
            a, b = draw(rng, shape, dtype, 2)
            a.reshape(-1)[0], b.reshape(-1)[-1] = np.nan, np.inf
            there = put(device, a, b)
            served("add", *there)
            y = kernels.add(*there)
            assert_same(y, rounded_sum(a, b))
            assert len(shape) < 4 or backend.is_channels_last(y)


def test_sums_of_large_numbers_overflow(device, rng):
    a = np.full(9, 60_000, np.float16)
    with np.errstate(over="ignore"):
        assert_same(kernels.add(*put(device, a, a)), np.full(9, np.inf, np.float16))


def test_gradients_of_sums(types, device, rng, served):
    """Into new memory, and over either operand; where y is 0 nothing passes, not even NaN."""
    for dtype in types:
        for shape in SHAPES:
            y, a, b = draw(rng, shape, dtype, 3)
            y = np.maximum(y, y.dtype.type(0))
            y.reshape(-1)[0], a.reshape(-1)[0], b.reshape(-1)[-1] = 0, np.nan, np.inf
            exact = np.where(y.astype(np.float64) != 0, rounded_sum(a, b), a.dtype.type(0))
            exact = exact.astype(a.dtype)
            for k in (None, 1, 2):
                there = put(device, y, a, b)
                out = None if k is None else there[k]
                served("relu_backward_of_sum", *there, out)
                with np.errstate(invalid="ignore"):  # where NumPy is the device
                    gx = kernels.relu_backward_of_sum(*there, out)
                assert out is None or gx is out
                assert_same(gx, exact)


def test_from_any_element_on(types, device, rng):
    """16 bytes at a time are read only where all arrays begin at a multiple of that."""
    for dtype in types:
        a, b = draw(rng, (103,), dtype, 2)
        there, other = put(device, a, b)
        for i, j in [(0, 0), (1, 1), (0, 1), (3, 2), (4, 8), (8, 0), (2, 2)]:
            n = 103 - max(i, j)
            p, q = a[i : i + n], b[j : j + n]
            assert_same(kernels.add(there[i : i + n], other[j : j + n]), rounded_sum(p, q))
            out = put(device, np.concatenate([a, a]))[i + j : i + j + n]
            exact = np.where(p.astype(np.float64) != 0, rounded_sum(out_of(a, i + j, n), q), p.dtype.type(0))
            gx = kernels.relu_backward_of_sum(there[i : i + n], out, other[j : j + n], out)
            assert_same(gx, exact.astype(p.dtype))


def out_of(a, first, n):
    return np.concatenate([a, a])[first : first + n]


def test_layouts_that_differ(device, rng, on):
    """Images beside arrays in C order, and memory with gaps, go another way."""
    a, b = draw(rng, (2, 3, 5, 7), "float32", 2)
    there, other = put(device, a, b)
    plain = put(device, b.copy("C").reshape(-1)).reshape(b.shape)
    assert_same(kernels.add(there, plain), a + b)
    assert_same(kernels.relu_backward_of_sum(there, other, plain), np.where(a != 0, b + b, 0))
    assert_same(kernels.add(there[:, ::2], other[:, ::2]), (a + b)[:, ::2])
    if on in ("cupy", "host-cuda"):
        assert kernels.provider_of("add", there, plain) == "numpy"
        assert kernels.provider_of("add", there[:, ::2], other[:, ::2]) == "numpy"


@pytest.mark.parametrize("dtype", TYPES)
def test_a_residual_block(dtype, types, device, rng, monkeypatch):
    """x goes two ways: its gradient is summed and masked in one pass, which no earlier value is lost by."""
    if dtype not in types:
        pytest.skip("float64 has no own kernels on the host")
    x, w = draw(rng, LARGE, dtype, 2)
    calls = count_calls(monkeypatch, "relu_backward_of_sum")
    v, factor = (Variable(a) for a in put(device, x, w))
    h = F.relu(v)
    y = h * factor + h
    y.grad = put(device, np.ones_like(w))
    y.backward()
    wide, scale = x.astype(np.float64), w.astype(np.float64)
    rectified = np.maximum(wide, 0)
    eps = float(2.0**-6 if dtype == "bfloat16" else 2.0**-9 if dtype == "float16" else 1e-6)
    assert np.abs(backend.to_cpu(y.array).astype(np.float64) - rectified * (scale + 1)).max() < 20 * eps
    assert np.abs(backend.to_cpu(v.grad).astype(np.float64) - np.where(wide > 0, scale + 1, 0)).max() < 4 * eps
    np.testing.assert_array_equal(backend.to_cpu(y.grad).astype(np.float64), 1)
    assert backend.is_channels_last(y.array) and backend.is_channels_last(v.grad)
    assert calls == [1]


def count_calls(monkeypatch, name):
    """A list with the number of calls of a kernel."""
    calls, run = [0], getattr(kernels, name)

    def counted(*arguments):
        calls[0] += 1
        return run(*arguments)

    monkeypatch.setattr(kernels, name, counted)
    return calls


def test_a_sum_goes_to_the_own_kernel(device, rng, on):
    """That of two Variables: what stands between the operator and the kernel must not keep arrays of a device away."""
    if on not in ("cupy", "host-cuda"):
        pytest.skip("elsewhere NumPy's kernel is the only one")
    a, b = put(device, *draw(rng, (2, 8, 16, 16), "float16", 2))
    before = set(kernels.table._local.plans)
    Variable(a) + Variable(b)
    assert any(key[0] == "add" for key in set(kernels.table._local.plans) - before)


def test_a_strided_shortcut(device, rng, on):
    """A 1x1 convolution that sees every other pixel adds its gradient to the other one in place."""
    if on == "host-cuda":
        pytest.skip("it has no convolutions")
    x = images(rng, LARGE)
    W = rng.standard_normal((4, 8, 1, 1)).astype(np.float32)
    v = Variable(put(device, x))
    h = F.relu(v)
    y = F.sum(F.convolution_2d(h, put(device, W), stride=2)) + F.sum(h * 2.0)
    y.backward()
    exact = np.full(LARGE, 2.0)
    exact[:, :, ::2, ::2] += W.astype(np.float64).sum(0)
    exact[x <= 0] = 0
    np.testing.assert_allclose(backend.to_cpu(v.grad), exact, 1e-5, 1e-4)


def test_places(device, rng, on):
    """One key where all operands lie on this thread's device, others where one does not."""
    if on in ("numpy", "host-cuda"):
        pytest.skip("arrays are NumPy's")
    a, b = put(device, *draw(rng, (4, 3), "float32", 2))
    host = np.zeros((4, 3), np.float32)
    assert backend.places_of(a, None, b) == backend.places_of(b, a)
    assert backend.places_of(a, host) == ((0, 0), None) != backend.places_of(a, b)
    assert backend.places_of(host, a) == (None, (0, 0))
    for name, operands in (("add", (a,)), ("relu_backward_of_sum", (a, a))):
        assert KEYS[name](*operands, b) != KEYS[name](*operands, host)


@pytest.mark.parametrize("shape", [(5, 3), (3, 40), (300, 67)])
def test_cross_entropy_of_large_scores(shape, types, device, rng, served):
    """Of ln sum exp in one number, float32 would lose more than the loss is."""
    for dtype, offset in zip(types[-3:], (1e6, 1000, 1000)):
        x = (rng.standard_normal(shape) * 8 + offset).astype(backend.as_dtype(dtype))
        x[1, 0] = -np.inf
        t = rng.integers(1, shape[1], shape[0]).astype(np.int64)
        t[0] = -1
        there, labels, gy = put(device, x, t, np.ones((), x.dtype))
        y, saved = kernels.cross_entropy(there, labels, -1, 0)
        gx = kernels.cross_entropy_backward(there, labels, saved, gy, -1)
        served("cross_entropy", there, labels, -1, 0)
        e = np.exp(x.astype("d") - x.astype("d").max(1, keepdims=True))
        p, at = e / e.sum(1, keepdims=True), (np.arange(1, len(t)), t[1:])
        loss = -np.log(p[at]).mean()
        p[at] -= 1
        p[0] = 0
        rtol = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 4e-6)
        assert float(backend.to_cpu(y)) == pytest.approx(loss, rel=rtol)
        exact = p / (len(t) - 1)
        np.testing.assert_allclose(backend.to_cpu(gx).astype("d"), exact, rtol=rtol, atol=1e-7)


def test_an_infinite_score_leaves_the_others_a_probability_of_zero(device, served):
    x = np.array([[np.inf, 1000, -5], [3, 2, 1]], np.float32)
    there, labels, gy = put(device, x, np.array([1, 0]), np.ones((), np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        y, saved = kernels.cross_entropy(there, labels, -1, 1)
        gx = backend.to_cpu(kernels.cross_entropy_backward(there, labels, saved, gy, -1))
    assert float(backend.to_cpu(y)) == np.inf
    np.testing.assert_array_equal(gx[0], [np.nan, -1, 0])
