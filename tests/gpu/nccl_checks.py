"""What pure_nccl must do on ranks with a device each, by way of NCCL or without; see programs/nccl_ranks.py."""

import os

import numpy as np
import stand_in
import stand_in_nccl
import test_gpu_comm
from support import assert_same, put

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.comm.communicators import nccl, two_levels
from dbrdist.comm.gradients import stream_overlap
from dbrdist.core.array import backend, random
from dbrdist.core.model.chain import Chain
from dbrdist.core.model.parameter import Parameter
from dbrdist.optimizers import MomentumSGD
from tests.comm import contract

BFLOAT16 = backend.as_dtype("bfloat16")


def used(function, *names):
    """What the function returns; NCCL must have been called by exactly these names."""
    before = len(stand_in_nccl.calls)
    result = function()
    assert set(stand_in_nccl.calls[before:]) == set(names), (stand_in_nccl.calls[before:], names)
    return result


def check_sums(comm, device):
    for dtype in [*map(np.dtype, "?bBhHiIqQefdFD"), BFLOAT16]:
        names = "send recv" if dtype == BFLOAT16 or dtype.char in "hHe?" else "allReduce"
        for shape in [(), (1,), (7,), (3, 4), (2, 3, 4, 5)]:
            mine = contract.array_of(comm.rank, shape, dtype)
            wide = sum(contract.array_of(r, shape, dtype).astype(np.complex128) for r in range(comm.size))
            expected = np.asarray({"b": wide.astype(bool), "c": wide}.get(dtype.kind, wide.real))
            result = used(lambda x=mine: comm.allreduce(put(device, x)), *names.split() if comm.size > 1 else [])
            got = backend.to_cpu(result)
            assert type(result) is stand_in.ndarray and got.dtype == dtype and got.shape == shape
            np.testing.assert_array_equal(got.astype(np.complex128), expected.astype(dtype).astype(np.complex128))
    used(lambda: comm.allreduce(put(device, np.zeros((0, 3), np.float32))))


def check_16_bit_sums(comm, device):
    rng = np.random.default_rng(5)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        everyone = rng.normal(size=(comm.size, 1001)).astype(dtype)
        exact = everyone.astype(np.float32).astype(np.float64).sum(0).astype(np.float32).astype(dtype)
        assert_same(device, comm.allreduce(put(device, everyone[comm.rank])), exact)


def check_mixed_places(comm, device):
    """Where one rank's array lies in host memory all send through it; each result lies where its argument did."""
    mine = contract.array_of(comm.rank)
    x = mine if comm.rank == 0 else put(device, mine)
    result = used(lambda: comm.allreduce(x))
    total = sum(contract.array_of(r) for r in range(comm.size))
    np.testing.assert_array_equal(backend.to_cpu(result), total)
    assert type(result) is type(x)


def gradients(comm, device, dtypes, configured=None):
    model = Chain()
    with model.init_scope():
        for i, dtype in enumerate(dtypes):
            setattr(model, f"p{i}", Parameter(np.zeros((3, i + 1), dtype)))
    model.to_device(device)
    comm.set_config("allreduce_grad_dtype", configured)
    return model


