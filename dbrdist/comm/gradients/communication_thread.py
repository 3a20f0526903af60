"""A thread that reduces gradients over a communicator of its own while the rank computes.

MPI's nonblocking collectives make progress only inside MPI: someone has to look. The thread looks and sleeps in turn,
so that a rank with one core loses little of it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase

PAUSE_SECONDS = 5e-5  # between two looks, at least


class Courier:
    """Does jobs in the order in which they were put.

    Args:
        comm: the communicator, which nobody else uses; jobs get it as their argument.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        self.comm = comm
        self._jobs: queue.SimpleQueue[Callable[[CommunicatorBase], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[CommunicatorBase], None]) -> None:
        """Have ``job(comm)`` called, some time before :meth:`wait` returns."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dbrdist courier", daemon=True)
            self._thread.start()
        with self._changed:
            self._num_left += 1
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when all is done; raise what a job raised, after which the rest was left out."""
        resting, me = self.comm.gate.record.resting, threading.get_ident()
        with self._changed:
            resting.add(me)
            try:
                while self._num_left:
                    self._changed.wait(0.1)  # signal handlers run in between
            finally:
                resting.discard(me)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()

    def _work(self) -> None:
        resting, me = self.comm.gate.record.resting, threading.get_ident()
        while True:
            resting.add(me)  # what is idle does not keep other ranks waiting
            job = self._jobs.get()
            resting.discard(me)
            if job is None:
                return
            try:
                if self._error is None:
                    job(self.comm)
            except BaseException as e:
                self._error = e
            del job  # with the plan and the model, which may end before the next one comes
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
