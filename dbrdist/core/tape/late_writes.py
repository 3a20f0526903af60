"""Gradients in flat memory that are written at the end of a backward pass, many in one launch of a device.

A rule that was given the place of a first contribution may leave it unwritten and say how it is written later. Whoever
looks at gradients before the pass ends, another contribution, a listener, a hook or a read of ``grad``, has all that
waits in its thread written first.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from dbrdist.core.array.backend import Array, on

_MOST = 96  # writes that wait at a time, since each holds memory

Job = Any  # what a writer asks for
Writer = Callable[[list[Job]], None]
waiting: dict[int, dict[int, tuple[Writer, Job, Array]]] = {}  # by thread and target; empty nearly always


def write_later(writer: Writer, job: Job, target: Array) -> Array:
    """Let ``writer`` write ``target`` along with what else waits for it; ``job`` is what it asks for."""
    mine = waiting.setdefault(get_ident(), {})
    if id(target) in mine or len(mine) == _MOST:
        settle()
        mine = waiting.setdefault(get_ident(), {})
    mine[id(target)] = writer, job, target
    return target


def settle() -> None:
    """Write what waits in this thread; called where ``waiting`` is not empty."""
    mine = waiting.pop(get_ident(), None)
    if mine is None:
        return
    jobs: dict[Writer, list[Job]] = {}
    some: dict[Writer, Array] = {}
    for writer, job, target in mine.values():
        jobs.setdefault(writer, []).append(job)
        some[writer] = target
    for writer, of_writer in jobs.items():
        with on(some[writer]):
            writer(of_writer)
