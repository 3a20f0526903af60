"""Tests of dbrdist.kernels.cpu.onednn_matmul."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import dbrdist
import dbrdist.functions as F
from dbrdist import kernels
from dbrdist.core.array import backend, elementwise
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn, onednn_matmul
from dbrdist.kernels.reference import numpy_
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn

try:
    onednn.library()
except onednn.Unavailable:
    pytest.skip("oneDNN is not installed", allow_module_level=True)


# rows, depth, columns, the depths of the pieces, and whether the right matrix is packed
PRODUCTS = [
    ((255, 100, 650), [100], False),
    ((256, 100, 650), [100], True),
    ((256, 100, 656), [100], False),
    ((256, 64, (1 << 16) - 1), [64], True),
    ((256, 65, (1 << 16) - 1), [65], False),
    ((64, 1312, 48), [1312], False),
    ((63, 1313, 48), [1313], False),
    ((64, 1313, 48), [657, 656], False),
    ((64, 2625, 48), [875, 875, 875], False),
]


@each(**{"shape, depths, is_packed": PRODUCTS})
def test_deep_products_are_cut_and_right_matrices_of_many_rows_packed(shape, depths, is_packed, monkeypatch):
    found = []
    for name, packs in (("_plan_plainly", False), ("_plan_packing", True)):
        monkeypatch.setattr(
            onednn_matmul, name, lambda a, b, y, adds, packs=packs: found.append((a.shape[1], len(b), adds, packs))
        )
    rows, depth, columns = shape
    a, b, y = (np.empty(s, np.float32) for s in ((rows, depth), (depth, columns), (rows, columns)))
    onednn_matmul._plan_product(a, b, y)
    assert found == [(d, d, k > 0, is_packed) for k, d in enumerate(depths)]
    if len(depths) > 1:  # a left matrix in columns gains nothing
        found.clear()
        onednn_matmul._plan_product(np.asfortranarray(a), b, y)
        assert found == [(depth, depth, False, is_packed)]


GEMM_CASES = [
    ((64, 64, 128), "F", "C", True), ((63, 64, 128), "F", "C", False), ((64, 64, 127), "F", "C", False),
    ((256, 512, 256), "C", "C", True), ((256, 511, 256), "C", "C", False),
    ((768, 1024, 768), "C", "F", True), ((768, 1025, 768), "C", "F", False), ((900, 800, 900), "F", "F", False),
]  # fmt: skip


@pytest.mark.slow
@each(**{"shape, of_a, of_b, is_gemm": GEMM_CASES})
def test_products_by_shape_give_what_numpy_gives(shape, of_a, of_b, is_gemm):
    """On both sides of each bound, by the implementation that is meant, and with what is not finite."""
    rng = np.random.default_rng(0)
    rows, depth, columns = shape
    a, b = rng.standard_normal((rows, depth)).astype("f"), rng.standard_normal((depth, columns)).astype("f")
    a[3, 5], a[7, 2], b[1, 9], b[0, 4], a[11] = np.nan, np.inf, -np.inf, np.nan, 0
    a, b = np.asarray(a, order=of_a), np.asarray(b, order=of_b)
    assert onednn_matmul.is_for_gemm(a, b) == is_gemm
    if is_gemm:
        y = np.empty((rows, columns), "f")
        assert onednn_matmul.build(a, b, y, implementation=onednn_matmul.GEMM).implementation == onednn_matmul.GEMM
    out = np.full((rows, columns), np.nan, "f")
    with np.errstate(invalid="ignore"), kernels.use("onednn"):
        expected = a.astype("d") @ b.astype("d")
        assert kernels.matmul(a, b, out) is out
        np.testing.assert_array_equal(kernels.matmul(a, b), out)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6 * depth)


@each(**{"dtype, num_products": [("float32", 1 << 19), ("bfloat16", 1 << 17)]})
def test_products_below_a_size_are_left_to_numpy(dtype, num_products):
    dtype = backend.as_dtype(dtype)
    b = np.ones((64, 16), dtype)
    onednn_matmul._check(np.ones((num_products // b.size, 64), dtype), b)
    for a in (np.ones((num_products // b.size - 1, 64), dtype), np.ones((1, num_products // b.size, 64), dtype)):
        with pytest.raises(onednn.Unsupported, match="small product"):
            onednn_matmul._check(a, b)


def test_packed_matrices_below_a_size_are_left_to_numpy():
    b = np.ones((64, 16), np.float32)
    assert kernels.provider_of("packed", b, 512, True) == "onednn"
    assert kernels.provider_of("packed", b, 511, True) == "numpy"


F32 = np.dtype("f")
BF16 = backend.as_dtype("bfloat16")


def strided(shape, strides):
    """Of float32, with strides in elements."""
    memory = np.arange(400, dtype=np.float32)
    return as_strided(memory[200:], shape, [4 * s for s in strides])


@each(
    **{"strides, serves": [
        ((3, 1), True), ((5, 1), True), ((2, 1), False), ((0, 1), False), ((-3, 1), False), ((6, 2), False),
        ((1, 4), True), ((1, 7), True), ((1, 3), False), ((1, 0), False), ((1, -4), False), ((2, 8), False),
    ]}
)  # fmt: skip
def test_matrices_whose_rows_or_columns_lie_densely_and_apart_serve_as_they_are(strides, serves):
    a = strided((4, 3), strides)
    assert (onednn_matmul._matrix(a) is a) == serves
    np.testing.assert_array_equal(onednn_matmul._matrix(a), a)
    adapted = onednn_matmul._adapter(a, F32)(a)
    assert (adapted is a) == serves and onednn_matmul._matrix(adapted) is adapted
    np.testing.assert_array_equal(adapted, a)


@needs_onednn
@each(strides=[(3, 1), (5, 1), (1, 4), (1, 7), (0, 1), (-3, 1), (6, 2)])
def test_casts_of_matrices_lie_as_they_do(strides):
    a = strided((4, 3), strides)
    made = onednn_matmul._adapter(a, BF16)(a)
    np.testing.assert_array_equal(made, a.astype(BF16))
    assert made.flags.f_contiguous if strides[0] == 1 else made.flags.c_contiguous, made.strides


@needs_onednn
@each(is_often=[False, True])
def test_weights_are_packed_for_many_calls_alone(is_often, monkeypatch):
    asked = []
    for name in ("build", "build_packed"):
        function = getattr(onednn_matmul, name)
        monkeypatch.setattr(
            onednn_matmul, name, lambda *a, name=name, f=function, **k: (asked.append(name), f(*a, **k))[1]
        )
    b = np.random.default_rng(0).standard_normal((64, 48), np.float32)
    onednn_matmul._plan_packed(b, 600, is_often)
    assert asked == ["build_packed" if is_often else "build"]


@needs_onednn
@each(
    turn=[lambda W: W[::-1], lambda W: W[..., ::-1], lambda W: np.broadcast_to(W[:1], W.shape), np.asfortranarray],
    lay=[backend.channels_last, np.ascontiguousarray, lambda a: a[..., ::-1]],
    g=[ConvGeometry(), ConvGeometry(2, 1, 1, 0), ConvGeometry(groups=2)],
)
def test_operands_lie_as_they_like(turn, lay, g):
    rng = np.random.default_rng(0)
    x, W = rng.standard_normal((2, 6, 5, 4)).astype("f"), rng.standard_normal((8, 6 // g.groups, 3, 2)).astype("f")
    gy = rng.standard_normal((2, 8, *g.out_hw(5, 4, 3, 2))).astype("f")
    W, x, gy, b = turn(W), lay(x), lay(gy), np.arange(16, dtype="f")[::2]
    wide = [a.astype("d") for a in (x, W, gy, b)]
    with kernels.use("onednn"):
        forward, data = kernels.conv_forward(x, W, b, g), kernels.conv_backward_data(gy, W, x.shape, g)
        weight = kernels.conv_backward_weight(x, gy, W.shape, g)
    np.testing.assert_allclose(forward, numpy_.conv_forward(wide[0], wide[1], wide[3], g), atol=1e-4)
    np.testing.assert_allclose(data, numpy_.conv_backward_data(wide[2], wide[1], x.shape, g), atol=1e-4)
    expected = numpy_.conv_backward_weight(wide[0], wide[2], W.shape, g, np.dtype("d"))
    np.testing.assert_allclose(weight, expected, atol=1e-4)


@needs_onednn
@each(pieces=[1, 2, 3], packs=[False, True])
def test_pieces_of_a_deep_product_are_added(pieces, packs, monkeypatch):
    monkeypatch.setattr(onednn_matmul, "_DEPTH", 8)
    monkeypatch.setattr(onednn_matmul, "_SOME_ROWS", 4)
    monkeypatch.setattr(onednn_matmul, "_is_packing_worth_it", lambda *sizes: packs)
    rng = np.random.default_rng(0)
    for depth in (8 * pieces - 7, 8 * pieces):
        a, b = rng.standard_normal((16, depth)).astype("f"), rng.standard_normal((depth, 5)).astype("f")
        y = np.full((16, 5), np.nan, "f")
        onednn_matmul._plan_product(a, b, y)(a, b, y)
        np.testing.assert_allclose(y, a.astype("d") @ b.astype("d"), rtol=0, atol=1e-5)


def heads(rng, *shape):
    """A stack (B, H, L, D) whose heads lie beside one another, as attention cuts them out of (B, L, H D)."""
    batch, num, length, width = shape
    return rng.standard_normal((batch, length, num, width), np.float32).transpose(0, 2, 1, 3)


STACKS = {
    "rows": lambda rng: (rng.standard_normal((6, 40, 50), np.float32), rng.standard_normal((6, 50, 60), np.float32)),
    "turned left": lambda rng: (
        rng.standard_normal((6, 50, 40), np.float32).swapaxes(1, 2), rng.standard_normal((6, 50, 60), np.float32)
    ),
    "turned right": lambda rng: (
        rng.standard_normal((6, 40, 50), np.float32), rng.standard_normal((6, 60, 50), np.float32).swapaxes(1, 2)
    ),
    "heads": lambda rng: (heads(rng, 3, 4, 40, 16), heads(rng, 3, 4, 64, 16).swapaxes(2, 3)),
    "weights and heads": lambda rng: (rng.standard_normal((3, 4, 40, 64), np.float32), heads(rng, 3, 4, 64, 16)),
    "five axes": lambda rng: (
        rng.standard_normal((2, 2, 3, 24, 32), np.float32), rng.standard_normal((2, 2, 3, 32, 40), np.float32)
    ),
    "a part of each matrix": lambda rng: (
        rng.standard_normal((6, 40, 80), np.float32)[:, :, 7:57], rng.standard_normal((6, 70, 60), np.float32)[:, :50]
    ),
    "one matrix": lambda rng: (
        rng.standard_normal((1, 80, 90), np.float32), rng.standard_normal((1, 90, 100), np.float32)
    ),
}  # fmt: skip


@needs_onednn
@each(name=list(STACKS))
def test_stacks_of_matrices_are_multiplied_as_they_lie(name):
    a, b = STACKS[name](np.random.default_rng(0))
    assert kernels.provider_of("stacked_matmul", a, b) == "onednn"
    expected = a.astype(np.float64) @ b.astype(np.float64)
    found = kernels.stacked_matmul(a, b)
    assert found.flags.c_contiguous and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-5)
    a[..., 3, 2], b[..., 5, 4] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isfinite(kernels.stacked_matmul(a, b)), np.isfinite(a @ b))


@needs_onednn
@each(change=["broadcast", "other lead", "narrow", "double", "backwards", "repeated", "overlapping", "sparse", "empty",
              "many axes"])  # fmt: skip
def test_stacks_that_are_left_to_numpy(change):
    a, b = STACKS["rows"](np.random.default_rng(0))
    if change == "broadcast":
        b = b[:1]
    elif change == "other lead":
        b = b[None]
    elif change == "narrow":
        a = a[:, :7]
    elif change == "double":
        b = b.astype("d")
    elif change == "backwards":
        a = a[::-1]
    elif change == "repeated":
        a = np.broadcast_to(a[:1], a.shape)
    elif change == "overlapping":
        a = as_strided(a, a.shape, (200, 200, 4))
    elif change == "sparse":
        a, b = a[:, :, ::2], b[:, ::2]
    elif change == "many axes":  # more than oneDNN takes
        a, b = (m.reshape((1,) * 10 + m.shape) for m in (a, b))
    else:
        a, b = a[:0], b[:0]
    assert kernels.provider_of("stacked_matmul", a, b) == "numpy"
    assert kernels.stacked_matmul(a, b) is None
    np.testing.assert_array_equal(F.matmul(a, b).array, np.matmul(a, b))


@needs_onednn
def test_functions_multiply_large_stacks_by_the_kernel(monkeypatch):
    rng = np.random.default_rng(0)
    a, b = (dbrdist.Variable(x) for x in (heads(rng, 4, 4, 64, 32), heads(rng, 4, 4, 64, 32).swapaxes(2, 3)))
    seen, kernel = [], elementwise.kernels[np.matmul]
    monkeypatch.setitem(elementwise.kernels, np.matmul, lambda a, b: seen.append(a.shape) or kernel(a, b))
    y = F.matmul(a, b)
    y.grad = rng.standard_normal(y.shape, np.float32)
    y.backward()
    assert len(seen) == 3
    np.testing.assert_allclose(y.array, a.array @ b.array, atol=2e-5)
    np.testing.assert_allclose(a.grad, y.grad @ b.array.swapaxes(2, 3), atol=5e-5)
    np.testing.assert_allclose(b.grad, a.array.swapaxes(2, 3) @ y.grad, atol=5e-5)
    F.matmul(a.array[:1, :1, :8, :8], b.array[:1, :1, :8, :8])
    assert len(seen) == 3  # small ones cost less without
