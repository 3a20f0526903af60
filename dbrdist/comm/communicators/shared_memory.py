"""Sums over ranks of one host through memory that they share, without messages.

Gradients are there already (``arenas.py``). Of any other array every rank writes a piece, adds its block of what all
have written, and reads the sum, while the pieces are in cache. Measured with 2 ranks of MPICH 5.0.2 on 2 cores, 102 MB
of float32: 30 to 74 ms, MPI_Allreduce 80 to 131 ms in the same runs. Pieces of 64 KiB took 51 ms where 256 KiB took 30
and 4 MiB 46. With 4 ranks on 2 cores it was 4 times slower than messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from dbrdist.comm.communicators import mailbox
from dbrdist.comm.communicators.mailbox import Mailbox
from dbrdist.comm.communicators.messages import MessageReducer
from dbrdist.comm.communicators.mpi_communicator import MpiCommunicator
from dbrdist.comm.gradients import bandwidth, shared_gradients
from dbrdist.comm.gradients.communication_thread import Courier
from dbrdist.comm.gradients.overlap import Overlap
from dbrdist.comm.gradients.pipeline import PipelinedSum
from dbrdist.comm.gradients.reducer import Configurable
from dbrdist.comm.gradients.reduction_plan import ReductionPlan
from dbrdist.comm.gradients.shared_gradients import SharedGradients, SharedValues
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.wire_type import Codec
from dbrdist.comm.transport import message, mpi
from dbrdist.comm.transport.call_log import Call
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.comm.transport.host_memory import RawMemory, Segment, SegmentTicket, attach
from dbrdist.comm.transport.hosts import Hosts
from dbrdist.comm.transport.sockets import MOST_RANKS, Cable, connect
from dbrdist.core.array.backend import Array
from dbrdist.core.files.standard_streams import stderr

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from dbrdist.comm.protocol.settings import ConfigValue


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
    """Buffers that all ranks of ``mpi_comm``, which are on one host, read and write."""

    def __init__(self, mpi_comm: Comm, raws: Sequence[RawMemory]) -> None:
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


class FlatReducer(MessageReducer):
    """One reduction over flat memory for all parameters of a type; within a host through shared memory.

    Three more configuration entries. ``shared_memory``: True or False, or None to use it for long arrays. Gradients are
    then added where they lie, in the memory of all ranks of a host; between hosts messages carry the sums. ``overlap``:
    True or False, or None to reduce gradients while backward runs where there are several hosts. ``sockets``: whether
    the sums of hosts are sent over TCP connections of our own (``sockets.py``); None is where these are as fast as MPI,
    which is measured.
    """

    settings: ClassVar[dict[str, ConfigValue]] = {"shared_memory": None, "overlap": None, "sockets": None}

    def __init__(self, comm: Configurable) -> None:
        super().__init__(comm)
        self.hosts: Hosts | None = None  # where memory may be shared
        self._shared: SharedSum | None = None
        self._courier: Courier | None = None
        self._bucket_bytes = 0
        self._cable: Cable | None = None  # between hosts
        self._has_cable: bool | None = None  # the same on all ranks, also those that take no part; None: not tried yet

    def prepare(self) -> None:
        if self.comm.get_config("shared_memory") is False or self.ranks.size == 1:
            return
        hosts = self.hosts = Hosts(self.ranks.MPI, self.ranks.comm, self.ranks.leaders)
        if not hosts.is_only_one:
            return
        if self.ranks.is_part and not self.comm.get_config("shared_memory"):
            # The ranks of a part share memory only once they have met a few times: many never do.
            self.ranks.call_after_rows(_ROWS_BEFORE_SHARING, self._share_rows)
        else:
            self._share_rows()

    def _share_rows(self) -> None:
        """Share memory for rows and sums: all ranks are on one host. Collective."""
        hosts, own = self.hosts, None
        assert hosts is not None

        def offer() -> message.HostArray:
            nonlocal own
            own = Segment(_SUMMED_BYTES + mailbox.NUM_BYTES)
            return np.array(own.ticket, np.int64)

        def take(everyones: list[message.HostArray]) -> list[RawMemory]:
            return [attach(SegmentTicket(*numbers.tolist())) for numbers in everyones]

        raws = self._share(hosts, offer, take)
        if raws is None:
            return
        self._shared = SharedSum(self.ranks.comm, raws)
        if mailbox.is_possible():
            of_rows = [raw[_SUMMED_BYTES:] for raw in raws]
            self.ranks.use_mailbox(Mailbox(of_rows, self.ranks.rank, self.ranks.wait_and_move))
            self.comm.gate.config_changed()  # what fits into a row is another now

    @property
    def is_on_one_host(self) -> bool:
        return self.hosts is not None and self.hosts.is_only_one

    def encloses(self, arrays: Sequence[Array]) -> bool:
        return not self.comm.get_config("overlap") and self.ranks.takes(arrays)

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
        # An array: mpi4py's first allreduce of objects duplicates the communicator, and keeps Python's lock meanwhile.
        # Where two threads come here at the same time, two ranks would wait for each other's second thread for ever.
        failures = np.array([bool(reason)], np.int32)
        self.ranks.comm.Allreduce(self.ranks.MPI.IN_PLACE, failures, self.ranks.MPI.MAX)
        if not failures.any():
            return taken
        reasons = self.ranks.comm.allgather(reason)
        failed = [rank for rank, why in enumerate(reasons) if why]
        if self.ranks.rank == 0:
            text = f"the ranks of a host send messages instead of sharing memory, because on {name_ranks(failed)}: "
            print(f"dbrdist: {text}{reasons[failed[0]]}", file=stderr)
        return None

    def share_gradients(self, call: Passage, plan: ReductionPlan) -> SharedGradients | None:
        hosts = self.hosts
        if hosts is None or not self._reaches(plan):
            return None
        self.lay_cable()
        runs = self._share_runs(hosts, call, plan, shared_gradients.GRADIENTS)
        if runs is None:
            return None
        plan.move(shared_gradients.move_gradients_in)
        return SharedGradients(runs)

    def share_values(self, call: Passage, plan: ReductionPlan) -> SharedValues | None:
        hosts = self.hosts
        if not isinstance(plan.shared, SharedGradients) or hosts is None or not hosts.is_only_one:
            return None
        runs = self._share_runs(hosts, call, plan, shared_gradients.VALUES)
        if runs is None:
            return None
        plan.move(shared_gradients.move_values_in)
        return SharedValues(runs)

    def _share_runs(self, hosts: Hosts, call: Passage, plan: ReductionPlan, segments: shared_gradients.Segments) -> Any:
        """The runs of a plan as all ranks of the host have them, once they lie in ``segments``."""
        with call.moving():
            self.ranks.meet(call)
            return self._share(
                hosts,
                lambda: shared_gradients.tickets(plan.runs, segments),
                lambda everyones: shared_gradients.reach(everyones, plan.runs, hosts.place, segments),
            )

    def reduce_between(self, call: Call, x: message.HostArray, codec: Codec, divisor: float | None) -> None:
        """The sum over hosts of what this rank's counterparts have, divided, sent as ``codec`` says."""
        assert self.hosts is not None
        if self._cable is None or not x.size:
            self.reduce_over(self.hosts.between, call, x, codec, None, divisor)
        else:
            PipelinedSum(self._cable, call, x, codec, None, divisor).run()

    def lay_cable(self, is_fast: bool | None = None) -> None:
        """Connect the hosts over TCP, once, where that is wanted, or as fast as MPI. Collective."""
        hosts, wanted = self.hosts, self.comm.get_config("sockets")
        if self._has_cable is not None or hosts is None or hosts.is_only_one:
            return
        self._has_cable = False
        num_hosts = self.ranks.inter_size
        if wanted is False or is_fast is False or (wanted is None and num_hosts > MOST_RANKS):
            return
        cable, reason = None, ""
        if num_hosts > MOST_RANKS:
            reason = f"there are {num_hosts} hosts, and more than {MOST_RANKS} are too many connections"
        elif hosts.between is not None:
            cable, reason = connect(hosts.between)
        reason = next(filter(None, self.ranks.comm.allgather(reason)), "")
        if reason and wanted and self.ranks.rank == 0:
            print(f"dbrdist: sums of hosts are sent by MPI, not over sockets: {reason}", file=stderr)
        self._has_cable = not reason and (wanted or is_fast or self._is_as_fast(cable))
        self._cable = cable if self._has_cable else None
        if cable is not None and not self._has_cable:
            cable.close()

    def between_hosts(self) -> str:
        """What carries sums there, for the name of what is measured."""
        return " over sockets" if self._has_cable else ""

    def _is_as_fast(self, cable: Cable | None) -> bool:
        """Whether a sum takes about as long over these connections as by MPI, which needs the core for it."""
        seconds = []
        for self._cable in (None, cable):
            seconds.append(min(self.time_reduction(_COMPARED_BYTES) for _ in range(_NUM_COMPARED)))
        return bool(self.ranks.comm.bcast(seconds[1] <= _MOST_OF_MPI * seconds[0]))

    def overlap(self, call: Passage, plan: ReductionPlan) -> Overlap | None:
        courier = self.thread() if self._overlaps(plan) else None
        if courier is None:
            return None
        if not self._bucket_bytes:
            self._bucket_bytes = bandwidth.bucket_bytes(courier.comm)
        # What is sent after backward is the last bucket; more of them cost the core more than they hide.
        return Overlap(courier, plan, max(self._bucket_bytes, plan.num_bytes // _MOST_BUCKETS))

    def thread(self) -> Courier | None:
        if self._courier is None and mpi.watching_is_allowed() and self.ranks.size > 1:
            self.lay_cable()
            self._courier = Courier(self.comm.split(0, self.ranks.rank))
            reducer: Any = self._courier.comm.reducer
            reducer.lay_cable(self._has_cable)
        return self._courier

    def time_reduction(self, num_bytes: int) -> float:
        """Seconds that it takes to add this many bytes between hosts; on one host, between its ranks. Collective."""
        hosts = self.hosts
        x = np.zeros(num_bytes // 4, np.float32)
        self.comm.barrier()
        with self.comm.gate.call("measure") as call:
            call.meet_without_row()
            with call.moving():
                if hosts is None or hosts.is_only_one:
                    return bandwidth.timed(lambda: self.reduce_over(self.ranks.comm, call, x, Codec(), None, None))
                if hosts.between is None:
                    return 0.0
                return bandwidth.timed(lambda: self.reduce_between(call, x, Codec(), None))

    def _overlaps(self, plan: ReductionPlan) -> bool:
        """Whether to reduce while backward runs; the same on every rank.

        Within one host there is nothing to hide: the cores that would add gradients compute them.
        """
        wanted = self.comm.get_config("overlap")
        if not mpi.watching_is_allowed() or self.ranks.size == 1 or not plan.runs:
            return False
        if wanted is not None:
            return bool(wanted)
        if plan.division is not None and plan.division.releases:
            return True  # the sooner gradients are reduced, the fewer lie in memory together
        return self.ranks.inter_size > 1 and plan.num_bytes >= _OVERLAP_FROM_BYTES

    def _reaches(self, plan: ReductionPlan) -> bool:
        """Whether to share the memory of these gradients; the same on every rank."""
        if not all(isinstance(run.grad, np.ndarray) and run.grad.dtype.isnative for run in plan.runs):
            return False
        return bool(self.comm.get_config("shared_memory")) or plan.num_bytes >= _SHARED_FROM_BYTES

    def reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        if self._shared is None or x.dtype == bool or not self._copies_through_memory(x.nbytes):
            super().reduce_host(call, x, factors, divisor)
            return
        self.ranks.meet(call)
        self._shared.reduce(x, factors, divisor)

    def _copies_through_memory(self, num_bytes: int) -> bool:
        """True if ranks with a core each add a long array (waiting, they would lose a time slice each time)."""
        wanted = self.comm.get_config("shared_memory")
        if wanted is None:
            return num_bytes >= _SHARED_FROM_BYTES and self.ranks.has_cores
        return bool(wanted)

    def free(self) -> None:
        if self._courier is not None:
            self._courier.close()
            self._courier.comm.finalize()
        self._shared = None
        if self._cable is not None:
            self._cable.close()
        if self.hosts is not None:
            self.hosts.free()
        super().free()


class SingleNodeReducer(FlatReducer):
    """As flat, for the ranks of one host only."""

    def misfit(self) -> Exception | None:
        size, num_hosts = self.ranks.size, self.ranks.inter_size
        if num_hosts == 1:
            return None
        return ValueError(
            f"the communicator 'single_node' expected all ranks on one host, got {size} ranks on {num_hosts} hosts; "
            "use 'auto', 'flat' or 'hierarchical'"
        )


class FlatCommunicator(MpiCommunicator):
    """Adds gradients in flat memory, within a host in memory that its ranks share: see :class:`FlatReducer`."""

    reducer_type = FlatReducer


class SingleNodeCommunicator(FlatCommunicator):
    """As flat, for the ranks of one host only."""

    reducer_type = SingleNodeReducer


def _tried(function: Callable[[], T]) -> tuple[T | None, str]:
    """(what the function returns, ""), or (None, why memory cannot be shared)."""
    try:
        return function(), ""
    except (OSError, MemoryError) as e:
        return None, str(e) or type(e).__name__
