"""Who writes a snapshot to disk: the training loop itself, or a thread or process beside it.

The loop copies the state; a writer gets the copy, a dictionary of arrays, and the loop continues. A writer that fails
raises its error at the next snapshot or at the end of the run. Files come into being as those of
:func:`~dbrdist.training.extensions.snapshots.write`: whole, or not at all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dbrdist.core.array.pages import CopySpace
from dbrdist.core.array.types import Array
from dbrdist.core.files.serializer import saved_state
from dbrdist.errors import CheckpointError
from dbrdist.training.extensions.snapshots import write

if TYPE_CHECKING:
    from dbrdist.core.files.serializer import Serializable
    from dbrdist.core.model.link import Link
    from dbrdist.training.trainer import Trainer

# New interpreters: forking breaks MPI, CUDA and threads.
_processes = multiprocessing.get_context("spawn")


class Writer:
    """Base of writers: called with a file's name, its folder, and the state as a dictionary of arrays."""

    def __call__(self, filename: str, outdir: str, target: Any) -> None:
        """Write the state, now or later."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(self, filename, outdir, target)")

    def copy_of(self, target: Trainer) -> dict[str, Array] | None:
        """The copy of an object's state that it is then called with."""
        return saved_state(target)

    def prepare(self, num_bytes: int) -> None:
        """Called when the run starts: about so many bytes are going to be copied each time."""

    def save(
        self,
        filename: str,
        outdir: str,
        target: dict[str, Array],
        savefun: Callable[[str, Serializable], object] | None = None,
        **kwds: Any,
    ) -> None:
        """Write it now, by `savefun(path, target, **kwds)`; None writes .npz with a checksum of the whole file."""
        _save(filename, outdir, target, savefun, kwds)

    def finalize(self) -> None:
        """Called when the run ends: wait until all is written. Raises CheckpointError where something was not."""


class SimpleWriter(Writer):
    """Writes at once, in the training loop."""

    def __init__(self, savefun: Callable[..., None] | None = None, **kwds: Any):
        self._savefun = savefun
        self._kwds = kwds

    def __call__(self, filename: str, outdir: str, target: dict[str, Array]) -> None:
        self.save(filename, outdir, target, self._savefun, **self._kwds)


def _save(
    filename: str,
    outdir: str,
    target: dict[str, Array],
    savefun: Any,
    kwds: dict[str, bool],
) -> None:
    write(os.path.join(outdir, filename), target, savefun and (lambda path, obj: savefun(path, obj, **kwds)))


class _Thread(threading.Thread):
    """A thread whose error can be asked for."""

    error: BaseException | None = None

    def run(self) -> None:
        try:
            super().run()
        except BaseException as error:  # raised in the loop, by _finish
            self.error = error


def _finish(worker: Any) -> None:
    """Wait for a thread or process. Raises its error."""
    worker.join()
    error = getattr(worker, "error", None)
    if error is not None:
        raise error
    status = getattr(worker, "exitcode", 0)
    if status:
        raise CheckpointError(
            f"the process that writes snapshots ended with exit status {status}: its last snapshot is not written; "
            "earlier ones are unharmed"
        )


