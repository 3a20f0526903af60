"""A rank and one that it spawns, which comes when the first has waited so long that it would look for a slip."""

import sys

from mpi4py import MPI

from dbrdist.comm import create_communicator
from dbrdist.comm.communicators.duplicate import Duplication

TAG = 7
_is_of_world = Duplication._is_of_world


def say(self):
    found = _is_of_world(self)
    if not told:
        told.append(merged.send("you may come", 1, TAG))
    return found


told = []
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    merged = MPI.COMM_SELF.Spawn(sys.executable, [__file__]).Merge(False)
    Duplication._is_of_world = say
else:
    merged = parent.Merge(True)
    merged.recv(source=0, tag=TAG)
comm = create_communicator("naive", mpi_comm=merged)
if comm.rank == 0:
    print("sum", comm.allreduce_obj(1))
else:
    comm.allreduce_obj(2)
comm.finalize()
