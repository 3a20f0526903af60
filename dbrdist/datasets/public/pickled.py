"""Examples of any kind in one file, one pickle behind the other.

A pickle is a program: open files of people alone whom you would let run programs. What is refused here stops the usual
attacks, not all of them.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from array import array
from typing import Any, BinaryIO

from dbrdist.datasets.loading.base import DatasetMixin
from dbrdist.datasets.public.unpickle import ARRAYS, PLAIN, DataUnpickler, reading

_ALLOWED = ARRAYS | PLAIN
_HINT = "; if you trust the file, open it with trusted=True"


class PickleDatasetWriter:
    """Writes examples one after another for :class:`PickleDataset`; also a context manager that closes.

    Args:
        writer: a file opened for writing in binary mode.
        protocol: of the pickles.

    Example:
        >>> import io
        >>> writer = datasets.PickleDatasetWriter(io.BytesIO())
        >>> writer.write((np.zeros(2), 1))
    """

    def __init__(self, writer: BinaryIO, protocol: int = pickle.HIGHEST_PROTOCOL) -> None:
        if not 0 <= protocol <= pickle.HIGHEST_PROTOCOL:
            raise ValueError(f"expected a protocol from 0 to {pickle.HIGHEST_PROTOCOL}, got {protocol}")
        self._writer = writer
        self._protocol = protocol

    def write(self, x: Any) -> None:
        """Append the example ``x``; one that cannot be pickled leaves the file as it was."""
        self._writer.write(pickle.dumps(x, self._protocol))

    def flush(self) -> None:
        """Hand what was written to the system."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> PickleDatasetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PickleDataset(DatasetMixin):
    """The examples of a file that :class:`PickleDatasetWriter` wrote, each read when it is asked for.

    Opening runs none of the pickles: it looks for their ends alone. Reading an example runs its pickle. Plain data and
    NumPy's arrays are read, and objects of classes outside of the standard library, such as your own; a pickle that
    asks for anything else, such as a function, is refused by a ValueError.

    Args:
        reader: a seekable file, opened for reading in binary mode.
        trusted: read whatever is in the file, functions too.

    Example:
        >>> dataset = datasets.PickleDataset(open("data", "rb"))  # doctest: +SKIP
    """

    def __init__(self, reader: BinaryIO, *, trusted: bool = False) -> None:
        if not reader.seekable():
            raise ValueError("the file must be seekable")
        self._reader = reader
        self._trusted = trusted
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._positions = _positions(reader)

    def __len__(self) -> int:
        return len(self._positions)

    def get_example(self, i: int) -> Any:
        if not -len(self) <= i < len(self):
            raise IndexError(f"expected an index below {len(self)}, the number of examples, got {i}")
        with self._lock:
            if self._process != os.getpid():  # forked: the place in an open file is shared with the parent
                self._reopen()
            self._reader.seek(self._positions[i])
            load = pickle.Unpickler(self._reader) if self._trusted else DataUnpickler(self._reader, _ALLOWED, True)
            return reading(f"of example {i} in {_name(self._reader)}", load.load, _HINT)

    def _reopen(self) -> None:
        after_fork = getattr(self._reader, "after_fork", None)
        if after_fork is not None:
            after_fork()
        self._process = os.getpid()

    def close(self) -> None:
        """Close the file; the examples cannot be read afterwards."""
        with self._lock:
            self._reader.close()

    def __enter__(self) -> PickleDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._reader, _File):
            raise TypeError("expected a PickleDataset of open_pickle_dataset to send to another process, got one of "
                            f"{type(self._reader).__name__}")  # fmt: skip
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _process=os.getpid())


