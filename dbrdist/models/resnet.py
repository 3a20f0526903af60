"""Residual networks (He et al. 2016, "Deep residual learning for image recognition", arXiv 1512.03385)."""

from __future__ import annotations

from functools import partial
from typing import Any

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.chain import Chain, ChainList
from dbrdist.links.initializers import HeNormal, Normal


def _conv(in_channels: int | None, out_channels: int, ksize: int, stride: int = 1) -> L.Convolution2D:
    """A convolution without bias, as before every batch normalization, initialised as in He et al. 2015."""
    return L.Convolution2D(
        in_channels, out_channels, ksize, stride, pad=ksize // 2, nobias=True, initialW=HeNormal(fan_option="fan_out")
    )


class Projection(Chain):
    """The shortcut where the shape changes: a strided 1x1 convolution and batch normalization."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        with self.init_scope():
            self.conv = _conv(in_channels, out_channels, 1, stride)
            self.bn = L.BatchNormalization(out_channels)

    def forward(self, x: Any) -> Any:
        return L.conv_bn(self.conv, self.bn, x)


class Basic(Chain):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, last_gamma: float) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = _conv(in_channels, channels, 3, stride)
            self.bn1 = L.BatchNormalization(channels)
            self.conv2 = _conv(channels, channels, 3)
            self.bn2 = L.BatchNormalization(channels, initial_gamma=last_gamma)
            if stride > 1 or in_channels != channels:
                self.shortcut = Projection(in_channels, channels, stride)
        self.is_projected = stride > 1 or in_channels != channels

    def forward(self, x: Any) -> Any:
        h = L.conv_bn(self.conv1, self.bn1, x, relu=True)
        residual = partial(self.shortcut, x) if self.is_projected else x
        return L.conv_bn(self.conv2, self.bn2, h, relu=True, residual=residual)


class Bottleneck(Chain):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the output has 4 times ``channels``."""

    def __init__(self, in_channels: int, channels: int, stride: int, last_gamma: float, stride_in_3x3: bool) -> None:
        super().__init__()
        out_channels = 4 * channels
        stride1, stride2 = (1, stride) if stride_in_3x3 else (stride, 1)
        with self.init_scope():
            self.conv1 = _conv(in_channels, channels, 1, stride1)
            self.bn1 = L.BatchNormalization(channels)
            self.conv2 = _conv(channels, channels, 3, stride2)
            self.bn2 = L.BatchNormalization(channels)
            self.conv3 = _conv(channels, out_channels, 1)
            self.bn3 = L.BatchNormalization(out_channels, initial_gamma=last_gamma)
            if stride > 1 or in_channels != out_channels:
                self.shortcut = Projection(in_channels, out_channels, stride)
        self.is_projected = stride > 1 or in_channels != out_channels

    def forward(self, x: Any) -> Any:
        h = L.conv_bn(self.conv1, self.bn1, x, relu=True)
        h = L.conv_bn(self.conv2, self.bn2, h, relu=True)
        residual = partial(self.shortcut, x) if self.is_projected else x
        return L.conv_bn(self.conv3, self.bn3, h, relu=True, residual=residual)


class ResNetCIFAR(Chain):
    """ResNet for 32x32 images: a 3x3 convolution, three stages of 16, 32 and 64 channels, and one linear layer.

    Args:
        num_classes: size of the output.
        depth: 6 n + 2 layers, such as 20 or 56.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).

    Where the shape changes the shortcut is a projection, unlike the padded identity of He et al., section 4.2. Input
    (N, 3, 32, 32), output (N, num_classes).
    """

    def __init__(self, num_classes: int = 10, depth: int = 20, zero_gamma: bool = False) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"ResNetCIFAR: expected a depth of 6 n + 2, such as 20 or 56, got {depth}")
        last_gamma = 0.0 if zero_gamma else 1.0
        blocks, in_channels = [], 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((depth - 2) // 6):
                blocks.append(Basic(in_channels, channels, stride if i == 0 else 1, last_gamma))
                in_channels = channels
        with self.init_scope():
            self.conv = _conv(3, 16, 3)
            self.bn = L.BatchNormalization(16)
            self.blocks = ChainList(*blocks)
            self.fc = L.Linear(64, num_classes)

    def forward(self, x: Any) -> Any:
        h = L.conv_bn(self.conv, self.bn, x, relu=True)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


class ResNet(Chain):
    """ResNet for ImageNet: a 7x7 convolution, pooling, four stages of bottleneck blocks, and one linear layer.

    Args:
        num_classes: size of the output.
        blocks: blocks per stage.
        stride_in_3x3: where a stage halves the image: in the 3x3 convolution (v1.5, Goyal et al. 2017) or in the first
            1x1 (v1, He et al. and Chainer).
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).

    Input (N, 3, H, W), output (N, num_classes).
    """

    def __init__(
        self,
        num_classes: int = 1000,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        stride_in_3x3: bool = True,
        zero_gamma: bool = False,
    ) -> None:
        super().__init__()
        last_gamma = 0.0 if zero_gamma else 1.0
        links, in_channels = [], 64
        for channels, stride, num_blocks in zip((64, 128, 256, 512), (1, 2, 2, 2), blocks):
            for i in range(num_blocks):
                links.append(Bottleneck(in_channels, channels, stride if i == 0 else 1, last_gamma, stride_in_3x3))
                in_channels = 4 * channels
        with self.init_scope():
            self.conv = _conv(3, 64, 7, 2)
            self.bn = L.BatchNormalization(64)
            self.blocks = ChainList(*links)
            self.fc = L.Linear(in_channels, num_classes, initialW=Normal(0.01))

    def forward(self, x: Any) -> Any:
        h = L.conv_bn(self.conv, self.bn, x, relu=True)
        h = F.max_pooling_2d(h, 3, stride=2, pad=1, cover_all=False)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


class ResNet50(ResNet):
    """ResNet-50: 25,557,032 parameters with 1,000 classes."""

    def __init__(self, num_classes: int = 1000, stride_in_3x3: bool = True, zero_gamma: bool = False) -> None:
        super().__init__(num_classes, (3, 4, 6, 3), stride_in_3x3, zero_gamma)


class ResNet20(ResNetCIFAR):
    """ResNet-20 for 32x32 images."""

    def __init__(self, num_classes: int = 10, zero_gamma: bool = False) -> None:
        super().__init__(num_classes, 20, zero_gamma)


class ResNet56(ResNetCIFAR):
    """ResNet-56 for 32x32 images."""

    def __init__(self, num_classes: int = 10, zero_gamma: bool = False) -> None:
        super().__init__(num_classes, 56, zero_gamma)
