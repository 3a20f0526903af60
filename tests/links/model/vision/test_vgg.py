"""Tests of dbrdist.links.model.vision.vgg."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.links.model.vision import vgg
from tests.each import each
from tests.links.model.vision.vision_helpers import NarrowVGG, Net, evaluated, images, stirred


def test_vgg_begins_with_small_weights_and_no_biases():
    class Small(vgg.VGGLayers):
        channels, hidden_size, num_classes = (4, 6, 8, 8, 8), 12, 5

    params = dict(Small(None, 19).namedparams())
    assert len(params) == 2 * 19  # Simonyan and Zisserman's configuration E
    for path, p in params.items():
        if path.endswith("b"):
            assert not p.array.any()
        elif p.array.size > 500:
            assert 0.008 < p.array.std() < 0.012


def max_pool(x, ksize, stride, pad=0, cover_all=True):
    return F.max_pooling_2d(x, ksize, stride, pad, cover_all).array


def plain_vgg(net, x, convolutions):
    for stage, num in enumerate(convolutions, 1):
        for i in range(1, num + 1):
            x = net.relu_conv(f"conv{stage}_{i}", x, 1, 1)
        x = max_pool(x, 2, 2)
    return net.linear("fc8", np.maximum(net.linear("fc7", np.maximum(net.linear("fc6", x), 0)), 0))


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * abs(expected).max())


@each(**{"n_layers, convolutions": [(16, (2, 2, 3, 3, 3)), (19, (2, 2, 4, 4, 4))]})
def test_vgg(n_layers, convolutions):
    model, x = stirred(NarrowVGG(None, n_layers)), images(1)
    found = evaluated(model, x, ["fc8", "prob"])
    expected = plain_vgg(Net(model), x, convolutions)
    close(found["fc8"].array, expected)
    close(found["prob"].array, np.exp(expected) / np.exp(expected).sum(1, keepdims=True))


@each(
    **{
        "n_layers, places": [
            (16, [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]),
            (19, [0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34]),
        ]
    }
)
def test_torchvisions_names_of_vgg(n_layers, places):
    model = NarrowVGG(None, n_layers)
    convolutions = [link.name for link in model.children() if link.name.startswith("conv")]
    expected = {name: f"features.{place}" for name, place in zip(convolutions, places, strict=True)}
    expected |= {"fc6": "classifier.0", "fc7": "classifier.3", "fc8": "classifier.6"}
    for name, theirs in expected.items():
        assert model._torchvision_name(f"{name}/W") == f"{theirs}.weight"
        assert model._torchvision_name(f"{name}/b") == f"{theirs}.bias"


@each(maker=[vgg.VGG16Layers, vgg.VGG19Layers])
def test_vggs_by_their_names(maker, tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path))
    Narrow = type(maker.__name__, (maker,), {"channels": (1, 1, 1, 1, 1), "hidden_size": 1, "num_classes": 2})
    names = [link.name for link in Narrow(None).children()]
    assert len(names) == int(maker.__name__[3:5])  # of convolutions and linear layers
    with pytest.raises(FileNotFoundError, match=f"takes .*VGG_ILSVRC_{len(names)}_layers.npz"):
        Narrow()
