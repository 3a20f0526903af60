"""What each rank has done: the last verbs, those it is in now, and how far it has come on each communicator.

A failure report takes its lines from here, and so does the watch (``watch.py``), which looks for ranks that wait for
each other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import CodeType, FrameType

    from dbrdist.core.array.types import DType

LENGTH = 1000  # verbs that are kept
_OURS, _OF_THE_ROOM = ("dbrdist.", "contextlib", "click."), ("dbrdist.comm.", "contextlib")
_NO_PLACE = ("an unknown place", 0)
# of modules: 0 outside this package, 1 in it, 2 in this room, 3 what has started a command, behind which is no program
_depths = {"dbrdist_launch.entry": 3}
_last_place: tuple[CodeType | None, int, tuple[str, int]] = (
    None,
    0,
    _NO_PLACE,
)  # code outside this package, instruction, place


class Call:
    """One verb of one rank: what, on which communicator, how many bytes, from which line, since when.

    A context manager: while it is open, the calling thread is in the verb.
    """

    # Of most calls these stay what they are. What each verb reads is set by __init__ instead: CPython 3.11 looks up an
    # attribute of the object in a fifth of the time of one of the class.
    number = 0  # the index of the meeting on the communicator, or of the message of the pair; 0 before it is known
    is_waiting = False  # for other ranks; False too while it prepares or copies
    meets_by = "row"  # or "bytes", where no row comes first
    partner = -1  # of a send or receive, as numbered in the whole job
    peer = -1  # the same, as numbered on the communicator
    tag = 0
    num_waits = 0  # for other ranks, where somebody records them
    kind: DType | None = None  # the type of the elements
    wait_id = 0
    error = ""  # set by the watch: why the wait cannot end

    def __init__(
        self, record: CallLog, verb: str, comm_name: str, members: tuple[int, ...], place: tuple[str, int] | None = None
    ) -> None:
        self.record = record
        self.verb = verb
        self.comm_name = comm_name
        self.members = members  # the communicator's ranks, as numbered in the whole job
        self.place = place_of(sys._getframe(2)) if place is None else place
        self.since = time.monotonic()
        self.thread = threading.get_ident()
        self.is_collective = True
        self.root = -1
        self.num_bytes = 0
        self.seconds = -1.0  # how long it took; -1 while it runs
        self.outer: Call | None = None  # the verb that called this one
        self.pause_seconds = 0.0  # between two looks, where the thread waits in the background

    def __enter__(self) -> Self:
        record, thread = self.record, self.thread
        running = record.running
        if running or self.outer is not None:
            self.outer = running.get(thread)
        record.num_entered += 1
        self.wait_id = record.num_entered
        running[thread] = self
        record.threads.add(thread)
        if self.seconds < 0:
            record.last.append(self)
        else:  # it is entered again
            self.seconds = -1.0
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds = time.monotonic() - self.since
        if self.outer is None:
            self.record.running.pop(self.thread, None)
        else:
            self.record.running[self.thread] = self.outer

    @property
    def is_send(self) -> bool:
        """True for a message that leaves this rank."""
        return self.verb.startswith("send")

    def where(self) -> str:
        """``file:line`` of the call."""
        name, line = self.place
        return f"{name}:{line}" if line else name

    def name(self) -> str:
        """The verb, and the one that called it: ``bcast in bcast_data``."""
        outermost = self
        while outermost.outer is not None:
            outermost = outermost.outer
        return self.verb if outermost.verb == self.verb else f"{self.verb} in {outermost.verb}"

    def line(self) -> str:
        """One line of the record: communicator, number, verb, partner or root, bytes, type, place, time."""
        with_whom = f" root {self.root}" if self.root >= 0 else ""
        if not self.is_collective:
            with_whom = f" {'to' if self.is_send else 'from'} {self.partner} tag {self.tag}"
        amount = f" {self.num_bytes} bytes" if self.num_bytes else ""
        kind = "" if self.kind is None else f" {self.kind}"
        took = f"{self.seconds:.6f} s" if self.seconds >= 0 else f"for {time.monotonic() - self.since:.1f} s, not over"
        return f"{self.comm_name} #{self.number} {self.name()}{with_whom}{amount}{kind} at {self.where()} {took}"


def place_of(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the innermost call from outside this package; within it, of the first outside this room."""
    code, at, place = _last_place
    if frame is not None and frame.f_code is code and frame.f_lasti == at:  # None: a thread that does but this
        return place
    inside = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")  # code that is run by exec may have none
        depth = _depths.get(module)
        if depth is None:
            depth = _depths[module] = str(module).startswith(_OURS) + str(module).startswith(_OF_THE_ROOM)
        if depth == 0:
            return _line(frame)
        if depth == 3:
            break
        if depth == 1 and inside is None:
            inside = frame
        frame = frame.f_back
    return _NO_PLACE if inside is None else (inside.f_code.co_filename, inside.f_lineno)


