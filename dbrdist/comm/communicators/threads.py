"""Ranks that are threads of one process: for tests, for simulation, and, with one rank, for running alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.communicators.world import Job, World
from dbrdist.comm.protocol.gate import Gate, Row
from dbrdist.comm.transport import message
from dbrdist.comm.transport.call_log import Call

_EAGER_BYTES = 1 << 16  # a longer message waits until it is received, as MPI's send does
_current = threading.local()


class ThreadCommunicator(CommunicatorBase):
    """One rank of a :class:`World`. All verbs copy: ranks never share memory through what they receive."""

    def __init__(self, world: World | None = None, rank: int = 0, settings: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._world = World(Job(1), "threads", (0,)) if world is None else world
        self._rank = rank
        self._meeting = 0  # the number of this rank's last
        self._configs.update(settings or {})
        record = self._world.job.records[self._world.members[rank]]
        self._gate = Gate(self, record, self._world.name, self._world.members)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._world.size

    @property
    def intra_rank(self) -> int:
        return self._rank

    @property
    def intra_size(self) -> int:
        return self._world.size

    @property
    def inter_rank(self) -> int:
        return 0

    @property
    def inter_size(self) -> int:
        return 1

    # ---- primitives ----

    def _post_row(self, call: Call, row: bytes, enclosed: Sequence[Any] = ()) -> _PendingRow:
        return _PendingRow(self._world, self._show(row))

    def _show(self, item: Any) -> int:
        self._meeting += 1
        self._world.show(self._meeting, self._rank, item)
        return self._meeting

    def _exchange_items(self, item: Any, read: Callable[[list[Any]], None]) -> None:
        """Show ``item`` to all ranks; ``read`` is done with all items before any rank continues."""
        call = self._gate.record.running[threading.get_ident()]
        read(self._world.see(call, self._show(item)))
        self._world.see(call, self._show(None))

    def _bcast_bytes(self, raw: message.HostArray, root: int) -> None:
        def read(everyone: list[Any]) -> None:
            if root != self._rank:
                raw[...] = everyone[root]

        self._exchange_items(raw, read)

    def _allgather_bytes(
        self, mine: message.HostArray, raw: message.HostArray, counts: Sequence[int], starts: Sequence[int]
    ) -> None:
        def read(everyone: list[Any]) -> None:
            for theirs, count, start in zip(everyone, counts, starts):
                raw[start : start + count] = theirs

        self._exchange_items(mine, read)

    def _exchange_bytes(
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
                begin = their_starts[self._rank]
                raw[start : start + count] = theirs[begin : begin + count]

        self._exchange_items((sent, sent_starts), read)

    def _send_parts(self, call: Call, head: Row, parts: list[message.HostArray]) -> None:
        item = head, [part.copy() for part in parts]
        self._world.put(call, (self._rank, call.peer, call.tag), item, call.num_bytes > _EAGER_BYTES)

    def _recv_parts(self, call: Call) -> tuple[Row, list[message.HostArray]]:
        received: tuple[Row, list[message.HostArray]] = self._world.take(call, (call.peer, self._rank, call.tag))
        return received

    def _reduce_host(
        self, call: Call, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None
    ) -> None:
        borders = message.blocks(x.size, self.size)
        begin, end = borders[self._rank], borders[self._rank + 1]

        def reduce_my_block(everyone: list[Any]) -> None:
            total = message.weighted_sum([theirs[begin:end] for theirs in everyone], factors, divisor)
            for theirs in everyone:  # no other rank touches this block
                theirs[begin:end] = total

        self._exchange_items(x, reduce_my_block)

    def _make_part(self, call: Call, ranks: list[int]) -> ThreadCommunicator | None:
        world = self._world
        mine = None
        if ranks and ranks[0] == self._rank:
            with world.job.changed:
                world.num_parts += 1
                name = f"{world.name}/{world.num_parts}"
            mine = World(world.job, name, tuple(world.members[rank] for rank in ranks))
        everyone = world.see(call, self._show(mine))
        if not ranks:
            return None
        return ThreadCommunicator(everyone[ranks[0]], ranks.index(self._rank), self._configs)

    def _failed_half_way(self, call: Call, reason: str) -> None:
        self._world.job.fail(f"rank {call.record.rank} failed in {call.verb} ({call.where()}) with {reason}")


class _PendingRow:
    """A row at a meeting."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._number = number

    def is_there(self) -> bool:
        """Whether all have come."""
        return self._world.is_complete(self._number)

    def pieces(self) -> list[list[Any]]:
        """Nothing is enclosed."""
        return []

    def wait(self, call: Call) -> list[bytes]:
        """The rows of all ranks."""
        return self._world.see(call, self._number)


def current() -> ThreadCommunicator | None:
    """The communicator of this thread, if it is a rank of :func:`run_threads`."""
    return getattr(_current, "communicator", None)


def run_threads(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float | None = None, **kwargs: Any
) -> list[Any]:
    """Call ``function(comm, *args, **kwargs)`` on ``num_ranks`` threads and return what each gave, in order of ranks.

    If a rank raises, the others raise at their next verb instead of waiting for it, and the caller gets the error of
    the rank that failed first, with a note that names the rank.

    Raises:
        TimeoutError: if ``timeout_seconds`` pass first; ranks that wait in a verb are woken.
    """
    if num_ranks < 1:
        raise ValueError(f"run_threads expected at least 1 rank, got {num_ranks}")
    job = Job(num_ranks)
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
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {num_ranks}")
        raise error
    return results


def _join(threads: list[threading.Thread], job: Job, timeout_seconds: float | None) -> None:
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        job.fail(f"the time limit of {timeout_seconds} s passed")
        raise TimeoutError(f"after {timeout_seconds} s these ranks had not returned: {', '.join(late)}")
