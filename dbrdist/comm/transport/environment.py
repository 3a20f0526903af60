"""What the launcher's environment says about this process, before MPI is started."""

from __future__ import annotations

import os
from collections.abc import Mapping

# (number of ranks, this rank) as set by hydra and its relatives, Open MPI, MVAPICH and srun. Slurm sets NTASKS in a
# batch script too, where there is one process; only a step counts.
_VARIABLES = (
    ("PMI_SIZE", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)

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
