"""Statistics of large means and of many elements: sums of float32 lose digits, which normalization must not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.functions import recomputed
from dbrdist.kernels import dispatch, providers, table
from dbrdist.kernels.cpu import loops, onednn, onednn_normalization
from tests.each import each
from tests.kernels.provider_helpers import PROVIDERS, draw, laid_out, needs_onednn


def check_against_definition(x, axis, provider, relu, tolerance):
    """Statistics, y and what is computed of them afterwards, in units of a standard deviation."""
    kept = (slice(None), *(None,) * (x.ndim - 2))
    mean, var = (f(x, axis, dtype="d") for f in (np.mean, np.var))
    gamma, beta, eps = draw(2, x.shape[1:2]), draw(3, x.shape[1:2]), 1e-5
    expected = (x - mean[kept]) / np.sqrt(var + eps)[kept] * gamma[kept] + beta[kept]
    expected = np.maximum(expected, 0) if relu else expected
    with kernels.use(provider):
        y, *statistics, _ = kernels.bn_forward(x, gamma, beta, eps, relu, axis)
        inferred = kernels.bn_inference(x, gamma, beta, *statistics, eps, relu, axis)
        statistics += kernels.bn_statistics(x, axis)
        assert kernels.provider_of("bn_forward", x, gamma, beta, eps, axis, relu) == provider
    for a in statistics[::2]:
        np.testing.assert_allclose((a - mean) / np.sqrt(var), 0, atol=tolerance)
    for a in statistics[1::2]:
        np.testing.assert_allclose(a / var, 1, atol=tolerance)
    np.testing.assert_allclose(inferred, expected, rtol=0, atol=4 * tolerance)
    # NumPy's own y is of distances from a mean that need not be rounded
    np.testing.assert_allclose(y, expected, rtol=0, atol=4 * tolerance if provider == "onednn" else 1e-5)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(
    **{"shape, axis": [((5000, 16), (0,)), ((8, 3, 30, 20), (0, 2, 3)), ((8, 16, 40, 40), (0, 2, 3))]},
    mean=[50.0, -1e3, 1e4],
    relu=[False, True],
)
def test_large_means_of_many_elements(shape, axis, mean, relu, provider):
    """Sums of float32 lose what a large mean adds to each element; one channel alone may have it."""
    x = laid_out(draw(0, shape), "channels_last") if len(shape) == 4 else draw(0, shape)
    x[:, 1] += np.float32(mean)
    check_against_definition(x, axis, provider, relu, 1e-4 + abs(mean) * 2**-23)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_channel_that_is_not_finite_hides_no_large_mean(provider):
    x = laid_out(draw(0, (16, 4, 40, 40)), "channels_last")
    x[0, 0, 0, 0], x[1, 1, 1, 1] = np.nan, np.inf
    x[:, 3] += np.float32(1e4)
    one = np.ones(4, np.float32)
    with np.errstate(invalid="ignore"), kernels.use(provider):
        y, mean, var, _ = kernels.bn_forward(x, one, one, 1e-5)
    assert np.isnan(var[:2]).all()
    np.testing.assert_allclose(mean[2:], x[:, 2:].mean((0, 2, 3), dtype="d"), rtol=1e-7, atol=1e-5)
    np.testing.assert_allclose(var[2:], x[:, 2:].var((0, 2, 3), dtype="d"), rtol=1e-4)
    assert abs(y[:, 3].mean(dtype="d") - 1) < 2e-3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_long_rows_of_large_means(provider):
    x = np.random.default_rng(0).standard_normal((2, 100_000)) + [[0], [155110.3]]
    x, one = x.astype(np.float32), np.ones(x.shape[1], np.float32)
    expected = (x - x.mean(1, dtype="d", keepdims=True)) / x.std(1, dtype="d", keepdims=True) + 1
    with kernels.use(provider):
        y, mean, var = kernels.ln_forward(x, one, one, 1e-5)
        assert kernels.provider_of("ln_forward", x, one, one, 1e-5) == provider
    for row, tolerance in enumerate((1e-4, 0.04)):  # half a unit in the last place of the mean is 0.008
        np.testing.assert_allclose(y[row], expected[row], rtol=0, atol=tolerance)
        assert abs(mean[row] - x[row].mean(dtype="d")) < tolerance
        assert var[row] == pytest.approx(x[row].var(dtype="d"), rel=tolerance)


@needs_onednn
@each(relu=[False, True], mean=[0.0, 3.0, 1e3], shape=[(7, 16, 31, 41), (1, 3, 1, 9001), (9001, 8)])
def test_long_sums_run_in_parts(relu, mean, shape):
    x = draw(0, shape) + np.float32(mean)
    x = laid_out(x, "channels_last") if x.ndim == 4 else x
    with pytest.MonkeyPatch.context() as m:
        m.setattr(onednn_normalization, "_MOST_IN_A_SUM", 8000)
        m.setattr(onednn_normalization, "_PART", 1000)
        check_against_definition(x, (0, 2, 3)[: x.ndim - 1], "onednn", relu, 5e-6 + mean * 2**-23)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_large_means_in_16_bits(provider):
    """A channel with a large mean spoils the statistics of no other: of values less a number some digits are gone."""
    x = laid_out(draw(0, (4, 3, 32, 32), "bfloat16"), "channels_last")
    x[:, 0] += x.dtype.type(1000)
    one, wide = np.ones(3, np.float32), x.astype("d")
    with kernels.use(provider):
        mean, var = kernels.bn_forward(x, one, one, 1e-5)[1:3]
    np.testing.assert_allclose((mean - wide.mean((0, 2, 3))) / wide.std((0, 2, 3)), 0, atol=2e-6)
    np.testing.assert_allclose(var, wide.var((0, 2, 3)), rtol=2e-4)


@needs_onednn
@each(relu=[False, True], most=[8000, 1 << 20])
def test_infinities_beside_large_means_are_not_warned_of(relu, most):
    x = laid_out(draw(0, (5, 3, 40, 50)), "channels_last")
    x[0, 0, 0, 0], x[:, 1] = np.inf, x[:, 1] + np.float32(1e4)
    one = np.ones(3, np.float32)
    with pytest.MonkeyPatch.context() as m, kernels.use("onednn"), np.errstate(all="raise"):
        m.setattr(onednn_normalization, "_MOST_IN_A_SUM", most)
        m.setattr(onednn_normalization, "_PART", 1000)
        y, mean, var, _ = kernels.bn_forward(x, one, one, 1e-5, relu)
    assert np.isnan(y[:, 0]).all() and np.isnan(var[0]) and not np.isfinite(mean[0])
    np.testing.assert_allclose(mean[1:], x[:, 1:].mean((0, 2, 3), dtype="d"), rtol=1e-7, atol=1e-5)
    np.testing.assert_allclose(var[1:], x[:, 1:].var((0, 2, 3), dtype="d"), rtol=1e-4)


@pytest.mark.parametrize("provider", PROVIDERS)
@each(dtype=["float32", "bfloat16"])
def test_rows_that_lie_as_columns(provider, dtype):
    """Columns are added one after another, so that of many float32 loses digits."""
    shape, one = (2, 60_000), np.ones(60_000, np.float32)
    x, gy = ((draw(i, shape) + mean).astype(backend.as_dtype(dtype)) for i, mean in enumerate((20, 1)))
    wide, g = x.astype("d"), gy.astype("d")
    mean, s = wide.mean(1, keepdims=True), 1 / wide.std(1, keepdims=True)
    x_hat = (wide - mean) * s
    gx = s * (g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True))
    with kernels.use(provider):
        y, m, v = kernels.ln_forward(np.asfortranarray(x), one, one, 1e-9)
        found = kernels.ln_backward(np.asfortranarray(x), one, m, v, np.asfortranarray(gy), 1e-9)[0]
    rounding = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(m, mean[:, 0], rtol=1e-7)
    np.testing.assert_allclose(v, s[:, 0] ** -2, rtol=2e-6)
    np.testing.assert_allclose(y.astype("d"), x_hat + 1, rtol=rounding, atol=rounding)
    np.testing.assert_allclose(found.astype("d"), gx, rtol=rounding, atol=rounding)


try:
    onednn.library()
except onednn.Unavailable:
    pytest.skip("oneDNN is not installed", allow_module_level=True)


@each(shape=[(3, 16, 5, 7), (2, 5, 4, 3), (4, 256, 14, 14)], relu=[False, True])
def test_rows_as_images_give_the_same_statistics(shape, relu):
    x = backend.channels_last(np.random.default_rng(0).standard_normal(shape, np.float32) + np.float32(3))
    scale, shift = np.full(shape[1], 1.5, np.float32), np.full(shape[1], -0.5, np.float32)
    found = []
    for seen in (shape, onednn_normalization._rows_as_images(shape)):
        primitive, num_bytes = onednn_normalization._build_bn_forward(seen, x.dtype, 1e-5, relu)
        mean, var, y = np.empty_like(scale), np.empty_like(scale), backend.empty(shape, x.dtype)
        primitive.on(x, scale, shift, mean, var, y, *([np.zeros(num_bytes, np.uint8)] if relu else []))
        found.append((mean, var, y))
    for whole, in_rows in zip(*found):  # equal on one thread; several add up other parts
        np.testing.assert_allclose(whole, in_rows, rtol=2e-6, atol=2e-5)


@needs_onednn
@each(shape=[(1, 8), (2, 8), (3, 16)], relu=[False, True])
def test_large_means_of_few_rows(shape, relu):
    x, gamma, beta = np.full(shape, 1e6, "f"), np.full(shape[1], 2, "f"), np.arange(shape[1], dtype="f") - 3
    with kernels.use("onednn"):
        assert kernels.provider_of("bn_forward", x, gamma, beta, 1e-5, (0,), relu) == "onednn"
        y, mean, var, _ = kernels.bn_forward(x, gamma, beta, 1e-5, relu, (0,))
    assert (mean == 1e6).all() and not var.any()
    np.testing.assert_array_equal(y, np.broadcast_to(np.maximum(beta, 0) if relu else beta, shape))


def test_vectors_of_a_normalization_stay_as_they_are_now():
    providers.add_rows_of_gpus()
    gamma, beta, mean, var = (np.full(3, n, "f") for n in (1, 2, 3, 4))
    kept = dispatch.bn_vectors(None, gamma, beta, mean, var)
    there = dispatch.bn_vectors(("cuda", np.concatenate([gamma, beta])), gamma, beta, mean, var)
    gamma[:], beta[:] = 8, 9
    for found in (kept(), there()):
        assert [v.tolist() for v in found] == [[n] * 3 for n in (1, 2, 3, 4)]


@each(shape=[(4, 16, 64, 64), (2, 256, 14, 14), (3, 48, 9, 7)], coarse=[False, True], relu=[False, True])
def test_normalizations_are_repeated_bit_for_bit(shape, coarse, relu):
    x = draw(0, shape) + (np.float32(3e4) if coarse else 0)  # of which sums in float32 are too coarse
    x = backend.channels_last(x.astype(np.float32))
    x[0, 0, 0, 0], gamma, beta = -0.0, draw(1, shape[1:2]), draw(2, shape[1:2])
    beta[3], gamma[4] = 0, 0
    y, mean, var, saved = kernels.bn_forward(x, gamma, beta, 2e-5, relu)
    if not kernels.may_be_repeated(saved):
        pytest.skip("oneDNN is not available")
    again = backend.channels_last(np.empty_like(y))
    make = kernels.bn_again(saved, gamma, beta, mean, var, 2e-5, relu, (0, 2, 3))
    make(x, again)
    assert again.tobytes() == y.tobytes()
    again[...] = 0
    rows, made = recomputed.as_rows(x), recomputed.as_rows(again)
    for part in (slice(0, 5), slice(5, 6), slice(6, None)):
        make(rows[part], made[part])
    assert again.tobytes() == y.tobytes()


@each(columns=[1, 7, 8, 20, 48])
def test_normalizations_and_sums_in_one_pass_have_the_bits_of_the_steps(columns):
    (x, added), y = (
        (backend.channels_last(draw(k, (3, columns, 40, 40))) for k in (0, 1)),
        np.empty((4800, columns), "f"),
    )
    gamma, beta = draw(2, (columns,)), draw(3, (columns,))
    steps, mean, var, _ = kernels.bn_forward(x, gamma, beta, 2e-5)
    vectors = np.stack((mean, gamma / np.sqrt(var + np.float32(2e-5)), beta))
    rows = [v.transpose(0, 2, 3, 1).reshape(-1, columns) for v in (x, added, steps)]
    if kernels.rectified_sum(y, rows[0], vectors, rows[1], None):
        np.testing.assert_array_equal(y, np.maximum(rows[2] + rows[1], 0))


@each(of_two=[False, True])
def test_normalizations_and_sums_in_one_pass(of_two):
    rng = np.random.default_rng(0)
    (x, added), y = rng.standard_normal((2, 70, 48), np.float32), np.empty((70, 48), np.float32)
    vectors, others = rng.random((2, 3, 48), np.float32) - np.float32(0.2)
    x[0, :2], added[1, 0], x[2, 3], added[2, 3] = (np.nan, np.inf), np.nan, np.inf, -np.inf
    if not kernels.rectified_sum(y, x, vectors, added, others if of_two else None):
        return  # not compiled, or for another rounding than that of the loop

    def of(a, v):
        return (a - v[0]).astype(np.float64) * v[1] + v[2]

    with np.errstate(invalid="ignore"):
        total = of(x, vectors) + (of(added, others) if of_two else added)
    np.testing.assert_allclose(y, np.maximum(total, 0), rtol=1e-6, atol=2e-6)
    assert not np.signbit(y[y == 0]).any()


def test_images_in_planes_are_normalized_where_the_processor_has_no_loop(monkeypatch):
    monkeypatch.setattr(loops, "_found", SimpleNamespace(ROWS={"normalize_planes": "ivvivv"}))
    monkeypatch.setattr(loops, "_PLACES", {})
    x, ones = draw(0, (2, 8, 32, 32)) + 3, np.ones(8, "f")
    table.forget()
    try:
        y = kernels.bn_forward(x, ones, 0 * ones, 1e-5)[0]
    finally:
        table.forget()
    expected = (x - x.mean((0, 2, 3), np.float64, keepdims=True)) / x.std((0, 2, 3), np.float64, keepdims=True)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)


def test_parameters_of_a_subclass_of_numpys_array_are_taken(tmp_path):
    """The compiled loop for images in planes refused memory maps, as a file of weights is read."""
    gamma = np.memmap(tmp_path / "gamma", np.float32, "w+", shape=(8,))
    gamma[:] = np.arange(8)
    x = draw(0, (4, 8, 32, 32))
    y, mean, var, _ = kernels.bn_forward(x, gamma, gamma, 1e-5)
    expected = (x - x.mean((0, 2, 3), np.float64, keepdims=True)) / x.std((0, 2, 3), np.float64, keepdims=True)
    of_channel = np.arange(8)[:, None, None]
    np.testing.assert_allclose(y, expected * of_channel + of_channel, rtol=0, atol=1e-3)
    again = kernels.bn_inference(x, gamma, gamma, mean, var, 1e-5)
    np.testing.assert_allclose(again, y, rtol=0, atol=1e-3)
