"""Virtual workers over processes; see conftest.py for how to run it."""

import pytest

from tests.comm import virtual_contract


@pytest.mark.parametrize("check", virtual_contract.CHECKS, ids=virtual_contract.by_name)
@pytest.mark.filterwarnings(virtual_contract.OVERFLOWS_ARE_MEANT)
def test_virtual_workers_over_mpi(world, check):
    check(world)
