"""What a converter of one function works with: the call, the names of its operands, and sizes that follow the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dbrdist.onnx.graph import OnnxGraph
from dbrdist.onnx.tracing import TracedCall

Converter = Callable[[OnnxGraph, "Conversion"], Any]
CONVERTERS: dict[str, Converter] = {}  # by the name of the node's class, or of an observed computation


class OperatorError(ValueError):
    """A function without a counterpart in ONNX, or a model that an ONNX graph cannot represent."""


def converts(*kinds: str) -> Callable[[Converter], Converter]:
    """Declare the converter of these functions: it takes the graph and a Conversion, and returns the output's name, or
    a list of names."""

    def declare(converter: Converter) -> Converter:
        for kind in kinds:
            CONVERTERS[kind] = converter
        return converter

    return declare


class Size(int):
    """A length in the traced pass that is ``other`` in a pass with another batch."""

    other: int

    def __new__(cls, value: int, other: int) -> Size:
        self = super().__new__(cls, value)
        self.other = other
        return self


def product(sizes: Iterable[int]) -> Size:
    """The product of lengths, for both batches."""
    sizes = list(sizes)
    return Size(math.prod(sizes), math.prod(getattr(n, "other", n) for n in sizes))


class Conversion:
    """One call on its way into a graph."""

    def __init__(
        self, g: OnnxGraph, call: TracedCall, other: TracedCall, names: list[str], name_of: Any, batch: Any
    ) -> None:
        self.g, self.call, self.other = g, call, other
        self.names = names
        self.name_of: Callable[[Any], str] = name_of  # of an array that the node keeps, such as a condition
        self._batch = batch  # a function that gives the name of the batch's size, with its two values

    @property
    def node(self) -> Any:
        """The function node, or the attributes of an observed computation."""
        return self.call.node

    @property
    def dtype(self) -> Any:
        """The type of the first result."""
        return self.call.ys[0].dtype

    def shape(self, i: int = 0) -> tuple[Size, ...]:
        """The shape of operand i."""
        return self._sizes(self.call.xs[i], self.other.xs[i])

    def out_shape(self, j: int = 0) -> tuple[Size, ...]:
        """The shape of result j."""
        return self._sizes(self.call.ys[j], self.other.ys[j])

    def _sizes(self, a: Any, b: Any) -> tuple[Size, ...]:
        return tuple(Size(n, m) for n, m in zip(np.shape(a), np.shape(b)))

    def number(self, value: Any) -> str:
        """A number of the first result's type."""
        return self.g.number(value, self.dtype)

    def fixed(self, what: str, value: Any, other: Any) -> Any:
        """A value that must not depend on the batch."""
        if not _equal(value, other):
            raise OperatorError(f"{what} depends on the batch size; export without dynamic_batch")
        return value

    def attribute(self, name: str) -> Any:
        """An attribute of the node that must not depend on the batch."""
        return self.fixed(name, getattr(self.node, name), getattr(self.other.node, name))

    def shape_name(self, sizes: Iterable[int]) -> str:
        """A shape as a value of the graph: a constant, or computed from the batch."""
        sizes = list(sizes)
        if all(getattr(n, "other", n) == n for n in sizes):
            return self.g.ints(int(n) for n in sizes)
        return self.g.op("Concat", *(self._size_name(n) for n in sizes), axis=0)

    def _size_name(self, n: int) -> str:
        other = getattr(n, "other", n)
        if other == n:
            return self.g.ints([int(n)])
        name, first, second = self._batch()
        slope, rest = divmod(other - n, second - first)
        if rest:
            raise OperatorError(f"a length of {n} for batch {first} and {other} for {second}: no multiple of the batch")
        found = self.g.op("Mul", name, self.g.ints([slope])) if slope != 1 else name
        offset = int(n) - slope * first
        return self.g.op("Add", found, self.g.ints([offset])) if offset else found

    def reshape(self, x: str, sizes: Iterable[int]) -> str:
        """x in another shape, in which at most one length follows the batch, or several that are computed."""
        sizes = list(sizes)
        moving = [i for i, n in enumerate(sizes) if getattr(n, "other", n) != n]
        if len(moving) == 1 and 0 not in sizes:
            return self.g.reshape(x, [-1 if i in moving else int(n) for i, n in enumerate(sizes)])
        return self.g.op("Reshape", x, self.shape_name(sizes), allowzero=1)

    def broadcast(self, x: str, sizes: Iterable[int]) -> str:
        """x repeated to a larger shape."""
        return self.g.op("Expand", x, self.shape_name(sizes))

    def axes(self, axis: Any, i: int = 0) -> list[int]:
        """Axes of operand i from 0 on; all where None."""
        ndim = len(self.shape(i))
        if axis is None:
            return list(range(ndim))
        return [a % ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)
