"""Sparse matrices as lists of their entries."""

from __future__ import annotations

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, on
from dbrdist.core.array.config import config
from dbrdist.core.array.ordered_sums import add_in_order
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.variable import Operand, Variable


class CooMatrix:
    """A sparse matrix, or a batch of them, as entries with their rows and columns.

    Args:
        data: the entries, an array or Variable of shape (L,), or (B, L) of B matrices.
        row, col: rows and columns of the entries, integers of the shape of ``data``. Entries in the same place add up;
            those with a row or column below 0 are none.
        shape: rows and columns of a matrix.
        order: 'C' where entries are sorted by row, 'F' where by column, 'other', or None to find out.
        requires_grad: whether ``data``, which becomes a Variable, takes a gradient; a Variable stays as it is.

    Example:
        >>> a = dbrdist.utils.CooMatrix(np.array([2.0]), np.array([0]), np.array([1]), (2, 2))
        >>> a.to_dense()
        array([[0., 2.],
               [0., 0.]])
    """

    def __init__(
        self,
        data: Operand,
        row: Array,
        col: Array,
        shape: tuple[int, ...],
        order: str | None = None,
        requires_grad: bool = False,
    ) -> None:
        if data.ndim not in (1, 2):
            raise expected("CooMatrix", "data", "1 axis, or 2 for a batch", data)
        for name, a in (("row", row), ("col", col)):
            if a.shape != data.shape or a.dtype.kind not in "iu":
                raise expected("CooMatrix", name, f"integers of shape {data.shape} to match data", a)
        shape = tuple(int(n) for n in shape)
        if len(shape) != 2 or min(shape) < 1:
            raise expected("CooMatrix", "shape", "two numbers from 1 on", str(shape))
        if order not in ("C", "F", "other", None):
            raise expected("CooMatrix", "order", "'C', 'F', 'other' or None", repr(order))
        with on(data):
            for name, a, length in (("row", row, shape[0]), ("col", col, shape[1])):
                if a.size and int(a.max()) >= length:
                    raise expected("CooMatrix", name, f"numbers below {length} for shape {shape}", f"{int(a.max())}")
        self.data = data if isinstance(data, Variable) else Variable(data, requires_grad=requires_grad)
        self.row, self.col, self.shape = row, col, shape
        with on(data):
            self.order = get_order(row, col) if order is None else order

    def to_dense(self) -> Array:
        """The matrix (rows, columns), or the batch of them, as an array."""
        with on(self.data):
            return self._dense_here(self.data.array)

    def _dense_here(self, data: Array) -> Array:
        xp = get_array_module(data)
        is_there = (self.row >= 0) & (self.col >= 0)
        x = xp.zeros((*data.shape[:-1], *self.shape), data.dtype)
        batch = () if data.ndim == 1 else (xp.broadcast_to(xp.arange(len(data))[:, None], data.shape)[is_there],)
        places = (*batch, self.row[is_there], self.col[is_there])
        if xp is not np and config.cudnn_deterministic:
            add_in_order(x, places, data[is_there])
        else:
            xp.add.at(x, places, data[is_there])
        return x


def to_coo(x: Array, ldnz: int | None = None, requires_grad: bool = False) -> CooMatrix:
    """The entries of a matrix (M, N), or of a batch of matrices (B, M, N), that are not zero.

    ``ldnz``: how many entries there are at least; those too many have row and column -1 and are zero.

    Args:
        x: a matrix (M, N), or a batch of matrices (B, M, N).
        ldnz: the least number of entries to store; those beyond the matrix's own have row and column -1 and are zero.
            None takes as many as there are.
        requires_grad: True makes the entries a Variable that takes a gradient.

    Raises:
        ValueError: x has another number of axes.

    Example:
        >>> dbrdist.utils.to_coo(np.array([[0.0, 2.0], [3.0, 0.0]])).row
        array([0, 1], dtype=int32)
    """
    if x.ndim not in (2, 3):
        raise expected("to_coo", "x", "a matrix, or a batch of them", x)
    with on(x):
        return _to_coo_here(x, ldnz, requires_grad)


def _to_coo_here(x: Array, ldnz: int | None, requires_grad: bool) -> CooMatrix:
    xp = get_array_module(x)
    batch = x if x.ndim == 3 else x[None]
    where = xp.nonzero(batch)
    counts = xp.bincount(where[0], minlength=len(batch)) if len(batch) else xp.zeros(0, "i8")
    size = max(int(counts.max()) if len(batch) else 0, ldnz or 0)
    number = xp.arange(len(where[0])) - (xp.cumsum(counts) - counts)[where[0]]  # of an entry in its matrix
    data = xp.zeros((len(batch), size), x.dtype)
    row, col = (xp.full((len(batch), size), -1, "i4") for _ in range(2))
    data[where[0], number] = batch[where]
    row[where[0], number], col[where[0], number] = where[1], where[2]
    if x.ndim == 2:
        data, row, col = data[0], row[0], col[0]
    return CooMatrix(data, row, col, x.shape[-2:], requires_grad=requires_grad)


def get_order(row: Array, col: Array) -> str:
    """'C' where entries are sorted by row and then column, 'F' where by column and then row, else 'other'.

    Args:
        row, col: the rows and columns of the entries, integers of one shape.

    Raises:
        ValueError: the shapes differ, or one of row and column is below 0 and the other is not.

    Example:
        >>> dbrdist.utils.get_order(np.array([0, 0, 1]), np.array([0, 1, 0]))
        'C'
    """
    if row.shape != col.shape:
        raise expected("get_order", "col", f"shape {row.shape} to match row", col)
    if bool(((row < 0) != (col < 0)).any()):
        raise expected("get_order", "row, col", "both below 0 for an entry that is none, or neither", "one of them")
    return "C" if _is_sorted(row, col) else "F" if _is_sorted(col, row) else "other"


def _is_sorted(first: Array, second: Array) -> bool:
    """Whether pairs ascend along the last axis, those below 0 left out; they stand at the end, as a rule."""
    if first.ndim > 1:
        return all(_is_sorted(a, b) for a, b in zip(first, second))
    first, second = first[first >= 0], second[second >= 0]
    step = first[1:].astype("i8") - first[:-1]
    return not bool(((step < 0) | ((step == 0) & (second[1:] < second[:-1]))).any())
