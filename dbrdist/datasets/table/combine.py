"""Datasets made of datasets: side by side, one after another, or through a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, is_array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.random import generator
from dbrdist.core.array.types import Index
from dbrdist.core.usage.foreign_names import add_hints
from dbrdist.core.usage.mistakes import warn, warn_of_arrays
from dbrdist.datasets.image.transforms import at_epoch, leaves_examples, transform_batch
from dbrdist.datasets.loading.base import (
    Batch,
    DatasetMixin,
    chosen,
    copied,
    example_at,
    has_rows,
    is_row_major,
    list_examples,
    read_examples,
    separate_examples,
    take,
)
from dbrdist.datasets.loading.contents import known_example


def _check_lengths(named: list[tuple[str, Any]], owner: str) -> None:
    if not named:
        raise ValueError(f"expected at least one dataset for {owner}, got none")
    lengths = {name: len(d) for name, d in named}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected datasets of one length for {owner}, got {lengths}")


def _are_datasets(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(hasattr(x, "get_batch") or hasattr(x, "get_example") for x in values)


def _explain_transform(transform: Callable[..., Any], example: Any) -> None:
    """Raise a better error where a function that takes the entries of an example was called with the example."""
    try:
        needed = [
            p for p in inspect.signature(transform).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]  # fmt: skip
    except (TypeError, ValueError):
        return
    if len(needed) > 1:
        names = ", ".join(p.name for p in needed)
        raise TypeError(
            f"TransformDataset: the transform takes {names}, and is called with one argument, the whole example "
            f"({type(example).__name__}); write def transform(example): {names} = example"
        )


def _examples(dataset: Any, index: object) -> Any:
    """One example or several; of what takes no list of indices, such as a list, one after the other."""
    if not isinstance(index, (list, np.ndarray)) or is_array(dataset) or isinstance(dataset, DatasetMixin):
        return dataset[index]
    return dataset[index] if as_chainer[0] else [dataset[int(i)] for i in index]


class TupleDataset:
    """Datasets of one length beside each other: example ``i`` is the tuple of their examples ``i``.

    Args:
        datasets: the datasets, such as an array of inputs and one of labels; all have the same length.

    Raises:
        ValueError: the lengths differ, or there is no dataset.

    Example:
        >>> datasets.TupleDataset(np.array([0.5, 1.5]), np.array([0, 1]))[1]
        (np.float64(1.5), np.int64(1))
    """

    def __init__(self, *datasets: Any) -> None:
        if len(datasets) == 1 and isinstance(datasets[0], (list, tuple)):
            warn_of_arrays(datasets[0], "TupleDataset", "TupleDataset(*arrays)")
        _check_lengths([(str(k), d) for k, d in enumerate(datasets)], "TupleDataset")
        self._datasets = datasets
        self._length = len(datasets[0])
        self._all_arrays = all(map(has_rows, datasets))
        self._are_rows = all(is_row_major(d) for d in datasets)

    @property
    def columns(self) -> tuple[Any, ...]:
        """The datasets beside each other."""
        return tuple(self._datasets)

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` without reading it."""
        return [known_example(d, i) for d in self._datasets]

    def __getitem__(self, index: Index) -> Any:
        """A tuple for an integer; a list of tuples for a slice, a list or a 1-d array of integers or booleans.

        In a program of Chainer a list or an array gives a tuple of what it gives of each dataset.
        """
        index = chosen(index, self._length)
        columns = [_examples(d, index) for d in self._datasets]
        if isinstance(index, slice) or (isinstance(index, (list, np.ndarray)) and not as_chainer[0]):
            return list(zip(*columns))
        return tuple(columns)

    def __len__(self) -> int:
        return self._length

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        return tuple(example_at(d, i, seed, epoch) for d in self._datasets)

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        if self._are_rows:
            return Batch(tuple([rows.take(indices, 0) for rows in self._datasets]))
        if self._all_arrays:
            return Batch(tuple([take(d, indices) for d in self._datasets]))
        return list_examples(self, indices, seed, epoch, skipped)


