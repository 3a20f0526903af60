"""A ratio of sums over many steps, such as correct answers per question where batches differ in size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dbrdist.core.files.serializer import AbstractSerializer, is_about
from dbrdist.core.model.reporter import as_number
from dbrdist.training.extension import PRIORITY_EDITOR, Extension
from dbrdist.training.triggers import get_trigger

if TYPE_CHECKING:
    from dbrdist.training.trainer import Trainer


class MicroAverage(Extension):
    """Adds up two observed values and, when `trigger` fires, reports their ratio as `result_key` and starts over.

    Called at every step; steps that observe only one of the two are left out. The ratio is NaN where the sum of the
    denominators is zero. A snapshot holds both sums.

    Args:
        numerator_key: name of the observed numerator.
        denominator_key: name of the observed denominator.
        result_key: name under which the ratio of the sums is reported.
        trigger: when to report: a pair such as (1, 'epoch'), or a trigger; default (1, 'epoch').

    Example:
        >>> mean = extensions.MicroAverage("main/num_correct", "main/num_questions", "main/accuracy")
    """

    priority = PRIORITY_EDITOR

    def __init__(self, numerator_key: str, denominator_key: str, result_key: str, trigger: Any = (1, "epoch")):
        self._keys = numerator_key, denominator_key
        self._result_key = result_key
        self._trigger = get_trigger(trigger)
        self._numerator = self._denominator = 0.0

    def __call__(self, trainer: Trainer) -> None:
        observation = trainer.observation
        if all(key in observation for key in self._keys):
            numerator, denominator = (as_number(observation[key]) for key in self._keys)
            self._numerator += numerator
            self._denominator += denominator
        if self._trigger(trainer):
            ratio = self._numerator / self._denominator if self._denominator else float("nan")
            observation[self._result_key] = ratio
            self._numerator = self._denominator = 0.0

    def serialize(self, serializer: AbstractSerializer) -> None:
        if is_about(serializer["_sums"], " / ".join(self._keys)):
            self._numerator = float(serializer("_numerator", self._numerator))
            self._denominator = float(serializer("_denominator", self._denominator))
        if hasattr(self._trigger, "serialize"):
            self._trigger.serialize(serializer["_trigger"])
