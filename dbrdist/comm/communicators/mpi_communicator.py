"""Ranks that are MPI processes.

Ordinary MPI suffices: arrays on a device are staged through host memory, 16-bit floats are sent as bytes and summed
here in float32, because MPI has no such types. Rows and bytes are sent on separate duplicates of the
communicator, apart from the program's own traffic: ranks that have lost step never take one for the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm.communicators import cores
from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.failure import watch
from dbrdist.comm.gradients.pipeline import Messages, Sum
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import Gate, Passage, Pending, Row, digest
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import call_log, environment, hosts, message, mpi
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.row_reduction import RowReduction
from dbrdist.core.array import spans
from dbrdist.errors import CommunicatorError

_PIECE_BYTES = 1 << 30  # counts of MPI before version 4 end at 2**31
_WHOLE_BYTES = 1 << 14  # the most that is sent behind its head in one message
_serials = itertools.count(1)


class MpiCommunicator(CommunicatorBase):
    """All verbs over mpi4py; subclasses differ in how they reduce gradients.

    Args:
        mpi_comm: the ranks; None is all of them.
        settings: configuration, as for :meth:`set_config`.
        error: what is wrong with this rank's arguments already; every rank raises it.
    """

    def __init__(
        self, mpi_comm: Any = None, settings: dict[str, Any] | None = None, error: Exception | None = None
    ) -> None:
        super().__init__()
        self._MPI = mpi.start()
        world = self._MPI.COMM_WORLD
        reason = environment.refusal(world.size)
        if reason and mpi_comm is None:
            raise CommunicatorError(reason)
        self._take_ranks(world if mpi_comm is None else mpi.checked(mpi_comm))
        call_log.process.rank = world.rank
        members = mpi.world_ranks(self._user_comm)
        self._gate = Gate(self, call_log.process, f"new of {digest(repr(members)):x}", members)
        with self._gate.call("create_communicator") as call:
            self._open(call, error or attempt(self._configure, settings or {})[1])

    def _take_ranks(self, mpi_comm: Any) -> None:
        self._user_comm = mpi_comm
        self._is_part = False  # made by split, so that the user's communicator is ours
        self._rank: int = mpi_comm.rank
        self._size: int = mpi_comm.size
        self._comm: Any = None
        self._abandoned: list[Any] = []  # what MPI may still read or write after an interrupted verb

    def _configure(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            self.set_config(name, value)

    def _duplicate(self, rows: Any) -> None:
        """Keep ``rows``, on which rows are exchanged, and make duplicates of it for all else. Collective."""
        self._rows, self._comm, self._differing = rows, rows.Dup(), rows.Dup()
        self._row_reduction = RowReduction(self._MPI, rows, self._differing, self._wait)

    def _free_duplicates(self) -> None:
        for each in (self._differing, self._comm, self._rows):
            each.Free()

    def _open(self, call: Passage, error: Exception | None) -> None:
        call.meet_without_row()
        rows, request = self._user_comm.Idup()
        mpi.wait_until(request.Test, call)
        self._duplicate(rows)
        kind = type(self).__name__
        try:
            own = [call_log.process.rank, next(_serials)] if self._rank == 0 else []
            row = [digest(kind), *own]
            rows = call.agree(row, error, num_same=1, what="the same kind of communicator", detail=kind)
            self._gate.name = f"{rows[0, 1]}.{rows[0, 2]}"
            mpi.unlink_segments()
            with call.moving():
                self._find_hosts(call)
            call.agree((), self._misfit())
        except Exception:
            self._free_duplicates()
            raise
        with call.moving():
            self._prepare()

    def _find_hosts(self, call: Passage) -> None:
        host = hosts.local_ranks(self._MPI, self._comm)
        leader = np.array([self._rank], np.int64)
        host.Bcast(leader, 0)
        self._seats = host.allgather(cores.seat_on(0))
        are_enough = all(host.allgather(cores.part_of(self._seats[host.rank], self._seats) >= 1))
        self._has_cores = all(host.allgather(mpi.share_cores(are_enough, host.size)))
        host.Free()
        self._take_hosts(call.agree(leader)[:, 0].tolist())

    def _take_hosts(self, leaders: list[int]) -> None:
        """``leaders`` are, for each rank, the lowest rank of its host."""
        self._leaders = leaders
        of_host = [rank for rank, leader in enumerate(leaders) if leader == leaders[self._rank]]
        self._intra_rank, self._intra_size = of_host.index(self._rank), len(of_host)
        in_order = sorted(set(leaders))
        self._inter_rank, self._inter_size = in_order.index(leaders[self._rank]), len(in_order)

    def _misfit(self) -> Exception | None:
        """Why these ranks cannot communicate in this way, as far as this rank sees."""
        return None

    def _prepare(self) -> None:
        """Make what a subclass needs. Collective."""

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._intra_rank

    @property
    def intra_size(self) -> int:
        return self._intra_size

    @property
    def inter_rank(self) -> int:
        return self._inter_rank

    @property
    def inter_size(self) -> int:
        return self._inter_size

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that this one was made from."""
        return self._user_comm

    def world_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in MPI's world."""
        return self._gate.members

    # ---- lifetime ----

    _refusal = staticmethod(mpi.refusal)

    def _make_part(self, call: Call, ranks: list[int]) -> MpiCommunicator | None:
        number, key = (ranks[0], ranks.index(self._rank)) if ranks else (self._MPI.UNDEFINED, 0)
        mpi_comm = self._rows.Split(number, key)  # the program may have freed its own communicator by now
        if not ranks:
            return None
        made = type(self).__new__(type(self))
        made._become_part(self, f"{self._gate.name}/{call.number}.{ranks[0]}", ranks, mpi_comm)
        return made

    def _become_part(self, whole: MpiCommunicator, name: str, ranks: list[int], mpi_comm: Any) -> None:
        """A communicator of some ranks of another, which has found out all about them."""
        super().__init__()
        self._MPI = whole._MPI
        self._take_ranks(mpi_comm)
        self._is_part = True
        self._configs.update(whole._configs)
        self._gate = Gate(self, call_log.process, name, tuple(whole._gate.members[rank] for rank in ranks))
        self._seats, self._has_cores = whole._seats, whole._has_cores
        self._duplicate(mpi_comm.Dup())
        first_of_host: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            first_of_host.setdefault(whole._leaders[rank], place)
        self._take_hosts([first_of_host[whole._leaders[rank]] for rank in ranks])
        self._prepare()

    def _free(self) -> None:
        self._free_duplicates()
        if self._is_part:
            self._user_comm.Free()

    def _failed_half_way(self, call: Call, reason: str) -> None:
        if self._size > 1:
            watch.end_for(call, reason)

    # ---- primitives ----

    def _post_row(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()) -> Pending:
        return self._row_reduction.post(row)

    def _bcast_bytes(self, raw: message.HostArray, root: int) -> None:
        for begin in range(0, raw.size, _PIECE_BYTES):
            self._comm.Bcast([raw[begin : begin + _PIECE_BYTES], self._MPI.BYTE], root)

    def _allgather_bytes(
        self, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        byte = self._MPI.BYTE
        self._comm.Allgatherv([mine, byte], [raw, (counts, starts), byte])

    def _allgather_own(self, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]) -> None:
        self._comm.Allgatherv(self._MPI.IN_PLACE, [raw, (counts, starts), self._MPI.BYTE])

    def _exchange_bytes(
        self,
        sent: message.HostArray,
        sent_counts: Sequence[int],
        sent_starts: Sequence[int],
        raw: message.HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        byte = self._MPI.BYTE
        self._comm.Alltoallv([sent, (sent_counts, sent_starts), byte], [raw, (counts, starts), byte])

    def _send_parts(self, call: Call, head: Row, parts: list[message.HostArray]) -> None:
        byte = self._MPI.BYTE
        is_whole = call.num_bytes <= _WHOLE_BYTES  # one message is received in a fraction of the time of two
        first = message.join(head, parts if is_whole else [])
        request = self._comm.Isend([first, byte], call.peer, call.tag)
        if not request.Test():
            self._wait(call, request)
        if is_whole:
            return
        for part in parts:
            for begin in range(0, part.size, _PIECE_BYTES):
                piece = [part[begin : begin + _PIECE_BYTES], byte]
                self._wait(call, self._comm.Isend(piece, call.peer, call.tag))

    def _recv_parts(self, call: Call) -> tuple[Row, list[message.HostArray]]:
        status, byte = self._MPI.Status(), self._MPI.BYTE
        probe, peer, tag = self._comm.Improbe, call.peer, call.tag
        matched = probe(peer, tag, status)
        if matched is None:
            matched = mpi.wait_until(lambda: probe(peer, tag, status), call)
        raw = np.empty(status.Get_count(byte), np.uint8)
        matched.Recv([raw, byte])
        head, parts = message.split(raw)
        if parts is not None:
            return head, parts
        parts = [np.empty(int(size), np.uint8) for size in head[2 : 2 + int(head[1])]]
        for part in parts:
            for begin in range(0, part.size, _PIECE_BYTES):
                piece = [part[begin : begin + _PIECE_BYTES], byte]
                self._wait(call, self._comm.Irecv(piece, call.peer, call.tag))
        return head, parts

    def _wait(self, call: Call, request: Any, kind: str = "reduce") -> None:
        try:
            self._wait_until(call, request.Test, kind)
        except BaseException:
            self._abandoned.append(request)
            raise

    def _wait_until(self, call: Call, test: Callable[[], Any], kind: str) -> None:
        recorder, began = spans.recording(), time.perf_counter()
        mpi.wait_until(test, call)
        if recorder is not None and call.is_collective:
            call.num_waits += 1
            recorder.meet((call.comm_name, call.number, call.num_waits, kind), began)

    def _reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        self._reduce_over(self._comm, call, x, Codec(), factors, divisor)

    def _reduce_over(
        self,
        mpi_comm: Any,
        call: Call,
        x: message.HostArray,
        codec: Codec,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """As :meth:`_reduce_in`, over the ranks of an MPI communicator."""
        if message.is_narrow(codec.wire_dtype(x.dtype)):
            # MPI has no such types. A user-defined operation would round at every addition and took 3 to 7 times as
            # long. Pairs of ranks exchange messages of the program on _comm; on _rows they have none.
            way = self._messages(self._rows if mpi_comm is self._comm else mpi_comm)
            Sum(way, call, x, codec, factors, divisor).run()
            return
        step = _PIECE_BYTES // x.itemsize
        for begin in range(0, x.size, step):
            piece = x[begin : begin + step]
            codec.carry(piece, lambda wide: self._reduce_native(mpi_comm, call, wide, factors, divisor))

    def _messages(self, mpi_comm: Any) -> Messages:
        return Messages(mpi_comm, self._MPI.BYTE, self._wait, self._abandoned)

    def _reduce_native(
        self,
        mpi_comm: Any,
        call: Call,
        x: message.HostArray,
        factors: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """By MPI's own sum, in place."""
        if factors is not None:
            x *= x.dtype.type(factors[mpi_comm.rank])
        op = self._MPI.LOR if x.dtype == bool else self._MPI.SUM
        self._wait(call, mpi_comm.Iallreduce(self._MPI.IN_PLACE, x, op))
        message.divide(x, divisor)

    def _meet(self, call: Call) -> None:
        """Wait for all ranks where no row came before, so that a wait in MPI itself is short."""
        if call.meets_by == "bytes":
            self._wait(call, self._comm.Ibarrier())


class NaiveCommunicator(MpiCommunicator):
    """One reduction for each parameter: the plainest way, to compare others with."""

    _reduces_one_by_one = True


class DummyCommunicator(MpiCommunicator):
    """Leaves gradients as they are: what a step costs without their communication. For measurements only."""

    _leaves_gradients = True
