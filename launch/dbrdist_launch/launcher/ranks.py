"""What the launcher knows of each rank."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field

from ..channel import Channel

_TAIL_LINES = 400
_ABORT_DELAYED = re.compile(r"^\[[^]]+:\d+\] Delaying for \d+ seconds before aborting")


@dataclass
class Rank:
    """One rank; times are seconds on the launcher's monotonic clock."""

    rank: int
    host: str
    channel: Channel
    local_rank: int = 0
    pid: int = 0  # of the program
    heard_at: float = field(default_factory=time.monotonic)
    state: str = ""  # of the program's process, as in /proc/PID/stat
    stopped_since: float | None = None
    count: int = 0  # beats
    step: int = -1
    beat_at: float | None = None
    paused: bool = False
    fields: dict = field(default_factory=dict)
    last_line: str = ""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))  # last lines of stderr
    connected: bool = True
    ended: float | None = None  # when its program ended; the report follows when its output has been read
    early_exit: dict | None = None  # that first word: code, signal, oom, ours
    aborting_at: float | None = None  # when Open MPI said that it waits before it aborts
    lost_at: float | None = None  # when the connection broke without a report
    cut: bool = False  # mpiexec killed its outer process
    leaving: bool = False  # its interpreter is ending
    exit: dict | None = None  # the supervisor's report of its end
    stacks: str | None = None

    @property
    def running(self) -> bool:
        return self.exit is None and self.connected

    @property
    def end(self) -> dict | None:
        """What is known of its end: the report, or the first word where there was no time for more."""
        return self.exit or self.early_exit

    def take_beat(self, message: dict, now: float) -> None:
        """Store what a supervisor's beat says."""
        self.state = message["state"]
        if self.state in ("T", "t"):
            self.stopped_since = self.stopped_since or now
        else:
            self.stopped_since = None
        self.count, self.paused = message["count"], message["paused"]
        self.step, self.fields = message["step"], message["fields"] or self.fields
        if message["age"] is not None:
            self.beat_at = now - message["age"]

    def take_lines(self, stream: str, lines: list[str]) -> None:
        """Remember the last words."""
        if stream == "err":
            self.errors.extend(lines)
            if self.aborting_at is None and any(_ABORT_DELAYED.search(line) for line in lines):
                self.aborting_at = time.monotonic()
        said = [line for line in lines if line.strip()]
        if said:
            self.last_line = said[-1]

    def activity(self, now: float) -> str:
        """In a few words: what this rank was doing."""
        if self.exit is not None:
            what = f"ended with {describe_end(self.exit['code'], self.exit['signal'])}"
        elif not self.connected:
            what = "lost"
        elif self.state in ("T", "t"):
            what = "stopped"
        else:
            what = "leaving" if self.leaving else "running"
        if self.count:
            what += f", step {self.step}" if self.step >= 0 else ""
            what += f", last beat {now - self.beat_at:.1f} s ago" if self.beat_at is not None else ""
        elif self.running:
            what += ", no beats"
        return what


def describe_end(code: int, signal_number: int) -> str:
    """Exit code 3, or SIGKILL."""
    from ..codes import signal_name

    return signal_name(signal_number) if signal_number else f"exit code {code}"
