"""Sums of hosts over connections of our own, between processes; hosts are pretended by what "local" means."""

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.transport import hosts, sockets
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter
from tests.each import each

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=[1, 2], ids=["a host each", "two on a host"])
def make(request, monkeypatch):
    """Makes communicators of all ranks."""
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(c.rank // request.param, c.rank))
    made = []

    def create(**settings):
        made.append(create_communicator("flat", shared_memory=True, **settings))
        return made[-1]

    yield create
    for comm in made:
        comm.finalize()


def means(comm, n, dtype, weighted):
    model = Chain()
    with model.init_scope():
        model.w = Parameter(np.zeros(n, dtype))
    model.w.grad = np.random.default_rng([comm.rank, n]).normal(size=n).astype(dtype)
    comm.weighted_mean_grad(list(model.namedparams()), True, comm.rank + 1 if weighted else None)
    return model.w.grad


CASES = [
    (n, dtype, wire, weighted)
    for n in (1, 5, 300_007)
    for dtype, wire in [
        (np.float32, None), (np.float64, None), (np.float16, None), (BFLOAT16, None), (np.float32, np.float16),
        (np.float32, BFLOAT16), (np.float16, np.float16), (np.float16, np.float32), (BFLOAT16, np.float16),
    ]
    for weighted in (False, True)
]  # fmt: skip


def test_the_same_bits_as_by_messages_and_right_values(make):
    ways = [make(sockets=False), make(sockets=True)]
    is_exact = ways[0].inter_size <= 2  # MPI adds three wide terms in an order of its own

    @each(**{"n, dtype, wire, weighted": CASES})
    def check(n, dtype, wire, weighted):
        found = []
        for comm in ways:
            comm.set_config("allreduce_grad_dtype", wire)
            found.append(means(comm, n, dtype, weighted))
            comm.set_config("allreduce_grad_dtype", None)
        size = ways[0].size
        weights = [r + 1.0 for r in range(size)] if weighted else [1.0] * size
        terms = [np.random.default_rng([r, n]).normal(size=n).astype(dtype).astype(np.float64) for r in range(size)]
        right = sum(w * x for w, x in zip(weights, terms)) / sum(weights)
        eps = max(float(ml_dtypes.finfo(d).eps) for d in (dtype, wire or dtype))
        for got in found:
            np.testing.assert_allclose(got.astype(np.float64), right, rtol=4 * eps, atol=4 * eps)
        if is_exact or (wire is not None and ml_dtypes.finfo(wire).bits == 16):
            np.testing.assert_array_equal(found[0].view(np.uint8), found[1].view(np.uint8))

    check()
    assert bool(ways[1].reducer._has_cable) is (ways[1].inter_size > 1)


def test_all_ranks_have_the_same_bits(make):
    comm = make(sockets=True)
    mine = means(comm, 100_003, np.float32, False)
    for theirs in comm.allgather_obj(mine):
        np.testing.assert_array_equal(mine, theirs)


def test_where_a_rank_cannot_connect_all_take_messages(make, monkeypatch, capfd):
    comm = make(sockets=True)
    if comm.inter_size == 1:
        pytest.skip("one host")
    monkeypatch.setattr(sockets, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(sockets, "_TRY_SECONDS", 0.3)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(sockets, "_call", lambda *_: exec('raise OSError("a firewall")'))
    mine = means(comm, 70_001, np.float32, False)
    assert comm.reducer._has_cable is False
    assert comm.reducer._cable is None
    terms = [np.random.default_rng([r, 70_001]).normal(size=70_001).astype(np.float32) for r in range(comm.size)]
    np.testing.assert_allclose(mine, sum(terms) / comm.size, atol=1e-6)
    comm.barrier()
    if comm.rank == 0:
        assert "sums of hosts are sent by MPI, not over sockets: " in capfd.readouterr().err


def test_the_faster_way_is_taken(make, monkeypatch):
    """Whatever it is: here the times are made up, and only those of rank 0 count."""
    for first, second in [(1.0, 1.2), (1.0, 1.4)]:
        comm = make()
        if comm.inter_size == 1:
            return
        times = {False: first, True: second}
        reducer, others = comm.reducer, 1 if comm.rank == 0 else 5
        monkeypatch.setattr(
            reducer, "time_reduction", lambda n, r=reducer, t=times, k=others: t[r._cable is not None] * k
        )
        means(comm, 70_001, np.float32, False)
        assert comm.reducer._has_cable is (second < 1.3)
        assert (comm.reducer._cable is not None) is (second < 1.3 and comm.reducer.hosts.between is not None)


def test_the_thread_beside_backward_has_connections_of_its_own(make):
    comm = make(sockets=True, overlap=True)
    if comm.inter_size == 1:
        pytest.skip("one host")
    courier = comm.reducer.thread()
    assert courier.comm.reducer._has_cable is comm.reducer._has_cable is True
    if comm.reducer._cable is not None:
        assert courier.comm.reducer._cable is not comm.reducer._cable


def test_no_sockets_where_they_are_not_wanted(make):
    comm = make(sockets=False)
    means(comm, 70_001, np.float32, False)
    assert not comm.reducer._has_cable
