"""Time by function."""

from __future__ import annotations

import time
from typing import Any, TextIO

import numpy as np

from dbrdist.core.array import backend
from dbrdist.core.array.types import Module
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.function_hooks.report import Report, in_units, print_table


class Stopwatch(Report):
    """Times of calls, which may be within each other; on a GPU by its own events."""

    heading = "FunctionName"

    def __init__(self) -> None:
        self.call_history: list[tuple[str, float]] = []
        self._started: list[Any] = []
        self._events: list[tuple[int, Any, Any]] = []

    def start(self, xp: Module) -> None:
        """Begin a call that computes with ``xp``."""
        self._started.append(time.perf_counter() if xp is np else _recorded_event())

    def stop(self, name: str) -> None:
        """End the call that began last, under ``name``."""
        start = self._started.pop()
        if isinstance(start, float):
            self.call_history.append((name, time.perf_counter() - start))
        else:
            self._events.append((len(self.call_history), start, _recorded_event()))
            self.call_history.append((name, 0.0))

    def settle(self) -> None:
        """Read the events of a GPU, which waits for it."""
        for i, start, end in self._events:
            end.synchronize()
            milliseconds = backend.import_cupy().cuda.get_elapsed_time(start, end)
            self.call_history[i] = (self.call_history[i][0], milliseconds * 1e-3)
        self._events.clear()

    def deleted(self, _: Any) -> None:
        """Read the times of calls on a GPU, which are known only after they have ended."""
        self.settle()

    def total_time(self) -> float:
        """Seconds in all calls."""
        self.settle()
        return sum(seconds for _, seconds in self.call_history)

    def summary(self) -> dict[str, dict[str, Any]]:
        """For each name: ``elapsed_time`` in seconds and ``occurrence``."""
        self.settle()
        return super().summary()

    def _row(self) -> dict[str, Any]:
        return {"elapsed_time": 0.0, "occurrence": 0}

    def _add(self, row: dict[str, Any], used: Any) -> None:
        row["elapsed_time"] += used

    def print_report(self, unit: str = "auto", file: TextIO | None = None) -> None:
        """Print the summary, slowest first; ``unit`` is auto (for each number its own), sec, ms, us or ns.

        Args:
            unit: the unit of all times: sec, ms, us or ns; auto (default) chooses one for each.
            file: an open text file; None for standard output.
        """
        scales = {"sec": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
        if unit not in ("auto", "auto_foreach", *scales):
            raise ValueError(f"TimerHook.print_report: unit: expected auto, sec, ms, us or ns, got {unit!r}")

        def written(seconds: float) -> str:
            if unit.startswith("auto"):
                return in_units(seconds * 1e9, "ns us ms sec", 1e3)
            return f"{seconds * scales[unit]:.2f}{unit}"

        rows = [(self.heading, "ElapsedTime", "Occurrence")]
        for name, row in sorted(self.summary().items(), key=lambda item: -item[1]["elapsed_time"]):
            rows.append((name, written(row["elapsed_time"]), str(row["occurrence"])))
        print_table(rows, file)


class TimerHook(Stopwatch, FunctionHook):
    """The time of each function, forward and backward apart in ``call_history``, together in ``summary``.

    Example:
        >>> with dbrdist.function_hooks.TimerHook() as hook:
        ...     y = F.relu(np.ones(1))
        >>> hook.total_time() > 0
        True
    """

    name = "TimerHook"

    def _begin(self, function: FunctionNode, in_data: Any, out_grad: Any = ()) -> None:
        self.start(backend.get_array_module(*in_data, *out_grad))

    def _end(self, function: FunctionNode, in_data: Any, *_: Any) -> None:
        self.stop(function.label)

    forward_preprocess = backward_preprocess = _begin
    forward_postprocess = backward_postprocess = _end


def _recorded_event() -> Any:
    event = backend.import_cupy().cuda.Event()
    event.record()
    return event
