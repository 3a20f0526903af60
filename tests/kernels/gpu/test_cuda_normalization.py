"""Tests of dbrdist.kernels.gpu.cuda_normalization."""

from __future__ import annotations

import types
from math import prod

import numpy as np
import pytest

from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.gpu import cuda_normalization, cuda_source
from tests.each import each

_THREADS_IN_BLOCK = 1024  # more than that no GPU starts


@pytest.fixture(autouse=True)
def nothing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_source, "require", lambda *arrays: None)
    for name in ("images", "plain"):
        monkeypatch.setattr(cuda_source, name, lambda shape, dtype: None)


def matrix(*shape):
    x = types.SimpleNamespace(shape=shape, ndim=len(shape), size=prod(shape), dtype=np.dtype(np.float32))
    return cuda_normalization.Matrix(x, (0,) if len(shape) == 2 else (0, 2, 3))


@each(rows=[1, 7, 300, 5000, 1_000_000], channels=[1, 3, 4, 20, 64, 2048, 2050], threads=[256, 512], rows_each=[1, 4])
def test_blocks_are_full_cover_all_columns_and_are_no_more_than_rows_need(rows, channels, threads, rows_each):
    m = matrix(rows, channels)
    (columns, down), block = m.grid(threads, 264, rows_each)
    width = 4 if channels % 4 == 0 else 1  # channels of a thread
    assert (m.rows, m.sizes) == (rows, (rows, channels))
    assert block[0] * block[1] == threads <= _THREADS_IN_BLOCK
    assert block[0] <= 32 and block[0] < 2 * -(-channels // width)  # a warp, less where half would do
    assert columns * block[0] * width >= channels > (columns - 1) * block[0] * width
    assert 1 <= down <= max(1, 264 // columns)
    assert (down - 1) * block[1] * rows_each < rows
    if down < 264 // columns:  # enough blocks that no thread has more rows than it needs to have
        assert down * block[1] * rows_each >= rows


def test_pixels_of_images_are_rows():
    m = matrix(2, 12, 5, 7)
    assert (m.rows, m.channels, m.across, m.columns) == (70, 12, 4, 1)


def test_more_columns_of_blocks_than_counters_are_left_to_numpy():
    m = matrix(1_000_000, 4096 * 128)
    assert m.columns == 4096 and m.grid(512, 264, 1)[0] == (4096, 1)
    with pytest.raises(Unsupported, match="channels"):
        matrix(1, 4096 * 128 + 4)


@each(**{"rows, down": [(1, 1), (64, 1), (65, 2), (67_584, 1056), (1_000_000, 1056)]})
def test_maps_have_four_rows_for_each_thread(rows, down):
    assert cuda_normalization.map_grid(matrix(rows, 64)) == ((1, down), (16, 16))
