"""The gradient checker is shown wrong gradients, and has to complain about each."""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest

import dbrdist
from dbrdist import FunctionNode, Parameter, Variable, gradient_check
from dbrdist.core.tape.gradient_check import (
    Kinks,
    NondifferentiableError,
    assert_allclose,
    check_backward,
    check_double_backward,
    numerical_grad,
)

X = np.array([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]])
GY = np.array([[1.0, -2.0, 0.5], [0.75, 1.5, -1.0]])
GG = np.array([[0.5, 1.0, -1.0], [2.0, -0.5, 0.25]])


class Cube(FunctionNode):
    """y = x^3, in Chainer's form, with a first-order rule that may be spoiled."""

    def __init__(self, spoil=lambda g: g):
        self.spoil = spoil

    def forward(self, inputs):
        self.retain_inputs((0,))
        return (inputs[0] ** 3,)

    def backward(self, indexes, grad_outputs):
        (x,) = self.get_retained_inputs()
        return (self.spoil(grad_outputs[0] * 3.0 * x * x),)


class FirstOrderOnly(Cube):
    """Right at first order; the gradient then forgets that it depends on x, on gy, or by how much."""

    def __init__(self, forget):
        super().__init__()
        self.forget = forget

    def backward(self, indexes, grad_outputs):
        (x,), (gy,) = self.get_retained_inputs(), grad_outputs
        if self.forget == "x":
            x = Variable(x.array)
        if self.forget == "gy":
            gy = Variable(gy.array)
        if self.forget == "half":
            return (gy * 3.0 * x * Variable(x.array),)
        return (gy * 3.0 * x * x,)


def one_element(factor):
    """Spoils a single element."""
    factors = np.ones_like(X)
    factors[1, 2] = factor
    return lambda g: g * factors


