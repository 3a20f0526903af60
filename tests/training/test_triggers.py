"""Tests of dbrdist.training.triggers."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dbrdist.core.model.reporter import DictSummary
from dbrdist.errors import UsageWarning
from dbrdist.training import extensions, get_trigger, plotting, triggers
from tests.each import each
from tests.training.training_helpers import Clock, Counting, Line, restore, saved


def fired(trigger, clock, steps):
    return [clock.iteration for _ in range(steps) if trigger(clock.tick())]


@pytest.mark.parametrize(
    ("period", "unit", "steps_per_epoch", "expected"),
    [
        (3, "iteration", 4, [3, 6, 9, 12]),
        (1, "iteration", 4, list(range(1, 13))),
        (1, "epoch", 4, [4, 8, 12]),
        (2, "epoch", 4, [8]),
        (0.5, "epoch", 4, [2, 4, 6, 8, 10, 12]),
        (0.1, "epoch", 10, list(range(1, 13))),
        (0.3, "epoch", 10, [3, 6, 9, 12]),
        (1, "epoch", 2.5, [3, 5, 8, 10]),
        (0.1, "epoch", 4, list(range(1, 13))),
        (1.1, "iteration", 4, [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (2.5, "iteration", 4, [3, 5, 8, 10]),
    ],
)
def test_interval(period, unit, steps_per_epoch, expected):
    assert fired(triggers.IntervalTrigger(period, unit), Clock(steps_per_epoch), 12) == expected


@pytest.mark.parametrize("stop", range(1, 8))
def test_interval_goes_on_after_a_resume(stop):
    straight = fired(triggers.IntervalTrigger(0.75, "epoch"), Clock(), 12)
    clock, first = Clock(), triggers.IntervalTrigger(0.75, "epoch")
    done = fired(first, clock, stop)
    second = restore(saved(first), triggers.IntervalTrigger(0.75, "epoch"))
    assert done + fired(second, clock, 12 - stop) == straight


@pytest.mark.parametrize("unit", ["iteration", "epoch"])
def test_what_is_first_asked_late_looks_at_the_last_step_alone(unit):
    make = [
        lambda: triggers.IntervalTrigger(3 if unit == "iteration" else 0.75, unit),
        lambda: triggers.ManualScheduleTrigger([3 if unit == "iteration" else 0.75], unit),
    ]
    for trigger, after in [(trigger, after) for trigger in make for after in range(1, 6)]:
        clock = Clock()
        for _ in range(after):
            clock.tick()
        assert trigger()(clock) == (after == 3)
    for trigger in [one() for one in make]:
        clock = Clock()
        assert not trigger(clock)  # before the first step
        for _ in range(5):
            clock.tick()
        assert trigger(clock)  # all that it has not seen since


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_whole_periods_in_steps_fire_as_any_number_does(period):
    rng = np.random.default_rng(period)
    whole, any_number = get_trigger((period, "iteration")), get_trigger((float(period), "iteration"))
    trainer = SimpleNamespace(updater=SimpleNamespace(iteration=0))
    for skipped in rng.integers(0, 2 * period, 100).tolist():  # steps between two calls
        before, trainer.updater.iteration = trainer.updater.iteration, trainer.updater.iteration + skipped
        assert whole(trainer) == any_number(trainer)
        if before:
            assert whole._passed.iteration == trainer.updater.iteration


def test_interval_counts_what_it_did_not_see():
    """Called every third step only, it still fires once for each period that passed."""
    clock, trigger = Clock(), triggers.IntervalTrigger(4, "iteration")
    seen = []
    for _ in range(6):
        clock.tick()
        clock.tick()
        if trigger(clock.tick()):
            seen.append(clock.iteration)
    assert seen == [6, 9, 12, 18]


@pytest.mark.parametrize("arguments", [(0, "epoch"), (-1, "iteration"), (1, "epochs"), (float("nan"), "epoch")])
def test_interval_refuses(arguments):
    with pytest.raises(ValueError, match="expected a trigger's"):
        triggers.IntervalTrigger(*arguments)


def test_get_trigger():
    assert isinstance(get_trigger((2, "epoch")), triggers.IntervalTrigger)
    assert not get_trigger(None)(Clock().tick())
    once = triggers.OnceTrigger()
    assert get_trigger(once) is once
    with pytest.raises(TypeError, match="expected a trigger, "):
        get_trigger(3)


@pytest.mark.parametrize(
    ("points", "unit", "expected"),
    [([2, 5], "iteration", [2, 5]), ([1, 2.5], "epoch", [4, 10]), (1.1, "epoch", [5]), ([0.25, 0.3], "epoch", [1, 2])],
)
def test_manual_schedule(points, unit, expected):
    trigger = triggers.ManualScheduleTrigger(points, unit)
    assert fired(trigger, Clock(), 12) == expected
    assert trigger.finished


def test_manual_schedule_after_a_resume():
    clock, first = Clock(), triggers.ManualScheduleTrigger([2, 5], "iteration")
    assert fired(first, clock, 3) == [2]
    second = restore(saved(first), triggers.ManualScheduleTrigger([2, 5], "iteration"))
    assert not second.finished
    assert fired(second, clock, 5) == [5]


def test_once():
    trigger = triggers.OnceTrigger()
    assert fired(trigger, Clock(), 3) == [1]
    assert restore(saved(trigger), triggers.OnceTrigger()).finished
    assert fired(restore(saved(trigger), triggers.OnceTrigger(call_on_resume=True)), Clock(), 3) == [1]


def test_time():
    clock, trigger = Clock(), triggers.TimeTrigger(10)
    seen = []
    for seconds in (1, 9, 10, 12, 19, 45, 49, 50):
        clock.elapsed_time = seconds
        if trigger(clock):
            seen.append(seconds)
    assert seen == [10, 45, 50]
    again = restore(saved(trigger), triggers.TimeTrigger(10))
    clock.elapsed_time = 55
    assert not again(clock)


@pytest.mark.parametrize(
    ("make", "expected"), [(triggers.MaxValueTrigger, [4, 12]), (triggers.MinValueTrigger, [4, 8, 16])]
)
def test_best_value_compares_the_means_of_intervals(make, expected):
    clock, trigger = Clock(), make("accuracy")
    values = [1, 1, 1, 1, 0, 0, 0, 3, 2, 2, 2, 2, -1, -1, -1, -1]
    seen = []
    for i, value in enumerate(values):
        if trigger(clock.tick(accuracy=value)):
            seen.append(clock.iteration)
        if i == 9:
            trigger = restore(saved(trigger), make("accuracy"))
    assert seen == expected


def test_best_value_without_values_does_not_fire():
    with pytest.warns(UsageWarning, match="MinValueTrigger: nobody has reported 'main/loss'") as given:
        assert fired(triggers.MinValueTrigger("main/loss"), Clock(), 8) == []
    assert len(given) == 1


def early(values, resume_at=None, **arguments):
    clock, trigger = Clock(1), triggers.EarlyStoppingTrigger(**arguments)
    for i, value in enumerate(values):
        if trigger(clock.tick(**{"main/loss": value, "accuracy": value})):
            return clock.iteration
        if i == resume_at:
            trigger = restore(saved(trigger), triggers.EarlyStoppingTrigger(**arguments))
    return None


@pytest.mark.parametrize("resume_at", [None, 0, 2])
def test_early_stopping(resume_at):
    assert early([5, 4, 4, 6, 3], resume_at, patience=2) == 4
    assert early([5, 4, 6, 3, 3, 3], resume_at, patience=2) == 6
    assert early([1, 2, 3, 3, 3], resume_at, patience=2, monitor="accuracy") == 5
    assert early([3, 2, 1], resume_at, patience=2, monitor="accuracy") == 3
    assert early([3, 2, 1, 0], resume_at, max_trigger=(2, "epoch")) == 2


def test_early_stopping_warns_where_nothing_is_reported():
    with pytest.warns(UserWarning, match="nothing reported 'main/loss'"):
        assert not triggers.EarlyStoppingTrigger(check_trigger=(1, "iteration"))(Clock().tick())


def test_early_stopping_tells_the_length():
    assert triggers.EarlyStoppingTrigger(max_trigger=(7, "epoch")).get_training_length() == (7, "epoch")


def test_any_trigger_asks_all():
    """Both are asked at each call, or else an interval would count again what it has already fired for."""
    both = triggers.AnyTrigger((3, "iteration"), (2, "iteration"))
    assert fired(both, Clock(), 12) == [2, 3, 4, 6, 8, 9, 10, 12]
    clock, first = Clock(), triggers.AnyTrigger((3, "iteration"), triggers.EndTrigger(9, 5))
    assert fired(first, clock, 4) == [3]
    second = restore(saved(first), triggers.AnyTrigger((3, "iteration"), triggers.EndTrigger(9, 5)))
    assert fired(second, clock, 3) == [5, 6, 7]


@pytest.mark.parametrize(
    ("end", "expected", "length"),
    [
        (triggers.EndTrigger(1.5), [6, 7, 8], (1.5, "epoch")),
        (triggers.EndTrigger(1.5, 5), [5, 6, 7, 8], (5, "iteration")),
        (triggers.EndTrigger(1.5, 7), [6, 7, 8], (7, "iteration")),
    ],
)
def test_end(end, expected, length):
    assert fired(end, Clock(4), 8) == expected
    assert end.get_training_length() == length


def test_time_by_another_clock():
    trigger = triggers.TimeTrigger(2.0, lambda trainer: trainer.iteration * 1.5)
    assert fired(trigger, Clock(), 6) == [2, 3, 4, 6]  # at 3.0, 4.5, 6.0 and 9.0 seconds


def test_an_end_that_several_ask_for_is_that_of_each_trainer_and_step():
    end, fast, slow = triggers.EndTrigger(1), Clock(2), Clock(4)
    found = []
    for _ in range(4):
        for clock in (fast.tick(), slow.tick()):
            found.append((end(clock), end(clock)))
    assert found == [(ends, ends) for ends in (False, False, True, False, True, False, True, True)]


def test_triggers_from_any_form():
    assert str(triggers.IntervalTrigger(2, "epoch")) == "IntervalTrigger(2, 'epoch')"
    assert not triggers.get_trigger(None)(Clock().tick())
    fires = triggers.get_trigger((2, "iteration"))
    clock = Clock()
    assert [fires(clock.tick()) for _ in range(4)] == [False, True, False, True]
    assert triggers.get_trigger(fires) is fires


def test_a_time_trigger_fires_at_its_period():
    clock = Clock()
    trigger, other = triggers.TimeTrigger(2.0), triggers.TimeTrigger(2.0, lambda trainer: trainer.elapsed_time / 2)
    fired = []
    for clock.elapsed_time in (0.0, 1.9, 2.0, 3.9, 4.0, 9.5, 9.9, 10.0):
        fired.append((trigger(clock), other(clock)))
    assert fired == [(False, False), (False, False), (True, False), (False, False), (True, True), (True, True),
                     (False, False), (True, False)]  # fmt: skip


@each(points=[[1.5, 2], 2.0, [0.25]])
def test_points_of_a_schedule_are_passed_once(points):
    trigger, clock = triggers.ManualScheduleTrigger(points, "epoch"), Clock(4.0)
    wanted = points if isinstance(points, list) else [points]
    for n in range(1, 13):
        assert trigger(clock.tick()) == (n / 4 in wanted)
        assert trigger.finished == (n / 4 >= max(wanted))


@each(
    case=[
        ("auto", "main/loss", [3, 2, 2, 2, 1, 1], 2, 4), ("auto", "main/accuracy", [1, 2, 2, 3, 3, 2], 2, 6),
        ("max", "main/loss", [1, 2, 2, 1], 2, 4), ("min", "main/accuracy", [2, 1, 1, 2], 2, 4),
        ("min", "x", [3, 2, 3, 4, 5], None, 5), ("min", "x", [1, 1], 1, 2),
    ]
)  # fmt: skip
def test_early_stopping_counts_checks_without_improvement(case):
    mode, monitor, values, patience, stops_at = case
    stop, clock = triggers.EarlyStoppingTrigger((1, "iteration"), monitor, patience, mode), Clock(100.0)
    fired = [stop(clock.tick(**{monitor: float(v)})) for v in values[:stops_at]]
    assert fired == [False] * (stops_at - 1) + [True]
    assert stop.get_training_length() == (100, "epoch")


def test_early_stopping_says_so_where_it_is_asked(capsys):
    stop, clock = triggers.EarlyStoppingTrigger((1, "iteration"), "x", 3, "min", verbose=True), Clock(1.0)
    for value in (2.0, 1.0, 1.0, 0.5, 0.6):
        stop(clock.tick(x=value))
    assert capsys.readouterr().out.splitlines() == [
        f"epoch {n}: x has not improved for 1 checks" for n in (3, 5)
    ]  # fmt: skip
    longest = triggers.EarlyStoppingTrigger((1, "iteration"), "x", 30, max_trigger=(2, "epoch"))
    clock = Clock(2.0)
    assert [longest(clock.tick(x=1.0)) for _ in range(4)] == [False, False, False, True]
    with pytest.warns(UserWarning, match="EarlyStoppingTrigger: nothing reported 'x' since the last check"):
        assert not triggers.EarlyStoppingTrigger((1, "iteration"), "x")(Clock().tick())


def test_a_run_ends_at_its_epochs_or_iterations():
    for end, at in ((triggers.EndTrigger(1.5), 6), (triggers.EndTrigger(9, 3), 3), (triggers.EndTrigger(0.5, 100), 2)):
        clock = Clock(4.0)
        assert [end(clock.tick()) for _ in range(8)] == [n >= at for n in range(1, 9)]
    assert triggers.EndTrigger(1.5).get_training_length() == (1.5, "epoch")
    assert triggers.EndTrigger(1.5, 7).get_training_length() == (7, "iteration")


@each(is_finished=[False, True])
def test_a_schedule_by_hand_knows_after_a_resume_whether_it_is_finished(is_finished):
    first = triggers.ManualScheduleTrigger([2], "iteration")
    clock = Clock()
    for _ in range(2 + is_finished):
        clock.tick()
        first(clock)
    first.finished = is_finished
    assert restore(saved(first), triggers.ManualScheduleTrigger([2], "iteration")).finished is is_finished


def plain(trainer):
    return False


def average(trigger):
    average = extensions.WeightAverage(Line(), 0.5)
    return average.around(extensions.MicroAverage("a", "b", "c", trigger))


# What is made with a trigger, and where that one's state is.
WITHIN = {
    "LogReport": (lambda t: extensions.LogReport(trigger=t), "_trigger"),
    "PrintReport": (lambda t: extensions.PrintReport([], extensions.LogReport(trigger=t)), "_log_report/_trigger"),
    "PlotReport": (lambda t: extensions.PlotReport(["a"], trigger=t), "_trigger"),
    "VariableStatisticsPlot": (lambda t: extensions.VariableStatisticsPlot(Line(), trigger=t), "_trigger"),
    "ParameterStatistics": (lambda t: extensions.ParameterStatistics(Line(), trigger=t), "_trigger"),
    "MicroAverage": (lambda t: extensions.MicroAverage("a", "b", "c", t), "_trigger"),
    "an extension on averages": (average, "_trigger"),
    "BestValueTrigger": (lambda t: triggers.BestValueTrigger("a", max, t), "interval_trigger"),
    "MaxValueTrigger": (lambda t: triggers.MaxValueTrigger("a", t), "interval_trigger"),
    "MinValueTrigger": (lambda t: triggers.MinValueTrigger("a", t), "interval_trigger"),
    "EarlyStoppingTrigger": (lambda t: triggers.EarlyStoppingTrigger(t, max_trigger=plain), "check_trigger"),
    "its end": (lambda t: triggers.EarlyStoppingTrigger(plain, max_trigger=t), "max_trigger"),
    "AnyTrigger": (lambda t: triggers.AnyTrigger(plain, t), "1"),
}  # fmt: skip


@each(kind=list(WITHIN))
def test_the_state_of_a_trigger_within_is_kept(kind, monkeypatch):
    monkeypatch.setattr(plotting, "available", lambda: True)
    make, place = WITHIN[kind]
    first, second = Counting(5), Counting()
    state = saved(make(first))
    assert state[f"{place}/count"] == 5
    restore(state, make(second))
    assert second.count == 5
    without = saved(make(plain))  # a function has no state
    assert sorted(without) == sorted(set(state) - {f"{place}/count"})
    restore(without, make(plain))


def filled(value):
    summary = DictSummary()
    for one in value:
        summary.add({"key": one})
    return summary


def shift():
    return extensions.ExponentialShift("lr", 0.5)


PASSED = {"_passed.iteration": 7, "_passed.epoch_detail": 1.75}
# A thing with some state, how to make another one, and the names of all that is kept.
STATES = {
    "a trigger of intervals": (lambda: triggers.IntervalTrigger(3, "epoch"), PASSED),
    "a trigger of points": (
        lambda: triggers.ManualScheduleTrigger([3], "epoch"), {**PASSED, "finished": True}),
    "a trigger that fires once": (triggers.OnceTrigger, {"_first": False}),
    "a trigger of seconds": (lambda: triggers.TimeTrigger(2.0), {"_next_seconds": 12.5}),
    "a trigger of the best": (
        lambda: triggers.MaxValueTrigger("key"), {"best_value": -2.5, "_summary": filled([1.0, 4.0])}),
    "a trigger of the end": (
        triggers.EarlyStoppingTrigger, {"best": 0.25, "count": 2, "_summary": filled([1.0, 4.0])}),
    "a log": (extensions.LogReport, {"_summary": filled([3.0, 5.0]), "_num_saved": 4}),
    "a plot": (
        lambda: extensions.PlotReport(["a", "b"]),
        {"_summary": filled([3.0, 5.0]), "_points": {"a": [(1, 2.5), (2, 3.5)], "b": []}}),
    "statistics": (lambda: extensions.ParameterStatistics(Line()), {"_summary": filled([3.0, 5.0])}),
    "a ratio of sums": (lambda: extensions.MicroAverage("a", "b", "c"), {"_numerator": 2.5, "_denominator": 3.5}),
    "a shift": (shift, {"_t": 3, "_init": 0.8, "_last_value": 0.1}),
    "a shift that has not begun": (shift, {"_t": 0, "_init": None, "_last_value": None}),
    "a graph": (lambda: extensions.DumpGraph("main/loss"), {"_is_done": True}),
    "averages": (lambda: extensions.WeightAverage(Line(), 0.5), {
        "_num_steps": 6, "_averages": {"w": np.array([3.0]), "b": np.array([4.0])}}),
}  # fmt: skip


def seen(thing, path):
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing.make_statistics() if isinstance(thing, DictSummary) else thing


@each(kind=list(STATES))
def test_all_of_a_state_is_kept(kind, monkeypatch):
    monkeypatch.setattr(plotting, "available", lambda: True)
    make, values = STATES[kind]
    first = make()
    for path, value in values.items():
        *owners, name = path.split(".")
        setattr(seen(first, ".".join(owners)) if owners else first, name, value)
    second = restore(saved(first), make())
    for path in values:
        found, expected = seen(second, path), seen(first, path)
        assert type(found) is type(expected)
        np.testing.assert_equal(found, expected)
    assert saved(second).keys() == saved(first).keys()


def test_whole_periods_are_counted():
    for period, unit, counts in ((3, "iteration", [0, 0, 0, 1, 1, 1, 2]), (0.5, "epoch", [0, 0, 1, 1, 2, 2, 3])):
        trigger, clock = triggers.IntervalTrigger(period, unit), Clock()
        found = [trigger.count]
        for _ in range(6):
            trigger(clock.tick())
            found.append(trigger.count)
        assert found == counts
    assert str(triggers.IntervalTrigger(3, "epoch")) == "IntervalTrigger(3, 'epoch')"
    assert triggers.IntervalTrigger(0.5, "epoch").get_training_length() == (0.5, "epoch")


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: triggers.TimeTrigger(0), ValueError, "expected a period above 0 seconds, got 0"),
        (lambda: triggers.TimeTrigger(float("nan")), ValueError, "expected a period above 0 seconds, got nan"),
        (lambda: triggers.IntervalTrigger(0, "epoch"), ValueError, "expected a trigger's period above 0, got 0"),
        (lambda: triggers.IntervalTrigger("1", "epoch"), ValueError, "expected a trigger's period above 0, got '1'"),
        (
            lambda: triggers.EarlyStoppingTrigger(patience=3, patients=4),
            TypeError,
            "EarlyStoppingTrigger: expected patience or its alias patients, got both",
        ),
        (
            lambda: triggers.EarlyStoppingTrigger(patience=-1),
            ValueError,
            "EarlyStoppingTrigger: patience: expected 0 or more, got -1",
        ),
        (
            lambda: triggers.EarlyStoppingTrigger(mode="best"),
            ValueError,
            "expected mode 'auto', 'min' or 'max', got 'best'",
        ),
        (
            lambda: triggers.ManualScheduleTrigger([1, "2"], "epoch"),
            TypeError,
            "ManualScheduleTrigger: points: expected numbers, got [1, '2']",
        ),
    ],
)
def test_arguments_that_make_no_trigger(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == words


def test_what_early_stopping_says_and_takes_by_default(capsys):
    """Three epochs without a lower loss; 100 epochs in any case."""
    clock, stop = Clock(1), triggers.EarlyStoppingTrigger(verbose=True)
    losses = {"main/loss": 1.0}, {"main/loss": 1.0}, {"main/loss": 0.5}, *3 * [{"main/loss": 0.5}]
    assert [stop(clock.tick(**loss)) for loss in losses] == [False] * 5 + [True]
    said = [(2, 1), (4, 1), (5, 2), (6, 3)]
    assert capsys.readouterr().out.splitlines() == [
        f"epoch {epoch}: main/loss has not improved for {count} checks" for epoch, count in said
    ]
    assert stop.get_training_length() == (100, "epoch") and (stop.patience, stop.verbose, stop.count) == (3, True, 3)
    quiet = triggers.EarlyStoppingTrigger(patients=0)
    assert quiet.patience == 0 and not quiet.verbose and quiet(clock.tick(**losses[0]))
    assert triggers.EarlyStoppingTrigger(patience=1).patience == 1
    assert capsys.readouterr().out == ""


def test_a_time_trigger_with_a_shorter_period_than_before():
    """The next time is no further away than the new period."""
    clock, before = Clock(), triggers.TimeTrigger(100)
    assert not before(clock)
    after = restore(saved(before), triggers.TimeTrigger(10))
    times = []
    for clock.elapsed_time in range(45):
        if after(clock):
            times.append(clock.elapsed_time)
    assert times == [10, 20, 30, 40]
    clock.elapsed_time = 75.0  # two periods have passed meanwhile
    assert after(clock) and not after(clock)
    clock.elapsed_time = 79.5
    assert not after(clock)
    clock.elapsed_time = 80.0
    assert after(clock)


def test_a_key_that_nobody_reports_is_said_once():
    """Also where the program calls the trigger at several of its lines."""
    for make, words in (
        (
            lambda: triggers.EarlyStoppingTrigger((1, "iteration")),
            "EarlyStoppingTrigger: nothing reported 'main/loss' since the last check: nobody has reported 'main/loss' "
            "so far; reported are loss; did you mean 'loss'?",
        ),
        (
            lambda: triggers.MaxValueTrigger("main/loss", (1, "iteration")),
            "MaxValueTrigger: nobody has reported 'main/loss' so far; reported are loss; did you mean 'loss'?, so it "
            "never fires",
        ),
    ):
        trigger, clock = make(), Clock()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not trigger(clock.tick(loss=1.0))
            assert not trigger(clock.tick(loss=1.0))
        assert [str(w.message) for w in caught] == [words]


def test_a_state_that_does_not_say_whether_it_fired():
    once, clock = triggers.OnceTrigger(), Clock()
    with pytest.warns(
        UsageWarning, match="OnceTrigger: the saved state does not say whether it fired, as in files of "
    ):
        once.serialize(lambda key, value: {}[key])
    assert not once(clock.tick()) and once.finished
    again = triggers.OnceTrigger(call_on_resume=True)
    with pytest.warns(UsageWarning):
        again.serialize(lambda key, value: {}[key])
    assert again(clock.tick()) and not again(clock.tick())


def test_two_triggers_of_a_kind_keep_their_own_states():
    def make():
        return triggers.AnyTrigger(triggers.TimeTrigger(10), triggers.TimeTrigger(100))

    clock, first = Clock(), make()
    clock.elapsed_time = 55.0
    assert first(clock)
    second = restore(saved(first), make())
    times = []
    for clock.elapsed_time in range(56, 125):
        if second(clock):
            times.append(clock.elapsed_time)
    assert times == [60, 70, 80, 90, 100, 110, 120]
    assert [trigger._next_seconds for trigger in second._triggers] == [130, 200]


@each(is_chainers=[False, True])
def test_where_a_trigger_counts_from(monkeypatch, is_chainers):
    """Ours from the step before its first call, Chainer's from the beginning of the run."""
    monkeypatch.setattr(triggers, "as_chainer", [is_chainers])
    for unit, at in (("iteration", 7), ("epoch", 1.75)):
        trigger, clock = triggers.IntervalTrigger(8 if unit == "iteration" else 2, unit), Clock(4)
        for _ in range(7):
            clock.tick()
        assert (clock.iteration, clock.epoch_detail)[unit == "epoch"] == at and not trigger(clock)
        assert trigger(clock.tick())
        late = triggers.IntervalTrigger(3 if unit == "iteration" else 0.75, unit)
        assert late(clock) is is_chainers  # at step 8 of an interval of 3, of which two have passed
    first = triggers.IntervalTrigger(1, "iteration")
    assert first(Clock(4).tick())
