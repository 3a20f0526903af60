"""Large arrays, which formulas of several steps work through block by block: every piece as if it were alone.

Arrays of more than 2^18 elements are cut into blocks of 2^15. Here they are cut from two blocks on, and what is
compared is made of pieces below that. Formulas are tried with blocks of 2^6, and what gathers operands with 2^15.
"""

from __future__ import annotations

import numpy as np
import pytest
from points import NEEDS_SCIPY

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core import elementwise
from dbrdist.core.backend import channels_last
from dbrdist.core.rows import ROWS
from tests.each import each

LIMIT = 2 * elementwise._BLOCK_ELEMENTS
SHORT = 2 << 6
SHAPES = [(SHORT - 1,), (SHORT,), (SHORT + 3,), (3, SHORT // 2, 1), (2, 2, 2, 2, 11)]


@pytest.fixture(autouse=True)
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


@each(name=ROWS)
def test_sizes_around_the_limit(name, short_blocks):
    row = ROWS[name]
    for shape in SHAPES:
        check(row, operands(row, shape), np.random.default_rng(1).uniform(-1, 1, shape))


@each(name=ROWS)
def test_other_orders_in_memory(name, short_blocks):
    row, shape = ROWS[name], (15, 20)
    gy = np.random.default_rng(1).uniform(-1, 1, shape)
    check(row, [np.asfortranarray(x) for x in operands(row, shape)], gy)
    check(row, [x[::-1, ::-1] for x in operands(row, shape)], gy)
    check(row, [x[:, ::2] for x in operands(row, (15, 40))], gy)


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


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (7, 2, 3, 4, 5), (2, 1, 1, 1, 1)], ids=str)
def test_images_beside_five_axes(shape):
    rng = np.random.default_rng(4)
    x, b = channels_last(rng.standard_normal((2, 3, 4, 5))), rng.standard_normal(shape)
    v = Variable(x)
    y = F.squared_difference(v, b)
    np.testing.assert_allclose(y.array, (x - b) ** 2)
    F.sum(y).backward()
    np.testing.assert_allclose(v.grad, 2 * (x - b).sum(0))


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
