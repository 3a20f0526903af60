"""Parts of a dataset: slices, splits in two or n, and folds for cross validation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.array.random import generator
from dbrdist.core.usage.mistakes import warn
from dbrdist.datasets.loading.base import DatasetMixin, example_at, get_batch, is_mask
from dbrdist.datasets.loading.contents import known_example

if TYPE_CHECKING:
    from dbrdist.datasets.loading.base import Dataset


class SubDataset(DatasetMixin):
    """The examples ``start`` to ``finish`` of a dataset, in the order given by ``order``.

    Args:
        dataset: the whole dataset.
        start, finish: half-open range of positions, from 0 to ``len(dataset)``.
        order: a permutation of ``range(len(dataset))``; position p is example ``order[p]``. None: position = index.

    Example:
        >>> datasets.SubDataset([10, 11, 12, 13], 1, 3)[:]
        [11, 12]
    """

    def __init__(self, dataset: Any, start: int, finish: int, order: Array | Sequence[int] | None = None) -> None:
        if not 0 <= start <= finish <= len(dataset):
            raise ValueError(
                f"expected 0 <= start <= finish <= {len(dataset)}, the number of examples, "
                f"got start={start} and finish={finish}"
            )
        if is_mask(order):
            raise ValueError("expected an order of integers, got booleans; examples of a mask are dataset[mask]")
        if order is not None and len(order) != len(dataset):
            raise ValueError(f"expected an order of all {len(dataset)} examples, got one of {len(order)}")
        self._dataset = dataset
        self._start = start
        self._size = finish - start
        self._order = order

    def __len__(self) -> int:
        return self._size

    def _index(self, i: int) -> int:
        if not -self._size <= i < self._size:
            raise IndexError(f"expected an index below {self._size}, the number of examples, got {i}")
        position = self._start + int(i) % self._size
        return position if self._order is None else int(self._order[position])

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` without reading it."""
        return known_example(self._dataset, self._index(i))

    def get_example(self, i: int) -> Any:
        return self._dataset[self._index(i)]

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        return example_at(self._dataset, self._index(i), seed, epoch)

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        mapped = np.array([self._index(i) for i in indices], np.int64)
        return get_batch(self._dataset, mapped, seed, epoch, skipped)


def split_dataset(dataset: Dataset, split_at: int, order: Array | None = None) -> tuple[SubDataset, SubDataset]:
    """Two datasets: the first examples and the others.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        split_at: the number of examples in the first, from 0 to the number of examples.
        order: a permutation of the indices; None keeps their order.

    Raises:
        TypeError, ValueError: ``split_at`` is no integer, or out of range.

    Example:
        >>> first, second = datasets.split_dataset([10, 11, 12], 2)
        >>> first[:], second[:]
        ([10, 11], [12])
    """
    if not isinstance(split_at, (int, np.integer)):
        is_share = isinstance(split_at, float) and 0 < split_at < 1
        hint = f"; for a share write int({split_at} * len(dataset))" if is_share else ""
        raise TypeError(f"expected an integer split_at, got {split_at!r}{hint}")
    split_at = int(split_at)
    if not 0 <= split_at <= len(dataset):
        raise ValueError(f"expected split_at from 0 to {len(dataset)}, the number of examples, got {split_at}")
    return SubDataset(dataset, 0, split_at, order), SubDataset(dataset, split_at, len(dataset), order)


def split_dataset_random(dataset: Dataset, first_size: int, seed: int | None = None) -> tuple[SubDataset, SubDataset]:
    """Two random parts of a dataset.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        first_size: the number of examples in the first part.
        seed: the seed of the order; None means 0.

    Example:
        >>> first, second = datasets.split_dataset_random([10, 11, 12], 2)
        >>> sorted(first[:] + second[:])
        [10, 11, 12]
    """
    return split_dataset(dataset, first_size, _random_order(len(dataset), seed))


def split_dataset_n(dataset: Dataset, n: int, order: Array | None = None) -> list[SubDataset]:
    """``n`` parts of ``len(dataset) // n`` examples each; as in Chainer the remainder is in none of them.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        n: the number of parts, from 1 to the number of examples.
        order: a permutation of the indices; None keeps their order.

    Raises:
        TypeError, ValueError: n is no integer, or out of range.

    Example:
        >>> [part[:] for part in datasets.split_dataset_n([10, 11, 12, 13, 14], 2)]
        [[10, 11], [12, 13]]
    """
    n = _parts("n", dataset, n)
    size = len(dataset) // n
    return [SubDataset(dataset, size * k, size * (k + 1), order) for k in range(n)]


