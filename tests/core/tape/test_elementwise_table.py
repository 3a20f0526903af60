"""Tests of dbrdist.core.tape.elementwise_table."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable, backward
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


# Name and operands of each row, the kind of their types, where tests draw them, and: s has steps, o is one pass, d is
# of the difference, l has a loop for each; then its numbers. A changed entry is a decision.
ROWS = """\
add(a, b) number -1..1 -
sub(a, b) number -1..1 -
mul(a, b) number -1..1 -
div(a, b) number -1..1 0.5..2 -
neg(x) number -1..1 -
exp(x) float -1..1 -
log(x) float 0.5..2 -
sqrt(x) float 0.5..2 -
tanh(x) float -1..1 s
absolute(self) number 0.3..1.5 -
pow(a, b) number 0.5..2 -1..1 s
pow_number(x) number 0.5..2 s c=3
sin(x) float -1..1 -
cos(x) float -1..1 -
tan(x) float -1..1 s
sinh(x) float -1..1 -
cosh(x) float -1..1 -
arcsin(x) float -0.7..0.7 s
arccos(x) float -0.7..0.7 s
arctan(x) float -1..1 s
arctan2(x1, x2) float 0.5..2 s
arctanh(x) float -0.7..0.7 s
expm1(x) float -1..1 -
log1p(x) float -0.5..2 -
log2(x) float 0.5..2 -
log10(x) float 0.5..2 -
rsqrt(x) float 0.5..2 s
square(x) float -1..1 -
squared_difference(x1, x2) float -1..1 sd
maximum(x1, x2) float -1..1 -
minimum(x1, x2) float -1..1 -
clip(x) float -1..1 so x_min=-0.9 x_max=1.2
exp_difference(a, b) float -1..1 s
scaled_exp_difference(a, b, c) float -1..1 s
linear_interpolate(p, x, y) float -1..1 sl
erf(x) float -1..1 s
erfc(x) float -1..1 s
erfcx(x) float -1..1 s
erfinv(x) float -0.7..0.7 s
erfcinv(x) float 0.3..1.7 s
ndtr(x) float -1..1 s
ndtri(x) float 0.1..0.9 s
log_ndtr(x) float -1..1 s
hazard(x) float -1..1 s
lgamma(x) float 0.5..2 s
digamma(x) float 0.5..2 s
polygamma(n, x) number 1..3 0.5..2 s
zeta(x, q) number 1.5..3 0.5..2 s
sigmoid(x) float -1..1 s
softplus(x) float -1..1 s beta=1.0
leaky_relu(x) float -1..1 s slope=0.2
elu(x) float -1..1 s alpha=1.0
selu(x) float -1..1 s alpha=1.6732632423543772 scale=1.0507009873554805
clipped_relu(x) float -30..30 so z=20.0
relu6(x) float -9..9 so
hard_sigmoid(x) float -4..4 s
silu(x) float -1..1 s beta=1.0
mish(x) float -1..1 s
hardswish(x) float -4..4 s
gelu(x) float -1..1 s
gelu_by_tanh(x) float -1..1 s
bernoulli(p, x) float -1..1 s
focal(x, t) float -1..1 0.2..0.8 s gamma=2.0 of_ones=0.25 of_zeros=0.75
distance(a, b) float 0.3..1.5 -1.5..-0.3 sd
huber(x, t) float -1.5..1.5 sd delta=0.6
normal_loss(x, mean, ln_var) float -1..1 sl
laplace_loss(x, loc, ln_scale) float 0.3..1.5 -1.5..-0.3 -1..1 sl
"""


def told(row):
    flags = zip("sodl", (row.has_steps, row.is_one_pass, row.of_difference, row.has_loop_for_each))
    domains = row.domain if isinstance(row.domain[0], tuple) else (row.domain,)
    parts = [
        f"{row.name}({', '.join(row.args)})", "/".join(dict.fromkeys(row.operands.kinds)),
        " ".join(f"{a:g}..{b:g}" for a, b in domains), "".join(letter for letter, has in flags if has) or "-",
        *(f"{name}={value!r}" for name, value in row.numbers.items()),
    ]  # fmt: skip
    return " ".join(parts)


def test_each_row_is_that_of_the_table():
    expected = ROWS.splitlines()
    assert F.likelihood  # loads the last rows, which others may have loaded before
    known = {line.partition("(")[0] for line in expected}
    rows = elementwise_table.ROWS.values()
    ours = [row for row in rows if row.name in known or row.formula.__module__.startswith("dbrdist.")]
    assert sorted(map(told, ours)) == sorted(expected)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("shape", [(300, 250), (9000, 3), (1, 70_000), (90, 100)])
def test_the_gradient_of_a_column_is_a_sum_of_products_that_are_not_kept(monkeypatch, shape, is_first):
    summed = []
    of_products = elementwise_table.product_sum
    monkeypatch.setattr(elementwise_table, "product_sum", lambda *args: summed.append(args[2]) or of_products(*args))
    x, gy = np.random.default_rng(0).standard_normal((2, *shape)).astype("f")
    factors = [Variable(x), Variable(np.linspace(-1, 1, len(x), dtype="f")[:, None])]
    y = factors[0] * factors[1] if is_first else factors[1] * factors[0]
    backward([y], [gy])
    gx, column = (v.grad for v in factors)
    assert summed == [(1,)]
    assert gx.tobytes() == (gy * factors[1].array).tobytes()
    assert column.shape == (len(x), 1) and column.tobytes() == (gy * x).sum(1, keepdims=True).tobytes()
    np.testing.assert_allclose(column[:, 0], (gy.astype("d") * x).sum(1), atol=2e-3)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [
        (((100, 100), (100, 1)), "d"),
        (((100, 100), (100, 1)), "e"),
        (((1, 100), (100, 1)), "f"),
        (((9000, 1), (9000, 1)), "f"),
        (((10, 30, 40), (10, 30, 1)), "f"),
        (((30, 30, 40), (30, 1)), "f"),  # beside as many matrices as there are rows
    ],
)
def test_the_gradients_of_other_factors_are_those_of_the_formula(monkeypatch, shapes, dtype):
    monkeypatch.delattr(elementwise_table, "product_sum")
    a, b = (Variable(np.random.default_rng(i).standard_normal(s).astype(dtype)) for i, s in enumerate(shapes))
    y = a * b
    gy = np.random.default_rng(2).standard_normal(y.shape).astype(dtype)
    gy[0] = -0.0
    backward([y], [gy])
    laid = (1,) * (y.ndim - b.ndim) + b.shape
    product, axes = gy.astype("d") * a.array, tuple(k for k, n in enumerate(laid) if y.shape[k] != n)
    expected = product.sum(axes, keepdims=True).reshape(b.shape)
    assert b.grad.dtype == dtype and b.grad.shape == b.shape
    np.testing.assert_allclose(b.grad, expected, rtol=0, atol=0.05 if dtype == "e" else 1e-4)
