"""Elementwise kernels on oneDNN: dense arrays of one layout, seen as one long row."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.onednn import Builder, Primitive, address, cached

Array = np.ndarray


def _build_elementwise(kind: str, size: int, dtype: Any) -> Primitive:
    with Builder() as b:
        row, zero = b.memory((size,), onednn.data_type(dtype)), onednn.c_float(0)
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
