"""Every row of ``tests/functions/cases.py`` on the device, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from support import assert_close, put

import dbrdist.functions as F
from dbrdist import Variable, backward, grad, using_config
from dbrdist.core.array import backend
from dbrdist.core.tape.gradient_check import check_backward, check_double_backward, numerical_grad
from tests.each import each
from tests.functions.cases import every_case, every_twice_differentiable_case

# How CuPy says that it lacks something; wrong numbers are an AssertionError.
LACKING = (TypeError, ValueError, NotImplementedError, RuntimeError)


def outputs(case, xs):
    ys = case.function(*xs)
    return list(ys) if isinstance(ys, (tuple, list)) else [ys]


def numbers(shape, dtype, shift=0.0):
    """Multiples of 1/4, different in each element and exact in 16 bits."""
    return np.asarray((np.arange(int(np.prod(shape))) % 5 - 1.5 + shift).reshape(shape) / 2, dtype)


def first_order(case, arrays, place):
    """Outputs, then gradients, as arrays."""
    xs = [Variable(a) for a in place(*arrays)]
    ys = outputs(case, xs)
    backward(ys, place(*[numbers(y.shape, y.dtype) for y in ys]))
    return [y.array for y in ys] + [x.grad for x in xs]


def second_order(case, arrays, place):
    """The gradients of a weighted sum of the gradients."""
    xs = [Variable(a) for a in place(*arrays)]
    ys = outputs(case, xs)
    gys = [Variable(g) for g in place(*[numbers(y.shape, y.dtype) for y in ys])]
    gxs = [(x, g) for x, g in zip(xs, grad(ys, xs, gys, enable_double_backprop=True)) if g is not None]
    weights = place(*[numbers(x.shape, x.dtype, 0.5) for x, _ in gxs])
    total = sum((F.sum(g * w) for (_, g), w in zip(gxs, weights)), Variable(place(np.zeros((), arrays[0].dtype))[0]))
    ggs = grad([total], xs + gys)
    return [None if g is None else g.array for g in ggs]


def on_host(*arrays):
    return [backend.copy(a) for a in arrays]


def on(device):
    return lambda *arrays: [put(device, a) for a in arrays]


@every_case
@each(shapes=lambda case: case.shapes, dtype=["float64", "float32", "float16"])
def test_outputs_and_gradients(case, shapes, dtype, device):
    tolerance = case.narrow_tolerance
    if tolerance is None and dtype == "float16":
        pytest.skip(f"{case.name} is not defined for 16-bit types")
    arrays = case.inputs(shapes, dtype)
    results = first_order(case, arrays, on(device))
    same_type = first_order(case, arrays, on_host)
    exact = first_order(case, [a.astype(np.float64) for a in arrays], on_host)
    for a, b, c in zip(results, same_type, exact, strict=True):
        assert a.dtype == b.dtype
        assert_close(device, a, c, (8 if dtype == "float64" else 4) * (tolerance or 16))


@every_twice_differentiable_case
@each(shapes=lambda case: case.shapes)
def test_second_order(case, shapes, device):
    arrays = case.inputs(shapes)
    for a, b in zip(second_order(case, arrays, on(device)), second_order(case, arrays, on_host), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(device, a, b, 1e5)


@every_case
@each(shapes=lambda case: case.shapes)
def test_bfloat16(case, shapes, device, on):
    """CuPy 14 lacks some of it (products of stacks of matrices, for one) and says so; it may not be wrong."""
    if case.narrow_tolerance is None:
        pytest.skip(f"{case.name} is not defined for 16-bit types")
    arrays = [a.astype(backend.as_dtype("bfloat16")) for a in case.inputs(shapes)]
    try:
        results = first_order(case, arrays, lambda *xs: [put(device, a) for a in xs])
    except LACKING as e:
        if on != "cupy":
            raise
        pytest.skip(f"CuPy's bfloat16 is not complete: {e}")
    exact = first_order(case, [a.astype(np.float64) for a in arrays], on_host)
    for a, b in zip(results, exact, strict=True):
        assert a.dtype.name == "bfloat16"
        tolerance = case.narrow_tolerance * 2**-7
        scale = max(1.0, float(abs(b).max())) if b.size else 1.0
        np.testing.assert_allclose(backend.to_cpu(a).astype(np.float64), b, tolerance, tolerance * scale)


def test_gradient_checks_run_on_the_device(device, rng):
    x, g = put(device, *rng.uniform(0.5, 1.5, (2, 3, 4)))
    check_backward(F.log, x, g)
    check_double_backward(F.tanh, x, g, g)
    (numerical,) = numerical_grad(lambda: (x**2,), (x,), (g,))
    assert_close(device, numerical, 2 * backend.to_cpu(x) * backend.to_cpu(g), 1e6)


def test_debug_mode_finds_nan(device, xp):
    with using_config("debug", True), np.errstate(invalid="ignore"):
        x = Variable(xp.asarray([-1.0, 4.0]))
        F.sum(F.square(x)).backward()
        with pytest.raises(RuntimeError, match="NaN"):
            F.sum(F.sqrt(x)).backward()


def test_bad_labels_are_found_in_debug_mode(device, xp):
    with using_config("debug", True), pytest.raises(ValueError, match="labels from 0 to 2"):
        F.softmax_cross_entropy(Variable(xp.ones((2, 3), np.float32)), xp.asarray([1, 3]))


def test_measures(device, rng):
    y, t = rng.standard_normal((6, 4)).astype(np.float32), np.array([0, 1, 2, 3, -1, 0], np.int32)
    for function, args in (
        (F.accuracy, (y, t.clip(0))), (lambda y, t: F.accuracy(y, t, -1), (y, t)),
        (F.binary_accuracy, (y, (y > 0.5).astype(np.int32))), (F.r2_score, (y, y * 0.9)),
        (F.argmax, (y,)), (lambda y: F.argmin(y, 1), (y,)), (F.sign, (y,)), (F.floor, (y,)), (F.fix, (y,)),
    ):  # fmt: skip
        expected = function(*args).array
        result = function(*(put(device, a) for a in args)).array
        assert result.dtype == expected.dtype
        assert_close(device, result.astype(np.float32), np.asarray(expected, np.float64), 8)
