"""Keys that nobody reports are warned of, but not before those who report them have run."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import dbrdist
import dbrdist.links as L
from dbrdist import iterators, optimizers, training
from dbrdist.datasets import TupleDataset
from dbrdist.errors import UsageWarning
from dbrdist.training import StandardUpdater, Trainer, extensions, triggers
from dbrdist.training.goals import GoalTrigger


def words_of(key, tmp_path, every=2, num_epochs=4, own=None):
    """The warnings of a run whose evaluations come every so many epochs, and whose reports ask for ``key``."""
    data = TupleDataset(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32))
    model = L.Classifier(L.Linear(4, 4))
    optimizer = optimizers.SGD(0.1).setup(model)
    trainer = Trainer(
        StandardUpdater(iterators.SerialIterator(data, 2), optimizer), (num_epochs, "epoch"), str(tmp_path)
    )
    test = iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
    trainer.extend(extensions.Evaluator(test, model), trigger=(every, "epoch"))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", key]))
    if own is not None:
        trainer.extend(own[0], name="mine", trigger=own[1], priority=training.PRIORITY_WRITER)
    trainer.extend(lambda trainer: None, name="best", trigger=triggers.MaxValueTrigger(key))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run()
    return [str(w.message) for w in caught if issubclass(w.category, UsageWarning)]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_evaluations_that_come_later_are_waited_for(tmp_path, every):
    assert words_of("validation/main/accuracy", tmp_path, every) == []


@pytest.mark.parametrize(
    ("key", "hint"), [("validation/accuracy", "validation/main/accuracy"), ("mean/loss", "main/loss")]
)
def test_a_key_that_nobody_reports_is_said_once_by_each(tmp_path, key, hint):
    found = words_of(key, tmp_path)
    assert len(found) == 2 and all(f"nobody has reported {key!r}" in words for words in found)
    assert all(f"did you mean {hint!r}?" in words for words in found)


@pytest.mark.parametrize("trigger", [(2, "epoch"), (3, "iteration"), triggers.ManualScheduleTrigger([2, 4], "epoch")])
def test_own_extensions_that_come_later_are_waited_for(tmp_path, trigger):
    def score(trainer):
        dbrdist.report({"score": 1.0})

    assert words_of("score", tmp_path, own=(score, trigger)) == []


def test_what_no_own_extension_has_reported_is_said_after_its_first_call(tmp_path):
    def score(trainer):
        dbrdist.report({"scores": 1.0})

    found = words_of("score", tmp_path, own=(score, (2, "epoch")))
    assert found and all("nobody has reported 'score'" in words and "mean 'scores'?" in words for words in found)


def test_a_goal_waits_for_own_extensions(tmp_path):
    data = TupleDataset(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32))
    optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(4, 4)))
    stop = GoalTrigger(6, None, "score", target=3.0, mode="max")
    trainer = Trainer(StandardUpdater(iterators.SerialIterator(data, 2), optimizer), stop, str(tmp_path))
    trainer.extend(lambda trainer: dbrdist.report({"score": trainer.updater.epoch}), name="s", trigger=(2, "epoch"))
    trainer.run()  # warnings are errors
    assert trainer.updater.epoch == 4


def test_what_is_reported_after_the_log_is_said(tmp_path):
    data = TupleDataset(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32))
    optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(4, 4)))
    trainer = Trainer(StandardUpdater(iterators.SerialIterator(data, 2), optimizer), (4, "epoch"), str(tmp_path))
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "score"]))
    trainer.extend(lambda trainer: dbrdist.report({"score": 1.0}), name="score", trigger=(1, "epoch"))
    with pytest.warns(UsageWarning, match=r"nobody has reported 'score'.*priority=training\.PRIORITY_WRITER") as caught:
        trainer.run()
    assert len(caught) == 1


@pytest.mark.parametrize("has_log", [False, True], ids=["a log that is new", "an evaluator that is new"])
def test_a_run_that_continues_within_an_epoch_waits_for_its_next_evaluation(tmp_path, has_log):
    data = TupleDataset(np.eye(8, dtype=np.float32), np.arange(8, dtype=np.int32))

    def trainer(stop, has_log, has_evaluator):
        model = L.Classifier(L.Linear(8, 8))
        updater = StandardUpdater(iterators.SerialIterator(data, 2), optimizers.SGD(0.1).setup(model))
        made = Trainer(updater, stop, str(tmp_path))
        if has_evaluator:
            test = iterators.SerialIterator(data, 2, repeat=False, shuffle=False)
            made.extend(extensions.Evaluator(test, model), trigger=(1, "epoch"))
        if has_log:
            made.extend(extensions.LogReport(trigger=(1, "iteration")))
        if has_log and has_evaluator:
            made.extend(extensions.PrintReport(["epoch", "validation/main/loss"]))
        return made

    first = trainer((6, "iteration"), has_log, not has_log)
    first.run()
    dbrdist.serializers.save_npz(tmp_path / "first.npz", first.updater)
    second = trainer((3, "epoch"), True, True)
    dbrdist.serializers.load_npz(tmp_path / "first.npz", second.updater)
    second.run()  # warnings are errors


def test_an_extension_that_reports_later_than_its_first_call_is_waited_for(tmp_path):
    data = TupleDataset(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32))
    optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(4, 4)))
    trainer = Trainer(StandardUpdater(iterators.SerialIterator(data, 2), optimizer), (4, "epoch"), str(tmp_path))

    def score(trainer):
        if trainer.updater.epoch >= 3:
            dbrdist.report({"score": 1.0})

    trainer.extend(score, trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    trainer.extend(extensions.LogReport())
    trainer.extend(extensions.PrintReport(["epoch", "score"]))
    trainer.run()  # warnings are errors


@pytest.mark.parametrize("value", ["0.5", np.ones(2), 1j, None])
def test_a_key_whose_values_have_no_mean_is_not_said_to_be_missing(value, tmp_path):
    data = TupleDataset(np.eye(4, dtype=np.float32), np.arange(4, dtype=np.int32))
    optimizer = optimizers.SGD(0.1).setup(L.Classifier(L.Linear(4, 4)))

    class Reports(StandardUpdater):
        def update_core(self):
            super().update_core()
            dbrdist.report({"score": value})

    trainer = Trainer(Reports(iterators.SerialIterator(data, 2), optimizer), (1, "epoch"), str(tmp_path))
    trainer.extend(lambda trainer: None, trigger=triggers.MaxValueTrigger("score", (1, "iteration")))
    with pytest.warns(UsageWarning, match="what was reported as 'score' has no mean so far; report a number") as given:
        trainer.run()
    assert not any("nobody has reported" in str(each.message) for each in given)
