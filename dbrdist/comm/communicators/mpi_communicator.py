"""Ranks that are MPI processes.

Ordinary MPI suffices: arrays on a device are staged through host memory, 16-bit floats are sent as bytes and summed
here in float32, because MPI has no such types. Rows and bytes are sent on separate duplicates of the
communicator, apart from the program's own traffic: ranks that have lost step never take one for the other.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators import cores
from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.communicators.duplicate import Duplication
from dbrdist.comm.communicators.mailbox import Mailbox
from dbrdist.comm.failure import watch
from dbrdist.comm.protocol.arguments import attempt
from dbrdist.comm.protocol.gate import ROW_BYTES, Passage, digest
from dbrdist.comm.protocol.primitives import PendingRow, Ranks, Row
from dbrdist.comm.transport import call_log, environment, hosts, message, mpi
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.row_reduction import RowReduction
from dbrdist.core.array import spans
from dbrdist.core.array.backend import Array
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from dbrdist.comm.protocol.settings import ConfigValue
    from dbrdist.core.array.types import HostArray

_PIECE_BYTES = 1 << 30  # counts of MPI before version 4 end at 2**31
_WHOLE_BYTES = 1 << 14  # the most that is sent behind its head in one message
_serials = itertools.count(1)


class MpiRanks(Ranks):
    """The ranks of an mpi4py communicator."""

    comm: Any = None  # for bytes, once they are connected
    rows: Comm  # for rows
    leaders: Sequence[int]  # for each rank the lowest rank of its host

    def __init__(self, mpi_comm: Comm, is_part: bool = False) -> None:
        """``is_part`` says that ``mpi_comm`` is ours, and not the user's."""
        self.MPI = mpi.start()
        self.user_comm = mpi_comm
        self.is_part = is_part
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.abandoned: list[object] = []  # what MPI may still read or write after an interrupted verb
        self._mailbox: Mailbox | None = None
        self._num_rows_left = 0
        self._then: Callable[[], None] | None = None  # see call_after_rows

    # ---- lifetime ----

    def _duplicate(self, rows: Comm) -> None:
        """Keep ``rows``, on which rows are exchanged, and make duplicates of it for all else. Collective."""
        self.rows, self.comm, self._differing = rows, rows.Dup(), rows.Dup()
        self._row_reduction = RowReduction(self.MPI, rows, self._differing, self.wait)

    def free_duplicates(self) -> None:
        """Disconnect. Collective."""
        for each in (self._differing, self.comm, self.rows):
            each.Free()

    def connect(self, call: Passage) -> None:
        """Be able to send rows and bytes, apart from the program's own traffic. Collective."""
        call.meet_without_row()
        duplication = Duplication(self.user_comm, call)
        self.abandoned.append(duplication)  # should the wait end by an error, MPI goes on
        self._duplicate(duplication.wait())
        self.abandoned.clear()
        row = int(duplication.has_looked).to_bytes(ROW_BYTES, "little")
        if any(map(any, self.post_row(call, row).wait(call))):
            duplication.finish()

    def agree_on_name(self, call: Passage, kind: str, error: Exception | None) -> str:
        """A name that no other communicator has. All ranks raise where their kinds differ, or one has an error."""
        own = [call_log.process.rank, next(_serials)] if self.rank == 0 else []
        rows = call.agree([digest(kind), *own], error, num_same=1, what="the same kind of communicator", detail=kind)
        return f"{rows[0, 1]}.{rows[0, 2]}"

    def find_hosts(self, call: Passage) -> None:
        """See which of the ranks share a host. Collective."""
        host = hosts.local_ranks(self.MPI, self.comm)
        leader = np.array([self.rank], np.int64)
        host.Bcast(leader, 0)
        self.seats = host.allgather(cores.seat_on(0))
        are_enough = all(host.allgather(cores.part_of(self.seats[host.rank], self.seats) >= 1))
        self.has_cores = all(host.allgather(mpi.share_cores(are_enough, host.size)))
        host.Free()
        self._take_hosts(call.agree(leader)[:, 0].tolist())

    def _take_hosts(self, leaders: list[int]) -> None:
        self.leaders = leaders
        of_host = [rank for rank, leader in enumerate(leaders) if leader == leaders[self.rank]]
        self.intra_rank, self.intra_size = of_host.index(self.rank), len(of_host)
        in_order = sorted(set(leaders))
        self.inter_rank, self.inter_size = in_order.index(leaders[self.rank]), len(in_order)

    def part(self, ranks: list[int]) -> MpiRanks | None:
        """These of the ranks, of which all is known already; None where there are none. Collective."""
        number, key = (ranks[0], ranks.index(self.rank)) if ranks else (self.MPI.UNDEFINED, 0)
        mpi_comm = self.rows.Split(number, key)  # the program may have freed its own communicator by now
        if not ranks:
            return None
        made = MpiRanks(mpi_comm, is_part=True)
        made.be_part(self, ranks)
        return made

    def be_part(self, whole: MpiRanks, ranks: list[int]) -> None:
        """Connect, and take over what is known of these ``ranks`` of ``whole``. Collective."""
        self.seats, self.has_cores = whole.seats, whole.has_cores
        self._duplicate(self.user_comm.Dup())
        first_of_host: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            first_of_host.setdefault(whole.leaders[rank], place)
        self._take_hosts([first_of_host[whole.leaders[rank]] for rank in ranks])

    def call_after_rows(self, num_rows: int, then: Callable[[], None]) -> None:
        """Call ``then()``, which is collective, when so many more rows were exchanged."""
        self._num_rows_left, self._then = num_rows, then

    def use_mailbox(self, mailbox: Mailbox) -> None:
        """Show rows in memory from now on: all ranks are on one host and reach it."""
        self._mailbox = mailbox
        self.exchange_row = mailbox.exchange  # type: ignore[method-assign]  # in one call less
        self.release_enclosed = mailbox.release  # type: ignore[method-assign]

    refusal = staticmethod(mpi.refusal)  # one call less at each verb

    def failed_half_way(self, call: Call, reason: str) -> None:
        if self.size > 1:
            watch.end_for(call, reason)

    def free(self) -> None:
        self._mailbox = self._then = None
        # The record of the last verbs keeps these ranks, but not the memory that these methods would hold.
        self.__dict__.pop("exchange_row", None)
        self.__dict__.pop("release_enclosed", None)
        self.free_duplicates()
        if self.is_part:
            self.user_comm.Free()

    # ---- rows ----

    def post_row(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()) -> PendingRow:
        if self._mailbox is None:
            return self._row_reduction.post(row)
        return self._mailbox.post(call, row, enclosed)

    def exchange_row(
        self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()
    ) -> tuple[list[bytes], list[list[HostArray]]]:
        """By messages."""
        answer = super().exchange_row(call, row, enclosed)
        if self._then is not None:
            self._num_rows_left -= 1
            if self._num_rows_left == 0:
                then, self._then = self._then, None
                then()
        return answer

    def wait_and_move(self, call: Call, test: Callable[[], bool], kind: str) -> None:
        """Wait for a row in memory. MPI moves this rank's messages meanwhile, which it does only while it is called:
        another rank may wait for them before it comes to its row."""
        anything = self.MPI.ANY_SOURCE, self.MPI.ANY_TAG
        self.wait_until(call, test, kind, functools.partial(self.comm.Iprobe, *anything))

    def takes(self, arrays: Sequence[Array]) -> bool:
        return self._mailbox is not None and self._mailbox.takes(arrays)

    def has_room(self) -> bool:
        return self._mailbox is not None and self._mailbox.has_room()

    # ---- bytes ----

    def bcast_bytes(self, raw: message.HostArray, root: int) -> None:
        for begin in range(0, raw.size, _PIECE_BYTES):
            self.comm.Bcast([raw[begin : begin + _PIECE_BYTES], self.MPI.BYTE], root)

    def allgather_bytes(
        self, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        byte = self.MPI.BYTE
        self.comm.Allgatherv([mine, byte], [raw, (counts, starts), byte])

    def allgather_own(self, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]) -> None:
        self.comm.Allgatherv(self.MPI.IN_PLACE, [raw, (counts, starts), self.MPI.BYTE])

    def exchange_bytes(
        self,
        sent: message.HostArray,
        sent_counts: Sequence[int],
        sent_starts: Sequence[int],
        raw: message.HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        byte = self.MPI.BYTE
        self.comm.Alltoallv([sent, (sent_counts, sent_starts), byte], [raw, (counts, starts), byte])

    def send_parts(self, call: Call, head: Row, parts: list[message.HostArray]) -> None:
        byte = self.MPI.BYTE
        is_whole = call.num_bytes <= _WHOLE_BYTES  # one message is received in a fraction of the time of two
        first = message.join(head, parts if is_whole else [])
        request = self.comm.Isend([first, byte], call.peer, call.tag)
        if not request.Test():
            self.wait(call, request)
        if is_whole:
            return
        for part in parts:
            for begin in range(0, part.size, _PIECE_BYTES):
                piece = [part[begin : begin + _PIECE_BYTES], byte]
                self.wait(call, self.comm.Isend(piece, call.peer, call.tag))

    def send_small(self, call: Call, x: message.HostArray) -> bool:
        if x.nbytes > _WHOLE_BYTES or x.ndim > message.MAX_NDIM or not x.flags.c_contiguous or not x.dtype.isnative:
            return False
        call.num_bytes = x.nbytes
        request = self.comm.Isend([message.whole(x), self.MPI.BYTE], call.peer, call.tag)
        if not request.Test():
            self.wait(call, request)
        return True

    def recv_array(self, call: Call) -> Any:
        raw = self._recv_first(call)
        found = message.taken_whole(raw)
        return self._with_parts(call, raw) if found is None else found

    def recv_parts(self, call: Call) -> tuple[Row, list[message.HostArray]]:
        return self._with_parts(call, self._recv_first(call))

    def _recv_first(self, call: Call) -> message.HostArray:
        """The bytes of the next message."""
        status, byte = self.MPI.Status(), self.MPI.BYTE
        probe, peer, tag = self.comm.Improbe, call.peer, call.tag
        matched = probe(peer, tag, status)
        if matched is None:
            matched = mpi.wait_until(lambda: probe(peer, tag, status), call)
        raw = np.empty(status.Get_count(byte), np.uint8)
        matched.Recv([raw, byte])
        return raw

    def _with_parts(self, call: Call, raw: message.HostArray) -> tuple[Row, list[message.HostArray]]:
        """What a message holds, or announces: parts that come after it."""
        byte = self.MPI.BYTE
        head, parts = message.split(raw)
        if parts is not None:
            return head, parts
        parts = [np.empty(int(size), np.uint8) for size in head[2 : 2 + int(head[1])]]
        for part in parts:
            for begin in range(0, part.size, _PIECE_BYTES):
                piece = [part[begin : begin + _PIECE_BYTES], byte]
                self.wait(call, self.comm.Irecv(piece, call.peer, call.tag))
        return head, parts

    def meet(self, call: Call) -> None:
        """So that a wait in MPI itself is short."""
        if call.meets_by == "bytes":
            self.wait(call, self.comm.Ibarrier())

    def wait(self, call: Call, request: mpi.Completion, kind: str = "reduce") -> None:
        """Return when a request of MPI is done."""
        try:
            self.wait_until(call, request.Test, kind)
        except BaseException:
            self.abandoned.append(request)
            raise

    def wait_until(
        self, call: Call, test: Callable[[], object], kind: str, meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Return when ``test()`` is true; what is recorded says for what ``kind`` of thing it waited."""
        recorder, began = spans.recording(), time.perf_counter()
        mpi.wait_until(test, call, meanwhile)
        if recorder is not None and call.is_collective:
            call.num_waits += 1
            recorder.meet((call.comm_name, call.number, call.num_waits, kind), began)


class MpiCommunicator(CommunicatorBase):
    """All verbs over mpi4py; subclasses differ in how they reduce gradients.

    Args:
        mpi_comm: the ranks; None is all of them.
        settings: configuration, as for :meth:`set_config`.
        error: what is wrong with this rank's arguments already; every rank raises it.
    """

    ranks: MpiRanks

    def __init__(
        self,
        mpi_comm: Comm | None = None,
        settings: dict[str, ConfigValue] | None = None,
        error: Exception | None = None,
    ) -> None:
        mpi_module = mpi.start()
        world = mpi_module.COMM_WORLD
        reason = environment.refusal(world.size)
        if reason and mpi_comm is None:
            raise CommunicatorError(reason)
        ranks = MpiRanks(world if mpi_comm is None else mpi.checked(mpi_comm))
        call_log.process.rank = world.rank
        members = mpi.world_ranks(ranks.user_comm)
        super().__init__(ranks, call_log.process, f"new of {digest(repr(members)):x}", members)
        with self.gate.call("create_communicator") as call:
            self._open(call, error or attempt(self._configure, settings or {})[1])

    def _open(self, call: Passage, error: Exception | None) -> None:
        ranks = self.ranks
        ranks.connect(call)
        try:
            self.gate.name = ranks.agree_on_name(call, self._kind, error)
            mpi.unlink_segments()
            with call.moving():
                ranks.find_hosts(call)
            self._settle(call.agree(self._facts(), self.reducer.misfit()))
        except Exception:
            ranks.free_duplicates()
            raise
        with call.moving():
            self.reducer.prepare()

    @property
    def _kind(self) -> str:
        """What must be the same on all ranks."""
        return type(self).__name__

    def _facts(self) -> Sequence[int]:
        """What this rank shows all others when the communicator is made."""
        return ()

    def _settle(self, rows: Row) -> None:
        """Take what all ranks have shown, a row for each."""

    def _configure(self, settings: dict[str, ConfigValue]) -> None:
        for name, value in settings.items():
            self.set_config(name, value)

    def _part(self, call: Passage, ranks: list[int]) -> MpiCommunicator | None:
        found = self.ranks.part(ranks)
        if found is None:
            return None
        made = type(self).__new__(type(self))  # without the search that this one began with
        name = f"{self.gate.name}/{call.number}.{ranks[0]}"
        members = tuple(self.gate.members[rank] for rank in ranks)
        CommunicatorBase.__init__(made, found, call_log.process, name, members, self.get_config())
        made.reducer.prepare()
        return made

    @property
    def mpi_comm(self) -> Comm:
        """The mpi4py communicator that this one was made from."""
        return self.ranks.user_comm

    def world_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in MPI's world."""
        return self.gate.members
