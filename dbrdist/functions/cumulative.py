"""Cumulative sums and products, and products over axes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from dbrdist import kernels
from dbrdist.core.array.array_operations import are_images
from dbrdist.core.array.backend import Array, accumulation_dtype, channels_last, get_array_module
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import floating
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable
from dbrdist.functions.math import checked_axis


def _by_loop(name: str, axis: int, arrays: tuple[Array, ...], *numbers: int, end: str = "") -> Array | None:
    """What a compiled loop makes of arrays of one shape along an axis; None: NumPy has to do.

    The arrays are in C order, perhaps after the first axis has been moved to the end. ``numbers`` are those of loops
    that take any axis.
    """
    shape: tuple[int, ...] = arrays[0].shape
    n, columns = shape[axis], math.prod(shape) // max(shape[axis], 1)
    if axis and axis == len(shape) - 1:
        made = kernels.of_rows(f"{name}_of_rows{end}", arrays, n, *numbers)
        return None if made is None else made[0].reshape(shape)
    if arrays[0].flags.c_contiguous:
        width = (math.prod(shape[axis + 1 :]),) if numbers else ()
        made = kernels.of_rows(f"{name}_of_columns{end}", arrays, n, columns, *numbers, *width)
        return None if made is None else made[0].reshape(shape)
    if axis:
        return None
    turned = tuple([a.transpose((*range(1, a.ndim), 0)) for a in arrays])
    y = kernels.of_rows(f"{name}_of_rows{end}", turned, n, *numbers)
    return None if y is None else y[0].reshape(turned[0].shape).transpose((-1, *range(len(shape) - 1)))


class CumSum(FunctionNode):
    """y_i = the sum of x up to element i along an axis; ``backwards``: from element i on, which is the transpose"""

    is_linear = True

    def __init__(self, axis: int, backwards: bool = False) -> None:
        self.axis = axis
        self.backwards = backwards

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = xs
        y = _by_loop("cumsum", self.axis, (x,), -1 if self.backwards else 1) if x.size else None
        if y is not None:
            return (y,)
        order = (*(slice(None),) * self.axis, slice(None, None, -1 if self.backwards else 1))
        wide = x.astype(accumulation_dtype(x.dtype), copy=False)
        y = wide[order].cumsum(axis=self.axis)[order].astype(x.dtype, copy=False)
        return (channels_last(y) if are_images(x) else y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(CumSum(self.axis, not self.backwards), gys[0]),)


def cumsum(x: Operand, axis: int | None = None) -> Variable:
    """The sums of all elements up to each one, along an axis or of the flattened array.

    Args:
        x: array or Variable of a floating type.
        axis: axis; None for the flattened array.

    Example:
        >>> F.cumsum(np.array([1.0, 2.0, 3.0])).array
        array([1., 3., 6.])
    """
    x, axis = _along("cumsum", x, axis)
    return CumSum(axis).apply((x,))[0]


class Recurrence(FunctionNode):
    """y_j = b_j + a_j y_{j-1} along axis 0, y_0 = b_0

    Its transpose is the same from the end on: gb_j = gy_j + a_{j+1} gb_{j+1}, ga_j = gb_j y_{j-1}.
    """

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        wide = accumulation_dtype(xs[1].dtype)
        a, y = xs[0].astype(wide, copy=False), xs[1].astype(wide)  # a copy
        for j in range(1, len(y)):
            y[j] += a[j] * y[j - 1]
        return (y.astype(xs[1].dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Any, ...]) -> tuple[Any, ...]:
        (a,), (y,) = self.retained_inputs(), self.retained_outputs()
        gb = _accumulated(a, gys[0])
        before = ops.scatter(ops.getitem(y, slice(-1)), slice(1, None), y.shape)
        return tuple(gb if i else ops.mul(gb, before) for i in wanted)


def _accumulated(a: Variable, g: Array) -> Variable:
    """s_j = g_j + a_{j+1} s_{j+1} along axis 0."""
    turned = slice(None, None, -1)
    later = ops.getitem(ops.concat((ops.getitem(a, slice(1, None)), ops.getitem(a, slice(1))), 0), turned)
    return ops.getitem(call(Recurrence(), later, ops.getitem(g, turned)), turned)


def _shifted(y: Variable) -> Variable:
    """1, y_0, y_1, ... along axis 0."""
    like = as_array(y)
    return ops.concat((get_array_module(like).ones((1, *y.shape[1:]), y.dtype), ops.getitem(y, slice(-1))), 0)


class CumProd(FunctionNode):
    """y_i = the product of x up to element i along axis 0

    gx_i = (the product before i) (gy_i + x_{i+1} (gy_{i+1} + x_{i+2} (...))): no division, so that zeros do no harm.
    """

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        self.retain_outputs((0,))
        x = xs[0]
        y = _by_loop("cumprod", 0, xs, 1)
        if y is not None:
            return (y,)
        return (x.astype(accumulation_dtype(x.dtype), copy=False).cumprod(axis=0).astype(x.dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,), (y,) = self.retained_inputs(), self.retained_outputs()
        if not x.shape[0]:
            return gys
        gx = None if self._on_variables else _by_loop("cumprod", 0, (x, y, gys[0]), end="_backward")
        return (ops.mul(_shifted(y), _accumulated(x, gys[0])) if gx is None else gx,)


def cumprod(x: Operand, axis: int | None = None) -> Variable:
    """The products of all elements up to each one, along an axis or of the flattened array.

    Args:
        x: array or Variable of a floating type.
        axis: axis; None for the flattened array.

    Example:
        >>> F.cumprod(np.array([1.0, 2.0, 3.0])).array
        array([1., 2., 6.])
    """
    x, axis = _along("cumprod", x, axis)
    order = (axis, *(i for i in range(x.ndim) if i != axis))
    back = tuple(order.index(i) for i in range(x.ndim))
    return ops.transpose(CumProd().apply((ops.transpose(x, order),))[0], back)


def _along(function: str, x: Operand, axis: int | None) -> tuple[Variable, int]:
    """x and the number of the axis from 0 on; flat where None."""
    floating(function, x=x)
    x = as_variable(x)
    if axis is None:
        return ops.reshape(x, (x.size,)), 0
    (axis,) = checked_axis(function, x, operator.index(axis))
    return x, axis


class Prod(FunctionNode):
    """y = the product of x (K, M) over axis 0; gx = gy times the product of all others, without division"""

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        self.retain_inputs((0,))
        x = xs[0]
        made = self._by_loop("", x)
        if made is not None:
            return (made,)
        return (x.astype(accumulation_dtype(x.dtype), copy=False).prod(axis=0).astype(x.dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        (x,) = self.retained_inputs()
        if not x.shape[0]:
            return (ops.mul(x, 0.0),)
        gx = None if self._on_variables else self._by_loop("_backward", x, gys[0])
        if gx is not None:
            return (gx.reshape(x.shape) if x.flags.c_contiguous else gx.reshape(-1, len(x)).T,)
        turned = slice(None, None, -1)
        before = _shifted(call(CumProd(), x))
        behind = ops.getitem(_shifted(call(CumProd(), ops.getitem(x, turned))), turned)
        return (ops.mul(ops.mul(before, behind), gys[0]),)

    def _by_loop(self, end: str, x: Array, *gys: Array) -> Array | None:
        """What a compiled loop makes of x, which is in C order as it is or turned; None: NumPy has to do."""
        if not x.size:
            return None
        if x.flags.c_contiguous:
            made = kernels.of_rows(f"prod_of_columns{end}", (x, *gys), *x.shape)
        else:
            made = kernels.of_rows(f"prod_of_rows{end}", (x.T, *gys), len(x))
        return None if made is None else made[0]


def prod(x: Operand, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Variable:
    """The product over all elements, or over an axis or a tuple of axes; zeros get their gradient too.

    Args:
        x: array or Variable of a floating type.
        axis: axis or tuple of axes; None for all.
        keepdims: keep the reduced axes with length 1; default False.

    Example:
        >>> F.prod(np.array([[1.0, 2.0], [3.0, 4.0]]), axis=0).array
        array([3., 8.])
    """
    floating("prod", x=x)
    x = as_variable(x)
    axes = checked_axis("prod", x, axis)
    axes = tuple(range(x.ndim)) if axes is None else axes
    rest = tuple(i for i in range(x.ndim) if i not in axes)
    sizes = tuple(math.prod(x.shape[i] for i in some) for some in (axes, rest))
    rows = ops.reshape(ops.transpose(x, axes + rest), sizes)
    shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    return ops.reshape(Prod().apply((rows,))[0], shape if keepdims else tuple(x.shape[i] for i in rest))
