"""Is what ranks use together the same thing on all of them? They make optimizers, evaluators, ... in the same order."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from dbrdist.comm.protocol.gate import digest
from dbrdist.comm.transport.call_log import lines_of, place_of
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from dbrdist.comm.communicators.communicator import CommunicatorBase


class RosterEntry(NamedTuple):
    """One of the things of a kind that a rank has made with a communicator."""

    ordinal: int
    place: str  # the line where it was made, and how many were made there before it


class RosterName:
    """What a thing without a name of its own is called when ranks compare it: at first by its number."""

    def __init__(self, entry: RosterEntry) -> None:
        self.entry = entry
        self.words = f"number {entry.ordinal}"

    def __str__(self) -> str:
        return self.words


class Roster:
    """What one rank has made of a kind with one communicator."""

    def __init__(self) -> None:
        self.num_made = 0
        self.num_introduced = 0  # the same on all ranks, which introduce them together
        self._made_at: Counter[str] = Counter()

    def enter(self, frame: FrameType) -> RosterEntry:
        """Note a thing that is made in ``frame``."""
        self.num_made += 1
        path, line = place_of(frame)
        place = f"{os.path.basename(path)}:{line}"
        self._made_at[place] += 1
        return RosterEntry(self.num_made, f"{place}, number {self._made_at[place]} there")


_rosters: WeakKeyDictionary[CommunicatorBase, dict[str, Roster]] = WeakKeyDictionary()


def roster_of(comm: CommunicatorBase, kind: str) -> Roster:
    """The roster of a kind of things that are made with ``comm``."""
    return _rosters.setdefault(comm, {}).setdefault(kind, Roster())


def are_same(entries: list[RosterEntry]) -> bool:
    """Whether ranks speak of one thing: the same by order, or made at the same line, as where one rank makes more."""
    return len({e.ordinal for e in entries}) == 1 or len({e.place for e in entries}) == 1


def check_same(comm: CommunicatorBase, entry: RosterEntry, kind: str, what: str) -> None:
    """Raise CommunicatorError on every rank where they speak of different things. Collective.

    Of ranks that have made different numbers of them, as where one made another for itself, nothing is known.
    """
    told = comm.allgather_obj((entry, roster_of(comm, kind).num_made))
    entries = [each for each, _ in told]
    if not are_same(entries) and len({num_made for _, num_made in told}) == 1:
        made = "; ".join(f"number {e.ordinal} (made at {e.place}) on rank {r}" for r, e in enumerate(entries[:8]))
        raise CommunicatorError(
            f"expected the same {what} on every rank, by the order in which they were made, got {made}: the ranks call "
            "them in different orders"
        )


class CommonOrder:
    """Whether ranks make things of a kind in one order, by what each rank says of each thing in one number.

    Ranks may say different things of one, such as other examples. What shows another order is that a rank says of some
    things, in another order, what rank 0 says of the same ones.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._said: list[list[int]] = [[] for _ in range(size)]

    def add(self, numbers: Sequence[int]) -> None:
        """Note what each rank says of its next thing."""
        for said, number in zip(self._said, numbers):
            said.append(number)

    def exchanged(self, unless: Sequence[CommonOrder] = ()) -> tuple[int, list[int]] | None:
        """(a rank, the indices of things) that it has in another order than rank 0, the last thing among them.

        None too where one of ``unless`` knows that all these are in the same order.
        """
        first = self._said[0]
        for rank, said in enumerate(self._said):
            where = {number: index for index, number in enumerate(first) if number != said[index]}
            ring: list[int] = []
            index: int | None = len(first) - 1
            while index is not None and index not in ring:
                ring.append(index)
                index = where.get(said[index])
            if index == ring[0] and not any(other.are_same(rank, ring) for other in unless):
                return rank, sorted(ring)
        return None

    def are_same(self, rank: int, indices: list[int]) -> bool:
        """Whether a rank says of these things, of each another thing, what rank 0 says."""
        first, said = ([said[index] for index in indices] for said in (self._said[0], self._said[rank]))
        return first == said and len(set(first)) == len(first)


_orders: WeakKeyDictionary[CommunicatorBase, dict[str, list[CommonOrder]]] = WeakKeyDictionary()


def check_order(comm: CommunicatorBase, verb: str, things: str, frame: FrameType, evidence: Sequence[int] = ()) -> None:
    """Raise CommunicatorError on every rank where ranks call ``verb`` for two ``things`` in another order. Collective.

    What differs between two that look the same: the lines that led to ``frame``; where these say nothing, numbers of
    the evidence, of which each counts where those before it say nothing.
    """
    if comm.size == 1:
        return
    lines = lines_of(frame)
    rows = comm.gate.allgather_rows(np.array([digest(repr(lines)), *evidence], np.int64))
    of_comm = _orders.setdefault(comm, {})
    orders = of_comm.setdefault(verb, [CommonOrder(comm.size) for _ in range(rows.shape[1])])
    for order, column in zip(orders, rows.T.tolist()):
        order.add(column)
    found = next((e for k, order in enumerate(orders) if (e := order.exchanged(orders[:k])) is not None), None)
    if found is None:
        return
    rank, indices = found
    places = comm.allgather_obj(lines[0] if lines else "an unknown place")
    raise CommunicatorError(
        f"{verb}: rank {rank} gives its {things} in another order than rank 0: calls "
        f"{', '.join(str(index + 1) for index in indices)} are for each other's {things}, the last at {places[0]} on "
        f"rank 0 and {places[rank]} on rank {rank}; make the calls in the same order on all ranks"
    )
