"""The cores of a host, shared by its ranks: how many threads oneDNN and BLAS use in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from dbrdist_launch.cores import available_cores

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.transport import environment
from dbrdist.core.array import thread_pools
from dbrdist.core.files.standard_streams import stderr


class Seat(NamedTuple):
    """Where a rank runs."""

    host: int
    cores: frozenset[int]  # of its affinity mask
    quota: int | None  # cores that a control group grants to all ranks of the host together; None for no limit
    num_launched: int  # ranks on the host as the launcher says; a communicator may have fewer


def share_out(comm: CommunicatorBase) -> None:
    """Limit the threads of this rank to its share of the host's cores, and let rank 0 say so. Collective."""
    seats: Sequence[Seat] = comm.ranks.seats or [seat_on(0)]
    own = seats[comm.intra_rank if comm.ranks.seats else 0]
    share = _whole(part_of(own, seats))
    everyones = comm.gate.allgather_rows(np.array([share], np.int64))
    if share > 1:
        thread_pools.wait_briefly()
    is_alone = comm.size == 1 and share == len(own.cores)
    if not is_alone and thread_pools.limit(share) and comm.rank == 0:
        print(f"dbrdist: {description(seats, everyones.min(), everyones.max())}", file=stderr)


def seat_on(host: int) -> Seat:
    """The seat of this process, on the host of that number."""
    cores, num_usable = thread_pools.affinity(), available_cores()
    return Seat(host, cores, num_usable if num_usable < len(cores) else None, environment.num_local_ranks())


def shares(seats: Sequence[Seat]) -> list[int]:
    """The number of threads of each rank; at least 1."""
    return [_whole(part_of(seat, seats)) for seat in seats]


def _whole(part: Fraction) -> int:
    return max(1, int(part))


def are_enough(seats: Sequence[Seat]) -> bool:
    """Whether every rank has a core of its own."""
    return all(part_of(seat, seats) >= 1 for seat in seats)


def part_of(seat: Seat, seats: Sequence[Seat]) -> Fraction:
    """The cores of one rank: one that k ranks may use counts 1/k. Other hosts' seats make no difference."""
    here = [other for other in seats if other.host == seat.host]
    num_ranks = ranks_by_host(here)[seat.host]
    unknown = num_ranks - len(here)  # ranks that may use any core
    users = Counter(core for other in here for core in other.cores)
    num_cores = Counter(users[core] for core in seat.cores)  # by the number of users
    part = sum((Fraction(count, num_users + unknown) for num_users, count in num_cores.items()), Fraction(0))
    return part if seat.quota is None else min(part, Fraction(seat.quota, num_ranks))


def ranks_by_host(seats: Sequence[Seat]) -> Counter[int]:
    """How many ranks each host has."""
    return Counter(seat.host for seat in seats) | Counter({seat.host: seat.num_launched for seat in seats})


def description(seats: Sequence[Seat], low: int | None = None, high: int | None = None) -> str:
    """For example "threads: 1 per rank (2 cores, 2 ranks on this host)", this host being that of rank 0.

    ``low`` and ``high`` are the least and most threads of a rank, where there are other ranks than in ``seats``.
    """
    if low is None or high is None:
        numbers = shares(seats)
        low, high = min(numbers), max(numbers)
    here = [seat for seat in seats if seat.host == seats[0].host]
    quotas = [seat.quota for seat in here if seat.quota is not None]
    num_cores = min([len({core for seat in here for core in seat.cores}), *quotas])
    num_ranks = ranks_by_host(seats)[seats[0].host]
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return f"threads: {low if low == high else f'{low} to {high}'} per rank ({cores}, {ranks} on this host)"
