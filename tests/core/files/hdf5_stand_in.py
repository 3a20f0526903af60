"""The part of h5py that dbrdist/core/files/hdf5.py uses, in pickled dictionaries: for machines without h5py."""

import os
import pickle

import numpy as np


class Empty:
    def __init__(self, dtype):
        self.dtype = dtype


def string_dtype():
    return np.dtype(object)


def check_string_dtype(dtype):
    return True if dtype.kind == "O" else None


class Dataset:
    def __init__(self, data):
        self.shape = None if isinstance(data, Empty) else data.shape
        self.data = data
        self.attrs = {}

    @property
    def dtype(self):
        return self.data.dtype

    def __getitem__(self, index):
        return self.data[index]

    def asstr(self):
        return self


class Group:
    def __init__(self, name):
        self.name = name
        self.entries = {}

    def _path(self, key):
        return f"{self.name.rstrip('/')}/{key}"

    def require_group(self, key):
        first, _, rest = key.partition("/")
        group = self.entries.setdefault(first, Group(self._path(first)))
        return group.require_group(rest) if rest else group

    def create_dataset(self, key, data, dtype=None, compression=None):
        group, _, last = key.rpartition("/")
        where = self.require_group(group) if group else self
        if last in where.entries:
            raise ValueError("name already exists")
        if not isinstance(data, Empty) and data.dtype.kind in "UVO" and dtype is None:
            raise TypeError(f"no conversion path for {data.dtype}")
        if compression is not None and not data.shape:
            raise TypeError("scalar datasets don't support chunk/filter options")
        where.entries[last] = Dataset(data)
        return where.entries[last]

    def __contains__(self, key):
        first, _, rest = key.partition("/")
        return first in self.entries and (not rest or rest in self.entries[first])

    def __getitem__(self, key):
        first, _, rest = key.partition("/")
        return self.entries[first][rest] if rest else self.entries[first]


class File(Group):
    def __init__(self, path, mode):
        super().__init__("/")
        self.attrs = {}
        self.path, self.mode = os.fspath(path), mode
        if mode == "r":
            with open(path, "rb") as f:
                try:
                    self.entries, self.attrs = pickle.load(f)
                except Exception as error:
                    raise OSError("Unable to open file (file signature not found)") from error

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.mode == "w":
            with open(self.path, "wb") as f:
                pickle.dump((self.entries, self.attrs), f)