class _File(io.BufferedReader):
    """A file that a pickled copy, or a forked process, opens again."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self._path = path

    def after_fork(self) -> None:
        file = self.raw
        self.__init__(self._path)  # type: ignore[misc]
        file.close()  # what the parent has open stays open

    def __reduce__(self) -> Any:
        return _File, (self._path,)


def open_pickle_dataset(path: str | os.PathLike[str], *, trusted: bool = False) -> PickleDataset:
    """The :class:`PickleDataset` of a file; close it, or use it in a ``with`` statement.

    It can be sent to loader processes, which open the file again.

    Args:
        path: a file of :func:`open_pickle_dataset_writer`.
        trusted: True unpickles any object, which can run code of whoever wrote the file; False accepts arrays, numbers,
            text and containers of them.

    Raises:
        DatasetError: the file is damaged.

    Example:
        >>> with dbrdist.utils.tempdir() as folder:
        ...     with datasets.open_pickle_dataset_writer(f"{folder}/data") as writer:
        ...         writer.write((np.zeros(2), 1))
        ...     with datasets.open_pickle_dataset(f"{folder}/data") as dataset:
        ...         print(len(dataset), dataset[0])
        1 (array([0., 0.]), 1)
    """
    file = _File(os.path.abspath(path))
    try:
        return PickleDataset(file, trusted=trusted)
    except BaseException:
        file.close()
        raise


def open_pickle_dataset_writer(
    path: str | os.PathLike[str], protocol: int = pickle.HIGHEST_PROTOCOL
) -> PickleDatasetWriter:
    """A :class:`PickleDatasetWriter` to a new file at ``path``, replacing an existing file.

    Args:
        path: the file to write.
        protocol: the version of the pickle format, from 0 to ``pickle.HIGHEST_PROTOCOL``.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> with dbrdist.utils.tempdir() as folder:
        ...     with datasets.open_pickle_dataset_writer(f"{folder}/data") as writer:
        ...         writer.write((np.zeros(2), 1))
    """
    return PickleDatasetWriter(open(path, "wb"), protocol)


# ---- where pickles begin --------------------------------------------------------------------------------------------

_STOP = ord(".")
# What stands outside of frames since protocol 4: long texts and bytes, whose length is said in so many bytes.
_LONG = {ord("B"): 4, 0x8E: 8, 0x96: 8, ord("X"): 4, 0x8D: 8}
_PROTOCOL, _FRAME = 0x80, 0x95


def _positions(reader: BinaryIO) -> Any:
    """Where each pickle starts. None of them runs."""
    reader.seek(0, io.SEEK_END)
    size, at = reader.tell(), 0
    found = array("q")
    while at < size:
        found.append(at)
        try:
            at = _end(reader, at, size)
        except Exception as e:  # of many kinds, for bytes that are no pickle
            raise ValueError(
                f"expected a file of pickles, but {_name(reader)} has another thing, or is cut short, at example "
                f"{len(found) - 1} (byte {at:,}): {e}"
            ) from e
    return found


def _end(reader: BinaryIO, start: int, size: int) -> int:
    """The end of a pickle, from the lengths of its frames and long values; operation by operation where it has none.

    Frames end where an operation ends. One whose last byte is STOP ends the pickle if another starts behind it, or
    nothing comes: no pickle has the mark of its protocol in the middle.
    """
    head = _read_at(reader, start, 2)
    if len(head) < 2 or head[0] != _PROTOCOL or head[1] < 4:
        return _end_by_operations(reader, start)
    at = start + 2
    while at < size:
        head = _read_at(reader, at, 9)
        width = 8 if head[0] == _FRAME else _LONG.get(head[0])
        if width is None:
            return _end_by_operations(reader, at)
        at += 1 + width + int.from_bytes(head[1 : 1 + width], "little")
        if head[0] == _FRAME and at <= size and _read_at(reader, at - 1, 1)[0] == _STOP:
            is_end = _read_at(reader, at, 1) in (b"", bytes([_PROTOCOL]))
            return at if is_end else _end_by_operations(reader, start)  # else it may be the end of a number or a text
    raise EOFError(f"the file ends after {size:,} bytes")


def _read_at(reader: BinaryIO, at: int, size: int) -> bytes:
    reader.seek(at)
    return reader.read(size)


def _end_by_operations(reader: BinaryIO, at: int) -> int:
    import pickletools  # a table of 3 ms

    reader.seek(at)
    for _ in pickletools.genops(reader):
        pass
    return reader.tell()


def _name(reader: BinaryIO) -> str:
    name = reader._path if isinstance(reader, _File) else getattr(reader, "name", None)
    return str(name) if isinstance(name, (str, os.PathLike)) else f"a {type(reader).__name__}"
