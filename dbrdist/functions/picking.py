"""Picking, permuting and replacing elements. Nearly all are compositions of the primitives in ``core.tape.ops``."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import (
    Array,
    empty,
    get_array_module,
    is_array,
    zeros,
    zeros_as,
)
from dbrdist.core.array.config import config
from dbrdist.core.array.gpu.mixed_devices import refuse_mixed
from dbrdist.core.array.types import Index
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.elementwise_table import matched, together
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.shapes import broadcast as broadcast
from dbrdist.functions.shapes import broadcast_to as broadcast_to
from dbrdist.functions.shapes import expand_dims as expand_dims
from dbrdist.functions.shapes import flatten as flatten
from dbrdist.functions.shapes import moveaxis as moveaxis
from dbrdist.functions.shapes import one_axis
from dbrdist.functions.shapes import reshape as reshape
from dbrdist.functions.shapes import rollaxis as rollaxis
from dbrdist.functions.shapes import squeeze as squeeze
from dbrdist.functions.shapes import sum_to as sum_to
from dbrdist.functions.shapes import swapaxes as swapaxes
from dbrdist.functions.shapes import transpose as transpose

# ---- picking --------------------------------------------------------------------------------------------------------


def get_item(x: Operand, slices: Index) -> Variable:
    """x[slices], with numbers, slices, None, Ellipsis and integer or boolean arrays.

    Args:
        x: array or Variable.
        slices: numbers, slices, None, Ellipsis, and arrays of integers or booleans, as in NumPy.

    Example:
        >>> F.get_item(np.array([[1.0, 2.0], [3.0, 4.0]]), (slice(None), 0)).array
        array([1., 3.])
    """
    _check_ellipses("get_item", slices)
    return ops.getitem(as_variable(x), slices)


def _check_ellipses(function: str, slices: Any) -> None:
    if isinstance(slices, (tuple, list)) and sum(s is Ellipsis for s in slices) > 1:
        raise expected(function, "slices", "at most one Ellipsis", repr(slices))


def select_item(x: Operand, t: Operand) -> Variable:
    """x[n, t_n] for each row n; x (N, K), t (N,) integers.

    Args:
        x: scores (N, K).
        t: integers (N,), from 0 to K - 1.

    Example:
        >>> F.select_item(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 0])).array
        array([2., 3.])
    """
    x, t = as_variable(x), as_array(t)
    if x.ndim != 2 or t.shape != x.shape[:1] or t.dtype.kind not in "iu":
        raise expected("select_item", "t", f"integers of shape {x.shape[:1]} for x of shape (N, K)", t)
    if config.debug and t.size and not 0 <= int(t.min()) <= int(t.max()) < x.shape[1]:
        raise expected("select_item", "t", f"integers from 0 to {x.shape[1] - 1}", f"{t.min()} to {t.max()}")
    return ops.getitem(x, (get_array_module(t).arange(len(t)), t))


class Permutation(FunctionNode):
    """y = the slices of x along an axis in another order"""

    is_linear = True
    gives_new = True

    def __init__(self, axis: int, order: Array, inverse: Array) -> None:
        self.axis, self.order, self.inverse = axis, order, inverse

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (xs[0].take(self.order, self.axis),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Permutation(self.axis, self.inverse, self.order), gys[0]),)


def permutate(x: Operand, indices: Operand, axis: int = 0, inv: bool = False) -> Variable:
    """Slices along an axis in the order of ``indices``; ``inv`` undoes that.

    Args:
        x: array or Variable.
        indices: integers (n,): the old positions in their new order.
        axis: the axis, of length n; default 0.
        inv: undo the permutation instead; default False.

    Example:
        >>> F.permutate(np.array([1.0, 2.0, 3.0]), np.array([2, 0, 1])).array
        array([3., 1., 2.])
    """
    x, indices = as_variable(x), as_array(indices)
    axis = one_axis("permutate", x.ndim, axis)
    n = x.shape[axis]
    if indices.shape != (n,) or indices.dtype.kind not in "iu":
        raise expected("permutate", "indices", f"integers of shape ({n},) to match axis {axis} of x", indices)
    if n and (int(indices.min()) < -n or int(indices.max()) >= n):
        raise expected("permutate", "indices", f"places from {-n} to {n - 1}", f"{indices.min()} to {indices.max()}")
    xp = get_array_module(indices)
    if config.debug and n and (int(indices.min()) < 0 or len(xp.unique(indices)) < n):
        raise expected("permutate", "indices", f"each place from 0 to {n - 1} once, in debug mode", str(indices))
    order = indices.astype(np.intp) % max(n, 1)
    inverse = xp.argsort(order)
    if not bool((order[inverse] == xp.arange(n)).all()):  # some element is taken twice
        return ops.getitem(x, (*(slice(None),) * axis, inverse if inv else order))
    return Permutation(axis, *((inverse, order) if inv else (order, inverse))).apply((x,))[0]


def flip(x: Operand, axis: int) -> Variable:
    """The order of elements reversed along an axis.

    Args:
        x: array or Variable.
        axis: axis to reverse.

    Example:
        >>> F.flip(np.array([1.0, 2.0, 3.0]), 0).array
        array([3., 2., 1.])
    """
    x = as_variable(x)
    axis = one_axis("flip", x.ndim, axis)
    return ops.getitem(x, (*(slice(None),) * axis, slice(None, None, -1)))


def flipud(a: Operand) -> Variable:
    """The order of rows (axis 0) reversed.

    Args:
        a: array or Variable with that axis.

    Example:
        >>> F.flipud(np.array([[1.0], [2.0]])).array
        array([[2.],
               [1.]])
    """
    return flip(a, 0)


def fliplr(a: Operand) -> Variable:
    """The order of columns (axis 1) reversed.

    Args:
        a: array or Variable with that axis.

    Example:
        >>> F.fliplr(np.array([[1.0, 2.0]])).array
        array([[2., 1.]])
    """
    return flip(a, 1)


class Diagonal(FunctionNode):
    """y = the diagonal over two axes, as a view with its axis last"""

    is_linear = True

    was_images = False

    def __init__(self, offset: int, axes: tuple[int, int]) -> None:
        self.offset = offset
        self.axes = axes

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.was_images = are_images(xs[0])
        return (xs[0].diagonal(self.offset, *self.axes),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(OntoDiagonal(self.offset, self.axes, self.inputs[0].shape, self.was_images), gys[0]),)


class OntoDiagonal(FunctionNode):
    """y = zeros with x on the diagonal over two axes: the transpose of Diagonal"""

    is_linear = True

    def __init__(self, offset: int, axes: tuple[int, int], shape: tuple[int, ...], to_images: bool) -> None:
        self.offset = offset
        self.axes = axes
        self.shape = shape
        self.to_images = to_images

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = xs
        y = zeros(self.shape, x.dtype, x) if self.to_images else zeros_as(x, self.shape, x.dtype)
        rest = [i for i in range(y.ndim) if i not in self.axes]
        along = get_array_module(x).arange(x.shape[-1])
        y.transpose((*self.axes, *rest))[along + max(-self.offset, 0), along + max(self.offset, 0)] = x.transpose(
            (x.ndim - 1, *range(x.ndim - 1))
        )
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Diagonal(self.offset, self.axes), gys[0]),)


def diagonal(x: Operand, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Variable:
    """The diagonal over two axes, which it replaces by one axis at the end; ``offset`` counts columns to the right.

    Args:
        x: array or Variable with at least two axes.
        offset: columns to the right of the main diagonal, negative for the left; default 0.
        axis1: axis of the rows; default 0.
        axis2: axis of the columns; default 1.

    Example:
        >>> F.diagonal(np.arange(9.0).reshape(3, 3)).array
        array([0., 4., 8.])
    """
    x = as_variable(x)
    if x.ndim < 2:
        raise expected("diagonal", "x", "at least 2 axes", x)
    axes = one_axis("diagonal", x.ndim, axis1, "axis1"), one_axis("diagonal", x.ndim, axis2, "axis2")
    if axes[0] == axes[1]:
        raise expected("diagonal", "axis2", f"another axis than axis1 = {axis1}", axis2)
    return Diagonal(operator.index(offset), axes).apply((x,))[0]


def where(condition: Array, x: Any, y: Operand) -> Variable:
    """x where ``condition`` (bool) holds, else y, with broadcasting; the condition gets no gradient.

    Args:
        condition: booleans, which broadcast with x and y.
        x: values where the condition holds.
        y: values elsewhere.

    Example:
        >>> F.where(np.array([True, False]), np.array([1.0, 2.0]), np.array([3.0, 4.0])).array
        array([1., 4.])
    """
    condition = as_array(condition)
    if isinstance(condition, np.bool_):  # what NumPy's comparisons make of arrays without axes
        condition = np.asarray(condition)
    if not is_array(condition) or condition.dtype != bool:
        raise expected("where", "condition", "an array of bool", condition)
    refuse_mixed("where", condition=condition, x=x, y=y)
    x, y = matched((x, y))
    return as_variable(ops.where(condition, x, y))


def scatter_add(a: Operand, slices: Index, b: Operand) -> Variable:
    """a with b added at ``slices``; repeated indices add up.

    Args:
        a: array or Variable.
        slices: numbers, slices or arrays of integers, as in NumPy.
        b: values to add, which broadcast to a[slices].

    Example:
        >>> F.scatter_add(np.zeros(3), np.array([0, 0, 2]), np.ones(3)).array
        array([2., 0., 1.])
    """
    _check_ellipses("scatter_add", slices)
    a, b = together("scatter_add", "number", a=a, b=b)
    slices = as_array(slices)
    target = empty(a.shape, bool, a.array)[slices].shape  # on the device, where slices may lie
    return ops.add(a, ops.scatter(ops.broadcast_to(b, target), slices, a.shape))
