"""Tests of dbrdist.training.extensions.shifts."""

from __future__ import annotations

import math
import warnings

import pytest

from dbrdist import optimizers
from dbrdist.errors import ScheduleError
from dbrdist.training import extensions
from dbrdist.training.extensions import shifts
from tests.each import each
from tests.training.training_helpers import Clock, restore, saved


class Optimizer:
    lr = 2.0


class Trainer:
    def __init__(self):
        self.updater = self
        self.optimizer = Optimizer()

    def get_optimizer(self, name):
        assert name == "main"
        return self.optimizer


CASES = [
    (lambda: extensions.ExponentialShift("lr", 0.5), [2, 1, 0.5, 0.25]),
    (lambda: extensions.ExponentialShift("lr", 0.5, init=8, target=3), [8, 4, 3, 3]),
    (lambda: extensions.ExponentialShift("lr", 2, init=1, target=3), [1, 2, 3, 3]),
    (lambda: extensions.ExponentialShift("lr", 2, init=-1, target=-3), [-1, -2, -3, -3]),
    (lambda: extensions.InverseShift("lr", 1, 2, init=36), [36, 9, 4, 2.25]),
    (lambda: extensions.InverseShift("lr", 1, 2, init=36, target=3), [36, 9, 4, 3]),
    (lambda: extensions.LinearShift("lr", (1, 3), (1, 3)), [1, 1, 2, 3, 3]),
    (lambda: extensions.StepShift("lr", 0.5, 2), [2, 2, 1, 1, 0.5]),
    (lambda: extensions.MultistepShift("lr", 0.1, [1, 3], 100), [100, 10, 10, 1]),
    (lambda: extensions.PolynomialShift("lr", 2, 4), [2, 1.125, 0.5, 0.125, 0, 0]),
    (lambda: extensions.PolynomialShift("lr", 2, 4, target=0.4), [2, 1.125, 0.5, 0.4, 0.4]),
    (lambda: extensions.WarmupShift("lr", 1, 4, 3), [1, 1.5, 2, 2.5, 3, 3]),
]


def values(make, num, resume_at=None):
    trainer, extension = Trainer(), make()
    extension.initialize(trainer)
    seen = [trainer.optimizer.lr]
    for i in range(1, num):
        if i == resume_at:
            trainer, extension = Trainer(), restore(saved(extension), make())
            extension.initialize(trainer)
            assert trainer.optimizer.lr == seen[-1]
        extension(trainer)
        seen.append(trainer.optimizer.lr)
    return seen


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("resume_at", [None, 1, 3])
def test_values(case, resume_at):
    make, expected = CASES[case]
    assert values(make, len(expected), resume_at) == pytest.approx(expected)


def test_a_resumed_shift_begins_where_the_program_says_now():
    trainer, before = Trainer(), extensions.ExponentialShift("lr", 0.5, init=8)
    before.initialize(trainer)
    for _ in range(2):
        before(trainer)
    after = restore(saved(before), extensions.ExponentialShift("lr", 0.5, init=80))
    after.initialize(trainer)
    after(trainer)
    assert trainer.optimizer.lr == 10


def test_another_optimizer():
    other = Optimizer()
    extension = extensions.ExponentialShift("lr", 0.5, optimizer=other)
    trainer = Trainer()
    extension.initialize(trainer)
    extension(trainer)
    assert (other.lr, trainer.optimizer.lr) == (1, 2)


def test_a_negative_rate_is_refused():
    with pytest.raises(ValueError, match="ExponentialShift: rate: expected a number of 0 or more, got -1"):
        extensions.ExponentialShift("lr", -1)


def test_follow_schedule_sets_the_value_of_the_next_step():
    class Progress(Trainer):
        epoch_detail = 0.0

    trainer, seen = Progress(), []
    by_name = extensions.FollowSchedule(lambda epoch: 3 * epoch)
    by_function = extensions.FollowSchedule(lambda epoch: epoch - 1, seen.append)
    for extension in (by_name, by_function):
        extension.initialize(trainer)
    assert (trainer.optimizer.lr, seen) == (0, [-1])
    trainer.epoch_detail = 2.5
    for extension in (by_name, by_function):
        extension(trainer)
    assert (trainer.optimizer.lr, seen) == (7.5, [-1, 1.5])


@each(
    **{"value, words": [
        (1.0, None),
        (2.0, "expected a number below 2, got 2.0 for the step after 7 "),
        (math.nan, "expected a finite number, got nan for the step after 7 "),
        ("x", "expected a finite number, got 'x' for the step after 7 "),
    ]}
)  # fmt: skip
def test_a_value_that_will_not_do_ends_the_run(value, words):
    trainer, asked = Trainer(), []
    trainer.epoch_detail, trainer.iteration = 3.5, 7

    def refuse(value):
        asked.append(value)
        return None if value < 2 else "a number below 2"

    follow = extensions.FollowSchedule(lambda epoch: value, "lr", refuse, "momentum's schedule")
    if words is None:
        follow(trainer)
        assert trainer.optimizer.lr == value
    else:
        with pytest.raises(ScheduleError, match=f"^momentum's schedule: {words}"):
            follow(trainer)
        assert trainer.optimizer.lr == 2.0
    assert asked == ([value] if value in (1.0, 2.0) else [])
    with pytest.raises(ScheduleError, match=r"^the schedule of lr: expected a finite number"):
        extensions.FollowSchedule(lambda epoch: math.inf)(trainer)
    with pytest.raises(ScheduleError, match=r"^the schedule of a hyperparameter: expected a finite number"):
        extensions.FollowSchedule(lambda epoch: math.inf, asked.append)(trainer)


