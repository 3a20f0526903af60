"""What a trainer looks for before its first step: triggers that never fire in this run, or far too often."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dbrdist.core.array.backend import on, to_cpu
from dbrdist.core.model.link import Link
from dbrdist.core.usage.mistakes import warn
from dbrdist.training.parallel_updater import ParallelUpdater
from dbrdist.training.triggers import IntervalTrigger, ManualScheduleTrigger
from dbrdist.training.updater import StandardUpdater

if TYPE_CHECKING:
    from dbrdist.core.array.types import HostArray
    from dbrdist.core.model.parameter import Parameter
    from dbrdist.training.trainer import Trainer
    from dbrdist.training.triggers import TriggerLike

_MOST_DIGITS = 6  # a rate times 1e-6 trains nothing any more
_MOST_DIGITS_UP = 10  # a search for the best rate goes over some eight, from 1e-7 to 10
_MARGIN = 1.5  # what a conversion of units may be off by: ranks, or a last batch that is short


def see_triggers(trainer: Trainer, entries: Iterable[Any]) -> None:
    """Warn of extensions that will not be called before the run ends, and of rates that vanish within it."""
    stop = trainer.stop_trigger
    if type(stop) is not IntervalTrigger:
        return
    steps = _steps_of_epoch(trainer.updater)
    is_trial = _is_trial(stop, steps)
    for entry in entries:
        is_result = entry.is_told_when and not getattr(entry.extension, "may_come_later", False)
        if is_result and not (is_trial or entry.before_training) and _is_too_late(entry.trigger, stop, steps):
            warn(
                f"Trainer: {entry.name} is never called in this run, which ends after {stop.period} {stop.unit}s: its "
                f"trigger is {_words(entry.trigger)}"
            )
        shrink = getattr(entry.extension, "factor_of_each_call", None)
        if shrink is not None and _is_each_step(entry) and (stop.unit == "iteration" or steps is not None):
            calls = stop.period * (1 if stop.unit == "iteration" else steps or 1)
            digits = calls * math.log10(shrink) if shrink > 0 else 0.0
            if not -_MOST_DIGITS <= digits <= _MOST_DIGITS_UP:
                words = f"multiplies the rate by {shrink:g} after each iteration, some {calls:.0f} times in this run"
                warn(
                    f"Trainer: {entry.name} {words}; for once per epoch write trainer.extend(..., trigger=(1, 'epoch'))"
                )


def _is_trial(stop: IntervalTrigger, steps: float | None) -> bool:
    """Whether a run ends within its first epoch, as one that only tries whether a program works."""
    return stop.period < (1 if stop.unit == "epoch" else steps or 0)


def _is_each_step(entry: Any) -> bool:
    """Whether an extension is called at each iteration, and nobody has said so."""
    trigger = entry.trigger
    is_default = not entry.is_told_when and type(trigger) is IntervalTrigger
    return is_default and (trigger.period, trigger.unit) == (1, "iteration")


def _is_too_late(trigger: TriggerLike, stop: IntervalTrigger, steps: float | None) -> bool:
    """Whether a trigger first fires after the end."""
    if type(trigger) is IntervalTrigger:
        first: Any = trigger.period
    elif type(trigger) is ManualScheduleTrigger and trigger.points:
        first = min(trigger.points)
    else:
        return False
    if trigger.unit == stop.unit:
        return bool(first > stop.period)
    if steps is None:
        return False
    in_steps = (first if trigger.unit == "iteration" else first * steps) / _MARGIN
    return bool(in_steps > (stop.period if stop.unit == "iteration" else stop.period * steps))


def _words(trigger: Any) -> str:
    if type(trigger) is IntervalTrigger:
        return f"({trigger.period}, {trigger.unit!r})"
    return f"{trigger.points} in {trigger.unit}s"


def _steps_of_epoch(updater: Any) -> float | None:
    """How many steps an epoch takes, where its main iterator says so; one's own updater may take several batches."""
    if not _is_ours(updater):
        return None
    try:
        iterator = updater.get_iterator("main")
        return float(len(iterator.dataset) / iterator.batch_size)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None


