"""The vision models against their networks written out with plain functions, which other tests check: where PyTorch is
not there, nothing else does.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_vision_models import NarrowGoogLeNet, NarrowResNet, NarrowVGG, evaluated, images, stirred

import dbrdist
import dbrdist.functions as F
from dbrdist import serializers
from dbrdist.links.model.vision import resnet, vgg
from tests.each import each


class Net:
    """Layers by name, with a model's weights."""

    def __init__(self, model, eps=2e-5):
        serializer = serializers.DictionarySerializer()
        serializer.save(model)
        self.w, self.eps = serializer.target, eps

    def conv(self, name, x, stride=1, pad=0):
        return F.convolution_2d(x, self.w[f"{name}/W"], self.w.get(f"{name}/b"), stride, pad).array

    def relu_conv(self, name, x, stride=1, pad=0):
        return np.maximum(self.conv(name, x, stride, pad), 0)

    def linear(self, name, x):
        return x.reshape(len(x), -1) @ self.w[f"{name}/W"].T + self.w[f"{name}/b"]

    def norm(self, name, x):
        gamma, beta, mean, var = (
            self.w[f"{name}/{v}"][:, None, None] for v in ("gamma", "beta", "avg_mean", "avg_var")
        )
        return (x - mean) / np.sqrt(var + self.eps) * gamma + beta


def max_pool(x, ksize, stride, pad=0, cover_all=True):
    return F.max_pooling_2d(x, ksize, stride, pad, cover_all).array


def plain_vgg(net, x, convolutions):
    for stage, num in enumerate(convolutions, 1):
        for i in range(1, num + 1):
            x = net.relu_conv(f"conv{stage}_{i}", x, 1, 1)
        x = max_pool(x, 2, 2)
    return net.linear("fc8", np.maximum(net.linear("fc7", np.maximum(net.linear("fc6", x), 0)), 0))


def plain_resnet(net, x, blocks, in_3x3, as_torchvision):
    h = np.maximum(net.norm("bn1", net.conv("conv1", x, 2, 3)), 0)
    h = max_pool(h, 3, 2, 1, False) if as_torchvision else max_pool(h, 3, 2)
    for stage, num in enumerate(blocks, 2):
        for i in range(num):
            name, stride = f"res{stage}/{f'b{i}' if i else 'a'}", 2 if stage > 2 and not i else 1
            first, second = (1, stride) if in_3x3 else (stride, 1)
            y = np.maximum(net.norm(f"{name}/bn1", net.conv(f"{name}/conv1", h, first)), 0)
            y = np.maximum(net.norm(f"{name}/bn2", net.conv(f"{name}/conv2", y, second, 1)), 0)
            y = net.norm(f"{name}/bn3", net.conv(f"{name}/conv3", y))
            h = np.maximum(y + (h if i else net.norm(f"{name}/bn4", net.conv(f"{name}/conv4", h, stride))), 0)
    return net.linear("fc6", h.mean((2, 3)))


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


@each(**{"n_layers, convolutions": [(16, (2, 2, 3, 3, 3)), (19, (2, 2, 4, 4, 4))]})
def test_vgg(n_layers, convolutions):
    model, x = stirred(NarrowVGG(None, n_layers)), images(1)
    found = evaluated(model, x, ["fc8", "prob"])
    expected = plain_vgg(Net(model), x, convolutions)
    close(found["fc8"].array, expected)
    close(found["prob"].array, np.exp(expected) / np.exp(expected).sum(1, keepdims=True))


@each(in_3x3=[True, False], as_torchvision=[True, False])
def test_resnet(in_3x3, as_torchvision):
    model, x = stirred(NarrowResNet(None, 50, in_3x3)), images(2, 64)
    if as_torchvision and not in_3x3:
        return
    if as_torchvision:
        model.use_torchvision()
    expected = plain_resnet(Net(model, 1e-5 if as_torchvision else 2e-5), x, (3, 4, 6, 3), in_3x3, as_torchvision)
    close(evaluated(model, x, ["fc6"])["fc6"].array, expected)


def test_googlenet():
    model, x = stirred(NarrowGoogLeNet(None)), images(1)
    expected = plain_googlenet(Net(model), x)
    for name, y in evaluated(model, x, list(expected)).items():
        close(y.array, expected[name])
    assert evaluated(model, images(1, 256), ["pool5"])["pool5"].shape[2:] == (2, 2)  # each place, of larger images


