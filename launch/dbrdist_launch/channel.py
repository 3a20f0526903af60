"""The side channel between the launcher and each rank's supervisor, over one connection.

What is said stands in `messages`. The first line of a connection carries the job's random token; a connection without
it is closed.

Nothing here blocks: what does not go out at once waits until the connection takes it. Whether the other end lives is
the kernel's to say: it closes the connection of a process that has ended, and gives up that of a host that is gone.
A process that is stopped, or slow, is neither.
"""

from __future__ import annotations

import _socket as socket  # without the enumerations and files of `socket`, which cost each rank's start 3 ms
import os

from . import messages, wire
from .limits import MESSAGE_BYTES
from .messages import NonsenseError

_RECEIVE_BYTES = 1 << 18
_KEEP_ALIVE_PROBES = 3
_KEEP_ALIVE_MOST_SECONDS = 32767  # of one probe, on Linux

TYPE_CHECKING = False  # `typing` itself would cost each rank's supervisor 0.7 MB
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .messages import Message


def new_token() -> str:
    """A random word that only this job's processes know."""
    return os.urandom(16).hex()


def same_token(one: object, other: str) -> bool:
    """Compare in a time that does not depend on where the two differ (hmac's function, without importing OpenSSL)."""
    from _operator import _compare_digest  # type: ignore[import-not-found,unused-ignore]

    return isinstance(one, str) and one.isascii() and bool(_compare_digest(one, other))


class Parser:
    """Bytes in, lines and their bytes out."""

    def __init__(self, limit_bytes: int = MESSAGE_BYTES) -> None:
        self.limit_bytes = limit_bytes  # of one message
        self._rest = bytearray()
        self._message: dict[str, Any] | None = None  # the one whose bytes have not all come
        self._wanted = 0

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """What is completed by `data`, each with the bytes that followed it; NonsenseError for anything else."""
        if self._rest:
            self._rest += data
        source = self._rest or data  # mostly a message comes whole, and is not copied together first
        with memoryview(source) as view:
            found, used = self._messages(source, view)
        if source is data:
            self._rest += data[used:]
        else:
            del self._rest[:used]
        return found

    def _messages(self, source: bytes | bytearray, view: memoryview) -> tuple[list[tuple[dict[str, Any], bytes]], int]:
        """(the messages that are whole, how many bytes they take)"""
        found: list[tuple[dict[str, Any], bytes]] = []
        at = 0
        while True:
            if self._message is None:
                begin = at
                at = self._header(source, view, begin)
                if at == begin:
                    return found, at
            if len(source) - at < self._wanted:
                return found, at
            message, self._message = self._message, None
            assert message is not None
            found.append((message, bytes(view[at : at + self._wanted])))
            at += self._wanted

    def _header(self, source: bytes | bytearray, view: memoryview, at: int) -> int:
        """Read the line there; where it ends, or `at` where its end has not come."""
        end = source.find(b"\n", at)
        if (end if end >= 0 else len(source)) - at > self.limit_bytes:
            raise NonsenseError("a line is too long")
        if end < 0:
            return at
        try:
            message = wire.loads(bytes(view[at:end]))
        except (ValueError, RecursionError) as error:
            raise NonsenseError("no JSON") from error
        if not isinstance(message, dict) or not isinstance(message.get("t"), str):
            raise NonsenseError("no message")
        self._wanted = message.pop("n", 0)
        if type(self._wanted) is not int or not 0 <= self._wanted <= self.limit_bytes:
            raise NonsenseError("no length")
        self._message = message
        return end + 1


class Channel:
    """One end of the connection."""

    def __init__(self, sock: socket.socket, limit_bytes: int = MESSAGE_BYTES) -> None:
        self.socket, self.parser = sock, Parser(limit_bytes)
        self.unsent = bytearray()
        self.when_blocked: Callable[[], None] | None = None  # told once some bytes have to wait
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def watch_peer(self, seconds: float) -> None:
        """Let the kernel give this connection up when the other host has not answered for so long."""
        if self.socket.family == socket.AF_UNIX:
            return
        seconds = max(0.0, min(seconds, _KEEP_ALIVE_MOST_SECONDS * (_KEEP_ALIVE_PROBES + 1)))
        every = int(max(1.0, seconds / (_KEEP_ALIVE_PROBES + 1)))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, every),
            (socket.TCP_KEEPINTVL, every),
            (socket.TCP_KEEPCNT, _KEEP_ALIVE_PROBES),
            (socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds))),
        ):
            self.socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: Message) -> None:
        """Send one message, now or when the connection takes it. A broken connection shows in `receive`."""
        head, data = messages.write(message)
        sent = 0
        if not self.unsent:
            try:
                sent = self.socket.sendmsg((head, data))
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                return
        if sent < len(head) + len(data):
            self.unsent += head[sent:]
            self.unsent += data[max(0, sent - len(head)) :]
            self.flush()
            if self.unsent and self.when_blocked is not None:
                self.when_blocked()

    def flush(self) -> None:
        """Hand the kernel what it takes."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.unsent.clear()

    def receive(self) -> list[Message] | None:
        """The messages that have arrived; None when the other end is gone or talks nonsense."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
            return [messages.read(*found) for found in self.parser.feed(data)] if data else None
        except (BlockingIOError, InterruptedError):
            return []
        except (OSError, NonsenseError):
            return None

    def close(self) -> None:
        self.socket.close()