class DictDataset:
    """Datasets of one length under names: example ``i`` is the dictionary of their examples ``i``.

    Args:
        datasets: the datasets by name; all have the same length.

    Raises:
        ValueError: the lengths differ, or there is no dataset.

    Example:
        >>> datasets.DictDataset(x=[1, 2], y=["a", "b"])[1]
        {'x': 2, 'y': 'b'}
    """

    def __init__(self, **datasets: Any) -> None:
        _check_lengths(list(datasets.items()), "DictDataset")
        self._datasets = datasets
        self._length = len(next(iter(datasets.values())))
        self._all_arrays = all(map(has_rows, datasets.values()))

    def __getitem__(self, index: Index) -> Any:
        """A dictionary for an integer; a list of dictionaries for a slice, a list or an array of integers or booleans.

        In a program of Chainer a list or an array gives a dictionary of what it gives of each dataset.
        """
        index = chosen(index, self._length)
        columns = {k: _examples(d, index) for k, d in self._datasets.items()}
        if isinstance(index, slice) or (isinstance(index, (list, np.ndarray)) and not as_chainer[0]):
            return [dict(zip(columns, row)) for row in zip(*columns.values())]
        return columns

    def __len__(self) -> int:
        return self._length

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` without reading it."""
        return [known_example(d, i) for d in self._datasets.values()]

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        return {k: example_at(d, i, seed, epoch) for k, d in self._datasets.items()}

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        if self._all_arrays:
            return Batch({k: take(d, indices) for k, d in self._datasets.items()})
        return list_examples(self, indices, seed, epoch, skipped)


add_hints(TupleDataset, "DatasetMixin")
add_hints(DictDataset, "DatasetMixin")


class ConcatenatedDataset(DatasetMixin):
    """Datasets one after another: the examples of the first, then those of the second, and so on.

    Args:
        datasets: any number of datasets with ``len`` and ``[i]``.

    Example:
        >>> both = datasets.ConcatenatedDataset([1, 2], [3])
        >>> len(both), both[2]
        (3, 3)
    """

    def __init__(self, *datasets: Any) -> None:
        if len(datasets) == 1 and isinstance(datasets[0], (list, tuple)) and _are_datasets(datasets[0]):
            warn(
                f"ConcatenatedDataset: a list of {len(datasets[0])} datasets has {len(datasets[0])} examples; write "
                "ConcatenatedDataset(*datasets)"
            )
        self._datasets = datasets
        self._ends = np.cumsum([len(d) for d in datasets], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _locate(self, i: int) -> tuple[Any, int]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"expected an index below {len(self)}, the number of examples, got {i}")
        i %= len(self)
        k = int(np.searchsorted(self._ends, i, side="right"))
        return self._datasets[k], i - (int(self._ends[k - 1]) if k else 0)

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` without reading it."""
        return known_example(*self._locate(i))

    def get_example(self, i: int) -> Any:
        dataset, j = self._locate(i)
        return dataset[j]

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        dataset, j = self._locate(i)
        return example_at(dataset, j, seed, epoch)


class TransformDataset(DatasetMixin):
    """``transform(example)`` of a dataset's examples, computed at each access.

    For random changes take :class:`AugmentedDataset`, whose transform is handed its random numbers.

    Args:
        dataset: anything with ``len`` and ``[i]``.
        transform: a function of one example that returns the new one.

    Raises:
        TypeError: ``transform`` cannot be called.

    Example:
        >>> datasets.TransformDataset([1, 2, 3], lambda x: 10 * x)[2]
        30
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:
        if not callable(transform):
            kind = type(transform).__name__
            raise TypeError(f"TransformDataset: transform: expected a function of an example, got {kind}")
        self._dataset = dataset
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` before it is changed, without reading it."""
        return known_example(self._dataset, i)

    def get_example(self, i: int) -> Any:
        return self._transformed(self._dataset[i])

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        return self._transformed(example_at(self._dataset, i, seed, epoch))

    def _transformed(self, example: Any) -> Any:
        try:
            return self._transform(example)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself
                _explain_transform(self._transform, example)
            raise


class AugmentedDataset(DatasetMixin):
    """``transform(example, rng)`` of a dataset's examples, where ``rng`` depends on (seed, epoch, i) and nothing else.

    Indexing shows the examples of epoch 0 with seed 0; a loader asks for those of its own seed and epoch.

    Args:
        dataset: the examples, tuples whose first entry is the image (H, W, C) for the transforms of
            :mod:`dbrdist.datasets.image.transforms`; a transform of your own may take any example.
        transform: a callable ``(example, rng)``, such as a ``Compose``; ``rng`` is a ``numpy.random.Generator``.

    Example:
        >>> noisy = datasets.AugmentedDataset([1.0, 2.0], lambda x, rng: x + 0 * rng.random())
        >>> noisy[1]
        2.0
    """

    def __init__(self, dataset: Any, transform: Callable[..., Any]) -> None:
        self._dataset = dataset
        self._transform = transform
        self._copies = not leaves_examples(transform)

    def __len__(self) -> int:
        return len(self._dataset)

    def known_example(self, i: int) -> object:
        """What is known of example ``i`` before it is changed, without reading it."""
        return known_example(self._dataset, i)

    def get_example(self, i: int) -> Any:
        return self.example_at(i, 0, 0)

    def example_at(self, i: int, seed: int, epoch: int) -> Any:
        """Example ``i`` as it looks in ``epoch`` (from 0) of a run with ``seed``."""
        example = example_at(self._dataset, i, seed, epoch)
        example = copied(example) if self._copies else example
        return at_epoch(self._transform, epoch)(example, generator(seed, "augment", epoch, int(i) % len(self)))

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        if self._copies:
            read = read_examples(self._dataset, indices, seed, epoch, skipped)
            examples: Iterator[Any] = ((i, copied(example)) for i, example in read)
        else:
            examples = separate_examples(self._dataset, indices, seed, epoch, skipped)
        return transform_batch(self._transform, examples, len(indices), seed, epoch, skipped)
