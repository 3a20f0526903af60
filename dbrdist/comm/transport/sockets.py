"""TCP connections of our own between hosts, for where MPI itself has nothing faster than TCP.

MPI moves messages only while someone looks, some 20 times for a megabyte, and each look takes the core and the
interpreter lock from backward. Here the kernel moves them: a rank says what it sends and receives, and sleeps. Measured
with MPICH 5.0.2 over a cable of 1 Gb/s, 102 MB in buckets of 2 MB, by a thread that looks every 0.2 ms: 1.04 s, of
which the thread takes 0.13 s of the core; these connections 0.86 s, of which 0.07 s.

Bytes are sent as they are, as MPI's are. A secret that the ranks share over MPI keeps strangers out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.message import HostArray
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from typing import Any

    from mpi4py.MPI import Comm

MOST_RANKS = 64  # each has a connection to each other
_LOOK_MS = 100  # between two looks for what the watch has to say
_WAKE_BYTES = 1 << 20  # a rank is woken for this much: fewer times cost backward less of the core
_PATIENCE_SECONDS = 5.0  # for connections, and for the watch to say why one has ended
_TRY_SECONDS = 1.0  # for one address
_SILENT_SECONDS = 60  # until a connection is looked at; the system's default is two hours
_SECRET_BYTES = 32
_CALL_BYTES = 4 + _SECRET_BYTES
_MOST_CALLERS = 256  # at a time
_SIOCGIFADDR = 0x8915  # on Linux

Ticket: TypeAlias = "tuple[_Line, int]"


class _Line:
    """One connection: what goes, what comes, in order."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connection)
        self.connection = connection
        self.peer = peer
        self.going: deque[memoryview] = deque()
        self.coming: deque[memoryview] = deque()
        self.num_posted = self.num_come = 0
        self.ended_at = 0.0
        self._wakes_at = 1

    def events(self) -> int:
        """What poll shall look for."""
        if self.ended_at:
            return 0
        if self.coming:
            self._wake_at(min(len(self.coming[0]), _WAKE_BYTES))
        return (select.POLLIN if self.coming else 0) | (select.POLLOUT if self.going else 0)

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._wakes_at:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def push(self) -> None:
        """Send what the kernel takes now."""
        with contextlib.suppress(BlockingIOError):
            while self.going:
                _advance(self.going, self.connection.send(self.going[0]))

    def pull(self) -> None:
        """Receive what is there."""
        with contextlib.suppress(BlockingIOError):
            while self.coming:
                num_bytes = self.connection.recv_into(self.coming[0])
                if num_bytes == 0:
                    self.ended_at = time.monotonic()
                    return
                self.num_come += _advance(self.coming, num_bytes)

    def move(self) -> None:
        """Both. A connection that ends is noted: why, the watch knows better."""
        if self.ended_at:
            return
        try:
            self.pull()
            self.push()
        except OSError:
            self.ended_at = time.monotonic()


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask now and then whether the other host is there: firewalls forget who is silent for long, as
    in an evaluation, and a host without power says nothing."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS)


def _advance(views: deque[memoryview], num_bytes: int) -> bool:
    """Whether the first of them is done now."""
    rest = views[0][num_bytes:]
    if len(rest):
        views[0] = rest
        return False
    views.popleft()
    return True


class Cable:
    """Connections to each other rank. Messages to a rank arrive in their order; the receiver knows their sizes.

    Args:
        connections: by rank.
    """

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self.size = len(connections) + 1
        self.rank = next(k for k in range(self.size) if k not in connections)
        self._lines = {peer: _Line(connection, peer) for peer, connection in connections.items()}
        self._of_file = {line.connection.fileno(): line for line in self._lines.values()}
        self._poll = select.poll()
        _cables.add(self)

    def send(self, peer: int, raw: HostArray) -> None:
        """Send these bytes, some time before :meth:`flush` returns; leave them alone until then, or until the peer
        has answered."""
        line = self._lines[peer]
        line.going.append(raw.data)
        if len(line.going) == 1 and not line.ended_at:
            line.move()

    def receive(self, peer: int, raw: HostArray) -> Ticket:
        """Receive into ``raw``: what comes from ``peer`` after the messages received before."""
        line = self._lines[peer]
        line.coming.append(raw.data)
        line.num_posted += 1
        return line, line.num_posted

    def wait(self, call: Call, ticket: Ticket) -> None:
        """Return when the bytes of a :meth:`receive` are there.

        Raises:
            CommunicatorError: if the watch finds that the wait can never end, or the connection has ended.
        """
        line, number = ticket
        while line.num_come < number:
            self._wait_for_any(call)

    def flush(self, call: Call) -> None:
        """Return when everything is sent."""
        while any(line.going for line in self._lines.values()):
            self._wait_for_any(call)

    def _wait_for_any(self, call: Call) -> None:
        for line in self._lines.values():
            self._poll.register(line.connection, line.events())
        call.is_waiting = True
        try:
            found = self._poll.poll(_LOOK_MS)
        finally:
            call.is_waiting = False
        if call.error:
            raise CommunicatorError(call.error)
        for file, _ in found:
            self._of_file[file].move()
        self._check_ends()

    def _check_ends(self) -> None:
        ended = [line for line in self._lines.values() if line.ended_at]
        if not ended:
            return
        if time.monotonic() - ended[0].ended_at > _PATIENCE_SECONDS:
            raise CommunicatorError(f"the connection to the rank on host {ended[0].peer} has ended")
        time.sleep(0.01)  # poll returns at once for a connection that has ended

    def close(self) -> None:
        """End the connections."""
        for line in self._lines.values():
            line.connection.close()


