"""Matrix products on oneDNN."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.onednn import Builder, Primitive, address, cached

Array = np.ndarray


def _build_matmul(a: Any, b: Any, y: Any) -> Primitive:
    """Each operand is (shape, strides in elements, dtype)."""
    with Builder() as builder:
        left, right, result = (
            builder.memory(shape, onednn.data_type(dtype), strides) for shape, strides, dtype in (a, b, y)
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


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """See numpy_.matmul."""
    a, b = _matrix(a), _matrix(b)
    if out is None:
        out = backend.empty((a.shape[0], b.shape[1]), a.dtype, a)
    key = ("matmul", a.shape, a.strides, b.shape, b.strides, out.strides, a.dtype, b.dtype, out.dtype)
    primitive = cached(
        key, lambda: _build_matmul(*((m.shape, onednn.element_strides(m), m.dtype) for m in (a, b, out)))
    )  # fmt: skip
    primitive(address(a), address(b), address(out))
    return out
