"""Tests of dbrdist.kernels.cpu.onednn_bfloat16."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import dbrdist
from dbrdist import kernels
from dbrdist.core.array import backend
from dbrdist.kernels import ConvGeometry
from dbrdist.kernels.cpu import onednn, onednn_bfloat16
from dbrdist.kernels.cpu.onednn_bfloat16 import also_in_bfloat16, narrow
from tests.each import each
from tests.kernels.provider_helpers import needs_onednn
from tests.processor import MULTIPLIES_BFLOAT16

BF16 = backend.as_dtype("bfloat16")
pytestmark = needs_onednn
multiplies = pytest.mark.skipif(not MULTIPLIES_BFLOAT16, reason="the processor has no kernels for bfloat16")
rng = np.random.default_rng(0)


def rounded(a):
    return a.astype(BF16).astype(np.float64)


@pytest.fixture
def in_bf16(monkeypatch):
    """The switch, where tests of the kernels run whatever the processor has instructions for."""
    monkeypatch.setattr(onednn, "has_bfloat16", lambda: True)
    with dbrdist.using_config("float32_products", "bf16"), kernels.use("onednn"):
        yield


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


# ---- rounding


@multiplies
@each(a=[normal(7, 5), normal(5, 7).T, normal(9), normal(8, 6)[:, 1:4], normal(0, 3), normal(2, 3, 4),
         backend.channels_last(normal(2, 3, 4, 5)), normal(2, 3, 4, 5)])  # fmt: skip
def test_arrays_are_rounded_to_the_nearest_and_lie_as_they_did(a):
    found = narrow(a)
    np.testing.assert_array_equal(found.astype("f"), a.astype(BF16).astype("f"))
    if a.ndim == 2 and a.size:
        assert found.strides[0] == 2 or found.strides[1] == 2
        assert found.flags.f_contiguous == a.flags.f_contiguous
    if a.ndim == 4:
        assert backend.is_channels_last(found)


@multiplies
def test_what_is_not_finite_stays_so():
    a = np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, 0.0, -0.0, 1.0], "f")
    found = narrow(a).astype("f")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, a.astype(BF16).astype("f"))
    assert np.signbit(found[6])


# ---- products


def check_product(run, exact, of_rounded):
    """``run`` gives float32, as near to the product of rounded operands as sums in float32 are, and with the switch off
    the product of the operands themselves."""
    found = run()
    assert found.dtype == np.float32
    scale = np.abs(exact).max()
    assert np.abs(found - of_rounded).max() <= 2e-6 * scale
    with dbrdist.using_config("float32_products", "float32"):
        assert np.abs(run() - exact).max() <= 2e-6 * scale
    assert np.abs(exact - of_rounded).max() > 1e-4 * scale  # so the two differ


@multiplies
@each(turned=[(False, False), (False, True), (True, False), (True, True)], into=[False, True])
def test_products_of_rounded_matrices(turned, into, in_bf16):
    a, b = (normal(*shape[::-1]).T if t else normal(*shape) for t, shape in zip(turned, ((130, 90), (90, 70))))
    out = np.empty((130, 70), "f") if into else None
    double = a.astype(np.float64) @ b
    check_product(lambda: kernels.matmul(a, b, out), double, rounded(a) @ rounded(b))
    if into:
        assert kernels.matmul(a, b, out) is out


@multiplies
@each(has_bias=[False, True])
def test_linear_of_rounded_matrices(has_bias, in_bf16):
    x, W, b = normal(128, 64), normal(96, 64), normal(96) if has_bias else None
    shift = 0 if b is None else b
    exact, of_rounded = x.astype(np.float64) @ W.T + shift, rounded(x) @ rounded(W).T + shift
    check_product(lambda: kernels.linear(x, W, b), exact, of_rounded)


@multiplies
@each(is_often=[False, True])
def test_packed_matrices_are_rounded_and_added_up_in_float32(is_often, in_bf16):
    a, b, before = normal(20, 130), normal(130, 260), normal(20, 260)

    def run():
        out = before.copy()
        kernels.packed(b, 20, is_often)(a, out)
        return out

    check_product(run, before + a.astype(np.float64) @ b, before + rounded(a) @ rounded(b))


CONVOLUTIONS = [
    ((2, 32, 12, 12), (48, 32, 3, 3), ConvGeometry(1, 1, 1, 1)),
    ((2, 32, 12, 12), (64, 32, 3, 3), ConvGeometry(2, 2, 1, 1)),
    ((4, 64, 10, 10), (96, 64, 1, 1), ConvGeometry()),
    ((2, 32, 12, 10), (64, 16, 3, 3), ConvGeometry(1, 1, 1, 1, groups=2)),
    ((4, 32, 12, 12), (256, 32, 1, 1), ConvGeometry(2, 2)),
]


@multiplies
@each(case=CONVOLUTIONS)
def test_convolutions_of_rounded_images(case, in_bf16):
    shape, W_shape, geometry = case
    x, W = backend.channels_last(normal(*shape)), normal(*W_shape)
    with kernels.use("numpy"), dbrdist.using_config("float32_products", "float32"):
        y = kernels.conv_forward(x, W, None, geometry)
    gy = backend.channels_last(normal(*y.shape))
    runs = {
        "forward": lambda x, W, gy: kernels.conv_forward(x, W, None, geometry),
        "data": lambda x, W, gy: kernels.conv_backward_data(gy, W, x.shape, geometry),
        "weights": lambda x, W, gy: kernels.conv_backward_weight(x, gy, W.shape, geometry, W.dtype),
    }
    for run in runs.values():
        with kernels.use("numpy"):
            exact = run(*(a.astype(np.float64) for a in (x, W, gy)))
            of_rounded = run(*(rounded(a) for a in (x, W, gy)))
        check_product(lambda run=run: run(x, W, gy), exact, of_rounded)


@multiplies
@each(change=["channels", "columns", "pixels", "outputs"])
def test_convolutions_that_gain_nothing_or_might_be_spoilt_stay_in_float32(change, in_bf16):
    shape, out = [2, 32, 12, 12], 64
    if change == "channels":
        shape[1] = 33
    elif change == "columns":
        shape[3] = 13
    elif change == "pixels":
        shape[2:] = 4, 4
    else:
        out = 5
    is_product = change in ("pixels", "outputs")
    x, W = backend.channels_last(normal(*shape)), normal(out, shape[1], *((1, 1) if is_product else (3, 3)))
    geometry = ConvGeometry() if is_product else ConvGeometry(1, 1, 1, 1)
    found = kernels.conv_forward(x, W, None, geometry)
    with dbrdist.using_config("float32_products", "float32"):
        same = kernels.conv_forward(x, W, None, geometry)
        gW = kernels.conv_backward_weight(x, same, W.shape, geometry, W.dtype)
    if change != "columns":
        np.testing.assert_array_equal(found, same)
    if change != "pixels":  # a product of few pixels, which is one of matrices
        np.testing.assert_array_equal(kernels.conv_backward_weight(x, same, W.shape, geometry, W.dtype), gW)


@multiplies
def test_nan_and_infinity_reach_the_outputs_that_see_them(in_bf16):
    a, b = normal(128, 64), normal(64, 64)
    a[3, 5], a[7, 2] = np.nan, np.inf
    y = kernels.matmul(a, b)
    assert np.isnan(y[3]).all() and not np.isfinite(y[7]).any()
    assert np.isfinite(np.delete(y, [3, 7], 0)).all()


def test_other_types_and_the_switch_of_another_thread_are_left_alone(in_bf16):
    a = rng.standard_normal((128, 64))
    np.testing.assert_array_equal(kernels.matmul(a, a.T), a @ a.T)
    planned = []

    def planner(*arguments, **how):
        planned.append((arguments, how))
        return lambda *arguments: None

    plan = also_in_bfloat16(planner, 0, 1)
    for others in ((a, a), (normal(4, 4), a), ([1.0], normal(4, 4))):
        plan(*others)
        assert planned.pop() == (others, {})
    x = normal(4, 4)
    also_in_bfloat16(planner, 0, unless=lambda x: True)(x)
    assert planned.pop() == ((x,), {})
    with dbrdist.using_config("float32_products", "float32"):
        plan(x, x)
    assert planned.pop() == ((x, x), {})


def test_the_plan_for_float32_serves_where_there_is_none_for_bfloat16(in_bf16, monkeypatch):
    monkeypatch.setattr(onednn_bfloat16, "narrow", lambda a: a)

    def planner(x, made=None):
        if made is not None:
            raise onednn.Unsupported("bfloat16")
        return lambda x: "float32"

    x = normal(2, 2)
    assert also_in_bfloat16(planner, 0)(x)(x) == "float32"


# ---- processors without such instructions


def test_one_line_says_that_the_switch_has_no_effect(monkeypatch):
    onednn_bfloat16._say_once.cache_clear()
    monkeypatch.setattr(onednn, "has_bfloat16", lambda: False)
    a = normal(128, 130)
    with dbrdist.using_config("float32_products", "bf16"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = kernels.matmul(a, a.T)
        kernels.matmul(a, a.T.copy())
    onednn_bfloat16._say_once.cache_clear()
    [one] = caught
    assert "has no effect here" in str(one.message) and "no instructions for bfloat16" in str(one.message)
    np.testing.assert_array_equal(found, kernels.matmul(a, a.T))


def test_the_line_names_a_missing_library(monkeypatch):
    def missing():
        raise onednn.Unavailable("not there")

    onednn_bfloat16._say_once.cache_clear()
    monkeypatch.setattr(onednn, "has_bfloat16", missing)
    says_so = pytest.warns(dbrdist.errors.UsageWarning, match="oneDNN is not available")
    with dbrdist.using_config("float32_products", "bf16"), says_so, pytest.raises(onednn.Unavailable):
        also_in_bfloat16(lambda *a: None, 0)(normal(2, 2))
    onednn_bfloat16._say_once.cache_clear()


@each(value=["bfloat16", "medium", None, True, 16])
def test_values_that_the_switch_does_not_have(value):
    for config in (dbrdist.config, dbrdist.global_config):
        with pytest.raises(ValueError, match=r"config\.float32_products: expected one of"):
            config.float32_products = value
    assert dbrdist.config.float32_products == "float32"
