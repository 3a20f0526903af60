"""As much of MPI as the gate, the watch and the creation of communicators use, for thousands of ranks in one thread.

Nothing waits: a collective is over once every rank has begun it, and a message is there at once. What is sent is
counted. A rank's part of the work is real code of dbrdist; only what carries its bytes is simulated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

MAX = "max"


class Group:
    """One communicator of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun: list[int] = [0] * size  # collectives, by rank
        self.meetings: dict[int, Meeting] = {}
        self.mail: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.num_messages = Counter[int]()  # sent, by rank
        self.num_bytes = Counter[int]()  # handed to collectives and sent as messages, by rank
        self.partners: list[set[int]] = [set() for _ in range(size)]  # with whom each rank has exchanged messages


class Meeting:
    """A collective on its way."""

    def __init__(self) -> None:
        self.num_there = 0
        self.items: list[Any] = []
        self.result: Any = None


class Comm:
    """A communicator as one rank has it."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.duplicates: list[Group] = []

    def Dup(self) -> Comm:
        """Another group of the same ranks: the k-th duplicate of every rank is the same."""
        number = self.group.begun[self.rank]
        self.group.begun[self.rank] += 1
        meeting = self.group.meetings.setdefault(number, Meeting())
        if meeting.result is None:
            meeting.result = Group(self.size)
        return Comm(meeting.result, self.rank)

    def Free(self) -> None:
        """There is nothing to give back."""

    def _meet(self, sent: Any, found: Any, join: Callable[[Meeting, Any], None], finish: Callable[..., Any]) -> Any:
        group = self.group
        number = group.begun[self.rank]
        group.begun[self.rank] += 1
        group.num_bytes[self.rank] += sent.nbytes
        meeting = group.meetings.setdefault(number, Meeting())
        join(meeting, sent)
        meeting.num_there += 1

        def test() -> bool:
            if meeting.num_there < group.size:
                return False
            found[...] = finish(meeting)
            return True

        return SimpleNamespace(Test=test)

    def Iallreduce(self, sent: Any, found: Any, op: Any) -> Any:
        """The largest, which is all that rows need."""
        assert op == MAX

        def join(meeting: Meeting, mine: Any) -> None:
            meeting.result = mine.copy() if meeting.result is None else np.maximum(meeting.result, mine)

        return self._meet(sent, found, join, lambda meeting: meeting.result)

    def Iallgather(self, sent: Any, found: Any) -> Any:
        """Rows of equal length."""

        def finish(meeting: Meeting) -> Any:
            if meeting.result is None:
                ordered = sorted(meeting.items, key=lambda item: item[0])
                meeting.result = np.array([row for _, row in ordered])
            return meeting.result

        return self._meet(sent, found, lambda meeting, mine: meeting.items.append((self.rank, mine.copy())), finish)

    # ---- messages ----

    def Isend(self, buffer: Any, to: int, tag: int) -> Any:
        """A message that is there at once."""
        raw = bytes(buffer[0])
        self.group.mail[to].append((self.rank, raw))
        self.group.num_messages[self.rank] += 1
        self.group.num_bytes[self.rank] += len(raw)
        self.group.partners[self.rank].add(to)
        self.group.partners[to].add(self.rank)
        return SimpleNamespace(Test=lambda: True)

    def Iprobe(self, source: int, tag: int) -> None:
        """Nothing has to be moved."""

    def Improbe(self, source: int, tag: int, status: Any) -> Any:
        """The next message."""
        if not self.group.mail[self.rank]:
            return None
        _, raw = self.group.mail[self.rank].popleft()
        status.Get_count = lambda kind: len(raw)
        return SimpleNamespace(Recv=lambda buffer: buffer[0].__setitem__(slice(None), np.frombuffer(raw, np.uint8)))

    def Ibarrier(self) -> Any:
        """Over once every rank has come."""
        nothing = np.empty(0, np.int64)
        return self._meet(nothing, nothing, lambda meeting, mine: None, lambda meeting: nothing)


MODULE = SimpleNamespace(MAX=MAX, BYTE="byte", ANY_SOURCE=-1, ANY_TAG=-1, Status=SimpleNamespace)


class Mirror:
    """A communicator whose other ranks all do what this one does: what creating one costs a rank of many.

    Of ``size`` ranks ``per_host`` are on each host.
    """

    def __init__(self, size: int, per_host: int) -> None:
        self.rank, self.size, self.per_host = 0, size, per_host

    def Dup(self) -> Mirror:
        return Mirror(self.size, self.per_host)

    def Idup(self) -> tuple[Mirror, Any]:
        return self.Dup(), SimpleNamespace(Test=lambda: True)

    def Split(self, color: int, key: int) -> Mirror:
        return Mirror(self.per_host, self.per_host)

    Split_type = Split

    def Free(self) -> None:
        """There is nothing to give back."""

    def Is_inter(self) -> bool:
        return False

    def Get_group(self) -> Any:
        return SimpleNamespace(size=self.size, Free=lambda: None)

    def allgather(self, item: Any) -> list[Any]:
        return [item] * self.size

    def allreduce(self, item: Any, op: Any = None) -> Any:
        return item

    def bcast(self, item: Any, root: int = 0) -> Any:
        return item

    def Bcast(self, buffer: Any, root: int) -> None:
        """The root's, which is this rank's."""

    def Barrier(self) -> None:
        """All are there."""

    def Iprobe(self, source: int, tag: int) -> None:
        """Nothing has to be moved."""

    def Iallreduce(self, sent: Any, found: Any, op: Any) -> Any:
        found[...] = sent
        if found.size % 2 == 0 and found.size > 80 and self.size > self.per_host and self._is_of_leaders(sent):
            found[5] = self.size - self.per_host  # the last host's lowest rank: hosts differ in this word
        return SimpleNamespace(Test=lambda: True)

    def _is_of_leaders(self, sent: Any) -> bool:
        return bool(sent[0] == 1)  # the first row under the name of the new communicator

    def Iallgather(self, sent: Any, found: Any) -> Any:
        found[...] = np.arange(self.size)[:, None] // self.per_host * self.per_host
        return SimpleNamespace(Test=lambda: True)

    def Allgatherv(self, sent: Any, received: Any) -> None:
        raw, (counts, starts), _ = received
        for count, start in zip(counts, starts):
            raw[start : start + count] = sent[0]
