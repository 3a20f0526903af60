"""Arrays of more than 2**31 elements and objects of more than 2 GiB; see conftest.py for how to run it.

They need 5 to 9 GiB per rank and some minutes, so they run where DBRDIST_TEST_MEMORY says how many GiB the ranks of a
host may take together: ``DBRDIST_TEST_MEMORY=18 mpiexec -n 2 python -m pytest tests/mpi/test_mpi_huge.py``.
"""

import operator
import os

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import create_communicator, run_threads
from dbrdist.core.array import memory
from dbrdist.core.model.link import Link
from dbrdist.core.model.parameter import Parameter

pytestmark = [pytest.mark.limit_seconds(400), pytest.mark.timeout(500)]

NUM_ELEMENTS = (1 << 31) + 5
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "dummy"]


def needs(gib_per_rank, num_ranks):
    if num_ranks * gib_per_rank > int(os.environ.get("DBRDIST_TEST_MEMORY", "0")):
        pytest.skip(f"DBRDIST_TEST_MEMORY allows less than {gib_per_rank} GiB per rank")


@pytest.fixture(autouse=True)
def large_blocks_go_back_to_the_system(monkeypatch):
    monkeypatch.setattr(memory, "_heap_is_tuned", True)


@pytest.fixture(params=NAMES)
def comm(request):
    made = create_communicator(request.param)
    yield made
    made.finalize()


def numbers(rank, n=NUM_ELEMENTS, dtype=np.int8):
    x = np.ones(n, dtype)
    x[-1] = rank + 3
    return x


def check_a_sum(comm):
    total = comm.allreduce(numbers(comm.rank))
    assert total.shape == (NUM_ELEMENTS,)
    assert total[0] == total[NUM_ELEMENTS // 2] == comm.size
    assert total[-1] == sum(rank + 3 for rank in range(comm.size))


def check_a_sum_of_16_bits(comm):
    """More than 2 GiB of a type whose sums run in a wider one."""
    n = (1 << 30) + 5
    total = comm.allreduce(numbers(comm.rank, n, ml_dtypes.bfloat16))
    assert total[0] == total[n // 2] == total[-2] == comm.size
    assert total[-1] == sum(rank + 3 for rank in range(comm.size))


def check_a_broadcast(comm):
    x = comm.bcast(numbers(0) if comm.rank == 0 else None)
    assert (x.size, x[-1]) == (NUM_ELEMENTS, 3)


def check_layouts(comm):
    """An array in Fortran's order, and one whose elements all are the same memory."""
    x = comm.bcast(numbers(0, 1 << 31).reshape(1 << 4, 1 << 27).T if comm.rank == 0 else None)
    assert (x.shape, x[-1, -1], x[-1, 0], x.flags.f_contiguous) == ((1 << 27, 1 << 4), 3, 1, True)
    del x
    x = comm.bcast(np.broadcast_to(np.int8(7), (5, 1 << 29)) if comm.rank == 0 else None)
    assert (x.shape, x[0, 0], x[-1, -1], x.flags.writeable) == ((5, 1 << 29), 7, 7, comm.rank > 0)


def check_messages(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send(numbers(0), comm.size - 1, 0)
    elif comm.rank == comm.size - 1 > 0:
        assert comm.recv(0, 0)[-1] == 3


def check_a_gather(comm):
    """One long array, and short ones after it."""
    arrays = comm.gather(numbers(0) if comm.rank == 0 else np.full(3, comm.rank))
    assert [int(x[-1]) for x in arrays or ()] == ([3, *range(1, comm.size)] if comm.rank == 0 else [])


def check_other_exchanges(comm):
    """One long array among short ones."""
    last = comm.size - 1
    short = [np.full(3, 10 * comm.rank + k) for k in range(comm.size)]
    arrays = comm.allgather(numbers(0) if comm.rank == 0 else short[0])
    assert [int(x[-1]) for x in arrays] == [3, *range(10, 10 * comm.size, 10)]
    del arrays
    rows = [*short[:-1], numbers(0)] if comm.rank == 0 else short
    got = [int(x[-1]) for x in comm.alltoall(rows)]
    assert got == [3 if (k, comm.rank) == (0, last) else 10 * k + comm.rank for k in range(comm.size)]
    own = comm.scatter(rows if comm.rank == 0 else None)
    assert int(own[-1]) == (3 if comm.rank == last else comm.rank)


def check_objects(comm):
    text = b"x" * NUM_ELEMENTS if comm.rank == 0 else None
    assert len(comm.bcast_obj(text)) == NUM_ELEMENTS
    gathered = comm.gather_obj(text)
    assert comm.rank or [len(x or "") for x in gathered] == [NUM_ELEMENTS] + [0] * (comm.size - 1)
    del gathered
    assert [len(x or "") for x in comm.allgather_obj(text)] == [NUM_ELEMENTS] + [0] * (comm.size - 1)
    assert len(comm.allreduce_obj(text or b"")) == NUM_ELEMENTS
    if comm.rank == 0 and comm.size > 1:
        comm.send_obj(text, comm.size - 1, 0)
    elif comm.rank == comm.size - 1 > 0:
        assert len(comm.recv_obj(0, 0)) == NUM_ELEMENTS
    own = comm.scatter_obj([*range(comm.size - 1), text] if comm.rank == 0 else None)
    assert own == comm.rank or len(own) == NUM_ELEMENTS


def check_gradients(comm, n=(1 << 30) + 5):
    """A run of gradients in 16 bits; values and gradients take four bytes for each."""
    model = Link()
    with model.init_scope():
        model.w = Parameter(np.zeros(n, np.float16))
    model.w.grad = np.zeros(n, np.float16)
    comm.multi_node_mean_grad(model)
    grad = model.w.grad
    grad[:] = comm.rank + 1
    grad[-1] = 60000
    comm.multi_node_mean_grad(model)
    mean = comm.rank + 1 if type(comm).__name__.startswith("Dummy") else (comm.size + 1) / 2
    assert model.w.grad[0] == model.w.grad[n // 2] == model.w.grad[-2] == mean
    assert model.w.grad[-1] == np.float16(60000)


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=operator.attrgetter("__name__"))
def test_huge_arrays_and_objects(comm, check):
    needs(6, comm.size)
    check(comm)


def test_more_gradients_than_32_bits_count(comm):
    needs(9, comm.size)
    check_gradients(comm, NUM_ELEMENTS)


@pytest.mark.parametrize("check", CHECKS, ids=operator.attrgetter("__name__"))
def test_ranks_that_are_threads(check):
    """On rank 0, while the others wait."""
    comm = create_communicator("naive")
    needs(8, 2)
    if comm.rank == 0:
        run_threads(2, check)
    comm.barrier()
    comm.finalize()
