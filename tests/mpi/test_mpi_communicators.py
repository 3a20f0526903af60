"""Every communicator over MPI by its name, on hosts of several layouts; see conftest.py for how to run it."""

import numpy as np
import pytest

from dbrdist import functions as F
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.communicators import two_levels
from dbrdist.comm.transport import hosts
from dbrdist.core.array import backend
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter
from dbrdist.errors import CommunicatorError
from dbrdist.optimizers import SGD
from tests.comm import contract, contract_names, edges_contract, training_contract
from tests.comm.contract import raises

LAYOUTS = {
    "one host": lambda rank, size: 0,
    "two hosts": lambda rank, size: rank // 2,
    "turns": lambda rank, size: rank % 2,
    "hosts of different sizes": lambda rank, size: int(rank == 0),
    "a host each": lambda rank, size: rank,
}
TWO_LEVELS = ["hierarchical", "two_dimensional"]


def check_sums(comm):
    """Short of ``contract.check_allreduce_every_type``, which each name passes once."""
    contract.check_weighted_sums(comm)
    contract.check_sums_of_16_bit_types_run_in_float32(comm)
    for dtype in ("?", "i", "F"):
        for shape in ((), (0,), (7,), (2, 3, 4, 5)):
            total = sum(contract.array_of(r, shape, "D") for r in range(comm.size))
            expected = np.asarray(total if dtype == "F" else total.real).astype(dtype)
            contract.same(comm.allreduce(contract.array_of(comm.rank, shape, dtype)), expected)


@pytest.fixture
def layout(monkeypatch):
    """A function that has the ranks pretend to be on hosts: a split plays them."""

    def pretend(name):
        color = LAYOUTS[name]
        monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(color(c.rank, c.size), c.rank))

    return pretend


@pytest.fixture(params=contract_names.OTHERS)
def made(request, layout, monkeypatch):
    monkeypatch.setattr(backend, "why_no_nccl", lambda: "")  # arrays are the host's
    layout("one host" if request.param == "single_node" else "hosts of different sizes")
    comm = create_communicator(request.param)
    yield comm
    comm.finalize()


@pytest.mark.parametrize("part", range(3))
def test_every_name_keeps_the_contract(made, part):
    for check in contract.CHECKS[part::3]:
        check(made)


def test_edges_and_training(made):
    if type(made).__name__ == "DummyCommunicator":
        return
    for check in edges_contract.CHECKS:
        check(made)
    training_contract.check_multi_node_mean_grad(made)
    training_contract.check_gradients_that_some_or_all_ranks_lack(made)
    training_contract.check_gradients_travel_in_the_configured_type(made)
    training_contract.check_n_ranks_give_the_weights_of_one(made)


def test_a_part_keeps_the_contract(made):
    part = made.split(made.rank % 2, -made.rank)
    assert type(part) is type(made)
    check_sums(part)
    part.finalize()


@pytest.mark.parametrize("hosts_are", LAYOUTS)
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_sums_on_every_layout(layout, name, hosts_are):
    layout(hosts_are)
    comm = create_communicator(name)
    check_sums(comm)
    comm.finalize()


@pytest.mark.parametrize("name", TWO_LEVELS)
@pytest.mark.parametrize("num_bytes", [200, 1 << 12])
def test_long_arrays_go_piece_by_piece(layout, monkeypatch, name, num_bytes):
    monkeypatch.setattr(two_levels, "_PIECE_BYTES", num_bytes)
    layout("two hosts")
    comm = create_communicator(name)
    contract.check_weighted_sums(comm)
    contract.check_sums_of_16_bit_types_run_in_float32(comm)
    comm.finalize()


def test_hosts_are_found(layout):
    layout("two hosts")
    comm = create_communicator("hierarchical")
    assert comm.intra_rank == comm.rank % 2
    assert comm.inter_rank == comm.rank // 2
    assert comm.inter_size == (comm.size + 1) // 2
    assert comm.reducer._hosts.num_owners == 1
    comm.finalize()
    comm = create_communicator("two_dimensional")
    assert comm.reducer._hosts.num_owners == (2 if comm.size % 2 == 0 else 1)
    comm.finalize()


def test_single_node_refuses_several_hosts(layout):
    layout("a host each")
    size = create_communicator("naive").size
    if size == 1:
        create_communicator("single_node")
        return
    for _ in range(2):  # nothing is left over
        raises(ValueError, f"got {size} ranks on {size} hosts", lambda: create_communicator("single_node"))
    contract.check_allreduce_every_type(create_communicator("flat"))


def test_dummy_leaves_gradients_alone():
    comm = create_communicator("dummy")
    model = Chain()
    with model.init_scope():
        model.p, model.q = Parameter(np.zeros(3, np.float32)), Parameter(np.zeros(2, np.float64))
    for with_q in (True, comm.rank == 0):
        model.p.grad = np.full(3, comm.rank + 1, np.float32)
        model.q.grad = np.full(2, comm.rank + 1.0) if with_q else None
        comm.multi_node_mean_grad(model)
        np.testing.assert_array_equal(model.p.grad, np.full(3, comm.rank + 1))
    optimizer = create_multi_node_optimizer(SGD(1.0), comm).setup(model)
    optimizer.update(lambda: F.sum(model.p * (comm.rank + 1.0)) + F.sum(model.q))
    np.testing.assert_array_equal(model.p.array, np.full(3, -(comm.rank + 1.0)))
    comm.finalize()


def test_an_unknown_name_on_one_rank_raises_on_all():
    size = create_communicator("naive").size
    wrong = create_communicator("naive").rank == size - 1
    for _ in range(2):
        raises(
            ValueError,
            "unknown communicator 'hierachical', known are auto, naive",
            lambda: create_communicator("hierachical" if wrong else "flat"),
        )
        name = "pure-nccl" if wrong else "naive"
        raises(ValueError, "did you mean 'pure_nccl'", lambda n=name: create_communicator(n))
    contract.check_allreduce_every_type(create_communicator("naive"))


def test_different_names_raise_on_all():
    comm = create_communicator("naive")
    if comm.size > 1:
        name = "flat" if comm.rank else "hierarchical"
        raises(CommunicatorError, "on every rank, got", lambda: create_communicator(name))


def test_nccl_without_a_gpu_is_refused_in_words(monkeypatch):
    reason = "CuPy finds no GPU" if create_communicator("naive").rank == 0 else ""
    monkeypatch.setattr(backend, "why_no_nccl", lambda: reason)
    for _ in range(2):
        text = "a GPU on every rank, but CuPy finds no GPU; use 'auto' or 'flat'"
        raises(RuntimeError, text, lambda: create_communicator("pure_nccl"))
