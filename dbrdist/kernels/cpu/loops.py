"""The provider ``loops``: update rules and some elementwise functions in one pass over memory, in own C.

The loops, in ``vector_loops.h``, run on OpenMP's threads. The provider serves float32 and float64 where dbrdist is
compiled. Elsewhere NumPy's formulas, which take several passes over pieces that stay in cache, give the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array import backend
from dbrdist.kernels.cpu import onednn
from dbrdist.kernels.cpu.onednn_finite import memory_row
from dbrdist.kernels.reference import numpy_

try:
    from dbrdist.kernels.cpu import vector_loops as _found
except ImportError:  # not compiled
    _found = None

Array = np.ndarray
Plan = Callable[..., Any]

_PLACES: dict[str, int] = {} if _found is None else _found.PLACES
_REAL = np.dtype(np.float32), np.dtype(np.float64)
_FEW = 1 << 13  # elements of an array up to which the call costs as much as it saves

# Rows of elementwise functions, or gradients of an operand: the loop, and the operands that it takes, in order.
TABLE: dict[Any, tuple[str, tuple[str, ...]]] = {
    "hard_sigmoid": ("hard_sigmoid", ("x",)),
    ("hard_sigmoid", 0): ("hard_sigmoid_gradient", ("x", "gy")),
    "huber": ("huber", ("x", "t")),
    ("huber", 0): ("huber_gradient", ("x", "t", "gy")),
}


def _loop(name: str, *arrays: Array | None) -> Callable[..., bool]:
    """A function of arrays like these and numbers; Unsupported where no loop takes them."""
    present = [a for a in arrays if a is not None]
    dtype = present[0].dtype
    if name not in _PLACES or dtype not in _REAL or any(type(a) is not np.ndarray or a.dtype != dtype for a in present):
        raise onednn.Unsupported("no compiled loop, or none for these types")
    return functools.partial(_found.run, _PLACES[name], dtype.itemsize == 8)


def _elementwise_loop(name: str, *arrays: Array) -> tuple[Callable[..., bool], Any]:
    """As :func:`_loop`, of large arrays that lie alike, and what allocates another such array."""
    first = arrays[0]
    are_images = first.ndim == 4 and backend.lies_as_images(first)
    lies_well = backend.is_channels_last if are_images else _is_in_c_order
    if first.size < _FEW or any(a.shape != first.shape or not lies_well(a) for a in arrays):
        raise onednn.Unsupported("small arrays, or layouts that differ")
    new = (backend.allocator if are_images else backend.plain_allocator)(first.shape, first.dtype)
    return _loop(name, *arrays), new


def _is_in_c_order(a: Array) -> bool:
    return bool(a.flags.c_contiguous)


def _plan_update(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> Plan:
    """See dispatch.update. Absent arrays are the last ones."""
    run = _loop("amsgrad" if rule == "adam" and arrays[-1] is not None else rule, *arrays)
    count = sum(a is not None for a in arrays)

    def update(rule: str, arrays: tuple[Array | None, ...], numbers: tuple[float, ...]) -> bool:
        return run(arrays[:count], numbers)

    return update


def _plan_row(key: Any, names: tuple[str, ...], arrays: tuple[Array, ...], numbers: tuple[Any, ...]) -> Plan:
    name, operands = TABLE.get(key, ("", ()))
    are_meant = all(type(v) in (int, float) and 0 <= v < math.inf for v in numbers)
    if names != operands or not are_meant:
        raise onednn.Unsupported("a row, or its numbers")
    run, new = _elementwise_loop(name, *arrays)

    def row(key: Any, names: tuple[str, ...], arrays: tuple[Array, ...], numbers: tuple[Any, ...]) -> Array | None:
        y = new()
        return y if run((memory_row(y), *map(memory_row, arrays)), numbers) else None

    return row


def _plan_relu_backward(y: Array, gy: Array) -> Plan:
    run, new = _elementwise_loop("relu_backward", y, gy)

    def relu_backward(y: Array, gy: Array) -> Array:
        gx = new()
        done = run((memory_row(gx), memory_row(y), memory_row(gy)), ())
        return gx if done else numpy_.relu_backward(y, gy)

    return relu_backward


def _plan_relu_backward_over(y: Array, gy: Array) -> Plan:
    run, _ = _elementwise_loop("relu_backward_over", gy, y)

    def relu_backward_over(y: Array, gy: Array) -> Array:
        done = run((memory_row(gy), memory_row(y)), ())
        return gy if done else numpy_.relu_backward(y, gy)

    return relu_backward_over


def _plan_relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Plan:
    """See numpy_.relu_backward_of_sum; ``out`` is a, b or new."""
    run, new = _elementwise_loop("relu_backward_of_sum", y, a, b)
    over = _loop("relu_backward_of_sum_over", y, a, b)

    def relu_backward_of_sum(y: Array, a: Array, b: Array, out: Array | None = None) -> Array:
        rows = [memory_row(v) for v in (y, a, b)]
        if out is None:
            gx = new()
            done = run((memory_row(gx), *rows), ())
        else:
            gx, (of_y, of_a, of_b) = out, rows
            done = over((of_a, of_y, of_b) if out is a else (of_b, of_y, of_a), ()) if out is a or out is b else False
        return gx if done else numpy_.relu_backward_of_sum(y, a, b, out)

    return relu_backward_of_sum


ROWS = {
    "update": _plan_update,
    "row": _plan_row,
    "relu_backward": _plan_relu_backward,
    "relu_backward_over": _plan_relu_backward_over,
    "relu_backward_of_sum": _plan_relu_backward_of_sum,
}
