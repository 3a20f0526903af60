"""What a run says: on the standard output while anybody reads it, and in a file of the run's folder."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from dbrdist.cli.output.words import columns_of, folded
from dbrdist.core.files import standard_streams
from dbrdist.core.files.regular_file import regular

_MAX_WAITING = 1000


class Console:
    """A text stream for whole lines. When its reader goes away (`| head`), the run continues without it."""

    def __init__(self) -> None:
        self._file: Any = None
        self._rest = ""
        self._waiting: list[str] = []  # for the file, as long as there is none

    def open(self, path: str, heading: str) -> None:
        """Write each line to a file too, with the time in front: a heading, what was said so far, and what will be."""
        self._file = open(  # noqa: SIM115 - closed by `close`
            path, "a", encoding="utf-8", errors="backslashreplace", opener=regular
        )
        waiting, self._waiting = self._waiting, []
        self._to_file([heading, *waiting])

    def write(self, text: str) -> int:
        """Write text; the file gets it line by line."""
        standard_streams.stdout.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        self._to_file(lines)
        return len(text)

    def say(self, line: str) -> None:
        """Write a line, folded on a terminal and whole in pipes and in the file."""
        standard_streams.stdout.write(folded(line, columns_of(sys.stdout)) + "\n")
        self._to_file([line])

    def warn(self, words: str) -> None:
        """Write a warning to the standard error and to the file."""
        line = f"warning: {words}"
        standard_streams.stderr.write(folded(line, columns_of(sys.stderr)) + "\n")
        self._to_file([line])

    def log(self, line: str) -> None:
        """Write a line to the file alone."""
        self._to_file([line])

    def _to_file(self, lines: list[str]) -> None:
        if self._file is None:
            self._waiting = [*self._waiting, *lines][:_MAX_WAITING]
            return
        with contextlib.suppress(OSError):  # a full disk is reported where a snapshot does not fit
            self._file.writelines(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n" for line in lines if line.strip())
            self._file.flush()

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        """Whether somebody sees it now."""
        return standard_streams.stdout.isatty()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
