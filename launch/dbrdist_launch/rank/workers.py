"""Watches the worker processes of a rank (data loaders): one that died and is not missed hangs its rank."""

import os
import time

from .. import codes, limits, linux
from ..signals import signal
from ..wire import whole


class WorkerWatch:
    """Finds children of a Python rank, Python too, that ended badly and that the rank does not fetch."""

    def __init__(self, rank_pid: int) -> None:
        self.rank_pid = rank_pid
        self._workers: set[int] = set()  # seen alive, running the rank's own interpreter
        self._dead_since: dict[int, float] = {}

    def look(self) -> tuple[int, str] | None:
        """(pid, how it ended) of a worker that has been dead for a while, or None."""
        now = time.monotonic()
        for pid in linux.children(self.rank_pid):
            if linux.state(pid) != "Z":
                if pid not in self._workers and _same_program(pid, self.rank_pid):
                    self._workers.add(pid)
            elif pid in self._workers:
                since = self._dead_since.setdefault(pid, now)
                how = _bad_end(pid)
                if how and now - since >= limits.WORKER_SECONDS:
                    self._workers.discard(pid)
                    return pid, how
        return None


def _same_program(pid: int, other: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") == os.readlink(f"/proc/{other}/exe")
    except OSError:
        return False


def _bad_end(pid: int) -> str | None:
    """How a process that nobody fetched ended, from the last field of its stat; None for exit code 0."""
    fields = linux.stat(pid)
    status = whole(fields[-1]) if fields else None
    if not status:
        return None
    code, number = codes.from_wait_status(status)
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return None  # somebody asked it to end, most likely the program itself
    return f"killed by {codes.signal_name(number)}" if number else f"ended with exit code {code}"
