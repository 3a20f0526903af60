"""Datasets as tables: columns with names, read a column at a time.

A table's ``mode`` says what an example is: a tuple of the columns' values, a dictionary by their names, or, for a
single column, the bare value (None). Views (a slice, a join, a transform, ...) hold no data: they pass on to the table
below which rows and columns are wanted, and only those are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import Array, is_array
from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.array.types import Index
from dbrdist.datasets.loading.base import Batch, DatasetMixin, SkipExample, list_examples
from dbrdist.datasets.loading.convert import stack


class TabularDataset(DatasetMixin):
    """Base of tables; a subclass defines ``__len__``, ``keys``, ``mode`` and ``get_examples``.

    Indexing gives one example, as from any dataset; :meth:`fetch` gives whole columns, and :attr:`slice` parts of them.
    Iterators read a batch of a table by one call of ``get_examples``.

    Example:
        >>> data = dbrdist.dataset.tabular.from_data(("x", [1, 2]), ("y", [3, 4]))  # doctest: +SKIP
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the columns."""
        raise NotImplementedError(f"{type(self).__name__} must define the property keys")

    @property
    def mode(self) -> Any:
        """What an example is: ``tuple``, ``dict``, or None for the bare value of a single column."""
        raise NotImplementedError(f"{type(self).__name__} must define the property mode")

    def get_examples(self, indices: Any, key_indices: Any) -> tuple[Any, ...]:
        """Some rows of some columns, a list or array for each column.

        Args:
            indices: a list of integers from 0, a slice, or None for all rows.
            key_indices: a tuple of the columns' positions in ``keys``, or None for all columns.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_examples(indices, key_indices)")

    def __iter__(self) -> Iterator[Any]:
        return (self.get_example(i) for i in range(len(self)))

    def get_example(self, i: int) -> Any:
        """Example number ``i``; negative ones count from the end."""
        n, row = len(self), operator.index(i)
        if not -n <= row < n:
            raise IndexError(f"expected an index below {n}, the number of examples, got {i}")
        return _by_mode(self, tuple(column[0] for column in self.get_examples([row % n], None)))

    def get_batch(self, indices: Array, seed: int, epoch: int, skipped: list[str]) -> Any:
        """The examples ``indices`` in ``epoch`` of a run with ``seed``; ``skipped`` gets errors of those left out."""
        try:
            columns = self.get_examples([int(i) for i in indices], None)
        except SkipExample:  # of one of them: the others are wanted
            return list_examples(self, indices, seed, epoch, skipped)
        if all(is_array(column) for column in columns):
            return Batch(_by_mode(self, columns))
        return [_by_mode(self, row) for row in zip(*columns)]

    def fetch(self) -> Any:
        """All rows, column by column: a tuple, a dictionary, or a single column, by ``mode``."""
        return _by_mode(self, self.get_examples(None, None))

    def convert(self, data: Any) -> Any:
        """``data``, columns as :meth:`fetch` gives them, as arrays: ``dataset.convert(dataset.fetch())``."""
        if isinstance(data, tuple):
            return tuple(_as_array(column) for column in data)
        if isinstance(data, dict):
            return {key: _as_array(column) for key, column in data.items()}
        return _as_array(data)

    # ---- views ----

    @property
    def slice(self) -> _Slicer:
        """``dataset.slice[rows]`` or ``dataset.slice[rows, keys]``: a view of some rows and columns.

        ``rows`` is a slice, or a list or array of integers or of booleans. ``keys`` is a tuple of names or positions,
        or a single one, whose examples are bare values.
        """
        return _Slicer(self)

    def astuple(self) -> TabularDataset:
        """A view whose examples are tuples."""
        return _WithMode(self, tuple)

    def asdict(self) -> TabularDataset:
        """A view whose examples are dictionaries."""
        return _WithMode(self, dict)

    def concat(self, *datasets: TabularDataset) -> TabularDataset:
        """This table's rows, then those of ``datasets``, which have the same ``keys``."""
        return _Concat(self, *datasets)

    def join(self, *datasets: TabularDataset) -> TabularDataset:
        """This table's columns beside those of ``datasets``, which have the same length and other keys."""
        return _Join(self, *datasets)

    def transform(self, keys: str | Sequence[str], transform: Callable[..., Any]) -> TabularDataset:
        """A view with columns ``keys`` (a name, or a tuple of names) that ``transform`` makes of each example.

        It gets a tuple's values as its arguments, a dictionary's by name, and returns a tuple or dictionary of the new
        columns' values, or for a single column the value. It is called for the rows that are read.
        """
        return _Transform(self, keys, transform)

    def transform_batch(self, keys: Any, transform_batch: Callable[..., Any]) -> TabularDataset:
        """A view with columns ``keys`` that ``transform_batch`` makes of whole columns; see :meth:`transform`."""
        return _TransformBatch(self, keys, transform_batch)

    def with_converter(self, converter: Callable[[Any], Any]) -> TabularDataset:
        """A view whose :meth:`convert` is ``converter(data)``."""
        return _WithConverter(self, converter)


