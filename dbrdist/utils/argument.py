"""Keyword arguments that came as a dictionary."""

from __future__ import annotations

import sys
from typing import Any


def check_unexpected_kwargs(kwargs: dict[str, int], **unexpected: str) -> None:
    """Raise ValueError with the given message where ``kwargs`` has one of the names."""
    for name, message in unexpected.items():
        if name in kwargs:
            raise ValueError(message)


def parse_kwargs(kwargs: dict[str, int], *name_and_values: tuple[str, Any], **unexpected: str) -> tuple[int, int]:
    """The values of the named arguments, each with its default: ``a, b = parse_kwargs(kwargs, ("a", 1), ("b", 2))``.

    A name that is none of them raises TypeError; one that ``unexpected`` names, ValueError with that message.
    """
    check_unexpected_kwargs(kwargs, **unexpected)
    values = tuple(kwargs.pop(name, default) for name, default in name_and_values)
    if kwargs:
        function = sys._getframe(1).f_code.co_name
        allowed = ", ".join(name for name, _ in name_and_values)
        given = ", ".join(repr(name) for name in sorted(kwargs))
        raise TypeError(f"{function}() got unexpected keyword argument(s) {given}; expected one of: {allowed}")
    return values


def assert_kwargs_empty(kwargs: dict[str, int]) -> None:
    """Raise TypeError unless ``kwargs`` is empty."""
    if kwargs:
        function = sys._getframe(1).f_code.co_name
        raise TypeError(f"{function}: unexpected arguments {', '.join(map(repr, sorted(kwargs)))}")
