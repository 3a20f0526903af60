"""pure_nccl on several processes, on stand-ins for CuPy and its bindings of NCCL; and NCCL's own calls on one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import assert_same, is_on, put

from dbrdist.comm.communicators import nccl
from dbrdist.core.array import backend
from tests.comm import jobs

PROGRAM = Path(__file__).parent / "programs" / "nccl_ranks.py"


@pytest.mark.without_device
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_nccl_on_stand_ins(num_ranks, on):
    if on != "stand-in":
        pytest.skip("runs with --on stand-in")
    outcome = jobs.run(num_ranks, PROGRAM, limit_seconds=120)
    assert outcome.code == 0, outcome.text
    assert len(outcome.lines("all right")) == num_ranks


@pytest.fixture
def ring(on, device):
    """What one rank needs to call NCCL itself; a communicator of one rank calls nobody."""
    if on != "cupy":
        pytest.skip("needs NCCL")
    bindings = backend.import_nccl()
    device.use()
    ring = nccl.NcclRing(bindings, 1, bindings.get_unique_id(), 0)
    yield ring
    ring.free()


@pytest.mark.parametrize("dtype", [*nccl._TYPES, "float16", "bfloat16"])
def test_sums_of_one_rank(dtype, ring, device):
    numbers = np.arange(1001) % 40
    values = numbers.astype(backend.as_dtype(dtype))
    is_float = backend.is_floating(values.dtype) or values.dtype.kind == "c"
    x = put(device, values)
    ring.reduce(x, [3.0], 2.0 if is_float else None)
    expected = (numbers * (1.5 if is_float else 3)).astype(values.dtype)
    assert is_on(device, x) and x.dtype == values.dtype
    assert backend.to_cpu(x).tobytes() == expected.tobytes()


def test_sending_to_oneself(ring, device, xp):
    """The calls by which 16-bit types travel, in one group."""
    a, b = put(device, np.arange(7, dtype=np.float16)), xp.zeros(7, np.float16)
    stream = backend.current_stream()
    ring._nccl.groupStart()
    ring._move(ring._comm.send, a, 0, stream)
    ring._move(ring._comm.recv, b, 0, stream)
    ring._nccl.groupEnd()
    assert_same(device, b, np.arange(7, dtype=np.float16))
