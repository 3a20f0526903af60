"""The reference kernels against direct loops over the definitions, in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry, PoolGeometry
from dbrdist.kernels.cpu import onednn_pooling
from dbrdist.kernels.reference import numpy_, numpy_normalization
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn

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


def test_images_that_need_no_frame_are_not_copied():
    x = backend.channels_last(np.random.default_rng(0).standard_normal((2, 3, 4, 5)))
    columns = numpy_._columns(x, ConvGeometry(), (1, 1), (4, 5))
    assert np.shares_memory(columns, x)
    np.testing.assert_array_equal(columns[0], x.transpose(0, 2, 3, 1).reshape(-1, 3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_summed_in_float32(dtype):
    from dbrdist.core.array import backend

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


@needs_onednn
@each(kind=["max", "average"], shape=[(2, 3, 7, 6), (1, 17, 40, 40)], size=[3, 17])
def test_a_child_takes_the_gradient_of_its_parents_pooling(kind, shape, size):
    size = min(size, *shape[2:])
    rng, g = np.random.default_rng(0), PoolGeometry(kind, size, size, 2, 2, 1, 1)
    x = backend.channels_last(rng.standard_normal(shape, np.float32))
    with kernels.use("onednn"):
        y, (_, saved) = kernels.pool_forward(x, g)
    assert (saved is None) == (kind == "average") and (saved is None or saved.ndim == 1)
    gy = backend.channels_last(rng.standard_normal(y.shape, np.float32))
    expected = numpy_.pool_backward(gy, shape, numpy_.pool_forward(x, g)[1], g)
    np.testing.assert_allclose(onednn_pooling._backward_of_parent(gy, shape, saved, g), expected, atol=1e-6)
