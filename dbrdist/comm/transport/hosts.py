"""The ranks of one communicator by host: those that share memory, and those that meet between hosts."""

from __future__ import annotations

from typing import Any


class Hosts:
    """The ranks on this rank's host, and its counterparts on the others. Collective.

    Every host takes as many ranks to the exchange between hosts as the smallest host has: its owners. Owner k adds the
    k-th part of what its host has, and exchanges that with the k-th owners of the other hosts. ``most_owners`` is the
    most that a host takes, where there should be fewer.
    """

    def __init__(self, mpi_module: Any, mpi_comm: Any, most_owners: int | None = None) -> None:
        self.local: Any = local_ranks(mpi_module, mpi_comm)
        self.ranks: list[int] = self.local.allgather(mpi_comm.rank)  # of this host, in order
        self.place = self.ranks.index(mpi_comm.rank)
        self.num_owners: int = mpi_comm.allreduce(min(len(self.ranks), most_owners or mpi_comm.size), mpi_module.MIN)
        self.between: Any = None  # the owners of the same number; None on a rank that is none, and on a single host
        most: int = mpi_comm.allreduce(len(self.ranks), mpi_module.MAX)
        self.is_only_one = most == mpi_comm.size
        self.has_one_each = most == 1
        if not self.is_only_one:
            number = self.place if self.place < self.num_owners else mpi_module.UNDEFINED
            between = mpi_comm.Split(number, mpi_comm.rank)
            self.between = between if between != mpi_module.COMM_NULL else None

    def free(self) -> None:
        """Give back the communicators. Collective."""
        self.local.Free()
        if self.between is not None:
            self.between.Free()


def local_ranks(mpi_module: Any, mpi_comm: Any) -> Any:
    """The communicator of the ranks of ``mpi_comm`` on this host, in their order."""
    return mpi_comm.Split_type(mpi_module.COMM_TYPE_SHARED, key=mpi_comm.rank)
