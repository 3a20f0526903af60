"""The sentences of argument errors, so that all functions sound alike.

A check compares first and builds its message only on failure::

    if x.shape[1] != W.shape[1]:
        raise expected("linear", "x", f"shape (N, {W.shape[1]}) to match W", x)
"""

from __future__ import annotations

from typing import Any


class ArgumentError(ValueError):
    """An argument that does not fit. Links on the way up add their names in front."""

    def __init__(self, function: str, argument: str, what: str, got: str, hint: str) -> None:
        super().__init__(function, argument, what, got, hint)
        self.function = function
        self.argument = argument
        self.what = what
        self.got = got
        self.hint = hint
        self.links: list[str] = []  # outermost first

    def __str__(self) -> str:
        where = f"link {'/'.join(self.links)}: " if self.links else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{where}{self.function}: {self.argument}: expected {self.what}, got {self.got}{hint}"

    def within(self, link: Any) -> None:
        """Say that the function was called by ``link``."""
        kind = type(link).__name__
        name = getattr(link, "name", None)
        self.links.insert(0, (name or kind) if self.links or not name else f"{name} ({kind})")


def describe(x: Any) -> str:
    """An array or Variable as its shape and type, anything else as it prints."""
    shape = getattr(x, "shape", None)
    if shape is None:
        return repr(x)
    return f"shape {tuple(shape)} and dtype {x.dtype}"


def expected(function: str, argument: str, what: str, got: Any, hint: str = "") -> ArgumentError:
    """The error ``function: argument: expected what, got got; hint``, to be raised by the caller.

    ``got`` is text, or the value itself, of which an array is described by shape and type.
    """
    return ArgumentError(function, argument, what, got if isinstance(got, str) else describe(got), hint)


def one_of(function: str, argument: str, choices: tuple[str, ...], got: Any) -> None:
    """Raise unless ``got`` is among ``choices``."""
    if got not in choices:
        raise expected(function, argument, " or ".join(repr(c) for c in choices), repr(got))
