"""ChainerMN's iterators, extensions and checkpoints over processes; see conftest.py for how to run it."""

import pytest

from dbrdist.comm import create_communicator
from tests.comm import chainermn_contract


@pytest.mark.parametrize("check", chainermn_contract.CHECKS, ids=chainermn_contract.by_name)
@pytest.mark.filterwarnings(chainermn_contract.DAMAGE_IS_MEANT)
def test_chainermn_names_over_mpi(check):
    comm = create_communicator("naive")
    check(comm)
    comm.finalize()
