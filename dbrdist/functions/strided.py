"""Arrays read with strides that the caller chooses."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, get_array_module, zeros
from dbrdist.core.array.types import Shape
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import expected
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_variable


def as_strided(x: Operand, shape: Shape, strides: Shape, storage_offset: int | None = None) -> Variable:
    """y[i, j, ...] = element storage_offset + i strides[0] + j strides[1] + ... of x.

    Args:
        x: any array, whose elements are counted in C order, however they lie in memory.
        shape: shape of the result.
        strides: for each axis the distance of its elements, in elements of x; 0 repeats, below 0 goes back.
        storage_offset: the first element; None for 0.

    The gradients of an element that is read several times add up.

    Example:
        >>> F.as_strided(np.arange(4.0), (3, 2), (1, 1)).array
        array([[0., 1.],
               [1., 2.],
               [2., 3.]])
    """
    x = as_variable(x)
    shape = (
        (operator.index(shape),) if isinstance(shape, (int, np.integer)) else tuple(operator.index(n) for n in shape)
    )
    strides = (
        (operator.index(strides),)
        if isinstance(strides, (int, np.integer))
        else tuple(operator.index(n) for n in strides)
    )
    if len(shape) != len(strides):
        raise expected(
            "as_strided", "strides", f"a number for each axis of shape {shape}, which are from 0 on", strides
        )
    if min(shape, default=0) < 0:
        raise expected("as_strided", "shape", "lengths from 0 on", shape)
    start = 0 if storage_offset is None else operator.index(storage_offset)
    reach = [(n - 1) * step for n, step in zip(shape, strides)]
    low, high = (start + sum(f(v, 0) for v in reach) for f in (min, max))
    if 0 not in shape and not 0 <= low <= high < x.size:
        got = f"elements {low} to {high}"
        raise expected("as_strided", "strides", f"elements from 0 to {x.size - 1} of x of shape {x.shape}", got)
    flat = ops.reshape(x, (x.size,))
    if type(x.array) is np.ndarray and _are_apart(shape, strides):
        return Strided(shape, strides, start).apply((flat,))[0]
    xp = get_array_module(x.array)
    index = xp.asarray(start)
    for n, step in zip(shape, strides):
        index = index[..., None] + xp.arange(n) * step
    return ops.getitem(flat, index)


def _are_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True if no element is read twice, as is plain where each step is longer than all shorter ones reach."""
    reach = 0
    for step, n in sorted((abs(step), n) for step, n in zip(strides, shape) if n > 1):
        if step <= reach:
            return False
        reach += (n - 1) * step
    return True


class Strided(FunctionNode):
    """y = elements of x (L,) on the host, none of them twice: a tenth of the time of indices"""

    is_linear = True
    gives_new = True

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> None:
        self.place = shape, strides, start

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (_view(xs[0], *self.place).copy(),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Unstrided(self.inputs[0].shape, self.place), gys[0]),)


class Unstrided(FunctionNode):
    """y (L,) = zeros with x where :class:`Strided` reads: its transpose"""

    is_linear = True
    gives_new = True

    def __init__(self, shape: tuple[int, ...], place: Any) -> None:
        self.shape, self.place = shape, place

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = zeros(self.shape, xs[0].dtype, xs[0])
        _view(y, *self.place)[...] = xs[0]
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Strided(*self.place), gys[0]),)


def _view(flat: Array, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Array:
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(flat[start:], shape, [n * step for n in strides])
