"""The stacks of a rank's threads: asked of the hooks in its Python, or of py-spy."""

from __future__ import annotations

import os

from .. import limits, linux
from ..wire import whole
from .spy import by_py_spy

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable

# What a signal makes short, as not every program expects: write, writev, pwrite64, sendto, sendmsg, sendfile, splice.
# And what waits for any signal: pause, rt_sigsuspend.
_SHORT = {"x86_64": (1, 20, 18, 44, 46, 40, 275, 34, 130), "aarch64": (64, 66, 68, 206, 211, 71, 76, 133)}
_NOT_ASKED = (
    "no stacks: it waits in a write, for a reader of its output, or for a signal; a signal would cut that short"
)
# `while not request.Test(): time.sleep(0.01)`: who is asleep there waits for what it asks.
_POLLED = r"(?i)\.(test(all|any|some)?|i?m?probe|is_completed|query)\s*\("
_LOOP_LINES = 6
IN_LOOP = "  # in a loop with "
_MOST_FRAMES = 200
_LINE_BYTES = 200


def would_cut(pid: int) -> bool:
    """Whether the main thread, which takes the signals of a process, is in a call that a signal would cut short."""
    try:
        with open(f"/proc/{pid}/wchan") as file:
            if "pipe_write" in file.read():
                return True
        with open(f"/proc/{pid}/syscall") as file:
            return whole(file.read().partition(" ")[0]) in _SHORT.get(os.uname().machine, ())
    except OSError:
        return False  # the kernel does not say


class Stacks:
    """One question at a time; `answer` is called with the text and the source lines once it is there."""

    def __init__(self, signal_number: int, answer: Callable[[str, dict[str, str]], None]) -> None:
        self.signal_number, self.answer = signal_number, answer
        self.text = b""
        self.below: list[int] = []  # the program, perhaps a shell, and what it started
        self.pid: int | None = None  # the one with the hooks
        self.sent = False
        self.due: float | None = None  # when to look again; None: nobody asks
        self.until = 0.0

    def ask(self, below: list[int], now: float) -> None:
        self.text, self.below, self.sent = b"", below, False
        self.pid = next((pid for pid in below if linux.catches(pid, self.signal_number)), None)
        self.until = now + limits.STACK_SECONDS
        self.due = now
        self.look(now)

    def take(self, line: bytes, now: float) -> None:
        """A line that the process wrote."""
        self.text += line
        if self.due is not None:
            self.due = min(self.until, now + limits.STACK_PAUSE_SECONDS)

    def look(self, now: float) -> None:
        if self.due is None or now < self.due:
            return
        if self.pid is None or (self.sent and (self.text or now >= self.until)):
            self._finish(self.text or by_py_spy(self.below).encode())
        elif not self.sent and not linux.catches(self.pid, self.signal_number):
            self.pid = (
                None  # its Python has ended meanwhile, or it has become another program: the signal would kill it
            )
            self._finish(by_py_spy(self.below).encode())
        elif not self.sent and not would_cut(self.pid):
            self.sent = True
            linux.kill(self.pid, self.signal_number)
            self.due = self.until = now + limits.STACK_SECONDS
        elif not self.sent and now >= self.until:
            self._finish(by_py_spy(self.below).encode() or _NOT_ASKED.encode())
        else:
            self.due = now + limits.STACK_LOOK_SECONDS

    def _finish(self, text: bytes) -> None:
        self.due = None
        words = text[-limits.TAIL_BYTES :].decode(errors="replace")
        self.answer(words, sources(words, _program(self.pid)))


def _program(pid: int | None) -> str | None:
    """The text of `python -c TEXT`."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        return os.fsdecode(words[words.index(b"-c") + 1])
    except (OSError, ValueError, IndexError):
        return None


def sources(stacks: str, program: str | None = None) -> dict[str, str]:
    """`FILE:LINE` of each frame, and the line there: read where the program runs."""
    wanted: dict[str, set[int]] = {}
    for line in stacks.splitlines()[:_MOST_FRAMES]:
        name, _, rest = line.strip().removeprefix('File "').partition('", line ')
        number = whole(rest.split(" ")[0].rstrip(","))
        if number:
            wanted.setdefault(name, set()).add(number)
    found: dict[str, str] = {}
    for name, numbers in wanted.items():
        lines = _lines(name, program)
        for number in numbers:
            if number <= len(lines):
                found[f"{name}:{number}"] = lines[number - 1].strip()[:_LINE_BYTES] + _polled(lines, number - 1)
    return found


def _polled(lines: list[str], at: int) -> str:
    """What a loop around a pause asks, as a comment; '' for other lines."""
    text = lines[at].strip()
    is_asking = text.startswith("while ") and _begins_with_pause(lines, at)
    if not is_asking and not _is_pause(text):
        return ""
    from re import search  # seldom needed, and it costs each rank's start 5 ms

    if is_asking:  # without a sleep it is mostly here
        return IN_LOOP + text[:_LINE_BYTES] if search(_POLLED, text) else ""
    for above in range(at - 1, max(-1, at - _LOOP_LINES), -1):
        if lines[above].lstrip().startswith("while ") and _indent(lines[above]) < _indent(lines[at]):
            end = next((n for n in range(at + 1, len(lines)) if _indent(lines[n]) <= _indent(lines[above])), len(lines))
            loop = lines[above : min(end, above + _LOOP_LINES)]
            asked = next((line.strip() for line in loop if search(_POLLED, line)), "")
            return IN_LOOP + asked[:_LINE_BYTES] if asked else ""
    return ""


def _is_pause(text: str) -> bool:
    return "sleep(" in text or text in ("pass", "continue")


def _begins_with_pause(lines: list[str], at: int) -> bool:
    """Whether what a loop does, on its own line or the next, is a pause first of all."""
    body = lines[at].partition("#")[0].rpartition(":")[2].strip()
    return _is_pause(body or "".join(lines[at + 1 : at + 2]).partition("#")[0].strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lines(name: str, program: str | None) -> list[str]:
    if name == "<string>":
        return (program or "").split("\n")
    try:
        with open(name, errors="replace") as file:
            return file.read(1 << 20).split("\n")
    except (OSError, ValueError):
        return []
