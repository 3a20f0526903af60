"""Communicators with arrays on the device: they travel by way of host memory, and results lie where inputs lay."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support import assert_same, is_on, put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.comm import create_communicator, create_multi_node_optimizer, run_threads
from dbrdist.core.array import backend, random
from dbrdist.core.model.chain import Sequential
from dbrdist.optimizers import MomentumSGD
from tests.comm import jobs

PROGRAM = Path(__file__).parent / "programs" / "comm_ranks.py"
STAGED = ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int32"]


def array(rank, shape=(2, 3), dtype="float32"):
    return (np.arange(int(np.prod(shape))).reshape(shape) + 10 * rank).astype(backend.as_dtype(dtype))


def verbs(comm, device, dtype="float32"):
    """Every array verb."""
    mine, size = array(comm.rank, dtype=dtype), comm.size
    x = put(device, mine)
    expected = sum(array(r, dtype="float64") for r in range(size)).astype(mine.dtype)
    assert_same(device, comm.allreduce(x), expected)
    assert_same(device, x, mine)
    assert_same(device, comm.bcast(x, root=size - 1), array(size - 1, dtype=dtype))
    for got in (comm.allgather(x), comm.gather(x, root=0) if comm.rank == 0 else comm.gather(x, root=0) or ()):
        for r, a in enumerate(got):
            assert_same(device, a, array(r, dtype=dtype))
    parts = tuple(put(device, array(10 * comm.rank + r, dtype=dtype)) for r in range(size))
    for r, a in enumerate(comm.alltoall(parts)):
        assert_same(device, a, array(10 * r + comm.rank, dtype=dtype))
    own = comm.scatter(parts if comm.rank == 0 else None, root=0)
    assert_same(device, own, array(comm.rank, dtype=dtype))
    if size > 1:
        comm.send(x, (comm.rank + 1) % size, 0)
        before = (comm.rank - 1) % size
        assert_same(device, comm.recv(before, 0), array(before, dtype=dtype))


def images(comm, device):
    """Channels-last arrays arrive so."""
    a = backend.channels_last(array(comm.rank, (2, 3, 4, 5)))
    for got in (comm.bcast(put(device, a), root=0), comm.allreduce(put(device, a))):
        assert is_on(device, got) and backend.is_channels_last(got)


def train(comm, device, dtype=None):
    """Three steps on this rank's part of eight examples; the parameters at the end."""
    random.set_seed(0)
    net = Sequential(L.Convolution2D(None, 4, 3), L.BatchNormalization(4), F.relu, L.Linear(None, 3)).to_device(device)
    optimizer = create_multi_node_optimizer(MomentumSGD(0.05), comm).setup(net)
    if dtype is not None:
        comm.set_config("allreduce_grad_dtype", dtype)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 1, 6, 6)).astype(np.float32)  # equal on all ranks: so are their statistics
    t = np.array([0, 2], np.int32)
    for _ in range(3):
        optimizer.update(lambda x, t: F.softmax_cross_entropy(net(x), t), *put(device, x, t))
    assert all(is_on(device, p.array) and is_on(device, p.grad) for p in net.params())
    return [backend.to_cpu(p.array) for p in net.params()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_verbs_of_threads(num_ranks, dtype, device):
    run_threads(num_ranks, verbs, device, dtype, timeout_seconds=60)


def test_images_of_threads(device):
    run_threads(2, images, device, timeout_seconds=60)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_training_on_threads(dtype, device):
    """Ranks with equal batches do what one does alone on the host."""
    (expected,) = run_threads(1, train, backend.get_device("@numpy"), timeout_seconds=60)
    for result in run_threads(2, train, device, dtype, timeout_seconds=60):
        for a, b in zip(result, expected, strict=True):
            tolerance = 1e-3 if dtype is None else 1e-2
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware", "dummy", "single"]
)
def test_one_rank(name, device):
    """With MPI in a process that nobody launched."""
    hook = sys.excepthook
    try:
        if name != "single":
            pytest.importorskip("mpi4py")
            try:
                comm = create_communicator(name)
            except (ImportError, RuntimeError) as e:
                pytest.skip(f"no MPI library: {e}")
        else:
            comm = create_communicator(name)
        for dtype in DTYPES:
            verbs(comm, device, dtype)
        images(comm, device)
        for a, b in zip(train(comm, device), train(comm, backend.get_device("@numpy")), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    finally:
        sys.excepthook = hook


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_that_share_a_device(num_ranks, on):
    """In processes, by way of host memory; NCCL wants a device for each and says so."""
    if on == "numpy" or (on == "stand-in" and num_ranks != 2):
        pytest.skip("runs on a GPU; on the stand-in only with 2 ranks, to save time")
    names = ["naive", "two_dimensional"] if on == "stand-in" else [*STAGED, "pure_nccl"]
    paths = os.pathsep.join(str(jobs.ROOT / folder) for folder in (".", "launch", "tests/gpu"))
    outcome = jobs.run(num_ranks, PROGRAM, on, *names, limit_seconds=110, python=jobs.REAL, PYTHONPATH=paths)
    assert outcome.code == 0, outcome.text
    assert len(outcome.lines("done")) == num_ranks * len(names), outcome.text
