"""Reductions in two halves, on threads; tests/mpi has the same on processes."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import started_contract
from tests.each import each


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@each(check=started_contract.CHECKS)
def test_reductions_in_two_halves_on_threads(num_ranks, check):
    run_threads(num_ranks, check, timeout_seconds=60)
