"""Rows that the ranks of a host show each other in memory that they share, without messages.

Each rank writes its row, and then the row's number; the others look at the number. On x86-64 what a processor writes
becomes visible in the order in which it was written; elsewhere rows travel by MPI. A few arrays may be enclosed in a
row: the gradients of a small model travel with the header of the step, so that the ranks meet once and not twice;
benchmarks/reduction.py times such a step beside one with a bare MPI_Allreduce in its place.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm import message
from dbrdist.comm.gate import ROW_WORDS, Row
from dbrdist.comm.host_memory import RawMemory
from dbrdist.comm.record import Call

ENCLOSED_BYTES = 1 << 16  # the most in one row; twice as much takes a meeting of its own as fast
_NUM_ROWS = 64  # of each rank that others may still have to read
_LINE_BYTES = 64
_ROWS_BEGIN = 2 * _LINE_BYTES
_ENCLOSED_BEGIN = _ROWS_BEGIN + _NUM_ROWS * ROW_WORDS * 8
NUM_BYTES = _ENCLOSED_BEGIN + 2 * ENCLOSED_BYTES

Wait = Callable[[Call, Callable[[], bool], str], None]


def is_possible() -> bool:
    """Whether this processor keeps the order of what it writes."""
    return platform.machine() in ("x86_64", "AMD64")


class _Memory:
    """The memory of one rank, as all see it."""

    def __init__(self, raw: RawMemory) -> None:
        numbers = raw[:_ROWS_BEGIN].data.cast("q")  # one look takes 40 ns, that of an array 100
        self.posted = numbers[:1]  # the number of the last row
        self.read = numbers[_LINE_BYTES // 8 :][:1]  # of the last row that this rank has of all ranks
        self.rows = raw[_ROWS_BEGIN:_ENCLOSED_BEGIN].view(np.int64).reshape(_NUM_ROWS, ROW_WORDS)
        self.enclosed = raw[_ENCLOSED_BEGIN:].reshape(2, ENCLOSED_BYTES)


class Mailbox:
    """The rows of one communicator on one rank; one thread at a time uses it.

    Args:
        raws: ``NUM_BYTES`` of memory of each rank, zeros at first.
        rank: the number of this one.
        wait: ``wait(call, test, kind)`` returns once ``test()`` is true, or raises.
    """

    def __init__(self, raws: Sequence[RawMemory], rank: int, wait: Wait) -> None:
        self._all = [_Memory(raw) for raw in raws]
        self._own = self._all[rank]
        self._wait = wait
        self._number = 0
        self._unread: deque[Letter] = deque()
        self._last_read = 0
        self._enclosed_at = [0, 0]  # the last row in which each half of that memory was enclosed

    def post(self, call: Call, row: Row, enclosed: Sequence[message.HostArray] = ()) -> Letter:
        """Show a row, with arrays of :data:`ENCLOSED_BYTES` together at most, which may be written again at once."""
        number = self._number + 1
        needed = max(number - _NUM_ROWS, self._enclosed_at[number % 2] if enclosed else 0)
        if not self._may_overwrite(needed):  # others still read what lies there
            self._wait(call, lambda: self._may_overwrite(needed), "row")
        if enclosed:
            self._enclose(number, enclosed)
        self._own.rows[number % _NUM_ROWS] = row
        self._own.posted[0] = self._number = number
        letter = Letter(self, number, enclosed)
        self._unread.append(letter)
        return letter

    def has_room(self) -> bool:
        """Whether arrays can be enclosed in the next row without waiting for a rank that still has to read others."""
        return self._may_overwrite(self._enclosed_at[(self._number + 1) % 2])

    def release(self) -> None:
        """Tell the others that this rank has done with what it has waited for."""
        self._own.read[0] = self._last_read

    def is_complete(self, number: int) -> bool:
        """Whether all ranks have shown this row."""
        return all(memory.posted[0] >= number for memory in self._all)

    def wait(self, call: Call, letter: Letter) -> None:
        """Read a row of all ranks, once it is there."""
        number = letter.number
        self._wait(call, lambda: self.is_complete(number), "row")
        while self._unread[0] is not letter:
            self._take_next().keep()
        self._take_next()

    def pieces(self, number: int, like: Sequence[message.HostArray]) -> list[list[message.HostArray]]:
        """What is enclosed in a row: for each array as every rank has it, until this rank shows its next row."""
        result, begin = [], 0
        for x in like:
            end = begin + x.nbytes
            result.append([memory.enclosed[number % 2, begin:end].view(x.dtype) for memory in self._all])
            begin = _next_line(end)
        return result

    def _enclose(self, number: int, arrays: Sequence[message.HostArray]) -> None:
        self._enclosed_at[number % 2] = number
        room, begin = self._own.enclosed[number % 2], 0
        for x in arrays:
            end = begin + x.nbytes
            room[begin:end] = message.as_bytes(x)
            begin = _next_line(end)

    def _may_overwrite(self, number: int) -> bool:
        """Whether all ranks have read up to this row; this one reads what it can, before others overwrite it."""
        while self._unread and self.is_complete(self._unread[0].number):
            self._take_next().keep()
        self.release()
        return all(memory.read[0] >= number for memory in self._all)

    def _take_next(self) -> Letter:
        letter = self._unread.popleft()
        self._last_read = letter.number  # which the others hear in ``release``: enclosed arrays are read till then
        letter.rows = np.empty((len(self._all), ROW_WORDS), np.int64)
        for k, memory in enumerate(self._all):
            letter.rows[k] = memory.rows[letter.number % _NUM_ROWS]
        return letter


class Letter:
    """A row that was shown."""

    __slots__ = ("_box", "_enclosed", "_pieces", "number", "rows")

    def __init__(self, box: Mailbox, number: int, enclosed: Sequence[message.HostArray]) -> None:
        self._box = box
        self._enclosed = enclosed
        self._pieces: list[list[message.HostArray]] | None = None
        self.number = number
        self.rows: Any = None

    def is_there(self) -> bool:
        """Whether all ranks have shown theirs."""
        return self.rows is not None or self._box.is_complete(self.number)

    def wait(self, call: Call) -> Row:
        """The rows of all ranks."""
        if self.rows is None:
            self._box.wait(call, self)
        rows: Row = self.rows
        return rows

    def keep(self) -> None:
        """Copy what is enclosed, before others overwrite it."""
        self._pieces = [[piece.copy() for piece in pieces] for pieces in self.pieces()]

    def pieces(self) -> list[list[message.HostArray]]:
        """For each enclosed array what every rank enclosed; for use before the next row is shown."""
        if self._pieces is None:
            return self._box.pieces(self.number, self._enclosed) if self._enclosed else []
        return self._pieces


def enclosed_bytes(arrays: Sequence[Any]) -> int:
    """How much room these arrays take in a row."""
    return sum(_next_line(x.nbytes) for x in arrays)


def _next_line(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
