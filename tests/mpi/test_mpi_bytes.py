"""In what type arrays travel between processes; see conftest.py for how to run it."""

import ml_dtypes
import numpy as np
import pytest

from dbrdist.comm import create_communicator


class Counted:
    """An MPI communicator that notes how many bytes a rank sends."""

    def __init__(self, comm):
        self._comm = comm
        self.num_bytes = 0

    def __getattr__(self, name):
        verb = getattr(self._comm, name)
        if name != "Isend":
            return verb

        def counted(sent, *args):
            self.num_bytes += sent[0].nbytes
            return verb(sent, *args)

        return counted


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_sums_do_not_travel_as_float32(dtype):
    """Each rank sends the others' parts of its array, and its part of the sums to each, in two bytes an element."""
    comm = create_communicator("naive")
    counted = comm._rows = Counted(comm._rows)
    x = np.full(1000, comm.rank + 1, dtype)
    total = comm.allreduce(x)
    assert total.dtype == dtype
    assert (total == sum(range(1, comm.size + 1))).all()
    assert counted.num_bytes <= 2 * x.nbytes
    assert counted.num_bytes > 0 or comm.size == 1
    comm._rows = counted._comm
    comm.finalize()
