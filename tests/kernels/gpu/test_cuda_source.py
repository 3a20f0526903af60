"""Tests of dbrdist.kernels.gpu.cuda_source."""

from __future__ import annotations

import types
from math import prod

import numpy as np
import pytest

from dbrdist.kernels.gpu import cuda_normalization, cuda_source
from tests.each import each
from tests.kernels.gpu.gpu_helpers import Fake

F32 = np.dtype(np.float32)


@pytest.fixture
def nothing_on_a_gpu(monkeypatch):
    monkeypatch.setattr(cuda_source, "require", lambda *arrays: None)
    for name in ("images", "plain"):
        monkeypatch.setattr(cuda_source, name, lambda shape, dtype: None)


def matrix(*shape):
    x = types.SimpleNamespace(shape=shape, ndim=len(shape), size=prod(shape), dtype=np.dtype(np.float32))
    return cuda_normalization.Matrix(x, (0,) if len(shape) == 2 else (0, 2, 3))


@pytest.mark.usefixtures("nothing_on_a_gpu")
@each(**{"size, blocks": [(0, 1), (1, 1), (256, 1), (257, 2), (2112 * 256, 2112), (2113 * 256, 2112)]})
def test_elements_have_a_thread_each_until_the_device_is_full(size, blocks):
    assert cuda_source.over(size) == ((blocks,), (256,))


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
    monkeypatch.setattr(cuda_normalization._counters, "made", {})
    return noted, stream


@pytest.mark.usefixtures("nothing_on_a_gpu")
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


@pytest.mark.usefixtures("nothing_on_a_gpu")
def test_counters_belong_to_a_stream_of_a_device(launches):
    noted, stream = launches
    reduce = matrix(1000, 64).reduction("bn_statistics", None)
    for device, number in ((0, 5), (0, 6), (1, 6), (0, 5)):
        stream.ptr = number
        reduce((types.SimpleNamespace(data=types.SimpleNamespace(device_id=device)),))
    counters = [arguments[4] for _, _, _, arguments, _ in noted]
    assert counters[3] is counters[0] and len({id(c) for c in counters}) == 3


def test_arrays_that_own_kernels_take(monkeypatch):
    monkeypatch.setattr(cuda_source.backend, "place_of", lambda a: a.place)
    cuda_source.require(Fake(), None, Fake("d"), Fake("e"))
    for arrays, words in (
        ((np.ones(3, "f"),), "other arrays"), ((Fake(), Fake(size=0)), "other arrays"), ((Fake("i"),), "other arrays"),
        ((None, Fake(place=(1, 0))), "memory of another device"), ((Fake(place=None),), "memory of another device"),
    ):  # fmt: skip
        with pytest.raises(cuda_source.Unsupported, match=words):
            cuda_source.require(*arrays)