def _by_mode(dataset: TabularDataset, columns: tuple[Any, ...]) -> Any:
    """Values of all columns as ``dataset.mode`` wants them."""
    if dataset.mode is dict:
        return dict(zip(dataset.keys, columns))
    return columns if dataset.mode is tuple else columns[0]


def _as_array(column: Any) -> Array:
    if is_array(column):
        return column
    return stack(column, None, None) if len(column) else np.asarray(column)


# ---- which rows, which columns --------------------------------------------------------------------------------------


def _rows(indices: Array | slice | Sequence[int], n: int) -> Any:
    """Rows as users name them, as a range or an array of positions from 0."""
    if isinstance(indices, slice):
        return range(n)[indices]
    if np.ndim(indices) != 1:
        raise TypeError(
            f"expected rows as a slice or as a list of integers or booleans, got {indices!r}; "
            "dataset[i] gives a single example"
        )
    rows = np.asarray(indices)
    if rows.dtype != bool and not as_chainer[0] and any(isinstance(i, (bool, np.bool_)) for i in indices):
        raise ValueError(f"expected rows as integers or as booleans, got both in {indices!r:.60}")
    if not len(rows):
        return rows.astype(np.int64)
    if rows.dtype == bool:
        if len(rows) != n:
            raise ValueError(f"expected {n} booleans, one for each row, got {len(rows)}")
        return np.flatnonzero(rows)
    if rows.dtype.kind not in "iu":
        raise ValueError(f"expected rows as integers or booleans, got {rows.dtype} in {indices!r:.60}")
    wrong = rows[(rows < -n) | (rows >= n)]
    if len(wrong):
        raise IndexError(f"expected rows below {n}, the number of examples, got {wrong[0]}")
    return np.where(rows < 0, rows + n, rows).astype(np.int64)


def _among(rows: Any, indices: slice | Sequence[int] | None) -> Any:
    """The rows ``indices`` of these rows, as ``get_examples`` takes them."""
    if indices is None:
        return _plain(rows)
    if isinstance(indices, slice):
        return _plain(rows[indices])
    if isinstance(rows, range):
        return [rows[i] for i in indices]
    return rows[np.asarray(indices, np.int64)].tolist()


def _plain(rows: Any) -> Any:
    """A range as the slice that means the same; an array as a list."""
    if not isinstance(rows, range):
        return rows.tolist()
    if not len(rows):
        return slice(0, 0, 1)
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)


def positions(indices: slice | Sequence[int] | None, n: int) -> Array:
    """What ``get_examples`` gets, as an array of positions."""
    if indices is None or isinstance(indices, slice):
        return np.arange(n)[slice(None) if indices is None else indices]
    return np.asarray(indices, np.int64)


