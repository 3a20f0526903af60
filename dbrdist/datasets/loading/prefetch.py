"""Iterators that read ahead: the same batches as a SerialIterator, made by threads or by processes meanwhile."""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any

from dbrdist.core.array import backend, thread_pools
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import not_negative
from dbrdist.datasets.loading.memory import Canvas, reused
from dbrdist.datasets.loading.order import OrderSampler, State, Step
from dbrdist.datasets.loading.serial import SerialIterator, put_together, read_parts
from dbrdist.datasets.loading.workers import Ticket, WorkerPool

# the state after a batch, the batch, and the parts of it that the workers of this rank take, with a ticket for each
_Ahead = tuple[State, Step, list[Step], list[Any]]


class PrefetchIterator(SerialIterator):
    """A SerialIterator with a bounded queue of batches in the making.

    What it saves is the position of the last batch handed out; batches made ahead are made again after a resume.
    A subclass says how many are in the making (``_num_ahead``), and how to ask for one and wait for it.
    """

    _num_ahead: int
    _starts_again = False  # whether reset gives a finalized one new workers

    def __init__(self, dataset: Any, batch_size: int, *args: Any, **kwargs: Any) -> None:
        self._ahead: deque[_Ahead] = deque()
        self._is_finalized = False
        super().__init__(dataset, batch_size, *args, **kwargs)

    def _submit(self, own: Step, whole: Step) -> Any:
        raise NotImplementedError

    def _collect(self, ticket: Any) -> tuple[Any, list[str]]:
        raise NotImplementedError

    def __next__(self) -> Any:
        self._fill()
        if not self._ahead:
            raise StopIteration
        state, step, own, tickets = self._ahead[0]
        try:
            found = [self._collect(tickets.pop(0)) for _ in self.workers]
        except BaseException:
            self._drop_ahead()  # the position has not moved: another call would read the same batch
            raise
        self._ahead.popleft()
        batch = self._arrive(state, step, own, found)
        self._fill()
        return batch

    next = __next__

    def _fill(self) -> None:
        if self._is_finalized:
            raise RuntimeError(f"expected an iterator in use, but this {type(self).__name__} was finalized")
        state = self._ahead[-1][0] if self._ahead else self._state
        while len(self._ahead) < self._num_ahead:
            state, step = self._plan.advance(state)
            if step is None:
                return
            own = self._own(step)
            self._ahead.append((state, step, own, [self._submit(part, step) for part in own]))

    def _drop_ahead(self) -> None:
        while self._ahead:
            for ticket in self._ahead.popleft()[3]:
                with contextlib.suppress(Exception):  # nobody waits for these batches, so their errors concern nobody
                    self._collect(ticket)

    def reset(self) -> None:
        """Go back to the start of epoch 0; batches made ahead are dropped, and threads that have ended start again."""
        if self._is_finalized and not self._starts_again:
            raise NotImplementedError(
                f"{type(self).__name__}.reset: the iterator is finalized, so its workers are gone; make a new one"
            )
        self._is_finalized = False
        self._drop_ahead()
        super().reset()

    def _go_to(self, state: State, seed: int) -> None:
        self._drop_ahead()
        super()._go_to(state, seed)

    def finalize(self) -> None:
        """Stop the workers; the iterator cannot be used afterwards."""
        self._is_finalized = True
        self._ahead.clear()

    def __copy__(self) -> PrefetchIterator:
        """An iterator at the same position with workers of its own."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._ahead = deque()
        other.skipped = list(self.skipped)
        other._forget_workers()
        return other

    def __getstate__(self) -> dict[str, Any]:
        return self.__copy__().__dict__  # without workers

    def _forget_workers(self) -> None:
        raise NotImplementedError


class MultithreadIterator(PrefetchIterator):
    """Batches made ahead by threads of this process.

    Decoding JPEGs and resizing run outside Python's lock, so threads speed them up; they share the dataset and its
    cache. A dataset that computes in Python is better served by :class:`MultiprocessIterator`.

    Args:
        dataset: anything with ``len`` and ``[i]`` that several threads may read.
        batch_size, repeat, shuffle, order_sampler, seed, rank, size, last, virtual_workers: those of
            :class:`SerialIterator`; the batches are the same.
        n_threads: number of threads; they share the work on each batch, and two batches are in the making or ready,
            so that memory does not grow with the threads.

    Raises:
        ValueError: ``n_threads`` is less than 1.

    Example:
        >>> with iterators.MultithreadIterator([0, 1, 2], 2, shuffle=False, n_threads=2) as iterator:
        ...     iterator.next()
        [0, 1]
    """

    _starts_again = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = None,
        n_threads: int = 1,
        order_sampler: OrderSampler | None = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        last: str = "wrap",
        virtual_workers: int | None = None,
    ) -> None:
        if n_threads < 1:
            raise ValueError(f"expected at least one thread, got n_threads={n_threads}")
        self.n_threads = n_threads
        self._num_ahead = 2
        self._pool: ThreadPoolExecutor | None = None
        super().__init__(
            dataset, batch_size, repeat, shuffle, order_sampler, seed=seed, rank=rank, size=size, last=last,
            virtual_workers=virtual_workers,
        )  # fmt: skip

    def _submit(self, own: Step, whole: Step) -> tuple[Step, list[Future[Any]]]:
        if self._pool is None:
            backend.tune_heap()  # else the pixels of each photograph lie in fresh pages, for which threads wait in turn
            self._pool = ThreadPoolExecutor(self.n_threads, thread_name_prefix="dbrdist-loader")
        canvas, size = Canvas(own.num_samples), _share_size(own.num_samples, self.n_threads)
        starts = range(0, own.num_samples, size)
        return whole, [self._pool.submit(self._read, own.cut(n, n + size), canvas, n) for n in starts]

    def _read(self, share: Step, canvas: Canvas, start: int) -> tuple[list[Any], list[str]]:
        """A part of a batch, in a thread: its images go to their rows of the canvas."""
        with reused.on(canvas, start, share.num_samples):
            return read_parts(self.dataset, share, self.seed)

    def _collect(self, ticket: tuple[Step, list[Future[Any]]]) -> tuple[Any, list[str]]:
        whole, futures = ticket
        found = [future.result() for future in futures]
        parts = [part for parts, _ in found for part in parts]
        skipped = [words for _, messages in found for words in messages]
        return put_together(self.dataset, parts, self.seed, whole), skipped

    def finalize(self) -> None:
        super().finalize()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _forget_workers(self) -> None:
        self._pool = None


def _share_size(num_samples: int, num_threads: int) -> int:
    """How many examples of a batch a thread takes at a time: two shares each, as some examples take longer.

    A share has a cost of its own, about a third of that of an image of 256 pixels.
    """
    size = min(max(-(-num_samples // (2 * num_threads)), 4), 32)
    return size + size % 2  # partners that are mixed stay together


class MultiprocessIterator(PrefetchIterator):
    """Batches made ahead by worker processes.

    Workers are spawned, never forked, since forking breaks MPI, CUDA and threads: the dataset must be picklable, and a
    script that makes this iterator needs ``if __name__ == "__main__":`` around its main part. A worker that dies is a
    LoaderError with its exit code; an exception in the dataset is raised here with the worker's traceback. Workers end
    when the iterator is finalized and when this process ends, however it ends.

    The arrays of a batch are stored in memory that is shared with the workers. It is used again once the arrays and all
    views of them are gone: at most for the batches in the making and two more. A batch is copied through a pipe if you
    keep more than that, if it is small, and if the system gives no such memory (a RuntimeWarning says so once).

    Args:
        dataset: anything with ``len`` and ``[i]`` that can be pickled.
        batch_size, repeat, shuffle, order_sampler, seed, rank, size, last, virtual_workers: those of
            :class:`SerialIterator`; the batches are the same.
        n_processes: number of workers; None is the number of cores of this process (of its share, where ranks have one
            host). Each makes whole batches.
        n_prefetch: how many batches are in the making or ready, beyond one per worker.
        shared_mem: 0 sends all batches through pipes; any other value is accepted for Chainer's sake, and the size is
            found by itself.
        dataset_timeout: after so many seconds without a batch a warning (``MultiprocessIterator.TimeoutWarning``)
            says so, and keeps waiting; None never warns.
        maxtasksperchild: replace a worker after so many batches; None never does.

    Raises:
        ValueError: a number is less than 1.
        LoaderError: at ``next``, a worker died, or the dataset raised.

    Example:
        >>> iterator = iterators.MultiprocessIterator(train, 32, n_processes=4)  # doctest: +SKIP
        >>> batch = iterator.next()  # doctest: +SKIP
    """

    class TimeoutWarning(RuntimeWarning):
        """A batch takes longer than ``dataset_timeout``."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = None,
        n_processes: int | None = None,
        n_prefetch: int = 1,
        shared_mem: int | None = None,
        order_sampler: Any = None,
        dataset_timeout: Annotated[float | None, not_negative] = 30.0,
        maxtasksperchild: int | None = None,
        *,
        seed: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        last: str = "wrap",
        virtual_workers: int | None = None,
    ) -> None:
        n_processes = n_processes or thread_pools.num_cores()
        if n_processes < 1 or n_prefetch < 1 or (maxtasksperchild is not None and maxtasksperchild < 1):
            raise ValueError(
                "expected at least 1 for n_processes, n_prefetch and maxtasksperchild, "
                f"got {n_processes}, {n_prefetch} and {maxtasksperchild}"
            )
        self.n_processes = n_processes
        self.n_prefetch = n_prefetch
        self.dataset_timeout = dataset_timeout
        self.shared_mem = shared_mem
        self.maxtasksperchild = maxtasksperchild
        self._num_ahead = n_processes + n_prefetch
        self._pool: WorkerPool | None = None
        super().__init__(
            dataset, batch_size, repeat, shuffle, order_sampler, seed=seed, rank=rank, size=size, last=last,
            virtual_workers=virtual_workers,
        )  # fmt: skip

    def _submit(self, own: Step, whole: Step) -> Ticket:
        if self._pool is None:
            # two more than are in the making: the next is asked for while the last two may still be in use
            num_slots = 0 if self.shared_mem == 0 else (self._num_ahead + 2) * len(self.workers)
            self._pool = WorkerPool(self.dataset, self.n_processes, self.maxtasksperchild, num_slots)
        return self._pool.submit((own, self.seed, whole))

    def _collect(self, ticket: Ticket) -> tuple[Any, list[str]]:
        assert self._pool is not None
        return self._pool.collect(ticket, self.dataset_timeout, self.TimeoutWarning)

    def finalize(self) -> None:
        super().finalize()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _forget_workers(self) -> None:
        self._pool = None


explain_constructors(globals())
