"""How blocks of threads share an array on a GPU; a stand-in on the host computes the same whatever the shares are."""

from __future__ import annotations

import types
from math import prod

import numpy as np
import pytest

from dbrdist.kernels import cuda_normalization, cuda_ops, cuda_source
from dbrdist.kernels.onednn import Unsupported
from tests.each import each

_THREADS_IN_BLOCK = 1024  # more than that no GPU starts
F32 = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def nothing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_source, "require", lambda *arrays: None)
    for name in ("images", "plain"):
        monkeypatch.setattr(cuda_source, name, lambda shape, dtype: None)


def matrix(*shape):
    x = types.SimpleNamespace(shape=shape, ndim=len(shape), size=prod(shape), dtype=np.dtype(np.float32))
    return cuda_normalization._Matrix(x, (0,) if len(shape) == 2 else (0, 2, 3))


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


@each(**{"size, blocks": [(0, 1), (1, 1), (256, 1), (257, 2), (2112 * 256, 2112), (2113 * 256, 2112)]})
def test_elements_have_a_thread_each_until_the_device_is_full(size, blocks):
    assert cuda_source.over(size) == ((blocks,), (256,))


# ---- what the kernels of batch normalization are launched with


@pytest.fixture
def launches(monkeypatch):
    """Kernels that note what they are launched with, on the stream of the moment: number 5, until another is there."""
    noted, stream = [], types.SimpleNamespace(ptr=5)

    def kernel(*name):
        return lambda grid, block, arguments, shared_mem=0: noted.append((name, grid, block, arguments, shared_mem))

    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setattr(cuda_source, "kernel", kernel)
    monkeypatch.setattr(cuda_source, "plain", lambda shape, dtype: lambda: ("room", shape, dtype))
    monkeypatch.setattr(cuda_normalization.backend, "import_cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_normalization.backend, "zeros", lambda shape, dtype, like: np.zeros(shape, dtype))
    monkeypatch.setattr(cuda_normalization, "_counters", {})
    return noted, stream


@each(
    **{
        "shape, relu, grid, block, shared": [
            ((1000, 64), None, (1, 32), (16, 32), 4 * 32 * (1 + 2 * 64)),
            ((1_000_000, 64), True, (1, 264), (16, 32), 4 * 32 * (1 + 2 * 64)),
            ((2, 258, 3, 5), False, (9, 2), (32, 16), 4 * 16 * (1 + 2 * 32)),
        ]
    }
)
def test_sums_have_a_row_for_each_thread_and_room_for_their_parts(launches, shape, relu, grid, block, shared):
    """In shared memory: for each row of threads a count, and two numbers for each channel."""
    noted, _ = launches
    noted.clear()
    m, x = matrix(*shape), types.SimpleNamespace(data=types.SimpleNamespace(device_id=0))
    m.reduction("bn_sums", relu)((x, "gy"), "mean", "var")
    ((name, *found, shared_mem),) = noted
    width = 4 if shape[1] % 4 == 0 else 1
    assert name == ("normalization", "bn_sums", F32, width, *(() if relu is None else (int(relu),)))
    assert (found[0], found[1], shared_mem) == (grid, block, shared)
    arrays, sizes, (parts, counters, *rest) = found[2][:2], found[2][2:4], found[2][4:]
    assert arrays == (x, "gy") and sizes == (m.rows, shape[1]) and rest == ["mean", "var"]
    assert parts == ("room", (2 * grid[1] * shape[1],), F32) and (counters.shape, counters.dtype) == ((4096,), "u4")


def test_counters_belong_to_a_stream_of_a_device(launches):
    noted, stream = launches
    reduce = matrix(1000, 64).reduction("bn_statistics", None)
    for device, number in ((0, 5), (0, 6), (1, 6), (0, 5)):
        stream.ptr = number
        reduce((types.SimpleNamespace(data=types.SimpleNamespace(device_id=device)),))
    counters = [arguments[4] for _, _, _, arguments, _ in noted]
    assert counters[3] is counters[0] and len({id(c) for c in counters}) == 3


@each(**{"rows, down": [(1, 1), (64, 1), (65, 2), (67_584, 1056), (1_000_000, 1056)]})
def test_maps_have_four_rows_for_each_thread(rows, down):
    assert cuda_normalization._map_grid(matrix(rows, 64)) == ((1, down), (16, 16))


@each(**{"dtype, blocks": [("f", 1024), ("e", 512), ("d", 2048)]})
def test_a_thread_of_a_sum_reads_sixteen_bytes_at_once(monkeypatch, dtype, blocks):
    noted = []
    monkeypatch.setattr(cuda_ops, "require", lambda *arrays: None)
    monkeypatch.setattr(cuda_source, "kernel", lambda *name: lambda *launched: noted.append((name, *launched)))
    x = np.zeros(1 << 20, dtype)
    run, _ = cuda_ops._map("add", x, x)
    run(x, x, "room")
    ((name, grid, block, arguments),) = noted
    assert name == ("elementwise", "add", x.dtype) and (grid, block) == ((blocks,), (256,))
    assert arguments[0] is x and arguments[2:] == ("room", 1 << 20)
