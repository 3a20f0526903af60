"""Do ranks wait for each other? A proof from what each of them says at one moment, without patience or guesses.

A rank that computes may still come, so nobody is stuck who waits for it. What is left when such ranks are taken away,
again and again, can never continue: every rank of it waits for another of it, or for one that has left. Of a rank with
several threads a wait for one that has left is in vain whatever the other threads do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dbrdist.comm.transport.call_log import Call, CallLog
from dbrdist.comm.transport.disagreement import name_ranks

if TYPE_CHECKING:
    from collections.abc import Hashable

    from dbrdist.core.array.types import JSON

_MAX_LISTED = 8


@dataclass
class Wait:
    """A verb in which a rank waits for others."""

    wait_id: int
    comm_name: str
    name: str
    number: int  # of the meeting on the communicator, or of the message
    kind: str  # "row" or "bytes" of a meeting, "send" or "recv"
    members: list[int]  # whom it needs, as numbered in the whole job
    tag: int
    where: str
    seconds: float

    def is_meeting(self) -> bool:
        """Whether it waits for all ranks of a communicator, and not for one message."""
        return self.kind in ("row", "bytes")

    def keys(self, rank: int) -> dict[int, list[tuple[Hashable, ...]]]:
        """By rank, what it has to have counted: whether this wait of ``rank`` can end depends on it."""
        if self.is_meeting():
            return {other: [(self.comm_name,)] for other in self.members}
        answer = "recv" if self.kind == "send" else "send"
        return {other: [(self.comm_name, answer, rank, self.tag)] for other in self.members}

    def encode(self) -> dict[str, JSON]:
        """As JSON has it; ranks in a row as one range, for a thousand ranks say the same to one."""
        return {**vars(self), "members": _ranges(tuple(self.members))}

    @staticmethod
    def decode(data: dict[str, Any]) -> Wait:
        """From JSON. Equal members are one list."""
        return Wait(**{**data, "members": _listed(tuple(map(tuple, data["members"])))})

    @staticmethod
    def of(call: Call, now: float) -> Wait:
        """What a call waits for."""
        kind = call.meets_by if call.is_collective else call.verb[:4]
        members = list(call.members) if call.is_collective else [call.partner]
        return Wait(
            call.wait_id,
            call.comm_name,
            call.name(),
            call.number,
            kind,
            members,
            call.tag,
            call.where(),
            now - call.since,
        )


@dataclass
class WaitState:
    """One rank at one moment."""

    rank: int
    is_busy: bool  # it computes, or may continue by itself
    has_left: bool = False
    waits: list[Wait] = field(default_factory=list)
    counts: dict[tuple[Hashable, ...], int] = field(default_factory=dict)  # see Record.counts

    @staticmethod
    def of(record: CallLog, now: float, has_left: bool, keys: Iterable[Sequence[Hashable]] | None = None) -> WaitState:
        """What the record says. With ``keys`` of all that was counted for messages these alone."""
        waits = [Wait.of(call, now) for call in list(record.running.values()) if call.is_waiting]
        counts = record.counts()
        if keys is not None:
            asked = set(map(tuple, keys))
            counts = {key: number for key, number in counts.items() if len(key) <= 2 or key in asked}
        return WaitState(record.rank, record.is_busy() and not has_left, has_left, waits, counts)

    def wait_ids(self) -> set[int]:
        """Which waits: unchanged as long as none of them is over."""
        return {wait.wait_id for wait in self.waits}

    def encode(self) -> dict[str, JSON]:
        """As JSON has it."""
        counts = [[list(key), number] for key, number in self.counts.items()]
        return {**vars(self), "waits": [wait.encode() for wait in self.waits], "counts": counts}

    @staticmethod
    def decode(data: dict[str, Any]) -> WaitState:
        """From JSON."""
        counts = {tuple(key): number for key, number in data["counts"]}
        return WaitState(**{**data, "waits": [*map(Wait.decode, data["waits"])], "counts": counts})


@functools.lru_cache(maxsize=1024)
def _ranges(members: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ranks as (first, how many in a row)."""
    found: list[tuple[int, int]] = []
    for rank in members:
        if found and rank == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((rank, 1))
    return found


