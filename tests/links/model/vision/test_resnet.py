"""Tests of dbrdist.links.model.vision.resnet."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist.links.model.vision import resnet
from tests.each import each
from tests.links.model.vision.vision_helpers import NarrowResNet, Net, evaluated, images, stirred


def max_pool(x, ksize, stride, pad=0, cover_all=True):
    return F.max_pooling_2d(x, ksize, stride, pad, cover_all).array


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


def close(found, expected):
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * abs(expected).max())


@pytest.mark.slow
@each(in_3x3=[True, False], as_torchvision=[True, False])
def test_resnet(in_3x3, as_torchvision):
    model, x = stirred(NarrowResNet(None, 50, in_3x3)), images(2, 64)
    if as_torchvision and not in_3x3:
        return
    if as_torchvision:
        model.use_torchvision()
    expected = plain_resnet(Net(model, 1e-5 if as_torchvision else 2e-5), x, (3, 4, 6, 3), in_3x3, as_torchvision)
    close(evaluated(model, x, ["fc6"])["fc6"].array, expected)


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


@pytest.mark.slow
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


def test_blocks_by_themselves_halve_the_image_in_their_first_convolution():
    for block in (resnet.BottleneckA(3, 2, 8), resnet.BuildingBlock(2, 3, 2, 8, 2).a):
        assert [getattr(block, f"conv{i}").stride for i in (1, 2, 3, 4)] == [(2, 2), (1, 1), (1, 1), (2, 2)]
        assert [getattr(block, f"conv{i}").pad for i in (1, 2, 3, 4)] == [(0, 0), (1, 1), (0, 0), (0, 0)]
        assert block(np.ones((1, 3, 6, 6), np.float32)).shape == (1, 8, 3, 3)
