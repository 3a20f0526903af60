"""Batch normalization on oneDNN: with a ReLU 2 to 4 times as fast as NumPy's on ResNet-50's layers.

Images in planes are normalized by loops of our own.
"""

from __future__ import annotations

from ctypes import c_float
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import loops, onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, cached
from dbrdist.kernels.cpu.onednn_finite import is_finite, memory_row, normalizes_finitely
from dbrdist.kernels.reference import numpy_, numpy_normalization
from dbrdist.kernels.reference.numpy_normalization import coarse_from, is_coarse

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.core.array.types import Array

_F32, _DENSE = np.dtype(np.float32), (4,)
_EPS = 1e-5  # what counts beside a variance where only statistics are wanted
_LARGE_BYTES = 1 << 23  # from here on a gradient that is written over another saves more than the time that it costs
_MOST_IN_A_SUM = 1 << 20  # elements; oneDNN adds one after another, and sums of more lose digits whatever their mean
_PART = 1 << 18  # of more, so many at a time
_MOST_SHIFTS = 4  # a first mean may be off by many deviations, a second one is near


def _as_image(x: HostArray) -> HostArray:
    """(N, C) as (N, C, 1, 1), and always channels-last."""
    return backend.channels_last(x if x.ndim == 4 else x[:, :, None, None])


def _f32(a: HostArray) -> HostArray:
    return a if a.dtype is _F32 and a.strides == _DENSE else np.ascontiguousarray(a, np.float32)


def _is_dense_image(x: HostArray) -> bool:
    return x.ndim == 4 and backend.is_channels_last(x)


def _shaped(x: HostArray, image: HostArray) -> HostArray:
    """A result in the shape of the input."""
    return image.reshape(x.shape) if x.ndim == 2 else image


def _bn_flags(relu: bool) -> int:
    return onednn.USE_SCALE | onednn.USE_SHIFT | (onednn.FUSE_RELU if relu else 0)


def _describe_bn(b: Builder, prop: int, shape: tuple[int, ...], dtype: DType, eps: float, flags: int) -> Any:
    x = b.image(shape, onednn.data_type(dtype))
    return b.describe("batch_normalization_forward", prop, x, x, c_float(eps), flags, b.attributes())


def _build_bn_forward(shape: tuple[int, ...], dtype: DType, eps: float, relu: bool) -> tuple[Primitive, int]:
    with Builder() as b:
        description = _describe_bn(b, onednn.FORWARD_TRAINING, shape, dtype, eps, _bn_flags(relu))
        x, c = b.image(shape, onednn.data_type(dtype)), b.memory(shape[1:2], onednn.F32)
        memories = {
            onednn.SRC: x, onednn.SCALE: c, onednn.SHIFT: c, onednn.MEAN: c, onednn.VARIANCE: c, onednn.DST: x,
        }  # fmt: skip
        workspace = b.query(description, onednn.QUERY_WORKSPACE)
        if relu:
            memories[onednn.WORKSPACE] = workspace
        return b.primitive(description, memories), b.size(workspace) if relu else 0


