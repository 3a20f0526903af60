"""Every operation of ``cases.py``: derivatives against differences, one rule for every order, 16-bit types."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, backward, grad
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.tape.gradient_check import check_backward, check_double_backward
from dbrdist.functions.math import exp_difference, scaled_exp_difference
from tests.each import each
from tests.functions.cases import CASES, every_case, every_twice_differentiable_case
from tests.functions.gradient_helpers import gradients_of, largest, outputs_of, seeds_of

every_shape = each(shapes=lambda case: case.shapes)


@every_case
@every_shape
def test_first_order(case, shapes, xp):
    xs = [xp.asarray(a) for a in case.inputs(shapes)]
    gys = seeds_of(outputs_of(case, [Variable(a) for a in xs]))
    check_backward(case.function, xs, gys, eps=1e-3, atol=1e-7, rtol=case.rtol)


@pytest.mark.slow
@every_twice_differentiable_case
@every_shape
def test_second_order(case, shapes, xp):
    xs = [xp.asarray(a) for a in case.inputs(shapes)]
    gys = seeds_of(outputs_of(case, [Variable(a) for a in xs]))
    rng = np.random.default_rng(3)
    ggs = [xp.asarray(rng.uniform(-1, 1, x.shape)) for x in xs]
    check_double_backward(case.function, xs, gys, ggs, eps=1e-3, atol=1e-6, rtol=10 * case.rtol)


@every_twice_differentiable_case
def test_the_transpose_of_the_transpose_gives_the_gradient_again(case):
    """Gradients are linear in gy: the gradient of their gradient by gy gives J v, and that of J v by v is J^T w."""
    arrays = case.inputs(largest(case))
    xs = [Variable(a) for a in arrays]
    ys = outputs_of(case, xs)
    gys, ws = [Variable(g) for g in seeds_of(ys)], [Variable(np.asarray(-0.5 * g)) for g in seeds_of(ys)]
    gxs = grad(ys, xs, gys, enable_double_backprop=True)
    vs = [Variable(np.cos(np.arange(g.size, dtype="d")).reshape(g.shape)) for g in gxs]
    products = grad(gxs, gys, vs, enable_double_backprop=True)
    seen = [i for i, p in enumerate(products) if p is not None]  # an output without elements reaches nothing
    for again, g in zip(grad([products[i] for i in seen], vs, [ws[i] for i in seen]), gxs, strict=True):
        expected = -0.5 * g.array
        actual = again.array if again is not None else np.zeros(g.shape)
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-10 * max(1, abs(expected).max(initial=0)))


@every_case
@each(shapes=lambda case: case.shapes, dtype=["float32", "float64"])
def test_one_rule_gives_the_same_bits_on_arrays_and_on_variables(case, shapes, dtype):
    arrays = case.inputs(shapes, dtype)
    ys, first = gradients_of(case, arrays)
    ys2, higher = gradients_of(case, arrays, higher=True)
    for a, b in zip(ys, ys2, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b, x in zip(first, higher, arrays, strict=True):
        assert a.dtype == b.dtype == x.dtype
        assert a.shape == b.shape == x.shape
        if case.has_one_rule:
            np.testing.assert_array_equal(a, b)
        else:  # sums that nearly cancel are as far off as their terms
            rtol = 1e-4 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 100 * abs(b).max(initial=0))


@every_case
@each(dtype=["float32", "float64"])
def test_nothing_that_was_given_is_changed(case, dtype):
    """Neither inputs nor gradients of outputs, in one pass and in a second one over the same graph."""
    given = case.inputs(largest(case), dtype)
    arrays = [a.copy() for a in given]
    xs = [Variable(a) for a in arrays]
    ys = outputs_of(case, xs)
    values, seeds = [y.array.copy() for y in ys], seeds_of(ys)
    gys = [g.copy() for g in seeds]
    first, second = (grad(ys, xs, [Variable(g) for g in gys]) for _ in range(2))
    backward(ys, gys)
    backward(ys, gys)
    for a, b in zip([*arrays, *gys, *(y.array for y in ys)], [*given, *seeds, *values], strict=True):
        np.testing.assert_array_equal(a, b)
    for x, a, b in zip(xs, first, second, strict=True):
        assert (x.grad is None) == (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.array, b.array)


def subsets(n):
    """Of n inputs; of more than four, single ones."""
    sizes = range(1, n) if n < 5 else (1,)
    return [chosen for k in sizes for chosen in itertools.combinations(range(n), k)]


@pytest.mark.slow
@every_case
@each(higher=[False, True], dtype=["float32", "float64"])
def test_some_gradients_are_the_same_as_among_all(case, higher, dtype):
    arrays = case.inputs(largest(case), dtype)

    def gradients(chosen):
        xs = [Variable(a, requires_grad=i in chosen) for i, a in enumerate(arrays)]
        ys = outputs_of(case, xs)
        seeds = [Variable(g) for g in seeds_of(ys)]
        return grad(ys, [xs[i] for i in chosen], seeds, enable_double_backprop=higher)

    whole = gradients(range(len(arrays)))
    for chosen in subsets(len(arrays)):
        for i, g in zip(chosen, gradients(chosen), strict=True):
            assert (g is None) == (whole[i] is None), (chosen, i)
            if g is not None:
                limit = abs(whole[i].array).max(initial=0) * (1e-6 if dtype == "float32" else 1e-14)
                np.testing.assert_allclose(g.array, whole[i].array, rtol=0, atol=limit, err_msg=f"{i} of {chosen}")


@pytest.mark.slow
@every_twice_differentiable_case
def test_second_derivatives_of_one_gradient_add_up_to_those_of_all(case):
    arrays = case.inputs(largest(case))

    def second(chosen):
        xs = [Variable(a) for a in arrays]
        ys = outputs_of(case, xs)
        gys = [Variable(g) for g in seeds_of(ys)]
        gxs = grad(ys, [xs[i] for i in chosen], gys, enable_double_backprop=True)
        weights = [Variable(np.cos(np.arange(g.size, dtype="d")).reshape(g.shape)) for g in gxs]
        return [0.0 if g is None else g.array for g in grad(gxs, [*xs, *gys], weights)]

    whole, single = second(range(len(arrays))), [second([i]) for i in range(len(arrays))]
    for parts, g in zip(zip(*single, strict=True), whole, strict=True):
        np.testing.assert_allclose(sum(parts), g, rtol=1e-9, atol=1e-10 * max(1, np.abs(g).max(initial=0)))


@every_case
@each(shapes=lambda case: case.shapes, dtype=["float16", "bfloat16"])
def test_narrow_types_follow_float64(case, shapes, dtype):
    if case.narrow_tolerance is None:
        pytest.skip(f"{case.name} is not defined for 16-bit types")
    narrow = [a.astype(as_dtype(dtype)) for a in case.inputs(shapes)]
    ys, gxs = gradients_of(case, narrow)
    ys64, gxs64 = gradients_of(case, [a.astype(np.float64) for a in narrow])
    tolerance = case.narrow_tolerance * float(ml_dtypes.finfo(as_dtype(dtype)).eps)
    for a, b in zip(ys + gxs, ys64 + gxs64, strict=True):
        assert a.dtype == as_dtype(dtype)
        scale = max(1.0, float(abs(b).max())) if b.size else 1.0
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.slow
@every_twice_differentiable_case
@each(dtype=["float32", "float16", "bfloat16"])
def test_second_derivatives_of_narrower_types_follow_float64(case, dtype):
    if case.narrow_tolerance is None and dtype != "float32":
        pytest.skip(f"{case.name} is not defined for 16-bit types")
    narrow = [a.astype(as_dtype(dtype)) for a in case.inputs(largest(case))]
    units = 4 * case.narrow_tolerance if dtype != "float32" else 800
    tolerance = units * float(ml_dtypes.finfo(as_dtype(dtype)).eps)
    wide = second_derivatives(case, [a.astype(np.float64) for a in narrow])
    for a, b in zip(second_derivatives(case, narrow), wide, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == as_dtype(dtype)
            scale = max(1.0, float(abs(b).max(initial=0)))
            np.testing.assert_allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance * scale)


def second_derivatives(case, arrays):
    """Of the gradients, each weighted, by the inputs and by the gradients of the outputs."""
    xs = [Variable(a) for a in arrays]
    ys = outputs_of(case, xs)
    gys = [Variable(g) for g in seeds_of(ys)]
    gxs = [g for g in grad(ys, xs, gys, enable_double_backprop=True) if g is not None]
    weights = [Variable(np.asarray(np.cos(np.arange(g.size)).reshape(g.shape)).astype(g.dtype)) for g in gxs]
    return [None if g is None else g.array for g in grad(gxs, [*xs, *gys], weights)]


def test_every_public_function_has_a_row_or_is_tested_by_name():
    """A new operation is its paragraph, its export and its row."""
    used = {name for case in CASES for name in _names(case.function)}
    elsewhere = {
        "accuracy", "argmax", "argmin", "binary_accuracy", "ceil", "fix", "floor", "r2_score", "sign",
        "top_k_accuracy",  # no gradient
        "argmax_crf1d", "classification_summary", "f1_score", "precision", "recall",
    }  # fmt: skip
    assert set(F.__all__) - used == elsewhere


def _names(function):
    code = getattr(function, "__code__", None)
    own = {function.__name__} if hasattr(function, "__name__") else set()
    return own | (set(code.co_names) if code is not None and function.__name__ == "<lambda>" else set())


@each(**{"function, num": [(exp_difference, 2), (scaled_exp_difference, 3)]})
def test_differences_of_exponents_have_every_derivative(function, num):
    """Losses call them with operands of which some have no gradient."""
    rng = np.random.default_rng(0)
    xs = [rng.uniform(-1, 1, (3, 4)) for _ in range(num)]
    gy, *ggs = (rng.uniform(-1, 1, (3, 4)) for _ in range(num + 1))
    check_backward(function, xs, gy, eps=1e-4, atol=1e-7, rtol=1e-6)
    check_double_backward(function, xs, gy, ggs, eps=1e-4, atol=1e-6, rtol=1e-5)
