"""What the launcher knows of each rank."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from ... import codes, limits
from ...channel import Channel
from ...messages import Beat, Ended, Exit, FoundStacks

Told = dict[str, Any]  # an event: what a program told of itself, and when
_ABORT_DELAYED = rb"(?m)^\[[^]]+:\d+\] Delaying for \d+ seconds before aborting"


@dataclass(eq=False, repr=False)
class Rank:
    """One rank; times are seconds on the launcher's monotonic clock."""

    rank: int
    host: str
    channel: Channel
    local_rank: int = 0
    pid: int = 0  # of the program
    heard_at: float = field(default_factory=lambda: time.monotonic())
    welcomed: bool = False  # it knows what to run
    pinged: bool = False  # and not answered yet
    state: str = ""  # of the program's process, as in /proc/PID/stat
    traced: bool = False  # a debugger is attached
    stopped_since: float | None = None
    count: int = 0  # beats
    step: int = -1
    beat_at: float | None = None
    paused: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    tails: dict[str, bytes] = field(default_factory=lambda: {"out": b"", "err": b""})  # last output
    written: int = 0  # bytes of output so far
    owed: int = 0  # bytes of output that came and for which it has got no credit yet
    spoke_last: str = "out"
    events: list[Told] = field(default_factory=list)  # what the program told of itself
    connected: bool = True
    ended: float | None = None  # when its program ended; the report follows when its output has been read
    early_exit: Ended | None = None  # that first word
    aborting_at: float | None = None  # when Open MPI said that it waits before it aborts
    lost_at: float | None = None  # when the connection broke without a report
    cut: bool = False  # mpiexec killed its outer process
    leaving: bool = False  # its interpreter is ending
    left_at: float | None = None  # when its report came
    exit: Exit | None = None  # the supervisor's report of its end
    stacks: str | None = None
    sources: dict[str, str] = field(default_factory=dict)  # the lines of their frames
    broken: str | None = None  # why its supervisor gave up
    orphaned: float | None = None  # when the process of mpiexec that had started it was gone
    cut_at: float | None = None
    warned: set[str] = field(default_factory=set)  # what was said of it once

    @property
    def running(self) -> bool:
        return self.exit is None and self.connected

    @property
    def end(self) -> Ended | Exit | None:
        """What is known of its end: the report, or the first word where there was no time for more."""
        return self.exit or self.early_exit

    @property
    def errors(self) -> list[str]:
        """The last lines of its error output."""
        return self.tails["err"].decode("utf-8", "surrogateescape").splitlines()

    @property
    def left_without_finalize(self) -> bool:
        """Whether it used MPI and ended well, by os._exit(0) or the like, while the others may wait for it."""
        end = self.exit
        if end is None or end.code or end.ours:
            return False
        return self.told("world") is not None and self.told("leaving") is None

    def told(self, kind: str) -> Told | None:
        """The last event of a kind that its own process told, or another one below it."""
        own = [event for event in self.events if event["event"] == kind]
        return own[-1] if own else None

    def take_beat(self, beat: Beat, now: float) -> None:
        """Store what a supervisor's beat says."""
        self.state, self.traced = beat.state, beat.traced
        stopped = self.state == "T" and not self.traced
        self.stopped_since = (self.stopped_since or now) if stopped else None
        self.count, self.paused = beat.beats, beat.paused
        self.step, self.fields = beat.step, beat.fields or self.fields
        if beat.age is not None:
            self.beat_at = now - max(0.0, beat.age)

    def take_stacks(self, found: FoundStacks) -> None:
        self.stacks, self.sources, self.state = found.text, found.sources, found.state

    def take_output(self, stream: str, data: bytes) -> None:
        """Remember the last words."""
        self.written += len(data)
        if stream == "err" and self.aborting_at is None and re.search(_ABORT_DELAYED, self.tails["err"][-100:] + data):
            self.aborting_at = time.monotonic()
        kept = self.tails[stream] if len(data) < limits.TAIL_BYTES else b""
        self.tails[stream] = (kept + data)[-limits.TAIL_BYTES :]
        self.spoke_last = stream

    def last_line(self) -> str:
        """The last line that it wrote, as a terminal would show it."""
        text = self.tails[self.spoke_last][-1000:].decode("utf-8", "replace")
        pieces = [piece.strip() for piece in re.split(r"[\r\n]", text)]
        return next((piece for piece in reversed(pieces) if piece), "")

    def forgive(self, seconds: float) -> None:
        """The launcher itself was stopped for so long: nobody was silent in that time."""
        self.heard_at += seconds
        if self.beat_at is not None:
            self.beat_at += seconds
        if self.stopped_since is not None:
            self.stopped_since += seconds

    def activity(self, now: float) -> str:
        """In a few words: what this rank was doing."""
        if self.exit is not None:
            what = f"ended with {codes.describe_end(self.exit.code, self.exit.signal)}"
        elif not self.connected:
            what = "lost"
        elif self.traced:
            what = "in a debugger"
        elif self.state == "T":
            what = "stopped"
        else:
            what = "leaving" if self.leaving else "running"
        if self.count:
            what += f", step {self.step}" if self.step >= 0 else ""
            what += f", last heartbeat {now - self.beat_at:.1f} s ago" if self.beat_at is not None else ""
        elif self.running:
            what += ", no heartbeats"
        return what
