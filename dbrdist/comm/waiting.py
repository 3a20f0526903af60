"""Which verb each thread of this process is in, and since when: what a watcher needs to say who waits for whom."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Wait:
    """A verb that has not returned yet."""

    __slots__ = ("comm", "partner", "since", "thread", "verb")

    def __init__(self, verb: str, comm: Any, thread: int) -> None:
        self.verb = verb
        self.comm = comm
        self.partner: int | None = None  # of a send or receive; None waits for all ranks
        self.since = time.monotonic()
        self.thread = thread

    def waits_for(self) -> tuple[int, ...]:
        """The world ranks without which the verb cannot end."""
        everyone: tuple[int, ...] = self.comm.world_ranks()
        return everyone if self.partner is None else (everyone[self.partner],)

    def caller(self) -> str:
        """``file:line`` where the verb was called, from outside this room."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("dbrdist.comm."):
            frame = frame.f_back
        return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


_waits: dict[int, Wait] = {}


def verb(method: Callable[P, R]) -> Callable[P, R]:
    """Note that the calling thread is in ``method`` of a communicator while it runs; the outermost verb counts."""
    name = method.__name__

    @functools.wraps(method)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        thread = threading.get_ident()
        if thread in _waits:
            return method(*args, **kwargs)
        _waits[thread] = Wait(name, args[0], thread)
        try:
            return method(*args, **kwargs)
        finally:
            del _waits[thread]

    return noted


def only_for(rank: int) -> None:
    """Note that the verb this thread is in waits for one rank alone."""
    wait = _waits.get(threading.get_ident())
    if wait is not None:
        wait.partner = rank


def all_waits() -> list[Wait]:
    """The verbs that threads of this process are in, the oldest first."""
    return sorted(list(_waits.values()), key=lambda wait: wait.since)
