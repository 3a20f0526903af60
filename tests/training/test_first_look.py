"""What the first steps of a run are warned of, and what they are not."""

from __future__ import annotations

import warnings

import pytest

import dbrdist.links as L
from dbrdist import iterators, optimizers, testing, training
from dbrdist.comm import create_communicator, create_multi_node_optimizer
from dbrdist.errors import UsageWarning
from dbrdist.training import first_look
from dbrdist.training.triggers import IntervalTrigger, ManualScheduleTrigger
from tests.each import each
from tests.training.mistaken import DATA, Net


def without_optimizers(tmp_path):
    return testing.get_trainer_with_mock_updater((3, "iteration"))


def of_many_calls(tmp_path):
    """The optimizer adds up gradients over more calls than this run has."""
    comm = create_communicator("single")
    optimizer = create_multi_node_optimizer(optimizers.SGD(0.1), comm, accumulate=4).setup(L.Classifier(Net()))
    updater = training.StandardUpdater(iterators.SerialIterator(DATA, 5), optimizer)
    return training.Trainer(updater, (3, "iteration"), tmp_path)


class Episodes(training.StandardUpdater):
    """Collects examples for many calls, then trains; as in reinforcement learning."""

    num_calls = 0
    num_collecting = 250
    adds_gradients = counts = True

    def update(self):
        self.update_core()
        self.iteration += self.counts or self.num_calls > self.num_collecting

    def update_core(self):
        optimizer = self.get_optimizer("main")
        self.num_calls += 1
        is_training = self.num_calls > self.num_collecting
        if is_training or self.adds_gradients:
            optimizer.target(DATA[0][0][None], DATA[0][1][None]).backward()
        if is_training:
            optimizer.update()


def of_episodes(tmp_path, **attributes):
    optimizer = optimizers.SGD(0.1).setup(L.Classifier(Net()))
    updater = Episodes(iterators.SerialIterator(DATA, 5), optimizer)
    vars(updater).update(attributes)
    return training.Trainer(updater, (251 if updater.counts else 1, "iteration"), tmp_path)


def that_add_gradients(tmp_path):
    return of_episodes(tmp_path)


def that_collect(tmp_path):
    return of_episodes(tmp_path, adds_gradients=False)


def that_count_no_step_before_they_train(tmp_path):
    return of_episodes(tmp_path, counts=False)


EPISODES = [that_add_gradients, that_collect, that_count_no_step_before_they_train]


@pytest.mark.parametrize("made", [without_optimizers, of_many_calls, *EPISODES])
def test_steps_that_need_not_update_are_not_warned_of(made, tmp_path):
    trainer = made(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run()


@pytest.mark.slow
def test_a_thousand_backward_passes_without_an_update_are_warned_of(tmp_path):
    trainer = of_episodes(tmp_path, num_collecting=1001)
    trainer.stop_trigger = training.get_trigger((2000, "iteration"))
    with pytest.warns(UsageWarning, match="1000 steps, and no optimizer has updated anything"):
        trainer.run()


def test_a_network_that_changes_in_the_first_call_alone_is_not_warned_of(tmp_path):
    """By the program's own hand, without an optimizer."""

    class Once(training.StandardUpdater):
        def update_core(self):
            if not self.iteration:
                self.get_optimizer("main").target.predictor.l1.W.array[...] += 1

    model = L.Classifier(Net())
    updater = Once(iterators.SerialIterator(DATA, 5), optimizers.SGD(0.1).setup(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.Trainer(updater, (3, "iteration"), tmp_path).run()


def test_a_network_that_the_first_batch_initializes(tmp_path):
    class Own(training.StandardUpdater):
        def update_core(self):
            x, t = self.converter(self.get_iterator("main").next(), None)
            self.get_optimizer("main").update(self.get_optimizer("main").target, x, t)

    model = L.Classifier(L.Linear(None, 3))
    updater = Own(iterators.SerialIterator(DATA, 5), optimizers.SGD(0.1).setup(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.Trainer(updater, (3, "iteration"), tmp_path).run()
    assert model.predictor.W.shape == (3, 4)


def test_a_look_at_the_first_steps_ends_with_the_first_update_that_is_counted():
    class Own(training.StandardUpdater):
        does_update = counts = False

        def update_core(self):
            if self.does_update:
                super().update_core()

        def update(self):
            self.update_core()
            self.iteration += self.counts

    def look(kind=Own):
        updater = kind(iterators.SerialIterator(DATA, 5), optimizers.SGD(0.1).setup(L.Classifier(Net())))
        return updater, first_look.FirstSteps(updater)

    updater, first = look()
    for does_update, counts in ((False, False), (True, False)):
        updater.does_update, updater.counts = does_update, counts
        updater.update()
        assert first.after_update() is first
    updater.does_update, updater.counts = False, True  # the update before is seen, and now the step
    updater.update()
    assert first.after_update() is None
    updater, first = look()
    updater.counts = True
    updater.update()
    assert first.after_update() is first  # nothing was updated
    updater.does_update = True
    updater.update()
    assert first.after_update() is None
    updater, first = look(training.StandardUpdater)
    assert first.after_update() is first
    updater.update()
    assert first.after_update() is None


def test_where_neither_step_nor_update_is_seen_a_hundred_calls_decide():
    class Own(training.StandardUpdater):
        def update(self):
            self.get_optimizer("main").target.predictor.l1.W.array[...] += 1

    updater = Own(iterators.SerialIterator(DATA, 5), optimizers.SGD(0.1).setup(L.Classifier(Net())))
    first = first_look.FirstSteps(updater)
    for _ in range(99):
        updater.update()
        assert first.after_update() is first
    words = "Own.update: 100 calls, and the iteration is still 0, so that no trigger fires"
    with pytest.warns(UsageWarning, match=words):
        assert first.after_update() is None
    unused = first_look.FirstSteps(updater)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unused.end()  # of a run without a step


@each(
    case=[
        ((3, "epoch"), (2, "epoch"), None, True), ((2, "epoch"), (2, "epoch"), None, False),
        ((3, "epoch"), (20, "iteration"), None, False), ((4, "epoch"), (20, "iteration"), 10.0, True),
        ((3, "epoch"), (20, "iteration"), 10.0, False), ((45, "iteration"), (3, "epoch"), 10.0, False),
        ((46, "iteration"), (3, "epoch"), 10.0, True), (([4, 9], "epoch"), (3, "epoch"), None, True),
        (([9, 3], "epoch"), (3, "epoch"), None, False), (([], "epoch"), (3, "epoch"), None, False),
    ]
)  # fmt: skip
def test_triggers_that_first_fire_after_the_end(case):
    trigger, stop, steps, expected = case
    kind = ManualScheduleTrigger if isinstance(trigger[0], list) else IntervalTrigger
    assert first_look._is_too_late(kind(*trigger), IntervalTrigger(*stop), steps) is expected
    assert first_look._is_too_late(lambda trainer: False, IntervalTrigger(*stop), steps) is False


@each(
    case=[
        ((1, "epoch"), 10.0, False), ((0.5, "epoch"), None, True), ((9, "iteration"), 10.0, True),
        ((10, "iteration"), 10.0, False), ((1, "iteration"), None, False),
    ]
)  # fmt: skip
def test_a_run_within_its_first_epoch_is_a_trial(case):
    stop, steps, expected = case
    assert first_look._is_trial(IntervalTrigger(*stop), steps) is expected
