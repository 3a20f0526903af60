"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

from numpy.typing import DTypeLike

from dbrdist.comm.functions.normalization import get_communication_backend, multi_node_batch_normalization
from dbrdist.comm.protocol.roster import RosterName, roster_of
from dbrdist.core.array.config import config
from dbrdist.core.model.link import Link
from dbrdist.core.tape.checks import expected
from dbrdist.links import BatchNormalization
from dbrdist.links.initializers import InitialValue

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase
    from dbrdist.core.array.types import Shape


class MultiNodeBatchNormalization(BatchNormalization):
    """Batch normalization with the statistics of the batches of all ranks together.

    Forward and backward, and the running statistics, are those of :class:`dbrdist.links.BatchNormalization` on one
    process with the batches of all ranks. Batches may differ in length between ranks, and be empty on some. In training
    all ranks call the link together. For statistics of groups of ranks pass a part of a communicator (``comm.split``).

    The gradient of x is that of the sum of all ranks' losses; those of gamma and beta are of this rank's batch, as for
    any parameter, and a multi-node optimizer averages them.

    Args:
        size: number of channels, or the shape of the axes that are kept; None takes it from the first batch.
        comm: the ranks.
        decay: weight of the past in the running statistics.
        eps: added to the variance.
        dtype: type of parameters and statistics; None for the configured one, float32 where that is mixed.
        use_gamma, use_beta: False leaves the parameter out.
        initial_gamma, initial_beta: initializer, array or number; None for 1 and 0.
        communication_backend: ``'auto'``, ``'mpi'`` or ``'nccl'``, for old scripts: the communicator decides.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> dbrdist.comm.links.MultiNodeBatchNormalization(3, comm)(np.ones((4, 3), np.float32)).shape
        (4, 3)
    """

    _number: str | RosterName = ""  # of one that is in no chain, by which it is told from others

    def __init__(
        self, size: int | Shape | None, comm: CommunicatorBase, decay: float = 0.9, eps: float = 2e-5,
        dtype: DTypeLike | None = None, use_gamma: bool = True, use_beta: bool = True,
        initial_gamma: InitialValue = None, initial_beta: InitialValue = None, communication_backend: str = "auto",
    ) -> None:  # fmt: skip
        get_communication_backend(comm, communication_backend)
        super().__init__(size, decay, eps, dtype, use_gamma, use_beta, initial_gamma, initial_beta)
        self.comm = comm
        self._number = RosterName(roster_of(comm, "batch normalizations").enter(sys._getframe(1)))

    @property
    def ignores_one_value(self) -> bool:
        """Whether there are no batches of other ranks."""
        return bool(self.comm.size == 1)

    def _of_batch(self, x: Any, gamma: Any, beta: Any, axis: Any, decay: float) -> Any:
        mean, var = (None, None) if config.in_recomputing else (self.avg_mean, self.avg_var)
        return multi_node_batch_normalization(
            self.comm, x, gamma, beta, eps=self.eps, running_mean=mean, running_var=var, axis=axis, decay=decay,
            name=self.name or self._number,
        )  # fmt: skip


def create_mnbn_model(link: Link, comm: CommunicatorBase, communication_backend: str = "auto") -> Link:
    """A copy of a model in which each BatchNormalization is a MultiNodeBatchNormalization over ``comm``.

    Parameters, running statistics and all settings are copied. Links that are used in several places still are.

    Args:
        link: the model to copy.
        comm: the ranks over which the statistics are taken.
        communication_backend: ``'auto'``, ``'mpi'`` or ``'nccl'``; the communicator itself is used, whatever is given.

    Raises:
        ValueError: if the model has a link of a class derived from BatchNormalization, since that may compute something
            else.

    Example:
        >>> comm = dbrdist.comm.create_communicator("single")
        >>> model = dbrdist.Sequential(L.Linear(4, 3), L.BatchNormalization(3))
        >>> type(dbrdist.comm.links.create_mnbn_model(model, comm)[1]).__name__
        'MultiNodeBatchNormalization'
    """
    get_communication_backend(comm, communication_backend)
    new = copy.deepcopy(link)
    for path, part in _all_links(new):
        if type(part) is BatchNormalization:
            # The object stays, and with it every reference that the model has to it.
            part.__class__ = MultiNodeBatchNormalization
            part.comm = comm
        elif isinstance(part, MultiNodeBatchNormalization):
            part.comm = comm
        elif isinstance(part, BatchNormalization):
            what = f"no class derived from BatchNormalization (at {path})"
            raise expected("create_mnbn_model", "link", what, type(part).__name__, "replace that link by hand")
    return new


def _all_links(link: Link) -> list[tuple[str, Link]]:
    if not isinstance(link, Link):
        raise expected("create_mnbn_model", "link", "a Link", type(link).__name__)
    return list(link.namedlinks())
