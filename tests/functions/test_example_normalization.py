"""Tests of dbrdist.functions.example_normalization."""

from __future__ import annotations

import numpy as np

import dbrdist.functions as F


def test_normalized_rows_have_length_one():
    x = np.random.default_rng(0).normal(size=(5, 7)).astype("f")
    np.testing.assert_allclose((F.normalize(x).array ** 2).sum(1), 1, rtol=1e-4)
    assert F.normalize(np.full((1, 4), 300, np.float16)).array.tolist() == [[0.5] * 4]  # the squares would overflow


def test_normalize_without_axes():
    x = np.array([3.0, -4.0], "f")
    np.testing.assert_allclose(F.normalize(x, eps=1.0, axis=()).array, x / (abs(x) + 1))
    np.testing.assert_allclose(F.normalize(np.array(3.0, "f"), eps=1.0, axis=()).array, 0.75)