def check_gradients(comm, device):
    for dtypes, configured, tolerance in [
        ([np.float32, np.float64], None, 1e-6),
        ([np.float16, BFLOAT16], None, 1e-2),
        ([np.float32], "float16", 1e-3),
        ([np.float32, np.float64], "bfloat16", 1e-2),
    ]:
        model = gradients(comm, device, dtypes, configured)
        named = list(model.namedparams())
        narrow = configured is not None or np.dtype(dtypes[0]).itemsize == 2
        for step in range(3):
            for weighted in (False, True):
                rng = [np.random.default_rng([r, step]) for r in range(comm.size)]
                values = [[g.normal(size=p.shape) for p in model.params()] for g in rng]
                for p, value in zip(model.params(), values[comm.rank]):
                    p.grad = put(device, value.astype(p.dtype))
                counts = [r + 1 for r in range(comm.size)] if weighted else [1] * comm.size
                names = [] if comm.size == 1 else ["send", "recv"] if narrow else ["allReduce"]
                names += ["allReduce"] * (comm.size > 1 and configured == "float16")  # the largest number of all ranks
                used(lambda c=counts, n=named: comm.weighted_mean_grad(n, True, c[comm.rank]), *names)
                for i, p in enumerate(model.params()):
                    mean = sum(c * v[i] for c, v in zip(counts, values)) / sum(counts)
                    got = backend.to_cpu(p.grad).astype(np.float64)
                    np.testing.assert_allclose(got, mean, rtol=tolerance, atol=tolerance)
                    assert type(p.grad) is stand_in.ndarray
                    assert comm.allgather_obj(got.tobytes()) == [got.tobytes()] * comm.size
    comm.set_config("allreduce_grad_dtype", None)


def check_gradients_that_are_missing(comm, device):
    model = gradients(comm, device, [np.float32] * 2)
    for with_both in (True, False, True):
        model.p0.grad = put(device, np.full((3, 1), comm.rank, np.float32))
        model.p1.grad = put(device, np.full((3, 2), comm.rank, np.float32)) if with_both or comm.rank else None
        comm.multi_node_mean_grad(model)
        for p in model.params():
            np.testing.assert_allclose(backend.to_cpu(p.grad) if p.grad is not None else 0, (comm.size - 1) / 2)


