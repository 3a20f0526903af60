"""Sequences of different lengths."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, empty_as, full_as, zeros_as
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.tape import ops
from dbrdist.core.tape.checks import describe, expected
from dbrdist.core.tape.elementwise_table import matched
from dbrdist.core.tape.function_node import FunctionNode, call
from dbrdist.core.tape.variable import Operand, Variable, as_array, as_variable


class PadSequence(FunctionNode):
    """y[i] = the i-th input, followed by one value; gx_i = the part of gy[i] that the input fills"""

    def __init__(self, length: int, value: Any) -> None:
        self.length = length
        self.value = value

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        y = full_as(xs[0], (len(xs), self.length, *xs[0].shape[1:]), xs[0].dtype, self.value)
        for row, x in zip(y, xs):
            row[: len(x)] = x
        return (y,)

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(ops.getitem(gys[0], (i, slice(self.inputs[i].shape[0]))) for i in wanted)


def pad_sequence(xs: Sequence[Operand], length: int | None = None, padding: float = 0) -> Variable:
    """Arrays of different lengths as rows of one array, filled up with a constant.

    Args:
        xs: arrays of shapes (L_i, ...), which agree in all axes but the first.
        length: the length of the rows; None takes the largest L_i.
        padding: the number that fills the rest.

    Returns:
        A Variable of shape (N, length, ...).

    Raises:
        ValueError: ``length`` is less than the largest L_i, or the type of xs cannot hold ``padding``.

    Example:
        >>> F.pad_sequence([np.array([1.0, 2.0]), np.array([3.0])], padding=-1).array
        array([[ 1.,  2.],
               [ 3., -1.]])
    """
    xs = _sequences("pad_sequence", xs)
    longest = max(x.shape[0] for x in xs)
    if length is not None and length < longest:
        raise expected("pad_sequence", "length", f"at least {longest}, the length of the longest of xs", length)
    dtype = xs[0].dtype
    try:
        is_held = dtype.kind not in "biu" or bool(dtype.type(padding) == padding)
    except (OverflowError, TypeError, ValueError):
        is_held = False
    if not is_held and as_chainer[0] and isinstance(padding, int):  # NumPy 1 took the lowest bits
        padding, is_held = int(np.asarray(padding).astype(dtype)), True
    if not is_held:
        raise expected("pad_sequence", "padding", f"a number of type {dtype}", repr(padding))
    return PadSequence(longest if length is None else operator.index(length), padding).apply(xs)[0]


class TransposeSequence(FunctionNode):
    """y_t = the t-th elements of the inputs that have one; of inputs in descending length, it is its own inverse"""

    is_linear = True

    def forward(self, xs: tuple[Array, ...]) -> tuple[Array, ...]:
        table = empty_as(xs[0], (len(xs[0]), len(xs), *xs[0].shape[1:]), xs[0].dtype)
        for i, x in enumerate(xs):
            table[: len(x), i] = x
        counts = np.greater.outer([len(x) for x in xs], range(len(xs[0]))).sum(axis=0).tolist()
        return tuple(row[:n] for row, n in zip(table, counts))

    def derive(self, wanted: tuple[int, ...], gys: tuple[Array, ...]) -> tuple[Array, ...]:
        nodes = self.inputs
        like = next(as_array(g) for g in gys if g is not None)
        rest, dtype = nodes[0].shape[1:], nodes[0].dtype
        lengths = [node.shape[0] for node in nodes]
        full = [
            zeros_as(like, (sum(n > t for n in lengths), *rest), dtype) if g is None else g for t, g in enumerate(gys)
        ]
        gxs = call(TransposeSequence(), *full)
        gxs = gxs if isinstance(gxs, tuple) else (gxs,)
        return tuple(gxs[i] if lengths[i] else zeros_as(like, (0, *rest), dtype) for i in wanted)


def transpose_sequence(xs: Sequence[Operand]) -> tuple[Variable, ...]:
    """For each t the t-th elements of all sequences longer than t, stacked.

    Args:
        xs: arrays of shapes (L_i, ...), the longest first.

    Returns:
        A tuple of L_0 Variables of shapes (N_t, ...), with N_t the number of sequences longer than t.

    Raises:
        ValueError: the lengths do not descend.

    Example:
        >>> [y.array.tolist() for y in F.transpose_sequence([np.array([1.0, 2.0]), np.array([3.0])])]
        [[1.0, 3.0], [2.0]]
    """
    if not len(xs):
        return ()
    xs = _sequences("transpose_sequence", xs)
    lengths = [x.shape[0] for x in xs]
    if lengths != sorted(lengths, reverse=True):
        raise expected("transpose_sequence", "xs", "sequences in descending order of length", str(lengths))
    return TransposeSequence().apply(xs) if lengths[0] else ()


def _sequences(function: str, xs: Sequence[Operand]) -> tuple[Variable, ...]:
    found = tuple(as_variable(x) for x in matched(tuple(xs)))
    if not found:
        raise expected(function, "xs", "at least one array", "none")
    for k, x in enumerate(found):
        if not x.ndim or x.shape[1:] != found[0].shape[1:] or x.dtype != found[0].dtype:
            raise expected(function, f"xs[{k}]", f"shape (L, ...) and type to match xs[0], {describe(found[0])}", x)
    return found
