"""Convolutions at inference on oneDNN: of weights that were reordered once, and with what follows in the same pass.

A normalization and an addition are applied to each block of outputs while it is in the cache. With that, ResNet-50
takes 0.87 of the time for one image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import channels_last, is_channels_last
from dbrdist.core.array.types import HostArray, Shape
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, scratch
from dbrdist.kernels.cpu.onednn_bfloat16 import also_in_bfloat16
from dbrdist.kernels.cpu.onednn_convolution import (
    channels_in,
    describe_weights,
    in_pairs,
    is_small_product,
    stays_in_float32,
)
from dbrdist.kernels.cpu.onednn_elementwise import ADD, MUL
from dbrdist.kernels.cpu.onednn_float16 import also_float16
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.reference import numpy_

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Kept

Pack = Callable[[HostArray, Any], HostArray]
_F32, _DENSE = np.dtype(np.float32), (4,)


def _build(
    x: HostArray, W: HostArray, y_shape: Shape, g: ConvGeometry, has_bias: bool, follows: tuple[int, ...] = (),
    is_added_to: bool = False, made: Any = None,
) -> tuple[Primitive, Pack]:  # fmt: skip
    """A primitive of x, weights, bias where there is one, the operands of what follows, and y; and how to pack weights.

    ``follows`` are binary operations with a number for each channel, ``is_added_to`` one more with an array like y.
    """
    with Builder() as b:
        t, channels = onednn.data_type(x.dtype), (1, W.shape[0], 1, 1)
        source, target = b.image(x.shape, t), b.image(y_shape, t if made is None else onednn.data_type(made))
        user = describe_weights(b, W.shape, onednn.element_strides(W), W.dtype, g.groups)
        grouped = W.shape if g.groups == 1 else (g.groups, W.shape[0] // g.groups, *W.shape[1:])
        bias, vector = b.memory(W.shape[:1], onednn.F32) if has_bias else None, b.memory(channels, onednn.F32)
        post = [(kind, vector) for kind in follows] + [(ADD, target)] * is_added_to
        left, right = onednn.paddings(x.shape[2:], W.shape[2:], g, y_shape[2:])
        description = b.describe(
            "convolution_forward", onednn.FORWARD_INFERENCE, onednn.CONVOLUTION_DIRECT, source, b.any(grouped, t), bias,
            target, onednn.dims((g.sh, g.sw)), onednn.dims((g.dh - 1, g.dw - 1)), left, right, b.attributes(post),
        )  # fmt: skip
        wanted = b.query(description, onednn.QUERY_WEIGHTS)
        memories = {onednn.SRC: source, onednn.WEIGHTS: wanted} | ({onednn.BIAS: bias} if has_bias else {})
        memories |= {onednn.post_operand(i): operand for i, (_, operand) in enumerate(post)}
        primitive = b.primitive(description, {**memories, onednn.DST: target})
        return primitive, _packing(b.reorder(user, wanted), b.size(wanted))


def _packing(reorder: Primitive | None, num_bytes: int) -> Pack:
    """A function from weights, and the place where they may stay or None, to memory in which they lie as is wanted."""
    if reorder is None:
        return lambda W, kept: W

    def pack(W: HostArray, kept: Any) -> HostArray:
        if kept is None:
            weights = scratch("weights", num_bytes)
            reorder.on(W, weights)
            return weights
        maker, weights = kept.made
        if maker is not reorder:
            weights = backend.aligned_zeros(num_bytes, np.uint8, W)
            reorder.on(W, weights)
            kept.made = reorder, weights
        return weights

    return pack


def _check(x: HostArray, W: HostArray) -> None:
    onednn.require(x)
    if 0 in W.shape or min(W.strides) <= 0:
        raise onednn.Unsupported("weights without elements, or turned around")


def _y_shape(x: HostArray, W: HostArray, geometry: ConvGeometry) -> Shape:
    return x.shape[0], W.shape[0], *geometry.out_hw(*x.shape[2:], *W.shape[2:])


def _f32(a: HostArray) -> HostArray:
    return a if a.dtype is _F32 and a.strides == _DENSE else np.ascontiguousarray(a, np.float32)


def _plan_inference(
    x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry, kept: Kept | None, made: Any = None
) -> Any:
    """See numpy_.conv_inference; in ResNet-50 at batch 1 the reorders took an eighth of the time."""
    _check(x, W)
    y_shape = _y_shape(x, W, geometry)
    new, is_plain = backend.allocator(y_shape, x.dtype if made is None else made), is_channels_last(x)
    primitive, pack = _build(x, W, y_shape, geometry, b is not None, made=made)

    def conv_inference(
        x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry, kept: Kept | None,
    ) -> HostArray:  # fmt: skip
        x, y = x if is_plain else channels_last(x), new()
        if b is None:
            primitive.on(x, pack(W, kept), y)
        else:
            b = _f32(b)  # held until the call has returned
            primitive.on(x, pack(W, kept), b, y)
        return y

    return conv_inference


def _plan_conv_bn(
    x: HostArray, W: HostArray, b: HostArray | None, vectors: tuple[Any, ...], eps: float, added: HostArray | None,
    geometry: ConvGeometry, kept: Kept | None, made: Any = None,
) -> Any:  # fmt: skip
    """See numpy_.conv_bn_inference."""
    _check(x, W)
    y_shape, dtype = _y_shape(x, W, geometry), x.dtype if made is None else made
    if added is not None and (type(added) is not np.ndarray or (added.shape, added.dtype) != (y_shape, dtype)):
        raise onednn.Unsupported("something to add of another kind, type or shape")
    if kept is None and is_small_product(x, W, geometry):
        raise onednn.Unsupported("few pixels and weights that change: a product of them as they lie takes less time")
    new, is_plain = backend.allocator(y_shape, dtype), is_channels_last(x)
    primitive, pack = _build(x, W, y_shape, geometry, True, (MUL, ADD), added is not None, made)
    if primitive.implementation.startswith("ref"):
        raise onednn.Unsupported("what follows a convolution on this processor")

    def conv_bn_inference(
        x: HostArray, W: HostArray, b: HostArray | None, vectors: tuple[Any, ...], eps: float, added: HostArray | None,
        geometry: ConvGeometry, kept: Kept | None,
    ) -> HostArray:  # fmt: skip
        x, y, operands = x if is_plain else channels_last(x), new(), _operands(b, *vectors, eps)
        weights = pack(W, kept)
        if added is None:
            primitive.on(x, weights, *operands, y)
        else:
            added = channels_last(added)
            primitive.on(x, weights, *operands, added, y)
        return y

    return conv_bn_inference


def _operands(
    b: HostArray | None, gamma: HostArray | None, beta: HostArray | None, mean: HostArray, var: HostArray, eps: float
) -> tuple[HostArray, HostArray, HostArray]:
    """What is added to the products, what the sum is multiplied by, and what is added then.

    The mean is taken off first, as by the normalization itself: a large one would cancel against a shift to digits.
    """
    with np.errstate(all="ignore"):
        scale = 1 / np.sqrt(_f32(var) + np.float32(eps))
        bias = -_f32(mean) if b is None else _f32(b) - _f32(mean)
        scale = scale if gamma is None else _f32(gamma) * scale
    return bias, scale, np.zeros_like(scale) if beta is None else _f32(beta)


ROWS = {
    "conv_inference": also_in_bfloat16(
        also_float16(in_pairs(_plan_inference, numpy_.conv_inference, channels_in)), 0, unless=stays_in_float32
    ),
    "conv_bn_inference": also_in_bfloat16(
        in_pairs(_plan_conv_bn, lambda *_: None, channels_in), 0, unless=stays_in_float32
    ),
}
