"""Tests of dbrdist.functions.pooling."""

import itertools

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, kernels
from dbrdist import functions as F
from dbrdist.core.array import backend
from tests.each import each
from tests.functions.image_helpers import check_gradients, draw


@pytest.mark.parametrize("kwargs", [{}, {"stride": 1, "pad": 1}, {"stride": 2, "cover_all": False}, {"pad": 1}])
def test_max_pooling_gradients(kwargs):
    check_gradients(lambda x: F.max_pooling_2d(x, 3, **kwargs), [draw(0, 2, 3, 6, 7)])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ksize": 2, "pad": 2},
        {"ksize": (3, 1), "pad": (1, 1), "stride": 1},
        {"ksize": 1, "stride": 4},  # with cover_all the last window starts at row 8 of 6
        {"ksize": 2, "stride": 9},
        {"ksize": (2, 3), "stride": (2, 12)},
    ],
)
def test_max_pooling_refuses_windows_that_see_nothing(kwargs):
    x = draw(0, 2, 3, 6, 7)
    with pytest.raises(ValueError, match=r"max_pooling_2d: ksize.*windows that each see a part of the image of 6 x 7"):
        F.max_pooling_2d(x, **kwargs)
    assert np.isfinite(F.max_pooling_2d(x, **{**kwargs, "pad": 0, "cover_all": False}).array).all()


@pytest.mark.parametrize(
    "kwargs", [{"ksize": 3, "pad": 2, "stride": 2}, {"ksize": 2, "stride": 3}, {"ksize": 1, "stride": 6}]
)
def test_max_pooling_takes_windows_that_see_one_element(kwargs):
    """Each window against the elements that it sees, in plain Python."""
    x = draw(0, 1, 1, 7, 7)
    y = F.max_pooling_2d(x, **kwargs).array[0, 0]
    k, s, p = kwargs["ksize"], kwargs.get("stride", kwargs["ksize"]), kwargs.get("pad", 0)
    for i, row in enumerate(y):
        for j, value in enumerate(row):
            seen = x[0, 0, max(i * s - p, 0) : i * s - p + k, max(j * s - p, 0) : j * s - p + k]
            assert seen.size
            assert value == seen.max()


@pytest.mark.parametrize("kwargs", [{}, {"stride": 1, "pad": 1}, {"stride": (2, 1), "pad": (1, 0)}])
def test_average_pooling_gradients(kwargs):
    check_gradients(lambda x: F.average_pooling_2d(x, (3, 2), **kwargs), [draw(0, 2, 3, 7, 8)])


def test_pooling_values():
    x = np.arange(25.0).reshape(1, 1, 5, 5)
    y, indices = F.max_pooling_2d(x, 2, return_indices=True)
    np.testing.assert_array_equal(y.array[0, 0], [[6, 8, 9], [16, 18, 19], [21, 23, 24]])
    np.testing.assert_array_equal(indices[0, 0], [[3, 3, 2], [3, 3, 2], [1, 1, 0]])
    np.testing.assert_array_equal(F.max_pooling_2d(x, 2, cover_all=False).array[0, 0], [[6, 8], [16, 18]])
    np.testing.assert_array_equal(F.average_pooling_2d(x, 2, 2, 1).array[0, 0, 0], [0, 0.75, 1.75])
    np.testing.assert_allclose(F.global_average_pooling_2d(x).array, [[12.0]])


# ---- Maxima of windows that hold NaN, minus infinity or the lowest number ----


LOWEST = np.finfo("f").min
FILLS = [[-np.inf], [np.nan], [-np.inf, np.nan], [LOWEST], [LOWEST, -np.inf], [np.inf, np.nan, -np.inf, 1.0], [2.0]]
WINDOWS = [(2, 2, 1, False), (3, 2, 1, True), (3, 1, 1, False), (2, 1, 0, True), (3, 3, 2, False)]


def images(shape, fill, dtype, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape)
    x[rng.random(shape) < 0.7] = np.nan
    return np.where(np.isnan(x), rng.choice(fill, shape), x).astype(dtype)


