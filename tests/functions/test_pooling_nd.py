"""Tests of dbrdist.functions.pooling_nd."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array.backend import as_dtype
from tests.each import each
from tests.kernels.cpu.test_loops import compiled


@each(dtype=["float16", "bfloat16"], stride=[None, 100], pad_value=[0, None])
def test_means_over_large_windows_run_in_a_wider_type(dtype, stride, pad_value):
    x = np.full((1, 1, 2500, 1), 60.0, as_dtype(dtype))  # the sum is beyond float16, and bfloat16 counts to 256
    y = F.average_pooling_nd(x, (2000, 1), stride, 0, pad_value)
    assert y.dtype == x.dtype and (y.array.astype(np.float64) == 60.0).all()


@each(height=[1, 2, 3, 4], rows=range(1, 20), columns=[8, 9, 13])
def test_pyramids_over_images_of_every_size(height, rows, columns):
    """Where each window sees some of the image, as many maxima as there are windows; refused where one sees none."""
    x = np.random.default_rng(0).standard_normal((1, 1, rows, columns)).astype("f")
    expected, is_whole = [], min(rows, columns) >= 2 ** (height - 1)
    for bins in (2**level for level in range(height)):
        size = [-(-n // bins) for n in (rows, columns)]
        shift = [(k * bins - n) // 2 for k, n in zip(size, (rows, columns))]
        for i, j in np.ndindex(bins, bins):
            (top, bottom), (left, right) = (
                (max(at * k - q, 0), max(at * k - q + k, 0)) for at, k, q in zip((i, j), size, shift)
            )
            seen = x[0, 0, top:bottom, left:right]
            is_whole &= seen.size > 0
            expected.append(seen.max(initial=-np.inf))
    if is_whole:
        assert F.spatial_pyramid_pooling_2d(x, height).array.ravel().tolist() == expected
    else:
        with pytest.raises(ValueError, match="spatial_pyramid_pooling_2d: x: expected"):
            F.spatial_pyramid_pooling_2d(x, height)


# shape of x, window, step and padding: pairs, overlaps, gaps, padding, and axes of one element
WINDOWS = [
    ((3, 4, 8, 16, 32), 2, None, 0),
    ((2, 3, 9, 14, 42), (3, 2, 2), (2, 2, 2), (1, 0, 1)),
    ((2, 3, 9, 13, 41), (2, 3, 4), (1, 2, 3), (0, 2, 1)),
    ((2, 2, 11, 20, 18), (1, 1, 3), (2, 1, 5), 0),
    ((2, 5, 1000), 2, None, 0),
    ((2, 5, 1001), 2, None, 0),
    ((1, 9000, 1, 1), (1, 1), None, 0),
]


def with_ties(shape, dtype="f"):
    """Whole numbers, of which many are equal, zeros of both signs, NaN and infinities."""
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(dtype)
    flat = x.reshape(-1)
    flat[::101], flat[50::307], flat[7::211], flat[9::223] = -0.0, np.nan, np.inf, -np.inf
    return x


def largest_and_gradient(x, window, step, padding, gy):
    """Window by window, over all axes at once; the first of equal elements, and NaN before all numbers."""
    count = x.ndim - 2
    k, s, p = (v if isinstance(v, tuple) else (v,) * count for v in (window, step or window, padding))
    y, gx = np.empty(gy.shape, x.dtype), np.zeros(x.shape)
    for place in itertools.product(*map(range, gy.shape[2:])):
        starts = [at * step - pad for at, step, pad in zip(place, s, p)]
        seen = tuple(slice(max(start, 0), start + n) for start, n in zip(starts, k))
        part = x[(slice(None), slice(None), *seen)].reshape(*x.shape[:2], -1)
        first = np.where(np.isnan(part), np.inf, part)
        first = np.where(np.isnan(part).any(-1), np.isnan(part).argmax(-1), first.argmax(-1))
        y[(slice(None), slice(None), *place)] = np.take_along_axis(part, first[..., None], -1)[..., 0]
        sizes = [min(start + n, size) - max(start, 0) for start, n, size in zip(starts, k, x.shape[2:])]
        index = np.unravel_index(first, sizes)
        at = [np.maximum(start, 0) + i for start, i in zip(starts, index)]
        np.add.at(gx, (*np.indices(x.shape[:2]), *at), gy[(slice(None), slice(None), *place)])
    return y, gx


def maxima(x, window, step, padding):
    """The function of all axes of x, its result and gradient for whole numbers, and the derivative of that."""
    v = Variable(x)
    y = F.max_pooling_nd(v, window, step, padding)
    gy = Variable(np.random.default_rng(1).integers(-9, 9, y.shape).astype(x.dtype))
    (gx,) = dbrdist.grad([y], [v], [gy], enable_double_backprop=True)
    return y.array, gx.array, gy.array


@pytest.mark.slow
@each(case=WINDOWS, dtype=["f", "d"])
def test_maxima_and_their_gradients_window_by_window(case, dtype):
    x = with_ties(case[0], dtype)
    y, gx, gy = maxima(x, *case[1:])
    wanted = largest_and_gradient(x, *case[1:], gy)
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(gx, wanted[1])


@compiled
@each(case=WINDOWS)
def test_loops_have_the_bits_of_numpys_maxima(case):
    """Zeros keep their signs; sums of gradients of overlapping windows their order."""
    shape, *window = case
    x = with_ties(shape)
    assert kernels.of_rows("largest_along", (np.zeros((300, 64), "f"),), 32, 64, 1, 2, 2, 0) is not None
    found = []
    for provider in ("loops", "numpy"):
        v = Variable(x)
        with kernels.use(provider):
            y = F.max_pooling_nd(v, *window)
            gy = np.random.default_rng(1).standard_normal(y.shape).astype("f")
            dbrdist.backward([y], [gy])
        found.append((y.array.tobytes(), v.grad.tobytes()))
    assert found[0] == found[1]
