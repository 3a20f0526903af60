"""The provider ``onednn``: float32, and bfloat16 where the processor has instructions for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.kernels import onednn
from dbrdist.kernels.geometry import PoolGeometry
from dbrdist.kernels.onednn_convolution import conv_backward_data, conv_backward_weight, conv_forward
from dbrdist.kernels.onednn_elementwise import add, add_relu, relu_backward, relu_forward
from dbrdist.kernels.onednn_matmul import matmul
from dbrdist.kernels.onednn_normalization import bn_backward, bn_forward, bn_inference
from dbrdist.kernels.onednn_pooling import pool_backward, pool_forward, pool_indices

__all__ = [
    "add",
    "add_relu",
    "bn_backward",
    "bn_forward",
    "bn_inference",
    "conv_backward_data",
    "conv_backward_weight",
    "conv_forward",
    "matmul",
    "pool_backward",
    "pool_forward",
    "pool_indices",
    "relu_backward",
    "relu_forward",
    "serves",
]

Array = np.ndarray

_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library
_SMALL_PRODUCT = 1 << 19  # multiplications


def serves(kernel: str, x: Array, geometry: Any = None) -> bool:
    """Can this provider take ``kernel`` for arrays like ``x``? A cheap test; building may still say Unsupported."""
    if type(x) is not np.ndarray or x.dtype.name not in onednn.TYPES or not x.size:
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
