"""Sums over ranks of one host through memory that they share, without messages.

Gradients lie there already (``arenas.py``). Of any other array every rank writes a piece, adds its block of what all
have written, and reads the sum, while the pieces are in cache. Measured with 2 ranks of MPICH 5.0.2 on 2 cores, 102 MB
of float32: 30 to 74 ms, MPI_Allreduce 80 to 131 ms in the same runs. Pieces of 64 KiB took 51 ms where 256 KiB took 30
and 4 MiB 46. With 4 ranks on 2 cores it was 4 times slower than messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dbrdist.comm.communicators import mailbox
from dbrdist.comm.communicators.mailbox import Mailbox
from dbrdist.comm.communicators.mpi_communicator import MpiCommunicator
from dbrdist.comm.gradients import bandwidth, shared_gradients
from dbrdist.comm.gradients.communication_thread import Courier
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.pipeline import Sum
from dbrdist.comm.gradients.reduction_plan import Plan
from dbrdist.comm.gradients.shared_gradients import SharedGradients, SharedValues
from dbrdist.comm.protocol.gate import Passage, Pending
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message, mpi
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.comm.transport.host_memory import RawMemory, Segment, Ticket, attach
from dbrdist.comm.transport.hosts import Hosts
from dbrdist.comm.transport.sockets import MOST_RANKS, Cable, connect
from dbrdist.core.array.backend import Array

T = TypeVar("T")

_COMPARED_BYTES = 1 << 22
_NUM_COMPARED = 3
_MOST_OF_MPI = 1.3  # of its time, in which MPI looks all the time here; beside backward it looks less, and is slower
PIECE_BYTES = 1 << 18  # of each rank at a time: two per rank stay in the second-level cache
_SHARED_FROM_BYTES = 1 << 16  # below, one message is as fast
_OVERLAP_FROM_BYTES = 1 << 20  # below, a reduction is over before a thread would have begun it
_MOST_BUCKETS = 48
_ROWS_BEFORE_SHARING = 16  # of a part
_NUM_BUFFERS = 2  # a piece is written while slower ranks still read the piece before it
_SUMMED_BYTES = PIECE_BYTES * _NUM_BUFFERS


class SharedSum:
    """Buffers that all ranks of ``mpi_comm``, which lie on one host, read and write."""

    def __init__(self, mpi_comm: Any, raws: Sequence[RawMemory]) -> None:
        self._comm = mpi_comm
        self._rank, self._size = self._comm.rank, self._comm.size
        self._buffers = [[raw[b * PIECE_BYTES : (b + 1) * PIECE_BYTES] for raw in raws] for b in range(_NUM_BUFFERS)]

    def reduce(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        """Replace 1-d ``x`` by ``sum(factors[k] * x of rank k) / divisor`` on every rank."""
        step = PIECE_BYTES // x.itemsize
        for number, begin in enumerate(range(0, x.size, step)):
            piece = x[begin : begin + step]
            slots = [raw[: piece.nbytes].view(x.dtype) for raw in self._buffers[number % _NUM_BUFFERS]]
            slots[self._rank][...] = piece
            self._comm.Barrier()
            borders = message.blocks(piece.size, self._size)
            mine = slice(borders[self._rank], borders[self._rank + 1])
            slots[0][mine] = message.weighted_sum([slot[mine] for slot in slots], factors, divisor)
            self._comm.Barrier()
            piece[...] = slots[0]
        if x.size:
            self._comm.Barrier()  # the next call begins with the first buffer again


class FlatCommunicator(MpiCommunicator):
    """One reduction over flat memory for all parameters of a type; within a host through shared memory.

    Three more configuration entries. ``shared_memory``: True or False, or None to use it for long arrays. Gradients are
    then added where they lie, in the memory of all ranks of a host; between hosts messages carry the sums. ``overlap``:
    True or False, or None to reduce gradients while backward runs where there are several hosts. ``sockets``: whether
    the sums of hosts are sent over TCP connections of our own (``cable.py``); None is where these are as fast as MPI,
    which is measured.
    """

    _defaults = {**MpiCommunicator._defaults, "shared_memory": None, "overlap": None, "sockets": None}
    _hosts: Hosts | None = None
    _shared: SharedSum | None = None
    _courier: Courier | None = None
    _mailbox: Mailbox | None = None
    _bucket_bytes = 0
    _num_rows = 0  # that were exchanged by messages
    _cable: Cable | None = None  # between hosts
    _has_cable: bool | None = None  # the same on all ranks, also those that take no part in it; None is not tried yet

    def _prepare(self) -> None:
        if self._configs["shared_memory"] is False or self.size == 1:
            return
        self._hosts = Hosts(self._MPI, self._comm, self._leaders)
        if not self._is_part or self._configs["shared_memory"]:
            self._share_rows(self._hosts)

    def _share_rows(self, hosts: Hosts) -> None:
        """Share memory for rows and sums, if all ranks are on one host. Collective."""
        self._num_rows = _ROWS_BEFORE_SHARING
        if not hosts.is_only_one:
            return
        own = None

        def offer() -> message.HostArray:
            nonlocal own
            own = Segment(_SUMMED_BYTES + mailbox.NUM_BYTES)
            return np.array(own.ticket, np.int64)

        def take(everyones: list[message.HostArray]) -> list[RawMemory]:
            return [attach(Ticket(*numbers.tolist())) for numbers in everyones]

        raws = self._share(hosts, offer, take)
        if raws is None:
            return
        self._shared = SharedSum(self._comm, raws)
        if mailbox.is_possible():
            self._mailbox = Mailbox([raw[_SUMMED_BYTES:] for raw in raws], self._rank, self._wait_and_move)
            self._exchange_row = self._mailbox.exchange  # type: ignore[method-assign]  # in one call less
            self._release_enclosed = self._mailbox.release  # type: ignore[method-assign]
            self._config_changed()  # what fits into a row is another now

    def _wait_and_move(self, call: Call, test: Callable[[], bool], kind: str) -> None:
        """Wait for a row in memory. MPI moves this rank's messages meanwhile, which it does only while it is called:
        another rank may wait for them before it comes to its row."""
        probe, anyone, anything = self._comm.Iprobe, self._MPI.ANY_SOURCE, self._MPI.ANY_TAG

        def look() -> bool:
            if test():
                return True
            probe(anyone, anything)
            return False

        self._wait_until(call, look, kind)

    def _exchange_row(
        self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()
    ) -> tuple[list[bytes], list[list[Any]]]:
        """By messages. The ranks of a part share memory only once they have met a few times: many never do."""
        answer = super()._exchange_row(call, row, enclosed)
        self._num_rows += 1
        if self._num_rows == _ROWS_BEFORE_SHARING and self._hosts is not None:
            self._share_rows(self._hosts)
        return answer

    def _post_row(self, call: Call, row: bytes, enclosed: Sequence[message.HostArray] = ()) -> Pending:
        if self._mailbox is None:
            return super()._post_row(call, row)
        return self._mailbox.post(call, row, enclosed)

    def _encloses(self, arrays: Sequence[Array]) -> bool:
        return self._mailbox is not None and not self._configs["overlap"] and self._mailbox.takes(arrays)

    def _has_room(self) -> bool:
        return self._mailbox is not None and self._mailbox.has_room()

    def _share(
        self, hosts: Hosts, offer: Callable[[], message.HostArray], take: Callable[[list[message.HostArray]], T]
    ) -> T | None:
        """What ``take`` makes of the offers of this host's ranks; None on all ranks where either fails on any of them.

        Rank 0 says why.
        """
        numbers, reason = _tried(offer)
        neighbours = hosts.local.allgather((numbers, reason))
        taken = None
        if not any(why for _, why in neighbours):
            taken, reason = _tried(lambda: take([theirs for theirs, _ in neighbours]))
        if not self._comm.allreduce(int(bool(reason)), self._MPI.MAX):
            return taken
        reasons = self._comm.allgather(reason)
        failed = [rank for rank, why in enumerate(reasons) if why]
        if self._rank == 0:
            text = f"the ranks of a host send messages instead of sharing memory, because on {name_ranks(failed)}: "
            print(f"dbrdist: {text}{reasons[failed[0]]}", file=sys.stderr, flush=True)
        return None

    def _share_gradients(self, call: Passage, plan: Plan) -> SharedGradients | None:
        hosts = self._hosts
        if hosts is None or not self._reaches(plan):
            return None
        self._lay_cable()
        runs = self._share_runs(hosts, call, plan, shared_gradients.GRADIENTS)
        if runs is None:
            return None
        plan.move(shared_gradients.move_gradients_in)
        return SharedGradients(runs)

    def _share_values(self, call: Passage, plan: Plan) -> SharedValues | None:
        hosts = self._hosts
        if not isinstance(plan.shared, SharedGradients) or hosts is None or not hosts.is_only_one:
            return None
        runs = self._share_runs(hosts, call, plan, shared_gradients.VALUES)
        if runs is None:
            return None
        plan.move(shared_gradients.move_values_in)
        return SharedValues(runs)

    def _share_runs(self, hosts: Hosts, call: Passage, plan: Plan, segments: shared_gradients.Segments) -> Any:
        """The runs of a plan as all ranks of the host have them, once they lie in ``segments``."""
        with call.moving():
            self._meet(call)
            return self._share(
                hosts,
                lambda: shared_gradients.tickets(plan.runs, segments),
                lambda everyones: shared_gradients.reach(everyones, plan.runs, hosts.place, segments),
            )

    def _reduce_between(self, call: Call, x: message.HostArray, codec: Codec, divisor: float | None) -> None:
        """The sum over hosts of what this rank's counterparts have, divided, sent as ``codec`` says."""
        assert self._hosts is not None
        if self._cable is None or not x.size:
            self._reduce_over(self._hosts.between, call, x, codec, None, divisor)
        else:
            Sum(self._cable, call, x, codec, None, divisor).run()

    def _lay_cable(self, is_fast: bool | None = None) -> None:
        """Connect the hosts over TCP, once, where that is wanted, or as fast as MPI. Collective."""
        hosts, wanted = self._hosts, self._configs["sockets"]
        if self._has_cable is not None or hosts is None or hosts.is_only_one:
            return
        self._has_cable = False
        if wanted is False or is_fast is False or (wanted is None and self.inter_size > MOST_RANKS):
            return
        cable, reason = None, ""
        if self.inter_size > MOST_RANKS:
            reason = f"there are {self.inter_size} hosts, and more than {MOST_RANKS} are too many connections"
        elif hosts.between is not None:
            cable, reason = connect(hosts.between)
        reason = next(filter(None, self._comm.allgather(reason)), "")
        if reason and wanted and self._rank == 0:
            print(f"dbrdist: sums of hosts are sent by MPI, not over sockets: {reason}", file=sys.stderr, flush=True)
        self._has_cable = not reason and (wanted or is_fast or self._is_as_fast(cable))
        self._cable = cable if self._has_cable else None
        if cable is not None and not self._has_cable:
            cable.close()

    def _between_hosts(self) -> str:
        """What carries sums there, for the name of what is measured."""
        return " over sockets" if self._has_cable else ""

    def _is_as_fast(self, cable: Cable | None) -> bool:
        """Whether a sum takes about as long over these connections as by MPI, which needs the core for it."""
        seconds = []
        for self._cable in (None, cable):
            seconds.append(min(self._time_reduction(_COMPARED_BYTES) for _ in range(_NUM_COMPARED)))
        return bool(self._comm.bcast(seconds[1] <= _MOST_OF_MPI * seconds[0]))

    def _overlap(self, call: Passage, plan: Plan) -> Overlap | None:
        courier = self._background() if self._overlaps(plan) else None
        if courier is None:
            return None
        if not self._bucket_bytes:
            self._bucket_bytes = bandwidth.bucket_bytes(courier.comm)
        # What is sent after backward is the last bucket; more of them cost the core more than they hide.
        return Overlap(courier, plan, max(self._bucket_bytes, plan.num_bytes // _MOST_BUCKETS))

    def _background(self) -> Courier | None:
        if self._courier is None and mpi.watching_is_allowed() and self.size > 1:
            self._lay_cable()
            self._courier = Courier(self.split(0, self._rank))
            self._courier.comm._lay_cable(self._has_cable)
        return self._courier

    def _time_reduction(self, num_bytes: int) -> float:
        """Seconds that it takes to add this many bytes between hosts; on one host, between its ranks. Collective."""
        hosts = self._hosts
        x = np.zeros(num_bytes // 4, np.float32)
        self.barrier()
        with self._gate.call("measure") as call:
            call.meet_without_row()
            with call.moving():
                if hosts is None or hosts.is_only_one:
                    return bandwidth.timed(lambda: self._reduce_over(self._comm, call, x, Codec(), None, None))
                if hosts.between is None:
                    return 0.0
                return bandwidth.timed(lambda: self._reduce_between(call, x, Codec(), None))

    def _overlaps(self, plan: Plan) -> bool:
        """Whether to reduce while backward runs; the same on every rank.

        Within one host there is nothing to hide: the cores that would add gradients compute them.
        """
        wanted = self._configs["overlap"]
        if not mpi.watching_is_allowed() or self.size == 1 or not plan.runs:
            return False
        if wanted is not None:
            return bool(wanted)
        if plan.division is not None and plan.division.releases:
            return True  # the sooner gradients are reduced, the fewer lie in memory together
        return self._inter_size > 1 and plan.num_bytes >= _OVERLAP_FROM_BYTES

    def _reaches(self, plan: Plan) -> bool:
        """Whether to share the memory of these gradients; the same on every rank."""
        if not all(isinstance(run.grad, np.ndarray) and run.grad.dtype.isnative for run in plan.runs):
            return False
        return bool(self._configs["shared_memory"]) or plan.num_bytes >= _SHARED_FROM_BYTES

    def _reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        if self._shared is None or x.dtype == bool or not self._copies_through_memory(x.nbytes):
            super()._reduce_host(call, x, factors, divisor)
            return
        self._meet(call)
        self._shared.reduce(x, factors, divisor)

    def _copies_through_memory(self, num_bytes: int) -> bool:
        """True if ranks with a core each add a long array (waiting, they would lose a time slice each time)."""
        wanted = self._configs["shared_memory"]
        if wanted is None:
            return num_bytes >= _SHARED_FROM_BYTES and self._has_cores
        return bool(wanted)

    def _free(self) -> None:
        if self._courier is not None:
            self._courier.close()
            self._courier.comm.finalize()
        self._shared = self._mailbox = None
        # The record of the last verbs keeps this communicator, but not the memory that these methods would hold.
        self.__dict__.pop("_exchange_row", None)
        self.__dict__.pop("_release_enclosed", None)
        if self._cable is not None:
            self._cable.close()
        if self._hosts is not None:
            self._hosts.free()
        super()._free()


class SingleNodeCommunicator(FlatCommunicator):
    """As flat, for the ranks of one host only."""

    def _misfit(self) -> Exception | None:
        if self.inter_size == 1:
            return None
        return ValueError(
            f"the communicator 'single_node' expected all ranks on one host, got {self.size} ranks on "
            f"{self.inter_size} hosts; use 'auto', 'flat' or 'hierarchical'"
        )


def _tried(function: Callable[[], T]) -> tuple[T | None, str]:
    """(what the function returns, ""), or (None, why memory cannot be shared)."""
    try:
        return function(), ""
    except (OSError, MemoryError) as e:
        return None, str(e) or type(e).__name__
