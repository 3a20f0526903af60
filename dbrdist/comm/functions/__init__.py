"""Communication through which gradients flow: what is sent forward from rank to rank returns as a gradient.

Every function takes and returns Variables, and has derivatives of every order. Gradients are those of the sum of all
ranks' losses. Going backward is communication too: every rank must go through the same calls, which happens in the
reverse order of the calls. A result that a rank's loss does not depend on is tied to it with :func:`pseudo_connect`.
"""

from dbrdist.comm.functions.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Bcast,
    Gather,
    ReduceScatter,
    Scatter,
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from dbrdist.comm.functions.graph import PseudoConnect, pseudo_connect
from dbrdist.comm.functions.normalization import get_communication_backend
from dbrdist.comm.functions.pair import Recv, Send, recv, send

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Bcast",
    "Gather",
    "PseudoConnect",
    "Recv",
    "ReduceScatter",
    "Scatter",
    "Send",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "get_communication_backend",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]
