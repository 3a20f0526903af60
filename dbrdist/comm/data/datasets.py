"""A part of a dataset for each rank.

These parts stay the same for the whole run, as in ChainerMN. Better use one dataset on all ranks and an iterator with
``rank=comm.rank, size=comm.size``: each epoch has its own permutation of all examples, divided over the ranks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.comm.communicators.communicator import CommunicatorBase
from dbrdist.comm.protocol import agree
from dbrdist.comm.protocol.agree import raise_together
from dbrdist.comm.protocol.arguments import attempt, rank_of, whole_number
from dbrdist.comm.protocol.shares import ranks_with_others
from dbrdist.comm.transport.disagreement import name_ranks
from dbrdist.core.array.backend import Array
from dbrdist.core.array.random import generator
from dbrdist.core.usage.mistakes import warn
from dbrdist.datasets.image.index import ImageIndex, in_memory, open_images
from dbrdist.datasets.loading.base import block_bounds
from dbrdist.datasets.table.split import SubDataset
from dbrdist.errors import DataSizeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dbrdist.datasets.loading.base import Dataset


class Shard(SubDataset):
    """One rank's examples. The last ``num_padding`` of them (0 or 1) belong to the next rank and only fill it up.

    A multi-node evaluator leaves them out; in training they count twice.
    """

    def __init__(self, dataset: Dataset, start: int, finish: int, order: Array | None, num_padding: int) -> None:
        super().__init__(dataset, start, finish, order)
        self.num_padding = num_padding
        self.is_one_ranks = len(self) - num_padding < len(dataset)

    @property
    def whole(self) -> Dataset:
        """The dataset of which this is a part."""
        dataset: Dataset = self._dataset
        return dataset

    @property
    def order(self) -> Array | Sequence[int] | None:
        """The permutation of the whole dataset that is divided; None for the order of indices."""
        return self._order

    def without_padding(self) -> SubDataset:
        """The examples that are this rank's own."""
        start, finish = self._start, self._start + len(self) - self.num_padding
        return SubDataset(self._dataset, start, finish, self._order)


def scatter_dataset(
    dataset: Dataset,
    comm: CommunicatorBase,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    max_buf_len: int = 256 * 1024 * 1024,
    *,
    force_equal_length: bool = True,
) -> Shard:
    """This rank's part of a dataset: contiguous in the order of indices, or of one permutation.

    Indices are scattered, not examples: every rank reads its own from its ``dataset``. Ranks that pass None get the
    root's, pickled (cheap for a list of files, expensive for arrays). Where it can be told that others have other
    examples, or another order of them, all get the root's, with a warning.

    Args:
        dataset: the whole dataset, the same on every rank that has one.
        comm: the ranks.
        root: the rank whose length, ``shuffle``, ``seed`` and ``force_equal_length`` are used.
        shuffle: divide a permutation that depends only on ``seed``.
        seed: the seed of the permutation; None is 0.
        max_buf_len: how many bytes of a pickled dataset are sent at a time.
        force_equal_length: give every rank the same number of examples, with one of padding if needed.

    Raises:
        DataSizeError: on every rank, if there are no examples, so that equal lengths are impossible.
        TypeError: on every rank, if the root has no dataset.
        ValueError: on every rank, if datasets differ in length.

    Example:
        >>> dbrdist.comm.run_threads(2, lambda comm: dbrdist.comm.scatter_dataset([10, 11, 12, 13], comm)[:])
        [[10, 11], [12, 13]]
    """
    if not isinstance(comm, CommunicatorBase):
        raise TypeError(
            f"scatter_dataset: expected a communicator, got {type(comm).__name__}; write scatter_dataset(dataset, comm)"
        )
    raise_together(comm, attempt(rank_of, root, comm.size, "scatter_dataset: root")[1])
    dataset = _for_all(dataset, comm, root, max_buf_len)
    length: int | None = None
    with agree.together(comm):
        length = _length(dataset)
        if seed is not None:
            whole_number(seed, "scatter_dataset: seed")
    num_samples, shuffle, seed = comm.bcast_obj((length, shuffle, seed or 0), root=root)
    with agree.together(comm):
        if length != num_samples:
            raise ValueError(f"scatter_dataset expected {num_samples} examples as rank {root} has, got {length}")
    others = ranks_with_others(comm, dataset)
    if others:
        with agree.together(comm):
            if comm.rank == root:
                warn(
                    f"scatter_dataset: {name_ranks(others)} has other examples than rank 0, or in another order, so "
                    f"that parts would overlap: all ranks get the dataset of rank {root}; make the same one everywhere "
                    "(sort lists of files, take one seed), or pass None on the other ranks"
                )
        dataset = comm.bcast_obj(dataset, max_buf_len, root=root)
    order = generator(seed, "scatter").permutation(num_samples) if shuffle else None
    begin, end = scatter_index(num_samples, comm, root, force_equal_length=force_equal_length)
    own_begin, own_end = block_bounds(num_samples, comm.rank, comm.size)
    return Shard(dataset, begin, end, order, (end - begin) - (own_end - own_begin))


