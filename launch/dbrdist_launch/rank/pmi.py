"""Passes on what a program and srun's PMI-2 server say to each other, and an abort only when its words have gone out.

At an abort the server has Slurm kill all processes of the step, supervisors too, within milliseconds: who aborted, and
with what code, would be lost where the supervisor had not had its turn. What the program inherits stays the same: a
connected Unix socket of that number, with the server's answers in it.
"""

from __future__ import annotations

import os
import stat
import time
from _socket import AF_UNIX, SHUT_WR, SOCK_STREAM, socketpair  # see channel.py

from .. import limits
from ..channel import Channel
from ..wire import whole

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..loop import Loop

_ABORT = b"cmd=abort"  # in both versions of the protocol
_READ_BYTES = 1 << 16


class PmiRelay:
    """Stands between a program and the server, under srun with PMI-2; elsewhere it does nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        found = whole(environment.get("PMI_FD")) if "SLURM_STEP_ID" in environment else None
        self.number = found if found is not None and _is_socket(found) else None  # as the program knows it
        if self.number is not None:
            self._ours, self._theirs = socketpair(AF_UNIX, SOCK_STREAM)
            self._server = os.dup(self.number)
        self._held = b""  # an abort, or what comes after it
        self._tail = b""
        self.due: float | None = None  # when an abort goes on at the latest

    def in_child(self) -> None:
        """To be called in the program's process, before it runs: it has the other end."""
        if self.number is not None:
            os.dup2(self._theirs.fileno(), self.number)

    def begin(self, loop: Loop, channel: Channel, say_all: Callable[[], None]) -> None:
        """Pass on from now on; `say_all` sends the launcher all that the program has written so far."""
        if self.number is None:
            return
        self._theirs.close()
        self._loop, self._channel, self._say_all = loop, channel, say_all
        for descriptor in (self._ours.fileno(), self._server):
            os.set_blocking(descriptor, True)
        loop.watch(self._ours.fileno(), self._on_program)
        loop.watch(self._server, self._on_server)

    def _on_program(self) -> None:
        data = self._read(self._ours.fileno())
        if not data:
            self._loop.forget(self._ours.fileno())
            return
        self._tail = (self._tail + data)[-len(data) - len(_ABORT) + 1 :]
        self._held += data
        if _ABORT in self._tail and self.due is None:
            self.due = time.monotonic() + limits.ABORT_SECONDS
            self._say_all()
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Hand on what the program said; an abort once the launcher's connection has taken the words before it."""
        if self._held and (self.due is None or now >= self.due or not self._channel.unsent):
            data, self._held, self.due = self._held, b"", None
            _write(self._server, data)

    def _on_server(self) -> None:
        data = self._read(self._server)
        if data:
            _write(self._ours.fileno(), data)
            return
        self._loop.forget(self._server)
        try:
            self._ours.shutdown(SHUT_WR)
        except OSError:
            pass  # the program has closed its end

    @staticmethod
    def _read(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, _READ_BYTES)
        except OSError:
            return b""


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _write(descriptor: int, data: bytes) -> None:
    """All of it; both ends read at once, and what is said in PMI is short."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # the reader has gone
