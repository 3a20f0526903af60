"""Pooling of images: the largest element, or the mean, of each window.

Both are linear once the maxima are chosen, so each is a pair of operations, one the transpose of the other.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dbrdist import kernels
from dbrdist.core.array.backend import Array, accumulation_dtype, aligned, is_floating, lies_as_images
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS
from dbrdist.core.array.sums import wide_sum
from dbrdist.core.array.types import DType, PerAxis
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable
from dbrdist.functions.convolution import pair
from dbrdist.kernels import PoolGeometry


class MaxPooling2D(FunctionNode):
    """y = the largest element of each window"""

    gives_new = True

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.x_shape = xs[0].shape
        y, self.saved = kernels.pool_forward(xs[0], self.geometry)
        self.y_shape = y.shape
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(MaxPoolingGradient(self), gys[0]),)

    def indices(self) -> Array:
        """Where in its window each maximum lies, u * kw + v: (N, C, OH, OW) of int32."""
        return kernels.pool_indices(self.saved, self.y_shape, self.geometry)


class MaxPoolingGradient(FunctionNode):
    """Every element of gy at the place of its window's maximum, overlaps added"""

    def __init__(self, pooling: MaxPooling2D) -> None:
        self.pooling = pooling

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        p = self.pooling
        return (kernels.pool_backward(xs[0], p.x_shape, p.saved, p.geometry),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(ChosenElements(self.pooling), gys[0]),)


class ChosenElements(FunctionNode):
    """What lies at the places of an earlier pooling's maxima"""

    def __init__(self, pooling: MaxPooling2D) -> None:
        self.pooling = pooling

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (kernels.pool_gather(xs[0], self.pooling.indices(), self.pooling.geometry),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(MaxPoolingGradient(self.pooling), gys[0]),)


class AveragePooling2D(FunctionNode):
    """y = the sum of each window / (kh kw)"""

    gives_new = True

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        self.x_shape = x.shape
        self.are_planes = _are_planes(x, self.geometry)
        if self.are_planes:
            return (self.of_planes(wide_sum(x, (2, 3), True), x.dtype),)
        y, self.saved = kernels.pool_forward(x, self.geometry)
        return (y,)

    def of_planes(self, v: Array, dtype: DType) -> Array:
        """Sums of whole images, or their gradients, divided by the number of pixels."""
        wide = v.astype(accumulation_dtype(dtype), copy=False) / (self.geometry.kh * self.geometry.kw)
        return wide.astype(dtype, copy=False)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(AveragePoolingGradient(self), gys[0]),)


def _are_planes(x: Array, g: PoolGeometry) -> bool:
    """Whether each window is a whole large image on the host whose rows lie one after another: oneDNN would turn it."""
    is_whole = (g.kh, g.kw) == x.shape[2:] and not (g.ph or g.pw)
    if not is_whole or type(x) is not np.ndarray or x.size < KERNEL_ELEMENTS:
        return False
    return bool(x.flags.c_contiguous) and not lies_as_images(x)


class AveragePoolingGradient(FunctionNode):
    """Every element of gy / (kh kw) at all places of its window, overlaps added"""

    def __init__(self, pooling: AveragePooling2D) -> None:
        self.pooling = pooling

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        p = self.pooling
        if p.are_planes:
            gx = aligned(prod(p.x_shape), xs[0].dtype).reshape(p.x_shape)
            gx[...] = p.of_planes(xs[0], xs[0].dtype)
            return (gx,)
        return (kernels.pool_backward(xs[0], p.x_shape, p.saved, p.geometry),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(AveragePooling2D(self.pooling.geometry), gys[0]),)


