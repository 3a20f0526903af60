"""When a run ends, evaluates and writes, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.cli.builders.build import arguments
from dbrdist.cli.configuration.periods import SECONDS, interval
from dbrdist.cli.configuration.schema import Config
from dbrdist.cli.running.lr_finder import EndOfTest, RangeTest
from dbrdist.comm.run.extensions import StepAgreement
from dbrdist.training import extensions
from dbrdist.training.goals import GoalTrigger, OffsetTrigger
from dbrdist.training.triggers import EndTrigger, TimeTrigger

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link

_ANY_LENGTH = 1e9  # epochs, where the steps end the run


def range_test_of(config: Config) -> RangeTest | None:
    """The learning-rate range test that the configuration asks for."""
    settings = config.lr_finder
    if settings is None:
        return None
    key = next((f"optimizer.{name}" for name in ("lr", "alpha") if hasattr(config.optimizer, name)), "the rate")
    return RangeTest(settings.lowest, settings.highest, settings.steps, key)


def planned(config: Config) -> Config:
    """The configuration with the length of the range test that it asks for, if it does."""
    if config.lr_finder is None:
        return config
    return config.model_copy(update={"iterations": config.lr_finder.steps, "epochs": _ANY_LENGTH, "stop": None})


def end_of(config: Config, range_test: RangeTest | None = None) -> EndTrigger:
    """Ends the run with its epochs, or at a goal; a range test with its steps."""
    stop = config.stop
    if range_test is not None:
        return EndOfTest(range_test)
    if stop is None:
        return EndTrigger(config.epochs, config.iterations)
    return GoalTrigger(config.epochs, config.iterations, stop.metric, **arguments(stop, "metric"))


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


def average_of(config: Config, task: Link, num_examples: int) -> extensions.WeightAverage | None:
    """The moving average of the weights that the configuration asks for."""
    settings = config.ema
    if settings is None:
        return None
    decay = settings.decay_for(config.steps_per_epoch(num_examples))
    return extensions.WeightAverage(task, decay, **arguments(settings, "decay", "half_life"))
