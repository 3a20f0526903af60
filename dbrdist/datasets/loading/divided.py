"""The iterators of a thread that divide their batches over ranks: so that a program's own loop can be checked, too."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbrdist.datasets.loading.serial import SerialIterator

_here = threading.local()  # ranks may be threads


def note_divided(iterator: SerialIterator) -> None:
    """Remember an iterator for as long as it is there."""
    _here.made = [*_still_there(), weakref.ref(iterator)]


def divided_iterators(rank: int, size: int) -> list[SerialIterator]:
    """Those of this thread that have given this rank its part of a batch, in the order in which they were made."""
    found = [made() for made in _still_there()]
    return [it for it in found if it is not None and (it.rank, it.size) == (rank, size) and it.num_samples_global]


def _still_there() -> list[Any]:
    return [made for made in getattr(_here, "made", ()) if made() is not None]
