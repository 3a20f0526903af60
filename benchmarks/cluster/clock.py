"""The clock of simulated jobs: it goes on where the simulation says so."""

from __future__ import annotations


class Clock:
    """The time of the simulated job, as the module ``time`` tells it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    time = perf_counter = monotonic
