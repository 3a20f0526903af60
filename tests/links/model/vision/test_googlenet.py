"""Tests of dbrdist.links.model.vision.googlenet."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.links.model.vision import googlenet
from tests.links.model.vision.vision_helpers import NarrowGoogLeNet, Net, evaluated, images, stirred


def test_googlenet_normalizes_over_five_channels():
    x = 100 * np.random.default_rng(0).standard_normal((1, 7, 2, 2)).astype("f")
    total = np.stack([(x[:, max(c - 2, 0) : c + 3] ** 2).sum(1) for c in range(7)], 1)
    np.testing.assert_allclose(googlenet._normalize(x).array, x / (1 + 1e-4 / 5 * total) ** 0.75, rtol=1e-5)


def max_pool(x, ksize, stride, pad=0, cover_all=True):
    return F.max_pooling_2d(x, ksize, stride, pad, cover_all).array


def inception(net, name, x):
    three = net.relu_conv(f"{name}/conv3", net.relu_conv(f"{name}/proj3", x), pad=1)
    five = net.relu_conv(f"{name}/conv5", net.relu_conv(f"{name}/proj5", x), pad=2)
    pooled = net.relu_conv(f"{name}/projp", max_pool(x, 3, 1, 1))
    return np.concatenate([net.relu_conv(f"{name}/conv1", x), three, five, pooled], 1)


def normalize(x):
    squares = np.pad(x * x, ((0, 0), (2, 2), (0, 0), (0, 0)))
    return x / (1 + 1e-4 / 5 * sum(squares[:, i : i + x.shape[1]] for i in range(5))) ** 0.75


def plain_googlenet(net, x):
    """The three scores."""

    def scores(name, x):
        h = net.relu_conv(f"{name}_conv", F.average_pooling_2d(x, 5, 3).array)
        return net.linear(f"{name}_fc2", np.maximum(net.linear(f"{name}_fc1", h), 0))

    h = normalize(max_pool(net.relu_conv("conv1", x, 2, 3), 3, 2))
    h = max_pool(normalize(net.relu_conv("conv2", net.relu_conv("conv2_reduce", h), pad=1)), 3, 2)
    h = max_pool(inception(net, "inc3b", inception(net, "inc3a", h)), 3, 2)
    found = {}
    for name in ("inc4a", "inc4b", "inc4c", "inc4d", "inc4e"):
        h = inception(net, name, h)
        if name in ("inc4a", "inc4d"):
            found["loss1_fc2" if name == "inc4a" else "loss2_fc2"] = scores("loss1" if name == "inc4a" else "loss2", h)
    h = inception(net, "inc5b", inception(net, "inc5a", max_pool(h, 3, 2)))
    return {**found, "loss3_fc": net.linear("loss3_fc", h.mean((2, 3)))}


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * abs(expected).max())


@pytest.mark.slow
def test_googlenet():
    model, x = stirred(NarrowGoogLeNet(None)), images(1)
    expected = plain_googlenet(Net(model), x)
    for name, y in evaluated(model, x, list(expected)).items():
        close(y.array, expected[name])
    assert evaluated(model, images(1, 256), ["pool5"])["pool5"].shape[2:] == (2, 2)  # each place, of larger images
