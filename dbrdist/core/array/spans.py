"""What a process does when: named spans of time, kept while somebody records them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

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

    key: tuple[Any, ...]
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

    def meet(self, key: tuple[Any, ...], began: float) -> None:
        """Note a wait that is over now."""
        self.meetings.append(Meeting(key, self.step, threading.get_ident(), began, time.perf_counter()))


recorders: list[Recorder] = []  # none or one


def record(recorder: Recorder | None) -> None:
    """Keep what this process does from now on in ``recorder``; None ends it."""
    recorders[:] = [] if recorder is None else [recorder]


def recording() -> Recorder | None:
    """What records now."""
    return recorders[0] if recorders else None


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
