"""Tests of dbrdist.functions.convolution."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each
from tests.functions.image_helpers import check_gradients, draw


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def ints(*values):
    return np.array(values, np.int32)


@each(name=["convolution", "deconvolution", "max_pooling", "average_pooling", "unpooling"], ndim=[1, 2, 3])
def test_windows_have_an_integer_for_each_axis(name, ndim):
    function = getattr(F, f"{name}_nd")
    arguments = inspect.signature(function).parameters
    given = {"W": ones_of(1, 1, *[3] * ndim)} if "W" in arguments else {"ksize": 2}
    for argument in {"ksize", "stride", "pad", "dilate", "outsize"} & set(arguments):
        for wrong in ((1,) * (ndim + 1), (), [1] * (ndim - 1), 1.0, (1.0,) * ndim, "1"):
            words = f"{name}_nd: {argument}: expected an integer or {ndim} of them, got {wrong!r}"
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(words)}"):
                function(ones_of(1, 1, *[5] * ndim), **{**given, argument: wrong})


@each(
    call=[
        lambda x, s, p: F.convolution_2d(x, x[:1, :, :2, :3], stride=s, pad=p),
        lambda x, s, p: F.deconvolution_2d(x, ones_of(2, 1, 2, 3), stride=s, pad=p),
        lambda x, s, p: F.max_pooling_2d(x, (2, 3), s, p, cover_all=False),
        lambda x, s, p: F.average_pooling_2d(x, [2, 3], s, p),
        lambda x, s, p: F.unpooling_2d(x, [2, 3], tuple(s), tuple(p), cover_all=False),
        lambda x, s, p: F.im2col(x, (2, 3), s, p),
    ],
    stride=[(2, 1), [2, 1], np.array([2, 1]), (np.int64(2), np.int8(1))], pad=[(1, 0), [1, 0], np.array([1, 0])],
)  # fmt: skip
def test_pairs_may_be_of_any_kind(call, stride, pad):
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype("f")
    np.testing.assert_array_equal(call(x, stride, pad).array, call(x, (2, 1), (1, 0)).array)


@each(of=[np.int64, np.int8, int])
def test_numbers_of_numpy_are_numbers_for_both_axes(of):
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6)).astype("f")
    for call in (
        lambda *w: F.convolution_2d(x, x[:1, :, :2, :3], None, *w), lambda *w: F.max_pooling_2d(x, 3, *w),
        lambda *w: F.deconvolution_2d(x, ones_of(2, 1, 2, 3), None, *w), lambda *w: F.average_pooling_2d(x, of(3), *w),
        lambda *w: F.im2col(x, of(2), *w), lambda *w: F.convolution_nd(x, x[:1, :, :2, :3], None, *w),
        lambda *w: F.unpooling_2d(x, of(3), *w), lambda *w: F.max_pooling_nd(x, of(3), *w),
    ):  # fmt: skip
        np.testing.assert_array_equal(call(of(2), of(1)).array, call((2, 2), (1, 1)).array)
    box = np.array([[0, 0, 4, 4.0]], "f"), ints(0)
    for align in (F.roi_max_align_2d, F.roi_average_align_2d):
        y = align(x, *box, outsize=of(2), spatial_scale=1.0, sampling_ratio=of(2))
        np.testing.assert_array_equal(y.array, align(x, *box, (2, 2), 1.0, (2, 2)).array)


CONVOLUTIONS = [
    {},
    {"stride": 2, "pad": 1},
    {"stride": (2, 1), "pad": (0, 1), "dilate": (1, 2)},
    {"groups": 2, "pad": 1},
    {"stride": 2, "cover_all": True},
]


@pytest.mark.parametrize("kwargs", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_gradients(kwargs, bias):
    channels = 4 // kwargs.get("groups", 1)
    inputs = [draw(0, 2, 4, 6, 5), draw(1, 6, channels, 3, 2)] + [draw(2, 6)] * bias
    check_gradients(lambda x, W, b=None: F.convolution_2d(x, W, b, **kwargs), inputs)


@pytest.mark.parametrize(
    "kwargs", [{}, {"stride": 2, "pad": 1}, {"stride": 2, "outsize": (12, 10)}, {"groups": 2}, {"dilate": 2}]
)
def test_deconvolution_gradients(kwargs):
    channels = 6 // kwargs.get("groups", 1)
    inputs = [draw(0, 2, 4, 5, 4), draw(1, 4, channels, 3, 3), draw(2, 6)]
    check_gradients(lambda x, W, b: F.deconvolution_2d(x, W, b, **kwargs), inputs)


def test_deconvolution_is_the_gradient_of_convolution():
    x, W = Variable(draw(0, 2, 3, 7, 7)), draw(1, 4, 3, 3, 3)
    y = F.convolution_2d(x, W, stride=2)
    gy = draw(2, *y.shape)
    (gx,) = dbrdist.grad([y], [x], [Variable(gy)])
    np.testing.assert_allclose(F.deconvolution_2d(gy, W, stride=2).array, gx.array, atol=1e-12)


def test_one_number_is_the_outsize_of_both_axes():
    x, W = draw(0, 1, 2, 3, 3), draw(1, 2, 3, 2, 2)
    for one in (6, np.int64(6)):
        y = F.deconvolution_2d(x, W, stride=2, outsize=one)
        np.testing.assert_array_equal(y.array, F.deconvolution_2d(x, W, stride=2, outsize=(6, 6)).array)


def test_deconvolution_grows_images():
    assert F.deconvolution_2d(np.ones((1, 8, 4, 4), "f"), np.ones((8, 3, 4, 4), "f"), stride=2, pad=1).shape == (
        1,
        3,
        8,
        8,
    )


def test_messages_of_misfits():
    x, W = np.ones((1, 3, 4, 4), "f"), np.ones((2, 4, 3, 3), "f")
    with pytest.raises(ValueError, match=r"x: expected shape \(N, 4, H, W\) for W \(2, 4, 3, 3\) with groups=1, got"):
        F.convolution_2d(x, W)
    with pytest.raises(ValueError, match="expected an image no smaller than the kernel of W"):
        F.convolution_2d(x, np.ones((2, 3, 5, 5), "f"))
    with pytest.raises(ValueError, match=r"convolution_2d: b: expected shape \(2,\), got shape \(3,\)"):
        F.convolution_2d(x, W[:, :3], np.ones(3, "f"))
    with pytest.raises(TypeError, match=r"x: expected a floating type, got shape .* and dtype int64; cast it first"):
        F.convolution_2d(x.astype(int), W[:, :3])
    with pytest.raises(ValueError, match=r"deconvolution_2d: outsize: expected .* got \(20, 20\)"):
        F.deconvolution_2d(x, np.ones((3, 2, 3, 3), "f"), stride=2, outsize=(20, 20))
    with pytest.raises(ValueError, match="expected an image no smaller than the window 6 x 6"):
        F.max_pooling_2d(x, 6, 1, cover_all=False)
    with pytest.raises(ValueError, match=r"batch_normalization: beta: expected shape \(3,\) for x .* got shape \(4,\)"):
        F.batch_normalization(x, np.ones(3, "f"), np.ones(4, "f"))
    for b in (0, 1):
        with pytest.raises(ValueError, match=r"deconvolution_2d: outsize: expected .* got \(3, 0\)"):
            F.deconvolution_2d(np.ones((b, 3, 1, 2), "f"), np.ones((3, 2, 3, 1), "f"), pad=(0, 1))
