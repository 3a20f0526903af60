"""Files that stay open between reads, a bounded number of them, for any number of threads."""

from __future__ import annotations

import errno
import os
import select
import stat
import threading
from collections import OrderedDict
from typing import BinaryIO

from dbrdist.core.files.regular_file import regular

_MAX_OPEN = 128
_MAX_BYTES = (1 << 31) - 1  # of a file that is read whole, twice what the largest image needs
_WRITER_MS = 5000  # for the writer of a pipe that is read as a file


class Descriptor:
    """The number of an open file, which is closed with the last reference to this."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._close = os.close  # at the interpreter's end the module may be gone before this

    def __del__(self) -> None:
        self._close(self.number)


def read_part(file: Descriptor, offset: int, size: int) -> bytes:
    """``size`` bytes from ``offset``. Raises OSError, also where the file ends before."""
    data = os.pread(file.number, size, offset)
    while len(data) < size:
        more = os.pread(file.number, size - len(data), offset + len(data))
        if not more:
            raise OSError(f"the file ends after {len(data):,} of {size:,} bytes at {offset:,}")
        data += more
    return data


class OpenFiles:
    """Reads parts of files; keeps those that were read last open."""

    def __init__(self, max_open: int = _MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """As :func:`read_part`, of a file by its path."""
        file = self._opened(path)  # what another thread drops meanwhile stays open while we hold it
        return read_part(file, offset, size)

    def _opened(self, path: str) -> Descriptor:
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = Descriptor(regular(path))
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return file


def read_file(path: str) -> bytes:
    """A whole file, by one read in nearly every case; OSError for a device, and for more than one would ever keep."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    try:
        about = os.fstat(number)
        if stat.S_ISFIFO(about.st_mode):
            _await_writer(number, path)
        if stat.S_ISCHR(about.st_mode) or stat.S_ISBLK(about.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, it is a device", path)
        size = about.st_size
        data = os.read(number, _checked_size(size, path) + 1)
        if len(data) != size:  # it changes, or is none whose size is known
            while more := os.read(number, 1 << 20):
                data += more
                _checked_size(len(data), path)
        return data
    finally:
        os.close(number)


def _checked_size(size: int, path: str) -> int:
    if size > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"expected a file of at most {_MAX_BYTES:,} bytes, got {size:,}", path)
    return size


def _await_writer(number: int, path: str) -> None:
    """Return once somebody writes to a pipe, and let reads wait from then on."""
    waiting = select.poll()
    waiting.register(number, select.POLLIN)
    if not waiting.poll(_WRITER_MS):
        raise OSError(errno.EAGAIN, "nobody writes to this pipe", path)
    os.set_blocking(number, True)


def as_binary(descriptor: Descriptor) -> BinaryIO:
    """An open file for writing, which leaves the descriptor open."""
    return open(descriptor.number, "wb", closefd=False)
