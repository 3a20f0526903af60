"""Matrix products, tensor contractions and means with weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.elementwise import fused
from dbrdist.core.array.sums import product_sum, sum_over
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.elementwise_table import from_kernel, together
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.tape.variable import Operand, Variable

# ---- matrix products ------------------------------------------------------------------------------------------------


def matmul(a: Operand, b: Operand, transa: bool = False, transb: bool = False) -> Variable:
    """The matrix product of the last two axes, the others broadcasting; ``transa``, ``transb`` swap them first.

    A vector counts as a row on the left and as a column on the right.

    Args:
        a: left operand, a stack of matrices (..., M, K).
        b: right operand (..., K, L).
        transa: exchange the last two axes of a first; default False.
        transb: exchange the last two axes of b first; default False.

    Example:
        >>> F.matmul(np.array([[1.0, 2.0]]), np.array([[3.0], [4.0]])).array
        array([[11.]])
    """
    a, b = together("matmul", "number", is_product=True, a=a, b=b)
    if not a.ndim or not b.ndim:
        raise expected("matmul", "b" if a.ndim else "a", "at least one axis", b if a.ndim else a)
    if transa and a.ndim > 1:
        a = ops.swap(a)
    if transb and b.ndim > 1:
        b = ops.swap(b)
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise expected("matmul", "b", f"{a.shape[-1]} rows to match a of shape {a.shape}", b)
    return ops.matmul(a, b)


def batch_matmul(a: Operand, b: Operand, transa: bool = False, transb: bool = False) -> Variable:
    """Products of N pairs of matrices, a (N, M, K), b (N, K, L); an argument of two axes holds N columns.

    Args:
        a: left operand, a stack of matrices (..., M, K).
        b: right operand (..., K, L).
        transa: exchange the last two axes of a first; default False.
        transb: exchange the last two axes of b first; default False.

    Example:
        >>> F.batch_matmul(np.ones((5, 2, 3)), np.ones((5, 3, 4))).shape
        (5, 2, 4)
    """
    a, b = together("batch_matmul", "number", is_product=True, a=a, b=b)
    a, b = (ops.reshape(v, (*v.shape, 1)) if v.ndim == 2 else v for v in (a, b))
    if a.shape[0] != b.shape[0]:
        raise expected("batch_matmul", "b", f"{a.shape[0]} matrices as in a", b)
    return matmul(a, b, transa, transb)


def tensordot(a: Operand, b: Operand, axes: Any = 2) -> Variable:
    """The sum of products over axes: the last ``axes`` of a with the first of b, or two lists of axes.

    Args:
        a: left operand.
        b: right operand.
        axes: number of axes to sum over, or a pair of lists of axes; default 2.

    Example:
        >>> F.tensordot(np.ones((2, 3, 4)), np.ones((3, 4, 5))).shape
        (2, 5)
    """
    a, b = together("tensordot", "number", is_product=True, a=a, b=b)
    if isinstance(axes, (int, np.integer)):
        left, right = tuple(range(a.ndim - axes, a.ndim)), tuple(range(axes))
    else:
        left, right = ((v,) if isinstance(v, (int, np.integer)) else tuple(v) for v in axes)
    left, right = tuple(i % a.ndim for i in left), tuple(i % b.ndim for i in right)
    if [a.shape[i] for i in left] != [b.shape[i] for i in right]:
        raise expected("tensordot", "b", f"axes {right} that match axes {left} of a of shape {a.shape}", b)
    rows = tuple(i for i in range(a.ndim) if i not in left)
    columns = tuple(i for i in range(b.ndim) if i not in right)
    common = math.prod(a.shape[i] for i in left)
    a2 = ops.reshape(ops.transpose(a, rows + left), (math.prod(a.shape[i] for i in rows), common))
    b2 = ops.reshape(ops.transpose(b, right + columns), (common, math.prod(b.shape[i] for i in columns)))
    return ops.reshape(ops.matmul(a2, b2), tuple(a.shape[i] for i in rows) + tuple(b.shape[i] for i in columns))


# ---- means with weights ---------------------------------------------------------------------------------------------


class WeightedMean(FunctionNode):
    """y = sum w x / sum w over axes; x and w have one shape, and a type in which sums run

    gx = w gy / sum w, gw = (x - y) gy / sum w
    """

    gives_new = True

    def __init__(self, axis: tuple[int, ...] | None, keepdims: bool) -> None:
        self.axis = axis
        self.keepdims = keepdims

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0, 1))
        x, w = xs
        self.total = ops.reshape(sum_over(w, self.axis, True), self._shape(x.shape, True))
        self.y = ops.reshape(product_sum(x, w, self.axis, True), self.total.shape) / self.total
        return (ops.reshape(self.y, self._shape(x.shape, self.keepdims)),)

    def _shape(self, shape: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
        gone = range(len(shape)) if self.axis is None else self.axis
        return tuple([1 if i in gone else n for i, n in enumerate(shape) if keepdims or i not in gone])

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        x, w = self.retained_inputs()
        y, total = self.y, self.total
        if self._on_variables:
            total = ops.sum(w, self.axis, True)
            y = ops.div(ops.sum(ops.mul(x, w), self.axis, True), total)
        share = ops.div(ops.reshape(gys[0], self.total.shape), total)
        if len(wanted) == 2 and type(share) is np.ndarray:
            lone = [np.broadcast_to(v, x.shape) for v in (y, share)]
            gxs = from_kernel(("weighted_mean", "each"), ("x", "w", "y", "share"), (x, w, *lone), ())
            if gxs is not None:
                return gxs  # type: ignore[return-value]
        return tuple([_scaled_difference(x, y, share) if i else ops.mul(w, share) for i in wanted])


def _scaled_difference(x: Array, y: Array, share: Array) -> Array:
    """(x - y) share; of large arrays in one pass over memory"""
    if any(isinstance(v, Variable) for v in (x, y, share)):
        return ops.mul(ops.sub(x, y), share)
    return fused(lambda x, y, share: (x - y) * share, x, y, share)
