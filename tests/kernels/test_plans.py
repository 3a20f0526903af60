"""What plans take, refuse and hand on, before anything is computed; and what they make of small numbers."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, kernels, using_config
from dbrdist.core import backend
from dbrdist.core.rows import ROWS
from dbrdist.kernels import (
    ConvGeometry,
    columns,
    dispatch,
    keys,
    numpy_,
    onednn,
    onednn_blocks,
    onednn_convolution,
    onednn_elementwise,
    onednn_float16,
    onednn_inference,
    onednn_layer_norm,
    onednn_matmul,
    onednn_softmax,
)
from tests.each import each

needs_onednn = pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed")
F32, F16, BF16 = np.dtype("f"), np.dtype("e"), backend.as_dtype("bfloat16")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


# ---- columns

# images, kernel, stride, pad and dilation of rows and columns; with gaps, in the padding alone, with nothing seen
WINDOWS = [
    ((2, 3, 4, 5), (2, 3), (1, 1, 0, 0, 1, 1)),
    ((1, 2, 5, 4), (3, 2), (2, 1, 1, 2, 1, 1)),
    ((1, 1, 6, 7), (2, 2), (1, 2, 2, 1, 2, 3)),
    ((2, 1, 7, 7), (1, 2), (3, 3, 0, 0, 1, 1)),
    ((1, 1, 1, 1), (1, 1), (4, 4, 2, 2, 1, 1)),
]


@each(**{"x_shape, kernel, window": WINDOWS})
def test_columns_are_the_pixels_of_each_window_and_back(x_shape, kernel, window):
    g = ConvGeometry(*window)
    (n, c, h, w), (kh, kw), (oh, ow) = x_shape, kernel, g.out_hw(*x_shape[2:], *kernel)
    index, is_padded = columns._gather(x_shape, kernel, (oh, ow), g)
    expected = np.full((n, oh, ow, c, kh, kw), n * c * h * w)
    seen_by = {}
    for place in np.ndindex(*expected.shape):
        i, p, q, channel, u, v = place
        row, column = p * g.sh + u * g.dh - g.ph, q * g.sw + v * g.dw - g.pw
        if 0 <= row < h and 0 <= column < w:
            expected[place] = ((i * h + row) * w + column) * c + channel
            seen_by.setdefault(expected[place], []).append(int(np.ravel_multi_index(place, expected.shape)))
    np.testing.assert_array_equal(index, expected.reshape(n * oh * ow, c * kh * kw))
    assert is_padded == (expected == n * c * h * w).any()
    back = columns._scatter(x_shape, kernel, (oh, ow), g)
    assert back.shape == (max(map(len, seen_by.values()), default=1), n * c * h * w)
    for place, row in enumerate(back.T.tolist()):
        there = seen_by.get(place, [])
        assert row == there + [expected.size] * (len(back) - len(there))


def test_convolutions_without_pixels_or_filters_are_no_columns():
    x, W, g = np.ones((1, 2, 3, 3), "f"), np.ones((4, 2, 2, 2), "f"), ConvGeometry()
    columns._plan_forward(x, W, None, g)
    refuses(columns._plan_forward, x[:0], W, None, g)
    refuses(columns._plan_forward, x, W[:0], None, g)
    refuses(columns._plan_forward, x[:, :0], W[:, :0], None, g)
    refuses(columns._plan_forward, x.view(np.ma.MaskedArray), W, None, g)
    refuses(columns._plan_backward_weight, x, x.astype("d"), W.shape, g, F32, None)


# ---- what serves 16 bits


def test_float16_is_served_as_float32():
    seen = []

    def planner(*arguments):
        seen.append(arguments)
        return lambda *arguments: seen.append(arguments) or np.full(3, 1.5, "f")

    x, other = np.ones(3, "e"), np.ones(2, BF16)
    plan = onednn_float16.also_float16(planner)(x, 7, F16, other, None)
    planned = seen.pop()
    assert [getattr(a, "dtype", a) for a in planned] == [F32, 7, F32, BF16, None]
    y = plan(x, 7, F16, other, None)
    assert y.dtype == F16 and y.tolist() == [1.5] * 3
    assert [getattr(a, "dtype", a) for a in seen.pop()] == [F32, 7, F32, BF16, None]
    assert onednn_float16.also_float16(planner)(x, F32)(x, F32).dtype == F32
    seen.clear()
    onednn_float16.also_float16(planner)(x, BF16, np.dtype("d"), "float16")
    assert seen.pop()[1:] == (BF16, np.dtype("d"), "float16")
    for first in (np.ones(3, "f"), other, [1.0]):
        onednn_float16.also_float16(planner)(first, x)
        assert seen.pop() == (first, x)  # as they are


def test_memory_of_float16_is_not_written_to_in_float32():
    plan = onednn_float16.also_float16(lambda *arguments: lambda *arguments: arguments[1], out=1)
    x, narrow, wide = np.ones(3, "e"), np.zeros(3, "e"), np.zeros(3, "f")
    refuses(plan, x, narrow)
    assert plan(x, wide)(x, wide) is wide
    assert plan(x)(x, wide).dtype == F16
    assert plan(x, None)(x, wide).dtype == F16


# ---- rectified gradients in blocks


@needs_onednn
def test_gradients_of_dense_images_of_two_blocks_are_masked_at_once(monkeypatch):
    monkeypatch.setattr(onednn_blocks, "_BLOCK", 60)
    like = backend.channels_last(np.ones((2, 3, 4, 5), "f"))
    plane, few, other = np.ones((2, 3, 4, 5), "f"), like[:1], backend.channels_last(np.ones((2, 3, 5, 4), "f"))
    matrix = np.ones((6, 20), "f")
    for planner, count in (
        (onednn_blocks._plan_relu_backward_over, 2),
        (onednn_blocks._plan_relu_backward_of_sum, 3),
    ):
        planner(*[like] * count)
        for wrong in (plane, other, few, like.astype("d")):
            for place in range(count):
                operands = [like] * count
                operands[place] = wrong
                refuses(planner, *operands)
        refuses(planner, *[few] * count)
        refuses(planner, *[matrix] * count)
        refuses(planner, *[plane] * count)


# ---- rows of functions

NUMBERS = {  # of a row: those that it takes, and those that it does not
    "leaky_relu": ([0.5, -0.25, 1.0, 2.0], [0.0]),
    ("leaky_relu", 0): ([0.0, 0.5, 1.5, -0.25], []),
    ("elu", 0): ([0.0, 0.5, 1.0, 1.5], [-0.25]),
    "huber": ([0.0, 0.5, 2.0], [-0.25]),
    ("huber", 0): ([0.0, 0.5, 2.0], [-0.25]),
    ("clipped_relu", 0): ([0.0, 0.5, 20.0], [-0.25]),
    "pow_number": ([3], [2, 4, 2.5]),
    ("pow_number", 0): ([2, 3], [1, 4, 2.5]),
}


@needs_onednn
@each(key=list(NUMBERS))
def test_rows_take_numbers_for_which_they_are_right(key):
    taken, refused = NUMBERS[key]
    row = ROWS[key if isinstance(key, str) else key[0]]
    rng, names = np.random.default_rng(0), row.args if isinstance(key, str) else (*row.kept_names, "gy")
    arrays = tuple(rng.standard_normal(1 << 13).astype("f") for _ in names)
    for number in refused:
        refuses(onednn_elementwise._plan_row, key, names, arrays, (number,))
    for number in taken:
        y = onednn_elementwise._plan_row(key, names, arrays, (number,))(key, names, arrays, (number,))
        wide = [a.astype("d") for a in arrays]
        if isinstance(key, str):
            expected = row.formula(*wide, number)
        else:
            values = {**dict(zip(row.kept_names, wide)), **dict(zip(row.numbers, (number,)))}
            expected = row.partials[key[1]].pull(wide[-1], values)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@needs_onednn
def test_rows_of_other_sizes_layouts_and_numbers_are_left_to_the_formula():
    x = np.ones(1 << 13, "f")
    pixels = backend.channels_last(np.ones((8, 4, 16, 16), "f"))
    for taken in (x, x.reshape(2, -1), pixels, x.astype(BF16)):
        onednn_elementwise._plan_row("leaky_relu", ("x",), (taken,), (0.5,))
    refused = x[1:], np.ones(1 << 14, "f")[::2], x.reshape(2, -1).T, pixels[:, :, ::-1], x.astype("d")
    for other in refused:
        refuses(onednn_elementwise._plan_row, "leaky_relu", ("x",), (other,), (0.5,))
    for number in (np.inf, -np.inf, np.nan, True, np.float32(0.5), None):
        refuses(onednn_elementwise._plan_row, "leaky_relu", ("x",), (x,), (number,))
    refuses(onednn_elementwise._plan_row, "no such row", ("x",), (x,), ())
    refuses(onednn_elementwise._plan_row, ("leaky_relu", 1), ("x",), (x,), (0.5,))


def test_ones_are_kept_and_zeros_become_another_number():
    clip, linear = onednn_elementwise.CLIP, onednn_elementwise.LINEAR
    for low, step in (
        (0.0, (clip, 0.0, 1.0)), (0.25, (clip, 0.25, 1.0)), (1.0, (clip, 1.0, 1.0)), (1.5, (linear, -0.5, 1.5)),
        (-0.5, (linear, 1.5, -0.5)),
    ):  # fmt: skip
        assert onednn_elementwise._one_or(low) == step


# ---- layer normalization


@needs_onednn
@each(shape=[(4, 5), (7, 16), (1, 33)])
def test_layer_normalization_is_onednns(shape):
    rng = np.random.default_rng(0)
    x, gy = (rng.standard_normal(shape).astype("f") for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[1]).astype("f") for _ in range(2))
    wide = x.astype("d")
    mean, var = wide.mean(1), wide.var(1)
    with kernels.use("onednn"):
        assert kernels.provider_of("ln_forward", x, gamma, beta, 1e-5) == "onednn"
        y, *statistics = onednn_layer_norm._plan_forward(x, gamma, beta, 1e-5)(x, gamma, beta, 1e-5)
        assert kernels.provider_of("ln_backward", x, gamma, *statistics, gy, 1e-5) == "onednn"
        backward = onednn_layer_norm._plan_backward(x, gamma, *statistics, gy, 1e-5)
        gx, ggamma, gbeta = backward(x, gamma, *statistics, gy, 1e-5)
    root = np.sqrt(var + 1e-5)[:, None]
    normal, g = (wide - mean[:, None]) / root, gy * gamma.astype("d")
    expected = (g - g.mean(1, keepdims=True) - normal * (g * normal).mean(1, keepdims=True)) / root
    for a, e in (
        (y, normal * gamma + beta), (statistics[0], mean), (statistics[1], var), (gx, expected),
        (ggamma, (gy * normal).sum(0)), (gbeta, gy.sum(0, dtype="d")),
    ):  # fmt: skip
        assert a.dtype == F32
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_a_layer_normalization_that_the_library_lacks_is_refused_when_it_is_planned(monkeypatch):
    def lacks(*arguments):
        raise onednn.Unsupported("layer normalization")

    monkeypatch.setattr(onednn, "require", lambda *arrays: None)
    x, row, statistics = np.ones((4, 5), "f"), np.ones(5, "f"), np.ones(4, "f")
    monkeypatch.setattr(onednn_layer_norm, "_build_forward", lacks)
    refuses(onednn_layer_norm._plan_forward, x, row, row, 1e-5)
    monkeypatch.setattr(onednn_layer_norm, "_build_backward", lacks)
    refuses(onednn_layer_norm._plan_backward, x, row, statistics, statistics, x, 1e-5)


@needs_onednn
@each(shape=[(1, 8), (2, 8), (3, 16)], relu=[False, True])
def test_large_means_of_few_rows(shape, relu):
    x, gamma, beta = np.full(shape, 1e6, "f"), np.full(shape[1], 2, "f"), np.arange(shape[1], dtype="f") - 3
    with kernels.use("onednn"):
        assert kernels.provider_of("bn_forward", x, gamma, beta, 1e-5, (0,), relu) == "onednn"
        y, mean, var, _ = kernels.bn_forward(x, gamma, beta, 1e-5, relu, (0,))
    assert (mean == 1e6).all() and not var.any()
    np.testing.assert_array_equal(y, np.broadcast_to(np.maximum(beta, 0) if relu else beta, shape))


# ---- convolutions


def test_a_filter_sees_the_channels_of_its_group():
    W, gy = np.ones((12, 5, 2, 3), "f"), np.ones((1, 12, 4, 4), "f")
    assert onednn_convolution.channels_in(np.ones((1, 20, 7, 7), "f"), W, None, ConvGeometry(groups=4)) == 5
    assert onednn_convolution._channels_out(gy, W, (1, 20, 7, 7), ConvGeometry(groups=4)) == 3


@needs_onednn
def test_weights_for_inference_have_elements_in_order_of_their_own():
    x, W = np.ones((1, 2, 3, 3), "f"), np.ones((4, 2, 2, 2), "f")
    onednn_inference._check(x, W)
    onednn_inference._check(x, np.asfortranarray(W))
    for weights in (W[:0], W[..., ::-1], W[::-1], np.broadcast_to(W[:1], W.shape)):
        refuses(onednn_inference._check, x, weights)
    for images in (x.astype("d"), x[:0], x.view(np.ma.MaskedArray)):
        refuses(onednn_inference._check, images, W)


def test_vectors_are_dense_and_of_float32():
    row = np.arange(8, dtype="f")
    assert onednn_inference._f32(row) is row
    for a in (row[::2], row.astype("e")[::2], row.astype("i4"), row.astype("d"), row[::-1], row.astype(BF16)):
        made = onednn_inference._f32(a)
        assert made.dtype == F32 and made.strides == (4,) and made.tolist() == a.tolist()


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


# ---- products


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


# ---- keys


def test_places_count_for_arrays_of_devices_alone(monkeypatch):
    monkeypatch.setattr(keys, "place_of", lambda x: ("place", x))
    monkeypatch.setattr(keys, "places_of", lambda *xs: ("places", *xs))
    host, there = np.zeros(1), "an array on a device"
    assert keys._place(host) is keys._places(host, there) is keys._switches(host, there) is None
    assert keys._place(there) == ("place", there) and keys._places(there, host) == ("places", there, host)
    with using_config("use_cudnn", "never"), using_config("use_cudnn_tensor_core", "always"):
        for is_deterministic in (False, True):
            with using_config("cudnn_deterministic", is_deterministic):
                expected = ("places", there, host), "never", "always", is_deterministic
                assert keys._switches(there, host) == expected


# ---- softmax and what is handed on


@each(axis=[0, 1, 2, 3, -1, -3], function=["softmax", "log_softmax"])
def test_softmax_along_each_axis_of_images(axis, function):
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype("f")
    gy = np.random.default_rng(1).standard_normal(x.shape).astype("f")
    wide = x.astype("d")
    p = np.exp(wide) / np.exp(wide).sum(axis, keepdims=True)
    if function == "softmax":
        y, gx = p, p * (gy - (gy * p).sum(axis, keepdims=True))
    else:
        y, gx = np.log(p), gy - p * gy.sum(axis, keepdims=True, dtype="d")
    for lay in (np.ascontiguousarray, backend.channels_last):
        v = Variable(lay(x))
        with kernels.use("numpy"):
            made = getattr(F, function)(v, axis=axis)
            made.grad = lay(gy)
            made.backward()
        np.testing.assert_allclose(made.array, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(v.grad, gx, rtol=1e-5, atol=1e-6)
        assert made.array.strides == v.array.strides


@needs_onednn
@each(shape=[(7, 6), (2, 25), (1, 6), (2, 6, 3, 3)], log=[False, True])
def test_softmax_goes_by_rows_in_blocks(shape, log, monkeypatch):
    monkeypatch.setattr(onednn_softmax, "_SMALL", 1)
    monkeypatch.setattr(onednn_softmax, "_BLOCK", 20)  # elements: 3 rows of 6, or one of 25
    rng = np.random.default_rng(0)
    lay = backend.channels_last if len(shape) == 4 else np.asarray
    x, gy = (lay(rng.standard_normal(shape).astype("f")) for _ in range(2))
    columns, num_rows = shape[1], x.size // shape[1]
    blocks, new = onednn_softmax._plan(1, log, x)
    step = 3 if columns == 6 else 1
    assert [b[:2] for b in blocks] == [(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]
    assert new().strides == x.strides
    e = np.exp(x.astype("d"))
    p = e / e.sum(1, keepdims=True)
    y = onednn_softmax._forward_planner(log)(x, 1)(x, 1)
    np.testing.assert_allclose(y, np.log(p) if log else p, rtol=1e-5, atol=1e-6)
    gx = onednn_softmax._backward_planner(log)(y, gy, 1)(y, gy, 1)
    expected = gy - p * gy.sum(1, keepdims=True) if log else p * (gy - (gy * p).sum(1, keepdims=True))
    np.testing.assert_allclose(gx, expected, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_softmax_over_other_axes_types_and_layouts_is_left_to_numpy(monkeypatch):
    monkeypatch.setattr(onednn_softmax, "_SMALL", 42)
    x, rows = np.ones((7, 6), "f"), np.ones((2, 3, 7), "f")
    plane, pixels = np.ones((2, 3, 4, 5), "f"), backend.channels_last(np.ones((2, 3, 4, 5), "f"))
    for arrays, axes in (((x, x), [1]), ((rows,), [2]), ((plane,), [3]), ((pixels, pixels), [1])):
        for axis in range(arrays[0].ndim):
            if axis in axes:
                onednn_softmax._plan(axis, False, *arrays)
            else:
                refuses(onednn_softmax._plan, axis, False, *arrays)
    for arrays in ((x[:6],), (x.astype(BF16),), (np.ones((6, 7), "f").T,), (x, np.ones((6, 7), "f").T)):
        refuses(onednn_softmax._plan, 1, False, *arrays)
    refuses(onednn_softmax._plan, 1, False, pixels[:, :, ::2])
    refuses(onednn_softmax._plan, 3, False, plane, pixels)


def test_vectors_of_a_normalization_stay_as_they_are_now():
    gamma, beta, mean, var = (np.full(3, n, "f") for n in (1, 2, 3, 4))
    kept = dispatch.bn_vectors(None, gamma, beta, mean, var)
    there = dispatch.bn_vectors(("cuda", np.concatenate([gamma, beta])), gamma, beta, mean, var)
    gamma[:], beta[:] = 8, 9
    for found in (kept(), there()):
        assert [v.tolist() for v in found] == [[n] * 3 for n in (1, 2, 3, 4)]


def test_normalization_without_a_word_is_of_images_and_not_rectified():
    rng = np.random.default_rng(0)
    x, gy = (backend.channels_last(rng.standard_normal((2, 3, 4, 5)).astype("f")) for _ in range(2))
    gamma, beta = np.array([1, 2, -1], "f"), np.array([0, -1, 0.5], "f")
    wide, per_channel = x.astype("d"), (slice(None), None, None)
    m, v = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    normal = (wide - m[per_channel]) / np.sqrt(v + 1e-5)[per_channel]
    expected = normal * gamma[per_channel] + beta[per_channel]
    y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 1e-5)
    for a, e in (
        (y, expected), (mean, m), (var, v), (kernels.bn_inference(x, gamma, beta, mean, var, 1e-5), expected),
        (kernels.bn_statistics(x)[0], m), (kernels.bn_statistics(x)[1], v),
    ):  # fmt: skip
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
    _, ggamma, gbeta = kernels.bn_backward(x, gamma, mean, var, gy, 1e-5, saved)
    np.testing.assert_allclose(ggamma, (gy * normal).sum((0, 2, 3)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gbeta, gy.sum((0, 2, 3), dtype="d"), rtol=1e-4, atol=1e-4)
