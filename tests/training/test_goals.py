"""When a run evaluates, and when it has reached its goal, with a trainer whose positions are given."""

import warnings
from types import SimpleNamespace

import pytest

from dbrdist.core.files.serializer import DictionarySerializer, NpzDeserializer
from dbrdist.training.goals import GoalTrigger, OffsetTrigger
from tests.each import each


def trainer(iteration, per_epoch=10, **observation):
    updater = SimpleNamespace(
        iteration=iteration,
        epoch_detail=iteration / per_epoch,
        previous_epoch_detail=(iteration - 1) / per_epoch,
        is_new_epoch=iteration % per_epoch == 0,
    )
    return SimpleNamespace(updater=updater, observation=observation)


@each(
    **{
        "period, unit, offset, expected": [
            (4, "epoch", 0, [40, 80]),
            (4, "epoch", 1, [10, 50, 90]),
            (4, "epoch", 3, [30, 70]),
            (0.5, "epoch", 0.25, [3, 8, 13, 18]),
            (7, "iteration", 2, [2, 9, 16]),
            (7, "iteration", 0, [7, 14]),
        ]
    }
)
def test_offsets(period, unit, offset, expected):
    fires = OffsetTrigger(period, unit, offset)
    assert [i for i in range(1, 100) if fires(trainer(i))][: len(expected)] == expected


@each(offset=[-1, 4, 5])
def test_offsets_are_less_than_the_period(offset):
    with pytest.raises(ValueError, match="expected an offset from 0 to less than the period 4"):
        OffsetTrigger(4, "epoch", offset)


def ends(goal, values):
    """After which of the observations a goal is reached; None for never."""
    for i, value in enumerate(values, 1):
        seen = {} if value is None else {goal.key: value}
        if goal(trainer(i, **seen)):
            return i
    return None


NAN = float("nan")


@each(
    **{
        "key, options, values, expected": [
            ("validation/main/accuracy", {"target": 0.759}, [0.5, 0.7589, 0.759, 0.8], 3),
            ("validation/main/accuracy", {"target": 0.759}, [NAN, None, 0.76], 3),
            ("validation/main/loss", {"target": 1.0}, [2.0, 1.5, 1.0], 3),
            ("validation/main/loss", {"target": 1.0, "mode": "max"}, [0.5, 2.0], 2),
            ("x", {"patience": 2}, [3, 2, 2.5, 2, 1], 4),
            ("x", {"patience": 2}, [3, None, 2, NAN, None, NAN], 6),
            ("x", {"patience": 2, "mode": "max"}, [3, 4, 4, 4], 4),
            ("x", {"patience": 1, "target": 5}, [6, 5], 2),
            ("x", {"target": 0}, [3, 2], None),
        ]
    }
)
def test_goals(key, options, values, expected):
    goal = GoalTrigger(100, None, key, **options)
    assert ends(goal, values) == expected
    assert (goal.reason is None) == (expected is None)


@each(case=[(10, "is 5 after 1 epoch: "), (20, "is 5 after 2 epochs: "), (5, "is 5 after 0.5 epochs: ")])
def test_the_reason_counts_epochs(case):
    iteration, words = case
    goal = GoalTrigger(100, None, "x", target=4, mode="max")
    assert goal(trainer(iteration, x=5.0))
    assert words in goal.reason


def test_a_goal_is_asked_several_times_after_a_step():
    goal = GoalTrigger(100, None, "x", patience=2)
    for step, value in enumerate([3, 3], 1):
        for _ in range(5):
            assert not goal(trainer(step, x=value))
    assert goal(trainer(3, x=3))


def test_the_end_of_the_run_still_ends_it():
    assert ends(GoalTrigger(0.5, None, "x", target=0), [None] * 9) == 5
    assert ends(GoalTrigger(9, 3, "x", target=0), [None] * 9) == 3


