"""Sums, means and gradients of what was broadcast, over many elements: the numbers of float64, in float32's digits."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.core.array import backend, sums
from dbrdist.core.tape import ops
from tests.each import each


def whole_numbers(shape, dtype, order="C"):
    """Numbers whose sums are exact in any order."""
    a = np.random.default_rng(0).integers(-9, 10, shape).astype(dtype)
    if order == "images":
        return np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return np.repeat(a, 2, -1)[..., ::2] if order == "apart" else np.asarray(a, order=order)


AXES = {
    (1023, 5): [0, 1, (0, 1)],
    (1024, 5): [0, -2, (0,), ()],
    (1025, 1): [0, 1],
    (4099, 3): [0, (1, 0)],
    (30001, 2): [0],
    (1300, 700): [0],
    (1100, 1200): [0],
    (5, 1030): [0, 1, -1],
    (60, 50, 7): [(0, 1), (1, 0), (-3, 1), (0, 2), 1, (1, 2)],
    (4, 3, 20, 31): [(0, 2, 3), (3, 0, 2), (2, 3), (1, 2, 3), (0, 1), 0],
    (0, 2000): [0, 1],
    (2000, 0): [0, 1],
    (20_000, 0): [0, 1],
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@each(
    **{"shape, axis": [(shape, axis) for shape in AXES for axis in AXES[shape]]},
    keepdims=[False, True],
    order=["C", "F", "images", "apart"],
    at_once=[1 << 16, 1000],
)
def test_each_element_counts_once(shape, axis, keepdims, order, at_once, dtype, monkeypatch):
    monkeypatch.setattr(sums, "_ELEMENTS_AT_ONCE", at_once)
    if order == "images" and len(shape) != 4:
        return
    x = whole_numbers(shape, dtype, order)
    expected = x.sum(axis, dtype="d", keepdims=keepdims)
    y = ops.sum(x, axis, keepdims)
    assert y.dtype == x.dtype
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected.astype(dtype))


def test_a_wrong_axis_is_refused():
    x = np.ones((2000, 3), np.float32)
    for axis in (2, -3, (0, 0), (0, -2)):
        with pytest.raises(ValueError, match="axis"):
            ops.sum(x, axis)


@each(value=[np.nan, np.inf, -np.inf], row=[0, 1500, 69999])
def test_what_is_not_finite_stays(value, row):
    x = np.ones((70000, 3), np.float32)
    x[row, 1] = value
    np.testing.assert_array_equal(ops.sum(x, 0), [70000, value, 70000])
    assert not np.isfinite(F.mean_squared_error(x, np.zeros_like(x)).array)


def test_a_bias_of_no_outputs_has_an_empty_gradient():
    b = Variable(np.ones(0, np.float32))
    F.sum(F.linear(np.ones((20_000, 2), np.float32), np.ones((0, 2), np.float32), b)).backward()
    assert b.grad.shape == (0,)


def squares(shape):
    """Positive numbers, many of them near zero, which a large sum loses."""
    return np.random.default_rng(1).standard_normal(shape, np.float32) ** 2


def deviation(y, expected):
    return abs(np.asarray(y.array if isinstance(y, Variable) else y, "d") / expected - 1).max()


def test_sums_over_many_rows_lose_no_digits():
    x = squares((300_000, 3))
    expected = x.sum(0, dtype="d")
    for y in (ops.sum(x, 0), ops.sum(Variable(x), 0), sums.sum_rows(x), ops.sum(x.T, 1), ops.sum_to(x, (3,))):
        assert deviation(y, expected) < 5e-7
    assert deviation(F.mean(x, axis=0), expected / len(x)) < 5e-7
    assert deviation(F.logsumexp(np.log(x), axis=0), np.log(np.exp(np.log(x).astype("d")).sum(0))) < 5e-7
    images = x.reshape(100, 50, 60, 3).transpose(0, 3, 1, 2)
    assert deviation(ops.sum(images, (0, 2, 3)), expected) < 5e-7


@each(shape=[(40_000, 3), (9000, 70)], at_once=[1, 60, 1 << 16])
def test_nothing_is_added_to_a_long_sum(shape, at_once, monkeypatch):
    """However wide the rows are beside what is added at once."""
    monkeypatch.setattr(sums, "_ELEMENTS_AT_ONCE", at_once)
    x = np.full(shape, 0.1, np.float32)
    assert deviation(ops.sum(x, 0), np.sum(x, 0, dtype="d")) < 6e-6


def test_gradients_of_what_was_broadcast_over_many_rows_lose_no_digits():
    x = squares((300_000, 3))
    scale = Variable(np.ones((3,), np.float32))
    column = Variable(np.ones((3, 1), np.float32))
    F.sum(scale * x).backward()
    F.sum(column * x.T).backward()
    for v in (scale, column):
        assert deviation(v.grad.reshape(-1), x.sum(0, dtype="d")) < 5e-7


def test_squares_of_many_elements_lose_no_digits():
    x = np.random.default_rng(1).standard_normal((2000, 1400), np.float32)
    assert deviation(F.mean_squared_error(x, np.zeros_like(x)), np.square(x, dtype="d").mean()) < 1e-6
    assert sums.square_sum(np.full(100_000, 2.0)) == 400_000


@each(dtype=["?", "i1", "u1", "i4", "e", "f", "d", "bfloat16"], axis=[None, (0,)], keepdims=[False, True])
def test_sums_are_as_wide_as_they_have_to_be(dtype, axis, keepdims):
    """Of integers as NumPy's, which do not overflow; of floating types in their own, rounded once."""
    x = np.ones((300, 2)).astype(backend.as_dtype(dtype))
    y = sums.sum_over(x, axis, keepdims)
    expected = x.astype("d" if x.dtype.kind in "fV" else x.dtype).sum(axis, keepdims=keepdims)
    assert y.shape == expected.shape and y.dtype == (x.dtype if x.dtype.kind in "fV" else expected.dtype)
    np.testing.assert_array_equal(np.asarray(y, "d"), np.asarray(expected.astype(y.dtype), "d"))


