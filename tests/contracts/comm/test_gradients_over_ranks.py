"""Gradients through communication and links that communicate, on ranks that are threads."""

import pytest

from dbrdist.comm import run_threads
from tests.comm import chain_list_contract, gradients_contract, jobs, multi_node_links_contract
from tests.each import each


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@each(check=gradients_contract.CHECKS)
def test_gradients_on_threads(num_ranks, check):
    run_threads(num_ranks, check, timeout_seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@each(check=[*multi_node_links_contract.CHECKS, *chain_list_contract.CHECKS])
def test_links_on_threads(num_ranks, check):
    run_threads(num_ranks, check, timeout_seconds=60)


LEAVES_OUT_BACKWARD = """
import numpy as np
from dbrdist.comm import create_communicator
from dbrdist.comm.functions import recv, send
from dbrdist.core.tape.variable import Variable
comm = create_communicator("naive")
if comm.rank == 0:
    send(Variable(np.ones(3)), comm, rank=1).backward()
else:
    recv(comm, rank=0)
"""


@pytest.mark.slow
@pytest.mark.mpiexec
def test_a_rank_that_waits_for_a_gradient_in_vain_says_so(tmp_path):
    script = tmp_path / "leaves_out_backward.py"
    script.write_text(LEAVES_OUT_BACKWARD)
    found = jobs.run(2, script, limit_seconds=60)
    assert found.code != 0
    assert "for rank 1 in recv with tag 0" in found.text and "leaves_out_backward.py:8" in found.text
