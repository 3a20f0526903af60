"""What ranks that are threads of one process share: meetings, mailboxes, and the knowledge of who waits for whom."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dbrdist.comm.failure import deadlock
from dbrdist.comm.transport.call_log import Call, CallLog
from dbrdist.errors import CommunicatorError

_LOOK_SECONDS = 0.25
patience_seconds = 1.0  # a rank that has waited this long looks whether the others can still come


class ThreadJob:
    """All ranks of one ``run_threads``; one lock for all that they share."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.records = [CallLog(rank) for rank in range(size)]
        self.left: set[int] = set()
        self.failure = ""

    def fail(self, reason: str) -> None:
        """Wake every rank that waits; from now on all verbs raise."""
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """A rank has returned from its function."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def wait(self, call: Call, is_there: Callable[[], object]) -> None:
        """Wait until ``is_there()``; the caller holds ``changed``.

        Raises:
            CommunicatorError: if a rank fails meanwhile, or the ranks turn out to wait for each other.
        """
        call.is_waiting = True
        try:
            while not is_there():
                if self.failure:
                    raise CommunicatorError(f"this rank cannot continue: {self.failure}")
                if not self.changed.wait(_LOOK_SECONDS) and time.monotonic() - call.since > patience_seconds:
                    self._look()
        finally:
            call.is_waiting = False

    def _look(self) -> None:
        now = time.monotonic()
        found = {r.rank: deadlock.WaitState.of(r, now, r.rank in self.left) for r in self.records}
        states = deadlock.without_hope(found)
        waiting = deadlock.stuck(states)
        if waiting:
            self.failure = deadlock.describe(states, waiting)
            self.changed.notify_all()


class World:
    """What the ranks of one communicator share."""

    def __init__(self, job: ThreadJob, name: str, members: tuple[int, ...]) -> None:
        self.job = job
        self.name = name
        self.members = members
        self.size = len(members)
        self.num_parts = 0
        self._meetings: dict[int, list[Any]] = {}
        self._readers: dict[int, int] = {}
        self._mail: dict[tuple[int, int, int], deque[Any]] = {}

    def show(self, number: int, rank: int, item: object) -> None:
        """Show ``item`` at the meeting of that number, without waiting."""
        with self.job.changed:
            items = self._meetings.setdefault(number, [])
            items.append((rank, item))
            if len(items) == self.size:
                items.sort(key=lambda entry: entry[0])
                self.job.changed.notify_all()

    def is_complete(self, number: int) -> bool:
        """Whether all ranks have come to a meeting that this one has not seen yet."""
        with self.job.changed:
            return len(self._meetings[number]) == self.size

    def see(self, call: Call, number: int) -> list[Any]:
        """What all ranks showed, once all have."""
        with self.job.changed:
            items = self._meetings[number]
            self.job.wait(call, lambda: len(items) == self.size)
            self._readers[number] = self._readers.get(number, 0) + 1
            if self._readers[number] == self.size:
                del self._meetings[number], self._readers[number]
            return [item for _, item in items]

    def put(self, call: Call, key: tuple[int, int, int], item: object, waits: bool) -> None:
        """Leave an item for (source, destination, tag); ``waits`` until it is taken."""
        with self.job.changed:
            if self.job.failure:
                raise CommunicatorError(f"this rank cannot continue: {self.job.failure}")
            mail = self._mail.setdefault(key, deque())
            entry = [item]
            mail.append(entry)
            self.job.changed.notify_all()
            if waits:
                self.job.wait(call, lambda: not entry)

    def take(self, call: Call, key: tuple[int, int, int]) -> Any:
        """The next item for (source, destination, tag), once it is there."""
        with self.job.changed:
            mail = self._mail.setdefault(key, deque())
            self.job.wait(call, lambda: mail)
            entry = mail.popleft()
            self.job.changed.notify_all()
            if not mail and self._mail.get(key) is mail:
                del self._mail[key]
            return entry.pop()
