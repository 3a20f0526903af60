"""Tests of dbrdist.testing.parameterized."""

import sys
import types
import unittest

import pytest

from dbrdist import testing
from tests.testing.testing_helpers import run


def texts(result):
    return [text for _, text in result.failures + result.errors]


def test_product_and_product_dict():
    assert testing.product({"y": "ab", "x": [1, 2]}) == [
        {"x": 1, "y": "a"},
        {"x": 1, "y": "b"},
        {"x": 2, "y": "a"},
        {"x": 2, "y": "b"},
    ]
    lists = [[{"a": 1}, {"a": 2}], [{"b": 3, "c": 4}]]
    merged = [{"a": 1, "b": 3, "c": 4}, {"a": 2, "b": 3, "c": 4}]
    assert testing.product_dict(*lists) == testing.product(lists) == merged
    for wrong in ([1], "ab", 3):
        with pytest.raises(TypeError, match="expected"):
            testing.product(wrong)
    with pytest.raises(TypeError, match="lists of dictionaries"):
        testing.product_dict([1])


def test_from_pytest_parameterize():
    assert testing.from_pytest_parameterize("x, y", [(1, 2), (3, 4)]) == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    assert testing.from_pytest_parameterize(["x"], [1, (2,)]) == [{"x": 1}, {"x": 2}]
    with pytest.raises(ValueError, match="expected 2 for x, y, got"):
        testing.from_pytest_parameterize("x,y", [(1, 2, 3)])


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


def test_parameterize_makes_a_class_for_each(module):
    seen = []

    def test_it(self):
        seen.append((self.x, self.f(3)))
        self.assertNotEqual(self.x, 2)

    double = {"x": 2, "f": lambda v: 2 * v}
    bundle = testing.parameterize({"x": 1, "f": abs}, double)(case_in(module, test_it=test_it))
    assert not isinstance(bundle, type) and len(classes(module)) == 2
    result = run(*classes(module))
    assert seen == [(1, 3), (2, 6)]
    (text,) = texts(result)
    assert "test parameters of TestIt.test_it:" in text and "x: 2" in text
    assert classes(module)[0].__name__.startswith("TestIt_param_0_{f=abs, x=1")


def test_parameterize_twice_and_with_backends(module):
    seen = []
    case = case_in(module, test_it=lambda self, config: seen.append((self.x, self.y, config.autotune)))
    bundle = testing.inject_backend_tests(["test_it"], [{}, {"autotune": True}])(case)
    bundle = testing.parameterize_pytest("x", [1, 2])(bundle)
    bundle = testing.parameterize({"y": 3}, {"y": 4})(bundle)
    assert len(classes(module)) == len(bundle.cases) == 4
    assert run(*classes(module)).testsRun == 8 and len(set(seen)) == 8


def test_what_parameterize_refuses(module):
    with pytest.raises(TypeError, match=r"forget the \* before product"):
        testing.parameterize(testing.product({"x": [1]}))
    with pytest.raises(TypeError, match="inherits from unittest"):
        testing.parameterize({})(lambda: None)
