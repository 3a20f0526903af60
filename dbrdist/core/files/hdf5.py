"""Serializers of HDF5 files: parts are groups, values are datasets. h5py is loaded when the first of them is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from dbrdist.core.array.backend import as_dtype
from dbrdist.core.array.chainer_mode import loading
from dbrdist.core.files.serializer import (
    Deserializer,
    Serializer,
    as_saved,
    load_file_of_chainer,
    load_value,
    missing,
    replace_atomically,
)
from dbrdist.errors import CheckpointError, MissingEntryError

if TYPE_CHECKING:
    from typing import Any

    import h5py

    from dbrdist.core.array.types import HostArray, Module
    from dbrdist.core.files.serializer import Entry, Serializable

_FORMAT = "dbrdist.format"  # an attribute of files that dbrdist wrote
_DTYPE = "dbrdist.dtype"  # the attribute with the name of a type that HDF5 does not know (bfloat16)


def _import_h5py() -> Module:
    try:
        import h5py
    except ImportError as error:
        raise RuntimeError("HDF5 files need h5py: pip install 'dbrdist[hdf5]', or use save_npz and load_npz") from error
    return h5py


class HDF5Serializer(Serializer):
    """Saves into a group of an HDF5 file that is open for writing.

    Args:
        group: the group or file of h5py.
        compression: level of gzip for arrays of more than one element, 0 to 9; None for none.

    Raises:
        RuntimeError: h5py is not installed.

    Example:
        >>> with h5py.File("model.h5", "w") as file:  # doctest: +SKIP
        ...     serializers.HDF5Serializer(file).save(model)
    """

    def __init__(self, group: h5py.Group, compression: int | None = 4) -> None:
        self._h5py = _import_h5py()
        self.group = group
        self.compression = compression

    def __getitem__(self, key: str) -> HDF5Serializer:
        return HDF5Serializer(self.group.require_group(key.strip("/")), self.compression)

    def __call__(self, key: str, value: Entry) -> Entry:
        key = key.lstrip("/")
        if value is None:
            self.group.create_dataset(key, data=self._h5py.Empty("f"))
            return value
        saved = as_saved(f"{self.group.name.rstrip('/')}/{key}", value)
        if saved.dtype.kind in "US":
            self.group.create_dataset(key, data=saved.astype(object), dtype=self._h5py.string_dtype())
            return value
        name = saved.dtype.name if saved.dtype.kind == "V" else None
        bits = saved if name is None else saved.view(f"u{saved.dtype.itemsize}")
        dataset = self.group.create_dataset(key, data=bits, compression=self.compression if saved.size > 1 else None)
        if name is not None:
            dataset.attrs[_DTYPE] = name
        return value


class HDF5Deserializer(Deserializer):
    """Loads from a group of an open HDF5 file.

    Args:
        group: the group or file of h5py; None where the file does not have it.
        strict: True raises if an entry is missing, False keeps the value.

    Raises:
        RuntimeError: h5py is not installed.
        CheckpointError: at a call, an entry is missing or has another shape.

    Example:
        >>> with h5py.File("model.h5") as file:  # doctest: +SKIP
        ...     serializers.HDF5Deserializer(file).load(model)
    """

    def __init__(self, group: Any, strict: bool = True) -> None:
        self._h5py = _import_h5py()
        self.group = group  # None: the file does not have it
        self.strict = strict
        self._path = "" if group is None else group.name.rstrip("/") + "/"

    def __getitem__(self, key: str) -> HDF5Deserializer:
        key = key.strip("/")
        part = HDF5Deserializer(self.group[key] if self._has(key) else None, self.strict)
        part._path = f"{self._path}{key}/"
        return part

    def _has(self, key: str) -> bool:
        return self.group is not None and key in self.group

    def __call__(self, key: str, value: Entry) -> Entry:
        key = key.lstrip("/")
        path = (self._path + key).lstrip("/")
        if not self._has(key):
            if self.strict:
                raise MissingEntryError(missing(path, ()))
            return value
        dataset = self.group[key]
        return load_value(path, value, None if dataset.shape is None else self._read(dataset))

    def _read(self, dataset: h5py.Dataset) -> HostArray:
        if self._h5py.check_string_dtype(dataset.dtype):
            return np.asarray(dataset.asstr()[()], str)
        saved = np.asarray(dataset[()])
        return saved.view(as_dtype(dataset.attrs[_DTYPE])) if _DTYPE in dataset.attrs else saved


def save_hdf5(filename: str | os.PathLike[str], obj: Serializable, compression: int | None = 4) -> None:
    """Save an object, or a dictionary of arrays, to an HDF5 file. A crash leaves no half of a file.

    Args:
        filename: the file.
        obj: a link, an optimizer, a trainer, anything with ``serialize``, or a dictionary of arrays by name.
        compression: level of gzip for arrays of more than one element, 0 to 9; None for none.

    Raises:
        RuntimeError: h5py is not installed.

    Example:
        >>> serializers.save_hdf5("model.h5", model)  # doctest: +SKIP
    """
    h5py = _import_h5py()

    def make(temporary: str) -> None:
        with h5py.File(temporary, "w") as file:
            file.attrs[_FORMAT] = 1
            serializer = HDF5Serializer(file, compression)
            if not isinstance(obj, dict):
                serializer.save(obj)
                return
            for key, value in obj.items():
                serializer(key, value)

    replace_atomically(filename, make)


def load_hdf5(filename: str | os.PathLike[str], obj: Serializable) -> None:
    """Load an object from an HDF5 file of :func:`save_hdf5` or of Chainer.

    Args:
        filename: the file.
        obj: what to fill: a link, an optimizer, a trainer or anything with ``serialize``.

    Raises:
        CheckpointError: the file is damaged, or an entry is missing or of another shape; the message names the entry.
        FileNotFoundError: there is no such file.
        RuntimeError: h5py is not installed.

    Example:
        >>> serializers.load_hdf5("model.h5", model)  # doctest: +SKIP
    """
    h5py = _import_h5py()
    if not os.path.exists(filename):
        raise FileNotFoundError(f"expected an HDF5 file, found nothing at {os.fspath(filename)}")
    try:
        with h5py.File(filename, "r") as file:
            deserializer = HDF5Deserializer(file)
            if _FORMAT in file.attrs or loading.file_of_chainer:
                deserializer.load(obj)
            else:
                load_file_of_chainer(os.fspath(filename), deserializer, obj)
    except CheckpointError as error:
        raise type(error)(f"{os.fspath(filename)}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{os.fspath(filename)}: cannot be read as an HDF5 file: {error}") from error
