"""Classes of Chainer's functions that no node here stands for, made of the function: their ``apply`` calls it.

A program may subclass them, too: what defines ``forward`` of its own is a node of its own. A class for which there is
no such row can be named and compared with, and says so when it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbrdist import functions as F
from dbrdist.core.array.types import Array, PerAxis
from dbrdist.core.tape.function_node import FunctionNode

if TYPE_CHECKING:
    from dbrdist.core.tape.variable import Operand

_NONE: Any = None


class CallsFunction(FunctionNode):
    """A function that consists of several nodes here: its class makes the call, its nodes are others."""

    _make: Callable[..., Callable[..., Any]]

    def __init__(self, *args: float | tuple[int, ...], **kwargs: Any) -> None:
        self._function = type(self)._make(*args, **kwargs)

    def apply(self, inputs: tuple[Operand, ...]) -> tuple[Any, ...]:
        """The function's result, as a tuple."""
        own = (FunctionNode.forward, FunctionNode.forward_cpu)
        if (type(self).forward, type(self).forward_cpu) != own:
            return super().apply(inputs)
        y = self._function(*inputs)
        return tuple(y) if isinstance(y, (tuple, list)) else (y,)


class AbsentFunction(FunctionNode):
    """A class of Chainer's that has no counterpart: no node is an instance of it."""

    def __init__(self, *args: Array, **kwargs: Any) -> None:
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}: dbrdist has no such class of a function; call the function of chainer.functions instead, or "
            "write a chainer.FunctionNode of your own"
        )


class Pooling2D(FunctionNode):
    """Base of a program's own poolings: it keeps the sizes of the window."""

    def __init__(
        self,
        ksize: PerAxis,
        stride: int | None = None,
        pad: int = 0,
        cover_all: bool = True,
        return_indices: bool = False,
    ) -> None:
        self.kh, self.kw = _pair(ksize)
        self.sy, self.sx = _pair(ksize if stride is None else stride)
        self.ph, self.pw = _pair(pad)
        self.cover_all = cover_all
        self.return_indices = return_indices


def _pair(x: PerAxis) -> tuple[int, int]:
    return tuple(x) if hasattr(x, "__iter__") else (x, x)  # type: ignore[return-value]


