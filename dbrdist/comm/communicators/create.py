"""Creates communicators by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

from dbrdist.comm.communicators import cores, messages, mpi_communicator, nccl, shared_memory, threads, two_levels
from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.failure import abort
from dbrdist.comm.transport import environment, mpi
from dbrdist.core.files.standard_streams import stderr
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from typing import TypeAlias

    from mpi4py.MPI import Comm

    from dbrdist.comm.protocol.settings import ConfigValue

Maker: TypeAlias = "Callable[[Comm | None, dict[str, ConfigValue]], CommunicatorBase]"


def _of_this_thread(mpi_comm: Comm | None, settings: dict[str, ConfigValue]) -> CommunicatorBase:
    """The communicator of the rank that this thread is."""
    comm = threads.current()
    if comm is None:
        raise ValueError("the communicator 'threads' must be created inside dbrdist.comm.run_threads(n, function)")
    for name, value in settings.items():
        comm.set_config(name, value)
    return comm


def _alone(mpi_comm: Comm | None, settings: dict[str, ConfigValue]) -> CommunicatorBase:
    """One rank, without MPI."""
    comm = threads.ThreadCommunicator()
    for name, value in settings.items():
        comm.set_config(name, value)
    return comm


def _over_mpi(kind: type[mpi_communicator.MpiCommunicator]) -> Maker:
    def make(mpi_comm: Comm | None, settings: dict[str, ConfigValue]) -> CommunicatorBase:
        comm = kind(mpi_comm, settings)
        abort.guard_library_use(comm)
        return comm

    return make


OVER_MPI: dict[str, type[mpi_communicator.MpiCommunicator]] = {
    "naive": messages.NaiveCommunicator,
    "flat": shared_memory.FlatCommunicator,
    "hierarchical": two_levels.HierarchicalCommunicator,
    "two_dimensional": two_levels.TwoDimensionalCommunicator,
    "single_node": shared_memory.SingleNodeCommunicator,
    "non_cuda_aware": two_levels.NonCudaAwareCommunicator,
    "pure_nccl": nccl.NcclCommunicator,
    "dummy": messages.DummyCommunicator,
}
PROVIDERS: dict[str, Maker] = {
    **{name: _over_mpi(kind) for name, kind in OVER_MPI.items()},
    "threads": _of_this_thread,
    "single": _alone,
}
_AUTO = _over_mpi(nccl.AutoCommunicator)
NAMES = ("auto", *PROVIDERS)
# what a run can train with: over MPI, and gradients are averaged
FOR_TRAINING = tuple(name for name, kind in OVER_MPI.items() if not kind.reducer_type.leaves_gradients)


def create_communicator(
    communicator_name: str | None = "auto", mpi_comm: Comm | None = None, **kwargs: ConfigValue
) -> CommunicatorBase:
    """The communicator of this process (or thread), and from now on abort on failure.

    Args:
        communicator_name: ``'auto'`` (or None) picks one, and rank 0 says on stderr which one and why: of several ranks
            ``'pure_nccl'`` where each has a GPU of its own, else ``'flat'``. By name: ``'naive'``, ``'flat'``,
            ``'hierarchical'``, ``'two_dimensional'``, ``'single_node'``, ``'non_cuda_aware'``, ``'pure_nccl'``,
            ``'dummy'`` (MPI processes, which add gradients in different ways: see docs/communicators.md),
            ``'threads'`` (inside :func:`run_threads`), ``'single'`` (one rank, no MPI).
        mpi_comm: an mpi4py communicator; None is all ranks.
        **kwargs: configuration, as for :meth:`CommunicatorBase.set_config`.

    Ranks on one host share its cores: each lets oneDNN and BLAS use its part of them, unless OMP_NUM_THREADS is set,
    and rank 0 says so on stderr (``cores.py``). With MPI and more than one rank, an uncaught exception on any rank
    ends the whole job (``comm/failure/abort.py``).

    Raises:
        ValueError: for an unknown name or configuration, with the closest known one. If one rank of an MPI program
            passes it, on every rank.
        CommunicatorError: if the ranks give different names; if the environment says that several ranks were started,
            but MPI's world has one.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> comm.rank, comm.size
        (0, 1)
    """
    return create(communicator_name, mpi_comm, kwargs)


def create(
    communicator_name: str | None, mpi_comm: Comm | None, kwargs: dict[str, ConfigValue], may_use_gpus: bool = True
) -> CommunicatorBase:
    """As :func:`create_communicator`; ``may_use_gpus=False`` where arrays are known to be in host memory."""
    is_auto = communicator_name in (None, "auto")
    name, reason = _what_fits(mpi_comm) if is_auto else (communicator_name, "")
    if name not in PROVIDERS:
        raise _told_to_all(ValueError(_unknown(name)), mpi_comm)
    if mpi_comm is not None and name not in OVER_MPI:
        raise ValueError(f"the communicator {name!r} does not use MPI, so it expected no mpi_comm")
    make = _AUTO if is_auto and name == "flat" and may_use_gpus else PROVIDERS[name]
    comm = make(mpi_comm, kwargs)
    if is_auto and comm.rank == 0:
        print(f"dbrdist: {_description(name_of(comm), reason, comm)}", file=stderr)
    if name != "threads":  # ranks that are threads have one process's threads together
        cores.share_out(comm)
    return comm


def name_of(comm: CommunicatorBase) -> str:
    """The name by which :func:`create_communicator` makes such a communicator, or that of its class."""
    if isinstance(comm, threads.ThreadCommunicator):
        return "single" if threads.current() is None else "threads"
    return next((name for name, kind in OVER_MPI.items() if type(comm) is kind), type(comm).__name__)


def _what_fits(mpi_comm: Comm | None) -> tuple[str, str]:
    """(the name of the communicator that fits, why)."""
    if mpi_comm is None and threads.current() is not None:
        return "threads", "inside run_threads"
    if mpi_comm is not None or mpi.started() is not None:
        return "flat", ""
    if environment.is_launched():
        is_helper = environment.is_helper() and not mpi.is_forked()
        return ("single", "started by a rank of the job, and not a rank itself") if is_helper else ("flat", "")
    return "single", "no launcher started this process"


def _description(name: str, reason: str, comm: CommunicatorBase) -> str:
    """For example "communicator 'flat', 4 ranks (one host: gradients are added in memory that its ranks share)"."""
    ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
    if name == "flat" and comm.size > 1:
        is_shared = comm.get_config("shared_memory") is not False
        shares = "gradients are added in memory that its ranks share" if is_shared else "gradients are sent as messages"
        reason = f"one host: {shares}" if comm.inter_size == 1 else f"{comm.inter_size} hosts: within each, {shares}"
    reason = "; ".join(filter(None, (reason, getattr(comm, "why", ""))))
    return f"communicator {name!r}, {ranks}" + (f" ({reason})" if reason else "")


def _told_to_all(error: Exception, mpi_comm: Comm | None) -> Exception:
    """``error``, after the other ranks of an MPI program, which wait to make a communicator, have raised it too."""
    is_rank = environment.is_launched() and not environment.is_helper()
    if mpi_comm is not None or (threads.current() is None and is_rank):
        try:
            messages.NaiveCommunicator(mpi_comm, {}, error)
        except (ImportError, CommunicatorError):  # there is no MPI that could tell them
            return error
        except Exception as shared:
            return shared
    return error


def _unknown(name: object) -> str:
    close = difflib.get_close_matches(str(name), NAMES, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown communicator {name!r}, known are {', '.join(NAMES)}{hint}"
