"""Small words of what a run says."""

from __future__ import annotations

import re
import textwrap

WIDTH = 80  # columns of what a run prints


def counted(n: int | str, noun: str) -> str:
    """For example "1 example", "2 examples"."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"


def said(error: Exception) -> str:
    """What an error says: of one of the system's, the file if it has one and the reason, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    # an error that another rank passed on has its words alone
    return str(error.args[0]) if isinstance(error, KeyError) else re.sub(r"^\[Errno \d+\] ", "", str(error))


def folded(line: str) -> str:
    """A line as lines of at most 80 characters, broken between words; a word that is longer stays whole."""
    if len(line) <= WIDTH:
        return line
    inner = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.fill(line, WIDTH, subsequent_indent=inner, break_long_words=False, break_on_hyphens=False)
