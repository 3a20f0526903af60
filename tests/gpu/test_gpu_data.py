"""Batches of images on the device: sent as uint8, finished there, with the numbers of the host."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.cli.builders.build import converter
from dbrdist.core.array import backend
from dbrdist.core.array.backend import get_device, to_cpu
from dbrdist.dataset import ConcatWithAsyncTransfer
from dbrdist.datasets import Batch, Normalize, ToCHW
from dbrdist.datasets.image.transforms import Finisher
from dbrdist.datasets.loading.convert import concat_examples


@pytest.fixture
def batch(rng):
    x, t = rng.integers(0, 256, (3, 5, 4, 3), np.uint8), np.arange(3, dtype=np.int32)
    return x, t, Finisher([Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), ToCHW()])


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_batch_is_finished_where_it_goes(on, where, batch):
    x, t, finish = batch
    expected = finish(x)
    device = "@numpy" if where == "cpu" or on == "numpy" else ("@cupy", 0)
    pixels, labels = concat_examples(Batch((x, t), finish), get_device(device))
    assert isinstance(pixels, np.ndarray) == (device == "@numpy")
    assert pixels.shape == (3, 3, 5, 4) and pixels.dtype == np.float32
    np.testing.assert_allclose(to_cpu(pixels), expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(to_cpu(labels), t)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("send", ["one by one", "ahead"])
def test_one_kernel_finishes_images_with_the_bits_of_the_host(send, dtype, on, device, batch):
    if on not in ("whole", "cupy"):
        pytest.skip("needs own kernels and arrays of a device")
    x, t, finish = batch
    dtype = backend.as_dtype(dtype)
    expected = finish(x, dtype)
    convert = ConcatWithAsyncTransfer()
    if on == "whole":
        import host_cuda

        host_cuda.launched.clear()
    for _ in range(3):  # rooms of pinned memory are used again
        made = Batch((x, t), finish)
        pixels, labels = (
            made.to_device(device, dtype) if send == "one by one" else convert.convert(made, device, dtype=dtype)
        )
        assert pixels.dtype == dtype and backend.is_channels_last(pixels)
        assert np.ascontiguousarray(to_cpu(pixels)).tobytes() == np.ascontiguousarray(expected).tobytes()
        assert np.array_equal(to_cpu(labels), t)
    if on == "whole":
        assert [name.partition("<")[0] for _, name, _, _ in host_cuda.launched] == ["by_table"] * 3


def test_the_command_sends_from_pinned_memory(on, device, batch, monkeypatch):
    """No copy of pageable memory, and no wait, but for those of the first batch: the table."""
    if on != "whole":
        pytest.skip("the stand-in counts copies, and has own kernels")
    import stand_in

    x, t, finish = batch
    convert = converter("float32")
    convert(Batch((x, t), finish), device)
    copies = []
    monkeypatch.setattr(stand_in.module, "asarray", lambda *args, **kwargs: copies.append(args))
    monkeypatch.setattr(stand_in.module, "array", lambda *args, **kwargs: copies.append(args))
    with stand_in.no_waits():
        pixels, labels = convert(Batch((x, t), finish), device)
    assert not copies
    np.testing.assert_allclose(to_cpu(pixels), finish(x), rtol=1e-6, atol=1e-6)
    assert np.array_equal(to_cpu(labels), t)
    example = convert([(np.ones((2, 3), "f"), np.int32(1)), (np.zeros((2, 3), "f"), np.int32(0))], device)
    assert [to_cpu(a).shape for a in example] == [(2, 2, 3), (2,)]
