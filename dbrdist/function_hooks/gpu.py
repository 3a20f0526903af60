"""What functions do on a GPU: memory, and ranges for NVIDIA's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from dbrdist.core.array import backend
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.function_hooks.report import Report, in_units, print_table


class CupyMemoryProfileHook(Report, FunctionHook):
    """The memory that each function takes from CuPy's pool, and that the pool takes from the GPU, in bytes.

    Example:
        >>> with dbrdist.function_hooks.CupyMemoryProfileHook() as hook:  # doctest: +SKIP
        ...     model(x)
    """

    name = "CupyMemoryProfileHook"

    def __init__(self) -> None:
        self.call_history: list[tuple[str, tuple[int, int]]] = []
        self._pool = backend.import_cupy().get_default_memory_pool()
        self._started: list[tuple[int, int]] = []

    def _taken(self) -> tuple[int, int]:
        return self._pool.used_bytes(), self._pool.total_bytes()

    def _begin(self, function: FunctionNode, in_data: Any, *_: Any) -> None:
        self._started.append(self._taken())

    def _end(self, function: FunctionNode, in_data: Any, *_: Any) -> None:
        before, now = self._started.pop(), self._taken()
        self.call_history.append((function.label, (max(0, now[0] - before[0]), max(0, now[1] - before[1]))))

    forward_preprocess = backward_preprocess = _begin
    forward_postprocess = backward_postprocess = _end

    def total_used_bytes(self) -> int:
        """Bytes taken from the pool by all functions."""
        return sum(used for _, (used, _) in self.call_history)

    def total_acquired_bytes(self) -> int:
        """Bytes that the pool took from the GPU."""
        return sum(acquired for _, (_, acquired) in self.call_history)

    def _row(self) -> dict[str, Any]:
        return {"used_bytes": 0, "acquired_bytes": 0, "occurrence": 0}

    def _add(self, row: dict[str, Any], used: Any) -> None:
        row["used_bytes"] += used[0]
        row["acquired_bytes"] += used[1]

    def print_report(self, unit: str = "auto", file: TextIO | None = None) -> None:
        """Print the summary, largest first; ``unit`` is auto, B, KB, MB, GB or TB.

        Args:
            unit: the unit of all sizes: B, KB, MB, GB or TB; auto (default) chooses one for each.
            file: an open text file; None for standard output.
        """
        names = ("B", "KB", "MB", "GB", "TB")
        if unit not in ("auto", *names):
            raise ValueError(f"CupyMemoryProfileHook.print_report: unit: expected auto or {names}, got {unit!r}")

        def written(count: int) -> str:
            if unit == "auto":
                return in_units(count, " ".join(names), 1024)
            return f"{count / 1024 ** names.index(unit):.2f}{unit}"

        rows = [("FunctionName", "UsedBytes", "AcquiredBytes", "Occurrence")]
        for name, row in sorted(self.summary().items(), key=lambda item: -item[1]["used_bytes"]):
            rows.append((name, written(row["used_bytes"]), written(row["acquired_bytes"]), str(row["occurrence"])))
        print_table(rows, file)


class CUDAProfileHook(FunctionHook):
    """A named range for each function in NVIDIA's profiler.

    Example:
        >>> with dbrdist.function_hooks.CUDAProfileHook():  # doctest: +SKIP
        ...     model(x)
    """

    name = "CUDAProfileHook"

    def __init__(self) -> None:
        self._mark: Callable[[str], Any] = backend.import_cupy().cuda.nvtx.RangePush
        self._close: Callable[[], Any] = backend.import_cupy().cuda.nvtx.RangePop

    def forward_preprocess(self, function: FunctionNode, in_data: Any) -> None:
        self._mark(f"{function.label}.forward")

    def backward_preprocess(self, function: FunctionNode, in_data: Any, out_grad: Any) -> None:
        self._mark(f"{function.label}.backward")

    def _end(self, function: FunctionNode, in_data: Any, *_: Any) -> None:
        self._close()

    forward_postprocess = backward_postprocess = _end
