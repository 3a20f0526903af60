"""When something happens in a run: callables that take the trainer and say yes or no after each step."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from dbrdist.core.array.chainer_mode import as_chainer
from dbrdist.core.files import standard_streams
from dbrdist.core.files.serializer import AbstractSerializer, described, is_about, loads, saved_entry
from dbrdist.core.model.reporter import DictSummary
from dbrdist.core.names import missing_names
from dbrdist.core.usage import foreign_names, mistakes
from dbrdist.optimizers.schedules import whole_periods as _whole_periods
from dbrdist.training import observed_keys

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer
    from dbrdist.training.updater import Updater

__all__ = [
    "AnyTrigger", "BestValueTrigger", "DictSummary", "EarlyStoppingTrigger", "EndTrigger", "IntervalTrigger",
    "ManualScheduleTrigger", "MaxValueTrigger", "MinValueTrigger", "OnceTrigger", "TimeTrigger", "get_trigger",
]  # fmt: skip

Trigger: TypeAlias = "Callable[[Trainer], bool]"
TriggerLike: TypeAlias = "Trigger | tuple[float, str] | None"  # what get_trigger takes; None never fires

_SLACK = 1e-10  # epochs are quotients of sample counts: 0.3 / 0.1 must count as 3


class _Passed:
    """The stretch of the run since a trigger's last call: its state."""

    def __init__(self) -> None:
        # Chainer's trigger counts from the beginning of the run, ours from the step before its first call.
        self.iteration = 0 if as_chainer[0] else -1
        self.epoch_detail = 0.0 if as_chainer[0] else -1.0

    def since_last_call(self, updater: Updater, unit: str) -> tuple[float, float]:
        """The position at the last call, or before the last step where there was none, and the position now."""
        before: float
        now: float
        if unit == "epoch":
            now, before = updater.epoch_detail, self.epoch_detail
            self.epoch_detail = now
            if before < 0:  # a program's own iterator may not know
                before = getattr(updater, "previous_epoch_detail", None)
                before = before if isinstance(before, (int, float)) else 0.0
            return before, now
        now, before = updater.iteration, self.iteration
        self.iteration = now
        return max(now - 1, 0) if before < 0 else before, now

    def serialize(self, serializer: AbstractSerializer, unit: str) -> None:
        """A position in another unit than the last run's is not where this trigger was last called."""
        if as_chainer[0] and loads(serializer) and saved_entry(serializer, "previous_iteration") is None:
            mistakes.warn(
                "a trigger's last call is not in the saved state, as in files of Chainer 3: it counts from now"
            )
            self.iteration, self.epoch_detail = -1, -1.0
        elif is_about(serializer, unit):
            self.iteration = int(serializer("previous_iteration", self.iteration))
            self.epoch_detail = float(serializer("previous_epoch_detail", self.epoch_detail))


_UNITS = {
    "epoch": "epoch", "epochs": "epoch", "ep": "epoch", "iteration": "iteration", "iterations": "iteration",
    "iter": "iteration", "iters": "iteration", "step": "iteration", "steps": "iteration", "batch": "iteration",
}  # fmt: skip


def _check_unit(unit: str, period: float | str | None = None) -> None:
    if unit not in ("epoch", "iteration"):
        words = f"expected a trigger's unit 'epoch' or 'iteration', got {unit!r}"
        meant = _UNITS.get(unit.lower()) if isinstance(unit, str) else None
        if isinstance(period, str) and period.lower() in _UNITS and not isinstance(unit, str):
            words += f"; write ({unit!r}, {_UNITS[period.lower()]!r})"
        raise ValueError(words + (f"; did you mean {meant!r}?" if meant else ""))


