"""Residual networks (He et al. 2016, "Deep residual learning for image recognition", arXiv 1512.03385)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dbrdist import functions as F
from dbrdist import links as L
from dbrdist.core.array.backend import Array
from dbrdist.core.model.chain import Chain, ChainList
from dbrdist.core.names.limits import fraction, whole
from dbrdist.core.tape.variable import Operand
from dbrdist.links.initializers import HeNormal, Normal, Uniform
from dbrdist.models.blocks import PLAIN, Basic, Bottleneck, Options, blur, convolution
from dbrdist.models.blocks import Projection as Projection
from dbrdist.models.mlp import NUM_CLASSES

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

VARIANTS = ("plain", "d", "chainer")
BLUR_POOLING = ("none", "convolutions", "all")
FANS = ("fan_out", "fan_in")

_ZERO_GAMMA = "Whether each block's last batch normalization starts with scale 0."
_STRIDE = "Where blocks halve the size: in the 3x3 convolution (v1.5) or in the first 1x1 (v1)."
_VARIANT = "`d` is ResNet-D; `chainer` has a bias in the stem and pooling without padding, as in Chainer's example."
_BLUR = "Whether a filter comes before strided convolutions, or before the pooling too (`all`)."
_DEPTH = "Fraction of images whose residual a training step drops in the last block; linear from 0 in the first."
_FAN = "What the variance of convolutions' initial weights is 2 over: `fan_in` as in NVIDIA's examples and Composer."
_GAMMA = "Whether the scales of batch normalizations start uniformly from 0 to 1, as in Composer, not at 1."
_BIAS = "Whether the last layer's bias starts at -ln(num_classes), for `binary_cross_entropy`."


class ResNetCIFAR(Chain):
    """ResNet for 32x32 images: a 3x3 convolution, three stages of 16, 32 and 64 channels, and one linear layer.

    Args:
        num_classes: size of the output.
        depth: 6 n + 2 layers, such as 20 or 56.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).

    Where the shape changes the shortcut is a projection, unlike the padded identity of He et al., section 4.2. Input
    (N, 3, 32, 32), output (N, num_classes).

    Example:
        >>> models.ResNetCIFAR(depth=20)(np.zeros((2, 3, 32, 32), np.float32)).shape
        (2, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 10,
        depth: int = 20,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"ResNetCIFAR: expected a depth of 6 n + 2, such as 20 or 56, got {depth}")
        options = Options(last_gamma=0.0 if zero_gamma else 1.0)
        blocks, in_channels = [], 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((depth - 2) // 6):
                blocks.append(Basic(in_channels, channels, stride if i == 0 else 1, options))
                in_channels = channels
        with self.init_scope():
            self.conv = convolution(3, 16, 3)
            self.bn = L.BatchNormalization(16)
            self.blocks = ChainList(*blocks)
            self.fc = L.Linear(64, num_classes)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, 3, H, W) to the scores (N, num_classes)."""
        h = L.conv_bn(self.conv, self.bn, x, relu=True)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


class DeepStem(Chain):
    """Three 3x3 convolutions of 32, 32 and 64 channels, the first of stride 2, instead of a 7x7 one (ResNet-D).

    The batch normalization of the last one is the network's.
    """

    def __init__(self, options: Options = PLAIN) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1, self.bn1 = options.convolution(3, 32, 3, 2), options.normalization(32)
            self.conv2, self.bn2 = options.convolution(32, 32, 3), options.normalization(32)
            self.conv3 = options.convolution(32, 64, 3)

    def forward(self, x: Any) -> Any:
        h = L.conv_bn(self.conv1, self.bn1, x, relu=True)
        return self.conv3(L.conv_bn(self.conv2, self.bn2, h, relu=True))


class ResNet(Chain):
    """ResNet for ImageNet: a stem, pooling, four stages of blocks, and one linear layer.

    Args:
        num_classes: size of the output.
        blocks: blocks per stage.
        stride_in_3x3: where a stage halves the image: in the 3x3 convolution (v1.5, Goyal et al. 2017) or in the first
            1x1 (v1, He et al. and Chainer). Basic blocks have no choice.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        bottleneck: blocks of 1x1, 3x3 and 1x1 convolutions; otherwise of two 3x3 ones (ResNet-18 and 34).
        variant: ``'plain'``; ``'d'`` with three small convolutions as stem and means in front of the shortcuts' 1x1
            convolutions (ResNet-D, He et al. 2019, arXiv 1812.01187); ``'chainer'``, as in Chainer's example: a bias in
            the stem, and pooling without padding.
        blur_pooling: filter what is read by strided convolutions of 16 input channels or more (``'convolutions'``), and
            the maxima of the pooling too (``'all'``); Zhang 2019, arXiv 1904.11486.
        stochastic_depth: the fraction of images whose residual a training step drops in the last block; it rises
            linearly from 0 in the first one (Huang et al. 2016, arXiv 1603.09382).
        log_constant_bias: start the last layer's bias at -ln(num_classes), so that a binary cross entropy starts small.
        fan: what the variance of convolutions' initial weights is 2 over: ``'fan_out'`` (torchvision, Goyal et al.) or
            ``'fan_in'`` (NVIDIA, Composer); He et al. 2015 name both.
        uniform_gamma: start the scales of batch normalizations uniformly from 0 to 1 (Composer), not at 1.

    Input (N, 3, H, W), output (N, num_classes).

    Example:
        >>> model = models.ResNet(num_classes=10, blocks=(1, 1, 1, 1), bottleneck=False)
    """

    variant, blurs_pooling = "plain", False  # in pickles of versions without these settings, too

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        blocks: tuple[int, int, int, int] = (3, 4, 6, 3),
        stride_in_3x3: Annotated[bool, _STRIDE] = True,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        *,
        bottleneck: bool = True,
        variant: Annotated[Literal["plain", "d", "chainer"], _VARIANT] = "plain",
        blur_pooling: Annotated[Literal["none", "convolutions", "all"], _BLUR] = "none",
        stochastic_depth: Annotated[float, fraction, _DEPTH] = 0.0,
        log_constant_bias: Annotated[bool, _BIAS] = False,
        fan: Annotated[Literal["fan_out", "fan_in"], _FAN] = "fan_out",
        uniform_gamma: Annotated[bool, _GAMMA] = False,
    ) -> None:
        super().__init__()
        _check(variant, blur_pooling, fan)
        self.variant, self.blurs_pooling = variant, blur_pooling == "all"
        gamma = _UnitUniform() if uniform_gamma else None
        blurs = blur_pooling != "none"
        options = Options(0.0 if zero_gamma else 1.0, stride_in_3x3, variant == "d", blurs, fan, gamma)
        kind: Any = Bottleneck if bottleneck else Basic
        links, in_channels = [], 64
        for channels, stride, num_blocks in zip((64, 128, 256, 512), (1, 2, 2, 2), blocks):
            for i in range(num_blocks):
                links.append(kind(in_channels, channels, stride if i == 0 else 1, options))
                in_channels = 4 * channels if bottleneck else channels
        for i, link in enumerate(links):
            link.drop_path = stochastic_depth * i / max(len(links) - 1, 1)
        with self.init_scope():
            self.conv = _stem(variant, options)
            self.bn = options.normalization(64)
            self.blocks = ChainList(*links)
            bias = -math.log(num_classes) if log_constant_bias else 0.0
            self.fc = L.Linear(in_channels, num_classes, initialW=Normal(0.01), initial_bias=bias)

    def forward(self, x: Operand) -> Any:
        """``x`` (N, 3, H, W) to the scores (N, num_classes)."""
        h = L.conv_bn(self.conv, self.bn, x, relu=True)
        if self.variant == "chainer":
            h = F.max_pooling_2d(h, 3, stride=2)
        elif self.blurs_pooling:
            h = blur(F.max_pooling_2d(h, 3, stride=1, pad=1, cover_all=False), stride=2)
        else:
            h = F.max_pooling_2d(h, 3, stride=2, pad=1, cover_all=False)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.mean(h, axis=(2, 3)))


def _check(variant: str, blur_pooling: str, fan: str) -> None:
    choices = ("variant", variant, VARIANTS), ("blur_pooling", blur_pooling, BLUR_POOLING), ("fan", fan, FANS)
    for name, value, known in choices:
        if value not in known:
            raise ValueError(f"ResNet: {name}: expected {', '.join(map(repr, known))}, got {value!r}")


class _UnitUniform(Uniform):
    """Uniform from 0 to 1."""

    def __init__(self) -> None:
        super().__init__(0.5)

    def __call__(self, array: Array) -> None:
        super().__call__(array)
        array += array.dtype.type(0.5)


def _stem(variant: str, options: Options) -> Link:
    if variant == "d":
        return DeepStem(options)
    initial = HeNormal(fan_option=options.fan)
    return L.Convolution2D(3, 64, 7, 2, pad=3, nobias=variant != "chainer", initialW=initial)


class ResNet18(ResNet):
    """ResNet-18: 11,689,512 parameters with 1,000 classes (He et al. 2016, arXiv:1512.03385).

    Args:
        num_classes: size of the output.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        settings: further arguments of :class:`ResNet`.

    Example:
        >>> model = models.ResNet18(num_classes=10)  # input (N, 3, H, W), output (N, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_classes, (2, 2, 2, 2), True, zero_gamma, bottleneck=False, **settings)


