"""Tests of dbrdist.models.models."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import models

X4 = np.random.default_rng(0).standard_normal((3, 4, 6, 5)).astype("f")


def test_the_sizes_of_the_models_where_none_are_given():
    x = np.zeros((1, 1, 8, 8), np.float32)
    sizes = {models.MLP: [100, 100, 10], models.LeNet: [32, 64, 128, 10]}
    for make, expected in sizes.items():
        model = make()
        model(x)
        assert [p.shape[0] for p in model.params() if p.name == "W"] == expected
        assert model.dropout == 0


def test_models_really_drop_in_training_and_not_in_evaluation():
    for model in (models.MLP((50,), 3, dropout=0.5), models.LeNet(3, dropout=0.5)):
        a, b = model(X4), model(X4)
        assert (a.array != b.array).any()
        with dbrdist.using_config("train", False):
            np.testing.assert_array_equal(model(X4).array, model(X4).array)
