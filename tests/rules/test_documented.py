"""Documented arguments: their number only goes up."""

from __future__ import annotations

import documented

DOCUMENTED = 302  # public names whose arguments are all described; raise it when you describe more


def test_the_number_of_documented_names_only_goes_up():
    names = documented.public()
    found = sum(not documented.missing(value) for value in names.values())
    assert found >= DOCUMENTED, "a public name lost the description of an argument: documented.py --missing"


def test_what_counts_as_described():
    def f(x, axis=0, *, eps=1.0):
        """One line.

        Args:
            x, axis: an array
                and its axis.
            eps: a number.

        Returns:
            other: not an argument.
        """

    def g(x):
        """x: not in a section."""

    assert documented.missing(f) == [] and documented.missing(g) == ["x"]
    assert documented.described(f.__doc__) == {"x", "axis", "eps"}
