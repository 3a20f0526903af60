"""Tests of dbrdist.kernels.cpu.onednn_finite."""

from __future__ import annotations

import numpy as np

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn_blocks, onednn_finite
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn


@each(dtype=["float32", "bfloat16"], shape=[(40,), (3, 5), (2, 3, 4, 5)])
def test_one_element_that_is_not_finite_is_found_wherever_it_lies(dtype, shape):
    x = np.full(shape, -1e30).astype(backend.as_dtype(dtype))  # its square is infinite
    for a in (x, -x, backend.channels_last(x) if x.ndim == 4 else x, x[:1], np.zeros_like(x)):
        assert onednn_finite.is_finite(a)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, x.size // 2, x.size - 1):
            for a in (x.copy(), backend.channels_last(x.copy()) if x.ndim == 4 else -x):
                a.flat[place] = value
                assert not onednn_finite.is_finite(a)


def test_elements_in_the_order_of_memory():
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    assert onednn_finite.memory_row(x).tolist() == list(range(24))
    images = backend.channels_last(x)
    assert onednn_finite.memory_row(images).tolist() == x.transpose(0, 2, 3, 1).ravel().tolist()
    onednn_finite.memory_row(images)[0] = 7
    assert images[0, 0, 0, 0] == 7


@needs_onednn
def test_what_is_not_finite_in_one_block_is_masked_there_and_stays_there():
    block = onednn_blocks._BLOCK
    shape = (1, 8, (2 * block + 24) // 8, 1)
    rng = np.random.default_rng(0)
    y, a, b = (backend.channels_last(rng.standard_normal(shape, np.float32)) for _ in range(3))
    y = np.maximum(y, 0)
    for bad in ([2 * block - 1], [2 * block + 23], [0, block, 2 * block], []):
        onednn_finite.memory_row(a)[bad] = np.inf
        with kernels.use("onednn"), np.errstate(invalid="ignore"):
            assert kernels.provider_of("relu_backward_of_sum", y, a, b, None) == "onednn"
            gx = kernels.relu_backward_of_sum(y, a, b)
        np.testing.assert_array_equal(gx, np.where(y > 0, a + b, np.float32(0)))
        onednn_finite.memory_row(a)[bad] = 1


@needs_onednn
def test_a_gradient_that_is_not_finite_in_one_block_is_written_over_there_alone():
    block = onednn_blocks._BLOCK
    shape = (1, 8, (4 * block + 24) // 8, 1)
    rng = np.random.default_rng(0)
    y, gy = (backend.channels_last(rng.standard_normal(shape, np.float32)) for _ in range(2))
    y = np.maximum(y, 0)
    row = onednn_finite.memory_row(gy)
    row[[3, 2 * block - 1, 4 * block + 23]] = np.inf, np.nan, -np.inf
    for places in ((3, 0), (2 * block - 1, 0), (4 * block + 23, 0), (4 * block + 22, 1)):
        onednn_finite.memory_row(y)[places[0]] = places[1]
    expected = np.where(y > 0, gy, np.float32(0))
    with kernels.use("onednn"), np.errstate(invalid="ignore"):
        assert kernels.provider_of("relu_backward_over", y, gy) == "onednn"
        assert kernels.relu_backward_over(y, gy) is gy
    np.testing.assert_array_equal(gy, expected)
