"""Gradients through communication and links that communicate, on real processes; see conftest.py for how to run it."""

import pytest

from tests.comm import chain_list_contract, gradients_contract, multi_node_links_contract

# The verbs beneath pass their own contract on each communicator.
pytestmark = pytest.mark.parametrize("world", ["flat"], indirect=True)


@pytest.mark.parametrize("check", gradients_contract.CHECKS, ids=gradients_contract.by_name)
def test_gradients_over_mpi(comm, check):
    check(comm)


@pytest.mark.parametrize(
    "check", [*multi_node_links_contract.CHECKS, *chain_list_contract.CHECKS], ids=gradients_contract.by_name
)
def test_links_over_mpi(comm, check):
    check(comm)
