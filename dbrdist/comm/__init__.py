"""Everything that deals with several ranks.

Importing it does not start MPI; creating an MPI communicator does. In a process that mpiexec started as one of several
ranks, an exception that nobody catches ends the job from the import on.
"""

from dbrdist.comm import functions, links
from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.communicators.create import create_communicator
from dbrdist.comm.communicators.threads import run_threads
from dbrdist.comm.data import datasets, iterators
from dbrdist.comm.data.datasets import create_empty_dataset, open_images_once, scatter_dataset, scatter_index
from dbrdist.comm.data.evaluator import create_multi_node_evaluator
from dbrdist.comm.failure import abort
from dbrdist.comm.links import MultiNodeChainList
from dbrdist.comm.run import extensions
from dbrdist.comm.run.checkpoints import create_multi_node_checkpointer
from dbrdist.comm.run.recalibration import RecalibrateStatistics
from dbrdist.comm.steps.optimizer import create_multi_node_optimizer
from dbrdist.comm.steps.reduction_handle import Reduction
from dbrdist.comm.steps.virtual import VirtualUpdater
from dbrdist.core.names.missing_names import explained as _explained
from dbrdist.errors import DataSizeError

__getattr__ = _explained("dbrdist.comm")

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "RecalibrateStatistics",
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
