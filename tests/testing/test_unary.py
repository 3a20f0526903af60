"""Tests of dbrdist.testing.unary."""

import sys
import types
import unittest

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import testing
from tests.testing.testing_helpers import run


def texts(result):
    return [text for _, text in result.failures + result.errors]


@pytest.fixture
def module(monkeypatch):
    """A module that test classes can be made in."""
    made = types.ModuleType("a_test_module")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def case_in(module, **members):
    return type("TestIt", (unittest.TestCase,), {"__module__": module.__name__, **members})


def classes(module):
    return [value for value in vars(module).values() if isinstance(value, type)]


def test_a_right_unary_function_passes(module):
    testing.unary_math_function_unittest(F.sin, label_expected="sin")(case_in(module))
    result = run(*classes(module))
    assert result.testsRun == 6 * 7 and not texts(result)


@pytest.mark.parametrize(
    ("arguments", "failing"),
    [
        ({"func_expected": lambda x, dtype: np.cos(x)}, {"test_forward_cpu"}),
        ({"func": lambda x: F.sin(dbrdist.Variable(x.array)) + 0 * x, "func_expected": np.sin}, {"test_backward_cpu"}),
        ({"label_expected": "cos"}, {"test_label"}),
        ({"forward_options": {"atol": 9}, "func_expected": lambda x, dtype: np.cos(x)}, set()),
    ],
)
def test_a_wrong_unary_function_is_noticed(module, arguments, failing):
    testing.unary_math_function_unittest(**{"func": F.sin, **arguments})(case_in(module))
    result = run(*classes(module))
    assert {test._testMethodName for test, _ in result.failures} == failing


def test_linear_functions_and_own_data(module):
    def make_data(shape, dtype):
        return tuple(np.random.uniform(0.5, 1, shape).astype(dtype) for _ in range(3))

    testing.unary_math_function_unittest(F.sqrt, make_data=make_data, is_linear=True)(case_in(module))
    assert not texts(run(*classes(module)))
    with pytest.raises(ValueError, match="NumPy has no function named 'relu'"):
        testing.unary_math_function_unittest(F.relu)
