"""Formulas of several steps on operands of every kind: blocks, layouts and 16-bit types change nothing but the time."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import backend, elementwise
from dbrdist.core.array.backend import channels_last
from dbrdist.core.tape.elementwise_table import ROWS
from tests.each import each
from tests.functions.points import NEEDS_SCIPY

SHAPE = (2, 3, 4, 5)
BF16 = backend.as_dtype("bfloat16")


def images(a):
    return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


# How an operand lies: from the values of a whole array to an array that broadcasts to it.
LAYOUTS = {
    "whole": lambda a: a,
    "images": images,
    "turned": lambda a: np.ascontiguousarray(a.T).T,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "from the end": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "a channel's": lambda a: a[:1, :, :1, :1],
    "a row's": lambda a: a[0, 0, 0],
    "of two axes": lambda a: a[0, 0, :, :1],
    "repeated": lambda a: np.broadcast_to(a[0, 0, 0, 0], SHAPE),
    "rows repeated": lambda a: np.broadcast_to(a[:, :, :1], SHAPE),
    "a number in an array": lambda a: a[0, 0, 0, 0, ...],
    "one element": lambda a: a[:1, 0, 0, 0],
    "a number of NumPy": lambda a: a[0, 0, 0, 0],
    "a number": lambda a: 0.75,
}


def formula(x, y, z):
    return np.tanh(x * y) + z / (1 + np.abs(y))


def expected(xs):
    """In float32, rounded once, where all floating operands have 16 bits and one type; else as NumPy promotes."""
    types = {x.dtype for x in xs if hasattr(x, "dtype") and x.dtype.kind in "fV"}
    narrow = types.pop() if len(types) == 1 and next(iter(types)).itemsize == 2 else None
    if narrow is None:
        return formula(*xs)
    wide = [x.astype("f") if getattr(x, "dtype", None) == narrow else x for x in xs]
    return np.asarray(formula(*wide)).astype(narrow)


@pytest.fixture(params=["at once", "in blocks of 7", "in blocks of 13", "in blocks of 60"])
def blocks(request, monkeypatch):
    if request.param != "at once":
        monkeypatch.setattr(elementwise, "_AT_ONCE_ELEMENTS", 1)
        monkeypatch.setattr(elementwise, "_BLOCK_ELEMENTS", int(request.param.split()[-1]))


def drawn(first, second, types):
    rng = np.random.default_rng(0)
    layouts = (LAYOUTS[first], LAYOUTS[second], LAYOUTS["whole" if types[2] else "a number"])
    return [lay(rng.uniform(0.1, 2, SHAPE).astype(t or "f")) for lay, t in zip(layouts, types, strict=True)]


@each(types=[("f", "f", "f"), ("d", "d", None), ("f", "d", None), ("f", "i", None)], first=LAYOUTS, second=LAYOUTS)
def test_values_are_those_of_the_formula(blocks, types, first, second):
    xs = drawn(first, second, types)
    y, e = elementwise.fused(formula, *xs), formula(*xs)
    assert np.shape(y) == np.shape(e) and y.dtype == e.dtype
    np.testing.assert_allclose(y, e, rtol=1e-6 if e.dtype == "f" else 1e-14)


@each(types=[(BF16, BF16, BF16), ("e", "e", None), (BF16, "f", None), ("i", BF16, None)], first=LAYOUTS, second=LAYOUTS)
def test_16_bit_types_are_rounded_once(blocks, types, first, second):
    xs = drawn(first, second, types)
    y, e = elementwise.fused(formula, *xs), expected(xs)
    assert np.shape(y) == np.shape(e) and y.dtype == e.dtype
    same = np.asarray(y).astype("d") == np.asarray(e).astype("d")
    assert same.mean() > 0.97  # NumPy's tanh of float32 depends on where a number lies
    np.testing.assert_allclose(np.asarray(y).astype("d"), np.asarray(e).astype("d"), rtol=2.0**-7)


@each(first=LAYOUTS, second=LAYOUTS)
def test_images_stay_images(blocks, first, second):
    xs = drawn(first, second, ("f", "f", None))
    y = elementwise.fused(formula, *xs)
    if any(getattr(x, "shape", ()) == SHAPE and backend.lies_as_images(x) for x in xs):
        assert y.shape == SHAPE and backend.lies_as_images(y)


@each(dtype=["float16", "bfloat16"])
def test_numbers_of_16_bits_are_rounded_once(dtype):
    """A formula on arrays without axes, or on NumPy's numbers, as on arrays of one element."""
    dtype = backend.as_dtype(dtype)
    values = np.linspace(0.1, 2, 60).astype(dtype)

    def formula(x, y):
        return (x * y + x) * y - x / 3

    for x, y in zip(values, values[::-1], strict=True):
        whole = elementwise.fused(formula, np.array([x], dtype), np.array([y], dtype))
        exact = formula(np.float32(x), np.float32(y)).astype(dtype)
        assert elementwise.fused(formula, x, y) == exact == whole[0]
        assert elementwise.fused(formula, np.array(x), 0.75).dtype == dtype
    wide = elementwise.fused(formula, np.float32(0.3), values[0])
    assert wide.dtype == np.float32 and wide == formula(np.float32(0.3), values[0])


