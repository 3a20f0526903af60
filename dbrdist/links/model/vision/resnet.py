"""Residual networks with Chainer's names (He et al. 2015, "Deep residual learning for image recognition",
arXiv:1512.03385). `dbrdist.models.ResNet50` is the one to train."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dbrdist import functions as F
from dbrdist.core.array.types import Array
from dbrdist.core.model.chain import Chain
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import one_of
from dbrdist.errors import CheckpointError
from dbrdist.links.connection import Linear
from dbrdist.links.convolution import Convolution2D
from dbrdist.links.convolution_bn import conv_bn, fused_block
from dbrdist.links.initializers import Constant, HeNormal, InitialValue
from dbrdist.links.model.vision import pixels
from dbrdist.links.model.vision.layers import LAST_NAMES, Functions, VisionLayers
from dbrdist.links.normalization import BatchNormalization

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand, Variable

_MEAN = (103.063, 115.903, 123.152)
_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}  # in each of the four stages
_OF_SHORTCUTS = {"conv4": "downsample.0", "bn4": "downsample.1"}


class ResNetLayers(VisionLayers):
    """ResNet with 50, 101 or 152 layers: a 7x7 convolution, pooling, four stages of bottlenecks, one linear layer.

    Args:
        pretrained_model: a file with weights, "auto" or None; see :class:`VisionLayers`.
        n_layers: 50, 101 or 152.
        downsample_fb: stages halve the image in the 3x3 convolution of their first block, as torchvision and Facebook
            do; False for the 1x1 convolution before it, as in the paper and in Chainer's weights.

    The layers are `conv1`, `pool1`, `res2` to `res5`, `pool5`, `fc6` and `prob`. With torchvision's weights `pool1`
    pads by a pixel, and 1e-5 is added to variances.
    """

    mean = _MEAN
    features = "pool5"
    channels: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)

    def __init__(
        self, pretrained_model: os.PathLike[str] | str | None, n_layers: int, downsample_fb: bool = False
    ) -> None:
        super().__init__()
        one_of("ResNetLayers", "n_layers", tuple(_BLOCKS), n_layers)
        self.weights_name = f"ResNet-{n_layers}-model.npz"
        self._downsample_fb = downsample_fb
        initialW = Constant(0) if pretrained_model else HeNormal(scale=1.0)
        in_channels = self.channels[0]
        with self.init_scope():
            self.conv1 = Convolution2D(3, in_channels, 7, 2, 3, initialW=initialW)
            self.bn1 = BatchNormalization(in_channels)
            for stage, (num, mid) in enumerate(zip(_BLOCKS[n_layers], self.channels), 2):
                stride = 1 if stage == 2 else 2
                block = BuildingBlock(num, in_channels, mid, 4 * mid, stride, initialW, downsample_fb)
                setattr(self, f"res{stage}", block)
                in_channels = 4 * mid
            self.fc6 = Linear(in_channels, self.num_classes, initialW=initialW)
        self._load(pretrained_model)

    @property
    def functions(self) -> Functions:
        return {
            "conv1": [self.conv1, self.bn1, F.relu],
            "pool1": [self._pool],
            **{f"res{stage}": [self[f"res{stage}"]] for stage in (2, 3, 4, 5)},
            "pool5": [lambda x: F.mean(x, axis=(2, 3))],
            "fc6": [self.fc6],
            "prob": [F.softmax],
        }

    def _pool(self, x: Variable) -> Any:
        if self.convention == "torchvision":
            return F.max_pooling_2d(x, 3, 2, 1, cover_all=False)
        return F.max_pooling_2d(x, 3, 2)

    def use_torchvision(self) -> None:
        if not self._downsample_fb:
            raise CheckpointError(
                f"{type(self).__name__}: torchvision's networks halve the image in 3x3 convolutions: pass "
                "downsample_fb=True"
            )
        super().use_torchvision()
        for link in self.links():
            if isinstance(link, BatchNormalization):
                link.eps = 1e-5

    def _torchvision_name(self, path: str) -> str | None:
        *links, name = path.split("/")
        if path == "conv1/b":
            return None
        if links[0].startswith("res"):
            number = 0 if links[1] == "a" else int(links[1][1:])
            inner = _OF_SHORTCUTS.get(links[2], links[2])
            return f"layer{int(links[0][3:]) - 1}.{number}.{inner}.{LAST_NAMES[name]}"
        return f"{'fc' if links[0] == 'fc6' else links[0]}.{LAST_NAMES[name]}"


class BuildingBlock(Chain):
    """A stage: a :class:`BottleneckA` named `a`, then :class:`BottleneckB` named `b1`, `b2` and so on."""

    def __init__(
        self, n_layer: int, in_channels: int, mid_channels: int, out_channels: int, stride: int,
        initialW: InitialValue = None, downsample_fb: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        with self.init_scope():
            self.a = BottleneckA(in_channels, mid_channels, out_channels, stride, initialW, downsample_fb)
            for i in range(1, n_layer):
                setattr(self, f"b{i}", BottleneckB(out_channels, mid_channels, initialW))

    def forward(self, x: Any) -> Any:
        """(N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        for block in self.children():
            x = block(x)
        return x


def _convolution(in_channels: int, out_channels: int, ksize: int, stride: int, initialW: InitialValue) -> Convolution2D:
    return Convolution2D(in_channels, out_channels, ksize, stride, ksize // 2, nobias=True, initialW=initialW)


class BottleneckA(Chain):
    """1x1, 3x3 and 1x1 convolutions, and a 1x1 convolution as the shortcut: the first block of a stage."""

    def __init__(
        self, in_channels: int, mid_channels: int, out_channels: int, stride: int = 2, initialW: InitialValue = None,
        downsample_fb: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        stride_1x1, stride_3x3 = (1, stride) if downsample_fb else (stride, 1)
        with self.init_scope():
            self.conv1 = _convolution(in_channels, mid_channels, 1, stride_1x1, initialW)
            self.bn1 = BatchNormalization(mid_channels)
            self.conv2 = _convolution(mid_channels, mid_channels, 3, stride_3x3, initialW)
            self.bn2 = BatchNormalization(mid_channels)
            self.conv3 = _convolution(mid_channels, out_channels, 1, 1, initialW)
            self.bn3 = BatchNormalization(out_channels)
            self.conv4 = _convolution(in_channels, out_channels, 1, stride, initialW)
            self.bn4 = BatchNormalization(out_channels)

    def forward(self, x: Operand) -> Any:
        """(N, in_channels, H, W) to (N, out_channels, H / stride, W / stride)."""
        stages = (self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)
        y = fused_block(x, stages, (self.conv4, self.bn4))
        if y is not None:
            return y
        h = conv_bn(self.conv1, self.bn1, x, relu=True)
        h = conv_bn(self.conv2, self.bn2, h, relu=True)
        return conv_bn(self.conv3, self.bn3, h, relu=True, residual=partial(conv_bn, self.conv4, self.bn4, x))


class BottleneckB(Chain):
    """1x1, 3x3 and 1x1 convolutions, and the input itself as the shortcut."""

    def __init__(self, in_channels: int, mid_channels: int, initialW: InitialValue = None) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = _convolution(in_channels, mid_channels, 1, 1, initialW)
            self.bn1 = BatchNormalization(mid_channels)
            self.conv2 = _convolution(mid_channels, mid_channels, 3, 1, initialW)
            self.bn2 = BatchNormalization(mid_channels)
            self.conv3 = _convolution(mid_channels, in_channels, 1, 1, initialW)
            self.bn3 = BatchNormalization(in_channels)

    def forward(self, x: Operand) -> Any:
        """(N, in_channels, H, W) to the same shape."""
        y = fused_block(x, ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)))
        if y is not None:
            return y
        h = conv_bn(self.conv1, self.bn1, x, relu=True)
        h = conv_bn(self.conv2, self.bn2, h, relu=True)
        return conv_bn(self.conv3, self.bn3, h, relu=True, residual=x)


class ResNet50Layers(ResNetLayers):
    """ResNet-50 with Chainer's names of layers and pretrained weights.

    Args:
        pretrained_model: a file with weights; `"auto"` looks for ResNet-50-model.npz in the folder of datasets; None
            for random weights.
        downsample_fb: stages halve the image in the 3x3 convolution of their first block, as torchvision and Facebook
            do; False for the 1x1 convolution before it, as in the paper and in Chainer's weights.

    Raises:
        FileNotFoundError: the file of weights is missing; the message says where to put it.

    Example:
        >>> model = L.ResNet50Layers(None)  # doctest: +SKIP
        >>> model(np.zeros((1, 3, 224, 224), np.float32), layers=["res5", "prob"])["prob"].shape  # doctest: +SKIP
        (1, 1000)
    """

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto", downsample_fb: bool = False) -> None:
        super().__init__(pretrained_model, 50, downsample_fb)


class ResNet101Layers(ResNetLayers):
    """ResNet-101 with Chainer's names of layers and pretrained weights.

    Args:
        pretrained_model: a file with weights; `"auto"` looks for ResNet-101-model.npz in the folder of datasets; None
            for random weights.
        downsample_fb: stages halve the image in the 3x3 convolution of their first block, as torchvision and Facebook
            do; False for the 1x1 convolution before it, as in the paper and in Chainer's weights.

    Raises:
        FileNotFoundError: the file of weights is missing; the message says where to put it.

    Example:
        >>> model = L.ResNet101Layers(None)  # doctest: +SKIP
        >>> model(np.zeros((1, 3, 224, 224), np.float32), layers=["res5", "prob"])["prob"].shape  # doctest: +SKIP
        (1, 1000)
    """

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto", downsample_fb: bool = False) -> None:
        super().__init__(pretrained_model, 101, downsample_fb)


class ResNet152Layers(ResNetLayers):
    """ResNet-152 with Chainer's names of layers and pretrained weights.

    Args:
        pretrained_model: a file with weights; `"auto"` looks for ResNet-152-model.npz in the folder of datasets; None
            for random weights.
        downsample_fb: stages halve the image in the 3x3 convolution of their first block, as torchvision and Facebook
            do; False for the 1x1 convolution before it, as in the paper and in Chainer's weights.

    Raises:
        FileNotFoundError: the file of weights is missing; the message says where to put it.

    Example:
        >>> model = L.ResNet152Layers(None)  # doctest: +SKIP
        >>> model(np.zeros((1, 3, 224, 224), np.float32), layers=["res5", "prob"])["prob"].shape  # doctest: +SKIP
        (1, 1000)
    """

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto", downsample_fb: bool = False) -> None:
        super().__init__(pretrained_model, 152, downsample_fb)


def prepare(image: Array, size: tuple[int, int] | None = (224, 224)) -> Array:
    """As :func:`dbrdist.links.model.vision.vgg.prepare`, with the means of ResNet's training set."""
    return pixels.subtract_mean(image, size, _MEAN)


explain_constructors(globals())
