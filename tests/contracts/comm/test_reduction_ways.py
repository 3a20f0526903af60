"""Ways to send less or later, on threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import late_contract, reduction_ways_contract

CHECKS = [*reduction_ways_contract.CHECKS, *late_contract.CHECKS]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=reduction_ways_contract.by_name)
def test_ways_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)
