"""Soft labels through loss, accuracy and a run."""

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Variable
from dbrdist.cli.task import Task
from dbrdist.core.reporter import Reporter
from dbrdist.links import Linear


def soft(n, k, dtype=np.float32):
    weights = np.random.default_rng(1).random((n, k))
    return (weights / weights.sum(1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_loss_smooths_soft_labels_as_it_does_hard_ones(smoothing, dtype):
    x = np.random.default_rng(0).standard_normal((6, 5)).astype(dtype)
    q = soft(6, 5, dtype)
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    expected = -((q * (1 - smoothing) + smoothing / 5) * logs).sum(1).mean()
    loss = F.softmax_cross_entropy(Variable(x), q, label_smoothing=smoothing)
    np.testing.assert_allclose(float(loss.array), expected, rtol=1e-5)
    hard = np.array([0, 4, 2, 1, 1, 3], np.int32)
    np.testing.assert_allclose(
        float(F.softmax_cross_entropy(x, np.eye(5, dtype=dtype)[hard], label_smoothing=smoothing).array),
        float(F.softmax_cross_entropy(x, hard, label_smoothing=smoothing).array),
        rtol=1e-5,
    )


def test_the_accuracy_takes_the_greatest_weight():
    y = np.array([[0.1, 0.9, 0], [3, 1, 2], [0, 1, 2], [5, 1, 0]], np.float32)
    t = np.array([[0.4, 0.6, 0], [0.3, 0.3, 0.4], [0, 0, 1], [1, 0, 0]], np.float32)
    assert float(F.accuracy(y, t).array) == 0.75
    pixels, weights = y.reshape(1, 3, 4), np.moveaxis(np.eye(3, dtype=np.float32)[[[0, 1, 2, 1]]], -1, 1)
    hits = (pixels[0].argmax(0) == [0, 1, 2, 1]).mean()
    assert float(F.accuracy(pixels, weights).array) == hits


@pytest.mark.parametrize(("loss", "has"), [(F.softmax_cross_entropy, True), (F.mean_squared_error, False)])
def test_a_task_reports_the_accuracy_of_classes_alone(loss, has):
    task, reporter = Task(Linear(4, 3), loss), Reporter()
    reporter.add_observer("main", task)
    with reporter:
        task(np.ones((5, 4), np.float32), soft(5, 3))
    assert ("main/accuracy" in reporter.observation) == has