def _length(dataset: Dataset) -> int:
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"scatter_dataset expected a dataset, but {type(dataset).__name__} has no len()")
    return len(dataset)


def _for_all(dataset: Dataset, comm: CommunicatorBase, root: int, max_buf_len: int) -> Any:
    """``dataset``, or where a rank has none, the root's."""
    with agree.together(comm):
        if comm.rank == root and dataset is None:
            raise TypeError("scatter_dataset expected a dataset on the root, got None")
    if not comm.gate.allgather_rows(np.array([dataset is None], np.int64)).any():
        return dataset
    shared = comm.bcast_obj(dataset, max_buf_len, root)
    return shared if dataset is None else dataset


def scatter_index(
    n_total_samples: int, comm: CommunicatorBase, root: int = 0, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """This rank's range of indices, (begin, end).

    Args:
        n_total_samples: the number of indices; that of the root is used.
        comm: the ranks.
        root: the rank whose number and ``force_equal_length`` are used.
        force_equal_length: let ranges that would be shorter reach one index into the next.

    Raises:
        DataSizeError: on every rank, if equal lengths are required and there is no sample.

    Example:
        >>> dbrdist.comm.run_threads(2, lambda comm: dbrdist.comm.scatter_index(4, comm))
        [(0, 2), (2, 4)]
    """
    num_samples, force_equal_length = comm.bcast_obj((n_total_samples, force_equal_length), root=root)
    num_samples = whole_number(num_samples, "scatter_index: n_total_samples")  # the same error on every rank
    if num_samples < 0 or (force_equal_length and num_samples == 0):
        raise DataSizeError(f"expected at least 1 sample to divide over {comm.size} ranks, got {num_samples}")
    begin, end = block_bounds(num_samples, comm.rank, comm.size)
    return (begin, begin + -(-num_samples // comm.size)) if force_equal_length else (begin, end)


def create_empty_dataset(dataset: Dataset) -> list[tuple[()]]:
    """As many empty examples as ``dataset`` has, for a rank whose part of a model reads no data.

    Args:
        dataset: the dataset whose length counts.

    Example:
        >>> dbrdist.comm.create_empty_dataset([10, 11, 12])
        [(), (), ()]
    """
    return [()] * len(dataset)


def open_images_once(root: str | os.PathLike[str], comm: CommunicatorBase) -> ImageIndex:
    """The list of images in ``root``, for ``ImageFolder(root, index=...)``: rank 0 scans the folder for all ranks.

    The processes of a host share one copy in memory, their loader processes included. Collective.

    Args:
        root: the folder of the images; see :func:`dbrdist.datasets.open_images`.
        comm: the ranks.

    Raises:
        FileNotFoundError, ValueError: on every rank, what :func:`dbrdist.datasets.open_images` raises on rank 0.

    Example:
        >>> index = dbrdist.comm.open_images_once("images/train", comm)  # doctest: +SKIP
        >>> train = datasets.ImageFolder("images/train", index=index)  # doctest: +SKIP
    """
    index: ImageIndex | None = None
    with agree.together(comm):
        if comm.rank == 0:
            index = open_images(root)
    leaders, host = comm.split(0 if comm.intra_rank == 0 else None, comm.rank), comm.split(comm.inter_rank, comm.rank)
    if leaders is not None:
        block = leaders.bcast(None if index is None else index.block())
        its_root = leaders.bcast_obj(None if index is None else index.root)
        index = in_memory(block, its_root) if index is None else index
        leaders.finalize()
    shared: ImageIndex = host.bcast_obj(index)
    host.finalize()
    return shared
