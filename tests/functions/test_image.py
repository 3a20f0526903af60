"""Tests of dbrdist.functions.image."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from tests.each import each
from tests.functions.references import algebra


def ones(*shape):
    return np.ones(shape, np.float32)


def test_an_infinite_pixel_stays_where_it_is():
    x = np.zeros((1, 1, 5, 5))
    x[0, 0, 2, 2] = np.inf
    y = F.resize_images(x, (5, 5)).array
    np.testing.assert_array_equal(y, x)
    y = F.resize_images(x, (10, 10), mode="nearest").array
    assert np.isinf(y).sum() == 4 and not np.isnan(y).any()


def test_places_that_are_no_numbers_make_no_pixel():
    x, grid = ones(1, 1, 3, 3), np.full((1, 2, 1, 2), np.nan, "f")
    grid[..., 1] = np.inf
    y = F.spatial_transformer_sampler(x, grid)
    assert y.shape == (1, 1, 1, 2)  # NaN or 0, and no index out of bounds


@each(num_channels=[1, 2])
def test_pixels_and_channels_of_any_layout(num_channels):
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((4, 6, 8, 4 * num_channels)).astype(np.float32)
    images = whole.transpose(0, 3, 1, 2)
    repeated = np.broadcast_to(images[:1, :, :1, :1], (3, 4 * num_channels, 2, 1))
    for x in (images, np.ascontiguousarray(images), images[::2, :, ::-1, 1:4].transpose(0, 1, 3, 2), repeated):
        v = Variable(x)
        y = F.depth2space(v, 2)
        gy = rng.standard_normal(y.shape).astype(np.float32)
        dbrdist.backward([y], [gy])
        np.testing.assert_array_equal(y.array, algebra.depth2space(x, 2).astype(np.float32))
        np.testing.assert_array_equal(v.grad, algebra.space2depth(gy, 2).astype(np.float32))
        np.testing.assert_array_equal(F.space2depth(y, 2).array, x)
        assert v.grad.flags.writeable and not np.shares_memory(v.grad, gy)
