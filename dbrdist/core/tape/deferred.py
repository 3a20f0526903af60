"""Gradients that whoever receives them completes, in fewer passes over memory than an array would take; and gradients
in flat memory that are written at the end of a backward pass, many in one launch of a device.

Of the latter, a rule that was given the place of a first contribution leaves it unwritten and says how it is written
later. Whoever looks at gradients before the pass ends, another contribution, a listener, a hook or a read of ``grad``,
has all that waits in its thread written first.
"""

from __future__ import annotations

from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dbrdist.core.array.array_operations import is_basic, scattered
from dbrdist.core.array.backend import Array, DType, on
from dbrdist.core.array.elementwise import KERNEL_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from dbrdist.core.array.types import Index
    from dbrdist.core.tape.node import VariableNode
    from dbrdist.core.tape.variable import Operand, Variable

    Same = TypeVar("Same")

Gradient: TypeAlias = "Array | Variable | Deferred"  # as rules give it: arrays, or Variables in a pass of higher order


class Deferred:
    """A gradient that is not an array yet: a pass adds and completes it without knowing what it is made from.

    A rule returns one only where it knows that the rule of the function that made its input takes it, or that nothing
    made it: a pass completes what it leaves at a leaf.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: DType

    @property
    def part(self) -> Array:
        """An array that it is made from: on the device on which it is completed."""
        raise NotImplementedError

    def force(self) -> Array:
        """The gradient as an array."""
        raise NotImplementedError

    def plus(self, g: Gradient, is_ours: bool) -> Gradient | None:
        """The sum with another gradient; None where both are completed first.

        ``is_ours``: nobody else has ``g``, so that the sum may be written there.
        """
        return None


class SliceGradient(Deferred):
    """The gradient of a leaf of which a slice was used: ``x`` at the slice, and zeros elsewhere.

    The first one of a pass makes the array, ``total``; the next ones are added to slices of it. Otherwise each would
    take a new array of zeros, and an addition of whole arrays.
    """

    __slots__ = ("dtype", "is_sum", "shape", "slices", "to_images", "total", "x")

    def __init__(self, x: Array, slices: Index, shape: tuple[int, ...], to_images: bool) -> None:
        self.x, self.slices = x, slices
        self.shape, self.dtype = shape, x.dtype
        self.to_images = to_images
        self.is_sum = False
        self.total: Array | None = None

    @property
    def part(self) -> Array:
        return self.x

    def force(self) -> Array:
        self.total = scattered(self.x, self.slices, self.shape, self.to_images)
        return self.total

    def add(self, g: SliceGradient) -> bool:
        """Add another to ``total``, with the bits of a sum of arrays; False, and nothing is done, where slices overlap.

        A sum with zeros has no -0, so that the first slice may lose its own.
        """
        total: Any = self.total
        mine, other = total[self.slices], total[g.slices]
        if not self.is_sum:
            if _may_overlap(mine, other):
                return False
            total[self.slices] = mine + 0
            self.is_sum = True
        total[g.slices] = other + g.x
        return True


def slice_gradient(node: VariableNode, gy: Operand, slices: Index, to_images: bool) -> SliceGradient | None:
    """The gradient of a large leaf on the host, given that of its slice; None for others."""
    if type(gy) is not np.ndarray or node.creator_node is not None or node.view is not None:
        return None
    if prod(node.shape) < KERNEL_ELEMENTS or not is_basic(slices):
        return None
    return SliceGradient(gy, slices, node.shape, to_images)


_MOST_STEPS: Any = 1000  # of the search for an element that two slices share


def _may_overlap(a: Array, b: Array) -> bool:
    if np.ndim(a) == 0 or np.ndim(b) == 0:  # a number is no view
        return True
    try:
        return np.shares_memory(a, b, max_work=_MOST_STEPS)
    except np.exceptions.TooHardError:
        return True


def plain(g: Deferred | Same) -> Array | Same:
    """A gradient as an array."""
    return g.force() if isinstance(g, Deferred) else g


# ---- gradients that are written later

_MOST = 96  # that wait at a time, since each holds memory
# By thread and target: what writes many at once, what it asks for, and the target. Empty nearly always.
waiting: dict[int, dict[int, tuple[Callable[[list[Any]], None], Any, Array]]] = {}


def write_later(writer: Callable[[list[Any]], None], what: Any, target: Array) -> Array:
    """Let ``writer`` write ``target`` along with what else waits for it; ``what`` is what it asks for."""
    mine = waiting.setdefault(get_ident(), {})
    if id(target) in mine or len(mine) == _MOST:
        write_all()
        mine = waiting.setdefault(get_ident(), {})
    mine[id(target)] = writer, what, target
    return target


def write_all() -> None:
    """Write what waits in this thread; called where ``waiting`` is not empty."""
    mine = waiting.pop(get_ident(), None)
    if mine is None:
        return
    asked: dict[Callable[[list[Any]], None], list[Any]] = {}
    some: dict[Callable[[list[Any]], None], Array] = {}
    for writer, what, target in mine.values():
        asked.setdefault(writer, []).append(what)
        some[writer] = target
    for writer, of_writer in asked.items():
        with on(some[writer]):
            writer(of_writer)
