"""The test classes that a decorator has made of one: no test class itself, so that no runner collects it."""

from __future__ import annotations

import unittest
from typing import Any


class Bundle:
    """The name of the decorated class stands for this; further decorators work on each of its ``cases``."""

    def __init__(self, cases: list[type]) -> None:
        self.cases = cases


def classes_of(case: Any) -> list[type]:
    """The test classes that a decorator is to change: those of a bundle, or the one class."""
    if isinstance(case, Bundle):
        return case.cases
    if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
        raise TypeError(f"expected a class that inherits from unittest.TestCase, got {case!r}")
    return [case]
