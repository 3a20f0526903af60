"""Chainer's type checks: each expression has Python's value and its own text."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist.utils import type_check as T
from tests.each import each

X, Y = np.zeros((2, 3), "f"), np.zeros((3,), "i")


@pytest.fixture
def types():
    return T.get_types((X, Y), "in_types")


@pytest.mark.parametrize("make, value, text", [
    (lambda t: t.size(), 2, "in_types.size"),
    (lambda t: t[0].shape, (2, 3), "in_types[0].shape"),
    (lambda t: t[0].shape[1], 3, "in_types[0].shape[1]"),
    (lambda t: t[0].shape[1:], (3,), "in_types[0].shape[1:]"),
    (lambda t: t[0].shape[::2], (2,), "in_types[0].shape[::2]"),
    (lambda t: t[1].dtype.kind, "i", "in_types[1].dtype.kind"),
    (lambda t: t[0].ndim + 1, 3, "in_types[0].ndim + 1"),
    (lambda t: 1 + t[0].ndim, 3, "1 + in_types[0].ndim"),
    (lambda t: t[0].ndim - 1, 1, "in_types[0].ndim - 1"),
    (lambda t: 7 - t[0].ndim - 1, 4, "7 - in_types[0].ndim - 1"),
    (lambda t: 7 - (t[0].ndim - 1), 6, "7 - (in_types[0].ndim - 1)"),
    (lambda t: (t[0].ndim + 1) * 2, 6, "(in_types[0].ndim + 1) * 2"),
    (lambda t: 2 * t[0].ndim + 1, 5, "2 * in_types[0].ndim + 1"),
    (lambda t: t[0].ndim / 4, 0.5, "in_types[0].ndim / 4"),
    (lambda t: 4 / t[0].ndim, 2.0, "4 / in_types[0].ndim"),
    (lambda t: 5 // t[0].ndim, 2, "5 // in_types[0].ndim"),
    (lambda t: t[0].size // 4, 1, "in_types[0].size // 4"),
    (lambda t: t[0].size % 4, 2, "in_types[0].size % 4"),
    (lambda t: 5 % t[0].ndim, 1, "5 % in_types[0].ndim"),
    (lambda t: t[0].ndim ** 3, 8, "in_types[0].ndim ** 3"),
    (lambda t: -t[0].ndim, -2, "-in_types[0].ndim"),
    (lambda t: -(t[0].ndim + 1), -3, "-(in_types[0].ndim + 1)"),
    (lambda t: (-t[0].ndim) ** 2, 4, "(-in_types[0].ndim) ** 2"),
    (lambda t: T.prod(t[0].shape), 6, "prod(in_types[0].shape)"),
    (lambda t: T.Variable("abc", "word").upper(), "ABC", "word.upper()"),
    (lambda t: t[0].shape[t[1].ndim], 3, "in_types[0].shape[in_types[1].ndim]"),
    (lambda t: T.Constant(3) * 2, 6, "3 * 2"),
    (lambda t: t[0].ndim << 2, 8, "in_types[0].ndim << 2"),
    (lambda t: 1 << t[0].ndim, 4, "1 << in_types[0].ndim"),
    (lambda t: 9 >> t[0].ndim, 2, "9 >> in_types[0].ndim"),
    (lambda t: t[0].ndim | 5, 7, "in_types[0].ndim | 5"),
    (lambda t: 6 & t[0].ndim, 2, "6 & in_types[0].ndim"),
    (lambda t: (t[0].ndim ^ 7) & 3, 1, "(in_types[0].ndim ^ 7) & 3"),
    (lambda t: t[0].ndim & 3 ^ 7, 5, "in_types[0].ndim & 3 ^ 7"),
    (lambda t: +t[0].ndim, 2, "+in_types[0].ndim"),
    (lambda t: ~t[0].ndim + 1, -2, "~in_types[0].ndim + 1"),
    (lambda t: 2 ** t[0].ndim ** 2, 16, "2 ** in_types[0].ndim ** 2"),
    (lambda t: (t[0].ndim ** 2) ** 3, 64, "(in_types[0].ndim ** 2) ** 3"),
    (lambda t: -t[0].ndim ** 2, -4, "-in_types[0].ndim ** 2"),
    (lambda t: T.Variable({"a": 1}, "y")["a"], 1, "y['a']"),
    (lambda t: T.Variable(sorted, "sorted")([t[0].ndim, 1]), [1, 2], "sorted([in_types[0].ndim, 1])"),
    (lambda t: T.Variable(len, "len")((t[0].ndim,)), 1, "len((in_types[0].ndim,))"),
    (lambda t: t[0].shape[t[1].ndim:], (3,), "in_types[0].shape[in_types[1].ndim:]"),
    (lambda t: T.GetAttr(t[0], T.Constant("ndim")), 2, "in_types[0].ndim"),
    (lambda t: T.UnaryOperator(9, t[0].ndim, "-", lambda n: -n), -2, "-(in_types[0].ndim)"),
    (lambda t: T.BinaryOperator(7, t[0].ndim, 3, "%", lambda n, m: n % m), 2, "in_types[0].ndim % 3"),
])  # fmt: skip
def test_values_and_texts(types, make, value, text):
    expression = make(types)
    assert T.eval(expression) == expression.eval() == value and type(expression.eval()) is type(value)
    assert str(expression) == text


@pytest.mark.parametrize("make, text, actual", [
    (lambda n: n == 3, "n == 3", "2 != 3"),
    (lambda n: n != 2, "n != 2", "2 == 2"),
    (lambda n: n < 2, "n < 2", "2 >= 2"),
    (lambda n: n <= 1, "n <= 1", "2 > 1"),
    (lambda n: n > 2, "n > 2", "2 <= 2"),
    (lambda n: n >= 3, "n >= 3", "2 < 3"),
    (lambda n: n >= 3, "n >= 3", "2 < 3"),
    (lambda n: n + 1 == n * 2, "n + 1 == n * 2", "3 != 4"),
])  # fmt: skip
def test_expectations(make, text, actual):
    n = T.make_variable(2, "n")
    with pytest.raises(T.InvalidType) as caught:
        T.expect(n == 2, make(n))
    assert (caught.value.expect, caught.value.actual) == (text, actual)
    with dbrdist.using_config("type_check", False):
        T.expect(make(n))


@pytest.mark.parametrize("make", [
    lambda n: n == 2, lambda n: n != 3, lambda n: n < 3, lambda n: n <= 2, lambda n: n > 1, lambda n: n >= 2,
])  # fmt: skip
def test_expectations_that_hold(make):
    T.expect(make(T.make_variable(2, "n")))


def test_comparisons_of_lists_with_expressions():
    shape = T.Variable((2, 3), "x.shape")
    T.expect(shape == (T.Constant(2), 3), T.Constant([[0]]) == [[T.Constant(0)]])
    with pytest.raises(T.InvalidType) as caught:
        T.expect(shape == (T.Variable(2, "n"), 4))
    assert (caught.value.expect, caught.value.actual) == ("x.shape == (n, 4)", "(2, 3) != (2, 4)")


def test_comparisons_written_by_hand():
    n = T.Variable(2, "n")
    T.BoolBinaryOperator(n, 4, "divides", "does not divide", lambda a, b: b % a == 0).expect()
    with pytest.raises(T.InvalidType) as caught:
        T.BoolBinaryOperator(n, 3, "divides", "does not divide", lambda a, b: b % a == 0).expect()
    assert (caught.value.expect, caught.value.actual) == ("n divides 3", "2 does not divide 3")


def test_plain_truth_values():
    T.expect(True, np.bool_(True))
    with pytest.raises(T.InvalidType):
        T.expect(False)
    with pytest.raises(TypeError, match="expected comparisons, got str"):
        T.expect("n == 2")


def test_an_expression_has_no_truth_value(types):
    with pytest.raises(RuntimeError, match=r"in_types\[0\].ndim == 2 has no truth value"):
        bool(types[0].ndim == 2)


def test_names_of_arguments(types):
    T.argname(types, ("x", "t"))
    assert str(types[1].shape[0]) == "t.shape[0]"
    with pytest.raises(T.InvalidType, match=r"in_types.size == 3"):
        T.argname(types, ("x", "t", "w"))


def test_shapes_unpack(types):
    rows, columns = types[0].shape
    assert (rows.eval(), str(columns)) == (2, "in_types[0].shape[1]")


def test_broadcast_shapes(types):
    T.expect_broadcast_shapes("shapes differ", types[0].shape, types[1].shape)
    with pytest.raises(
        T.InvalidType, match=r"shapes differ\n\nExpect: .*in_types\[0\].shape, \(4,\)\nActual: \(2, 3\), \(4,\)"
    ):
        T.expect_broadcast_shapes("shapes differ", types[0].shape, (4,))


def test_light_types_are_plain():
    light = T.get_light_types((X, Y))
    assert light.size() == 2 and light[0].shape == (2, 3) and light[1].dtype == np.int32
    T.argname(light, ("x", "y"))
    with pytest.raises(T.InvalidType):
        T.argname(light, ("x",))


def test_missing_arrays():
    with pytest.raises(ValueError, match="in_types has None"):
        T.get_types((X, None), "in_types")
    assert T.get_types((X, None), "in_types", accept_none=True)[1].eval() is None
    assert T.same_types(X, Y) and T.same_types()


def test_expressions_are_written_as_they_were():
    x = T.Variable(np.arange(24).reshape(2, 3, 4), "x")
    for made, written in (
        (x[0], "x[0]"), (x[1, 2], "x[1, 2]"), (x[..., 0], "x[..., 0]"), (x[1:], "x[1:]"), (x[:2], "x[:2]"),
        (x[0:2], "x[0:2]"), (x[::2], "x[::2]"), (x[0, :1], "x[0, :1]"), (x.shape[0], "x.shape[0]"),
        ((x.ndim + 1) * 2, "(x.ndim + 1) * 2"), (x.ndim - (x.ndim - 1), "x.ndim - (x.ndim - 1)"),
    ):  # fmt: skip
        assert str(made) == written
    assert (x[0, :1]).eval().tolist() == [[0, 1, 2, 3]]
    with pytest.raises(RuntimeError, match="has no truth value of its own"):
        bool(x.ndim == 3)
    with pytest.raises(AttributeError, match="__array__"):
        x.__array__  # noqa: B018
    for kind in (T.Expr, T.Testable):
        with pytest.raises(NotImplementedError):
            (kind().eval if kind is T.Expr else kind().expect)()
    with pytest.raises(NotImplementedError):
        str(T.Expr())


@each(sign=["==", "!=", "<", "<=", ">", ">="], n=[2, 3, 4])
def test_comparisons_hold_or_say_the_opposite(sign, n):
    left = T.Variable(n, "n")
    holds = {"==": n == 3, "!=": n != 3, "<": n < 3, "<=": n <= 3, ">": n > 3, ">=": n >= 3}[sign]
    opposite = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}[sign]
    test = {
        "==": left == 3, "!=": left != 3, "<": left < 3, "<=": left <= 3, ">": left > 3, ">=": left >= 3
    }[sign]  # fmt: skip
    if holds:
        T.expect(test)
    else:
        with pytest.raises(T.InvalidType, match=f"n {sign} 3[\\s\\S]*{n} {opposite} 3"):
            T.expect(test)
        with dbrdist.using_config("type_check", False):
            T.expect(test)


def test_what_is_expected_is_a_comparison():
    T.expect(True, np.bool_(True))
    with pytest.raises(T.InvalidType, match="a comparison that holds"):
        T.expect(True, False)
    with pytest.raises(TypeError, match=r"type_check.expect: expected comparisons, got int"):
        T.expect(1)
    assert repr(T.TypeInfo((2, 3), np.dtype("f4"))) == "TypeInfo((2, 3), float32)"
    info = T.TypeInfo((2, 3), np.dtype("f4"))
    assert (info.ndim, info.size, T.TypeInfo((), "f4").size) == (2, 6, 1)
    in_types = T.TypeInfoTuple((info, info))
    assert str(in_types) == "in_types" and in_types.size().eval() == 2 and str(in_types.size()) == "in_types.size"
    assert T.prod(T.Variable((2, 3), "s")).eval() == 6
    T.expect_broadcast_shapes("words", (2, 1), (3,))
    with pytest.raises(T.InvalidType, match="words"):
        T.expect_broadcast_shapes("words", (2,), (3,))


def test_arrays_of_one_kind():
    Foreign = type("Foreign", (), {"__module__": "cupy.core"})
    other = type("Other", (), {"__module__": "cupy.elsewhere"})
    assert T.same_types() and T.same_types(np.ones(1), np.float32(1)) and T.same_types(Foreign(), other())
    assert not T.same_types(np.ones(1), Foreign())
    whole = type("Whole", (), {"__module__": "cupy"})
    assert T.same_types(whole(), Foreign()) and not T.same_types(np.ones(1), whole())


def test_a_users_check_sees_an_operand_that_is_none():
    """As Chainer's functions with optional inputs have it."""
    seen = []

    class Optional(dbrdist.FunctionNode):
        def check_type_forward(self, in_types):
            seen.append((in_types[0].shape.eval(), in_types[1].eval()))

        def forward(self, inputs):
            return (2 * inputs[0],)

    (y,) = Optional().apply((np.ones((2, 3)), None))
    assert y.array.sum() == 12 and seen == [((2, 3), None)]


def test_operators_associate_to_the_left_unless_they_say_otherwise():
    from dbrdist.core.tape import type_check

    def tree(**options):
        part = type_check.Constant(2) if hasattr(type_check, "Constant") else 2
        inner = type_check.BinaryOperator(5, part, part, "-", lambda a, b: a - b, **options)
        left = type_check.BinaryOperator(5, inner, part, "-", lambda a, b: a - b, **options)
        right = type_check.BinaryOperator(5, part, inner, "-", lambda a, b: a - b, **options)
        return str(left), str(right)

    assert tree() == tree(right_associative=False) == ("2 - 2 - 2", "2 - (2 - 2)")
    assert tree(right_associative=True) == ("(2 - 2) - 2", "2 - 2 - 2")
