"""Tables of what exists already: arrays, lists, other datasets, and functions of a row's index."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from dbrdist.core.array.backend import is_array
from dbrdist.datasets.table.tables import TabularDataset, positions


class _Column(TabularDataset):
    """A single column: an array, or anything with ``len`` and ``[i]``.

    Sent to another process, a file that is mapped to memory is mapped there; NumPy would send what is in it.
    """

    def __init__(self, key: str, data: Any) -> None:
        self._key = key
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self._key,)

    @property
    def mode(self) -> Any:
        return None

    def get_examples(
        self, indices: slice | Sequence[int] | None, key_indices: tuple[int, ...] | None
    ) -> tuple[Any, ...]:
        return (self._values(indices),) * (1 if key_indices is None else len(key_indices))

    def __getstate__(self) -> dict[str, Any]:
        data = self._data
        if isinstance(data, np.memmap) and isinstance(data.base, mmap.mmap) and data.mode in ("r", "r+", "w+"):
            order = "C" if data.flags.c_contiguous else "F"
            return {"_key": self._key, "_map": (data.filename, data.dtype, "r", data.offset, data.shape, order)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._key = state["_key"]
        self._data = np.memmap(*state["_map"]) if "_map" in state else state["_data"]

    def _values(self, indices: slice | Sequence[int] | None) -> Any:
        data = self._data
        if is_array(data):
            return data if indices is None else data[indices]
        if isinstance(data, list) and (indices is None or isinstance(indices, slice)):
            return data if indices is None else data[indices]
        return [data[i] for i in positions(indices, len(self)).tolist()]


_num_unnamed = itertools.count()


def from_data(data: Any, size: int | None = None) -> TabularDataset:
    """A table of columns that exist already, or that functions compute row by row.

    Args:
        data: a column, whose examples are bare values; a tuple of columns, whose examples are tuples; or a dictionary
            ``{key: column}``, whose examples are dictionaries. A column is an array, or a list or any other dataset.
            In a tuple, ``(key, column)`` gives it a name; such a pair may also stand alone. A column with a name may
            also be a function of the row's index, and with a tuple of names one that returns a tuple or a dictionary
            of as many values.
        size: the number of rows, needed where all columns are functions.

    >>> from dbrdist.dataset import tabular
    >>> tabular.from_data(([0, 1, 2], [3, 4, 5]))[0]
    (0, 3)
    >>> tabular.from_data({"x": [0, 1, 2], ("y", "z"): lambda i: (i * i, -i)})[2]
    {'x': 2, 'y': 4, 'z': -2}
    """
    if isinstance(data, dict):
        return _beside_each_other(list(data.items()), size).asdict()
    if isinstance(data, tuple) and not _is_named(data):
        pairs = [column if isinstance(column, tuple) and _is_named(column) else (None, column) for column in data]
        return _beside_each_other(pairs, size).astuple()
    return _column(*(data if isinstance(data, tuple) else (None, data)), size)


def _is_named(pair: tuple[Any, ...]) -> bool:
    """Whether a tuple is a pair of a name, or a tuple of names, and a column."""
    if len(pair) != 2:
        return False
    key = pair[0]
    return isinstance(key, str) or (isinstance(key, tuple) and bool(key) and all(isinstance(k, str) for k in key))


def _beside_each_other(pairs: list[tuple[Any, Any]], size: int | None) -> TabularDataset:
    if not pairs:
        raise ValueError("expected at least one column, got none")
    if size is None:
        size = next((len(column) for _, column in pairs if hasattr(column, "__len__")), None)
    first, *others = [_column(key, column, size) for key, column in pairs]
    return first.join(*others)


def _column(key: str | tuple[str, ...] | None, data: Any, size: int | None) -> TabularDataset:
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        if isinstance(key, tuple):
            raise ValueError(f"expected a function for the columns {key}, got {type(data).__name__}")
        if size is not None and len(data) != size:
            raise ValueError(f"expected columns of {size} rows, got {len(data)}" + (f" in {key!r}" if key else ""))
        return _Column(f"_{next(_num_unnamed)}" if key is None else key, data)
    if not callable(data):
        raise TypeError(f"expected a column as an array, a list, a dataset or a function, got {type(data).__name__}")
    if key is None:
        raise ValueError(f"expected a name for the column that {data!r} computes: (key, function)")
    if size is None:
        raise ValueError(f"expected the number of rows, size=, for the column {key!r} that is a function")
    return _Column("index", range(size)).transform(key, data)
