"""Time and memory of every function and layer, forward and backward, without changing which kernels run.

Function hooks switch off what depends on nobody looking: the fusion of batch normalization and ReLU, the kernels of
inference. The profiler is no hook: while it records it stands around the methods through which every call goes (see
:mod:`~dbrdist.function_hooks.around_calls`). It reads no array.

What a call costs is small beside most functions, and large beside those of a tiny network. With a bound on the overhead
the profiler records some steps in a row, and then steps aside for so long that the whole run stays within the bound:
only the optimizers' ``update`` is looked at then, once per step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from dbrdist.core.array import spans
from dbrdist.core.files.serializer import write_atomically
from dbrdist.core.files.standard_streams import stdout
from dbrdist.function_hooks import around_calls
from dbrdist.function_hooks.report import in_units

if TYPE_CHECKING:
    from dbrdist.core.model.link import Link
    from dbrdist.core.tape.function_node import FunctionNode
    from dbrdist.core.update.optimizer import Optimizer

_PHASES = ("forward", "backward", "update")
MAX_EVENTS = 1 << 18  # calls that the trace shows: of a longer run the last ones
_BURST = 20  # steps that are recorded in a row
_GRID = 32  # a burst begins at a multiple of this number of steps, or of twice, four times, ... as many
_CAUTION = 5  # times the cost of noting a call or of a pause: closures, labels and colder caches, as measured


class ProfileEntry:
    """What one function used in one layer, over all calls. Times are without those of functions inside."""

    __slots__ = ("bytes", "calls", "function", "layer", "seconds")

    def __init__(self, function: str, layer: str) -> None:
        self.function = function
        self.layer = layer  # the path of the innermost link, or empty
        self.calls = dict.fromkeys(_PHASES, 0)
        self.seconds = dict.fromkeys(_PHASES, 0.0)
        self.bytes = 0  # of the outputs of forward that are no views

    @property
    def total_seconds(self) -> float:
        """Seconds of forward, backward and update together."""
        return sum(self.seconds.values())


class Event(NamedTuple):
    """One call, in seconds of ``time.perf_counter``."""

    function: str
    layer: str
    phase: str
    began: float
    ended: float


class Profile:
    """``with dbrdist.profile() as p:`` records this thread's calls in the block; see :func:`profile`."""

    def __init__(self, most_overhead: float | None = None) -> None:
        if most_overhead is not None and not 0 < most_overhead <= 1:
            raise ValueError(f"profile: most_overhead: expected a number above 0 and up to 1, got {most_overhead!r}")
        self.entries: dict[tuple[str, str], ProfileEntry] = {}
        self.seconds = 0.0  # of the whole block, or of its recorded steps
        self.num_steps = 0  # updates in the block
        self.num_recorded = 0  # those of them whose calls were recorded
        self.peak_bytes = 0  # the process's largest resident memory so far
        self._most_overhead = most_overhead
        self._noted: list[tuple[str, str, str, float, float]] = []
        self._thread = 0
        self._opened = 0.0  # when the block began
        self._began = self._began_here = 0.0
        self._inner: list[float] = [0.0]  # seconds of functions inside, for each open call
        self._layers: list[str] = []
        self.is_recording, self.is_updating = False, False
        self._num_left, self._num_calls = 0, 0  # steps of this burst to come, calls of it so far
        self._resume_at = self._call_seconds = self._switch_seconds = 0.0
        self._grid = self._next_look = 0  # the step at which the end of a pause is looked for, a multiple of the grid
        self._names: dict[int, tuple[str, Any]] = {}

    # ---- recording --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        self._thread = threading.get_ident()
        self._opened = time.perf_counter()
        around_calls.start(self)
        self._call_seconds = 0.0 if self._most_overhead is None else _CAUTION * _seconds_of_a_call(self)
        self._begin_burst()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.is_recording:
            self.seconds += time.perf_counter() - self._began
        else:
            spans.resume()
        around_calls.stop()
        self.peak_bytes = _peak_bytes()

    def begin(self, what: FunctionNode | Optimizer | None = None, layer: str = "", phase: str = "") -> float:
        """Open a call of a function or an optimizer: the time at which it begins.

        Args:
            what: the function or optimizer.
            layer: the path of the innermost link.
            phase: forward, backward or update.
        """
        self._inner.append(0.0)
        return time.perf_counter()

    def finish(self, function: str, layer: str, phase: str, began: float) -> ProfileEntry:
        """Close the innermost open call and note it.

        Args:
            function: the label of the function, or the class of the optimizer.
            layer: the path of the innermost link.
            phase: forward, backward or update.
            began: what :meth:`begin` returned.
        """
        ended = time.perf_counter()
        took = ended - began
        inner = self._inner
        own = took - inner.pop()
        inner[-1] += took
        entry = self.entries.get((function, layer))
        if entry is None:
            entry = self.entries[function, layer] = ProfileEntry(function, layer)
        entry.calls[phase] += 1
        entry.seconds[phase] += own
        self._num_calls += 1
        noted = self._noted
        if len(noted) >= MAX_EVENTS:
            del noted[: MAX_EVENTS // 2]
        noted.append((function, layer, phase, began, ended))
        recorder = spans.recording()
        if recorder is not None:
            name = f"{function} ({layer})" if layer else function
            recorder.spans.append(spans.Span(name, recorder.step, self._thread, began, ended))
        return entry

    @property
    def events(self) -> list[Event]:
        """The calls of the trace, in the order in which they ended."""
        return [Event(*noted) for noted in self._noted]

    # ---- steps that are recorded, and steps that are not ------------------------------------------------------------

    def _begin_burst(self) -> None:
        self.is_recording = True
        self._num_left, self._num_calls = _BURST, 0
        self._began, self._began_here = time.perf_counter(), time.thread_time()

    def end_step(self) -> None:
        """An update has ended: go on recording, pause, or record again after a pause."""
        self.num_steps += 1
        if self.is_recording:
            self.num_recorded += 1
            self._end_recorded()
        elif self.num_steps == self._next_look:
            self._look()

    def _end_recorded(self) -> None:
        if self._most_overhead is None:
            return
        self._num_left -= 1
        if self._num_left:
            return
        self.seconds += time.perf_counter() - self._began
        now = time.thread_time()  # of this thread alone: others may have the processor
        took = now - self._began_here
        cost = self._num_calls * self._call_seconds + self._switch_seconds
        pause = cost / self._most_overhead - took
        if pause <= 0:
            self._begin_burst()
            return
        self.is_recording = False
        self._resume_at = now + pause
        self._look_next_at(_GRID)
        began = time.thread_time()
        around_calls.pause()
        self._switch_seconds = _CAUTION * (time.thread_time() - began)  # with the way back, and methods looked up anew
        spans.pause()

    def _look(self) -> None:
        """End the pause if it was long enough; otherwise look again on a grid of twice the distance.

        The pauses of a job's ranks differ a little. On such grids their bursts are mostly the same steps, which a trace
        of all ranks shows side by side.
        """
        if time.thread_time() < self._resume_at:
            self._look_next_at(2 * self._grid)
            return
        around_calls.resume()
        self._begin_burst()
        spans.resume()

    def _look_next_at(self, grid: int) -> None:
        self._grid = grid
        self._next_look = (self.num_steps // grid + 1) * grid

    def is_here(self) -> bool:
        """Whether this is the thread that is recorded."""
        return threading.get_ident() == self._thread

    @property
    def layer(self) -> str:
        """The path of the innermost link that is being called."""
        return self._layers[-1] if self._layers else ""

    def within(self, link: Link, run: Callable[[], Any]) -> Any:
        """Run a link's call; its path is known from the outermost link that contains it.

        Args:
            link: the link that is called, whose path becomes that of the functions inside.
            run: makes the call, without arguments.
        """
        if not self._layers:
            for path, inner in link.namedlinks():
                self._names.setdefault(id(inner), (path, inner))
        path = self._names.get(id(link), (type(link).__name__, None))[0]
        self._num_calls += 1
        self._layers.append(path)
        try:
            return run()
        finally:
            self._layers.pop()

    # ---- results ----------------------------------------------------------------------------------------------------

    @property
    def python_share(self) -> float:
        """The share of the block's time that no function or update took: the program itself, links, data."""
        inside = sum(entry.total_seconds for entry in self.entries.values())
        return max(0.0, 1.0 - inside / self.seconds) if self.seconds else 0.0

    def by_function(self) -> list[ProfileEntry]:
        """An entry for each function, the slowest first."""
        return self._merged(lambda entry: (entry.function, ""))

    def by_layer(self) -> list[ProfileEntry]:
        """An entry for each layer (``function`` is empty), the slowest first."""
        return self._merged(lambda entry: ("", entry.layer))

    def _merged(self, key: Callable[[ProfileEntry], tuple[str, str]]) -> list[ProfileEntry]:
        found: dict[tuple[str, str], ProfileEntry] = {}
        for entry in self.entries.values():
            into = found.setdefault(key(entry), ProfileEntry(*key(entry)))
            into.bytes += entry.bytes
            for phase in _PHASES:
                into.calls[phase] += entry.calls[phase]
                into.seconds[phase] += entry.seconds[phase]
        return sorted(found.values(), key=lambda entry: -entry.total_seconds)

    def lines(self, num: int = 20) -> Iterator[str]:
        """The table: the ``num`` slowest functions, then the slowest layers, then the rest of the time."""
        total = sum(entry.total_seconds for entry in self.entries.values())
        some = f"{self.num_recorded:,} of {self.num_steps:,} steps in "
        some = some if self.num_recorded < self.num_steps else ""
        took = in_units(self.seconds * 1e9, "ns us ms s", 1e3)
        yield f"profile: {some}{took}{'' if some else ' in all'}, peak memory {_size(self.peak_bytes)}"
        for title, entries in (("function", self.by_function()), ("layer", self.by_layer())):
            rows = [(title, "calls", "forward", "backward", "update", "share", "output")]
            rows += [self._row(title, entry) for entry in entries[:num]]
            yield from _aligned(rows)
            if len(entries) > num:
                rest = sum(entry.total_seconds for entry in entries[num:])
                yield f"  and {len(entries) - num} more with {_share(rest, self.seconds)}"
        yield f"functions: {_share(total, self.seconds)}; Python and everything else: {100 * self.python_share:.1f} %"

    def _row(self, title: str, entry: ProfileEntry) -> tuple[str, ...]:
        times = [
            in_units(entry.seconds[phase] * 1e9, "ns us ms s", 1e3) if entry.calls[phase] else "" for phase in _PHASES
        ]
        name = entry.function if title == "function" else entry.layer or "(no layer)"
        calls = f"{max(entry.calls.values()):,}"
        return name, calls, *times, _share(entry.total_seconds, self.seconds), _size(entry.bytes)

    def print_report(self, num: int = 20, file: TextIO | None = None) -> None:
        """Print the table of the ``num`` slowest functions and layers.

        Args:
            num: the number of rows of each part.
            file: an open text file; None for standard output.
        """
        for line in self.lines(num):
            print(line, file=file or stdout)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the calls as a file for ui.perfetto.dev or chrome://tracing.

        Args:
            path: of the file of JSON, which is replaced as a whole.
        """
        events = [
            {
                "name": e.function, "cat": e.phase, "ph": "X", "pid": 0, "tid": 0,
                "ts": round((e.began - self._opened) * 1e6, 1), "dur": round((e.ended - e.began) * 1e6, 1),
                "args": {"layer": e.layer, "phase": e.phase},
            }
            for e in self.events
        ]  # fmt: skip
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
        write_atomically(os.fspath(path), lambda file: file.write(text))


def profile(most_overhead: float | None = None) -> Profile:
    """Measure time and memory of every function and layer in a block.

    It records the thread that enters the block. The same kernels run as without it, and every result has the same bits;
    each call takes about two microseconds more. On a GPU, times are those of starting kernels, not of running them.

    Args:
        most_overhead: the part of the time by which profiling may lengthen the block, such as 0.05. Steps of a network
            whose functions take longer are all recorded; of faster ones twenty at a time, with pauses between, in
            which a trace that records at the same time pauses, too.
            ``seconds`` and shares are then those of the recorded steps. A step ends with an optimizer's ``update``: a
            block without updates, such as an evaluation, is recorded as a whole. None records every step.

    Returns:
        A :class:`~dbrdist.function_hooks.profiler.Profile`: a context manager. ``print_report()`` prints the slowest
        functions and layers, ``by_function()`` and ``by_layer()`` give them as objects, ``python_share`` is the
        share of the time outside of functions, and ``write_trace(path)`` writes a timeline for ui.perfetto.dev.

    Raises:
        RuntimeError: another profile records already.
        ValueError: ``most_overhead`` is not above 0 and at most 1.

    Example:
        >>> import numpy as np, dbrdist, dbrdist.links as L
        >>> net = L.Linear(3, 2)
        >>> with dbrdist.profile() as p:
        ...     y = net(np.zeros((4, 3), 'f'))
        >>> [(entry.function, entry.layer, entry.calls['forward']) for entry in p.entries.values()]
        [('LinearFunction', '/', 1)]
    """
    return Profile(most_overhead)


def _share(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f} %" if whole else "0.0 %"


def _size(num_bytes: int) -> str:
    return in_units(num_bytes, "B KiB MiB GiB TiB", 1024) if num_bytes else ""


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip()


def _peak_bytes() -> int:
    """The largest resident memory of the process so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _seconds_of_a_call(profile: Profile, times: int = 200) -> float:
    """What the profiler adds to a call, from calls of nothing; they leave no trace."""
    kept = profile.entries, profile._noted
    profile.entries, profile._noted, profile._num_calls = {}, [], 0
    recorder = spans.recording() or spans.Recorder()
    recorded, recorder.spans = recorder.spans, deque()
    began = time.thread_time()
    for _ in range(times):
        around_calls.here()
        profile.finish("", profile.layer, "forward", profile.begin())
    seconds = (time.thread_time() - began) / times
    profile.entries, profile._noted = kept
    noted, recorder.spans = list(recorder.spans), recorded
    recorded.extend(span for span in noted if span.name)  # of other threads
    profile._inner[:] = [0.0]
    return seconds
