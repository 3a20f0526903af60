"""Batches of images on the device: sent as uint8, finished there, with the numbers of the host."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist.core.array.backend import get_device, to_cpu
from dbrdist.datasets import Batch, Normalize, ToCHW
from dbrdist.datasets.image.transforms import Finisher
from dbrdist.datasets.loading.convert import concat_examples


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_batch_is_finished_where_it_goes(on, where):
    rng = np.random.default_rng(0)
    x, t = rng.integers(0, 256, (3, 5, 4, 3), np.uint8), np.arange(3, dtype=np.int32)
    finish = Finisher([Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), ToCHW()])
    expected = finish(x)
    device = "@numpy" if where == "cpu" or on == "numpy" else ("@cupy", 0)
    pixels, labels = concat_examples(Batch((x, t), finish), get_device(device))
    assert isinstance(pixels, np.ndarray) == (device == "@numpy")
    assert pixels.shape == (3, 3, 5, 4) and pixels.dtype == np.float32
    np.testing.assert_allclose(to_cpu(pixels), expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(to_cpu(labels), t)
