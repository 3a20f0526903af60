"""Products with sparse matrices."""

from __future__ import annotations

from typing import Any

from dbrdist.core import ops
from dbrdist.core.backend import Array, accumulation_dtype, get_array_module
from dbrdist.core.checks import describe, expected
from dbrdist.core.rows import together
from dbrdist.core.sparse import CooMatrix


def sparse_matmul(a: Any, b: Any, transa: bool = False, transb: bool = False) -> Any:
    """a b where one of both is a :class:`dbrdist.utils.CooMatrix` and the other an array or Variable.

    Args:
        a, b: matrices, or batches of equally many: (M, K) and (K, N), or (B, M, K) and (B, K, N).
        transa, transb: take the transpose of each matrix of a, of b.

    The result is dense. The entries of the sparse matrix get a gradient where it ``requires_grad``, zeros do not.
    """
    if isinstance(a, CooMatrix) == isinstance(b, CooMatrix):
        both = isinstance(a, CooMatrix)
        raise TypeError(f"sparse_matmul: expected one CooMatrix among a and b, got {'two' if both else 'none'}")
    if isinstance(a, CooMatrix):
        row, col = (a.col, a.row) if transa else (a.row, a.col)
        size = a.shape[::-1] if transa else a.shape
        return _product("b", a.data, row, col, size, b, transb)
    row, col = (b.row, b.col) if transb else (b.col, b.row)
    size = b.shape if transb else b.shape[::-1]
    return ops.swap(_product("a", b.data, row, col, size, a, not transa))


def _product(name: str, data: Any, row: Array, col: Array, size: Any, dense: Any, is_transposed: bool) -> Any:
    """S D: the entries of the sparse matrix times rows of the dense one, added up by row."""
    data, dense = together("sparse_matmul", **{"entries": data, name: dense})
    if dense.ndim != data.ndim + 1 or dense.shape[:-2] != data.shape[:-1]:
        what = "a matrix" if data.ndim == 1 else f"a batch of {data.shape[0]} matrices"
        raise expected("sparse_matmul", name, f"{what} beside the sparse one", describe(dense))
    dense = ops.swap(dense) if is_transposed else dense
    if dense.shape[-2] != size[1]:
        raise expected("sparse_matmul", name, f"{size[1]} rows or columns to match the sparse matrix", describe(dense))
    xp, dtype = get_array_module(dense.array), dense.dtype
    wide = accumulation_dtype(dtype)
    is_there = (row >= 0) & (col >= 0)
    values = ops.where(is_there, ops.cast(data, wide), wide.type(0))
    batch = () if data.ndim == 1 else (xp.arange(data.shape[0])[:, None],)
    rows = ops.getitem(ops.cast(dense, wide), (*batch, col * is_there))
    parts = ops.mul(rows, ops.reshape(values, (*values.shape, 1)))
    y = ops.scatter(parts, (*batch, row * is_there), (*dense.shape[:-2], size[0], dense.shape[-1]))
    return ops.cast(y, dtype)
