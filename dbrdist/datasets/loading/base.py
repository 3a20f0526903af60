"""What a dataset is to the loaders: ``len``, indexing, and two optional methods for randomness and speed.

Anything with ``len`` and ``[i]`` is a dataset. Two methods more make it a better one:

- ``example_at(i, seed, epoch)``: example ``i`` as it looks in this epoch, for datasets that augment at random;
- ``get_batch(indices, seed, epoch, skipped)``: many examples at once, as a :class:`Batch` or a list.

Loaders call :func:`get_batch`, which takes whichever a dataset has. Wrappers such as ``SubDataset`` pass both through
with the index of the wrapped dataset, so an example's augmentation does not depend on who asks for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.backend import Array, DeviceSpec, is_array, is_channels_last
from dbrdist.core.usage.foreign_names import add_hints
from dbrdist.core.usage.mistakes import given_a_class, warn_of_arrays
from dbrdist.datasets.loading.memory import reused
from dbrdist.errors import CorruptExampleError

if TYPE_CHECKING:
    from typing import TypeGuard, TypeVar

    from dbrdist.datasets.image.transforms import Finisher

    Indices = TypeVar("Indices")


class SkipExample(CorruptExampleError):
    """This example cannot be read and is to be left out (``on_corrupt='skip'``); loaders catch it and count.

    Example:
        >>> datasets.SkipExample("a.jpg is no JPEG file")  # doctest: +SKIP
    """


class Dataset(Protocol):
    """What loaders read: anything with ``len`` and ``[i]``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def chosen(indices: Indices, length: int) -> Indices | list[int]:
    """The indices of examples of a dataset; those where it is True for a list or an array of booleans, a mask.

    Raises:
        IndexError: a mask has not ``length`` booleans.
    """
    if not is_mask(indices):
        return indices
    if len(indices) != length:
        raise IndexError(f"expected a mask of {length} booleans, one for each example, got {len(indices)}")
    return [int(i) for i in np.flatnonzero(indices)]


def is_mask(indices: object) -> TypeGuard[list[bool]]:
    """Whether a list or an array holds booleans, which would be taken for the integers 0 and 1."""
    if isinstance(indices, list):
        return bool(indices) and isinstance(indices[0], (bool, np.bool_))
    return isinstance(indices, np.ndarray) and indices.dtype == bool


