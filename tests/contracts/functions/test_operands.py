"""Every operation of ``cases.py`` is given operands that users give by mistake: a right value or an error in words.

Integers and booleans are refused by name or computed as numbers, never truncated; an array beside a Variable takes its
type; each input gets a gradient of its own type; what a call returned does not change when its inputs are refilled.
"""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, backward
from dbrdist.core.tape import ops
from tests.each import each
from tests.functions.cases import every_case, every_case_of_several_inputs

ARITHMETIC = {"add", "sub", "mul", "neg", "pow", "pow_constant", "rpow", "add_many", "bias", "scale", "scatter_add"}


def listed(ys):
    return list(ys) if isinstance(ys, (tuple, list)) else [ys]


def whole_numbers(case, dtype):
    """Inputs of whole numbers in a type, and the same numbers in float64."""
    wide = [np.asarray(np.round(a * 3)) for a in case.inputs(case.shapes[-1])]
    if dtype == "bool":
        wide = [np.asarray(a > 0, np.float64) for a in wide]
    elif np.dtype(dtype).kind == "u":
        wide = [abs(a) for a in wide]
    return [a.astype(dtype) for a in wide], wide


@every_case
@pytest.mark.filterwarnings("ignore:.*(divide|invalid|overflow).*:RuntimeWarning")
@each(dtype=["int32", "int64", "uint8", "bool"], wrapped=[True, False])
def test_integers_are_refused_or_computed(case, dtype, wrapped):
    narrow, wide = whole_numbers(case, dtype)
    try:
        ys = listed(case.function(*[Variable(a) for a in narrow] if wrapped else narrow))
    except (TypeError, ValueError, AttributeError) as e:
        if isinstance(e, AttributeError):  # the row itself asks a Variable for its array module
            assert not wrapped, e
            return
        message = str(e)
        assert "expected" in message or "negative integer powers" in message or "boolean" in message, message
        return
    expected = listed(case.function(*[Variable(a) for a in wide]))
    for y, z in zip(ys, expected, strict=True):
        wraps = y.dtype == "bool" or (y.dtype == "uint8" and case.name in ARITHMETIC)
        if isinstance(y, np.ndarray) or wraps:
            continue  # an operator between arrays is NumPy's; its booleans and bytes wrap there and here
        np.testing.assert_allclose(y.array.astype(np.float64), z.array, rtol=1e-5, atol=1e-6)
        assert not y.requires_grad or y.dtype.kind == "f"


OF_ANY_TYPES = {"broadcast", "forget", "forget_twice"}  # what is given is handed on as it is


@every_case_of_several_inputs
def test_an_array_beside_a_variable_takes_its_type(case):
    if case.name in OF_ANY_TYPES:
        pytest.skip("takes any types")
    inputs = case.inputs(case.shapes[0])
    first = Variable(inputs[0].astype(np.float32))
    ys = listed(case.function(first, *inputs[1:]))
    backward(ys, [np.ones(y.shape, y.dtype) for y in ys])
    assert all(y.dtype == np.float32 for y in ys)
    assert first.grad is None or first.grad.dtype == np.float32


@every_case_of_several_inputs
def test_each_input_gets_a_gradient_of_its_own_type(case):
    inputs = case.inputs(case.shapes[-1])
    dtypes = [np.float32, np.float64, np.float32, np.float64, np.float32][: len(inputs)]
    xs = [Variable(a.astype(d)) for a, d in zip(inputs, dtypes)]
    try:
        ys = listed(case.function(*xs))
    except (TypeError, ValueError) as e:
        assert "expected" in str(e)
        return
    backward(ys, [np.ones(y.shape, y.dtype) for y in ys])
    for x, d in zip(xs, dtypes):
        assert x.grad is None or (x.grad.dtype == d and x.grad.shape == x.shape)


@every_case
@each(shapes=lambda case: case.shapes)
def test_a_value_stays_when_its_inputs_are_refilled(case, shapes):
    arrays = case.inputs(shapes, np.float32)
    given = [a.copy() for a in arrays]
    ys = listed(case.function(*[Variable(a) for a in given]))
    expected = [np.array(y.array) for y in listed(case.function(*[Variable(a) for a in arrays]))]
    for a in given:
        a[...] = 77.0
    for y, z in zip(ys, expected, strict=True):
        if not any(np.shares_memory(y.array, a) for a in given):  # shapes and pieces are views
            np.testing.assert_array_equal(y.array, z)


