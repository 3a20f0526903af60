"""Ways to send less or later, on threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import reduction_ways_contract


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("check", reduction_ways_contract.CHECKS, ids=reduction_ways_contract.by_name)
def test_ways_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)
