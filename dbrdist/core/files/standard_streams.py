"""The standard streams for words that end no program: a stream may be closed, its reader gone, its disk full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TextIO

_GONE = (None, errno.EPIPE, errno.EBADF, errno.EIO)  # nobody reads any more, or there is none
_PIECE = 1024  # characters at a time: they fit into Python's buffer, which loses what does not while a pipe is full


class StandardStream:
    """A text stream to `sys.stdout` or `sys.stderr` of the moment that never fails.

    What cannot be written is dropped; what the encoding lacks is written as an escape.

    Args:
        name: 'stdout' or 'stderr'.
        is_below_bars: whether it leaves out the stream that a progress bar puts there, so that words appear above it.
    """

    def __init__(self, name: str, is_below_bars: bool = False):
        self._name = name
        self._is_below_bars = is_below_bars
        self._has_told = False

    @property
    def _stream(self) -> Any:
        stream = getattr(sys, self._name, None)  # None where a program began with a closed one
        return getattr(stream, "rich_proxied_file", stream) if self._is_below_bars else stream

    def is_named(self, name: str) -> bool:
        """Whether this is that of `sys.stdout` or of `sys.stderr`."""
        return self._name == name

    def below_bars(self) -> StandardStream:
        """The same for a progress bar, which would otherwise write to what it has put in this stream's place."""
        return StandardStream(self._name, is_below_bars=True)

    @property
    def encoding(self) -> str:
        """That of the stream, UTF-8 where there is none."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, words: str) -> int:
        """Write words, and pass them on at once."""
        try:
            stream = self._stream
            size = len(words) if hasattr(stream, "rich_proxied_file") else _PIECE  # each piece would be a line there
            for start in range(0, len(words) or 1, size or 1):
                self._put(stream, words[start : start + size])
        except (OSError, ValueError, AttributeError) as error:
            self._drop(error)
        return len(words)

    def _put(self, stream: TextIO, words: str) -> None:
        _wait(stream)
        try:
            stream.write(words)
        except UnicodeEncodeError:
            stream.write(words.encode(self.encoding, "backslashreplace").decode(self.encoding))
        _flush(stream)

    def flush(self) -> None:
        """Pass on what waits, such as what the program itself has written."""
        try:
            _flush(self._stream)
        except (OSError, ValueError) as error:
            self._drop(error)

    def isatty(self) -> bool:
        """Whether somebody reads it at a terminal."""
        stream = self._stream
        try:
            return bool(stream.isatty())
        except (AttributeError, ValueError):  # there is none, or it is closed
            return False

    def fileno(self) -> int:
        """The file descriptor. Raises OSError where there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation(f"sys.{self._name} is None")
        return int(self._stream.fileno())

    def _drop(self, error: Exception) -> None:
        """Let what follows go nowhere: what Python still holds must not fail at the exit either.

        A full disk is told once; a file that the program has put in the stream's place stays as it is.
        """
        if self._name == "stdout" and not self._has_told and getattr(error, "errno", None) not in _GONE:
            self._has_told = True
            stderr.write(f"dbrdist: the standard output cannot be written ({error}); what follows may be lost\n")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._stream.fileno() in (1, 2):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


def _flush(stream: TextIO) -> None:
    """Pass on what waits; a pipe that does not block, and is full, is waited for as one that does."""
    while hasattr(stream, "flush"):  # a program's own may have none
        try:
            stream.flush()
            return
        except BlockingIOError:
            if not _wait(stream):
                raise


def _wait(stream: TextIO) -> bool:
    """True after a wait until a pipe that does not block has room.

    Where Python has no buffer, it drops what finds no room, and says nothing.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file, or no file of this system's
        if not os.get_blocking(descriptor := stream.fileno()):
            select.select([], [descriptor], [])
            return True
    return False


stdout, stderr = StandardStream("stdout"), StandardStream("stderr")


def ends_at(name: str, stream: TextIO | StandardStream) -> bool:
    """Whether `sys.stdout` or `sys.stderr`, by its name, leads to the same terminal or file as a stream.

    That of a program's own class may lead anywhere, also back to the standard output.
    """
    if isinstance(stream, StandardStream):
        if stream.is_named(name):
            return True
    elif not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return os.path.samestat(os.fstat(getattr(sys, name).fileno()), os.fstat(stream.fileno()))
    except (OSError, ValueError, AttributeError):  # there is none, it is closed, or it is no file
        return getattr(sys, name, None) is stream
