"""Convolutions on oneDNN: 1.7 times as fast as NumPy's on ResNet-50's layers.

Activations are channels-last; weights and their gradients are plain OIHW, reordered to the layout and the type that
oneDNN asks for: at each call where they change at each step, once where the caller keeps what was made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import channels_last, is_channels_last
from dbrdist.core.array.types import DType, HostArray, Shape
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, address, scratch
from dbrdist.kernels.cpu.onednn_bfloat16 import also_in_bfloat16
from dbrdist.kernels.cpu.onednn_finite import is_finite
from dbrdist.kernels.cpu.onednn_float16 import also_float16
from dbrdist.kernels.cpu.onednn_matmul import build, plan_matmul
from dbrdist.kernels.cpu.onednn_taps import plan_by_taps, suits
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.reference import numpy_
from dbrdist.kernels.reference.numpy_ import plain_empty

_POINTWISE = ConvGeometry()
_FEW_FORWARD, _FEW_FOR_DATA, _FEW_POINTWISE = 16, 48, 64  # channels of images that a convolution with strides sees
_FEW, _FEW_MADE = 32, 16  # channels of a 3x3 convolution without a stride
_ONE_BLOCK, _MOST_COLUMNS = 28, 64  # columns of its images that forward's loop holds in registers; that data's takes
_SOME_PIXELS = 1 << 12  # of all its images
_GROWING_FROM, _GROWING_TO = range(128, 257), range(512, 1025)  # channels of a 1x1 convolution
_LARGE_WEIGHTS, _BYTES = 1 << 20, np.dtype(np.uint8)
_LANES = 16  # channels that a vector holds
_MANY_CHANNELS = 512  # from here on a copy of every second pixel costs less than it saves
_FEW_MULTIPLICATIONS = 48  # of an element of x
_FEW_PIXELS = 256  # up to here it takes longer to reorder weights than to multiply with them as they lie


def describe_weights(b: Builder, W_shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, groups: int) -> Any:
    """Descriptor of the caller's OIHW weights; with groups the first axis is split in two."""
    (o, *rest), so = W_shape, strides[0]
    if groups == 1:
        return b.memory(W_shape, onednn.data_type(dtype), strides)
    return b.memory((groups, o // groups, *rest), onednn.data_type(dtype), (so * (o // groups), *strides))


def _build(
    direction: str, x_shape: Shape, W: HostArray, y_shape: Shape, g: ConvGeometry, dtype: DType, bias: bool = False,
    made: DType | None = None,
) -> tuple[Primitive, Primitive | None, int]:  # fmt: skip
    """One direction of a convolution: its primitive, the reorder of its weights if any, and their bytes inside.

    ``W`` stands for the caller's weights, or for the array that takes their gradient; ``made`` is the type of the
    images that are made where that is not ``dtype``.
    """
    with Builder() as b:
        t = onednn.data_type(dtype)
        of_result = t if made is None else onednn.data_type(made)
        x = b.image(x_shape, of_result if direction == "data" else t)
        y = b.image(y_shape, of_result if direction == "forward" else t)
        user = describe_weights(b, W.shape, onednn.element_strides(W), W.dtype, g.groups)
        grouped = W.shape if g.groups == 1 else (g.groups, W.shape[0] // g.groups, *W.shape[1:])
        free = b.any(grouped, onednn.data_type(W.dtype) if direction == "weights" else t)
        bias_memory = b.memory(W.shape[:1], onednn.F32) if bias else None
        left, right = onednn.paddings(x_shape[2:], W.shape[2:], g, y_shape[2:])
        window = (onednn.dims((g.sh, g.sw)), onednn.dims((g.dh - 1, g.dw - 1)), left, right)
        attributes, direct = b.attributes(), onednn.CONVOLUTION_DIRECT
        name = _fastest(direction, x_shape, W.shape, g) if t == onednn.F32 else None
        forward = b.describe_as(
            name if direction == "forward" else None, "convolution_forward", onednn.FORWARD_TRAINING, direct,
            b.image(x_shape, t) if direction == "data" else x, b.any(grouped, t), bias_memory, y, *window, attributes,
        )  # fmt: skip
        if direction == "forward":
            wanted = b.query(forward, onednn.QUERY_WEIGHTS)
            memories = {onednn.SRC: x, onednn.WEIGHTS: wanted, onednn.DST: y}
            if bias:
                memories[onednn.BIAS] = bias_memory
            return b.primitive(forward, memories), b.reorder(user, wanted), b.size(wanted)
        if direction == "data":
            backward = b.describe_as(
                name, "convolution_backward_data", direct, x, free, y, *window, forward, attributes
            )  # fmt: skip
            wanted = b.query(backward, onednn.QUERY_WEIGHTS)
            memories = {onednn.DIFF_DST: y, onednn.WEIGHTS: wanted, onednn.DIFF_SRC: x}
            return b.primitive(backward, memories), b.reorder(user, wanted), b.size(wanted)
        backward = b.describe("convolution_backward_weights", direct, x, free, None, y, *window, forward, attributes)
        given = b.query(backward, onednn.QUERY_DIFF_WEIGHTS)
        memories = {onednn.SRC: x, onednn.DIFF_DST: y, onednn.DIFF_WEIGHTS: given}
        return b.primitive(backward, memories), b.reorder(given, user), b.size(given)


def _fastest(direction: str, x_shape: Shape, W_shape: Shape, g: ConvGeometry) -> str | None:
    """The implementation in float32 that is faster than the library's first choice, where there is one.

    Measured with AVX-512 at 4 to 128 images: with strides and few channels data takes 0.4 to 0.9 of the time, forward
    0.55 to 0.95 (beyond 16 channels that of 1x1 alone); without a stride 1x1 from 128 or 256 channels to 512 to 1,024
    takes 0.8 to 1.0.
    """
    channels, is_pointwise = x_shape[1], W_shape[2:] == (1, 1)
    if g.groups > 1:
        return None
    if max(g.sh, g.sw) > 1:
        limit = _FEW_FOR_DATA if direction == "data" else _FEW_POINTWISE if is_pointwise else _FEW_FORWARD
        return "jit:avx512_core" if channels <= limit else None
    if _is_narrow(direction, x_shape, W_shape, g):
        return "jit:avx512_core"
    given, made = (W_shape[0], channels) if direction == "data" else (channels, W_shape[0])
    grows = given in _GROWING_FROM and made in _GROWING_TO
    return "jit_1x1:avx512_core" if is_pointwise and g == _POINTWISE and grows else None


def _is_narrow(direction: str, x_shape: Shape, W_shape: Shape, g: ConvGeometry) -> bool:
    """Is this a 3x3 convolution with so few channels that what the library's first choice does around its products
    counts?

    Measured on an EPYC with AVX-512: up to 16 channels that are made the other one takes 0.55 to 0.95 of the time, up
    to 32 of them 0.8 to 1.0; with more columns than here up to 1.4 (forward) and 1.2 (data).
    """
    if W_shape[2:] != (3, 3) or g != ConvGeometry(1, 1, g.ph, g.pw):
        return False
    _, channels, _, columns = x_shape
    given, made = (W_shape[0], channels) if direction == "data" else (channels, W_shape[0])
    if columns <= _ONE_BLOCK:
        return max(given, made) <= _FEW
    return direction == "data" and given <= _FEW and made <= _FEW_MADE and columns <= _MOST_COLUMNS


def _is_faster_turned(x: HostArray, W: HostArray, g: ConvGeometry) -> bool:
    """Does the kernel for the gradient of images, with turned weights, make these images in 0.65 to 0.95 of the time?

    A convolution without a stride and the gradient of one are the same sums.
    """
    is_measured = W.dtype == x.dtype == np.float32 and x[:, 0].size >= _SOME_PIXELS and onednn.has_avx512()
    are_wide = x.shape[3] > _ONE_BLOCK and (g.ph, g.pw) == (1, 1) and is_channels_last(x)
    made = (x.shape[0], W.shape[0], *x.shape[2:])
    return is_measured and are_wide and _is_narrow("data", made, _turned(W).shape, g)


def _turned(W: HostArray) -> HostArray:
    """Weights of the convolution whose gradient for its images is that with W."""
    return W.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]


def _readable(W: HostArray) -> HostArray:
    """Weights in memory that a descriptor can name: any positive strides will do."""
    if min(W.strides) > 0:
        return W
    dense = plain_empty(W.shape, W.dtype, W)
    dense[...] = W
    return dense


def _to_images(x: HostArray) -> Callable[[HostArray], HostArray]:
    """What makes images like x channels-last; where they lie plane by plane, in a quarter of NumPy's time."""
    if is_channels_last(x) or not x.flags.c_contiguous:
        return channels_last
    with Builder() as b:
        t = onednn.data_type(x.dtype)
        reorder, new = b.reorder(b.memory(x.shape, t), b.image(x.shape, t)), backend.allocator(x.shape, x.dtype)
    assert reorder is not None

    def turned(x: HostArray) -> HostArray:
        y = new()
        reorder.on(x, y)
        return y

    return turned


def _for_weights(num_bytes: int) -> HostArray:
    """Memory for weights until the call is over: large ones would take that much from a step's peak if they stayed."""
    return scratch("weights", num_bytes) if num_bytes < _LARGE_WEIGHTS else backend.aligned(num_bytes, _BYTES)


def _packing(reorder: Primitive | None, num_bytes: int) -> Callable[[HostArray], HostArray]:
    """A function from weights to memory in which they lie as the primitive wants them."""
    if reorder is None:
        return lambda W: W

    def pack(W: HostArray) -> HostArray:
        target = _for_weights(num_bytes)
        reorder.on(W, target)
        return target

    return pack


def is_small_product(x: HostArray, W: HostArray, geometry: ConvGeometry) -> bool:
    """Is this a matrix product of few pixels with weights of their type, in C order?

    In ResNet-50 at batch 1 the last stages' 1x1 convolutions take 0.6 to 0.9 of the time so.
    """
    is_pointwise = geometry == _POINTWISE and W.shape[2:] == (1, 1)
    return is_pointwise and x.size // x.shape[1] <= _FEW_PIXELS and W.flags.c_contiguous and W.dtype == x.dtype


def _require(W_shape: Shape, *arrays: HostArray) -> None:
    onednn.require(*arrays)
    if 0 in W_shape:
        raise onednn.Unsupported("weights without elements")


def in_pairs(planner: Callable[..., Any], reference: Callable[..., Any], channels: Callable[..., int]) -> Any:
    """A planner for images of which oneDNN reads bfloat16 channels two by two.

    An odd one is paired with the next in memory, which is multiplied by 0: where that is infinite or NaN, so would be
    outputs that do not see it. ``reference`` takes such images; ``channels`` counts those of a group.
    """

    def plan(x: HostArray, *arguments: Any, **how: DType) -> Any:
        inner = planner(x, *arguments, **how)
        if x.dtype.name != "bfloat16" or channels(x, *arguments) % 2 == 0:
            return inner

        def convolution(x: HostArray, *arguments: Any) -> str:
            dense = x if x.flags.c_contiguous else channels_last(x)
            return inner(x, *arguments) if is_finite(dense) else reference(x, *arguments)

        return convolution

    return plan


def channels_in(x: HostArray, W: HostArray, *rest: Any) -> int:
    """How many channels of x a filter of W sees."""
    return W.shape[1]


def _channels_out(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> int:
    return W.shape[0] // geometry.groups


def _plan_forward(
    x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry, made: DType | None = None,
) -> Any:  # fmt: skip
    _require(W.shape, x)
    y_shape = (x.shape[0], W.shape[0], *geometry.out_hw(*x.shape[2:], *W.shape[2:]))
    if b is None and made is None and _is_faster_turned(x, W, geometry):
        inner = _plan_backward_data(x, _turned(W), y_shape, geometry)
        return lambda x, W, b, geometry: inner(x, _turned(W), y_shape, geometry)
    new = backend.allocator(y_shape, x.dtype if made is None else made)
    if is_small_product(x, W, geometry):
        primitive = build(_rows(channels_last(x)), W.reshape(W.shape[:2]).T, _rows(new()), b is not None)
        pack = _packing(None, 0)
    else:
        primitive, *reorder = _build("forward", x.shape, _readable(W), y_shape, geometry, x.dtype, b is not None, made)
        pack = _packing(*reorder)
    is_plain, images = is_channels_last(x) and min(W.strides) > 0, _to_images(x)

    def conv_forward(x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry) -> HostArray:
        if not is_plain:
            x, W = images(x), _readable(W)
        y = new()
        weights = pack(W)  # after y, so that nothing stays above their memory once they are gone
        if b is None:
            primitive.on(x, weights, y)
        else:
            b = np.ascontiguousarray(b, np.float32)
            primitive(address(x), address(weights), address(y), address(b))
        return y

    return conv_forward


def _plan_backward_data(
    gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry, made: DType | None = None,
) -> Any:  # fmt: skip
    _require(W.shape, gy)
    if _is_strided_pointwise(W.shape, geometry, gy.dtype):
        return _plan_strided_pointwise_data(gy, W, x_shape, geometry)
    new = backend.allocator(x_shape, gy.dtype if made is None else made)
    if is_small_product(gy, W, geometry):
        primitive, pack = build(_rows(channels_last(gy)), W.reshape(W.shape[:2]), _rows(new())), _packing(None, 0)
    else:
        primitive, *reorder = _build("data", x_shape, _readable(W), gy.shape, geometry, gy.dtype, made=made)
        pack = _packing(*reorder)
    is_plain = is_channels_last(gy) and min(W.strides) > 0

    def conv_backward_data(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> HostArray:
        if not is_plain:
            gy, W = channels_last(gy), _readable(W)
        gx = new()
        primitive.on(gy, pack(W), gx)
        return gx

    return conv_backward_data


def _rows(x: HostArray) -> HostArray:
    """(N, C, H, W) in channels-last memory as (N * H * W, C)."""
    return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])


def _is_strided_pointwise(W_shape: Shape, g: ConvGeometry, dtype: DType) -> bool:
    """Does a 1x1 convolution look at every sh-th row and sw-th column alone?"""
    is_sparse = g == ConvGeometry(g.sh, g.sw) and max(g.sh, g.sw) > 1
    return is_sparse and W_shape[2:] == (1, 1) and dtype == np.float32


def _seen(x: HostArray, g: ConvGeometry) -> HostArray:
    """A view of the pixels of x that a strided pointwise convolution looks at."""
    return x[:, :, :: g.sh, :: g.sw]


def _plan_strided_pointwise_data(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> Any:
    """The gradients of the pixels that were seen, between zeros: 0.7 to 0.95 of the time of oneDNN's strided kernel."""
    seen_shape = _seen(np.empty(x_shape, np.bool_), geometry).shape
    inner, new = _plan_backward_data(gy, W, seen_shape, _POINTWISE), backend.allocator(x_shape, gy.dtype)

    def conv_backward_data(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> HostArray:
        gx, seen = new(), inner(gy, W, seen_shape, _POINTWISE)
        backend.fill(gx, 0)
        _seen(gx, geometry)[...] = seen
        return gx

    return conv_backward_data


def _plan_backward_weight(
    x: HostArray,
    gy: HostArray,
    W_shape: Shape,
    geometry: ConvGeometry,
    dtype: DType,
    out: HostArray | None,
    made: DType | None = None,
) -> Any:
    _require(W_shape, x, gy)
    like = plain_empty(W_shape, dtype if out is None else out.dtype, gy)
    if geometry == _POINTWISE and W_shape[2:] == (1, 1):
        return _plan_pointwise_weight(x, gy, like)
    if _is_strided_pointwise(W_shape, geometry, x.dtype) and W_shape[1] >= _MANY_CHANNELS:
        inner = _plan_pointwise_weight(backend.copy(_seen(channels_last(x), geometry)), gy, like)
        return lambda x, gy, W_shape, geometry, dtype, out: inner(
            backend.copy(_seen(channels_last(x), geometry)), gy, W_shape, _POINTWISE, dtype, out
        )
    if W_shape[2:] == (1, 1) and max(geometry.sh, geometry.sw) > 1 and W_shape[1] % _LANES:
        raise onednn.Unsupported("a kernel for AVX2 that writes beyond its scratchpad")  # of 3.2, which kills programs
    if suits(x, gy, like, geometry):
        return plan_by_taps(x, gy, like, geometry)
    primitive, reorder, num_bytes = _build("weights", x.shape, like, gy.shape, geometry, x.dtype)
    if primitive.implementation.startswith("jit_bf16:avx512_core") and geometry.dh > 1 and W_shape[1] % _LANES:
        raise onednn.Unsupported("a kernel that is wrong from 29 columns on")  # of 3.2; that for AMX is another one
    new, is_plain = backend.plain_allocator(W_shape, like.dtype), is_channels_last(x) and is_channels_last(gy)
    images, unseen = _to_images(x), _unseen(x.shape, W_shape, gy.shape, geometry)
    are_in_pairs = x.dtype.name == "bfloat16" and gy.shape[3] % 2  # columns, as channels in in_pairs

    def conv_backward_weight(
        x: HostArray, gy: HostArray, W_shape: Shape, geometry: ConvGeometry, dtype: DType, out: HostArray | None
    ) -> HostArray:
        if not is_plain:
            x, gy = images(x), channels_last(gy)
        if out is None:
            out = new()
        if reorder is None:
            primitive.on(x, gy, out)
        else:
            target = _for_weights(num_bytes)
            primitive.on(x, gy, target)
            reorder.on(target, out)
        for taps in unseen:
            out[taps] = 0
        if are_in_pairs and not is_finite(out):
            return numpy_.conv_backward_weight(x, gy, W_shape, geometry, dtype, out)
        return out

    return conv_backward_weight


def _unseen(x_shape: Shape, W_shape: Shape, y_shape: Shape, g: ConvGeometry) -> list[Any]:
    """Where weights lie that meet nothing but padding: oneDNN's kernels for bfloat16 write what was in memory there."""
    rows, columns = (
        [i for i in range(k) if not any(0 <= o * stride + i * dilation - pad < size for o in range(num_out))]
        for k, size, num_out, stride, pad, dilation in zip(
            W_shape[2:], x_shape[2:], y_shape[2:], (g.sh, g.sw), (g.ph, g.pw), (g.dh, g.dw)
        )
    )
    return [(..., i, slice(None)) for i in rows] + [(..., j) for j in columns]


def _plan_pointwise_weight(x: HostArray, gy: HostArray, like: HostArray) -> Any:
    """gW = gy^T x over all pixels, written as it stands: 1.05 to 1.3 times as fast as the convolution's kernel."""
    new, shape = backend.plain_allocator(like.shape, like.dtype), like.shape[:2]
    product = _plan_turned(x, gy, like) or plan_matmul(
        _rows(channels_last(gy)).T, _rows(channels_last(x)), like.reshape(shape)
    )

    def conv_backward_weight(
        x: HostArray, gy: HostArray, W_shape: Shape, geometry: ConvGeometry, dtype: DType, out: HostArray | None
    ) -> HostArray:
        if out is None:
            out = new()
        product(_rows(channels_last(gy)).T, _rows(channels_last(x)), out.reshape(shape))
        return out

    return conv_backward_weight


def _plan_turned(x: HostArray, gy: HostArray, like: HostArray) -> Any:
    """The product as x^T gy, turned afterwards, or None: 0.86 to 0.96 of the time where gy has more channels than x
    and there are many pixels, since oneDNN copies the left matrix.
    """
    o, i = like.shape[:2]
    if not 1 < i < o < gy.size // o // 2 or like.dtype != np.float32 or x.dtype != np.float32:
        return None
    primitive = build(_rows(channels_last(x)).T, _rows(channels_last(gy)), like.reshape(i, o))
    with Builder() as b:
        turn = b.reorder(b.memory((o, i), onednn.F32, (1, o)), b.memory((o, i), onednn.F32))
    assert turn is not None
    num_bytes = like.nbytes  # the array itself must not stay with the plan

    def product(g: HostArray, x: HostArray, out: HostArray) -> None:
        target = _for_weights(num_bytes)
        primitive.on(x.T, g.T, target)
        turn.on(target, out)

    return product


def stays_in_float32(x: HostArray, W: HostArray, *rest: ConvGeometry | None) -> bool:
    """Whether a convolution of float32 gains nothing by bfloat16, or may be spoilt by it as in :func:`in_pairs`."""
    geometry = next(a for a in rest if isinstance(a, ConvGeometry))
    return W.shape[1] % 2 == 1 or _does_little(W.shape, geometry) or is_small_product(x, W, geometry)


def _data_stays_in_float32(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> bool:
    is_odd = _channels_out(gy, W, x_shape, geometry) % 2 == 1
    return is_odd or _does_little(W.shape, geometry) or is_small_product(gy, W, geometry)


def _weights_stay_in_float32(
    x: HostArray, gy: HostArray, W_shape: Shape, geometry: ConvGeometry, *rest: DType | None,
) -> bool:  # fmt: skip
    is_product = geometry == _POINTWISE and W_shape[2:] == (1, 1)
    is_odd = gy.shape[3] % 2 == 1 or W_shape[1] % 2 == 1
    return _does_little(W_shape, geometry) or (is_odd and not is_product)


def _does_little(W_shape: Shape, g: ConvGeometry) -> bool:
    """Whether it takes longer to round an element of x than it saves where that is multiplied."""
    return W_shape[0] // g.groups * prod(W_shape[2:]) < _FEW_MULTIPLICATIONS * g.sh * g.sw


ROWS = {
    "conv_forward": also_in_bfloat16(
        also_float16(in_pairs(_plan_forward, numpy_.conv_forward, channels_in)), 0, unless=stays_in_float32
    ),
    "conv_backward_data": also_in_bfloat16(
        also_float16(in_pairs(_plan_backward_data, numpy_.conv_backward_data, _channels_out)),
        0, unless=_data_stays_in_float32,
    ),
    "conv_backward_weight": also_in_bfloat16(
        also_float16(_plan_backward_weight, out=5), 0, 1, unless=_weights_stay_in_float32
    ),
}  # fmt: skip
