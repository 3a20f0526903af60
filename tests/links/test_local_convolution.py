"""Tests of dbrdist.links.local_convolution."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, initializers, training
from dbrdist import functions as F
from dbrdist import links as L
from tests.each import each
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close_to(y, expected, tolerance=1e-4):
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


WRONG = [
    (lambda: F.batch_renormalization(X, np.ones(4, "f"), np.ones(4, "f"), 1, 0), "running_mean: expected an array"),
    (
        lambda: F.batch_renormalization(
            X, np.ones(4, "f"), np.ones(4, "f"), 0.5, 0, 1e-5, np.ones(4, "f"), np.ones(4, "f")
        ),
        "rmax, dmax: expected rmax from 1 on",
    ),
    (lambda: F.decorrelated_batch_normalization(X, groups=3), "groups: expected a divisor of the 4 channels"),
    (lambda: F.decorrelated_batch_normalization(X[0, 0, 0], groups=1), "x: expected at least 2 axes"),
    (lambda: F.decorrelated_batch_normalization(X.astype(int), groups=2), "x: expected a floating type"),
    (
        lambda: F.decorrelated_batch_normalization(X, groups=2, running_mean=np.ones(4)),
        r"running_mean: expected shape \(2, 2\)",
    ),
    (
        lambda: F.fixed_decorrelated_batch_normalization(X, np.ones((2, 2), "f"), np.ones((4, 4), "f"), 2),
        r"projection: expected shape \(2, 2, 2\)",
    ),
    (lambda: L.DecorrelatedBatchNormalization(4), "groups: expected a divisor of size=4, got 16"),
    (lambda: L.LocalConvolution2D(3, 4, 5), "ksize: expected a number or a pair"),
    (lambda: L.LocalConvolution2D(3, 4, 2, 3), r"in_size: expected at least the window \(3, 3\)"),
    (lambda: L.LocalConvolution2D(3, 4, (6, 5), 3)(X), "W: expected shape"),
    (lambda: initializers.UpsamplingDeconvFilter("cubic"), "interpolation: expected 'linear', got 'cubic'"),
    (lambda: initializers.UpsamplingDeconvFilter()(np.zeros((3, 2, 4, 4))), "array: expected shape"),
    (lambda: initializers.DownsamplingConvFilter()(np.zeros((3, 3, 4, 3))), "array: expected shape"),
    (lambda: initializers.DownsamplingConvFilter()(np.zeros((3, 3))), "array: expected shape"),
]


@pytest.mark.parametrize("call, message", WRONG)
def test_wrong_arguments_are_refused_in_words(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@each(options=[{}, {"stride": (2, 1)}, {"nobias": True}, {"in_size": (6, 5)}, {"initialW": 0.5, "initial_bias": 2.0}])
def test_local_convolution(options):
    link = L.LocalConvolution2D(4, 3, ksize=(3, 2), **options)
    assert link.W.is_initialized == ("in_size" in options)
    y = link(X)
    assert (link.b is None) == options.get("nobias", False)
    close_to(y, R.local_convolution_2d(*wide(X, link.W, link.b), options.get("stride", 1)))
    if "initialW" not in options:
        np.testing.assert_allclose(link.W.array.std(), 1 / np.sqrt(4 * 3 * 2), rtol=0.1)


def test_deformable_convolution_starts_as_a_plain_one():
    link = L.DeformableConvolution2D(None, 3, (3, 2), (2, 1), (1, 2), deform_initial_bias=1.0)
    y = link(X)
    plain = R.convolution_2d(*wide(X, link.deform_conv.W, link.deform_conv.b), stride=(2, 1), pad=(1, 2))
    close_to(y, plain)
    assert link.offset_conv.W.shape == (12, 4, 3, 2)
    names = sorted(name for name, _ in link.namedparams())
    assert names == ["/deform_conv/W", "/deform_conv/b", "/offset_conv/W", "/offset_conv/b"]


def test_deformable_convolution_with_values_of_ones_own():
    link = L.DeformableConvolution2D(
        4, 3, 2, offset_nobias=True, offset_initialW=initializers.Normal(0.3), deform_nobias=True, deform_initialW=0.5
    )
    assert link.offset_conv.b is None
    assert link.deform_conv.b is None
    offset = R.convolution_2d(*wide(X, link.offset_conv.W))
    y = link(Variable(X))
    close_to(y, R.deformable_convolution_2d_sampler(*wide(X), offset, *wide(link.deform_conv.W)), 1e-3)
    F.sum(y * y).backward()
    assert np.abs(link.offset_conv.W.grad).max() > 0
    L.DeformableConvolution2D(4, 3, 2, offset_initial_bias=0.5)(X)


def test_names_in_chainers_places():
    assert dbrdist.Initializer is initializers.Initializer
    assert training.IntervalTrigger(2, "epoch").period == 2
    assert issubclass(initializers.UpsamplingDeconvFilter, dbrdist.Initializer)
