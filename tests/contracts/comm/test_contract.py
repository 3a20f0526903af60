"""The contract of communicators, on ranks that are threads."""

import pytest

from dbrdist.comm import create_communicator, run_threads
from tests.comm import contract

pytestmark = pytest.mark.slow
LIMIT = 60


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_contract_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=LIMIT)


@pytest.mark.parametrize("check", contract.CHECKS, ids=contract.by_name)
def test_contract_on_a_part(check):
    run_threads(3, lambda comm: check(comm.split(comm.rank == 1, -comm.rank)), timeout_seconds=LIMIT)


def test_single():
    comm = create_communicator("single")
    assert (comm.rank, comm.size) == (0, 1)
    for check in contract.CHECKS:
        check(create_communicator("single"))
