"""GoogLeNet (Szegedy et al. 2014, "Going deeper with convolutions", arXiv:1409.4842)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from dbrdist import functions as F
from dbrdist.core.array.types import Array
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.links.blocks import Inception
from dbrdist.links.connection import Linear
from dbrdist.links.convolution import Convolution2D
from dbrdist.links.initializers import Constant, LeCunUniform
from dbrdist.links.model.vision import pixels
from dbrdist.links.model.vision.layers import Functions, VisionLayers

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand, Variable

_MEAN = (104.0, 117.0, 123.0)

# Inputs, then the outputs of Inception: 1x1, 3x3 reduced, 3x3, 5x5 reduced, 5x5, pooling (table 1 of the paper).
_INCEPTIONS = {
    "inc3a": (192, 64, 96, 128, 16, 32, 32),
    "inc3b": (256, 128, 128, 192, 32, 96, 64),
    "inc4a": (480, 192, 96, 208, 16, 48, 64),
    "inc4b": (512, 160, 112, 224, 24, 64, 64),
    "inc4c": (512, 128, 128, 256, 24, 64, 64),
    "inc4d": (512, 112, 144, 288, 32, 64, 64),
    "inc4e": (528, 256, 160, 320, 32, 128, 128),
    "inc5a": (832, 256, 160, 320, 32, 128, 128),
    "inc5b": (832, 384, 192, 384, 48, 128, 128),
}


class GoogLeNet(VisionLayers):
    """GoogLeNet: 13,378,280 parameters, including those of the two auxiliary classifiers.

    Args:
        pretrained_model: a file with weights, "auto" (bvlc_googlenet.npz) or None; see :class:`VisionLayers`. The
            GoogLeNet of torchvision is another network, so its weights are refused.

    The layers are `conv1`, `pool1`, `conv2_reduce`, `conv2`, `pool2`, `inception_3a` to `inception_5b` with `pool3` and
    `pool4` between them, `pool5`, `loss3_fc`, `prob`, and the scores of the other classifiers, `loss1_fc2` (from
    `inception_4a`) and `loss2_fc2` (from `inception_4d`).

    Example:
        >>> model = L.GoogLeNet(None)  # doctest: +SKIP
        >>> model.extract([image], layers=["pool5"])["pool5"].shape  # doctest: +SKIP
    """

    mean = _MEAN
    weights_name = "bvlc_googlenet.npz"
    features = "pool5"
    branches = {"loss1_fc2": "inception_4a", "loss2_fc2": "inception_4d"}
    divisor: ClassVar[int] = 1  # of all widths

    def __init__(self, pretrained_model: os.PathLike[str] | str | None = "auto") -> None:
        super().__init__()
        initial = Constant(0) if pretrained_model else LeCunUniform(scale=1.0)
        d, with_values = self.divisor, {"initialW": initial}
        with self.init_scope():
            self.conv1 = Convolution2D(3, 64 // d, 7, 2, 3, **with_values)
            self.conv2_reduce = Convolution2D(64 // d, 64 // d, 1, **with_values)
            self.conv2 = Convolution2D(64 // d, 192 // d, 3, 1, 1, **with_values)
            for name, sizes in _INCEPTIONS.items():
                setattr(self, name, Inception(*[n // d for n in sizes], conv_init=initial))
            self.loss3_fc = Linear(1024 // d, self.num_classes, **with_values)
            for name, in_channels in (("loss1", 512), ("loss2", 528)):
                setattr(self, f"{name}_conv", Convolution2D(in_channels // d, 128 // d, 1, **with_values))
                setattr(self, f"{name}_fc1", Linear(128 // d * 4 * 4, 1024 // d, **with_values))
                setattr(self, f"{name}_fc2", Linear(1024 // d, self.num_classes, **with_values))
        self._load(pretrained_model)

    @property
    def functions(self) -> Functions:
        inceptions = {f"inception_{name[3:]}": [self[name]] for name in _INCEPTIONS}
        threes, fours, fives = ({k: v for k, v in inceptions.items() if f"_{n}" in k} for n in (3, 4, 5))
        return {
            "conv1": [self.conv1, F.relu],
            "pool1": [_pool, _normalize],
            "conv2_reduce": [self.conv2_reduce, F.relu],
            "conv2": [self.conv2, F.relu, _normalize],
            "pool2": [_pool],
            **threes,
            "pool3": [_pool],
            **fours,
            "pool4": [_pool],
            **fives,
            "pool5": [lambda x: F.average_pooling_2d(x, 7, 1)],
            "loss3_fc": [lambda x: F.dropout(x, 0.4), self.loss3_fc],
            "prob": [F.softmax],
            "loss1_fc2": self._classifier("loss1"),
            "loss2_fc2": self._classifier("loss2"),
        }

    def _classifier(self, name: str) -> list[Any]:
        links = [self[f"{name}_{part}"] for part in ("conv", "fc1", "fc2")]
        return [lambda x: F.average_pooling_2d(x, 5, 3), links[0], F.relu, links[1], F.relu, links[2]]


def _pool(x: Variable) -> Any:
    return F.max_pooling_2d(x, 3, 2)


def _normalize(x: Operand) -> Variable:
    return F.local_response_normalization(x, 5, 1, 1e-4 / 5)


def prepare(image: Array, size: tuple[int, int] | None = (224, 224)) -> Array:
    """As :func:`dbrdist.links.model.vision.vgg.prepare`, with GoogLeNet's means."""
    return pixels.subtract_mean(image, size, _MEAN)


explain_constructors(globals())
