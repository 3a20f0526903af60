"""Each rank makes a communicator, multiplies with BLAS and convolves with oneDNN, and says with how many threads.

threads_used.py [CORE,CORE]...     the affinity mask of each rank, if it is to be another than the inherited one
"""

import os
import sys
import time

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.transport import mpi
from dbrdist.core.array import thread_pools
from dbrdist.functions import convolution_2d


def busy_threads(work, seconds):
    """How many threads of this process compute while ``work`` is repeated."""
    before = run_times()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()
    grown = [time_ns - before.get(thread, 0) for thread, time_ns in run_times().items()]
    return sum(ns > 0.02e9 * seconds for ns in grown)


def run_times():
    """Nanoseconds that each thread of this process has run."""
    times = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            times[thread] = int(file.read().split()[0])
    return times


rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
if len(sys.argv) > 1:
    os.sched_setaffinity(0, map(int, sys.argv[1 + rank].split(",")))
comm = create_communicator()
comm.split(comm.rank, 0)  # that ranks have a communicator each gives them no cores
a = np.ones((400, 400), np.float32)
x, w = np.ones((4, 32, 32, 32), np.float32), np.ones((32, 32, 3, 3), np.float32)
convolution_2d(x, w)  # loads oneDNN
used = {
    "OpenBLAS": busy_threads(lambda: a @ a, 0.3),
    "oneDNN": busy_threads(lambda: convolution_2d(x, w), 0.3),
    **{f"pool of {pool.name}": pool.size() for pool in thread_pools.pools()},
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    "cores": thread_pools.num_cores(),
    "spins": mpi._spins == mpi._SPINS,
}
for line in comm.gather_obj(f"rank {rank}: {used}") or ():
    print(line)
