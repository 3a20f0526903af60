"""Gradients that whoever receives them completes, in fewer passes over memory than an array would take; and gradients
in flat memory that are written at the end of a backward pass, many in one launch of a device.

Of the latter, a rule that was given the place of a first contribution leaves it unwritten and says how it is written
later. Whoever looks at gradients before the pass ends, another contribution, a listener, a hook or a read of ``grad``,
has all that waits in its thread written first.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias

from dbrdist.core.array.backend import Array, DType, on

if TYPE_CHECKING:
    from collections.abc import Callable
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
