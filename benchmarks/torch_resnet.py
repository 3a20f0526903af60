"""The networks of ``dbrdist.models.resnet`` in PyTorch for comparisons, with ReLU and additions in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def _conv(i: int, o: int, k: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, stride, k // 2, bias=False)


def _normalized(i: int, o: int, k: int, stride: int = 1, relu: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = [_conv(i, o, k, stride), nn.BatchNorm2d(o)]
    return nn.Sequential(*parts, *([nn.ReLU(inplace=True)] if relu else []))


class Block(nn.Module):
    """A residual block around ``body``."""

    def __init__(self, body: nn.Module, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut = _normalized(i, o, 1, stride, relu=False) if stride > 1 or i != o else nn.Identity()

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x).add_(self.shortcut(x)), inplace=True)


def _bottleneck(i: int, c: int, stride: int) -> Block:
    body = [_normalized(i, c, 1), _normalized(c, c, 3, stride), _normalized(c, 4 * c, 1, relu=False)]
    return Block(nn.Sequential(*body), i, 4 * c, stride)


def _basic(i: int, c: int, stride: int) -> Block:
    return Block(nn.Sequential(_normalized(i, c, 3, stride), _normalized(c, c, 3, relu=False)), i, c, stride)


class Head(nn.Module):
    """Mean over rows and columns, and a linear layer."""

    def __init__(self, i: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(i, num_classes)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.mean(x, (2, 3)))


def resnet50(num_classes: int) -> nn.Module:
    """ResNet-50 with the stride in the 3x3 convolution."""
    layers: list[nn.Module] = [_normalized(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for c, stride, num_blocks in ((64, 1, 3), (128, 2, 4), (256, 2, 6), (512, 2, 3)):
        for j in range(num_blocks):
            layers.append(_bottleneck(i, c, stride if j == 0 else 1))
            i = 4 * c
    return nn.Sequential(*layers, Head(i, num_classes))


def resnet20(num_classes: int) -> nn.Module:
    """ResNet-20 with projections as shortcuts."""
    layers: list[nn.Module] = [_normalized(3, 16, 3)]
    i = 16
    for c, stride in ((16, 1), (32, 2), (64, 2)):
        for j in range(3):
            layers.append(_basic(i, c, stride if j == 0 else 1))
            i = c
    return nn.Sequential(*layers, Head(i, num_classes))