class StandardWriter(Writer):
    """Base of writers that start a worker for each snapshot; a snapshot waits for the worker of the one before.

    A subclass defines `create_worker`.
    """

    def __init__(self, savefun: Callable[..., None] | None = None, **kwds: Any):
        self._savefun = savefun
        self._kwds = kwds
        self._worker: Any = None

    def __call__(self, filename: str, outdir: str, target: dict[str, Array]) -> None:
        self.finalize()
        worker = self.create_worker(filename, outdir, target)
        worker.start()
        self._worker = worker

    def create_worker(self, filename: str, outdir: str, target: Any) -> Any:
        """An object with `start()` and `join()` that writes the state."""
        raise NotImplementedError(f"{type(self).__name__} must define create_worker(self, filename, outdir, target)")

    def finalize(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            _finish(worker)


class ThreadWriter(StandardWriter):
    """A thread writes; most of the time is spent in the file system, where threads do not wait for each other.

    The copies of the state all take the same memory, which stays with the writer.
    """

    def __init__(self, savefun: Callable[..., None] | None = None, **kwds: Any):
        super().__init__(savefun, **kwds)
        self._space = CopySpace()
        self._preparing: threading.Thread | None = None

    def prepare(self, num_bytes: int) -> None:
        def reserve() -> None:
            with contextlib.suppress(MemoryError):  # the first copy says so, where there still is none
                self._space.reserve(num_bytes)

        self._preparing = threading.Thread(target=reserve, daemon=True)
        self._preparing.start()

    def copy_of(self, target: Link | Trainer) -> dict[str, Array] | None:
        self.finalize()  # the thread has done with the former copy
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._space.restart()
        return saved_state(target, self._space.copy)

    def create_worker(self, filename: str, outdir: str, target: dict[str, Array]) -> threading.Thread:
        return _Thread(target=_save, args=(filename, outdir, target, self._savefun, self._kwds))


class ProcessWriter(StandardWriter):
    """A new process writes each snapshot: the program needs `if __name__ == "__main__":`, `savefun` must be picklable.

    Starting it takes longer than most snapshots take to write: ThreadWriter is usually better.
    """

    def create_worker(self, filename: str, outdir: str, target: Any) -> Any:
        return _processes.Process(target=_save, args=(filename, outdir, target, self._savefun, self._kwds))


class QueueWriter(Writer):
    """Base of writers with one consumer, which takes the snapshots from a queue in their order.

    Snapshots wait in memory, so that a disk that is slower than the run fills it. After an error the consumer ends; the
    next snapshot raises it. A subclass defines `create_queue` and `create_consumer`; `task(filename, outdir, target)`
    writes one snapshot, None takes that of `create_task`.
    """

    def __init__(self, savefun: Callable[..., None] | None = None, task: Callable[..., None] | None = None):
        self._task = self.create_task(savefun) if task is None else task
        self._queue: Any = None
        self._consumer: Any = None

    def create_task(self, savefun: Callable[..., None] | None) -> Callable[..., None]:
        """What writes one snapshot."""
        return SimpleWriter(savefun)

    def create_queue(self) -> Any:
        """A queue with `put` and `get`."""
        raise NotImplementedError(f"{type(self).__name__} must define create_queue(self)")

    def create_consumer(self, q: Any) -> Any:
        """An object with `start()`, `join()` and `is_alive()` that calls :func:`consume`."""
        raise NotImplementedError(f"{type(self).__name__} must define create_consumer(self, q)")

    def __call__(self, filename: str, outdir: str, target: dict[str, Array]) -> None:
        if self._consumer is None:
            self._queue = self.create_queue()
            self._consumer = self.create_consumer(self._queue)
            self._consumer.start()
        elif not self._consumer.is_alive():
            self.finalize()
        self._queue.put((self._task, filename, outdir, target))

    def finalize(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        self._queue.put(None)
        consumer.join()
        if hasattr(self._queue, "cancel_join_thread"):  # nobody reads what is left, and the program must end
            self._queue.cancel_join_thread()
        _finish(consumer)


def consume(q: Any) -> None:
    """Write what comes from a queue until None comes."""
    while (work := q.get()) is not None:
        task, filename, outdir, target = work
        task(filename, outdir, target)


class ThreadQueueWriter(QueueWriter):
    """One thread writes all snapshots."""

    def create_queue(self) -> Any:
        return queue.Queue()

    def create_consumer(self, q: Any) -> threading.Thread:
        return _Thread(target=consume, args=(q,))


class ProcessQueueWriter(QueueWriter):
    """One process writes all snapshots: the program needs `if __name__ == "__main__":`, `savefun` must be picklable."""

    def create_queue(self) -> Any:
        return _processes.Queue()

    def create_consumer(self, q: Any) -> Any:
        return _processes.Process(target=consume, args=(q,))
