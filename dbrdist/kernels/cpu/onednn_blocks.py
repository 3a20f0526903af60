"""Two elementwise steps over large arrays, block by block: what the first makes stays in the cache for the second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.core.array import backend
from dbrdist.core.array.types import DType, HostArray
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn import Builder, Primitive, address, scratch
from dbrdist.kernels.cpu.onednn_elementwise import ADD, LINEAR, RELU_OF_OUTPUT
from dbrdist.kernels.cpu.onednn_finite import is_finite, memory_row
from dbrdist.kernels.reference import numpy_

if TYPE_CHECKING:
    from collections.abc import Callable

    from dbrdist.core.array.types import Array

_FEW = 1 << 12  # elements up to which a call costs as much as it saves
_BLOCK = 1 << 16  # elements; smaller blocks are many calls, larger ones leave the cache


def _build_sum(count: int, dtype: DType) -> Primitive:
    with Builder() as b:
        row = b.memory((count,), onednn.data_type(dtype))
        description = b.describe("binary", ADD, row, row, row, b.attributes())
        return b.primitive(description, {onednn.SRC: row, onednn.SRC_1: row, onednn.DST: row})


def _build_mask(count: int, dtype: DType) -> Primitive:
    with Builder() as b:
        row, zero = b.memory((count,), onednn.data_type(dtype)), onednn.c_float(0)
        kind, attributes = RELU_OF_OUTPUT, b.attributes()
        forward = b.describe("eltwise_forward", onednn.FORWARD_TRAINING, kind, row, row, zero, zero, attributes)
        backward = b.describe("eltwise_backward", kind, row, row, row, zero, zero, forward, attributes)
        return b.primitive(backward, {onednn.DST: row, onednn.DIFF_DST: row, onednn.DIFF_SRC: row})


def _plan_relu_backward_of_sum(
    y: HostArray, a: HostArray, b: HostArray, out: HostArray | None = None
) -> Callable[..., Array]:
    """See numpy_.relu_backward_of_sum; three quarters of the time of a sum, then a mask, at 51 MB."""
    onednn.require(y, a, b)
    is_dense = all(v.shape == y.shape and v.ndim == 4 and backend.is_channels_last(v) for v in (y, a, b))
    if y.size < 2 * _BLOCK or not is_dense:
        raise onednn.Unsupported("small arrays, or layouts that differ")
    width, new, places = y.itemsize, backend.allocator(y.shape, y.dtype), _blocks(y.size)
    steps = {n: (_build_sum(n, y.dtype), _build_mask(n, y.dtype)) for n in {n for _, n in places}}
    blocks = [(first, n, *steps[n]) for first, n in places]

    def relu_backward_of_sum(y: HostArray, a: HostArray, b: HostArray, out: HostArray | None = None) -> HostArray:
        gx = new() if out is None else out
        y_start, a_start, b_start, gx_start = address(y), address(a), address(b), address(gx)
        total = scratch("sum", _BLOCK * width)[: _BLOCK * width].view(y.dtype)
        start = address(total)
        for first, n, add, mask in blocks:
            offset = first * width
            add(a_start + offset, b_start + offset, start)
            mask(y_start + offset, start, gx_start + offset)
            if not is_finite(total[:n]):  # oneDNN multiplies by 0 or 1, which makes NaN
                here = slice(first, first + n)
                memory_row(gx)[here] = numpy_.relu_backward(memory_row(y)[here], total[:n])
        return gx

    return relu_backward_of_sum


def _plan_relu_backward_over(y: HostArray, gy: HostArray) -> Callable[..., Array]:
    """See numpy_.relu_backward_over."""
    onednn.require(y, gy)
    are_dense = all(v.shape == y.shape and v.ndim == 4 and backend.is_channels_last(v) for v in (y, gy))
    if y.size < 2 * _BLOCK or not are_dense:
        raise onednn.Unsupported("small arrays, or layouts that differ")
    width = y.itemsize
    blocks = [(first, n, _build_mask(n, y.dtype)) for first, n in _blocks(y.size)]

    def relu_backward_over(y: HostArray, gy: HostArray) -> HostArray:
        y_start, start, row = address(y), address(gy), memory_row(gy)
        for first, n, mask in blocks:
            part = row[first : first + n]
            if is_finite(part):  # oneDNN multiplies by 0 or 1, which makes NaN
                mask(y_start + first * width, start + first * width, start + first * width)
            else:
                part[...] = numpy_.relu_backward(memory_row(y)[first : first + n], part)
        return gy

    return relu_backward_over


def _blocks(size: int) -> list[tuple[int, int]]:
    """Where blocks of ``size`` elements begin, and how many there are in each."""
    return [(first, min(_BLOCK, size - first)) for first in range(0, size, _BLOCK)]


def _plan_scaled_sum(terms: tuple[HostArray, ...], scale: float, out: HostArray) -> Any:
    """See numpy_.scaled_sum; in bfloat16 of 32,768 elements half of its time: one pass, and one rounding as there."""
    onednn.require(*terms, out)
    size = out.size
    is_dense = all(t.shape == out.shape == (size,) and t.strides == out.strides == (out.itemsize,) for t in terms)
    if (
        out.dtype.name != "bfloat16"
        or not is_dense
        or size < _FEW
        or size & (size - 1)
        or len(terms) not in range(2, 9)
    ):
        raise onednn.Unsupported(
            "other types, few elements, or a length for which no other sum would use the primitive"
        )
    with Builder() as b:
        row = b.memory((size,), onednn.data_type(out.dtype))
        chain = [*((ADD, row) for _ in terms[2:]), (LINEAR, float(scale))]
        description = b.describe("binary", ADD, row, row, row, b.attributes(chain))
        others = {onednn.post_operand(i): row for i in range(len(terms) - 2)}
        add = b.primitive(description, {onednn.SRC: row, onednn.SRC_1: row, **others, onednn.DST: row})
    return lambda terms, scale, out: add(*map(address, terms), address(out))


ROWS = {
    "relu_backward_of_sum": _plan_relu_backward_of_sum,
    "relu_backward_over": _plan_relu_backward_over,
    "scaled_sum": _plan_scaled_sum,
}
