"""What a program leaves behind when it ends: processes that still write its output, or read what it wrote."""

from __future__ import annotations

import os

from .. import limits, linux

_WORDS = 60


def _target(pid: int, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except OSError:
        return ""


class Leftovers:
    """Looks at the descendants of this process, once the program itself has ended."""

    def __init__(self, outputs: tuple[int, ...], given: int = -1) -> None:
        own = os.getpid()
        self.outputs = {_target(own, descriptor) for descriptor in outputs}  # of the program: stdout and stderr
        self.inputs = {_target(own, 0), _target(own, given)}  # of the program: what it shares with its own children
        self.alive: list[int] = []
        self.filters: list[int] = []
        self.writers: list[int] = []
        self.due = 0.0

    def look(self, now: float) -> None:
        """Who is there: read from /proc, which is slow, at most ten times a second."""
        if now < self.due:
            return
        self.due = now + limits.LEFTOVER_LOOK_SECONDS
        self.alive = [pid for pid in linux.descendants(os.getpid()) if linux.state(pid) not in ("", "Z")]
        self.filters = [pid for pid in self.alive if self._reads_a_pipe(pid)]
        self.writers = [pid for pid in self.alive if self.outputs & {_target(pid, 1), _target(pid, 2)}]

    def _reads_a_pipe(self, pid: int) -> bool:
        """`exec > >(filter)`: its input ends with the program, and it may still have some of it to write."""
        source = _target(pid, 0)
        return source.startswith("pipe:") and source not in self.inputs

    def patience(self, is_open: bool, went_well: bool) -> float:
        """For how many silent seconds to wait, now that the program has ended."""
        if self.filters:
            return limits.FILTER_SECONDS if went_well else limits.FAILED_FILTER_SECONDS
        if is_open and self.writers and went_well:
            return limits.WRITER_SECONDS
        return limits.DRAIN_SECONDS if is_open or (self.alive and went_well) else 0.0

    def words(self, is_open: bool) -> str:
        """What is about to be ended; '' for nothing."""
        held = "; they held its output open, which may be cut short" if is_open else ""
        if not self.alive:
            return "its output was still open after its end, and is cut here" if is_open else ""
        named = ", ".join(_name(pid) for pid in self.alive[:4])
        more = f" and {len(self.alive) - 4} more" if len(self.alive) > 4 else ""
        return f"its program has ended and left processes, which are ended now: {named}{more}{held}"


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    plain = "".join(letter if letter.isprintable() else " " for letter in command)
    return f"{pid} ({plain[:_WORDS] or '?'})"
