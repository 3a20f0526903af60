"""Tests of dbrdist.kernels.cpu.onednn_layer_norm."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.kernels.cpu import onednn, onednn_layer_norm
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn


@needs_onednn
def test_layer_normalization_backward_takes_statistics_of_float32_alone():
    x, row, statistics = np.ones((4, 5), "f"), np.ones(5, "f"), np.ones(4, "f")
    plan = onednn_layer_norm._plan_backward
    assert callable(plan(x, row, statistics, statistics, x, 1e-5))
    for mean, var in ((statistics.astype("d"), statistics), (statistics, statistics.astype("d"))):
        with pytest.raises(onednn.Unsupported, match="statistics of"):
            plan(x, row, mean, var, x, 1e-5)


F32 = np.dtype("f")


def refuses(planner, *arguments):
    with pytest.raises(onednn.Unsupported):
        planner(*arguments)


@needs_onednn
@each(shape=[(4, 5), (7, 16), (1, 33)])
def test_layer_normalization_is_onednns(shape):
    rng = np.random.default_rng(0)
    x, gy = (rng.standard_normal(shape).astype("f") for _ in range(2))
    gamma, beta = (rng.standard_normal(shape[1]).astype("f") for _ in range(2))
    wide = x.astype("d")
    mean, var = wide.mean(1), wide.var(1)
    with kernels.use("onednn"):
        assert kernels.provider_of("ln_forward", x, gamma, beta, 1e-5) == "onednn"
        y, *statistics = onednn_layer_norm._plan_forward(x, gamma, beta, 1e-5)(x, gamma, beta, 1e-5)
        assert kernels.provider_of("ln_backward", x, gamma, *statistics, gy, 1e-5) == "onednn"
        backward = onednn_layer_norm._plan_backward(x, gamma, *statistics, gy, 1e-5)
        gx, ggamma, gbeta = backward(x, gamma, *statistics, gy, 1e-5)
    root = np.sqrt(var + 1e-5)[:, None]
    normal, g = (wide - mean[:, None]) / root, gy * gamma.astype("d")
    expected = (g - g.mean(1, keepdims=True) - normal * (g * normal).mean(1, keepdims=True)) / root
    for a, e in (
        (y, normal * gamma + beta), (statistics[0], mean), (statistics[1], var), (gx, expected),
        (ggamma, (gy * normal).sum(0)), (gbeta, gy.sum(0, dtype="d")),
    ):  # fmt: skip
        assert a.dtype == F32
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4)


def test_a_layer_normalization_that_the_library_lacks_is_refused_when_it_is_planned(monkeypatch):
    def lacks(*arguments):
        raise onednn.Unsupported("layer normalization")

    monkeypatch.setattr(onednn, "require", lambda *arrays: None)
    x, row, statistics = np.ones((4, 5), "f"), np.ones(5, "f"), np.ones(4, "f")
    monkeypatch.setattr(onednn_layer_norm, "_build_forward", lacks)
    refuses(onednn_layer_norm._plan_forward, x, row, row, 1e-5)
    monkeypatch.setattr(onednn_layer_norm, "_build_backward", lacks)
    refuses(onednn_layer_norm._plan_backward, x, row, statistics, statistics, x, 1e-5)
