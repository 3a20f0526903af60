"""Values of every public function against ``references``: plain formulas in float64 that share no code with them.

The gradient of a composition follows its forward, so that checking gradients proves nothing about values.
"""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, backward, grad
from dbrdist.core.array.backend import as_dtype
from tests.each import each
from tests.functions import references
from tests.functions.cases import every_case
from tests.functions.points import KINKS, NEEDS_SCIPY, POINTS

TYPES = {"float64": 1e-12, "float32": 3e-6, "float16": 8e-3, "bfloat16": 6e-2}


class Plain(np.ndarray):
    """An array with the attributes that rows of ``cases.py`` read from their inputs."""

    xp = np
    device = "@numpy"


def reference_of(case):
    """The function of a row with ``references`` in the place of ``dbrdist.functions``."""
    function = case.function
    if function.__name__ == "<lambda>":
        names = {**function.__globals__, "F": references}
        return types.FunctionType(function.__code__, names, "reference", function.__defaults__, function.__closure__)
    return getattr(references, function.__name__)


def listed(ys):
    return [a for y in ys for a in listed(y)] if isinstance(ys, (tuple, list)) else [ys]


def compare(ys, expected, tolerance):
    """Shapes, and values to ``tolerance`` times the largest value of each array, or a tenth where that is less."""
    ys, expected = listed(ys), listed(expected)
    assert not any(isinstance(e, Variable) for e in expected), "the row computes with dbrdist beside F: no reference"
    assert len(ys) == len(expected)
    for y, e in zip(ys, expected):
        a, e = np.asarray(getattr(y, "array", y)).astype(np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * np.abs(e[np.isfinite(e)]).max(initial=0.1))


@every_case
@each(shapes=lambda case: case.shapes, dtype=["float64", "float32"])
def test_rows(case, shapes, dtype):
    arrays = case.inputs(shapes, dtype)
    expected = reference_of(case)(*(a.astype(np.float64).view(Plain) for a in arrays))
    compare(case.function(*(Variable(a) for a in arrays)), expected, TYPES[dtype])


def of_type(value, dtype):
    """Floating-point arrays in ``dtype``, on their own, all else as it is."""
    if isinstance(value, tuple):
        return tuple(of_type(v, dtype) for v in value)
    return value.astype(dtype) if isinstance(value, np.ndarray) and value.dtype.kind in "fV" else value


@pytest.mark.slow
@pytest.mark.parametrize("first", sorted({p.name[0] for p in POINTS}))
@each(name=lambda first: sorted({p.name for p in POINTS if p.name[0] == first}))
@each(point=lambda name: [p for p in POINTS if p.name == name], dtype=["float64", "float32"])
def test_points(name, point, dtype):
    if point.name in NEEDS_SCIPY:
        pytest.importorskip("scipy")
    args, options = of_type(point.args, dtype), of_type(tuple(point.options.items()), dtype)
    expected = getattr(references, point.name)(*of_type(args, "float64"), **dict(of_type(options, "float64")))
    compare(getattr(F, point.name)(*args, **dict(options)), expected, TYPES[dtype])


@pytest.mark.parametrize("name", ["sum", "mean", "softmax", "linear", "matmul"])
@each(point=lambda name: [p for p in POINTS if p.name == name], dtype=["float16", "bfloat16"])
def test_sums_of_16_bit_types_run_in_a_wider_one(name, point, dtype):
    args, options = of_type(point.args, as_dtype(dtype)), of_type(tuple(point.options.items()), as_dtype(dtype))
    expected = getattr(references, point.name)(*of_type(args, "float64"), **dict(of_type(options, "float64")))
    ys = getattr(F, point.name)(*args, **dict(options))
    assert ys.dtype == as_dtype(dtype)
    compare(ys, expected, TYPES[dtype])


