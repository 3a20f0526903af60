"""Adding at indices: the quick way for large arrays gives what NumPy's add.at gives."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import Parameter
from dbrdist.core.array import array_operations
from dbrdist.core.model import flat
from dbrdist.core.tape import ops
from tests.each import each

RNG = np.random.default_rng(0)
SHAPE = (40, 30, 8)


def ints(num, low, high, *more):
    return RNG.integers(low, high, (num, *more))


INDICES = [
    ints(600, -40, 40),
    (ints(600, 0, 40),),
    (ints(600, -40, 40), ints(600, -30, 30)),
    (ints(20, 0, 40)[:, None], ints(30, 0, 30)),
    (ints(70, 0, 40, 80), ints(70, 0, 30, 80), ints(70, -8, 8, 80)),
    (ints(600, 0, 40).astype(np.uint8), ints(600, 0, 30).astype(np.int16)),
    (ints(600, 0, 40), slice(None), ints(600, 0, 8)),
    (Ellipsis, ints(600, 0, 8)),
    RNG.random(SHAPE) > 0.3,
]


@pytest.mark.parametrize("number", range(len(INDICES)))
@each(dtype=["float32", "float64", "float16"])
def test_scatter_adds_as_numpy_does(number, dtype):
    index = INDICES[number]
    x = RNG.standard_normal(np.zeros(SHAPE)[index].shape).astype(dtype)
    expected = np.zeros(SHAPE, "float32" if dtype == "float16" else dtype)
    np.add.at(expected, index, x)
    y = ops.scatter(x, index, SHAPE)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, expected.astype(dtype))


@each(dtype=["uint8", "int8", "uint16", "int16", "uint64"])
def test_the_type_of_indices_need_not_hold_the_length(dtype):
    index, x = ints(600, 0, 40).astype(dtype), RNG.standard_normal((600, 8))
    expected = np.zeros((70000, 8))
    np.add.at(expected, index.astype(np.int64), x)
    np.testing.assert_array_equal(ops.scatter(x, index, expected.shape), expected)


@each(index=[np.full(600, 40), np.full(600, -41), (np.zeros(600, int), np.full(600, 30))])
def test_what_is_out_of_bounds_is_refused(index):
    with pytest.raises(IndexError, match="out of bounds"):
        ops.scatter(
            np.ones(np.broadcast_shapes((600, 30, 8) if not isinstance(index, tuple) else (600, 8))), index, SHAPE
        )


@pytest.mark.slow
def test_blocks_follow_one_another():
    index = ints(9000, 0, 40)
    x = RNG.standard_normal((9000, 30, 8))
    expected = np.zeros(SHAPE)
    np.add.at(expected, index, x)
    np.testing.assert_array_equal(ops.scatter(x, index, SHAPE), expected)


@pytest.mark.slow
def test_few_of_many_elements():
    rng = np.random.default_rng(0)
    for shape in ((1 << 20, 1), ((1 << 20) - 1, 1), (1 << 11, 600)):
        for dtype in (np.float32, np.float64):
            places = rng.integers(0, shape[0], 50)
            values = rng.standard_normal((50, shape[1])).astype(dtype)
            found = array_operations.scattered(values, places, shape, False)
            expected = np.zeros(shape, dtype)
            np.add.at(expected, places, values)
            assert found.flags.writeable and found.dtype == dtype
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            found += 1
            assert found.min() < 1.01 and not np.shares_memory(
                found, array_operations.scattered(values, places, shape, False)
            )


def test_a_lookup_writes_its_gradient_where_it_belongs():
    for ids in (np.array([3, 1, 3]), np.array([], int)):
        w, other = Parameter(np.ones((5, 4), np.float32)), Parameter(np.ones((3,), np.float32))
        flat.gather([w, other])
        w.node.view[...], other.node.view[...] = 7.0, 7.0
        y = ops.getitem(w, ids)
        y.grad = np.arange(y.size, dtype=np.float32).reshape(y.shape)
        y.backward()
        expected = np.zeros((5, 4))
        np.add.at(expected, ids, y.grad)
        np.testing.assert_array_equal(w.grad, expected)
        assert w.grad is w.node.view and (other.node.view == 7.0).all()
        y.backward()
        np.testing.assert_array_equal(w.grad, 2 * expected)


def test_places_counted_from_the_end_are_no_slower():
    """They are added by rows as others are, not element by element with ``np.add.at``."""
    order = np.random.default_rng(0).integers(-9, 9, 600)
    rows = np.random.default_rng(1).standard_normal((600, 70))
    y, expected = np.zeros((9, 70)), np.zeros((9, 70))
    assert array_operations._placed_by_row(y, order, rows)
    np.add.at(expected, order, rows)
    np.testing.assert_array_equal(y, expected)


@each(index=[np.s_[:, ::-1], np.s_[::-1], np.s_[..., None], np.s_[:], np.s_[::2], np.s_[3], np.s_[1:, ::-1], np.s_[:0]])
def test_what_a_slice_leaves_over_is_zero(index):
    """Into memory that held something else; of a slice of all elements none is."""
    shape = 300, 70
    y = np.random.default_rng(0).standard_normal(np.zeros(shape)[index].shape)
    expected = np.zeros(shape)
    expected[index] = y
    for out in (None, np.full(shape, 7.0), np.full(shape, 7.0, "f")):
        found = array_operations.scattered(y, index, shape, False, out)
        np.testing.assert_array_equal(found, expected)
        assert (found is out) == (out is not None and out.dtype == y.dtype)


def test_slices_and_numbers_are_basic_and_arrays_are_not():
    for index in (3, np.int64(1), None, ..., slice(2), (0, None, ..., slice(1, 2), np.int32(1))):
        assert array_operations.is_basic(index)
    for index in ([0], np.zeros(1, int), (0, [1]), (slice(2), np.array([True])), np.ones(2, bool)):
        assert not array_operations.is_basic(index)


LEADING = [
    ((700, 40), (slice(None), ints(900, -40, 40))),
    ((3, 50, 70), (slice(None), ints(900, 0, 50))),
    ((3, 2, 30, 9), (slice(None), slice(None), ints(900, -30, 30))),
    ((2, 30, 9, 5), (slice(None), ints(900, 0, 30), ints(900, 0, 9))),
    ((60, 300), (ints(9, 0, 60, 100),)),
    ((60, 3), (ints(9000, 0, 60),)),
]


@pytest.mark.slow
@each(number=range(len(LEADING)), dtype=["float32", "float64"])
def test_axes_before_those_with_indices_stay(number, dtype):
    """Bit for bit as ``np.add.at``: what comes to one place is added in order. NaN stays where it is."""
    shape, index = LEADING[number]
    x = np.random.default_rng(number).standard_normal(np.empty(shape, dtype)[index].shape).astype(dtype)
    x.reshape(-1)[7] = np.nan
    expected = np.zeros(shape, dtype)
    np.add.at(expected, index, x)
    for values in (x, np.asfortranarray(x), np.broadcast_to(x[..., :1], x.shape)):
        expected = np.zeros(shape, dtype)
        np.add.at(expected, index, values)
        found = array_operations.scattered(values, index, shape, False)
        assert found.tobytes() == expected.tobytes()


@each(c=[3, 4.0, 5, -2, -3.0, 7, 2.5], dtype=["float32", "float64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_powers_of_negative_numbers(c, dtype):
    """The same to a few units on both sides of the size from which absolute values are taken."""
    x = np.random.default_rng(0).standard_normal(1 << 10).astype(dtype)
    x[:8] = 0.0, -0.0, np.inf, -np.inf, np.nan, -1e-30, 1e30, -1
    found, few = (
        array_operations.power_of(x, c),
        np.concatenate([array_operations.power_of(v, c) for v in (x[:9], x[9:])]),
    )
    exact = x.astype(np.longdouble) ** c
    np.testing.assert_array_equal(np.isnan(found), np.isnan(exact.astype(dtype)))
    np.testing.assert_array_equal(np.signbit(found[:4]), np.signbit(exact[:4]))
    for y in (found, few):
        np.testing.assert_allclose(y, exact.astype(dtype), rtol=4 * np.finfo(dtype).eps)


@each(width=[1, 8, 64, 100])
def test_negative_zeros_that_are_added_to_zeros_are_zeros(width):
    """As np.add.at adds them, however wide rows are."""
    rows = np.arange(9000) % 9
    rows[rows == 8] = 7
    y = array_operations.scattered(np.full((9000, width), -0.0, "f"), (rows,), (9, width), False)
    assert not np.signbit(y).any()


def test_dense_parts_are_no_smaller_than_half_of_an_equal_share():
    """Smaller ones would keep far more memory than their own."""
    whole = np.zeros((8, 8))
    for rows, count, are_dense in (((4, 4), 2, True), ((6, 2), 2, True), ((7, 1), 2, False), ((1, 7), 4, True)):
        parts = np.split(whole, [rows[0]])
        assert [len(part) for part in parts] == list(rows)
        assert array_operations.are_dense_parts(parts, whole, count) is are_dense
    assert not array_operations.are_dense_parts(np.split(whole, 2, axis=1), whole, 2)
    assert array_operations.are_dense_parts([], whole, 2)


@each(
    **{"c, way": [(3, 1), (3.0, 1), (-3, 1), (4, 0), (-2, 0), (0.5, None), (2, None), (1, None), (-1, None), (0, None)]}
)
def test_powers_of_many_numbers_are_those_of_their_sizes(monkeypatch, c, way):
    """Of integers beyond those that NumPy has ways of its own for; odd ones have the sign of the number."""
    signs, absolutes = [], []
    for name, kept in (("copysign", signs), ("absolute", absolutes)):
        plain = getattr(np, name)
        monkeypatch.setattr(np, name, lambda *a, kept=kept, plain=plain, **k: kept.append(1) or plain(*a, **k))
    x = np.linspace(-2, 2, 1024) if c != 0.5 else np.linspace(0.5, 2, 1024)
    found = array_operations.power_of(x, c)
    assert (len(absolutes), len(signs)) == ((0, 0) if way is None else (1, way))
    np.testing.assert_allclose(found, [float(v) ** c for v in x], rtol=1e-12)
    array_operations.power_of(x[1:], c)  # fewer
    assert len(absolutes) == (way is not None)


class Elsewhere(np.ndarray):
    """As an array of a device: not NumPy's own class."""


