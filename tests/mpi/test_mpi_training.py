"""Training over processes; see conftest.py for how to run it."""

import pytest

from tests.comm import data_contract, training_contract


@pytest.mark.parametrize("check", training_contract.CHECKS, ids=training_contract.by_name)
@pytest.mark.filterwarnings(training_contract.OVERFLOWS_ARE_MEANT)
def test_training_over_mpi(comm, check):
    check(comm)


@pytest.mark.parametrize("check", data_contract.CHECKS, ids=data_contract.by_name)
def test_data_over_mpi(comm, check):
    check(comm)