def _plan_forward(
    x: HostArray, gamma: HostArray, beta: HostArray, eps: float, axis: tuple[int, ...], relu: bool,
) -> Any:  # fmt: skip
    """See numpy_normalization.bn_forward; saved is oneDNN's mask of the ReLU, or one of bool where that comes after it.

    That is where the output is not finite, and where oneDNN takes another implementation for both in one, whose numbers
    differ in the last bit: they must not depend on whether somebody expected a ReLU.
    """
    _check(x, axis)
    shape, dtype = _image_shape(x), x.dtype
    rows = _rows_as_images(shape)
    primitive, mask_bytes = _build_bn_forward(rows, dtype, eps, relu)
    if relu:
        plain = _plan_forward(x, gamma, beta, eps, axis, False)
        if primitive.implementation != _build_bn_forward(rows, dtype, eps, False)[0].implementation:
            return lambda *arguments: _rectified(plain, *arguments)
    is_dense, new, new_vector = _is_dense_image(x), backend.allocator(shape, dtype), _vectors(shape)
    count = shape[0] * shape[2] * shape[3]
    limit, is_long = coarse_from(count), count > _MOST_IN_A_SUM

    def bn_forward(
        x: HostArray, gamma: HostArray, beta: HostArray, eps: float, axis: tuple[int, ...], relu: bool
    ) -> tuple[HostArray, HostArray, HostArray, Any]:
        image, mean, var, y = x if is_dense else _as_image(x), new_vector(), new_vector(), new()
        scale, shift = _f32(gamma), _f32(beta)
        if not is_long:
            primitive.on(image, scale, shift, mean, var, y)
        if is_long or is_coarse(mean, var, eps, limit):
            _forward_with_care(image, scale, shift, mean, var, y, eps)
        return y if is_dense else _shaped(x, y), mean, var, None

    def bn_relu_forward(
        x: HostArray, gamma: HostArray, beta: HostArray, eps: float, axis: tuple[int, ...], relu: bool
    ) -> tuple[HostArray, HostArray, HostArray, Any]:
        image, mean, var, y = x if is_dense else _as_image(x), new_vector(), new_vector(), new()
        saved = backend.empty((mask_bytes,), np.uint8, x)
        scale, shift = _f32(gamma), _f32(beta)
        if not is_long:
            primitive.on(image, scale, shift, mean, var, y, saved)
        is_careful = is_long or is_coarse(mean, var, eps, limit)
        if is_careful or not normalizes_finitely(scale, shift, mean, var, eps):  # of one NaN statistics are NaN
            return _rectified(plain, x, gamma, beta, eps, axis, relu)
        return y if is_dense else _shaped(x, y), mean, var, saved

    return bn_relu_forward if relu else bn_forward


