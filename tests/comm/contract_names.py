"""The names of communicators that keep the whole contract on real ranks, in tests/mpi: all that the table has."""

from dbrdist.comm.communicators import create

# "shared" is flat with sums through shared memory for every size of array and number of ranks.
WORLDS = ("naive", "flat", "shared")
OTHERS = tuple(name for name in create.OVER_MPI if name not in WORLDS)
