"""Products, sums, cross entropy and updates by own kernels, compiled for the host, against formulas in float64.

What the device computes is looked at in ``test_gpu_kernels.py``; here are the plans as well: what they take, where they
write, and what they leave to others (``--on host-cuda``).
"""

from __future__ import annotations

import numpy as np
import pytest
from support import eps_of, put

from dbrdist.core.array import backend
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_ops, cuda_products

TYPES = ["float32", "float16", "bfloat16"]
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def on_the_host(on):
    if on != "host-cuda":
        pytest.skip("runs with --on host-cuda")


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(backend.as_dtype(dtype))


def assert_near(a, exact, num_eps=4):
    """Within so many roundings of its type, of the largest value."""
    assert a.shape == np.shape(exact)
    tolerance = num_eps * eps_of(a.dtype) * max(1.0, np.abs(exact).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(a).astype("d"), exact, rtol=0, atol=tolerance)


def refuses(planner, *arguments):
    with pytest.raises(Unsupported):
        planner(*arguments)


def turned(a):
    """The same values, from the last to the first in memory."""
    return a[::-1].copy()[::-1]


# ---- elementwise


@pytest.mark.parametrize("dtype", TYPES)
def test_new_memory_lies_as_the_first_operand(dtype, device, rng):
    for shape in [(300,), (7, 9), (2, 3, 4, 5)]:
        a, b = draw(rng, shape, dtype), draw(rng, shape, dtype)
        there = put(device, a, b)
        y = cuda_ops.ROWS["add"](*there)(*there)
        assert_near(y, a.astype("d") + b.astype("d"), 1)
        assert y.strides == there[0].strides and y.dtype == a.dtype
    flat, other = put(device, draw(rng, (4, 6), dtype), draw(rng, (6, 4), dtype))
    wide = flat.astype("d" if dtype == "float32" else "f")
    assert wide.shape == flat.shape
    for pair in ((flat, other), (flat, other.T), (flat, wide), (flat[:, ::2], flat[:, ::2]), (flat.T, flat.T)):
        refuses(cuda_ops.ROWS["add"], *pair)
    refuses(cuda_ops.ROWS["add"], flat, np.ones((4, 6), flat.dtype))
    images = device.xp.empty((2, 4, 3, 5), F32).transpose(0, 2, 3, 1)  # neither in C order nor as images
    refuses(cuda_ops.ROWS["relu_forward"], images)


def test_a_masked_sum_may_be_written_over_an_operand(device, rng):
    y, a, b = (draw(rng, 1000, "float32") for _ in range(3))
    y[::3] = 0
    exact = np.where(y != 0, a.astype("d") + b, 0)
    there = put(device, y, a, b)
    plan = cuda_ops.relu_backward_of_sum(*there)
    assert_near(plan(*there), exact, 1)
    assert plan(*there, there[2]) is there[2]
    assert_near(there[2], exact, 1)
    np.testing.assert_array_equal(there[1], a)


# ---- linear


@pytest.mark.parametrize("dtype", TYPES)
def test_linear_in_its_type_with_biases_of_others(dtype, device, rng):
    x, W = draw(rng, (5, 40), dtype), draw(rng, (70, 40), dtype)
    exact = x.astype("d") @ W.astype("d").T
    xd, Wd = put(device, x, W)
    plan = cuda_products.linear(xd, Wd, None)
    y = plan(xd, Wd, None)
    assert y.dtype == x.dtype
    assert_near(y, exact, 8)
    for kind in TYPES:  # one plan for all of them
        b = draw(rng, 70, kind)
        there = put(device, np.repeat(b, 2))
        for bias in (there[::2], there[::2].copy()):
            assert_near(plan(xd, Wd, bias), exact + b.astype("d"), 8)


