"""What happens after each step: the ranks tell each other how it went, and prepare the next."""

from __future__ import annotations

from typing import Any

from dbrdist.comm.observations import Observations
from dbrdist.core.reporter import as_number
from dbrdist.errors import NonFiniteLossError
from dbrdist.training import Extension, extensions, get_trigger
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

# before everything else: nothing is evaluated, logged or saved after a step that went wrong
PRIORITY_FIRST = 1000


class StepAgreement(Extension):
    """One exchange of a few numbers per step, after which all ranks know the same.

    Observed values become their means over the ranks, weighted by samples. A loss that is not finite on any rank
    raises NonFiniteLossError on all.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_FIRST

    def __init__(self, comm: Any, iterator: Any):
        self._observations = Observations(comm)
        self._iterator = iterator
        self._failure = extensions.FailOnNonNumber()

    def __call__(self, trainer: Any) -> None:
        observation = trainer.observation
        numbers = {key: as_number(value) for key, value in observation.items() if getattr(value, "ndim", 0) == 0}
        complaint = self._failure.complaint(trainer)
        error = NonFiniteLossError(complaint) if complaint else None
        observation.update(self._observations.average(numbers, self._iterator.num_read, error))


class EndTrigger:
    """True once `epochs` or `iterations` are done, also where a run is resumed beyond them."""

    def __init__(self, epochs: float, iterations: int | None):
        self.epochs = epochs
        self.iterations = iterations

    def __call__(self, trainer: Any) -> bool:
        updater = trainer.updater
        if self.iterations is not None and updater.iteration >= self.iterations:
            return True
        return bool(updater.epoch_detail >= self.epochs - 1e-9)

    def get_training_length(self) -> tuple[float, str]:
        """For progress: what the run is counted in."""
        return (self.epochs, "epoch") if self.iterations is None else (self.iterations, "iteration")


class AtEndToo:
    """Fires with an interval, and once more where the run ends."""

    def __init__(self, interval: Any, end: EndTrigger):
        self._interval = get_trigger(interval)
        self._end = end

    def __call__(self, trainer: Any) -> bool:
        return self._interval(trainer) or self._end(trainer)

    def serialize(self, serializer: Any) -> None:
        self._interval.serialize(serializer)  # type: ignore[attr-defined]


class FollowSchedule(Extension):
    """Sets the learning rate for the next step from the epochs done; it has no state of its own."""

    trigger = (1, "iteration")
    priority = PRIORITY_SNAPSHOT + 1

    def __init__(self, schedule: Any, optimizer: Any):
        self._schedule = schedule
        self._optimizer = optimizer

    def initialize(self, trainer: Any) -> None:
        self(trainer)

    def __call__(self, trainer: Any) -> None:
        self._optimizer.lr = self._schedule(trainer.updater.epoch_detail)
