"""Renormalization, whitening, local and deformable convolution, filters that interpolate."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Variable, initializers, serializers, training
from dbrdist import functions as F
from dbrdist import links as L
from tests.each import each
from tests.functions import references as R

X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close(y, expected, tolerance=1e-4):
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


def test_renormalization_follows_its_running_statistics():
    link = L.BatchRenormalization(
        4, 1.5, 0.25, 0.75, 0.1, initial_gamma=2, initial_beta=1, initial_avg_mean=0.5, initial_avg_var=3
    )
    mean, var = np.full(4, 0.5), np.full(4, 3.0)
    for _ in range(2):
        expected = R.batch_renormalization(*wide(X, link.gamma, link.beta), 1.5, 0.25, 0.1, mean, var, 0.75, True)
        close(link(X), expected)
        np.testing.assert_allclose(link.avg_mean, mean, rtol=1e-4)
        np.testing.assert_allclose(link.avg_var, var, rtol=1e-4)
    with dbrdist.using_config("train", False):
        close(link(X), R.fixed_batch_renormalization(*wide(X, link.gamma, link.beta), mean, var, 0.1))


def test_renormalization_without_bounds_to_correct_is_batch_normalization():
    plain, link = L.BatchNormalization(4), L.BatchRenormalization(4)
    np.testing.assert_allclose(link(X).array, plain(X).array, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(link.avg_var, plain.avg_var)
    assert sorted(name for name, _ in link.namedparams()) == ["/beta", "/gamma"]
    assert list(L.BatchRenormalization(4, use_gamma=False, use_beta=False).params()) == []


def test_corrections_are_constants_for_gradients():
    x, gamma, beta = Variable(X.astype("d")), Variable(np.arange(1.0, 5)), Variable(np.zeros(4))
    mean, var = np.full(4, 0.2), np.full(4, 1.5)
    gy = np.random.default_rng(1).standard_normal(X.shape)
    y = F.batch_renormalization(x, gamma, beta, 9, 9, 1e-3, mean, var)
    y.grad = gy
    y.backward()
    deviation = np.sqrt(1.5 + 1e-3)
    r = np.sqrt(X.astype("d").var((0, 2, 3)) + 1e-3) / deviation
    d = (X.astype("d").mean((0, 2, 3)) - 0.2) / deviation
    plain = Variable(X.astype("d"))
    scale, shift = Variable(gamma.array * r), Variable(gamma.array * d)
    z = F.batch_normalization(plain, scale, shift, eps=1e-3)
    z.grad = gy
    z.backward()
    np.testing.assert_allclose(y.array, z.array, rtol=1e-10)
    np.testing.assert_allclose(x.grad, plain.grad, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(gamma.grad, scale.grad * r + shift.grad * d, rtol=1e-8)
    np.testing.assert_allclose(beta.grad, shift.grad, rtol=1e-10)


def test_whitened_channels_are_not_correlated():
    mixed = np.einsum("ij,njhw->nihw", np.random.default_rng(3).standard_normal((4, 4)), X) + 5
    y = F.decorrelated_batch_normalization(mixed.astype("d"), groups=1, eps=1e-9).array
    rows = np.moveaxis(y, 1, -1).reshape(-1, 4)
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(4), atol=1e-6)


def test_whitening_as_a_link(tmp_path):
    link = L.DecorrelatedBatchNormalization(4, 2, 0.75, 0.1)
    np.testing.assert_array_equal(link.avg_projection, np.tile(np.eye(2), (2, 1, 1)))
    mean, projection = np.zeros((2, 2)), np.tile(np.eye(2), (2, 1, 1))
    options = {"groups": 2, "eps": 0.1, "running_mean": mean, "running_projection": projection, "decay": 0.75}
    for _ in range(2):
        close(link(X), R.decorrelated_batch_normalization(*wide(X), **options))
        np.testing.assert_allclose(link.avg_mean, mean, atol=1e-5)
        np.testing.assert_allclose(link.avg_projection, projection, atol=1e-5)
    serializers.save_npz(tmp_path / "a.npz", link)
    other = L.DecorrelatedBatchNormalization(4, 2)
    serializers.load_npz(tmp_path / "a.npz", other)
    with dbrdist.using_config("train", False):
        close(other(X), R.fixed_decorrelated_batch_normalization(*wide(X), mean, projection, 2))


def test_finetuning_and_repetition_of_whitening():
    link = L.DecorrelatedBatchNormalization(4, 1)
    link(X + 7)
    link.start_finetuning()
    batches = [X, X + 1, 2 * X]
    for x in batches:
        F.sum(F.forget(lambda v: link(v, finetune=True), Variable(x))).backward()
    np.testing.assert_allclose(link.avg_mean[0], np.mean([x.mean((0, 2, 3)) for x in batches], 0), rtol=1e-3, atol=1e-5)
    assert link.N == 3


def test_equal_variances_have_a_derivative():
    """Equal eigenvalues, for which eigenvectors have none."""
    x = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    dbrdist.gradient_check.check_backward(
        lambda v: F.decorrelated_batch_normalization(v, groups=1), x, np.arange(8.0).reshape(4, 2), rtol=1e-6, atol=1e-7
    )


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_goes_through_whitening():
    x = X.copy()
    x[0, 0, 0, 0] = np.nan
    y = F.decorrelated_batch_normalization(x, groups=2).array
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2:]).all() or np.isnan(y[:, 2:]).all()  # LAPACK gives up on all matrices of a batch at once


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
    close(y, R.local_convolution_2d(*wide(X, link.W, link.b), options.get("stride", 1)))
    if "initialW" not in options:
        np.testing.assert_allclose(link.W.array.std(), 1 / np.sqrt(4 * 3 * 2), rtol=0.1)


def test_deformable_convolution_starts_as_a_plain_one():
    link = L.DeformableConvolution2D(None, 3, (3, 2), (2, 1), (1, 2), deform_initial_bias=1.0)
    y = link(X)
    plain = R.convolution_2d(*wide(X, link.deform_conv.W, link.deform_conv.b), stride=(2, 1), pad=(1, 2))
    close(y, plain)
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
    close(y, R.deformable_convolution_2d_sampler(*wide(X), offset, *wide(link.deform_conv.W)), 1e-3)
    F.sum(y * y).backward()
    assert np.abs(link.offset_conv.W.grad).max() > 0
    L.DeformableConvolution2D(4, 3, 2, offset_initial_bias=0.5)(X)


@each(size=[1, 2, 3, 4, 5])
def test_upsampling_filters_interpolate(size):
    """A constant stays one, and a slope stays one inside."""
    step = (size + 1) // 2
    link = L.Deconvolution2D(3, 3, size, step, initialW=initializers.UpsamplingDeconvFilter())
    y = link(np.ones((1, 3, 8, 8), np.float32)).array
    np.testing.assert_allclose(y[:, :, size:-size, size:-size], 1, rtol=1e-6)
    grouped = np.zeros((3, 1, size, size), np.float32)
    initializers.UpsamplingDeconvFilter()(grouped)
    np.testing.assert_array_equal(grouped[:, 0], link.W.array[[0, 1, 2], [0, 1, 2]])
    assert not link.W.array[0, 1].any()


@each(size=[1, 2, 3, 4, 5], ndim=[1, 2, 3])
def test_downsampling_filters_are_means(size, ndim):
    W = np.zeros((2, 2, *(size,) * ndim))
    initializers.DownsamplingConvFilter()(W)
    np.testing.assert_allclose(W.sum(tuple(range(2, ndim + 2))), np.eye(2), rtol=1e-12)
    np.testing.assert_array_equal(W, np.flip(W, tuple(range(2, ndim + 2))))
    assert initializers.DownsamplingConvFilter("linear", "float64").dtype == np.float64


def test_names_in_chainers_places():
    assert dbrdist.Initializer is initializers.Initializer
    assert training.IntervalTrigger(2, "epoch").period == 2
    assert issubclass(initializers.UpsamplingDeconvFilter, dbrdist.Initializer)
