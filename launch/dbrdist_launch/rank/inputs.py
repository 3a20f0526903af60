"""The stdin of rank 0's program: what the launcher sends is written as the program reads it."""

from __future__ import annotations

import os

from ..loop import Loop

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable


class Inputs:
    """The write end of the pipe; `taken` hears how many bytes went into it, and that nobody reads any more."""

    def __init__(self, loop: Loop, pipe: int, taken: Callable[[int, bool], None]) -> None:
        self.loop, self.pipe, self.taken = loop, pipe, taken
        self._unsent = bytearray()
        self._ended = False
        os.set_blocking(pipe, False)  # our end of it alone

    def take(self, data: bytes) -> None:
        """So much more; b"" is the end."""
        self._unsent += data
        self._ended = self._ended or not data
        self._write()

    def _write(self) -> None:
        count = 0
        try:
            while self._unsent and self.pipe >= 0:
                written = os.write(self.pipe, self._unsent)
                del self._unsent[:written]
                count += written
        except BlockingIOError:
            self.loop.when_writable(self.pipe, self._write)
        except OSError:  # the program has closed its stdin, or has ended
            self.close()
        if self._ended and not self._unsent:
            self.close()
        if count or self.pipe < 0:
            self.taken(count, self.pipe < 0)

    def close(self) -> None:
        if self.pipe >= 0:
            self.loop.forget_writable(self.pipe)
            os.close(self.pipe)
            self.pipe = -1
        self._unsent.clear()