def _joining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function of a list of arrays, and arguments of its own."""
    return lambda *args, **kwargs: lambda *xs: function(xs, *args, **kwargs)


def _after(function: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """Of a function of ``count`` arrays, whose other arguments the class takes."""
    return lambda *args, **kwargs: lambda *xs: function(*xs[:count], *args, **kwargs)


def _average_pooling_nd(
    ndim: int, ksize: int, stride: int | None = None, pad: int = 0, cover_all: bool = False, pad_value: int | None = 0
) -> Callable[..., Any]:
    if cover_all:
        raise ValueError("AveragePoolingND: cover_all: expected False, got True")
    return lambda x: F.average_pooling_nd(x, ksize, stride, pad, pad_value)


_ROWS: dict[str, Callable[..., Callable[..., Any]]] = {
    "activation.prelu.PReLUFunction": lambda: F.prelu,
    "array.broadcast.Broadcast": lambda: F.broadcast,
    "array.depth2space.Depth2Space": _after(F.depth2space),
    "array.dstack.Dstack": _joining(F.dstack),
    "array.expand_dims.ExpandDims": _after(F.expand_dims),
    "array.flip.Flip": _after(F.flip),
    "array.fliplr.FlipLR": _after(F.fliplr),
    "array.flipud.FlipUD": _after(F.flipud),
    "array.hstack.Hstack": _joining(F.hstack),
    "array.moveaxis.Moveaxis": _after(F.moveaxis),
    "array.repeat.Repeat": _after(F.repeat),
    "array.resize_images.ResizeImages": _after(F.resize_images),
    "array.rollaxis.Rollaxis": _after(F.rollaxis),
    "array.select_item.SelectItem": lambda: F.select_item,
    "array.separate.Separate": _after(F.separate),
    "array.space2depth.Space2Depth": _after(F.space2depth),
    "array.squeeze.Squeeze": _after(F.squeeze),
    "array.stack.Stack": _joining(F.stack),
    "array.swapaxes.Swapaxes": _after(F.swapaxes),
    "array.tile.Tile": _after(F.tile),
    "array.vstack.Vstack": _joining(F.vstack),
    "connection.bilinear.BilinearFunction": lambda: F.bilinear,
    "connection.convolution_nd.ConvolutionND": lambda ndim, stride=1, pad=0, cover_all=False, dilate=1, groups=1: (
        lambda x, W, b=None: F.convolution_nd(x, W, b, stride, pad, cover_all, dilate, groups)
    ),
    "connection.deconvolution_nd.DeconvolutionND": lambda ndim, stride=1, pad=0, outsize=None, dilate=1, groups=1: (
        lambda x, W, b=None: F.deconvolution_nd(x, W, b, stride, pad, outsize, dilate, groups)
    ),
    "connection.embed_id.EmbedIDFunction": _after(F.embed_id, 2),
    "evaluation.accuracy.Accuracy": _after(F.accuracy, 2),
    "evaluation.binary_accuracy.BinaryAccuracy": lambda: F.binary_accuracy,
    "loss.absolute_error.AbsoluteError": lambda: F.absolute_error,
    "loss.contrastive.Contrastive": _after(F.contrastive, 3),
    "loss.hinge.Hinge": _after(F.hinge, 2),
    "loss.huber_loss.HuberLoss": _after(F.huber_loss, 2),
    "loss.mean_absolute_error.MeanAbsoluteError": lambda: F.mean_absolute_error,
    "loss.sigmoid_cross_entropy.SigmoidCrossEntropy": lambda normalize=True, reduce="mean": (
        lambda x, t: F.sigmoid_cross_entropy(x, t, normalize, reduce)
    ),
    "loss.triplet.Triplet": _after(F.triplet, 3),
    "math.batch_l2_norm_squared.BatchL2NormSquared": lambda: F.batch_l2_norm_squared,
    "math.fmod.Fmod": lambda: F.fmod,
    "math.identity.Identity": lambda: F.identity,
    "math.minmax.ArgMax": _after(F.argmax),
    "math.minmax.ArgMin": _after(F.argmin),
    "noise.gaussian.Gaussian": lambda eps=_NONE: lambda mean, ln_var: F.gaussian(mean, ln_var, eps=eps),
    "normalization.l2_normalization.NormalizeL2": _after(F.normalize),
    "normalization.layer_normalization.LayerNormalization": _after(F.layer_normalization, 3),
    "normalization.local_response_normalization.LocalResponseNormalization": _after(F.local_response_normalization),
    "pooling.average_pooling_nd.AveragePoolingND": _average_pooling_nd,
    "pooling.roi_pooling_2d.ROIPooling2D": _after(F.roi_pooling_2d, 2),
    "pooling.unpooling_2d.Unpooling2D": _after(F.unpooling_2d),
    "pooling.upsampling_2d.Upsampling2D": _after(F.upsampling_2d),
    "rnn.slstm.SLSTM": lambda: F.slstm,
    "rnn.tree_lstm.TreeLSTM": lambda: F.tree_lstm,
}


@functools.cache
def _names() -> frozenset[str]:
    """All classes of functions in Chainer 7.8.1, below ``chainer``."""
    return frozenset(Path(__file__).with_name("function_classes.txt").read_text(encoding="utf-8").split())


@functools.cache
def find(path: str) -> type[FunctionNode] | None:
    """The class of a path such as ``functions.pooling.pooling_2d.Pooling2D``, or None where Chainer has none."""
    below, name = path.removeprefix("functions."), path.rpartition(".")[2]
    if below == "pooling.pooling_2d.Pooling2D":
        return Pooling2D
    module, make = f"chainer.{path.rpartition('.')[0]}", _ROWS.get(below)
    if make is not None:
        return type(name, (CallsFunction,), {"_make": staticmethod(make), "__module__": module})
    return type(name, (AbsentFunction,), {"__module__": module}) if path in _names() else None
