"""Where the ranks' lines go: one write per line, the rank and its host in front; one file per rank in --log-dir."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, BinaryIO

from ..errors import LaunchError

if TYPE_CHECKING:
    from .view import View


class Output:
    """Prints lines of ranks and of the launcher itself."""

    def __init__(self, quiet: bool = False, log_dir: str | None = None, prefix: bool = True) -> None:
        self.quiet, self.log_dir, self.prefix = quiet, log_dir, prefix
        self._files: dict[int, BinaryIO] = {}
        self.view: View | None = None  # set by the live view, which then draws the lines above itself
        if log_dir is not None:
            try:
                os.makedirs(log_dir, exist_ok=True)
                probe = os.path.join(log_dir, f".probe-{os.getpid()}")
                with open(probe, "w"):
                    os.unlink(probe)
            except OSError as error:
                raise LaunchError(f"--log-dir {log_dir!r} cannot be written: {error.strerror}") from error

    def lines(self, rank: int, host: str, stream: str, lines: list[str]) -> None:
        """Print and file the lines of one rank."""
        front = f"[{rank} {host}] " if self.prefix else ""
        if self.log_dir is not None:
            file = self._files.get(rank)
            if file is None:
                file = self._files[rank] = open(os.path.join(self.log_dir, f"rank-{rank}.log"), "ab", buffering=0)  # noqa: SIM115
            file.write("".join(line + "\n" for line in lines).encode("utf-8", "surrogateescape"))
        if self.quiet and rank != 0:
            return
        for line in lines:
            self._write(2 if stream == "err" else 1, front + line)

    def note(self, text: str) -> None:
        """Print what the launcher itself has to say."""
        self._write(2, text)

    def _write(self, descriptor: int, text: str) -> None:
        data = (text + "\n").encode("utf-8", "surrogateescape")
        if self.view is not None:
            self.view.line(text)
            return
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError:
            # The reader has gone (`| head`): the job goes on, as its result may be a file.
            sys.stdout = None  # type: ignore[assignment]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