WRONG = {
    "sign": lambda g: -g,
    "twice": lambda g: g * 2.0,
    "one per cent": lambda g: g * 1.01,
    "zero": lambda g: g * 0.0,
    "one element": one_element(0.0),
    "the sign of one element": one_element(-1.0),
    "rows exchanged": lambda g: g[::-1],
    "columns exchanged": lambda g: g[:, ::-1],
    "a constant": lambda g: g + 0.1,
    "NaN": lambda g: g * float("nan"),
    "infinity": lambda g: g * float("inf"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_first_order_rule_is_found(wrong):
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(AssertionError, match="first-order backward: expected a slope of"),
    ):
        check_backward(lambda x: Cube(WRONG[wrong]).apply((x,))[0], X, GY)


def test_a_right_rule_passes_at_both_orders():
    check_backward(lambda x: Cube().apply((x,))[0], X, GY, atol=1e-9, rtol=1e-9)
    check_double_backward(lambda x: Cube().apply((x,))[0], X, GY, GG, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("forget", ["x", "gy", "half"])
def test_a_wrong_second_order_rule_is_found(forget):
    def func(x):
        return FirstOrderOnly(forget).apply((x,))[0]

    check_backward(func, X, GY)
    with pytest.raises(AssertionError, match="backward: expected a slope of"):
        check_double_backward(func, X, GY, GG)


@pytest.mark.parametrize("wrong", ["one per cent", "one element", "a constant"])
def test_a_wrong_gradient_of_a_parameter_is_found(wrong):
    W = Parameter(X.copy())

    def func(x):
        return x * Cube(WRONG[wrong]).apply((W,))[0]

    check_backward(func, X, GY)  # as far as x goes it is right
    with pytest.raises(AssertionError, match=r"inputs and parameters: \(2, 3\) float64, \(2, 3\) float64"):
        check_backward(func, X, GY, W)
    with pytest.raises(AssertionError):
        check_backward(func, X, GY, [W])


def test_a_wrong_second_order_rule_of_a_parameter_is_found():
    W = Parameter(X.copy())

    def func(x):
        return x * FirstOrderOnly("x").apply((W,))[0]

    check_backward(func, X, GY, W)
    with pytest.raises(AssertionError):
        check_double_backward(func, X, GY, GG, W, GG)


def test_parameters_are_as_they_were_afterwards():
    W = Parameter(X.copy())
    check_backward(lambda x: x * W, X, GY, W)
    np.testing.assert_array_equal(W.array, X)


def test_one_of_several_inputs_and_outputs_is_enough():
    def func(x, y):
        return x * y, Cube(WRONG["twice"]).apply((y,))[0]

    with pytest.raises(AssertionError):
        check_backward(func, (X, X + 1), (GY, GY))
    check_backward(func, (X, X + 1), (GY, GY), no_grads=(False, True))
    check_backward(func, (X, X + 1), (GY, None))  # what gets no gradient is not looked at
    with pytest.raises(AssertionError):
        check_backward(func, (X, X + 1), (GY, GY), no_grads=(True, False))


@pytest.mark.parametrize("at", [0.0, 3e-4, -4e-4])
def test_a_kink_is_named(at):
    x = np.array([at])

    def func(x):
        return dbrdist.functions.absolute(x)

    with pytest.raises(NondifferentiableError, match=r"output 0 has a kink or a jump within 0\.001 of the point"):
        check_backward(func, x, np.ones(1), detect_nondifferentiable=True)
    with pytest.raises(NondifferentiableError):
        numerical_grad(lambda: (func(Variable(x)),), (x,), (np.ones(1),), detect_nondifferentiable=True)


def test_a_kink_at_second_order_is_named():
    def func(x):
        return dbrdist.functions.absolute(x) * x

    with pytest.raises(NondifferentiableError):
        check_double_backward(func, np.zeros(1), np.ones(1), np.ones(1), detect_nondifferentiable=True)


@pytest.mark.parametrize("at", [0.01, -3.0, 1e4])
def test_away_from_kinks_nothing_is_named(at):
    check_backward(
        lambda x: dbrdist.functions.absolute(x) ** 2, np.array([at]), np.ones(1), detect_nondifferentiable=True
    )


def test_numerical_gradients_have_the_closed_form():
    x = X.copy()
    (g,) = numerical_grad(lambda: (x**3,), (x,), (GY,))
    np.testing.assert_allclose(g, 3 * X**2 * GY, rtol=1e-9)
    np.testing.assert_array_equal(x, X)
    (g,) = numerical_grad(lambda: (x**3, x), (x,), (None, GY))
    np.testing.assert_allclose(g, GY, rtol=1e-9)


def test_tolerances_are_used():
    def func(x):
        return Cube(WRONG["one per cent"]).apply((x,))[0]

    check_backward(func, X, GY, rtol=0.02)
    check_backward(func, X, GY, atol=10.0)
    with pytest.raises(AssertionError):
        check_backward(func, X, GY, rtol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_type_of_the_check(dtype):
    seen = set()

    def func(x, W):
        seen.update((x.dtype, W.dtype))
        return x * W

    check_backward(func, (X.astype(np.float16), X), GY, dtype=dtype, rtol=1e-2)
    assert seen == {np.dtype(dtype)}


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ValueError, match="expected at least one floating-point input"):
        check_backward(lambda x: x, np.array([1, 2]), np.ones(2))
    with pytest.raises(ValueError, match="y_grad: expected a gradient for each of 1 outputs, got None"):
        check_backward(lambda x: x * 2.0, X, None)
    with pytest.raises(ValueError, match="y_grad: expected 1 gradients, one for each output, got 2"):
        check_backward(lambda x: x * 2.0, X, (GY, GY))
    check_backward(lambda x: (x * x).sum(), X, None)


@pytest.mark.parametrize("b, good", [(1.0, True), (1.00005, True), (1.001, False), (np.nan, False), (np.inf, False)])
def test_assert_allclose(b, good):
    a, b = np.ones(3), np.array([1.0, 1.0, b])
    if good:
        assert_allclose(a, Variable(b))
    else:
        with pytest.raises(AssertionError):
            assert_allclose(Variable(a), b)
    with pytest.raises(AssertionError):
        assert_allclose(np.ones(3), np.ones(3) * 1.5, atol=0.1, rtol=0.1)
    assert_allclose(np.ones(3, np.float16), np.ones(3) * 1.5, atol=0.6)


def points(*values):
    return [[np.array(v, np.float64)] for v in values]


def test_kinks_are_measured_beside_the_best_parabola():
    steps = np.arange(5.0)
    for bend in (0.5, 2.0):
        values = np.abs(steps - 2) * bend
        residual = np.sqrt(np.mean((values - np.polyval(np.polyfit(steps, values, 2), steps)) ** 2))
        Kinks(residual * 1.001, 0.0).look(points(*values), 0.1)
        Kinks(0.0, residual / np.ptp(values) * 1.001).look(points(*values), 0.1)
        for atol, rtol in ((residual * 0.999, 0.0), (0.0, residual / np.ptp(values) * 0.999)):
            with pytest.raises(NondifferentiableError, match=r"output 0 .* within 0\.1 of"):
                Kinks(atol, rtol).look(points(*values), 0.1)
    Kinks(0.0, 0.0).look(points(*(3 * steps**2 - steps)), 0.1)  # a parabola


def test_kinks_are_looked_for_in_each_element():
    smooth, bent = [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0], [4.0, 5.0]], [0.0, 0.0, 0.0, 1.0, 2.0]
    Kinks(0.0, 1e-2).look(points(*smooth), 0.1)
    with pytest.raises(NondifferentiableError, match="output 1"):  # of the second output, in one element of two
        both = [[a[0], np.array([1.0, b])] for a, b in zip(points(*smooth), bent)]
        Kinks(0.0, 1e-2).look(both, 0.1)
    opposite = [np.array([[b], [-b]]) for b in bent]  # whose sum is smooth
    with pytest.raises(NondifferentiableError):
        Kinks(0.0, 1e-2).look(points(*opposite), 0.1)
    Kinks(0.0, 1e-2).look([[None, np.zeros((0, 2))]] * 5, 0.1)


def test_values_that_are_not_finite_are_a_jump_where_others_are():
    nan, inf = float("nan"), float("inf")
    for values in ((nan,) * 5, (inf,) * 5):
        Kinks(0.0, 1e-2).look(points(*values), 0.1)
    for values in ((nan, nan, nan, 0, 0), (0, 0, inf, 0, 0), (0, 0, 0, 0, -inf)):
        with pytest.raises(NondifferentiableError):
            Kinks(0.0, 1e-2).look(points(*values), 0.1)


def test_gradients_are_checked_for_some_inputs_only():
    x, y, g = np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([0.5, -1.0])

    def wrong_by_second(a, b):
        return a * a + Variable(b.array)

    gradient_check.check_backward(wrong_by_second, (x, y), g, no_grads=[False, True])
    with pytest.raises(AssertionError):
        gradient_check.check_backward(wrong_by_second, (x, y), g)
    square = lambda a, b: a * a * b  # noqa: E731
    gradient_check.check_double_backward(square, (x, y), g, (g,), no_grads=[False, True])
    gradient_check.check_double_backward(square, (x, y), g, (g, g), no_grads=[False, True])
    gradient_check.check_double_backward(square, (x, y), g, (g, g), no_grads=[False, False])


def test_numerical_gradients_have_steps_and_tolerances_of_kinks():
    x = np.array([2.0])
    seen = []

    def cubed():
        seen.append(x[0])
        return (x**3,)

    for options, step in (({}, 1e-3), ({"eps": 0.25}, 0.25)):
        seen.clear()
        gradient_check.numerical_grad(cubed, (x,), (np.ones(1),), **options)
        np.testing.assert_allclose(sorted(seen), [2 - step, 2 - step / 2, 2 + step / 2, 2 + step], rtol=1e-12)

    def bent(slope):
        return lambda: (np.where(x > 2, 2 + slope * (x - 2), x),)

    def slope_at(slope, **options):
        return gradient_check.numerical_grad(bent(slope), (x,), (np.ones(1),), **options)[0]

    assert slope_at(2.0) == pytest.approx(1.5)  # nobody looks for kinks
    slope_at(1.2, detect_nondifferentiable=True)  # within a hundredth
    slope_at(2.0, detect_nondifferentiable=True, diff_atol=1e-4, diff_rtol=0.0)
    slope_at(2.0, detect_nondifferentiable=True, diff_rtol=0.1)
    for options in ({}, {"diff_atol": 5e-5, "diff_rtol": 0.0}, {"diff_rtol": 0.017}):
        with pytest.raises(gradient_check.NondifferentiableError):
            slope_at(2.0, detect_nondifferentiable=True, **options)
    with pytest.raises(gradient_check.NondifferentiableError):
        slope_at(1.5, detect_nondifferentiable=True)


def test_rounding_is_no_kink():
    kinks = gradient_check.Kinks(0.0, 0.0)
    kinks.look(points(0, 0, 0, 0, 0), 0.1)
    for scale in (1.0, -64.0):
        kinks.look(points(scale, scale, scale * (1 + 1e-13), scale, scale), 0.1)  # beside a parabola by 0.3e-13
        with pytest.raises(gradient_check.NondifferentiableError):
            kinks.look(points(scale, scale, scale * (1 + 4e-13), scale, scale), 0.1)


def test_slopes_may_differ_by_the_tolerance():
    problem = types.SimpleNamespace(checked=[Variable(np.zeros(3, "f"))])
    gradient_check._compare("first-order", 1.5, 1.0, 0.5, 0.0, problem)
    gradient_check._compare("first-order", 1.5, -1.0, 0.5, 2.0, problem)
    for numbers in ((1.625, 1.0, 0.5, 0.0), (-1.5, 1.0, 0.5, 0.5), (1.0, float("nan"), 1.0, 1.0)):
        with pytest.raises(AssertionError, match=r"first-order backward: .*parameters: \(3,\) float32"):
            gradient_check._compare("first-order", *numbers, problem)


def test_parameters_without_a_shape_get_it_from_the_first_call():
    link = dbrdist.links.Swish(None)
    check_backward(link, X, GY, link.beta, dtype=np.float64, atol=1e-5)
    assert link.beta.shape == X.shape[1:]


def test_nothing_to_check_is_a_value_error_and_a_runtime_error():
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="at least one"):
            check_backward(lambda x: x * 2, X, GY, no_grads=[True])


