"""Tests of images read between their pixels: values, gradients and layouts, by compiled loops and by NumPy."""

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist import Variable, kernels
from dbrdist.core.array import backend
from dbrdist.functions.sampling import Pixels
from tests.each import each
from tests.kernels.cpu.test_loops import compiled

# images, rows and columns of the result; large enough for the loops
SHAPES = [
    ((3, 5, 20, 30), (40, 50)),
    ((2, 16, 33, 31), (33, 31)),
    ((2, 1, 70, 80), (60, 90)),
    ((1, 100, 12, 12), (9, 12)),
]


def given(shape, size, seed=0):
    """Images, places of which some are beyond the border, and the gradient."""
    rng = np.random.default_rng(seed)
    x, gy = rng.standard_normal(shape), rng.standard_normal((*shape[:2], *size))
    grid = rng.uniform(-1.3, 1.3, (shape[0], 2, *size))
    return x.astype("f"), grid.astype("f"), gy.astype("f")


def exact(x, grid, gy):
    """In float64, from the sum over all pixels of max(0, 1 - |row - r|) max(0, 1 - |column - c|) x[r, c]."""
    x, gy, (height, width) = x.astype("d"), gy.astype("d"), x.shape[2:]
    # the places as they are rounded, since a pixel beside each depends on it
    at = (grid[:, ::-1] + np.float32(1)) * np.array([(height - 1) / 2, (width - 1) / 2], "f").reshape(1, 2, 1, 1)
    far = [at[:, i, ..., None].astype("d") - np.arange(n) for i, n in enumerate((height, width))]
    of_row, of_column = (np.maximum(0, 1 - np.abs(d)) for d in far)
    slope_of_row, slope_of_column = (np.where(np.abs(d) < 1, -np.sign(d), 0.0) for d in far)
    y = np.einsum("nijr,nijc,nkrc->nkij", of_row, of_column, x, optimize=True)
    gx = np.einsum("nijr,nijc,nkij->nkrc", of_row, of_column, gy, optimize=True)
    of_rows = np.einsum("nijr,nijc,nkrc,nkij->nij", slope_of_row, of_column, x, gy, optimize=True)
    of_columns = np.einsum("nijr,nijc,nkrc,nkij->nij", of_row, slope_of_column, x, gy, optimize=True)
    return y, gx, np.stack((of_columns * (width - 1) / 2, of_rows * (height - 1) / 2), 1)


def step(x, grid, gy):
    v, places = Variable(x), Variable(grid)
    y = F.spatial_transformer_sampler(v, places)
    dbrdist.backward([y], [gy])
    return y.array, v.grad, places.grad


@pytest.mark.slow
@each(case=SHAPES, layout=[np.ascontiguousarray, backend.channels_last])
def test_values_and_gradients_are_those_of_a_sum_over_all_pixels(case, layout):
    x, grid, gy = given(*case)
    for found, wanted in zip(step(layout(x), grid, layout(gy)), exact(x, grid, gy)):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(case=SHAPES, value=[0.0, np.nan, np.inf])
def test_loops_have_the_bits_of_numpys_formula(case, value):
    x, grid, gy = given(*case)
    x[0, 0, 3, 4] = gy[0, -1, 2, 1] = value
    grid[0, 0, 0, 0], grid[0, 1, 0, 1] = np.nan, np.inf
    num_channels, (height, width), num_places = x.shape[1], x.shape[2:], gy[0, 0].size
    pixels = np.zeros((len(x), height * width, num_channels), "f")
    numbers = np.zeros((len(x), 4, num_places), "f")
    sizes = num_channels * num_places, num_channels * height * width, num_channels
    assert kernels.provider_of("of_rows", "mix_pixels", (pixels, numbers, numbers), sizes) == "loops"
    ours = step(x, grid, gy)
    with kernels.use("numpy"):
        theirs = step(x, grid, gy)
    for a, b in zip(ours, theirs):
        np.testing.assert_array_equal(a, b)


@each(dtype=[np.float16, np.float32])
def test_an_infinite_pixel_reaches_the_places_beside_it_alone(dtype):
    x, grid, _ = given((2, 4, 20, 30), (40, 50))
    x[1, 2, 7, 8] = np.inf
    y = F.spatial_transformer_sampler(x.astype(dtype), grid.astype(dtype)).array
    column, row = ((grid[1, i] + 1) * (n - 1) / 2 for i, n in ((0, 30), (1, 20)))
    is_beside = (np.abs(row - 7) < 1) & (np.abs(column - 8) < 1)
    clear = (np.abs(np.abs(row - 7) - 1) > 0.1) & (np.abs(np.abs(column - 8) - 1) > 0.1)  # of float16's rounding
    assert y.dtype == dtype and is_beside.sum() > 3
    np.testing.assert_array_equal(np.isinf(y[1, 2])[clear], is_beside[clear])
    assert np.isfinite(np.delete(y[1], 2, 0)).all() and np.isfinite(y[0]).all()


def test_derivatives_of_gradients_are_those_of_differences():
    """Of the products of all gradients with fixed directions, in float64."""
    rng = np.random.default_rng(3)
    x, gy, grid = (
        rng.standard_normal((2, 3, 5, 4)),
        rng.standard_normal((2, 3, 3, 3)),
        rng.uniform(-0.9, 0.9, (2, 2, 3, 3)),
    )
    directions = [rng.standard_normal(a.shape) for a in (x, grid, gy)]

    def gradients(x, grid, gy):
        vs = [Variable(a) for a in (x, grid, gy)]
        y = F.spatial_transformer_sampler(vs[0], vs[1])
        firsts = dbrdist.grad([F.sum(y * vs[2])], vs, enable_double_backprop=True)
        return vs, F.sum(firsts[0] * directions[0]) + F.sum(firsts[1] * directions[1]) + F.sum(
            firsts[2] * directions[2]
        )

    vs, total = gradients(x, grid, gy)
    found = [v.array for v in dbrdist.grad([total], vs)]
    step = 1e-6
    for i, a in enumerate((x, grid, gy)):
        moved = rng.standard_normal(a.shape)
        ends = []
        for sign in (1, -1):
            arrays = [x, grid, gy]
            arrays[i] = a + sign * step * moved
            ends.append(float(gradients(*arrays)[1].array))
        np.testing.assert_allclose((found[i] * moved).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-6)


def test_loops_are_not_asked_for_more_pixels_than_their_numbers_reach(monkeypatch):
    monkeypatch.setattr(kernels, "of_rows", lambda *_: pytest.fail("numbers of 32 bits were asked for"))
    x, w = np.zeros((1, 4, 3), "f"), np.zeros((1, 4, 5), "f")
    assert Pixels(np.zeros((1, 4, 5), int), 1 << 31).by_loop("mix_pixels", 3, x, w) is None
