"""Elementwise kernels on oneDNN: dense arrays of one layout, seen as one long row."""

from __future__ import annotations

from ctypes import c_float
from typing import Any

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import numpy_, onednn
from dbrdist.kernels.onednn import Builder, Primitive, address
from dbrdist.kernels.onednn_finite import is_finite

Array = np.ndarray

_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library


def _build(kind: str, size: int, dtype: Any) -> Primitive:
    with Builder() as b:
        row, zero = b.memory((size,), onednn.data_type(dtype)), c_float(0)
        if kind == "add":
            description = b.describe("binary", onednn.BINARY_ADD, row, row, row, b.attributes())
            return b.primitive(description, {onednn.SRC: row, onednn.SRC_1: row, onednn.DST: row})
        attributes, training = b.attributes(), onednn.FORWARD_TRAINING
        algorithm = onednn.RELU_FROM_OUTPUT
        forward = b.describe("eltwise_forward", training, algorithm, row, row, zero, zero, attributes)
        if kind == "relu_forward":
            return b.primitive(forward, {onednn.SRC: row, onednn.DST: row})
        backward = b.describe("eltwise_backward", algorithm, row, row, row, zero, zero, forward, attributes)
        return b.primitive(backward, {onednn.DST: row, onednn.DIFF_DST: row, onednn.DIFF_SRC: row})


def _runner(kind: str, first: Array) -> Any:
    """The kernel for arrays of one shape and type; the result lies as the first of them."""
    primitive, shape, dtype = _build(kind, first.size, first.dtype), first.shape, first.dtype
    are_images = first.ndim == 4 and backend.lies_as_images(first)
    dense = backend.channels_last if are_images else np.ascontiguousarray

    def run(*arrays: Array) -> Array:
        xs = [dense(a) for a in arrays]
        y = backend.empty_as(arrays[0], shape, dtype)
        primitive(*[address(a) for a in xs], address(y))
        return y

    return run


def _check(*arrays: Array) -> None:
    onednn.require(*arrays)
    if arrays[0].size < _SMALL:
        raise onednn.Unsupported("a small array")


def _plan_relu_forward(x: Array) -> Any:
    """oneDNN makes 0 of NaN; in float32 NumPy's maximum is as fast on one thread."""
    _check(x)
    if x.dtype == np.float32:
        raise onednn.Unsupported("float32")
    run = _runner("relu_forward", x)
    return lambda x: run(x) if is_finite(x) else numpy_.relu_forward(x)


def _plan_relu_backward(y: Array, gy: Array) -> Any:
    """oneDNN multiplies by 0 or 1, which makes NaN of what is not finite."""
    _check(y, gy)
    run = _runner("relu_backward", y)

    def relu_backward(y: Array, gy: Array) -> Array:
        gx = run(y, gy)
        return gx if is_finite(gx) else numpy_.relu_backward(y, gy)

    return relu_backward


def _plan_add(a: Array, b: Array) -> Any:
    _check(a, b)
    return _runner("add", a)


ROWS = {"relu_forward": _plan_relu_forward, "relu_backward": _plan_relu_backward, "add": _plan_add}
