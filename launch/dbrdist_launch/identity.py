"""Which rank a process is, as the starters of MPI programs tell it in the environment."""

from __future__ import annotations

import os

from .named import NamedTuple
from .wire import whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# For each backend the names of rank, size, local rank and local size; of several the first that is there.
_NAMES: dict[str, tuple[str, str, str, str]] = {
    "hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK PMIX_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_LOCALID", ""),
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
}


class Identity(NamedTuple):
    """Rank and number of ranks, in the job and on this host (0: the starter does not say how many are here)."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str


def _first(environment: Mapping[str, str], names: str) -> int | None:
    for name in names.split():
        number = whole(environment.get(name))
        if number is not None:
            return number
    return None


def repeated(text: str) -> list[int]:
    """Slurm's short form of counts, 2(x3),1 -> 2 2 2 1; [] for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        first, times, rest = part.partition("(x")
        count, number = whole(first), whole(rest[:-1]) if times and rest.endswith(")") else None if times else 1
        if count is None or number is None or max(count, number) >= 1_000_000:
            return []
        counts += [count] * number
    return counts


def _slurm_local_size(environment: Mapping[str, str]) -> int | None:
    """This node's part of the tasks."""
    counts, node = repeated(environment.get("SLURM_STEP_TASKS_PER_NODE", "")), whole(environment.get("SLURM_NODEID"))
    return counts[node] if node is not None and node < len(counts) else None


def of_environment(backend: str, environment: Mapping[str, str] = os.environ) -> Identity | None:
    """Read rank and sizes as this backend tells them; None where it did not start this process.

    `backend` is a name of the table above, or the four names themselves, separated by commas.
    Only its own variables count: others may be left from a shell inside another job.
    """
    ranks, sizes, local_ranks, local_sizes = _NAMES[backend] if backend in _NAMES else backend.split(",")
    rank, size = _first(environment, ranks), _first(environment, sizes)
    if rank is None or size is None:
        return None
    local_size = _first(environment, local_sizes) or _slurm_local_size(environment)
    return Identity(rank, size, _first(environment, local_ranks) or 0, local_size or 0, os.uname().nodename)
