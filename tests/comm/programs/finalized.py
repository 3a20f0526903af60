"""A program that ends MPI itself and then wants a communicator."""

from mpi4py import MPI

from dbrdist.comm import create_communicator
from dbrdist.errors import CommunicatorError

rank = MPI.COMM_WORLD.rank
MPI.Finalize()
try:
    create_communicator("flat")
except CommunicatorError as error:
    print(f"rank {rank}: {error}", flush=True)
