"""The rows of all ranks by messages: one small reduction, and only the words in which ranks differ are gathered.

Ranks mostly show the same row. An allgather of it would bring each of 1,024 ranks 385 kB at every verb; the largest and
the smallest of each word are 752 bytes, which tell every rank whether all rows are equal, and if not, in which words
they differ: those alone are gathered then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array.types import IntArray, Module

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

    from dbrdist.comm.transport.mpi import Completion
    from dbrdist.core.array.types import HostArray

WaitForRequest: TypeAlias = "Callable[[Call, Completion, str], None]"


class RowReduction:
    """The rows of one communicator on one rank.

    Args:
        mpi_module: mpi4py.MPI.
        rows: the communicator on which rows are reduced.
        differing: another one of the same ranks, for the words that differ.
        wait: ``wait(call, request, kind)`` returns once ``request.Test()`` is true, or raises.
    """

    def __init__(self, mpi_module: Module, rows: Comm, differing: Comm, wait: WaitForRequest) -> None:
        self._largest = mpi_module.MAX
        self._rows = rows
        self.size: int = rows.size
        self._differing = differing
        self.wait = wait
        self._unsettled: deque[ReducedRow] = deque()

    def post(self, row: bytes) -> ReducedRow:
        """Show a row, without waiting for the others'."""
        words = np.frombuffer(row, np.int64)
        both = np.concatenate([words, ~words])  # the largest of ~w is the smallest of w: one operation serves both
        found = np.empty_like(both)
        posted = ReducedRow(self, row, found, self._rows.Iallreduce(both, found, self._largest))
        self._unsettled.append(posted)
        return posted

    def settle(self) -> None:
        """Begin what follows the reductions that are over, in the order of the rows, so that all ranks have the same
        order: a rank may look at its second row before its first."""
        while self._unsettled and self._unsettled[0].reduction.Test():
            self._unsettled.popleft().settle(self._differing)


class ReducedRow:
    """A row that was shown and not yet answered."""

    def __init__(self, owner: RowReduction, row: bytes, found: IntArray, reduction: Request) -> None:
        self._owner = owner
        self._row = row
        self._found = found
        self.reduction = reduction
        self._is_settled = False
        self._rest: Request | None = None  # the request of what is gathered
        self._where = self._gathered = found

    def settle(self, differing: Comm) -> None:
        """The reduction is over: gather the words that differ, if there are any."""
        self._is_settled = True
        largest, inverse_of_smallest = self._found.reshape(2, -1)
        self._where = np.flatnonzero(largest != ~inverse_of_smallest)
        if self._where.size:
            words = np.frombuffer(self._row, np.int64)[self._where]
            self._gathered = np.empty((differing.size, words.size), np.int64)
            self._rest = differing.Iallgather(words, self._gathered)

    def Test(self) -> bool:
        """Whether the rows of all ranks are there; named as MPI's requests name it."""
        if not self._is_settled:
            self._owner.settle()
            if not self._is_settled:
                return False
        return self._rest is None or bool(self._rest.Test())

    is_there = Test

    def pieces(self) -> list[list[HostArray]]:
        """Nothing is enclosed."""
        return []

    def wait(self, call: Call) -> list[bytes]:
        """The rows of all ranks."""
        self._owner.wait(call, self, "row")
        size = self._owner.size
        if self._rest is None:
            return [self._row] * size
        rows = np.tile(np.frombuffer(self._row, np.int64), (size, 1))
        rows[:, self._where] = self._gathered
        return [row.tobytes() for row in rows]
