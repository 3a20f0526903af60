"""The reference kernels: plain array code for any float type, on NumPy and on CuPy arrays.

Legend: N batch, C channels in, O channels out, H W image, OH OW output, kh kw kernel, G groups, M rows of a matrix.
Arrays are NCHW by shape and channels-last in memory; inside, most code works on the NHWC view. float16 and bfloat16
are computed in float32 (``backend.accumulation_dtype``) and narrowed once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import is_channels_last
from dbrdist.core.array.elementwise import elementwise
from dbrdist.core.array.types import Array, DType, Module
from dbrdist.kernels.geometry import ConvGeometry, PoolGeometry
from dbrdist.kernels.reference import numpy_normalization, numpy_recurrent, numpy_softmax
from dbrdist.kernels.small_arrays.small_numpy import has_nan

if TYPE_CHECKING:
    from dbrdist.core.model.parameter import Kept

# ---- windows over an image


def _padded(x: Array, pad: tuple[int, int], rows: int, cols: int, value: float) -> Array:
    """``x`` (N, C, H, W) as an NHWC array in the accumulation type, padded to at least ``rows`` x ``cols``."""
    n, c, h, w = x.shape
    (ph, pw), x = pad, x.transpose(0, 2, 3, 1)
    rows, cols = max(rows, ph + h), max(cols, pw + w)
    dtype = backend.accumulation_dtype(x.dtype)
    if (rows, cols) == (h, w):
        return x.astype(dtype, copy=False)
    buffer = backend.full((n, c, rows, cols), value, dtype, x).transpose(0, 2, 3, 1)
    buffer[:, ph : ph + h, pw : pw + w] = x
    return buffer


def _columns(x: Array, geometry: ConvGeometry, kernel: tuple[int, int], out: tuple[int, int]) -> Array:
    """Image to columns: (G, M, kh * kw * C/G) with M = N * OH * OW; a view where the kernel is 1 x 1."""
    xp = backend.get_array_module(x)
    (kh, kw), (oh, ow), g = kernel, out, geometry
    padded = _padded(x, (g.ph, g.pw), (oh - 1) * g.sh + (kh - 1) * g.dh + 1, (ow - 1) * g.sw + (kw - 1) * g.dw + 1, 0)
    n, c = x.shape[:2]
    sn, sh, sw, sc = padded.strides
    shape = (n, oh, ow, kh, kw, g.groups, c // g.groups)
    strides = (sn, sh * g.sh, sw * g.sw, sh * g.dh, sw * g.dw, sc * (c // g.groups), sc)
    windows = xp.lib.stride_tricks.as_strided(padded, shape, strides)
    return windows.transpose(5, 0, 1, 2, 3, 4, 6).reshape(g.groups, n * oh * ow, kh * kw * (c // g.groups))


def _weight_matrix(W: Array, groups: int) -> Array:
    """(O, C/G, kh, kw) as (G, kh * kw * C/G, O/G), in the order of the columns."""
    o, c, kh, kw = W.shape
    grouped = W.reshape(groups, o // groups, c, kh, kw).transpose(0, 3, 4, 2, 1)
    return grouped.reshape(groups, kh * kw * c, o // groups).astype(backend.accumulation_dtype(W.dtype), copy=False)


def _grouped_rows(y: Array, groups: int) -> Array:
    """(N, O, OH, OW) as (G, M, O/G) in the accumulation type."""
    n, o, oh, ow = y.shape
    rows = y.transpose(0, 2, 3, 1).reshape(n * oh * ow, groups, o // groups).transpose(1, 0, 2)
    return rows.astype(backend.accumulation_dtype(y.dtype), copy=False)


def _deliver(nhwc: Array, dtype: DType) -> Array:
    """An NHWC array as a channels-last array of NCHW shape in ``dtype``."""
    return backend.channels_last(nhwc.transpose(0, 3, 1, 2).astype(dtype, copy=False))


# ---- convolution


def conv_forward(x: Array, W: Array, b: Array | None, geometry: ConvGeometry) -> Array:
    """y[n, o, i, j] = b[o] + sum over c, u, v of W[o, c, u, v] x[n, c, i s - p + u d, j s - p + v d]."""
    n, o = x.shape[0], W.shape[0]
    oh, ow = geometry.out_hw(*x.shape[2:], *W.shape[2:])
    y = _columns(x, geometry, W.shape[2:], (oh, ow)) @ _weight_matrix(W, geometry.groups)
    y = y.transpose(1, 0, 2).reshape(n, oh, ow, o)
    if b is not None:
        y = y + b
    return _deliver(y, x.dtype)


def conv_inference(x: Array, W: Array, b: Array | None, geometry: ConvGeometry, kept: Kept) -> Array:
    """As :func:`conv_forward`, of weights that stay; ``kept`` is where a provider may keep what it makes of them."""
    return conv_forward(x, W, b, geometry)


def conv_backward_data(gy: Array, W: Array, x_shape: tuple[int, ...], geometry: ConvGeometry) -> Array:
    """The gradient with respect to x; also the forward of a transposed convolution."""
    g = geometry
    (n, c, h, w), (oh, ow), (kh, kw) = x_shape, gy.shape[2:], W.shape[2:]
    columns = _grouped_rows(gy, g.groups) @ _weight_matrix(W, g.groups).transpose(0, 2, 1)
    columns = columns.reshape(g.groups, n, oh, ow, kh, kw, c // g.groups).transpose(4, 5, 1, 2, 3, 0, 6)
    columns = columns.reshape(kh, kw, n, oh, ow, c)
    rows = max((oh - 1) * g.sh + (kh - 1) * g.dh + 1, g.ph + h)
    cols = max((ow - 1) * g.sw + (kw - 1) * g.dw + 1, g.pw + w)
    gx = backend.zeros((n, c, rows, cols), columns.dtype, gy).transpose(0, 2, 3, 1)
    for u in range(kh):
        for v in range(kw):
            top, left = u * g.dh, v * g.dw
            gx[:, top : top + oh * g.sh : g.sh, left : left + ow * g.sw : g.sw][:, :oh, :ow] += columns[u, v]
    return _deliver(gx[:, g.ph : g.ph + h, g.pw : g.pw + w], gy.dtype)


def conv_backward_weight(
    x: Array, gy: Array, W_shape: tuple[int, ...], geometry: ConvGeometry, dtype: DType, out: Array | None = None
) -> Array:
    """The gradient with respect to W: plain OIHW memory of type ``dtype``, or ``out`` of any shape where given."""
    (o, c, kh, kw), groups = W_shape, geometry.groups
    columns = _columns(x, geometry, (kh, kw), gy.shape[2:])
    gW = columns.transpose(0, 2, 1) @ _grouped_rows(gy, groups)
    gW = gW.reshape(groups, kh, kw, c, o // groups).transpose(0, 4, 3, 1, 2)
    if out is None:
        out = plain_empty(W_shape, dtype, gy)
    out[...] = gW.reshape(out.shape)
    return out


def plain_empty(shape: tuple[int, ...], dtype: DType, like: Array) -> Array:
    """An uninitialised array in C order: weights are OIHW in memory too, unlike activations."""
    return backend.empty((prod(shape),), dtype, like).reshape(shape)


def _wide(a: Array, b: Array) -> DType:
    """The type in which the products of two arrays are summed."""
    return np.promote_types(backend.accumulation_dtype(a.dtype), backend.accumulation_dtype(b.dtype))


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """The product of two matrices, summed in the accumulation type, in the type of a or into ``out``."""
    xp, dtype = backend.get_array_module(a, b), _wide(a, b)
    if a.dtype == b.dtype == dtype:
        return xp.matmul(a, b, out=out)
    y = xp.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False))
    if out is None:
        return y.astype(a.dtype)
    out[...] = y
    return out


def linear(x: Array, W: Array, b: Array | None) -> Array:
    """x W^T + b, with sums in the accumulation type and one cast to the type of x."""
    dtype = _wide(x, W)
    y = x.astype(dtype, copy=False).dot(W.T.astype(dtype, copy=False))
    if b is not None:
        y += b.astype(dtype, copy=False)
    return y.astype(x.dtype, copy=False)


def column_sums(x: Array, dtype: DType, out: Array | None = None) -> Array:
    """The sums over the rows of a matrix."""
    y = x.astype(backend.accumulation_dtype(x.dtype), copy=False).sum(axis=0).astype(dtype, copy=False)
    if out is None:
        return y
    out[...] = y
    return out


def packed(b: Array, rows: int, is_often: bool) -> Callable[[Array, Array], None]:
    """A function of a and out that adds the product a b to out, summed in the accumulation type."""
    if not isinstance(b, np.ndarray) and b.dtype.itemsize == 2:  # CuPy sums 16-bit products in float32

        def add_narrow(a: Array, out: Array) -> None:
            out += a.dot(b)

        return add_narrow
    wide = b.astype(_wide(b, b), copy=False)

    def add_product(a: Array, out: Array) -> None:
        out += a.astype(wide.dtype, copy=False).dot(wide)

    return add_product


# ---- pooling


def pool_forward(x: Array, geometry: PoolGeometry) -> tuple[Array, Any]:
    """Returns y and, for the maximum, the position u * kw + v of the first largest element in each window."""
    xp, g = backend.get_array_module(x), geometry
    oh, ow = g.out_hw(*x.shape[2:])
    largest = g.kind == "max"
    rows, cols = (oh - 1) * g.sh + g.kh, (ow - 1) * g.sw + g.kw
    padded = _padded(x, (g.ph, g.pw), rows, cols, float("-inf") if largest else 0.0)
    y = index = None
    for position, window in enumerate(_shifted(padded, g, oh, ow)):
        if y is None:
            y = window.copy()
            index = xp.empty(y.shape, xp.int32)
            index[...] = xp.asarray(_first_pixels(g, x.shape[2:], oh, ow))
        elif largest:
            xp.copyto(index, position, where=~(window <= y) & (y == y))  # NaN counts as the largest
            xp.maximum(y, window, out=y)
        else:
            y += window
    if largest:
        return _deliver(y, x.dtype), index
    return _deliver(y / (g.kh * g.kw), x.dtype), None


def _first_pixels(g: PoolGeometry, hw: tuple[int, ...], oh: int, ow: int) -> Array:
    """The position in each window (OH, OW, 1) of the first pixel of the image, 0 where it sees none."""
    top, left = (np.arange(oh) * g.sh - g.ph)[:, None, None], (np.arange(ow) * g.sw - g.pw)[:, None]
    row, column = np.maximum(-top, 0), np.maximum(-left, 0)
    sees_one = (row < g.kh) & (top < hw[0]) & (column < g.kw) & (left < hw[1])
    return np.where(sees_one, row * g.kw + column, 0).astype(np.int32)


def _shifted(padded: Array, g: PoolGeometry, oh: int, ow: int) -> Any:
    """For each position in the window, the NHWC array of what all windows see there."""
    for u in range(g.kh):
        for v in range(g.kw):
            yield padded[:, u : u + oh * g.sh : g.sh, v : v + ow * g.sw : g.sw][:, :oh, :ow]


def pool_backward(gy: Array, x_shape: tuple[int, ...], saved: Array | None, geometry: PoolGeometry) -> Array:
    """The gradient with respect to x."""
    xp, g = backend.get_array_module(gy), geometry
    (n, c, h, w), (oh, ow) = x_shape, gy.shape[2:]
    rows, cols = max((oh - 1) * g.sh + g.kh, g.ph + h), max((ow - 1) * g.sw + g.kw, g.pw + w)
    wide = gy.transpose(0, 2, 3, 1).astype(backend.accumulation_dtype(gy.dtype), copy=False)
    gx = backend.zeros((n, c, rows, cols), wide.dtype, gy).transpose(0, 2, 3, 1)
    if g.kind != "max":
        wide = wide / (g.kh * g.kw)
    for position, window in enumerate(_shifted(gx, g, oh, ow)):
        window += wide if g.kind != "max" else xp.where(saved == position, wide, 0)
    return _deliver(gx[:, g.ph : g.ph + h, g.pw : g.pw + w], gy.dtype)


def pool_indices(saved: Array, y_shape: tuple[int, ...], geometry: PoolGeometry) -> Array:
    """Position in the window, u * kw + v, of each maximum: int32, NCHW shape."""
    return saved.transpose(0, 3, 1, 2)


def pool_gather(x: Array, indices: Array, geometry: PoolGeometry) -> Array:
    """What each window sees at ``indices`` (u * kw + v): the transpose of a maximum's pool_backward.

    A position in the padding gives zero.
    """
    xp, g = backend.get_array_module(x), geometry
    (n, c, h, w), (oh, ow) = x.shape, indices.shape[2:]
    row = indices // g.kw + (xp.arange(oh) * g.sh - g.ph)[:, None]
    col = indices % g.kw + xp.arange(ow) * g.sw - g.pw
    inside = (row >= 0) & (row < h) & (col >= 0) & (col < w)
    sample, channel = xp.arange(n)[:, None, None, None], xp.arange(c)[:, None, None]
    seen = x[sample, channel, xp.clip(row, 0, h - 1), xp.clip(col, 0, w - 1)]
    return backend.channels_last(xp.where(inside, seen, 0).astype(x.dtype, copy=False))


# ---- elementwise


def relu_forward(x: Array) -> Array:
    """max(x, 0); NaN stays."""
    return _elementwise(lambda xp, a: xp.maximum(a, 0), x)


def relu_backward(y: Array, gy: Array) -> Array:
    """0 where y, the output of a ReLU, is 0, whatever gy is there; else gy."""
    return _elementwise(passed, y, gy)


def relu_backward_over(y: Array, gy: Array) -> Array:
    """:func:`relu_backward`, which may be written over gy."""
    return relu_backward(y, gy)


def relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Array:
    """:func:`relu_backward` of a + b, into ``out`` where given."""
    gx = relu_backward(y, add(a, b))
    if out is None:
        return gx
    out[...] = gx
    return out


MARKS = 32  # elements whose marks, a bit each, are a number


def relu_of_sum_marked(a: Array, b: Array) -> Array:
    """See host_dispatch."""
    np.add(a, b, out=a)
    np.maximum(a, 0, out=a)
    row = a.transpose(0, 2, 3, 1).reshape(-1)
    return np.packbits(row != 0, bitorder="little").view(np.float32)


def relu_backward_marked(marks: Array, gy: Array, other: Array | None, is_ours: bool) -> Array:
    """See host_dispatch."""
    y = backend.empty(gy.shape, gy.dtype)
    y.transpose(0, 2, 3, 1).reshape(-1)[...] = np.unpackbits(marks.view(np.uint8), bitorder="little")
    return relu_backward(y, gy if other is None else add(gy, other))


def passed(xp: Module, y: Array, gy: Array) -> Array:
    """The formula of :func:`relu_backward`, for arrays of one layout."""
    if xp is np:  # it chooses by a random mask six times as slowly as it multiplies
        gx = gy * (y != 0)
        if not has_nan(gx):  # 0 times what is not finite is NaN
            return gx
    wide = gy.astype(backend.accumulation_dtype(gy.dtype), copy=False)
    return xp.where(y != 0, wide, 0).astype(gy.dtype, copy=False)


def add(a: Array, b: Array) -> Array:
    """a + b of equal shapes."""
    return _elementwise(lambda xp, p, q: p + q, a, b)


def scaled_sum(terms: tuple[Array, ...], scale: float, out: Array) -> None:
    """``sum(terms) * scale`` into ``out``, which may be the first term: added in order and rounded once."""
    wide = backend.accumulation_dtype(out.dtype)
    total = terms[0].astype(wide)
    for term in terms[1:]:
        total += term.astype(wide, copy=False)
    total *= wide.type(scale)
    out[...] = total


def _elementwise(formula: Any, *arrays: Array) -> Array:
    """Run a formula; the result lies as the arrays do."""
    return elementwise(partial(formula, backend.get_array_module(*arrays)), *arrays)


def _planner(kernel: Any) -> Any:
    """The kernels here take any arguments: each is its own plan."""
    return lambda *arguments: kernel


def _elementwise_planner(kernel: Any, formula: Any) -> Any:
    """``formula`` alone where it keeps the layout: dense host arrays of one type with equal strides."""

    def plan(*arrays: Array | None) -> Any:
        first = arrays[0]
        if type(first) is np.ndarray and first.dtype.char in "fd" and first.ndim == 4 and is_channels_last(first):
            operands = [a for a in arrays if a is not None]
            if all(a.strides == first.strides and a.dtype == first.dtype for a in operands):
                zero = backend.number(0.0, first.dtype)
                return formula(zero)
        return kernel

    return plan


ROWS = {
    kernel.__name__: _planner(kernel)
    for kernel in (
        conv_forward, conv_inference, conv_backward_data, conv_backward_weight, matmul, linear, packed, column_sums,
        pool_forward, pool_backward, pool_indices, relu_backward_over, relu_backward_of_sum, scaled_sum,
        relu_of_sum_marked, relu_backward_marked,
    )
}  # fmt: skip
ROWS |= numpy_normalization.ROWS | numpy_recurrent.ROWS | numpy_softmax.ROWS
ROWS |= {
    name: _planner(lambda *_: None)  # a GPU does in one pass what is done here by several functions
    for name in (
        "relu_dropout", "relu_dropout_backward", "dropout_add", "masked", "ln_of_sum", "ln_of_sum_backward",
        "attention_weights", "attention_weights_backward", "split_heads", "merge_heads", "scaled_matmul",
        "fused_attention", "fused_attention_backward", "conv_and_sums", "conv_backward_weight_rectified", "bn_of_sums",
        "bn_relu_of_sum", "bn_backward_of_two",
    )
}  # fmt: skip
ROWS |= {
    "relu_forward": _elementwise_planner(relu_forward, lambda zero: lambda x: np.maximum(x, zero)),
    "relu_backward": _elementwise_planner(relu_backward, lambda zero: partial(passed, np)),
    "add": _elementwise_planner(add, lambda zero: np.add),
    "conv_bn_inference": _planner(lambda *_: None),  # which saves nothing here
    "stacked_matmul": _planner(lambda *_: None),
    "dropout": _planner(lambda *_: None),
    "by_table": _planner(lambda *_: None),
    "mean_of_images": _planner(lambda *_: None),
    "mean_of_images_backward": _planner(lambda *_: None),
    "conv_forward_and_keep": _planner(lambda *_: None),
    "conv_backward_weight_later": _planner(lambda *_: None),
    "linear_and_keep": _planner(lambda *_: None),
    "linear_weight_gradients": _planner(lambda *_: None),
    "ln_backward_into": _planner(lambda *_: None),
    "conv_backward_data_as_laid": _planner(lambda gy, W, x_shape, g, laid: conv_backward_data(gy, W, x_shape, g)),
    "bn_forward_and_move": _planner(lambda *_: None),
    "bn_add_relu": _planner(lambda *_: None),
    "bn_backward_of_sum": _planner(lambda *_: None),
    "convert": _planner(lambda *_: None),
    "of_rows": _planner(lambda *_: None),
    "sum_of": _planner(lambda *_: False),
    "relu_of_sum_over": _planner(lambda *_: False),
    "rectified_sum": _planner(lambda *_: False),
    "philox": _planner(lambda *_: False),
    "pick_rows": _planner(lambda *_: False),
    "repeat": _planner(lambda *_: False),
    "filter_rows": _planner(lambda *_: False),
    "row": _planner(lambda *_: None),  # the row's own formula is NumPy's kernel
    "update": _planner(lambda *_: False),  # and so is the rule's
}
