"""The ranks of one communicator by host: those that share memory, and those that meet between hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dbrdist.core.array.types import Module

if TYPE_CHECKING:
    from typing import Any

    from mpi4py.MPI import Comm


class Hosts:
    """The ranks on this rank's host, and its counterparts on the others. Collective.

    Every host takes as many ranks to the exchange between hosts as the smallest host has: its owners. Owner k adds the
    k-th part of what its host has, and exchanges that with the k-th owners of the other hosts. ``most_owners`` is the
    most that a host takes, where there should be fewer.
    """

    def __init__(
        self, mpi_module: Module, mpi_comm: Comm, leaders: Sequence[int], most_owners: int | None = None
    ) -> None:
        """``leaders`` are, for each rank, the lowest rank of its host."""
        place_of_host = leaders[mpi_comm.rank]
        self.ranks: list[int] = [rank for rank, leader in enumerate(leaders) if leader == place_of_host]
        self.place = self.ranks.index(mpi_comm.rank)
        sizes = Counter(leaders).values()
        self.num_owners: int = min(*sizes, most_owners or mpi_comm.size, mpi_comm.size)
        self.is_only_one = len(sizes) == 1
        self.has_one_each = max(sizes) == 1
        self.local: Any = mpi_comm
        self.between: Any = None  # the owners of the same number; None on a rank that is none, and on one host
        if not self.is_only_one:
            self.local = mpi_comm.Split(place_of_host, mpi_comm.rank)
            number = self.place if self.place < self.num_owners else mpi_module.UNDEFINED
            between = mpi_comm.Split(number, mpi_comm.rank)
            self.between = between if between != mpi_module.COMM_NULL else None

    def free(self) -> None:
        """Give back the communicators. Collective."""
        if not self.is_only_one:
            self.local.Free()
        if self.between is not None:
            self.between.Free()


def local_ranks(mpi_module: Module, mpi_comm: Comm) -> Comm:
    """The communicator of the ranks of ``mpi_comm`` on this host, in their order."""
    return mpi_comm.Split_type(mpi_module.COMM_TYPE_SHARED, key=mpi_comm.rank)
