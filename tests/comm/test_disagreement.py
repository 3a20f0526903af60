"""Ranks that disagree, on threads; tests/mpi has the same on processes."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import disagreement_contract


@pytest.mark.parametrize("check", disagreement_contract.CHECKS, ids=disagreement_contract.by_name)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_disagreement_on_threads(check, num_ranks):
    run_threads(num_ranks, check, timeout_seconds=60)
