"""What a process of ours inherits, changes for itself, and hands on as it was: signals that are blocked, open files."""

from __future__ import annotations

import os
import resource

from . import linux
from .signals import signal

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Collection

_MOST_FILES = 1 << 16
_COERCED = ("C.UTF-8", "C.utf8", "UTF-8")  # what Python sets LC_CTYPE to where the locale is C (PEP 538)
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python itself, from its start on


def restore_environment() -> None:
    """Take back what Python itself has put into the environment at its start: programs get the locale that was set."""
    if os.environ.get("LC_CTYPE") not in _COERCED:
        return
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return
    given = next((entry for entry in entries if entry.startswith(b"LC_CTYPE=")), None)
    if given is None:
        del os.environ["LC_CTYPE"]
    else:  # such as "C", or a locale that this machine does not have
        os.environb[b"LC_CTYPE"] = given.partition(b"=")[2]


def _was_ignored(number: int) -> bool:
    """Whether this process was started with a signal ignored that Python itself ignores from its start on.

    The process that started it tells, which hands on what it ignores; a Python does not (`subprocess`).
    """
    parent = os.getppid()
    return linux.ignores(parent, number) and not linux.is_python(parent)


class Inherited:
    """The state at the time when this is made: before anything of it is changed."""

    def __init__(self) -> None:
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self.files = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.raised: list[int] = []  # the soft limit of open files before and after `widen`
        self.ignores_size = _was_ignored(signal.SIGXFSZ)

    def hear(self, numbers: Collection[int]) -> None:
        """Unblock what this process waits for."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def widen(self) -> None:
        """Open as many files as may be: a launcher has one for each rank."""
        soft, hard = self.files
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
                self.raised = [soft, most]
            except (OSError, ValueError):
                pass  # it stays as it is

    def was_raised(self, raised: list[int]) -> None:
        """A process before this one had raised the limit of open files, as it says."""
        if raised and self.files[0] == raised[1]:
            self.files = raised[0], self.files[1]

    def hand_on(self, files: bool = True) -> None:
        """To be called in a child after a fork, last: everything as it was; without `files` it opens as many as we."""
        if files:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
            except (OSError, ValueError):
                pass
        for number in _OF_PYTHON:
            kept = number == signal.SIGXFSZ and self.ignores_size
            signal.signal(number, signal.SIG_IGN if kept else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
