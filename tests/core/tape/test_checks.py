"""Tests of dbrdist.core.tape.checks."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from dbrdist.core.tape import checks, named_errors


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_arguments_in_messages_are_short():
    for value, shown in (
        (int, "int"),
        ([ones(1)] * 4, f"[{', '.join(['shape (1,) and dtype float32'] * 4)}]"),
        ([ones(1)] * 5, f"[{', '.join(['shape (1,) and dtype float32'] * 4)}, ...]"),
        ([1, 2], "list [1, 2]"),
        ("a" * 60, "str '" + "a" * 39),
        (None, "NoneType None"),
    ):
        assert named_errors._seen(value) == shown


def test_an_error_has_its_parts_in_the_order_of_its_sentence():
    error = checks.expected("linear", "x", "shape (N, 3)", np.zeros((2, 4), "f"), "transpose it")
    parts = ("linear", "x", "shape (N, 3)", "shape (2, 4) and dtype float32", "transpose it")
    assert error.args == parts
    assert (error.function, error.argument, error.what, error.got, error.hint) == parts
    assert str(error) == "linear: x: expected shape (N, 3), got shape (2, 4) and dtype float32; transpose it"


def test_operands_beyond_the_last_name_are_numbered():
    operands = checks.Operands("concat", x="float", rest="integer")
    operands.check(5, np.zeros(1, "i"))
    with pytest.raises(checks.OperandTypeError, match="concat: operand 2: expected integers, got shape") as caught:
        operands.check(2, np.zeros(1))
    assert caught.value.args[:3] == ("concat", "operand 2", "integers")


def test_a_failed_check_can_be_copied_and_pickled_with_the_function_it_was_in():
    plain, compared = checks.InvalidType("words"), checks.InvalidType("x == 3", "2")
    for error, expected in ((plain, "words"), (compared, "\nExpect: x == 3\nActual: 2")):
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == expected
    plain.within_function("F")
    compared.within_function("F")
    compared.within_function("Outer")  # the innermost counts
    inside = "Invalid operation is performed in: F (Forward)\n\nExpect: x == 3\nActual: 2"
    for again in (lambda error: error, copy.copy, lambda error: pickle.loads(pickle.dumps(error))):
        assert (str(again(plain)), str(again(compared))) == ("words", inside)
    assert compared.args == ("x == 3", "2", "Invalid operation is performed in: F (Forward)")
