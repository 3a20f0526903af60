"""Optimizer state divided over ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import sharding_contract


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.filterwarnings(sharding_contract.OVERFLOWS_ARE_MEANT)
@pytest.mark.parametrize("check", sharding_contract.CHECKS, ids=sharding_contract.by_name)
def test_sharding_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)
