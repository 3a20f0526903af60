"""Tests of dbrdist.testing.link_case."""

import unittest

import numpy as np
import pytest

import dbrdist.functions as F
import dbrdist.links as L
from dbrdist import initializers, testing
from tests.testing.testing_helpers import WrongBackward, failures


def uniform(*shape):
    return np.random.uniform(-1, 1, shape).astype(np.float32)


class LinearCase:
    param_names = ("W", "b")

    def generate_params(self):
        return uniform(3, 2), uniform(3)

    def generate_inputs(self):
        return (uniform(1, 2),)

    def create_link(self, inits):
        return L.Linear(2, 3, initialW=inits[0], initial_bias=inits[1])


class LinearValues(LinearCase, testing.LinkTestCase):
    def forward_expected(self, link, inputs):
        return (inputs[0].dot(link.W.array.T) + link.b.array,)


class LinearInitializers(LinearCase, testing.LinkInitializersTestCase):
    def get_initializers(self):
        return (
            [initializers.Constant(1), 2, uniform(3, 2)],
            [initializers.Constant(2), 3, testing.InitializerArgument(None, 0)],
        )


class LinearWithWrongBackward(L.Linear):
    def forward(self, x):
        return F.linear(x, self.W) + WrongBackward().apply((self.b,))[0]


def test_right_links_pass():
    assert failures(LinearValues) == {}
    assert failures(LinearInitializers) == {}
    late = {"create_link": lambda s, i: L.Linear(None, 3, initialW=i[0], initial_bias=i[1])}
    assert failures(LinearInitializers, **late) == {}


def test_wrong_links_are_noticed():
    found = failures(LinearValues, forward_expected=lambda s, link, xs: (xs[0].dot(link.W.array.T),))
    assert "output 0, shape (1, 3) and dtype float32: values differ" in found["test_forward"]
    wrong = {
        "create_link": lambda s, i: LinearWithWrongBackward(2, 3, initialW=i[0], initial_bias=i[1]),
        "forward_expected": lambda s, link, xs: (xs[0].dot(link.W.array.T) + link.b.array**2,),
    }
    found = failures(LinearValues, **wrong)
    assert set(found) == {"test_backward"} and "backward is wrong" in found["test_backward"]
    found = failures(LinearValues, param_names=("W", "beta"))
    assert "a parameter named 'beta'; its parameters: W, b" in found["test_backward"]
    assert "expected a Link, got NoneType" in failures(LinearValues, create_link=lambda s, i: None)["test_forward"]


def test_wrong_initializers_are_noticed():
    found = failures(LinearInitializers, create_link=lambda s, i: L.Linear(2, 3, initialW=i[0]))
    words = found["test_initializers"]
    assert "parameter b with the initializer <dbrdist" in words and "values differ" in words
    found = failures(LinearInitializers, get_initializers=lambda s: ([None], []))
    assert "wrap None into an InitializerArgument" in found["test_initializers"]
    for arguments, error in (((1, None), ValueError), ((1, "zeros"), TypeError)):
        with pytest.raises(error, match="expected_initializer: expected an initializer"):
            testing.InitializerArgument(*arguments)


def test_the_base_classes_themselves_pass():
    for case in (testing.FunctionTestCase, testing.LinkTestCase, testing.LinkInitializersTestCase):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
        assert result.wasSuccessful()