def split_dataset_n_random(dataset: Dataset, n: int, seed: int | None = None) -> list[SubDataset]:
    """Random parts of ``len(dataset) // n`` examples each; the remainder is in none of them.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        n: the number of parts, from 1 to the number of examples.
        seed: the seed of the order; None means 0.

    Example:
        >>> [len(part) for part in datasets.split_dataset_n_random([10, 11, 12, 13, 14], 2)]
        [2, 2]
    """
    return split_dataset_n(dataset, n, _random_order(len(dataset), seed))


def get_cross_validation_datasets(
    dataset: Dataset, n_folds: int | None = None, order: Array | Sequence[int] | None = None, **kwargs: Any
) -> list[tuple[SubDataset, SubDataset]]:
    """``n_folds`` pairs (train, test); the test parts are contiguous in ``order``, disjoint, and cover the dataset.

    As in Chainer the last part of the dataset is the first test part, and a train part begins behind its test part.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        n_folds: the number of pairs, from 1 to the number of examples.
        order: a permutation of the indices; None keeps their order.
        kwargs: ``n_fold``, Chainer's older name of ``n_folds``.

    Raises:
        TypeError, ValueError: ``n_folds`` is missing or out of range.

    Example:
        >>> pairs = datasets.get_cross_validation_datasets([0, 1, 2, 3], 2)
        >>> [(train[:], test[:]) for train, test in pairs]
        [([0, 1], [2, 3]), ([2, 3], [0, 1])]
    """
    if "n_fold" in kwargs and n_folds is None:
        n_folds = kwargs.pop("n_fold")
    if kwargs:
        raise TypeError(f"get_cross_validation_datasets got unknown arguments {sorted(kwargs)}")
    if n_folds is None:
        raise TypeError("expected the number of folds, n_folds=...")
    n_folds = _parts("n_folds", dataset, n_folds)
    if n_folds == 1:
        warn("get_cross_validation_datasets: with one fold all examples are for tests and none are left to train on")
    n = len(dataset)
    positions = np.arange(n) if order is None else np.asarray(order)
    if positions.shape != (n,):
        raise ValueError(f"order: expected a permutation of {n} indices, got {order!r:.40}")
    folds = []
    bounds = [n * k // n_folds for k in range(n_folds + 1)]
    for start, end in reversed(list(itertools.pairwise(bounds))):
        train_first = np.concatenate([positions[end:], positions[:start], positions[start:end]])
        folds.append(split_dataset(dataset, n - (end - start), train_first))
    return folds


def get_cross_validation_datasets_random(
    dataset: Dataset, n_folds: int, seed: int | None = None, **kwargs: Any
) -> list[tuple[SubDataset, SubDataset]]:
    """The pairs of :func:`get_cross_validation_datasets` over a random order.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        n_folds: the number of pairs, from 1 to the number of examples.
        seed: the seed of the order; None means 0.
        kwargs: ``n_fold``, Chainer's older name of ``n_folds``.

    Example:
        >>> pairs = datasets.get_cross_validation_datasets_random([0, 1, 2, 3], 2)
        >>> [(len(train), len(test)) for train, test in pairs]
        [(2, 2), (2, 2)]
    """
    return get_cross_validation_datasets(dataset, n_folds, _random_order(len(dataset), seed), **kwargs)


def _random_order(n: int, seed: int | None) -> Array:
    if seed is not None and not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed: expected an integer or None, got {type(seed).__name__} {seed!r:.40}")
    return generator(seed or 0, "split").permutation(n)


def _parts(name: str, dataset: Dataset, n: int) -> int:
    if not isinstance(n, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(n).__name__} {n!r:.40}")
    n = int(n)  # of NumPy's 8 bits it could not be compared
    if not 1 <= n <= len(dataset):
        raise ValueError(f"expected from 1 to {len(dataset)} parts, the number of examples, got {n}")
    return n
