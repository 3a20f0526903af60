"""Where the supervisors connect: a Unix socket where all ranks are on this machine, else a TCP port.

A connection is a stranger until its first line has shown the job's token. Strangers are few, have little time and
cannot do anything: whatever they send, at most they are closed.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable

from ... import limits
from ...channel import Channel, same_token
from ...errors import LaunchError
from ...loop import Loop
from ...messages import Ask, Hello


class ConnectionListener:
    """Hands over each connection that has shown the token, with its hello."""

    def __init__(
        self,
        loop: Loop,
        token: str,
        welcome: Callable[[Channel, Hello | Ask], None],
        say: Callable[[str], None],
        path: str | None,
        addresses: tuple[str, ...] = (),
        port: int = 0,
    ) -> None:
        self.loop, self.welcome, self.say = loop, welcome, say
        self.token = token
        self.path = path
        self.strangers: dict[Channel, float] = {}
        self.refused = 0
        self.spare = os.open(os.devnull, os.O_RDONLY)  # given up when no file can be opened any more
        self.again_at: float | None = None  # when to accept again
        self.socket = self._unix(path) if path is not None else self._tcp(addresses, port)
        self.socket.setblocking(False)
        self.address = f"unix:{path}" if path is not None else f"{','.join(addresses)}:{self.socket.getsockname()[1]}"
        loop.watch(self.socket.fileno(), self._accept)

    def _unix(self, path: str) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind(path)
        made.listen(512)
        return made

    def _tcp(self, addresses: tuple[str, ...], port: int) -> socket.socket:
        bind = addresses[0] if len(addresses) == 1 else ""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            return socket.create_server((bind, port), family=family, backlog=512)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on port {port} of {bind or 'all interfaces'}: {error.strerror}; "
                "omit --port to use a free port, or give an address of this host with --interface"
            ) from error

    def _accept(self) -> None:
        try:
            found, _ = self.socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._make_room()
            return
        if len(self.strangers) >= limits.MAX_STRANGERS:
            self._close(next(iter(self.strangers)))
        channel = Channel(found, limits.HELLO_BYTES)
        self.strangers[channel] = time.monotonic()
        self.loop.watch_channel(channel, lambda: self._on_stranger(channel))

    def _make_room(self) -> None:
        """No more files: the oldest stranger goes, or the one who knocks."""
        if self.strangers:
            self._close(next(iter(self.strangers)))
            return
        os.close(self.spare)
        try:
            self.socket.accept()[0].close()
        except OSError:
            pass
        try:
            self.spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass
        self.loop.forget(self.socket.fileno())
        self.again_at = time.monotonic() + 1.0

    def _on_stranger(self, channel: Channel) -> None:
        messages = channel.receive()
        if messages == []:
            return
        hello = messages[0] if messages else None
        problem = problem_with(hello, self.token)
        if problem is None and isinstance(hello, (Hello, Ask)):
            self.loop.forget(channel.fileno())
            del self.strangers[channel]
            channel.parser.limit_bytes = limits.MESSAGE_BYTES
            self.welcome(channel, hello)
            return
        self.refused += 1
        if self.refused <= 10:
            self.say(f"refused a connection from {_peer(channel)}: {problem}")
        self._close(channel)

    def _close(self, channel: Channel) -> None:
        self.loop.forget(channel.fileno())
        del self.strangers[channel]
        channel.close()

    def look(self, now: float) -> None:
        """Close who has not said who he is, and listen again after a pause."""
        for channel, since in list(self.strangers.items()):
            if now - since > limits.HELLO_SECONDS:
                self._close(channel)
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            self.loop.watch(self.socket.fileno(), self._accept)

    def close(self) -> None:
        for channel in list(self.strangers):
            self._close(channel)
        self.loop.forget(self.socket.fileno())
        self.socket.close()
        try:
            os.close(self.spare)
            os.unlink(self.path or "")
        except OSError:
            pass


def problem_with(hello: object, token: str) -> str | None:
    """Why a first message, or None for none that could be read, is no rank's; None for a good one."""
    if not isinstance(hello, (Hello, Ask)):
        return "it does not follow the protocol"
    if not same_token(hello.token, token):
        return "wrong token (a rank of another job, or a stranger)"
    if isinstance(hello, Hello) and (hello.rank < 0 or hello.size < 1 or not hello.host):
        return "it does not say which rank it is"
    return None


def _peer(channel: Channel) -> str:
    try:
        name = channel.socket.getpeername()
        return "{}:{}".format(*name[:2]) if isinstance(name, tuple) else "a process on this machine"
    except OSError:
        return "a peer that is gone"
