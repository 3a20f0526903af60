"""The first program of every MPI course."""

from mpi4py import MPI

world = MPI.COMM_WORLD
print("hello from rank", world.rank, "of", world.size, "on", MPI.Get_processor_name())
