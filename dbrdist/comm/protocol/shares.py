"""Do the ranks that divide batches among them divide the same batches, each with a share of its own?"""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.protocol import agree
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.datasets.loading.contents import Known, are_alike, known_examples
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.errors import CommunicatorError

if TYPE_CHECKING:
    from dbrdist.comm.communicators.communicator import CommunicatorBase


def check_shares(comm: Any, iterator: Any, what: str = "training", is_moving: bool = True) -> None:
    """Make sure that ranks which divide batches among them divide the same ones, each its own share. Collective.

    Iterators that are not divided over all of these ranks go through datasets of their own, which may differ. Where
    they have come to matters only if they are ``is_moving``: each evaluation begins anew.

    Raises:
        CommunicatorError: on every rank, if iterators differ in their examples, the batch, the order, the end of an
            epoch, virtual workers or in how far they have come, or if two ranks have the same share.
    """
    is_divided = isinstance(iterator, SerialIterator) and iterator.size == comm.size
    lines = batches_in_words(iterator, what, is_moving) if is_divided else [f"{what} examples of its own"]
    agree.same_everywhere(comm, agree.as_lines(lines), f"the same {what} batches")
    if is_divided and comm.size > 1:
        shares = comm.gate.allgather_rows(np.array([iterator.rank], np.int64))[:, 0].tolist()
        refuse_doubled(shares, what)
        check_examples(comm, iterator.dataset, what)


def check_examples(comm: CommunicatorBase, dataset: Any, what: str) -> None:
    """Raise CommunicatorError on every rank where datasets that should be one have other examples. Collective."""
    others = ranks_with_others(comm, dataset)
    if others:
        raise CommunicatorError(
            f"expected the same {what} examples in the same order on every rank, but those of {name_ranks(others)} "
            "differ from rank 0's: files may be listed in another order there (sort them), or a shuffle may have "
            "another seed; or give each rank a part of its own (dbrdist.comm.scatter_dataset, from one rank's dataset)"
        )


def ranks_with_others(comm: CommunicatorBase, dataset: Any) -> list[int]:
    """The ranks whose examples differ from those of the first, as far as that can be told. Collective."""
    if comm.size == 1:
        return []
    known: list[Known] = []
    with contextlib.suppress(Exception):  # what a program's own dataset raises here: nothing can be told of it
        if not getattr(dataset, "is_one_ranks", False):  # a rank's part has examples of its own
            known = known_examples(dataset)
    if agree.are_equal(comm, checksum_of(known)):
        return []
    everyone = comm.allgather_obj(known)
    expected = next(theirs for theirs in everyone if theirs)
    return [rank for rank, theirs in enumerate(everyone) if theirs and not are_alike(expected, theirs)]


def checksum_of(known: list[Known]) -> int:
    """A checksum of what is known of examples."""
    found = 0
    for one in known:
        found = zlib.crc32(one.encode() if isinstance(one, str) else one.tobytes(), found)
    return found


def batches_in_words(iterator: SerialIterator, what: str, is_moving: bool = True) -> list[str]:
    """One line for each thing that makes up the global batches still to come."""
    sampler = iterator.order_sampler
    lines = [
        f"{len(iterator.dataset)} {what} examples",
        f"virtual workers {iterator.virtual_workers}",
        f"batch {iterator.batch_size}",
        f"last={iterator.last!r}",
        f"repeat={bool(iterator.repeat)}",
        "index order" if sampler is None else f"shuffled by {type(sampler).__name__} with seed {iterator.seed}",
    ]
    if is_moving:
        lines.append(f"order {iterator.order_checksum}")
        lines.append(f"example {iterator.current_position} of epoch {iterator.epoch} next")
    return lines


def refuse_doubled(shares: list[int], what: str) -> None:
    """Raise where ranks take the same share, which means that another is left out."""
    for share in shares:
        ranks = [rank for rank, theirs in enumerate(shares) if theirs == share]
        if len(ranks) > 1:
            raise CommunicatorError(
                f"expected {what} iterators that each have a share of their own, got rank={share} on "
                f"{name_ranks(ranks)}; make them with rank=comm.rank"
            )