@each(num=[1, 8, 9, 16, 17, 65])
def test_in_a_captured_step_eight_arrays_are_joined_at_once(monkeypatch, num):
    joined = []
    plain = np.concatenate
    monkeypatch.setattr(np, "concatenate", lambda xs, axis: joined.append(len(xs)) or plain(xs, axis=axis))
    xs = [np.full((2, 1 + i % 3), i, "f") for i in range(num)]
    expected = plain(xs, axis=1)
    np.testing.assert_array_equal(array_operations.concatenated(xs, 1), expected)
    assert joined == [num]
    with monkeypatch.context() as patch:
        patch.setattr(array_operations.capturing, "is_on", True)
        np.testing.assert_array_equal(array_operations.concatenated(xs, -1), expected)
    assert joined[0] == num and sum(joined[1:]) >= num and max(joined[1:]) <= 8
    assert len(joined) == 1 + {1: 1, 8: 1, 9: 3, 16: 3, 17: 4, 65: 12}[num]


LARGE, SMALL = (2, 128, 64), (2, 127, 64)  # times (2, 64, 32): 2 ** 19 multiplications, and fewer


def check_who_multiplies(monkeypatch, a, b, asked):
    """A kernel is ``asked`` once, or not; where it declines, and where there is none, NumPy multiplies."""
    seen, expected = [], np.matmul(np.asarray(a), np.asarray(b))
    for answer in (None, "made"):
        monkeypatch.setattr(array_operations, "kernels", {np.matmul: lambda *ab, y=answer: seen.append(ab) or y})
        y = array_operations.product(a, b)
        if answer == "made" and asked:
            assert y == "made"
        else:
            assert y.dtype == expected.dtype
            np.testing.assert_array_equal(y, expected)
    assert len(seen) == 2 * asked
    monkeypatch.setattr(array_operations, "kernels", {})
    np.testing.assert_array_equal(array_operations.product(a, b), expected)


@each(
    **{
        "shapes, asked": [
            ((LARGE, (2, 64, 32)), 1),
            ((SMALL, (2, 64, 32)), 0),
            (((2, 64, 256), (256, 64)), 0),
            (((256, 64), (2, 64, 32)), 0),
            (((256, 64), (64, 32)), 0),
        ]
    }
)
def test_a_kernel_takes_large_stacks_of_matrices(monkeypatch, shapes, asked):
    check_who_multiplies(monkeypatch, *(np.ones(shape, "f") for shape in shapes), asked)


@each(
    **{
        "dtypes, shapes, asked": [
            ("ee", ((2, 3, 4), (2, 4, 5)), 1),
            ("ee", ((2, 3, 4), (4, 5)), 1),
            ("ee", ((2, 3, 4), (4,)), 0),
            ("ef", ((2, 3, 4), (2, 4, 5)), 0),
            ("ff", ((2, 3, 4), (2, 4, 5)), 0),
        ]
    }
)
def test_a_devices_kernel_takes_stacks_of_16_bits(monkeypatch, dtypes, shapes, asked):
    factors = (np.ones(shape, dtype).view(Elsewhere) for shape, dtype in zip(shapes, dtypes))
    check_who_multiplies(monkeypatch, *factors, asked)