@each(
    **{
        "key, seen, expected": [
            ("nosuch", {"main/loss": 1.0}, "nobody has reported 'nosuch' so far; reported are main/loss"),
            ("validation/main/acc", {"validation/main/accuracy": 1.0}, "did you mean 'validation/main/accuracy'?"),
            ("validation/main/accuracy", {"main/loss": 1.0}, None),  # an evaluator that is due later
            ("validation/main/accuracy", {"validation/main/accuracy": 1.0}, None),
            ("main/loss", {"main/loss": 1.0}, None),
        ]
    }
)
def test_a_value_that_nobody_reports_is_said_once_behind_the_first_epoch_and_its_evaluation(key, seen, expected):
    goal, number = GoalTrigger(9, None, key, patience=50), 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(1, 40):
            now = trainer(iteration)
            now.get_extension = ["validation"].index  # a ValueError for any other name
            now.observation = {"main/loss": 1.0} if "main/loss" in seen else {}
            goal(now)  # as an evaluator's trigger asks
            if now.updater.is_new_epoch:
                now.observation |= seen
            goal(now)
            number = number or (iteration if caught else 0)
    assert [str(w.message) for w in caught if expected is None or expected not in str(w.message)] == []
    assert len(caught) == (expected is not None) and number in (0, 11)


def saved(goal):
    serializer = DictionarySerializer()
    goal.serialize(serializer)
    return serializer.target


def test_a_goal_goes_on_counting_after_a_resume():
    first = GoalTrigger(100, None, "x", patience=3)
    assert ends(first, [3, 2, 4]) is None
    second = GoalTrigger(100, None, "x", patience=3)
    second.serialize(NpzDeserializer(saved(first)))
    assert not second(trainer(4, x=5))
    assert second(trainer(5, x=2))


def test_a_goal_of_another_quantity_starts_anew():
    first = GoalTrigger(100, None, "x", patience=2)
    ends(first, [3, 3, 3])
    other = GoalTrigger(100, None, "y", patience=2)
    other.serialize(NpzDeserializer(saved(first)))
    assert (other.best, other.count, other.reason) == (None, 0, None)
    same = GoalTrigger(100, None, "x", patience=2)
    same.serialize(NpzDeserializer(saved(first)))
    assert same.reason is not None
    fresh = GoalTrigger(100, None, "x", target=1)
    fresh.serialize(NpzDeserializer({}))  # of a run that had no goal
    assert fresh.best is None


@each(options=[{"mode": "largest"}, {"patience": 0}])
def test_bad_goals_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        GoalTrigger(1, None, "x", **options)


@each(values=[("min", [5, 3, 4]), ("max", [3, 5, 4])])
def test_a_goal_in_another_direction_starts_anew(values):
    mode, observed = values
    first = GoalTrigger(100, None, "loss", patience=9, mode=mode)
    assert ends(first, observed) is None and first.best == (min if mode == "min" else max)(observed)
    other = GoalTrigger(100, None, "loss", patience=9, mode="max" if mode == "min" else "min")
    other.serialize(NpzDeserializer(saved(first)))
    assert (other.best, other.count) == (None, 0)
    same = GoalTrigger(100, None, "loss", patience=9, mode=mode)
    same.serialize(NpzDeserializer(saved(first)))
    assert (same.best, same.count) == (first.best, 1)
    earlier = {key: value for key, value in saved(first).items() if "best_value" not in key}
    same.serialize(NpzDeserializer(earlier))  # of a version that saved the key alone
    assert same.best == first.best


def test_a_value_is_looked_for_again_after_each_epoch():
    """The evaluation comes after the second epoch, and reports something else."""
    goal, at = GoalTrigger(9, None, "validation/main/acc", patience=50), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in range(1, 40):
            now = trainer(iteration, **{"main/loss": 1.0})
            now.get_extension = ["validation"].index
            if iteration == 20:
                now.observation["validation/main/accuracy"] = 1.0
            goal(now)
            goal(now)
            at += [iteration] * len(caught)
            caught.clear()
    assert at == [21]
    assert goal._observed_last is None