class IntervalTrigger:
    """Fires every `period` epochs or iterations; a period in epochs may be a fraction.

    It compares the position with that of its last call, so it fires once per period even where steps or calls are
    coarser than the period.

    Args:
        period: number of units between two firings; fractions of an epoch are allowed.
        unit: 'epoch' or 'iteration'.

    Example:
        >>> every = training.IntervalTrigger(2, "epoch")
    """

    def __init__(self, period: float, unit: str):
        _check_unit(unit, period)
        if isinstance(period, str) or not period > 0:
            raise ValueError(f"expected a trigger's period above 0, got {period!r}")
        self.period = period
        self.unit = unit
        self._passed = _Passed()

    def __call__(self, trainer: Trainer) -> bool:
        period, passed, updater = self.period, self._passed, trainer.updater
        counts_steps = type(period) is int and self.unit == "iteration"
        if counts_steps and passed.iteration >= 0:  # the same in less time
            before, passed.iteration = passed.iteration, updater.iteration
            return before // period != passed.iteration // period  # type: ignore[no-any-return]
        before, now = passed.since_last_call(updater, self.unit)
        return _whole_periods(before, period) != _whole_periods(now, period)

    @property
    def count(self) -> int:
        """The whole periods until the last call."""
        passed = self._passed.epoch_detail if self.unit == "epoch" else self._passed.iteration
        return max(_whole_periods(passed, self.period), 0)

    def get_training_length(self) -> tuple[float, str]:
        """As a stop trigger: (period, unit)."""
        return self.period, self.unit

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        self._passed.serialize(serializer, self.unit)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.period}, {self.unit!r})"


def get_trigger(trigger: Any) -> Callable[[Any], bool]:
    """A trigger from itself, from `(period, unit)`, or from None, which never fires.

    Args:
        trigger: a trigger, a pair such as (1, 'epoch'), or None for a trigger that never fires.

    Example:
        >>> training.get_trigger((1, "epoch")).unit
        'epoch'
    """
    if trigger is None:
        return _never
    if isinstance(trigger, type):
        raise mistakes.given_a_class("trigger", trigger, "a trigger")
    if callable(trigger):
        return trigger  # type: ignore[no-any-return]
    try:
        if isinstance(trigger, str):
            raise TypeError
        period, unit = trigger
    except (TypeError, ValueError):
        hint = f"; write ({trigger}, 'epoch') or ({trigger}, 'iteration')" if isinstance(trigger, (int, float)) else ""
        if isinstance(trigger, str) and trigger.lower() in _UNITS:
            hint = f"; write (1, {_UNITS[trigger.lower()]!r})"
        raise TypeError(f"expected a trigger, (period, unit) or None, got {trigger!r}{hint}") from None
    return IntervalTrigger(period, unit)


def _never(trainer: Trainer) -> bool:
    return False


def can_fire(trigger: TriggerLike) -> bool:
    """Whether the trigger can ever fire."""
    return trigger is not _never


def position_if_each_step(trigger: TriggerLike) -> Any:
    """The position of a trigger that fires with each step, as most do; None for any other.

    It fires where its ``iteration`` is not that of the updater, which then becomes its own: who does both need not
    call it.
    """
    if type(trigger) is not IntervalTrigger or (trigger.period, trigger.unit) != (1, "iteration"):
        return None
    trigger._passed.iteration = max(trigger._passed.iteration, 0)
    return trigger._passed


class ManualScheduleTrigger:
    """Fires when the run passes each of `points`, epochs or iterations; a point may be a fraction of an epoch.

    Args:
        points: a number, or a list of them: when to fire.
        unit: 'epoch' or 'iteration'.

    Example:
        >>> points = triggers.ManualScheduleTrigger([30, 60], "epoch")
    """

    def __init__(self, points: float | Sequence[float], unit: str):
        _check_unit(unit)
        self.points = list(points) if isinstance(points, Sequence) else [points]
        for point in self.points:
            if isinstance(point, str) or not hasattr(point, "__lt__"):
                raise TypeError(f"ManualScheduleTrigger: points: expected numbers, got {points!r}")
        self.unit = unit
        self.finished = False
        self._passed = _Passed()

    def __call__(self, trainer: Trainer) -> bool:
        before, now = self._passed.since_last_call(trainer.updater, self.unit)
        self.finished = all(point <= now + _SLACK for point in self.points)
        return any(before + _SLACK < point <= now + _SLACK for point in self.points)

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        if as_chainer[0] and loads(serializer) and saved_entry(serializer, "finished") is None:
            mistakes.warn("ManualScheduleTrigger: the saved state does not say whether it is finished, as of Chainer 3")
        elif is_about(serializer["points"], f"{self.points} {self.unit}"):
            self.finished = bool(serializer("finished", self.finished))
        self._passed.serialize(serializer, self.unit)


