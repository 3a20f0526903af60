"""Trainers whose ranks differ, on ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import trainer_contract


@pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=trainer_contract.by_name)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trainers_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)
