"""Blocks of residual networks (He et al. 2016, "Deep residual learning for image recognition", arXiv 1512.03385)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.array.backend import empty
from dbrdist.core.array.config import config
from dbrdist.core.model.chain import Chain
from dbrdist.core.tape.variable import Operand, Variable, as_array
from dbrdist.links.convolution_bn import fused_block
from dbrdist.links.initializers import HeNormal

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link


def convolution(
    in_channels: int | None, out_channels: int, ksize: int, stride: int = 1, fan: str = "fan_out"
) -> L.Convolution2D:
    """A convolution without bias, as before every batch normalization, initialised as in He et al. 2015."""
    return L.Convolution2D(
        in_channels, out_channels, ksize, stride, pad=ksize // 2, nobias=True, initialW=HeNormal(fan_option=fan)
    )


class Options(NamedTuple):
    """What all blocks of a network have in common."""

    last_gamma: float = 1.0  # scale of each block's last batch normalization at the start
    stride_in_3x3: bool = True
    average_shortcut: bool = False
    blurs: bool = False  # in front of strided convolutions
    fan: str = "fan_out"  # of the initial weights of convolutions
    gamma: Any = None  # initializer of the scales of batch normalizations; None for 1

    def convolution(self, in_channels: int, out_channels: int, ksize: int, stride: int = 1) -> L.Convolution2D:
        """A convolution with these initial weights."""
        return convolution(in_channels, out_channels, ksize, stride, self.fan)

    def normalization(self, channels: int, is_last: bool = False) -> L.BatchNormalization:
        """A batch normalization with these initial scales."""
        starts_at_zero = is_last and self.last_gamma != 1
        return L.BatchNormalization(channels, initial_gamma=self.last_gamma if starts_at_zero else self.gamma)


PLAIN = Options()
_MIN_BLURRED = 16  # channels of an input that is worth a filter, as in FFCV and Composer


def blur(x: Operand, stride: int = 1) -> Variable:
    """Each channel of ``x`` (N, C, H, W) filtered by (1, 2, 1) / 4 along both sides, zeros outside (Zhang 2019)."""
    num_channels = x.shape[1]
    W = empty((num_channels, 1, 3, 3), x.dtype, as_array(x))
    W[...] = W.dtype.type(1 / 16)
    for at in (np.s_[:, :, 1], np.s_[:, :, :, 1]):
        W[at] *= W.dtype.type(2)
    return F.convolution_2d(x, W, stride=stride, pad=1, groups=num_channels)


def _blurred(x: Operand, conv: L.Convolution2D, blurs: bool) -> Operand:
    """What a convolution reads, filtered before samples are left out."""
    return blur(x) if blurs and conv.stride[0] > 1 and x.shape[1] >= _MIN_BLURRED else x


def halved(x: Operand) -> Variable:
    """Means over squares of 2x2 of ``x`` (N, C, H, W); at odd ends over what is there."""
    if x.shape[2] % 2:
        x = F.concat([x, x[:, :, -1:]], axis=2)
    if x.shape[3] % 2:
        x = F.concat([x, x[:, :, :, -1:]], axis=3)
    return F.average_pooling_2d(x, 2, 2)


def _last(block: Any, conv: Link, bn: Link, h: Any, x: Any) -> Variable:
    """The end of a block: the residual, which training may drop for whole images, and the shortcut."""
    ratio = block.drop_path
    shortcut = partial(block.shortcut, x) if block.is_projected else x
    if not (ratio and config.train):
        return L.conv_bn(conv, bn, h, relu=True, residual=shortcut)
    h = L.conv_bn(conv, bn, h)
    ones = empty((h.shape[0], 1, 1, 1), h.dtype, as_array(h))
    ones[...] = 1
    kept = F.dropout(ones, ratio)
    return F.relu(h * F.broadcast_to(kept, h.shape) + (shortcut() if callable(shortcut) else shortcut))


class Projection(Chain):
    """The shortcut where the shape changes: a strided 1x1 convolution and batch normalization.

    With ``average_shortcut`` (ResNet-D) means over squares take the place of the stride.
    """

    halves = blurs = False  # in pickles of versions without these settings, too

    def __init__(self, in_channels: int, out_channels: int, stride: int, options: Options = PLAIN) -> None:
        super().__init__()
        self.halves = options.average_shortcut and stride == 2
        self.blurs = options.blurs
        with self.init_scope():
            self.conv = options.convolution(in_channels, out_channels, 1, 1 if self.halves else stride)
            self.bn = options.normalization(out_channels)

    def forward(self, x: Operand) -> Any:
        x = halved(x) if self.halves else _blurred(x, self.conv, self.blurs)
        return L.conv_bn(self.conv, self.bn, x)


class _Block(Chain):
    """A residual block, which a pickle of a version without these settings has, too."""

    blurs = False
    drop_path = 0.0  # the fraction of images whose residual a training step drops
    is_projected = False
    shortcut: Projection

    def _fused(self, x: Operand, *stages: tuple[Link, Link]) -> Variable | None:
        """All of the block as one function, or None."""
        shortcut = self.shortcut if self.is_projected else None
        if self.blurs or self.drop_path:
            return None
        if shortcut is None:
            return fused_block(x, stages)
        is_plain = type(shortcut) is Projection and not shortcut.halves and not shortcut._hooks
        if not is_plain or "forward" in shortcut.__dict__:
            return None
        return fused_block(x, stages, (shortcut.conv, shortcut.bn))


class Basic(_Block):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, options: Options = PLAIN) -> None:
        super().__init__()
        self.blurs = options.blurs
        with self.init_scope():
            self.conv1 = options.convolution(in_channels, channels, 3, stride)
            self.bn1 = options.normalization(channels)
            self.conv2 = options.convolution(channels, channels, 3)
            self.bn2 = options.normalization(channels, True)
            if stride > 1 or in_channels != channels:
                self.shortcut = Projection(in_channels, channels, stride, options)
        self.is_projected = stride > 1 or in_channels != channels

    def forward(self, x: Operand) -> Any:
        y = self._fused(x, (self.conv1, self.bn1), (self.conv2, self.bn2))
        if y is not None:
            return y
        h = L.conv_bn(self.conv1, self.bn1, _blurred(x, self.conv1, self.blurs), relu=True)
        return _last(self, self.conv2, self.bn2, h, x)


class Bottleneck(_Block):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the output has 4 times ``channels``."""

    def __init__(self, in_channels: int, channels: int, stride: int, options: Options = PLAIN) -> None:
        super().__init__()
        out_channels = 4 * channels
        stride1, stride2 = (1, stride) if options.stride_in_3x3 else (stride, 1)
        self.blurs = options.blurs
        with self.init_scope():
            self.conv1 = options.convolution(in_channels, channels, 1, stride1)
            self.bn1 = options.normalization(channels)
            self.conv2 = options.convolution(channels, channels, 3, stride2)
            self.bn2 = options.normalization(channels)
            self.conv3 = options.convolution(channels, out_channels, 1)
            self.bn3 = options.normalization(out_channels, True)
            if stride > 1 or in_channels != out_channels:
                self.shortcut = Projection(in_channels, out_channels, stride, options)
        self.is_projected = stride > 1 or in_channels != out_channels

    def forward(self, x: Operand) -> Any:
        y = self._fused(x, (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3))
        if y is not None:
            return y
        h = L.conv_bn(self.conv1, self.bn1, _blurred(x, self.conv1, self.blurs), relu=True)
        h = L.conv_bn(self.conv2, self.bn2, _blurred(h, self.conv2, self.blurs), relu=True)
        return _last(self, self.conv3, self.bn3, h, x)