@every_case
@each(dtype=["float32", "float16", "bfloat16"])
def test_a_foreign_dtype_object_changes_nothing(case, dtype):
    """Unpickled arrays carry a dtype that equals NumPy's and is another object."""
    if case.narrow_tolerance is None and dtype != "float32":
        pytest.skip("not defined for 16-bit types")
    own = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    arrays = case.inputs(case.shapes[-1], own)
    if dtype == "bfloat16":
        foreign = arrays
    else:
        foreign = [np.ndarray(a.shape, np.dtype(a.dtype.str, copy=True), a.tobytes()) for a in arrays]
        assert all(f.dtype == a.dtype for f, a in zip(foreign, arrays))
    results = []
    for inputs in (arrays, foreign):
        xs = [Variable(np.array(a) if a is not f else a) for a, f in zip(inputs, foreign)]
        ys = listed(case.function(*xs))
        backward(ys, [np.ones(y.shape, y.dtype) for y in ys])
        results.append([y.array for y in ys] + [x.grad for x in xs])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: F.sigmoid(np.array([1])), r"sigmoid: x: expected a floating type, got shape \(1,\) and dtype int64"),
        (lambda: F.relu(3.0), r"relu: x: expected an array or Variable, got float 3.0"),
        (lambda: F.sin([1.0]), r"sin: x: expected an array or Variable, got list"),
        (lambda: F.mean(np.array([1, 2])), r"mean: x: expected a floating type"),
        (lambda: F.linear(np.ones((1, 3), int), np.ones((2, 3), "f")), r"linear: x: expected a floating type"),
        (lambda: F.linear(np.ones((1, 3), "f"), np.ones((2, 3), int)), r"linear: W: expected a floating type"),
        (lambda: F.mean_squared_error(np.array([1, 2]), np.array([1, 3])), r"mean_squared_error: x0: expected a float"),
        (lambda: F.clip(np.array([1, 2]), 0, 1), r"clip: x: expected a floating type"),
        (lambda: F.maximum(np.array([1, 2]), np.array([1, 3])), r"maximum: x1: expected a floating type"),
        (lambda: F.logsumexp(np.array([1, 2])), r"logsumexp: x: expected a floating type"),
    ],
)  # fmt: skip
def test_words(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_integers_and_numbers_beside_variables():
    x = Variable(np.ones((2, 3), np.float32))
    bytes_, wide = np.arange(3, dtype=np.uint8), np.ones(3)
    for y in (x + np.arange(3), x * bytes_, x * np.float64(2), x / 3, x**2, x + wide, 1 + x):
        assert y.dtype == np.float32
    i = Variable(np.arange(3))
    assert (i + 1).dtype == np.int64 and (i * 2).array.tolist() == [0, 2, 4]
    np.testing.assert_array_equal((i * 2.5).array, [0.0, 2.5, 5.0])
    np.testing.assert_array_equal((i / 2).array, [0.0, 0.5, 1.0])
    np.testing.assert_array_equal((x * i).array, np.ones((2, 3)) * np.arange(3))
    i.grad is None and ops.sum(x * i).backward()
    assert i.grad is None  # integers take no gradient


NUMBERED = {F.leaky_relu: (0.25,), F.softplus: (2.0,), F.elu: (1.5,), F.selu: (1.5, 2.0), F.clipped_relu: (3.0,)}


@each(function=NUMBERED, kind=[np.float64, np.float32, np.array, np.longdouble])
def test_numbers_of_numpy_leave_the_type(function, kind):
    x, numbers = np.array([-1.0, 0.5, 7.0], np.float32), NUMBERED[function]
    found, wanted = Variable(x), Variable(x)
    ys = [function(found, *map(kind, numbers)), function(wanted, *numbers)]
    for y in ys:
        y.grad = np.ones_like(y.array)
        y.backward()
    assert ys[0].dtype == np.float32
    np.testing.assert_array_equal(ys[0].array, ys[1].array)
    np.testing.assert_array_equal(found.grad, wanted.grad)


def test_a_threshold_of_numpy_leaves_the_type():
    x = Variable(np.array([[-1.0, 0.5]], np.float32))
    assert F.huber_loss(x, np.zeros((1, 2), np.float32), np.float64(0.5)).dtype == np.float32


@pytest.mark.parametrize("narrow", [np.float16, ml_dtypes.bfloat16])
def test_the_wider_of_two_floating_types_leads_in_formulas_of_several_steps(narrow):
    a, b = Variable(np.array([300.0, 1.0]).astype(narrow)), Variable(np.array([-1.0, 1.0], np.float32))
    y = F.squared_difference(a, b)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y.array, (a.array.astype(np.float64) - b.array) ** 2)  # 90601 is no float16
    F.sum(y).backward()
    assert a.grad.dtype == narrow and b.grad.dtype == np.float32