@pytest.mark.parametrize("point", [p for p in POINTS if p.options.get("running_mean") is not None], ids=str)
def test_running_statistics_move_as_the_reference_says(point):
    moved = []
    for room in (F, references):
        options = of_type(tuple(point.options.items()), "float64")
        getattr(room, point.name)(*point.args, **dict(options))
        moved.append([v for k, v in options if k.startswith("running")])
    compare(*moved, 1e-14)
    assert (moved[0][0] != point.options["running_mean"]).all()


@each(**{"name, args, options, expected": KINKS})
def test_gradients_where_the_derivative_jumps(name, args, options, expected):
    xs = [Variable(a) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in args]
    y = getattr(F, name)(*xs, **options)
    backward([y], [np.ones_like(y.array)])
    gradients = [x.grad for x in xs if isinstance(x, Variable)]
    for g, e in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-14)


# What a formula does otherwise at one number shows at that number alone, or at one that was taken for it.
NUMBERS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.75, 4.0, -0.25, -1.0, -1.25, -2.0)
OF_A_NUMBER = {
    "power": (lambda x, c: x**c, lambda x, c: x**c, NUMBERS),
    "softplus": (F.softplus, references.softplus, [c for c in NUMBERS if c > 0]),
    "silu": (F.silu, references.silu, NUMBERS),
    "leaky_relu": (F.leaky_relu, references.leaky_relu, NUMBERS),
    "elu": (F.elu, references.elu, NUMBERS),
    "alpha of selu": (F.selu, references.selu, NUMBERS),
    "scale of selu": (lambda x, c: F.selu(x, 1.5, c), lambda x, c: references.selu(x, 1.5, c), NUMBERS),
    "clipped_relu": (F.clipped_relu, references.clipped_relu, [c for c in NUMBERS if c > 0]),
}


@pytest.mark.parametrize("name", OF_A_NUMBER)
@each(number=lambda name: OF_A_NUMBER[name][2], beside=[0.0, 1e-9, -1e-9])
def test_formulas_of_a_number_at_each_special_one_and_beside_it(name, number, beside):
    ours, plain, _ = OF_A_NUMBER[name]
    number, h = number + beside, 1e-4
    x = Variable(np.array([0.1, 0.37, 0.9, 1.1, 1.7, 2.3] + [-0.1, -0.6, -1.3, -2.2] * (name != "power")))
    below, at, above = (plain(x.array + step, number) for step in (-h, 0.0, h))
    y = ours(x, number)
    (slope,) = grad([y], [x], enable_double_backprop=True)
    (curvature,) = grad([slope * x], [x])  # slope + x curvature: there is a way to x also where the slope is constant
    np.testing.assert_allclose(y.array, at, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(slope.array, (above - below) / (2 * h), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose((curvature.array - slope.array) / x.array, (above - 2 * at + below) / h**2, 1e-3, 1e-4)


# ---- nothing is left out --------------------------------------------------------------------------------------------

# Chance decides what these give: tests/functions/test_noise.py tests them by name.
BY_NAME = {
    ("dropout", "ratio"), ("scaled_dot_product_attention", "dropout_ratio"), ("multi_head_attention", "dropout_ratio"),
}  # fmt: skip
# `sample_weight` is refused unless it is None.
REFUSED = {("r2_score", "sample_weight")}


def test_every_public_function_has_a_reference_with_its_arguments():
    for name in F.__all__:
        ours, plain = (inspect.signature(getattr(room, name), eval_str=False) for room in (F, references))
        assert list(ours.parameters) == list(plain.parameters), name
        for key, parameter in ours.parameters.items():
            assert parameter.default == plain.parameters[key].default, f"{name}: {key}"


def test_every_argument_is_tested_away_from_its_default():
    missing = {
        (name, key)
        for name in F.__all__
        for key, parameter in inspect.signature(getattr(F, name)).parameters.items()
        if parameter.default is not parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    } - BY_NAME - REFUSED  # fmt: skip
    for point in POINTS:
        signature = inspect.signature(getattr(F, point.name))
        for key, value in signature.bind(*point.args, **point.options).arguments.items():
            default = signature.parameters[key].default
            if isinstance(value, np.ndarray) or value != default:
                missing.discard((point.name, key))
    assert missing == set()
