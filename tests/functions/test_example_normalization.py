"""Tests of dbrdist.functions.example_normalization."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
import dbrdist.functions as F
from dbrdist.core.array import backend
from tests.each import each
from tests.kernels.cpu.test_loops import compiled


def test_normalized_rows_have_length_one():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype("f")
    np.testing.assert_allclose((F.normalize(x).array ** 2).sum(1), 1, rtol=1e-4)
    assert F.normalize(np.full((1, 4), 300, np.float16)).array.tolist() == [[0.5] * 4]  # the squares would overflow


def test_normalize_without_axes():
    x = np.array([3.0, -4.0], "f")
    np.testing.assert_allclose(F.normalize(x, eps=1.0, axis=()).array, x / (abs(x) + 1))
    np.testing.assert_allclose(F.normalize(np.array(3.0, "f"), eps=1.0, axis=()).array, 0.75)


def given(shape, middle=0.0):
    rng = np.random.default_rng(0)
    x, gy = (rng.standard_normal(shape) * 2 + middle).astype("f"), rng.standard_normal(shape).astype("f")
    return x, rng.uniform(0.5, 2, shape[1]).astype("f"), rng.standard_normal(shape[1]).astype("f"), gy


def in_float64(x, gamma, beta, gy, groups, eps):
    """Group normalization and the gradients of x, gamma and beta."""
    shape, rest = (1, x.shape[1], *(1,) * (x.ndim - 2)), (0, *range(2, x.ndim))
    rows, g = (v.astype("d").reshape(len(x), groups, -1) for v in (x, gy * gamma.astype("d").reshape(shape)))
    root = np.sqrt(rows.var(2, keepdims=True) + eps)
    hat = (rows - rows.mean(2, keepdims=True)) / root
    gx = (g - g.mean(2, keepdims=True) - hat * (g * hat).mean(2, keepdims=True)) / root
    hat = hat.reshape(x.shape)
    y = hat * gamma.astype("d").reshape(shape) + beta.astype("d").reshape(shape)
    return y, gx.reshape(x.shape), (gy * hat).sum(rest), gy.astype("d").sum(rest)


IMAGES = [(4, 6, 30, 30), (16, 64, 7, 7), (300, 96), (16, 32, 50), (4, 32, 3, 4, 7)]


@compiled
@each(shape=IMAGES, groups=[1, 2, "each"], middle=[0.0, 3.0, 1e3])
def test_groups_by_loops_are_near_those_of_float64(shape, groups, middle):
    x, gamma, beta, gy = given(shape, middle)
    groups = shape[1] if groups == "each" and len(shape) > 2 else 3 if groups == "each" else groups
    v = [dbrdist.Variable(a) for a in (x, gamma, beta)]
    y = F.group_normalization(v[0], groups, v[1], v[2], 1e-3)
    assert y.creator_node.label == "GroupNormalization"
    dbrdist.backward([y], [gy])
    size = 1e-6 + middle * 1e-7
    for found, wanted in zip((y.array, *[a.grad for a in v]), in_float64(x, gamma, beta, gy, groups, 1e-3)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=size * max(1, np.abs(wanted).max()) * 2)


@compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@each(value=[np.nan, np.inf, -np.inf], shape=[(4, 6, 30, 30), (300, 96)])
def test_what_is_not_finite_makes_nan_of_its_group_alone(value, shape):
    x, gamma, beta, gy = given(shape)
    clean = F.group_normalization(x, 3, gamma, beta).array.copy()
    x[1, shape[1] // 2] = value
    v = dbrdist.Variable(x)
    y = F.group_normalization(v, 3, gamma, beta)
    dbrdist.backward([y], [gy])
    spoilt = np.zeros(shape, bool)
    spoilt[1, shape[1] // 3 : shape[1] // 3 * 2] = True
    np.testing.assert_array_equal(np.isnan(y.array), spoilt)
    np.testing.assert_array_equal(np.isnan(v.grad), spoilt)
    np.testing.assert_array_equal(y.array[~spoilt], clean[~spoilt])


@compiled
def test_groups_of_other_layouts_and_types_go_by_the_formula():
    x, gamma, beta, _ = given((4, 6, 30, 30))
    others = [backend.channels_last(x), x[:, :, ::2], x.astype("d"), x[:1, :, :4, :4].copy()]
    for other in others:
        vectors = gamma.astype(other.dtype), beta.astype(other.dtype)
        v = dbrdist.Variable(other)
        y = F.group_normalization(v, 3, *vectors)
        assert y.creator_node.label != "GroupNormalization"
        dbrdist.backward([y], [np.ones_like(other)])
        wanted = in_float64(other, *vectors, np.ones(other.shape), 3, 1e-5)
        np.testing.assert_allclose(y.array, wanted[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(v.grad, wanted[1], rtol=1e-4, atol=1e-5)


@compiled
def test_second_derivatives_of_groups_are_those_of_the_formula():
    found = []
    for dtype in ("f", "d"):  # of float32 by loops, of float64 by the formula
        x, gamma, beta, gy = [dbrdist.Variable(a.astype(dtype)) for a in given((16, 6, 10, 10))]
        y = F.group_normalization(x, 3, gamma, beta)
        (gx,) = dbrdist.grad([y], [x], [gy], enable_double_backprop=True)
        F.sum(gx * gx * x).backward()
        found.append((gx.array, x.grad, gamma.grad, gy.grad))
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