@functools.lru_cache(maxsize=1024)
def _listed(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [rank for first, count in ranges for rank in range(first, first + count)]


class _Needs:
    """Whom each rank waits for, of those that have said something. Equal waits are looked at once: a thousand ranks
    that wait in one meeting cost as little as one."""

    def __init__(self, states: Mapping[int, WaitState]) -> None:
        self._states = states
        self._missing: dict[tuple[Hashable, ...], frozenset[int]] = {}
        self.left = {rank for rank, state in states.items() if state.has_left}
        self.of_rank: dict[int, list[frozenset[int]]] = {
            rank: [self._of(rank, wait) for wait in state.waits]
            for rank, state in states.items()
            if state.waits and not state.is_busy and not state.has_left
        }

    def _of(self, rank: int, wait: Wait) -> frozenset[int]:
        """Which of the ranks have not come to where this one waits."""
        if not wait.is_meeting():
            return self._look(rank, wait)
        key = wait.comm_name, wait.number, wait.kind, id(wait.members)
        if key not in self._missing:
            self._missing[key] = self._look(rank, wait)
        found = self._missing[key]
        return found - {rank} if rank in found else found

    def _look(self, rank: int, wait: Wait) -> frozenset[int]:
        states = self._states
        return frozenset(
            other
            for other in wait.members
            if other in states and other != rank and _is_missing(states, rank, wait, other)
        )

    def among(self, rank: int, gone: set[int]) -> set[int]:
        """For whom of ``gone`` a rank waits."""
        return set().union(*(needs & gone for needs in self.of_rank[rank]))

    def stuck(self) -> set[int]:
        """The ranks that can never continue: those that wait for one of them, or for one that has left."""
        waiting = set(self.of_rank)
        gone = waiting | self.left
        distinct = {id(needs): needs for all_needs in self.of_rank.values() for needs in all_needs}
        num_gone = {key: len(needs & gone) for key, needs in distinct.items()}
        of_member: dict[int, list[int]] = {}
        for key, needs in distinct.items():
            for other in needs & waiting:
                of_member.setdefault(other, []).append(key)
        who_has: dict[int, list[int]] = {}
        for rank, all_needs in self.of_rank.items():
            for needs in all_needs:
                who_has.setdefault(id(needs), []).append(rank)
        free = [rank for key, number in num_gone.items() if number == 0 for rank in who_has[key]]
        while free:  # a rank that may continue, and what follows for those that wait for it
            rank = free.pop()
            if rank not in waiting:
                continue
            waiting.discard(rank)
            for key in of_member.get(rank, ()):
                num_gone[key] -= 1
                if num_gone[key] == 0:
                    free += who_has[key]
        return waiting


def without_hope(states: Mapping[int, WaitState]) -> dict[int, WaitState]:
    """The states, but of a rank that may go on by another thread the waits alone that nothing else ends.

    These are waits for ranks that have left. Such a rank counts as one that does nothing but wait there.
    """
    found = dict(states)
    left = [rank for rank, state in states.items() if state.has_left]
    if not left:
        return found
    as_whole = stuck(states)
    for rank, state in states.items():
        if state.has_left or rank in as_whole:
            continue
        vain = [wait for wait in state.waits if _is_in_vain(states, rank, wait, left)]
        if vain:
            found[rank] = replace(state, is_busy=False, waits=vain)
    return found


def stuck(states: Mapping[int, WaitState]) -> dict[int, set[int]]:
    """The ranks that can never continue, and for whom each waits; ranks that said nothing count as computing."""
    needs = _Needs(states)
    found = needs.stuck()
    gone = found | needs.left
    return {rank: needs.among(rank, gone) for rank in found}


def grow(states: Mapping[int, WaitState], core: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The core, which can never continue, with all ranks that wait for it, or for ranks that do."""
    needs = _Needs(states)
    found = set(core)
    rest = needs.of_rank.keys() - found
    while True:
        gone = found | needs.left
        more = {rank for rank in rest if not any(gone.isdisjoint(each) for each in needs.of_rank[rank])}
        if not more:  # those that came later may be waited for, too
            return {rank: needs.among(rank, gone) for rank in found}
        found |= more
        rest -= more


def _is_in_vain(states: Mapping[int, WaitState], rank: int, wait: Wait, left: Sequence[int]) -> bool:
    return any(other in wait.members and _is_missing(states, rank, wait, other) for other in left)


def _is_missing(states: Mapping[int, WaitState], rank: int, wait: Wait, other: int) -> bool:
    theirs = states[other]
    if wait.is_meeting():
        number = theirs.counts.get((wait.comm_name,), 0)
        if wait.kind == "bytes" and theirs.counts.get((wait.comm_name, "bytes"), 0) < wait.number:
            return True  # it may have shown later rows, and given each of them up
        if number != wait.number:
            return number < wait.number
        return any(
            w.comm_name == wait.comm_name and w.number == number and w.kind in ("row", "bytes") and w.kind != wait.kind
            for w in theirs.waits
        )
    answer = "recv" if wait.kind == "send" else "send"
    return theirs.counts.get((wait.comm_name, answer, rank, wait.tag), 0) < wait.number


def describe(states: Mapping[int, WaitState], waiting: Mapping[int, set[int]]) -> str:
    """The verdict in words, the same on every rank."""
    parts = []
    for rank in sorted(waiting)[:_MAX_LISTED]:
        wait = min(states[rank].waits, key=lambda w: w.wait_id)
        missing = name_ranks(sorted(waiting[rank]))
        tag = f" with tag {wait.tag}" if wait.kind in ("send", "recv") else ""
        parts.append(f"rank {rank} has waited {wait.seconds:.0f} s for {missing} in {wait.name}{tag} ({wait.where})")
    more = f"; and {len(waiting) - _MAX_LISTED} more" if len(waiting) > _MAX_LISTED else ""
    left = sorted({other for others in waiting.values() for other in others if states[other].has_left})
    if left:
        have = "has" if len(left) == 1 else "have"
        return f"{name_ranks(left)} {have} left, but {'; '.join(parts)}{more}"
    return f"the ranks wait for each other, and none can continue: {'; '.join(parts)}{more}"
