"""Tests of dbrdist.core.array.memory; copies of every layout are in test_backend.py."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from dbrdist.core.array import memory
from tests.each import each


@each(shape=[(), (3,), (128, 127), (128, 128), (2, 3, 4, 5), (2, 64, 16, 16)], dtype=["f", "d"])
def test_an_allocator_makes_what_empty_makes(shape, dtype):
    """Small arrays in the quick way; those of 2 ** 16 bytes begin on a cache line."""
    new, expected = memory.allocator(shape, np.dtype(dtype)), memory.empty(shape, np.dtype(dtype))
    first, second = new(), new()
    for a in (first, second):
        assert (a.shape, a.dtype, a.strides) == (expected.shape, expected.dtype, expected.strides)
        assert expected.nbytes < 1 << 16 or memory.address(a) % 64 == 0
    assert not np.shares_memory(first, second)
    assert (new.func is memory.empty) is (expected.nbytes >= 1 << 16)
    plain = memory.plain_allocator(shape, np.dtype(dtype))()
    assert (plain.shape, plain.dtype) == (shape, dtype) and plain.flags.c_contiguous


ROWS = np.arange(512, dtype="f")[:, None]
SHAPE = (512, 512)


@each(
    **{
        "shape, value, is_asked": [
            (SHAPE, np.broadcast_to(ROWS, SHAPE), True),
            ((512, 511), np.broadcast_to(ROWS, (512, 511)), False),  # few
            (SHAPE, np.zeros(SHAPE, "f"), False),
            (SHAPE, np.broadcast_to(np.float32(3), SHAPE), False),  # a single one
            (SHAPE, ROWS, False),
            (SHAPE, np.broadcast_to(ROWS.astype("d"), SHAPE), False),
            (SHAPE, 3.0, False),
        ]
    }
)
def test_a_loop_copies_what_is_repeated_for_each_row(shape, value, is_asked, monkeypatch):
    """NumPy does where the loop refuses or is not there."""
    expected = np.empty(shape, "f")
    expected[...] = value
    for answer in (True, False):
        asked = []
        monkeypatch.setattr(memory, "_repeat", [lambda *words, y=answer, kept=asked: kept.append(words) or y])
        a = np.full(shape, -1, "f")
        memory.fill(a, value)
        assert len(asked) == is_asked and all(one is a and other is value for one, other in asked)
        np.testing.assert_array_equal(a, -1 if is_asked and answer else expected)
    monkeypatch.setattr(memory, "_repeat", [])
    memory.fill(a, value)
    np.testing.assert_array_equal(a, expected)


@each(shape=[(1000, 300), (1 << 18,), (2, 40, 75, 50)], dtype=["f", "i2"])
def test_a_single_value_is_stored_in_memory_of_any_kind(shape, dtype, monkeypatch):
    """Rows of it are copied to dense memory that a cache may hold; elsewhere NumPy stores it."""
    room = np.zeros((*shape[:-1], shape[-1] + 1), dtype)
    for bound in (1 << 24, 1 << 10):
        monkeypatch.setattr(memory, "_CACHED_BYTES", bound)
        for value in (3, np.full((), 5, dtype), np.broadcast_to(np.array(7, dtype), shape), np.full(1, 9, dtype)):
            for a in (np.zeros(shape, dtype), memory.zeros(shape, dtype), room[..., 1:]):
                memory.fill(a, value)
                np.testing.assert_array_equal(a, np.full(shape, np.asarray(value).reshape(-1)[0], dtype))
        with pytest.raises(ValueError, match="broadcast"):
            memory.fill(np.zeros(shape, dtype), np.broadcast_to(np.zeros((), dtype), (7, *shape[1:])))
    assert not room[..., 0].any()


@each(shape=[(), (3,), (128, 128), (2, 64, 16, 16), (0, 5)], dtype=["f", "d", "?"])
def test_zeros_lie_as_uninitialised_memory_does(shape, dtype):
    image = memory.empty((1, 2, 3, 4), "f")
    for empty, zeros in (
        (lambda: memory.empty(shape, dtype), lambda: memory.zeros(shape, dtype)),
        (lambda: memory.empty_as(image, shape, dtype), lambda: memory.zeros_as(image, shape, dtype)),
        (lambda: memory.empty_as(image[0], shape, dtype), lambda: memory.zeros_as(image[0], shape, dtype)),
    ):
        used = empty()
        used[...] = 1
        expected = used.shape, used.dtype, used.strides
        del used  # whose memory comes next
        a = zeros()
        assert (a.shape, a.dtype, a.strides) == expected and not a.any()
        assert a.nbytes < 1 << 16 or memory.address(a) % 64 == 0


@each(shape=[(1 << 14,), (3, 70, 100), (2, 40, 20, 21), (160, 205)])
@each(value=[0, 0.0, -0.0, False, np.float64(0), 3, 0.1, np.nan, np.array(0.0), np.array(7.0)])
@each(dtype=["f", "d", "?", "i1", "i8", "e", "F"])
def test_one_number_is_in_all_elements_whatever_lies_how(shape, value, dtype, monkeypatch):
    """Also where memory has gaps: nothing is written to those."""
    monkeypatch.setattr(memory, "_MANY_REPEATS", 1 << 14)
    monkeypatch.setattr(memory, "_CACHED_BYTES", 130_000)
    if dtype in ("i1", "i8") and value != value:
        value = 0.1
    layouts = [lambda a: a, lambda a: a.T, lambda a: a[::-1]]
    if len(shape) == 4:
        layouts += [lambda a: a.transpose(0, 3, 1, 2)]
    for layout in layouts:
        a, expected = (layout(np.full(shape, 77, dtype)) for _ in range(2))
        memory.fill(a, value)
        expected[...] = value
        assert a.tobytes() == expected.tobytes()
    wide = np.full((*shape[:-1], shape[-1] + 1), 77, dtype)
    memory.fill(wide[..., :-1], value)
    assert (wide[..., -1] == np.full((), 77, dtype)).all() and set(wide[..., :-1].tobytes()) == set(expected.tobytes())


def test_values_of_another_class_are_copied_as_arrays():
    class Own(np.ndarray):
        pass

    values = np.arange(1 << 18, dtype="f").reshape(512, 512)
    for value in (values.view(Own), values[0].view(Own), np.broadcast_to(values[1, 1:2], values.shape).view(Own)):
        a = np.zeros(values.shape, "f")
        memory.fill(a, value)
        np.testing.assert_array_equal(a, np.broadcast_to(value, a.shape))


def test_a_number_that_the_type_does_not_have_is_refused_as_by_numpy():
    for dtype, value in (("f", 1j), ("i4", np.nan), ("u1", 300)):
        a = np.ones(1 << 18, dtype)
        with pytest.raises((TypeError, ValueError, OverflowError)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            memory.fill(a, value)
        assert a.all()


@each(value=[np.zeros(3), np.zeros((1 << 18, 1)), "no number", None])
def test_what_does_not_fit_is_refused_as_by_numpy(value):
    a, expected = np.ones(1 << 18, "f"), np.ones(1 << 18, "f")
    for fill in (memory.fill, lambda a, value: a.__setitem__(..., value)):
        try:
            fill(a if fill is memory.fill else expected, value)
        except (TypeError, ValueError):
            continue
        assert value is None
    np.testing.assert_array_equal(a, expected)
    a.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        memory.fill(a, 0)


@each(
    shape=[(20, 128, 128), (1, 2048, 130), (64, 1024, 4), (300, 34, 5, 10), (7, 20, 2000), (64, 4096, 1)],
    dtype=["f", "d"],
)
def test_short_rows_that_follow_upon_themselves_are_copied_in_any_way(shape, dtype, monkeypatch):
    """As they lie after a sum over the second axis, or reversed; together, or one by one to what no cache holds."""
    rows = np.random.default_rng(0).standard_normal((shape[0], 1, *shape[2:])).astype(dtype)
    for bound in (1 << 24, 1 << 10):
        monkeypatch.setattr(memory, "_CACHED_BYTES", bound)
        for source in (rows, rows[::-1], rows[..., ::-1].astype("e"), rows[:1]):
            expected = np.broadcast_to(source, shape)
            a = memory.aligned(expected.size, np.dtype(dtype)).reshape(shape)
            memory.fill(a, expected)
            np.testing.assert_array_equal(a, expected)
        turned = np.zeros((shape[-1], *shape[:-1]), dtype).transpose(*range(1, len(shape)), 0)
        memory.fill(turned, expected)
        np.testing.assert_array_equal(turned, expected)


def images(*shape):
    n, c, h, w = shape
    return np.zeros((n, h, w, c), "f").transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        (images(2, 3, 4, 5), True),
        (images(2, 2, 4, 5), True),
        (images(2, 3, 4, 1), True),
        (images(2, 3, 1, 4), True),
        (images(2, 1, 4, 5), False),  # either order fits
        (images(2, 3, 1, 1), False),
        (np.zeros((2, 3, 4, 5), "f"), False),
        (np.zeros((2, 3, 4, 1), "f"), False),
        (np.zeros((2, 3, 1, 4), "f"), False),
        (np.broadcast_to(np.zeros((2, 3, 1, 1), "f"), (2, 3, 4, 5)), True),  # a sum over height and width
        (np.broadcast_to(np.zeros((2, 6, 1, 1), "f")[:, ::2], (2, 3, 4, 5)), False),
        (np.broadcast_to(np.zeros((2, 1, 4, 5), "f"), (2, 3, 4, 5)), False),  # one channel, repeated
        (np.broadcast_to(np.float32(0), (2, 3, 4, 5)), False),
    ],
)
def test_whether_channels_are_innermost(a, expected):
    assert memory.lies_as_images(a) is expected