def _forward_with_care(
    image: HostArray, scale: HostArray, shift: HostArray, mean: HostArray, var: HostArray, y: HostArray, eps: float,
) -> None:  # fmt: skip
    """Write y, mean and var where oneDNN's sums are too coarse: with statistics of a part of the elements at a time,
    and in channels whose mean is large of the distances from a number near it.
    """
    shape, dtype = image.shape, image.dtype
    rows = image.transpose(0, 2, 3, 1).reshape(-1, shape[1])
    num_parts = -(-len(rows) // _PART) if len(rows) > _MOST_IN_A_SUM else 1
    bounds = [len(rows) * i // num_parts for i in range(num_parts + 1)]
    limit, vectors = coarse_from(bounds[1]), (scale, shift, mean, var)
    near, distances, room = np.zeros_like(mean), rows, memory_row(y).reshape(rows.shape)
    for _ in range(_MOST_SHIFTS):
        _statistics_by_parts(distances, bounds, *vectors, room, eps)
        are_coarse = numpy_normalization.are_coarse(mean, var, eps, limit)
        mean += near
        if not are_coarse.any():
            break
        near = np.where(are_coarse, mean, near)
        distances = room = rows - near  # in float32: 16 bits would round them; oneDNN may write over what it reads
    apply = cached(("bn_inference", shape, dtype, eps), lambda: _build_bn_inference(shape, dtype, eps, False))
    apply.on(image, *vectors, y)


def _statistics_by_parts(
    rows: HostArray, bounds: list[int], scale: HostArray, shift: HostArray, mean: HostArray, var: HostArray,
    room: HostArray, eps: float,
) -> None:  # fmt: skip
    """Write mean and variance of the columns of rows (M, K) from those of the parts between bounds; room is as rows."""
    parts = np.empty((2, len(bounds) - 1, rows.shape[1]), np.float32)
    for start, end, m, v in zip(bounds, bounds[1:], *parts):
        shape = 1, rows.shape[1], 1, end - start
        key = "bn_forward", shape, rows.dtype, eps
        primitive, _ = cached(key, lambda: _build_bn_forward(shape, rows.dtype, eps, False))  # noqa: B023
        primitive.on(rows[start:end], scale, shift, m, v, room[start:end])
    weights = np.diff(bounds) / max(len(rows), 1)
    with np.errstate(invalid="ignore", over="ignore"):  # as oneDNN, warn of nothing that is not finite
        mean[...] = middle = weights.dot(parts[0])
        var[...] = weights.dot(parts[1] + np.square(parts[0] - middle))


def _vectors(shape: tuple[int, ...]) -> Any:
    """What makes an uninitialised vector beside the channels."""
    make: Any = np.ndarray
    return partial(make, shape[1:2], _F32)


def _rectified(plain: Any, x: HostArray, *arguments: Any) -> Any:
    """Normalization, then the ReLU."""
    y, mean, var, _ = plain(x, *arguments)
    y = numpy_.relu_forward(y)
    return y, mean, var, y != 0


def _build_bn_inference(shape: tuple[int, ...], dtype: DType, eps: float, relu: bool) -> Primitive:
    with Builder() as b:
        flags = _bn_flags(relu) | onednn.USE_GLOBAL_STATS
        description = _describe_bn(b, onednn.FORWARD_INFERENCE, shape, dtype, eps, flags)
        x, c = b.image(shape, onednn.data_type(dtype)), b.memory(shape[1:2], onednn.F32)
        memories = {
            onednn.SRC: x, onednn.SCALE: c, onednn.SHIFT: c, onednn.MEAN: c, onednn.VARIANCE: c, onednn.DST: x,
        }  # fmt: skip
        return b.primitive(description, memories)


def _plan_inference(
    x: HostArray, gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float,
    axis: tuple[int, ...], relu: bool, out: HostArray | None = None,
) -> Any:  # fmt: skip
    """See numpy_normalization.bn_inference."""
    _check(x, axis)
    shape, dtype = _image_shape(x), x.dtype
    primitive = _build_bn_inference(shape, dtype, eps, relu)
    is_dense, new = _is_dense_image(x), backend.allocator(x.shape, dtype)

    def bn_inference(
        x: HostArray, gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float,
        axis: tuple[int, ...], relu: bool, out: HostArray | None = None,
    ) -> HostArray:  # fmt: skip
        image, vectors = x if is_dense else _as_image(x), (_f32(gamma), _f32(beta), _f32(mean), _f32(var))
        if relu and not (normalizes_finitely(*vectors, eps) and is_finite(image)):
            return numpy_normalization.bn_inference(x, gamma, beta, mean, var, eps, axis, relu, out)
        y = new() if out is None else out
        primitive.on(image, *vectors, y)
        return y

    return bn_inference


def _plan_again(
    x: HostArray, gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float, inner: Any,
    relu: bool, axis: tuple[int, ...], out: HostArray,
) -> Any:  # fmt: skip
    """See host_dispatch.bn_again. oneDNN's own ReLU serves where it did in forward, since all was finite then."""
    if not onednn.is_available():  # in a forked process, of a graph from before the fork
        return numpy_normalization.bn_again
    is_fused = relu and inner is not None and inner.dtype != np.bool_
    primitive = _build_bn_inference(_rows_as_images(_image_shape(x)), x.dtype, eps, is_fused)
    is_dense = _is_dense_image(x)

    def bn_again(
        x: HostArray, gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float, inner: Any,
        relu: bool, axis: tuple[int, ...], out: HostArray,
    ) -> None:  # fmt: skip
        primitive.on(x if is_dense else _as_image(x), _f32(gamma), _f32(beta), _f32(mean), _f32(var), out)
        if relu and not is_fused:
            np.maximum(out, 0, out=out)

    return bn_again


_TRIED = 2048  # elements


def _plan_rectified_sum(y: HostArray, x: HostArray, *rest: HostArray | None) -> Any:
    """See host_dispatch.rectified_sum: a loop of our own, where it rounds as oneDNN does, which is tried."""
    columns = x.shape[1]
    one = loops.runner("rectified_sum", y, x)
    two = loops.runner("rectified_sum_of_two", y, x)
    if not cached(("rounds_as_loop", columns), partial(_rounds_as_loop, columns)):
        raise onednn.Unsupported("another rounding than the loop's")
    numbers = (columns, 3 * columns)

    def rectified_sum(
        y: HostArray, x: HostArray, vectors: HostArray, added: HostArray, others: HostArray | None
    ) -> bool:
        if others is None:
            return one((y, x, vectors, added), numbers)
        return two((y, x, vectors, added, others), numbers)

    return rectified_sum


def _rounds_as_loop(columns: int) -> bool:
    """Whether oneDNN's normalization multiplies and adds in one step: versions 3 do for a multiple of 8 columns, with
    AVX2 and AVX-512.
    """
    eps, rng = np.float32(_EPS), np.random.default_rng(0)
    x = rng.standard_normal((-(-_TRIED // columns), columns), np.float32)
    zeros = np.zeros_like(x)
    gamma, beta, mean, var = rng.random((4, columns), np.float32)
    y, expected = np.empty_like(x), np.empty_like(x)
    _build_bn_inference((*x.shape, 1, 1), x.dtype, _EPS, False).on(x, gamma, beta, mean, var, expected)
    vectors = np.stack((mean, gamma / np.sqrt(var + eps), beta))
    loops.runner("rectified_sum", y, x)((y, x, vectors, zeros), (columns, 3 * columns))
    return bool((y == np.maximum(expected, 0)).all())


def _build_bn_backward(shape: tuple[int, ...], dtype: DType, eps: float, relu: bool) -> Primitive:
    with Builder() as b:
        flags = _bn_flags(relu)
        forward = _describe_bn(b, onednn.FORWARD_TRAINING, shape, dtype, eps, flags)
        x, c = b.image(shape, onednn.data_type(dtype)), b.memory(shape[1:2], onednn.F32)
        description = b.describe(
            "batch_normalization_backward", onednn.BACKWARD, x, x, x, c_float(eps), flags, forward,
            b.attributes(),
        )  # fmt: skip
        memories = {
            onednn.SRC: x, onednn.DIFF_DST: x, onednn.SCALE: c, onednn.MEAN: c, onednn.VARIANCE: c,
            onednn.DIFF_SRC: x, onednn.DIFF_SCALE: c, onednn.DIFF_SHIFT: c,
        }  # fmt: skip
        if relu:
            memories[onednn.WORKSPACE] = b.query(forward, onednn.QUERY_WORKSPACE)
        return b.primitive(description, memories)


def _plan_backward(
    x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float, saved: Any,
    axis: tuple[int, ...], relu: bool, out_gamma: HostArray | None = None, out_beta: HostArray | None = None,
    is_ours: bool = False,
) -> Any:  # fmt: skip
    """See numpy_normalization.bn_backward; without ``relu`` it ignores the mask: a fused forward works too."""
    if not onednn.is_available():
        return _backward_of_parent
    shape, dtype = _image_shape(x), x.dtype
    rows = _rows_as_images(shape)
    plain = _build_bn_backward(rows, dtype, eps, False)
    masked = _build_bn_backward(rows, dtype, eps, True) if relu and saved.dtype != np.bool_ else None
    are_dense, new = _is_dense_image(x) and _is_dense_image(gy), backend.allocator(shape, dtype)
    is_large = are_dense and gy.nbytes >= _LARGE_BYTES

    def bn_backward(
        x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float, saved: Any,
        axis: tuple[int, ...], relu: bool, out_gamma: HostArray | None = None, out_beta: HostArray | None = None,
        is_ours: bool = False,
    ) -> tuple[HostArray, HostArray, HostArray]:  # fmt: skip
        if relu and masked is None:
            gy = numpy_.relu_backward(saved, gy)
        image, g = (x, gy) if are_dense else (_as_image(x), _as_image(gy))
        scale, gx = _f32(gamma), g if is_ours and is_large and g.flags.writeable else new()
        ggamma, gbeta = _f32_target(out_gamma, scale), _f32_target(out_beta, scale)
        if masked is None:
            plain.on(image, g, scale, _f32(mean), _f32(var), gx, ggamma, gbeta)
        else:
            masked.on(image, g, scale, _f32(mean), _f32(var), gx, ggamma, gbeta, saved)
        gx = gx if are_dense else _shaped(x, gx)
        return gx, _delivered(ggamma, out_gamma, gamma), _delivered(gbeta, out_beta, gamma)

    return bn_backward


def _backward_of_parent(
    x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float, saved: Any,
    axis: tuple[int, ...], relu: bool, *rest: Any,
) -> tuple[HostArray, HostArray, HostArray]:  # fmt: skip
    """In a forked process, which leaves the library alone, of a graph from before the fork."""
    if relu:
        gy = numpy_.relu_backward(bn_mask(saved, gy.shape, gy.dtype), gy)
    return numpy_normalization.bn_backward(x, gamma, mean, var, gy, eps, None, axis, False, *rest)


def _f32_target(out: HostArray | None, like: HostArray) -> HostArray:
    if out is not None and out.dtype is _F32 and out.flags.c_contiguous:
        return out
    return np.empty(like.shape, np.float32)


def _delivered(value: HostArray, out: HostArray | None, like: HostArray) -> HostArray:
    if out is value:
        return value
    if out is None:
        return value.astype(like.dtype, copy=False)
    out[...] = value
    return out


def bn_mask(saved: Any, y_shape: tuple[int, ...], dtype: DType) -> HostArray:
    """1 where the ReLU let an element through, else 0; oneDNN keeps a bit or a byte of each, in the order of memory."""
    if saved.dtype == np.bool_:
        return saved.astype(dtype)
    count = prod(y_shape)
    flags = saved[:count] if saved.size >= count else np.unpackbits(saved, count=count, bitorder="little")
    mask = backend.empty(y_shape, dtype)
    memory_row(mask)[...] = flags
    return mask


# oneDNN has no kernels for the parts, but those for the whole give them; what they compute beside is dropped.


def _plan_statistics(x: HostArray, axis: tuple[int, ...]) -> Callable[..., Array]:
    """See numpy_normalization.bn_statistics."""
    ones = np.ones(x.shape[1], np.float32)
    forward = _plan_forward(x, ones, ones, _EPS, axis, False)
    return lambda x, axis: forward(x, ones, ones, _EPS, axis, False)[1:3]


def _plan_sums(
    x: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float, axis: tuple[int, ...]
) -> Callable[..., Array]:
    """See numpy_normalization.bn_sums."""
    _check(x, axis)
    ones = np.ones(x.shape[1], np.float32)
    backward = _plan_backward(x, ones, mean, var, gy, eps, None, axis, False)
    return lambda x, mean, var, gy, eps, axis: backward(x, ones, mean, var, gy, eps, None, axis, False)[1:]


def _check(x: HostArray, axis: tuple[int, ...]) -> None:
    onednn.require(x)
    if (x.ndim, axis) not in ((4, (0, 2, 3)), (2, (0,))):
        raise onednn.Unsupported(f"axes {axis} of {x.ndim}")


def _image_shape(x: HostArray) -> tuple[int, ...]:
    return x.shape if x.ndim == 4 else (*x.shape, 1, 1)


def _rows_as_images(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Each row as an image of its own, which is the same memory: 0.75 to 0.95 of the backward pass's time for images of
    6 MB and more with 128 channels and more, 0.9 of the forward pass's with 25 MB and 256, and no difference for
    others. On one thread the numbers are the same; several threads divide rows otherwise than images.
    """
    n, c, h, w = shape
    return n * h, c, 1, w


ROWS = {
    "bn_statistics": _plan_statistics,
    "bn_sums": _plan_sums,
    "bn_forward": _plan_forward,
    "bn_inference": _plan_inference,
    "bn_again": _plan_again,
    "rectified_sum": _plan_rectified_sum,
    "bn_backward": _plan_backward,
    "bn_mask": lambda saved: bn_mask,
}


# ---- images in C order, plane after plane, as a user's own arrays are: compiled loops take half of the time that it
# takes to bring them to the layout above and back

_FEW = 1 << 13  # elements, up to which nothing is gained


def _run_planes(name: str, *arrays: HostArray, eps: float) -> tuple[HostArray, ...]:
    """What a loop makes of images, the first array, and what belongs to them."""
    n, c, h, w = arrays[0].shape
    made = loops.rows_of(name, arrays, (n * h * w, c, h * w, eps))
    if made is None:
        raise RuntimeError(f"{name}: the compiled loop does not take arrays that its plan was made for")
    return made


def _check_planes(x: HostArray, axis: tuple[int, ...]) -> None:
    """Raise Unsupported unless x are images whose planes lie dense, and that oneDNN would have to copy."""
    if loops.runs("normalize_planes") and type(x) is np.ndarray and x.dtype == _F32 and x.ndim == 4 and x.size >= _FEW:
        is_plain = x.flags.c_contiguous and not backend.is_channels_last(x) and not backend.lies_as_images(x)
        if is_plain and axis == (0, 2, 3):
            return
    raise onednn.Unsupported("other arrays than images of float32 in planes")


def _dense(a: HostArray) -> HostArray:
    return np.require(a, _F32, "CAE")


def _vector(a: HostArray) -> HostArray:
    return _dense(a).reshape(-1)


def _planes_forward(
    x: HostArray, gamma: HostArray, beta: HostArray, eps: float, axis: tuple[int, ...], relu: bool
) -> tuple[HostArray, HostArray, HostArray, Any]:
    """See numpy_normalization.bn_forward; saved is where the ReLU let elements through."""
    y, mean, var = _run_planes("normalize_planes", _dense(x), _vector(gamma), _vector(beta), eps=eps)
    y = y.reshape(x.shape)
    if not relu:
        return y, mean, var, None
    y = numpy_.relu_forward(y)
    return y, mean, var, y != 0


def _planes_inference(
    x: HostArray, gamma: HostArray, beta: HostArray, mean: HostArray, var: HostArray, eps: float,
    axis: tuple[int, ...], relu: bool, out: HostArray | None = None,
) -> HostArray:  # fmt: skip
    """See numpy_normalization.bn_inference."""
    (y,) = _run_planes("apply_to_planes", _dense(x), *map(_vector, (gamma, beta, mean, var)), eps=eps)
    y = y.reshape(x.shape)
    if relu:
        y = numpy_.relu_forward(y)
    if out is None:
        return y
    out[...] = y
    return out


def _planes_backward(
    x: HostArray, gamma: HostArray, mean: HostArray, var: HostArray, gy: HostArray, eps: float, saved: Any,
    axis: tuple[int, ...], relu: bool, out_gamma: HostArray | None = None, out_beta: HostArray | None = None,
    is_ours: bool = False,
) -> tuple[HostArray, HostArray, HostArray]:  # fmt: skip
    """See numpy_normalization.bn_backward."""
    if relu:
        gy = numpy_.relu_backward(saved, gy)
    gx, *vectors = _run_planes(
        "normalize_planes_backward", _dense(x), _dense(gy), *map(_vector, (gamma, mean, var)), eps=eps
    )
    given = [_delivered(v, out, gamma) for v, out in zip(vectors, (out_gamma, out_beta))]
    return gx.reshape(x.shape), given[0], given[1]


def _plan_planes(run: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A plan where the images and the axes, the argument at ``place``, are such."""

    def plan(x: HostArray, *rest: Any) -> Callable[..., Any]:
        _check_planes(x, rest[place - 1])
        return run

    return plan


PLANE_ROWS: dict[str, Callable[..., Any]] = {
    "bn_forward": _plan_planes(_planes_forward, 4),
    "bn_inference": _plan_planes(_planes_inference, 6),
    "bn_backward": lambda *arguments: _planes_backward,
    "bn_mask": lambda saved: bn_mask,
}