@pytest.mark.parametrize("no_grads", [[True], [False, False, False], []])
def test_who_says_which_gradients_to_leave_out_says_it_of_each_input(no_grads):
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"argument 2 is (shorter|longer) than argument 1"):
        gradient_check.check_backward(lambda a, b: a * b, (x, x), np.ones((2, 3)), no_grads=no_grads)
    gradient_check.check_backward(lambda a, b: a * b, (x, x), np.ones((2, 3)), no_grads=[True, False])


@pytest.mark.parametrize("eps", [0.0, -1.0, float("nan")])
def test_a_step_of_a_difference_is_above_0(eps):
    x = np.array([3.0])
    with pytest.raises(ValueError, match="numerical_grad: eps: expected a number above 0"):
        gradient_check.numerical_grad(lambda: (x * x,), (x,), (np.ones(1),), eps=eps)


def test_outputs_without_a_gradient_are_not_in_the_sum():
    from dbrdist.core.tape import gradient_check as checks

    y, gy = np.arange(3.0), np.ones(3, np.float32) * 2
    assert checks._weighted_sum([y, np.ones(2), y], [gy, None, y]) == 6.0 + 5.0


def test_defaults_of_the_checks():
    def defaults(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    common = {"no_grads": None, "dtype": None, "detect_nondifferentiable": False, "eps": 1e-3, "params": ()}
    assert defaults(check_backward) == {**common, "atol": 1e-5, "rtol": 1e-4}
    assert defaults(check_double_backward) == {**common, "atol": 1e-4, "rtol": 1e-3, "params_grad_grad": ()}
    assert defaults(assert_allclose) == {"atol": 1e-5, "rtol": 1e-4, "verbose": True}


def test_16_bit_numbers_are_compared_in_64_bits():
    x, y = np.float16([1]), np.float16([1 + 2**-10])
    assert_allclose(x, y, atol=2**-10, rtol=0)
    with pytest.raises(AssertionError):
        assert_allclose(x, y, atol=2**-10 - 1e-7, rtol=0)  # in 16 bits it would be the same
