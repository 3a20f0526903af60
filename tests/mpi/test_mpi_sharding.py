"""Optimizer state divided over processes; see conftest.py for how to run it."""

import copy

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.gradients import bandwidth, shared_gradients
from dbrdist.comm.transport import hosts, mpi
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter
from tests.comm import carried_contract, reduction_ways_contract, sharding_contract
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


@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "non_cuda_aware"])
def test_several_hosts(monkeypatch, name):
    """Hosts of one rank and of all others: divided state, compressed and late gradients, and rounds of local SGD."""
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(int(c.rank > 0), c.rank))
    comm = create_communicator(name, **({"shared_memory": True} if name == "flat" else {}))
    assert comm.inter_size == min(comm.size, 2)
    sharding_contract.check_weights_are_those_of_one_process(comm)
    reduction_ways_contract.check_power_sgd_is_that_of_the_paper(comm)
    reduction_ways_contract.check_top_k_sends_the_largest(comm)
    carried_contract.check_a_snapshot_at_once_after_a_resume_is_the_same(comm)
    comm.finalize()


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_of_other_ranks_give_their_memory_back(monkeypatch, shared):
    """Also while backward still runs: buckets go one by one."""
    monkeypatch.setattr(bandwidth, "bucket_bytes", lambda comm: 1 << 16)
    comm = create_communicator("flat", shared_memory=shared)
    model = net(num_hidden=1 << 15)  # 2 MB and a little
    optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=2)
    steps(comm, optimizer, model, batches(3))
    arena = model.l1.W.slot.arena
    assert shared_gradients.resident_bytes(arena) <= arena.grad.nbytes / comm.size + 3 * 4096 * 2
    if comm.size > 1 and mpi.watching_is_allowed():
        assert optimizer._steps.current_plan().overlap is not None
    alone = net(num_hidden=1 << 15)
    plain = made(alone, "adam")
    for x, t in batches(3):
        plain.update(alone, x, t)
    np.testing.assert_allclose(model.l1.W.array, alone.l1.W.array, rtol=1e-9, atol=1e-12)
    comm.finalize()


def test_updated_values_do_not_travel_through_gradients_that_were_given_back(monkeypatch):
    """They lie where the ranks of the host reach them; pages of gradients stay away."""
    comm = create_communicator("flat", shared_memory=True)
    model = net(num_hidden=1 << 13)
    optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=2)
    steps(comm, optimizer, model, batches(2))
    arena = model.l1.W.slot.arena
    if comm.size > 1:
        assert arena in shared_gradients.VALUES
        assert np.shares_memory(model.l1.W.array, shared_gradients.VALUES[arena].raw)
    sharding, resident = optimizer._policy.sharding, []
    if comm.size > 1:
        share = sharding.share_values

        def without_release(call, plan):
            monkeypatch.setattr(sharding, "releases", False)
            share(call, plan)
            resident.append(shared_gradients.resident_bytes(arena))
            monkeypatch.undo()

        monkeypatch.setattr(sharding, "share_values", without_release)
    steps(comm, optimizer, model, list(batches(3))[2:])
    assert all(found <= arena.grad.nbytes / comm.size + 3 * 4096 * 2 for found in resident)
    assert len(resident) == (comm.size > 1)
    comm.finalize()


def test_values_are_read_before_a_rank_may_change_them():
    """What one rank writes into its parameters after an update, no other one sees."""
    comm = create_communicator("flat", shared_memory=True)
    model = net(num_hidden=1 << 13)
    optimizer = create_multi_node_optimizer(made(model, "momentum"), comm, zero=1)
    for x, t in batches(4):
        steps(comm, optimizer, model, [(x, t)])
        mine = model.l1.W.array.copy()
        model.l1.W.array[...] = comm.rank
        assert all((theirs == mine).all() for theirs in comm.allgather_obj(mine))
        model.l1.W.array[...] = mine
    comm.finalize()


def test_parameters_that_share_memory_with_others_stay_where_they_are(capfd):
    """A frozen parameter that another one of the model shares its array with: values travel as messages."""
    comm = create_communicator("flat", shared_memory=True)

    class Tied(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.net = net()
                self.frozen = Parameter(np.ones((3, 5)))
            self.twin = copy.copy(self.frozen)

        def forward(self, x, t):
            return self.net(x, t)

    model = Tied()
    optimizer = create_multi_node_optimizer(made(model, "adam"), comm, zero=1)
    model.frozen.update_rule.enabled = False
    steps(comm, optimizer, model, batches(4))
    assert model.net.l1.W.slot.arena is model.frozen.slot.arena
    model.twin.array[0, 0] = 5
    assert model.frozen.array[0, 0] == 5
    plain = net()
    alone = made(plain, "adam")
    for x, t in batches(4):
        alone.update(plain, x, t)
    np.testing.assert_allclose(model.net.l1.W.array, plain.l1.W.array, rtol=1e-9, atol=1e-12)
    said = comm.gather_obj(capfd.readouterr().err)
    assert comm.size == 1 or "shares its array" in said[0] if comm.rank == 0 else True
    comm.finalize()
