"""Tests of dbrdist.testing.function_case."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import testing
from tests.testing.testing_helpers import WrongBackward, failures


def uniform(*shape):
    return np.random.uniform(-1, 1, shape).astype(np.float32)


class Softplus(testing.FunctionTestCase):
    def generate_inputs(self):
        return uniform(2, 3), uniform(2, 3)

    def forward(self, inputs, device):
        x, y = inputs
        return F.log(1 + F.exp(x)) * y, x + y

    def forward_expected(self, inputs):
        x, y = inputs
        return np.log1p(np.exp(x)) * y, x + y


class WrongSecondBackward(WrongBackward):
    """A square whose gradient is right and has no gradient by x itself."""

    def backward(self, indexes, gys):
        (x,) = self.get_retained_inputs()
        return (gys[0] * 2 * x.array,)


class Square(testing.FunctionTestCase):
    def generate_inputs(self):
        return (uniform(4) + 2,)

    def forward(self, inputs, device):
        return (inputs[0] ** 2,)

    def forward_expected(self, inputs):
        return (inputs[0] ** 2,)


def test_a_right_function_passes():
    assert failures(Softplus) == {}
    assert failures(Softplus, contiguous="C") == {}


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"forward": lambda s, xs, d: (xs[0] * 2, xs[0] + xs[1])}, "output 0, shape (2, 3) and dtype float32: values"),
        ({"forward": lambda s, xs, d: (xs[0],)}, "expected 2 outputs, got 1"),
        ({"forward": lambda s, xs, d: xs[0]}, "expected a tuple of Variables, got Variable"),
        ({"forward": lambda s, xs, d: (xs[0].array, xs[1])}, "got ndarray as output 0"),
        (
            {"forward": lambda s, xs, d: (F.cast(Softplus.forward(s, xs, d)[0], np.float64), xs[0] + xs[1])},
            "expected shape (2, 3) and dtype float32, got shape (2, 3) and dtype float64",
        ),
        ({"forward_expected": lambda s, xs: [xs[0]]}, "forward_expected(): expected a tuple of NumPy arrays, got list"),
        ({"generate_inputs": lambda s: (1.0, 2.0)}, "generate_inputs(): expected a tuple of NumPy arrays, got float"),
        ({"contiguous": "F"}, "contiguous: expected None or 'C', got 'F'"),
    ],
)
def test_a_wrong_forward_is_noticed(members, words):
    assert words in failures(Softplus, **members)["test_forward"]


def test_a_forward_that_writes_to_its_inputs_is_noticed():
    def forward(self, inputs, device):
        y = inputs[0] ** 2
        inputs[0].array[0] = 0
        return (y,)

    assert "forward changed its inputs: 0" in failures(Square, forward=forward)["test_forward"]


def test_wrong_gradients_are_noticed():
    found = failures(Square, forward=lambda s, xs, d: WrongBackward().apply(xs))
    assert set(found) == {"test_backward"}  # its own gradient is consistent
    assert "backward is wrong: first-order backward: expected a slope of" in found["test_backward"]
    found = failures(Square, forward=lambda s, xs, d: WrongSecondBackward().apply(xs))
    assert set(found) == {"test_double_backward"}
    assert "double backward is wrong" in found["test_double_backward"]


def test_skips_options_and_the_name_of_the_test():
    names = []
    members = {
        "skip_forward_test": True,
        "check_backward_options": {"atol": 1e6},
        "check_double_backward_options": {"atol": 1e6},
        "before_test": lambda s, name: names.append(name),
    }
    assert failures(Square, forward=lambda s, xs, d: WrongBackward().apply(xs), **members) == {}
    assert sorted(names) == ["test_backward", "test_double_backward"]


@pytest.mark.slow
def test_kinks_are_dodged():
    draws = iter([1e-4, 1e-4, 0.5] * 3)
    members = {
        "generate_inputs": lambda s: (np.full(2, next(draws), np.float32),),
        "forward": lambda s, xs, d: (F.absolute(xs[0]),),
        "forward_expected": lambda s, xs: (abs(xs[0]),),
        "skip_forward_test": True,
    }
    assert failures(Square, dodge_nondifferentiable=True, **members) == {}
    members["generate_inputs"] = lambda s: (np.zeros(2, np.float32),)
    found = failures(Square, dodge_nondifferentiable=True, **members)
    assert "without kinks among 100 draws" in found["test_backward"]


def test_integer_inputs_take_no_gradient():
    members = {
        "generate_inputs": lambda s: (uniform(3, 4), np.array([0, 3, 1], np.int32)),
        "forward": lambda s, xs, d: (F.select_item(*xs),),
        "forward_expected": lambda s, xs: (xs[0][np.arange(3), xs[1]],),
    }
    assert failures(Square, **members) == {}


def test_gradients_may_be_none():
    """No gradient arrives at the first output, nor at the gradient of the second input."""

    class Both(dbrdist.FunctionNode):
        def forward(self, xs):
            self.retain_inputs((0, 1))
            return xs[0] ** 2, xs[0] * xs[1]

        def backward(self, indexes, gys):
            assert gys[0] is None and gys[1] is not None
            return tuple(x * gys[1] for x in self.get_retained_inputs()[::-1])

    class Case(testing.FunctionTestCase):
        def generate_inputs(self):
            return uniform(3), uniform(3)

        def generate_grad_outputs(self, outputs_template):
            return None, uniform(3)

        def generate_grad_grad_inputs(self, inputs_template):
            return uniform(3), None

        def forward(self, inputs, device):
            return Both().apply(inputs)

        def forward_expected(self, inputs):
            return inputs[0] ** 2, inputs[0] * inputs[1]

    assert failures(Case) == {}
    wrong = failures(Case, generate_inputs=lambda self: (uniform(3), None))
    assert all("expected a tuple of NumPy arrays, got ndarray, NoneType" in text for text in wrong.values()) and wrong
