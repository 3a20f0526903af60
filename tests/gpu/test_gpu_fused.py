"""Residual blocks whose convolutions do more than convolve (``config.fused_convolutions``): ``--on whole``."""

from __future__ import annotations

import numpy as np
import pytest
import whole_models
from test_gpu_whole import distance, gradients, two_steps

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import Chain, Sequential, using_config
from dbrdist.core.array import backend
from dbrdist.models.blocks import Basic, Bottleneck


class Net(Chain):
    """A stem, bottlenecks of each kind and basic blocks of both."""

    def __init__(self, width=8):
        super().__init__()
        with self.init_scope():
            self.conv, self.bn = L.Convolution2D(3, 16, 3, 1, pad=1, nobias=True), L.BatchNormalization(16)
            self.blocks = Sequential(
                Bottleneck(16, width, 1), Bottleneck(4 * width, width, 1), Bottleneck(4 * width, 16, 2),
                Bottleneck(64, 16, 1), Basic(64, 16, 2), Basic(16, 16, 1),
            )  # fmt: skip
            self.fc = L.Linear(16, 10)

    def forward(self, x):
        h = self.blocks(L.conv_bn(self.conv, self.bn, x, relu=True))
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))


def _images(rng, dtype):
    return rng.standard_normal((4, 3, 11, 13)).astype(dtype), np.arange(4, dtype=np.int32)


@pytest.fixture(autouse=True)
def fused(on, monkeypatch):
    if on != "whole":
        pytest.skip("runs with --on whole")
    for width in (8, 6):
        monkeypatch.setitem(whole_models.MODELS, f"net of {width}", (lambda width=width: Net(width), _images))
    with using_config("fused_convolutions", True), using_config("cudnn_deterministic", True):
        yield


@pytest.mark.parametrize("name", ["net of 8", "net of 6", "bottlenecks"])
def test_steps_are_those_of_float64(name, device, launched):
    """As accurate as NumPy's own mixed16; widths that cuDNN does not fuse go by the calls."""
    numpy = backend.get_device("@numpy")
    losses, found = two_steps(name, device, "mixed16")
    names = launched()
    exact_losses, exact = two_steps(name, numpy, "float64")
    _, by_numpy = two_steps(name, numpy, "mixed16")
    np.testing.assert_allclose(losses, exact_losses, rtol=2e-2)
    for part in (gradients, dict):
        error, usual = (distance(part(v), part(exact)) for v in (found, by_numpy))
        print(name, part, error, usual)
        assert error < 1.5 * usual + 1e-3, (error, usual)
    print({n: names.count(n) for n in set(names)})
