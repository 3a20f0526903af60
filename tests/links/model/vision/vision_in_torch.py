"""The networks of dbrdist.links.model.vision in plain PyTorch, with torchvision's names, for comparisons."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(nn.Module):
    def __init__(self, n_layers, channels, hidden, num_classes):
        super().__init__()
        layers, last = [], 3
        for num, out in zip(CONVOLUTIONS[n_layers], channels):
            for _ in range(num):
                layers += [nn.Conv2d(last, out, 3, padding=1), nn.ReLU()]
                last = out
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(last * 49, hidden), nn.ReLU(), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, num_classes),
        )  # fmt: skip

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Bottleneck(nn.Module):
    def __init__(self, n_in, mid, stride, in_3x3, eps):
        super().__init__()
        first, second = (1, stride) if in_3x3 else (stride, 1)
        self.conv1, self.bn1 = nn.Conv2d(n_in, mid, 1, first, bias=False), nn.BatchNorm2d(mid, eps)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, second, 1, bias=False), nn.BatchNorm2d(mid, eps)
        self.conv3, self.bn3 = nn.Conv2d(mid, 4 * mid, 1, bias=False), nn.BatchNorm2d(4 * mid, eps)
        self.downsample = None
        if stride > 1 or n_in != 4 * mid:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_in, 4 * mid, 1, stride, bias=False), nn.BatchNorm2d(4 * mid, eps)
            )

    def forward(self, x):
        h = self.bn1(self.conv1(x)).relu()
        h = self.bn2(self.conv2(h)).relu()
        h = self.bn3(self.conv3(h))
        return (h + (x if self.downsample is None else self.downsample(x))).relu()


class ResNet(nn.Module):
    """As torchvision; with `chainer` as Chainer: other strides, pooling and addend of variances."""

    def __init__(self, blocks, channels, num_classes, chainer=False):
        super().__init__()
        self.chainer, eps = chainer, 2e-5 if chainer else 1e-5
        last = channels[0]
        self.conv1, self.bn1 = nn.Conv2d(3, last, 7, 2, 3, bias=False), nn.BatchNorm2d(last, eps)
        for stage, (num, mid) in enumerate(zip(blocks, channels), 1):
            parts = []
            for i in range(num):
                parts.append(Bottleneck(last, mid, 2 if i == 0 and stage > 1 else 1, not chainer, eps))
                last = 4 * mid
            setattr(self, f"layer{stage}", nn.Sequential(*parts))
        self.fc = nn.Linear(last, num_classes)

    def forward(self, x):
        h = self.bn1(self.conv1(x)).relu()
        h = F.max_pool2d(h, 3, 2, ceil_mode=True) if self.chainer else F.max_pool2d(h, 3, 2, 1)
        for stage in (1, 2, 3, 4):
            h = getattr(self, f"layer{stage}")(h)
        return self.fc(h.mean((2, 3)))


def relu_conv(weights, name, x, stride=1, pad=0, relu=True):
    y = F.conv2d(x, weights[f"{name}/W"], weights[f"{name}/b"], stride, pad)
    return y.relu() if relu else y


def inception(w, name, x):
    three = relu_conv(w, f"{name}/conv3", relu_conv(w, f"{name}/proj3", x), pad=1)
    five = relu_conv(w, f"{name}/conv5", relu_conv(w, f"{name}/proj5", x), pad=2)
    pooled = relu_conv(w, f"{name}/projp", F.max_pool2d(x, 3, 1, 1))
    return torch.cat([relu_conv(w, f"{name}/conv1", x), three, five, pooled], 1)


def googlenet(w, x):
    """Chainer's GoogLeNet on weights by path, in evaluation mode: the three scores."""

    def linear(name, x):
        return F.linear(x.flatten(1), w[f"{name}/W"], w[f"{name}/b"])

    def normalize(x):  # PyTorch divides alpha by n
        return F.local_response_norm(x, 5, alpha=1e-4, k=1)

    def pool(x):
        return F.max_pool2d(x, 3, 2, ceil_mode=True)

    def scores(name, x):
        h = relu_conv(w, f"{name}_conv", F.avg_pool2d(x, 5, 3))
        return linear(f"{name}_fc2", linear(f"{name}_fc1", h).relu())

    h = normalize(pool(relu_conv(w, "conv1", x, 2, 3)))
    h = pool(normalize(relu_conv(w, "conv2", relu_conv(w, "conv2_reduce", h), pad=1)))
    h = pool(inception(w, "inc3b", inception(w, "inc3a", h)))
    found = {}
    for name in ("inc4a", "inc4b", "inc4c", "inc4d", "inc4e"):
        h = inception(w, name, h)
        if name in ("inc4a", "inc4d"):
            found["loss1_fc2" if name == "inc4a" else "loss2_fc2"] = scores("loss1" if name == "inc4a" else "loss2", h)
    h = inception(w, "inc5b", inception(w, "inc5a", pool(h)))
    return {**found, "loss3_fc": linear("loss3_fc", F.avg_pool2d(h, 7))}
