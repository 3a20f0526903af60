"""Tests of dbrdist.models.lenet."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import models
from tests.functions import references as R


def close(y, expected, tolerance=1e-5):
    expected = np.asarray(expected)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y.array, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_lenet_follows_its_formula(dropped, ratio):
    model = models.LeNet(3, (2, 5), 7, dropout=ratio)
    x = np.random.default_rng(0).standard_normal((2, 1, 9, 7)).astype("f")
    y, h = model(x), np.asarray(x, np.float64)
    assert [p.shape[0] for p in (model.conv1.W, model.conv2.W, model.fc1.W, model.fc2.W)] == [2, 5, 7, 3]
    for conv in (model.conv1, model.conv2):
        assert conv.W.shape[2:] == (3, 3)
        h = R.max_pooling_2d(R.relu(R.convolution_2d(h, *wide(conv.W, conv.b), pad=1)), 2)
    h = R.relu(R.linear(h.reshape(2, -1), *wide(model.fc1.W, model.fc1.b))) * ((2 + ratio) if ratio else 1)
    close(y, R.linear(h, *wide(model.fc2.W, model.fc2.b)))
    assert dropped == [ratio] * (1 if ratio else 0)