class ResNet34(ResNet):
    """ResNet-34: 21,797,672 parameters with 1,000 classes (He et al. 2016, arXiv:1512.03385).

    Args:
        num_classes: size of the output.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        settings: further arguments of :class:`ResNet`.

    Example:
        >>> model = models.ResNet34(num_classes=10)  # input (N, 3, H, W), output (N, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_classes, (3, 4, 6, 3), True, zero_gamma, bottleneck=False, **settings)


class ResNet50(ResNet):
    """ResNet-50: 25,557,032 parameters with 1,000 classes (He et al. 2016, arXiv:1512.03385).

    Args:
        num_classes: size of the output.
        stride_in_3x3: where a stage halves the image: in the 3x3 convolution (v1.5, Goyal et al. 2017) or in the first
            1x1
            (v1, He et al. and Chainer).
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        settings: further arguments of :class:`ResNet`.

    Example:
        >>> model = models.ResNet50(num_classes=10)  # input (N, 3, H, W), output (N, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        stride_in_3x3: Annotated[bool, _STRIDE] = True,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_classes, (3, 4, 6, 3), stride_in_3x3, zero_gamma, **settings)


class ResNet101(ResNet):
    """ResNet-101: 44,549,160 parameters with 1,000 classes (He et al. 2016, arXiv:1512.03385).

    Args:
        num_classes: size of the output.
        stride_in_3x3: where a stage halves the image: in the 3x3 convolution (v1.5, Goyal et al. 2017) or in the first
            1x1
            (v1, He et al. and Chainer).
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        settings: further arguments of :class:`ResNet`.

    Example:
        >>> model = models.ResNet101(num_classes=10)  # input (N, 3, H, W), output (N, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        stride_in_3x3: Annotated[bool, _STRIDE] = True,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_classes, (3, 4, 23, 3), stride_in_3x3, zero_gamma, **settings)


class ResNet152(ResNet):
    """ResNet-152: 60,192,808 parameters with 1,000 classes (He et al. 2016, arXiv:1512.03385).

    Args:
        num_classes: size of the output.
        stride_in_3x3: where a stage halves the image: in the 3x3 convolution (v1.5, Goyal et al. 2017) or in the first
            1x1
            (v1, He et al. and Chainer).
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).
        settings: further arguments of :class:`ResNet`.

    Example:
        >>> model = models.ResNet152(num_classes=10)  # input (N, 3, H, W), output (N, 10)
    """

    def __init__(
        self,
        num_classes: Annotated[int, whole, NUM_CLASSES] = 1000,
        stride_in_3x3: Annotated[bool, _STRIDE] = True,
        zero_gamma: Annotated[bool, _ZERO_GAMMA] = False,
        **settings: Any,
    ) -> None:
        super().__init__(num_classes, (3, 8, 36, 3), stride_in_3x3, zero_gamma, **settings)


class ResNet20(ResNetCIFAR):
    """ResNet-20 for images of 32 x 32 pixels, as for CIFAR-10 (He et al. 2016, arXiv:1512.03385, section 4.2).

    Args:
        num_classes: size of the output.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).

    Example:
        >>> model = models.ResNet20()
        >>> model(np.zeros((2, 3, 32, 32), np.float32)).shape
        (2, 10)
    """

    def __init__(
        self, num_classes: Annotated[int, whole, NUM_CLASSES] = 10, zero_gamma: Annotated[bool, _ZERO_GAMMA] = False
    ) -> None:
        super().__init__(num_classes, 20, zero_gamma)


class ResNet56(ResNetCIFAR):
    """ResNet-56 for images of 32 x 32 pixels, as for CIFAR-10 (He et al. 2016, arXiv:1512.03385, section 4.2).

    Args:
        num_classes: size of the output.
        zero_gamma: start each block as its shortcut (Goyal et al. 2017).

    Example:
        >>> model = models.ResNet56()
        >>> model(np.zeros((2, 3, 32, 32), np.float32)).shape
        (2, 10)
    """

    def __init__(
        self, num_classes: Annotated[int, whole, NUM_CLASSES] = 10, zero_gamma: Annotated[bool, _ZERO_GAMMA] = False
    ) -> None:
        super().__init__(num_classes, 56, zero_gamma)
