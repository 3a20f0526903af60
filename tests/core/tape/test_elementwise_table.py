"""Tests of dbrdist.core.tape.elementwise_table."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.tape import elementwise_table, gradient_check


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_rows_take_their_arguments_once_and_whole():
    with pytest.raises(TypeError, match="elu: expected an argument 'x', got none"):
        F.elu()
    with pytest.raises(TypeError, match=r"elu: expected the arguments x, alpha, got {'beta': 1}"):
        F.elu(ones(1), beta=1)
    with pytest.raises(TypeError, match="elu: expected the arguments x, alpha, got 3"):
        F.elu(ones(1), 1.0, 2.0)
    assert F.elu(-ones(1), alpha=np.float64(2)).dtype == np.float32
    others = "f", ("x",), "float", (0, 1), {}, None, False, False, False
    elementwise_table.Row("f", np.exp, (lambda gy, x, y: gy,), *others)
    for given in ((), (lambda w: w,), (lambda x: x, lambda x: x)):
        with pytest.raises(TypeError, match=r"row 'f': expected a derivative by each of .*x.*, got names "):
            elementwise_table.Row("f", np.exp, given, *others)


@pytest.fixture
def made_row(monkeypatch):
    """Makes rows that are forgotten afterwards."""
    monkeypatch.setattr(elementwise_table, "ROWS", dict(elementwise_table.ROWS))
    return lambda *args, **options: elementwise_table.public(elementwise_table.row(*args, **options))


def test_a_row_becomes_a_function_with_name_and_signature(made_row):
    scaled = made_row(
        "scaled", lambda x, slope, shift: x * slope + shift, lambda slope: slope, "A line.", slope=2.0, shift=0.5
    )
    assert scaled.__name__ == scaled.__qualname__ == "scaled" and scaled.__doc__.startswith(
        "A line.\n\nArgs:\n    x: array"
    )
    assert scaled.__module__ == "dbrdist.functions"
    assert str(__import__("inspect").signature(scaled)) == "(x, slope=2.0, shift=0.5)"
    entry = elementwise_table.ROWS["scaled"]
    assert entry is scaled.row is scaled.primitive.row and entry.domain == (-1.0, 1.0) and entry.operands.kinds == (
        "float",
    )  # fmt: skip
    assert not entry.runs_at_once and entry.has_steps and not entry.is_one_pass and not entry.of_difference
    assert (entry.keep_in, entry.keep_out, entry.kept_names) == ((), (), ())
    x = Variable(np.array([1.0, -2.0]))
    assert scaled(x).array.tolist() == [2.5, -3.5] and scaled(x, 3.0, shift=1.0).array.tolist() == [4, -5]
    assert scaled.primitive(x.array, 3.0, 1.0).tolist() == [4, -5]
    F.sum(scaled(x, 4.0)).backward()
    assert x.grad.tolist() == [4, 4]


def test_what_a_row_keeps_is_what_its_derivatives_name(made_row):
    both = made_row(
        "both", lambda a, b: a * b + b, lambda b: b, lambda gy, a, y: gy * (a + 1.0 + 0.0 * y), "ab + b.", args="a b",
        domain=((0, 1), (2, 3)), kind="number", has_steps=False,
    )  # fmt: skip
    entry = both.row
    assert (entry.keep_in, entry.keep_out, entry.kept_names) == ((0, 1), (0,), ("a", "b", "y"))
    assert entry.domain == ((0, 1), (2, 3)) and entry.operands.kinds == ("number", "number") and not entry.has_steps
    assert [(p.names, p.takes_gradient) for p in entry.partials] == [(("b",), False), (("a", "y"), True)]
    a, b = Variable(np.array([2.0, 3.0])), Variable(np.array([5.0]))
    gradient_check.check_backward(both, (a.array, b.array), np.array([0.5, -2.0]))
    assert both.primitive(a, b).array.tolist() == [15, 20] and both.primitive(a.array, b.array).tolist() == [15, 20]


def test_a_row_that_hands_its_gradient_on_says_so(made_row):
    plus = made_row("plus", np.add, 1, 1, "a + b.", args="a b")
    minus = made_row("minus", np.negative, -1, "-a.")
    third = made_row("third", lambda x: x / 3, 1 / 3, "x / 3.")
    assert (plus.row.runs_at_once, minus.row.runs_at_once, third.row.runs_at_once) == (True, True, False)
    assert [f.row.node.gives_new for f in (plus, minus, third)] == [False, True, True]
    for f, count in ((plus, 2), (minus, 1), (third, 1)):
        xs = [np.array([1.0, 4.0 + i], np.float32) for i in range(count)]
        assert isinstance(f.primitive(*xs), np.ndarray) and isinstance(f.primitive(*map(Variable, xs)), Variable)
        gradient_check.check_backward(f, xs, np.array([1.0, -2.0]), dtype=np.float64)
    mixed = plus.primitive(Variable(np.ones(2, np.float32)), np.ones(2))
    assert mixed.dtype == np.float32 and plus.primitive(np.ones(2, np.float32), np.ones(2)).dtype == np.float64
    with pytest.raises(TypeError, match="expected a derivative by each of"):
        made_row("none", np.exp, lambda z: z, "words")


def test_numbers_that_are_arrays_broadcast_whatever_the_size():
    numbers = np.linspace(0.5, 1.5, 8, dtype="f")
    for function in (F.clipped_relu, F.silu, lambda x, delta: F.huber_loss(x, x.array * 0, delta, reduce="no")):
        found = []
        for n in (1, 2000):
            x = Variable(np.full((n, 8), 1.25, "f"))
            y = function(x, numbers)
            y.grad = np.ones_like(y.array)
            y.backward()
            found += [(y.array[0], x.grad[0])]
        np.testing.assert_allclose(*found, rtol=1e-6)
