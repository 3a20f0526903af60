"""Small words of what a run says."""

from __future__ import annotations


def counted(n: int | str, noun: str) -> str:
    """For example "1 example", "2 examples"."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"


def said(error: Exception) -> str:
    """What an error says: of one of the system's, the file and the reason, without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error.args[0]) if isinstance(error, KeyError) else str(error)
