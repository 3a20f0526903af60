"""Gradients of the weights of many channels, a product for each tap, against the definition in float64."""

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn, onednn_convolution, onednn_taps
from tests.each import each

try:
    onednn.library()
except onednn.Unavailable:
    pytest.skip("oneDNN is not installed", allow_module_level=True)


# images, kernel (O, C, kh, kw), stride, pad and dilation of rows and columns, cover_all
CASES = [
    ((2, 3, 7, 7), (5, 3, 3, 3), (1, 1, 1, 1, 1, 1), False),
    ((2, 3, 7, 6), (5, 3, 3, 3), (2, 2, 1, 1, 1, 1), False),
    ((1, 4, 9, 5), (2, 4, 2, 3), (3, 1, 0, 2, 2, 1), False),
    ((3, 1, 5, 8), (2, 1, 1, 5), (1, 2, 0, 3, 1, 1), False),
    ((1, 2, 2, 2), (3, 2, 3, 3), (1, 3, 3, 3, 2, 1), False),  # taps that see the padding alone
    ((2, 2, 6, 7), (3, 2, 3, 2), (2, 3, 0, 1, 1, 2), True),
]


def definition(x, gy, W_shape, g):
    """The sum over all pixels within the image that a tap sees."""
    gW = np.zeros(W_shape)
    for u, v in np.ndindex(*W_shape[2:]):
        for k, m in np.ndindex(*gy.shape[2:]):
            row, column = k * g.sh + u * g.dh - g.ph, m * g.sw + v * g.dw - g.pw
            if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
                gW[:, :, u, v] += gy[:, :, k, m].T.astype("d") @ x[:, :, row, column].astype("d")
    return gW


def arrays(x_shape, W_shape, geometry):
    rng = np.random.default_rng(0)
    y_shape = (x_shape[0], W_shape[0], *geometry.out_hw(*x_shape[2:], *W_shape[2:]))
    x, gy = (backend.channels_last(rng.standard_normal(s, np.float32)) for s in (x_shape, y_shape))
    return x, gy, np.full(W_shape, np.nan, np.float32)


def planned(monkeypatch, x, gy, out, g):
    """The plan that convolutions choose, where 1 channel counts as many."""
    monkeypatch.setattr(onednn_taps, "_MANY_CHANNELS", 1)
    return onednn_convolution._plan_backward_weight(x, gy, out.shape, g, x.dtype, out)


@each(**{"x_shape, W_shape, window, cover_all": CASES})
def test_every_tap_sees_its_pixels(x_shape, W_shape, window, cover_all):
    g = ConvGeometry(*window, 1, cover_all)
    x, gy, out = arrays(x_shape, W_shape, g)
    with pytest.MonkeyPatch.context() as patch:
        plan = planned(patch, x, gy, out, g)
    assert plan.__module__ == onednn_taps.__name__
    expected = definition(x, gy, W_shape, g)
    assert plan(x, gy, W_shape, g, x.dtype, out) is out
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
    plain = np.ascontiguousarray(x), np.ascontiguousarray(gy)
    np.testing.assert_array_equal(plan(*plain, W_shape, g, x.dtype, None), out)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_does_not_meet_the_padding(monkeypatch, value):
    g = ConvGeometry(1, 1, 1, 1)
    x, gy, out = arrays((1, 2, 4, 4), (3, 2, 3, 3), g)
    gy[0, 1, 0, 0] = value
    with np.errstate(invalid="ignore"):
        planned(monkeypatch, x, gy, out, g)(x, gy, out.shape, g, x.dtype, out)
        expected = definition(x, gy, out.shape, g)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
    assert np.isfinite(out[1, :, 0]).all() and not np.isfinite(out[1, :, 1:, 1:]).any()


def test_few_channels_many_pixels_groups_and_other_types_are_left_to_the_convolution():
    g = ConvGeometry(1, 1, 1, 1)
    x, gy, out = (np.zeros(s, np.float32) for s in ((16, 512, 7, 7), (16, 512, 7, 7), (512, 512, 3, 3)))
    assert onednn_taps.suits(x, gy, out, g)
    assert not onednn_taps.suits(x, gy, out[:, :511].copy(), g)
    assert not onednn_taps.suits(x, gy, out[:511], g)
    for num_pixels, suits in ((2048, True), (2049, False)):
        assert onednn_taps.suits(x, np.zeros((num_pixels, 512, 1, 1), np.float32), out, g) == suits
    assert not onednn_taps.suits(x, gy, out, g._replace(groups=2))
    assert not onednn_taps.suits(x, gy, out[:, :, :1, :1].copy(), g)
    for two_taps in (out[:, :, :1, :2], out[:, :, :2, :1]):
        assert onednn_taps.suits(x, gy, two_taps.copy(), g)
    assert not onednn_taps.suits(x, gy, out[..., ::-1], g)
    assert not onednn_taps.suits(x.astype(np.float16), gy, out, g)


