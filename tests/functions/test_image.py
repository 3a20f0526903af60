"""Tests of dbrdist.functions.image."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from tests.each import each
from tests.functions.references import algebra
from tests.kernels.cpu.test_loops import compiled


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


@each(size=[(10, 14), (3, 3), (1, 1), (5, 7), (40, 2)], mode=["bilinear", "nearest"], align_corners=[True, False])
def test_resizing_is_linear_in_the_pixels_and_keeps_their_layout(size, mode, align_corners):
    """The gradient is the transpose: each column of the matrix by an image with a single 1."""
    units = np.eye(35).reshape(35, 1, 5, 7)
    matrix = F.resize_images(units, size, mode=mode, align_corners=align_corners).array.reshape(35, -1)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7))
    gy = np.random.default_rng(1).standard_normal((2, 3, *size))
    for layout in (np.ascontiguousarray, backend.channels_last):
        v = Variable(layout(x))
        y = F.resize_images(v, size, mode=mode, align_corners=align_corners)
        dbrdist.backward([y], [gy])
        np.testing.assert_allclose(y.array.reshape(6, -1), x.reshape(6, -1) @ matrix, atol=1e-12)
        np.testing.assert_allclose(v.grad.reshape(6, -1), gy.reshape(6, -1) @ matrix.T, atol=1e-12)
        is_like = y.array.flags.c_contiguous if layout is np.ascontiguousarray else backend.lies_as_images(y.array)
        assert is_like or size == (1, 1)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(size=[(96, 96), (20, 33), (64, 50), (128, 64)], mode=["bilinear", "nearest"], align_corners=[True, False])
def test_loops_resize_with_the_bits_of_numpys_formula(size, mode, align_corners):
    """Also where NaN and infinity are neighbours, with a weight or without."""
    x = np.random.default_rng(0).standard_normal((3, 5, 64, 50)).astype("f")
    x[0, 1, 2, 3], x[1, 2, 20:22, 7], x[2, 4, 63, 49] = np.nan, np.inf, -np.inf
    numbers = np.arange(64, dtype=np.int32).view("f")
    assert (
        kernels.of_rows("interpolate_rows", (x.reshape(-1, 50), numbers[:50], numbers[:50], x[0, 0, 0]), 50, 50)
        is not None
    )
    for layout in (np.ascontiguousarray, backend.channels_last):
        found = []
        for provider in ("loops", "numpy"):
            with kernels.use(provider):
                found.append(F.resize_images(layout(x), size, mode=mode, align_corners=align_corners).array)
        np.testing.assert_array_equal(*found)
        assert found[0].strides == found[1].strides


def test_numbers_of_elements_are_made_for_the_types_of_the_loop_alone(monkeypatch):
    """They took a third of the time that float64 takes for one image."""
    asked = []
    monkeypatch.setattr(kernels, "of_rows", lambda name, arrays, *_: asked.append(arrays[0].dtype.char))
    for dtype in "def":
        F.resize_images(np.ones((1, 1, 100, 100), dtype), (90, 90))
    assert set(asked) == {"f"}


@each(shape=[(200, 90), (45, 400), (90, 110), (1, 1)])
def test_large_images_are_interpolated_between_their_corners(shape):
    """Row by row, then column by column, in float64."""
    x = np.random.default_rng(0).standard_normal((2, 3, 90, 110)).astype(np.float32)
    expected = x.astype(np.float64)
    for axis, n in ((2, shape[0]), (3, shape[1])):
        size = x.shape[axis]
        places = np.linspace(0, size - 1, n) if n > 1 else np.zeros(1)
        low = np.minimum(places.astype(int), size - 2)
        w = (places - low).reshape([-1 if a == axis else 1 for a in range(4)])
        expected = np.take(expected, low, axis) * (1 - w) + np.take(expected, low + 1, axis) * w
    np.testing.assert_allclose(F.resize_images(x, shape).array, expected, rtol=1e-5, atol=1e-5)
