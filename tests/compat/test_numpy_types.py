"""An array beside a scalar gives the type that NumPy 1.23 gave; the expected types were read off NumPy 1.23.5."""

import operator

import numpy as np
import pytest

from dbrdist.compat.numpy_1 import numpy_calls, numpy_types

# The type of the array, the scalar, the type of their sum. None: as NumPy 2.
SUMS = [
    ("f", np.float64(2), "f"), ("f", np.float64(1e5), "f"), ("f", np.float64(1e300), "d"), ("f", np.int64(1000), "f"),
    ("f", np.int64(70000), "d"), ("f", np.array(2.0), "f"), ("f", np.float64("nan"), "f"), ("f", np.complex128(1), "F"),
    ("e", np.float64(2), "e"), ("e", np.float64(1e5), "f"), ("e", np.float32(2), "e"), ("e", np.int64(300), "f"),
    ("d", np.float32(2), "d"), ("F", np.float64(2), "F"),
    ("b", np.int64(3), "b"), ("b", np.int64(200), "h"), ("b", 200, "h"), ("b", 128, "h"), ("b", -128, "b"),
    ("B", 200, "B"), ("B", 300, "H"), ("B", -1, "h"), ("B", np.int64(70000), "I"), ("i", np.int64(3), "i"),
    ("i", np.int64(2**40), "q"), ("i", np.float32(2), "d"), ("i", np.array(3), "i"), ("?", np.int64(1), "q"),
]  # fmt: skip


@pytest.mark.parametrize("dtype, scalar, expected", SUMS)
def test_the_type_of_a_sum(dtype, scalar, expected):
    a = np.ones(2, dtype)
    for y in (numpy_types.operate("Add", a, scalar), numpy_types.operate("Add", scalar, a)):
        assert y.dtype == np.dtype(expected)
        np.testing.assert_array_equal(y, np.array([1 + scalar] * 2, expected))
    assert numpy_types.of_two(np.multiply, a, scalar).dtype == np.dtype(expected)


def test_arrays_and_numbers_alone_are_as_in_numpy_2():
    f, d = np.ones(2, "f"), np.ones(2)
    for a, b in ((f, d), (d, f), (f, 2.5), (f, 10**6), (np.float32(2), np.float64(2)), (np.array(2, "f"), 2.5), (3, 4)):
        for name, of in numpy_types.OPERATORS.items():
            y, expected = numpy_types.operate(name, a, b), of(a, b)
            np.testing.assert_array_equal(y, expected)
            assert type(y) is type(expected) and getattr(y, "dtype", 0) == getattr(expected, "dtype", 0)


@pytest.mark.parametrize("expression", [
    "w * np.sqrt(2.0 / 3)", "np.sqrt(2.0 / 3) * w", "(w - m) / s", "w ** s", "w // s", "w % s", "-w + s * 2",
    "np.maximum(w, m)", "np.where(w > 0, w, m)", "np.multiply(s, w)", "[w * s][0]", "(lambda v: v - m)(w)",
])  # fmt: skip
def test_expressions_of_a_program_stay_in_float32(expression):
    names = {"w": np.ones(3, "f"), "m": np.float64(0.5), "s": np.float64(3)}
    code = numpy_calls.compiled(f"y = {expression}", "program.py")
    mine = dict(names, np=np, **numpy_calls.HELPERS)
    exec(code, mine)
    assert mine["y"].dtype == np.float32
    assert eval(expression, dict(names, np=np)).dtype == np.float64  # NumPy 2 alone
    np.testing.assert_allclose(mine["y"], eval(expression, dict(names, np=np)), rtol=1e-6)


def test_a_type_that_is_asked_for_takes_scalars_as_they_are():
    one = np.ones(2, "f")
    for expression in ("np.add(one, np.float64(0.1), dtype='d')", "np.add(np.float64(0.1), one, signature='dd->d')"):
        mine = dict(one=one, np=np, **numpy_calls.HELPERS)
        exec(numpy_calls.compiled(f"y = {expression}", "program.py"), mine)
        assert mine["y"].tolist() == [1.1, 1.1]


def test_operators_of_other_classes_are_theirs():
    class Path:
        def __truediv__(self, other):
            return f"under {other}"

        __rtruediv__ = __add__ = __truediv__

    mine = dict(p=Path(), name="a", np=np, **numpy_calls.HELPERS)
    exec(numpy_calls.compiled("y = [p / name, name / p, name + name, p + name, name * int('3')]", "program.py"), mine)
    assert mine["y"] == ["under a", "under a", "aa", "under a", "aaa"]
    with pytest.raises(TypeError, match="unsupported operand"):
        exec(numpy_calls.compiled("y = p - name", "program.py"), mine)


def test_names_are_those_of_the_operators_in_the_syntax_tree():
    for name, of in numpy_types.OPERATORS.items():
        sign = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
        mine = dict(a=7, b=2, **numpy_calls.HELPERS)
        exec(numpy_calls.compiled(f"y = a {sign[of.__name__]} b", "program.py"), mine)
        assert mine["y"] == getattr(operator, of.__name__)(7, 2), name
