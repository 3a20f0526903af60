"""Time and memory of every function and layer, forward and backward, without changing which kernels run.

Function hooks switch off what depends on nobody looking: the fusion of batch normalization and ReLU, the kernels of
inference. The profiler is no hook. While it records it stands around the methods through which every call goes:
``FunctionNode.apply``, each class's ``derive``, ``Link.__call__`` and the optimizers' ``update``. It reads no array.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from dbrdist.core.array import spans
from dbrdist.core.model.link import Link
from dbrdist.core.tape.function_node import FunctionNode
from dbrdist.core.update.optimizer import Optimizer
from dbrdist.function_hooks.report import in_units

_PHASES = ("forward", "backward", "update")
MAX_EVENTS = 1 << 18  # calls that the trace shows: of a longer run the last ones


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

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], ProfileEntry] = {}
        self.events: list[Event] = []
        self.seconds = 0.0  # of the whole block
        self.peak_bytes = 0  # the process's largest resident memory so far
        self._thread = 0
        self._began = 0.0
        self._inner: list[float] = [0.0]  # seconds of functions inside, for each open call
        self._layers: list[str] = []
        self._names: dict[int, tuple[str, Any]] = {}

    # ---- recording --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        _start(self)
        self._thread = threading.get_ident()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds += time.perf_counter() - self._began
        _stop(self)
        self.peak_bytes = _peak_bytes()

    def call(self, function: str, layer: str, phase: str, run: Callable[[], Any]) -> Any:
        """Run a call and note it."""
        inner = self._inner
        inner.append(0.0)
        began = time.perf_counter()
        try:
            return run()
        finally:
            ended = time.perf_counter()
            took = ended - began
            own = took - inner.pop()
            inner[-1] += took
            entry = self.entries.get((function, layer))
            if entry is None:
                entry = self.entries[function, layer] = ProfileEntry(function, layer)
            entry.calls[phase] += 1
            entry.seconds[phase] += own
            self.note(Event(function, layer, phase, began, ended))

    def note(self, event: Event) -> None:
        """Keep an event for the trace, and hand it to the recorder of all ranks if there is one."""
        if len(self.events) >= MAX_EVENTS:
            del self.events[: MAX_EVENTS // 2]
        self.events.append(event)
        recorder = spans.recording()
        if recorder is not None:
            name = f"{event.function} ({event.layer})" if event.layer else event.function
            recorder.spans.append(spans.Span(name, recorder.step, self._thread, event.began, event.ended))

    def is_here(self) -> bool:
        """Whether this is the thread that is recorded."""
        return threading.get_ident() == self._thread

    @property
    def layer(self) -> str:
        """The path of the innermost link that is being called."""
        return self._layers[-1] if self._layers else ""

    def within(self, link: Any, run: Callable[[], Any]) -> Any:
        """Run a link's call; its path is known from the outermost link that contains it."""
        if not self._layers:
            for path, inner in link.namedlinks():
                self._names.setdefault(id(inner), (path, inner))
        path = self._names.get(id(link), (type(link).__name__, None))[0]
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
        yield f"profile: {in_units(self.seconds * 1e9, 'ns us ms s', 1e3)} in all, peak memory {_size(self.peak_bytes)}"
        for title, entries in (("function", self.by_function()), ("layer", self.by_layer())):
            rows = [(title, "calls", "forward", "backward", "update", "share", "output")]
            rows += [self._row(title, entry) for entry in entries[:num]]
            yield from _aligned(rows)
            if len(entries) > num:
                rest = sum(entry.total_seconds for entry in entries[num:])
                yield f"  and {len(entries) - num} more with {_share(rest, self.seconds)}"
        yield f"functions: {_share(total, self.seconds)}; Python and everything else: {self.python_share:.1%}"

    def _row(self, title: str, entry: ProfileEntry) -> tuple[str, ...]:
        times = [
            in_units(entry.seconds[phase] * 1e9, "ns us ms s", 1e3) if entry.calls[phase] else "" for phase in _PHASES
        ]
        name = entry.function if title == "function" else entry.layer or "(no layer)"
        calls = f"{max(entry.calls.values()):,}"
        return name, calls, *times, _share(entry.total_seconds, self.seconds), _size(entry.bytes)

    def print_report(self, num: int = 20, file: TextIO | None = None) -> None:
        """Print the table of the ``num`` slowest functions and layers."""
        for line in self.lines(num):
            print(line, file=file or sys.stdout)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the calls as a file for ui.perfetto.dev or chrome://tracing."""
        events = [
            {
                "name": e.function, "cat": e.phase, "ph": "X", "pid": 0, "tid": 0,
                "ts": round((e.began - self._began) * 1e6, 1), "dur": round((e.ended - e.began) * 1e6, 1),
                "args": {"layer": e.layer, "phase": e.phase},
            }
            for e in self.events
        ]  # fmt: skip
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def profile() -> Profile:
    """Measure time and memory of every function and layer in a block.

    It records the thread that enters the block. The same kernels run as without it, and every result has the same bits;
    each call takes about two microseconds more. On a GPU, times are those of starting kernels, not of running them.

    Returns:
        A :class:`~dbrdist.function_hooks.profiler.Profile`: a context manager. ``print_report()`` prints the slowest
        functions and layers, ``by_function()`` and ``by_layer()`` give them as objects, ``python_share`` is the
        share of the time outside of functions, and ``write_trace(path)`` writes a timeline for ui.perfetto.dev.

    Raises:
        RuntimeError: another profile records already.

    Example:
        >>> import numpy as np, dbrdist, dbrdist.links as L
        >>> net = L.Linear(3, 2)
        >>> with dbrdist.profile() as p:
        ...     y = net(np.zeros((4, 3), 'f'))
        >>> [(entry.function, entry.layer, entry.calls['forward']) for entry in p.entries.values()]
        [('LinearFunction', '/', 1)]
    """
    return Profile()


