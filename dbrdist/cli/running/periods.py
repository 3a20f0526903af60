"""When a run ends, evaluates and writes, from its configuration."""

from __future__ import annotations

from typing import Any

from dbrdist.cli.configuration.schema import SECONDS, Config, interval
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.training import extensions
from dbrdist.training.goals import GoalTrigger, OffsetTrigger
from dbrdist.training.triggers import EndTrigger, TimeTrigger


def end_of(config: Config) -> EndTrigger:
    """Ends the run with its epochs, or at a goal."""
    stop = config.stop
    if stop is None:
        return EndTrigger(config.epochs, config.iterations)
    return GoalTrigger(config.epochs, config.iterations, stop.metric, stop.target, stop.patience, stop.mode)


def epochs_of(config: Config, num_examples: int) -> float:
    """The length of the run in epochs, where it has no goal to end at before."""
    if config.iterations is None:
        return config.epochs
    return min(config.epochs, config.iterations / config.steps_per_epoch(num_examples))


def evaluations(config: Config) -> Any:
    """The trigger of evaluations."""
    period, offset = interval(config.evaluation.every), config.evaluation.offset
    return OffsetTrigger(*period, offset) if offset else period


def uses_time(periods: str) -> bool:
    """Whether snapshots are saved by the clock, on which the ranks must agree."""
    return any(unit in periods for unit in SECONDS)


def trigger_of(period: str, agreement: StepAgreement) -> Any:
    """The trigger of a period of the run or of time."""
    number, unit = period.split()
    if unit in SECONDS:
        return TimeTrigger(float(number) * SECONDS[unit], agreement.elapsed_time)
    return interval(period)


def average_of(config: Config, task: Any, num_examples: int) -> extensions.WeightAverage | None:
    """The moving average of the weights that the configuration asks for."""
    settings = config.ema
    if settings is None:
        return None
    decay = settings.decay_for(config.steps_per_epoch(num_examples))
    return extensions.WeightAverage(task, decay, settings.warmup, settings.every)
