"""Communicators at their edges, on ranks that are threads."""

import pytest

from dbrdist.comm import create_communicator, run_threads
from tests.comm import edges_contract


@pytest.mark.parametrize("check", edges_contract.CHECKS, ids=edges_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_edges_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("check", edges_contract.CHECKS, ids=edges_contract.by_name)
def test_edges_of_a_single_rank(check):
    check(create_communicator("single"))
