"""The cores of a host, shared by its ranks: how many threads oneDNN and BLAS use in each."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from dbrdist_launch.cores import available_cores

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.transport import environment
from dbrdist.core.array import thread_pools


class Seat(NamedTuple):
    """Where a rank runs."""

    host: int
    cores: frozenset[int]  # of its affinity mask
    quota: int | None  # cores that a control group grants to all ranks of the host together; None for no limit
    num_launched: int  # ranks on the host as the launcher says; a communicator may have fewer


def share_out(comm: CommunicatorBase) -> None:
    """Limit the threads of this rank to its share of the host's cores, and let rank 0 say so. Collective."""
    seats: list[Seat] = comm.allgather_obj(seat_on(comm.inter_rank))
    own, share = seats[comm.rank], shares(seats)[comm.rank]
    if share > 1:
        thread_pools.wait_briefly()
    is_alone = len(seats) == 1 and share == len(own.cores)
    if not is_alone and thread_pools.limit(share) and comm.rank == 0:
        print(f"dbrdist: {description(seats)}", file=sys.stderr, flush=True)


def seat_on(host: int) -> Seat:
    """The seat of this process, on the host of that number."""
    cores, num_usable = thread_pools.affinity(), available_cores()
    return Seat(host, cores, num_usable if num_usable < len(cores) else None, environment.num_local_ranks())


def shares(seats: Sequence[Seat]) -> list[int]:
    """The number of threads of each rank; at least 1."""
    return [max(1, int(part)) for part in _parts(seats)]


def are_enough(seats: Sequence[Seat]) -> bool:
    """Whether every rank has a core of its own."""
    return all(part >= 1 for part in _parts(seats))


def _parts(seats: Sequence[Seat]) -> list[Fraction]:
    """The cores of each rank: one that k ranks may use counts 1/k."""
    num_ranks = ranks_by_host(seats)
    known = Counter(seat.host for seat in seats)
    users = Counter((seat.host, core) for seat in seats for core in seat.cores)
    result = []
    for seat in seats:
        unknown = num_ranks[seat.host] - known[seat.host]  # ranks that may use any core
        part = sum((Fraction(1, users[seat.host, core] + unknown) for core in seat.cores), Fraction(0))
        if seat.quota is not None:
            part = min(part, Fraction(seat.quota, num_ranks[seat.host]))
        result.append(part)
    return result


def ranks_by_host(seats: Sequence[Seat]) -> Counter[int]:
    """How many ranks each host has."""
    return Counter(seat.host for seat in seats) | Counter({seat.host: seat.num_launched for seat in seats})


def description(seats: Sequence[Seat]) -> str:
    """For example "threads: 1 per rank (2 cores, 2 ranks on this host)", this host being that of rank 0."""
    numbers = shares(seats)
    low, high = min(numbers), max(numbers)
    here = [seat for seat in seats if seat.host == seats[0].host]
    quotas = [seat.quota for seat in here if seat.quota is not None]
    num_cores = min([len({core for seat in here for core in seat.cores}), *quotas])
    num_ranks = ranks_by_host(seats)[seats[0].host]
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return f"threads: {low if low == high else f'{low} to {high}'} per rank ({cores}, {ranks} on this host)"
