"""Tests of dbrdist.functions.convolution_nd."""

import numpy as np
import pytest

from dbrdist import Variable, kernels
from dbrdist import functions as F
from dbrdist.core.array.backend import as_dtype
from tests.each import each
from tests.functions.image_helpers import draw


@each(
    **{
        "stride, pad, dilate": [
            ((1, 2, 3), (2, 1, 0), (1, 1, 2)),
            ((3, 1, 2), (0, 2, 1), (2, 1, 1)),
            ((2, 3, 1), (1, 0, 2), (1, 2, 1)),
            ((2, 1, 1), (0, 0, 0), (1, 3, 2)),
            ((1, 2, 2), (1, 1, 1), (3, 1, 1)),
            ((3, 1, 2), (1, 0, 2), (1, 1, 1)),
        ]
    },
    groups=[1, 2],
    cover_all=[False, True],
)
def test_a_transposed_convolution_over_three_axes_is_the_transpose(stride, pad, dilate, groups, cover_all):
    """<conv(x), y> = <x, deconv(y)>, with another number along each axis."""
    x, W = draw(0, 2, 4, 9, 8, 7), draw(1, 6, 4 // groups, 3, 2, 3)
    conv = F.convolution_nd(x, W, stride=stride, pad=pad, dilate=dilate, groups=groups, cover_all=cover_all).array
    y = draw(2, *conv.shape)
    options = {"stride": stride, "pad": pad, "dilate": dilate, "groups": groups, "outsize": x.shape[2:]}
    back = F.deconvolution_nd(y, W, **options).array
    assert back.shape == x.shape
    np.testing.assert_allclose((conv * y).sum(), (x * back).sum(), rtol=1e-10)


ONES = np.ones


@pytest.mark.parametrize("call, message", [
    (lambda: F.convolution_1d(ONES((2, 3, 4, 5)), ONES((2, 3, 2))), r"x: expected shape \(N, C, 1 axes\)"),
    (lambda: F.convolution_nd(ONES((2, 3)), ONES((2, 3))), r"convolution_nd: x: expected shape \(N, C, ...\)"),
    (lambda: F.convolution_3d(ONES((2, 3, 4, 4, 4)), ONES((2, 3, 2))), r"convolution_3d: W: expected 5 axes, as x has"),
    (lambda: F.convolution_3d(ONES((2, 3, 1, 4, 4)), ONES((2, 3, 2, 2, 2))), r"axes no smaller than the window"),
    (lambda: F.convolution_nd(ONES((2, 3, 4)), ONES((2, 3, 2)), stride=(1, 2)), r"stride: expected an integer or 1"),
    (lambda: F.deconvolution_nd(ONES((2, 3, 4)), ONES((3, 2, 2)), outsize=9), r"outsize: expected sizes whose"),
    (lambda: F.depthwise_convolution_2d(ONES((2, 3, 4, 4)), ONES((2, 4, 2, 2))), r"W: expected shape \(D, 3, kh, kw\)"),
    (lambda: F.max_pooling_1d(ONES((2, 3, 4, 5)), 2), r"max_pooling_1d: x: expected shape \(N, C, 1 axes\)"),
    (lambda: F.average_pooling_3d(ONES((2, 3, 4, 4, 4)), 2, pad_value=1), r"pad_value: expected 0 or None"),
    (lambda: F.unpooling_2d(ONES((2, 3, 2, 2)), 2, outsize=(9, 9)), r"outsize: expected sizes whose"),
    (lambda: F.upsampling_2d(ONES((1, 1, 2, 2)), ONES((1, 1, 2, 2)), 2), r"indexes: expected integers of shape"),
    (lambda: F.upsampling_2d(ONES((1, 1, 1, 1)), np.full((1, 1, 1, 1), 4), 2), r"indexes: expected places from 0 to 3"),
    (lambda: F.spatial_pyramid_pooling_2d(ONES((1, 1, 3, 3)), 3), r"H and W at least 4 for pyramid_height=3"),
    (lambda: F.spatial_pyramid_pooling_2d(ONES((1, 1, 5, 5)), 3), r"each of 4 windows of 2 x 2 sees some"),
    (lambda: F.unpooling_nd(ONES((2, 3, 4)), 0), r"numbers >= 1, and pad >= 0"),
])  # fmt: skip
def test_wrong_windows_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@each(stride=[1, 3], pad=[0, 2], dilate=[1, 2])
def test_one_axis_is_an_image_of_one_row_without_a_stride_over_rows(stride, pad, dilate, monkeypatch):
    """Pointwise convolutions with a stride take a slower way."""
    seen, conv_forward = [], kernels.conv_forward

    def watched(x, W, b, geometry):
        seen.append((x.shape, W.shape, geometry))
        return conv_forward(x, W, b, geometry)

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "conv_forward", watched)
        F.convolution_1d(draw(0, 2, 4, 9), draw(1, 6, 4, 1), None, stride, pad, dilate=dilate)
    assert seen == [((2, 4, 1, 9), (6, 4, 1, 1), kernels.ConvGeometry(1, stride, 0, pad, 1, dilate))]


@pytest.mark.parametrize("shape, window", [((2, 3, 6), (4, 3, 2)), ((2, 3, 4, 4, 4), (4, 3, 2, 2, 2))])
def test_16_bit_activations_beside_float32_weights_decide_the_type(shape, window):
    x, W, b = np.ones(shape, np.float16), Variable(np.ones(window, "f")), Variable(np.ones(4, "f"))
    assert F.convolution_nd(x, W, b).dtype == np.float16
    turned = Variable(np.ones((3, 4, *window[2:]), "f"))
    assert F.deconvolution_nd(x, turned, b).dtype == np.float16


@each(dtype=["float16", "bfloat16"])
def test_three_axes_in_16_bits_are_rounded_once(dtype):
    rng = np.random.default_rng(0)
    x, W = (rng.standard_normal(shape).astype(as_dtype(dtype)) for shape in ((1, 4, 9, 8, 8), (4, 4, 9, 3, 3)))
    b = rng.standard_normal(4).astype(as_dtype(dtype))
    for function in (F.convolution_3d, F.deconvolution_3d):
        exact = function(*(a.astype(np.float64) for a in (x, W, b))).array
        y = function(x, W, b)
        assert y.dtype == as_dtype(dtype)
        rounding = np.abs(exact.astype(as_dtype(dtype)).astype(np.float64) - exact).max()
        assert np.abs(y.array.astype(np.float64) - exact).max() < 1.1 * rounding
