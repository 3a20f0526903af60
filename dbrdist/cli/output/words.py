"""Small words of what a run says."""

from __future__ import annotations

import os
import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

WIDTH = 80  # columns of what a run prints, where nothing says how many there are


def counted(n: int | str, noun: str, plural: str | None = None) -> str:
    """For example "1 example", "1,442 examples"."""
    number = f"{n:,}" if hasattr(n, "__index__") else str(n)  # a file may have anything as a number
    return f"{number} {noun}" if number == "1" else f"{number} {plural or noun + 's'}"


def as_percent(share: float) -> str:
    """A share with two digits behind the point; short for the numbers of a function that is none."""
    return f"{100 * share:.2f} %" if abs(share) < 1e4 else f"{100 * share:.2e} %"


def said(error: Exception) -> str:
    """What an error says: of one of the system's, the file if it has one and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    # an error that another rank passed on has its words alone
    return str(error.args[0]) if isinstance(error, KeyError) else re.sub(r"^\[Errno \d+\] ", "", str(error))


def columns_of(stream: TextIO) -> int | None:
    """The columns of the terminal behind a stream; None where it is a pipe, a file or nothing."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return None


def folded(line: str, width: int | None = WIDTH) -> str:
    """A line as lines of at most `width` characters (None: any), broken between words; longer words stay whole."""
    if width is None or len(line) <= width:
        return line
    inner = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.fill(line, width, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
