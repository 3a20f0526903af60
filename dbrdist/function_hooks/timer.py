"""Time by function."""

from __future__ import annotations

import time
from typing import Any, TextIO

import numpy as np

from dbrdist.core import backend
from dbrdist.core.graph import FunctionHook, FunctionNode
from dbrdist.function_hooks.report import Report, in_units, print_table


class TimerHook(Report, FunctionHook):
    """The time of each function, forward and backward apart; on a GPU by its own events."""

    name = "TimerHook"

    def __init__(self) -> None:
        self.call_history: list[tuple[str, float]] = []
        self._started: list[Any] = []
        self._events: list[tuple[int, Any, Any]] = []

    def _begin(self, function: FunctionNode, in_data: Any, out_grad: Any = ()) -> None:
        if backend.get_array_module(*in_data, *out_grad) is np:
            self._started.append(time.perf_counter())
        else:
            self._started.append(_recorded_event())

    def _end(self, function: FunctionNode, in_data: Any, *_: Any) -> None:
        start = self._started.pop()
        if isinstance(start, float):
            self.call_history.append((function.label, time.perf_counter() - start))
        else:
            self._events.append((len(self.call_history), start, _recorded_event()))
            self.call_history.append((function.label, 0.0))

    forward_preprocess = backward_preprocess = _begin
    forward_postprocess = backward_postprocess = _end

    def _settle(self) -> None:
        """Read the events of a GPU, which waits for it."""
        for i, start, end in self._events:
            end.synchronize()
            milliseconds = backend.import_cupy().cuda.get_elapsed_time(start, end)
            self.call_history[i] = (self.call_history[i][0], milliseconds * 1e-3)
        self._events.clear()

    def deleted(self, function: FunctionNode | None) -> None:
        self._settle()

    def total_time(self) -> float:
        """Seconds in all functions."""
        self._settle()
        return sum(seconds for _, seconds in self.call_history)

    def summary(self) -> dict[str, dict[str, Any]]:
        """For each function: ``elapsed_time`` in seconds and ``occurrence``, forward and backward together."""
        self._settle()
        return super().summary()

    def _row(self) -> dict[str, Any]:
        return {"elapsed_time": 0.0, "occurrence": 0}

    def _add(self, row: dict[str, Any], used: Any) -> None:
        row["elapsed_time"] += used

    def print_report(self, unit: str = "auto", file: TextIO | None = None) -> None:
        """Print the summary, slowest first; ``unit`` is auto, sec, ms, us or ns."""
        scales = {"sec": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
        if unit not in ("auto", *scales):
            raise ValueError(f"TimerHook.print_report: unit: expected auto, sec, ms, us or ns, got {unit!r}")

        def written(seconds: float) -> str:
            if unit == "auto":
                return in_units(seconds * 1e9, "ns us ms sec", 1e3)
            return f"{seconds * scales[unit]:.2f}{unit}"

        rows = [("FunctionName", "ElapsedTime", "Occurrence")]
        for name, row in sorted(self.summary().items(), key=lambda item: -item[1]["elapsed_time"]):
            rows.append((name, written(row["elapsed_time"]), str(row["occurrence"])))
        print_table(rows, file)


def _recorded_event() -> Any:
    event = backend.import_cupy().cuda.Event()
    event.record()
    return event
