"""Products of matrices on a GPU: by cuBLASLt those of 16-bit types, by CuPy's cuBLAS the others, with an own kernel for
biases."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import Array
from dbrdist.kernels.gpu import cublaslt, cuda_layout, cuda_ops, cuda_source
from dbrdist.kernels.gpu.cuda_source import over, require
from dbrdist.kernels.unsupported import Unsupported

if TYPE_CHECKING:
    from dbrdist.core.array.types import DType
    from dbrdist.core.model.weight_copies import Reader

Plan = Callable[..., Any]


def multiply(a: Array, b: Array, out: Array | None = None) -> Array:
    """The product of two matrices of one type; that of 16-bit ones may be stored in float32.

    16-bit types, and all types as a step is captured, are multiplied by cuBLASLt where it is there.
    """
    product = backend.capturing.product
    if product is not None:
        return product(a, b, out)
    if a.dtype.itemsize == 2 and cublaslt.is_there():
        return cublaslt.serve(a, b, out)
    if out is None or out.dtype == a.dtype:
        return a.dot(b, out)
    out[...] = a.dot(b)
    return out


def matmul(a: Array, b: Array, out: Array | None = None) -> Plan:
    """The product of two matrices; 16-bit ones are added in float32. Beside a 16-bit one float32 is narrowed."""
    require(a, b, out)
    if a.dtype == b.dtype and (out is None or (out.dtype == a.dtype and out.flags.c_contiguous)):
        return multiply
    narrow = [x.dtype for x in (a, b) if x.dtype.itemsize == 2]
    if not narrow or any(x.dtype not in (narrow[0], np.float32) for x in (a, b)):
        raise Unsupported("several types")
    dtype, own = narrow[0], a.dtype
    is_made = out is not None and out.dtype in (dtype, np.float32) and out.flags.c_contiguous

    def plan(a: Array, b: Array, out: Array | None = None) -> Array:
        a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
        if is_made:
            return multiply(a, b, out)
        y = multiply(a, b)
        if out is None:
            return y.astype(own, copy=False)
        out[...] = y
        return out

    return plan


def stacked_matmul(a: Array, b: Array) -> Plan:
    """Stacks of 16-bit matrices, which CuPy would widen."""
    require(a, b)
    if a.dtype != b.dtype or a.dtype.itemsize != 2 or min(a.ndim, b.ndim) < 2 or not cublaslt.is_there():
        raise Unsupported("other types, or no cuBLASLt")
    cublaslt.product(a, b)  # what it refuses here is left to others
    return cublaslt.serve  # as it may refuse later matrices for where they begin


def scaled_matmul(a: Array, b: Array, factor: float) -> Plan:
    """See device_dispatch.scaled_matmul."""
    require(a, b)
    if a.dtype != b.dtype or min(a.ndim, b.ndim) < 2 or not cublaslt.is_there():
        raise Unsupported("other types, or no cuBLASLt")
    cublaslt.product(a, b, factor=factor)  # what it refuses here is left to others
    return lambda a, b, factor: cublaslt.serve(a, b, factor=factor)


def _plan_linear(x: Array, W: Array, b: Array | None) -> Callable[..., tuple[Array, Array]]:
    """x W^T + b in the type of x, and W in that type."""
    require(x, W, b)
    dtype, is_same, columns = x.dtype, W.dtype == x.dtype, np.int32(len(W))
    if not is_same and (dtype.itemsize != 2 or W.dtype != np.float32):
        raise Unsupported("weights of another type")
    size = len(x) * len(W)
    grid, block = over(size)
    launches: dict[Any, Callable[..., None]] = {}  # by type of the bias
    layout = None
    if not is_same and W.flags.c_contiguous:
        layout = cuda_layout.FilterLayout(W.dtype, dtype, (len(W), W.shape[1], 1, W.shape[1]))

    def plan(x: Array, W: Array, b: Array | None, copy: Reader | None) -> tuple[Array, Array]:
        if copy is not None and layout is not None:
            narrow = copy(W, layout).reshape(W.shape)
        else:
            narrow = W if is_same else W.astype(dtype)
        y = multiply(x, narrow.T)
        if b is not None:
            launch = launches.get(b.dtype)
            if launch is None:
                launch = launches[b.dtype] = cuda_source.kernel("elementwise", "add_bias", dtype, b.dtype)
            launch(grid, block, (y, b if b.flags.c_contiguous else b.copy(), size, columns))
        return y, narrow

    return plan


def linear(x: Array, W: Array, b: Array | None) -> Plan:
    """See dispatch.linear."""
    both = _plan_linear(x, W, b)
    return lambda x, W, b: both(x, W, b, None)[0]


def linear_and_keep(x: Array, W: Array, b: Array | None, copy: Reader | None) -> Plan:
    """See device_dispatch.linear_and_keep."""
    if W.dtype == x.dtype:
        raise Unsupported("weights that are read as they are")
    return _plan_linear(x, W, b)


def linear_weight_gradients(
    gy: Array, x: Array, dtypes: tuple[DType, DType], out_W: Array | None, out_b: Array | None
) -> Plan:
    """See device_dispatch.linear_weight_gradients: both in float32, of 16-bit operands or, without TF32, of float32."""
    require(gy, x, out_W, out_b)
    wide, shape = np.dtype(np.float32), (gy.shape[1], x.shape[1])
    is_wide = gy.dtype == wide and cublaslt.is_there() and os.environ.get("CUPY_TF32", "0") != "1"
    if gy.dtype != x.dtype or not (is_wide or gy.dtype.itemsize == 2) or any(d != wide for d in dtypes):
        raise Unsupported("other types, or TF32, which CuPy's products take")
    if any(a is not None and (a.dtype != wide or not a.flags.c_contiguous) for a in (out_W, out_b)):
        raise Unsupported("room of another type or layout")
    new_W, new_b = cuda_source.plain(shape, wide), cuda_source.plain(shape[:1], wide)
    adds_on_the_way = cublaslt.is_there()

    def plan(gy: Array, x: Array, dtypes: Any, out_W: Array | None, out_b: Array | None) -> tuple[Array, Array]:
        nonlocal adds_on_the_way
        gW, gb = new_W() if out_W is None else out_W, new_b() if out_b is None else out_b
        if adds_on_the_way:
            try:
                cublaslt.product(gy.T, x, gW, sums=gb)
                return gW, gb
            except Unsupported:
                adds_on_the_way = False
        multiply(gy.T, x, gW)
        _sums_of_columns(gy, gb)
        return gW, gb

    return plan


def _sums_of_columns(x: Array, out: Array) -> None:
    if not x.flags.c_contiguous:
        x = x.copy()
    try:
        cuda_ops.column_sums(x, out.dtype, out)(x, out.dtype, out)
    except Unsupported:  # of very many rows
        backend.get_array_module(x).sum(x, 0, dtype=out.dtype, out=out)


ROWS: dict[str, Callable[..., Plan]] = {
    planner.__name__: planner
    for planner in (matmul, stacked_matmul, scaled_matmul, linear, linear_and_keep, linear_weight_gradients)
}
