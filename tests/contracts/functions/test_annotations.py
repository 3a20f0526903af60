"""What functions are annotated to return is what they return, so that an editor knows it."""

from __future__ import annotations

import inspect
import sys
import types
import typing

import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array.types import Array
from tests.functions.cases import CASES
from tests.functions.gradient_helpers import largest

FUNCTIONS = [f for f in (getattr(F, name) for name in F.__all__) if isinstance(f, types.FunctionType)]
PUBLIC = {inspect.unwrap(f).__code__: inspect.unwrap(f) for f in FUNCTIONS}
# What these return depends on an argument, such as `return_indices`, or on how many variables they are given.
DEPENDS = {"dropout", "identity", "max_pooling_2d", "split_axis"}


def returned(function: types.FunctionType) -> object:
    return typing.get_type_hints(function)["return"]


def test_every_public_function_says_what_it_returns():
    silent = {inspect.unwrap(f).__name__ for f in FUNCTIONS if returned(inspect.unwrap(f)) is typing.Any}
    assert silent == DEPENDS


def is_a(value: object, kind: object) -> bool:
    """Whether a value is of a type, as far as annotations of functions go."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is typing.Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(is_a(value, k) for k in inner)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(is_a, value, kinds))
    if origin is list:
        return isinstance(value, list) and all(is_a(v, inner[0]) for v in value)
    return hasattr(value, "__array__") if kind is Array else isinstance(value, kind)


@pytest.mark.slow
def test_functions_return_what_they_say():
    wrong, seen = [], set()

    def look(frame, event, value):
        f = PUBLIC.get(frame.f_code) if event == "return" else None
        if f is not None and value is not None:  # None while an error is raised
            seen.add(f.__name__)
            if not is_a(value, returned(f)):
                wrong.append((f.__name__, type(value)))

    for case in CASES:
        try:
            xs = [Variable(a) for a in case.inputs(largest(case))]
        except pytest.skip.Exception:
            continue
        sys.setprofile(look)
        try:
            case.function(*xs)
        finally:
            sys.setprofile(None)
    assert wrong == []
    assert len(seen) > 160 or "relu" not in seen  # compiled functions are not seen
