"""Programs' MPI communicators that ranks give in another order, or late; see conftest.py."""

import numpy as np
import pytest
from mpi4py import MPI

from dbrdist.comm import create_communicator
from dbrdist.comm.communicators import duplicate
from dbrdist.errors import CommunicatorError

WORLD = MPI.COMM_WORLD
TAG = 7

pytestmark = [
    pytest.mark.skipif(WORLD.size < 2, reason="an order needs two ranks"),
    pytest.mark.skipif("Open MPI" in MPI.Get_library_version(), reason="Open MPI makes one communicator after another"),
    pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="needs threads that call MPI"),
]


@pytest.fixture
def _is_alone(monkeypatch):
    """Whatever threads other tests have left."""
    monkeypatch.setattr(duplicate, "_is_alone", lambda: True)


def check(mpi_comm):
    comm = create_communicator("naive", mpi_comm=mpi_comm)
    assert comm.allreduce(np.float64(comm.rank + 1)) == comm.size * (comm.size + 1) / 2
    comm.finalize()


@pytest.mark.usefixtures("_is_alone")
def test_two_duplicates_in_another_order_raise_on_all_ranks(monkeypatch):
    monkeypatch.setattr(duplicate, "patience_seconds", 0.05)
    both = [WORLD.Dup(), WORLD.Dup()]
    words = f"expected the same MPI communicator on every rank, got different ones of the same {WORLD.size} ranks"
    with pytest.raises(CommunicatorError, match=words):
        create_communicator("naive", mpi_comm=both[WORLD.rank == WORLD.size - 1])
    check(WORLD.Dup())


@pytest.mark.usefixtures("_is_alone")
@pytest.mark.parametrize("num_early", [1, WORLD.size - 1])
def test_ranks_that_come_late_are_waited_for(num_early, monkeypatch):
    """They come when the others have begun to look for other communicators."""
    monkeypatch.setattr(duplicate, "patience_seconds", 0.05)
    make = duplicate.Duplication._make_third

    def tell_and_make(self):
        if WORLD.rank == 0:
            for late in range(num_early, WORLD.size):
                WORLD.send("you may come", late, TAG)
        make(self)

    monkeypatch.setattr(duplicate.Duplication, "_make_third", tell_and_make)
    for mpi_comm in (WORLD, WORLD.Dup(), WORLD.Split(0, -WORLD.rank)):
        if WORLD.rank >= num_early:
            monkeypatch.setattr(duplicate, "patience_seconds", 3600.0)
            assert WORLD.recv(source=0, tag=TAG) == "you may come"
        check(mpi_comm)


def test_nothing_is_made_where_all_come_in_time(monkeypatch):
    monkeypatch.setattr(duplicate, "patience_seconds", 3600.0)
    monkeypatch.setattr(duplicate.Duplication, "_make_third", lambda self: pytest.fail("a third communicator"))
    check(WORLD.Dup())
