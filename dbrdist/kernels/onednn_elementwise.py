"""Elementwise kernels on oneDNN: dense arrays of one layout, seen as one long row.

``FORWARD`` and ``BACKWARD`` say which rows of functions (``core.rows``) the library computes, and by which of its
algorithms. Left out is what it gets wrong (NaN, small numbers) and what NumPy computes as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core import backend
from dbrdist.kernels import numpy_, onednn
from dbrdist.kernels.onednn import Builder, Primitive
from dbrdist.kernels.onednn_finite import is_finite

Array = np.ndarray

_SMALL = 1 << 15  # elements; below, NumPy's elementwise loops beat a call of the library
_SMALL_ROW = 1 << 13  # the same for a function of several steps or with a gradient to multiply

# Values of dnnl_alg_kind_t; those from _FROM_OUTPUT on read the output on the way back, the others the input.
_RELU, _SOFT_RELU, _GELU_TANH, _SWISH, _CLIP, _GELU_ERF, _MISH, _HARDSWISH = (
    0x20, 0x27, 0x2B, 0x2C, 0x2F, 0x31, 0x33, 0x34,
)  # fmt: skip
_FROM_OUTPUT, _TANH_FROM_OUTPUT, _LOGISTIC_FROM_OUTPUT = 0x100, 0x101, 0x104


class Algorithm(NamedTuple):
    """One of the library's algorithms, and its two numbers made of those of the row.

    Where ``is_checked``, a result that is not finite everywhere is left to the row's own formula.
    """

    kind: int
    numbers: Callable[..., tuple[float, float]] = lambda *_: (0.0, 0.0)
    is_checked: bool = False


def _meant(holds: bool, number: float) -> float:
    if not holds:
        raise onednn.Unsupported(f"the number {number}")
    return number


_silu = Algorithm(_SWISH, lambda: (1.0, 0.0))
FORWARD = {
    "tanh": Algorithm(_TANH_FROM_OUTPUT),
    "sigmoid": Algorithm(_LOGISTIC_FROM_OUTPUT),
    "silu": _silu,
    "leaky_relu": Algorithm(_RELU, lambda slope: (_meant(slope != 0, slope), 0.0)),  # by 0 it would lose NaN
    "hardswish": Algorithm(_HARDSWISH, lambda: (1 / 6, 0.5)),
    "mish": Algorithm(_MISH),
    "gelu": Algorithm(_GELU_ERF, is_checked=True),
    "gelu_by_tanh": Algorithm(_GELU_TANH),
}
BACKWARD = {
    "tanh": Algorithm(_TANH_FROM_OUTPUT),
    "sigmoid": Algorithm(_LOGISTIC_FROM_OUTPUT),
    "silu": _silu,
    "softplus": Algorithm(_SOFT_RELU, lambda beta: (beta, 0.0)),
    "relu6": Algorithm(_CLIP, lambda: (0.0, 6.0), is_checked=True),
    "clipped_relu": Algorithm(_CLIP, lambda z: (0.0, _meant(z >= 0, z)), is_checked=True),
    "mish": Algorithm(_MISH, is_checked=True),
    "gelu": Algorithm(_GELU_ERF, is_checked=True),
    "gelu_by_tanh": Algorithm(_GELU_TANH, is_checked=True),
}
_relu = Algorithm(_FROM_OUTPUT, is_checked=True)


def _build(kind: int, numbers: tuple[float, float], is_backward: bool, size: int, dtype: Any) -> Primitive:
    with Builder() as b:
        row, attributes = b.memory((size,), onednn.data_type(dtype)), b.attributes()
        alpha, beta = map(c_float, numbers)
        forward = b.describe("eltwise_forward", onednn.FORWARD_TRAINING, kind, row, row, alpha, beta, attributes)
        if not is_backward:
            return b.primitive(forward, {onednn.SRC: row, onednn.DST: row})
        backward = b.describe("eltwise_backward", kind, row, row, row, alpha, beta, forward, attributes)
        kept = onednn.DST if kind >= _FROM_OUTPUT else onednn.SRC
        return b.primitive(backward, {kept: row, onednn.DIFF_DST: row, onednn.DIFF_SRC: row})


def _build_add(size: int, dtype: Any) -> Primitive:
    with Builder() as b:
        row = b.memory((size,), onednn.data_type(dtype))
        description = b.describe("binary", onednn.BINARY_ADD, row, row, row, b.attributes())
        return b.primitive(description, {onednn.SRC: row, onednn.SRC_1: row, onednn.DST: row})


def _runner(primitive: Primitive, first: Array) -> Any:
    """The kernel for arrays of one shape and type; the result lies as the first of them."""
    shape, dtype = first.shape, first.dtype
    are_images = first.ndim == 4 and backend.lies_as_images(first)
    dense = backend.channels_last if are_images else np.ascontiguousarray
    new = (backend.allocator if are_images else backend.plain_allocator)(shape, dtype)

    def of_one(x: Array) -> Array:
        x, y = dense(x), new()
        primitive.on2(x, y)
        return y

    def of_two(a: Array, b: Array) -> Array:
        a, b, y = dense(a), dense(b), new()
        primitive.on3(a, b, y)
        return y

    return of_two if primitive.num_arrays == 3 else of_one


def _check(limit: int, *arrays: Array) -> None:
    onednn.require(*arrays)
    if arrays[0].size < limit:
        raise onednn.Unsupported("a small array")


def _plan_relu_forward(x: Array) -> Any:
    """oneDNN makes 0 of NaN; in float32 NumPy's maximum is as fast on one thread."""
    _check(_SMALL, x)
    if x.dtype == np.float32:
        raise onednn.Unsupported("float32")
    run = _runner(_build(_relu.kind, _relu.numbers(), False, x.size, x.dtype), x)
    return lambda x: run(x) if is_finite(x) else numpy_.relu_forward(x)


