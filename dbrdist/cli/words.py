"""Small words of what a run says."""

from __future__ import annotations


def counted(n: int | str, noun: str) -> str:
    """For example "1 example", "2 examples"."""
    return f"{n} {noun}" if str(n) == "1" else f"{n} {noun}s"