def test_small_integers_are_not_rounded_as_16_bits_of_a_float():
    a, b = np.array([7, 300], np.int16), np.array([2, 1000], np.int16)
    for xs in ((a, b), (a, 2), (a, np.float32(2)), (a[0], b[0])):
        y, exact = elementwise.fused(lambda x, y: x / y, *xs), xs[0] / xs[1]
        assert y.dtype == exact.dtype and np.array_equal(y, exact)


LIMIT = 2 * elementwise._BLOCK_ELEMENTS
SHORT = 2 << 6
SHAPES = [(SHORT - 1,), (SHORT,), (SHORT + 3,), (3, SHORT // 2, 1), (2, 2, 2, 2, 11)]


@pytest.fixture
def two_blocks_are_cut(monkeypatch):
    monkeypatch.setattr(elementwise, "_AT_ONCE_ELEMENTS", LIMIT - 1)


@pytest.fixture
def short_blocks(monkeypatch, two_blocks_are_cut):
    """Blocks of 2^6 elements."""
    monkeypatch.setattr(elementwise, "_BLOCK_ELEMENTS", SHORT // 2)
    monkeypatch.setattr(elementwise, "_AT_ONCE_ELEMENTS", SHORT - 1)


def operands(row, shape, seed=0):
    if row.name in NEEDS_SCIPY:
        pytest.importorskip("scipy")
    rng = np.random.default_rng(seed)
    domains = row.domain if isinstance(row.domain[0], tuple) else (row.domain,) * len(row.args)
    return [rng.uniform(low, high, shape) for low, high in domains]


def value_and_gradients(row, xs, gy):
    vs = [Variable(x) for x in xs]
    y = row.primitive(*vs, *row.numbers.values())
    grads = dbrdist.grad([y], vs, [gy])
    return y.array, *[np.zeros(gy.shape) if g is None else g.array for g in grads]


def in_pieces(row, xs, gy):
    flat = [np.array_split(np.ravel(a), 4) for a in (*xs, gy)]
    pieces = [value_and_gradients(row, piece[:-1], piece[-1]) for piece in zip(*flat, strict=True)]
    return [np.concatenate(parts).reshape(gy.shape) for parts in zip(*pieces, strict=True)]


def check(row, xs, gy):
    for found, wanted in zip(value_and_gradients(row, xs, gy), in_pieces(row, xs, gy), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("two_blocks_are_cut")
def test_arrays_that_fit_into_the_cache_are_taken_at_once(monkeypatch):
    seen = []

    def formula(x):
        seen.append(x.size)
        return x + 1

    monkeypatch.undo()
    for size in ((1 << 18) - 1, 1 << 18):
        elementwise.fused(formula, np.ones(size, np.float32))
    assert seen == [(1 << 18) - 1, 1 << 18]
    elementwise.fused(formula, np.ones((1 << 18) + 1, np.float32))
    assert seen[2:] == [1 << 15] * 8 + [1]


@pytest.mark.slow
@pytest.mark.usefixtures("two_blocks_are_cut")
@each(name=ROWS)
def test_sizes_around_the_limit(name, short_blocks):
    row = ROWS[name]
    for shape in SHAPES:
        check(row, operands(row, shape), np.random.default_rng(1).uniform(-1, 1, shape))


@pytest.mark.slow
@pytest.mark.usefixtures("two_blocks_are_cut")
@each(name=ROWS)
def test_other_orders_in_memory(name, short_blocks):
    row, shape = ROWS[name], (15, 20)
    gy = np.random.default_rng(1).uniform(-1, 1, shape)
    check(row, [np.asfortranarray(x) for x in operands(row, shape)], gy)
    check(row, [x[::-1, ::-1] for x in operands(row, shape)], gy)
    check(row, [x[:, ::2] for x in operands(row, (15, 40))], gy)


@pytest.mark.usefixtures("two_blocks_are_cut")
@each(name=ROWS, dtype=[np.float32, np.float64])
def test_the_gradient_of_a_sum_is_one_value_repeated(name, dtype, short_blocks):
    row = ROWS[name]
    xs = [x.astype(dtype) for x in operands(row, (SHORT,))]
    found, wanted = [Variable(x) for x in xs], [Variable(x) for x in xs]
    F.sum(row.primitive(*found, *row.numbers.values())).backward()
    y = row.primitive(*wanted, *row.numbers.values())
    y.grad = np.ones_like(y.array)
    y.backward()
    for v, w in zip(found, wanted, strict=True):
        assert v.grad.dtype == dtype
        np.testing.assert_allclose(v.grad, w.grad, rtol=1e-6)


PARTNERS = [(1,), (1, 1), (3, 1), (1, 1, 1, 1, 1), (2, 1, 1)]


@pytest.mark.usefixtures("two_blocks_are_cut")
@pytest.mark.parametrize("shape", PARTNERS, ids=str)
def test_operands_that_enlarge_the_largest(shape):
    rng = np.random.default_rng(2)
    x, b = rng.standard_normal(LIMIT), rng.standard_normal(shape)
    v, w = Variable(x), Variable(b)
    for y in (F.squared_difference(v, w), F.squared_difference(w, v)):
        np.testing.assert_allclose(y.array, (x - b) ** 2)
        v.cleargrad()
        w.cleargrad()
        F.sum(y).backward()
        np.testing.assert_allclose(v.grad, 2 * (x - b).reshape(-1, LIMIT).sum(0), atol=1e-9)
        np.testing.assert_allclose(w.grad, 2 * (b - x).sum(-1).reshape(shape), atol=1e-9)


@pytest.mark.usefixtures("two_blocks_are_cut")
@each(
    repeated=[(LIMIT,), (1, LIMIT), (3, LIMIT), (LIMIT, 3), (1, 1), (LIMIT, 1)],
    other=[(LIMIT,), (1,), (3, 1), (LIMIT, 1), (1, 3), (3,)],
)
def test_one_value_repeated(repeated, other):
    a, b = np.broadcast_to(np.float64(0.25), repeated), np.random.default_rng(3).standard_normal(other)
    try:
        shape = np.broadcast_shapes(repeated, other)
    except ValueError:
        with pytest.raises(ValueError):
            F.squared_difference(a, b)
        return
    if np.prod(shape) > 4 * LIMIT:
        return
    for y in (F.squared_difference(a, b), F.squared_difference(b, a)):
        assert y.shape == shape
        np.testing.assert_allclose(y.array, (0.25 - b) ** 2 * np.ones(shape))


@pytest.mark.usefixtures("two_blocks_are_cut")
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (7, 2, 3, 4, 5), (2, 1, 1, 1, 1)], ids=str)
def test_images_beside_five_axes(shape):
    rng = np.random.default_rng(4)
    x, b = channels_last(rng.standard_normal((2, 3, 4, 5))), rng.standard_normal(shape)
    v = Variable(x)
    y = F.squared_difference(v, b)
    np.testing.assert_allclose(y.array, (x - b) ** 2)
    F.sum(y).backward()
    np.testing.assert_allclose(v.grad, 2 * (x - b).sum(0))


@pytest.mark.usefixtures("two_blocks_are_cut")
@pytest.mark.parametrize("size", [5000, LIMIT])
@pytest.mark.parametrize("holds", [True, False])
def test_a_condition_repeated(size, holds):
    a, b = np.random.default_rng(5).standard_normal((2, size))
    v, w = Variable(a), Variable(b)
    y = F.where(np.broadcast_to(np.array(holds), (size,)), v, w)
    np.testing.assert_array_equal(y.array, a if holds else b)
    F.sum(y).backward()
    np.testing.assert_array_equal(v.grad, np.full(size, float(holds)))
    np.testing.assert_array_equal(w.grad, np.full(size, float(not holds)))


def test_arrays_that_are_alike():
    """Of one class, shape and type, which is NumPy's own class."""

    class Own(np.ndarray):
        pass

    a = np.zeros((2, 3), "f")
    for b, are_alike in ((a.copy(), True), (a.T, False), (a.astype("d"), False), (a[:1], False), (a.view(Own), False)):
        assert elementwise._are_alike(a, b) is are_alike
        assert elementwise._are_alike(b, a) is are_alike
    assert not elementwise._are_alike(a.view(Own), a.view(Own))


# of a large operand, and what lies beside it: the loop over rows of so many elements, or None
BESIDE = [
    ((300, 250), (250,), ("row", 250)),
    ((300, 250), (1, 250), ("row", 250)),
    ((300, 250), (300, 1), ("column", 250)),
    ((30, 10, 250), (10, 250), ("row", 2500)),
    ((30, 10, 250), (30, 1, 1), ("column", 2500)),
    ((30, 10, 250), (30, 10, 1), ("column", 250)),
    ((30, 1, 2500), (2500,), ("row", 2500)),
    ((30, 10, 250), (1, 10, 1), None),
    ((30, 10, 250), (30, 1, 250), None),
    ((30, 10, 250), (30, 10, 250), None),
    ((30, 10, 250), (1, 1, 1), None),
    ((30, 1, 2500), (30, 5, 1), None),
    ((1, 90_000), (3, 1), None),
    ((90_000,), (2, 1), None),
    ((3000, 25), (25,), None),  # short rows
    ((3000, 25), (3000, 1), None),
    ((100, 250), (250,), None),  # few
]


@each(operation=["add", "multiply"], **{"shape, beside, loop": BESIDE})
def test_large_arrays_meet_vectors_in_loops_over_rows(operation, shape, beside, loop, monkeypatch):
    ufunc, asked = getattr(np, operation), []
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s, np.float32) for s in (shape, beside))
    a.flat[::97] = np.nan
    b.flat[-1] = -0.0
    expected = ufunc(a, b)

    def of_rows(name, arrays, n):
        asked.append((name, n))
        assert all(v.flags.c_contiguous for v in arrays)
        x, vector = arrays
        vector = vector[:, None] if name.endswith("column") else vector
        return (ufunc(x.reshape(-1, n), vector).reshape(-1),)

    def tried(a, b):
        asked.clear()
        found = elementwise.elementwise(ufunc, a, b)
        np.testing.assert_array_equal(found, ufunc(a, b))
        assert found.dtype == ufunc(a, b).dtype
        return [*asked]

    name = {"add": "add", "multiply": "mul"}[operation]
    with monkeypatch.context() as m:
        m.setitem(elementwise.kernels, "of_rows", of_rows)
        assert tried(a, b) == ([] if loop is None else [(f"{name}_{loop[0]}", loop[1])])
        assert tried(a, np.repeat(b, 2, axis=-1)[..., ::2]) == (
            [] if loop is None else [(f"{name}_{loop[0]}", loop[1])]
        )
        for x, y in (
            (a.astype("d"), b.astype("d")),
            (a, b.astype("d")),
            (np.repeat(a, 2, axis=-1)[..., ::2], b),
            (b, a),
        ):
            assert tried(x, y) == [] or x is b
        m.setitem(elementwise.kernels, "of_rows", lambda *words: None)
        assert tried(a, b) == []
    assert tried(a, b) == []
    np.testing.assert_array_equal(elementwise.elementwise(ufunc, a, b), expected)  # as compiled, where it is


