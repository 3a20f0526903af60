"""From a name to a communicator."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from typing import Any

from dbrdist.comm import abort, cores, environment, mpi, processes, shared_memory, threads
from dbrdist.comm.communicator import CommunicatorBase

Maker = Callable[[Any, dict[str, Any]], CommunicatorBase]


def _of_this_thread(mpi_comm: Any, settings: dict[str, Any]) -> CommunicatorBase:
    """The communicator of the rank that this thread is."""
    comm = threads.current()
    if comm is None:
        raise ValueError("the communicator 'threads' expected to be made inside dbrdist.comm.run_threads(n, function)")
    for name, value in settings.items():
        comm.set_config(name, value)
    return comm


def _alone(mpi_comm: Any, settings: dict[str, Any]) -> CommunicatorBase:
    """One rank, without MPI."""
    comm = threads.ThreadCommunicator()
    for name, value in settings.items():
        comm.set_config(name, value)
    return comm


def _over_mpi(kind: type[processes.MpiCommunicator]) -> Maker:
    def make(mpi_comm: Any, settings: dict[str, Any]) -> CommunicatorBase:
        comm = kind(mpi_comm, settings)
        abort.guard_library_use(comm)
        return comm

    return make


PROVIDERS: dict[str, Maker] = {
    "naive": _over_mpi(processes.NaiveCommunicator),
    "flat": _over_mpi(shared_memory.FlatCommunicator),
    "threads": _of_this_thread,
    "single": _alone,
}
# Names of ChainerMN whose purpose another provider serves here.
_SUCCESSORS = dict.fromkeys(["hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "pure_nccl"], "flat")


def create_communicator(communicator_name: str | None = None, mpi_comm: Any = None, **kwargs: Any) -> CommunicatorBase:
    """The communicator of this process (or thread), and from now on abort on failure.

    Args:
        communicator_name: ``'naive'`` (MPI, one reduction for each parameter), ``'flat'`` (MPI, one reduction over flat
            memory), ``'threads'`` (inside :func:`run_threads`), ``'single'`` (one rank, no MPI). None takes what fits,
            and rank 0 says on stderr what that is: threads inside ``run_threads``, flat where a launcher started this
            process, MPI runs already, or ``mpi_comm`` is given, single otherwise.
        mpi_comm: an mpi4py communicator; None is all ranks.
        **kwargs: configuration, as for :meth:`CommunicatorBase.set_config`.

    Ranks on one host share its cores: each lets oneDNN and BLAS use its part of them, unless OMP_NUM_THREADS is set,
    and rank 0 says so on stderr (``comm/cores.py``). With MPI and more than one rank, an uncaught exception on any rank
    ends the whole job (``comm/abort.py``).

    Raises:
        ValueError: for an unknown name or configuration, with the nearest known one.
        CommunicatorError: if the environment says that several ranks were started, but MPI's world has one.
    """
    name = communicator_name or _what_fits(mpi_comm)
    if name not in PROVIDERS:
        raise ValueError(_unknown(name))
    if mpi_comm is not None and name not in ("naive", "flat"):
        raise ValueError(f"the communicator {name!r} does not use MPI, so it expected no mpi_comm")
    comm = PROVIDERS[name](mpi_comm, kwargs)
    if communicator_name is None and comm.rank == 0:
        ranks = "1 rank" if comm.size == 1 else f"{comm.size} ranks"
        print(f"dbrdist: communicator {name!r}, {ranks}", file=sys.stderr, flush=True)
    if name != "threads":  # ranks that are threads have one process's threads together
        cores.share_out(comm)
    return comm


def _what_fits(mpi_comm: Any) -> str:
    if mpi_comm is not None:
        return "flat"
    if threads.current() is not None:
        return "threads"
    return "flat" if environment.is_launched() or mpi.started() is not None else "single"


def _unknown(name: str) -> str:
    known = ", ".join(PROVIDERS)
    if name in _SUCCESSORS:
        return (
            f"the communicator {name!r} is not part of dbrdist; {_SUCCESSORS[name]!r} serves instead (known: {known})"
        )
    close = difflib.get_close_matches(str(name), PROVIDERS, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown communicator {name!r}, known are {known}{hint}"
