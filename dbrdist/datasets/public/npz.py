"""Arrays of an .npz file as a dataset."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from dbrdist.core.array.config import get_dtype
from dbrdist.core.array.types import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.core.files.serializer import READING
from dbrdist.datasets.table.combine import TupleDataset


class NpzDataset(TupleDataset):
    """Pairs (x[i], y[i]) from an .npz file, held in memory; nothing in it is unpickled.

    Args:
        path: the file, as written by ``numpy.savez(path, x=..., y=...)``.
        x: key of the inputs, (N, ...). Floating numbers become ``dtype``; integers stay as they are unless
            ``dtype`` is given.
        y: key of the labels or targets, (N, ...): integers become int32, floating numbers ``dtype``. None: no labels,
            and examples are tuples of one entry.
        dtype: None is ``config.dtype``.
        shape: the shape that each example of x must have; None takes any.

    Example:
        >>> with dbrdist.utils.tempdir() as folder:
        ...     np.savez(f"{folder}/a.npz", x=np.ones((4, 2)), y=np.arange(4))
        ...     len(datasets.NpzDataset(f"{folder}/a.npz"))
        4
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        x: str = "x",
        y: str | None = "y",
        *,
        dtype: DTypeLike | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        keys = [x] if y is None else [x, y]
        arrays = _read(path, keys)
        _check(path, keys, arrays, shape)
        float_dtype = get_dtype(dtype)
        if arrays[0].dtype.kind == "f" or dtype is not None:
            arrays[0] = arrays[0].astype(float_dtype, copy=False)
        if y is not None:
            kind = arrays[1].dtype.kind
            if kind in "iu":
                _check_labels(path, keys[1], arrays[1])
            arrays[1] = arrays[1].astype(float_dtype if kind == "f" else np.int32, copy=False)
        super().__init__(*arrays)


def _check_labels(path: Any, key: str, labels: Any) -> None:
    """Refuse numbers that int32 lacks, which would become others."""
    limits = np.iinfo(np.int32)
    outside = (labels > limits.max) | (labels < limits.min)
    if outside.any():
        got = labels[outside].flat[0]
        raise ValueError(
            f"expected labels of at most {limits.max:,} under {key!r} in {path}, got {got:,}; number the classes from 0"
        )


def _read(path: str | os.PathLike[str], keys: list[str]) -> list[Any]:
    with READING, open(path, "rb", opener=regular) as f:
        try:
            archive = np.load(f, allow_pickle=False)
        except (ValueError, EOFError, zipfile.BadZipFile) as e:
            raise ValueError(f"expected an .npz file, but {path} cannot be read as one: {e}") from e
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"expected an .npz file with the keys {keys}, but {path} holds a single array")
        if any(k not in archive.files for k in keys):
            raise KeyError(f"expected the keys {keys} in {path}, which has {sorted(archive.files)}")
        return [_read_entry(path, archive, k) for k in keys]


def _read_entry(path: Any, archive: Any, key: str) -> Array:
    try:
        _check_claims(archive, key)
        return archive[key]
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as e:
        raise ValueError(f"expected an array of numbers under {key!r} in {path}: {e}") from e


_MAX_DEFLATED = 1100  # bytes that one byte of deflate can become, and some more


def _check_claims(archive: Any, key: str) -> None:
    """Refuse an array that is larger by its header than its entry, or an entry that its packed bytes cannot fill.

    NumPy takes memory for what the header claims, before it reads on.
    """
    entry = archive.zip.getinfo(key if key in archive.zip.namelist() else f"{key}.npy")
    if entry.file_size > _MAX_DEFLATED * (entry.compress_size + 1):
        raise ValueError(f"{entry.compress_size:,} packed bytes claim to become {entry.file_size:,}")
    with archive.zip.open(entry) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        claimed, there = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
    if not dtype.hasobject and claimed > there:
        raise ValueError(f"its header claims {shape} of {dtype}, {claimed:,} bytes, but {there:,} are there")


def _check(path: Any, keys: list[str], arrays: list[Array], shape: tuple[int, ...] | None) -> None:
    for key, a in zip(keys, arrays):
        if a.ndim == 0 or a.dtype.kind not in "biuf":
            raise ValueError(
                f"expected numbers with the examples along axis 0 under {key!r} in {path}, got {a.dtype} of {a.shape}"
            )
    lengths = {k: len(a) for k, a in zip(keys, arrays)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"expected arrays of one length in {path}, got {lengths}")
    got = arrays[0].shape[1:]
    if shape is not None and got != tuple(shape):
        raise ValueError(f"expected examples of shape {tuple(shape)} under {keys[0]!r} in {path}, got {got}")
