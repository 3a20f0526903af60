"""Chainer's attributes of convolutions and poolings in a graph, such as ``sy`` and ``ph``, and its way to make them.

Programs read them in hooks that count operations, and call ``Convolution2DFunction(stride, pad)(x, W, b)``.
"""

from __future__ import annotations

from typing import Any

from dbrdist.compat.windows import as_tuple
from dbrdist.core.array.types import PerAxis
from dbrdist.functions.convolution import Convolution2D, ConvolutionData
from dbrdist.functions.pooling import AveragePooling2D, MaxPooling2D
from dbrdist.kernels.geometry import ConvGeometry

_OF_WINDOW = {"sy": "sh", "sx": "sw", "ph": "ph", "pw": "pw", "cover_all": "cover_all"}
_OF_CONVOLUTION = {**_OF_WINDOW, "dy": "dh", "dx": "dw", "groups": "groups"}
_OF_POOLING = {**_OF_WINDOW, "kh": "kh", "kw": "kw"}
_ATTRIBUTES: dict[type, dict[str, str]] = {
    Convolution2D: _OF_CONVOLUTION, ConvolutionData: _OF_CONVOLUTION,
    AveragePooling2D: _OF_POOLING, MaxPooling2D: _OF_POOLING,
}  # fmt: skip
_init = Convolution2D.__init__


def _of_geometry(name: str) -> property:
    return property(lambda node: getattr(node.geometry, name))


def _convolution(
    self: Convolution2D, stride: Any = 1, pad: PerAxis = 0, cover_all: bool = False, dilate: PerAxis = 1,
    groups: int = 1, **ignored: Any,
) -> None:  # fmt: skip
    """Of a geometry, as our functions make it, or of Chainer's arguments."""
    if not isinstance(stride, ConvGeometry):
        stride = ConvGeometry(*as_tuple(stride, 2), *as_tuple(pad, 2), *as_tuple(dilate, 2), groups, cover_all)
    _init(self, stride)


def serve() -> None:
    """Give the nodes Chainer's attributes and arguments."""
    for cls, attributes in _ATTRIBUTES.items():
        for name, ours in attributes.items():
            setattr(cls, name, _of_geometry(ours))
    Convolution2D.__init__ = _convolution  # type: ignore[method-assign]


def withdraw() -> None:
    """Take them away again."""
    for cls, attributes in _ATTRIBUTES.items():
        for name in attributes:
            delattr(cls, name)
    Convolution2D.__init__ = _init  # type: ignore[method-assign]
