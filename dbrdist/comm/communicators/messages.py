"""Sums of arrays by messages of MPI: the ways of ``naive`` and ``dummy``, and what all others over MPI fall back to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dbrdist.comm.communicators.mpi_communicator import MpiCommunicator, MpiRanks
from dbrdist.comm.gradients.pipeline import Messages, PipelinedSum
from dbrdist.comm.gradients.reducer import Reducer
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from dbrdist.core.array.types import Array

_PIECE_BYTES = 1 << 30  # counts of MPI before version 4 end at 2**31


class MessageReducer(Reducer):
    """Adds arrays as MPI does."""

    ranks: MpiRanks

    def reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        self.reduce_over(self.ranks.comm, call, x, Codec(), factors, divisor)

    def reduce_over(
        self,
        mpi_comm: Comm,
        call: Call,
        x: message.HostArray,
        codec: Codec,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """As :meth:`reduce_in`, over the ranks of an MPI communicator."""
        if message.is_narrow(codec.wire_dtype(x.dtype)):
            # MPI has no such types. A user-defined operation would round at every addition and took 3 to 7 times as
            # long. Pairs of ranks exchange messages of the program on comm; on rows they have none.
            way = self._messages(self.ranks.rows if mpi_comm is self.ranks.comm else mpi_comm)
            PipelinedSum(way, call, x, codec, factors, divisor).run()
            return
        step = _PIECE_BYTES // x.itemsize
        for begin in range(0, x.size, step):
            piece = x[begin : begin + step]
            codec.carry(piece, lambda wide: self._reduce_native(mpi_comm, call, wide, factors, divisor))

    def _messages(self, mpi_comm: Comm) -> Messages:
        return Messages(mpi_comm, self.ranks.MPI.BYTE, self.ranks.wait, self.ranks.abandoned)

    def _reduce_native(
        self, mpi_comm: Comm, call: Call, x: Array, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        """By MPI's own sum, in place."""
        if factors is not None:
            x *= x.dtype.type(factors[mpi_comm.rank])
        op = self.ranks.MPI.LOR if x.dtype == bool else self.ranks.MPI.SUM
        self.ranks.wait(call, mpi_comm.Iallreduce(self.ranks.MPI.IN_PLACE, x, op))
        message.divide(x, divisor)


class OneByOne(MessageReducer):
    """One reduction for each parameter."""

    one_by_one = True


class NoReduction(MessageReducer):
    """Gradients stay as they are."""

    leaves_gradients = True


class NaiveCommunicator(MpiCommunicator):
    """One reduction for each parameter: the plainest way, to compare others with."""

    reducer_type = OneByOne


class DummyCommunicator(MpiCommunicator):
    """Leaves gradients as they are: what a step costs without their communication. For measurements only."""

    reducer_type = NoReduction
