"""A main under comm.abort.guard, as dbrdist-train has it. For tests/comm/failure/test_abort.py."""

import os
import sys

import numpy as np

from dbrdist.comm import create_communicator
from dbrdist.comm.failure import abort
from dbrdist.comm.transport import environment

deed = sys.argv[1]


def main():
    _, rank, _ = environment.launched()
    if deed == "before MPI" and rank == 1:
        raise FileNotFoundError("no such data on this host")
    if deed == "all before MPI":
        if rank == 0:
            print("the configuration is wrong", flush=True)
        return 2
    comm = create_communicator("flat")
    comm.allreduce(np.ones(2))
    if comm.rank == 1:
        if deed == "exception":
            raise ValueError("broken on purpose")
        if deed == "exit":
            sys.exit(3)
        if deed == "return 7":
            return 7
        if deed == "exit text":
            sys.exit("why I leave")
    if deed == "all 75":
        return 75
    comm.allreduce(np.ones(2))
    comm.allreduce(np.ones(2))
    os.write(1, b"done\n")
    return None


abort.guard(main)
