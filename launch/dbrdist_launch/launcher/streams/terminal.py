"""What is typed on the launcher's terminal, for rank 0: mpiexec, in a session of its own, cannot read there."""

from __future__ import annotations

import os
import termios
from collections.abc import Callable

from ... import limits
from ...loop import Loop


class Typed:
    """Hands on what is typed, while the launcher stands in the foreground."""

    def __init__(self, loop: Loop, pipe: int, echoed: Callable[[bytes], None] = lambda data: None) -> None:
        """``echoed`` is told what the terminal has shown of it."""
        self.loop, self.pipe, self.echoed = loop, pipe, echoed
        self._watching = False
        self._unsent = b""
        os.set_blocking(pipe, False)

    def look(self) -> None:
        """Several times a second: the launcher may have come to the foreground, or rank 0 may take more."""
        if self._unsent:
            self._send()
        wanted = self.pipe >= 0 and not self._unsent and _in_foreground()
        if wanted and not self._watching:
            self.loop.watch(0, self._read)
        elif self._watching and not wanted:
            self.loop.forget(0)
        self._watching = wanted

    def _read(self) -> None:
        if not _in_foreground():  # a read would stop the launcher
            self.look()
            return
        try:
            data = os.read(0, limits.READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # the terminal has gone
        if data:
            if _echoes():
                self.echoed(data)
            self._unsent += data
            self._send()
        else:
            self.close()

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self.pipe, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # mpiexec reads no more
            self._unsent = b""
            self.close()

    def close(self) -> None:
        """The end of the input: Ctrl-D, or that of the attempt."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        if self._watching:
            self.loop.forget(0)
            self._watching = False


def _echoes() -> bool:
    try:
        return bool(termios.tcgetattr(0)[3] & termios.ECHO)
    except termios.error:
        return False


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
