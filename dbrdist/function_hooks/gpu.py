"""What functions do on a GPU: memory, and ranges for NVIDIA's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from dbrdist.core.array import backend, spans
from dbrdist.core.tape.function_node import FunctionHook, FunctionNode
from dbrdist.function_hooks.profiler import Profile, ProfileEntry
from dbrdist.function_hooks.report import Report, in_units, print_table

if TYPE_CHECKING:
    from dbrdist.core.update.optimizer import Optimizer


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


class CUDAProfileRanges(Profile):
    """A profile that also marks a range for each function, layer and phase in NVIDIA's profiler.

    It is no hook: the same kernels run as without it. Steps of a trainer and what waits for other ranks have ranges,
    too. ``nsys profile --trace=cuda,nvtx python train.py`` shows them above the kernels.

    Args:
        most_overhead: as for :func:`dbrdist.profile`; None marks every step.

    Example:
        >>> with dbrdist.function_hooks.CUDAProfileRanges():  # doctest: +SKIP
        ...     trainer.run()
    """

    def __init__(self, most_overhead: float | None = None) -> None:
        super().__init__(most_overhead)
        nvtx = backend.import_cupy().cuda.nvtx
        self._mark: Callable[[str], Any] = nvtx.RangePush
        self._close: Callable[[], Any] = nvtx.RangePop
        self._recorder = _RangeRecorder(self._mark, self._close)

    def __enter__(self) -> Profile:
        super().__enter__()  # which may refuse
        if spans.recording() is None:  # a trace keeps its own
            spans.record(self._recorder)
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if spans.recording() is self._recorder:
            spans.record(None)

    def begin(self, what: FunctionNode | Optimizer | None = None, layer: str = "", phase: str = "") -> float:
        name = getattr(what, "label", None) or type(what).__name__
        self._mark(f"{name} ({layer}).{phase}" if layer else f"{name}.{phase}")
        return super().begin(what, layer, phase)

    def finish(self, function: str, layer: str, phase: str, began: float) -> ProfileEntry:
        self._close()
        return super().finish(function, layer, phase, began)


class _RangeRecorder(spans.Recorder):
    """Marks spans instead of keeping them."""

    def __init__(self, mark: Callable[[str], Any], close: Callable[[], Any]) -> None:
        super().__init__()
        self._mark, self._close = mark, close

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._mark(f"{name} {self.step}" if name == "step" else name)
        try:
            yield
        finally:
            self._close()


class CUDAProfileHook(FunctionHook):
    """A named range for each function in NVIDIA's profiler. :class:`CUDAProfileRanges` changes no kernels, this does.

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
