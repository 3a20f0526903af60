"""Tests of dbrdist.functions.math."""

from __future__ import annotations

import itertools
import math
import operator
from fractions import Fraction

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import array_operations
from tests.each import each


def test_indices_and_steps(xp):
    x = xp.asarray([[1.5, -2.5], [0.0, 3.5]])
    assert int(F.argmax(x).array) == 3
    assert F.argmin(x, axis=1).array.tolist() == [1, 0]
    assert F.argmax(x).dtype == np.int32
    assert F.floor(x).array.tolist() == [[1, -3], [0, 3]]
    assert F.ceil(x).array.tolist() == [[2, -2], [0, 4]]
    assert F.fix(x).array.tolist() == [[1, -2], [0, 3]]
    assert F.sign(x).array.tolist() == [[1, -1], [0, 1]]
    assert not F.sign(Variable(x)).requires_grad


@pytest.mark.parametrize("name", ["floor", "ceil", "fix", "sign"])
@each(value=[-1.5, 0.0, 2.25])
def test_step_functions_of_one_number(name, value):
    y = getattr(F, name)(np.array(value, np.float32))
    formula = {"fix": np.trunc}.get(name) or getattr(np, name)
    assert type(y.array) is np.ndarray and y.shape == () and y.dtype == np.float32
    assert y.array == formula(value)


def test_floor_division_is_a_constant():
    x, d = np.array([-7.0, 7.0, 7.5], np.float32), np.array([2.0, -2.0, 2.5], np.float32)
    a = Variable(x)
    for y in (a // Variable(d), a // d, x // Variable(d)):
        np.testing.assert_array_equal(y.array, [-4, -4, 3])
        assert y.dtype == np.float32 and y.creator is None
    np.testing.assert_array_equal((a // 2).array, [-4, 3, 3])
    np.testing.assert_array_equal((15 // Variable(d)).array, [7, -8, 6])
    assert (Variable(np.array(7.0)) // 2).array == 3


@each(**{"size, is_joined": [(4095, False), (4096, True)]})
def test_bits_of_many_elements_are_joined(size, is_joined, monkeypatch):
    rng, found = np.random.default_rng(0), []
    fused = array_operations.fused
    monkeypatch.setattr(array_operations, "fused", lambda *xs: found.append(1) or fused(*xs))
    a, b = rng.standard_normal((2, size), np.float32)
    condition = rng.random(size) < 0.5
    np.testing.assert_array_equal(array_operations.chosen(condition, a, b), np.where(condition, a, b))
    assert bool(found) == is_joined


# ---- Remainders and whole quotients, exact as Python's, and what Variables do not compare ----


FLOATS = ["float16", "float32", "float64"]


@pytest.mark.parametrize("function", [F.add, F.fmod, F.maximum, F.arctan2])
def test_of_arrays_alone_the_first_does_not_decide_the_type(function):
    xs = [np.array([1.5, 7], dtype) for dtype in FLOATS]
    for a, b in itertools.permutations(xs, 2):
        assert function(a, b).dtype == np.result_type(a, b)
    assert F.add(xs[0], xs[2] * 1e300, 2.0).array[1] == 7e300


def pairs(dtype, n=500):
    rng = np.random.default_rng(0)
    most = {"float16": 4, "float32": 30, "float64": 200}[dtype]
    a = rng.normal(size=n) * 10.0 ** rng.uniform(-most / 2, most / 2, n)
    b = rng.normal(size=n) * 10.0 ** rng.uniform(-most / 2, most / 2, n)
    a, b = (np.concatenate([x, np.linspace(-5, 5, 21)]).astype(dtype) for x in (a, b))
    b[b == 0] = 0.1
    return a, b


@each(dtype=FLOATS)
def test_remainders_are_exact(dtype):
    a, b = pairs(dtype)
    for found, exact in (
        (F.fmod(a, b), lambda x, y: Fraction(math.fmod(x, y))),
        (Variable(a) % b, lambda x, y: Fraction(x) % Fraction(y)),
        (a % Variable(b), lambda x, y: Fraction(x) % Fraction(y)),
    ):
        assert found.dtype == dtype
        wanted = np.array([float(exact(float(x), float(y))) for x, y in zip(a, b)]).astype(dtype)
        np.testing.assert_array_equal(found.array, wanted)


@each(dtype=FLOATS)
def test_whole_quotients_are_pythons(dtype):
    a, b = pairs(dtype)
    near = abs(a / b) < 1 / np.finfo(dtype).eps  # larger ones are rounded
    a, b = a[near], b[near]
    wanted = np.array([Fraction(float(x)) // Fraction(float(y)) for x, y in zip(a, b)], dtype)
    for found in (Variable(a) // b, a // Variable(b), divmod(Variable(a), b)[0], divmod(a, Variable(b))[0]):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.array, wanted)
    assert (Variable(np.array([1.0])) // 0.1).array == 9.0


@each(dtype=["int8", "uint8", "int16", "int64", "uint64"])
def test_integers_stay_integers(dtype):
    most = np.iinfo(dtype).max
    a = np.array([most, most - 2, 7, 8] + ([-7, -most] if np.dtype(dtype).kind == "i" else []), dtype)
    for b in (3, 2, np.array(5, dtype)):
        found = {"//": Variable(a) // b, "%": Variable(a) % b, "fmod": F.fmod(a, b)}
        exact = {"//": operator.floordiv, "%": operator.mod, "fmod": lambda x, y: abs(x) % y * (1 if x >= 0 else -1)}
        for name, y in found.items():
            assert y.dtype == dtype, name
            assert y.array.tolist() == [exact[name](int(x), int(b)) for x in a], name


@each(dtype=["?", "i1", "i8", "e", "f", "d"], number=[2, 0.4])
def test_remainders_of_large_arrays_by_numbers_are_those_of_small_ones(dtype, number):
    x = (np.arange(9000) % 120).astype(dtype)
    for function in (F.fmod, lambda x, y: Variable(x) % y):
        whole, parts = function(x, number).array, [function(part, number).array for part in np.split(x, 9)]
        assert whole.dtype == parts[0].dtype
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@each(function=[F.fmod, lambda x, y: x % y])
def test_gradients_of_remainders(function):
    a, b = np.array([5.5, -7.2, 1e9 + 0.25, 3.0]), np.array([2.0, 2.5, 0.7, -1.1])
    x, y = Variable(a), Variable(b)
    F.sum(function(x, y) * np.arange(1.0, 5.0)).backward()
    with np.errstate(all="ignore"):
        k = np.trunc(a / b) if function is F.fmod else np.floor(a / b)
    np.testing.assert_allclose(x.grad, np.arange(1.0, 5.0))
    np.testing.assert_allclose(y.grad, -k * np.arange(1.0, 5.0))


@each(compare=[operator.eq, operator.ne])
def test_variables_are_not_compared(compare):
    y, t = Variable(np.zeros(3)), np.zeros(3)
    for one, other in ((y, t), (t, y), (y, Variable(t)), (y, 0)):
        for kind in (NotImplementedError, TypeError):
            with pytest.raises(kind, match="compare their arrays"):
                compare(one, other)
    assert y in [y]
    assert len({y, Variable(t)}) == 2
