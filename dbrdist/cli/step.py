"""What happens after each step: the ranks tell each other how it went, and prepare the next."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

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
        self._comm = comm
        self._iterator = iterator
        self._keys: list[str] | None = None
        self._failure = extensions.FailOnNonNumber()

    def __call__(self, trainer: Any) -> None:
        observation = trainer.observation
        if self._keys is None:
            found = self._comm.allgather_obj([k for k, v in observation.items() if getattr(v, "ndim", 0) == 0])
            self._keys = sorted(set().union(*found))
        complaint = self._failure.complaint(trainer)
        num_samples = len(self._iterator.indices)
        row = np.full(2 + len(self._keys), np.nan)
        row[:2] = complaint is not None, num_samples
        for i, key in enumerate(self._keys):
            if num_samples and key in observation:
                row[2 + i] = as_number(observation[key])
        rows = self._comm._allgather_rows(row.view(np.int64)).view(np.float64)
        if rows[:, 0].any():
            raise NonFiniteLossError(self._first_complaint(complaint))
        for i, key in enumerate(self._keys):
            mean = _weighted_mean(rows[:, 2 + i], rows[:, 1])
            if mean is not None:
                observation[key] = mean

    def _first_complaint(self, complaint: str | None) -> str:
        complaints = self._comm.allgather_obj(complaint)
        rank, words = next((rank, words) for rank, words in enumerate(complaints) if words)
        return f"{words} (rank {rank} of {self._comm.size})" if self._comm.size > 1 else words


def _weighted_mean(values: Any, weights: Any) -> float | None:
    """The mean of what is there, added in the order of ranks; None where nothing is."""
    pairs = [(v, w) for v, w in zip(values.tolist(), weights.tolist()) if w and not math.isnan(v)]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None


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
