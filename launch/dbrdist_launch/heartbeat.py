"""Tell `dbrdist-launch` that this rank makes progress. Two lines serve any program, under any launcher:

    from dbrdist_launch import heartbeat
    heartbeat.beat(step, loss=0.3)        # once a step

Not under `dbrdist-launch`, a beat does nothing. Under it, a beat costs about a microsecond: it writes into a page of
memory that the rank's supervisor reads once a second. DBRDIST_HEARTBEAT names it, `PATH,DESCRIPTOR`: a file in /proc of
the supervisor, and the same as an open descriptor, for programs that cannot see the supervisor (containers).
A rank that has beaten once and then not for `--heartbeat-timeout` seconds ends the job.
"""

from __future__ import annotations

import os
import struct
import sys
import time

from . import wire
from .named import NamedTuple

TYPE_CHECKING = False  # `typing` itself would cost each rank's supervisor 0.7 MB
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "DBRDIST_HEARTBEAT"
PAGE_NAME = "dbrdist-heartbeat"
PAGE_BYTES = 4096
# Layout of the page: number of beats, step, time of the beat (CLOCK_MONOTONIC, one clock for all processes of a host),
# then flag "paused", then the number of bytes of the fields and the fields as JSON.
_HEAD = struct.Struct("=qqd")
_PAUSED = struct.Struct("=B")
_LENGTH = struct.Struct("=I")
_PAUSED_AT, _LENGTH_AT, _FIELDS_AT = 24, 28, 32
_FIELDS_SECONDS = 0.1  # fields are for people to read: written at most ten times a second


class LastBeat(NamedTuple):
    """What a rank last said."""

    number: int  # of beats
    step: int  # -1: none
    time: float  # in seconds on the monotonic clock
    paused: bool
    fields: dict[str, object]


class _Writer:
    def __init__(self, path: str) -> None:
        import mmap

        descriptor = os.open(path, os.O_RDWR)
        try:
            self.page = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self.count = 0
        self.step = -1
        self.fields_due = 0.0

    def beat(self, step: object, fields: dict[str, object]) -> None:
        now = time.monotonic()
        self.count += 1
        if step is not None:
            self.step = _whole(step)
        if fields and now >= self.fields_due:
            self.write_fields(fields)
            self.fields_due = now + _FIELDS_SECONDS
        _PAUSED.pack_into(self.page, _PAUSED_AT, 0)
        _HEAD.pack_into(self.page, 0, self.count, self.step, now)

    def write_fields(self, fields: dict[str, object]) -> None:
        import json  # 9 ms of the start of each rank's supervisor

        try:
            text = json.dumps(fields, default=str).encode()
        except (ValueError, TypeError, RecursionError):
            return  # fields are for people to read: what cannot be written down is left out
        if len(text) <= PAGE_BYTES - _FIELDS_AT:
            _LENGTH.pack_into(self.page, _LENGTH_AT, 0)  # a reader in between sees no fields, not half of them
            self.page[_FIELDS_AT : _FIELDS_AT + len(text)] = text
            _LENGTH.pack_into(self.page, _LENGTH_AT, len(text))

    def pause(self) -> None:
        _PAUSED.pack_into(self.page, _PAUSED_AT, 1)


def _whole(step: Any) -> int:
    """A step as a number that fits into the page: 0.5 counts as 0, what is no number as -1."""
    try:
        return max(-(1 << 63), min(int(step), (1 << 63) - 1))
    except (ValueError, TypeError, OverflowError):
        return -1


def _open() -> _Writer | None:
    """The page, by its path or as the descriptor that came with it; a stale name is neither."""
    words = os.environ.get(VARIABLE, "").split(",")
    for path in (words[0], *(f"/proc/self/fd/{word}" for word in words[1:])):
        try:
            if path and (not path.startswith("/proc/") or PAGE_NAME in os.readlink(path)):
                return _Writer(path)
        except (OSError, ValueError):
            continue
    if words[0]:
        try:
            sys.stderr.write(
                f"dbrdist-launch: heartbeats do not reach the launcher: {words[0]} cannot be opened here\n"
            )
        except (OSError, ValueError, AttributeError):  # closed or full, or there is none
            pass
    return None


def _forget() -> None:
    """A forked child does not beat for its parent."""
    global _writer
    _writer = None


_writer = _open()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def active() -> bool:
    """Whether somebody reads the beats."""
    return _writer is not None


def beat(step: object = None, **fields: object) -> None:
    """This rank is alive and at `step`. Fields are shown by the live view and kept for the report.

    A step that is not a whole number is rounded towards zero.
    `total` (number of steps), `items_per_second`, `loss` and `message` have a place of their own in the view.
    """
    if _writer is not None:
        _writer.beat(step, fields)


def pause() -> None:
    """Nothing will be heard until the next beat, and that is right (a long evaluation, the last save)."""
    if _writer is not None:
        _writer.pause()


def read(page: Any) -> LastBeat:
    """What stands on a page: for the supervisor."""
    count, step, when = _HEAD.unpack_from(page, 0)
    (paused,) = _PAUSED.unpack_from(page, _PAUSED_AT)
    (length,) = _LENGTH.unpack_from(page, _LENGTH_AT)
    fields: dict[str, object] = {}
    if 0 < length <= PAGE_BYTES - _FIELDS_AT:
        try:
            found = wire.loads(bytes(page[_FIELDS_AT : _FIELDS_AT + length]))
            fields = found if isinstance(found, dict) else {}
        except (ValueError, RecursionError):
            pass  # being written at this moment; the next look sees it
    return LastBeat(count, step, when, bool(paused), fields)
