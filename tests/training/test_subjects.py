"""Saved state carries the name of what it is about: with another name it starts anew."""

import math
import operator

import numpy as np
import pytest

from dbrdist import iterators, optimizers
from dbrdist.core.files.serializer import NpzDeserializer, saved_state
from dbrdist.core.model.reporter import DictSummary, Summary
from dbrdist.training import Extension, StandardUpdater, Trainer, extensions, triggers
from tests.each import each
from tests.training.training_helpers import Line, examples

INF, NAN = math.inf, math.nan


class Run:
    """As much of a trainer as triggers read."""

    def __init__(self):
        self.updater = self
        self.observation = {}
        self.iteration = self.epoch = 0
        self.epoch_detail = 0.0
        self.previous_epoch_detail = None
        self.is_before_training = False

    def step(self, **observation):
        self.previous_epoch_detail = self.epoch_detail
        self.iteration += 1
        self.epoch_detail += 0.25
        self.epoch = int(self.epoch_detail)
        self.observation = {key.replace("_", "/"): value for key, value in observation.items()}
        return self


def moved(old, new):
    """`new` with the saved state of `old`."""
    NpzDeserializer(saved_state(old)).load(new)
    return new


def fires(trigger, values, key="a"):
    run = Run()
    return [trigger(run.step(**{key: value})) for value in values]


ONE = (1, "iteration")


@each(
    kind=[triggers.MinValueTrigger, triggers.MaxValueTrigger],
    values=[[NAN, 3.0, 2.0, 2.5, 1.0], [NAN, NAN, 1.0, NAN, 2.0], [1.0, NAN, 0.5, 2.0]],
)
def test_nan_is_never_the_best(kind, values):
    best, expected = None, []
    for value in values:
        is_better = best is None or (value < best if kind is triggers.MinValueTrigger else value > best)
        expected.append(is_better and not math.isnan(value))
        best = value if expected[-1] else best
    assert fires(kind("a", ONE), values) == expected


def test_infinity_is_a_value_and_a_saved_nan_is_none():
    assert fires(triggers.MinValueTrigger("a", ONE), [INF, INF, 1.0]) == [True, False, True]
    old = triggers.MinValueTrigger("a", ONE)
    old.best_value = NAN
    assert fires(moved(old, triggers.MinValueTrigger("a", ONE)), [2.0]) == [True]


def test_early_stopping_counts_nan_as_no_improvement_and_forgets_it():
    trigger = triggers.EarlyStoppingTrigger(ONE, "a", patience=2, max_trigger=(100, "epoch"))
    assert fires(trigger, [NAN, 2.0, 1.0, NAN, NAN]) == [False, False, False, False, True]
    assert trigger.best == 1.0


BEST = {
    "another key": (triggers.MaxValueTrigger("a", ONE), lambda: triggers.MaxValueTrigger("b", ONE)),
    "another comparison": (triggers.MinValueTrigger("a", ONE), lambda: triggers.MaxValueTrigger("a", ONE)),
    "another function": (
        triggers.BestValueTrigger("a", operator.lt, ONE),
        lambda: triggers.BestValueTrigger("a", operator.ge, ONE),
    ),
}


@each(case=list(BEST))
def test_a_best_value_is_that_of_its_key(case):
    old, make = BEST[case]
    old.best_value = 99.0
    assert moved(old, make()).best_value is None
    assert (
        moved(
            old, type(old)(*(("a", operator.lt) if type(old) is triggers.BestValueTrigger else ("a",)), ONE)
        ).best_value
        == 99.0
    )


@each(new=[("b", "min"), ("a", "max"), ("a/accuracy", "auto")])
def test_patience_is_that_of_its_monitor(new):
    old = triggers.EarlyStoppingTrigger(ONE, "a", patience=5, mode="min")
    old.count, old.best = 4, 0.5
    other = moved(old, triggers.EarlyStoppingTrigger(ONE, new[0], patience=5, mode=new[1]))
    assert (other.count, other.best) == (0, None)
    same = moved(old, triggers.EarlyStoppingTrigger(ONE, "a", patience=5))
    assert (same.count, same.best) == (4, 0.5)


def test_a_position_is_that_of_its_unit():
    """In epochs, iterations and epochs again: the position of the first time is not where the last call was."""
    run, trigger = Run(), triggers.IntervalTrigger(1, "epoch")
    for _ in range(4):
        trigger(run.step())
    trigger = moved(trigger, triggers.IntervalTrigger(3, "iteration"))
    for _ in range(6):
        trigger(run.step())
    trigger = moved(trigger, triggers.IntervalTrigger(1, "epoch"))
    assert not trigger(run.step())  # epoch 2.75
    assert trigger(run.step())  # epoch 3


def test_points_that_have_changed_are_not_finished():
    old = triggers.ManualScheduleTrigger([1], "iteration")
    old(Run().step())
    assert old.finished and not moved(old, triggers.ManualScheduleTrigger([1, 5], "iteration")).finished
    assert moved(old, triggers.ManualScheduleTrigger([1], "iteration")).finished


