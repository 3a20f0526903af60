"""How fast a run is and what it waits for, measured between two lines of the log at no cost for a step."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING, Any

from dbrdist.cli.output.folder import now
from dbrdist.core.array.backend import DeviceSpec
from dbrdist.core.array.gpu.device_memory import peak_bytes

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import Optimizer
    from dbrdist.training.trainer import Trainer
    from dbrdist.training.updater import Updater


class Meter:
    """Speed between two lines of the log, and between two looks at it.

    A line gets examples per second over all ranks (of the steps alone: evaluations and snapshots do not count), the
    share of the steps in which this rank waited for data, the position in epochs, the largest memory of this process so
    far, and the time; with several ranks the share of the steps that communication took after backward, waiting for
    slower ranks included; on a GPU the most memory that CuPy has held there.
    """

    def __init__(
        self, num_examples: int, updater: Updater, optimizer: Optimizer | None = None, device: DeviceSpec | None = None
    ):
        self._num_examples = num_examples
        self._updater = updater
        self._optimizer = optimizer  # one that counts its `exposed_seconds`
        self._device = device
        self._at_line = self._at_look = self.position()

    def start(self) -> None:
        """Measure from here on, for example after a resume."""
        self._at_line = self._at_look = self.position()

    def __call__(self, entry: dict[str, Any]) -> None:
        before, self._at_line = self._at_line, self.position()
        speed, waited, exposed = _speed(before, self._at_line)
        if speed is not None:
            entry |= {"examples_per_second": speed, "data_wait_fraction": waited}
            if self._optimizer is not None:
                entry["communication_fraction"] = exposed
        entry |= self.memory()
        entry["epoch_detail"] = self._updater.epoch_detail
        entry["time"] = now()

    def words(self, trainer: Trainer) -> str:
        """The speed since the last look, and the wait for data where there is any to speak of."""
        before, self._at_look = self._at_look, self.position()
        speed, waited, _ = _speed(before, self._at_look)
        if speed is None:
            return "0 examples/s"
        return f"{speed:,.0f} examples/s" + (f", {100 * waited:.0f} % waiting for data" if waited >= 0.005 else "")

    def memory(self) -> dict[str, int]:
        """The largest memory so far, of the process and on its GPU, by the names of the log."""
        found = {"memory_bytes": peak_memory_bytes()}
        if self._device is not None:
            found["device_memory_bytes"] = peak_bytes()
        return found

    @property
    def measures_communication(self) -> bool:
        """Whether `position` has seconds of communication, which a single rank has none of."""
        return self._optimizer is not None

    def position(self) -> _Position:
        """Seconds in steps, examples, seconds of waiting for them, seconds of communication after backward."""
        updater, exposed = self._updater, getattr(self._optimizer, "exposed_seconds", 0.0)
        return updater.step_seconds, updater.epoch_detail * self._num_examples, updater.data_seconds, exposed


_Position = tuple[float, float, float, float]


def _speed(before: _Position, after: _Position) -> tuple[float | None, float, float]:
    """Examples per second, and the shares of the steps spent waiting for data and communicating."""
    seconds, examples, waited, exposed = (b - a for a, b in zip(before, after))
    if seconds <= 0:
        return None, 0.0, 0.0
    return examples / seconds, min(waited / seconds, 1.0), min(exposed / seconds, 1.0)


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