def max_pooling_2d(
    x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0, cover_all: bool = True,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    """The largest element of each window; each has to see a part of the image.

    Args:
        x: images (N, C, H, W).
        ksize, stride, pad: a number, or a pair for rows and columns; ``stride`` None means ``ksize``.
        cover_all: let the last window reach beyond the image, so that every element is covered (Chainer's default).
        return_indices: also return where in its window each maximum lies, u * kw + v.

    Returns:
        (N, C, OH, OW) with OH = ceil((H + 2 pad - kh) / stride) + 1 (floor without ``cover_all``), and with
        ``return_indices`` an array of int32 of the same shape.

    Example:
        >>> F.max_pooling_2d(np.arange(16.0).reshape(1, 1, 4, 4), 2).array[0, 0]
        array([[ 5.,  7.],
               [13., 15.]])
    """
    pooling = MaxPooling2D(_geometry("max", x, ksize, stride, pad, cover_all))
    y = pooling.apply((x,))[0]
    return (y, pooling.indices()) if return_indices else y


def average_pooling_2d(x: Operand, ksize: PerAxis, stride: PerAxis | None = None, pad: PerAxis = 0) -> Variable:
    """The mean of each window; padding counts as zeros. Arguments and result as in :func:`max_pooling_2d`.

    Args:
        x: images (N, C, H, W).
        ksize: length of the window, a number or one for each axis.
        stride: step of the window; None for ksize.
        pad: zeros (minus infinity for maxima) on both sides; default 0.

    Example:
        >>> F.average_pooling_2d(np.arange(16.0).reshape(1, 1, 4, 4), 2).array[0, 0]
        array([[ 2.5,  4.5],
               [10.5, 12.5]])
    """
    return AveragePooling2D(_geometry("average", x, ksize, stride, pad, False)).apply((x,))[0]


def global_average_pooling_2d(x: Operand) -> Variable:
    """The mean over rows and columns: (N, C, H, W) to (N, C).

    Args:
        x: images (N, C, H, W).

    Example:
        >>> F.global_average_pooling_2d(np.arange(4.0).reshape(1, 1, 2, 2)).array
        array([[1.5]])
    """
    return ops.reshape(average_pooling_2d(x, x.shape[2:]), x.shape[:2])


def _geometry(
    kind: str, x: Operand, ksize: PerAxis, stride: PerAxis | None, pad: PerAxis, cover_all: bool
) -> PoolGeometry:
    name = f"{kind}_pooling_2d"
    g = PoolGeometry(kind, *pair(ksize), *pair(ksize if stride is None else stride), *pair(pad), cover_all)
    if len(x.shape) != 4 or not is_floating(x.dtype):
        raise expected(name, "x", "4 axes and a floating type", x)
    if min(g.kh, g.kw, g.sh, g.sw) < 1 or min(g.ph, g.pw) < 0:
        raise expected(name, "ksize, stride, pad", "numbers >= 1, and pad >= 0", _words(g))
    if min(out_hw := g.out_hw(*x.shape[2:])) < 1:
        raise expected(name, "x", f"an image no smaller than the window {g.kh} x {g.kw}", x, "pad it")
    if kind == "max" and not _see_image(g, x.shape[2:], out_hw):
        raise expected(
            name, "ksize, stride, pad, cover_all", f"windows that each see a part of the image of {x.shape[2]} x "
            f"{x.shape[3]}", _words(g), "a window without elements has no largest one: pad less, or cover_all=False",
        )  # fmt: skip
    return g


def _words(g: PoolGeometry) -> str:
    """A geometry as the arguments of the function: numbers, and pairs where they differ."""
    pairs = {"ksize": (g.kh, g.kw), "stride": (g.sh, g.sw), "pad": (g.ph, g.pw)}
    named = [f"{name} {a if a == b else (a, b)}" for name, (a, b) in pairs.items()]
    return ", ".join([*named, *["cover_all=True"] * g.cover_all])


def _see_image(g: PoolGeometry, hw: tuple[int, int], out_hw: tuple[int, int]) -> bool:
    """False where a window lies wholly in the padding: with pad >= ksize, or beyond the image with cover_all."""
    (h, w), (oh, ow) = hw, out_hw
    return g.ph < g.kh and g.pw < g.kw and (oh - 1) * g.sh - g.ph < h and (ow - 1) * g.sw - g.pw < w
