"""Tests of dbrdist.models.mlp."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import models
from tests.functions import references as R

X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_mlp_follows_its_formula(dropped, ratio):
    model = models.MLP((7, 6), 3, dropout=ratio)
    h = np.asarray(X4, np.float64).reshape(3, -1)
    y = model(X4)
    layers = list(model)
    assert [layer.W.shape[0] for layer in layers] == [7, 6, 3]
    for layer in layers[:-1]:
        h = R.relu(R.linear(h, *wide(layer.W, layer.b))) * ((2 + ratio) if ratio else 1)
    close(y, R.linear(h, *wide(layers[-1].W, layers[-1].b)))
    assert dropped == [ratio] * (2 if ratio else 0)
