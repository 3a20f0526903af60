"""Gradients through communication and links that communicate, on ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import chain_list_contract, gradients_contract, multi_node_links_contract
from tests.each import each


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@each(check=gradients_contract.CHECKS)
def test_gradients_on_threads(num_ranks, check):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@each(check=[*multi_node_links_contract.CHECKS, *chain_list_contract.CHECKS])
def test_links_on_threads(num_ranks, check):
    run_threads(num_ranks, check, timeout_seconds=60)
