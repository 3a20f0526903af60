"""In what type arrays travel between processes; see conftest.py for how to run it."""

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.comm.transport import hosts
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter

HOST_OF = {
    "two hosts": lambda rank: rank // 2,
    "turns": lambda rank: rank % 2,
    "hosts of different sizes": lambda rank: int(rank == 0),
    "a host each": lambda rank: rank,
}


class Counted:
    """An MPI communicator that notes how many bytes a rank sends, in messages and in sums of MPI's own."""

    def __init__(self, comm):
        self._comm = comm
        self.num_bytes = 0

    def __getattr__(self, name):
        verb = getattr(self._comm, name)
        if name == "Isend":

            def counted(sent, *args):
                self.num_bytes += sent[0].nbytes
                return verb(sent, *args)

        elif name == "Iallreduce":

            def counted(in_place, x, op):
                self.num_bytes += 2 * x.nbytes  # once as terms, once as sums
                return verb(in_place, x, op)

        else:
            return verb
        return counted


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_sums_do_not_travel_as_float32(dtype):
    """Each rank sends the others' parts of its array, and its part of the sums to each, in two bytes an element."""
    comm = create_communicator("naive")
    counted = comm.ranks.rows = Counted(comm.ranks.rows)
    x = np.full(1000, comm.rank + 1, dtype)
    total = comm.allreduce(x)
    assert total.dtype == dtype
    assert (total == sum(range(1, comm.size + 1))).all()
    assert counted.num_bytes <= 2 * x.nbytes
    assert counted.num_bytes > 0 or comm.size == 1
    comm.ranks.rows = counted._comm
    comm.finalize()


@pytest.fixture(params=[(name, layout) for name in ("hierarchical", "two_dimensional") for layout in HOST_OF])
def levels(request, monkeypatch):
    """(a communicator of two levels, the host of each rank, what counts on the way between hosts)."""
    name, layout = request.param
    monkeypatch.setattr(hosts, "local_ranks", lambda _, c: c.Split(HOST_OF[layout](c.rank), c.rank))
    comm = create_communicator(name)
    between, counted = comm.reducer._hosts.between, None
    if between is not None:
        counted = comm.reducer._hosts.between = Counted(between)
    yield comm, [HOST_OF[layout](rank) for rank in range(comm.size)], counted
    comm.reducer._hosts.between = between
    comm.finalize()


def mean_gradients(comm, everyones):
    """What ``multi_node_mean_grad`` makes of everyone's gradients."""
    model = Link()
    with model.init_scope():
        model.w = Parameter(np.zeros_like(everyones[0]))
    model.w.grad = everyones[comm.rank].copy()
    comm.multi_node_mean_grad(model)
    return model.w.grad


def sums_of_hosts(everyones, host_of):
    """In float32, in the order of the hosts' first ranks. Whole numbers: exact in any order."""
    found = {}
    for g, host in zip(everyones, host_of):
        found[host] = found.get(host, np.float32(0)) + g.astype(np.float32)
    return list(found.values())


@pytest.mark.parametrize("travels", ["float16", "bfloat16"])
def test_sums_of_hosts_travel_in_the_configured_type(levels, travels):
    comm, host_of, counted = levels
    comm.set_config("allreduce_grad_dtype", travels)
    rng = np.random.default_rng(7)
    narrow = np.dtype(getattr(ml_dtypes, travels, travels))
    for dtype in (np.float32, narrow, np.float64):
        everyones = list(rng.integers(-2000, 2000, (comm.size, 10_007)).astype(dtype))
        if counted is not None:
            counted.num_bytes = 0
        found = mean_gradients(comm, everyones)
        sums = sums_of_hosts(everyones, host_of)
        if len(sums) > 1:  # a power of two before and after changes no bit of these
            total = sum(s.astype(narrow).astype(np.float32) for s in sums)
            expected = (total / np.float32(comm.size)).astype(narrow).astype(dtype)
        elif comm.size > 1 or dtype != narrow:
            expected = (sums[0].astype(dtype if dtype == np.float64 else np.float32) / comm.size).astype(dtype)
        else:
            expected = everyones[0]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)
        if counted is not None:
            num_elements = -(-found.size // comm.reducer._hosts.num_owners)
            assert 0 < counted.num_bytes <= 2 * num_elements * 2
    comm.set_config("allreduce_grad_dtype", None)


def test_sums_of_hosts_that_are_too_large_for_float16(levels):
    """Each term and the mean fit, a host's sum does not."""
    comm, _, _ = levels
    for dtype in (np.float32, np.float16):
        comm.set_config("allreduce_grad_dtype", "float16")
        found = mean_gradients(comm, [np.full(1000, 60000, dtype)] * comm.size)
        np.testing.assert_array_equal(found, np.full(1000, 60000, dtype))
        comm.set_config("allreduce_grad_dtype", None)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_gradients_between_hosts(levels, dtype):
    """Those of one rank travel as they are; sums of several in float32, so that they are narrowed once."""
    comm, host_of, counted = levels
    everyones = list(np.random.default_rng(8).integers(-200, 200, (comm.size, 10_007)).astype(dtype))
    found = mean_gradients(comm, everyones)
    total = sum(sums_of_hosts(everyones, host_of))
    np.testing.assert_array_equal(found, (total / np.float32(comm.size)).astype(dtype))
    if counted is not None:
        width = 2 if comm.reducer._hosts.has_one_each else 4
        num_elements = -(-found.size // comm.reducer._hosts.num_owners)
        assert 0 < counted.num_bytes <= 2 * num_elements * width