class OnceTrigger:
    """Fires at the first call, and at the first call after a resume where `call_on_resume` is true.

    Args:
        call_on_resume: fire once more when a run is resumed; default False.

    Example:
        >>> once = triggers.OnceTrigger()
    """

    def __init__(self, call_on_resume: bool = False):
        self._first = True
        self._on_resume = call_on_resume

    @property
    def finished(self) -> bool:
        """True if it will not fire again."""
        return not (self._first or self._on_resume)

    def __call__(self, trainer: Trainer) -> bool:
        fire = not self.finished
        self._first = False
        self._on_resume = False
        return fire

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        try:
            self._first = bool(serializer("first", self._first))
        except KeyError:
            mistakes.warn("OnceTrigger: the saved state does not say whether it fired, as in files of Chainer 4")
            self._first = False


class TimeTrigger:
    """Fires every `period` seconds of the run's elapsed time.

    `clock(trainer)` gives the seconds; None reads `trainer.elapsed_time`. Ranks need a common one
    (`comm.extensions.StepAgreement.elapsed_time`) for what they do together.

    Args:
        period: seconds between two firings, > 0.
        clock: function of the trainer that gives the seconds; None for trainer.elapsed_time.

    Example:
        >>> hourly = triggers.TimeTrigger(3600)
    """

    def __init__(self, period: float, clock: Callable[[Any], float] | None = None):
        if not period > 0:
            raise ValueError(f"expected a period above 0 seconds, got {period!r}")
        self.period = period
        self._clock = clock
        self._next_seconds = period

    def __call__(self, trainer: Trainer) -> bool:
        seconds = trainer.elapsed_time if self._clock is None else self._clock(trainer)
        self._next_seconds = min(self._next_seconds, seconds + self.period)  # the period may have been longer so far
        if seconds < self._next_seconds:
            return False
        self._next_seconds += self.period * (1 + (seconds - self._next_seconds) // self.period)
        return True

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        self._next_seconds = float(serializer("next_seconds", self._next_seconds))


def _optional(value: Any) -> float | None:
    """A saved best value; NaN, which earlier versions saved, is none."""
    return None if value is None or math.isnan(float(value)) else float(value)


class BestValueTrigger:
    """Fires at the end of an interval whose mean of the observed `key` is better than in all before.

    `compare(best, new)` is true where `new` is better; NaN never is. A snapshot stores the best value with the name of
    the key and of the comparison: a run that continues with another key or comparison starts anew.

    Args:
        key: name of the observed value.
        compare: function of the best value so far and the new one; true if the new one is better.
        trigger: how often to compare: a pair such as (1, 'epoch'), or a trigger; default (1, 'epoch').

    Example:
        >>> best = triggers.BestValueTrigger("validation/main/accuracy", lambda best, new: new > best)
    """

    def __init__(self, key: str, compare: Callable[[float, float], bool], trigger: Any = (1, "epoch")):
        self._key = key
        self._compare = compare
        self._interval_trigger = get_trigger(trigger)
        self._summary = DictSummary()
        self._has_warned = False
        self.best_value: float | None = None

    def __call__(self, trainer: Trainer) -> bool:
        if self._key in trainer.observation:
            self._summary.add({self._key: trainer.observation[self._key]})
        if not self._interval_trigger(trainer):
            return False
        means = self._summary.compute_mean()
        self._summary = DictSummary()
        if self._key not in means:
            is_due = observed_keys.is_due(self._key, trainer.observation, trainer)
            if self.best_value is None and not self._has_warned and not is_due:
                self._has_warned = True
                words = observed_keys.never_reported(self._key, trainer.observation)
                mistakes.warn(f"{type(self).__name__}: {words}, so it never fires")
            return False
        value = float(means[self._key])
        if math.isnan(value):
            return False
        if self.best_value is not None and not self._compare(self.best_value, value):
            return False
        self.best_value = value
        return True

    def forget(self) -> None:
        """Begin anew: values observed from now on are measured otherwise than the best one."""
        self.best_value, self._summary = None, DictSummary()

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        if hasattr(self._interval_trigger, "serialize"):
            self._interval_trigger.serialize(serializer["interval_trigger"])
        compare = getattr(self._compare, "__name__", type(self._compare).__name__)
        if is_about(serializer, f"{self._key} by {compare}"):
            self._summary.serialize(serializer["summary"])
            self.best_value = _optional(serializer("best_value", self.best_value))


class MaxValueTrigger(BestValueTrigger):
    """Fires where the interval's mean of `key` is the highest so far.

    Args:
        key: name of the observed value, such as 'validation/main/accuracy'.
        trigger: how often to compare: a pair such as (1, 'epoch'), or a trigger; default (1, 'epoch').

    Example:
        >>> best = triggers.MaxValueTrigger("validation/main/accuracy")
    """

    def __init__(self, key: str, trigger: Any = (1, "epoch")):
        super().__init__(key, operator.lt, trigger)


class MinValueTrigger(BestValueTrigger):
    """Fires where the interval's mean of `key` is the lowest so far.

    Args:
        key: name of the observed value, such as 'validation/main/accuracy'.
        trigger: how often to compare: a pair such as (1, 'epoch'), or a trigger; default (1, 'epoch').

    Example:
        >>> best = triggers.MinValueTrigger("validation/main/loss")
    """

    def __init__(self, key: str, trigger: Any = (1, "epoch")):
        super().__init__(key, operator.gt, trigger)


class EarlyStoppingTrigger:
    """A stop trigger: fires when `monitor` has not improved for `patience` checks, or at `max_trigger`.

    `mode` is `min`, `max`, or `auto` (`max` where the key has "accuracy" in it). NaN is no improvement.

    Args:
        check_trigger: how often to look: a pair such as (1, 'epoch'), or a trigger; default (1, 'epoch').
        monitor: name of the observed value; default 'main/loss'.
        patience: number of checks without improvement before it fires; None for 3.
        mode: 'min', 'max', or 'auto': 'max' if the name contains 'accuracy'; default 'auto'.
        verbose: print when a value has not improved; default False.
        max_trigger: when it fires in any case: a pair such as (100, 'epoch'); default (100, 'epoch').
        kwargs: ``patients``, the name of ``patience`` in old programs.

    Raises:
        TypeError, ValueError: an argument is unknown, or ``mode`` is none of the three.

    Example:
        >>> stop = triggers.EarlyStoppingTrigger(monitor="validation/main/loss", patience=3, max_trigger=(100, "epoch"))
    """

    def __init__(
        self,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        **kwargs: Any,
    ):
        if "patients" in kwargs:  # as Chainer spelled it first
            if patience is not None:
                raise TypeError("EarlyStoppingTrigger: expected patience or its alias patients, got both")
            patience = kwargs.pop("patients")
        foreign_names.refuse_unknown("EarlyStoppingTrigger", EarlyStoppingTrigger.__init__, kwargs)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"expected mode 'auto', 'min' or 'max', got {mode!r}")
        if patience is not None and patience < 0:
            mistakes.refuse(ValueError(f"EarlyStoppingTrigger: patience: expected 0 or more, got {patience}"))
        self.monitor = monitor
        self.patience = 3 if patience is None else patience
        self.verbose = verbose
        self.count = 0
        self._check_trigger = get_trigger(check_trigger)
        self._max_trigger = get_trigger(max_trigger)
        self._summary = DictSummary()
        self._mode = "max" if mode == "max" or (mode == "auto" and "accuracy" in monitor) else "min"
        self._has_warned = False
        self.best: float | None = None

    def __call__(self, trainer: Trainer) -> bool:
        if self.monitor in trainer.observation:
            self._summary.add({self.monitor: trainer.observation[self.monitor]})
        if self._max_trigger(trainer):
            return True
        if not self._check_trigger(trainer):
            return False
        means = self._summary.compute_mean()
        self._summary = DictSummary()
        if self.monitor not in means:
            if not self._has_warned and not observed_keys.is_due(self.monitor, trainer.observation, trainer):
                self._has_warned = True
                mistakes.warn(
                    f"EarlyStoppingTrigger: nothing reported {self.monitor!r} since the last check: "
                    f"{observed_keys.never_reported(self.monitor, trainer.observation)}"
                )
            return False
        return self._check(float(means[self.monitor]), trainer)

    def _check(self, value: float, trainer: Trainer) -> bool:
        is_better = operator.gt if self._mode == "max" else operator.lt
        if not math.isnan(value) and (self.best is None or is_better(value, self.best)):
            self.best = value
            self.count = 0
        else:
            self.count += 1
        if self.verbose and self.count:
            words = f"epoch {trainer.updater.epoch}: {self.monitor} has not improved for {self.count} checks"
            standard_streams.stdout.write(f"{words}\n")
        return self.count >= self.patience

    def get_training_length(self) -> tuple[float, str]:
        """The longest run: that of `max_trigger`."""
        return self._max_trigger.get_training_length()  # type: ignore[attr-defined, no-any-return]

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        for name, trigger in (("check_trigger", self._check_trigger), ("max_trigger", self._max_trigger)):
            if hasattr(trigger, "serialize"):
                trigger.serialize(serializer[name])
        if is_about(serializer, f"{self._mode} of {self.monitor}"):
            self._summary.serialize(serializer["summary"])
            self.count = int(serializer("count", self.count))
            self.best = _optional(serializer("best", self.best))


