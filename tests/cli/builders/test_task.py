"""Tests of dbrdist.cli.builders.task."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import dbrdist.functions as F
from dbrdist import Link, Variable
from dbrdist.cli.builders import task as tasks
from dbrdist.cli.builders.task import Task
from dbrdist.core.array.backend import as_dtype
from dbrdist.core.array.config import using_config
from dbrdist.core.model.reporter import DictSummary, Reporter
from dbrdist.functions import softmax_cross_entropy
from dbrdist.links import Linear
from tests.each import each


def soft(n, k, dtype=np.float32):
    weights = np.random.default_rng(1).random((n, k))
    return (weights / weights.sum(1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize(("loss", "has"), [(F.softmax_cross_entropy, True), (F.mean_squared_error, False)])
def test_a_task_reports_the_accuracy_of_classes_alone(loss, has):
    task, reporter = Task(Linear(4, 3), loss), Reporter()
    reporter.add_observer("main", task)
    with reporter:
        task(np.ones((5, 4), np.float32), soft(5, 3))
    assert ("main/accuracy" in reporter.observation) == has


class Identity(Link):
    def forward(self, x):
        return x


def without_loss(outputs, labels):
    return Variable(np.zeros(()))


@each(
    case=[
        ((4, 3), np.zeros(4, int), without_loss, True), ((4, 3), np.zeros((4, 3), int), without_loss, False),
        ((4, 3, 2), np.zeros((4, 2), int), without_loss, True), ((4,), np.zeros(4, int), without_loss, False),
        ((4, 3), np.full((4, 3), 1 / 3, "f"), softmax_cross_entropy, True),
        ((4, 3), np.full((4, 3), 1 / 3, "f"), without_loss, False), ((4,), np.zeros(4, "f"), without_loss, False),
    ]
)  # fmt: skip
def test_an_accuracy_needs_classes(case):
    outputs, labels, loss, expected = case
    own, reporter = Task(Identity(), loss), Reporter()
    reporter.add_observer("main", own)
    with reporter:
        own(np.zeros(outputs, "f"), labels)
    assert ("main/accuracy" in reporter.observation) is expected


@each(value=[Decimal("0.5"), Fraction(1, 2), 0.5, np.array(0.5), np.float32(0.5)])
def test_each_kind_of_number_of_a_metric_is_a_float_in_the_log_and_in_evaluations(value):
    own, reporter, summary = Task(Identity(), without_loss, {"odd": lambda y, t: value}), Reporter(), DictSummary()
    reporter.add_observer("main", own)
    with reporter:
        own(np.zeros((4, 3), "f"), np.zeros(4, int))
    summary.add(reporter.observation)
    assert summary.compute_mean()["main/odd"] == 0.5


@each(
    case=[
        ((np.zeros(1),), {}, "1 entries"), ((np.zeros(1),) * 3, {}, "3 entries"),
        ((), {"a": 1, "b": 2}, "dictionaries of a, b"), ((np.zeros(1),) * 2, {"a": 1}, "dictionaries of a"),
    ]
)  # fmt: skip
def test_a_loss_of_ours_takes_pairs(case):
    args, named, got = case
    with pytest.raises(ValueError) as caught:
        Task(Identity(), without_loss)(*args, **named)
    assert str(caught.value) == (
        f"expected examples of (input, label), got {got}; with `loss: model` the network takes any batch"
    )


def test_a_network_that_has_its_loss_takes_any_batch():
    class Own(Link):
        def forward(self, *args, scale=1.0):
            return Variable(np.array(float(sum(args)) * scale))

    own, reporter = Task(Own(), None), Reporter()
    reporter.add_observer("main", own)
    with reporter:
        assert own(1.0, 2.0, 3.0, scale=2.0).array == 12.0 == reporter.observation["main/loss"]


@each(flips=[True, False], train=[True, False])
def test_mirrored_images_and_the_watcher_of_outputs_are_for_tests(monkeypatch, flips, train):
    called = []
    monkeypatch.setattr(tasks, "mean_over_mirrored", lambda network, inputs: called.append("mirrored") or inputs)
    own = Task(Identity(), without_loss, flips_tests=flips)
    own.on_outputs = lambda inputs, outputs, labels: called.append((inputs, outputs, labels))
    x, t = np.zeros((4, 3), "f"), np.zeros(4, int)
    with using_config("train", train):
        own(x, t)
    is_mirrored = flips and not train
    assert called == ["mirrored"] * is_mirrored + [(x, x, t)] * (not train)


@pytest.mark.parametrize("labels", [np.array([0, 2, 1, 2]), soft(4, 3)])
def test_a_metric_that_works_in_place_changes_neither_gradients_nor_other_metrics(labels):
    x = np.random.default_rng(0).normal(size=(4, 5)).astype("f4")
    seen = []

    def spoils(outputs, known):
        seen.append((float(outputs.array.sum()), float(known.sum())))
        outputs.array[...] = 0
        known[...] = 0
        return 1.0

    loss = F.softmax_cross_entropy if labels.ndim == 1 else F.binary_cross_entropy
    gradients = []
    for metrics in ({}, {"first": spoils, "second": spoils}):
        network, given = Linear(5, 3, initialW=np.arange(15.0).reshape(3, 5) / 15), labels.copy()
        Task(network, loss, metrics)(x, given).backward()
        gradients.append(network.W.grad)
        np.testing.assert_array_equal(given, labels)
    np.testing.assert_array_equal(*gradients)
    assert seen[0] == seen[1] and seen[0][0] != 0


def test_metrics_of_several_outputs_get_copies_of_each():
    outputs = np.ones(2), [Variable(np.ones(3))], "name"
    first, (second,), name = tasks._copied(outputs)
    first[...] = second.array[...] = 5
    assert outputs[0].sum() == 2 and outputs[1][0].array.sum() == 3 and name == "name"


@each(dtype=["float16", "bfloat16", "float32", "float64"])
def test_losses_and_metrics_of_16_bit_outputs_are_computed_in_float32(dtype):
    seen = []
    own = Task(Identity(), softmax_cross_entropy, {"seen": lambda y, t: seen.append(y.dtype) or 0.0})
    x = Variable(np.linspace(-1, 1, 12).reshape(4, 3).astype(as_dtype(dtype)))
    wanted = dtype if dtype == "float64" else "float32"
    assert own(x, np.zeros(4, int)).dtype == wanted and seen == [np.dtype(wanted)]
