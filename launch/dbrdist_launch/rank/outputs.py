"""What a rank's program writes: read from its pipes, and passed on as far as the launcher takes it."""

from __future__ import annotations

import fcntl
import mmap
import os
import time

from .. import limits
from ..loop import Loop

TYPE_CHECKING = False  # see channel.py
if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_PIECES = 64  # of what a program that goes on writing has in its pipes


class Outputs:
    """Reads the pipes as they fill; what the launcher does not take yet waits in them, and so does the program.

    Pieces go out as they come while they are few. Each one wakes four processes, so a program that keeps writing
    has its lines gathered in its pipes for a moment: 10^5 lines a second are then sent as 15 pieces. The moment is
    shorter where a pipe would fill meanwhile: nobody who writes fast is held up.
    """

    def __init__(self, loop: Loop, pipes: dict[int, str], credit: int, send: Callable[[memoryview, str], None]) -> None:
        self.loop, self.send = loop, send
        self.pipes = pipes  # the open ones, each with the name of its stream
        self.credit = credit  # bytes that the launcher takes before it has written the last ones
        self.waiting: set[int] = set()  # pipes that wait for credit, or for more to come; the others are watched
        self.gather_until: float | None = None
        self.heard_at = 0.0
        self._flow = 0.0  # pieces sent lately: one is forgotten every GATHER_SECONDS
        self._moment = limits.GATHER_SECONDS
        self._ended = False
        # Its pages come to be as they are written: most ranks never fill it.
        self._piece = memoryview(mmap.mmap(-1, limits.READ_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._rooms = {pipe: fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) for pipe in pipes}  # bytes that fit into each
        for pipe in pipes:
            os.set_blocking(pipe, False)  # our end of it alone
            self._watch(pipe)

    def give_credit(self, count: int) -> None:
        """The launcher has written what it had: it takes so much more."""
        self.credit += count
        if self.gather_until is None:
            self._read_on()

    def end(self) -> None:
        """The program has ended, or is about to: what is left in its pipes is little, and needs no credit."""
        self._ended = True
        self._read_on()

    def read_all(self) -> None:
        """What has been written so far, at once: the program's last words, before it says so elsewhere."""
        self.end()
        for _ in range(_MOST_PIECES):
            if not self.drain():
                return

    def look(self, now: float) -> None:
        """Read what has gathered, once its time is over."""
        if self.gather_until is not None and now >= self.gather_until:
            self.gather_until = None
            for pipe in sorted(self.waiting):  # stdout first, which was made first
                self._read(pipe)

    def drain(self) -> bool:
        """Read what is there, without waiting; whether something was. Its turn in the loop may not have come yet."""
        found = [self._read(pipe) for pipe in sorted(self.pipes)]
        return True in found

    def _watch(self, pipe: int) -> None:
        self.waiting.discard(pipe)
        self.loop.watch(pipe, lambda: self._read(pipe))

    def _wait(self, pipe: int) -> None:
        self.waiting.add(pipe)
        self.loop.forget(pipe)

    def _read_on(self) -> None:
        self.gather_until = None
        for pipe in list(self.waiting):
            self._watch(pipe)

    def _read(self, pipe: int) -> bool:
        """Pass on one piece; whether there was one."""
        if self.credit <= 0 and not self._ended:
            self._wait(pipe)
            return False
        most = limits.READ_BYTES if self._ended else min(limits.READ_BYTES, self.credit)
        try:
            count = os.readv(pipe, [self._piece[:most]])
        except BlockingIOError:  # nothing was gathered
            if self.gather_until is None:
                self._watch(pipe)
            return False
        if not count:
            self._wait(pipe)
            self.waiting.remove(pipe)
            del self.pipes[pipe]
            return False
        self.credit -= count + limits.PIECE_BYTES
        self.send(self._piece[:count], self.pipes[pipe])
        if self._gathers(count, self._rooms[pipe]) and count < most and not self._ended:
            # All ranks of a host look at the same time: the launcher then wakes up once for all of them.
            self.gather_until = (self.heard_at // self._moment + 1) * self._moment
            for other in self.pipes:
                self._wait(other)
        else:
            self._watch(pipe)
        return True

    def _gathers(self, count: int, room: int) -> bool:
        """Whether to wait for more after a piece of so many bytes; half of what the pipe holds is right, or more."""
        now = time.monotonic()
        flow = max(0.0, self._flow - (now - self.heard_at) / limits.GATHER_SECONDS)
        self._flow, self.heard_at = min(flow, limits.PIECES) + 1.0, now
        if count > room * 3 // 4:
            self._moment /= 2
        elif count < room // 2:
            self._moment = min(1.25 * self._moment, limits.GATHER_SECONDS)
        return self._flow > limits.PIECES and self._moment > limits.LEAST_SECONDS