BLIND = [
    ((3, 16, 2, 2), (31, 16, 3, 3), ConvGeometry(2, 3, 1, 2)),
    ((2, 4, 13, 1), (16, 2, 3, 4), ConvGeometry(1, 3, 1, 3, groups=2)),
    ((1, 16, 12, 2), (128, 16, 4, 3), ConvGeometry(3, 3, 2, 2, cover_all=True)),
    ((2, 16, 2, 9), (8, 16, 3, 3), ConvGeometry(3, 1, 2, 1)),
]


@each(**{"x_shape, W_shape, g": BLIND, "dtype": ["bfloat16", "float32"], "W_dtype": ["bfloat16", "float32"]})
def test_taps_that_see_the_padding_alone_have_no_gradient(x_shape, W_shape, g, dtype, W_dtype):
    """oneDNN 3.2's kernel for bfloat16 gives them what its scratchpad held."""
    dtype, W_dtype = backend.as_dtype(dtype), backend.as_dtype(W_dtype)
    x, gy, _ = (a.astype(dtype) for a in arrays(x_shape, W_shape, g))
    onednn.scratch("scratchpad", 1 << 22)[:] = 255  # NaN in any type
    whole = W_shape[0], g.groups * W_shape[1], *W_shape[2:]
    expected = definition(x, gy, whole, g)
    if g.groups > 1:
        size, o = W_shape[1], W_shape[0] // g.groups
        expected = np.concatenate([expected[i * o :][:o, i * size :][:, :size] for i in range(g.groups)])
    gW = kernels.conv_backward_weight(x, gy, W_shape, g, W_dtype, None).astype("d")
    assert (expected == 0).any() and (gW[expected == 0] == 0).all()
    np.testing.assert_allclose(gW, expected, rtol=0.02, atol=0.3 if "bfloat16" in (dtype.name, W_dtype.name) else 1e-4)


@each(num_channels=[1, 3, 17], g=[ConvGeometry(2, 2), ConvGeometry(1, 2, 0, 0, 2, 2)])
def test_a_pointwise_gradient_with_strides_and_odd_channels_is_not_left_to_onednn(num_channels, g):
    """oneDNN 3.2's kernel for AVX2 writes beyond its scratchpad there, which kills the program later."""
    W_shape = 5, num_channels, 1, 1
    x, gy, out = arrays((2, num_channels, 7, 6), W_shape, g)
    with pytest.raises(onednn.Unsupported):
        onednn_convolution._plan_backward_weight(x, gy, W_shape, g, x.dtype, out)
    gW = kernels.conv_backward_weight(x, gy, W_shape, g, x.dtype, None)
    np.testing.assert_allclose(gW, definition(x, gy, W_shape, g), rtol=0, atol=1e-4)


DILATED = [((3, 33, 9, 30), (1, 33, 2, 2), 1), ((3, 8, 9, 30), (8, 1, 2, 2), 8), ((2, 24, 5, 34), (17, 24, 2, 3), 1)]


@each(**{"x_shape, W_shape, groups": DILATED, "W_dtype": ["bfloat16", "float32"]})
def test_gradients_of_dilated_rows_and_odd_channels_are_right_in_bfloat16(x_shape, W_shape, groups, W_dtype):
    """oneDNN 3.2's kernel for AVX-512 is wrong where outputs have more than 28 columns; that for AMX is not."""
    dtype, g = backend.as_dtype("bfloat16"), ConvGeometry(dh=2, groups=groups)
    x, gy, _ = (a.astype(dtype) for a in arrays(x_shape, W_shape, g))
    onednn.scratch("scratchpad", 1 << 22)[:] = 255  # NaN in any type
    gW = kernels.conv_backward_weight(x, gy, W_shape, g, backend.as_dtype(W_dtype), None).astype("d")
    parts = np.split(x.astype("d"), groups, 1), np.split(gy.astype("d"), groups, 1)
    shape = W_shape[0] // groups, *W_shape[1:]
    expected = np.concatenate([definition(*pair, shape, g._replace(groups=1)) for pair in zip(*parts)])
    np.testing.assert_allclose(gW, expected, rtol=0.02, atol=0.3)


@each(num_channels=[16, 64, 496])
def test_a_pointwise_gradient_with_strides_whose_channels_fill_vectors_is_left_to_onednn(num_channels):
    x, gy = np.ones((2, num_channels, 7, 6), np.float32), np.ones((2, 5, 4, 3), np.float32)
    arguments = x, gy, (5, num_channels, 1, 1), ConvGeometry(2, 2), x.dtype, None
    with kernels.use("onednn"):
        assert kernels.provider_of("conv_backward_weight", *arguments) == "onednn"
