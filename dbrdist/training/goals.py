"""When a run evaluates, and when it has reached what it is for."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dbrdist.core.files.serializer import AbstractSerializer, is_about
from dbrdist.core.model.reporter import as_number
from dbrdist.core.names.constructors import explain_constructors
from dbrdist.core.names.limits import any_number, count
from dbrdist.core.usage import mistakes
from dbrdist.errors import CheckpointError
from dbrdist.training import observed_keys
from dbrdist.training.triggers import EndTrigger, IntervalTrigger

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer

_SLACK = 1e-10  # epochs are quotients of sample counts

_NUMBER, _COUNT = (limit.but(is_of_chainer=True) for limit in (any_number, count))


class OffsetTrigger(IntervalTrigger):
    """Fires at `offset` and every `period` epochs or iterations after it, but not before the first step.

    `OffsetTrigger(4, "epoch", 1)` fires after epochs 1, 5, 9 and so on: MLPerf's evaluation with an offset.
    """

    def __init__(self, period: float, unit: str, offset: float = 0.0):
        super().__init__(period, unit)
        if not 0 <= offset < period:
            raise ValueError(f"expected an offset from 0 to less than the period {period}, got {offset}")
        self.offset = offset

    def __call__(self, trainer: Trainer) -> bool:
        before, now = self._passed.since_last_call(trainer.updater, self.unit)
        return self._periods(before) != self._periods(now)

    def _periods(self, position: float) -> int:
        return math.floor((position - self.offset) / self.period + _SLACK)


class GoalTrigger(EndTrigger):
    """A stop trigger: fires at the end of the run, where `key` is as good as `target`, or where it stagnates.

    An observation is the value of `key` in the trainer's observation of a step, such as the result of an evaluation.
    Ranks must observe the same value, as a multi-node evaluator's. NaN is never good enough, nor an improvement.

    Args:
        epochs, iterations: the end of the run, as of :class:`~dbrdist.training.triggers.EndTrigger`.
        key: of the observed value.
        target: fire where the value is this or better; None for no target.
        patience: fire where so many observations in a row have not been better than the best before; None for never.
        mode: `min`, `max`, or `auto` (`max` where the key has "accuracy" in it).
    """

    def __init__(
        self,
        epochs: float,
        iterations: int | None,
        key: str,
        target: Annotated[float | None, _NUMBER, "The run ends when the value is as good as this."] = None,
        patience: Annotated[
            int | None, _COUNT, "The run ends when the value has not improved for so many of its observations in a row."
        ] = None,
        mode: Annotated[
            Literal["auto", "min", "max"],
            "Which value is better; `auto` is `max` where its name has `accuracy` in it, else `min`.",
        ] = "auto",
    ):
        super().__init__(epochs, iterations)
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"expected mode 'auto', 'min' or 'max', got {mode!r}")
        self.key = key
        self.target = target
        self.patience = patience
        rises = mode == "max" or (mode == "auto" and "accuracy" in key)
        self._is_better = operator.gt if rises else operator.lt
        self.best: float | None = None
        self.count = 0  # observations since the best one
        self.reason: str | None = None  # why the run ended before its last epoch
        self._seen_at = -1  # the step of the last observation
        self._epoch = 0.0  # at that step
        self._has_warned = False
        self._observed_last: tuple[int, dict[str, Any]] | None = None  # in the last step of an epoch, and which step

    def __call__(self, trainer: Trainer) -> bool:
        value = trainer.observation.get(self.key)
        if value is not None and self._seen_at != trainer.updater.iteration:
            self._seen_at = trainer.updater.iteration
            self._look(float(as_number(value)), trainer.updater.epoch_detail)
        if value is None and self._seen_at == -1 and not self._has_warned:
            self._look_for_key(trainer)
        return self.reason is not None or super().__call__(trainer)

    def _look_for_key(self, trainer: Trainer) -> None:
        """Warn once of a value that nobody has reported by the step after the end of an epoch, with its evaluation."""
        if self._observed_last is None:
            if trainer.updater.is_new_epoch:
                self._observed_last = trainer.updater.iteration, trainer.observation
            return
        iteration, observation = self._observed_last
        if iteration == trainer.updater.iteration:
            return
        self._observed_last = None
        if self.key not in observation and not observed_keys.is_due(self.key, observation, trainer):
            self._has_warned = True
            words = observed_keys.never_reported(self.key, observation)
            mistakes.warn(f"stopping at a goal: the run goes on to its last epoch: {words}")

    def _look(self, value: float, epoch: float) -> None:
        self._epoch = epoch
        if not math.isnan(value) and (self.best is None or self._is_better(value, self.best)):
            self.best, self.count = value, 0
        else:
            self.count += 1
        self.reason = self._found(value)

    def _found(self, value: float | None) -> str | None:
        """Why the run ends, in words; None where it goes on."""
        if value is None:
            return None
        where = f"{self.key} is {value:.6g} after {self._epoch:.6g} epoch{'s' * (self._epoch != 1)}"
        if self.target is not None and (value == self.target or self._is_better(value, self.target)):
            return f"{where}: the target of {self.target:g} is reached"
        if self.patience is not None and self.count >= self.patience:
            best = "" if self.best is None else f" than {self.best:.6g}"
            return f"{where}: not better{best} for {self.count} evaluations in a row"
        return None

    def forget(self) -> None:
        """Begin anew: values observed from now on are measured otherwise than the best one."""
        self.best, self.count, self.reason = None, 0, None

    def serialize(self, serializer: AbstractSerializer) -> None:
        direction = "highest" if self._is_better is operator.gt else "lowest"
        is_same = is_about(serializer["best_value"], f"{direction} of {self.key}")
        try:
            key = str(serializer("key", self.key))
        except CheckpointError:  # the run had no goal so far
            return
        best, count = serializer("best", self.best), int(serializer("count", self.count))
        seen_at, epoch = int(serializer("seen_at", self._seen_at)), float(serializer("epoch", self._epoch))
        if serializer.is_loading and is_same and key == self.key:  # the best of another quantity says nothing
            self.best, self.count = None if best is None else float(best), count
            self._seen_at, self._epoch = seen_at, epoch
            self.reason = self._found(self.best)  # target and patience may have changed


explain_constructors(globals())
