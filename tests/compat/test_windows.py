"""Chainer's ``utils.conv`` and ``utils.conv_nd``, compared with loops over every window."""

import itertools

import numpy as np
import pytest

from tests.each import each


def windows(img, ksize, stride, pad, outs, dilate):
    """Every element by its own index."""
    dims = img.shape[2:]
    col = np.zeros((*img.shape[:2], *ksize, *outs), img.dtype)
    for place in itertools.product(*map(range, ksize)):
        for out in itertools.product(*map(range, outs)):
            at = [o * s - p + i * d for o, s, p, i, d in zip(out, stride, pad, place, dilate)]
            if all(0 <= i < n for i, n in zip(at, dims)):
                col[(slice(None), slice(None), *place, *out)] = img[(slice(None), slice(None), *at)]
    return col


@each(dims=[(7,), (6, 5), (4, 5, 3)], stride=[1, 2], pad=[0, 1], dilate=[1, 2], cover_all=[False, True])
def test_windows_and_their_sum(dims, stride, pad, dilate, cover_all, installed):
    from chainer.utils import conv, conv_nd

    n = len(dims)
    ksize, stride, pad = (2,) * n, (stride,) * n, (pad,) * n
    img = np.random.RandomState(0).randn(2, 3, *dims)
    outs = [conv.get_conv_outsize(d, 2, s, p, cover_all, dilate) for d, s, p in zip(dims, stride, pad)]
    expected = windows(img, ksize, stride, pad, outs, (dilate,) * n)
    col = conv_nd.im2col_nd(img, ksize, stride, pad, cover_all, dilate)
    np.testing.assert_array_equal(col, expected)
    other = np.random.RandomState(1).randn(*col.shape)
    back = conv_nd.col2im_nd(other, stride, pad, dims, dilate)
    np.testing.assert_allclose((col * other).sum(), (img * back).sum())  # each is the other's transpose
    if n == 2:
        two = conv.im2col(img, *ksize, *stride, *pad, cover_all, dilate, dilate)  # without a padding value
        np.testing.assert_array_equal(two, expected)
        np.testing.assert_array_equal(conv.col2im(other, *stride, *pad, *dims, dilate, dilate), back)


def test_a_padding_value(installed):
    from chainer.utils import conv

    col = conv.im2col_cpu(np.zeros((1, 1, 2, 2)), 2, 2, 1, 1, 1, 1, 7)
    assert col[0, 0, 0, 0].tolist() == [[7, 7, 7], [7, 0, 0], [7, 0, 0]]


def test_as_tuple(installed):
    from chainer.utils import conv_nd

    assert conv_nd.as_tuple(2, 3) == (2, 2, 2) and conv_nd.as_tuple([1, 2], 2) == (1, 2)
    with pytest.raises(AssertionError, match="expected 3 values, got 1"):
        conv_nd.as_tuple((1,), 3)
