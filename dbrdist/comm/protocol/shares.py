"""Do the ranks that divide batches among them divide the same batches, each with a share of its own?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.protocol import agree
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    pass


def check_shares(comm: Any, iterator: Any, what: str = "training") -> None:
    """Make sure that ranks which divide batches among them divide the same ones, each its own share. Collective.

    Iterators that are not divided over all of these ranks go through datasets of their own, which may differ.

    Raises:
        CommunicatorError: on every rank, if iterators differ in the number of examples, the batch, the order, the end
            of an epoch, virtual workers or in how far they have come, or if two ranks have the same share.
    """
    is_divided = isinstance(iterator, SerialIterator) and iterator.size == comm.size
    lines = batches_in_words(iterator, what) if is_divided else [f"{what} examples of its own"]
    agree.same_everywhere(comm, agree.as_lines(lines), f"the same {what} batches")
    if is_divided and comm.size > 1:
        shares = comm.gate.allgather_rows(np.array([iterator.rank], np.int64))[:, 0].tolist()
        refuse_doubled(shares, what)


def batches_in_words(iterator: SerialIterator, what: str) -> list[str]:
    """One line for each thing that makes up the global batches still to come."""
    sampler = iterator.order_sampler
    return [
        f"{len(iterator.dataset)} {what} examples",
        f"virtual workers {iterator.virtual_workers}",
        f"batch {iterator.batch_size}",
        f"last={iterator.last!r}",
        "index order" if sampler is None else f"shuffled by {type(sampler).__name__} with seed {iterator.seed}",
        f"example {iterator.current_position} of epoch {iterator.epoch} next",
    ]


def refuse_doubled(shares: list[int], what: str) -> None:
    """Raise where ranks take the same share, which means that another is left out."""
    for share in shares:
        ranks = [rank for rank, theirs in enumerate(shares) if theirs == share]
        if len(ranks) > 1:
            raise CommunicatorError(
                f"expected {what} iterators that each have a share of their own, got rank={share} on "
                f"{name_ranks(ranks)}; make them with rank=comm.rank"
            )
