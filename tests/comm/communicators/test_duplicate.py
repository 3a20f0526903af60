"""Tests of dbrdist.comm.communicators.duplicate; those of real ranks are tests/mpi/test_mpi_duplicates.py."""

import pytest

from tests.comm import jobs


@pytest.mark.mpiexec
def test_ranks_that_others_have_spawned_may_come_late():
    """They have another COMM_WORLD, where no third communicator could be made."""
    found = jobs.run(1, jobs.PROGRAMS / "spawned.py")
    assert found.code == 0, found.text
    assert found.lines("sum") == ["sum 3"]