@each(operation=["add", "multiply"], width=[64, 65, 250, 1024])
def test_vectors_beside_rows_have_the_bits_of_numpys(operation, width):
    """Of images by the channel, too, and of rows that begin anywhere in memory."""
    ufunc, rng = getattr(np, operation), np.random.default_rng(width)
    a = rng.standard_normal(100_000 // width * width + 1, np.float32)[1:].reshape(-1, width)
    a[::7, 3] = np.inf, np.nan, -0.0, 1e30, 1e-40, 0.0, *a[42::7, 3]
    image = a[: len(a) // 4 * 4].reshape(2, 2, -1, width).transpose(0, 3, 1, 2)
    for x, vectors in ((a, (a[0], a[:, :1])), (image, (image[:1, :, :1, :1],))):
        for vector in vectors:
            with np.errstate(all="ignore"):
                found, expected = elementwise.elementwise(ufunc, x, vector), ufunc(x, vector)
            assert found.strides == x.strides
            np.testing.assert_array_equal(
                found.view("i4")[~np.isnan(expected)], expected.view("i4")[~np.isnan(expected)]
            )
            np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@each(operation=["add", "multiply"])
def test_large_arrays_in_c_order_lie_as_the_image_beside_them(operation, monkeypatch):
    monkeypatch.setitem(elementwise.kernels, "of_rows", lambda name, arrays, n: pytest.fail(name))
    a = np.ones((8, 16, 24, 25), "f")
    b = np.arange(a[0].size, dtype="f").reshape(1, 24, 25, 16).transpose(0, 3, 1, 2)
    y = elementwise.elementwise(getattr(np, operation), a, b)
    assert backend.is_channels_last(y)
    np.testing.assert_array_equal(y, getattr(np, operation)(a, b))


@each(operation=["add", "multiply"])
def test_an_overflow_beside_a_vector_is_raised_where_a_program_asks_for_it(operation, monkeypatch):
    ufunc, rows = getattr(np, operation), np.full((300, 250), 3e38, np.float32)
    monkeypatch.setitem(elementwise.kernels, "of_rows", lambda name, arrays, n: pytest.fail(name))
    for vector in (rows[0], rows[:, :1]):
        with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow"):
            elementwise.elementwise(ufunc, rows, vector)
        heard = []
        with np.errstate(over="call", call=lambda *words, heard=heard: heard.append(words)):
            assert np.isinf(elementwise.elementwise(ufunc, rows, vector)).all()
        assert heard
