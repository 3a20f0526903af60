"""Worker processes that read batches: each with a pipe of its own, and never the cause of a hang.

There is no shared queue or lock that a killed worker could leave locked. Batch k goes to worker k modulo their number,
which answers in the order of its requests; a dead worker's pipe ends, and with it the wait. A worker ends when its pipe
does: at ``close``, and when the parent ends in whatever way.

Workers are new interpreters (what multiprocessing calls spawn), started by hand for two reasons: their environment is
free of the variables of an MPI launcher, with which MPI would take them for ranks and end the job; and a session of
their own keeps away the signals to the job's processes, which concern the parent alone.

Pipes carry requests, answers and small batches; the arrays of large ones are in shared memory (``rings.py``), as long
as there is a free slot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.process import current_process
from typing import Any, NamedTuple

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.backend import Array
from dbrdist.datasets.loading import rings
from dbrdist.datasets.loading.serial import read_step
from dbrdist.errors import LoaderError

_OUT_OF_BAND_BYTES = 1 << 14  # smaller buffers are sent inside the pickle
_END_SECONDS = 2.0  # how long a worker may take to end by itself
_LAUNCHER_VARIABLES = (
    "PMI_",
    "PMIX_",
    "PMI2_",
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_",
    "I_MPI_",
    "MV2_COMM_",
    "SLURM_STEP_",
    "SLURM_PROCID",
)
# One thread each: examples are spread over processes, and the rank needs its cores.
_THREADS = dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"], "1")
# A signal to everything in the job concerns the parent: it may want to finish its step and save, with our batches.
# The parent's sys.path and main module come before our own, so that what they define can be unpickled.
_START = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"):
    number = getattr(signal, name)
    signal.signal(number, signal.SIG_IGN)
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
pipe, slots = Connection(int(sys.argv[1])), [int(fd) for fd in sys.argv[2:]]
try:
    preparation = pipe.recv()
except (EOFError, OSError):  # the rank has ended meanwhile
    sys.exit()
process.current_process()._inheriting = True
spawn.prepare(preparation)
del process.current_process()._inheriting
from dbrdist.datasets.loading.workers import serve
serve(pipe, slots)
"""


class Ticket(NamedTuple):
    """A batch that was asked for, and the worker that makes it."""

    worker: Worker
    number: int
    slot: int | None


class Worker:
    """One process and the pipe to it, seen from the parent."""

    def __init__(self, dataset_bytes: bytes, ring: rings.Ring) -> None:
        self._ring = ring
        self.pipe, there = multiprocessing.Pipe()
        fds = (there.fileno(), *ring.fds)
        self.process = subprocess.Popen(
            [*_python(), "-c", _START, *map(str, fds)],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env={k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_VARIABLES)} | _THREADS,
            start_new_session=True,
        )
        there.close()  # so that the pipe ends with the worker
        self.num_asked = 0
        self.num_answered = 0
        with contextlib.suppress(OSError):  # a worker that is dead already is reported where its answer is awaited
            self.pipe.send(_preparation())
            self.pipe.send_bytes(dataset_bytes)

    def ask(self, request: tuple[object, ...]) -> Ticket:
        self.num_asked += 1
        slot = self._ring.take()
        with contextlib.suppress(OSError):
            self.pipe.send((*request, slot))
        return Ticket(self, self.num_asked, slot)

    def wait(self, timeout: float | None) -> bool:
        """True once there is an answer, or the worker is dead; False after ``timeout`` seconds."""
        return bool(multiprocessing.connection.wait([self.pipe], timeout))

    def answer(self, slot: int | None) -> Any:
        """Receive the answer to a request with ``slot``: what the worker made, or its exception, raised here."""
        try:
            kind, data, sizes, is_stored, why_not = self.pipe.recv()
            buffers = [] if is_stored else [_read(self.pipe.fileno(), size) for size in sizes]
        except (EOFError, OSError) as e:
            raise self.death() from e
        self.num_answered += 1
        if slot is not None and is_stored:
            buffers = self._ring.lend(slot, sizes)
        elif slot is not None:
            self._ring.give_back(slot)
        if why_not is not None:
            self._ring.fail(why_not)
        result = pickle.loads(data, buffers=buffers)
        if kind == "error":
            error, text = result
            error.add_note(f"This happened in a loader process, at:\n{text}")
            raise error
        return result

    def death(self) -> LoaderError:
        """The error that tells how this worker ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        code = self.process.returncode
        if code is None:
            how = "closed its pipe without ending"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -9 else "")
        else:
            how = f"ended with exit code {code}"
        hint = ""
        if self.num_answered == 0 and code == 1:
            hint = '; its own message stands above; a script needs `if __name__ == "__main__":` around its main part'
        return LoaderError(
            f"expected a batch from loader process {self.process.pid}, but it {how} "
            f"after {self.num_answered} batches{hint}"
        )

    def stop(self) -> None:
        """Let the worker end once it has answered everything that was asked."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)


def _python() -> list[str]:
    """What starts a new interpreter; our tests put one in its place that has imported everything."""
    return [sys.executable]


def _preparation() -> dict[str, Any]:
    """What a new interpreter must know before it can unpickle what ours pickled."""
    data = spawn.get_preparation_data("dbrdist-loader")
    data["authkey"] = bytes(data["authkey"])
    main = data.get("init_main_from_path")
    if main is not None and not os.path.exists(main):  # a script from standard input: <stdin>
        del data["init_main_from_path"]
    return data


