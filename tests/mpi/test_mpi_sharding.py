"""Optimizer state divided over processes; see conftest.py for how to run it."""

import numpy as np
import pytest

from dbrdist.comm import arenas, create_communicator, hosts, mpi, speed
from tests.comm import sharding_contract
from tests.comm.sharding_contract import batches, create_multi_node_optimizer, made, net, steps


@pytest.fixture(params=["naive", "shared"])
def comm(request):
    """Messages, and the memory that ranks share."""
    settings = {"shared_memory": True} if request.param == "shared" else {}
    made = create_communicator("flat" if settings else "naive", **settings)
    yield made
    made.finalize()


@pytest.mark.parametrize("check", sharding_contract.CHECKS, ids=sharding_contract.by_name)
@pytest.mark.filterwarnings(sharding_contract.OVERFLOWS_ARE_MEANT)
def test_sharding_over_mpi(comm, check):
    check(comm)


def test_two_hosts(monkeypatch):
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(c.rank // 2, c.rank))
    comm = create_communicator("flat", shared_memory=True)
    sharding_contract.check_weights_are_those_of_one_process(comm)
    comm.finalize()


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_other_ranks_give_their_memory_back(monkeypatch, shared):
    """Also while backward still runs: buckets go one by one."""
    monkeypatch.setattr(speed, "bucket_bytes", lambda comm: 1 << 16)
    comm = create_communicator("flat", shared_memory=shared)
    model = net(num_hidden=1 << 15)  # 2 MB and a little
    optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=2)
    steps(comm, optimizer, model, batches(3))
    arena = model.l1.W.slot.arena
    assert arenas.resident_bytes(arena) <= arena.grad.nbytes / comm.size + 3 * 4096 * 2
    if comm.size > 1 and mpi.watching_is_allowed():
        assert optimizer._steps.current_plan().overlap is not None
    alone = net(num_hidden=1 << 15)
    plain = made(alone, "adam")
    for x, t in batches(3):
        plain.update(alone, x, t)
    np.testing.assert_allclose(model.l1.W.array, alone.l1.W.array, rtol=1e-9, atol=1e-12)
    comm.finalize()
