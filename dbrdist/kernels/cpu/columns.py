"""Small convolutions as one gather and one product of BLAS: no weights are reordered, and few calls are made.

Legend: P output pixels of the batch, K = C kh kw elements in a window. The columns (P, K) are gathered from
channels-last memory in the order of the weights (O, K), which are used as they lie. With 4 pixels and 64 channels the
three directions take 27 us together where oneDNN's take 53, most of it for reorders of the weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy import ndarray

from dbrdist.core.array import backend
from dbrdist.core.array.backend import channels_last, is_channels_last
from dbrdist.core.array.types import DType, HostArray, Shape
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.geometry import ConvGeometry

# Elements of the columns; beyond, oneDNN takes less time: for 16 pixels and 32 channels, 4608 elements, the three
# directions take 24 us here and 36 us there, for 64 pixels and 16 channels, 9216 elements, 33 and 28.
_LARGEST = 3 << 11
_take, _dot, _add = ndarray.take, ndarray.dot, np.add.reduce


def _see_types(x: HostArray, dtype: DType, geometry: ConvGeometry) -> None:
    """Raise Unsupported unless one product of BLAS does it."""
    is_plain = type(x) is ndarray and x.dtype.char in "fd" and x.dtype.isnative and dtype == x.dtype
    if not is_plain or geometry.groups > 1 or not x.size:
        raise onednn.Unsupported("other types, several groups, or nothing to compute")


def _see_size(y_shape: Shape, W_shape: Shape) -> None:
    n, o, oh, ow = y_shape
    _, c, kh, kw = W_shape
    if not 0 < n * oh * ow * c * kh * kw <= _LARGEST or not o:
        raise onednn.Unsupported("a large convolution")


@lru_cache(maxsize=64)
def _gather(x_shape: Shape, kernel: Shape, out_hw: Shape, g: ConvGeometry) -> tuple[HostArray, bool]:
    """Where each element of the columns (P, K) lies in channels-last x, x.size for padding; and if there is any."""
    (n, c, h, w), (kh, kw), (oh, ow) = x_shape, kernel, out_hw
    i, ci, u, v = (np.arange(m) for m in (n, c, kh, kw))
    rows = (np.arange(oh) * g.sh - g.ph)[:, None, None, None, None] + (u * g.dh)[:, None]
    cols = (np.arange(ow) * g.sw - g.pw)[:, None, None, None] + v * g.dw
    index = ((i[:, None, None, None, None, None] * h + rows) * w + cols) * c + ci[:, None, None]
    inside = (rows >= 0) & (rows < h) & (cols >= 0) & (cols < w)
    index = np.where(inside, index, n * c * h * w).reshape(n * oh * ow, c * kh * kw).astype(np.intp)
    index.flags.writeable = False
    return index, not inside.all()


@lru_cache(maxsize=64)
def _scatter(x_shape: Shape, kernel: Shape, out_hw: Shape, g: ConvGeometry) -> HostArray:
    """The transpose of :func:`_gather`: for each element of x the columns' elements that it became, (T, x.size).

    T is the largest number of windows that see one element; columns.size stands for none.
    """
    index, _ = _gather(x_shape, kernel, out_hw, g)
    size, flat = int(np.prod(x_shape)), index.reshape(-1)
    order = np.argsort(flat, kind="stable")
    order = order[: np.searchsorted(flat[order], size)]
    counts = np.bincount(flat[order], minlength=size)
    places = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    back = np.full((max(int(counts.max()), 1), size), flat.size, np.intp)
    back[places, flat[order]] = order
    back.flags.writeable = False
    return back


def _columns(x: HostArray, W_shape: Shape, out_hw: Shape, geometry: ConvGeometry) -> Any:
    """A function from arrays like x to their columns, in memory of its own."""
    index, is_padded = _gather(x.shape, W_shape[2:], out_hw, geometry)
    columns, padded, is_dense = np.empty(index.shape, x.dtype), np.zeros(x.size + 1, x.dtype), is_channels_last(x)
    inner = padded[:-1]

    def gather(x: HostArray) -> HostArray:
        row = (x if is_dense else channels_last(x)).transpose(0, 2, 3, 1).reshape(-1)
        if is_padded:
            inner[...] = row
            row = padded
        return _take(row, index, None, columns, "clip")

    return gather


def _plan_forward(x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry) -> Any:
    """See numpy_.conv_forward."""
    _see_types(x, W.dtype, geometry)
    out_hw, width = geometry.out_hw(*x.shape[2:], *W.shape[2:]), W.shape[0]
    y_shape = (x.shape[0], width, *out_hw)
    _see_size(y_shape, W.shape)
    columns, new = _columns(x, W.shape, out_hw, geometry), backend.allocator(y_shape, x.dtype)
    count = x.shape[0] * out_hw[0] * out_hw[1]

    def conv_forward(x: HostArray, W: HostArray, b: HostArray | None, geometry: ConvGeometry) -> HostArray:
        y = new()
        rows = y.transpose(0, 2, 3, 1).reshape(count, width)
        _dot(columns(x), W.reshape(width, -1).T, rows)
        if b is not None:
            rows += b
        return y

    return conv_forward


def _plan_backward_data(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> Any:
    """See numpy_.conv_backward_data."""
    _see_types(gy, W.dtype, geometry)
    _see_size(gy.shape, W.shape)
    width = W.shape[0]
    back = _scatter(tuple(x_shape), W.shape[2:], gy.shape[2:], geometry)
    count = gy.size // width
    memory = np.zeros(count * (W.size // width) + 1, gy.dtype)
    columns, parts = memory[:-1].reshape(count, -1), np.empty(back.shape, gy.dtype)
    is_dense, new = is_channels_last(gy), backend.allocator(tuple(x_shape), gy.dtype)

    def conv_backward_data(gy: HostArray, W: HostArray, x_shape: Shape, geometry: ConvGeometry) -> HostArray:
        rows = (gy if is_dense else channels_last(gy)).transpose(0, 2, 3, 1).reshape(count, width)
        _dot(rows, W.reshape(width, -1), columns)
        gx = new()
        _add(_take(memory, back, None, parts, "clip"), 0, None, gx.transpose(0, 2, 3, 1).reshape(-1))
        return gx

    return conv_backward_data


def _plan_backward_weight(
    x: HostArray, gy: HostArray, W_shape: Shape, geometry: ConvGeometry, dtype: DType, out: HostArray | None
) -> Any:
    """See numpy_.conv_backward_weight."""
    target = dtype if out is None else out.dtype
    _see_types(x, target, geometry)
    if gy.dtype != x.dtype:
        raise onednn.Unsupported("several types")
    _see_size(gy.shape, W_shape)
    columns, new = _columns(x, W_shape, gy.shape[2:], geometry), backend.plain_allocator(tuple(W_shape), target)
    is_dense, width = is_channels_last(gy), W_shape[0]
    count = gy.size // width

    def conv_backward_weight(
        x: HostArray, gy: HostArray, W_shape: Shape, geometry: ConvGeometry, dtype: DType, out: HostArray | None
    ) -> HostArray:
        rows = (gy if is_dense else channels_last(gy)).transpose(0, 2, 3, 1).reshape(count, width)
        if out is None:
            out = new()
        _dot(rows.T, columns(x), out.reshape(width, -1))
        return out

    return conv_backward_weight


ROWS = {
    "conv_forward": _plan_forward,
    "conv_backward_data": _plan_backward_data,
    "conv_backward_weight": _plan_backward_weight,
}
