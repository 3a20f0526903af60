"""Virtual workers on ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import virtual_contract


@pytest.mark.slow
@pytest.mark.parametrize("check", virtual_contract.CHECKS, ids=virtual_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.filterwarnings(virtual_contract.OVERFLOWS_ARE_MEANT)
def test_virtual_workers_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_more_numbers_of_ranks(num_ranks):
    run_threads(num_ranks, virtual_contract.check_bits_with_lars, timeout_seconds=60)
