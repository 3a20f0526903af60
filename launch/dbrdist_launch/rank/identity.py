"""Which rank a process is, as the MPI starters tell it in the environment."""

import os
from collections.abc import Mapping
from typing import NamedTuple

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


class Identity(NamedTuple):
    """Rank and number of ranks, in the job and on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def _slurm_local_size(environment: Mapping[str, str]) -> int | None:
    """This node's part of SLURM_STEP_TASKS_PER_NODE, such as 2(x3),1."""
    text, node = environment.get("SLURM_STEP_TASKS_PER_NODE", ""), environment.get("SLURM_NODEID", "")
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        if not count.isdigit():
            return None
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def of_environment(environment: Mapping[str, str] = os.environ) -> Identity | None:
    """Read rank and sizes; None where no starter of MPI programs set them."""
    rank, size = _first(environment, _RANK), _first(environment, _SIZE)
    if rank is None or size is None:
        return None
    local_rank = _first(environment, _LOCAL_RANK)
    local_size = _first(environment, _LOCAL_SIZE) or _slurm_local_size(environment)
    host = os.uname().nodename
    return Identity(rank, size, local_rank if local_rank is not None else 0, local_size or 1, host)
