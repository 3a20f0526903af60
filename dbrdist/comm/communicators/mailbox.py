"""Rows that the ranks of a host show each other in memory that they share, without messages.

Each rank writes its row, and then the row's number; the others look at the number. On x86-64 what a processor writes
becomes visible in the order in which it was written; elsewhere rows are sent by MPI. A few arrays may be enclosed in a
row: the gradients of a small model come with the header of the step, so that the ranks meet once and not twice;
benchmarks/reduction.py times such a step beside one with a bare MPI_Allreduce in its place.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from dbrdist.comm.protocol.gate import ROW_BYTES
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.host_memory import RawMemory
from dbrdist.core.array import spans
from dbrdist.core.array.types import Array

ENCLOSED_BYTES = 1 << 16  # the most in one row; twice as much takes a meeting of its own as fast
_NUM_ROWS = 64  # of each rank that others may still have to read
_LINE_BYTES = 64
_ROWS_BEGIN = 2 * _LINE_BYTES
_ENCLOSED_BEGIN = _ROWS_BEGIN + _NUM_ROWS * ROW_BYTES
NUM_BYTES = _ENCLOSED_BEGIN + 2 * ENCLOSED_BYTES
_LOOKS = 300  # some 15 us: ranks with a core each come to most rows nearly together
_MAX_ENCLOSURES = 8  # of models that take turns
_to_bytes = memoryview.tobytes

WaitForTest = Callable[[Call, Callable[[], bool], str], None]


def is_possible() -> bool:
    """Whether this processor keeps the order of what it writes."""
    return platform.machine() in ("x86_64", "AMD64")


class _Memory:
    """The memory of one rank, as all see it."""

    def __init__(self, raw: RawMemory) -> None:
        numbers = raw[:_ROWS_BEGIN].data.cast("q")  # one look takes 40 ns, that of an array 100
        self.posted = numbers[:1]  # the number of the last row
        self.read = numbers[_LINE_BYTES // 8 :][:1]  # of the last row that this rank has of all ranks
        rows = raw[_ROWS_BEGIN:_ENCLOSED_BEGIN].data
        self.rows = [rows[ROW_BYTES * k : ROW_BYTES * (k + 1)] for k in range(_NUM_ROWS)]
        self.enclosed = raw[_ENCLOSED_BEGIN:].reshape(2, ENCLOSED_BYTES)


class Mailbox:
    """The rows of one communicator on one rank; one thread at a time uses it.

    Args:
        raws: ``NUM_BYTES`` of memory of each rank, zeros at first.
        rank: the number of this one.
        wait: ``wait(call, test, kind)`` returns once ``test()`` is true, or raises.
    """

    def __init__(self, raws: Sequence[RawMemory], rank: int, wait: WaitForTest) -> None:
        self._all = [_Memory(raw) for raw in raws]
        self._rank = rank
        self._own = self._all[rank]
        self._rows = list(zip(*(memory.rows for memory in self._all)))  # in each place those of all ranks
        self._posted_by_others = [memory.posted for memory in self._all if memory is not self._own]
        self._read_by_others = [memory.read for memory in self._all if memory is not self._own]
        self._wait = wait
        self._number = 0
        self._unread: deque[Letter] = deque()
        self._last_read = 0
        self._enclosed_at = [0, 0]  # the last row in which each half of that memory was enclosed
        self._enclosures: dict[int, _Enclosure] = {}
        self._last_enclosure: _Enclosure | None = None

    def post(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()) -> Letter:
        """Show a row, with arrays of :data:`ENCLOSED_BYTES` together at most, which may be written again at once."""
        letter = Letter(self, *self._show(call, row, enclosed))
        self._unread.append(letter)
        return letter

    def exchange(
        self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()
    ) -> tuple[list[bytes], Pieces]:
        """Show a row and wait: (the rows of all ranks, and for each enclosed array what every rank enclosed)."""
        if self._unread:
            letter = self.post(call, row, enclosed)
            return letter.wait(call), letter.pieces()
        number, enclosure = self._show(call, row, enclosed)
        self._wait_for(call, number)
        self._last_read = number
        rows = [*map(_to_bytes, self._rows[number % _NUM_ROWS])]
        return rows, [] if enclosure is None else enclosure.pieces[number % 2]

    def _show(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray]) -> tuple[int, _Enclosure | None]:
        """The number of the row, and where the arrays lie that came with it."""
        number = self._number + 1
        half = number % 2
        needed = number - _NUM_ROWS
        if enclosed and (last := self._enclosed_at[half]) > needed:
            needed = last
        own = self._own
        own.read[0] = self._last_read  # see release
        is_free = not self._unread  # then this rank has read all rows
        for read in self._read_by_others:
            if read[0] < needed:
                is_free = False
        if not is_free and not self._may_overwrite(needed):  # others still read what is there
            self._wait(call, lambda: self._may_overwrite(needed), "row")
        enclosure = None
        if enclosed:
            enclosure = self._last_enclosure
            if enclosure is None or enclosure.arrays is not enclosed:
                enclosure = self._enclosure(enclosed)
            self._enclosed_at[half] = number
            for room, x in zip(enclosure.own[half], enclosed):
                room[...] = x
        own.rows[number % _NUM_ROWS][:] = row
        own.posted[0] = self._number = number
        return number, enclosure

    def takes(self, arrays: Sequence[Array]) -> bool:
        """Whether these arrays can be enclosed in a row."""
        return id(arrays) in self._enclosures or (
            enclosed_bytes(arrays) <= ENCLOSED_BYTES
            and all(isinstance(x, np.ndarray) and x.dtype.isnative for x in arrays)
        )

    def _enclosure(self, arrays: Sequence[message.HostArray]) -> _Enclosure:
        """Where arrays lie in a row; for a tuple of them, which stays what it is, this is kept, and it with this."""
        kept = self._enclosures.get(id(arrays))
        if kept is not None:
            self._last_enclosure = kept
            return kept
        made = _Enclosure(arrays, self._all, self._rank)
        if isinstance(arrays, tuple):
            if len(self._enclosures) >= _MAX_ENCLOSURES:
                self._enclosures.clear()
            self._enclosures[id(arrays)] = self._last_enclosure = made
        return made

    def has_room(self) -> bool:
        """Whether arrays can be enclosed in the next row without waiting for a rank that still has to read others."""
        return self._may_overwrite(self._enclosed_at[(self._number + 1) % 2])

    def release(self) -> None:
        """Tell the others that this rank has done with what it has waited for."""
        self._own.read[0] = self._last_read

    def is_complete(self, number: int) -> bool:
        """Whether all ranks have shown this row."""
        for posted in self._posted_by_others:
            if posted[0] < number:
                return False
        return self._number >= number

    def read(self, call: Call, letter: Letter) -> None:
        """Read a row of all ranks, once it is there."""
        self._wait_for(call, letter.number)
        while self._unread[0] is not letter:
            self._take_first().keep()
        self._take_first()

    def _wait_for(self, call: Call, number: int) -> None:
        """Wait until all ranks have shown this row."""
        if spans.recorders or call.pause_seconds:
            self._wait(call, lambda: self.is_complete(number), "row")
        looks = _LOOKS  # first without the care that a long wait needs
        for posted in self._posted_by_others:
            while posted[0] < number:
                looks -= 1
                if not looks:
                    self._wait(call, lambda: self.is_complete(number), "row")

    def _take_first(self) -> Letter:
        letter = self._unread.popleft()
        self._last_read = letter.number  # which the others hear in release: enclosed arrays are read till then
        letter.rows = [*map(_to_bytes, self._rows[letter.number % _NUM_ROWS])]
        return letter

    def _may_overwrite(self, number: int) -> bool:
        """Whether all ranks have read up to this row; this one reads what it can, before others overwrite it."""
        while self._unread and self.is_complete(self._unread[0].number):
            self._take_first().keep()
        self.release()
        return self._last_read >= number and all(read[0] >= number for read in self._read_by_others)


class _Enclosure:
    """Where some arrays lie when they come with a row."""

    __slots__ = ("arrays", "own", "pieces")

    def __init__(self, arrays: Sequence[message.HostArray], memories: Sequence[_Memory], rank: int) -> None:
        self.arrays = arrays
        self.pieces: list[Pieces] = []  # in each half of the memory
        for half in range(2):
            found, begin = [], 0
            for x in arrays:
                end = begin + x.nbytes
                found.append([memory.enclosed[half, begin:end].view(x.dtype) for memory in memories])
                begin = _next_line(end)
            self.pieces.append(found)
        self.own = [[of_ranks[rank] for of_ranks in found] for found in self.pieces]


Pieces = list[list[message.HostArray]]  # for each array what every rank enclosed


class Letter:
    """A row that was shown."""

    __slots__ = ("_box", "_enclosure", "_kept", "number", "rows")

    def __init__(self, box: Mailbox, number: int, enclosure: _Enclosure | None) -> None:
        self._box = box
        self._enclosure = enclosure
        self._kept: Pieces | None = None
        self.number = number
        self.rows: list[bytes] | None = None

    def is_there(self) -> bool:
        """Whether all ranks have shown theirs."""
        return self.rows is not None or self._box.is_complete(self.number)

    def wait(self, call: Call) -> list[bytes]:
        """The rows of all ranks."""
        if self.rows is None:
            self._box.read(call, self)
        rows = self.rows
        assert rows is not None
        return rows

    def keep(self) -> None:
        """Copy what is enclosed, before others overwrite it."""
        self._kept = [[piece.copy() for piece in of_ranks] for of_ranks in self.pieces()]

    def pieces(self) -> Pieces:
        """For each enclosed array what every rank enclosed; for use before the next row is shown."""
        if self._kept is not None or self._enclosure is None:
            return self._kept or []
        return self._enclosure.pieces[self.number % 2]


def enclosed_bytes(arrays: Sequence[Array]) -> int:
    """How much room these arrays take in a row."""
    return sum(_next_line(x.nbytes) for x in arrays)


def _next_line(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
