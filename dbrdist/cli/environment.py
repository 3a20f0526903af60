"""What the launcher wrote into the environment, for use before MPI starts."""

from __future__ import annotations

import os

_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


def rank() -> int:
    """This process's rank as the launcher numbers it; 0 where no launcher says anything."""
    return _first(_RANK, 0)


def size() -> int:
    """The number of ranks that the launcher started; 1 where none says anything."""
    return _first(_SIZE, 1)


def _first(names: tuple[str, ...], otherwise: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return otherwise
