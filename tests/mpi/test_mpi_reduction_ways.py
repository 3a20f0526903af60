"""Ways to send less or later, over processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from tests.comm import late_contract, reduction_ways_contract

CHECKS = [*reduction_ways_contract.CHECKS, *late_contract.CHECKS]


@pytest.mark.parametrize("name", ["naive", "flat"])
@pytest.mark.parametrize("check", CHECKS, ids=reduction_ways_contract.by_name)
def test_ways_over_mpi(check, name):
    comm = create_communicator(name)
    check(comm)
    comm.finalize()
