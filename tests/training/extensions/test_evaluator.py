"""Tests of dbrdist.training.extensions.evaluator."""

from __future__ import annotations

import numpy as np
import pytest

from dbrdist import iterators
from dbrdist.core.array.backend import get_device
from dbrdist.datasets.loading.convert import concat_examples
from dbrdist.datasets.loading.serial import SerialIterator
from dbrdist.training import extensions
from tests.training.training_helpers import Line, examples, make_trainer


def test_an_evaluator_has_its_parts_by_name():
    model, calls = Line(), []
    data = iterators.SerialIterator(examples(4), 2, repeat=False, shuffle=False)
    for iterator, target in ((data, model), ({"main": data}, {"main": model})):
        evaluator = extensions.Evaluator(iterator, target, eval_hook=calls.append)
        assert evaluator.get_iterator("main") is data and evaluator.get_all_iterators() == {"main": data}
        assert evaluator.get_target("main") is model and evaluator.get_all_targets() == {"main": model}
        evaluator.name = None
        first = evaluator()
        assert first == evaluator() and list(first) == ["main/loss"]
        expected = np.mean([(0.5 * x - t) ** 2 for x, t in examples(4)])
        np.testing.assert_allclose(first["main/loss"], expected, rtol=1e-12)
        assert calls == [evaluator] * 2
        calls.clear()


def test_an_evaluator_without_reset_goes_over_a_copy():
    class Once:
        epoch = 0

        def __init__(self):
            self.left = [examples(2)]

        def __copy__(self):
            return Once()

        def __iter__(self):
            return iter(self.left)

    evaluator = extensions.Evaluator(Once(), Line(), eval_func=None)
    assert evaluator() == evaluator() != {}


@pytest.mark.parametrize("device", [None, "@numpy"])
def test_an_evaluator_hands_its_device_to_the_converter(device):
    seen = []

    def converter(batch, where):
        seen.append(where)
        return concat_examples(batch, where)

    iterator = SerialIterator(examples(4), 2, repeat=False, shuffle=False)
    extensions.Evaluator(iterator, Line(), converter, device=device)()
    assert seen == [None if device is None else get_device(device)] * 2


@pytest.mark.parametrize("batch", [1, 3, 4, 10, 20])
def test_evaluation_weighs_by_samples(batch):
    model, data = Line(), examples(10)
    result = extensions.Evaluator(SerialIterator(data, batch, repeat=False, shuffle=False), model)()
    x, t = np.array([e[0][0] for e in data]), np.array([e[1][0] for e in data])
    assert result["main/loss"] == pytest.approx(((0.5 * x - t) ** 2).mean(), rel=1e-12)


def test_evaluation_in_a_run(tmp_path):
    trainer = make_trainer(tmp_path, (2, "epoch"))
    model = trainer.updater.get_optimizer("main").target
    modes = []

    def evaluate(x, t):
        import dbrdist

        modes.append((dbrdist.config.train, dbrdist.config.enable_backprop))
        return model(x, t)

    trainer.extend(
        extensions.Evaluator(SerialIterator(examples(5), 2, repeat=False, shuffle=False), model, eval_func=evaluate)
    )
    trainer.extend(extensions.LogReport())
    trainer.run()
    assert modes == [(False, False)] * 6
    log = trainer.get_extension("LogReport").log
    assert [set(entry) >= {"main/loss", "validation/main/loss"} for entry in log] == [True, True]
