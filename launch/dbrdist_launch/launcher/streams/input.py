"""What stands on the launcher's stdin, for rank 0: read as fast as that takes it, and no faster.

mpiexec of MPICH reads as fast as it can, and ends the job where a rank is slower ("process reading stdin too slowly").
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable

from ... import limits
from ...channel import Channel
from ...loop import Loop
from ...messages import In, Taken
from .terminal import echoes, in_foreground, is_free, is_terminal


class KeptInput:
    """What the attempts of a job have read, so that a restarted program reads the same: a file, or some of a pipe."""

    def __init__(self) -> None:
        self._place = _place_in_file()
        self._data = bytearray()
        self._count = 0
        self.again = b""  # what the next attempt hands on before it reads

    def note(self, data: bytes) -> None:
        """So much has been read."""
        self._count += len(data)
        if self._place is None and self._count <= limits.KEPT_INPUT_BYTES:
            self._data += data
        else:
            self._data.clear()

    def rewind(self) -> str:
        """Begin again; in words what cannot be read twice, or ""."""
        if self._place is not None:
            os.lseek(0, self._place, os.SEEK_SET)
        self.again = bytes(self._data)
        if self._place is not None or self._count <= limits.KEPT_INPUT_BYTES:
            return ""
        return (
            f"the restarted program does not get the first {self._count / 1e6:.1f} MB of the input again: of a pipe at "
            f"most {limits.KEPT_INPUT_BYTES >> 20} MiB are kept; a file (< FILE) is read from its beginning"
        )


class Rank0:
    """The program of rank 0, by its supervisor, which tells what it has taken."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self._room = channel, limits.INPUT_BYTES

    def room(self) -> int:
        """How many bytes it takes now."""
        return self._room

    def send(self, data: bytes) -> None:
        """Take so much; b"" is the end."""
        self._room -= len(data)
        self.channel.send(In(data))

    def taken(self, message: Taken) -> None:
        self._room = 0 if message.closed else self._room + message.bytes

    def close(self) -> None:
        self._room = 0


class StarterPipe:
    """The stdin of srun, which hands it on to the ranks that its own options name."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self._unsent = b""
        os.set_blocking(pipe, False)

    def room(self) -> int:
        self._flush()
        return limits.READ_BYTES if self.pipe >= 0 and not self._unsent else 0

    def send(self, data: bytes) -> None:
        self._unsent += data
        self._flush()
        if not data:
            self.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.pipe, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it reads no more
            self.close()

    def close(self) -> None:
        self._unsent = b""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


class InputReader:
    """Hands the input on; from a terminal while the launcher stands in the foreground."""

    def __init__(
        self, loop: Loop, echoed: Callable[[bytes], None] = lambda data: None, to_rank_0: bool = True,
        kept: KeptInput | None = None,
    ) -> None:  # fmt: skip
        """``echoed`` hears what the terminal has shown of it; without ``to_rank_0`` the starter has the input."""
        self.loop, self.echoed, self.to_rank_0 = loop, echoed, to_rank_0 and has_input()
        self._kept = kept if kept is not None else KeptInput()
        self._again, self._kept.again = self._kept.again, b""
        self.taker: Rank0 | StarterPipe | None = None
        self._is_terminal = is_terminal()
        self._is_free = self._is_terminal and is_free()
        self._source = _own_end() if self.to_rank_0 else 0
        self._socket = socket.socket(fileno=os.dup(0)) if self.to_rank_0 and _is_socket() else None
        self._watching = self._ended = False

    def begin_for_rank(self, rank: int, channel: Channel) -> None:
        """A rank's program has begun."""
        if rank == 0 and self.to_rank_0:
            self.taker = Rank0(channel)
            self.look()

    def begin_for_starter(self, pipe: int | None) -> None:
        """The starter has begun, with a pipe for what it cannot read itself."""
        if pipe is not None:
            self.taker = StarterPipe(pipe)

    def taken(self, message: Taken) -> None:
        """Rank 0 takes more, or no more ever."""
        if isinstance(self.taker, Rank0):
            self.taker.taken(message)
            self.look()

    def look(self) -> None:
        """Several times a second, and when more is taken: the launcher may have come to the foreground."""
        while self._again and self.taker is not None and self._may_read():
            most = min(limits.READ_BYTES, self.taker.room())
            data, self._again = self._again[:most], self._again[most:]
            self.taker.send(data)
        wanted = self._may_read()
        if wanted and not self._watching:
            try:
                self.loop.watch(0, self._read)  # our own end of a named pipe would not hear of a writer's earlier end
            except PermissionError:  # a file, which can always be read
                while self._may_read():
                    self._read()
                return
        elif self._watching and not wanted:
            self.loop.forget(0)
        self._watching = wanted

    def _may_read(self) -> bool:
        room = self.taker.room() if self.taker is not None and not self._ended else 0
        return room > 0 and (not self._is_terminal or self._is_free or in_foreground())

    def _read(self) -> None:
        if self.taker is None or not self._may_read():
            self.look()
            return
        try:
            data = self._receive(min(limits.READ_BYTES, self.taker.room()))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # the terminal has gone, or stdin cannot be read
        self._ended = not data
        if data and self._is_terminal and echoes():
            self.echoed(data)
        if not self._is_terminal:  # what is typed, is typed again
            self._kept.note(data)
        self.taker.send(data)

    def _receive(self, most: int) -> bytes:
        """What is there, and no waiting for what another process has taken; BlockingIOError for nothing."""
        if self._socket is not None:
            return self._socket.recv(most, socket.MSG_DONTWAIT)
        return os.read(self._source, most)

    def close(self) -> None:
        """The attempt is over."""
        self._ended = True
        if self.taker is not None:
            self.taker.close()
        if self._watching:
            self.loop.forget(0)
            self._watching = False
        if self._socket is not None:
            self._socket.close()
        if self._source:
            os.close(self._source)
            self._source = 0


def _own_end() -> int:
    """Stdin; a pipe or a terminal opened once more, so that a read does not wait for what another process has taken."""
    try:
        if stat.S_ISFIFO(os.fstat(0).st_mode) or is_terminal():
            return os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        pass  # somebody else's
    return 0


def _is_socket() -> bool:
    return stat.S_ISSOCK(os.fstat(0).st_mode)


def _place_in_file() -> int | None:
    """Where a file on stdin is read next; None for what cannot be read twice."""
    try:
        if stat.S_ISREG(os.fstat(0).st_mode) and fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        pass  # stdin is closed
    return None


def has_input() -> bool:
    """Whether there may be something to read on stdin."""
    try:
        found = os.fstat(0)
        if fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            return False
    except OSError:
        return False
    return not (stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev)