def _plan_relu_backward(y: Array, gy: Array) -> Any:
    """oneDNN multiplies by 0 or 1, which makes NaN of what is not finite."""
    _check(_SMALL, y, gy)
    run = _runner(_build(_relu.kind, _relu.numbers(), True, y.size, y.dtype), y)

    def relu_backward(y: Array, gy: Array) -> Array:
        gx = run(y, gy)
        return gx if is_finite(gx) else numpy_.relu_backward(y, gy)

    return relu_backward


def _plan_add(a: Array, b: Array) -> Any:
    _check(_SMALL, a, b)
    return _runner(_build_add(a.size, a.dtype), a)


def _plan_row_forward(name: str, x: Array, numbers: tuple[float, ...]) -> Any:
    _check(_SMALL_ROW, x)
    run = _algorithm_of(FORWARD, name, x, numbers, False)
    return lambda name, x, numbers: run(x)


def _plan_row_backward(name: str, kept: Array, gy: Array, numbers: tuple[float, ...]) -> Any:
    _check(_SMALL_ROW, kept, gy)
    if kept.shape != gy.shape:
        raise onednn.Unsupported("operands that broadcast")
    run = _algorithm_of(BACKWARD, name, kept, numbers, True)
    return lambda name, kept, gy, numbers: run(kept, gy)


def _algorithm_of(table: dict[str, Algorithm], name: str, first: Array, numbers: Any, is_backward: bool) -> Any:
    if name not in table or not all(type(v) in (int, float) and isfinite(v) for v in numbers):
        raise onednn.Unsupported(name)
    kind, numbers_of, is_checked = table[name]
    run = _runner(_build(kind, numbers_of(*numbers), is_backward, first.size, first.dtype), first)
    if not is_checked:
        return run

    def checked(*arrays: Array) -> Array | None:
        y = run(*arrays)
        return y if is_finite(y) else None

    return checked


ROWS = {
    "relu_forward": _plan_relu_forward,
    "relu_backward": _plan_relu_backward,
    "add": _plan_add,
    "row_forward": _plan_row_forward,
    "row_backward": _plan_row_backward,
}
