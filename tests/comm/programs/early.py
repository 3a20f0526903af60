"""Rank 1 does something before its first communicator. For tests/comm/communicators/test_communicator.py."""

import os
import subprocess
import sys

import dbrdist.comm

rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
deed = sys.argv[1]
if rank == 1:
    if deed == "exception":
        raise FileNotFoundError("no data on this host")
    if deed == "exit":
        sys.exit(3)
    if deed == "helper":  # a program of its own that fails: it inherits the environment, but is no rank
        code = "import dbrdist.comm; raise ValueError('of the helper')"
        assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 1
comm = dbrdist.comm.create_communicator("flat")
comm.barrier()
os.write(1, f"the end of rank {rank}\n".encode())