class DatasetMixin:
    """Base of datasets that implement ``__len__`` and ``get_example(i)``; adds slices and lists of indices.

    Example:
        >>> class Squares(datasets.DatasetMixin):
        ...     def __len__(self):
        ...         return 4
        ...     def get_example(self, i):
        ...         return i * i
        >>> Squares()[1:3]
        [1, 4]
    """

    def __getitem__(self, index: Any) -> Any:
        """One example for an integer, a list of examples for a slice, a list or a 1-d array of integers or booleans."""
        if isinstance(index, slice):
            return [self.get_example(i) for i in range(*index.indices(len(self)))]
        if isinstance(index, (list, np.ndarray)):
            return [self.get_example(int(i)) for i in chosen(index, len(self))]
        return self.get_example(index)

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define __len__")

    def get_example(self, i: int) -> Any:
        """Example number ``i``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_example(i)")


add_hints(DatasetMixin, "DatasetMixin")


class Batch(Sequence):  # type: ignore[type-arg]
    """Examples that are stacked already: reads like the list of examples, and ``concat_examples`` need not copy it.

    Args:
        arrays: what ``concat_examples`` would return: one array, a tuple of arrays or a dictionary of arrays, each with
            the examples along axis 0.
        finish: ``finish(arrays, dtype)`` makes the final arrays of them, floating ones in ``dtype`` where that is not
            None. It is called when they are first asked for: so images are sent as uint8, and become floating numbers
            once, where they are needed.

    Example:
        >>> batch = datasets.Batch((np.zeros((2, 3)), np.array([0, 1])))
        >>> len(batch), batch[1]
        (2, (array([0., 0., 0.]), np.int64(1)))
    """

    def __init__(self, arrays: Any, finish: Finisher | None = None) -> None:
        self._arrays = arrays
        self._finish = finish

    @property
    def arrays(self) -> Any:
        """The final arrays."""
        return self._arrays if self._finish is None else self.finished()._arrays

    @property
    def raw(self) -> tuple[Any, Any]:
        """The arrays as they are now, and what finishes them; None where they are final."""
        return self._arrays, self._finish

    def finished(self, dtype: DTypeLike | None = None) -> Batch:
        """This batch with its final arrays; what is made now has floating numbers in ``dtype``, if given."""
        if self._finish is not None:
            self._arrays, self._finish = self._finish(self._arrays, dtype), None
        return self

    def to_device(self, device: DeviceSpec | None, dtype: DTypeLike | None = None) -> Any:
        """The final arrays on ``device``, floats in ``dtype`` if given; a GPU finishes uint8 after the transfer."""
        if device.xp is np:
            return self.finished(dtype).map(device.send)
        finish = self._finish
        if finish is None:
            return self._map_raw(device.send)
        return finish(self._map_raw(lambda a: _sent_as_it_lies(a, device.send)), dtype)

    def map(self, function: Any) -> Any:
        """``function`` of each array, in the same tuple, dictionary or bare."""
        return _map(function, self.arrays)

    def _map_raw(self, function: Any) -> Any:
        return _map(function, self._arrays)

    def __len__(self) -> int:
        arrays = self._arrays
        if isinstance(arrays, tuple):
            return len(arrays[0])
        if isinstance(arrays, dict):
            return len(next(iter(arrays.values())))
        return len(arrays)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (slice, list, np.ndarray)):
            rows = chosen(index, len(self))
            return Batch(self._map_raw(lambda a: a[rows]), self._finish)
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, the number of examples, got {index}")
        return self.map(lambda a: a[index])

    def __add__(self, other: Iterable[object]) -> list[object]:
        return [*self, *other]

    def __radd__(self, other: Iterable[object]) -> list[object]:
        return [*other, *self]

    def __reduce__(self) -> Any:
        # pickle keeps the memory order of C-contiguous arrays only, so channels-last ones are sent as (N, H, W, C)
        return _unpickle_batch, (self._map_raw(_to_plain), self._finish)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}: {self.map(lambda a: f'{a.dtype}{a.shape}')}>"


def _sent_as_it_lies(a: Array, send: Any) -> Any:
    """Images (N, H, W, C) that are not finished, in their own order: devices take four axes to be (N, C, H, W)."""
    return send(a.reshape(len(a), -1)).reshape(a.shape) if a.ndim == 4 and a.size and a.flags.c_contiguous else send(a)


def _map(function: Any, arrays: Array | tuple[Array, ...]) -> Array | tuple[Array, Array]:
    if isinstance(arrays, tuple):
        return tuple(function(a) for a in arrays)
    if isinstance(arrays, dict):
        return {k: function(a) for k, a in arrays.items()}
    return function(arrays)


def join(batches: Sequence[Batch]) -> Batch | None:
    """Batches concatenated into one; None if their shapes, types or transforms differ."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if not all(type(b) is Batch and b._finish is first._finish and isinstance(b._arrays, tuple) for b in batches):
        return None
    columns = list(zip(*(b._arrays for b in batches)))
    if any(len({(a.dtype, a.shape[1:]) for a in column}) > 1 for column in columns):
        return None
    return Batch(tuple(map(reused.concatenated, columns)), first._finish)


def _to_plain(a: Array) -> tuple[Array, bool]:
    if isinstance(a, np.ndarray) and a.ndim == 4 and not a.flags.c_contiguous and is_channels_last(a):
        return a.transpose(0, 2, 3, 1), True
    return a, False


def _from_plain(plain: tuple[Array, bool]) -> Array:
    a, is_transposed = plain
    return a.transpose(0, 3, 1, 2) if is_transposed else a


def _unpickle_batch(arrays: Any, finish: Finisher | None) -> Batch:
    if isinstance(arrays, dict):
        return Batch({k: _from_plain(a) for k, a in arrays.items()}, finish)
    if isinstance(arrays[0], tuple):
        return Batch(tuple(_from_plain(a) for a in arrays), finish)
    return Batch(_from_plain(arrays), finish)


def example_at(dataset: Dataset, i: int, seed: int, epoch: int) -> Any:
    """Example ``i`` as it looks in ``epoch`` of a run with ``seed``."""
    method = getattr(dataset, "example_at", None)
    return dataset[i] if method is None else method(i, seed, epoch)


