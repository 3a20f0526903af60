"""The program's own MPI communicator, and what a communicator gives back at its end; see conftest.py."""

import gc
import os

import numpy as np
import pytest
from mpi4py import MPI

from dbrdist.comm import create_communicator

KINDS = ["naive", "flat", "hierarchical", "two_dimensional"]


@pytest.mark.parametrize("name", KINDS)
def test_the_programs_communicator_is_not_needed_any_more(name):
    programs = MPI.COMM_WORLD.Dup()
    comm = create_communicator(name, mpi_comm=programs)
    programs.Free()
    x = np.arange(3.0) + comm.rank
    expected = comm.size * np.arange(3.0) + comm.size * (comm.size - 1) / 2
    np.testing.assert_array_equal(comm.allreduce(x), expected)
    part = comm.split(0, -comm.rank)  # the same ranks, in reverse
    assert part.allgather_obj(comm.rank) == list(range(comm.size))[::-1]
    part.finalize()
    comm.finalize()


@pytest.mark.parametrize("name", KINDS)
def test_the_end_gives_back_file_descriptors(name):
    def made():
        create_communicator(name).finalize()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    made()  # what the first one keeps for good
    before = made()
    assert [made() for _ in range(5)][-1] <= before


@pytest.mark.parametrize(
    ("mpi_comm", "kind", "words"),
    [
        (MPI.COMM_NULL, ValueError, "expected a communicator that this process is in, got MPI.COMM_NULL"),
        ("world", TypeError, "expected a communicator of mpi4py, such as MPI.COMM_WORLD, got str"),
        (MPI.GROUP_EMPTY, TypeError, "got Group"),
    ],
)
def test_what_is_no_communicator_of_ranks_is_refused_in_words(mpi_comm, kind, words):
    with pytest.raises(kind, match="mpi_comm") as caught:
        create_communicator("flat", mpi_comm=mpi_comm)
    assert words in str(caught.value)


@pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="two groups need two ranks")
def test_a_communicator_between_two_groups_is_refused():
    world = MPI.COMM_WORLD
    half = world.Split(int(world.rank > 0), world.rank)
    between = half.Create_intercomm(0, world, 0 if world.rank else 1)
    with pytest.raises(ValueError, match="joins two; pass mpi_comm"):
        create_communicator("flat", mpi_comm=between)
    between.Free()
    half.Free()
