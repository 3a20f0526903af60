"""Every provider against the reference in float64, over a table of shapes; who served is part of each assertion."""

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry, PoolGeometry, table
from dbrdist.kernels.reference import numpy_, numpy_normalization
from tests.each import each
from tests.kernels.provider_helpers import HAS_ONEDNN, PROVIDERS, TOLERANCE, draw, laid_out, needs_onednn
from tests.processor import MULTIPLIES_BFLOAT16

LAYOUTS = ["channels_last", "nchw", "sliced", "reversed"]


def assert_close(actual, expected, dtype="float32", are_images=True):
    expected = np.asarray(expected, np.float64)
    scale = max(float(np.abs(expected).max(initial=0)), 1.0)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=TOLERANCE[dtype] * scale)
    if actual.ndim == 4 and are_images:
        assert backend.is_channels_last(actual)


def wide(*arrays):
    return [a.astype(np.float64) for a in arrays]


CONVOLUTIONS = [
    ((2, 16, 8, 8), (32, 16, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((2, 16, 9, 7), (16, 16, 3, 3), ConvGeometry(2, 2, 1, 1)),
    ((2, 16, 9, 7), (8, 16, 3, 2), ConvGeometry(2, 1, 0, 1)),
    ((2, 3, 15, 13), (8, 3, 7, 7), ConvGeometry(2, 2, 3, 3)),
    ((3, 1, 9, 9), (4, 1, 5, 5), ConvGeometry(1, 1, 2, 2)),
    ((2, 5, 6, 7), (7, 5, 1, 1), ConvGeometry()),
    ((2, 64, 7, 7), (128, 64, 1, 1), ConvGeometry(2, 2)),
    ((1, 512, 9, 10), (6, 512, 1, 1), ConvGeometry(3, 2)),
    ((1, 512, 1, 7), (9, 512, 1, 1), ConvGeometry(1, 2)),
    ((2, 8, 8, 8), (16, 8, 1, 1), ConvGeometry(2, 2, 0, 0, 1, 1, 1, True)),
    ((2, 8, 10, 11), (6, 8, 3, 3), ConvGeometry(1, 1, 2, 2, 2, 2)),
    ((2, 8, 9, 9), (12, 2, 3, 3), ConvGeometry(1, 1, 1, 1, 1, 1, 4)),
    ((2, 16, 6, 6), (16, 1, 3, 3), ConvGeometry(1, 2, 1, 1, 1, 1, 16)),
    ((2, 4, 8, 8), (4, 4, 3, 3), ConvGeometry(2, 2, 0, 0, 1, 1, 1, True)),
    ((1, 8, 1, 1), (8, 8, 1, 1), ConvGeometry()),
    ((1, 48, 5, 3), (80, 48, 1, 1), ConvGeometry()),
    ((2, 16, 12, 12), (24, 16, 1, 1), ConvGeometry()),
    ((0, 8, 6, 6), (4, 8, 3, 3), ConvGeometry(1, 1, 1, 1)),
]


@pytest.mark.parametrize("provider", PROVIDERS)
@each(**{"x_shape, W_shape, geometry": CONVOLUTIONS})
def test_convolution_of_float16(x_shape, W_shape, geometry, provider):
    check_convolution(x_shape, W_shape, geometry, provider, "nchw", "float16")


@pytest.mark.parametrize("provider", PROVIDERS)
@each(layout=LAYOUTS, **{"x_shape, W_shape, geometry": CONVOLUTIONS})
def test_convolution(x_shape, W_shape, geometry, provider, layout):
    check_convolution(x_shape, W_shape, geometry, provider, layout, "float32")


def check_convolution(x_shape, W_shape, geometry, provider, layout, dtype):
    x, W, b = draw(0, x_shape, dtype), draw(1, W_shape, dtype), draw(2, W_shape[:1], "float32")
    x64, W64, b64 = wide(x, W, b)
    y64 = numpy_.conv_forward(x64, W64, b64, geometry)
    gy = draw(3, y64.shape, dtype)
    x, gy = laid_out(x, layout), laid_out(gy, layout)
    out = np.full(W64.size, np.nan, np.float32)
    with kernels.use(provider):
        y = kernels.conv_forward(x, W, b, geometry)
        plain = kernels.conv_forward(x, W, None, geometry)
        gx = kernels.conv_backward_data(gy, W, x_shape, geometry)
        gW = kernels.conv_backward_weight(x, gy, W_shape, geometry, out=out, dtype=np.dtype(np.float32))
        gW_own = kernels.conv_backward_weight(x, gy, W_shape, geometry)
        assert kernels.provider_of("conv_forward", x, W, b, geometry) == (provider if x.size else "numpy")
    assert gW is out
    assert gW_own.dtype == x.dtype
    assert gW_own.flags.c_contiguous
    assert_close(y, y64, dtype)
    assert_close(plain, y64 - b64[:, None, None], dtype)
    assert_close(gx, numpy_.conv_backward_data(gy.astype("d"), W64, x_shape, geometry), dtype)
    gW64 = numpy_.conv_backward_weight(x64, gy.astype("d"), W_shape, geometry, np.float64)
    assert_close(gW, gW64.reshape(-1), dtype)
    np.testing.assert_allclose(gW_own.astype("d"), gW64, atol=TOLERANCE[dtype] * max(np.abs(gW64).max(initial=0), 1))


SMALL_CONVOLUTIONS = [
    ((1, 64, 2, 2), (64, 64, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((1, 32, 4, 4), (32, 32, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((1, 3, 8, 8), (16, 3, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((2, 4, 5, 7), (6, 4, 3, 2), ConvGeometry(2, 1, 0, 1)),
    ((3, 5, 4, 4), (7, 5, 1, 1), ConvGeometry()),
    ((2, 6, 5, 5), (3, 6, 1, 1), ConvGeometry(2, 3)),
    ((1, 2, 9, 8), (4, 2, 3, 3), ConvGeometry(1, 2, 2, 3, 2, 3)),
    ((2, 4, 8, 8), (4, 4, 3, 3), ConvGeometry(2, 2, 0, 0, 1, 1, 1, True)),
    ((1, 2, 3, 3), (5, 2, 2, 2), ConvGeometry(4, 4, 3, 3, 1, 1, 1, True)),  # windows that see padding alone
    ((1, 8, 1, 1), (8, 8, 1, 1), ConvGeometry()),
    ((4, 1, 3, 3), (1, 1, 3, 3), ConvGeometry()),
]


@each(layout=LAYOUTS, **{"x_shape, W_shape, geometry": SMALL_CONVOLUTIONS})
def test_small_convolutions_by_columns(x_shape, W_shape, geometry, layout):
    check_convolution(x_shape, W_shape, geometry, "columns", layout, "float32")
    x, W = draw(0, x_shape), draw(1, W_shape)
    assert kernels.provider_of("conv_forward", x, W, None, geometry) == "columns"


def test_columns_leave_what_is_large_or_of_other_types():
    x, W = draw(0, (1, 16, 8, 8)), draw(1, (16, 16, 3, 3))
    with kernels.use("columns"):
        for others in ((x, W), (x[:, :, :4, :4].astype("e"), W), (x[:, :, :4, :4], W.astype("d")), (x[:0], W)):
            served = kernels.provider_of("conv_forward", *others, None, ConvGeometry(1, 1, 1, 1))
            assert served == "numpy"


def test_calls_by_columns_leave_nothing_behind():
    """Memory is used again: neither earlier values, NaN nor padding must shine through."""
    W, geometry = draw(1, (8, 4, 3, 3)), ConvGeometry(1, 1, 1, 1)
    for seed in range(6):
        x = draw(seed, (1, 4, 4, 4))
        if seed % 2:
            x[0, 1] = np.nan
        gy = draw(seed, (1, 8, 4, 4)) * (np.inf if seed % 2 else 1)
        with np.errstate(invalid="ignore"):
            results = [
                (f(x, W, None, geometry), g(gy, W, x.shape, geometry), h(x, gy, W.shape, geometry, x.dtype))
                for f, g, h in ((kernels.conv_forward, kernels.conv_backward_data, kernels.conv_backward_weight),
                                (numpy_.conv_forward, numpy_.conv_backward_data, numpy_.conv_backward_weight))
            ]  # fmt: skip
        for one, other in zip(*results):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("provider", [*PROVIDERS, "columns"])
def test_weights_may_have_any_strides(provider):
    for W_shape in ((6, 6, 3, 3), (6, 6, 1, 1)):  # the second is a product of few pixels
        x, W, geometry = draw(0, (2, 6, 5, 5)), draw(1, W_shape), ConvGeometry()
        expected = numpy_.conv_forward(*wide(x, W), None, geometry)
        gy = draw(2, expected.shape)
        expected_gx = numpy_.conv_backward_data(*wide(gy, W), x.shape, geometry)
        with kernels.use(provider):
            for weights in (backend.channels_last(W), np.asfortranarray(W), laid_out(W, "reversed")):
                assert_close(kernels.conv_forward(x, weights, None, geometry), expected)
                assert_close(kernels.conv_backward_data(gy, weights, x.shape, geometry), expected_gx)


@pytest.mark.parametrize("provider", [*PROVIDERS, "columns"])
def test_convolutions_without_outputs_have_no_gradients(provider):
    x, W, gy, geometry = draw(0, (1, 3, 4, 4)), draw(1, (0, 3, 3, 3)), draw(2, (1, 0, 2, 2)), ConvGeometry()
    with kernels.use(provider):
        assert kernels.conv_forward(x, W, None, geometry).shape == gy.shape
        gx = kernels.conv_backward_data(gy, W, x.shape, geometry)
        assert kernels.conv_backward_weight(x, gy, W.shape, geometry).shape == W.shape
        assert kernels.provider_of("conv_forward", x, W, None, geometry) == "numpy"
    np.testing.assert_array_equal(gx, np.zeros_like(x))


NORMALIZATIONS = [
    ((4, 16, 5, 7), (0, 2, 3)),
    ((3, 3, 9, 1), (0, 2, 3)),
    ((2, 1, 4, 4), (0, 2, 3)),
    ((6, 33, 1, 1), (0, 2, 3)),
    ((2, 128, 7, 5), (0, 2, 3)),
    ((9, 20), (0,)),
    ((0, 4, 3, 3), (0, 2, 3)),
]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("shape", "axis"), NORMALIZATIONS)
@each(layout=LAYOUTS)
def test_batch_normalization(shape, axis, provider, layout):
    check_batch_normalization(shape, axis, provider, layout, "float32")


def check_batch_normalization(shape, axis, provider, layout, dtype):
    x, gy = draw(0, shape, dtype), draw(1, shape, dtype)
    gamma, beta, eps = draw(2, shape[1:2]), draw(3, shape[1:2]), 2e-5
    x64, gy64, gamma64, beta64 = wide(x, gy, gamma, beta)
    if x.ndim == 4:
        x, gy = laid_out(x, layout), laid_out(gy, layout)
    for relu in (False, True):
        y64, mean64, var64, saved64 = numpy_normalization.bn_forward(x64, gamma64, beta64, eps, axis, relu)
        with kernels.use(provider):
            y, mean, var, saved = kernels.bn_forward(x, gamma, beta, eps, relu, axis)
            inferred = kernels.bn_inference(x, gamma, beta, mean, var, eps, relu, axis)
            assert kernels.provider_of("bn_forward", x, gamma, beta, eps, axis, relu) == (
                provider if x.size else "numpy"
            )
        assert mean.dtype == var.dtype == np.float32
        assert_close(y, y64, dtype)
        assert_close(mean, mean64)
        assert_close(var, var64)
        assert_close(inferred, y64, dtype)
        mask = kernels.bn_mask(saved, y.shape, y.dtype) if relu else None
        if mask is not None:
            assert (mask().dtype, mask().strides) == (y.dtype, y.strides)
            np.testing.assert_array_equal(mask() != 0, y != 0)
        assert (mask is None) == (not relu or provider == "numpy" or not x.size)
        for masked in {False, relu}:  # a fused forward also serves the gradient before the ReLU
            out_gamma, out_beta = np.full((2, *gamma.shape), np.nan, np.float32)
            gx, ggamma, gbeta = kernels.bn_backward(
                x, gamma, mean, var, gy, eps, saved, masked, axis, out_gamma, out_beta
            )
            expected = numpy_normalization.bn_backward(x64, gamma64, mean64, var64, gy64, eps, saved64, axis, masked)
            assert ggamma is out_gamma
            assert gbeta is out_beta
            for actual, value in zip((gx, ggamma, gbeta), expected):
                assert_close(actual, value, dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("shape", "axis"), NORMALIZATIONS[:-1])
def test_batch_normalization_in_parts(shape, axis, provider):
    """Statistics, sums and the gradient of the input, against their definitions; ``count`` may be of a larger batch."""
    x, gy, gamma = draw(0, shape), draw(1, shape), draw(2, shape[1:2])
    mean, var, count, eps = draw(3, shape[1:2]), abs(draw(4, shape[1:2])), 1000.0, 1e-3
    kept = (slice(None), *(None,) * (x.ndim - 2))
    s = 1 / np.sqrt(var.astype("d") + eps)[kept]
    x_hat = (x.astype("d") - mean[kept]) * s
    ggamma, gbeta = (gy * x_hat).sum(axis), gy.astype("d").sum(axis)
    with kernels.use(provider):
        own = kernels.bn_statistics(x, axis)
        sums = kernels.bn_sums(x, mean, var, gy, eps, axis)
        gx = kernels.bn_input_gradient(x, gamma, mean, var, gy, *sums, count, eps, axis)
        for kernel, arguments in (("bn_statistics", (x, axis)), ("bn_sums", (x, mean, var, gy, eps, axis))):
            assert kernels.provider_of(kernel, *arguments) == provider
    for actual, expected in zip((*own, *sums), (x.astype("d").mean(axis), x.astype("d").var(axis), ggamma, gbeta)):
        assert_close(actual, expected)
    assert_close(gx, gamma[kept] * s * (gy - (gbeta[kept] + x_hat * ggamma[kept]) / count))


@needs_onednn
@each(rest=[(), (8, 9)], num_channels=[1, 3, 8, 12, 16, 31, 64, 130])
def test_a_fused_relu_changes_no_bit(num_channels, rest):
    """Forward and backward: which of both runs depends on what was expected, and a resumed run expects nothing."""
    shape, axis, eps = (128, num_channels, *rest), (0, 2, 3) if rest else (0,), 2e-5
    x, gy = (laid_out(draw(i, shape), "channels_last") if rest else draw(i, shape) for i in (0, 1))
    gamma, beta = draw(2, shape[1:2]), draw(3, shape[1:2])
    plain, fused = (kernels.bn_forward(3 * x + 1, gamma, beta, eps, relu, axis) for relu in (False, True))
    np.testing.assert_array_equal(fused[0], np.maximum(plain[0], 0))
    for a, b in zip(fused[1:3], plain[1:3]):
        np.testing.assert_array_equal(a, b)
    again = [kernels.bn_inference(3 * x + 1, gamma, beta, *plain[1:3], eps, relu, axis) for relu in (False, True)]
    np.testing.assert_array_equal(again[0], plain[0])
    np.testing.assert_array_equal(again[1], fused[0])
    one = kernels.bn_backward(3 * x + 1, gamma, *plain[1:3], gy, eps, fused[3], True, axis)
    g = kernels.relu_backward(fused[0], gy)
    two = kernels.bn_backward(3 * x + 1, gamma, *plain[1:3], g, eps, plain[3], False, axis)
    for a, b in zip(one, two):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_large_mean_keeps_its_variance(provider):
    x = (1e4 + np.arange(12, dtype=np.float32)).reshape(3, 1, 2, 2)
    one = np.ones(1, np.float32)
    with kernels.use(provider):
        var = kernels.bn_forward(x, one, one, 1e-5)[2]
    assert var[0] == pytest.approx(np.var(np.arange(12)), rel=1e-4)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(shape=[(1, 3), (5, 1), (64, 128), (300, 77), (0, 4)], dtype=["float32", "float16"])
def test_layer_normalization(shape, provider, dtype):
    """Against the definition in float64, also for rows that lie apart."""
    x, gy, gamma, beta, eps = draw(0, shape), draw(1, shape), draw(2, shape[1:]), draw(3, shape[1:]), 1e-3
    x, gy = (np.repeat(a.astype(dtype), 2, 1)[:, ::2] for a in (x, gy))
    wide_x, g = x.astype("d"), gy.astype("d") * gamma
    mean, var = wide_x.mean(1, keepdims=True), wide_x.var(1, keepdims=True)
    s = 1 / np.sqrt(var + eps)
    x_hat = (wide_x - mean) * s
    gx = s * (g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True))
    with kernels.use(provider):
        y, m, v = kernels.ln_forward(x, gamma, beta, eps)
        grads = kernels.ln_backward(x, gamma, m, v, gy, eps)
        served = kernels.provider_of("ln_forward", x, gamma, beta, eps)
    assert served == (provider if dtype == "float32" and x.size else "numpy")
    assert [a.dtype for a in (y, m, v, *grads)] == [x.dtype, "f", "f", x.dtype, "f", "f"]
    tolerance = 2e-2 if dtype == "float16" else 2e-5 * max(shape[0], 1)
    for actual, expected in zip((y, m, v, *grads), (
        x_hat * gamma + beta, mean[:, 0], var[:, 0], gx, (gy * x_hat).sum(0), gy.astype("d").sum(0)
    )):  # fmt: skip
        np.testing.assert_allclose(actual, expected, atol=tolerance)


POOLINGS = [
    ((2, 16, 8, 9), PoolGeometry("max", 2, 2, 2, 2)),
    ((2, 64, 15, 14), PoolGeometry("max", 3, 3, 2, 2, 1, 1)),
    ((2, 3, 8, 7), PoolGeometry("max", 3, 3, 2, 2, 0, 0, True)),
    ((2, 1, 8, 7), PoolGeometry("max", 3, 2, 2, 1, 1, 1, True)),
    ((1, 4, 20, 20), PoolGeometry("max", 17, 17, 1, 1, 8, 8)),
    ((2, 16, 7, 8), PoolGeometry("average", 3, 2, 2, 2, 1, 1)),
    ((2, 16, 7, 7), PoolGeometry("average", 7, 7, 7, 7)),
    ((0, 4, 4, 4), PoolGeometry("max", 2, 2, 2, 2)),
]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("shape", "geometry"), POOLINGS)
@each(layout=LAYOUTS)
def test_pooling(shape, geometry, provider, layout):
    check_pooling(shape, geometry, provider, layout, "float32")


def check_pooling(shape, geometry, provider, layout, dtype):
    x = draw(0, shape, dtype)
    y64, saved64 = numpy_.pool_forward(x.astype("d"), geometry)
    gy = draw(1, y64.shape, dtype)
    with kernels.use(provider):
        y, saved = kernels.pool_forward(laid_out(x, layout), geometry)
        gx = kernels.pool_backward(laid_out(gy, layout), shape, saved, geometry)
        assert kernels.provider_of("pool_forward", x, geometry) == (provider if x.size else "numpy")
    assert_close(y, y64, dtype)
    if geometry.kind == "max":
        np.testing.assert_array_equal(y, y64)
        indices = kernels.pool_indices(saved, y.shape, geometry)
        np.testing.assert_array_equal(indices, numpy_.pool_indices(saved64, y.shape, geometry))
    assert_close(gx, numpy_.pool_backward(gy.astype("d"), shape, saved64, geometry), dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(shape=[(2, 32, 32, 32), (5, 16, 33, 21)], layout=LAYOUTS)
def test_elementwise(shape, provider, layout):
    check_elementwise(shape, provider, layout, "float32")


def check_elementwise(shape, provider, layout, dtype):
    a, b = draw(0, shape, dtype), draw(1, shape, dtype)
    a64, b64 = wide(a, b)
    a, b = laid_out(a, layout), laid_out(b, layout)
    with kernels.use(provider):
        assert kernels.provider_of("add", a, b) == provider
        are_images = backend.lies_as_images(a)  # the result lies as its operands do
        assert_close(kernels.relu_forward(a), np.maximum(a64, 0), dtype, are_images)
        y = kernels.relu_forward(a)
        assert_close(kernels.relu_backward(y, b), b64 * (a64 > 0), dtype, are_images)
        assert_close(kernels.add(a, b), a64 + b64, dtype, are_images)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_elementwise_on_matrices(provider):
    a, b = draw(0, (300, 200)), draw(1, (200, 300)).T
    with kernels.use(provider):
        assert_close(kernels.add(a, b), a.astype("d") + b)
        assert_close(kernels.relu_backward(np.maximum(a, 0), b), b * (a > 0))


MATRICES = {
    "plain": lambda a: a,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "sliced": lambda a: np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2],
    "rows of a wider one": lambda a: np.hstack([a, a])[:, : a.shape[1]],
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
}


@pytest.mark.parametrize("provider", PROVIDERS)
@each(left=MATRICES, right=MATRICES, dtype=["float32", "bfloat16", "float16"])
def test_matrix_product(provider, left, right, dtype):
    a, b = MATRICES[left](draw(0, (70, 90), dtype)), MATRICES[right](draw(1, (90, 130), dtype))
    expected = numpy_.matmul(*wide(a, b))
    out = np.full((70, 130), np.nan, np.float32)
    with kernels.use(provider):
        y = kernels.matmul(a, b)
        assert kernels.matmul(a, b, out) is out
        if dtype != "bfloat16" or MULTIPLIES_BFLOAT16:
            assert kernels.provider_of("matmul", a, b) == provider
    assert y.dtype == a.dtype
    assert_close(y, expected, dtype)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(
    left=["plain", "transposed"],
    right=["plain", "rows of a wider one"],
    shape=[(300, 40, 50), (20, 2700, 48), (70, 2700, 48), (260, 2700, 70)],
)
def test_large_products_in_pieces_and_packed(provider, left, right, shape):
    rows, depth, columns = shape
    a, b = MATRICES[left](draw(0, (rows, depth), "float32")), MATRICES[right](draw(1, (depth, columns), "float32"))
    expected, out = a.astype(np.float64) @ b, np.full((rows, columns), np.nan, np.float32)
    with kernels.use(provider):
        for scale in (1, -2):  # what was packed for one call must not serve the next
            y = kernels.matmul(a, scale * b)
            assert kernels.matmul(a, scale * b, out) is out
            for found in (y, out):
                np.testing.assert_allclose(found, scale * expected, atol=2e-5 * abs(expected).max())


@pytest.mark.parametrize("provider", PROVIDERS)
@each(layout=MATRICES, is_often=[False, True], dtype=["float32", "bfloat16", "float16"])
def test_products_with_one_packed_matrix_are_added(provider, layout, is_often, dtype):
    a, y = draw(0, (70, 90), dtype), draw(1, (70, 130), dtype)
    matrices = [MATRICES[layout](draw(seed, (90, 130), dtype)) for seed in (2, 3)]
    with kernels.use(provider):
        functions = [kernels.packed(b, 70, is_often) for b in matrices]  # both are alive at the same time
        if dtype == "float32":
            assert kernels.provider_of("packed", matrices[0], 70, is_often) == provider
        for b, add_product in zip(matrices, functions):
            for left in (a, -a[::-1].copy()):
                out = y.copy()
                add_product(left, out)
                wide_left, wide_b, wide_y = wide(left, b, y)
                assert_close(out, wide_y + wide_left @ wide_b, dtype)


def test_small_or_empty_products_are_left_to_numpy():
    for shape in ((8, 8), (0, 8)):
        a = draw(0, shape)
        b = draw(1, (8, 8))
        assert kernels.provider_of("matmul", a, b) == "numpy"
        assert kernels.matmul(a, b).shape == shape
        assert kernels.provider_of("packed", b, len(a), True) == "numpy"


@needs_onednn
def test_bfloat16_where_the_processor_has_it():
    """Values near float64's; on a processor without the instructions NumPy serves, with the same result."""
    for x_shape, W_shape, geometry in CONVOLUTIONS[:2]:
        x, W = draw(0, x_shape, "bfloat16"), draw(1, W_shape, "bfloat16")
        kernels.conv_forward(x, W, None, geometry)
        served = kernels.provider_of("conv_forward", x, W, None, geometry)
        check_convolution(x_shape, W_shape, geometry, served, "nchw", "bfloat16")
        mixed = kernels.conv_forward(x, W.astype(np.float32), None, geometry)
        assert mixed.dtype == x.dtype
        assert_close(mixed, numpy_.conv_forward(*wide(x, W), None, geometry), "bfloat16")
        pixel = W[:, :, :1, :1].astype(np.float32)  # a product of few pixels where types agree
        y = kernels.conv_forward(x, pixel, None, ConvGeometry())
        assert_close(y, numpy_.conv_forward(*wide(x, pixel), None, ConvGeometry()), "bfloat16")
    x = draw(0, (4, 16, 5, 7), "bfloat16")
    kernels.bn_forward(x, draw(2, (16,)), draw(3, (16,)), 1e-5)
    arguments = (x, draw(2, (16,)), draw(3, (16,)), 1e-5, (0, 2, 3), False)
    served = kernels.provider_of("bn_forward", *arguments)
    check_batch_normalization(x.shape, (0, 2, 3), served, "nchw", "bfloat16")
    kernels.pool_forward(draw(0, POOLINGS[1][0], "bfloat16"), POOLINGS[1][1])
    served = kernels.provider_of("pool_forward", draw(0, POOLINGS[1][0], "bfloat16"), POOLINGS[1][1])
    check_pooling(*POOLINGS[1], served, "nchw", "bfloat16")
    check_elementwise((2, 32, 32, 32), "numpy", "nchw", "bfloat16")


def convolved(x, W):
    return kernels.provider_of("conv_forward", x, W, None, ConvGeometry()), kernels.conv_forward(
        x, W, None, ConvGeometry()
    )


@needs_onednn
def test_a_call_of_mixed_types_changes_no_other_call():
    x, W = draw(0, (2, 16, 9, 9)), draw(1, (8, 16, 3, 3))
    expected = numpy_.conv_forward(*wide(x, W), None, ConvGeometry())
    gy = expected.astype("f")
    for others in ((x, W.astype("d")), (x.astype("d"), W), (x, W)):
        served, y = convolved(*others)
        assert served == ("onednn" if others[0].dtype == others[1].dtype else "numpy")
        assert y.dtype == others[0].dtype
        assert_close(y, expected)
    for mixed in (gy.astype("d"), gy):
        served = kernels.provider_of("conv_backward_weight", x, mixed, W.shape, ConvGeometry(), x.dtype, None)
        assert served == ("onednn" if mixed is gy else "numpy")
    a, b = draw(2, (300, 200)), draw(3, (200, 300))
    assert [kernels.provider_of("matmul", a, m) for m in (b.astype("d"), b)] == ["numpy", "onednn"]
    big = draw(4, (2, 32, 32, 32))
    assert [kernels.provider_of("add", big, m) for m in (big.astype("d"), big)] == ["numpy", "onednn"]


@needs_onednn
def test_types_are_compared_by_what_they_mean():
    """An array that was unpickled may carry another object for the same type."""
    other = np.dtype(np.float32).newbyteorder("=").newbyteorder("<")
    x, W = draw(0, (2, 16, 9, 9)), draw(1, (8, 16, 3, 3))
    foreign = np.frombuffer(x.tobytes(), other).reshape(x.shape)
    assert foreign.dtype is not x.dtype
    served, y = convolved(foreign, W)
    assert served == "onednn"
    np.testing.assert_array_equal(y, kernels.conv_forward(x, W, None, ConvGeometry()))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types_are_served_by_numpy_or_by_way_of_float32(dtype):
    x, W, gamma = draw(0, (8, 64, 32, 32), dtype), draw(1, (64, 64, 3, 3), dtype), draw(2, (64,), dtype)
    matrix = draw(3, (256, 256), dtype)
    for kernel, *arguments in (
        ("conv_forward", x, W, None, ConvGeometry()),
        ("conv_backward_data", x, W, (8, 64, 34, 34), ConvGeometry()),
        ("conv_backward_weight", x, x, (64, 64, 1, 1), ConvGeometry(), x.dtype, None),
        ("bn_forward", x, gamma, gamma, 1e-5, (0, 2, 3), False),
        ("bn_inference", x, gamma, gamma, gamma, gamma, 1e-5, (0, 2, 3), False),
        ("pool_forward", x, PoolGeometry("max", 2, 2, 2, 2)),
        ("matmul", matrix, matrix),
        ("relu_forward", x),
        ("relu_backward", x, x),
        ("add", x, x),
    ):
        by_float32 = dtype == "float16" and HAS_ONEDNN and kernel.startswith(("conv", "matmul"))
        with kernels.use("columns", "onednn"):  # not the compiled loops
            assert kernels.provider_of(kernel, *arguments) == ("onednn" if by_float32 else "numpy")


@needs_onednn
def test_geometry_beyond_onednn_is_served_by_numpy():
    geometry = PoolGeometry("max", 1, 1, 4, 4, 0, 0, True)
    x = draw(0, (1, 2, 6, 6))
    assert kernels.provider_of("pool_forward", x, geometry) == "numpy"
    assert kernels.pool_forward(x, geometry)[0][0, 0, 2, 2] == -np.inf
    gamma = draw(1, (2, 6, 6))
    assert kernels.provider_of("bn_forward", x, gamma, gamma, 1e-5, (0,), False) == "numpy"


def flat(n):
    return np.ones(n, np.float32)


def thin(n):
    return backend.channels_last(np.ones((1, 1, n, 1), np.float32))


FROM = [  # a kernel, its arguments for so many elements, and from how many on oneDNN takes them
    ("softmax", lambda n: (flat(n)[None], 1), 1 << 9),
    ("log_softmax", lambda n: (flat(n)[None], 1), 1 << 9),
    ("softmax_backward", lambda n: (flat(n)[None], flat(n)[None], 1), 1 << 9),
    ("relu_backward", lambda n: (flat(n), flat(n)), 1 << 15),
    ("add", lambda n: (flat(n), flat(n)), 1 << 15),
    ("relu_backward_of_sum", lambda n: (thin(n), thin(n), thin(n), None), 1 << 17),
    ("relu_backward_over", lambda n: (thin(n), thin(n)), 1 << 17),
]


@needs_onednn
@each(**{"kernel, arguments, count": FROM})
def test_onednn_takes_what_is_large_enough_for_a_call(kernel, arguments, count):
    with kernels.use("onednn"):  # not the compiled loops
        assert kernels.provider_of(kernel, *arguments(count)) == "onednn"
        assert kernels.provider_of(kernel, *arguments(count - 1)) == "numpy"


@pytest.mark.parametrize("kernel", [kernels.relu_forward, lambda x: kernels.relu_backward(x, x)])
def test_few_elements_are_one_call_of_numpy_without_a_plan(kernel):
    table.forget()
    kernel(flat(1024))
    assert not table._local.plans
    kernel(flat(1025))
    assert len(table._local.plans) == 1


def test_unknown_provider_is_refused():
    with (
        pytest.raises(
            ValueError, match=r"a provider out of \['columns', 'cuda', 'cudnn', 'loops', 'numpy', 'onednn'\], got 'mkl'"
        ),
        kernels.use("mkl"),
    ):
        pass
