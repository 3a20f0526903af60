"""Ranks on one host share its cores: the number of threads of each, computed and in real processes."""

import ast
import os

import pytest

from dbrdist.comm import environment
from dbrdist.comm.cores import Seat, are_enough, description, shares
from tests.comm import jobs

NUM_CORES = len(os.sched_getaffinity(0))
UNSET = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT"), None)


def seat(cores, host=0, quota=None, num_launched=1):
    return Seat(host, frozenset(cores), quota, num_launched)


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


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8, 48])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 48])
def test_ranks_do_not_take_more_than_the_cores(num_cores, num_ranks):
    numbers = shares([seat(range(num_cores))] * num_ranks)
    assert sum(numbers) <= max(num_cores, num_ranks)
    assert len(set(numbers)) == 1


def test_the_line_tells_cores_and_ranks_of_the_host():
    assert description([seat(range(2))] * 2) == "threads: 1 per rank (2 cores, 2 ranks on this host)"
    assert description([seat([0])]) == "threads: 1 per rank (1 core, 1 rank on this host)"
    assert description([seat(range(64), quota=4)] * 2) == "threads: 2 per rank (4 cores, 2 ranks on this host)"
    bound = [seat([0, 1]), seat([2, 3])]
    assert description(bound) == "threads: 2 per rank (4 cores, 2 ranks on this host)"
    hosts = [seat(range(8)), seat(range(8), 1), seat(range(8), 1)]
    assert description(hosts) == "threads: 4 to 8 per rank (8 cores, 1 rank on this host)"


def test_launchers_say_how_many_ranks_a_host_has():
    assert environment.num_local_ranks({}) == 1
    assert environment.num_local_ranks({"MPI_LOCALNRANKS": "4"}) == 4
    assert environment.num_local_ranks({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MPI_LOCALNRANKS": "?"}) == 2


def used(outcome):
    """What each rank says of its threads."""
    assert outcome.code == 0, outcome.text
    return [ast.literal_eval(line.split(": ", 1)[1]) for line in sorted(outcome.lines("rank "))]


def run(num_ranks, *arguments, **environ):
    return jobs.run(num_ranks, jobs.PROGRAMS / "threads_used.py", *arguments, python=jobs.REAL, **{**UNSET, **environ})


needs_cores = pytest.mark.skipif(NUM_CORES < 2, reason="with one core there is nothing to share")


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


@needs_cores
@pytest.mark.mpiexec
def test_ranks_bound_to_one_core_leave_it_to_each_other():
    first = min(os.sched_getaffinity(0))
    both_on_one = used(run(2, f"{first}", f"{first}"))  # however many cores the machine has
    assert not any(rank["spins"] for rank in both_on_one)


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
