"""What windows see at given places, and gradients through what a later kernel may do: small things with sharp edges."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, kernels
from dbrdist import functions as F
from dbrdist.core.array import backend
from dbrdist.kernels import PoolGeometry
from dbrdist.kernels.cpu import onednn_pooling
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn


@pytest.mark.parametrize("pad", [0, 1, (2, 1)])
@pytest.mark.parametrize("cover_all", [True, False])
def test_places_in_the_padding_give_zero(pad, cover_all):
    ph, pw = (pad, pad) if isinstance(pad, int) else pad
    geometry = PoolGeometry("max", 3, 2, 2, 1, ph, pw, cover_all)
    x = 1 + np.arange(2 * 3 * 5 * 4, dtype=np.float32).reshape(2, 3, 5, 4)
    oh, ow = geometry.out_hw(5, 4)
    indices = np.random.default_rng(0).integers(0, 6, (2, 3, oh, ow)).astype(np.int32)
    y = kernels.pool_gather(x, indices, geometry)
    num_outside = 0
    for n, c, i, j in np.ndindex(indices.shape):
        u, v = divmod(int(indices[n, c, i, j]), 2)
        row, column = 2 * i + u - ph, j + v - pw
        inside = 0 <= row < 5 and 0 <= column < 4
        num_outside += not inside
        assert y[n, c, i, j] == (x[n, c, row, column] if inside else 0)
    assert (num_outside > 0) == (ph > 0)


@pytest.mark.parametrize("read", [True, False])
def test_grad_after_batch_normalization_and_relu(read):
    """``grad`` and ``backward`` give the same, whether or not someone looked at the output before."""
    x0 = np.random.default_rng(0).standard_normal((4, 16, 10, 10)).astype("f")
    gy = np.random.default_rng(1).standard_normal(x0.shape).astype("f")
    results = []
    for way in ("backward", "grad"):
        link = dbrdist.links.BatchNormalization(16)
        x = Variable(x0)
        y = F.relu(link(x))
        if read:
            assert y.array.min() == 0
        if way == "backward":
            y.grad = gy
            y.backward()
            grads = [x.grad, link.gamma.grad, link.beta.grad]
        else:
            grads = [g.array for g in dbrdist.grad([y], [x, link.gamma, link.beta], [Variable(gy)])]
        results.append([np.array(g) for g in grads] + [np.array(link.avg_mean), np.array(link.avg_var)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(results[0][3], 0.1 * x0.mean((0, 2, 3)), rtol=1e-4, atol=1e-7)


def test_grad_without_relu_moves_the_statistics_at_once():
    x = Variable(np.random.default_rng(0).standard_normal((4, 16, 10, 10)).astype("f") + 1)
    link = dbrdist.links.BatchNormalization(16)
    y = link(x)
    (g,) = dbrdist.grad([y], [x], [Variable(np.ones(y.shape, "f"))])
    assert abs(g.array).max() < 1e-4  # a constant gradient goes into the mean
    np.testing.assert_allclose(link.avg_mean, 0.1 * x.array.mean((0, 2, 3)), rtol=1e-4)


@each(size=[2, 5, 6], kernel=[1, 2, 3], stride=[1, 2, 4, 5], pad=[0, 1], axis=[0, 1])
def test_windows_that_lie_in_the_padding_are_seen(size, kernel, stride, pad, axis):
    hw = (size, 4) if axis == 0 else (4, size)
    windows = [(kernel, stride, pad), (2, 2, 0)][:: 1 if axis == 0 else -1]
    (kh, sh, ph), (kw, sw, pw) = windows
    g = PoolGeometry("max", kh, kw, sh, sw, ph, pw, True)
    last = [(n - 1) * s - p for n, s, p in zip(g.out_hw(*hw), (sh, sw), (ph, pw))]
    expected = all(start < n for start, n in zip(last, hw))
    assert onednn_pooling._windows_touch_image(np.empty((1, 1, *hw)), g) == expected


@needs_onednn
def test_a_maximum_over_nan_is_numpys_with_its_positions():
    g = PoolGeometry("max", 2, 2, 2, 2)
    x = backend.channels_last(np.arange(32.0, dtype=np.float32).reshape(1, 2, 4, 4))
    x[0, 1, 0, 1] = np.nan
    with kernels.use("onednn"):
        y, saved = kernels.pool_forward(x, g)
        positions = kernels.pool_indices(saved, y.shape, g)
    expected = np.full((1, 2, 2, 2), 3)
    expected[0, 1, 0, 0] = 1
    np.testing.assert_array_equal(positions, expected)
    assert np.isnan(y[0, 1, 0, 0]) and np.isfinite(y).sum() == 7
