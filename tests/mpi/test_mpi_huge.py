"""Arrays of more than 2**31 elements and objects of more than 2 GiB; see conftest.py for how to run it.

They need some 9 GiB per rank and a minute, so they run where DBRDIST_TEST_MEMORY says how many GiB the ranks of a host
may take together: ``DBRDIST_TEST_MEMORY=20 mpiexec -n 2 python -m pytest tests/mpi/test_mpi_huge.py``.
"""

import os

import numpy as np
import pytest

from dbrdist.comm import create_communicator
from dbrdist.core.link import Link
from dbrdist.core.parameter import Parameter

pytestmark = pytest.mark.limit_seconds(300)

NUM_ELEMENTS = (1 << 31) + 5
GIB_PER_RANK = 9
NAMES = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "dummy"]


@pytest.fixture(params=NAMES)
def comm(request):
    made = create_communicator(request.param)
    if made.size * GIB_PER_RANK > int(os.environ.get("DBRDIST_TEST_MEMORY", "0")):
        made.finalize()
        pytest.skip(f"DBRDIST_TEST_MEMORY allows less than {GIB_PER_RANK} GiB per rank")
    yield made
    made.finalize()


def numbers(rank):
    x = np.ones(NUM_ELEMENTS, np.int8)
    x[-1] = rank + 3
    return x


def test_a_sum(comm):
    total = comm.allreduce(numbers(comm.rank))
    assert total.shape == (NUM_ELEMENTS,)
    assert total[0] == total[NUM_ELEMENTS // 2] == comm.size
    assert total[-1] == sum(rank + 3 for rank in range(comm.size))


def test_a_broadcast(comm):
    x = comm.bcast(numbers(0) if comm.rank == 0 else None)
    assert (x.size, x[-1]) == (NUM_ELEMENTS, 3)


def test_messages(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send(numbers(0), comm.size - 1, 0)
    elif comm.rank == comm.size - 1 > 0:
        assert comm.recv(0, 0)[-1] == 3


def test_a_gather(comm):
    """One long array, and short ones after it."""
    arrays = comm.gather(numbers(0) if comm.rank == 0 else np.full(3, comm.rank))
    assert [int(x[-1]) for x in arrays or ()] == ([3, *range(1, comm.size)] if comm.rank == 0 else [])


def test_other_exchanges(comm):
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


def test_gradients(comm):
    """A run of gradients; values and gradients take 8 GiB on each rank."""
    model = Link()
    with model.init_scope():
        model.w = Parameter(np.zeros(NUM_ELEMENTS, np.float16))
    model.w.grad = np.zeros(NUM_ELEMENTS, np.float16)
    comm.multi_node_mean_grad(model)
    grad = model.w.grad
    grad[:] = comm.rank + 1
    grad[-1] = 60000
    comm.multi_node_mean_grad(model)
    mean = comm.rank + 1 if type(comm).__name__.startswith("Dummy") else (comm.size + 1) / 2
    assert model.w.grad[0] == model.w.grad[NUM_ELEMENTS // 2] == model.w.grad[-2] == mean
    assert model.w.grad[-1] == np.float16(60000)


def test_objects(comm):
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
