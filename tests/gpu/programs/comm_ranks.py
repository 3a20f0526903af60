"""Run under mpiexec: communicators with arrays on the device, which several ranks may share.

PYTHONPATH=.:launch:tests/gpu mpiexec -n 3 python tests/gpu/programs/comm_ranks.py stand-in naive flat
PYTHONPATH=.:launch:tests/gpu mpiexec -n 3 python tests/gpu/programs/comm_ranks.py cupy naive flat pure_nccl
"""

import sys

import numpy as np
import stand_in
import test_gpu_comm

from dbrdist.comm import create_communicator
from dbrdist.core.array import backend
from tests.comm import contract


def every_verb(comm, device):
    """Sums, transfers, images and training on one communicator."""
    for dtype in test_gpu_comm.DTYPES:
        test_gpu_comm.verbs(comm, device, dtype)
    test_gpu_comm.images(comm, device)
    alone = test_gpu_comm.train(create_communicator("single"), backend.get_device("@numpy"))
    for a, b in zip(test_gpu_comm.train(comm, device), alone, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def refused(comm, device):
    """NCCL wants a device for each rank; every rank says so."""
    x, text = device.xp.ones(3, np.float32), "expected a GPU for each rank, but rank 0 uses that of rank"
    contract.raises(ValueError, text, lambda: comm.allreduce(x))


def main():
    on, *names = sys.argv[1:]
    if on == "stand-in":
        sys.modules["cupy"] = stand_in.module
        sys.modules["cupyx.scipy"] = stand_in.cupyx_scipy
    num_devices = backend.import_cupy().cuda.runtime.getDeviceCount()
    for name in names:
        comm = create_communicator(name)
        device = backend.get_device(f"@cupy:{comm.intra_rank % num_devices}")
        device.use()
        if name == "pure_nccl" and comm.intra_size > num_devices:
            refused(comm, device)
        else:
            every_verb(comm, device)
        comm.finalize()
        print("done", name, flush=True)


main()
