"""Ranks on one host share its cores: the number of threads of each, computed and in real processes."""

from __future__ import annotations

import ast
import os
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.comm.communicators import cores, create
from dbrdist.comm.communicators.cores import Seat, are_enough, description, shares
from tests.comm import jobs

NUM_CORES = len(os.sched_getaffinity(0))
UNSET = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"), None)


def seat(cores, host=0, quota=None, num_launched=1):
    return Seat(host, frozenset(cores), quota, num_launched)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        ([seat(range(2))], [2]),
        ([seat(range(2))] * 2, [1, 1]),
        ([seat(range(2))] * 3, [1, 1, 1]),  # more ranks than cores: at least one thread each
        ([seat(range(6))] * 6, [1] * 6),
        ([seat(range(7))] * 3, [2, 2, 2]),
        ([seat(range(64))] * 7, [9] * 7),
        ([seat([0]), seat([1]), seat([2]), seat([3])], [1] * 4),  # bound to a core each
        ([seat(range(16)), seat(range(16, 32))] * 2, [8] * 4),  # bound to sockets
        ([seat(range(8)), seat(range(4))], [6, 2]),  # cores 0 to 3 count half
        ([seat(range(4), host=0), seat(range(4), host=1), seat(range(4), host=1)], [4, 2, 2]),
        ([seat(range(64), quota=4)] * 2, [2, 2]),
        ([seat(range(64), quota=4)], [4]),
        ([seat(range(64), quota=1)] * 3, [1] * 3),
        ([seat(range(8), num_launched=4)] * 2, [2, 2]),  # a communicator of half of the ranks
        ([seat(range(8), host=h, num_launched=2) for h in (0, 0, 1)], [4, 4, 4]),
    ],
)
def test_each_rank_gets_its_part(seats, expected):
    assert shares(seats) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seats", "expected"),
    [
        ([seat(range(2))] * 2, True),
        ([seat(range(2))] * 3, False),
        ([seat([0])] * 2, False),  # a mask narrower than the machine
        ([seat([0]), seat([1]), seat([2])], True),
        ([seat([0, 1]), seat([0]), seat([1])], False),
        ([seat(range(64), quota=2)] * 3, False),
        ([seat(range(64), quota=3)] * 3, True),
        ([seat(range(2), num_launched=4)], False),  # alone in its communicator, but not on its core
        ([seat(range(1), host=0), seat(range(1), host=1)], True),
        ([seat(range(1), host=0), seat(range(1), host=1), seat(range(1), host=1)], False),
    ],
)
def test_ranks_know_whether_each_has_a_core(seats, expected):
    assert are_enough(seats) is expected


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 48])
def test_ranks_do_not_take_more_than_the_cores(num_cores, num_ranks):
    numbers = shares([seat(range(num_cores))] * num_ranks)
    assert sum(numbers) <= max(num_cores, num_ranks)
    assert len(set(numbers)) == 1


@pytest.mark.slow
def test_the_line_tells_cores_and_ranks_of_the_host():
    assert description([seat(range(2))] * 2) == "threads: 1 per rank (2 cores, 2 ranks on this host)"
    assert description([seat([0])]) == "threads: 1 per rank (1 core, 1 rank on this host)"
    assert description([seat(range(64), quota=4)] * 2) == "threads: 2 per rank (4 cores, 2 ranks on this host)"
    bound = [seat([0, 1]), seat([2, 3])]
    assert description(bound) == "threads: 2 per rank (4 cores, 2 ranks on this host)"
    hosts = [seat(range(8)), seat(range(8), 1), seat(range(8), 1)]
    assert description(hosts) == "threads: 4 to 8 per rank (8 cores, 1 rank on this host)"


def used(outcome):
    """What each rank says of its threads."""
    assert outcome.code == 0, outcome.text
    return [ast.literal_eval(line.split(": ", 1)[1]) for line in sorted(outcome.lines("rank "))]


def run(num_ranks, *arguments, **environ):
    return jobs.run(num_ranks, jobs.PROGRAMS / "threads_used.py", *arguments, python=jobs.REAL, **{**UNSET, **environ})


needs_cores = pytest.mark.skipif(NUM_CORES < 2, reason="with one core there is nothing to share")


