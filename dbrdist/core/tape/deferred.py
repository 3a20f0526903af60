"""Gradients that whoever receives them completes, in fewer passes over memory than an array would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from dbrdist.core.array.backend import Array, DType

if TYPE_CHECKING:
    from typing import TypeVar

    from dbrdist.core.tape.variable import Variable

    Same = TypeVar("Same")

Gradient: TypeAlias = "Array | Variable | Deferred"  # as rules give it: arrays, or Variables in a pass of higher order


class Deferred:
    """A gradient that is not an array yet: a pass adds and completes it without knowing what it is made from.

    A rule returns one only where it knows that the rule of the function that made its input takes it.
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


def plain(g: Deferred | Same) -> Array | Same:
    """A gradient as an array."""
    return g.force() if isinstance(g, Deferred) else g
