"""Repeated augmentation: fewer images in an epoch, each of them several times, differently augmented."""

from __future__ import annotations

from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.random import permutation
from dbrdist.datasets.image.mixing import positions
from dbrdist.datasets.loading.base import Batch, DatasetMixin, get_batch, join

_NEXT_SEED = 0x9E3779B97F4A7C15  # between the seeds of two augmentations of one image


class RepeatedDataset(DatasetMixin):
    """A dataset in whose epochs each image comes ``repeats`` times, augmented differently (Hoffer et al. 2020).

    An epoch is as long as before, so that it shows one of ``repeats`` images, others each time. The copies lie in one
    block of ``block`` examples of the epoch's order, ``block / repeats`` (rounded up) apart: in one batch, but on
    different ranks.
    Which image an example is, is a function of (seed, epoch, index), so that numbers depend on no rank or worker.

    It needs loaders that shuffle, as :class:`ShuffleOrderSampler` does. An example that is asked for by index alone is
    that of the wrapped dataset.

    Args:
        dataset: the examples, augmented by functions of (seed, epoch, sample).
        repeats: how often each image comes.
        block: examples of the global batch.

    Example:
        >>> datasets.RepeatedDataset([10, 11, 12], repeats=2, block=3)[:]
        [10, 11, 12]
    """

    def __init__(self, dataset: Any, repeats: int, block: int) -> None:
        if not 1 <= repeats <= block:
            raise ValueError(f"expected repeats from 1 to the block's length, got {repeats} and {block}")
        self._dataset = dataset
        self.repeats = repeats
        self.block = block

    def __len__(self) -> int:
        return len(self._dataset)

    def __reduce__(self) -> Any:
        return RepeatedDataset, (self._dataset, self.repeats, self.block)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def get_example(self, i: int) -> Any:
        return self._dataset[i]

    def sources(self, indices: Array, seed: int, epoch: int) -> tuple[Array, Array]:
        """For ``indices`` the images in ``epoch`` of a run with ``seed``, and the number of each copy, from 0."""
        n = len(self)
        place = positions(seed, epoch, n)[np.asarray(indices, np.int64)].astype(np.int64)
        start, within = place - place % self.block, place % self.block
        stride = -(-np.minimum(self.block, n - start) // self.repeats)  # the last block may be short
        return permutation(seed, epoch, n)[start + within % stride], within // stride

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        skipped: list[str] = []
        batch = self.get_batch(np.array([range(len(self))[i]]), seed, epoch, skipped)
        return batch[0] if len(batch) else self._dataset[i]  # which says what is wrong with it

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        images, copies = self.sources(indices, seed, epoch)
        parts, rows = [], []
        for copy in np.unique(copies):
            mine = np.flatnonzero(copies == copy)
            before = len(skipped)
            own_seed = (seed + int(copy) * _NEXT_SEED) % 2**63
            parts.append(get_batch(self._dataset, images[mine], own_seed, epoch, skipped))
            if len(skipped) > before:  # rows are missing: the order no longer matters as much as the examples
                mine = mine[: len(parts[-1])]
            rows.append(mine)
        order = np.argsort(np.concatenate(rows), kind="stable") if rows else np.empty(0, np.int64)
        return _in_order(parts, order)


def _in_order(parts: list[Any], order: Array) -> Any:
    """Batches joined, with their examples in another order."""
    parts = [part for part in parts if len(part)]
    joined = join(parts) if parts and all(isinstance(part, Batch) for part in parts) else None
    if joined is None:
        examples = [example for part in parts for example in part]
        return [examples[k] for k in order]
    arrays, finish = joined.raw
    if isinstance(arrays, tuple):
        return Batch(tuple(a[order] for a in arrays), finish)
    return Batch(arrays[order], finish)
