"""Kernels that only the host has, each in the place of several passes over memory: see :mod:`dbrdist.kernels.table`.

None as a result means that the formula has to do; so it is for arrays of devices.
"""

from __future__ import annotations

import numpy as np

from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, hand_down_kernel
from dbrdist.core.array.memory import hand_down_repeat
from dbrdist.core.array.types import Array, DType, IntArray
from dbrdist.kernels.table import kernel

_float32 = np.dtype(np.float32)


@kernel(is_light=True)
def _of_rows(name: str, arrays: tuple[Array, ...], numbers: tuple[int, ...]) -> tuple[Array, ...] | None:
    return "of_rows", name, numbers, *[(type(a), a.shape, a.strides, a.dtype) for a in arrays]


def of_rows(name: str, arrays: tuple[Array, ...], *numbers: int) -> tuple[Array, ...] | None:
    """What the loop ``name`` makes of rows, as flat arrays; the first number is the length of a row.

    The arrays are in C order, one row after another; some have one element or two rows for each row, or are one row for
    all, as the loop says (``ROWS`` in vector_loops.h). Small arrays and other types than float32 are left to
    the formula.
    """
    first = arrays[0]
    if type(first) is not np.ndarray or first.size < KERNEL_ELEMENTS or first.dtype != _float32:
        return None
    return _of_rows(name, arrays, numbers)


@kernel(is_light=True)
def sum_of(terms: tuple[Array, ...], out: Array) -> bool:
    """The sum of two or more vectors in order, in fewer passes than additions, into ``out``, which may be the first.

    False: nothing was written, and additions have to do.
    """
    return "sum_of", out.dtype, *[(type(a), a.shape, a.strides, a.dtype) for a in terms]


@kernel(is_light=True)
def repeat(a: Array, values: Array) -> bool:
    """Copy ``values``, a broadcast view of the shape of ``a``, to ``a``. False: nothing was written."""
    return "repeat", a.shape, a.strides, a.dtype, values.strides


@kernel(is_light=True)
def relu_of_sum_over(a: Array, b: Array) -> bool:
    """max(a + b, 0), rounded as by both in turn, over a, which lies as b does and shares no memory with it: one pass
    instead of two.

    False: nothing was written, and an addition and a ReLU have to do.
    """
    return "relu_of_sum_over", *[(type(v), v.shape, v.strides, v.dtype) for v in (a, b)]


@kernel(is_light=True)
def pick_rows(rows: Array, numbers: IntArray, picked: Array, adds: bool) -> bool:
    """Copy the rows (outer, height, width) of these numbers to (outer, count, width), or add those to them, in order.

    False: nothing was written, and NumPy has to do.
    """
    return "pick_rows", rows.dtype, picked.dtype, numbers.dtype, rows.size > 0


@kernel(is_light=True)
def filter_rows(pixels: Array, first: IntArray, counts: IntArray, weights: Array, out: Array) -> bool:
    """Rows of bytes (new, width) of those of (old, width): sums of ``counts`` rows from ``first`` on times ``weights``
    (new, taps) of float32, rounded to the nearest byte, what is halfway upwards. The sums are exact.

    False: nothing was written, and NumPy has to do.
    """
    return "filter_rows", pixels.dtype, first.dtype, counts.dtype, weights.dtype, out.dtype


@kernel(is_light=True)
def convert(x: Array, dtype: DType) -> Array | None:
    """A copy of x on the host in another type, laid out as x. None: NumPy has to do."""
    return "convert", x.shape, x.strides, x.dtype, dtype


@kernel(is_light=True)
def philox(words: IntArray, counter: IntArray, key: IntArray) -> bool:
    """Write the first words of NumPy's Philox with a counter (4,) and a key (2,); False: NumPy has to do."""
    return ("philox",)


hand_down_kernel("convert", convert)
hand_down_kernel("philox", philox)
hand_down_kernel("of_rows", of_rows)
hand_down_kernel("pick_rows", pick_rows)
hand_down_repeat(repeat)
