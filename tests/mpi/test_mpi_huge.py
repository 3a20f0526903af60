"""Arrays of more than 2**31 elements and objects of more than 2 GiB; see conftest.py for how to run it.

They need some 9 GiB per rank and a minute, so they run where DBRDIST_TEST_MEMORY says how many GiB the ranks of a host
may take together: ``DBRDIST_TEST_MEMORY=20 mpiexec -n 2 python -m pytest tests/mpi/test_mpi_huge.py``.
"""

import os

import numpy as np
import pytest

from dbrdist.comm import create_communicator

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


def test_objects(comm):
    text = b"x" * NUM_ELEMENTS if comm.rank == 0 else None
    assert len(comm.bcast_obj(text)) == NUM_ELEMENTS
    gathered = comm.gather_obj(text)
    assert comm.rank or [len(x or "") for x in gathered] == [NUM_ELEMENTS] + [0] * (comm.size - 1)
    own = comm.scatter_obj([*range(comm.size - 1), text] if comm.rank == 0 else None)
    assert own == comm.rank or len(own) == NUM_ELEMENTS
