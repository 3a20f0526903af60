"""Kernels that only the host has, each in the place of several passes over memory: see :mod:`dbrdist.kernels.table`.

None as a result means that the formula has to do; so it is for arrays of devices. What batch normalization makes again
for backward is here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dbrdist.core.array.elementwise import KERNEL_ELEMENTS, hand_down_kernel
from dbrdist.core.array.memory import hand_down_repeat
from dbrdist.core.array.types import Array, DType, IntArray
from dbrdist.kernels.reference.numpy_ import MARKS as MARKS
from dbrdist.kernels.table import kernel, key_of, planned

_float32 = np.dtype(np.float32)
_REPEATING = frozenset({"onednn"})  # providers that normalize with given statistics to the same bits as with their own


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
def relu_of_sum_marked(a: Array, b: Array) -> Array:
    """max(a + b, 0) over a, as by :func:`relu_of_sum_over`, and marks of what is not 0 then: a bit for each element in
    the order of memory, ``MARKS`` of them in a number, the first one lowest.

    Both are dense images of float32 on the host, of a multiple of ``MARKS`` elements.
    """
    return "relu_of_sum_marked", *[(type(v), v.shape, v.strides, v.dtype) for v in (a, b)]


@kernel(is_light=True)
def relu_backward_marked(marks: Array, gy: Array, other: Array | None, is_ours: bool) -> Array:
    """:func:`relu_backward` of gy, or of the sum of two gradients, by ``marks`` of the output; over gy if ``is_ours``.

    The gradients are dense images of float32 on the host.
    """
    strides = None if other is None else other.strides
    return "relu_backward_marked", gy.shape, gy.strides, gy.dtype, strides, is_ours


@kernel(is_light=True)
def rectified_sum(y: Array, x: Array, vectors: Array, added: Array, others: Array | None) -> bool:
    """Write to y (M, C) the ReLU of the sum of two matrices: of x, normalized by ``vectors`` (3, C), the means, factors
    and offsets of its columns, and of ``added``, which is normalized by ``others`` if there are any.

    It has the bits of :func:`bn_again`, a sum and a ReLU, of arrays in C order; False: nothing was written, and those
    have to do.
    """
    return "rectified_sum", x.shape, x.dtype, others is None


@key_of("bn_again")
def _bn_again_key(
    x: Array, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, inner: Any, relu: bool,
    axis: tuple[int, ...], out: Array,
) -> Any:  # fmt: skip
    kind = None if inner is None else inner.dtype
    return "bn_again", x.shape, x.strides, x.dtype, eps, kind, relu, axis, out.strides


def may_be_repeated(saved: Any) -> bool:
    """Whether :func:`bn_again` gives the bits of the forward pass that returned ``saved``."""
    return saved is not None and saved[0] in _REPEATING


def bn_again(
    saved: Any, gamma: Array, beta: Array, mean: Array, var: Array, eps: float, relu: bool, axis: tuple[int, ...]
) -> Callable[[Array, Array], None]:
    """A function of x and out: it writes what :func:`bn_forward` gave for images x, all or some, with the statistics of
    all. Rows of images may be images of their own.
    """
    name, inner = saved
    plans: dict[Any, Any] = {}

    def again(x: Array, out: Array) -> None:
        arguments = (x, gamma, beta, mean, var, eps, inner, relu, axis, out)
        plan = plans.get(x.shape)
        if plan is None:
            plan = plans[x.shape] = planned(_bn_again_key(*arguments), arguments, name)
        plan(*arguments)

    return again


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
