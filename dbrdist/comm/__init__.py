"""Everything that deals with several ranks.

Importing it does not start MPI; creating an MPI communicator does. In a process that mpiexec started as one of several
ranks, an exception that nobody catches ends the job from the import on.
"""

from dbrdist.comm import abort, datasets, extensions, functions, iterators, links
from dbrdist.comm.background import Reduction
from dbrdist.comm.checkpoints import create_multi_node_checkpointer
from dbrdist.comm.communicator import CommunicatorBase
from dbrdist.comm.create import create_communicator
from dbrdist.comm.datasets import create_empty_dataset, open_images_once, scatter_dataset, scatter_index
from dbrdist.comm.evaluator import create_multi_node_evaluator
from dbrdist.comm.links import MultiNodeChainList
from dbrdist.comm.optimizer import create_multi_node_optimizer
from dbrdist.comm.threads import run_threads
from dbrdist.comm.virtual import VirtualUpdater
from dbrdist.errors import DataSizeError

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "Reduction",
    "VirtualUpdater",
    "create_communicator",
    "create_empty_dataset",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "extensions",
    "functions",
    "iterators",
    "links",
    "open_images_once",
    "run_threads",
    "scatter_dataset",
    "scatter_index",
]

abort.guard_launched()
