"""Tests of dbrdist.functions.whitening."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import functions as F


def ones_of(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_eigenvectors_that_are_not_found_are_not_numbers(monkeypatch):
    from dbrdist.functions import whitening

    def fails(a):
        raise np.linalg.LinAlgError("Eigenvalues did not converge")

    monkeypatch.setattr(np.linalg, "eigh", fails)
    values, vectors = whitening._eigen(ones_of(2, 3, 3))
    assert values.shape == (2, 3) and vectors.shape == (2, 3, 3)
    assert np.isnan(values).all() and np.isnan(vectors).all() and values.dtype == vectors.dtype == np.float32


X = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def test_whitened_channels_are_not_correlated():
    mixed = np.einsum("ij,njhw->nihw", np.random.default_rng(3).standard_normal((4, 4)), X) + 5
    y = F.decorrelated_batch_normalization(mixed.astype("d"), groups=1, eps=1e-9).array
    rows = np.moveaxis(y, 1, -1).reshape(-1, 4)
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-10)
    np.testing.assert_allclose(rows.T @ rows / len(rows), np.eye(4), atol=1e-6)


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


def test_integers_scale_renormalized_batches():
    """The corrections were rounded to gamma's type, and 0 where they are below 1."""
    x, gamma = np.random.default_rng(0).standard_normal((6, 2)), np.array([2, 3])
    y, wanted = (
        F.batch_renormalization(x, g, np.zeros(2), 3.0, 5.0, running_mean=np.zeros(2), running_var=np.ones(2)).array
        for g in (gamma, gamma.astype(float))
    )
    np.testing.assert_array_equal(y, wanted)
    assert np.abs(y).min() > 0
