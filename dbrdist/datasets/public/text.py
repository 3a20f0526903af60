"""Lines of text files, found by their number without reading what is between."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dbrdist.core.array.backend import Array
from dbrdist.core.files.regular_file import regular
from dbrdist.datasets.loading.base import DatasetMixin
from dbrdist.datasets.loading.files import Descriptor, read_part
from dbrdist.errors import CorruptExampleError, DatasetError

if TYPE_CHECKING:
    from typing import BinaryIO

_BLOCK_BYTES = 1 << 22


class TextDataset(DatasetMixin):
    """The lines of a text file as text; of several files of equally many lines, tuples of lines.

    Files are gone through once, to find where lines begin: 8 bytes of memory for each line. Lines are read when they
    are asked for, by any number of threads, and with the ends of lines that they have. Sent to another process it is
    opened there, without going through the files again; files that changed meanwhile are a DatasetError.

    Args:
        paths: a path, or a list of paths.
        encoding, errors, newline: as in :func:`open`; one for all files or a list with one for each.
        filter_func: called with the line of each file; example i is the i-th line for which it is true.

    Example:
        >>> datasets.TextDataset("lines.txt", encoding="utf-8")[0]  # doctest: +SKIP
    """

    def __init__(
        self, paths: Any, encoding: Any = None, errors: Any = None, newline: Any = None,
        filter_func: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not names:
            raise ValueError("expected at least one text file, got none")
        options = [_for_each(len(names), **{k: v}) for k, v in
                   (("encoding", encoding), ("errors", errors), ("newline", newline))]  # fmt: skip
        self._lines = [_Lines(os.fspath(name), *chosen) for name, *chosen in zip(names, *options)]
        counts = {lines.path: len(lines) for lines in self._lines}
        if len({len(lines) for lines in self._lines}) > 1:
            raise ValueError(f"expected text files of equally many lines, got {counts}")
        self._numbers: Array | None = None
        if filter_func is not None:
            kept = [i for i in range(len(self._lines[0])) if filter_func(*(lines[i] for lines in self._lines))]
            self._numbers = np.array(kept, np.int64)

    def __len__(self) -> int:
        return len(self._lines[0]) if self._numbers is None else len(self._numbers)

    def get_example(self, i: int) -> Any:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"expected an index below {n}, the number of lines, got {i}")
        number = int(i) % n if self._numbers is None else int(self._numbers[i])
        found = tuple(lines[number] for lines in self._lines)
        return found[0] if len(found) == 1 else found


def _for_each(num_files: int, **option: Any) -> Sequence[str | None]:
    ((name, value),) = option.items()
    if value is None or isinstance(value, str):
        return [value] * num_files
    if len(value) != num_files:
        raise ValueError(f"expected as many values of {name} as text files, {num_files}, got {len(value)}")
    return value


class _Code(NamedTuple):
    """How the text of a file becomes bytes."""

    name: str  # of the codec for one line
    start: int  # the bytes in front of the first line
    width: int  # of the units in which ends of lines are looked for
    feed: int  # the unit that is a line feed
    back: int  # the unit that is a carriage return


class _Lines:
    """The lines of one file."""

    def __init__(self, path: str, encoding: str | None, errors: str | None, newline: str | None) -> None:
        if newline not in (None, "", "\n", "\r", "\r\n"):
            raise ValueError(f"expected newline None, '', '\\n', '\\r' or '\\r\\n', got {newline!r}")
        self.path = os.path.abspath(path)
        self.encoding = (
            encoding if encoding not in (None, "locale") else io.TextIOWrapper(io.BytesIO()).encoding
        )  # that of the system
        self.errors = errors or "strict"
        codecs.lookup_error(self.errors)
        self._newline = newline
        self._file = Descriptor(regular(self.path))
        self._stamp = _stamp(self._file)
        with open(self._file.number, "rb", closefd=False) as file:
            self._code = _code_of(self.encoding, file.read(4))
            self._bounds = _bounds(file, self._code, newline)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, i: int) -> str:
        start, end = int(self._bounds[i]), int(self._bounds[i + 1])
        data = read_part(self._file, start, end - start)
        try:
            text = data.decode(self._code.name, self.errors)
        except UnicodeError as e:
            raise CorruptExampleError(
                f"expected text in {self.encoding} in line {i + 1} of {self.path}: {e}; "
                "name the file's encoding, or say errors='replace'"
            ) from e
        if self._newline is None and text.endswith("\r\n"):
            return text[:-2] + "\n"
        return text[:-1] + "\n" if self._newline is None and text.endswith("\r") else text

    def __getstate__(self) -> dict[str, str | None]:
        return {k: v for k, v in self.__dict__.items() if k != "_file"}

    def __setstate__(self, state: dict[str, str | None]) -> None:
        self.__dict__.update(state)
        self._file = Descriptor(regular(self.path))
        if _stamp(self._file) != self._stamp:
            raise DatasetError(f"{self.path} has changed since its lines were counted; create the TextDataset again")


def _stamp(file: Descriptor) -> tuple[int, int]:
    status = os.fstat(file.number)
    return status.st_size, status.st_mtime_ns


# What a file may start with to say which of these it is.
_MARKS: dict[str, dict[bytes, str]] = {
    "utf-8-sig": {codecs.BOM_UTF8: "utf-8"},
    "utf-16": {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"},
    "utf-32": {codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be"},
}
_UNMARKED = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}


def _code_of(encoding: str, head: bytes) -> _Code:
    name, start = codecs.lookup(encoding).name, 0
    for mark, meant in _MARKS.get(name, {}).items():
        if head.startswith(mark):
            name, start = meant, len(mark)
    name = _UNMARKED.get(name, name)
    feed, back = "\n".encode(name), "\r".encode(name)
    if len(feed) != len(back) or len(feed) not in (1, 2, 4) or name == "iso2022_kr":
        raise ValueError(f"expected an encoding whose lines can be told apart, got {encoding}")
    order = "big" if name.endswith("-be") else "little"
    return _Code(name, start, len(feed), *(int.from_bytes(unit, order) for unit in (feed, back)))  # type: ignore[arg-type]


def _bounds(file: BinaryIO, code: _Code, newline: str | None) -> Array:
    """Where each line starts, and the end of the file, in bytes."""
    size = os.fstat(file.fileno()).st_size
    file.seek(code.start)
    ends = [found * code.width + code.start for found in _ends(_blocks(file, code), code, newline)]
    bounds = np.concatenate([np.array([code.start], np.int64), *ends])
    return bounds if bounds[-1] >= size else np.append(bounds, size)  # a last line without an end


def _blocks(file: BinaryIO, code: _Code) -> Iterator[tuple[int, Array]]:
    """Pieces of a file as units, with the number of their first one; each ends with the first unit of the next."""
    dtype = np.dtype(f"{'>' if code.name.endswith('-be') else '<'}u{code.width}")
    at, data = 0, file.read(_BLOCK_BYTES)
    while data:
        more = file.read(_BLOCK_BYTES)
        whole = data + more[: code.width]
        yield at, np.frombuffer(whole, dtype, len(whole) // code.width)
        at += _BLOCK_BYTES // code.width
        data = more


def _ends(blocks: Iterator[tuple[int, Array]], code: _Code, newline: str | None) -> Iterator[Array]:
    """The numbers of the units behind which lines end."""
    for at, units in blocks:
        own, following = units[: _BLOCK_BYTES // code.width], units[1:]
        feeds, backs = own == code.feed, own == code.back
        if newline == "\n":
            is_end = feeds
        elif newline == "\r":
            is_end = backs
        elif newline == "\r\n":
            is_end = _pairs(backs, following == code.feed)
            yield np.flatnonzero(is_end) + at + 2
            continue
        else:
            is_end = feeds | (backs & ~_pairs(backs, following == code.feed))
        yield np.flatnonzero(is_end) + at + 1


def _pairs(first: Array, second: Array) -> Array:
    """Where a unit of the first kind has one of the second behind it."""
    both = np.zeros(len(first), bool)
    n = min(len(first), len(second))
    both[:n] = first[:n] & second[:n]
    return both
