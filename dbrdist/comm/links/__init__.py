"""Links that communicate: models divided over ranks, and batch normalization over the batches of all ranks."""

from dbrdist.comm.links.chain_list import MultiNodeChainList
from dbrdist.comm.links.n_step_rnn import create_multi_node_n_step_rnn
from dbrdist.comm.links.normalization import MultiNodeBatchNormalization, create_mnbn_model

__all__ = [
    "MultiNodeBatchNormalization",
    "MultiNodeChainList",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
]
