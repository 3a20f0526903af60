"""The side channel: JSON objects, one a line, over one TCP connection between the launcher and each rank's supervisor.

From a rank: hello, out, beat, event, stacks, asked, exit. From the launcher: welcome, ping, stop, kill, stacks, bye.
The first line of a connection carries the job's random token; a connection without it is closed.
"""

import json
import os
import socket

_RECEIVE_BYTES = 1 << 18


def new_token() -> str:
    """A random word that only this job's processes know."""
    return os.urandom(16).hex()


def same_token(one: str, other: str) -> bool:
    """Compare in a time that does not depend on where the two differ (hmac's function, without importing OpenSSL)."""
    from _operator import _compare_digest

    return bool(_compare_digest(one.encode(), other.encode()))


class Channel:
    """One end of the connection. `receive` never blocks for longer than its caller's `select` said is right."""

    def __init__(self, sock: socket.socket, limit_bytes: int | None = None) -> None:
        self.socket = sock
        self.limit_bytes = limit_bytes  # of one line; lifted once the other end has shown the token
        self._rest = b""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, **fields: object) -> bool:
        """Send one message; False when the connection is broken or the other end no longer reads."""
        try:
            self.socket.sendall(json.dumps({"t": kind, **fields}).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict] | None:
        """The messages that have arrived; None when the other end is gone or talks nonsense."""
        try:
            data = self.socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.limit_bytes is not None and any(len(line) > self.limit_bytes for line in (*lines, self._rest)):
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        if not all(isinstance(message, dict) and isinstance(message.get("t"), str) for message in messages):
            return None
        return messages

    def close(self) -> None:
        self.socket.close()
