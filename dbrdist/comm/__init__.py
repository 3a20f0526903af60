"""Everything that knows there are several ranks. Importing it starts nothing; creating an MPI communicator does."""

from dbrdist.comm.communicator import CommunicatorBase
from dbrdist.comm.create import create_communicator
from dbrdist.comm.threads import run_threads

__all__ = ["CommunicatorBase", "create_communicator", "run_threads"]
