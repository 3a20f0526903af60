"""Virtual workers over processes; see conftest.py for how to run it."""

import pytest

from tests.comm import virtual_contract


@pytest.mark.parametrize("check", virtual_contract.CHECKS, ids=virtual_contract.by_name)
def test_virtual_workers_over_mpi(world, check):
    check(world)
