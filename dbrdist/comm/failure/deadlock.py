"""Do ranks wait for each other? A proof from what each of them says at one moment, without patience or guesses.

A rank that computes may still come, so nobody is stuck who waits for it. What is left when such ranks are taken away,
again and again, can never continue: every rank of it waits for another of it, or for one that has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dbrdist.comm.transport.call_log import Call, Record
from dbrdist.comm.transport.disagreement import name_ranks

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
class State:
    """One rank at one moment."""

    rank: int
    is_busy: bool  # it computes, or may continue by itself
    has_left: bool = False
    waits: list[Wait] = field(default_factory=list)
    counts: dict[tuple[Any, ...], int] = field(default_factory=dict)  # see Record.counts

    @staticmethod
    def of(record: Record, now: float, has_left: bool) -> State:
        """What the record says."""
        waits = [Wait.of(call, now) for call in list(record.running.values()) if call.is_waiting]
        return State(record.rank, record.is_busy() and not has_left, has_left, waits, record.counts())

    def wait_ids(self) -> set[int]:
        """Which waits: unchanged as long as none of them is over."""
        return {wait.wait_id for wait in self.waits}

    def encode(self) -> dict[str, Any]:
        """As JSON has it."""
        counts = [[list(key), number] for key, number in self.counts.items()]
        return {**vars(self), "waits": [vars(wait) for wait in self.waits], "counts": counts}

    @staticmethod
    def decode(data: dict[str, Any]) -> State:
        """From JSON."""
        counts = {tuple(key): number for key, number in data["counts"]}
        return State(**{**data, "waits": [Wait(**wait) for wait in data["waits"]], "counts": counts})


def stuck(states: Mapping[int, State]) -> dict[int, set[int]]:
    """The ranks that can never continue, and for whom each waits; ranks that said nothing count as computing."""
    left = {rank for rank, state in states.items() if state.has_left}
    waiting = {rank for rank, state in states.items() if state.waits and not state.is_busy and rank not in left}
    while True:
        gone = waiting | left
        still = {rank for rank in waiting if all(_needs(states, rank, wait) & gone for wait in states[rank].waits)}
        if still == waiting:
            return {rank: set().union(*(_needs(states, rank, w) & gone for w in states[rank].waits)) for rank in still}
        waiting = still


def grow(states: Mapping[int, State], core: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The core, which can never continue, with all ranks that wait for it, or for ranks that do."""
    left = {rank for rank, state in states.items() if state.has_left}
    found = dict(core)
    while True:
        gone = found.keys() | left
        more = {
            rank: set().union(*(_needs(states, rank, wait) & gone for wait in state.waits))
            for rank, state in states.items()
            if rank not in gone
            and state.waits
            and not state.is_busy
            and all(_needs(states, rank, wait) & gone for wait in state.waits)
        }
        if not more:  # those that came later may be waited for, too
            return {r: set().union(*(_needs(states, r, wait) & gone for wait in states[r].waits)) for r in found}
        found |= more


def _needs(states: Mapping[int, State], rank: int, wait: Wait) -> set[int]:
    """Which of the ranks that have said something have not come to where this one waits."""
    return {
        other for other in wait.members if other != rank and other in states and _is_missing(states, rank, wait, other)
    }


def _is_missing(states: Mapping[int, State], rank: int, wait: Wait, other: int) -> bool:
    theirs = states[other]
    if wait.kind in ("row", "bytes"):
        number = theirs.counts.get((wait.comm_name,), 0)
        if number != wait.number:
            return number < wait.number
        return any(
            w.comm_name == wait.comm_name and w.number == number and w.kind in ("row", "bytes") and w.kind != wait.kind
            for w in theirs.waits
        )
    answer = "recv" if wait.kind == "send" else "send"
    return theirs.counts.get((wait.comm_name, answer, rank, wait.tag), 0) < wait.number


def describe(states: Mapping[int, State], waiting: Mapping[int, set[int]]) -> str:
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
