"""Ranks that are threads of one process: for tests, for simulation, and, with one rank, for running alone."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbrdist.comm import message
from dbrdist.comm.communicator import CommunicatorBase, pickled, unpickled
from dbrdist.core.backend import Array
from dbrdist.errors import CommunicatorError

_current = threading.local()


class World:
    """What the ranks of one communicator share: a meeting point, a place for each rank, and mailboxes."""

    def __init__(self, size: int, parent: World | None = None) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.mail: dict[tuple[int, int, int], deque[Any]] = {}
        self.arrived = threading.Condition()
        self.children: list[World] = []
        self.failure = ""
        if parent is not None:
            parent.children.append(self)
            if parent.failure:
                self.fail(parent.failure)

    def fail(self, reason: str) -> None:
        """Wake every rank that waits here or in a part of this world; from now on all verbs raise."""
        with self.arrived:
            self.failure = self.failure or reason
            self.arrived.notify_all()
        self.barrier.abort()
        for child in self.children:
            child.fail(reason)

    def meet(self) -> None:
        """Wait for all ranks."""
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise self._broken() from None

    def _broken(self) -> CommunicatorError:
        return CommunicatorError(f"this rank cannot go on: {self.failure or 'another rank failed'}")

    def put(self, key: tuple[int, int, int], item: Any) -> None:
        """Leave an item for (source, destination, tag)."""
        with self.arrived:
            self.mail.setdefault(key, deque()).append(item)
            self.arrived.notify_all()

    def take(self, key: tuple[int, int, int]) -> Any:
        """Wait for the next item for (source, destination, tag)."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.failure or self.mail.get(key))
            if not self.mail.get(key):
                raise self._broken()
            return self.mail[key].popleft()


