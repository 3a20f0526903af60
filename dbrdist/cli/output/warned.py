"""Python's warnings as words of a run: a line each, once, on the screen and in the log file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from dbrdist.cli.output.console import Console

if TYPE_CHECKING:
    from typing import TextIO

    from dbrdist.comm.communicators.communicator import CommunicatorBase

_OWN_FILES = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep,
    os.path.dirname(os.path.abspath(click.__file__)) + os.sep,  # which calls the command
)
_MAX_WARNINGS = 1000  # that are told apart


class Warned:
    """The warnings of this rank's run: rank 0 says its own at once, and others' when the run ends."""

    def __init__(self, rank: int, console: Console):
        self._rank = rank
        self._console = console
        self._found: dict[str, None] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block, warnings come here; Python's filters (`-W`, PYTHONWARNINGS) hold as ever."""
        before = warnings.showwarning
        warnings.showwarning = self._take
        try:
            yield
        finally:
            warnings.showwarning = before

    def _take(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        words = in_words(message, category, filename, lineno)
        if words in self._found or len(self._found) >= _MAX_WARNINGS:
            return
        self._found[words] = None
        if self._rank == 0:
            self._console.warn(words)

    def say_own(self) -> None:
        """On another rank than 0, where its run has failed: say what it was warned of, which nobody will gather."""
        for words in list(self._found) if self._rank else ():
            self._console.warn(f"rank {self._rank}: {words}")

    def gather(self, comm: CommunicatorBase) -> None:
        """Let rank 0 say what only other ranks were warned of. Collective."""
        for rank, theirs in enumerate(comm.allgather_obj(list(self._found))):
            for words in theirs if self._rank == 0 else ():
                if words not in self._found:
                    self._found[words] = None
                    self._console.warn(f"rank {rank}: {words}")


def in_words(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str:
    """A warning in one line: its text, and where it comes from another's code, its kind and place."""
    text = " ".join(str(message).split())
    if filename.startswith(_OWN_FILES):
        return text
    return f"{text} ({category.__name__} at {_from_here(filename)}:{lineno})"


def _from_here(path: str) -> str:
    """A path without the working directory, if it begins with it."""
    try:
        here = os.path.relpath(path)
        return os.path.abspath(path) if here.startswith(os.pardir) else here
    except (OSError, ValueError):  # the directory was removed, or is on another drive
        return path
