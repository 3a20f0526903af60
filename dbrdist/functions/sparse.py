"""Products with sparse matrices."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array import array_operations
from dbrdist.core.array.backend import Array, accumulation_dtype, empty_as, get_array_module, zeros_as
from dbrdist.core.chainer.sparse import CooMatrix
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import OperandTypeError, describe, expected
from dbrdist.core.tape.elementwise_table import together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable

_ROW_ELEMENTS = 1 << 11  # products of a row: below, a call for each row takes longer than adding them one by one
_BLOCK_ELEMENTS = 1 << 15  # what stays in the cache


def sparse_matmul(a: CooMatrix | Operand, b: Any, transa: bool = False, transb: bool = False) -> Variable:
    """a b where one of both is a :class:`dbrdist.utils.CooMatrix` and the other an array or Variable.

    Args:
        a, b: matrices, or batches of equally many: (M, K) and (K, N), or (B, M, K) and (B, K, N).
        transa, transb: take the transpose of each matrix of a, of b.

    The result is dense. The entries of the sparse matrix get a gradient where it ``requires_grad``, zeros do not.

    Example:
        >>> a = dbrdist.utils.to_coo(np.array([[0.0, 2.0]]))
        >>> F.sparse_matmul(a, np.array([[1.0], [3.0]])).array
        array([[6.]])
    """
    if isinstance(a, CooMatrix) == isinstance(b, CooMatrix):
        both = isinstance(a, CooMatrix)
        raise OperandTypeError("sparse_matmul", "a, b", "one CooMatrix among them", "two" if both else "none", "")
    if isinstance(a, CooMatrix):
        row, col = (a.col, a.row) if transa else (a.row, a.col)
        size = a.shape[::-1] if transa else a.shape
        return _product("b", a.data, row, col, size, b, transb)
    row, col = (b.row, b.col) if transb else (b.col, b.row)
    size = b.shape if transb else b.shape[::-1]
    return ops.swap(_product("a", b.data, row, col, size, a, not transa))


def _product(
    name: str, data: Any, row: Array, col: Array, size: tuple[int, ...], dense: Any, is_transposed: bool
) -> Any:
    """S D: the entries of the sparse matrix times rows of the dense one, added up by row."""
    data, dense = together("sparse_matmul", **{"entries": data, name: dense})
    if dense.ndim != data.ndim + 1 or dense.shape[:-2] != data.shape[:-1]:
        what = "a matrix" if data.ndim == 1 else f"a batch of {data.shape[0]} matrices"
        raise expected("sparse_matmul", name, f"{what} beside the sparse one", describe(dense))
    dense = ops.swap(dense) if is_transposed else dense
    if dense.shape[-2] != size[1]:
        raise expected("sparse_matmul", name, f"{size[1]} rows or columns to match the sparse matrix", describe(dense))
    xp, wide = get_array_module(dense.array), accumulation_dtype(dense.dtype)
    is_there = (row >= 0) & (col >= 0)
    values = ops.where(is_there, ops.cast(data, wide), wide.type(0))
    shape, (m, n), k = dense.shape[:-2], size, dense.shape[-1]
    first = xp.arange(prod(shape)).reshape(*shape, 1) if shape else 0  # the matrices of a batch one below the other
    row, col = ((v * is_there + first * num).reshape(-1) for v, num in ((row, m), (col, n)))
    values, lines = ops.reshape(values, row.shape), ops.reshape(ops.cast(dense, wide), (prod(shape) * n, k))
    y = Product(row, col, prod(shape) * m).apply((values, lines))[0]
    return ops.cast(ops.reshape(y, (*shape, m, k)), dense.dtype)


class Product(FunctionNode):
    """y (M, K): for each entry, ``values[l] lines[col[l]]`` is added to y[row[l]]"""

    gives_new = True

    def __init__(self, row: Array, col: Array, num_rows: int) -> None:
        self.row, self.col, self.num_rows = row, col, num_rows

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        return (_added_up(*xs, self.row, self.col, self.num_rows),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        values, lines = self.retained_inputs()
        rules = (
            lambda: call(Sampled(self.row, self.col), gys[0], lines),
            lambda: call(Product(self.col, self.row, lines.shape[0]), values, gys[0]),
        )
        return tuple(rules[i]() for i in wanted)


class Sampled(FunctionNode):
    """y (L,): of each entry the scalar product of a[row] and b[col]; what of a b' a sparse matrix has places for"""

    gives_new = True

    def __init__(self, row: Array, col: Array) -> None:
        self.row, self.col = row, col

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        (a, b), num = xs, len(self.row)
        y = empty_as(a, (num,), a.dtype)
        step = max(_BLOCK_ELEMENTS // max(a.shape[1], 1), 1) if isinstance(a, np.ndarray) else max(num, 1)
        for start in range(0, num, step):
            block = slice(start, start + step)
            y[block] = get_array_module(a).einsum("lk,lk->l", a[self.row[block]], b[self.col[block]])
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b = self.retained_inputs()
        rules = (
            lambda: call(Product(self.row, self.col, a.shape[0]), gys[0], b),
            lambda: call(Product(self.col, self.row, b.shape[0]), gys[0], a),
        )
        return tuple(rules[i]() for i in wanted)


def _added_up(values: Array, lines: Array, row: Array, col: Array, num_rows: int) -> Array:
    """The forward of :class:`Product`: one small product for each row where that has much to add up.

    5000 entries in 100 rows times 1000 columns take 1.3 ms so, and 90 with sums of single products.
    """
    shape = (num_rows, lines.shape[1])
    starts = _starts(row) if isinstance(row, np.ndarray) else []
    if not starts or row.size * shape[1] < _ROW_ELEMENTS * len(starts):
        return array_operations.scattered(lines[col] * values[:, None], (row,), shape, False)
    y, order = zeros_as(lines, shape, lines.dtype), row.argsort(kind="stable")
    for first, last in pairwise([*starts, row.size]):
        entries = order[first:last]
        y[row[entries[0]]] = values[entries] @ lines[col[entries]]
    return y


def _starts(row: Array) -> list[int]:
    """Where in the sorted rows each begins."""
    found: list[int] = np.flatnonzero(np.diff(np.sort(row), prepend=-1)).tolist()
    return found
