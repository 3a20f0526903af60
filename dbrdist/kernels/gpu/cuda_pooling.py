"""Pooling on a GPU: own kernels over channels-last memory; of a maximum its place in the window is kept, in a byte."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.types import Array, Shape
from dbrdist.kernels.cpu.onednn import Unsupported
from dbrdist.kernels.geometry import PoolGeometry
from dbrdist.kernels.gpu import cuda_source
from dbrdist.kernels.reference import numpy_

if TYPE_CHECKING:
    from collections.abc import Callable

_TYPES = ("float32", "float16", "bfloat16")
_BYTE, _INT = np.dtype(np.uint8), np.dtype(np.int32)
_C_TYPES = {_BYTE: "unsigned char", _INT: "int"}


def _numbers(x_shape: Shape, y_shape: Shape, g: PoolGeometry) -> tuple[Any, ...]:
    """What the kernels ask for after the number of threads."""
    (_, c, h, w), (p, q) = x_shape, y_shape[2:]
    return tuple(map(np.int32, (h, w, c, p, q, g.kh, g.kw, g.sh, g.sw, g.ph, g.pw)))


def _index_type(g: PoolGeometry) -> Any:
    return _BYTE if g.kh * g.kw <= 256 else _INT


def _plan_forward(x: Array, geometry: PoolGeometry) -> Any:
    """See numpy_.pool_forward."""
    cuda_source.require(x)
    if x.dtype.name not in _TYPES:
        raise Unsupported("another type")
    dtype, y_shape = x.dtype, (*x.shape[:2], *geometry.out_hw(*x.shape[2:]))
    width, index_type = cuda_source.pack(x.shape[1]), _index_type(geometry)
    size, numbers = prod(y_shape) // width, _numbers(x.shape, y_shape, geometry)
    (grid, block), new = cuda_source.over(size), cuda_source.images(y_shape, dtype)
    if geometry.kind == "max":
        run = cuda_source.kernel("pooling", "max_forward", dtype, width, _C_TYPES[index_type])
        new_index = cuda_source.images(y_shape, index_type)
    else:
        run, new_index = cuda_source.kernel("pooling", "average_forward", dtype, width), None

    def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
        x, y = cuda_source.aligned_images(x)(x), new()
        index = None if new_index is None else new_index()
        run(grid, block, (x, y, size, *numbers) if index is None else (x, y, index, size, *numbers))
        return y, index

    return pool_forward


def _plan_backward(gy: Array, x_shape: Shape, saved: Any, geometry: PoolGeometry) -> Callable[..., Array]:
    """See numpy_.pool_backward."""
    cuda_source.require_here(gy, saved)
    if not gy.size or gy.dtype.name not in _TYPES:  # of another type or shape than forward's
        return lambda gy, x_shape, saved, geometry: numpy_.pool_backward(gy, x_shape, _rows_first(saved), geometry)
    dtype, width, x_shape = gy.dtype, cuda_source.pack(x_shape[1]), tuple(x_shape)
    is_max, index_type = int(saved is not None), _INT if saved is None else saved.dtype
    run = cuda_source.kernel("pooling", "backward", dtype, width, _C_TYPES[index_type], is_max)
    size, numbers = prod(x_shape) // width, _numbers(x_shape, gy.shape, geometry)
    (grid, block), new = cuda_source.over(size), cuda_source.images(x_shape, dtype)

    def pool_backward(gy: Array, x_shape: Shape, saved: Any, geometry: PoolGeometry) -> Array:
        gx, index = new(), cuda_source.NULL if saved is None else saved
        run(grid, block, (cuda_source.aligned_images(gy)(gy), index, gx, size, *numbers))
        return gx

    return pool_backward


def _rows_first(saved: Any) -> Any:
    """Places as NumPy's kernel keeps them."""
    return None if saved is None else saved.transpose(0, 2, 3, 1)


def _pool_indices(saved: Any, y_shape: Shape, geometry: PoolGeometry) -> Array:
    """See numpy_.pool_indices."""
    index: Array = saved.astype(np.int32)
    return index


# ---- means of whole images: one window


_MOST_PIXELS = 1 << 10  # one thread adds them up


def _whole(shape: Shape) -> PoolGeometry:
    h, w = shape[2:]
    if not 0 < h * w <= _MOST_PIXELS:
        raise Unsupported("large images")
    return PoolGeometry("average", h, w, h, w)


def _plan_mean(x: Array) -> Callable[[Array], Array]:
    """See device_dispatch.mean_of_images."""
    geometry = _whole(x.shape)
    pool, shape = _plan_forward(x, geometry), x.shape[:2]

    def mean_of_images(x: Array) -> Array:
        y: Array = pool(x, geometry)[0].reshape(shape)
        return y

    return mean_of_images


def _plan_mean_backward(gy: Array, x_shape: Shape) -> Callable[[Array, Shape], Array]:
    """See device_dispatch.mean_of_images_backward."""
    geometry, shape = _whole(x_shape), (*x_shape[:2], 1, 1)
    cuda_source.require(gy)
    if gy.dtype.name not in _TYPES or not gy.flags.c_contiguous:
        raise Unsupported("another type, or a gradient with gaps")
    spread = _plan_backward(gy.reshape(shape), x_shape, None, geometry)
    return lambda gy, x_shape: spread(gy.reshape(shape), x_shape, None, geometry)


ROWS = {
    "mean_of_images": _plan_mean,
    "mean_of_images_backward": _plan_mean_backward,
    "pool_forward": _plan_forward,
    "pool_backward": _plan_backward,
    "pool_indices": lambda *arguments: _pool_indices,
}