@each(new=[[(2, "iteration"), triggers.TimeTrigger(60)], [triggers.TimeTrigger(60)], [(1, "epoch"), ONE]])
def test_joined_triggers_find_their_own_state_or_start_anew(new):
    old = triggers.AnyTrigger(triggers.TimeTrigger(10), (1, "epoch"))
    old._triggers[0]._next_seconds, old._triggers[1]._passed.epoch_detail = 50.0, 7.5
    found = moved(old, triggers.AnyTrigger(*new))
    for trigger in found._triggers:
        if isinstance(trigger, triggers.TimeTrigger):
            assert trigger._next_seconds == 50.0
        else:
            assert trigger._passed.epoch_detail == (7.5 if trigger.unit == "epoch" else -1)


def test_a_ratio_a_shift_and_curves_are_of_what_they_were_made_for(monkeypatch):
    ratio = extensions.MicroAverage("a", "b", "c")
    ratio._numerator = 5.0
    assert moved(ratio, extensions.MicroAverage("a", "d", "c"))._numerator == 0.0
    assert moved(ratio, extensions.MicroAverage("a", "b", "c"))._numerator == 5.0
    shift = extensions.ExponentialShift("lr", 0.5, init=1.0)
    shift._t, shift._last_value = 3, 0.125
    other = moved(shift, extensions.ExponentialShift("momentum", 0.5, init=0.9))
    assert (other._t, other._last_value, other.init) == (0, None, 0.9)
    assert moved(shift, extensions.ExponentialShift("lr", 0.5))._last_value == 0.125
    monkeypatch.setattr(extensions.PlotReport, "available", staticmethod(lambda: True))
    plot = extensions.PlotReport(["loss"], "iteration")
    plot._points["loss"] = [(10, 0.5)]
    assert moved(plot, extensions.PlotReport(["loss"], "epoch"))._points == {"loss": []}
    assert moved(plot, extensions.PlotReport(["loss"], "iteration"))._points == {"loss": [(10, 0.5)]}
    monkeypatch.setattr(extensions.VariableStatisticsPlot, "available", staticmethod(lambda: True))
    statistics = {"report_data": True, "plot_std": False, "percentile_sigmas": None, "max_sample_size": 4}
    old = extensions.VariableStatisticsPlot(Line(), report_grad=False, **statistics)
    old._samples.add(np.ones((1, 1)))
    gradients = {**statistics, "report_data": False}
    assert moved(old, extensions.VariableStatisticsPlot(Line(), report_grad=True, **gradients))._samples._num_added == 0
    assert (
        moved(old, extensions.VariableStatisticsPlot(Line(), report_grad=False, **statistics))._samples._num_added == 1
    )


class Counter(Extension):
    count = 0

    def serialize(self, serializer):
        self.count = int(serializer("count", self.count))


class Other(Counter):
    pass


def trainer(tmp_path, extension, trigger=ONE, stop=(1, "epoch")):
    optimizer = optimizers.SGD(0.1).setup(Line())
    made = Trainer(StandardUpdater(iterators.SerialIterator(examples(), 4), optimizer), stop, out=str(tmp_path))
    made.extend(extension, name="mine", trigger=trigger)
    return made


def test_an_extension_of_the_same_name_is_not_the_same(tmp_path):
    old = Counter()
    old.count = 7
    saved = saved_state(trainer(tmp_path, old, triggers.MaxValueTrigger("a")))
    for made, expected in ((Counter(), 7), (Other(), 0)):
        extensions_trainer = trainer(tmp_path, made, triggers.MaxValueTrigger("a"))
        NpzDeserializer(saved).load(extensions_trainer)
        assert made.count == expected
    # Earlier versions saved the class of an extension whose arguments are its subject now.
    for subject, kept, expected in (("one", "one", 7), ("one", "other", 0), (None, "other", 7)):
        old.subject = subject
        saved = saved_state(trainer(tmp_path, old, triggers.MaxValueTrigger("a")))
        named = Counter()
        named.subject = kept
        NpzDeserializer(saved).load(trainer(tmp_path, named, triggers.MaxValueTrigger("a")))
        assert named.count == expected


@each(trigger=[(2, "epoch"), triggers.TimeTrigger(5), triggers.MaxValueTrigger("b")])
def test_another_trigger_under_the_name_of_an_extension_starts_anew(tmp_path, trigger):
    best = triggers.MinValueTrigger("a", ONE)
    best.best_value = 1.0
    saved = saved_state(trainer(tmp_path, Counter(), best))
    NpzDeserializer(saved).load(trainer(tmp_path, Counter(), trigger))
    assert getattr(trigger, "best_value", None) is None


@each(
    values=[[INF, INF], [1.0, INF, 2.0], [-INF, 1.0], [INF, -INF], [NAN, 1.0], [1e308, -1e308, 1e308], [1.0, 2.0, 4.0]]
)
def test_means_of_values_that_are_not_finite(values):
    with np.errstate(invalid="ignore", over="ignore"):
        expected = float(np.mean(np.array(values, np.longdouble)))
    for make in (lambda: _one_by_one(values), lambda: _together(values)):
        assert make() == pytest.approx(expected, nan_ok=True, rel=1e-12)


def _one_by_one(values):
    summary = Summary()
    for value in values:
        summary.add(value)
    return summary.compute_mean()


def _together(values):
    summary = DictSummary()
    for value in values:
        summary.add({"a": value})
    return summary.compute_mean()["a"]


def test_names_of_sums_may_have_line_breaks():
    summary = DictSummary()
    summary.add({"a\nb": 1.0, "[c": 2.0})
    assert moved(summary, DictSummary()).compute_mean() == {"a\nb": 1.0, "[c": 2.0}