def get_batch(dataset: Any, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
    """The examples ``indices`` (1-d integers) of ``dataset``: a :class:`Batch` or a list.

    An example that its dataset wants skipped is left out; the text of its error is appended to ``skipped``.
    """
    method = getattr(dataset, "get_batch", None)
    if method is not None:
        return method(indices, seed, epoch, skipped)
    if has_rows(dataset):
        return Batch(take(dataset, indices))
    return list_examples(dataset, indices, seed, epoch, skipped)


def list_examples(dataset: Any, indices: Array, seed: int, epoch: int, skipped: list[str]) -> list[Any]:
    """As :func:`get_batch`, one by one."""
    return [example for _, example in separate_examples(dataset, indices, seed, epoch, skipped)]


def separate_examples(
    dataset: Any, indices: Array, seed: int, epoch: int, skipped: list[str]
) -> Iterator[tuple[int, Any]]:
    """As :func:`read_examples`, but copies where the second example takes the memory of the first one."""
    before = len(skipped)
    reading = read_examples(dataset, indices, seed, epoch, skipped)
    first = list(itertools.islice(reading, 2))
    if len(first) == 2 and _is_same_memory(first[1][1], first[0][1]):  # the first one may have been overwritten
        del skipped[before:]
        return ((i, copied(example)) for i, example in read_examples(dataset, indices, seed, epoch, skipped))
    return itertools.chain(first, reading)


def copied(part: Any) -> Any:
    """An example whose arrays, and whatever holds them, nobody else changes."""
    if is_array(part):
        return part.copy()
    if type(part) is dict:
        return {name: copied(value) for name, value in part.items()}
    return type(part)(map(copied, part)) if type(part) in (tuple, list) else part


def _is_same_memory(a: Any, b: Any) -> bool:
    """Whether two examples lie at the same place, as those of a dataset that fills one buffer again for each."""
    kind = type(a)
    if kind is tuple:
        return type(b) is tuple and any(map(_is_same_memory, a, b))
    if kind is np.ndarray:
        is_view = a.base is not None and type(b) is np.ndarray and a.base is b.base
        return a is b or (is_view and a.__array_interface__["data"] == b.__array_interface__["data"])
    if kind is dict and type(b) is dict and a is not b:
        return any(_is_same_memory(value, b[name]) for name, value in a.items() if name in b)
    return a is b and kind in (dict, list)


def take(rows: Array, indices: Array) -> Array:
    """A copy of the rows with these indices; of an array in order of memory without NumPy's slower general indexing."""
    return rows.take(indices, 0) if is_row_major(rows) else rows[indices]


def has_rows(dataset: Any) -> bool:
    """Whether it is an array of numbers or texts; one of objects, such as arrays of several sizes, is like a list."""
    return is_array(dataset) and not dataset.dtype.hasobject


def is_row_major(rows: Array | Sequence[Array]) -> bool:
    """True for an array in order of memory, of which ``take`` copies rows in the least time."""
    return type(rows) is np.ndarray and rows.flags.c_contiguous and not rows.dtype.hasobject


def read_examples(dataset: Any, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Iterator[tuple[int, Any]]:
    """Pairs (index, example), one after the other, without the skipped ones."""
    for i in map(int, indices):
        try:
            example = example_at(dataset, i, seed, epoch)
        except SkipExample as e:
            skipped.append(str(e))
        else:
            yield i, example


def block_bounds(n: int, rank: int, size: int) -> tuple[int, int]:
    """Start and end of this rank's part of ``n`` things: contiguous, in order of ranks, lengths differ by at most 1.

    Args:
        n: the number of things to divide.
        rank: the number of the rank, from 0.
        size: the number of ranks.

    Example:
        >>> [datasets.block_bounds(5, rank, 2) for rank in (0, 1)]
        [(0, 2), (2, 5)]
    """
    return n * rank // size, n * (rank + 1) // size


def block(indices: Sequence[int], rank: int, size: int) -> Any:
    """This rank's contiguous part of a global batch: nothing padded, nothing lost, possibly empty.

    Args:
        indices: anything with ``len`` and slices.
        rank: the number of the rank, from 0.
        size: the number of ranks.

    Example:
        >>> [datasets.block(list(range(5)), rank, 2) for rank in (0, 1)]
        [[0, 1], [2, 3, 4]]
    """
    start, end = block_bounds(len(indices), rank, size)
    return indices[start:end]


def check_dataset(dataset: Any, **switches: bool | str | None) -> None:
    """Refuse what has no examples by number, and warn of arrays side by side, which are no examples."""
    if isinstance(dataset, type):
        raise given_a_class("dataset", dataset, "a dataset")
    kind = type(dataset).__name__
    if (isinstance(dataset, Mapping) and dataset and 0 not in dataset) or kind == "DataFrame":
        hint = "DictDataset(**dataset)" if kind != "DataFrame" else "TupleDataset(*arrays) with arrays of its columns"
        raise TypeError(f"dataset: expected an object with examples [0], [1], ..., got {kind}; write {hint}")
    if isinstance(dataset, (str, bytes)):
        words = f"expected an object with examples [0], [1], ..., got the text {dataset!r:.60}"
        raise TypeError(f"dataset: {words}; read it first, for example with LabeledImageDataset(pairs, root)")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        hint = "; write list(...)" if hasattr(dataset, "__next__") else ""
        raise TypeError(f"dataset: expected an object with len() and [i], got {kind}{hint}")
    if type(dataset) is tuple:
        warn_of_arrays(dataset, "dataset", "TupleDataset(x, t) for examples (x, t)")
    for name, value in switches.items():
        if isinstance(value, str):
            raise TypeError(f"{name}: expected True or False, got the text {value!r}")
