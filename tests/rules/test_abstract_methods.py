"""Methods that a subclass has to define say so where it did not: none of them returns None in silence."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def raises_only(function):
    """Whether a definition has no more than a docstring and ``raise NotImplementedError``."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0])


def found(node, names=()):
    """The names of such methods, with those of the classes around them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from found(child, (*names, child.name))
        elif isinstance(child, ast.FunctionDef) and names and raises_only(child):
            yield (*names, child.name)


METHODS = {
    f"{path.relative_to(ROOT).with_suffix('').as_posix()}: {'.'.join(names)}": names
    for path in sorted((ROOT / "dbrdist").rglob("*.py"))
    if "NotImplementedError" in (text := path.read_text())  # to parse all takes a second
    for names in found(ast.parse(text))
}


# How many there are: one that no longer raises is no longer found.
NUMBERS = {
    "comm": 6, "core": 25, "datasets": 13, "distributions": 1, "function_hooks": 2, "functions": 2, "link_hooks": 2,
    "links": 4, "testing": 9, "training": 10,
}  # fmt: skip


def test_none_has_been_lost():
    assert Counter(place.split("/")[1] for place in METHODS) == NUMBERS


@pytest.mark.parametrize("room", NUMBERS)
def test_what_is_not_defined_is_said(room):
    for place, names in METHODS.items():
        if place.split("/")[1] != room:
            continue
        owner = importlib.import_module(place.partition(":")[0].replace("/", "."))
        for name in names[:-1]:
            owner = getattr(owner, name)
        method = vars(owner)[names[-1]]
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        first = owner if isinstance(method, classmethod) else object.__new__(owner)
        _, *more = (p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
        with pytest.raises(NotImplementedError):
            function(first, *[None] * len(more))
            pytest.fail(place)