def test_weights_are_narrowed_to_16_bits_alone(device, rng):
    x, W, b = draw(rng, (6, 9), "float32"), draw(rng, (4, 9), "float32"), draw(rng, 4, "float32")
    for dtype in ("float16", "bfloat16"):
        narrow = x.astype(backend.as_dtype(dtype))
        there = put(device, narrow, W, b)
        y = cuda_products.linear(*there)(*there)
        assert y.dtype == narrow.dtype
        assert_near(y, narrow.astype("d") @ W.astype(narrow.dtype).astype("d").T + b, 8)
    xd, Wd, half, bf16 = put(device, x, W, x.astype("e"), x.astype(backend.as_dtype("bfloat16")))
    refuses(cuda_products.linear, xd, Wd.astype("d"), None)
    refuses(cuda_products.linear, xd, Wd.astype("e"), None)
    refuses(cuda_products.linear, half, Wd.astype("d"), None)
    refuses(cuda_products.linear, half, Wd.astype(bf16.dtype), None)
    for operands in ((x, Wd, None), (xd, W, None), (xd, Wd, b)):  # in host memory
        refuses(cuda_products.linear, *operands)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_of_one_type_go_where_they_are_wanted(dtype, device, rng):
    a, b = draw(rng, (5, 7), dtype), draw(rng, (7, 3), dtype)
    there = put(device, a, b)
    exact = a.astype("d") @ b.astype("d")
    plan = cuda_products.matmul(*there)
    assert_near(plan(*there), exact, 8)
    room = device.xp.empty((5, 3), there[0].dtype)
    assert cuda_products.matmul(*there, room)(*there, room) is room
    assert_near(room, exact, 8)
    if dtype == "float32":
        refuses(cuda_products.matmul, *there, room.astype("e"))
        refuses(cuda_products.matmul, *there, device.xp.empty((3, 5), room.dtype).T)
    refuses(cuda_products.matmul, there[0], there[1].astype("d"))
    refuses(cuda_products.matmul, *there, np.empty((5, 3), room.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_is_narrowed_beside_16_bits(dtype, device, rng):
    a, b = draw(rng, (5, 7), dtype), draw(rng, (7, 3), "float32")
    narrow, wide, same = put(device, a, b, b.astype(a.dtype))
    exact = a.astype("d") @ b.astype(a.dtype).astype("d")
    y = cuda_products.matmul(narrow, wide)(narrow, wide)
    assert y.dtype == a.dtype
    assert_near(y, exact, 8)
    z = cuda_products.matmul(wide.T, narrow.T)(wide.T, narrow.T)
    assert z.dtype == F32 and np.abs(np.asarray(z).T - exact).max() <= 8 * eps_of(a.dtype) * np.abs(exact).max()
    for room in (device.xp.empty((5, 3), F32), device.xp.empty((3, 5), F32).T):
        assert cuda_products.matmul(narrow, same, room)(narrow, same, room) is room
        assert np.abs(np.asarray(room) - exact).max() <= 8 * eps_of(a.dtype) * np.abs(exact).max()


@pytest.mark.parametrize("dtype", TYPES)
def test_sums_of_columns(dtype, device, rng):
    for rows, columns in [(1, 1), (3, 70), (33, 32), (1000, 3), (4096, 33)]:
        x = draw(rng, (rows, columns), dtype)
        there, exact = put(device, x), x.astype("d").sum(0)
        for kind in TYPES:
            kind = backend.as_dtype(kind)
            plan = cuda_ops.column_sums(there, kind)
            made = plan(there, kind, None)
            assert made.dtype == kind
            assert_near(made, exact, 32 if kind == F32 else 1)
            room = device.xp.empty(columns, kind)
            assert cuda_ops.column_sums(there, kind, room)(there, kind, room) is room
            np.testing.assert_array_equal(room, made)
    x, room = put(device, draw(rng, (4097, 4), dtype)), device.xp.empty(4, F32)
    refuses(cuda_ops.column_sums, x, F32)
    few = x[:4]
    cuda_ops.column_sums(few, F32, room)
    refuses(cuda_ops.column_sums, few.T, F32)
    refuses(cuda_ops.column_sums, few, np.dtype("i4"))
    refuses(cuda_ops.column_sums, few, F32, room.astype("e"))
    refuses(cuda_ops.column_sums, few, F32, device.xp.empty(8, F32)[::2])
    refuses(cuda_ops.column_sums, few, F32, np.empty(4, F32))


# ---- cross entropy


def mean_and_gradient(x, t, ignored, divisor, factor):
    """By definition."""
    x = x.astype("d")
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    counts = t != ignored
    rows, over = np.arange(len(t))[counts], divisor or max(counts.sum(), 1)
    gx = np.where(counts[:, None], p, 0)
    gx[rows, t[counts]] -= 1
    return -np.log(p[rows, t[counts]]).sum() / over, gx * factor / over


# Of one block, with fewer rows than it has warps and with more, and of several; and what the mean is over.
SCORES = [((1, 1), 0), ((8, 33), 17), ((100, 3), 0), ((33, 1000), 0), ((16, 2050), 40)]
KINDS = [("float32", "int32"), ("float32", "int64"), ("float16", "int64"), ("bfloat16", "int32")]


@pytest.mark.parametrize(("dtype", "labels"), KINDS)
def test_cross_entropy(dtype, labels, device, rng):
    for shape, divisor in SCORES:
        x, t = draw(rng, shape, dtype) * backend.as_dtype(dtype).type(3), rng.integers(0, shape[1], shape[0])
        t = t.astype(labels)
        t[::5] = ignored = -7
        there = put(device, x, t)
        exact, gradient = mean_and_gradient(x, t, ignored, divisor, 0.5)
        y, saved = cuda_ops.cross_entropy(*there, ignored, divisor)(*there, ignored, divisor)
        assert y.dtype == x.dtype and y.shape == ()
        assert_near(y, exact, 16)
        gy = put(device, np.asarray(0.5, x.dtype))
        gx = cuda_ops.cross_entropy_backward(*there, saved, gy, ignored)(*there, saved, gy, ignored)
        assert gx.dtype == x.dtype
        assert_near(gx, gradient, 4)


def test_labels_and_scores_that_other_kernels_take(device, rng):
    x, t, gy = put(device, draw(rng, (6, 4), "float32"), np.zeros(6, "i4"), np.ones((), "f"))
    saved = cuda_ops.cross_entropy(x, t, -1, 0)(x, t, -1, 0)[1]
    cuda_ops.cross_entropy_backward(x, t, saved, gy, -1)
    more = put(device, np.zeros(12, "i4"))[::2]
    for scores, labels in (
        (x, t.astype("i2")), (x, more), (put(device, draw(rng, (4, 6), "float32")).T, t), (x, np.zeros(6, "i4")),
        (np.ones((6, 4), "f"), t),
    ):  # fmt: skip
        refuses(cuda_ops.cross_entropy, scores, labels, -1, 0)
        refuses(cuda_ops.cross_entropy_backward, scores, labels, saved, gy, -1)
    refuses(cuda_ops.cross_entropy_backward, x, t, saved, gy.astype("e"), -1)
    refuses(cuda_ops.cross_entropy_backward, x, t, saved, np.ones((), "f"), -1)


def test_blocks_for_scores():
    """All of a few rows in one block, else a warp for each until the device is full."""
    like = lambda *shape: np.broadcast_to(np.float32(0), shape).view(Dense)  # noqa: E731

    class Dense(np.ndarray):
        flags = type("", (), {"c_contiguous": True})

    with pytest.MonkeyPatch.context() as patch:
        for name in ("require", "require_here"):
            patch.setattr(cuda_ops, name, lambda *arrays: None)
        for shape, grid, threads in (
            ((1, 1), 1, 1024), ((1024, 32), 1, 1024), ((1025, 32), 129, 256), ((2, 1 << 15), 1, 256),
            ((20_000, 40), 2112, 256),
        ):  # fmt: skip
            types, found, block, sizes = cuda_ops._of_rows(like(*shape), np.zeros(shape[0], "i8"))
            assert (found, block, sizes) == ((grid,), (threads,), shape)
            assert types == (F32, "long long", F32) and all(type(n) is np.int32 for n in sizes)


# ---- updates


def arrays_for(device, rng, dtype, count, size=5000):
    """p, g and state, on the device and in float64."""
    wide = backend.accumulation_dtype(backend.as_dtype(dtype))
    made = [draw(rng, size, dtype) for _ in range(2)] + [np.abs(draw(rng, size, wide)) for _ in range(count)]
    return put(device, *made), [a.astype("d") for a in made]


@pytest.mark.parametrize("dtype", TYPES)
def test_updates(dtype, device, rng):
    """What the kernels write, and that an absent array is none."""
    there, (p, g) = arrays_for(device, rng, dtype, 0)
    assert cuda_ops.update("sgd", tuple(there), (0.25,))("sgd", tuple(there), (0.25,)) is True
    assert_near(there[0], p - 0.25 * g, 1)
    there, (p, g, v) = arrays_for(device, rng, dtype, 1)
    assert cuda_ops.update("momentum_sgd", tuple(there), (1, 0.5))("momentum_sgd", tuple(there), (1, 0.5)) is True
    assert_near(there[2], 0.5 * v - g, 2)
    assert_near(there[0], p + 0.5 * v - g, 1)
    numbers = 0.5, 0.25, 0.75, 0.125, 0.1, 1e-3, 0.9
    for has_largest in (False, True):
        there, (p, g, m, v, largest) = arrays_for(device, rng, dtype, 3)
        there = tuple(there if has_largest else there[:4])  # the last array may be absent
        assert cuda_ops.update("adam", there, numbers)("adam", there, numbers) is True
        m, v = 0.5 * m + 0.25 * g, 0.75 * v + 0.125 * g * g
        largest = np.maximum(v, largest) if has_largest else v
        for a, e in zip(there[2:4], (m, v), strict=True):
            assert_near(a, e, 4)
        assert_near(there[0], 0.9 * p - 0.1 * m / (np.sqrt(largest) + 1e-3), 4)


def test_state_of_another_type_or_place_is_left_to_the_formula(device, rng):
    (p, g, v), _ = arrays_for(device, rng, "float16", 1)
    cuda_ops.update("momentum_sgd", (p, g, v), (0.1, 0.9))
    for arrays in (
        (p, g.astype("f"), v),
        (p, g, v.astype("e")),
        (p, g, np.ones(5000, "f")),
        (p, np.ones(5000, "e"), v),
    ):
        refuses(cuda_ops.update, "momentum_sgd", arrays, (0.1, 0.9))


@pytest.mark.parametrize("dtype", TYPES)
def test_layers_of_lars_have_their_own_rates(dtype, device, rng, monkeypatch):
    """One of several pieces, one of a single element, one that is not scaled, one of zeros, and a gap."""
    monkeypatch.setattr(backend, "device_of", lambda a: device)
    cuda_ops._tables.cache_clear()
    layers = (0, 40_000, True), (40_000, 40_001, True), (40_004, 40_100, False), (40_100, 40_164, True)
    there, (p, g, v) = arrays_for(device, rng, dtype, 1, 40_170)
    there[0][40_100:40_164] = p[40_100:40_164] = 0
    lr, momentum, decay, trust, eps = 0.5, 0.75, 0.125, 0.25, 1e-3
    numbers = layers, lr, momentum, decay, trust, eps
    assert cuda_ops.update("lars", tuple(there), numbers)("lars", tuple(there), numbers) is True
    moved = np.zeros_like(p)
    for start, stop, is_scaled in layers:
        here = slice(start, stop)
        of_p, of_g = np.linalg.norm(p[here]), np.linalg.norm(g[here])
        rate, wd = lr, decay if is_scaled else 0
        if is_scaled and of_p > 0:
            rate *= trust * of_p / (of_g + wd * of_p + eps)
        moved[here] = momentum * v[here] - rate * (g[here] + wd * p[here])
        assert_near(there[2][here], moved[here], 16)
    assert_near(there[0], p + moved, 16 if dtype == "float32" else 1)
    for gap in (slice(40_001, 40_004), slice(40_164, None)):
        np.testing.assert_array_equal(np.asarray(there[2][gap]).astype("d"), v[gap])
    of_piece, of_layer = cuda_ops._tables(layers, device)
    assert of_piece.tolist()[:4] == [[0, 0, 16384], [0, 16384, 32768], [0, 32768, 40_000], [1, 40_000, 40_001]]
    assert of_layer.tolist() == [[0, 3, 1], [3, 4, 1], [4, 5, 0], [5, 6, 1]]
    assert of_piece.dtype == of_layer.dtype == np.int64
