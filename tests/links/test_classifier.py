"""Tests of dbrdist.links.classifier."""

from __future__ import annotations

import numpy as np
import pytest

import dbrdist
from dbrdist import Reporter
from dbrdist import functions as F
from dbrdist import links as L
from tests.functions import references as R

X2 = np.random.default_rng(1).standard_normal((5, 4)).astype("f")


def wide(*arrays):
    return [None if a is None else np.asarray(getattr(a, "array", a), np.float64) for a in arrays]


def test_a_classifier_uses_its_functions():
    t = np.array([0, 1, 2, 0, 1])
    predictor = L.Linear(4, 3)
    model = L.Classifier(predictor, lossfun=lambda y, t: F.sum(y) * 2.0, accfun=lambda y, t: F.max(y))
    y = R.linear(*wide(X2, predictor.W, predictor.b))
    np.testing.assert_allclose(model(X2, t).array, 2 * y.sum(), rtol=1e-4)
    np.testing.assert_allclose(model.accuracy.array, y.max(), rtol=1e-5)
    model = L.Classifier(predictor, accfun=None)
    np.testing.assert_allclose(model(X2, t).array, R.softmax_cross_entropy(y, t), rtol=1e-5)
    assert model.accuracy is None
    assert model.y.shape == (5, 3)


def test_classifier_reports_loss_and_accuracy():
    model = L.Classifier(L.Linear(3, 2))
    x, t = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), np.array([0, 1, 0, 1, 1, 0])
    reporter = Reporter()
    reporter.add_observer("main", model)
    with reporter:
        loss = model(x, t)
    assert model.y.shape == (6, 2)
    assert reporter.observation["main/loss"] == loss.array
    expected = (model.y.array.argmax(1) == t).mean()
    assert reporter.observation["main/accuracy"] == pytest.approx(expected)
    assert model.loss is loss


def test_classifier_finds_its_label_by_position_or_name():
    x, t = np.ones((2, 3), np.float32), np.array([0, 1])
    predictor = L.Linear(3, 2)
    first = L.Classifier(predictor, label_key=0)(t, x)
    named = L.Classifier(predictor, label_key="t")(x, t=t)
    assert first.array == named.array
    with pytest.raises(ValueError, match="Label key 't' is not found: expected a label as that keyword"):
        L.Classifier(predictor, label_key="t")(x)
    with pytest.raises(ValueError, match="Label key 3 is out of bounds: expected a label at that position, got 2"):
        L.Classifier(predictor, label_key=3)(x, t)


def test_classifier_without_accuracy():
    model = L.Classifier(L.Linear(3, 2))
    model.compute_accuracy = False
    model(np.ones((2, 3), np.float32), np.array([0, 1]))
    assert model.accuracy is None


def test_a_predictor_without_inputs():
    class Always(dbrdist.Link):
        def forward(self):
            return np.array([[0.0, 1.0]], np.float32)

    loss = L.Classifier(Always(), label_key=0)(np.array([1]))
    assert float(loss.array) == pytest.approx(np.log(1 + np.exp(-1.0)))
    for kind in (TypeError, ValueError):
        with pytest.raises(kind, match=r"expected examples \(input, label\), got an array of shape \(2,\) alone"):
            L.Classifier(L.Linear(3, 2))(np.array([0, 1]))