_cables: weakref.WeakSet[Cable] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child that outlives its rank must not keep the connections open."""
    for cable in list(_cables):
        cable.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# ---- how ranks find each other ----


def connect(mpi_comm: Comm) -> tuple[Cable | None, str]:
    """(connections between these ranks, one on each host; why there are none). Collective."""
    made: dict[int, socket.socket] = {}
    reason, listener = "", None
    try:
        listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        own = (listener.getsockname()[1], addresses())
    except OSError as e:
        own, reason = (0, []), str(e)
    secret = mpi_comm.bcast(secrets.token_bytes(_SECRET_BYTES) if mpi_comm.rank == 0 else None)
    everyone = mpi_comm.allgather(own)
    if all(port for port, _ in everyone):
        try:
            _meet(mpi_comm.rank, everyone, secret, listener, made)
        except OSError as e:
            reason = str(e) or type(e).__name__
    if listener is not None:
        listener.close()
    reasons = [why for why in mpi_comm.allgather(reason) if why]
    if not reasons:
        return Cable(made), ""
    for connection in made.values():
        connection.close()
    return None, reasons[0]


def _meet(
    rank: int,
    everyone: Sequence[tuple[int, list[str]]],
    secret: bytes,
    listener: Any,
    made: dict[int, socket.socket],
) -> None:
    """Call the ranks below, in turn, then answer those above."""
    for peer in range(rank):
        made[peer] = _call(rank, peer, everyone[peer], secret)
    end = time.monotonic() + _PATIENCE_SECONDS + _TRY_SECONDS * max(len(found) for _, found in everyone)
    with contextlib.closing(_Door(listener, rank, secret)) as door:
        while len(made) < len(everyone) - 1:
            for caller, connection in door.wait(end):
                if rank < caller < len(everyone) and caller not in made:
                    made[caller] = connection
                else:
                    connection.close()


class _Door:
    """Where others call. All of them are heard at once: a stranger that says nothing keeps no rank waiting."""

    def __init__(self, listener: Any, rank: int, secret: bytes) -> None:
        listener.setblocking(False)
        self._listener, self._rank, self._secret = listener, rank, secret
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}  # by file; what each has said
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def wait(self, end: float) -> list[tuple[int, socket.socket]]:
        """The ranks that have called by now, with their connections; maybe none."""
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        files = [file for file, _ in self._poll.poll(left * 1000)]
        found = [self._hear(file) for file in files if file in self._callers]
        if self._listener.fileno() in files:
            self._open()
        return [ranks for ranks in found if ranks is not None]

    def _open(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._callers) == _MOST_CALLERS:
                self._dismiss(next(iter(self._callers))).close()  # which has been there for longest
            self._callers[connection.fileno()] = connection, bytearray()
            self._poll.register(connection, select.POLLIN)

    def _dismiss(self, file: int) -> socket.socket:
        self._poll.unregister(file)
        return self._callers.pop(file)[0]

    def _hear(self, file: int) -> tuple[int, socket.socket] | None:
        """A rank that has said all it has to say; a stranger is sent away."""
        connection, said = self._callers[file]
        try:
            more = connection.recv(_CALL_BYTES - len(said))
            said += more
            if more and len(said) < _CALL_BYTES:
                return None
            caller = _answer(connection, bytes(said), self._rank, self._secret)
        except BlockingIOError:
            return None
        except OSError:
            caller = None
        self._dismiss(file)
        if caller is None:
            connection.close()
            return None
        return caller, connection

    def close(self) -> None:
        """Send away who is still there."""
        for file in list(self._callers):
            self._dismiss(file).close()


def _call(rank: int, peer: int, where: tuple[int, list[str]], secret: bytes) -> socket.socket:
    port, found = where
    reason = "it has no address"
    for address in found:
        try:
            connection = socket.create_connection((address, port), _TRY_SECONDS)
        except OSError as e:
            reason = f"{address}: {e}"
            continue
        try:
            end = time.monotonic() + _PATIENCE_SECONDS  # the peer may have others to call first
            connection.sendall(struct.pack("!i", rank) + _proof(secret, "call", rank, peer))
            if hmac.compare_digest(_read(connection, _SECRET_BYTES, end), _proof(secret, "answer", rank, peer)):
                return connection
            reason = f"{address}: another program answers there"
        except OSError as e:
            reason = f"{address}: {e}"
        connection.close()
    raise OSError(f"no connection to the rank on host {peer}: {reason}")


def _answer(connection: socket.socket, said: bytes, rank: int, secret: bytes) -> int | None:
    """Which rank calls; None for a stranger."""
    if len(said) < _CALL_BYTES:
        return None
    peer: int = struct.unpack("!i", said[:4])[0]
    if not hmac.compare_digest(said[4:], _proof(secret, "call", peer, rank)):
        return None
    connection.sendall(_proof(secret, "answer", peer, rank))  # which the kernel has room for
    return peer


def _proof(secret: bytes, what: str, caller: int, called: int) -> bytes:
    return hmac.digest(secret, f"{what} {caller} {called}".encode(), "sha256")


def _read(connection: socket.socket, num_bytes: int, end: float) -> bytes:
    """That many bytes; fewer where the connection ends."""
    found = b""
    while len(found) < num_bytes:
        connection.settimeout(max(end - time.monotonic(), 1e-3))
        more = connection.recv(num_bytes - len(found))
        if not more:
            break
        found += more
    return found


def addresses() -> list[str]:
    """The IPv4 addresses of this host: those of its name first; the loopback alone where there are no others."""
    found: list[str] = []
    with contextlib.suppress(OSError, UnicodeError):  # Python refuses names with parts of 64 letters
        infos = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in infos]
    if sys.platform.startswith("linux"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # one without an address
                    packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(packed[20:24]))
    others = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    return others or ["127.0.0.1"]
