"""Tests of dbrdist.training.extensions.weight_average."""

from __future__ import annotations

import numpy as np

import dbrdist
from dbrdist import iterators
from dbrdist.training import extensions
from tests.each import each
from tests.training.training_helpers import Line, examples


@each(warmup=[True, False], decay=[0, 0.5, 0.9])
def test_averages_of_weights_with_and_without_warm_up(warmup, decay):
    model, average = Line(), None
    average = extensions.WeightAverage(model, decay, warmup)
    average.initialize(None)
    expected, values = 0.5, [1.0, 2.0, 5.0]
    for t, value in enumerate(values, 1):
        model.w.array[...] = value
        average(None)
        keep = min(decay, (1 + t) / (10 + t)) if warmup else decay
        expected = keep * expected + (1 - keep) * value
        np.testing.assert_allclose(average.averages["w"], expected, rtol=1e-12)
    with average.applied():
        np.testing.assert_allclose(model.w.array, expected, rtol=1e-12)
    assert model.w.array == 5
    around = average.around(extensions.Evaluator(iterators.SerialIterator(examples(2), 2, repeat=False), model))
    assert around.default_name == "validation"


def test_a_parameter_made_late_begins_its_average():
    link = dbrdist.links.Linear(None, 1)
    average = extensions.WeightAverage(link, 0.5, warmup=False)
    average.initialize(None)
    assert list(average.averages) == ["b"]
    link(np.ones((1, 2), "f"))
    average(None)
    np.testing.assert_array_equal(average.averages["W"], link.W.array)