_MANY_CALLS = 100  # between two looks at parameters, while no step or no update is counted
_MOST_GRADIENTS = 1000  # backward passes whose gradients one update may add up
_MOST_COLLECTING = 100_000  # calls that only collect examples and count no step
_FEW = 8  # elements of each parameter that are compared


class FirstSteps:
    """What the first calls of an updater do: count steps, and update parameters.

    Whether something is updated is asked of a program's own updaters alone. They may collect examples for many calls
    before they train or count a step, may add up the gradients of an episode, and may change parameters without an
    optimizer.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater
        self._iteration = _iteration(updater)
        self._num_updates = _num_updates(updater)
        self._before = None if _is_ours(updater) else self._num_updates
        self._values: dict[Parameter, HostArray] = {}
        self._note_values()
        self._num_calls = 0

    def after_update(self) -> FirstSteps | None:
        """Called after each update; None once both are seen, or missed."""
        self._num_calls += 1
        is_counted = self._iteration is None or _iteration(self._updater) != self._iteration
        has_updated = self._before is None or _num_updates(self._updater) != self._before
        if is_counted and has_updated:
            return None
        if self._num_calls == 1:
            self._note_values()
        if self._num_calls % _MANY_CALLS == 0 and self._is_known(is_counted):
            self.end()
            return None
        return self

    def _is_known(self, is_counted: bool) -> bool:
        """Whether it is known by now that steps are not counted, or that updates are missing or are not needed."""
        trains = self._num_updates != _num_updates(self._updater) or self._has_changed()
        if not is_counted:
            return trains or self._num_calls >= _MOST_COLLECTING
        return trains or (self._num_calls >= _MOST_GRADIENTS and self._has_gradients())

    def end(self) -> None:
        """Warn of what is missing."""
        name = type(self._updater).__name__
        if not self._num_calls:
            return
        if self._iteration is not None and _iteration(self._updater) == self._iteration:
            warn(
                f"{name}.update: {self._num_calls} calls, and the iteration is still {self._iteration}, so that no "
                "trigger fires; override update_core() instead of update(), or add 1 to self.iteration"
            )
        elif self._before is not None and _num_updates(self._updater) == self._before and not self._has_changed():
            warn(
                f"{name}: {self._num_calls} steps, and no optimizer has updated anything; call update() of one in "
                "update_core(), or give the updater no optimizers, {}, where none is meant"
            )

    def _note_values(self) -> None:
        """Keep a few values of parameters; those that a first batch initialises come after it."""
        for p in _params(self._updater) if self._before is not None else ():
            if p not in self._values:
                self._values[p] = _some_values(p)

    def _has_changed(self) -> bool:
        """Whether a parameter has other values, as where a program updates it by itself."""
        return any(not np.array_equal(_some_values(p), old, equal_nan=True) for p, old in self._values.items())

    def _has_gradients(self) -> bool:
        """Whether there was a backward pass."""
        return any(p.grad is not None for p in self._values)


def _some_values(p: Parameter) -> HostArray:
    with on(p):
        return np.array(to_cpu(p.lend().ravel()[:_FEW]))


def _params(updater: Any) -> list[Parameter]:
    links = [getattr(optimizer, "target", None) for optimizer in updater.get_all_optimizers().values()]
    return [p for link in links if isinstance(link, Link) for p in link.params(include_uninit=False)]


def _is_ours(updater: Any) -> bool:
    """Whether a step is what our updaters do."""
    kind, ours = type(updater), (StandardUpdater.update_core, ParallelUpdater.update_core)
    return getattr(kind, "update_core", None) in ours and kind.update is StandardUpdater.update


def _iteration(updater: Any) -> int | None:
    """How many steps an updater has counted; None where it counts none."""
    iteration = getattr(updater, "iteration", None)
    return int(iteration) if isinstance(iteration, (int, np.integer)) else None


def _num_updates(updater: Any) -> int | None:
    """How many updates the optimizers have made; None where there are none, or that is not known."""
    try:
        counts = [optimizer.t for optimizer in updater.get_all_optimizers().values()]
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    is_known = len(counts) > 0 and all(isinstance(t, (int, np.integer)) for t in counts)
    return sum(map(int, counts)) if is_known else None