class EndTrigger:
    """A stop trigger by epochs and iterations, whichever ends first. It also fires if a run is resumed beyond them.

    Args:
        epochs: the number of epochs; it may be a fraction.
        iterations: the number of steps; None is no limit.

    Example:
        >>> stop = triggers.EndTrigger(90, iterations=1000)  # training.Trainer(updater, stop)
    """

    def __init__(self, epochs: float, iterations: int | None = None):
        self.epochs = epochs
        self.iterations = iterations
        self._asked_at: tuple[Any, int] = (None, 0)

    def __call__(self, trainer: Trainer) -> bool:
        updater = trainer.updater
        iteration = updater.iteration
        asked_of, asked_at = self._asked_at
        if asked_at != iteration or asked_of is not updater:  # several ask after each step
            over = self.iterations is not None and iteration >= self.iterations
            self._is_over = bool(over or updater.epoch_detail >= self.epochs - 1e-9)
            self._asked_at = updater, iteration
        return self._is_over

    def get_training_length(self) -> tuple[float, str]:
        """For progress: what the run is counted in."""
        return (self.epochs, "epoch") if self.iterations is None else (self.iterations, "iteration")


class AnyTrigger:
    """Fires if at least one of several triggers does; all of them are asked at each call.

    Args:
        triggers: triggers, or pairs `(period, unit)`.

    Example:
        >>> trigger = triggers.AnyTrigger((1, "epoch"), (500, "iteration"))
    """

    def __init__(self, *triggers: Any):
        self._triggers = [get_trigger(trigger) for trigger in triggers]

    def __call__(self, trainer: Trainer) -> bool:
        fires = False
        for trigger in self._triggers:  # all: each keeps count of its calls
            if trigger(trainer):
                fires = True
        return fires

    def serialize(self, serializer: AbstractSerializer) -> None:
        """Save or load by ``serializer`` what the trigger remembers of the run."""
        own = [subject_of(trigger) for trigger in self._triggers]
        saved = _saved_list(serializer, own)
        for i, (subject, trigger) in enumerate(zip(own, self._triggers)):
            if not hasattr(trigger, "serialize"):
                continue
            if saved is None:
                trigger.serialize(serializer[str(i)])
            elif subject in saved:  # each at most once: two of a kind keep their order
                place = saved.index(subject)
                saved[place] = None
                trigger.serialize(serializer[str(place)])


def subject_of(trigger: Any) -> str:
    """What a trigger's state is about: its class, and the unit in which it counts."""
    return " ".join(filter(None, (type(trigger).__name__, getattr(trigger, "unit", None))))


def _saved_list(serializer: AbstractSerializer, own: list[str]) -> list[str | None] | None:
    """Save the subjects of several triggers, or load those that were saved; None in snapshots without them."""
    saved = described(serializer, "subjects", json.dumps(own))
    return None if saved is None else list(json.loads(saved))


__getattr__ = missing_names.explained(__name__)
