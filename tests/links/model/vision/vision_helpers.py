"""Chainer's image networks with a fraction of their channels."""

from __future__ import annotations

import numpy as np

import dbrdist
import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import serializers
from dbrdist.links.model.vision import googlenet, resnet, vgg


class NarrowVGG(vgg.VGGLayers):
    channels, hidden_size, num_classes = (4, 6, 8, 8, 8), 12, 5


class NarrowResNet(resnet.ResNetLayers):
    channels, num_classes = (4, 4, 6, 8), 5


class NarrowGoogLeNet(googlenet.GoogLeNet):
    divisor, num_classes = 16, 5


def images(num=2, size=224):
    return np.random.default_rng(0).normal(0, 50, (num, 3, size, size)).astype(np.float32)


def stirred(model, seed=0):
    """The model with weights of a sensible size and running statistics away from 0 and 1."""
    rng = np.random.default_rng(seed)
    for p in model.params():
        scale = np.sqrt(2 / max(np.prod(p.shape[1:]), 1)) if p.ndim > 1 else 0.1
        p.array[...] = rng.normal(0, scale, p.shape) + (p.name == "gamma")
    for link in model.links():
        if isinstance(link, L.BatchNormalization):
            link.avg_mean[...] = rng.normal(0, 1, link.avg_mean.shape)
            link.avg_var[...] = rng.uniform(0.5, 2, link.avg_var.shape)
    return model


def evaluated(model, x, layers=None):
    with dbrdist.using_config("train", False):
        return model(x, layers)


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
