"""Reductions in two halves, over processes; see conftest.py for how to run it."""

import pytest

from tests.comm import started_contract


@pytest.mark.parametrize("check", started_contract.CHECKS, ids=started_contract.by_name)
def test_reductions_in_two_halves_over_mpi(comm, check):
    check(comm)
