"""VGG networks (Simonyan and Zisserman 2014, "Very deep convolutional networks for large-scale image recognition",
arXiv:1409.1556)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from dbrdist import functions as F
from dbrdist.core.array.types import Array
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.tape.checks import one_of
from dbrdist.links.connection import Linear
from dbrdist.links.convolution import Convolution2D
from dbrdist.links.initializers import Constant, Normal
from dbrdist.links.model.vision import pixels
from dbrdist.links.model.vision.layers import LAST_NAMES, Functions, VisionLayers

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Variable
    from dbrdist.datasets.image.images import Image

_MEAN = (103.939, 116.779, 123.68)
_CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # in each of the five stages


class VGGLayers(VisionLayers):
    """VGG with 16 or 19 layers with weights: 3x3 convolutions in five stages, each with a pooling behind it, then
    three linear layers.

    Args:
        pretrained_model: a file with weights, "auto" or None; see :class:`VisionLayers`.
        n_layers: 16 or 19.

    The layers are `conv1_1` to `conv5_3` (`conv5_4` with 19), `pool1` to `pool5`, `fc6`, `fc7`, `fc8` and `prob`.
    """

    mean = _MEAN
    features = "fc7"
    channels: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 512)
    hidden_size: ClassVar[int] = 4096

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto", n_layers: int = 16) -> None:
        super().__init__()
        one_of("VGGLayers", "n_layers", tuple(_CONVOLUTIONS), n_layers)
        self.weights_name = f"VGG_ILSVRC_{n_layers}_layers.npz"
        self._num_convolutions = _CONVOLUTIONS[n_layers]
        initial_weight = Constant(0) if pretrained_model else Normal(0.01)
        initial: dict[str, Any] = {"initialW": initial_weight, "initial_bias": 0}
        in_channels = 3
        with self.init_scope():
            for stage, out_channels in enumerate(self.channels):
                for i in range(self._num_convolutions[stage]):
                    link = Convolution2D(in_channels, out_channels, 3, 1, 1, **initial)
                    setattr(self, f"conv{stage + 1}_{i + 1}", link)
                    in_channels = out_channels
            self.fc6 = Linear(in_channels * 7 * 7, self.hidden_size, **initial)
            self.fc7 = Linear(self.hidden_size, self.hidden_size, **initial)
            self.fc8 = Linear(self.hidden_size, self.num_classes, **initial)
        self._load(pretrained_model)

    @property
    def functions(self) -> Functions:
        found: Functions = {}
        for stage, num in enumerate(self._num_convolutions, 1):
            for i in range(1, num + 1):
                found[f"conv{stage}_{i}"] = [self[f"conv{stage}_{i}"], F.relu]
            found[f"pool{stage}"] = [_pool]
        return {
            **found,
            "fc6": [self.fc6, F.relu, F.dropout],
            "fc7": [self.fc7, F.relu, F.dropout],
            "fc8": [self.fc8],
            "prob": [F.softmax],
        }

    def _torchvision_name(self, path: str) -> str | None:
        link, name = path.split("/")
        if link.startswith("fc"):
            return f"classifier.{3 * (int(link[2]) - 6)}.{LAST_NAMES[name]}"
        stage, i = int(link[4]) - 1, int(link[6]) - 1
        before = sum(2 * num + 1 for num in self._num_convolutions[:stage])
        return f"features.{before + 2 * i}.{LAST_NAMES[name]}"


def _pool(x: Variable) -> Any:
    return F.max_pooling_2d(x, 2)


class VGG16Layers(VGGLayers):
    """VGG-16 with Chainer's names of layers and pretrained weights: 138,357,544 parameters (Simonyan and Zisserman
    2014).

    Args:
        pretrained_model: a file with weights; `"auto"` looks for VGG_ILSVRC_16_layers.npz in the folder of datasets;
            None
            for random weights.

    Raises:
        FileNotFoundError: the file of weights is missing; the message says where to put it.

    Example:
        >>> model = L.VGG16Layers(None)  # doctest: +SKIP
        >>> model.extract([image], layers=["fc7"])["fc7"].shape  # doctest: +SKIP
        (1, 4096)
    """

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto") -> None:
        super().__init__(pretrained_model, 16)


class VGG19Layers(VGGLayers):
    """VGG-19 with Chainer's names of layers and pretrained weights: 143,667,240 parameters (Simonyan and Zisserman
    2014).

    Args:
        pretrained_model: a file with weights; `"auto"` looks for VGG_ILSVRC_19_layers.npz in the folder of datasets;
            None
            for random weights.

    Raises:
        FileNotFoundError: the file of weights is missing; the message says where to put it.

    Example:
        >>> model = L.VGG19Layers(None)  # doctest: +SKIP
        >>> model.extract([image], layers=["fc7"])["fc7"].shape  # doctest: +SKIP
        (1, 4096)
    """

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto") -> None:
        super().__init__(pretrained_model, 19)


def prepare(image: Image, size: tuple[int, int] | None = (224, 224)) -> Array:
    """An image as the network's input (3, H, W): resized, blue, green and red, less their means.

    Args:
        image: a Pillow image, or an array of shape (H, W), (3, H, W) or (H, W, 3) with values from 0 to 255.
        size: columns and rows; None leaves the image as it is.
    """
    return pixels.subtract_mean(image, size, _MEAN)


explain_constructors(globals())
