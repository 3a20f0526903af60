"""Test classes that are run within a test, and what they are wrong about."""

from __future__ import annotations

import unittest

import numpy as np

import dbrdist


def failures(case, **members):
    """The failing tests of a variant of a test case, by name, with what they say.

    Inputs and gradients are the same each time: among some hundred draws one hides a wrong gradient.
    """
    np.random.seed(0)
    variant = type(case.__name__, (case,), members)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(variant)
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun == suite.countTestCases() > 0
    return {test._testMethodName: text for test, text in result.failures + result.errors}


class WrongBackward(dbrdist.FunctionNode):
    """A square whose gradient is that of x^2 / 2."""

    def forward(self, xs):
        self.retain_inputs((0,))
        return (xs[0] * xs[0],)

    def backward(self, indexes, gys):
        (x,) = self.get_retained_inputs()
        return (gys[0] * x,)


def run(*cases):
    """The result of test classes, under unittest."""
    result = unittest.TestResult()
    for case in cases:
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result
