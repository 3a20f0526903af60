"""What the launcher's environment says about this process, before MPI is started."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping

# (number of ranks, this rank) as set by hydra and its relatives, Open MPI, MVAPICH and srun. Slurm sets NTASKS in a
# batch script too, where there is one process; only a step counts.
_VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)

# What names the place of a process in its job, for launchers without a descriptor of their own for each rank.
_PLACES = ("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
_MARK = "DBRDIST_RANK_PROCESS"  # set by a rank, for the processes that it starts

# Ranks on this host, as set by hydra, Open MPI and MVAPICH.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def launched(environ: Mapping[str, str] = os.environ) -> tuple[int, int, str]:
    """(number of ranks, this rank, the variable that said so); (1, 0, '') where no launcher left a word."""
    for size_name, rank_name in _VARIABLES:
        if size_name == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environ:
            continue
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "0")
        if size.isdigit():
            return int(size), int(rank) if rank.isdigit() else 0, size_name
    return 1, 0, ""


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher of MPI programs started this process, also with one rank."""
    return launched(environ)[2] != ""


def num_local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks the launcher started on this host; 1 where it does not say."""
    return max([1, *(int(environ[name]) for name in _LOCAL_SIZES if environ.get(name, "").isdigit())])


def prefix(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """What stands in front of each line of a rank; nothing where dbrdist-launch puts it."""
    return "" if environ.get("DBRDIST_LAUNCH") else f"[rank {rank}] "


def refusal(world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Why a world of one rank is wrong here, or an empty text."""
    size, _, name = launched(environ)
    if world_size > 1 or size <= 1:
        return ""
    return (
        f"{name}={size} says that {size} ranks were started, but MPI's world has one: the launcher does not match "
        "the MPI library that mpi4py loaded, and every process would train alone. Use the mpiexec of that library "
        "(next to the Python interpreter if MPI is a wheel; under Slurm: srun --mpi=pmi2 for MPICH, --mpi=pmix for "
        "Open MPI); `python -m mpi4py --mpi-lib-version` says which library it is"
    )


def launcher_socket(environ: Mapping[str, str] = os.environ) -> int | None:
    """The descriptor of this rank's line to hydra; None where the launcher is another.

    0 in a helper that a rank has started: it inherits the variables, but not the line, and is no rank.
    """
    word = environ.get("PMI_FD", "")
    if not word.isdigit():
        return None
    try:
        return int(word) if stat.S_ISSOCK(os.fstat(int(word)).st_mode) else 0
    except OSError:
        return 0


def mark_as_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that this one starts know that they are no ranks, though they inherit a rank's variables."""
    if is_launched(environ):
        environ[_MARK] = f"{os.getpid()} {_place(environ)}"


def is_helper(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a process that a rank has started: MPI would wait in it for ever, or end it."""
    if launcher_socket(environ) == 0:
        return True
    pid, _, place = environ.get(_MARK, "").partition(" ")
    return pid.isdigit() and int(pid) != os.getpid() and place == _place(environ)


def _place(environ: Mapping[str, str]) -> str:
    """The place of a rank in its job. A job that a rank has started by a launcher of its own has others."""
    socket = launcher_socket(environ)
    if socket:
        return f"socket {os.fstat(socket).st_ino}"
    return " ".join(environ.get(name, "-") for name in _PLACES)


HELPER_REFUSAL = (
    "this process was started by a rank of the job and is not a rank itself, so it cannot use MPI; create 'single' "
    "(or 'auto') for a communicator of this process alone, or start helpers that are ranks with mpiexec"
)
