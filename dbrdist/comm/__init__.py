"""Everything that knows there are several ranks. Importing it starts nothing; creating an MPI communicator does."""

from dbrdist.comm.communicator import CommunicatorBase
from dbrdist.comm.create import create_communicator
from dbrdist.comm.optimizer import create_multi_node_optimizer
from dbrdist.comm.threads import run_threads

__all__ = ["CommunicatorBase", "create_communicator", "create_multi_node_optimizer", "run_threads"]
