"""Elementwise kernels on oneDNN: dense arrays of one layout, seen as one long row."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import onednn
from dbrdist.kernels.onednn import Builder, Primitive, address

Array = np.ndarray

_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library


def _build(kind: str, size: int, dtype: Any) -> Primitive:
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


def _dense(a: Array) -> Array:
    return backend.channels_last(a) if a.ndim == 4 else np.ascontiguousarray(a)


def _planner(kind: str) -> Any:
    def plan(*arrays: Array | None) -> Any:
        """Arrays of one shape and type, then the output or None."""
        operands = [a for a in arrays if a is not None]
        onednn.require(*operands)
        first = operands[0]
        if first.size < _SMALL:
            raise onednn.Unsupported("a small array")
        primitive, new = _build(kind, first.size, first.dtype), backend.allocator(first.shape, first.dtype)
        num_inputs = 1 if kind == "relu_forward" else 2

        def elementwise(*arrays: Array | None) -> Array:
            xs = [_dense(a) for a in arrays[:num_inputs]]
            y = arrays[num_inputs] if len(arrays) > num_inputs else None
            if y is None:
                y = new()
            primitive(*[address(a) for a in xs], address(y))
            return y

        return elementwise

    return plan


ROWS = {kind: _planner(kind) for kind in ("relu_forward", "relu_backward", "add", "add_relu")}
