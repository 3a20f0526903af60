"""Tests of dbrdist.core.tape.named_errors."""

from __future__ import annotations

import pytest

from dbrdist.core.tape import named_errors
from dbrdist.core.tape.checks import ArgumentError
from tests.each import each


@each(**{"error, kind, words": [
    (KeyError("a b"), KeyError, "f: a b; got x: int 1"),
    (ValueError("a", 2), ArgumentError, "f: ('a', 2); got x: int 1"),
    (ValueError(), ArgumentError, "f: ; got x: int 1"), (TypeError("f: as it is"), TypeError, "f: as it is"),
    (type("_Own", (TypeError,), {"__module__": "numpy._core"})("a"), TypeError, "f: a; got x: int 1"),
    (ZeroDivisionError("a"), ZeroDivisionError, "a"),
]})  # fmt: skip
def test_errors_keep_their_kind_and_words(error, kind, words):
    def f(x):
        exec("raise error", {"__name__": "numpy.made", "error": error})

    with pytest.raises(kind) as raised:
        named_errors.naming_errors(f)(1)
    assert type(raised.value) is kind and raised.value.args[0] == words
    assert getattr(raised.value, "__notes__", []) == (["f: got x: int 1"] if words == "a" else [])
