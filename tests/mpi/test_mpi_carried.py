"""What ranks carry through a snapshot, on processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from tests.comm import carried_contract


@pytest.fixture
def comm():
    """Gradients in the memory that ranks share; messages are tested on ranks that are threads."""
    made = create_communicator("flat", shared_memory=True)
    yield made
    made.finalize()


@pytest.mark.parametrize("check", carried_contract.CHECKS, ids=carried_contract.by_name)
def test_carried_over_mpi(comm, check):
    check(comm)
