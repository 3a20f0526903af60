"""The reference kernels against direct loops over the definitions, in float64."""

import itertools

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.kernels import ConvGeometry, PoolGeometry, numpy_, numpy_normalization, numpy_softmax

CONVOLUTIONS = [
    # (N, C, H, W), (O, C/G, kh, kw), geometry
    ((2, 3, 5, 6), (4, 3, 3, 3), ConvGeometry()),
    ((1, 1, 7, 4), (2, 1, 3, 2), ConvGeometry(2, 1, 1, 0)),
    ((2, 4, 6, 5), (6, 2, 3, 3), ConvGeometry(1, 2, 2, 1, 2, 1, 2)),
    ((2, 3, 5, 5), (3, 1, 2, 2), ConvGeometry(2, 2, 0, 0, 1, 1, 3, True)),
    ((2, 3, 4, 4), (5, 3, 1, 1), ConvGeometry(2, 2)),
    ((0, 3, 4, 4), (5, 3, 3, 3), ConvGeometry(1, 1, 1, 1)),
]


def naive_convolution(x, W, b, g):
    n, _, h, w = x.shape
    o, cg, kh, kw = W.shape
    oh, ow = g.out_hw(h, w, kh, kw)
    y = np.zeros((n, o, oh, ow)) + b[:, None, None]
    per_group = o // g.groups
    for i, k, p, q, c, u, v in itertools.product(*map(range, (n, o, oh, ow, cg, kh, kw))):
        row, col = p * g.sh - g.ph + u * g.dh, q * g.sw - g.pw + v * g.dw
        if 0 <= row < h and 0 <= col < w:
            y[i, k, p, q] += W[k, c, u, v] * x[i, (k // per_group) * cg + c, row, col]
    return y


@pytest.mark.parametrize(("x_shape", "W_shape", "geometry"), CONVOLUTIONS)
def test_convolution_is_its_definition(x_shape, W_shape, geometry):
    rng = np.random.default_rng(0)
    x, W, b = rng.standard_normal(x_shape), rng.standard_normal(W_shape), rng.standard_normal(W_shape[0])
    y = numpy_.conv_forward(x, W, b, geometry)
    np.testing.assert_allclose(y, naive_convolution(x, W, b, geometry), atol=1e-12)


@pytest.mark.parametrize(("x_shape", "W_shape", "geometry"), CONVOLUTIONS)
def test_convolution_gradients_are_adjoint(x_shape, W_shape, geometry):
    """A linear map f has <gy, f(x)> = <f'(gy), x>, in x and in W."""
    rng = np.random.default_rng(1)
    x, W = rng.standard_normal(x_shape), rng.standard_normal(W_shape)
    y = numpy_.conv_forward(x, W, None, geometry)
    gy = rng.standard_normal(y.shape)
    out = np.full(W_shape, np.nan)
    gW = numpy_.conv_backward_weight(x, gy, W_shape, geometry, x.dtype, out)
    gx = numpy_.conv_backward_data(gy, W, x_shape, geometry)
    assert gW is out
    assert gx.shape == x_shape
    assert np.sum(gx * x) == pytest.approx(np.sum(gy * y), abs=1e-10)
    assert np.sum(gW * W) == pytest.approx(np.sum(gy * y), abs=1e-10)


POOLINGS = [
    ((2, 3, 5, 6), PoolGeometry("max", 3, 2, 2, 1)),
    ((1, 1, 7, 4), PoolGeometry("max", 3, 3, 2, 2, 1, 1, True)),
    ((2, 2, 5, 5), PoolGeometry("average", 3, 2, 2, 2, 1, 1)),
    ((2, 2, 5, 4), PoolGeometry("average", 2, 2, 2, 2)),
    ((0, 2, 5, 4), PoolGeometry("max", 2, 2, 2, 2)),
]


def naive_windows(x, g, fill):
    n, c, h, w = x.shape
    oh, ow = g.out_hw(h, w)
    windows = np.full((n, c, oh, ow, g.kh * g.kw), fill)
    for p, q, u, v in itertools.product(*map(range, (oh, ow, g.kh, g.kw))):
        row, col = p * g.sh - g.ph + u, q * g.sw - g.pw + v
        if 0 <= row < h and 0 <= col < w:
            windows[:, :, p, q, u * g.kw + v] = x[:, :, row, col]
    return windows


@pytest.mark.parametrize(("shape", "geometry"), POOLINGS)
def test_pooling_is_its_definition(shape, geometry):
    rng = np.random.default_rng(2)
    x = np.round(rng.standard_normal(shape), 1)  # rounded, so that windows have equal maxima
    y, saved = numpy_.pool_forward(x, geometry)
    if geometry.kind == "max":
        windows = naive_windows(x, geometry, -np.inf)
        np.testing.assert_array_equal(y, windows.max(-1))
        np.testing.assert_array_equal(numpy_.pool_indices(saved, y.shape, geometry), windows.argmax(-1))
    else:
        np.testing.assert_allclose(y, naive_windows(x, geometry, 0.0).mean(-1), atol=1e-14)
    gy = rng.standard_normal(y.shape)
    gx = numpy_.pool_backward(gy, shape, saved, geometry)
    assert np.sum(gx * x) == pytest.approx(np.sum(gy * y), abs=1e-10)  # both poolings are linear around x


def test_window_in_the_padding_alone_is_minus_infinity():
    geometry = PoolGeometry("max", 1, 1, 4, 4, 0, 0, True)
    y, saved = numpy_.pool_forward(np.ones((1, 1, 6, 6)), geometry)
    np.testing.assert_array_equal(y[0, 0], [[1, 1, -np.inf], [1, 1, -np.inf], [-np.inf] * 3])
    assert numpy_.pool_backward(np.ones_like(y), (1, 1, 6, 6), saved, geometry).sum() == 4


NORMALIZATIONS = [((4, 3, 5, 2), (0, 2, 3)), ((7, 3), (0,)), ((3, 2, 4, 2), (0,)), ((3, 2, 4), (0, 2)), ((2, 3), (1,))]


@pytest.mark.parametrize(("shape", "axis"), NORMALIZATIONS)
@pytest.mark.parametrize("relu", [False, True])
def test_batch_normalization_matches_finite_differences(shape, axis, relu):
    rng = np.random.default_rng(3)
    kept = tuple(n for i, n in enumerate(shape) if i not in axis)
    expand = tuple(1 if i in axis else n for i, n in enumerate(shape))
    x, gamma, beta = rng.standard_normal(shape), rng.standard_normal(kept), rng.standard_normal(kept)

    def formula(x, gamma, beta):
        y = (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-3)
        y = y * gamma.reshape(expand) + beta.reshape(expand)
        return np.maximum(y, 0) if relu else y

    y, mean, var, saved = numpy_normalization.bn_forward(x, gamma, beta, 1e-3, axis, relu)
    np.testing.assert_allclose(y, formula(x, gamma, beta), atol=1e-12)
    np.testing.assert_allclose(mean, x.mean(axis), atol=1e-13)
    np.testing.assert_allclose(var, x.var(axis), atol=1e-13)
    inferred = numpy_normalization.bn_inference(x, gamma, beta, mean, var, 1e-3, axis, relu)
    np.testing.assert_allclose(inferred, y, atol=1e-12)

    gy = rng.standard_normal(shape)
    grads = numpy_normalization.bn_backward(x, gamma, mean, var, gy, 1e-3, saved, axis, relu)
    for i, grad in enumerate(grads):
        direction, inputs = rng.standard_normal(grad.shape), [x, gamma, beta]
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(inputs)
            moved[i] = moved[i] + step * direction
            ends.append(np.sum(gy * formula(*moved)))
        assert np.sum(grad * direction) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_variance_of_a_large_mean_is_stable():
    x = np.array([1e4, 1e4 + 1, 1e4 + 2], np.float32).reshape(3, 1)
    one = np.ones(1, np.float32)
    _, _, var, _ = numpy_normalization.bn_forward(x, one, one, 1e-5, (0,), False)
    assert var[0] == pytest.approx(2 / 3, rel=1e-6)


def test_statistics_of_many_rows_are_exact_to_float32():
    x = np.random.default_rng(0).standard_normal((50_001, 3), dtype=np.float32) + np.float32(3)
    one = np.ones(3, np.float32)
    _, mean, var, _ = numpy_normalization.bn_forward(x, one, one, 1e-5, (0,), False)
    np.testing.assert_allclose(mean, x.mean(0, dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(var, x.var(0, dtype=np.float64), rtol=1e-6)


def test_statistics_of_an_empty_batch_are_zero():
    one = np.ones(3, np.float32)
    x = np.zeros((0, 3, 4, 4), np.float32)
    y, mean, var, saved = numpy_normalization.bn_forward(x, one, one, 1e-5, (0, 2, 3), True)
    gx, ggamma, gbeta = numpy_normalization.bn_backward(x, one, mean, var, y, 1e-5, saved, (0, 2, 3), True)
    assert y.shape == gx.shape == x.shape
    assert not np.any([mean, var, ggamma, gbeta])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_summed_in_float32(dtype):
    from dbrdist.core import backend

    dtype = backend.as_dtype(dtype)
    x = np.ones((1, 4096, 1, 1)).astype(dtype)
    W = np.ones((1, 4096, 1, 1)).astype(dtype)
    y = numpy_.conv_forward(x, W, None, ConvGeometry())
    assert y.dtype == dtype
    assert float(y[0, 0, 0, 0]) == 4096  # a running sum in either type stops far below
    gW = numpy_.conv_backward_weight(x, y, W.shape, ConvGeometry(), np.dtype(np.float32))
    assert gW.dtype == np.float32
    tall, one = np.full((4096, 1), 0.5).astype(dtype), np.ones(1, np.float32)
    assert numpy_normalization.bn_forward(tall, one, one, 1e-5, (0,), False)[1].dtype == np.float32


@pytest.mark.parametrize("shape", [(4, 0, 8, 8), (300, 0), (0, 3, 8, 8)])
def test_normalization_of_images_without_channels_or_of_no_images_is_empty(shape):
    x, ones, axis = np.zeros(shape, np.float32), np.ones(shape[1], np.float32), (0, *range(2, len(shape)))
    y, mean, var, saved = kernels.bn_forward(x, ones, ones, 1e-5, False, axis)
    gx, ggamma, gbeta = kernels.bn_backward(x, ones, mean, var, x, 1e-5, saved, False, axis)
    assert y.shape == gx.shape == shape
    assert all(v.shape == (shape[1],) and not v.any() for v in (mean, var, ggamma, gbeta))


# ---- what the host has other ways for: these serve where a GPU has no kernel of its own ------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_of_columns(dtype):
    x = np.full((3000, 2), [1, 0.25], dtype)  # float16 itself would stop at 2048
    sums = numpy_.column_sums(x, np.dtype("float32"))
    assert sums.dtype == np.float32
    np.testing.assert_array_equal(sums, [3000, 750])
    out = np.zeros(2)
    assert numpy_.column_sums(x, np.dtype("float64"), out) is out
    np.testing.assert_array_equal(out, [3000, 750])


def test_running_statistics_move_by_their_own_weights():
    mean, var = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    numpy_normalization.bn_move(mean, var, np.array([10.0, 20.0]), np.array([30.0, 40.0]), 0.5, (0.25, 0.125))
    np.testing.assert_array_equal(mean, [3.0, 6.0])
    np.testing.assert_array_equal(var, [5.25, 7.0])


@pytest.mark.parametrize("divisor", [0, 7])
@pytest.mark.parametrize("labels", [[0, 3, -1, 2, 2], [-1, -1, 1, -1, -1], [-1, -1, -1, -1, -1]])
def test_cross_entropy_is_its_definition(labels, divisor):
    x, t = np.random.default_rng(0).standard_normal((5, 4)) * 3, np.array(labels)
    counts = [i for i in range(5) if t[i] != -1]
    over = divisor or max(len(counts), 1)
    p = np.exp(x) / np.exp(x).sum(1)[:, None]
    expected, gx = 0.0, np.zeros((5, 4))
    for i in counts:
        expected -= np.log(p[i, t[i]]) / over
        gx[i] = (p[i] - np.eye(4)[t[i]]) * 1.5 / over
    y, saved = numpy_softmax.cross_entropy(x, t, -1, divisor)
    np.testing.assert_allclose(y, expected, rtol=1e-12)
    given = numpy_softmax.cross_entropy_backward(x, t, saved, np.array(1.5), -1)
    np.testing.assert_allclose(given, gx, rtol=1e-12, atol=1e-15)


def test_cross_entropy_of_extreme_scores_and_of_labels_that_are_none():
    x = np.array([[1e30, 0, -1e30], [-np.inf, -np.inf, 0], [5, 5, 5]], np.float32)
    y, saved = numpy_softmax.cross_entropy(x, np.array([0, 2, 1]), -1, 0)
    np.testing.assert_allclose(y, np.log(3) / 3, rtol=1e-6)
    assert y.dtype == np.float32
    with np.errstate(over="ignore"):
        y, _ = numpy_softmax.cross_entropy(np.array([[np.inf, 0]]), np.array([1]), -1, 0)
    assert y == np.inf
    for label in (3, -2):  # no class, and not the one to be ignored
        t = np.array([label, 2, 1])
        y, saved = numpy_softmax.cross_entropy(x, t, -1, 0)
        gx = numpy_softmax.cross_entropy_backward(x, t, saved, np.float32(1), -1)
        assert np.isnan(y) and np.isnan(gx[0]).all() and np.isfinite(gx[1:]).all()
    y, saved = numpy_softmax.cross_entropy(x[1:].astype(np.float16), np.array([2, 1]), -1, 0)
    gx = numpy_softmax.cross_entropy_backward(x[1:].astype(np.float16), np.array([2, 1]), saved, np.float16(1), -1)
    assert y.dtype == gx.dtype == np.float16 and saved[0].dtype == saved[1].dtype == np.float32
