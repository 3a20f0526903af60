"""Communicators at their edges, on real processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.communicators import mpi_communicator
from tests.comm import edges_contract


@pytest.mark.parametrize("check", edges_contract.CHECKS, ids=edges_contract.by_name)
def test_edges_over_mpi(comm, check):
    check(comm)


@pytest.fixture
def small_pieces(monkeypatch):
    """Arrays beyond a gibibyte go in pieces; with pieces of 64 bytes a small one does."""
    monkeypatch.setattr(mpi_communicator, "_PIECE_BYTES", 64)


@pytest.mark.parametrize(
    "check", [edges_contract.check_many_pieces, edges_contract.check_a_broadcast_gives_each_rank_memory_of_its_own]
)
def test_pieces_of_64_bytes(small_pieces, comm, check):
    check(comm)


def test_traffic_between_ranks_is_apart_from_the_callers_own(world):
    """A message of the program, sent first and with the same tag, does not end up in a verb."""
    me, right, left = world.rank, (world.rank + 1) % world.size, (world.rank - 1) % world.size
    request = world.mpi_comm.isend(f"program {me}", right, 0)
    if me == 0:
        world.send_obj(f"ours {me}", right, 0)
    assert world.recv_obj(left, 0) == f"ours {left}"
    if me:
        world.send_obj(f"ours {me}", right, 0)
    assert world.mpi_comm.recv(source=left, tag=0) == f"program {left}"
    request.wait()


def test_two_communicators_of_one_world_are_apart(world):
    other = create_communicator("naive")
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size > 1 and world.rank % 2 == 0 and right:
        world.send_obj("first", right, 0)
        other.send_obj("second", right, 0)
    if world.rank % 2:
        assert other.recv_obj(left, 0) == "second"
        assert world.recv_obj(left, 0) == "first"
    world.barrier()
    other.finalize()
