"""The kernels on oneDNN: float32, and bfloat16 where the processor has instructions for it.

Activations are channels-last; weights and their gradients are plain OIHW, reordered at each call to the layout that
oneDNN asks for, since they change at each step. Compared with NumPy's kernels on ResNet-50's layers: convolutions
1.7 times, batch normalization with ReLU 2 to 4 times, pooling 10 times as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry
from dbrdist.kernels.numpy_ import plain_empty
from dbrdist.kernels.onednn import Builder, Primitive, address, cached, scratch

Array = np.ndarray

_TYPES = {"float32": onednn.F32, "bfloat16": onednn.BF16}
_POINTWISE = ConvGeometry()
_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library

_SMALL_PRODUCT = 1 << 19  # multiplications


def serves(kernel: str, x: Array, geometry: Any = None) -> bool:
    """Can this provider take ``kernel`` for arrays like ``x``? A cheap test; building may still say Unsupported."""
    if type(x) is not np.ndarray or x.dtype.name not in _TYPES or not x.size:
        return False
    if kernel == "elementwise":
        return x.size >= _SMALL
    if kernel == "matmul":  # geometry: the other matrix' shape and type
        shape, dtype = geometry
        return x.ndim == len(shape) == 2 and dtype == x.dtype and x.size * shape[1] >= _SMALL_PRODUCT
    if kernel == "bn":  # geometry: the axes
        return (x.ndim, geometry) in ((4, (0, 2, 3)), (2, (0,)))
    if kernel == "pool":
        return geometry.ph < geometry.kh and geometry.pw < geometry.kw and _windows_touch_image(x, geometry)
    return kernel == "conv" and x.ndim == 4


def _windows_touch_image(x: Array, g: PoolGeometry) -> bool:
    """False where a window lies wholly in the padding, as cover_all with a stride beyond the kernel can make it."""
    oh, ow = g.out_hw(*x.shape[2:])
    return (oh - 1) * g.sh - g.ph < x.shape[2] and (ow - 1) * g.sw - g.pw < x.shape[3]


def _type(dtype: Any) -> int:
    try:
        return _TYPES[dtype.name]
    except KeyError:
        raise onednn.Unsupported(f"arrays of {dtype}") from None


def _paddings(hw: Any, kernel: Any, g: Any, out: Any) -> tuple[Any, Any]:
    """Left and right padding; the right one is what the output size implies, and more than the left for cover_all."""
    dh, dw = getattr(g, "dh", 1), getattr(g, "dw", 1)
    bottom = (out[0] - 1) * g.sh + (kernel[0] - 1) * dh + 1 - hw[0] - g.ph
    right = (out[1] - 1) * g.sw + (kernel[1] - 1) * dw + 1 - hw[1] - g.pw
    return onednn.dims((g.ph, g.pw)), onednn.dims((bottom, right))


# ---- convolution


class _Convolution:
    """One direction of a convolution: its primitive and the reorder of its weights, if any."""

    __slots__ = ("primitive", "reorder", "weight_bytes")

    def __init__(self, primitive: Primitive, reorder: Primitive | None, weight_bytes: int) -> None:
        self.primitive, self.reorder, self.weight_bytes = primitive, reorder, weight_bytes


def _weights(b: Builder, W_shape: Any, strides: Any, dtype: Any, groups: int) -> Any:
    """Descriptor of the caller's OIHW weights; with groups the first axis is split in two."""
    (o, *rest), so = W_shape, strides[0]
    if groups == 1:
        return b.memory(W_shape, _type(dtype), strides)
    return b.memory((groups, o // groups, *rest), _type(dtype), (so * (o // groups), *strides))


def _build_convolution(
    direction: str, x_shape: Any, W_shape: Any, y_shape: Any, g: ConvGeometry, dtype: Any, W_dtype: Any,
    W_strides: Any, bias: bool = False,
) -> _Convolution:  # fmt: skip
    with Builder() as b:
        t = _type(dtype)
        x, y = b.image(x_shape, t), b.image(y_shape, t)
        user = _weights(b, W_shape, W_strides, W_dtype, g.groups)
        grouped = W_shape if g.groups == 1 else (g.groups, W_shape[0] // g.groups, *W_shape[1:])
        free = b.any(grouped, _type(W_dtype) if direction == "weights" else t)
        bias_memory = b.memory(W_shape[:1], onednn.F32) if bias else None
        left, right = _paddings(x_shape[2:], W_shape[2:], g, y_shape[2:])
        window = (onednn.dims((g.sh, g.sw)), onednn.dims((g.dh - 1, g.dw - 1)), left, right)
        attributes, direct = b.attributes(), onednn.CONVOLUTION_DIRECT
        forward = b.describe(
            "convolution_forward", onednn.FORWARD_TRAINING, direct, x, b.any(grouped, t), bias_memory, y, *window,
            attributes,
        )  # fmt: skip
        if direction == "forward":
            wanted = b.query(forward, onednn.QUERY_WEIGHTS)
            memories = {onednn.SRC: x, onednn.WEIGHTS: wanted, onednn.DST: y}
            if bias:
                memories[onednn.BIAS] = bias_memory
            return _Convolution(b.primitive(forward, memories), b.reorder(user, wanted), b.size(wanted))
        if direction == "data":
            backward = b.describe("convolution_backward_data", direct, x, free, y, *window, forward, attributes)
            wanted = b.query(backward, onednn.QUERY_WEIGHTS)
            memories = {onednn.DIFF_DST: y, onednn.WEIGHTS: wanted, onednn.DIFF_SRC: x}
            return _Convolution(b.primitive(backward, memories), b.reorder(user, wanted), b.size(wanted))
        backward = b.describe("convolution_backward_weights", direct, x, free, None, y, *window, forward, attributes)
        given = b.query(backward, onednn.QUERY_DIFF_WEIGHTS)
        memories = {onednn.SRC: x, onednn.DIFF_DST: y, onednn.DIFF_WEIGHTS: given}
        return _Convolution(b.primitive(backward, memories), b.reorder(given, user), b.size(given))


def _element_strides(W: Array) -> tuple[int, ...]:
    return tuple(s // W.itemsize for s in W.strides)


def _readable(W: Array) -> Array:
    """Weights in memory that a descriptor can name: any positive strides will do."""
    if min(W.strides) > 0:
        return W
    dense = plain_empty(W.shape, W.dtype, W)
    dense[...] = W
    return dense


def _convolution(direction: str, x_shape: Any, W: Array, y_shape: Any, g: ConvGeometry, dtype: Any, bias: bool) -> Any:
    key = (direction, x_shape, W.shape, y_shape, g, dtype, W.dtype, W.strides, bias)
    return cached(
        key,
        lambda: _build_convolution(
            direction, x_shape, W.shape, y_shape, g, dtype, W.dtype, _element_strides(W), bias
        ),
    )  # fmt: skip


def _reordered(op: _Convolution, W: Array) -> int:
    """The address of the weights in the layout that the primitive wants."""
    if op.reorder is None:
        return address(W)
    target = scratch("weights", op.weight_bytes)
    op.reorder(address(W), target)
    return target


def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
    """See numpy_.conv_forward."""
    x, W = backend.channels_last(x), _readable(W)
    y_shape = (x.shape[0], W.shape[0], *geometry.out_hw(*x.shape[2:], *W.shape[2:]))
    op = _convolution("forward", x.shape, W, y_shape, geometry, x.dtype, b is not None)
    y = backend.empty(y_shape, x.dtype, x)
    if b is None:
        op.primitive(address(x), _reordered(op, W), address(y))
    else:
        b = np.ascontiguousarray(b, np.float32)
        op.primitive(address(x), _reordered(op, W), address(y), address(b))
    return y


def conv_backward_data(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Array:
    """See numpy_.conv_backward_data."""
    gy, W = backend.channels_last(gy), _readable(W)
    op = _convolution("data", x_shape, W, gy.shape, geometry, gy.dtype, False)
    gx = backend.empty(x_shape, gy.dtype, gy)
    op.primitive(address(gy), _reordered(op, W), address(gx))
    return gx


def _rows(x: Array) -> Array:
    """(N, C, H, W) in channels-last memory as (N * H * W, C)."""
    return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])


def conv_backward_weight(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: Any, out: Array | None = None
) -> Array:
    """See numpy_.conv_backward_weight."""
    x, gy = backend.channels_last(x), backend.channels_last(gy)
    if out is None:
        out = plain_empty(W_shape, dtype, gy)
    if geometry == _POINTWISE and W_shape[2:] == (1, 1) and out.flags.c_contiguous:
        # gW = gy^T x over all pixels, written as it stands: 1.05 to 1.3 times as fast as the convolution's kernel.
        matmul(_rows(gy).T, _rows(x), out.reshape(W_shape[:2]))
        return out
    op = _convolution("weights", x.shape, out, gy.shape, geometry, gy.dtype, False)
    if op.reorder is None:
        op.primitive(address(x), address(gy), address(out))
    else:
        target = scratch("weights", op.weight_bytes)
        op.primitive(address(x), address(gy), target)
        op.reorder(target, address(out))
    return out


# ---- matrix product


def _build_matmul(a: Any, b: Any, y: Any) -> Primitive:
    """Each operand is (shape, strides in elements, dtype)."""
    with Builder() as builder:
        left, right, result = (builder.memory(shape, _type(dtype), strides) for shape, strides, dtype in (a, b, y))
        description = builder.describe("matmul", left, right, None, result, builder.attributes())
        return builder.primitive(description, {onednn.SRC: left, onednn.WEIGHTS: right, onednn.DST: result})


def _matrix(a: Array) -> Array:
    """A matrix whose rows or columns lie densely; oneDNN falls back to slow code for others."""
    rows, columns = a.strides
    size = a.itemsize
    if (columns == size and rows >= a.shape[1] * size) or (rows == size and columns >= a.shape[0] * size):
        return a
    return np.ascontiguousarray(a)


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """See numpy_.matmul."""
    a, b = _matrix(a), _matrix(b)
    if out is None:
        out = backend.empty((a.shape[0], b.shape[1]), a.dtype, a)
    key = ("matmul", a.shape, a.strides, b.shape, b.strides, out.strides, a.dtype, b.dtype, out.dtype)
    primitive = cached(
        key, lambda: _build_matmul(*((m.shape, _element_strides(m), m.dtype) for m in (a, b, out)))
    )  # fmt: skip
    primitive(address(a), address(b), address(out))
    return out


# ---- batch normalization


def _as_image(x: Array) -> Array:
    """(N, C) as (N, C, 1, 1), and always channels-last."""
    return backend.channels_last(x if x.ndim == 4 else x[:, :, None, None])


def _f32(a: Array) -> Array:
    return np.ascontiguousarray(a, np.float32)


def _bn_flags(relu: bool) -> int:
    return onednn.USE_SCALE | onednn.USE_SHIFT | (onednn.FUSE_RELU if relu else 0)


def _describe_bn(b: Builder, prop: int, shape: Any, dtype: Any, eps: float, flags: int) -> Any:
    x = b.image(shape, _type(dtype))
    return b.describe("batch_normalization_forward", prop, x, x, onednn.c_float(eps), flags, b.attributes())


def _build_bn_forward(shape: Any, dtype: Any, eps: float, relu: bool) -> tuple[Primitive, int]:
    with Builder() as b:
        description = _describe_bn(b, onednn.FORWARD_TRAINING, shape, dtype, eps, _bn_flags(relu))
        x, c = b.image(shape, _type(dtype)), b.memory(shape[1:2], onednn.F32)
        memories = {
            onednn.SRC: x, onednn.SCALE: c, onednn.SHIFT: c, onednn.MEAN: c, onednn.VARIANCE: c, onednn.DST: x,
        }  # fmt: skip
        workspace = b.query(description, onednn.QUERY_WORKSPACE)
        if relu:
            memories[onednn.WORKSPACE] = workspace
        return b.primitive(description, memories), b.size(workspace) if relu else 0


def bn_forward(
    x: Array, gamma: Array, beta: Array, eps: float, axis: tuple[int, ...], relu: bool
) -> tuple[Array, Array, Array, Any]:
    """See numpy_.bn_forward; saved is oneDNN's mask of the ReLU."""
    image, gamma, beta = _as_image(x), _f32(gamma), _f32(beta)
    shape = image.shape
    primitive, workspace_bytes = cached(
        ("bn_forward", shape, x.dtype, eps, relu), lambda: _build_bn_forward(shape, x.dtype, eps, relu)
    )
    y = backend.empty(shape, x.dtype, x)
    statistics = np.empty((2, shape[1]), np.float32)
    mean, var = statistics
    arguments = [address(image), address(gamma), address(beta), address(mean), address(var), address(y)]
    saved = None
    if relu:
        saved = backend.empty((workspace_bytes,), np.uint8, x)
        arguments.append(address(saved))
    primitive(*arguments)
    return y.reshape(x.shape) if x.ndim == 2 else y, mean, var, saved


def _build_bn_inference(shape: Any, dtype: Any, eps: float, relu: bool) -> Primitive:
    with Builder() as b:
        flags = _bn_flags(relu) | onednn.USE_GLOBAL_STATS
        description = _describe_bn(b, onednn.FORWARD_INFERENCE, shape, dtype, eps, flags)
        x, c = b.image(shape, _type(dtype)), b.memory(shape[1:2], onednn.F32)
        memories = {
            onednn.SRC: x, onednn.SCALE: c, onednn.SHIFT: c, onednn.MEAN: c, onednn.VARIANCE: c, onednn.DST: x,
        }  # fmt: skip
        return b.primitive(description, memories)


def bn_inference(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, axis: tuple[int, ...], relu: bool
) -> Array:
    """See numpy_.bn_inference."""
    image, gamma, beta, mean, var = _as_image(x), _f32(gamma), _f32(beta), _f32(mean), _f32(var)
    shape = image.shape
    primitive = cached(
        ("bn_inference", shape, x.dtype, eps, relu), lambda: _build_bn_inference(shape, x.dtype, eps, relu)
    )
    y = backend.empty(shape, x.dtype, x)
    primitive(address(image), address(gamma), address(beta), address(mean), address(var), address(y))
    return y.reshape(x.shape) if x.ndim == 2 else y


def _build_bn_backward(shape: Any, dtype: Any, eps: float, relu: bool) -> Primitive:
    with Builder() as b:
        flags = _bn_flags(relu)
        forward = _describe_bn(b, onednn.FORWARD_TRAINING, shape, dtype, eps, flags)
        x, c = b.image(shape, _type(dtype)), b.memory(shape[1:2], onednn.F32)
        description = b.describe(
            "batch_normalization_backward", onednn.BACKWARD, x, x, x, onednn.c_float(eps), flags, forward,
            b.attributes(),
        )  # fmt: skip
        memories = {
            onednn.SRC: x, onednn.DIFF_DST: x, onednn.SCALE: c, onednn.MEAN: c, onednn.VARIANCE: c,
            onednn.DIFF_SRC: x, onednn.DIFF_SCALE: c, onednn.DIFF_SHIFT: c,
        }  # fmt: skip
        if relu:
            memories[onednn.WORKSPACE] = b.query(forward, onednn.QUERY_WORKSPACE)
        return b.primitive(description, memories)


def bn_backward(
    x: Array, gamma: Array, mean: Array, var: Array, gy: Array, eps: float, saved: Any, axis: tuple[int, ...],
    relu: bool, out_gamma: Array | None = None, out_beta: Array | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """See numpy_.bn_backward; without ``relu`` it does not look at the mask, so a fused forward serves both."""
    image, g, scale, mean, var = _as_image(x), _as_image(gy), _f32(gamma), _f32(mean), _f32(var)
    shape = image.shape
    primitive = cached(
        ("bn_backward", shape, x.dtype, eps, relu), lambda: _build_bn_backward(shape, x.dtype, eps, relu)
    )
    gx = backend.empty(shape, x.dtype, x)
    ggamma, gbeta = _f32_target(out_gamma, scale), _f32_target(out_beta, scale)
    arguments = [address(a) for a in (image, g, scale, mean, var, gx, ggamma, gbeta)]
    if relu:
        arguments.append(address(saved))
    primitive(*arguments)
    gx = gx.reshape(x.shape) if x.ndim == 2 else gx
    return gx, _delivered(ggamma, out_gamma, gamma), _delivered(gbeta, out_beta, gamma)


def _f32_target(out: Array | None, like: Array) -> Array:
    if out is not None and out.dtype == np.float32 and out.flags.c_contiguous:
        return out
    return np.empty(like.shape, np.float32)


def _delivered(value: Array, out: Array | None, like: Array) -> Array:
    if out is None or out is value:
        return value.astype(like.dtype, copy=False)
    out[...] = value
    return out


# ---- pooling


def _build_pool(direction: str, x_shape: Any, y_shape: Any, g: PoolGeometry, dtype: Any) -> tuple[Primitive, int]:
    with Builder() as b:
        x, y = b.image(x_shape, _type(dtype)), b.image(y_shape, _type(dtype))
        kind = onednn.POOLING_MAX if g.kind == "max" else onednn.POOLING_AVERAGE_WITH_PADDING
        dims, kernel = onednn.dims, (g.kh, g.kw)
        left, right = _paddings(x_shape[2:], kernel, g, y_shape[2:])
        window = (dims((g.sh, g.sw)), dims(kernel), dims((0, 0)), left, right)
        attributes = b.attributes()
        forward = b.describe("pooling_forward", onednn.FORWARD_TRAINING, kind, x, y, *window, attributes)
        workspace = b.query(forward, onednn.QUERY_WORKSPACE) if g.kind == "max" else None
        extra = {onednn.WORKSPACE: workspace} if workspace else {}
        if direction == "forward":
            return b.primitive(forward, {onednn.SRC: x, onednn.DST: y} | extra), b.size(workspace)
        backward = b.describe("pooling_backward", kind, x, y, *window, forward, attributes)
        return b.primitive(backward, {onednn.DIFF_DST: y, onednn.DIFF_SRC: x} | extra), b.size(workspace)


def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
    """See numpy_.pool_forward; saved is oneDNN's workspace, positions as uint8 or int32 in the layout of y."""
    x = backend.channels_last(x)
    x_shape, y_shape = x.shape, (*x.shape[:2], *geometry.out_hw(*x.shape[2:]))
    primitive, workspace_bytes = cached(
        ("pool_forward", x_shape, geometry, x.dtype),
        lambda: _build_pool("forward", x_shape, y_shape, geometry, x.dtype),
    )
    y = backend.empty(y_shape, x.dtype, x)
    if not workspace_bytes:
        primitive(address(x), address(y))
        return y, None
    saved = backend.empty((workspace_bytes,), np.uint8, x)
    primitive(address(x), address(y), address(saved))
    return y, saved


def pool_backward(gy: Array, x_shape: tuple[int, ...], saved: Any, geometry: PoolGeometry) -> Array:
    """See numpy_.pool_backward."""
    gy = backend.channels_last(gy)
    y_shape = gy.shape
    primitive, _ = cached(
        ("pool_backward", x_shape, geometry, gy.dtype),
        lambda: _build_pool("backward", x_shape, y_shape, geometry, gy.dtype),
    )
    gx = backend.empty(x_shape, gy.dtype, gy)
    if saved is None:
        primitive(address(gy), address(gx))
    else:
        primitive(address(gy), address(gx), address(saved))
    return gx


def pool_indices(saved: Any, y_shape: tuple[int, ...], geometry: PoolGeometry) -> Array:
    """See numpy_.pool_indices."""
    n, c, oh, ow = y_shape
    kind = np.uint8 if saved.nbytes == n * c * oh * ow else np.int32
    return saved.view(kind).reshape(n, oh, ow, c).transpose(0, 3, 1, 2).astype(np.int32)


# ---- elementwise: dense arrays of one layout, seen as one long row


def _build_elementwise(kind: str, size: int, dtype: Any) -> Primitive:
    with Builder() as b:
        row, zero = b.memory((size,), _type(dtype)), onednn.c_float(0)
        if kind in ("add", "add_relu"):
            description = b.describe("binary", onednn.BINARY_ADD, row, row, row, b.attributes(relu=kind == "add_relu"))
            return b.primitive(description, {onednn.SRC: row, onednn.SRC_1: row, onednn.DST: row})
        attributes, training = b.attributes(), onednn.FORWARD_TRAINING
        algorithm = onednn.RELU_FROM_OUTPUT
        forward = b.describe("eltwise_forward", training, algorithm, row, row, zero, zero, attributes)
        if kind == "relu_forward":
            return b.primitive(forward, {onednn.SRC: row, onednn.DST: row})
        backward = b.describe("eltwise_backward", algorithm, row, row, row, zero, zero, forward, attributes)
        return b.primitive(backward, {onednn.DST: row, onednn.DIFF_DST: row, onednn.DIFF_SRC: row})


def _elementwise(kind: str, arrays: tuple[Array, ...], out: Array | None = None) -> Array:
    first = arrays[0]
    if first.ndim == 4:
        arrays = tuple(backend.channels_last(a) for a in arrays)
    elif not all(a.flags.c_contiguous for a in arrays):
        arrays = tuple(np.ascontiguousarray(a) for a in arrays)
    size, dtype = first.size, first.dtype
    primitive = cached((kind, size, dtype), lambda: _build_elementwise(kind, size, dtype))
    y = out if out is not None else backend.empty(first.shape, dtype, first)
    primitive(*[address(a) for a in arrays], address(y))
    return y


def relu_forward(x: Array) -> Array:
    """See numpy_.relu_forward."""
    return _elementwise("relu_forward", (x,))


def relu_backward(y: Array, gy: Array) -> Array:
    """See numpy_.relu_backward."""
    return _elementwise("relu_backward", (y, gy))


def add(a: Array, b: Array) -> Array:
    """See numpy_.add."""
    return _elementwise("add", (a, b))


def add_relu(a: Array, b: Array, out: Array | None = None) -> Array:
    """See numpy_.add_relu; ``out`` is dense and channels-last where it has four dimensions."""
    return _elementwise("add_relu", (a, b), out)
