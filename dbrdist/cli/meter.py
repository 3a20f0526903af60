"""How fast a run is and what it waits for, measured between two lines of the log at no cost for a step."""

from __future__ import annotations

import resource
import sys
from typing import Any

from dbrdist.cli.folder import now


class Meter:
    """Speed between two lines of the log, and between two looks at it.

    A line gets examples per second over all ranks (of the steps alone: evaluations and snapshots do not count), the
    share of the steps in which this rank waited for data, the position in epochs, the largest memory of this process so
    far, and the time.
    """

    def __init__(self, num_examples: int, updater: Any):
        self._num_examples = num_examples
        self._updater = updater
        self._at_line = self._at_look = self._position()

    def start(self) -> None:
        """Measure from here on, after a resume say."""
        self._at_line = self._at_look = self._position()

    def __call__(self, entry: dict[str, Any]) -> None:
        before, self._at_line = self._at_line, self._position()
        speed, waited = _speed(before, self._at_line)
        if speed is not None:
            entry |= {"examples_per_second": speed, "data_wait_fraction": waited}
        entry["memory_bytes"] = peak_memory_bytes()
        entry["epoch_detail"] = self._updater.epoch_detail
        entry["time"] = now()

    def words(self, trainer: Any) -> str:
        """The speed since the last look, and the wait for data where there is any to speak of."""
        before, self._at_look = self._at_look, self._position()
        speed, waited = _speed(before, self._at_look)
        if speed is None:
            return "0 examples/s"
        return f"{speed:,.0f} examples/s" + (f", {waited:.0%} waiting for data" if waited >= 0.005 else "")

    def _position(self) -> tuple[float, float, float]:
        """Seconds in steps, examples, seconds of waiting for them."""
        updater = self._updater
        return updater.step_seconds, updater.epoch_detail * self._num_examples, updater.data_seconds


def _speed(before: tuple[float, float, float], after: tuple[float, float, float]) -> tuple[float | None, float]:
    seconds, examples, waited = (b - a for a, b in zip(before, after))
    return (examples / seconds, min(waited / seconds, 1.0)) if seconds > 0 else (None, 0.0)


def peak_memory_bytes() -> int:
    """The largest resident memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