@pytest.mark.parametrize(
    "make, scale",
    [(lambda: NarrowVGG(None), lambda fan: 0.01), (lambda: NarrowResNet(None, 50), lambda fan: (2 / fan) ** 0.5),
     (lambda: NarrowGoogLeNet(None), lambda fan: fan**-0.5)],
)  # fmt: skip
def test_weights_without_a_file_are_random(make, scale):
    dbrdist.random.set_seed(0)
    for path, p in make().namedparams():
        if path.endswith("/W") and p.size > 500:
            assert abs(p.array.std() / scale(np.prod(p.shape[1:])) - 1) < 0.15, path
        if path.endswith(("/b", "/beta")):
            assert not p.array.any()


# ---- torchvision's names --------------------------------------------------------------------------------------------


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


def test_torchvisions_names_of_resnet():
    model = NarrowResNet(None, 50, True)
    ends = {"W": "weight", "gamma": "weight", "beta": "bias", "avg_mean": "running_mean", "avg_var": "running_var"}
    expected = {"conv1/W": "conv1.weight", "conv1/b": None, "fc6/W": "fc.weight", "fc6/b": "fc.bias"}
    for stage, num in enumerate((3, 4, 6, 3), 1):
        for i in range(num):
            for k in (1, 2, 3) if i else (1, 2, 3, 4):
                ours = f"res{stage + 1}/{f'b{i}' if i else 'a'}"
                conv, bn = ("downsample.0", "downsample.1") if k == 4 else (f"conv{k}", f"bn{k}")
                expected[f"{ours}/conv{k}/W"] = f"layer{stage}.{i}.{conv}.weight"
                for end in ("gamma", "beta", "avg_mean", "avg_var"):
                    expected[f"{ours}/bn{k}/{end}"] = f"layer{stage}.{i}.{bn}.{ends[end]}"
    for end in ("gamma", "beta", "avg_mean", "avg_var"):
        expected[f"bn1/{end}"] = f"bn1.{ends[end]}"
    assert {path: model._torchvision_name(path) for path in expected} == expected
    assert {path.strip("/") for path, _ in model.namedparams()} == {p for p in expected if "avg" not in p}


@each(
    **{
        "maker, blocks": [
            (resnet.ResNet50Layers, (3, 4, 6, 3)),
            (resnet.ResNet101Layers, (3, 4, 23, 3)),
            (resnet.ResNet152Layers, (3, 8, 36, 3)),
        ]
    }
)
def test_resnets_by_their_names(maker, blocks, tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path))
    Narrow = type(maker.__name__, (maker,), {"channels": (1, 1, 1, 1), "num_classes": 2})
    for options, halving in (((), (2, 1)), ((False,), (2, 1)), ((True,), (1, 2))):
        model = Narrow(None, *options)
        assert tuple(len(list(model[f"res{k}"].children())) for k in (2, 3, 4, 5)) == blocks
        assert (model.res3.a.conv1.stride[0], model.res3.a.conv2.stride[0]) == halving
    with pytest.raises(FileNotFoundError, match=f"takes .*ResNet-{3 * sum(blocks) + 2}-model.npz"):
        Narrow()


@each(maker=[vgg.VGG16Layers, vgg.VGG19Layers])
def test_vggs_by_their_names(maker, tmp_path, monkeypatch):
    monkeypatch.setenv("CHAINER_DATASET_ROOT", str(tmp_path))
    Narrow = type(maker.__name__, (maker,), {"channels": (1, 1, 1, 1, 1), "hidden_size": 1, "num_classes": 2})
    names = [link.name for link in Narrow(None).children()]
    assert len(names) == int(maker.__name__[3:5])  # of convolutions and linear layers
    with pytest.raises(FileNotFoundError, match=f"takes .*VGG_ILSVRC_{len(names)}_layers.npz"):
        Narrow()


def test_blocks_by_themselves_halve_the_image_in_their_first_convolution():
    for block in (resnet.BottleneckA(3, 2, 8), resnet.BuildingBlock(2, 3, 2, 8, 2).a):
        assert [getattr(block, f"conv{i}").stride for i in (1, 2, 3, 4)] == [(2, 2), (1, 1), (1, 1), (2, 2)]
        assert [getattr(block, f"conv{i}").pad for i in (1, 2, 3, 4)] == [(0, 0), (1, 1), (0, 0), (0, 0)]
        assert block(np.ones((1, 3, 6, 6), np.float32)).shape == (1, 8, 3, 3)
