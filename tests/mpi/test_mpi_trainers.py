"""Trainers whose ranks differ, over processes; see conftest.py for how to run it."""

import pytest

from tests.comm import trainer_contract


@pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=trainer_contract.by_name)
def test_trainers_over_mpi(comm, check):
    check(comm)
