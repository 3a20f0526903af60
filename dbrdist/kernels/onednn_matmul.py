"""Matrix products on oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.onednn import Builder, Primitive, address
from dbrdist.kernels.onednn_float16 import also_float16

Array = np.ndarray

_SMALL_PRODUCT = 1 << 19  # multiplications; below, NumPy's product takes less time than the call


def build(a: Array, b: Array, y: Array, bias: bool = False) -> Primitive:
    with Builder() as builder:
        left, right, result = (
            builder.memory(m.shape, onednn.data_type(m.dtype), onednn.element_strides(m)) for m in (a, b, y)
        )
        row = builder.memory((1, y.shape[1]), onednn.F32) if bias else None
        description = builder.describe("matmul", left, right, row, result, builder.attributes())
        memories = {onednn.SRC: left, onednn.WEIGHTS: right, onednn.DST: result}
        return builder.primitive(description, memories | ({onednn.BIAS: row} if bias else {}))


def _matrix(a: Array) -> Array:
    """A matrix whose rows or columns lie densely; oneDNN falls back to slow code for others."""
    rows, columns = a.strides
    size = a.itemsize
    if (columns == size and rows >= a.shape[1] * size) or (rows == size and columns >= a.shape[0] * size):
        return a
    return np.ascontiguousarray(a)


def _as_is(a: Array) -> Array:
    return a


def _adapter(a: Array, dtype: Any) -> Callable[[Array], Array]:
    """What turns matrices like ``a`` into what the library takes well: dense in rows or columns, of type ``dtype``."""
    if a.dtype != dtype:
        return caster(a, dtype)
    return _as_is if _matrix(a) is a else np.ascontiguousarray


def caster(a: Array, dtype: Any) -> Callable[[Array], Array]:
    """A function that brings matrices like ``a`` to another type; the result lies in rows as ``a`` or its transpose."""
    is_turned = _matrix(a) is a and a.strides[0] == a.itemsize
    shape = a.shape[::-1] if is_turned else a.shape
    with Builder() as b:
        source = b.memory(shape, onednn.data_type(a.dtype))
        primitive = b.reorder(source, b.memory(shape, onednn.data_type(dtype)))
    assert primitive is not None
    new = backend.allocator(shape, dtype)

    def cast(a: Array) -> Array:
        source, target = np.ascontiguousarray(a.T if is_turned else a), new()
        primitive.on2(source, target)
        return target.T if is_turned else target

    return cast


def plan_matmul(a: Array, b: Array, out: Array | None) -> Any:
    """See numpy_.matmul."""
    shape, dtype = (a.shape[0], b.shape[1]), min(a.dtype, b.dtype, key=lambda d: d.itemsize)
    left, right, new = _adapter(a, dtype), _adapter(b, dtype), backend.allocator(shape, a.dtype)
    primitive = build(left(a), right(b), new() if out is None else out)

    def matmul(a: Array, b: Array, out: Array | None) -> Array:
        a, b = left(a), right(b)
        if out is None:
            out = new()
        primitive.on3(a, b, out)
        return out

    return matmul


def _check(a: Array, b: Array) -> None:
    """Two matrices that are large enough, of float32 or of 16 bits."""
    onednn.require(a)
    onednn.require(b)
    if a.ndim != 2 or b.ndim != 2 or a.size * b.shape[1] < _SMALL_PRODUCT >> 2 * (a.itemsize == 2):
        raise onednn.Unsupported("a small product, or none of two matrices")


def _plan_large(a: Array, b: Array, out: Array | None = None) -> Any:
    _check(a, b)
    return plan_matmul(a, b, out)


def _plan_linear(x: Array, W: Array, b: Array | None) -> Any:
    if b is None:
        return _without_bias(x, W)
    _check(x, W.T)
    if x.dtype.itemsize > W.dtype.itemsize:
        raise onednn.Unsupported("W narrower than x")
    left, right = _adapter(x, x.dtype), _adapter(W.T, x.dtype)
    new = backend.allocator((x.shape[0], W.shape[0]), x.dtype)
    primitive = build(left(x), right(W.T), new(), bias=True)

    def linear(x: Array, W: Array, b: Array) -> Array:
        x, W, b = left(x), right(W.T), np.ascontiguousarray(b, np.float32)
        y = new()
        primitive(address(x), address(W), address(y), address(b))
        return y

    return linear


def _without_bias(x: Array, W: Array) -> Any:
    product = _plan_large(x, W.T)
    return lambda x, W, b: product(x, W.T, None)


def _plan_packed(b: Array, rows: int, is_often: bool) -> Any:
    """See numpy_.packed; ``b`` is brought to the library's own layout where the calls are enough to pay for it.

    20 rows times 650 by 2600: 0.54 ms, and 0.75 with ``b`` as it lies. The reorder takes as long as a product.
    """
    onednn.require(b)
    if rows * b.size < _SMALL_PRODUCT:
        raise onednn.Unsupported("a small product")
    lies_well = _adapter(b, b.dtype)
    with Builder() as builder:
        t, (k, n) = onednn.data_type(b.dtype), b.shape
        left, right, result = (
            builder.memory((rows, k), t), builder.memory(b.shape, t, onednn.element_strides(lies_well(b))),
            builder.memory((rows, n), t),
        )  # fmt: skip
        free = builder.any(b.shape, t) if is_often else right
        description = builder.describe("matmul", left, free, None, result, builder.attributes([(onednn.SUM,)]))
        wanted = builder.query(description, onednn.QUERY_WEIGHTS)
        primitive = builder.primitive(description, {onednn.SRC: left, onednn.WEIGHTS: wanted, onednn.DST: result})
        reorder, num_bytes = builder.reorder(right, wanted), builder.size(wanted)

    def packed(b: Array, rows: int, is_often: bool) -> Callable[[Array, Array], None]:
        weights = b = lies_well(b)
        if reorder is not None:
            weights = backend.empty((num_bytes,), np.uint8)
            reorder.on2(b, weights)
        return lambda a, out: primitive.on3(a, weights, out)

    return packed


ROWS = {"matmul": also_float16(_plan_large, out=2), "linear": also_float16(_plan_linear), "packed": _plan_packed}