class ThreadCommunicator(CommunicatorBase):
    """One rank of a :class:`World`. All verbs copy: ranks never share memory through what they receive."""

    def __init__(self, world: World | None = None, rank: int = 0) -> None:
        super().__init__()
        self._world = World(1) if world is None else world
        self._rank = rank

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

    def _exchange(self, item: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Show ``item`` to all ranks; what ``read`` makes of all items is made before any rank goes on."""
        world = self._world
        world.slots[self._rank] = item
        world.meet()
        try:
            return read(world.slots)
        finally:
            world.meet()
            world.slots[self._rank] = None

    def _exchange_checked(self, make: Callable[[], Any], read: Callable[[list[Any]], Any]) -> Any:
        """As ``_exchange``; if ``make`` raises on a rank, every rank raises that."""
        try:
            item, error = make(), None
        except (TypeError, ValueError) as e:
            item, error = None, e
        found = self._exchange(error, lambda errors: next((e for e in errors if e is not None), None))
        if found is not None:
            raise error or copy.copy(found)
        return self._exchange(item, read)

    def _allgather_rows(self, row: message.Header) -> message.Header:
        result: message.Header = self._exchange(row, np.array)
        return result

    # ---- arrays ----

    def split(self, color: int | None, key: int) -> ThreadCommunicator | None:
        everyone = self._exchange((color, key, self._rank), list)
        mine = sorted(entry[1:] for entry in everyone if entry[0] == color)
        leader = mine[0][1]
        world = World(len(mine), self._world) if color is not None and leader == self._rank else None
        worlds = self._exchange(world, list)
        if color is None:
            return None
        part = ThreadCommunicator(worlds[leader], mine.index((key, self._rank)))
        part._inherit(self)
        return part

    def alltoall(self, xs: Sequence[Array]) -> tuple[Array, ...]:
        result: tuple[Array, ...] = self._exchange_checked(
            lambda: self._one_for_each_rank(xs, "alltoall"),
            lambda slots: tuple(message.clone(theirs[self._rank]) for theirs in slots),
        )
        return result

    def send(self, data: Array | Sequence[Array], dest: int, tag: int) -> None:
        self._check_rank(dest, "send")
        if isinstance(data, (tuple, list)):
            item: Any = tuple(message.clone(message.as_array(x, "send")) for x in data)
        else:
            item = message.clone(message.as_array(data, "send"))
        self._world.put((self._rank, dest, tag), ("array", item))

    def recv(self, source: int, tag: int) -> Any:
        return self._take("array", source, tag)

    def _take(self, kind: str, source: int, tag: int) -> Any:
        self._check_rank(source, "recv")
        sent, item = self._world.take((source, self._rank, tag))
        if sent != kind:
            raise wrong_kind(kind, source, tag)
        return item

    def bcast(self, data: Array | None, max_buf_len: int | None = None, root: int = 0) -> Array:
        self._check_rank(root, "bcast")
        if self._rank == root:
            self._exchange_checked(lambda: message.as_array(data, "bcast"), lambda slots: None)
            return data
        return self._exchange_checked(lambda: None, lambda slots: message.clone(slots[root]))

    def gather(self, data: Array, root: int = 0) -> tuple[Array, ...] | None:
        self._check_rank(root, "gather")
        result: tuple[Array, ...] | None = self._exchange_checked(
            lambda: message.as_array(data, "gather"),
            lambda slots: tuple(map(message.clone, slots)) if self._rank == root else None,
        )
        return result

    def allgather(self, x: Array) -> tuple[Array, ...]:
        result: tuple[Array, ...] = self._exchange_checked(
            lambda: message.as_array(x, "allgather"), lambda slots: tuple(map(message.clone, slots))
        )
        return result

    def scatter(self, xs: Sequence[Array] | Array | None, root: int = 0) -> Array:
        self._check_rank(root, "scatter")
        return self._exchange_checked(
            lambda: self._one_for_each_rank(xs, "scatter") if self._rank == root else None,
            lambda slots: message.clone(slots[root][self._rank]),
        )

    def _reduce_host(self, x: message.HostArray, factors: Sequence[float] | None, divisor: float | None) -> None:
        borders = message.blocks(x.size, self.size)
        begin, end = borders[self._rank], borders[self._rank + 1]

        def reduce_my_block(slots: list[message.HostArray]) -> None:
            total = message.weighted_sum([theirs[begin:end] for theirs in slots], factors, divisor)
            for theirs in slots:  # no other rank touches this block
                theirs[begin:end] = total

        self._exchange(x, reduce_my_block)

    def barrier(self) -> None:
        self._world.meet()

    # ---- objects ----

    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        self._check_rank(dest, "send_obj")
        raw, error = pickled(obj)
        self._world.put((self._rank, dest, tag), ("object", raw))
        if error is not None:
            raise error

    def recv_obj(self, source: int, tag: int) -> Any:
        return unpickled(self._take("object", source, tag))

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        self._check_rank(root, "bcast_obj")
        raw, error = pickled(obj if self._rank == root else None)
        raw = self._exchange(raw, lambda slots: slots[root])
        if error is not None:
            raise error
        return obj if self._rank == root else unpickled(raw)

    def allgather_obj(self, obj: Any) -> list[Any]:
        return [unpickled(raw) for raw in self._exchange(pickled(obj)[0], list)]

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        self._check_rank(root, "scatter_obj")
        raws = self._exchange_checked(
            lambda: pickled_for_each(objs, self.size) if self._rank == root else None, lambda slots: slots[root]
        )
        return unpickled(raws[self._rank])


def pickled_for_each(objs: Sequence[Any] | None, size: int) -> list[message.HostArray]:
    """The ``size`` objects of a scatter as bytes."""
    if objs is None or len(objs) != size:
        raise ValueError(f"scatter_obj expected {size} objects, got {'None' if objs is None else len(objs)}")
    pairs = [pickled(obj) for obj in objs]
    for _, error in pairs:
        if error is not None:
            raise error
    return [raw for raw, _ in pairs]


def wrong_kind(expected: str, source: int, tag: int) -> TypeError:
    """The error for a message of the other sort."""
    if expected == "array":
        return TypeError(f"recv expected an array from rank {source} with tag {tag}, got an object; use recv_obj")
    return TypeError(f"recv_obj expected an object from rank {source} with tag {tag}, got an array; use recv")


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
    world = World(num_ranks)
    results: list[Any] = [None] * num_ranks
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        comm = _current.communicator = ThreadCommunicator(world, rank)
        try:
            results[rank] = function(comm, *args, **kwargs)
        except BaseException as e:
            failures.append((rank, e))
            world.fail(f"rank {rank} failed with {type(e).__name__}: {e}")

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    _join(threads, world, timeout_seconds)
    if failures:
        rank, error = failures[0]
        error.add_note(f"on rank {rank} of {num_ranks}")
        raise error
    return results


def _join(threads: list[threading.Thread], world: World, timeout_seconds: float | None) -> None:
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(None if end is None else max(0.0, end - time.monotonic()))
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        world.fail(f"the time limit of {timeout_seconds} s passed")
        raise TimeoutError(f"after {timeout_seconds} s these ranks had not returned: {', '.join(late)}")