class Wide(Chain):
    """Layers with 5 MB of gradients in all, the last one first in the order of parameters."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.last = L.Linear(256, 4)
            self.first, self.second, self.third = L.Linear(64, 512), L.Linear(512, 2048), L.Linear(2048, 256)

    def forward(self, x):
        return self.last(F.relu(self.third(F.relu(self.second(F.relu(self.first(x)))))))


def trained_wide(comm, device, num_samples):
    """Parameters after four steps; calls of NCCL and the streams of the last one."""
    random.set_seed(0)
    net = Wide().to_device(device)
    optimizer = create_multi_node_optimizer(MomentumSGD(0.05), comm).setup(net)
    rng = np.random.default_rng(comm.rank)
    for _ in range(4):
        first = len(stand_in_nccl.calls), len(stand_in_nccl.streams)
        x, t = rng.standard_normal((3, 64)).astype(np.float32), np.array([0, 2, 1], np.int32)
        loss = lambda x, t: F.softmax_cross_entropy(net(x), t)  # noqa: E731
        optimizer.update(loss, *put(device, x, t), num_samples=num_samples)
    values = [backend.to_cpu(p.array) for p in net.params()]
    return values, stand_in_nccl.calls[first[0] :], set(stand_in_nccl.streams[first[1] :])


def check_overlap(comm, device):
    """Buckets are reduced on a stream of their own while backward runs, with the bits of one reduction after it."""
    stream_overlap.StreamOverlap.__init__.__defaults__ = (1 << 20,)
    for dtype in (None, "float16", "bfloat16"):
        for num_samples in (None, comm.rank + 1):
            found = []
            for overlaps in (False, None):
                comm.set_config("overlap", overlaps)
                comm.set_config("allreduce_grad_dtype", dtype)
                found.append(trained_wide(comm, device, num_samples))
            (after, calls_after, streams_after), (beside, calls, streams) = found
            for a, b in zip(after, beside, strict=True):
                if dtype == "float16":  # each bucket has a scale of its own
                    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
                else:
                    np.testing.assert_array_equal(a, b)
            if comm.size > 1:
                assert streams_after == {0} and 0 not in streams and len(streams) == 1
                assert len(calls) >= 4 * len(calls_after) if dtype is None else calls
            assert comm.allgather_obj([a.tobytes() for a in beside]) == [[a.tobytes() for a in beside]] * comm.size
    comm.set_config("overlap", None)
    comm.set_config("allreduce_grad_dtype", None)


def check_auto(comm):
    """'auto' is NCCL where each rank has a GPU of its own, and flat where they would share one."""
    nccl.driver_cuda = lambda: (13, 0)
    backend.import_cupy().cuda.nccl = stand_in_nccl
    own, size = os.environ["STAND_IN_BUS"], comm.size
    for bus, is_nccl in ((own, size > 1), ("0000", size == 2)):  # the stand-in has two devices
        os.environ["STAND_IN_BUS"] = bus
        backend.get_device("@cupy:0").use()
        found = create_communicator()
        assert type(found).__name__ == ("NcclCommunicator" if is_nccl else "FlatCommunicator"), (bus, found)
        assert (type(found.reducer).__name__ == "NcclReducer") == is_nccl
        found.finalize()
    os.environ["STAND_IN_BUS"] = own


def check_parts(comm, device):
    part = comm.split(comm.rank % 2, -comm.rank)
    assert type(part) is type(comm)
    check_16_bit_sums(part, device)
    check_gradients(part, device)
    part.finalize()


def refused():
    """Two ranks on one device, and a rank without NCCL: in words, on every rank, and the job goes on."""
    comm = create_communicator("pure_nccl")
    backend.get_device("@cupy:0").use()
    if comm.size > 1:
        x = put(backend.get_device("@cupy:0"), np.ones(3, np.float32))
        text = f"expected a GPU for each rank, but rank 0 uses that of rank {1} (0000:0)"
        for _ in range(2):
            contract.raises(ValueError, text, lambda: comm.allreduce(x))
    comm.finalize()
    stand_in_nccl.available = comm.rank != comm.size - 1
    text = "'pure_nccl' expected CuPy with NCCL, and a GPU on every rank, but CuPy finds no NCCL library"
    contract.raises(RuntimeError, text, lambda: create_communicator("pure_nccl"))
    stand_in_nccl.available = True


def check_staged(device):
    """Communicators without NCCL bring device arrays through host memory, non_cuda_aware through one short buffer."""
    two_levels._PIECE_BYTES = 64
    for name in ("hierarchical", "two_dimensional", "non_cuda_aware", "flat"):
        comm = create_communicator(name)
        for dtype in (np.dtype(np.float32), BFLOAT16):
            values = [contract.array_of(r, (101,), dtype) for r in range(comm.size)]
            total = sum(v.astype(np.float32) for v in values).astype(dtype)
            assert_same(device, used(lambda c=comm, v=values: c.allreduce(put(device, v[c.rank]))), total)
        model = gradients(comm, device, [np.float32, np.float16])
        for p in model.params():
            p.grad = put(device, np.full(p.shape, comm.rank, p.dtype))
        used(lambda c=comm, m=model: c.multi_node_mean_grad(m))
        for p in model.params():
            assert_same(device, p.grad, np.full(p.shape, (comm.size - 1) / 2, p.dtype))
        comm.finalize()


def main():
    refused()
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
    os.environ["STAND_IN_BUS"] = str(rank)
    device = backend.get_device(f"@cupy:{rank % 2}")
    device.use()
    comm = create_communicator("pure_nccl")
    for check in (contract.check_allreduce_every_type, contract.check_weighted_sums):  # of host arrays
        used(lambda c=check: c(comm))
    for dtype in test_gpu_comm.DTYPES:
        test_gpu_comm.verbs(comm, device, dtype)
    test_gpu_comm.images(comm, device)
    check_sums(comm, device)
    check_16_bit_sums(comm, device)
    check_mixed_places(comm, device)
    check_gradients(comm, device)
    check_gradients_that_are_missing(comm, device)
    check_overlap(comm, device)
    check_auto(comm)
    device.use()
    check_parts(comm, device)
    check_staged(device)
    trained = test_gpu_comm.train(comm, device)
    alone = test_gpu_comm.train(create_communicator("single"), backend.get_device("@numpy"))
    for a, b in zip(trained, alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    comm.finalize()
    print("all right", comm.rank, flush=True)


main()