def test_shifts_end_at_their_target_from_either_side():
    for rate, target, values in (
        (0.5, 0.25, [1, 0.5, 0.25, 0.25]), (2.0, 4.0, [1, 2, 4, 4]), (0.5, None, [1, 0.5, 0.25, 0.125]),
        (1.0, 3.0, [3, 3, 3, 3]), (1.0, 0.5, [1, 1, 1, 1]),
    ):  # fmt: skip
        shift = extensions.ExponentialShift("lr", rate, 1.0, target)
        assert [shift.value(t) for t in range(4)] == values
    down, up, still = (
        extensions.StepShift("lr", gamma, 2, 1.0, target) for gamma, target in ((0.5, 0.3), (2, 3), (1, 2))
    )
    assert [down.value(t) for t in range(6)] == [1, 1, 0.5, 0.5, 0.3, 0.3]
    assert [up.value(t) for t in range(6)] == [1, 1, 2, 2, 3, 3]
    assert [still.value(t) for t in (0, 5)] == [2, 2]
    assert extensions.ExponentialShift("lr", 0, 1.0).value(3) == 0
    own, clock = optimizers.SGD(0.5), Clock()
    shift = extensions.ExponentialShift("lr", 0.5, optimizer=own)
    shift.initialize(clock)
    assert shift.init == 0.5 == own.lr
    shift(clock)
    assert own.lr == 0.25
    assert isinstance(shift, shifts.ExponentialShift)


def test_a_rate_of_zero_is_taken():
    class Trainer:
        class optimizer:
            lr = 2.0

        updater = None

    shift = extensions.ExponentialShift("lr", 0.0, init=3.0, optimizer=Trainer.optimizer)
    shift.initialize(Trainer)
    assert Trainer.optimizer.lr == 3
    shift(Trainer)
    assert Trainer.optimizer.lr == 0


def test_a_negative_exponent_raises_up_to_the_target():
    shift = extensions.PolynomialShift("x", -0.5, 10, init=2.0, target=2.2)
    assert [shift.value(t) for t in (0, 1, 2)] == [2.0, pytest.approx(2 * 0.9**-0.5), 2.2]
    with pytest.raises(ValueError, match="rate: expected a number of 0 or more, got -1"):
        extensions.ExponentialShift("x", -1)


@pytest.mark.parametrize("pair", [3, (1,), (1, 2, 3)])
def test_a_range_is_two_numbers(pair):
    with pytest.raises(ValueError) as caught:
        extensions.LinearShift("lr", pair, (0, 1))
    assert str(caught.value) == f"LinearShift: value_range: expected two numbers, got {pair!r}"
    with pytest.raises(ValueError) as caught:
        extensions.LinearShift("lr", (0, 1), pair)
    assert str(caught.value) == f"LinearShift: time_range: expected two numbers, got {pair!r}"


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: extensions.PolynomialShift("x", 0.5, 10, init=2.0, target=1.95), [2.0, 1.95, 1.95]),
        (lambda: extensions.PolynomialShift("x", 0, 10, init=2.0, target=1.0), [2.0, 2.0, 2.0]),
        (lambda: extensions.InverseShift("x", 1, 0.5, init=2.0, target=1.5), [2.0, 1.5, 1.5]),
        (lambda: extensions.InverseShift("x", 1, -1, init=2.0, target=5.0), [2.0, 4.0, 5.0]),
        (lambda: extensions.InverseShift("x", 0, 2, init=2.0), [2.0, 2.0, 2.0]),
    ],
)  # fmt: skip
def test_a_target_is_below_what_falls_and_above_what_rises(make, values):
    shift = make()
    assert [shift.value(t) for t in range(3)] == pytest.approx(values)


def test_a_speed_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"^InverseShift: gamma: expected 0 or more, got -0.5$"):
        extensions.InverseShift("x", -0.5, 1)


@pytest.mark.parametrize(
    ("gamma", "step", "is_odd"),
    [(2, 0.5, True), (1, 0.5, True), (0.5, 0.5, False), (2, 1, False), (1.5, 1.5, False), (30000, 0.1, True)],
)
def test_factor_and_step_in_the_other_order_are_warned_of(gamma, step, is_odd):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        extensions.StepShift("x", gamma, step)
    words = f"StepShift: gamma is {gamma:g} and step {step:g}; write StepShift(attr, gamma, step), a factor first"
    assert [str(one.message) for one in seen] == [words] * is_odd