def looped(x, k, s, p, cover_all, gy=None):
    """The first pixel of each window that nothing exceeds, NaN being the largest: values, places, gradient of x."""
    axes = x.ndim - 2
    counts = [(n + 2 * p - k + (s - 1 if cover_all else 0)) // s + 1 for n in x.shape[2:]]
    y, at = np.empty((*x.shape[:2], *counts), x.dtype), np.empty((*x.shape[:2], *counts), int)
    gx = np.zeros(x.shape)
    for lead in np.ndindex(*x.shape[:2]):
        for window in np.ndindex(*counts):
            best = None
            for offset in itertools.product(range(k), repeat=axes):
                place = tuple(w * s + o - p for w, o in zip(window, offset))
                if all(0 <= i < n for i, n in zip(place, x.shape[2:])):
                    v = x[(*lead, *place)]
                    if best is None or v > best[0] or (np.isnan(v) and not np.isnan(best[0])):
                        best = v, int(np.ravel_multi_index(offset, (k,) * axes)), place
            y[(*lead, *window)], at[(*lead, *window)] = best[:2]
            gx[(*lead, *best[2])] += 1.0 if gy is None else gy[(*lead, *window)]
    return y, at, gx


@pytest.mark.slow
@pytest.mark.parametrize("axes", [1, 2, 3])
@each(fill=FILLS, window=WINDOWS, dtype=["float32", "float64"])
def test_places_of_maxima(axes, fill, window, dtype):
    k, s, p, cover_all = window
    x = images((1, 2, *((7, 6, 4)[:axes] if axes < 3 else (4, 3, 4))), fill, dtype, 0)
    functions = [F.max_pooling_nd, (F.max_pooling_1d, F.max_pooling_2d, F.max_pooling_3d)[axes - 1]]
    for function in functions:
        v = Variable(x)
        y, at = function(v, k, s, p, cover_all, return_indices=True)
        gy = np.random.default_rng(1).uniform(1, 2, y.shape).astype(dtype)
        wanted, places, gradient = looped(x, k, s, p, cover_all, gy)
        np.testing.assert_array_equal(y.array, wanted)
        np.testing.assert_array_equal(at, places)
        np.testing.assert_allclose(dbrdist.grad([y], [v], [gy])[0].array, gradient, rtol=1e-6)
        if axes == 2 and LOWEST not in fill:  # of which the sum of two overflows
            back = F.upsampling_2d(y, at, k, s, p, x.shape[2:], cover_all).array
            with np.errstate(all="ignore"):
                spread = looped(x, k, s, p, cover_all, y.array)[2].astype(dtype)
            np.testing.assert_allclose(back, spread, rtol=1e-6)


@pytest.mark.slow
@each(provider=["onednn", "numpy"], dtype=["float32", "bfloat16"], fill=FILLS)
def test_places_are_the_same_for_every_provider(provider, dtype, fill):
    x = images((2, 16, 9, 8), fill, "float32", 2).astype(backend.as_dtype(dtype))
    if LOWEST in fill:
        x[x.astype("f") < -1e38] = -np.inf if -np.inf in fill else -3.3895e38
    with kernels.use(provider):
        v = Variable(x)
        y, at = F.max_pooling_2d(v, 3, 2, 1, return_indices=True)
        (g,) = dbrdist.grad([y], [v], [np.ones(y.shape, y.dtype)])
    wanted, places, gradient = looped(x.astype("f"), 3, 2, 1, True)
    np.testing.assert_array_equal(y.array.astype("f"), wanted)
    np.testing.assert_array_equal(at, places)
    np.testing.assert_array_equal(g.array.astype("f"), gradient)


@each(function=[F.max, F.min], axis=[None, 0, 1])
def test_the_gradient_of_an_extremum_that_is_nan_goes_to_it(function, axis):
    x = Variable(np.array([[1.0, np.nan, 2.0], [np.nan, np.nan, -np.inf]]))
    y = function(x, axis=axis)
    (g,) = dbrdist.grad([y], [x], [np.ones(y.shape)])
    with np.errstate(invalid="ignore"):
        largest = (np.max if function is F.max else np.min)(x.array, axis=axis, keepdims=True)
    wanted = np.isnan(x.array) & np.isnan(largest) | (x.array == largest)
    np.testing.assert_array_equal(g.array, wanted.astype("d"))


@each(function=[F.average_pooling_1d, F.average_pooling_2d, F.average_pooling_3d], value=[np.nan, np.inf, -np.inf])
def test_means_are_spoiled_in_their_windows_alone(function, value):
    axes = int(function.__name__[-2])
    x = np.ones((1, 2, *(6,) * axes), np.float32)
    x[(0, 0, *(0,) * axes)] = value
    y = function(x, 2, 2, 0).array
    assert np.array_equal(y[(0, 0, *(0,) * axes)], value, equal_nan=True)
    y[(0, 0, *(0,) * axes)] = 1.0
    np.testing.assert_array_equal(y, np.ones_like(y))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(dtype=[np.float16, np.float32, np.float64], layout=[np.ascontiguousarray, backend.channels_last])
def test_means_of_large_images_and_their_gradients(dtype, layout):
    """Against float64; what is not finite stays in its plane."""
    rng = np.random.default_rng(0)
    x, gy = (rng.standard_normal(shape).astype(dtype) for shape in ((8, 30, 9, 8), (8, 30)))
    x[1, 2, 3, 4], x[3, 4, 5, 6], gy[5, 6] = np.nan, np.inf, -np.inf
    v, g = Variable(layout(x)), Variable(gy)
    y = F.global_average_pooling_2d(v)
    (gx,) = dbrdist.grad([y], [v], [g], enable_double_backprop=True)
    tolerance = {"rtol": 4 * float(np.finfo(dtype).eps), "atol": 1e-7 if dtype != np.float16 else 1e-3}
    np.testing.assert_allclose(y.array, x.astype(np.float64).mean((2, 3)), **tolerance)
    wanted = np.broadcast_to(gy.astype(np.float64)[..., None, None] / 72, x.shape)
    np.testing.assert_allclose(gx.array, wanted, **tolerance)
    assert y.dtype == gx.dtype == dtype and backend.lies_as_images(gx.array) == backend.lies_as_images(v.array)
    direction = rng.standard_normal(x.shape).astype(dtype)
    (of_gy,) = dbrdist.grad([gx], [g], [direction])
    np.testing.assert_allclose(of_gy.array, direction.astype(np.float64).mean((2, 3)), **tolerance)