def lines_of(frame: FrameType | None) -> list[str]:
    """``file:line`` of all calls outside this package that led here, the innermost first."""
    found = []
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            found.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _line(frame: FrameType) -> tuple[str, int]:
    """(file, line) where a frame is. To count lines takes long in a long function; a loop calls from the same one."""
    global _last_place
    code, at, place = _last_place
    if frame.f_code is not code or frame.f_lasti != at:
        place = frame.f_code.co_filename, frame.f_lineno
        _last_place = frame.f_code, frame.f_lasti, place
    return place


class CallLog:
    """The verbs of one rank (a process, or a thread of ``run_threads``)."""

    def __init__(self, rank: int = 0, home: int | None = None) -> None:
        self.rank = rank  # as numbered in the whole job
        self.home = home  # the thread that a rank is; None is the process's main thread
        self.last: deque[Call] = deque(maxlen=LENGTH)
        self.running: dict[int, Call] = {}  # thread -> the innermost verb that it is in
        self.threads: set[int] = set()  # all that were ever in a verb
        self.resting: set[int] = set()  # those that do nothing now until another thread of this rank does
        # By communicator, and of it the last meeting in which bytes moved; for messages by verb, partner and tag.
        # Agreement and the proof of deadlocks rest on these numbers, so none is dropped while its communicator lives.
        self._counts: dict[tuple[Hashable, ...], int] = {}
        self.num_entered = 0  # how often a verb was entered

    def count(self, *key: int | str) -> int:
        """One more of ``key``; returns how many there are now."""
        number = self._counts[key] = self._counts.get(key, 0) + 1
        return number

    def reach(self, number: int, *key: Hashable) -> None:
        """Note the last number of a kind, of those that were counted together with others."""
        self._counts[key] = number

    def counted(self, *key: Hashable) -> int:
        """How many of ``key`` there were."""
        return self._counts.get(key, 0)

    def counts(self) -> dict[tuple[Hashable, ...], int]:
        """How many of each key there were."""
        return dict(self._counts)

    def forget(self, comm_name: str) -> None:
        """Drop what was counted on a communicator that is no more."""
        for key in [key for key in self._counts if key[0] == comm_name]:
            del self._counts[key]

    def is_busy(self) -> bool:
        """True if a thread that communicates, or the rank's own, does not wait for other ranks now."""
        alive = {t.ident for t in threading.enumerate()}
        home = threading.main_thread().ident if self.home is None else self.home
        waiting = {thread for thread, call in list(self.running.items()) if call.is_waiting}
        return bool((({home} | self.threads) & alive) - waiting - self.resting)

    def text(self) -> str:
        """All lines, the oldest first."""
        return "".join(f"{call.line()}\n" for call in list(self.last))

    def dump(self, path: str) -> bool:
        """Write the lines to a file; False where that fails or there is nothing to write."""
        if not self.last:
            return False
        try:
            with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"# rank {self.rank}, process {os.getpid()}: its last {len(self.last)} verbs\n{self.text()}")
        except OSError:
            return False
        return True


process = CallLog()  # of this process, where ranks are processes