def _share(seconds: float, whole: float) -> str:
    return f"{seconds / whole:.1%}" if whole else "0.0%"


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


# ---- what stands around the methods ---------------------------------------------------------------------------------

_recording: list[Profile] = []  # none or one
_originals: list[tuple[type, str, Any]] = []
_lock = threading.Lock()


def _start(profile: Profile) -> None:
    with _lock:
        if _recording:
            raise RuntimeError("dbrdist.profile: another profile records already; only one can at a time")
        _recording.append(profile)
        _replace(FunctionNode, "apply", _around_apply)
        _replace(Link, "__call__", _around_link)
        for cls in _subclasses(FunctionNode):
            _replace(cls, "derive", _around_derive)
        for cls in _subclasses(Optimizer):
            _replace(cls, "update", _around_update)


def _stop(profile: Profile) -> None:
    with _lock:
        _recording.clear()
        for cls, name, original in reversed(_originals):
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)
        _originals.clear()


def _subclasses(cls: type) -> Iterator[type]:
    seen = {cls}
    waiting = [cls]
    while waiting:
        for found in waiting.pop().__subclasses__():
            if found not in seen:
                seen.add(found)
                waiting.append(found)
                yield found


def _replace(cls: type, name: str, around: Callable[[Any], Any]) -> None:
    """Put a function around a method that the class has itself; a root class may inherit it."""
    own = cls.__dict__.get(name)
    if own is None and cls not in (FunctionNode, Link):
        return
    _originals.append((cls, name, own))
    setattr(cls, name, around(getattr(cls, name)))


def _here() -> Profile | None:
    return _recording[0] if _recording and _recording[0].is_here() else None


def _around_apply(apply: Any) -> Any:
    @functools.wraps(apply)
    def profiled(self: Any, inputs: tuple[Any, ...]) -> Any:
        profile = _here()
        if profile is None:
            return apply(self, inputs)
        layer, label = profile.layer, self.label
        self.__dict__["_profiled_layer"] = layer
        outputs = profile.call(label, layer, "forward", lambda: apply(self, inputs))
        given = {id(_root(getattr(x, "_array", x))) for x in inputs}
        new = (y._array for y in outputs if id(_root(y._array)) not in given)
        profile.entries[label, layer].bytes += sum(a.nbytes for a in new)
        return outputs

    return profiled


def _root(array: Any) -> Any:
    """The array that owns the memory of a view."""
    while getattr(array, "base", None) is not None and hasattr(array.base, "shape"):
        array = array.base
    return array


def _around_derive(derive: Any) -> Any:
    @functools.wraps(derive)
    def profiled(self: Any, *args: Any) -> Any:
        profile = _here()
        if profile is None:
            return derive(self, *args)
        layer = self.__dict__.get("_profiled_layer", "")
        return profile.call(self.label, layer, "backward", lambda: derive(self, *args))

    return profiled


def _around_link(call: Any) -> Any:
    @functools.wraps(call)
    def profiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        profile = _here()
        if profile is None:
            return call(self, *args, **kwargs)
        return profile.within(self, lambda: call(self, *args, **kwargs))

    return profiled


def _around_update(update: Any) -> Any:
    @functools.wraps(update)
    def profiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        profile = _here()
        if profile is None:
            return update(self, *args, **kwargs)
        return profile.call(type(self).__name__, "", "update", lambda: update(self, *args, **kwargs))

    return profiled