@each(axis=[(0, 2), (0, -1), (1, 3), (0, 2, 3), (-1, -4)], keepdims=[False, True], dtype=[np.float32, np.float64])
def test_sums_over_the_last_and_over_other_axes(axis, keepdims, dtype):
    x = np.random.default_rng(0).uniform(0, 1, (20, 9, 10, 11)).astype(dtype)
    found = sums.wide_sum(x, axis, keepdims)
    exact = x.astype(np.longdouble).sum(axis, keepdims=keepdims)
    assert found.shape == exact.shape and found.dtype == dtype
    np.testing.assert_allclose(found, exact.astype(dtype), rtol=32 * np.finfo(dtype).eps)


def test_wrong_axes_are_still_numpys_to_refuse():
    x = np.ones((20, 9, 10, 11), np.float32)
    for axis in ((0, 4), (0, 0, 3), (-5, 3)):
        with pytest.raises(ValueError):
            sums.wide_sum(x, axis, False)


@each(case=[((2, 3, 4, 5), (2, 3), 1 / 20), ((2, 3, 4, 5), (0,), 1 / 2), ((6,), None, 1 / 6), ((0, 3), None, None)])
@pytest.mark.filterwarnings("ignore")
def test_a_mean_comes_with_one_over_the_number_of_elements(case):
    shape, axis, scale = case
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mean, found = sums.mean_over(x, axis, False)
    if scale is None:
        assert np.isnan(found)
    else:
        assert found == scale
        np.testing.assert_allclose(mean, x.astype("f8").mean(axis), rtol=1e-6)


@each(axis=[(2, 3), (1, 2), None, (-2, -1)], keepdims=[False, True])
def test_a_devices_kernel_takes_means_of_images(axis, keepdims, monkeypatch):
    """Over height and width, where it does not refuse; the gradient has one of its own."""

    class Elsewhere(np.ndarray):
        """As an array of a device: not NumPy's own class."""

    x = np.arange(120.0, dtype="f").reshape(2, 3, 4, 5)
    gy, is_taken = x.sum(axis, keepdims=keepdims), axis == (2, 3) and not keepdims
    expected = x.mean(axis, keepdims=keepdims)
    for answer in (None, "made"):
        both = {"mean_of_images": lambda a, y=answer: y, "mean_of_images_backward": lambda *a: a}
        monkeypatch.setattr(sums, "kernels", both)
        y, scale = sums.mean_over(x.view(Elsewhere), axis, keepdims)
        assert scale == 1 / (x.size // expected.size)
        if is_taken and answer:
            assert y == "made"
        else:
            np.testing.assert_allclose(y, expected, rtol=1e-6)
        taken = sums.spread_mean(gy.view(Elsewhere), x.shape, axis, keepdims)
        assert taken is None if not is_taken else taken[1] == x.shape
        assert sums.spread_mean(gy, x.shape, axis, keepdims) is None
        assert sums.spread_mean(gy.view(Elsewhere), x.shape[1:], axis, keepdims) is None
    monkeypatch.setattr(sums, "kernels", {})
    np.testing.assert_allclose(sums.mean_over(x.view(Elsewhere), axis, keepdims)[0], expected, rtol=1e-6)


@each(
    **{
        "count, width, expected": [
            (1023, 16, (1, 1)),
            (1023, 15, (0, 0)),
            (0, 1, (0, 0)),
            (1024, 1, (4, 4)),
            (1279, 1, (4, 4)),
            (1280, 1, (5, 5)),
            (1024, 1 << 16, (4, 1)),
            (1024, 1 << 17, (4, 1)),
            (1024, 1 << 15, (4, 2)),
            (3000, 1 << 15, (10, 2)),
        ]
    }
)
def test_how_many_sums_rows_are_first_added_to(count, width, expected):
    assert sums.parts_of_rows(count, width) == expected