class WorkerPool:
    """``n_processes`` workers for one dataset, and ``num_slots`` for their batches; the module has its promises."""

    def __init__(self, dataset: Any, n_processes: int, max_tasks: int | None, num_slots: int) -> None:
        if getattr(current_process(), "_inheriting", False):  # this is a worker that imports the main module
            raise RuntimeError(
                "a loader process imports the main script again, and its main part must not run there; "
                'put it under `if __name__ == "__main__":`'
            )
        try:
            self._dataset_bytes = pickle.dumps(dataset, protocol=5)
        except Exception as e:  # pickle passes on whatever the object's own methods raise
            raise TypeError(
                "expected a dataset that can be pickled for loader processes, "
                f"but {type(dataset).__name__} cannot: {e}; use functions and classes of modules, or threads"
            ) from e
        self._max_tasks = max_tasks
        self._ring = rings.Ring(num_slots)
        self._retired: list[Worker] = []
        self._workers: list[Worker] = []
        self._end = weakref.finalize(self, _end_workers, self._workers, self._retired)
        self._workers += [Worker(self._dataset_bytes, self._ring) for _ in range(n_processes)]
        self._next = 0

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [w.process.pid for w in self._workers]

    def submit(self, request: tuple[object, ...]) -> Ticket:
        """Ask the next worker for a batch."""
        k = self._next
        self._next = (k + 1) % len(self._workers)
        worker = self._workers[k]
        if self._max_tasks is not None and worker.num_asked >= self._max_tasks:
            worker.stop()
            self._retired.append(worker)
            worker = self._workers[k] = Worker(self._dataset_bytes, self._ring)
        return worker.ask(request)

    def collect(self, ticket: Ticket, timeout: float | None, warning: type[Warning]) -> Any:
        """Wait for a batch; tickets are collected in the order in which they were submitted."""
        worker = ticket.worker
        if not worker.wait(timeout):
            warnings.warn(
                f"no batch from loader process {worker.process.pid} for {timeout} seconds; still waiting",
                warning,
                stacklevel=4,
            )
            worker.wait(None)
        try:
            return worker.answer(ticket.slot)
        finally:
            if worker in self._retired and worker.num_answered == worker.num_asked:
                self._retired.remove(worker)
                _end_workers([worker], [])

    def close(self) -> None:
        """End all workers."""
        self._end()


def _end_workers(workers: list[Worker], retired: list[Worker]) -> None:
    everyone = workers + retired
    for w in everyone:
        w.pipe.close()
    for w in everyone:
        try:
            w.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            w.process.kill()
            w.process.wait()
    workers.clear()
    retired.clear()


# ---- in the worker --------------------------------------------------------------------------------------------------


def serve(pipe: Any, slots: list[int]) -> None:
    """The worker's main function: answer requests until the pipe ends. ``slots`` are the open files of the ring."""
    for fd in (pipe.fileno(), *slots):
        os.set_inheritable(fd, False)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        dataset_bytes = _received(pipe.recv_bytes)
        try:
            dataset = pickle.loads(dataset_bytes)
        except Exception as e:  # told at the first batch, where somebody waits
            dataset = e
        del dataset_bytes
        while (request := _received(pipe.recv)) is not None:
            _answer(pipe, slots, dataset, request)


def _received(receive: Callable[[], Any]) -> Any:
    """A message; EOFError also where the rank has ended in the midst of it."""
    try:
        return receive()
    except OSError as error:
        raise EOFError from error


def _answer(pipe: Any, slots: list[int], dataset: Any, request: Any) -> None:
    own, seed, whole, slot = request
    try:
        if isinstance(dataset, Exception):
            raise dataset
        kind, (data, buffers) = "batch", _pickle(read_step(dataset, own, seed, whole))
    except Exception as e:  # whatever the dataset raises goes to the one who waits for the batch
        kind, (data, buffers) = "error", _pickle((_portable(e), traceback.format_exc()))
    views = [b.raw() for b in buffers]
    sizes = [v.nbytes for v in views]
    fits_slot = slot is not None and sum(sizes) >= rings.FROM_BYTES
    why_not = rings.store(slots[slot], views) if fits_slot else None
    is_stored = fits_slot and why_not is None
    pipe.send((kind, data, sizes, is_stored, why_not))
    if not is_stored:
        for v in views:
            _write(pipe.fileno(), v)


def _pickle(obj: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _OUT_OF_BAND_BYTES:
            return True
        buffers.append(buffer)
        return False

    return pickle.dumps(obj, protocol=5, buffer_callback=keep_inside), buffers


def _portable(error: Exception) -> Exception:
    """The exception itself where it survives pickling, else a LoaderError with its text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # exceptions with arguments of their own often cannot be rebuilt
        pass
    return LoaderError(f"{type(error).__name__}: {error}")


# ---- bytes through a pipe: one copy at each side --------------------------------------------------------------------


def _write(fd: int, view: memoryview) -> None:
    while view.nbytes:
        view = view[os.write(fd, view) :]


def _read(fd: int, size: int) -> Array:
    found = backend.empty((size,), np.uint8)
    view = memoryview(found)
    while view.nbytes:
        count = os.readv(fd, [view])
        if count == 0:
            raise EOFError
        view = view[count:]
    return found
