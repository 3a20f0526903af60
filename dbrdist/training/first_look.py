"""What a trainer looks for before its first step: triggers that never fire in this run, or far too often."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dbrdist.core.usage.mistakes import warn
from dbrdist.training.triggers import IntervalTrigger, ManualScheduleTrigger

_VANISHED = 1e-6  # a rate times this trains nothing any more
_MARGIN = 1.5  # what a conversion of units may be off by: ranks, or a last batch that is short


def see_triggers(trainer: Any, entries: Iterable[Any]) -> None:
    """Warn of extensions that will not be called before the run ends, and of rates that vanish within it."""
    stop = trainer.stop_trigger
    if type(stop) is not IntervalTrigger:
        return
    steps = _steps_of_epoch(trainer.updater)
    for entry in entries:
        is_result = entry.is_told_when and not getattr(entry.extension, "may_come_later", False)
        if is_result and _is_too_late(entry.trigger, stop, steps):
            warn(
                f"Trainer: {entry.name} is never called in this run, which ends after {stop.period} {stop.unit}s: its "
                f"trigger is {_words(entry.trigger)}"
            )
        shrink = getattr(entry.extension, "factor_of_each_call", None)
        if shrink is not None and not entry.is_told_when and (stop.unit == "iteration" or steps is not None):
            calls = stop.period * (1 if stop.unit == "iteration" else steps or 1)
            if 0 < shrink < 1 and shrink**calls < _VANISHED:
                words = f"multiplies the rate by {shrink:g} after each iteration, some {calls:.0f} times in this run"
                warn(
                    f"Trainer: {entry.name} {words}; for once per epoch write trainer.extend(..., trigger=(1, 'epoch'))"
                )


def _is_too_late(trigger: Any, stop: IntervalTrigger, steps: float | None) -> bool:
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
    """How many steps an epoch takes, where its main iterator says so."""
    try:
        iterator = updater.get_iterator("main")
        return float(len(iterator.dataset) / iterator.batch_size)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
