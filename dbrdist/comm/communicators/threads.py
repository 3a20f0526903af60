"""Ranks that are threads of one process: for tests, for simulation, and, with one rank, for running alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.communicators.world import ThreadJob, World
from dbrdist.comm.gradients.reducer import Reducer
from dbrdist.comm.protocol.gate import Passage
from dbrdist.comm.protocol.primitives import Ranks, Row
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array.types import Array
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.core.array.types import HostArray

_EAGER_BYTES = 1 << 16  # a longer message waits until it is received, as MPI's send does
_current = threading.local()


T = TypeVar("T")


class ThreadRanks(Ranks):
    """One rank of a :class:`World`; what it receives is a copy."""

    inter_rank, inter_size = 0, 1

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = self.intra_rank = rank
        self.size = self.intra_size = world.size
        self.record = world.job.records[world.members[rank]]
        self._meeting = 0  # the number of this rank's last

    def post_row(self, call: Call, row: bytes, enclosed: Sequence[HostArray] = ()) -> _PendingRow:
        return _PendingRow(self.world, self.show(row))

    def show(self, item: object) -> int:
        """Show ``item`` at this rank's next meeting, whose number this is."""
        self._meeting += 1
        self.world.show(self._meeting, self.rank, item)
        return self._meeting

    def exchange_items(self, item: object, read: Callable[[list[Any]], None]) -> None:
        """Show ``item`` to all ranks; ``read`` is done with all items before any rank continues."""
        call = self.record.running[threading.get_ident()]
        read(self.world.see(call, self.show(item)))
        self.world.see(call, self.show(None))

    def bcast_bytes(self, raw: message.HostArray, root: int) -> None:
        def read(everyone: list[Array]) -> None:
            if root != self.rank:
                raw[...] = everyone[root]

        self.exchange_items(raw, read)

    def allgather_bytes(
        self, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        def read(everyone: list[Array]) -> None:
            for theirs, count, start in zip(everyone, counts, starts):
                raw[start : start + count] = theirs

        self.exchange_items(mine, read)

    def exchange_bytes(
        self,
        sent: message.HostArray,
        sent_counts: Sequence[int],
        sent_starts: Sequence[int],
        raw: message.HostArray,
        counts: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        def read(everyone: list[Any]) -> None:
            for (theirs, their_starts), count, start in zip(everyone, counts, starts):
                begin = their_starts[self.rank]
                raw[start : start + count] = theirs[begin : begin + count]

        self.exchange_items((sent, sent_starts), read)

    def send_parts(self, call: Call, head: Row, parts: list[message.HostArray]) -> None:
        item = head, [part.copy() for part in parts]
        self.world.put(call, (self.rank, call.peer, call.tag), item, call.num_bytes > _EAGER_BYTES)

    def recv_parts(self, call: Call) -> tuple[Row, list[message.HostArray]]:
        received: tuple[Row, list[message.HostArray]] = self.world.take(call, (call.peer, self.rank, call.tag))
        return received

    def failed_half_way(self, call: Call, reason: str) -> None:
        self.world.job.fail(f"rank {call.record.rank} failed in {call.verb} ({call.where()}) with {reason}")


class ThreadReducer(Reducer):
    """Each rank adds its block of the arrays of all, where they lie."""

    ranks: ThreadRanks

    def reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        rank = self.ranks.rank
        borders = message.blocks(x.size, self.ranks.size)
        begin, end = borders[rank], borders[rank + 1]

        def reduce_my_block(everyone: list[Array]) -> None:
            total = message.weighted_sum([theirs[begin:end] for theirs in everyone], factors, divisor)
            for theirs in everyone:  # no other rank touches this block
                theirs[begin:end] = total

        self.ranks.exchange_items(x, reduce_my_block)


class ThreadCommunicator(CommunicatorBase):
    """One rank of a :class:`World`. All verbs copy: ranks never share memory through what they receive."""

    reducer_type = ThreadReducer
    ranks: ThreadRanks

    def __init__(
        self, world: World | None = None, rank: int = 0, configs: dict[str, bool | None] | None = None
    ) -> None:
        world = World(ThreadJob(1), "threads", (0,)) if world is None else world
        ranks = ThreadRanks(world, rank)
        super().__init__(ranks, ranks.record, world.name, world.members, configs)

    def _part(self, call: Passage, ranks: list[int]) -> ThreadCommunicator | None:
        world = self.ranks.world
        mine = None
        if ranks and ranks[0] == self.rank:
            with world.job.changed:
                world.num_parts += 1
                name = f"{world.name}/{world.num_parts}"
            mine = World(world.job, name, tuple(world.members[rank] for rank in ranks))
        everyone = world.see(call, self.ranks.show(mine))
        if not ranks:
            return None
        return ThreadCommunicator(everyone[ranks[0]], ranks.index(self.rank), self.get_config())


class _PendingRow:
    """A row at a meeting."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number

    def is_there(self) -> bool:
        """Whether all have come."""
        return self._world.is_complete(self._number)

    def pieces(self) -> list[list[HostArray]]:
        """Nothing is enclosed."""
        return []

    def wait(self, call: Call) -> list[bytes]:
        """The rows of all ranks."""
        return self._world.see(call, self._number)


def current() -> ThreadCommunicator | None:
    """The communicator of this thread, if it is a rank of :func:`run_threads`."""
    return getattr(_current, "communicator", None)


def run_threads(
    num_ranks: int, function: Callable[..., T], *args: object, timeout_seconds: float | None = None, **kwargs: object
) -> list[T]:
    """Call a function on several ranks that are threads, and return what each gave, in order of ranks.

    If a rank raises, the others raise at their next call instead of waiting for it, and the caller gets the error of
    the rank that failed first, with a note that names the rank.

    Args:
        num_ranks: the number of ranks, 1 or more.
        function: called as ``function(comm, *args, **kwargs)`` by each.
        args: further arguments.
        timeout_seconds: the longest time that the call may take; None for no limit.
        kwargs: further arguments by name.

    Raises:
        TimeoutError: if ``timeout_seconds`` pass first; ranks that wait are woken.

    Example:
        >>> dbrdist.comm.run_threads(3, lambda comm: float(comm.allreduce(np.array(comm.rank, "d"))))
        [3.0, 3.0, 3.0]
    """
    if num_ranks < 1:
        raise ValueError(f"run_threads expected at least 1 rank, got {num_ranks}")
    job = ThreadJob(num_ranks)
    world = World(job, "threads", tuple(range(num_ranks)))
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        job.records[rank].home = threading.get_ident()
        comm = _current.communicator = ThreadCommunicator(world, rank)
        try:
            results[rank] = function(comm, *args, **kwargs)
        except BaseException as e:
            failures.append((rank, e))
            job.fail(f"rank {rank} failed with {type(e).__name__}: {e}")
        finally:
            job.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    _join(threads, job, timeout_seconds)
    if failures:
        ours = [failed for failed in failures if not isinstance(failed[1], CommunicatorError)]  # what went wrong first
        rank, error = (ours or failures)[0]
        error.add_note(f"on rank {rank} of {num_ranks}")
        raise error
    return results


def _join(threads: list[threading.Thread], job: ThreadJob, timeout_seconds: float | None) -> None:
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        job.fail(f"the time limit of {timeout_seconds} s passed")
        raise TimeoutError(f"after {timeout_seconds} s these ranks had not returned: {', '.join(late)}")
