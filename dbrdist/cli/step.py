"""What the ranks tell each other after each step: the observed means, a bad loss, a request to stop."""

from __future__ import annotations

import math
import signal
from typing import Any

import numpy as np

from dbrdist.core.reporter import as_number
from dbrdist.errors import NonFiniteLossError, StopRequested
from dbrdist.training import Extension, extensions, get_trigger
from dbrdist.training.extensions.snapshots import PRIORITY_SNAPSHOT

# before everything else: nothing is evaluated, logged or saved after a step that went wrong
PRIORITY_FIRST = 1000
# after everything else, the snapshot included: a stopped run has the state of one that went on
PRIORITY_LAST = -1000


class StopSignal:
    """Notes a request to save and stop: SIGTERM or SIGUSR1."""

    def __init__(self) -> None:
        self.name = ""

    def install(self) -> None:
        """Take the signals from now on; only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.name = signal.Signals(number).name


class StepAgreement(Extension):
    """One exchange of a few numbers per step, after which all ranks know the same.

    Observed values become their means over the ranks, weighted by samples. A loss that is not finite on any rank
    raises NonFiniteLossError on all; a request to stop that any rank got is kept in `stop_requested`.
    """

    trigger = (1, "iteration")
    priority = PRIORITY_FIRST

    def __init__(self, comm: Any, iterator: Any, stop: StopSignal):
        self._comm = comm
        self._iterator = iterator
        self._stop = stop
        self._keys: list[str] | None = None
        self._failure = extensions.FailOnNonNumber()
        self.stop_requested = False

    def __call__(self, trainer: Any) -> None:
        observation = trainer.observation
        if self._keys is None:
            found = self._comm.allgather_obj([k for k, v in observation.items() if getattr(v, "ndim", 0) == 0])
            self._keys = sorted(set().union(*found))
        complaint = self._failure.complaint(trainer)
        num_samples = len(self._iterator.indices)
        row = np.full(3 + len(self._keys), np.nan)
        row[:3] = bool(self._stop.name), complaint is not None, num_samples
        for i, key in enumerate(self._keys):
            if num_samples and key in observation:
                row[3 + i] = as_number(observation[key])
        rows = self._comm._allgather_rows(row.view(np.int64)).view(np.float64)
        self.stop_requested = bool(rows[:, 0].any())
        if rows[:, 1].any():
            raise NonFiniteLossError(self._first_complaint(complaint))
        for i, key in enumerate(self._keys):
            mean = _weighted_mean(rows[:, 3 + i], rows[:, 2])
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


class SaveAndStop(Extension):
    """At a step at which the ranks agreed to stop: saves, and ends the run with StopRequested."""

    trigger = (1, "iteration")
    priority = PRIORITY_LAST

    def __init__(self, agreement: StepAgreement, snapshot: Any):
        self._agreement = agreement
        self._snapshot = snapshot

    def __call__(self, trainer: Any) -> None:
        if self._agreement.stop_requested:
            self._snapshot.save(trainer)
            raise StopRequested(f"stopped on request after step {trainer.updater.iteration}, and saved")


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
