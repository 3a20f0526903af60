"""Matrix products on oneDNN."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.onednn import Builder, Primitive, address

Array = np.ndarray

_SMALL_PRODUCT = 1 << 19  # multiplications; below, NumPy's product takes less time than the call


def _build(a: Array, b: Array, y: Array) -> Primitive:
    with Builder() as builder:
        left, right, result = (
            builder.memory(m.shape, onednn.data_type(m.dtype), onednn.element_strides(m)) for m in (a, b, y)
        )
        description = builder.describe("matmul", left, right, None, result, builder.attributes())
        return builder.primitive(description, {onednn.SRC: left, onednn.WEIGHTS: right, onednn.DST: result})


def _matrix(a: Array) -> Array:
    """A matrix whose rows or columns lie densely; oneDNN falls back to slow code for others."""
    rows, columns = a.strides
    size = a.itemsize
    if (columns == size and rows >= a.shape[1] * size) or (rows == size and columns >= a.shape[0] * size):
        return a
    return np.ascontiguousarray(a)


def plan_matmul(a: Array, b: Array, out: Array | None) -> Any:
    """See numpy_.matmul."""
    shape = a.shape[0], b.shape[1]
    left, right = _matrix(a), _matrix(b)
    primitive = _build(left, right, backend.empty(shape, a.dtype, a) if out is None else out)
    new, is_plain = backend.allocator(shape, a.dtype), left is a and right is b

    def matmul(a: Array, b: Array, out: Array | None) -> Array:
        if not is_plain:
            a, b = _matrix(a), _matrix(b)
        if out is None:
            out = new()
        primitive(address(a), address(b), address(out))
        return out

    return matmul


def _plan_large(a: Array, b: Array, out: Array | None = None) -> Any:
    onednn.require(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.size * b.shape[1] < _SMALL_PRODUCT:
        raise onednn.Unsupported("a small product, or none of two matrices")
    return plan_matmul(a, b, out)


ROWS = {"matmul": _plan_large}
