"""Tests of dbrdist.functions.pooling_nd."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.core.array.backend import as_dtype
from tests.each import each


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
