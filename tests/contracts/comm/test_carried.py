"""What ranks carry through a snapshot, on ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import carried_contract


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("check", carried_contract.CHECKS, ids=carried_contract.by_name)
def test_carried_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=120)