@pytest.mark.slow
@needs_cores
@pytest.mark.mpiexec
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_onednn_and_blas_use_the_share(num_ranks):
    outcome = run(num_ranks)
    share = max(1, NUM_CORES // num_ranks)
    for rank in used(outcome):
        assert rank["pool of OpenBLAS"] == rank["pool of OpenMP"] == rank["cores"] == share
        if share == 1:
            assert (rank["OpenBLAS"], rank["oneDNN"]) == (1, 1)
        elif num_ranks == 1:  # the same measurement sees the threads of one that has all cores
            assert rank["oneDNN"] > 1 and rank["OpenBLAS"] > 1
    said = f"dbrdist: threads: {share} per rank ({NUM_CORES} cores, {num_ranks} ranks on this host)"
    assert outcome.text.count(said) == (num_ranks > 1)


@pytest.mark.slow
@needs_cores
@pytest.mark.mpiexec
def test_ranks_bound_to_cores_of_their_own_share_nothing():
    first, second = sorted(os.sched_getaffinity(0))[:2]
    outcome = run(3, f"{first},{second}", f"{first}", f"{second}")
    assert [rank["cores"] for rank in used(outcome)] == [1, 1, 1]
    assert not any(rank["spins"] for rank in used(outcome))
    ranks = used(run(2, f"{first}", f"{second}"))
    assert [rank["pool of OpenMP"] for rank in ranks] == [1, 1]
    assert all(rank["spins"] for rank in ranks)


@pytest.mark.slow
@needs_cores
@pytest.mark.mpiexec
def test_ranks_bound_to_one_core_leave_it_to_each_other():
    first = min(os.sched_getaffinity(0))
    both_on_one = used(run(2, f"{first}", f"{first}"))  # however many cores the machine has
    assert not any(rank["spins"] for rank in both_on_one)


@pytest.mark.slow
@needs_cores
@pytest.mark.mpiexec
def test_the_users_own_setting_wins():
    outcome = run(2, OMP_NUM_THREADS="2")
    for rank in used(outcome):
        assert rank["OMP_NUM_THREADS"] == "2"
        assert rank["pool of OpenBLAS"] == rank["pool of OpenMP"] == 2
    assert "threads:" not in outcome.text
    for rank in used(run(2, OPENBLAS_NUM_THREADS="2")):
        assert rank["pool of OpenBLAS"] == 2
        assert rank["pool of OpenMP"] == max(1, NUM_CORES // 2)


@pytest.mark.parametrize(("usable", "quota"), [(4, None), (3, 3), (5, None)])
def test_a_seat_has_a_quota_where_a_control_group_grants_less_than_its_cores(monkeypatch, usable, quota):
    monkeypatch.setattr(cores.thread_pools, "affinity", lambda: frozenset(range(4)))
    monkeypatch.setattr(cores, "available_cores", lambda: usable)
    assert cores.seat_on(2)[:3] == (2, frozenset(range(4)), quota)


@pytest.mark.parametrize(
    ("num_ranks", "rank", "usable", "share", "is_said"),
    [(1, 0, 4, None, False), (1, 0, 3, 3, True), (2, 0, 4, 2, True), (2, 1, 4, 2, False), (4, 0, 4, 1, True)],
)
def test_threads_are_limited_and_rank_0_says_so(monkeypatch, capsys, num_ranks, rank, usable, share, is_said):
    """Alone with all cores nothing is limited; where the user has set a number, nothing is, and nothing is said."""
    limited, waits = [], []
    monkeypatch.setattr(cores.thread_pools, "affinity", lambda: frozenset(range(4)))
    monkeypatch.setattr(cores.thread_pools, "wait_briefly", lambda: waits.append(1))
    monkeypatch.setattr(cores, "available_cores", lambda: usable)
    monkeypatch.setattr(cores.environment, "num_local_ranks", lambda: 1)
    seats = [cores.seat_on(0)] * num_ranks
    rows = SimpleNamespace(allgather_rows=lambda row: np.repeat(row[None], num_ranks, 0))
    of_all = SimpleNamespace(rank=rank, intra_rank=rank, size=num_ranks, ranks=SimpleNamespace(seats=seats), gate=rows)
    for can_be_limited in (True, False):
        monkeypatch.setattr(cores.thread_pools, "limit", lambda n, done=can_be_limited: limited.append(n) or done)
        cores.share_out(of_all)
        assert capsys.readouterr().err.startswith("dbrdist: threads: ") == (is_said and can_be_limited)
    assert limited == ([] if share is None else [share] * 2) and len(waits) == 2 * (share != 1)


def test_ranks_that_are_processes_share_the_cores_out(monkeypatch):
    seen = []
    monkeypatch.setattr(cores, "share_out", seen.append)
    alone = create_communicator("single")
    assert seen == [alone]
    assert run_threads(2, lambda comm: create_communicator("threads") is comm) == [True, True] and seen == [alone]
    assert create.name_of(alone) == "single"