def test_complex_operands_keep_their_imaginary_part():
    x, z = np.array([1.0, 2.0]), np.array([1.0j, 3.0 + 1.0j])
    for y in (Variable(x) * Variable(z), Variable(x) * z, Variable(z) * x):
        np.testing.assert_array_equal(y.array, x * z)
    np.testing.assert_array_equal((Variable(x) * np.complex128(2j)).array, x * 2j)


@pytest.mark.parametrize("other", [np.array([1.0, 2.0], object), np.array(["2020-01-01"] * 2, "M8[D]")], ids=str)
def test_what_is_no_number_is_not_converted(other):
    with pytest.raises(TypeError, match="expected numbers"):
        Variable(np.ones(2)) + other


def test_numbers_to_choose_from():
    condition, x = np.array([True, False]), np.array([3.0, 4.0], np.float32)
    v = Variable(x)
    for y, wanted in ((F.where(condition, 1.0, x), [1, 4]), (F.where(condition, x, 1.0), [3, 1]),
                      (F.where(condition, 1.0, v), [1, 4]), (F.where(condition, v, 1.0), [3, 1])):  # fmt: skip
        assert isinstance(y, Variable) and y.dtype == np.float32
        np.testing.assert_array_equal(y.array, wanted)
    assert isinstance(F.where(condition, 1.0, 2.0), Variable)
    F.sum(F.where(condition, 1.0, v)).backward()
    np.testing.assert_array_equal(v.grad, [0, 1])


@pytest.mark.parametrize("axis", [np.int64(1), np.int64(-1), [1], (np.int64(1),)], ids=repr)
def test_axes_of_numpys_kind(axis):
    x = np.array([[1.0, 2.0, 4.0], [0.0, 1.0, 3.0]])
    for function in (Variable.sum, Variable.mean):
        v = Variable(x)
        y = function(v, axis)
        np.testing.assert_allclose(y.array, getattr(x, function.__name__)(1))
        F.sum(y * y).backward()
        factor = 2 if function is Variable.sum else 2 / 3
        np.testing.assert_allclose(v.grad, factor * np.repeat(y.array[:, None], 3, 1))


def test_an_axis_of_numpys_kind_in_other_functions():
    x = np.array([[1.0, 2.0, 4.0]])
    assert F.squeeze(Variable(x), np.int64(0)).shape == (3,)
    assert F.tensordot(Variable(x), x, np.int64(2)).array == 21
    weights = np.array([1.0, 1.0, 2.0])
    np.testing.assert_allclose(Variable(x).mean(np.int64(1), weights=weights).array, [11 / 4])


@pytest.mark.programs
def test_bfloat16_by_name_where_nobody_imported_ml_dtypes():
    code = "import numpy, dbrdist.functions as F\nassert F.cast(numpy.ones(2), 'bfloat16').dtype.name == 'bfloat16'\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_condition_that_is_a_list_is_refused_in_words():
    with pytest.raises(ValueError, match=r"where: condition: expected an array of bool, got \[True\]"):
        F.where([True], np.ones(1), np.ones(1))


@pytest.mark.parametrize("swapped", [False, True])
def test_the_wider_type_leads_in_a_mean_squared_error(swapped):
    a, b = Variable(np.array([300.0, 1.0], np.float16)), Variable(np.array([0.0, 1.0001], np.float32))
    y = F.mean_squared_error(*((b, a) if swapped else (a, b)))
    assert y.dtype == np.float32
    wide = a.array.astype(np.float64) - b.array
    np.testing.assert_allclose(y.array, (wide**2).mean(), rtol=1e-6)  # 45000; the sum is no float16
    y.backward()
    assert a.grad.dtype == np.float16 and b.grad.dtype == np.float32
    np.testing.assert_allclose(b.grad, -wide, rtol=1e-3)  # 2 / N = 1
    np.testing.assert_allclose(b.grad[1], 1e-4, rtol=1e-2)
    np.testing.assert_allclose(a.grad, wide, rtol=1e-3)


@every_case
@each(shapes=lambda case: case.shapes)
def test_a_leaf_owns_its_gradient(case, shapes):
    """What a leaf's gradient holds changes with nothing else: not with gy, an input, an output or another gradient."""
    xs = [Variable(a) for a in case.inputs(shapes)]
    ys = listed(case.function(*xs))
    gys = [np.full(y.shape, 0.5, y.dtype) for y in ys]
    backward(ys, gys)
    others = [*gys, *(y.array for y in ys), *(x.array for x in xs)]
    grads = [x.grad for x in xs if x.grad is not None]
    for i, g in enumerate(grads):
        for other in others + grads[:i]:
            assert not np.shares_memory(g, other)
