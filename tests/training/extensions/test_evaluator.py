"""Tests of dbrdist.training.extensions.evaluator."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import dbrdist
from dbrdist import iterators
from dbrdist.core.array.backend import get_device
from dbrdist.core.files import standard_streams
from dbrdist.core.model.reporter import report
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


class Part:
    """Stands for an iterator of batches; ``size`` ranks share its data."""

    def __init__(self, batches, dataset=None, **attributes):
        self.batches, self.dataset = batches, dataset
        vars(self).update(attributes)

    def __iter__(self):
        for number, batch in enumerate(self.batches, 1):
            self.current_position = number * 10
            self.is_new_epoch = number == len(self.batches)
            yield batch

    def reset(self):
        pass


def test_an_evaluation_shows_how_far_it_is(monkeypatch):
    """Behind the last batch all of it is done, wherever the iterator stands by then."""
    written = []
    monkeypatch.setattr(standard_streams, "stdout", SimpleNamespace(write=written.append))
    batches = [examples(2), examples(2)]
    extensions.Evaluator(Part(batches, range(15)), Line(), progress_bar=True)()
    assert written == ["\rvalidation: 10 of 15 examples", "\rvalidation: 15 of 15 examples", "\n"]
    written.clear()
    extensions.Evaluator(Part(batches), Line(), progress_bar=True)()
    assert written == ["\rvalidation", "\rvalidation", "\n"]
    written.clear()
    extensions.Evaluator(batches, Line(), progress_bar=True)()
    extensions.Evaluator(batches, Line(), progress_bar=False)()
    extensions.Evaluator(batches, Line())()
    assert written == ["\rvalidation", "\rvalidation", "\n"]


def test_batches_without_a_length_weigh_the_same_and_empty_ones_are_passed_over():
    """A converter may take anything for a batch."""

    def convert(batch, device):
        return concat_examples(examples(10)[: batch if isinstance(batch, int) else len(batch)])

    def mean(*counts_and_weights):
        losses = {n: np.mean([(0.5 * x - t) ** 2 for x, t in examples(10)[:n]]) for n, _ in counts_and_weights}
        return sum(losses[n] * weight for n, weight in counts_and_weights) / sum(w for _, w in counts_and_weights)

    def evaluated(*batches):
        return extensions.Evaluator(list(batches), Line(), convert)()["main/loss"]

    assert evaluated(1, 9) == pytest.approx(mean((1, 1), (9, 1)), rel=1e-12)
    assert evaluated("a", "a" * 9) == pytest.approx(mean((1, 1), (9, 9)), rel=1e-12)
    assert evaluated("a", "", "a" * 9) == evaluated("a", "a" * 9)


@pytest.mark.parametrize(
    ("iterator", "words"),
    [
        (
            Part([examples(2)], range(2), size=2),
            "Evaluator: it evaluates this rank's part alone, and each rank reports another result; wrap it in "
            "dbrdist.comm.create_multi_node_evaluator(evaluator, comm)",
        ),
        (
            Part([examples(2)], SimpleNamespace(is_one_ranks=True)),
            "Evaluator: it evaluates this rank's part alone, and each rank reports another result; wrap it in "
            "dbrdist.comm.create_multi_node_evaluator(evaluator, comm)",
        ),
        (Part([examples(2)], []), "Evaluator: the dataset is empty, so nothing is evaluated and reported"),
        (Part([examples(2)], range(2), size=1), None),
    ],
)
def test_an_evaluation_of_a_part_or_of_nothing_is_said_once(iterator, words):
    evaluator = extensions.Evaluator(iterator, Line())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluator()
        evaluator()
    assert [str(w.message) for w in caught] == [words] * (words is not None)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((SerialIterator, Line()), TypeError, "Evaluator: expected an iterator, got the class SerialIterator"),
        (([], Line), TypeError, "Evaluator: expected a link, got the class Line; write Line(...)"),
        (([], 3), TypeError, "Evaluator: target: expected a link, got int"),
        ((3, Line()), TypeError, "Evaluator: iterator: expected an iterator, got int; write iterators.SerialIterator("),
        ((Line(), Line()), TypeError, "Evaluator: iterator: expected an iterator, got Line; write "),
        (([(np.ones(2), 1)], Line()), TypeError, "Evaluator: iterator: expected an iterator, got a list of examples; "),
        (
            (SerialIterator(examples(2), 1), Line()),
            ValueError,
            "Evaluator: the iterator repeats, so no evaluation ends; make it with repeat=False",
        ),
    ],
)
def test_what_cannot_be_evaluated(arguments, kind, words):
    with pytest.raises(kind) as caught:
        extensions.Evaluator(*arguments)
    assert str(caught.value).startswith(words)


def test_an_evaluator_ends_its_iterators():
    ended = []
    iterator = Part([])
    iterator.finalize = lambda: ended.append(1)
    extensions.Evaluator({"main": iterator, "other": Part([])}, {"main": Line()}).finalize()
    assert ended == [1]
    for fine in ([(np.ones(2), np.ones(2))], [(1, 2)], [[np.ones(2), 1]], []):  # batches, and examples of numbers alone
        extensions.Evaluator(fine, Line())
    extensions.Evaluator([(np.ones(2), 1)], Line(), lambda batch, device: batch)


def test_what_parts_of_a_network_report_has_their_names():
    class Inner(dbrdist.Chain):
        def forward(self, x):
            report({"x": 3.0}, self)
            return x

    class Whole(dbrdist.Chain):
        def forward(self, x, t):
            report({"loss": 1.0}, self)
            return self.part(x)

    whole = Whole(part=Inner())
    evaluator = extensions.Evaluator([examples(2)], {"main": whole})
    assert evaluator() == {"main/loss": 1.0, "main/part/x": 3.0}
    evaluator.name = "test"
    assert evaluator() == {"test/main/loss": 1.0, "test/main/part/x": 3.0}


def test_what_is_reported_and_has_no_mean_is_warned_of():
    class Odd(Line):
        def forward(self, x, t):
            report({"loss": 1.0, "all": np.zeros(3), "words": "good"}, self)

    evaluator = extensions.Evaluator(iterators.SerialIterator(examples(4), 2, repeat=False), Odd())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        evaluator()
    rest = "and has no mean, so logs leave it out; report a number, such as its mean"
    assert [str(one.message) for one in seen] == [
        f"report: 'main/all' is an array of shape (3,) {rest}", f"report: 'main/words' is of type str {rest}",
    ]  # fmt: skip
