"""How a plan over flat memory learns that something it rests on has changed.

A plan rests on links (which parameters there are), parameters (where they lie) and update rules. Each of these carries
the number of its last change. A plan first compares the count of all changes; only if that has moved does it look at
its own objects. A change elsewhere costs one such look and invalidates nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import Any

_numbers = itertools.count(1)  # next() is atomic: two threads never take the same number
_last = 0


class Changing(Protocol):
    """What a plan may rest on: it has the number of its last change, None until somebody watches it."""

    _changed_at: Any


def note_change(thing: Changing) -> None:
    """``thing`` is no longer what it was: plans that rest on it are stale. Nothing to do while no plan does."""
    global _last
    if thing._changed_at is not None:
        thing._changed_at = _last = next(_numbers)


class Watch:
    """Tells whether any of ``things`` has changed since it was made; each has an attribute ``_changed_at``."""

    __slots__ = ("_seen", "_things")

    def __init__(self, things: Iterable[Changing]) -> None:
        self._things = list(things)
        self._seen = _last
        for thing in self._things:
            at = getattr(thing, "_changed_at", None)
            if type(at) is not int:  # not watched yet, or an update rule that is no class of ours
                thing._changed_at = 0
            elif at > _last:  # a number from the process in which it was pickled
                thing._changed_at = _last

    def is_current(self) -> bool:
        """False once one of the things has changed."""
        last = _last
        if self._seen == last:
            return True
        seen = self._seen
        for thing in self._things:
            if thing._changed_at > seen:
                return False
        self._seen = last
        return True