def _columns(keys: tuple[Any, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """The positions of columns that are given by name or by position."""
    found = []
    for key in keys:
        if isinstance(key, str):
            if key not in names:
                raise KeyError(f"expected keys among {names}, got {key!r}")
            found.append(names.index(key))
        elif not isinstance(key, (int, np.integer)):
            raise TypeError(f"expected a column's name or position, or a tuple of them, got {key!r}")
        elif not -len(names) <= key < len(names):
            raise IndexError(f"expected a column below {len(names)}, the number of {names}, got {key}")
        else:
            found.append(int(key) % len(names))
    return tuple(found)


# ---- views ----------------------------------------------------------------------------------------------------------


class DelegateDataset(TabularDataset):
    """A table that is another one: the base of views, and of tables of your own that are made of existing ones."""

    def __init__(self, dataset: TabularDataset, *others: TabularDataset) -> None:
        for table in (dataset, *others):
            if not isinstance(table, TabularDataset):
                raise TypeError(f"expected a TabularDataset, got {type(table).__name__}; see tabular.from_data")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.dataset.keys

    @property
    def mode(self) -> Any:
        return self.dataset.mode

    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        return self.dataset.get_examples(indices, key_indices)

    def convert(self, data: Any) -> Any:
        return self.dataset.convert(data)


class _WithMode(DelegateDataset):
    def __init__(self, dataset: TabularDataset, mode: type) -> None:
        super().__init__(dataset)
        self._mode = mode

    @property
    def mode(self) -> Any:
        return self._mode


class _WithConverter(DelegateDataset):
    def __init__(self, dataset: TabularDataset, converter: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self._converter = converter

    def convert(self, data: Any) -> Any:
        if as_chainer[0] and isinstance(data, (tuple, dict)):  # as Chainer calls it
            return self._converter(*data) if isinstance(data, tuple) else self._converter(**data)
        return self._converter(data)


class _Slicer:
    """What ``dataset.slice`` is: indexing it makes a view."""

    def __init__(self, dataset: TabularDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Index) -> TabularDataset:
        rows, keys = index if isinstance(index, tuple) else (index, None)
        return _Slice(self._dataset, rows, keys)


class _Slice(DelegateDataset):
    def __init__(self, dataset: TabularDataset, indices: Any, keys: Any) -> None:
        super().__init__(dataset)
        self._rows = _rows(indices, len(dataset))
        self._is_bare = keys is not None and not isinstance(keys, tuple)
        wanted = (keys,) if self._is_bare else keys
        self._columns = None if keys is None else _columns(wanted, dataset.keys)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def keys(self) -> tuple[str, ...]:
        names = self.dataset.keys
        return names if self._columns is None else tuple(names[k] for k in self._columns)

    @property
    def mode(self) -> Any:
        if self._columns is None:
            return self.dataset.mode
        return None if self._is_bare else self.dataset.mode or tuple

    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        own = self._columns
        columns = own if own is None or key_indices is None else tuple(own[k] for k in key_indices)
        return self.dataset.get_examples(_among(self._rows, indices), key_indices if own is None else columns)


class _Concat(DelegateDataset):
    def __init__(self, *datasets: TabularDataset) -> None:
        super().__init__(*datasets)
        for k, dataset in enumerate(datasets):
            if dataset.keys != self.keys:
                raise ValueError(
                    f"expected tables with the keys {self.keys} to concat, got {dataset.keys} in number {k}"
                )
        self._datasets = datasets
        self._ends = np.cumsum([len(d) for d in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        if indices is None:
            return _one_behind_the_other([d.get_examples(None, key_indices) for d in self._datasets], None)
        if as_chainer[0] and isinstance(indices, list) and not indices:
            return tuple([] for _ in (self.keys if key_indices is None else key_indices))
        rows = positions(indices, len(self))
        owners = np.searchsorted(self._ends, rows, side="right")
        used = np.unique(owners) if len(rows) else np.array([0])
        parts, places = [], []
        for k in used.tolist():
            mine = np.flatnonzero(owners == k)
            first = int(self._ends[k]) - len(self._datasets[k])
            parts.append(self._datasets[k].get_examples(_part(indices, rows[mine], first, self), key_indices))
            places.append(mine)
        order = np.argsort(np.concatenate(places)) if len(parts) > 1 else None
        return _one_behind_the_other(parts, order)


def _part(indices: slice | Sequence[int], rows: Array, first: int, table: TabularDataset) -> Any:
    """The rows of one of several tables, whose first one is ``first``: a slice where a slice was asked for."""
    if not isinstance(indices, slice) or not len(rows):
        return (rows - first).tolist()
    _, stop, step = indices.indices(len(table))
    end = min(stop - first, int(rows[-1]) - first + step) if step > 0 else max(stop - first, -1)
    return slice(int(rows[0]) - first, None if end < 0 else end, step)


def _one_behind_the_other(parts: Sequence[tuple[Any, ...]], order: Array | None) -> tuple[Any, ...]:
    """Columns of several tables as one, in ``order`` if given: an array where all are of one type and shape."""
    if len(parts) == 1:
        return parts[0]
    return tuple(_joined(column, order) for column in zip(*parts))


def _joined(pieces: Sequence[Any], order: Array | None) -> Any:
    if (
        not as_chainer[0]
        and all(isinstance(p, np.ndarray) for p in pieces)
        and len({(p.dtype, p.shape[1:]) for p in pieces}) == 1
    ):
        whole = np.concatenate(pieces)
        return whole if order is None else whole[order]
    values = [value for piece in pieces for value in piece]
    return values if order is None else [values[i] for i in order]


class _Join(DelegateDataset):
    def __init__(self, *datasets: TabularDataset) -> None:
        super().__init__(*datasets)
        lengths = [len(d) for d in datasets]
        if len(set(lengths)) > 1:
            raise ValueError(f"expected tables of one length to join, got {lengths}")
        keys = [key for dataset in datasets for key in dataset.keys]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"expected tables with different keys to join, but {twice} come more than once")
        self._datasets = datasets
        self._keys = tuple(keys)
        self._places = [(d, k) for d, dataset in enumerate(datasets) for k in range(len(dataset.keys))]

    @property
    def keys(self) -> tuple[str, ...]:
        return self._keys

    @property
    def mode(self) -> Any:
        return next((d.mode for d in self._datasets if d.mode), tuple)

    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        wanted = self._places if key_indices is None else [self._places[k] for k in key_indices]
        found = {}
        for d, dataset in enumerate(self._datasets):  # each table once, for all of its columns together
            columns = list(dict.fromkeys(k for owner, k in wanted if owner == d))
            if columns:
                values = dataset.get_examples(indices, None if key_indices is None else tuple(columns))
                found.update({(d, k): value for k, value in zip(columns, values)})
        return tuple(found[place] for place in wanted)


class _Made(DelegateDataset):
    """A table whose columns a function makes; ``mode`` follows from what it returned first."""

    def __init__(self, dataset: TabularDataset, keys: str | Sequence[str], function: Callable[..., Any]) -> None:
        super().__init__(dataset)
        if not callable(function):
            raise TypeError(f"expected a function for the transform, got {function!r}")
        self._keys = keys if isinstance(keys, tuple) else (keys,)
        if not self._keys or not all(isinstance(k, str) for k in self._keys) or len(set(self._keys)) < len(self._keys):
            raise ValueError(f"expected a name or a tuple of different names for the new columns, got {keys!r}")
        self._function = function
        self._mode: Any = "unknown"

    @property
    def keys(self) -> tuple[str, ...]:
        return self._keys

    @property
    def mode(self) -> Any:
        if self._mode == "unknown":
            if not len(self):
                raise ValueError(
                    "expected at least one example to see what the transform returns, got an empty table; "
                    "say it with astuple() or asdict()"
                )
            self.get_examples([0], None)
        return self._mode

    def _call(self, values: tuple[Any, ...]) -> Any:
        if self.dataset.mode is dict:
            return self._function(**dict(zip(self.dataset.keys, values)))
        return self._function(*values)

    def _parts(self, made: Any) -> tuple[Any, ...]:
        """What the function returned, as a value for each key."""
        mode = type(made) if type(made) in (tuple, dict) else tuple if isinstance(made, tuple) else None
        if self._mode not in ("unknown", mode):
            raise ValueError(
                f"expected the transform to return {_named(self._mode)} as for the first example, got {made!r:.60}"
            )
        self._mode = mode
        if isinstance(made, dict):
            if any(key not in made for key in self._keys):
                raise ValueError(f"expected the transform to return the keys {self._keys}, got {tuple(made)}")
            return tuple(made[key] for key in self._keys)
        values = made if mode is tuple else (made,)
        if len(values) != len(self._keys):
            raise ValueError(f"expected the transform to return {len(self._keys)} values for {self._keys}, "
                             f"got {len(values)}")  # fmt: skip
        return tuple(values)


def _named(mode: Any) -> str:
    return "a single value" if mode is None else f"a {mode.__name__}"


class _Transform(_Made):
    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        columns = range(len(self._keys)) if key_indices is None else key_indices
        out: tuple[list[Any], ...] = tuple([] for _ in columns)
        for row in zip(*self.dataset.get_examples(indices, None)):
            values = self._parts(self._call(row))
            for column, k in zip(out, columns):
                column.append(values[k])
        return out


class _TransformBatch(_Made):
    def get_examples(self, indices: slice | Sequence[int] | None, key_indices: Any) -> tuple[Any, ...]:
        columns = self._parts(self._call(tuple(self.dataset.get_examples(indices, None))))
        n = len(positions(indices, len(self)))
        for key, column in zip(self._keys, columns):
            if len(column) != n:
                raise ValueError(f"expected transform_batch to return {n} values for {key!r}, got {len(column)}")
        return columns if key_indices is None else tuple(columns[k] for k in key_indices)
