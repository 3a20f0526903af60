"""Convolutions on cuDNN, with sums in float32.

Activations are channels-last. Weights are plain OIHW and are brought to OHWI at each call, in the type of the
activations; those of 1x1 kernels lie so already. Images of a few channels get more, which are zero, because the kernels
for tensor cores want 16 bytes in a pixel: at least 4 of float32, or 8 of 16 bits.

``config.use_cudnn_tensor_core`` decides about float32: 'always' lets it be multiplied as TF32, with 10 bits of mantissa
instead of 23; 'auto', as in Chainer, and 'never' do not. 16-bit types have tensor cores unless it says 'never'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from numpy import dtype as dtype_of
from numpy import float32, int32
from numpy.typing import DTypeLike

from dbrdist.core.array.config import config
from dbrdist.core.array.types import Array, DType, Shape
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.geometry import ConvGeometry
from dbrdist.kernels.gpu import cuda_layout, cuda_source, cudnn
from dbrdist.kernels.gpu.cuda_layout import FilterLayout, FilterPiece
from dbrdist.kernels.gpu.cudnn import Graph, Notes
from dbrdist.kernels.reference.numpy_ import plain_empty

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Kept
    from dbrdist.core.model.weight_copies import Reader


_FEWEST_BYTES = 16  # in a pixel
_F32 = dtype_of(float32)


def notes(dtype: Any) -> Notes:
    """What the switches of this thread allow for a type."""
    use = config.use_cudnn_tensor_core
    allows = use == "always" or (use == "auto" and dtype.itemsize == 2)
    return Notes(allows, config.cudnn_deterministic)


def _require(W_shape: Shape, *arrays: Array) -> None:
    if config.use_cudnn == "never":
        raise Unsupported("config.use_cudnn is 'never'")
    cudnn.require(*arrays)
    if 0 in W_shape:
        raise Unsupported("weights without elements")


def describe(
    graph: Graph, direction: str, x_shape: Shape, W_shape: Shape, y_shape: Shape, g: ConvGeometry,
    rectifies: bool = False,
) -> Graph:  # fmt: skip
    """One direction of a convolution: 'forward' of x, W, y; 'data' of gy, W, gx; 'weight' of x, gy, gW.

    'sums' is 'forward', and the sums of y and of its squares in each channel. ``rectifies``: after x come a factor and
    a summand for each of its channels, and the ReLU of x times the one plus the other takes the place of x.
    """
    below = [
        max(p, (o - 1) * s + (k - 1) * d + 1 - size - p)
        for p, o, s, k, d, size in zip((g.ph, g.pw), y_shape[2:], (g.sh, g.sw), W_shape[2:], (g.dh, g.dw), x_shape[2:])
    ]
    window = {
        "pre_padding": [g.ph, g.pw], "post_padding": below, "stride": [g.sh, g.sw], "dilation": [g.dh, g.dw],
    }  # fmt: skip
    if direction == "data":
        gx = graph.graph.conv_dgrad(loss=graph.image(y_shape), filter=graph.image(W_shape), **window)
        graph.result(gx, x_shape)
        return graph
    x = graph.rectified(graph.image(x_shape), x_shape[1]) if rectifies else graph.image(x_shape)
    if direction == "weight":
        gW = graph.graph.conv_wgrad(image=x, loss=graph.image(y_shape), **window)
        graph.result(gW, W_shape)
        return graph
    y = graph.graph.conv_fprop(image=x, weight=graph.image(W_shape), **window)
    graph.result(y, y_shape)
    if direction == "sums":
        for sums in graph.graph.genstats(input=y):
            graph.result(sums, (1, y_shape[1], 1, 1), is_wide=True)
    return graph


def _build(direction: str, dtype: DTypeLike, *description: Any) -> Callable[..., None]:
    return describe(Graph(dtype), direction, *description).build(notes(dtype))


# ---- layouts


def _padded_channels(x_shape: Shape, dtype: DType, geometry: ConvGeometry) -> int:
    """How many channels images get that have few."""
    c, fewest = x_shape[1], _FEWEST_BYTES // dtype.itemsize
    return max(c, fewest) if geometry.groups == 1 else c


def _images(x: Array, channels: int) -> Callable[[Array], Array]:
    """A function from arrays like x to channels-last ones with so many channels."""
    n, c, h, w = x.shape
    if channels == c:
        return cuda_source.aligned_images(x)
    shape, dtype, strides = (n, channels, h, w), x.dtype, [s // x.itemsize for s in x.strides]
    size = prod(shape)
    grid, block = cuda_source.over(size)
    widen, new = cuda_source.kernel("layout", "widen", dtype, dtype), cuda_source.images(shape, dtype)

    def widened(x: Array) -> Array:
        out = new()
        widen(grid, block, (x, out, size, *map(int32, (c, h, w, channels)), *strides))
        return out

    return widened


def _filters(W: Array, dtype: DTypeLike, channels: int) -> Callable[[Array], Array]:
    """A function from weights like W to their OHWI memory in a type, with so many channels."""
    o, i, kh, kw = W.shape
    is_plain = W.flags.c_contiguous
    if channels == i and _lies_well(W, dtype):
        return lambda W: W if is_plain and cuda_source.is_aligned(W) else _plain(W)
    layout = FilterLayout(W.dtype, dtype, (o, i, kh * kw, channels))
    return layout if is_plain else lambda W: layout(_plain(W))


def _lies_well(W: Array, dtype: Any) -> bool:
    """Is W, in C order, what cuDNN reads in this type?"""
    return bool(W.shape[2] * W.shape[3] == 1 and W.dtype == dtype)


def _plain(W: Array) -> Array:
    """A copy in C order."""
    dense = plain_empty(W.shape, W.dtype, W)
    dense[...] = W
    return dense


# ---- rows


def _plan_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Any:
    """See numpy_.conv_forward."""
    inner = _plan_product(x, W, b, geometry)

    def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
        return _shifted(inner(x, W, None), b)

    return conv_forward


def _plan_forward_and_keep(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, copy: Reader | None) -> Any:
    """See device_dispatch.conv_forward_and_keep. Weights that get more channels serve forward alone."""
    image, run, new = _plan_laid_product(x, W, b, geometry)
    channels = _padded_channels(x.shape, x.dtype, geometry)
    is_widened = channels != x.shape[1]
    is_kept = not is_widened and not _lies_well(W, x.dtype)

    filters = _filters(W, x.dtype, channels // geometry.groups)
    is_copied = isinstance(filters, FilterLayout)

    def conv_forward_and_keep(
        x: Array, W: Array, b: Array | None, geometry: ConvGeometry, copy: Reader | None
    ) -> tuple[Array, Any, Any]:
        laid, seen, y = filters(W) if copy is None or not is_copied else copy(W, filters), image(x), new()
        run(seen.data.ptr, laid.data.ptr, y.data.ptr)
        return y if b is None else _shifted(y, b), laid if is_kept else None, seen if is_widened else None

    return conv_forward_and_keep


def _plan_inference(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Kept) -> Any:
    """See numpy_.conv_inference."""
    inner = _plan_product(x, W, b, geometry)

    def conv_inference(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Any) -> Array:
        return _shifted(inner(x, W, kept), b)

    return conv_inference


def _plan_product(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Callable[[Array, Array, Any], Array]:
    """x * W, of weights that are turned at each call, or of those in ``kept``."""
    image, run, new = _plan_laid_product(x, W, b, geometry)
    filters = _filters(W, x.dtype, _padded_channels(x.shape, x.dtype, geometry) // geometry.groups)

    def product(x: Array, W: Array, kept: Any) -> Array:
        maker, weights = (None, None) if kept is None else kept.made
        if maker is not filters:
            weights = filters(W)
            if kept is not None:
                kept.made = filters, weights
        seen, y = image(x), new()
        run(seen.data.ptr, weights.data.ptr, y.data.ptr)
        return y

    return product


def _plan_laid_product(
    x: Array, W: Array, b: Array | None, geometry: ConvGeometry
) -> tuple[Callable[[Array], Array], Callable[..., None], Callable[[], Array]]:
    """How images are laid out, their product with weights as ``_filters`` lays them out, and what makes room for it."""
    _require(W.shape, x)
    cuda_source.require(W, b)
    dtype, channels = x.dtype, _padded_channels(x.shape, x.dtype, geometry)
    y_shape = (x.shape[0], W.shape[0], *geometry.out_hw(*x.shape[2:], *W.shape[2:]))
    x_shape, W_shape = (x.shape[0], channels, *x.shape[2:]), (W.shape[0], channels // geometry.groups, *W.shape[2:])
    run = _build("forward", dtype, x_shape, W_shape, y_shape, geometry)
    return _images(x, channels), run, cuda_source.images(y_shape, dtype)


def _shifted(y: Array, b: Array | None) -> Array:
    if b is not None:
        rows = y.transpose(0, 2, 3, 1)
        rows += b
    return y


def _plan_backward_data(gy: Array, W: Array, x_shape: Shape, geometry: ConvGeometry) -> Any:
    """See numpy_.conv_backward_data."""
    inner = _plan_backward_data_as_laid(gy, W, x_shape, geometry, None)
    filters = _filters(W, gy.dtype, W.shape[1])

    def conv_backward_data(gy: Array, W: Array, x_shape: Shape, geometry: ConvGeometry) -> Array:
        return inner(gy, W, x_shape, geometry, filters(W))

    return conv_backward_data


def _plan_backward_data_as_laid(
    gy: Array, W: Array, x_shape: Shape, geometry: ConvGeometry, laid: Array | None
) -> Callable[..., Array]:
    """See device_dispatch.conv_backward_data_as_laid; ``laid`` has the type of gy."""
    _require(W.shape, gy)
    cuda_source.require(W)
    if 0 in x_shape:
        raise Unsupported("an empty result")
    dtype, x_shape = gy.dtype, tuple(x_shape)
    run = _build("data", dtype, x_shape, W.shape, gy.shape, geometry)
    image, new = _images(gy, gy.shape[1]), cuda_source.images(x_shape, dtype)

    def conv_backward_data_as_laid(gy: Array, W: Array, x_shape: Shape, geometry: ConvGeometry, laid: Array) -> Array:
        gx, seen = new(), image(gy)
        run(seen.data.ptr, laid.data.ptr, gx.data.ptr)
        return gx

    return conv_backward_data_as_laid


def _plan_backward_weight(
    x: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, dtype: DType, out: Array | None
) -> Any:
    """See numpy_.conv_backward_weight. The sums run in float32 and are narrowed to the type of x, then cast."""
    _require(W_shape, x, gy)
    cuda_source.require(out)
    own, target, W_shape = x.dtype, dtype if out is None else out.dtype, tuple(W_shape)
    o, i, kh, kw = W_shape
    channels = _padded_channels(x.shape, own, geometry)
    inside = (o, channels // geometry.groups, kh, kw)
    run = _build("weight", own, (x.shape[0], channels, *x.shape[2:]), inside, gy.shape, geometry)
    image, gradient = _images(x, channels), _images(gy, gy.shape[1])
    is_direct = kh * kw == 1 and inside == W_shape and target == own
    size, numbers = prod(W_shape), tuple(map(int32, (i, kh * kw, inside[1])))
    grid, block = cuda_source.over(size)
    turn = None if is_direct else cuda_source.kernel("layout", "to_plain", own, target)
    new, new_inside = cuda_source.plain(W_shape, target), cuda_source.plain((prod(inside),), own)

    def conv_backward_weight(
        x: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, dtype: DTypeLike, out: Array | None
    ) -> Array:
        if out is not None and not (out.flags.c_contiguous and cuda_source.is_aligned(out)):
            out[...] = conv_backward_weight(x, gy, W_shape, geometry, dtype, None).reshape(out.shape)
            return out
        if out is None:
            out = new()
        memory = out if turn is None else new_inside()
        seen, g = image(x), gradient(gy)
        run(seen.data.ptr, g.data.ptr, memory.data.ptr)
        if turn is not None:
            turn(grid, block, (memory, out, size, *numbers))
        return out

    return conv_backward_weight


def _plan_backward_weight_later(
    x: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, out: Array
) -> Callable[..., tuple[Any, FilterPiece]]:
    """See device_dispatch.conv_backward_weight_later."""
    _require(W_shape, x, gy)
    cuda_source.require(out)
    own, (o, i, kh, kw) = x.dtype, W_shape
    channels = _padded_channels(x.shape, own, geometry)
    inside = (o, channels // geometry.groups, kh, kw)
    if kh * kw == 1 and inside == tuple(W_shape) and out.dtype == own:
        raise Unsupported("a gradient that cuDNN writes where it belongs")
    if not out.flags.c_contiguous:
        raise Unsupported("room in another order")
    run = _build("weight", own, (x.shape[0], channels, *x.shape[2:]), inside, gy.shape, geometry)
    image, gradient = _images(x, channels), _images(gy, gy.shape[1])
    new, numbers = cuda_source.plain((prod(inside),), own), (i, kh * kw, inside[1])
    writer = cuda_layout.to_plain(cuda_source.current_device(), own, out.dtype)

    def conv_backward_weight_later(
        x: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, out: Array
    ) -> tuple[Any, FilterPiece]:
        memory, seen, g = new(), image(x), gradient(gy)
        run(seen.data.ptr, g.data.ptr, memory.data.ptr)
        return writer, FilterPiece(memory, out, numbers)

    return conv_backward_weight_later


# ---- convolutions that do more than convolve


_FUSIBLE = 8  # channels at a time: cuDNN 9.19 and 9.28 have such kernels for multiples of it alone, and for float16
_said: list[str] = []  # why there is no such kernel, which is said once


def _build_fused(
    dtype: DType, direction: str, x_shape: Shape, W_shape: Shape, y_shape: Shape, g: ConvGeometry, rectifies: bool
) -> Callable[..., None]:
    """As ``_build``, for float16 without groups."""
    if dtype.name != "float16" or g.groups != 1 or x_shape[1] % _FUSIBLE or W_shape[0] % _FUSIBLE:
        raise Unsupported("another type, groups, or other numbers of channels")
    try:
        return _build(direction, dtype, x_shape, W_shape, y_shape, g, rectifies)
    except Unsupported as e:
        if not _said:
            _said.append(str(e).splitlines()[0])
            words = f"config.fused_convolutions has no effect on some blocks: {_said[0]}"
            warnings.warn(words, RuntimeWarning, stacklevel=2)
        raise


def _plan_and_sums(x: Array, W: Array, geometry: ConvGeometry, affine: Array | None, copy: Reader | None) -> Any:
    """See fused_dispatch.conv_and_sums."""
    _require(W.shape, x)
    cuda_source.require(W, affine)
    dtype, size, rectifies = x.dtype, W.shape[0], affine is not None
    y_shape = (x.shape[0], size, *geometry.out_hw(*x.shape[2:], *W.shape[2:]))
    run = _build_fused(dtype, "sums", x.shape, W.shape, y_shape, geometry, rectifies)
    image, new = _images(x, x.shape[1]), cuda_source.images(y_shape, dtype)
    new_sums = cuda_source.plain((2, size), _F32)
    filters, is_kept = _filters(W, dtype, W.shape[1]), not _lies_well(W, dtype)
    is_copied, to_squares, to_summands = isinstance(filters, FilterLayout), 4 * size, x.shape[1] * dtype.itemsize

    def conv_and_sums(
        x: Array, W: Array, geometry: ConvGeometry, affine: Array | None, copy: Reader | None
    ) -> tuple[Array, Array, Array | None]:
        laid = filters(W) if copy is None or not is_copied else copy(W, filters)
        seen, y, sums = image(x), new(), new_sums()
        of_x = () if affine is None else (affine.data.ptr, affine.data.ptr + to_summands)
        run(seen.data.ptr, *of_x, laid.data.ptr, y.data.ptr, sums.data.ptr, sums.data.ptr + to_squares)
        return y, sums, laid if is_kept else None

    return conv_and_sums


def _plan_backward_weight_rectified(
    x: Array, affine: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, out: Array
) -> Callable[..., tuple[Any, FilterPiece | None]]:
    """See fused_dispatch.conv_backward_weight_rectified."""
    _require(W_shape, x, gy)
    cuda_source.require(out, affine)
    own, (o, i, kh, kw) = x.dtype, W_shape
    run = _build_fused(own, "weight", x.shape, tuple(W_shape), gy.shape, geometry, True)
    if not out.flags.c_contiguous:
        raise Unsupported("room in another order")
    image, gradient, to_summands = _images(x, i), _images(gy, o), i * own.itemsize
    new, numbers = cuda_source.plain((prod(W_shape),), own), (i, kh * kw, i)
    is_direct = kh * kw == 1 and out.dtype == own
    writer = cuda_layout.to_plain(cuda_source.current_device(), own, out.dtype)

    def conv_backward_weight_rectified(
        x: Array, affine: Array, gy: Array, W_shape: Shape, geometry: ConvGeometry, out: Array
    ) -> tuple[Any, FilterPiece | None]:
        at_once = is_direct and cuda_source.is_aligned(out)
        memory, seen, g, start = out if at_once else new(), image(x), gradient(gy), affine.data.ptr
        run(seen.data.ptr, start, start + to_summands, g.data.ptr, memory.data.ptr)
        return (None, None) if at_once else (writer, FilterPiece(memory, out, numbers))

    return conv_backward_weight_rectified


ROWS = {
    "conv_and_sums": _plan_and_sums,
    "conv_backward_weight_rectified": _plan_backward_weight_rectified,
    "conv_backward_weight_later": _plan_backward_weight_later,
    "conv_forward": _plan_forward,
    "conv_forward_and_keep": _plan_forward_and_keep,
    "conv_inference": _plan_inference,
    "conv_backward_data": _plan_backward_data,
    "conv_backward_data_as_laid": _plan_backward_data_as_laid,
    "conv_backward_weight": _plan_backward_weight,
}
