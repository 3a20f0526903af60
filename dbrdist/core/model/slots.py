"""Where a parameter is stored: its place in flat memory, who shares its array, and what kernels keep of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbrdist.core.model.flat import Arena
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.core.model.weight_copies import WeightCopies


class Slot:
    """A parameter's place in an arena: its position among the parameters there, and which elements are its own."""

    __slots__ = ("_copies", "arena", "index", "start", "stop")

    def __init__(self, arena: Arena, index: int, start: int, stop: int) -> None:
        self.arena, self.index = arena, index
        self.start, self.stop = start, stop
        self._copies: weakref.ref[WeightCopies] | None = None

    def give_copies(self, copies: WeightCopies) -> None:
        """Let what a device's libraries read be kept in ``copies``, which does not live by this."""
        self._copies = weakref.ref(copies)

    @property
    def copies(self) -> WeightCopies | None:
        """Where copies are kept; None where each call makes its own."""
        return None if self._copies is None else self._copies()


class Kept:
    """What a kernel made of a parameter's array, such as weights in the layout of a library, and what made it."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: tuple[Any, Any] = (None, None)  # the maker and the result, replaced together


class Peers:
    """The parameters that share one array. Copied or pickled together, their copies share one array again."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[Parameter] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[Peers], tuple[()]]:
        return Peers, ()  # copies join as they are made
