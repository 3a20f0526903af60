"""What ranks carry through a snapshot, on processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from tests.comm import carried_contract


@pytest.fixture(params=["naive", "shared"])
def comm(request):
    """Messages, and the memory that ranks share."""
    settings = {"shared_memory": True} if request.param == "shared" else {}
    made = create_communicator("flat" if settings else "naive", **settings)
    yield made
    made.finalize()


@pytest.mark.parametrize("check", carried_contract.CHECKS, ids=carried_contract.by_name)
def test_carried_over_mpi(comm, check):
    check(comm)
