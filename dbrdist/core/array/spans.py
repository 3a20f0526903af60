"""What a process does when: named spans of time, kept while somebody records them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

MAX_KEPT = 1 << 18  # spans and meetings; of longer runs the last ones stay


class Span(NamedTuple):
    """One stretch of time, in seconds of ``time.perf_counter``."""

    name: str
    step: int
    thread: int
    began: float
    ended: float


class Meeting(NamedTuple):
    """A wait for other ranks: its key is the same on all of them."""

    key: tuple[Hashable, ...]
    step: int
    thread: int
    began: float  # when it came
    ended: float


class Recorder:
    """The last spans and meetings of this process."""

    def __init__(self) -> None:
        self.step = 0
        self.spans: deque[Span] = deque(maxlen=MAX_KEPT)
        self.meetings: deque[Meeting] = deque(maxlen=MAX_KEPT)
        self.is_pausing = False  # from the next step on

    @property
    def first_whole_step(self) -> int:
        """The first step of which nothing had to give way to later ones."""
        return max((kept[0].step + 1 for kept in (self.spans, self.meetings) if len(kept) == kept.maxlen), default=0)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(name, self.step, threading.get_ident(), began, time.perf_counter()))

    def meet(self, key: tuple[Hashable, ...], began: float) -> None:
        """Note a wait that is over now."""
        self.meetings.append(Meeting(key, self.step, threading.get_ident(), began, time.perf_counter()))


recorders: list[Recorder] = []  # none or one
_paused: list[Recorder] = []  # the one that pauses


def record(recorder: Recorder | None) -> None:
    """Keep what this process does from now on in ``recorder``; None ends it."""
    _paused.clear()
    recorders[:] = [] if recorder is None else [recorder]


def recording() -> Recorder | None:
    """What records now, or pauses."""
    return next(iter(recorders + _paused), None)


def pause() -> None:
    """Leave out the steps after this one, until :func:`resume`."""
    for recorder in recorders:
        recorder.is_pausing = True


def resume() -> None:
    """Record the steps after this one again."""
    for recorder in recorders:
        recorder.is_pausing = False
    if _paused:
        recorder = _paused.pop()
        recorder.is_pausing, recorder.step = False, -1  # the rest of this step belongs to none
        recorders.append(recorder)


def step(number: int) -> AbstractContextManager[None]:
    """The span of a step that begins now; whoever calls it has seen that somebody records."""
    recorder = recorders[0]
    if recorder.is_pausing:
        recorders.clear()
        _paused.append(recorder)
        return _nothing
    recorder.step = number
    return recorder.span("step")


class _Nothing:
    """A context in which nothing happens, by functions of C alone: half the time of contextlib.nullcontext."""

    __enter__ = str
    __exit__ = "".format  # takes anything, and its empty text lets exceptions pass


_nothing: Any = _Nothing()


def note(name: str, began: float) -> None:
    """A stretch of time that began then ends now: what :func:`span` notes, where each call before a step counts."""
    for recorder in recorders:
        recorder.spans.append(Span(name, recorder.step, threading.get_ident(), began, time.perf_counter()))


def span(name: str) -> AbstractContextManager[None]:
    """``with span("forward"):`` notes how long the block takes, if anybody records."""
    return recorders[0].span(name) if recorders else _nothing
