"""The contract of communicators, on real processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.communicators import shared_memory
from dbrdist.comm.transport import mpi
from tests.comm import contract, disagreement_contract


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.by_name)
def test_contract_over_mpi(comm, check):
    check(comm)


@pytest.mark.parametrize("check", disagreement_contract.CHECKS, ids=disagreement_contract.by_name)
def test_disagreement_over_mpi(comm, check):
    check(comm)


def test_ranks_are_those_of_mpi(world):
    assert world.mpi_comm == mpi.start().COMM_WORLD
    assert (world.rank, world.size) == (world.mpi_comm.rank, world.mpi_comm.size)
    assert world.world_ranks() == tuple(range(world.size))


def test_a_given_mpi_communicator_is_used(world):
    backwards = world.mpi_comm.Split(0, -world.rank)
    comm = create_communicator("flat", backwards, batched_copy=False)
    assert comm.rank == world.size - 1 - world.rank
    assert comm.get_config("batched_copy") is False
    assert comm.world_ranks() == tuple(range(world.size))[::-1]
    contract.check_allreduce_every_type(comm)


def test_without_a_name_flat_is_taken_and_rank_0_says_so(world, capfd):
    comm = create_communicator()
    assert type(comm) is shared_memory.FlatCommunicator
    expected = f"dbrdist: communicator 'flat', {world.size} rank" if world.rank == 0 else ""
    assert expected in capfd.readouterr().err  # after what Open MPI says of itself


def test_traffic_is_apart_from_the_callers_own(world):
    """A message of the program with the same tag does not end up in a verb."""
    me = world.rank
    request = world.mpi_comm.isend("mine", me, 0)
    world.send_obj("ours", me, 0)
    assert world.recv_obj(me, 0) == "ours"
    assert world.mpi_comm.recv(source=me, tag=0) == "mine"
    request.wait()
