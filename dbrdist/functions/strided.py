"""Arrays read with strides that the caller chooses."""

from __future__ import annotations

import operator
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, accumulation_dtype, get_array_module, zeros
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
    turns = _turns(shape, strides) if type(x.array) is np.ndarray else None
    if turns is not None:
        return Strided(shape, strides, start, turns).apply((flat,))[0]
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


_LEAST = 64  # elements that are added at once, on average; fewer are added by their indices
_FEW = 8  # turns that are no matter
_MANY = 1 << 16  # turns that take too long to find, and too much memory to remember

Turns = list[tuple[int | slice, ...]]


@lru_cache(maxsize=16)
def _turns(shape: tuple[int, ...], strides: tuple[int, ...]) -> Turns | None:
    """Indices of the result, none of which reads an element twice, and in which terms of an element come in C order.

    They run over axes that follow each other, as few places as possible; None if there would be many.
    """
    if _are_apart(shape, strides) or 0 in shape:
        return [()]
    most = min(max(prod(shape) // _LEAST, _FEW), _MANY)
    ends = [(i, k) for i in range(len(shape)) for k in range(i + 1, len(shape) + 1)]
    for first, end in sorted(ends, key=lambda axes: prod(shape[axes[0] : axes[1]])):
        if prod(shape[first:end]) > most:
            return None
        places = _in_order(shape, strides, first, end)
        if places is not None:
            return [(*(slice(None),) * first, *place) for place in places]
    return None


def _in_order(
    shape: tuple[int, ...], strides: tuple[int, ...], first: int, end: int
) -> list[tuple[int, ...]] | None:  # fmt: skip
    """The places along the axes from ``first`` to ``end`` in such an order; None if there is none."""
    places = list(np.ndindex(shape[first:end]))
    if first == 0:
        return places if _are_apart(shape[end:], strides[end:]) else None
    # Where the other axes reach each element once, and the later the further: what two places share comes earlier
    # from the one that starts later.
    reach = 0
    reach_after = 0
    for i in reversed([*range(first), *range(end, len(shape))]):
        if shape[i] > 1 and strides[i] <= reach:
            return None
        reach += (shape[i] - 1) * strides[i]
        reach_after = reach if i >= end else reach_after
    starts = {place: sum(i * step for i, step in zip(place, strides[first:end])) for place in places}
    distinct = sorted(set(starts.values()))
    if any(b - a <= reach_after for a, b in pairwise(distinct)):  # else their order depends on a later axis
        return None
    return sorted(places, key=lambda place: (-starts[place], place))


class Strided(FunctionNode):
    """y = elements of x (L,) on the host: a tenth of the time of indices"""

    is_linear = True
    gives_new = True

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], start: int, turns: Turns) -> None:
        self.place, self.turns = (shape, strides, start), turns

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        return (_view(xs[0], *self.place).copy(),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Unstrided(self.inputs[0].shape, self.place, self.turns), gys[0]),)


class Unstrided(FunctionNode):
    """y (L,) = zeros with x added where :class:`Strided` reads: its transpose"""

    is_linear = True
    gives_new = True

    def __init__(self, shape: tuple[int, ...], place: Any, turns: Turns) -> None:
        self.shape, self.place, self.turns = shape, place, turns

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        x = xs[0]
        if len(self.turns) == 1:
            y = zeros(self.shape, x.dtype, x)
            _view(y, *self.place)[...] = x
            return (y,)
        y = zeros(self.shape, accumulation_dtype(x.dtype), x)
        view = _view(y, *self.place)
        for turn in self.turns:
            view[turn] += x[turn]
        return (y.astype(x.dtype, copy=False),)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return (call(Strided(*self.place, self.turns), gys[0]),)


def _view(flat: Array, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Array:
    step = flat.strides[0]
    return np.lib.stride_tricks.as_strided(flat[start:], shape, [n * step for n in strides])
