"""Ways to send less or later, over processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from tests.comm import reduction_ways_contract


@pytest.mark.parametrize("name", ["naive", "flat"])
@pytest.mark.parametrize("check", reduction_ways_contract.CHECKS, ids=reduction_ways_contract.by_name)
def test_ways_over_mpi(check, name):
    comm = create_communicator(name)
    check(comm)
    comm.finalize()
